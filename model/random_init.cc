#include "model/random_init.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "common/check.h"
#include "common/hash.h"
#include "kernels/bf16.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;
using kernels::Tensor;

// c0 + x c1 + x^2 c2 + ...
constexpr double horner(double, double c0) { return c0; }
template <class... Rest>
constexpr double horner(double x, double c0, double c1, Rest... rest) {
  return c0 + x * horner(x, c1, rest...);
}

// The library's log and cos round differently from one machine to the next; these are plain IEEE operations.
// Their errors, below 1e-11, vanish in the rounding to fp32.
double natural_log(double x) {  // x > 0 and normal
  constexpr double kLog2 = 0.693147180559945309;
  const uint64_t bits = std::bit_cast<uint64_t>(x);
  double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  double mantissa = std::bit_cast<double>((bits & 0x000fffffffffffffull) | 0x3ff0000000000000ull);
  const bool above = mantissa > 1.4142135623730951;
  mantissa = above ? mantissa * 0.5 : mantissa;
  exponent = above ? exponent + 1.0 : exponent;
  const double s = (mantissa - 1.0) / (mantissa + 1.0);  // log m = 2 atanh(s), |s| < 0.172
  const double s2 = s * s;
  const double series = horner(s2, 1.0, 1.0 / 3, 1.0 / 5, 1.0 / 7, 1.0 / 9, 1.0 / 11, 1.0 / 13);
  return exponent * kLog2 + 2.0 * s * series;
}

double cos_turns(double turns) {  // cos(2 pi turns), turns in [0, 1)
  constexpr double kPi = 3.141592653589793238;
  // cos(2 pi t) = sin(pi (2 |t - 1/2| - 1/2)), whose argument is within a quarter turn.
  const double angle = kPi * (2.0 * std::abs(turns - 0.5) - 0.5);
  const double a2 = angle * angle;
  constexpr double k3 = 6, k5 = k3 * 20, k7 = k5 * 42, k9 = k7 * 72, k11 = k9 * 110, k13 = k11 * 156,
                   k15 = k13 * 210;
  const double series = horner(a2, 1.0, -1 / k3, 1 / k5, -1 / k7, 1 / k9, -1 / k11, 1 / k13, -1 / k15);
  return angle * series;
}

float standard_normal(uint64_t key, int64_t i) {
  const uint64_t hash = mix64(key ^ splitmix64(static_cast<uint64_t>(i)));
  // 40 bits for the radius, which then reaches sqrt(80 log 2) = 7.45, and 24 for the angle.
  constexpr uint64_t kOne = 0x3ff0000000000000ull;
  const double uniform = 2.0 - std::bit_cast<double>(kOne | (hash >> 24) << 12);        // in (0, 1]
  const double turns = std::bit_cast<double>(kOne | (hash & 0xffffffull) << 28) - 1.0;  // in [0, 1)
  return static_cast<float>(std::sqrt(-2.0 * natural_log(uniform)) * cos_turns(turns));
}

void store(float value, float* out) { *out = value; }
void store(float value, bf16* out) { *out = kernels::to_bf16(value); }

template <class T>
void fill(uint64_t key, float std, int64_t first, T* out, int64_t count) {
  for (int64_t j = 0; j < count; ++j) store(std * standard_normal(key, first + j), out + j);
}

}  // namespace

void init_normal(const NormalInit& init, const Tensor& dst, kernels::Stream& stream) {
  CHECK(!dst.empty());
  CHECK(dst.device() == kernels::Device{});
  CHECK(dst.dtype() == DType::kF32 || dst.dtype() == DType::kBf16);
  CHECK_GE(init.std, 0.0f);
  const uint64_t key = mix64(mix64(init.seed) ^ fnv1a(init.name));
  const int last = dst.rank() - 1;
  const int64_t row_size = dst.size(last);
  if (dst.numel() == 0) return;
  const int64_t rows = dst.numel() / row_size;
  // Pieces of rows: vectors are one long row, convolutions many short ones.
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = (row_size + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, kPiece / row_size);
  stream.parallel_for(rows * pieces, grain, [&](int64_t begin, int64_t end, kernels::Worker&) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / pieces;
      const int64_t from = task % pieces * kPiece;
      const int64_t count = std::min(kPiece, row_size - from);
      int64_t offset = from;
      for (int64_t dim = last - 1, rest = row; dim >= 0; rest /= dst.size(static_cast<int>(dim)), --dim) {
        offset += rest % dst.size(static_cast<int>(dim)) * dst.stride(static_cast<int>(dim));
      }
      const int64_t first = row * row_size + from;
      if (dst.dtype() == DType::kF32) {
        fill(key, init.std, first, dst.f32() + offset, count);
      } else {
        fill(key, init.std, first, dst.bf() + offset, count);
      }
    }
  });
}

}  // namespace slipstream::model
