// The episodes an environment server has open: finds them by id, answers repeated calls with the first
// answer, forgets what nobody asks for. Knows no gRPC.
#pragma once

#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/status.h"
#include "examples/episodic_task.h"

namespace slipstream::examples {

// Thread-safe; a call holds the lock while the task's own logic runs, which must be quick.
class EpisodeTable {
 public:
  struct Config {
    int episodes_max = 4096;                   // open at once
    absl::Duration idle_max = absl::Hours(1);  // an episode nobody calls is forgotten after this
  };

  EpisodeTable(const std::string& environment, std::vector<TaskEntry> tasks, Config config);

  const v1::DescribeResponse& describe() const { return description_; }

  // InvalidArgument names the field: an id, a task or an instance that does not exist, or another problem
  // than the one this episode was reset with. ResourceExhausted: too many are open.
  absl::StatusOr<v1::ResetResponse> reset(const v1::ResetRequest& request, absl::Time now);
  // NotFound: the episode. InvalidArgument: a turn that is neither the next one nor an answered one.
  absl::StatusOr<v1::StepResponse> step(const v1::StepRequest& request, absl::Time now);
  // Closing an episode that is gone is harmless: the first answer may have been lost.
  absl::Status close(const v1::CloseRequest& request, absl::Time now);

  size_t num_open() const;

 private:
  struct Episode {
    std::string id;
    const TaskEntry* entry = nullptr;
    uint64_t instance = 0;
    std::unique_ptr<EpisodicTask> task;
    v1::ResetResponse opening;
    std::vector<v1::StepResponse> answers;  // by turn
    absl::Time used;
  };
  using Episodes = std::list<Episode>;  // least recently used first

  void expire(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // null: not open. Moves it to the end of the list.
  Episode* find(const std::string& id, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::vector<TaskEntry> tasks_;
  const Config config_;
  v1::DescribeResponse description_;
  mutable absl::Mutex mutex_;
  Episodes episodes_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, Episodes::iterator> by_id_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace slipstream::examples
