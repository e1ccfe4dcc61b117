#include "learner/training_batch.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/escaping.h"

namespace slipstream::learner {
namespace {

absl::Status column_size(const char* name, int size, int64_t actions, bool optional) {
  if (size == actions || (optional && size == 0)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", size, " entries, expected ", actions));
}

// Spans cover the ids, and positions lists their action tokens.
absl::Status read_spans(const v1::Sample& sample, std::vector<int32_t>* positions) {
  int64_t at = 0;
  for (const v1::Span& span : sample.spans()) {
    if (span.length() < 0)
      return absl::InvalidArgumentError(absl::StrCat("spans: length ", span.length(), ", expected >= 0"));
    if (at + span.length() > sample.ids_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("spans: ", at + span.length(), " tokens, expected ", sample.ids_size()));
    }
    for (int64_t i = at; span.kind() == v1::SPAN_KIND_ACTION && i < at + span.length(); ++i) {
      positions->push_back(static_cast<int32_t>(i));
    }
    at += span.length();
  }
  if (at != sample.ids_size())
    return absl::InvalidArgumentError(absl::StrCat("spans: ", at, " tokens, expected ", sample.ids_size()));
  if (!positions->empty() && positions->front() == 0) {
    return absl::InvalidArgumentError("spans: an action token at position 0, which has no context");
  }
  return absl::OkStatus();
}

absl::Status check_ids(const v1::Sample& sample, const TrainingBatchOptions& options) {
  if (sample.ids_size() > options.max_positions) {
    return absl::InvalidArgumentError(
        absl::StrCat("ids: ", sample.ids_size(), ", expected at most ", options.max_positions));
  }
  for (int i = 0; i < sample.ids_size(); ++i) {
    if (sample.ids(i) < 0 || sample.ids(i) >= options.vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat("ids[", i, "]: ", sample.ids(i), ", expected 0..", options.vocab - 1));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<TrainingSample> read_sample(const v1::Sample& sample, const v1::Trajectory& trajectory,
                                           const TrainingBatchOptions& options) {
  TrainingSample out;
  RETURN_IF_ERROR(check_ids(sample, options));
  RETURN_IF_ERROR(read_spans(sample, &out.positions));
  const int64_t actions = static_cast<int64_t>(out.positions.size());
  const bool demonstration = options.kind == v1::TRAJECTORY_KIND_DEMONSTRATION;
  RETURN_IF_ERROR(column_size("action_logprobs", sample.action_logprobs_size(), actions, demonstration));
  RETURN_IF_ERROR(
      column_size("action_policy_versions", sample.action_policy_versions_size(), actions, demonstration));
  RETURN_IF_ERROR(
      column_size("action_context_versions", sample.action_context_versions_size(), actions, true));
  RETURN_IF_ERROR(column_size("action_masked", sample.action_masked_size(), actions, true));
  const float temperature = trajectory.sampling().temperature();
  if (!std::isfinite(temperature) || temperature < 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat("sampling.temperature: ", temperature, ", expected >= 0"));
  }
  out.temperature = temperature > 0.0f ? temperature : 1.0f;  // greedy log-probs are under softmax(logits)
  out.ids.assign(sample.ids().begin(), sample.ids().end());
  out.selected.assign(static_cast<size_t>(actions), 1);
  for (int i = 0; i < sample.action_masked_size(); ++i) {
    if (sample.action_masked(i)) out.selected[static_cast<size_t>(i)] = 0;
  }
  if (demonstration) return out;
  out.rollout_logprob.assign(sample.action_logprobs().begin(), sample.action_logprobs().end());
  out.policy_version.assign(sample.action_policy_versions().begin(), sample.action_policy_versions().end());
  const auto& context = sample.action_context_versions_size() > 0 ? sample.action_context_versions()
                                                                  : sample.action_policy_versions();
  out.context_version.assign(context.begin(), context.end());
  for (size_t i = 0; i < out.selected.size(); ++i) {
    if (!std::isfinite(out.rollout_logprob[i]))
      out.selected[i] = 0;  // the gateway marks these too; a log-prob is not trusted
  }
  return out;
}

// Appends the trajectory and its samples, or nothing.
absl::Status add_trajectory(const v1::Trajectory& message, int weight, const TrainingBatchOptions& options,
                            TrainingBatch* batch) {
  if (message.kind() != options.kind)
    return absl::InvalidArgumentError(absl::StrCat("kind: ", message.kind(), ", expected ", options.kind));
  if (!std::isfinite(message.reward()))
    return absl::InvalidArgumentError(
        absl::StrCat("reward: ", message.reward(), ", expected a finite number"));
  if (weight == 0) return absl::InvalidArgumentError("in no row of its group");
  TrainingTrajectory trajectory{
      .message = &message, .weight = weight, .advantage = 0.0f, .num_selected = 0, .samples = {}};
  std::vector<TrainingSample> samples;
  for (int i = 0; i < message.samples_size(); ++i) {
    absl::StatusOr<TrainingSample> sample = read_sample(message.samples(i), message, options);
    if (!sample.ok())
      return absl::InvalidArgumentError(absl::StrCat("samples[", i, "].", sample.status().message()));
    sample->trajectory = static_cast<int64_t>(batch->trajectories.size());
    trajectory.num_selected += sample->num_selected();
    trajectory.samples.push_back(static_cast<int64_t>(batch->samples.size() + samples.size()));
    samples.push_back(*std::move(sample));
  }
  if (samples.empty()) return absl::InvalidArgumentError("samples: none, expected at least one");
  batch->trajectories.push_back(std::move(trajectory));
  std::move(samples.begin(), samples.end(), std::back_inserter(batch->samples));
  return absl::OkStatus();
}

// How often each trajectory of the group stands in its rows; all zero when the rows make no sense.
std::vector<int> row_weights(const v1::Group& group) {
  const int count = group.trajectories_size();
  if (group.rows_size() == 0) return std::vector<int>(static_cast<size_t>(count), 1);
  std::vector<int> weights(static_cast<size_t>(count), 0);
  for (const int32_t row : group.rows()) {
    if (row < 0 || row >= count) return std::vector<int>(static_cast<size_t>(count), 0);
    ++weights[static_cast<size_t>(row)];
  }
  return weights;
}

void set_advantages(const TrainingBatchOptions& options, TrainingBatch* batch) {
  std::vector<RewardedSample> rewards;
  for (const TrainingTrajectory& trajectory : batch->trajectories) {
    const v1::Trajectory& message = *trajectory.message;
    rewards.push_back({message.group_id(), message.rollout_id(), message.reward(), trajectory.weight});
  }
  const std::vector<float> advantages = grpo_advantages(rewards, options.advantages);
  for (size_t i = 0; i < advantages.size(); ++i) batch->trajectories[i].advantage = advantages[i];
}

}  // namespace

int64_t TrainingSample::num_selected() const {
  return std::count(selected.begin(), selected.end(), uint8_t{1});
}

int64_t TrainingBatch::num_tokens() const {
  int64_t tokens = 0;
  for (const TrainingSample& sample : samples) tokens += static_cast<int64_t>(sample.ids.size());
  return tokens;
}

std::vector<std::string> TrainingBatch::rollout_ids() const {
  std::vector<std::string> ids;
  for (const TrainingTrajectory& trajectory : trajectories) ids.push_back(trajectory.message->rollout_id());
  return ids;
}

TrainingBatch make_training_batch(const v1::Batch& message, const TrainingBatchOptions& options,
                                  const Logger& log) {
  TrainingBatch batch;
  std::set<std::string> seen;
  for (const v1::Group& group : message.groups()) {
    const std::vector<int> weights = row_weights(group);
    for (int i = 0; i < group.trajectories_size(); ++i) {
      const v1::Trajectory& trajectory = group.trajectories(i);
      const std::string& id = trajectory.rollout_id();
      if (!seen.insert(id).second || (options.trained != nullptr && options.trained->contains(id))) {
        ++batch.repeated;
        continue;
      }
      const absl::Status added = add_trajectory(trajectory, weights[static_cast<size_t>(i)], options, &batch);
      if (added.ok()) continue;
      log->warn("trajectory {} refused: {}", absl::CHexEscape(id), std::string(added.message()));
      batch.refused["malformed"].push_back(id);
    }
  }
  set_advantages(options, &batch);
  return batch;
}

}  // namespace slipstream::learner
