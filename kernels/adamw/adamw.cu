#include "kernels/adamw/adamw.h"

#include <algorithm>

#include "kernels/cuda/device.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 132 * 8;

struct Numbers {
  float beta1, beta2, rate, correct2, eps, decay, scale;
};

__device__ __forceinline__ void update(const Numbers& u, float g, float& m, float& v, float& w) {
  const float gradient = g * u.scale;
  m = u.beta1 * m + (1.0f - u.beta1) * gradient;
  v = u.beta2 * v + (1.0f - u.beta2) * gradient * gradient;
  w = w * u.decay - __fdiv_rn(u.rate * m, __fsqrt_rn(v * u.correct2) + u.eps);
}

// Each value is read and written once; what is read next is in flight while four values are computed.
template <class X>
__global__ void __launch_bounds__(kThreads) adamw(Numbers u, const float* g, float* m, float* v, float* w, X* rounded,
                                                  int32_t* nonfinite, int64_t n, bool whole) {
  bool finite = true;
  const int64_t step = int64_t{gridDim.x} * kThreads * 4;
  for (int64_t i = 4 * (int64_t{blockIdx.x} * kThreads + threadIdx.x); i < n; i += step) {
    const int64_t count = min(int64_t{4}, n - i);
    const bool four = whole && count == 4;
    const float4 gs = load_run(g + i, count, four);
    float4 ms = load_run(m + i, count, four), vs = load_run(v + i, count, four), ws = load_run(w + i, count, four);
    update(u, gs.x, ms.x, vs.x, ws.x), update(u, gs.y, ms.y, vs.y, ws.y);
    update(u, gs.z, ms.z, vs.z, ws.z), update(u, gs.w, ms.w, vs.w, ws.w);
    store_run(m + i, ms, count, four);
    store_run(v + i, vs, count, four);
    store_run(w + i, ws, count, four);
    if (rounded != nullptr) store_run(rounded + i, ws, count, four);
    const auto exists = [&](int64_t place, float value) { return place >= count || isfinite(value); };
    finite = finite && exists(0, ws.x) && exists(1, ws.y) && exists(2, ws.z) && exists(3, ws.w);
  }
  if (!finite) *nonfinite = 1;  // all who store, store the same
}

// Lane l of the block is thread l: value(0), value(256), ... from thread 0 on.
template <class F>
__device__ double sum_lanes(int64_t n, F&& value) {
  __shared__ double lanes[kSquareLanes];
  double sum = 0.0;
#pragma unroll 8
  for (int64_t i = threadIdx.x; i < n; i += kSquareLanes) sum += value(i);
  lanes[threadIdx.x] = sum;
  for (int half = kSquareLanes / 2; half > 0; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half) lanes[threadIdx.x] += lanes[threadIdx.x + half];
  }
  return lanes[0];  // in thread 0
}

__global__ void __launch_bounds__(kSquareLanes) square_pieces(const float* x, int64_t n, double* pieces) {
  const int64_t begin = blockIdx.x * kSquarePiece;
  const double sum = sum_lanes(min(kSquarePiece, n - begin), [&](int64_t i) {
    const double value = x[begin + i];
    return value * value;
  });
  if (threadIdx.x == 0) pieces[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSquareLanes) add_squares(const double* pieces, int64_t count, double* sum) {
  const double all = sum_lanes(count, [&](int64_t i) { return pieces[i]; });
  if (threadIdx.x == 0) *sum = all;
}

bool aligned(const Tensor& t, uintptr_t bytes) { return t.empty() || reinterpret_cast<uintptr_t>(t.raw()) % bytes == 0; }

}  // namespace

template <>
void launch_cuda<AdamWStep>(const AdamWStep& args, Stream& stream) {
  const int64_t n = args.gradient.numel();
  if (n == 0) return;
  const Numbers numbers = {args.beta1, args.beta2, args.rate, args.correct2, args.eps, args.decay, args.scale};
  const bool whole = aligned(args.gradient, 16) && aligned(args.first, 16) && aligned(args.second, 16) &&
                     aligned(args.master, 16) && aligned(args.rounded, 16);
  const auto blocks = static_cast<unsigned>(std::min(kBlocksMax, divide_up(n, 4 * kThreads)));
  with_type(args.rounded.empty() ? DType::kF32 : args.rounded.dtype(), [&](auto x) {
    using X = decltype(x);
    adamw<X><<<blocks, kThreads, 0, cuda_stream(stream)>>>(numbers, args.gradient.f32(), args.first.f32(),
                                                          args.second.f32(), args.master.f32(), data_of<X>(args.rounded),
                                                          args.nonfinite.i32(), n, whole);
  });
  check_launch("adamw");
}

template <>
void launch_cuda<SumSquares>(const SumSquares& args, Stream& stream) {
  const int64_t n = args.x.numel(), pieces = divide_up(n, kSquarePiece);
  const ArenaScope scope(stream.workspace());
  double* const partial = static_cast<double*>(stream.workspace().alloc(DType::kI32, {pieces, 2}).raw());
  if (pieces > 0) {
    square_pieces<<<static_cast<unsigned>(pieces), kSquareLanes, 0, cuda_stream(stream)>>>(args.x.f32(), n, partial);
  }
  add_squares<<<1, kSquareLanes, 0, cuda_stream(stream)>>>(partial, pieces, static_cast<double*>(args.sum.raw()));
  check_launch("sum_squares");
}

}  // namespace slipstream::kernels
