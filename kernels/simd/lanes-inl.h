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
#include <cstring>

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
  const hn::RebindToSigned<LanesTag> number;
  for (int64_t i = 0; i < kLanesParts; ++i) {
    const auto bits = hn::BitCast(whole, x.part[i]);
    const auto upper = hn::ShiftRight<16>(bits);
    const auto odd = hn::And(upper, hn::Set(whole, 1u));
    const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(whole, 0x7fffu))));
    const auto is_nan = hn::RebindMask(whole, hn::IsNaN(x.part[i]));
    const auto out = hn::IfThenElse(is_nan, hn::Or(upper, hn::Set(whole, 0x40u)), rounded);
    hn::StoreU(hn::DemoteTo(half, hn::BitCast(number, out)), half,
               reinterpret_cast<uint16_t*>(p) + i * kLanesPartSize);
  }
}

// The first n (1..15) values; the other lanes read as `fill` and are not written.
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
  bf16 values[kLanes] = {};
  std::memcpy(values, p, static_cast<size_t>(n) * sizeof(bf16));
  const Lanes x = load(values);
  const LanesTag d;
  return map([&](int64_t i) HWY_ATTR {
    const int64_t left = n - i * kLanesPartSize;
    if (left <= 0) return hn::Set(d, fill);
    return hn::IfThenElse(hn::FirstN(d, static_cast<size_t>(left)), x.part[i], hn::Set(d, fill));
  });
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
  bf16 values[kLanes];
  store(x, values);
  std::memcpy(p, values, static_cast<size_t>(n) * sizeof(bf16));
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
HWY_INLINE Lanes exp(const Lanes& a) {
  return map([&](int64_t i) HWY_ATTR { return hn::Exp(LanesTag(), a.part[i]); });
}
HWY_INLINE Lanes log(const Lanes& a) {
  return map([&](int64_t i) HWY_ATTR { return hn::Log(LanesTag(), a.part[i]); });
}
// 1 / (1 + exp(-a)): 0 and 1 at the ends, never NaN for finite a.
HWY_INLINE Lanes sigmoid(const Lanes& a) {
  const Lanes one = broadcast(1.0f);
  return div(one, add(one, exp(sub(zero_lanes(), a))));
}

// The sixteen lanes folded 8+8, 4+4, 2+2, 1+1: fold(lower half, upper half) of vectors.
template <class V, class Fold>
HWY_INLINE auto fold_to_eight(const V (&part)[1], Fold&& fold) {
  const hn::CappedTag<float, 8> eight;
  return fold(hn::LowerHalf(eight, part[0]), hn::UpperHalf(eight, part[0]));
}
template <class V, class Fold>
HWY_INLINE auto fold_to_eight(const V (&part)[2], Fold&& fold) {
  return fold(part[0], part[1]);
}
template <class Fold>
HWY_INLINE float fold_lanes(const Lanes& x, Fold&& fold) {
  const hn::CappedTag<float, 4> four;
  const auto eight = fold_to_eight(x.part, fold);
  const auto sums = fold(hn::LowerHalf(four, eight), hn::UpperHalf(four, eight));
  const auto two = fold(sums, hn::Shuffle1032(sums));
  return hn::GetLane(fold(two, hn::Shuffle2301(two)));
}
HWY_INLINE float sum_lanes(const Lanes& x) {
  return fold_lanes(x, [](auto a, auto b) HWY_ATTR { return hn::Add(a, b); });
}
// a > b ? a : b at every fold.
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
