// What is known of one learner step: for the console, metrics.jsonl, TensorBoard and Prometheus.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json_fwd.hpp"

namespace slipstream::model {
class JsonReader;
}

namespace slipstream::learner {

enum class Phase { kWarmup, kRl };
const char* name_of(Phase phase);  // "warmup", "rl"
Phase read_phase(model::JsonReader& json, const char* key);

// What is absent did not occur: missing is not zero.
struct StepReport {
  int64_t step = 0;  // of the whole run, from 1, warm-up included
  Phase phase = Phase::kRl;
  int64_t phase_step = 0;      // from 1
  int64_t phase_steps = 0;     // most there will be
  int32_t policy_version = 0;  // the learner's when the step began: staleness is counted against it
  bool skipped = false;        // a gradient was not finite

  // Of all episodes that finished since the step before, whether they were trained on or not; if the gateway
  // does not say, of the trained ones. The latter alone would mislead: groups that are all right teach
  // nothing and are left out.
  std::optional<double> reward_mean;
  std::optional<double> trained_reward_mean;
  std::map<std::string, double> reward_by_task;  // as reward_mean
  std::optional<double> staleness_mean;          // versions, over trajectories
  std::optional<double>
      mismatch_abs_mean;  // |learner - rollout log-prob| over tokens of exactly these weights
  std::optional<double> mismatch_abs_max;
  std::optional<double> drift_abs_mean;       // over the other tokens
  std::map<int, double> drift_by_age;         // mean by age in versions; 8: 8 and more
  std::optional<double> masked_low_fraction;  // of tokens in the loss
  std::optional<double> masked_high_fraction;
  int64_t masked_low_tokens = 0;  // the same, counted
  int64_t masked_high_tokens = 0;
  int64_t non_finite_tokens = 0;
  std::optional<double>
      demonstration_probability;  // warm-up: mean probability of a whole demonstration, this step

  double loss = 0.0;
  double entropy = 0.0;  // nats a token
  double grad_norm = 0.0;
  double learning_rate = 0.0;
  double expert_load_imbalance = 0.0;
  int64_t trained_tokens = 0;
  int64_t trained_trajectories = 0;

  uint64_t produced = 0, trained = 0, dropped = 0, queued = 0, running = 0;  // the gateway's counts
  std::map<std::string, uint64_t> dropped_by_reason;
  uint64_t generated_tokens = 0;               // by all workers since the gateway started
  std::map<std::string, double> idle_seconds;  // by role, since it started

  double wall_seconds = 0.0;  // of the run, restarts' pauses not included
  double wait_data_seconds = 0.0, train_seconds = 0.0;
  // NaN: the process died before it knew.
  double checkpoint_seconds = 0.0, publish_seconds = 0.0;
};

// A flat object; not-a-number is null, bytes that are no UTF-8 are left to dump().
nlohmann::ordered_json to_json(const StepReport& report);
// One JSON object on one line, without the line's end.
std::string to_json_line(const StepReport& report);
// What to_json() made; a field that is missing or of another kind is json's failure.
StepReport read_report(model::JsonReader& json);

// The numbers of a report by name ("reward/mean", "loss/policy"), for a writer of event files.
using ScalarSink =
    std::function<void(int64_t step, const std::vector<std::pair<std::string, double>>& values)>;
std::vector<std::pair<std::string, double>> scalars_of(const StepReport& report);

}  // namespace slipstream::learner
