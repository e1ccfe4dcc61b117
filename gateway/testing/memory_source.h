// An EpisodeSource without groups, log or admission: hands out a list of plans and keeps what comes back.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "gateway/episode.h"

namespace slipstream::gateway::testing {

class MemorySource : public EpisodeSource {
 public:
  void plan(EpisodePlan plan);
  std::optional<EpisodePlan> next(std::stop_token stop) override;
  void finish(const EpisodePlan& plan, v1::Trajectory trajectory,
              std::function<void(absl::StatusOr<uint64_t>)> done) override;
  void cancel(const EpisodePlan& plan) override;
  absl::StatusOr<EpisodePlan> admit(const std::string& task, const std::string& group_id, int group_size) override;

  // Called before a trajectory is taken; an error is what finish() answers with.
  std::function<absl::Status(const v1::Trajectory&)> on_finish;

  // By rollout id, once `count` have been finished or cancelled. Empty map: not within 60 s.
  std::map<std::string, v1::Trajectory> wait_for(size_t count);
  std::vector<std::string> cancelled();

 private:
  absl::Mutex mutex_;
  absl::CondVar changed_;
  std::deque<EpisodePlan> plans_;
  std::map<std::string, v1::Trajectory> finished_;
  std::vector<std::string> cancelled_;
  uint64_t admitted_ = 0;
};

// An episode of FakeEnvironment's task at the environment "env".
EpisodePlan fake_plan(uint64_t number);

}  // namespace slipstream::gateway::testing
