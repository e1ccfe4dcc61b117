// Keeps a worker known to the gateway: registers, sends heartbeats, registers again when the gateway has
// restarted, keeps trying while it is away.
#pragma once

#include <thread>

#include "common/log.h"
#include "rollout/engine.h"
#include "rollout/gateway_client.h"

namespace slipstream::rollout {

class Registration {
 public:
  // Starts its thread. The engine outlives it. draining: requested when the engine drains, which the gateway
  // is told at once. Once the engine is idle too, the worker unregisters by itself.
  Registration(const std::string& gateway_address, WorkerIdentity worker, Engine& engine,
               std::stop_token draining, Logger log);
  ~Registration();  // without a word to the gateway, as when the process dies
  // Ends the heartbeats and unregisters, if that has not happened. Once, from one thread.
  void leave();

 private:
  void run(std::stop_token stop) noexcept;
  void rest(absl::Duration length, std::stop_token stop);

  const std::string gateway_address_;
  const WorkerIdentity worker_;
  Engine& engine_;
  const std::stop_token draining_;
  bool drain_seen_ = false;  // the thread's
  Logger log_;
  GatewayClient client_;
  bool registered_ = false;  // the thread's until it is joined
  std::jthread thread_;
};

}  // namespace slipstream::rollout
