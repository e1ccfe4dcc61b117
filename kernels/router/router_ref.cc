#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/router/router.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

constexpr float kLowestChoice = -1e30f;  // below it, and NaN: see the header
constexpr float kIneligible = -std::numeric_limits<float>::infinity();

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// The lowest index of the largest value.
int64_t argmax(const std::vector<float>& values, int64_t begin, int64_t end) {
  int64_t best = begin;
  for (int64_t i = begin + 1; i < end; ++i) {
    if (values[static_cast<size_t>(i)] > values[static_cast<size_t>(best)]) best = i;
  }
  return best;
}

// Makes the experts of all but the `kept` best groups ineligible.
void limit_groups(std::vector<float>& choice, int64_t groups, int64_t kept) {
  const int64_t size = static_cast<int64_t>(choice.size()) / groups;
  std::vector<float> scores;
  for (int64_t g = 0; g < groups; ++g) {
    std::vector<float> group(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(group.begin(), group.end(), std::greater<float>());
    scores.push_back(group[0] + group[1]);
  }
  std::vector<bool> eligible(static_cast<size_t>(groups), false);
  for (int64_t i = 0; i < kept; ++i) {
    const auto best = static_cast<size_t>(argmax(scores, 0, groups));
    eligible[best] = true;
    scores[best] = kIneligible;
  }
  for (size_t e = 0; e < choice.size(); ++e) {
    if (!eligible[e / static_cast<size_t>(size)]) choice[e] = kIneligible;
  }
}

}  // namespace

absl::Status validate(const Router& args) {
  const Operands op("router");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  const int64_t tokens = args.logits.size(0), num_experts = args.logits.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "bias", args.bias, DType::kF32, {num_experts}));
  RETURN_IF_ERROR(expect_tensor(op, "experts", args.experts, DType::kI32, {tokens, -1}));
  const int64_t slots = args.experts.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "weights", args.weights, DType::kF32, {tokens, slots}));
  RETURN_IF_ERROR(expect_that(op, args.groups >= 1 && num_experts % args.groups == 0,
                              "groups must divide the number of experts"));
  const int64_t group_size = num_experts / args.groups;
  RETURN_IF_ERROR(
      expect_that(op, args.groups == 1 || group_size >= 2, "a group must have at least two experts"));
  RETURN_IF_ERROR(expect_that(op, args.groups_kept >= 1 && args.groups_kept <= args.groups,
                              "groups_kept must be in 1..groups"));
  return expect_that(op, slots >= 1 && slots <= args.groups_kept * group_size,
                     "slots must be in 1..eligible experts");
}

absl::Status validate(const RouterBackward& args) {
  const Operands op("router_backward");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  const int64_t tokens = args.logits.size(0), num_experts = args.logits.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "experts", args.experts, DType::kI32, {tokens, -1}));
  const int64_t slots = args.experts.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "dweights", args.dweights, DType::kF32, {tokens, slots}));
  RETURN_IF_ERROR(expect_tensor(op, "dlogits", args.dlogits, DType::kF32, {tokens, num_experts}));
  return expect_that(op, slots >= 1 && slots <= num_experts, "slots must be in 1..experts");
}

void reference(const Router& args) {
  CHECK_OK(validate(args));
  const int64_t num_experts = args.logits.size(1), slots = args.experts.size(1);
  for (int64_t t = 0; t < args.logits.size(0); ++t) {
    const float* logits = args.logits.row(t);
    int32_t* experts = args.experts.i32() + t * args.experts.stride(0);
    if (!args.replayed) {
      std::vector<float> choice(static_cast<size_t>(num_experts));
      for (int64_t e = 0; e < num_experts; ++e) {
        const float value = static_cast<float>(sigmoid(logits[e])) + args.bias.f32()[e];
        choice[static_cast<size_t>(e)] = value > kLowestChoice ? value : kLowestChoice;
      }
      if (args.groups > 1) limit_groups(choice, args.groups, args.groups_kept);
      for (int64_t k = 0; k < slots; ++k) {
        const int64_t best = argmax(choice, 0, num_experts);
        experts[k] = static_cast<int32_t>(best);
        choice[static_cast<size_t>(best)] = kIneligible;
      }
    }
    double sum = 0.0;
    for (int64_t k = 0; k < slots; ++k) sum += sigmoid(logits[experts[k]]);
    const double divisor = args.normalize ? sum + 1e-20 : 1.0;
    for (int64_t k = 0; k < slots; ++k) {
      args.weights.row(t)[k] = static_cast<float>(sigmoid(logits[experts[k]]) / divisor * args.scale);
    }
  }
}

// With w_k = scale s_k / S and S = sum of the s + 1e-20:  ds_k = scale (dw_k - sum_j dw_j s_j / S) / S.
void reference(const RouterBackward& args) {
  CHECK_OK(validate(args));
  const int64_t num_experts = args.logits.size(1), slots = args.experts.size(1);
  for (int64_t t = 0; t < args.logits.size(0); ++t) {
    const int32_t* experts = args.experts.i32() + t * args.experts.stride(0);
    const float* dweights = args.dweights.row(t);
    float* dlogits = args.dlogits.row(t);
    const auto score = [&](int64_t k) { return sigmoid(args.logits.row(t)[experts[k]]); };
    double divisor = 1.0, mean = 0.0;
    if (args.normalize) {
      divisor = 1e-20;
      for (int64_t k = 0; k < slots; ++k) divisor += score(k);
      for (int64_t k = 0; k < slots; ++k) mean += dweights[k] * score(k) / divisor;
    }
    for (int64_t e = 0; e < num_experts; ++e) dlogits[e] = 0.0f;
    for (int64_t k = 0; k < slots; ++k) {
      const double dscore = args.scale * (dweights[k] - mean) / divisor;
      dlogits[experts[k]] += static_cast<float>(dscore * score(k) * (1.0 - score(k)));
    }
  }
}

}  // namespace slipstream::kernels
