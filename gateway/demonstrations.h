// Batches of demonstrations for the supervised warm-up: episodes of the environments' own solutions, collected in memory,
// never logged and never counted. They follow from the seed, so that whatever is lost is made again.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gateway/episode.h"
#include "gateway/task_schedule.h"

namespace slipstream::gateway {

// Not thread-safe: lives under the ledger's mutex.
class Demonstrations {
 public:
  Demonstrations(uint64_t seed, std::string run_id, const TaskSchedule& schedule);

  // The learner asks for the batch of `step`. Other steps than this and the next are forgotten; the next one's episodes
  // follow when all of this one's are handed out, so that they run while the learner trains.
  void request(int64_t step, int count);
  // No more are wanted: rollouts have begun.
  void clear();
  // An episode to run, if there is one.
  std::optional<EpisodePlan> next();
  // A failed episode is replaced by the next attempt. False: the plan is of no batch that is wanted.
  bool finish(const EpisodePlan& plan, v1::Trajectory trajectory);
  void cancel(const EpisodePlan& plan);

  using Batch = std::vector<std::shared_ptr<const v1::Trajectory>>;
  // The batch of `step` in the order of indices; nullopt: not complete. FailedPrecondition: no task has solutions.
  // Unavailable: too many attempts failed; asking again starts over.
  absl::StatusOr<std::optional<Batch>> ready(int64_t step);

 private:
  struct Slot {
    int attempt = 0;
    bool running = false;
    std::shared_ptr<const v1::Trajectory> trajectory;
  };
  struct Step {
    std::vector<Slot> slots;
    std::string failure;
  };
  Slot* find(const EpisodePlan& plan);
  EpisodePlan plan(int64_t step, int index, int attempt, const ScheduledTask& task) const;

  const uint64_t seed_;
  const std::string run_id_;
  const TaskSchedule& schedule_;
  std::map<int64_t, Step> steps_;
};

}  // namespace slipstream::gateway
