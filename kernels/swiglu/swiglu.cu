#include "kernels/swiglu/swiglu.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

__device__ float bounded_gate(float gate, float limit) { return gate > limit ? limit : gate; }  // NaN stays
__device__ float bounded_up(float up, float limit) { return up > limit ? limit : up < -limit ? -limit : up; }

template <class X>
__global__ void swiglu(Rows<const X> gates, Rows<const X> ups, Rows<X> ys, int64_t width, float limit, bool whole) {
  const int64_t row = blockIdx.x;
  const auto value = [&](float gate, float up) {
    const float g = bounded_gate(gate, limit);
    return g * sigmoid(g) * bounded_up(up, limit);
  };
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 g = load_run(gates[row] + i, count, whole), u = load_run(ups[row] + i, count, whole);
    store_run(ys[row] + i, {value(g.x, u.x), value(g.y, u.y), value(g.z, u.z), value(g.w, u.w)}, count, whole);
  });
}

template <class X>
__global__ void swiglu_backward(Rows<const X> gates, Rows<const X> ups, Rows<const X> dys, Rows<X> dgates, Rows<X> dups,
                                int64_t width, float limit, bool whole) {
  const int64_t row = blockIdx.x;
  const auto dgate = [&](float gate, float up, float dy) {
    const float s = sigmoid(gate);
    return gate > limit ? 0.0f : dy * bounded_up(up, limit) * (s * fmaf(gate, 1.0f - s, 1.0f));
  };
  const auto dup = [&](float gate, float up, float dy) {
    const float g = bounded_gate(gate, limit);
    return up > limit || up < -limit ? 0.0f : dy * (g * sigmoid(g));
  };
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 g = load_run(gates[row] + i, count, whole), u = load_run(ups[row] + i, count, whole);
    const float4 d = load_run(dys[row] + i, count, whole);
    store_run(dgates[row] + i, {dgate(g.x, u.x, d.x), dgate(g.y, u.y, d.y), dgate(g.z, u.z, d.z), dgate(g.w, u.w, d.w)},
              count, whole);
    store_run(dups[row] + i, {dup(g.x, u.x, d.x), dup(g.y, u.y, d.y), dup(g.z, u.z, d.z), dup(g.w, u.w, d.w)}, count,
              whole);
  });
}

}  // namespace

template <>
void launch_cuda<SwiGlu>(const SwiGlu& args, Stream& stream) {
  const int64_t rows = args.gate.size(0), width = args.gate.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.gate) && fours(args.up) && fours(args.y);
  with_type(args.gate.dtype(), [&](auto x) {
    using X = decltype(x);
    swiglu<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.gate), rows_of<const X>(args.up), rows_of<X>(args.y), width, args.limit, whole);
  });
  check_launch("swiglu");
}

template <>
void launch_cuda<SwiGluBackward>(const SwiGluBackward& args, Stream& stream) {
  const int64_t rows = args.gate.size(0), width = args.gate.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.gate) && fours(args.up) && fours(args.dy) && fours(args.dgate) && fours(args.dup);
  with_type(args.gate.dtype(), [&](auto x) {
    using X = decltype(x);
    swiglu_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.gate), rows_of<const X>(args.up), rows_of<const X>(args.dy), rows_of<X>(args.dgate),
        rows_of<X>(args.dup), width, args.limit, whole);
  });
  check_launch("swiglu_backward");
}

}  // namespace slipstream::kernels
