#include "gateway/demonstrations.h"

#include <algorithm>

#include "gateway/groups.h"

namespace slipstream::gateway {
namespace {
constexpr int kAttemptsMax = 100;  // of one demonstration, before the learner is told
}  // namespace

Demonstrations::Demonstrations(uint64_t seed, std::string run_id, const TaskSchedule& schedule)
    : seed_(seed), run_id_(std::move(run_id)), schedule_(schedule) {}

void Demonstrations::request(int64_t step, int count) {
  std::erase_if(steps_, [&](const auto& entry) {
    return (entry.first != step && entry.first != step + 1) || static_cast<int>(entry.second.slots.size()) != count ||
           !entry.second.failure.empty();
  });
  for (const int64_t wanted : {step, step + 1}) steps_.try_emplace(wanted, Step{std::vector<Slot>(count), {}});
}

void Demonstrations::clear() { steps_.clear(); }

EpisodePlan Demonstrations::plan(int64_t step, int index, int attempt, const ScheduledTask& task) const {
  EpisodePlan out;
  out.rollout_id = absl::StrCat(run_id_, "-demo", step, "-", index);
  if (attempt > 0) absl::StrAppend(&out.rollout_id, "-r", attempt);
  out.group_id = out.rollout_id;
  out.group_number = static_cast<uint64_t>(index);
  out.kind = v1::TRAJECTORY_KIND_DEMONSTRATION;
  out.environment = task.environment;
  out.task = task.task;
  out.instance = task.instance;
  out.sampling_seed = counter_hash(seed_, "demo sampling", {static_cast<uint64_t>(step), static_cast<uint64_t>(index),
                                                            static_cast<uint64_t>(attempt)});
  return out;
}

std::optional<EpisodePlan> Demonstrations::next() {
  for (auto& [step, batch] : steps_) {
    if (!batch.failure.empty()) continue;
    for (size_t i = 0; i < batch.slots.size(); ++i) {
      Slot& slot = batch.slots[i];
      if (slot.running || slot.trajectory != nullptr) continue;
      const auto task = schedule_.demonstration(step, static_cast<int>(i), slot.attempt);
      if (!task.has_value()) return std::nullopt;
      slot.running = true;
      return plan(step, static_cast<int>(i), slot.attempt, *task);
    }
  }
  return std::nullopt;
}

// The plan's own words say where it belongs: rollout ids differ by step, index and attempt.
Demonstrations::Slot* Demonstrations::find(const EpisodePlan& wanted) {
  for (auto& [step, batch] : steps_) {
    if (wanted.group_number >= batch.slots.size()) continue;
    Slot& slot = batch.slots[wanted.group_number];
    const int index = static_cast<int>(wanted.group_number);
    if (slot.running && plan(step, index, slot.attempt, {}).rollout_id == wanted.rollout_id) return &slot;
  }
  return nullptr;
}

bool Demonstrations::finish(const EpisodePlan& finished, v1::Trajectory trajectory) {
  Slot* slot = find(finished);
  if (slot == nullptr) return false;
  slot->running = false;
  const std::optional<std::string> failure = exclusion(summarize(trajectory));
  if (!failure.has_value()) {
    slot->trajectory = std::make_shared<const v1::Trajectory>(std::move(trajectory));
    return true;
  }
  if (++slot->attempt < kAttemptsMax) return true;
  for (auto& [step, batch] : steps_) {
    for (const Slot& other : batch.slots) {
      if (&other == slot) {
        batch.failure = absl::StrCat("demonstration ", finished.rollout_id, " of task \"", finished.task, "\": ", kAttemptsMax,
                                     " attempts failed, the last with ", *failure);
      }
    }
  }
  return true;
}

void Demonstrations::cancel(const EpisodePlan& cancelled) {
  if (Slot* slot = find(cancelled); slot != nullptr) slot->running = false;
}

absl::StatusOr<std::optional<Demonstrations::Batch>> Demonstrations::ready(int64_t step) {
  if (schedule_.complete() && !schedule_.has_demonstrations()) {
    return absl::FailedPreconditionError("demonstrations are asked for, but no task of the environments has solutions");
  }
  const auto found = steps_.find(step);
  if (found == steps_.end()) return std::optional<Batch>();
  if (!found->second.failure.empty()) return absl::UnavailableError(found->second.failure);
  Batch batch;
  for (const Slot& slot : found->second.slots) {
    if (slot.trajectory == nullptr) return std::optional<Batch>();
    batch.push_back(slot.trajectory);
  }
  return std::optional<Batch>(std::move(batch));
}

}  // namespace slipstream::gateway
