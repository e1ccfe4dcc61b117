// Fetches new weights from the learner for as long as it lives and gives them to the engine.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "common/log.h"
#include "common/metrics.h"
#include "model/config.h"
#include "rollout/engine.h"
#include "rollout/weights_client.h"

namespace slipstream::rollout {

struct WeightReceiverConfig {
  std::string worker_id;
  std::string learner_address;
  // Of one call, waiting and transfer: a transfer that takes longer never arrives.
  absl::Duration poll = absl::Seconds(120);
  absl::Duration retry_min = absl::Milliseconds(100);
  absl::Duration retry_max = absl::Seconds(5);
  // The learner's weights are of another model, dtype or run: no later ones will fit, and none are asked for any more.
  std::function<void(absl::Status)> on_failure = nullptr;
};

// Weights are assembled beside those in use and offered when complete and checked; a stream that breaks
// leaves nothing behind and is asked for again with back-off. Memory: two sets of weights, a third while the
// engine has not taken the last.
class WeightReceiver {
 public:
  // Starts its thread. policy_version: of `weights`, which the engine runs on and whose kind new ones must
  // be. The engine outlives it.
  WeightReceiver(WeightReceiverConfig config, const model::ModelConfig& model_config,
                 const model::WeightStore& weights, int32_t policy_version, Engine& engine, Metrics& metrics,
                 Logger log);
  ~WeightReceiver();

 private:
  class Pool;
  void run(std::stop_token stop) noexcept;
  struct Progress {
    bool began = false;
    bool foreign = false;  // weights of another model, dtype or run
  };
  absl::Status fetch(std::stop_token stop, Progress* progress);

  const WeightReceiverConfig config_;
  const std::shared_ptr<Pool> pool_;
  const std::string dtype_;
  int32_t policy_version_;
  std::string weights_id_;
  Engine& engine_;
  Metrics& metrics_;
  Logger log_;
  WeightsClient client_;
  std::jthread thread_;
};

}  // namespace slipstream::rollout
