#include "learner/step_report.h"

#include <cmath>
#include <limits>

#include "absl/strings/numbers.h"
#include "model/json_reader.h"
#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

// Calls field(key, member) for each field, in the order of metrics.jsonl. The one list: for writing and for
// reading.
template <class Report, class Field>
void for_each_field(Report& r, Field field) {
  field("step", r.step);
  field("policy_version", r.policy_version);
  field("reward_mean", r.reward_mean);
  field("staleness_mean", r.staleness_mean);
  field("mismatch_abs_mean", r.mismatch_abs_mean);
  field("mismatch_abs_max", r.mismatch_abs_max);
  field("drift_abs_mean", r.drift_abs_mean);
  field("masked_low_fraction", r.masked_low_fraction);
  field("masked_high_fraction", r.masked_high_fraction);
  field("grad_norm", r.grad_norm);
  field("trained_tokens", r.trained_tokens);
  field("produced", r.produced);
  field("trained", r.trained);
  field("dropped", r.dropped);
  field("queued", r.queued);
  field("wall_seconds", r.wall_seconds);
  field("phase", r.phase);
  field("phase_step", r.phase_step);
  field("phase_steps", r.phase_steps);
  field("skipped", r.skipped);
  field("loss", r.loss);
  field("entropy", r.entropy);
  field("learning_rate", r.learning_rate);
  field("trained_reward_mean", r.trained_reward_mean);
  field("reward_by_task", r.reward_by_task);
  field("drift_by_age", r.drift_by_age);
  field("non_finite_tokens", r.non_finite_tokens);
  field("demonstration_probability", r.demonstration_probability);
  field("expert_load_imbalance", r.expert_load_imbalance);
  field("trained_trajectories", r.trained_trajectories);
  field("dropped_by_reason", r.dropped_by_reason);
  field("running", r.running);
  field("generated_tokens", r.generated_tokens);
  field("idle_seconds", r.idle_seconds);
  field("wait_data_seconds", r.wait_data_seconds);
  field("train_seconds", r.train_seconds);
  field("checkpoint_seconds", r.checkpoint_seconds);
  field("publish_seconds", r.publish_seconds);
}

struct Writer {
  ordered_json* json;

  template <class T>
  void operator()(const char* key, const T& value) const {
    (*json)[key] = value;
  }
  void operator()(const char* key, Phase phase) const { (*json)[key] = name_of(phase); }
  void operator()(const char* key, const std::optional<double>& value) const {
    (*json)[key] = value ? ordered_json(*value) : ordered_json(nullptr);
  }
  void operator()(const char* key, double value) const {
    (*json)[key] = std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
  }
  void operator()(const char* key, const std::map<int, double>& values) const {
    ordered_json& object = (*json)[key] = ordered_json::object();
    for (const auto& [number, value] : values) object[std::to_string(number)] = value;
  }
};

struct Reader {
  model::JsonReader& json;

  void operator()(const char* key, int64_t& value) const { value = json.require_int(key, 0, kInt64Max); }
  void operator()(const char* key, int32_t& value) const {
    value = static_cast<int32_t>(json.require_int(key, 0, std::numeric_limits<int32_t>::max()));
  }
  void operator()(const char* key, uint64_t& value) const {
    value = static_cast<uint64_t>(json.require_int(key, 0, kInt64Max));
  }
  void operator()(const char* key, bool& value) const {
    if (!json.has(key)) json.fail(key, "true or false");
    value = json.get_bool(key, false);
  }
  void operator()(const char* key, Phase& value) const { value = read_phase(json, key); }
  void operator()(const char* key, double& value) const { value = number(key).value_or(std::nan("")); }
  void operator()(const char* key, std::optional<double>& value) const { value = number(key); }
  void operator()(const char* key, std::map<std::string, double>& values) const {
    each(key, [&](const std::string& name, const ordered_json& value) { values[name] = number_of(value); });
  }
  void operator()(const char* key, std::map<std::string, uint64_t>& values) const {
    each(key, [&](const std::string& name, const ordered_json& value) {
      if (!value.is_number_unsigned()) return json.fail(key, "counts");
      values[name] = value.get<uint64_t>();
    });
  }
  void operator()(const char* key, std::map<int, double>& values) const {
    each(key, [&](const std::string& name, const ordered_json& value) {
      int age = 0;
      if (!absl::SimpleAtoi(name, &age)) return json.fail(key, "ages");
      values[age] = number_of(value);
    });
  }

 private:
  std::optional<double> number(const char* key) const {
    if (!json.contains(key)) json.fail(key, "a number or null");
    if (!json.has(key)) return std::nullopt;
    return json.require_number(key, -std::numeric_limits<double>::max());
  }
  static double number_of(const ordered_json& value) {
    return value.is_number() ? value.get<double>() : std::nan("");
  }
  template <class Take>
  void each(const char* key, Take take) const {
    const ordered_json* object = json.find(key);
    if (object == nullptr || !object->is_object()) return json.fail(key, "an object of numbers");
    for (const auto& [name, value] : object->items()) {
      if (!value.is_number() && !value.is_null()) return json.fail(key, "an object of numbers");
      take(name, value);
    }
  }
};

}  // namespace

const char* name_of(Phase phase) { return phase == Phase::kWarmup ? "warmup" : "rl"; }

Phase read_phase(model::JsonReader& json, const char* key) {
  const std::string name = json.require_string(key);
  if (name != "warmup" && name != "rl") json.fail(key, "warmup or rl");
  return name == "warmup" ? Phase::kWarmup : Phase::kRl;
}

ordered_json to_json(const StepReport& report) {
  ordered_json json = ordered_json::object();
  for_each_field(report, Writer{&json});
  return json;
}

std::string to_json_line(const StepReport& report) {
  return to_json(report).dump(-1, ' ', false,
                              ordered_json::error_handler_t::replace);  // task names may be any bytes
}

StepReport read_report(model::JsonReader& json) {
  StepReport report;
  for_each_field(report, Reader{json});
  return report;
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
      {"trajectories/produced", static_cast<double>(r.produced)},
      {"trajectories/trained", static_cast<double>(r.trained)},
      {"trajectories/dropped", static_cast<double>(r.dropped)},
      {"trajectories/queued", static_cast<double>(r.queued)},
  };
  const auto add = [&](const char* name, const std::optional<double>& value) {
    if (value) out.emplace_back(name, *value);
  };
  if (!std::isnan(r.checkpoint_seconds)) out.emplace_back("time/checkpoint_seconds", r.checkpoint_seconds);
  if (!std::isnan(r.publish_seconds)) out.emplace_back("time/publish_seconds", r.publish_seconds);
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
