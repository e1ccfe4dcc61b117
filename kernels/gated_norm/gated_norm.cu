#include "kernels/gated_norm/gated_norm.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// One block a row.
template <class X>
__global__ void gated_norm(Rows<const X> xs, const float* w, Rows<const X> gates, Rows<X> ys, float* inv_rms,
                           int64_t width, float eps, bool whole) {
  const int64_t row = blockIdx.x;
  const X *const x = xs[row], *const gate = gates[row];
  float squares = 0.0f;
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole);
    squares = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, squares))));
  });
  const float inv = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole), g = load_run(gate + i, count, whole);
    const float4 s = load_run(w + i, count, whole);
    store_run(ys[row] + i,
              {s.x * (v.x * inv) * sigmoid(g.x), s.y * (v.y * inv) * sigmoid(g.y), s.z * (v.z * inv) * sigmoid(g.z),
               s.w * (v.w * inv) * sigmoid(g.w)},
              count, whole);
  });
  if (inv_rms != nullptr && threadIdx.x == 0) inv_rms[row] = inv;
}

// With n = x inv_rms and s = sigmoid(gate):  dgate = dy w n s (1 - s),  slope = dy s w,  dx = inv_rms (slope - n mean(slope n)).
template <class X>
__global__ void gated_norm_backward(Rows<const X> xs, const float* w, Rows<const X> gates, const float* inv_rms,
                                    Rows<const X> dys, Rows<X> dxs, Rows<X> dgates, int64_t width) {
  const int64_t row = blockIdx.x;
  const X *const x = xs[row], *const gate = gates[row], *const dy = dys[row];
  const float inv = inv_rms[row];
  const auto slope = [&](int64_t i) { return load(dy + i) * sigmoid(load(gate + i)) * w[i]; };
  float dot = 0.0f;
  for_fours(width, [&](int64_t i, int64_t count) {
    for (int64_t j = i; j < i + count; ++j) dot = fmaf(slope(j), load(x + j) * inv, dot);
  });
  const float mean = block_sum(dot) / static_cast<float>(width);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const float normed = load(x + i) * inv, s = sigmoid(load(gate + i)), up = slope(i);
    store(dgates[row] + i, load(dy + i) * (w[i] * normed) * (s * (1.0f - s)));
    store(dxs[row] + i, inv * fmaf(-normed, mean, up));  // last: dx may be dy
  }
}

template <class X>
void backward(const GatedNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const Rows<const X> x = rows_of<const X>(args.x), gate = rows_of<const X>(args.gate), dy = rows_of<const X>(args.dy);
  const float* const inv_rms = args.inv_rms.f32();
  // First: dx may overwrite dy.
  add_column_sums([=] __device__(int64_t r, int64_t i) {
    return load(dy[r] + i) * sigmoid(load(gate[r] + i)) * (load(x[r] + i) * inv_rms[r]);
  }, rows, width, args.dw.f32(), stream);
  gated_norm_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
      x, args.w.f32(), gate, inv_rms, dy, rows_of<X>(args.dx), rows_of<X>(args.dgate), width);
  check_launch("gated_norm_backward");
}

}  // namespace

template <>
void launch_cuda<GatedNorm>(const GatedNorm& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.x) && fours(args.w) && fours(args.gate) && fours(args.y);
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    gated_norm<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.x), args.w.f32(), rows_of<const X>(args.gate), rows_of<X>(args.y),
        data_of<float>(args.inv_rms), width, args.eps, whole);
  });
  check_launch("gated_norm");
}

template <>
void launch_cuda<GatedNormBackward>(const GatedNormBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
