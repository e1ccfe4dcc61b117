#include "gateway/testing/memory_source.h"

#include "absl/time/clock.h"

namespace slipstream::gateway::testing {

EpisodePlan fake_plan(uint64_t number) {
  EpisodePlan plan;
  plan.rollout_id = absl::StrCat("run-g", number, "-0");
  plan.group_id = absl::StrCat("run-g", number);
  plan.group_number = number;
  plan.environment = "env";
  plan.task = "task";
  plan.instance = number;
  plan.sampling_seed = 1000 + number;
  return plan;
}

void MemorySource::plan(EpisodePlan plan) {
  const absl::MutexLock lock(&mutex_);
  plans_.push_back(std::move(plan));
  changed_.SignalAll();
}

std::optional<EpisodePlan> MemorySource::next(std::stop_token stop) {
  const std::stop_callback wake(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  const absl::MutexLock lock(&mutex_);
  while (plans_.empty() && !stop.stop_requested()) changed_.Wait(&mutex_);
  if (stop.stop_requested()) return std::nullopt;
  EpisodePlan plan = std::move(plans_.front());
  plans_.pop_front();
  return plan;
}

void MemorySource::finish(const EpisodePlan& plan, v1::Trajectory trajectory,
                          std::function<void(absl::StatusOr<uint64_t>)> done) {
  const absl::Status status = on_finish ? on_finish(trajectory) : absl::OkStatus();
  if (!status.ok()) return done(status);
  uint64_t offset = 0;
  {
    const absl::MutexLock lock(&mutex_);
    finished_[plan.rollout_id] = std::move(trajectory);
    offset = finished_.size();
    changed_.SignalAll();
  }
  done(offset);
}

void MemorySource::cancel(const EpisodePlan& plan) {
  const absl::MutexLock lock(&mutex_);
  cancelled_.push_back(plan.rollout_id);
  changed_.SignalAll();
}

absl::StatusOr<EpisodePlan> MemorySource::admit(const std::string& task, const std::string& group_id, int group_size) {
  if (group_size > 64) return absl::InvalidArgumentError("group_size: more than 64");
  if (task == "closed") return absl::ResourceExhaustedError("admission is closed");
  const absl::MutexLock lock(&mutex_);
  EpisodePlan plan = fake_plan(1'000'000 + admitted_++);
  plan.task = task;
  plan.environment.clear();
  if (!group_id.empty()) plan.group_id = group_id;
  return plan;
}

std::map<std::string, v1::Trajectory> MemorySource::wait_for(size_t count) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  const absl::MutexLock lock(&mutex_);
  while (finished_.size() + cancelled_.size() < count) {
    if (changed_.WaitWithDeadline(&mutex_, deadline)) return {};
  }
  return finished_;
}

std::vector<std::string> MemorySource::cancelled() {
  const absl::MutexLock lock(&mutex_);
  return cancelled_;
}

}  // namespace slipstream::gateway::testing
