// What the ledger (trajectories, groups, admission) and those who run episodes say to each other.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>

#include "common/status.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

// An episode to run. Everything in it follows from the run's seed and the group number, so that a run with max_staleness 0
// repeats bit for bit, and an episode lost with a killed gateway is run again the same way.
struct EpisodePlan {
  std::string rollout_id;     // "<run>-g<group number>-<index>", and "-r<n>" appended for the n-th refill
  std::string group_id;
  uint64_t group_number = 0;
  int group_index = 0;
  v1::TrajectoryKind kind = v1::TRAJECTORY_KIND_ROLLOUT;
  std::string environment;
  std::string task;
  uint64_t instance = 0;
  uint64_t sampling_seed = 0;
  int min_policy_version = 0;  // no token may be sampled by weights older than this
};

// Writes into the trajectory which episode it is of. Whoever takes it in does this (EpisodeSource::finish).
void identify(const EpisodePlan& plan, v1::Trajectory* trajectory);

class EpisodeSource {
 public:
  virtual ~EpisodeSource() = default;
  // The next episode that admission lets start; waits for one. nullopt: stop was requested. Called by many threads.
  virtual std::optional<EpisodePlan> next(std::stop_token stop) = 0;
  // Hands over the finished (or failed) episode. `done` is called once, perhaps from another thread, when the trajectory is
  // on disk (its log offset) or could not be written. Finishing a rollout id twice is harmless.
  virtual void finish(const EpisodePlan& plan, v1::Trajectory trajectory,
                      std::function<void(absl::StatusOr<uint64_t>)> done) = 0;
  // The episode was given up by us (shutdown): it did not happen and may be planned again.
  virtual void cancel(const EpisodePlan& plan) = 0;
  // Admits an episode that an outside agent drives, in the group it names (empty: a group of its own). ResourceExhausted:
  // admission is closed at the moment. InvalidArgument: the group has other members' size or is full.
  virtual absl::StatusOr<EpisodePlan> admit(const std::string& task, const std::string& group_id, int group_size) = 0;
};

}  // namespace slipstream::gateway
