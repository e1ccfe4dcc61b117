#include "kernels/swiglu/swiglu.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/row_values.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kRuns = 2;

__device__ float bounded_gate(float gate, float limit) { return gate > limit ? limit : gate; }  // NaN stays
__device__ float bounded_up(float up, float limit) { return up > limit ? limit : up < -limit ? -limit : up; }

template <class X>
__global__ void __launch_bounds__(kPartThreads) swiglu(Rows<const X> gates, Rows<const X> ups, Rows<X> ys, int width,
                                                       float limit, bool whole) {
  const int64_t row = blockIdx.x;
  const auto value = [&](float gate, float up) {
    const float g = bounded_gate(gate, limit);
    return g * sigmoid(g) * bounded_up(up, limit);
  };
  Four<X> gate[kRuns], up[kRuns];
  for_part<kRuns>(width, [&](int r, int i) {
    gate[r] = load_four(gates[row] + i, width - i, whole), up[r] = load_four(ups[row] + i, width - i, whole);
  });
  for_part<kRuns>(width, [&](int r, int i) {
    const float4 g = gate[r].values(), u = up[r].values();
    store_run(ys[row] + i, {value(g.x, u.x), value(g.y, u.y), value(g.z, u.z), value(g.w, u.w)}, width - i, whole);
  });
}

template <class X>
__global__ void __launch_bounds__(kPartThreads) swiglu_backward(Rows<const X> gates, Rows<const X> ups, Rows<const X> dys,
                                                                Rows<X> dgates, Rows<X> dups, int width, float limit,
                                                                bool whole) {
  const int64_t row = blockIdx.x;
  const auto dgate = [&](float gate, float up, float dy) {
    const float s = sigmoid(gate);
    return gate > limit ? 0.0f : dy * bounded_up(up, limit) * (s * fmaf(gate, 1.0f - s, 1.0f));
  };
  const auto dup = [&](float gate, float up, float dy) {
    const float g = bounded_gate(gate, limit);
    return up > limit || up < -limit ? 0.0f : dy * (g * sigmoid(g));
  };
  Four<X> gate[kRuns], up[kRuns], dy[kRuns];
  for_part<kRuns>(width, [&](int r, int i) {
    gate[r] = load_four(gates[row] + i, width - i, whole), up[r] = load_four(ups[row] + i, width - i, whole);
    dy[r] = load_four(dys[row] + i, width - i, whole);
  });
  for_part<kRuns>(width, [&](int r, int i) {
    const float4 g = gate[r].values(), u = up[r].values(), d = dy[r].values();
    store_run(dgates[row] + i, {dgate(g.x, u.x, d.x), dgate(g.y, u.y, d.y), dgate(g.z, u.z, d.z), dgate(g.w, u.w, d.w)},
              width - i, whole);
    store_run(dups[row] + i, {dup(g.x, u.x, d.x), dup(g.y, u.y, d.y), dup(g.z, u.z, d.z), dup(g.w, u.w, d.w)}, width - i,
              whole);
  });
}

}  // namespace

template <>
void launch_cuda<SwiGlu>(const SwiGlu& args, Stream& stream) {
  const int64_t rows = args.gate.size(0), width = args.gate.size(1);
  if (rows * width == 0) return;
  const bool whole = fours(args.gate) && fours(args.up) && fours(args.y);
  with_type(args.gate.dtype(), [&](auto x) {
    using X = decltype(x);
    swiglu<X><<<part_grid<kRuns>(rows, width), kPartThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.gate), rows_of<const X>(args.up), rows_of<X>(args.y), static_cast<int>(width), args.limit, whole);
  });
  check_launch("swiglu");
}

template <>
void launch_cuda<SwiGluBackward>(const SwiGluBackward& args, Stream& stream) {
  const int64_t rows = args.gate.size(0), width = args.gate.size(1);
  if (rows * width == 0) return;
  const bool whole = fours(args.gate) && fours(args.up) && fours(args.dy) && fours(args.dgate) && fours(args.dup);
  with_type(args.gate.dtype(), [&](auto x) {
    using X = decltype(x);
    swiglu_backward<X><<<part_grid<kRuns>(rows, width), kPartThreads, 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.gate), rows_of<const X>(args.up), rows_of<const X>(args.dy), rows_of<X>(args.dgate),
        rows_of<X>(args.dup), static_cast<int>(width), args.limit, whole);
  });
  check_launch("swiglu_backward");
}

}  // namespace slipstream::kernels
