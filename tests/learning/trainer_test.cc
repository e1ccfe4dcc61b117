// Goal: the gradient of a step is the derivative of its loss; it does not depend on how samples are split
// into micro-batches; masked tokens, repeated rows and branches count as they should; a gradient that is not
// finite moves nothing.
#include "learner/trainer.h"

#include <cmath>
#include <limits>

#include "gtest/gtest.h"
#include "learner/step_statistics.h"
#include "tests/learning/batches.h"

namespace slipstream::learner {
namespace {

using testing::BatchShape;
using testing::Bench;

constexpr char kFamily[] = "glm5_next";

double norm(const std::vector<float>& values) {
  double sum = 0.0;
  for (const float value : values) sum += double{value} * value;
  return std::sqrt(sum);
}

void expect_close(const std::vector<float>& a, const std::vector<float>& b, double relative) {
  ASSERT_EQ(a.size(), b.size());
  std::vector<float> difference(a.size());
  for (size_t i = 0; i < a.size(); ++i) difference[i] = a[i] - b[i];
  EXPECT_LE(norm(difference), relative * norm(b)) << norm(a) << " against " << norm(b);
  EXPECT_GT(norm(b), 0.0);
}

class TrainerTest : public ::testing::Test {
 protected:
  TrainerTest() { testing::write_model(kFamily, dir.path()); }

  std::vector<float> gradient(const v1::Batch& message, const TrainerOptions& options = {},
                              GradientResult* result = nullptr, int threads = 1) {
    Bench bench(dir.path(), options, kernels::DType::kF32, threads);
    absl::StatusOr<GradientResult> computed = bench.trainer->compute_gradient(
        testing::training_batch(message, bench.config()), options.loss.objective);
    CHECK_OK(computed.status());
    if (result != nullptr) *result = *std::move(computed);
    return testing::flat(bench.trainer->gradients());
  }
  v1::Batch scored_batch(const BatchShape& shape, double noise = 0.15) {
    Bench bench(dir.path());
    v1::Batch batch = testing::make_batch(shape, bench.config().vocab);
    testing::set_rollout_logprobs(*bench.trainer, bench.config(), noise, &batch);
    return batch;
  }

  testing::TemporaryDirectory dir;
};

// Case C8: any split into micro-batches gives the same gradient.
TEST_F(TrainerTest, SplitIntoMicroBatchesChangesNothing) {
  const v1::Batch batch = scored_batch({});
  GradientResult whole_result;
  const std::vector<float> whole = gradient(batch, {}, &whole_result);
  for (const int64_t tokens : {int64_t{1}, int64_t{20}, int64_t{50}}) {
    GradientResult split_result;
    expect_close(gradient(batch, {.loss = {}, .optimizer = {}, .micro_batch_tokens = tokens}, &split_result),
                 whole, 1e-5);
    EXPECT_EQ(split_result.learner_logprob, whole_result.learner_logprob);  // bit for bit
    EXPECT_EQ(split_result.loss, whole_result.loss);
  }
  const std::vector<float> recomputed =
      gradient(batch, {.loss = {}, .optimizer = {}, .micro_batch_tokens = 50, .recompute = true});
  expect_close(recomputed, whole, 1e-5);
  EXPECT_EQ(gradient(batch, {}, nullptr, /*threads=*/2), whole);
  EXPECT_EQ(gradient(batch), whole);
}

// Each normaliser and the entropy bonus: finite differences of loss + entropy_loss along the gradient of head
// and last norm, which no discrete choice of expert or position depends on (the layers' own derivatives:
// tests/property/gradient_test).
TEST_F(TrainerTest, GradientIsTheDerivativeOfTheLoss) {
  v1::Batch batch = scored_batch({});
  *batch.mutable_groups(0)->mutable_trajectories(0)->add_samples() =
      batch.groups(1).trajectories(2).samples(0);      // a branch
  batch.mutable_groups(2)->mutable_rows()->Set(3, 0);  // row 0 twice, trajectory 3 out
  batch.mutable_groups(2)->mutable_trajectories()->RemoveLast();
  for (const Normalizer normalizer : {Normalizer::kTokens, Normalizer::kSequence, Normalizer::kConstant}) {
    TrainerOptions options;
    options.loss.objective = "ppo_clip";  // a true derivative
    options.loss.options = {.clip_low = 0.5, .clip_high = 0.9};
    options.loss.normalizer = normalizer;
    options.loss.normalizer_constant = 50.0;
    options.loss.entropy_bonus = 0.01;
    Bench bench(dir.path(), options);
    const TrainingBatch data = testing::training_batch(batch, bench.config());
    ASSERT_EQ(data.trajectories.size(), 15u);
    CHECK_OK(bench.trainer->compute_gradient(data, "ppo_clip").status());
    std::vector<float> g;
    std::vector<kernels::Tensor> moved;
    for (size_t e = 0; e < bench.trainer->gradients().entries().size(); ++e) {
      const auto& entry = bench.trainer->gradients().entries()[e];
      if (entry.parameter.name != "lm_head.weight" &&
          entry.parameter.name != bench.config().prefix + "norm.weight")
        continue;
      g.insert(g.end(), entry.tensor.f32(), entry.tensor.f32() + entry.tensor.numel());
      moved.push_back(bench.weights->master().store.entries()[e].tensor);
    }
    ASSERT_EQ(moved.size(), 2u);
    const double length = norm(g);
    const auto loss_at = [&](double by) {
      size_t i = 0;
      std::vector<std::vector<float>> before;
      for (const kernels::Tensor& tensor : moved) {
        before.emplace_back(tensor.f32(), tensor.f32() + tensor.numel());
        for (int64_t j = 0; j < tensor.numel(); ++j, ++i)
          tensor.f32()[j] += static_cast<float>(by * g[i] / length);
      }
      const auto result = bench.trainer->compute_gradient(data, "ppo_clip");
      for (size_t e = 0; e < moved.size(); ++e) std::copy(before[e].begin(), before[e].end(), moved[e].f32());
      return result->loss + result->entropy_loss;
    };
    constexpr double kStep = 2e-3;
    EXPECT_NEAR((loss_at(kStep) - loss_at(-kStep)) / (2 * kStep), length, 2e-3 * length);
  }
}

// A trajectory named by two rows counts like two trajectories.
TEST_F(TrainerTest, RepeatedRowsWeighTwice) {
  v1::Batch twice = scored_batch({.groups = 2});
  v1::Batch copied = twice;
  twice.mutable_groups(0)->add_rows(1);
  v1::Group& group = *copied.mutable_groups(0);
  v1::Trajectory copy = group.trajectories(1);
  copy.set_rollout_id("a copy of it");
  *group.add_trajectories() = copy;
  group.add_rows(4);
  GradientResult a, b;
  const std::vector<float> weighted = gradient(twice, {}, &a), repeated = gradient(copied, {}, &b);
  expect_close(weighted, repeated, 1e-5);
  EXPECT_NEAR(a.loss, b.loss, 1e-9);
}

TEST_F(TrainerTest, MaskedTokensReachNothing) {
  v1::Batch clean = scored_batch({}), dirty = clean;
  for (v1::Batch* batch : {&clean, &dirty}) {
    for (v1::Group& group : *batch->mutable_groups()) {
      for (v1::Trajectory& trajectory : *group.mutable_trajectories()) {
        v1::Sample& sample = *trajectory.mutable_samples(0);
        for (int i = 0; i < sample.action_logprobs_size(); ++i) sample.add_action_masked(i % 3 == 1);
        for (int i = 1; batch == &dirty && i < sample.action_logprobs_size(); i += 3) {
          sample.set_action_logprobs(i, i % 2 == 0 ? std::numeric_limits<float>::quiet_NaN()
                                                   : -std::numeric_limits<float>::infinity());
        }
      }
    }
  }
  EXPECT_EQ(gradient(clean), gradient(dirty));
  // A non-finite log-prob that nobody marked is masked all the same (case C10).
  v1::Batch unmarked = dirty;
  for (v1::Group& group : *unmarked.mutable_groups()) {
    for (v1::Trajectory& trajectory : *group.mutable_trajectories())
      trajectory.mutable_samples(0)->clear_action_masked();
  }
  EXPECT_EQ(gradient(unmarked), gradient(dirty));
}

TEST_F(TrainerTest, EverythingMaskedGivesZeroAndMovesNothing) {
  v1::Batch batch = scored_batch({});
  for (v1::Group& group : *batch.mutable_groups()) {
    for (v1::Trajectory& trajectory : *group.mutable_trajectories()) {
      v1::Sample& sample = *trajectory.mutable_samples(0);
      for (int i = 0; i < sample.action_logprobs_size(); ++i) sample.add_action_masked(true);
    }
  }
  Bench bench(dir.path());
  const std::string before = testing::master_bytes(*bench.weights);
  const auto result =
      bench.trainer->step(testing::training_batch(batch, bench.config()), "double_sided", 1e-2);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->gradient.loss, 0.0);
  EXPECT_EQ(result->grad_norm, 0.0);
  EXPECT_FALSE(result->updated || result->skipped);
  EXPECT_EQ(testing::master_bytes(*bench.weights), before);
}

// Log-ratios of +100 are masked; no infinity appears.
TEST_F(TrainerTest, HugeRatiosAreMasked) {
  v1::Batch batch = scored_batch({}, 0.0);
  v1::Sample& sample = *batch.mutable_groups(0)->mutable_trajectories(0)->mutable_samples(0);
  sample.set_action_logprobs(0, -100.0f);
  GradientResult result;
  for (const float value : gradient(batch, {}, &result)) ASSERT_TRUE(std::isfinite(value));
  EXPECT_EQ(result.tokens[0][0].fate, TokenFate::kMaskedHigh);
  EXPECT_TRUE(std::isfinite(result.loss));
}

TEST_F(TrainerTest, NonFiniteGradientIsSkippedAndNamed) {
  const v1::Batch message = scored_batch({});
  Bench bench(dir.path());
  const TrainingBatch batch = testing::training_batch(message, bench.config());
  ASSERT_TRUE(bench.trainer->step(batch, "double_sided", 1e-3)->updated);
  // A weight that only the backward of one sample's tokens meets would be subtle; a NaN norm weight breaks
  // every log-prob.
  float* const norm_weight = bench.weights->master().store.tensors().norm.f32();
  const float before = norm_weight[0];
  norm_weight[0] = std::numeric_limits<float>::quiet_NaN();
  const std::string bytes = testing::master_bytes(*bench.weights);
  const auto broken = bench.trainer->step(batch, "double_sided", 1e-3);
  ASSERT_TRUE(broken.ok());
  EXPECT_TRUE(broken->skipped);
  EXPECT_FALSE(broken->offending.empty());
  EXPECT_EQ(testing::master_bytes(*bench.weights), bytes);
  norm_weight[0] = before;
  EXPECT_TRUE(bench.trainer->step(batch, "double_sided", 1e-3)->updated);
  // An overflow of the gradient alone names its parameter.
  TrainerOptions options;
  options.loss.normalizer = Normalizer::kConstant;
  options.loss.normalizer_constant = 1e-42;
  Bench huge(dir.path(), options);
  const auto overflow = huge.trainer->step(batch, "sft", 1e-3);
  ASSERT_TRUE(overflow.ok());
  EXPECT_TRUE(overflow->skipped);
  EXPECT_NE(overflow->offending.find("weight"), std::string::npos) << overflow->offending;
}

// Weights that are no numbers any more are an error, before anybody could save or publish them.
TEST_F(TrainerTest, AnUpdateThatDivergesIsAnError) {
  TrainerOptions options;
  options.optimizer.weight_decay = 1e45;
  Bench bench(dir.path(), options);
  const auto result =
      bench.trainer->step(testing::training_batch(scored_batch({}), bench.config()), "double_sided", 1e-3);
  EXPECT_TRUE(absl::IsDataLoss(result.status())) << result.status();
  EXPECT_NE(result.status().message().find("the policy has diverged"), absl::string_view::npos) << result.status();
}

// Training on demonstrations makes them probable, in fp32 and with bf16 weights.
TEST_F(TrainerTest, LearnsDemonstrations) {
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBf16}) {
    Bench bench(dir.path(), {}, dtype, 2);
    v1::Batch batch;
    for (uint64_t i = 0; i < 6; ++i)
      *batch.add_groups() = testing::make_demonstration({}, bench.config().vocab, i);
    const TrainingBatch data =
        testing::training_batch(batch, bench.config(), v1::TRAJECTORY_KIND_DEMONSTRATION);
    double first = 0.0, last = 0.0;
    for (int step = 0; step < 40; ++step) {
      const auto result = bench.trainer->step(data, "sft", 5e-3);
      ASSERT_TRUE(result.ok() && result->updated);
      last = result->gradient.loss;
      if (step == 0) first = last;
    }
    EXPECT_LT(last, 0.1 * first);
  }
}

// Mismatch is what exactly these weights produced; the rest is drift, by age. Missing is not zero.
TEST_F(TrainerTest, MismatchAndDriftAreApart) {
  v1::Batch batch = scored_batch({.groups = 2, .group_size = 2, .policy_version = 5}, 0.0);
  v1::Sample& sample = *batch.mutable_groups(0)->mutable_trajectories(0)->mutable_samples(0);
  const float exact = sample.action_logprobs(0);
  sample.set_action_policy_versions(0, 3);
  sample.set_action_context_versions(0, 3);
  sample.set_action_logprobs(0, exact - 0.25f);
  sample.set_action_context_versions(1, 4);  // sampled by version 5 over rows that version 4 computed
  sample.set_action_logprobs(1, sample.action_logprobs(1) - 0.5f);
  Bench bench(dir.path());
  const TrainingBatch data = testing::training_batch(batch, bench.config());
  StepResult result;
  result.gradient = *bench.trainer->compute_gradient(data, "double_sided");
  StepReport report;
  fill_report(data, result, {.policy_version = 5, .exactly = true}, &report);
  EXPECT_EQ(report.mismatch_abs_mean, 0.0);
  EXPECT_EQ(report.mismatch_abs_max, 0.0);
  EXPECT_NEAR(*report.drift_abs_mean, 0.375, 1e-6);
  EXPECT_NEAR(report.drift_by_age.at(2), 0.25, 1e-6);
  EXPECT_NEAR(report.drift_by_age.at(1), 0.5, 1e-6);
  EXPECT_GT(*report.masked_high_fraction, 0.0);
  StepReport moved;
  fill_report(data, result, {.policy_version = 5, .exactly = false}, &moved);
  EXPECT_FALSE(moved.mismatch_abs_mean.has_value());
  EXPECT_TRUE(moved.drift_abs_mean.has_value());
}

TEST_F(TrainerTest, MalformedTrajectoriesAreRefusedOneByOne) {
  Bench bench(dir.path());
  v1::Batch batch = testing::make_batch({}, bench.config().vocab);
  const auto trajectory = [&](int group, int index) {
    return batch.mutable_groups(group)->mutable_trajectories(index);
  };
  trajectory(0, 0)->mutable_samples(0)->add_ids(1);
  trajectory(0, 1)->mutable_samples(0)->mutable_action_logprobs()->RemoveLast();
  trajectory(1, 0)->mutable_samples(0)->set_ids(2, static_cast<int32_t>(bench.config().vocab));
  trajectory(1, 1)->set_reward(std::numeric_limits<double>::quiet_NaN());
  trajectory(2, 0)->mutable_samples(0)->mutable_spans(0)->set_length(-1);
  trajectory(2, 1)->clear_samples();
  trajectory(2, 2)->mutable_samples(0)->mutable_spans(0)->set_kind(v1::SPAN_KIND_ACTION);
  batch.mutable_groups(3)->add_rows(99);
  const TrainingBatch data = testing::training_batch(batch, bench.config());
  EXPECT_EQ(data.refused.at("malformed").size(), 11u);
  EXPECT_EQ(data.trajectories.size(), 5u);
  EXPECT_TRUE(bench.trainer->step(data, "double_sided", 1e-3).ok());
}

}  // namespace
}  // namespace slipstream::learner
