#include "kernels/adamw/adamw.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// Loops the compiler vectorises: nothing here is worth more than memory's bandwidth.
bool update_range(const AdamWStep& args, const float* __restrict__ g, float* __restrict__ m, float* __restrict__ v,
                  float* __restrict__ w, int64_t n) {
  // Named copies: stores through m, v and w could change what a reference names.
  const float beta1 = args.beta1, beta2 = args.beta2, rate = args.rate, correct2 = args.correct2, eps = args.eps,
              decay = args.decay, scale = args.scale;
  uint32_t largest = 0;  // exponents of ones are infinity and NaN
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * scale;
    const float first = beta1 * m[i] + (1.0f - beta1) * gradient;
    const float second = beta2 * v[i] + (1.0f - beta2) * gradient * gradient;
    const float master = w[i] * decay - rate * first / (std::sqrt(second * correct2) + eps);
    m[i] = first, v[i] = second, w[i] = master;
    largest = std::max(largest, std::bit_cast<uint32_t>(master) & 0x7fffffffu);
  }
  return largest < 0x7f800000u;
}

void round_range(const float* __restrict__ w, bf16* __restrict__ rounded, int64_t n) {
  for (int64_t i = 0; i < n; ++i) rounded[i] = to_bf16(w[i]);
}

// value(i) for i < n.
template <class F>
double sum_lanes(int64_t n, F value) {
  double lanes[kSquareLanes] = {};
  int64_t i = 0;
  for (; i + kSquareLanes <= n; i += kSquareLanes) {
    for (int l = 0; l < kSquareLanes; ++l) lanes[l] += value(i + l);
  }
  for (int l = 0; i + l < n; ++l) lanes[l] += value(i + l);
  for (int half = kSquareLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace

void launch(const AdamWStep& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.gradient.numel(), 1 << 14, [&](int64_t begin, int64_t end, Worker&) {
    float* const w = args.master.f32() + begin;
    const bool finite = update_range(args, args.gradient.f32() + begin, args.first.f32() + begin,
                                     args.second.f32() + begin, w, end - begin);
    if (!finite) __atomic_store_n(args.nonfinite.i32(), 1, __ATOMIC_RELAXED);
    if (args.rounded.empty()) return;
    if (args.rounded.dtype() == DType::kBf16) return round_range(w, args.rounded.bf() + begin, end - begin);
    std::memcpy(args.rounded.f32() + begin, w, static_cast<size_t>(end - begin) * sizeof(float));
  });
}

void launch(const SumSquares& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t n = args.x.numel();
  const float* const x = args.x.f32();
  std::vector<double> pieces(static_cast<size_t>((n + kSquarePiece - 1) / kSquarePiece));
  stream.parallel_for(static_cast<int64_t>(pieces.size()), 1, [&](int64_t begin, int64_t end, Worker&) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const float* const from = x + piece * kSquarePiece;
      pieces[static_cast<size_t>(piece)] = sum_lanes(
          std::min(kSquarePiece, n - piece * kSquarePiece), [&](int64_t i) { return double{from[i]} * double{from[i]}; });
    }
  });
  const double sum =
      sum_lanes(static_cast<int64_t>(pieces.size()), [&](int64_t i) { return pieces[static_cast<size_t>(i)]; });
  std::memcpy(args.sum.raw(), &sum, sizeof sum);
}

}  // namespace slipstream::kernels
