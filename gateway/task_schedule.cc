#include "gateway/task_schedule.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_join.h"
#include "common/check.h"

namespace slipstream::gateway {
namespace {

uint64_t mix(uint64_t x) {  // splitmix64's finaliser: Steele, Lea, Flood 2014
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// 0 .. n-1, or any 63 bits for n = 0 (so that an environment may keep it in a signed integer).
uint64_t bounded(uint64_t hash, uint64_t n) {
  if (n == 0) return hash >> 1;
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(hash) * n) >> 64);
}

}  // namespace

uint64_t counter_hash(uint64_t seed, std::string_view purpose, std::initializer_list<uint64_t> counters) {
  uint64_t state = mix(seed + 0x9e3779b97f4a7c15u);
  for (const char c : purpose) state = mix(state + 0x9e3779b97f4a7c15u + static_cast<uint8_t>(c));
  for (const uint64_t counter : counters) state = mix(state + 0x9e3779b97f4a7c15u + mix(counter + 0x632be59bd9b4e019u));
  return state;
}

TaskSchedule::TaskSchedule(uint64_t seed, const std::vector<EnvironmentConfig>& environments)
    : seed_(seed), environments_(environments) {}

absl::Status TaskSchedule::set_tasks(const std::string& environment, absl::Span<const v1::TaskDescription> descriptions) {
  const auto config = std::find_if(environments_.begin(), environments_.end(),
                                   [&](const EnvironmentConfig& e) { return e.name == environment; });
  if (config == environments_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("environment \"", environment, "\" is not in the config"));
  }
  std::vector<TaskConfig> wanted = config->tasks;
  if (wanted.empty()) {
    for (const v1::TaskDescription& description : descriptions) wanted.push_back({.name = description.name()});
  }
  std::vector<Task> tasks;
  for (const TaskConfig& task : wanted) {
    const auto found = std::find_if(descriptions.begin(), descriptions.end(),
                                    [&](const v1::TaskDescription& d) { return d.name() == task.name; });
    if (found == descriptions.end()) {
      const std::string names = absl::StrJoin(descriptions, ", ", [](std::string* out, const v1::TaskDescription& d) {
        out->append(d.name());
      });
      return absl::NotFoundError(absl::StrCat("no task \"", task.name, "\", it has: ", names.empty() ? "none" : names));
    }
    if (found->num_instances() > 0 && task.instances > found->num_instances()) {
      return absl::InvalidArgumentError(absl::StrCat("task \"", task.name, "\": ", task.instances, " instances wanted, it has ", found->num_instances()));
    }
    tasks.push_back({.environment = environment,
                     .name = task.name,
                     .weight = task.weight,
                     .groups_per_second = task.groups_per_second,
                     .instances = task.instances > 0 ? task.instances : found->num_instances(),
                     .demonstrations = task.demonstrations && found->has_solutions()});
  }
  if (tasks.empty()) return absl::InvalidArgumentError("describes no task");
  const auto before = described_.find(environment);
  if (before != described_.end()) {  // a reconnect does not refill the rate limits
    for (Task& task : tasks) {
      for (const Task& old : tasks_) {
        if (old.environment == environment && old.name == task.name) task.next_start = old.next_start;
      }
    }
  }
  std::map<std::string, std::vector<Task>> next = described_;
  next[environment] = std::move(tasks);
  if (next.size() == environments_.size()) {
    const bool any = std::any_of(next.begin(), next.end(), [](const auto& entry) {
      return std::any_of(entry.second.begin(), entry.second.end(), [](const Task& task) { return task.weight > 0; });
    });
    if (!any) return absl::InvalidArgumentError("environments: the weights of all tasks are 0, expected one above");
  }
  described_ = std::move(next);
  rebuild();
  return absl::OkStatus();
}

void TaskSchedule::rebuild() {
  tasks_.clear();
  rollout_tasks_.clear();
  demonstration_tasks_.clear();
  for (const EnvironmentConfig& environment : environments_) {
    const auto found = described_.find(environment.name);
    if (found == described_.end()) continue;
    for (const Task& task : found->second) {
      if (task.weight > 0) {
        rollout_tasks_.push_back(tasks_.size());
        if (task.demonstrations) demonstration_tasks_.push_back(tasks_.size());
      }
      tasks_.push_back(task);
    }
  }
}

bool TaskSchedule::complete() const { return !environments_.empty() && described_.size() == environments_.size(); }
bool TaskSchedule::has_demonstrations() const { return complete() && !demonstration_tasks_.empty(); }

bool TaskSchedule::knows(const std::string& task) const {
  const auto named = [&](const auto& t) { return t.name == task; };
  return std::any_of(tasks_.begin(), tasks_.end(), named) ||
         std::any_of(environments_.begin(), environments_.end(), [&](const EnvironmentConfig& environment) {
           return std::any_of(environment.tasks.begin(), environment.tasks.end(), named);
         });
}

ScheduledTask TaskSchedule::pick(absl::Span<const size_t> candidates, uint64_t task_hash, uint64_t instance_hash) const {
  double total = 0;
  for (const size_t index : candidates) total += tasks_[index].weight;
  double left = std::ldexp(static_cast<double>(task_hash >> 11), -53) * total;
  size_t chosen = candidates.back();
  for (const size_t index : candidates) {
    if (left < tasks_[index].weight) {
      chosen = index;
      break;
    }
    left -= tasks_[index].weight;
  }
  const Task& task = tasks_[chosen];
  return {task.environment, task.name, bounded(instance_hash, task.instances), chosen};
}

ScheduledTask TaskSchedule::group(uint64_t group_number) const {
  CHECK(complete());
  return pick(rollout_tasks_, counter_hash(seed_, "task", {group_number}), counter_hash(seed_, "instance", {group_number}));
}

std::optional<ScheduledTask> TaskSchedule::demonstration(int64_t step, int index, int attempt) const {
  if (!has_demonstrations()) return std::nullopt;
  const auto s = static_cast<uint64_t>(step), i = static_cast<uint64_t>(index), a = static_cast<uint64_t>(attempt);
  return pick(demonstration_tasks_, counter_hash(seed_, "demo task", {s, i, a}), counter_hash(seed_, "demo", {s, i, a}));
}

absl::Time TaskSchedule::start_time(size_t task_index) const { return tasks_.at(task_index).next_start; }

// A bucket of one token: groups of the task are at least 1 / rate apart.
void TaskSchedule::started(size_t task_index, absl::Time now) {
  Task& task = tasks_.at(task_index);
  if (task.groups_per_second > 0) {
    task.next_start = std::max(now, task.next_start) + absl::Seconds(1 / task.groups_per_second);
  }
}

}  // namespace slipstream::gateway
