// Goal: case C7, number by number.
#include "learner/advantages.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace slipstream::learner {
namespace {

using Samples = std::vector<RewardedSample>;

void expect_near(const std::vector<float>& actual, const std::vector<double>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-6) << i;
}

TEST(Advantages, MeanOnlyAndWithDeviation) {
  const Samples samples = {{"g0", "a", 1}, {"g0", "b", 3}, {"g1", "c", 5}};
  expect_near(grpo_advantages(samples, {}), {-1, 1, 0});
  expect_near(grpo_advantages(samples, {.std = true}), {-0.7071063, 0.7071063, 0});
}

TEST(Advantages, GroupsAreToldApartByIdAlone) {
  // Two groups of the same prompt: within each all rewards are equal.
  expect_near(grpo_advantages(Samples{{"A", "a", 0}, {"A", "b", 0}, {"B", "c", 1}, {"B", "d", 1}}, {}),
              {0, 0, 0, 0});
}

TEST(Advantages, InterleavedArrivalChangesNothing) {
  Samples samples = {
      {"g0", "a", 0.1}, {"g0", "b", 0.7}, {"g0", "c", 0.3}, {"g1", "d", 0.2}, {"g1", "e", 0.9}};
  const std::vector<float> in_order = grpo_advantages(samples, {.std = true});
  const std::vector<size_t> order = {3, 0, 4, 2, 1};
  Samples mixed;
  for (const size_t i : order) mixed.push_back(samples[i]);
  const std::vector<float> out = grpo_advantages(mixed, {.std = true});
  for (size_t i = 0; i < order.size(); ++i) EXPECT_EQ(out[i], in_order[order[i]]);
}

TEST(Advantages, RolloutWithSeveralSamplesCountsOnce) {
  expect_near(grpo_advantages(Samples{{"g", "r0", 1}, {"g", "r0", 1}, {"g", "r0", 1}, {"g", "r1", 0}}, {}),
              {0.5, 0.5, 0.5, -0.5});
}

TEST(Advantages, PaddedRowsWeighTheBaseline) {
  // Rows [0,1,2,3,4,0,1,2] of valid rewards [1,0,0,1,0].
  expect_near(
      grpo_advantages(
          Samples{{"g", "0", 1, 2}, {"g", "1", 0, 2}, {"g", "2", 0, 2}, {"g", "3", 1, 1}, {"g", "4", 0, 1}},
          {}),
      {0.625, -0.375, -0.375, 0.625, -0.375});
}

TEST(Advantages, EqualRewardsGiveExactlyZero) {
  Samples samples;
  const std::string ids = "01234567";
  for (size_t i = 0; i < 8; ++i) samples.push_back({"g", std::string_view(ids).substr(i, 1), 0.1});
  for (const bool std : {false, true}) {
    for (const float advantage : grpo_advantages(samples, {.std = std})) EXPECT_EQ(advantage, 0.0f);
  }
}

}  // namespace
}  // namespace slipstream::learner
