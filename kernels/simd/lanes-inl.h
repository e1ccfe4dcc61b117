// Lanes: sixteen fp32 values, whatever the CPU's vector width: one AVX-512 register or two AVX2 ones.
//
// Every reduction of a row in the CPU operators is written as: lane j adds elements j, j+16, j+32, ...; then the
// sixteen partial sums are folded 8+8, 4+4, 2+2, 1+1. The order depends on the row's length alone, so a row's
// bits are the same in any batch, on any number of threads and on AVX2 and AVX-512 alike.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target (hence the unusual include guard).
#if defined(SLIPSTREAM_KERNELS_SIMD_LANES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SIMD_LANES_INL_H_
#undef SLIPSTREAM_KERNELS_SIMD_LANES_INL_H_
#else
#define SLIPSTREAM_KERNELS_SIMD_LANES_INL_H_
#endif

#include <cstdint>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"
#include "kernels/bf16.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

constexpr int64_t kLanes = 16;

using LanesTag = hn::CappedTag<float, kLanes>;
using LanesVec = hn::Vec<LanesTag>;
constexpr int64_t kLanesPartSize = static_cast<int64_t>(hn::MaxLanes(LanesTag()));
constexpr int64_t kLanesParts = kLanes / kLanesPartSize;

struct Lanes {
  LanesVec part[kLanesParts];
};

// f(part...) for each register of the arguments.
template <class F>
HWY_INLINE Lanes map(F&& f) {
  Lanes out;
  for (int64_t i = 0; i < kLanesParts; ++i) out.part[i] = f(i);
  return out;
}

HWY_INLINE Lanes broadcast(float x) {
  return map([&](int64_t) HWY_ATTR { return hn::Set(LanesTag(), x); });
}
HWY_INLINE Lanes zero_lanes() { return broadcast(0.0f); }

// Sixteen values from any address.
HWY_INLINE Lanes load(const float* p) {
  return map([&](int64_t i) HWY_ATTR { return hn::LoadU(LanesTag(), p + i * kLanesPartSize); });
}
HWY_INLINE Lanes load(const bf16* p) {
  const hn::Rebind<uint16_t, LanesTag> half;
  const hn::RebindToUnsigned<LanesTag> whole;
  return map([&](int64_t i) HWY_ATTR {
    const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(p) + i * kLanesPartSize);
    return hn::BitCast(LanesTag(), hn::ShiftLeft<16>(hn::PromoteTo(whole, bits)));
  });
}
HWY_INLINE void store(const Lanes& x, float* p) {
  for (int64_t i = 0; i < kLanesParts; ++i) hn::StoreU(x.part[i], LanesTag(), p + i * kLanesPartSize);
}
// Rounds to nearest even, as to_bf16() does; NaN stays NaN.
HWY_INLINE void store(const Lanes& x, bf16* p) {
  const hn::Rebind<uint16_t, LanesTag> half;
  const hn::RebindToUnsigned<LanesTag> whole;
  for (int64_t i = 0; i < kLanesParts; ++i) {
    const auto bits = hn::BitCast(whole, x.part[i]);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(whole, 1u));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(whole, 0x7fffu)));
    const auto nan = hn::RebindMask(whole, hn::IsNaN(x.part[i]));
    const auto kept = hn::IfThenElse(nan, hn::Or(bits, hn::Set(whole, 0x400000u)), rounded);
    const auto upper = hn::BitCast(hn::RebindToSigned<LanesTag>(), hn::ShiftRight<16>(kept));
    hn::StoreU(hn::DemoteTo(half, upper), half, reinterpret_cast<uint16_t*>(p) + i * kLanesPartSize);
  }
}

// The first n (1..16) values; the other lanes read as `fill` and are not written.
HWY_INLINE Lanes load_first(const float* p, int64_t n, float fill = 0.0f) {
  const LanesTag d;
  return map([&](int64_t i) HWY_ATTR {
    const int64_t left = n - i * kLanesPartSize;
    if (left <= 0) return hn::Set(d, fill);
    const auto mask = hn::FirstN(d, static_cast<size_t>(left));
    return hn::IfThenElse(mask, hn::MaskedLoad(mask, d, p + i * kLanesPartSize), hn::Set(d, fill));
  });
}
HWY_INLINE Lanes load_first(const bf16* p, int64_t n, float fill = 0.0f) {
#if HWY_TARGET <= HWY_AVX3
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  const __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16);
  return {{LanesVec{_mm512_mask_mov_ps(_mm512_set1_ps(fill), mask, _mm512_castsi512_ps(bits))}}};
#else
  float values[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) values[i] = i < n ? to_f32(p[i]) : fill;
  return load(values);
#endif
}
HWY_INLINE void store_first(const Lanes& x, float* p, int64_t n) {
  const LanesTag d;
  for (int64_t i = 0; i < kLanesParts; ++i) {
    const int64_t left = n - i * kLanesPartSize;
    if (left <= 0) return;
    hn::BlendedStore(x.part[i], hn::FirstN(d, static_cast<size_t>(left)), d, p + i * kLanesPartSize);
  }
}
HWY_INLINE void store_first(const Lanes& x, bf16* p, int64_t n) {
  float values[kLanes];
  store(x, values);
  for (int64_t i = 0; i < n; ++i) p[i] = to_bf16(values[i]);
}

#define SLIPSTREAM_LANES_BINARY(name, op)                                                    \
  HWY_INLINE Lanes name(const Lanes& a, const Lanes& b) {                                    \
    return map([&](int64_t i) HWY_ATTR { return hn::op(a.part[i], b.part[i]); });            \
  }
SLIPSTREAM_LANES_BINARY(add, Add)
SLIPSTREAM_LANES_BINARY(sub, Sub)
SLIPSTREAM_LANES_BINARY(mul, Mul)
SLIPSTREAM_LANES_BINARY(div, Div)
SLIPSTREAM_LANES_BINARY(max, Max)
SLIPSTREAM_LANES_BINARY(min, Min)
#undef SLIPSTREAM_LANES_BINARY

// a * b + c with one rounding; c - a * b with one rounding.
HWY_INLINE Lanes fma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return map([&](int64_t i) HWY_ATTR { return hn::MulAdd(a.part[i], b.part[i], c.part[i]); });
}
HWY_INLINE Lanes fnma(const Lanes& a, const Lanes& b, const Lanes& c) {
  return map([&](int64_t i) HWY_ATTR { return hn::NegMulAdd(a.part[i], b.part[i], c.part[i]); });
}
HWY_INLINE Lanes sqrt(const Lanes& a) {
  return map([&](int64_t i) HWY_ATTR { return hn::Sqrt(a.part[i]); });
}
// e^a to one ulp: 0 below -86.98 (no subnormal results), infinity above 88.72, NaN for NaN. Ours because
// Highway 1.0's Exp wraps around above 177 (sigmoid(-200) came out as 1), turns NaN into 0, and needs nearly
// twice the instructions. a = n ln 2 + r; 2 e^r by a polynomial of degree 6 (minimax: 3e-9), times 2^(n-1).
HWY_INLINE LanesVec exp_part(LanesVec a) {
  const LanesTag d;
  const hn::RebindToUnsigned<LanesTag> bits;
  const LanesVec magic = hn::Set(d, 12582912.0f + 126.0f);  // 1.5 * 2^23 + 126: rounds, and biases n - 1
  a = hn::Max(hn::Set(d, -87.5f), hn::Min(hn::Set(d, 89.0f), a));  // in this order NaN passes through both
  const LanesVec biased = hn::MulAdd(a, hn::Set(d, 1.44269504f), magic);
  const LanesVec n = hn::Sub(biased, magic);
  LanesVec r = hn::NegMulAdd(n, hn::Set(d, 0.693145751953125f), a);
  r = hn::NegMulAdd(n, hn::Set(d, 1.42860677e-6f), r);
  LanesVec twice = hn::Set(d, 2.0f * 0.0013814599f);
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f * 0.008368717f));
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f * 0.04166839f));
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f * 0.16666521f));
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f * 0.49999994f));
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f));
  twice = hn::MulAdd(twice, r, hn::Set(d, 2.0f));
  return hn::Mul(twice, hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(bits, biased))));
}
HWY_INLINE Lanes exp(const Lanes& a) {
  return map([&](int64_t i) HWY_ATTR { return exp_part(a.part[i]); });
}
// a > 0 and finite.
HWY_INLINE Lanes log(const Lanes& a) {
  return map([&](int64_t i) HWY_ATTR { return hn::Log(LanesTag(), a.part[i]); });
}
// 1 / (1 + exp(-a)): 0 and 1 at the ends, NaN only for NaN.
HWY_INLINE Lanes sigmoid(const Lanes& a) {
  const Lanes one = broadcast(1.0f);
  return div(one, add(one, exp(sub(zero_lanes(), a))));
}

// The sixteen lanes folded 8+8, 4+4, 2+2, 1+1; the lower lanes are fold's first argument.
template <class Fold>
HWY_INLINE float fold_lanes(const Lanes& x, Fold&& fold) {
  const hn::CappedTag<float, kLanes / 2> half;
#if HWY_TARGET <= HWY_AVX3
  const auto eight = fold(hn::LowerHalf(x.part[0]), hn::UpperHalf(half, x.part[0]));
#else
  static_assert(kLanesParts == 2);
  const auto eight = fold(x.part[0], x.part[1]);
#endif
  const auto four = fold(hn::LowerHalf(eight), hn::UpperHalf(hn::Half<decltype(half)>(), eight));
  const auto two = fold(four, hn::Shuffle1032(four));
  return hn::GetLane(fold(two, hn::Shuffle2301(two)));
}
HWY_INLINE float sum_lanes(const Lanes& x) {
  return fold_lanes(x, [](auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
}
// a > b ? a : b at each fold: a NaN may be lost.
HWY_INLINE float max_lanes(const Lanes& x) {
  return fold_lanes(x, [](auto a, auto b) HWY_ATTR { return hn::Max(a, b); });
}

// body(offset, load_or_load_first, store_or_store_first) over a row of n values in steps of sixteen:
//   for_lanes(n, [&](int64_t i, auto chunk) { chunk.store(mul(chunk.load(x + i), w), y + i); });
struct FullChunk {
  template <class T>
  HWY_INLINE Lanes load(const T* p, float = 0.0f) const { return HWY_NAMESPACE::load(p); }
  template <class T>
  HWY_INLINE void store(const Lanes& x, T* p) const { HWY_NAMESPACE::store(x, p); }
};
struct TailChunk {
  int64_t n;
  template <class T>
  HWY_INLINE Lanes load(const T* p, float fill = 0.0f) const { return load_first(p, n, fill); }
  template <class T>
  HWY_INLINE void store(const Lanes& x, T* p) const { store_first(x, p, n); }
};
template <class Body>
HWY_INLINE void for_lanes(int64_t n, Body&& body) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, FullChunk{});
  if (i < n) body(i, TailChunk{n - i});
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
