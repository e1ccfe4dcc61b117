#include "kernels/router/router.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/router/router_simd.cc"
#include <algorithm>
#include <limits>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// Choices lie in [kLowestChoice, inf]; experts that are taken, or in a group that is not kept, are below all
// of them.
constexpr float kLowestChoice = -1e30f;
constexpr float kIneligible = -std::numeric_limits<float>::infinity();

// The lowest index of the largest of n >= 1 values, none of them NaN.
int64_t argmax(const float* values, int64_t n) {
  Lanes largest = broadcast(kIneligible);
  for_lanes(n, [&](int64_t i, auto chunk)
                   HWY_ATTR { largest = max(largest, chunk.load(values + i, kIneligible)); });
  LanesVec folded = largest.part[0];
  for (int64_t p = 1; p < kLanesParts; ++p) folded = hn::Max(folded, largest.part[p]);
  const LanesTag d;
  const float value = hn::GetLane(hn::MaxOfLanes(d, folded));  // a maximum is exact in any order
  const LanesVec target = hn::Set(d, value);
  int64_t i = 0;
  for (; i + kLanesPartSize <= n; i += kLanesPartSize) {
    const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, values + i), target));
    if (found >= 0) return i + found;
  }
  while (values[i] != value) ++i;
  return i;
}

void limit_groups(float* choice, int64_t num_experts, int64_t groups, int64_t kept, float* scores) {
  const int64_t size = num_experts / groups;
  for (int64_t g = 0; g < groups; ++g) {
    float* group = choice + g * size;
    float& best = group[argmax(group, size)];
    const float largest = best;
    best = kIneligible;
    scores[g] = largest + group[argmax(group, size)];
    best = largest;
  }
  for (int64_t i = 0; i < kept; ++i) scores[argmax(scores, groups)] = kIneligible;  // taken: its experts stay
  for (int64_t g = 0; g < groups; ++g) {
    if (scores[g] != kIneligible) std::fill(choice + g * size, choice + (g + 1) * size, kIneligible);
  }
}

void choose_experts(const Router& args, const float* logits, float* choice, float* scores, int32_t* experts) {
  const int64_t num_experts = args.logits.size(1), slots = args.experts.size(1);
  const float* bias = args.bias.f32();
  const Lanes lowest = broadcast(kLowestChoice);
  for_lanes(num_experts, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes value = add(sigmoid(chunk.load(logits + i)), chunk.load(bias + i));
    const Lanes clamped = map([&](int64_t p) HWY_ATTR {
      return hn::IfThenElse(hn::Gt(value.part[p], lowest.part[p]), value.part[p],
                            lowest.part[p]);  // NaN: lowest
    });
    chunk.store(clamped, choice + i);
  });
  if (args.groups > 1) limit_groups(choice, num_experts, args.groups, args.groups_kept, scores);
  for (int64_t k = 0; k < slots; ++k) {
    const int64_t best = argmax(choice, num_experts);
    experts[k] = static_cast<int32_t>(best);
    choice[best] = kIneligible;
  }
}

// scores[k] = sigmoid of slot k's logit. Chosen and replayed experts go the same way, so their weights have
// the same bits.
void chosen_scores(const float* logits, int64_t num_experts, const int32_t* experts, int64_t slots,
                   float* scores) {
  for_lanes(slots, [&](int64_t i, auto chunk) HWY_ATTR {
    float chosen[kLanes] = {};
    for (int64_t k = i; k < std::min(i + kLanes, slots); ++k) {
      CHECK(experts[k] >= 0 && experts[k] < num_experts);
      chosen[k - i] = logits[experts[k]];
    }
    chunk.store(sigmoid(load(chosen)), scores + i);
  });
}

float score_sum(const float* scores, int64_t slots) {
  float sum = 0.0f;
  for (int64_t k = 0; k < slots; ++k) sum += scores[k];
  return sum + 1e-20f;
}

void router_rows(const Router& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t num_experts = args.logits.size(1), slots = args.experts.size(1);
  float* choice = worker.scratch<float>(num_experts);
  float* group_scores = worker.scratch<float>(args.groups);
  const Lanes scale = broadcast(args.scale);
  for (int64_t t = begin; t < end; ++t) {
    const float* logits = args.logits.row(t);
    int32_t* experts = args.experts.i32() + t * args.experts.stride(0);
    float* weights = args.weights.row(t);
    if (!args.replayed) choose_experts(args, logits, choice, group_scores, experts);
    chosen_scores(logits, num_experts, experts, slots, weights);
    const Lanes divisor = broadcast(args.normalize ? score_sum(weights, slots) : 1.0f);
    for_lanes(slots, [&](int64_t i, auto chunk) HWY_ATTR {
      chunk.store(mul(div(chunk.load(weights + i), divisor), scale), weights + i);
    });
  }
}

void router_backward_rows(const RouterBackward& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t num_experts = args.logits.size(1), slots = args.experts.size(1);
  float* scores = worker.scratch<float>(slots);
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* experts = args.experts.i32() + t * args.experts.stride(0);
    const float* dweights = args.dweights.row(t);
    float* dlogits = args.dlogits.row(t);
    chosen_scores(args.logits.row(t), num_experts, experts, slots, scores);
    float divisor = 1.0f, mean = 0.0f;
    if (args.normalize) {
      divisor = score_sum(scores, slots);
      for (int64_t k = 0; k < slots; ++k) mean += dweights[k] * (scores[k] / divisor);
    }
    std::fill(dlogits, dlogits + num_experts, 0.0f);
    for (int64_t k = 0; k < slots; ++k) {
      // s / S first: both may be tiny.
      const float share = scores[k] / divisor;
      dlogits[experts[k]] += args.scale * (dweights[k] - mean) * share * (1.0f - scores[k]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(router_rows);
HWY_EXPORT(router_backward_rows);

namespace {
constexpr int64_t kGrainTokens = 32;  // 5 to 10 us of work: below that, waking a thread costs more
}

void launch(const Router& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.logits.size(0), kGrainTokens, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(router_rows)(args, begin, end, worker);
  });
}

void launch(const RouterBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.logits.size(0), kGrainTokens, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(router_backward_rows)(args, begin, end, worker);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
