// The products of one query's heads with panels of keys, in registers. A panel is sixteen key rows,
// transposed: panel[channel * 16 + key], so that one vector holds one channel of sixteen keys.
//
// Included by indexer_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_INDEXER_SCORES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_INDEXER_SCORES_INL_H_
#undef SLIPSTREAM_KERNELS_INDEXER_SCORES_INL_H_
#else
#define SLIPSTREAM_KERNELS_INDEXER_SCORES_INL_H_
#endif

#include <cstdint>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

using QuadTag = hn::CappedTag<float, 4>;

HWY_INLINE hn::Vec<QuadTag> load_quad(const float* p) { return hn::LoadU(QuadTag(), p); }
HWY_INLINE hn::Vec<QuadTag> load_quad(const bf16* p) {
  const hn::Rebind<uint16_t, QuadTag> half;
  const hn::RebindToUnsigned<QuadTag> whole;
  const auto bits = hn::LoadU(half, reinterpret_cast<const uint16_t*>(p));
  return hn::BitCast(QuadTag(), hn::ShiftLeft<16>(hn::PromoteTo(whole, bits)));
}

// Four channels of keys rows[0], rows[4], rows[8], ...: one 128-bit block a key.
template <class T>
HWY_INLINE LanesVec load_quads(const T* const* rows, int64_t channel) {
  const auto quad = [&](int64_t i) HWY_ATTR { return load_quad(rows[4 * i] + channel); };
  if constexpr (kLanesParts == 2) {
    return hn::Combine(LanesTag(), quad(1), quad(0));
  } else {
    const hn::Half<LanesTag> half;
    return hn::Combine(LanesTag(), hn::Combine(half, quad(3), quad(2)), hn::Combine(half, quad(1), quad(0)));
  }
}

// panel[width, 16] from sixteen rows of `width`.
template <class T>
HWY_INLINE void pack_panel(const T* const* rows, int64_t width, float* HWY_RESTRICT panel) {
  int64_t channel = 0;
  for (; channel + 4 <= width; channel += 4) {
    for (int64_t part = 0; part < kLanesParts; ++part) {
      const T* const* own = rows + part * kLanesPartSize;
      LanesVec in[4];
      for (int64_t i = 0; i < 4; ++i) in[i] = load_quads(own + i, channel);
      const LanesTag d;
      const hn::RepartitionToWide<LanesTag> pairs;
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, in[0], in[1]));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, in[2], in[3]));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, in[0], in[1]));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, in[2], in[3]));
      float* to = panel + channel * kLanes + part * kLanesPartSize;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, to + kLanes);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d, to + 2 * kLanes);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d, to + 3 * kLanes);
    }
  }
  for (; channel < width; ++channel) {
    for (int64_t i = 0; i < kLanes; ++i) panel[channel * kLanes + i] = to_f32(rows[i][channel]);
  }
}

// One query's heads: q[head * head_stride + channel].
struct QueryHeads {
  const float* q;
  int64_t head_stride;
  int64_t heads;
  int64_t width;
  float scale;
};

// acc[head][panel] = q[head] · keys, the chain of block_gemm.
template <int Heads, int Panels>
HWY_INLINE void multiply_heads(const float* q, int64_t head_stride, int64_t width,
                               const float* HWY_RESTRICT panels, Lanes (&acc)[Heads][Panels]) {
  for (int h = 0; h < Heads; ++h) {
    for (int p = 0; p < Panels; ++p) acc[h][p] = zero_lanes();
  }
  for (int64_t i = 0; i < width; ++i) {
    Lanes key[Panels];
    for (int p = 0; p < Panels; ++p) key[p] = load(panels + (p * width + i) * kLanes);
    for (int h = 0; h < Heads; ++h) {
      const Lanes left = broadcast(q[h * head_stride + i]);
      for (int p = 0; p < Panels; ++p) acc[h][p] = fma(left, key[p], acc[h][p]);
    }
  }
}

// Heads a step: with two panels, 16 of 32 AVX-512 registers or 8 of 16 AVX2 ones (one panel at a time) hold
// sums, enough to cover the latency of the multiply-adds; more would not divide the usual 8, 16 and 32 heads.
constexpr int kHeadStep = kLanesParts == 1 ? 8 : 4;

template <int Heads, int Panels, class Each>
HWY_INLINE void head_group(const QueryHeads& query, int64_t head, const float* panels, Each&& each) {
  Lanes acc[Heads][Panels];
  multiply_heads<Heads, Panels>(query.q + head * query.head_stride, query.head_stride, query.width, panels,
                                acc);
  const Lanes scale = broadcast(query.scale);
  const Lanes zero = zero_lanes();
  for (int h = 0; h < Heads; ++h) {
    // The zero goes first: of (zero, NaN) the maximum is the second, so a NaN is not lost.
    for (int p = 0; p < Panels; ++p) each(head + h, p, max(zero, mul(acc[h][p], scale)));
  }
}

// each(head, panel, relu(q[head] · keys * scale)), heads ascending.
template <int Panels, class Each>
HWY_INLINE void for_each_head(const QueryHeads& query, const float* panels, Each&& each) {
  int64_t head = 0;
  for (; head + kHeadStep <= query.heads; head += kHeadStep) {
    head_group<kHeadStep, Panels>(query, head, panels, each);
  }
  for (; head < query.heads; ++head) head_group<1, Panels>(query, head, panels, each);
}

template <int Panels>
HWY_INLINE void score_panels(const QueryHeads& query, const float* weights, const float* panels,
                             float* scores) {
  Lanes sum[Panels];
  for (int p = 0; p < Panels; ++p) sum[p] = zero_lanes();
  for_each_head<Panels>(query, panels, [&](int64_t head, int p, const Lanes& product) HWY_ATTR {
    sum[p] = fma(broadcast(weights[head]), product, sum[p]);
  });
  for (int p = 0; p < Panels; ++p) store(sum[p], scores + p * kLanes);
}

// I of one query for the 32 keys of two panels.
HWY_INLINE void score_pair(const QueryHeads& query, const float* weights, const float* panels,
                           float* scores) {
  if constexpr (kLanesParts == 1) {
    score_panels<2>(query, weights, panels, scores);
  } else {
    score_panels<1>(query, weights, panels, scores);
    score_panels<1>(query, weights, panels + query.width * kLanes, scores + kLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
