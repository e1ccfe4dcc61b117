#include "learner/step_statistics.h"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace slipstream::learner {
namespace {

constexpr int kOldest = 8;  // ages from here on share a bin

// One token in the loss with finite log-probs.
struct TokenView {
  TokenLoss loss;
  double difference = 0.0;  // |learner - rollout|
  bool own = false;         // sampled, context included, by exactly the learner's weights
  int age = 0;              // versions
};

// Calls each(view) for rollout tokens in the loss; demonstrations have none.
template <class F>
void for_each_token(const TrainingBatch& batch, const StepResult& result, const ScoredWith& weights, F each) {
  for (size_t s = 0; s < batch.samples.size(); ++s) {
    const TrainingSample& sample = batch.samples[s];
    if (sample.rollout_logprob.empty()) continue;
    for (size_t i = 0; i < sample.positions.size(); ++i) {
      const TokenLoss& token = result.gradient.tokens[s][i];
      if (token.fate == TokenFate::kUnselected || token.fate == TokenFate::kNonFinite) continue;
      const int32_t oldest = std::min(sample.policy_version[i], sample.context_version[i]);
      const int32_t newest = std::max(sample.policy_version[i], sample.context_version[i]);
      each(TokenView{
          .loss = token,
          .difference =
              std::abs(double{result.gradient.learner_logprob[s][i]} - double{sample.rollout_logprob[i]}),
          .own = weights.exactly && oldest == weights.policy_version && newest == weights.policy_version,
          .age = std::max(0, weights.policy_version - oldest)});
    }
  }
}

struct Mean {
  double sum = 0.0;
  int64_t count = 0;
  void add(double value) { sum += value, ++count; }
  std::optional<double> value() const {
    return count == 0 ? std::nullopt : std::optional<double>(sum / static_cast<double>(count));
  }
};

void fill_rewards(const TrainingBatch& batch, int32_t policy_version, StepReport* report) {
  Mean reward, staleness;
  std::map<std::string, Mean> by_task;
  for (const TrainingTrajectory& trajectory : batch.trajectories) {
    const v1::Trajectory& message = *trajectory.message;
    reward.add(message.reward());
    by_task[message.task()].add(message.reward());
    staleness.add(policy_version - message.min_policy_version());
  }
  report->reward_mean = report->trained_reward_mean = reward.value();
  report->staleness_mean = staleness.value();
  for (const auto& [task, mean] : by_task) report->reward_by_task[task] = *mean.value();
}

}  // namespace

void fill_report(const TrainingBatch& batch, const StepResult& result, const ScoredWith& weights,
                 StepReport* report) {
  Mean mismatch, drift;
  std::map<int, Mean> drift_by_age;
  double mismatch_max = 0.0;
  int64_t low = 0, high = 0, tokens = 0;
  for_each_token(batch, result, weights, [&](const TokenView& token) {
    ++tokens;
    low += token.loss.fate == TokenFate::kMaskedLow;
    high += token.loss.fate == TokenFate::kMaskedHigh;
    if (token.own) {
      mismatch.add(token.difference);
      mismatch_max = std::max(mismatch_max, token.difference);
    } else {
      drift.add(token.difference);
      drift_by_age[std::min(token.age, kOldest)].add(token.difference);
    }
  });
  report->mismatch_abs_mean = mismatch.value();
  if (mismatch.count > 0) report->mismatch_abs_max = mismatch_max;
  report->drift_abs_mean = drift.value();
  for (const auto& [age, mean] : drift_by_age) report->drift_by_age[age] = *mean.value();
  if (tokens > 0) {
    report->masked_low_tokens = low;
    report->masked_high_tokens = high;
    report->masked_low_fraction = static_cast<double>(low) / static_cast<double>(tokens);
    report->masked_high_fraction = static_cast<double>(high) / static_cast<double>(tokens);
  }
  for (size_t s = 0; s < batch.samples.size(); ++s) {
    for (size_t i = 0; i < batch.samples[s].positions.size(); ++i) {
      const bool bad =
          result.gradient.tokens[s][i].fate == TokenFate::kNonFinite ||
          (!batch.samples[s].rollout_logprob.empty() && !std::isfinite(batch.samples[s].rollout_logprob[i]));
      report->non_finite_tokens += bad;
    }
  }
  if (report->phase == Phase::kRl) fill_rewards(batch, weights.policy_version, report);
  report->skipped = result.skipped;
  report->loss = result.gradient.loss;
  report->entropy = result.gradient.entropy_mean;
  report->grad_norm = result.grad_norm;
  report->learning_rate = result.learning_rate;
  report->expert_load_imbalance = result.gradient.expert_load_imbalance;
  report->trained_tokens = result.gradient.trained_tokens;
  report->trained_trajectories = static_cast<int64_t>(batch.trajectories.size());
}

void record_metrics(const TrainingBatch& batch, const StepResult& result, const ScoredWith& weights,
                    const StepReport& report, Metrics& metrics) {
  for_each_token(batch, result, weights, [&](const TokenView& token) {
    metrics.observe(metric::kImportanceRatio, token.loss.ratio);
    if (token.own) metrics.observe(metric::kLogprobDiffHistogram, token.difference);
  });
  metrics.add(metric::kMaskedTokens, static_cast<double>(report.masked_low_tokens), {"low"});
  metrics.add(metric::kMaskedTokens, static_cast<double>(report.masked_high_tokens), {"high"});
  if (report.mismatch_abs_mean) {
    metrics.set(metric::kLogprobDiff, *report.mismatch_abs_mean);
    metrics.set(metric::kMilesLogprobDiff, *report.mismatch_abs_mean);
    metrics.set(metric::kLogprobDiffMax, *report.mismatch_abs_max);
  }
  if (report.drift_abs_mean) metrics.set(metric::kDrift, *report.drift_abs_mean);
  for (const auto& [age, mean] : report.drift_by_age)
    metrics.set(metric::kDriftByAge, mean, {std::to_string(age)});
  if (report.phase == Phase::kRl) {
    for (const TrainingTrajectory& trajectory : batch.trajectories) {
      metrics.observe(metric::kStaleness, weights.policy_version - trajectory.message->min_policy_version());
    }
    if (report.staleness_mean) metrics.set(metric::kMilesStaleness, *report.staleness_mean);
    if (report.trained_reward_mean) metrics.set(metric::kMilesReward, *report.trained_reward_mean);
  }
  if (report.non_finite_tokens > 0)
    metrics.add(metric::kNonFiniteLogprobs, static_cast<double>(report.non_finite_tokens));
  if (report.skipped) metrics.add(metric::kSkippedSteps, 1);
  metrics.observe(metric::kTrainStepSeconds, report.train_seconds);
  metrics.add(metric::kTrainTokens, static_cast<double>(report.trained_tokens));
  metrics.add(metric::kIdleSeconds, report.wait_data_seconds, {"learner"});
  metrics.set(metric::kLoss, report.loss, {report.phase == Phase::kWarmup ? "sft" : "policy"});
  metrics.set(metric::kLoss, result.gradient.entropy_loss, {"entropy"});
  metrics.set(metric::kLearningRate, report.learning_rate);
  if (std::isfinite(report.grad_norm)) metrics.set(metric::kGradNorm, report.grad_norm);
  if (report.expert_load_imbalance > 0.0)
    metrics.set(metric::kExpertLoadImbalance, report.expert_load_imbalance);
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  metrics.set(metric::kLastStepTimestamp, std::chrono::duration<double>(now).count());
}

}  // namespace slipstream::learner
