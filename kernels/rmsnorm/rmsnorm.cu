#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// One block a row.
template <class X>
__global__ void rmsnorm(Rows<const X> xs, const float* w, Rows<X> ys, float* inv_rms, int64_t width, float eps, bool whole) {
  const int64_t row = blockIdx.x;
  const X* const x = xs[row];
  X* const y = ys[row];
  float squares = 0.0f;
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole);
    squares = fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, squares))));
  });
  const float inv = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole);
    const float4 g = w == nullptr ? float4{1.0f, 1.0f, 1.0f, 1.0f} : load_run(w + i, count, whole);
    store_run(y + i, {g.x * (v.x * inv), g.y * (v.y * inv), g.z * (v.z * inv), g.w * (v.w * inv)}, count, whole);
  });
  if (inv_rms != nullptr && threadIdx.x == 0) inv_rms[row] = inv;
}

template <class X>
__global__ void rmsnorm_backward(Rows<const X> xs, const float* w, const float* inv_rms, Rows<const X> dys, Rows<X> dxs,
                                 int64_t width, bool whole) {
  const int64_t row = blockIdx.x;
  const X* const x = xs[row];
  const X* const dy = dys[row];
  const float inv = inv_rms[row];
  const auto slopes = [&](int64_t i, int64_t count) {
    const float4 g = w == nullptr ? float4{1.0f, 1.0f, 1.0f, 1.0f} : load_run(w + i, count, whole);
    const float4 d = load_run(dy + i, count, whole);
    return float4{g.x * d.x, g.y * d.y, g.z * d.z, g.w * d.w};
  };
  float dot = 0.0f;
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole), s = slopes(i, count);
    dot = fmaf(s.w, v.w * inv, fmaf(s.z, v.z * inv, fmaf(s.y, v.y * inv, fmaf(s.x, v.x * inv, dot))));
  });
  const float mean = block_sum(dot) / static_cast<float>(width);
  for_fours(width, [&](int64_t i, int64_t count) {
    const float4 v = load_run(x + i, count, whole), s = slopes(i, count);
    const auto slope = [&](float value, float s_i) { return inv * fmaf(-(value * inv), mean, s_i); };
    store_run(dxs[row] + i, {slope(v.x, s.x), slope(v.y, s.y), slope(v.z, s.z), slope(v.w, s.w)}, count, whole);
  });
}

template <class X>
void backward(const RmsNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const Rows<const X> x = rows_of<const X>(args.x), dy = rows_of<const X>(args.dy);
  const float* const inv_rms = args.inv_rms.f32();
  if (!args.dw.empty()) {  // first: dx may overwrite dy
    add_column_sums([=] __device__(int64_t t, int64_t i) { return load(dy[t] + i) * (load(x[t] + i) * inv_rms[t]); },
                    rows, width, args.dw.f32(), stream);
  }
  const bool whole = fours(args.x) && fours(args.w) && fours(args.dy) && fours(args.dx);
  rmsnorm_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
      x, data_of<float>(args.w), inv_rms, dy, rows_of<X>(args.dx), width, whole);
  check_launch("rmsnorm_backward");
}

}  // namespace

template <>
void launch_cuda<RmsNorm>(const RmsNorm& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  if (rows == 0) return;
  const bool whole = fours(args.x) && fours(args.w) && fours(args.y);
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    rmsnorm<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.x), data_of<float>(args.w), rows_of<X>(args.y), data_of<float>(args.inv_rms), width,
        args.eps, whole);
  });
  check_launch("rmsnorm");
}

template <>
void launch_cuda<RmsNormBackward>(const RmsNormBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
