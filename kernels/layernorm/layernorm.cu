#include "kernels/layernorm/layernorm.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// Sum over the row of f(i), in the order of row reductions.
template <class F>
__device__ float row_sum(int64_t width, F&& f) {
  float sum = 0.0f;
  for_fours(width, [&](int64_t i, int64_t count) {
    for (int64_t j = 0; j < count; ++j) sum += f(i + j);
  });
  return block_sum(sum);
}

// One block a row.
template <class X>
__global__ void layernorm(Rows<const X> xs, const float* w, const float* b, Rows<X> ys, float* means, float* inv_stds,
                          int64_t width, float eps) {
  const int64_t row = blockIdx.x;
  const X* const x = xs[row];
  const float mean = row_sum(width, [&](int64_t i) { return load(x + i); }) / static_cast<float>(width);
  const float squares = row_sum(width, [&](int64_t i) {
    const float d = load(x + i) - mean;
    return d * d;
  });
  const float inv_std = 1.0f / sqrtf(squares / static_cast<float>(width) + eps);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    // y may be x: the element is read by the thread that writes it, all else has been.
    store(ys[row] + i, fmaf(w[i], (load(x + i) - mean) * inv_std, b[i]));
  }
  if (means != nullptr && threadIdx.x == 0) {
    means[row] = mean;
    inv_stds[row] = inv_std;
  }
}

// With n = (x - mean) inv_std and g = w dy:  dx = inv_std (g - mean(g) - n mean(g n)).
template <class X>
__global__ void layernorm_backward(Rows<const X> xs, const float* w, const float* means, const float* inv_stds,
                                   Rows<const X> dys, Rows<X> dxs, int64_t width) {
  const int64_t row = blockIdx.x;
  const X *const x = xs[row], *const dy = dys[row];
  const float mean = means[row], inv_std = inv_stds[row];
  const auto normed = [&](int64_t i) { return (load(x + i) - mean) * inv_std; };
  const auto slope = [&](int64_t i) { return w[i] * load(dy + i); };
  const float slopes = row_sum(width, slope) / static_cast<float>(width);
  const float dots = row_sum(width, [&](int64_t i) { return slope(i) * normed(i); }) / static_cast<float>(width);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    store(dxs[row] + i, inv_std * (slope(i) - slopes - normed(i) * dots));
  }
}

template <class X>
void backward(const LayerNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const Rows<const X> x = rows_of<const X>(args.x), dy = rows_of<const X>(args.dy);
  const float *const mean = args.mean.f32(), *const inv_std = args.inv_std.f32();
  // First: dx may overwrite dy.
  add_column_sums([=] __device__(int64_t t, int64_t i) {
    return load(dy[t] + i) * ((load(x[t] + i) - mean[t]) * inv_std[t]);
  }, rows, width, args.dw.f32(), stream);
  add_column_sums([=] __device__(int64_t t, int64_t i) { return load(dy[t] + i); }, rows, width, args.db.f32(), stream);
  layernorm_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
      x, args.w.f32(), mean, inv_std, dy, rows_of<X>(args.dx), width);
  check_launch("layernorm_backward");
}

}  // namespace

template <>
void launch_cuda<LayerNorm>(const LayerNorm& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  if (rows == 0) return;
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    layernorm<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        rows_of<const X>(args.x), args.w.f32(), args.b.f32(), rows_of<X>(args.y), data_of<float>(args.mean),
        data_of<float>(args.inv_std), width, args.eps);
  });
  check_launch("layernorm");
}

template <>
void launch_cuda<LayerNormBackward>(const LayerNormBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
