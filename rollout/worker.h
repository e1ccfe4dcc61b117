// A rollout worker: engine, weight receiver, service and registration, put together.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "common/config.h"
#include "common/log.h"
#include "common/metrics.h"
#include "model/model_section.h"
#include "rollout/engine.h"

namespace slipstream::rollout {

// Whether the engine reads the weights of a learner in the same process where they are, instead of copies that it fetches.
enum class ShareWeights { kAuto, kAlways, kNever };  // kAuto: if it can

// Thread-safe. The destructor stops at once, without a word to the gateway; drain() first to leave in order.
class Worker {
 public:
  struct Config {
    // model:
    model::ModelSection model;
    // rollout:
    EngineConfig engine;
    std::string address = "127.0.0.1:0";
    std::string advertised_host;  // what the gateway dials instead of address's host; empty: that host
    std::string gateway_address;  // empty: not registered anywhere
    std::string learner_address;  // empty: no new weights
    int drain_timeout_ms = 30'000;
    int weights_poll_ms = 120'000;  // of one weight call, waiting and transfer
    ShareWeights share_weights = ShareWeights::kAuto;

    // Reads both sections; errors are found by root.finish().
    static Config from(ConfigNode root);
  };

  // Weights that are in this process, on engine.device or in host memory. Who owns them, and outlives the worker, changes them
  // through engine().rewrite_weights().
  struct Policy {
    model::ModelConfig config;
    const model::WeightStore* weights = nullptr;
    int32_t version = 0;
  };

  // Loads the checkpoint as policy version 0, or takes `policy`, and then asks no learner for newer ones; starts everything.
  // Does not wait for gateway or learner. Errors: those of load_weights, Engine::create, and UNAVAILABLE when the address
  // cannot be bound. on_failure (may be null; from another thread, outlives the worker): what no waiting mends: the learner
  // trains another model than model.path.
  static absl::StatusOr<std::unique_ptr<Worker>> start(const Config& config, Metrics& metrics, Logger log,
                                                       std::function<void(absl::Status)> on_failure = nullptr,
                                                       std::optional<Policy> policy = std::nullopt);
  ~Worker();

  std::string address() const;  // as bound
  Engine& engine();
  // Takes no new generations, lets running ones end until the deadline, cuts the rest off (UNAVAILABLE),
  // unregisters. Once.
  void drain(absl::Time deadline);
  // True once a peer asked for the drain, or drain() was called.
  bool draining() const;

 private:
  struct Impl;
  explicit Worker(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::rollout
