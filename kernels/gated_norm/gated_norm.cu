#include "kernels/gated_norm/gated_norm.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/row_values.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kWarps = 8;              // of a block
constexpr int64_t kBlocks = 132 * 4;  // that are there at once
constexpr int kRows = 2;               // of a warp, worked on together
constexpr int kNarrow = 4 * kWarp;     // columns, a head's, that a warp keeps in registers
constexpr float4 kZero = {0.0f, 0.0f, 0.0f, 0.0f};

__device__ __forceinline__ float4 gated(float4 x, float4 gate, float4 w, float inv) {
  return {w.x * (x.x * inv) * sigmoid(gate.x), w.y * (x.y * inv) * sigmoid(gate.y), w.z * (x.z * inv) * sigmoid(gate.z),
          w.w * (x.w * inv) * sigmoid(gate.w)};
}

// Warps go through the rows, kRows at a time, of at most kNarrow columns; the next are on their way while some are worked on.
template <class X>
__global__ void __launch_bounds__(kWarps* kWarp, 4)
    gated_norm(Rows<const X> xs, const float* w, Rows<const X> gates, Rows<X> ys, float* inv_rms, int64_t rows, int width,
               float eps, bool whole) {
  const int column = 4 * (static_cast<int>(threadIdx.x) % kWarp), count = width - column;
  const int64_t step = int64_t{gridDim.x} * kWarps * kRows;
  int64_t first = (int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp) * kRows;
  struct Pair {
    Four<X> x[kRows], gate[kRows];
  };
  const auto read = [&](int64_t at) {
    Pair pair;
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (count > 0 && at + u < rows) {
        pair.x[u] = load_four(xs[at + u] + column, count, whole), pair.gate[u] = load_four(gates[at + u] + column, count, whole);
      } else {
        pair.x[u] = pair.gate[u] = Four<X>(kZero);
      }
    }
    return pair;
  };
  const float4 weight = count > 0 ? load_run(w + column, count, whole) : kZero;
  Pair next = read(first);
  for (; first < rows; first += step) {
    const Pair now = next;
    next = read(first + step);
    float inv[kRows];
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      inv[u] = 1.0f / sqrtf(warp_sum(add_squares(now.x[u].values(), 0.0f)) / static_cast<float>(width) + eps);
    }
#pragma unroll
    for (int u = 0; u < kRows; ++u) {
      if (first + u >= rows) continue;
      if (inv_rms != nullptr && column == 0) inv_rms[first + u] = inv[u];
      if (count <= 0) continue;
      store_run(ys[first + u] + column, gated(now.x[u].values(), now.gate[u].values(), weight, inv[u]), count, whole);
    }
  }
}

// A block a row, of any width.
template <class X>
__global__ void gated_norm_wide(Rows<const X> xs, const float* w, Rows<const X> gates, Rows<X> ys, float* inv_rms, int width,
                                float eps, bool whole) {
  const int64_t row = blockIdx.x;
  float squares = 0.0f;
  for_fours(width, [&](int64_t i, int64_t n) { squares = add_squares(load_run(xs[row] + i, n, whole), squares); });
  const float inv = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(width) + eps);
  for_fours(width, [&](int64_t i, int64_t n) {
    const float4 x = load_run(xs[row] + i, n, whole), gate = load_run(gates[row] + i, n, whole);
    store_run(ys[row] + i, gated(x, gate, load_run(w + i, n, whole), inv), n, whole);
  });
  if (inv_rms != nullptr && threadIdx.x == 0) inv_rms[row] = inv;
}

// With n = x inv_rms and s = sigmoid(gate):  dgate = dy w n s (1 - s),  slope = dy s w,  dx = inv_rms (slope - n mean(slope n)),
// dw = sum over rows of dy s n.
struct Element {
  float normed, s, open, slope;  // open = dy s
  __device__ Element(float x, float gate, float dy, float w, float inv)
      : normed(x * inv), s(sigmoid(gate)), open(dy * s), slope(open * w) {}
};

// A block goes through a piece of the rows, its warps in turns, and keeps the sums of w's gradient.
template <class X>
__global__ void __launch_bounds__(kWarps* kWarp, 4)
    gated_norm_backward(Rows<const X> xs, const float* w, Rows<const X> gates, const float* inv_rms, Rows<const X> dys,
                        Rows<X> dxs, Rows<X> dgates, int64_t rows, int width, int64_t piece, bool whole, float* partial) {
  __shared__ float sums[kWarps][kNarrow];
  const int64_t begin = blockIdx.x * piece, end = min(begin + piece, rows);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, column = 4 * (static_cast<int>(threadIdx.x) % kWarp);
  const int count = width - column;
  struct Row {
    Four<X> x, gate, dy;
    float inv;
  };
  const auto read = [&](int64_t row) {
    if (row >= end) row = begin;  // not used
    const float inv = inv_rms[row];
    if (count <= 0) return Row{Four<X>(kZero), Four<X>(kZero), Four<X>(kZero), inv};
    return Row{load_four(xs[row] + column, count, whole), load_four(gates[row] + column, count, whole),
               load_four(dys[row] + column, count, whole), inv};
  };
  const float4 weight = count > 0 ? load_run(w + column, count, whole) : kZero;
  float4 dw = kZero;
  Row first = read(begin + warp), second = read(begin + warp + kWarps);
  for (int64_t row = begin + warp; row < end; row += kWarps) {
    const Row now = first;  // before anything is written: dx may be dy
    first = second, second = read(row + 2 * kWarps);
    const float4 x = now.x.values(), gate = now.gate.values(), dy = now.dy.values();
    const Element a(x.x, gate.x, dy.x, weight.x, now.inv), b(x.y, gate.y, dy.y, weight.y, now.inv);
    const Element c(x.z, gate.z, dy.z, weight.z, now.inv), d(x.w, gate.w, dy.w, weight.w, now.inv);
    const float4 normed = {a.normed, b.normed, c.normed, d.normed}, slope = {a.slope, b.slope, c.slope, d.slope};
    dw = {dw.x + a.open * a.normed, dw.y + b.open * b.normed, dw.z + c.open * c.normed, dw.w + d.open * d.normed};
    const float mean = warp_sum(add_products(slope, normed, 0.0f)) / static_cast<float>(width);
    if (count <= 0) continue;
    const auto dgate = [](const Element& e, float dy_e, float w_e) { return dy_e * (w_e * e.normed) * (e.s * (1.0f - e.s)); };
    store_run(dgates[row] + column,
              {dgate(a, dy.x, weight.x), dgate(b, dy.y, weight.y), dgate(c, dy.z, weight.z), dgate(d, dy.w, weight.w)}, count,
              whole);
    const float4 dx = add_scaled(-mean, normed, slope);
    store_run(dxs[row] + column, {now.inv * dx.x, now.inv * dx.y, now.inv * dx.z, now.inv * dx.w}, count, whole);
  }
  store4(&sums[warp][column], dw);
  __syncthreads();
  const int at = static_cast<int>(threadIdx.x);
  if (at >= width) return;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += sums[i][at];
  partial[blockIdx.x * width + at] = sum;
}

// A block a row, of any width, after w's gradient.
template <class X>
__global__ void gated_norm_backward_wide(Rows<const X> xs, const float* w, Rows<const X> gates, const float* inv_rms,
                                         Rows<const X> dys, Rows<X> dxs, Rows<X> dgates, int64_t width) {
  const int64_t row = blockIdx.x;
  const auto element = [&](int64_t i) {
    return Element(load(xs[row] + i), load(gates[row] + i), load(dys[row] + i), w[i], inv_rms[row]);
  };
  float dot = 0.0f;
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const Element e = element(i);
    dot = fmaf(e.slope, e.normed, dot);
  }
  const float mean = block_sum(dot) / static_cast<float>(width);
  for (int64_t i = threadIdx.x; i < width; i += blockDim.x) {
    const Element e = element(i);
    store(dgates[row] + i, load(dys[row] + i) * (w[i] * e.normed) * (e.s * (1.0f - e.s)));
    store(dxs[row] + i, inv_rms[row] * fmaf(-e.normed, mean, e.slope));  // last: dx may be dy
  }
}

template <class X>
void backward(const GatedNormBackward& args, Stream& stream) {
  const int64_t rows = args.x.size(0), width = args.x.size(1);
  const Rows<const X> x = rows_of<const X>(args.x), gate = rows_of<const X>(args.gate), dy = rows_of<const X>(args.dy);
  const Rows<X> dx = rows_of<X>(args.dx), dgate = rows_of<X>(args.dgate);
  const float *const inv_rms = args.inv_rms.f32(), *const w = args.w.f32();
  if (width > kNarrow) {
    add_column_sums([=] __device__(int64_t r, int64_t i) {
      const Element e(load(x[r] + i), load(gate[r] + i), load(dy[r] + i), w[i], inv_rms[r]);
      return e.open * e.normed;
    }, rows, width, args.dw.f32(), stream);  // first: dx may overwrite dy
    gated_norm_backward_wide<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
        x, w, gate, inv_rms, dy, dx, dgate, width);
    return;
  }
  const bool whole =
      fours(args.x) && fours(args.w) && fours(args.gate) && fours(args.dy) && fours(args.dx) && fours(args.dgate);
  const int64_t piece = divide_up(divide_up(rows, kBlocks), kWarps) * kWarps, pieces = divide_up(rows, piece);
  const ArenaScope scope(stream.workspace());
  float* const partial = stream.workspace().alloc(DType::kF32, {pieces, width}).f32();
  gated_norm_backward<X><<<static_cast<unsigned>(pieces), kWarps * kWarp, 0, cuda_stream(stream)>>>(
      x, w, gate, inv_rms, dy, dx, dgate, rows, static_cast<int>(width), piece, whole, partial);
  add_pieces(partial, pieces, width, args.dw.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<GatedNorm>(const GatedNorm& args, Stream& stream) {
  const int64_t rows = args.x.size(0);
  const int width = static_cast<int>(args.x.size(1));
  if (rows == 0) return;
  const bool whole = fours(args.x) && fours(args.w) && fours(args.gate) && fours(args.y);
  const auto narrow_blocks = std::min(kBlocks, divide_up(rows, kWarps * kRows));
  with_type(args.x.dtype(), [&](auto type) {
    using X = decltype(type);
    const Rows<const X> x = rows_of<const X>(args.x), gate = rows_of<const X>(args.gate);
    const Rows<X> y = rows_of<X>(args.y);
    float* const inv_rms = data_of<float>(args.inv_rms);
    if (width <= kNarrow) {
      gated_norm<X><<<static_cast<unsigned>(narrow_blocks), kWarps * kWarp, 0, cuda_stream(stream)>>>(
          x, args.w.f32(), gate, y, inv_rms, rows, width, args.eps, whole);
    } else {
      gated_norm_wide<X><<<static_cast<unsigned>(rows), row_threads(width), 0, cuda_stream(stream)>>>(
          x, args.w.f32(), gate, y, inv_rms, width, args.eps, whole);
    }
  });
  check_launch("gated_norm");
}

template <>
void launch_cuda<GatedNormBackward>(const GatedNormBackward& args, Stream& stream) {
  if (args.x.size(0) == 0) return;
  with_type(args.x.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
  check_launch("gated_norm_backward");
}

}  // namespace slipstream::kernels
