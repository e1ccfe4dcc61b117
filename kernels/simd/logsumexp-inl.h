// The softmax of a row of logits without writing it: maximum, log of the sum of exponentials, entropy.
// LogProb and Sampling share it, so that a sampled token's log-prob has the bits the learner will compute.
//
// A row is cut at multiples of kSoftmaxBlock. Each block is summed against its own maximum in the order of
// Lanes while it sits in the L1 cache, so the row is read from memory once; the blocks are merged in
// ascending order. Neither the cut nor the merge depends on anything but V, so blocks may be computed by any
// threads.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_SIMD_LOGSUMEXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SIMD_LOGSUMEXP_INL_H_
#undef SLIPSTREAM_KERNELS_SIMD_LOGSUMEXP_INL_H_
#else
#define SLIPSTREAM_KERNELS_SIMD_LOGSUMEXP_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/simd/lanes-inl.h"
#include "kernels/simd/softmax_parts.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// The maximum of n values; any value when there is a NaN. Four chains: a single one would wait for itself.
HWY_INLINE float block_max(const float* x, int64_t n) {
  const Lanes lowest = broadcast(-std::numeric_limits<float>::infinity());
  Lanes best[4] = {lowest, lowest, lowest, lowest};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    for (int64_t k = 0; k < 4; ++k) best[k] = max(best[k], load(x + i + k * kLanes));
  }
  for_lanes(n - i, [&](int64_t j, auto chunk) HWY_ATTR {
    best[0] = max(best[0], chunk.load(x + i + j, -std::numeric_limits<float>::infinity()));
  });
  return max_lanes(max(max(best[0], best[1]), max(best[2], best[3])));
}

// Below it exp() is zero. A bounded exponent keeps 0 * d from becoming NaN for logits of minus infinity; NaN
// passes.
HWY_INLINE Lanes bounded_exponent(const Lanes& d) { return max(broadcast(-87.5f), d); }

// One block. NaN and plus infinity make the sum NaN.
HWY_INLINE SoftmaxPart softmax_part(const float* x, int64_t n, float inv_temperature, bool entropy) {
  const float max_value = block_max(x, n);
  // A block without finite logits subtracts 0, not infinity: its exponentials are then 0, not NaN.
  const Lanes top = broadcast(max_value == -std::numeric_limits<float>::infinity() ? 0.0f : max_value);
  const Lanes scale = broadcast(inv_temperature);
  Lanes sum = zero_lanes(), dot = zero_lanes();
  if (entropy) {
    for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes v = chunk.load(x + i, -std::numeric_limits<float>::infinity());
      const Lanes d = bounded_exponent(mul(sub(v, top), scale));
      const Lanes e = exp(d);
      sum = add(sum, e);
      dot = fma(e, d, dot);
    });
  } else {
    for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes v = chunk.load(x + i, -std::numeric_limits<float>::infinity());
      sum = add(sum, exp(mul(sub(v, top), scale)));
    });
  }
  return {.max = max_value, .weight = 0.0f, .sum = sum_lanes(sum), .dot = sum_lanes(dot)};
}

HWY_INLINE float scalar_exp(float x) { return hn::GetLane(exp(broadcast(x)).part[0]); }
HWY_INLINE float scalar_log(float x) { return hn::GetLane(log(broadcast(x)).part[0]); }

// Sets each part's weight and returns the row's softmax; NaN in log_sum and entropy for a row that has none.
HWY_INLINE RowSoftmax merge_softmax(SoftmaxPart* parts, int64_t count, float inv_temperature) {
  float top = parts[0].max;
  for (int64_t b = 1; b < count; ++b) top = std::max(top, parts[b].max);
  float sum = 0.0f, dot = 0.0f;
  for (int64_t b = 0; b < count; ++b) {
    SoftmaxPart& part = parts[b];
    const float d = (part.max - top) * inv_temperature;
    part.weight = scalar_exp(d);
    sum += part.weight * part.sum;
    dot += part.weight * (part.dot + part.sum * std::max(d, -87.5f));
  }
  // Legal rows sum to at least 1, the term of the maximum.
  const float log_sum = sum >= 1.0f ? scalar_log(sum) : std::numeric_limits<float>::quiet_NaN();
  return {.max = top,
          .inv_temperature = inv_temperature,
          .sum = sum,
          .log_sum = log_sum,
          .entropy = log_sum - dot / sum};
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
