#include "learner/step_report.h"

#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

nlohmann::ordered_json optional_json(const std::optional<double>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(nullptr);
}

}  // namespace

const char* name_of(Phase phase) { return phase == Phase::kWarmup ? "warmup" : "rl"; }

std::string to_json_line(const StepReport& r) {
  nlohmann::ordered_json drift_by_age = nlohmann::ordered_json::object();
  for (const auto& [age, mean] : r.drift_by_age) drift_by_age[std::to_string(age)] = mean;
  const nlohmann::ordered_json json = {
      {"step", r.step},
      {"policy_version", r.policy_version},
      {"reward_mean", optional_json(r.reward_mean)},
      {"staleness_mean", optional_json(r.staleness_mean)},
      {"mismatch_abs_mean", optional_json(r.mismatch_abs_mean)},
      {"mismatch_abs_max", optional_json(r.mismatch_abs_max)},
      {"drift_abs_mean", optional_json(r.drift_abs_mean)},
      {"masked_low_fraction", optional_json(r.masked_low_fraction)},
      {"masked_high_fraction", optional_json(r.masked_high_fraction)},
      {"grad_norm", r.grad_norm},
      {"trained_tokens", r.trained_tokens},
      {"produced", r.produced},
      {"trained", r.trained},
      {"dropped", r.dropped},
      {"queued", r.queued},
      {"wall_seconds", r.wall_seconds},
      {"phase", name_of(r.phase)},
      {"phase_step", r.phase_step},
      {"phase_steps", r.phase_steps},
      {"skipped", r.skipped},
      {"loss", r.loss},
      {"entropy", r.entropy},
      {"learning_rate", r.learning_rate},
      {"trained_reward_mean", optional_json(r.trained_reward_mean)},
      {"reward_by_task", r.reward_by_task},
      {"drift_by_age", drift_by_age},
      {"non_finite_tokens", r.non_finite_tokens},
      {"demonstration_probability", optional_json(r.demonstration_probability)},
      {"expert_load_imbalance", r.expert_load_imbalance},
      {"trained_trajectories", r.trained_trajectories},
      {"dropped_by_reason", r.dropped_by_reason},
      {"running", r.running},
      {"generated_tokens", r.generated_tokens},
      {"idle_seconds", r.idle_seconds},
      {"wait_data_seconds", r.wait_data_seconds},
      {"train_seconds", r.train_seconds},
      {"checkpoint_seconds", r.checkpoint_seconds},
      {"publish_seconds", r.publish_seconds},
  };
  return json.dump(-1, ' ', false,
                   nlohmann::json::error_handler_t::replace);  // task names may be any bytes; NaN is null
}

std::vector<std::pair<std::string, double>> scalars_of(const StepReport& r) {
  std::vector<std::pair<std::string, double>> out = {
      {"loss/policy", r.loss},
      {"train/grad_norm", r.grad_norm},
      {"train/learning_rate", r.learning_rate},
      {"train/entropy", r.entropy},
      {"train/tokens", static_cast<double>(r.trained_tokens)},
      {"train/policy_version", static_cast<double>(r.policy_version)},
      {"time/wait_for_batch_seconds", r.wait_data_seconds},
      {"time/train_seconds", r.train_seconds},
      {"time/checkpoint_seconds", r.checkpoint_seconds},
      {"time/publish_seconds", r.publish_seconds},
      {"trajectories/produced", static_cast<double>(r.produced)},
      {"trajectories/trained", static_cast<double>(r.trained)},
      {"trajectories/dropped", static_cast<double>(r.dropped)},
      {"trajectories/queued", static_cast<double>(r.queued)},
  };
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) out.emplace_back(name, *value);
  };
  add("reward/mean", r.reward_mean);
  add("reward/trained_mean", r.trained_reward_mean);
  add("staleness/mean_versions", r.staleness_mean);
  add("logprob_diff/mismatch_mean", r.mismatch_abs_mean);
  add("logprob_diff/mismatch_max", r.mismatch_abs_max);
  add("logprob_diff/drift_mean", r.drift_abs_mean);
  add("masked/low_fraction", r.masked_low_fraction);
  add("masked/high_fraction", r.masked_high_fraction);
  add("warmup/demonstration_probability", r.demonstration_probability);
  for (const auto& [task, mean] : r.reward_by_task) out.emplace_back("reward_by_task/" + task, mean);
  for (const auto& [role, seconds] : r.idle_seconds) out.emplace_back("idle_seconds/" + role, seconds);
  return out;
}

}  // namespace slipstream::learner
