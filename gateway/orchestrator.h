// Runs the episodes that admission lets start, each from start to finish in a thread of its own.
#pragma once

#include <atomic>
#include <map>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "common/metrics.h"
#include "common/throttle.h"
#include "gateway/config.h"
#include "gateway/driven_episode.h"
#include "gateway/engine_client.h"
#include "gateway/environment_client.h"
#include "gateway/episode.h"
#include "model/chat_format.h"

namespace slipstream::gateway {

class Orchestrator {
 public:
  using Environments = std::map<std::string, EnvironmentClient*>;

  // Starts config.episode_threads threads; std::system_error: the system has not so many. What the arguments refer to outlives it.
  Orchestrator(const GatewayConfig& config, EpisodeSource& source, EngineClient& engine, Environments environments,
               const model::ChatFormat& format, Metrics& metrics, Logger log);
  // stop().
  ~Orchestrator();

  // Cancels what runs, gives its episodes back to the source, and waits for the threads: as long as a write that is under
  // way takes, 5 s at most.
  void stop();

  // Time that episodes, the running ones not included, spent waiting.
  double environment_seconds() const { return 1e-6 * static_cast<double>(environment_time_us_); }
  double engine_seconds() const { return 1e-6 * static_cast<double>(engine_time_us_); }

 private:
  void work(int thread) noexcept;
  bool run(const EpisodePlan& plan, const std::string& episode_id);
  void hand_over(const EpisodePlan& plan, const std::function<v1::Trajectory()>& trajectory);

  const GatewayConfig config_;
  EpisodeSource& source_;
  EngineClient& engine_;
  const Environments environments_;
  const model::ChatFormat& format_;
  Metrics& metrics_;
  const Logger log_;
  const std::string life_;  // tells episode ids of this life from those before
  Throttle failures_{absl::Seconds(5)}, writes_{absl::Seconds(5)};
  std::atomic<int64_t> environment_time_us_ = 0, engine_time_us_ = 0;
  std::stop_source stop_;
  std::vector<std::jthread> threads_;
};

}  // namespace slipstream::gateway
