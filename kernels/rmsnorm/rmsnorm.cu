#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/norm_row.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// The residual's sum, on its way to memory.
template <class X, int kRuns>
__device__ __forceinline__ HeldRow<X, kRuns> sum_row(const X* a, const X* b, X* to, const RowShare& share) {
  const HeldRow<X, kRuns> u(a, share), v(b, share);
  HeldRow<X, kRuns> sum(to);
  for_runs<kRuns>(share, [&](int r, int column) {
    const float4 p = u.at(r, column, share), q = v.at(r, column, share);
    const float4 both = {rounded<X>(p.x + q.x), rounded<X>(p.y + q.y), rounded<X>(p.z + q.z), rounded<X>(p.w + q.w)};
    store_run(to + column, both, share.width - column, share.whole);
    if (r < kRuns) sum.keep(r, both);
  });
  return sum;
}

// One block a row.
template <class X, int kRuns, bool kSum>
__global__ void __launch_bounds__(256) rmsnorm(Rows<const X> xs, Rows<const X> bs, Rows<X> sums, const float* w, Rows<X> ys,
                                               float* inv_rms, int width, float eps, bool whole) {
  const int64_t row = blockIdx.x;
  const RowShare share = block_share(width, whole);
  prefetch_norm<kRuns>(w, share);
  const HeldRow<X, kRuns> x = [&] {
    if constexpr (kSum) return sum_row<X, kRuns>(xs[row], bs[row], sums[row], share);
    else return HeldRow<X, kRuns>(xs[row], share);
  }();
  const float inv = norm_row(x, w, ys[row], eps, share, [](float squares) { return block_sum(squares); });
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

// The same row by row, with the same bits, for wide rows and w's gradient: a block takes consecutive rows and keeps its
// columns' sums of dy n in registers, so that x and dy are read once. The next row is on its way while one is reduced.
constexpr int kManyThreads = 256;
// Blocks a multiprocessor, as many as their registers allow; and pieces of rows, the sums' order: no property of the device.
constexpr int row_blocks(int fours) { return fours <= 2 ? 4 : 2; }
constexpr int64_t row_pieces(int fours) { return 132 * row_blocks(fours); }

template <class X, int kFours>
__global__ void __launch_bounds__(kManyThreads, row_blocks(kFours))
    rmsnorm_backward_rows(Rows<const X> xs, const float* w, const float* inv_rms, Rows<const X> dys, Rows<X> dxs, int64_t rows,
                          int64_t width, int64_t piece, float* partial) {
  const int64_t begin = blockIdx.x * piece, end = min(begin + piece, rows);
  // Runs of this thread: four columns each, kManyThreads runs apart, as for_fours() has them.
  const auto for_runs = [&](auto&& f) {
#pragma unroll
    for (int i = 0; i < kFours; ++i) {
      const int64_t column = 4 * (threadIdx.x + int64_t{i} * kManyThreads);
      if (column < width) f(i, column);
    }
  };
  float4 sums[kFours];
  Four<X> x[kFours], dy[kFours];
  for_runs([&](int i, int64_t column) {
    sums[i] = {0.0f, 0.0f, 0.0f, 0.0f};
    x[i] = Four<X>(xs[begin] + column), dy[i] = Four<X>(dys[begin] + column);
  });
  for (int64_t row = begin; row < end; ++row) {
    const float inv = inv_rms[row];
    const auto slope_of = [&](int i, int64_t column) {
      const float4 d = dy[i].values(), g = load4(w + column);
      return float4{g.x * d.x, g.y * d.y, g.z * d.z, g.w * d.w};
    };
    float dot = 0.0f;
    for_runs([&](int i, int64_t column) {
      const float4 v = x[i].values(), d = dy[i].values(), s = slope_of(i, column);
      dot = fmaf(s.w, v.w * inv, fmaf(s.z, v.z * inv, fmaf(s.y, v.y * inv, fmaf(s.x, v.x * inv, dot))));
      sums[i].x += d.x * (v.x * inv), sums[i].y += d.y * (v.y * inv);
      sums[i].z += d.z * (v.z * inv), sums[i].w += d.w * (v.w * inv);
    });
    Four<X> next_x[kFours], next_dy[kFours];
    const int64_t next = min(row + 1, end - 1);
    for_runs([&](int i, int64_t column) {
      next_x[i] = Four<X>(xs[next] + column), next_dy[i] = Four<X>(dys[next] + column);
    });
    const float mean = block_sum(dot) / static_cast<float>(width);
    for_runs([&](int i, int64_t column) {
      const float4 v = x[i].values(), s = slope_of(i, column);
      const auto slope = [&](float value, float s_i) { return inv * fmaf(-(value * inv), mean, s_i); };
      store4(dxs[row] + column, {slope(v.x, s.x), slope(v.y, s.y), slope(v.z, s.z), slope(v.w, s.w)});
      x[i] = next_x[i], dy[i] = next_dy[i];
    });
  }
  for_runs([&](int i, int64_t column) { store4(partial + blockIdx.x * width + column, sums[i]); });
}

template <class X, int kFours>
void backward_rows(const RmsNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const int64_t piece = divide_up(rows, row_pieces(kFours)), pieces = divide_up(rows, piece);
  const ArenaScope scope(stream.workspace());
  float* const partial = stream.workspace().alloc(DType::kF32, {pieces, width}).f32();
  rmsnorm_backward_rows<X, kFours><<<static_cast<unsigned>(pieces), kManyThreads, 0, cuda_stream(stream)>>>(
      rows_of<const X>(args.x), args.w.f32(), args.inv_rms.f32(), rows_of<const X>(args.dy), rows_of<X>(args.dx), rows,
      width, piece, partial);
  add_pieces(partial, pieces, width, args.dw.f32(), stream);
  check_launch("rmsnorm_backward");
}

template <class X>
void backward(const RmsNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const bool whole = fours(args.x) && fours(args.w) && fours(args.dy) && fours(args.dx);
  if (!args.dw.empty() && whole && row_threads(width) == kManyThreads) {
    if (width <= 2 * 4 * kManyThreads) return backward_rows<X, 2>(args, stream);
    if (width <= 4 * 4 * kManyThreads) return backward_rows<X, 4>(args, stream);
    if (width <= 6 * 4 * kManyThreads) return backward_rows<X, 6>(args, stream);
  }
  const Rows<const X> x = rows_of<const X>(args.x), dy = rows_of<const X>(args.dy);
  const float* const inv_rms = args.inv_rms.f32();
  if (!args.dw.empty()) {  // first: dx may overwrite dy
    add_column_sums([=] __device__(int64_t t, int64_t i) { return load(dy[t] + i) * (load(x[t] + i) * inv_rms[t]); },
                    rows, width, args.dw.f32(), stream);
  }
  rmsnorm_backward<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
      x, data_of<float>(args.w), inv_rms, dy, rows_of<X>(args.dx), width, whole);
  check_launch("rmsnorm_backward");
}

}  // namespace

template <>
void launch_cuda<RmsNorm>(const RmsNorm& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  if (rows == 0) return;
  const bool sums = !args.b.empty();
  const bool whole = fours(args.x) && fours(args.w) && fours(args.y) && (!sums || (fours(args.b) && fours(args.sum)));
  with_type(args.x.dtype(), [&](auto x) {
    using X = decltype(x);
    const auto enqueue = [&](auto kernel) {
      kernel<<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
          rows_of<const X>(args.x), rows_of<const X>(args.b), rows_of<X>(args.sum), data_of<float>(args.w), rows_of<X>(args.y),
          data_of<float>(args.inv_rms), static_cast<int>(width), args.eps, whole);
    };
    // What is held beyond the row would cost registers alone.
    const int64_t runs = divide_up(width, 4 * row_threads(width));
    if (sums) {
      runs <= 1 ? enqueue(rmsnorm<X, 1, true>) : runs <= 4 ? enqueue(rmsnorm<X, 4, true>) : enqueue(rmsnorm<X, 6, true>);
    } else {
      runs <= 1 ? enqueue(rmsnorm<X, 1, false>) : runs <= 4 ? enqueue(rmsnorm<X, 4, false>) : enqueue(rmsnorm<X, 6, false>);
    }
  });
  check_launch("rmsnorm");
}

template <>
void launch_cuda<RmsNormBackward>(const RmsNormBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
}

}  // namespace slipstream::kernels
