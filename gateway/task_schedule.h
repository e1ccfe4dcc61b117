// Which task and instance a group gets. Everything follows from the run's seed and the group's number, by a counter-based
// hash: no state, so that a restarted gateway goes on where it was and order of arrival changes nothing.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/status.h"
#include "gateway/config.h"
#include "slipstream/v1/environment.pb.h"

namespace slipstream::gateway {

// 64 well-mixed bits of the seed, the purpose and the counters.
uint64_t counter_hash(uint64_t seed, std::string_view purpose, std::initializer_list<uint64_t> counters);

struct ScheduledTask {
  std::string environment;
  std::string task;
  uint64_t instance = 0;
  size_t task_index = 0;  // for start_time
};

// One thread at a time.
class TaskSchedule {
 public:
  TaskSchedule(uint64_t seed, const std::vector<EnvironmentConfig>& environments);

  // What an environment's Describe returned; again after a reconnect. NotFound: a task that the config names is missing.
  // InvalidArgument: more instances than there are, no task, all weights zero, or an environment not in the config.
  absl::Status set_tasks(const std::string& environment, absl::Span<const v1::TaskDescription> descriptions);
  // Every environment of the config was described, and there is one.
  bool complete() const;
  bool has_demonstrations() const;
  // Whether the config or an environment knows this task (metrics' labels are bounded by it).
  bool knows(const std::string& task) const;

  ScheduledTask group(uint64_t group_number) const;  // needs complete()
  // For the supervised warm-up: among tasks that have solutions. nullopt: there is none.
  std::optional<ScheduledTask> demonstration(int64_t step, int index, int attempt) const;

  // Rate limits delay the start of a group and never change the order: when the task's next group may start.
  absl::Time start_time(size_t task_index) const;
  void started(size_t task_index, absl::Time now);

 private:
  struct Task {
    std::string environment, name;
    double weight = 1, groups_per_second = 0;
    uint64_t instances = 0;  // 0: any uint64
    bool demonstrations = false;
    absl::Time next_start = absl::InfinitePast();
  };
  ScheduledTask pick(absl::Span<const size_t> candidates, uint64_t task_hash, uint64_t instance_hash) const;
  void rebuild();

  const uint64_t seed_;
  const std::vector<EnvironmentConfig> environments_;
  std::map<std::string, std::vector<Task>> described_;  // by environment
  std::vector<Task> tasks_;                             // in the config's order
  std::vector<size_t> rollout_tasks_, demonstration_tasks_;
};

}  // namespace slipstream::gateway
