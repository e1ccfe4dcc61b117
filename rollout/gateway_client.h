// The wire side of a worker's registration: the gateway's Workers service.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "common/status.h"

namespace slipstream::rollout {

struct WorkerIdentity {
  std::string worker_id;
  std::string address;
  int64_t start_time_us = 0;  // tells one life of a worker from the next
  int64_t max_concurrent = 0;
  int64_t max_context = 0;
};

struct Heartbeat {
  int32_t policy_version = 0;
  int64_t running = 0;
  int64_t waiting = 0;
  int64_t generated_tokens = 0;
  double idle_seconds = 0.0;
  bool draining = false;
};

// Each call blocks for at most `timeout`, or until stop is requested (CANCELLED).
class GatewayClient {
 public:
  GatewayClient(const std::string& address, absl::Duration timeout);
  ~GatewayClient();

  // How often the gateway wants to hear.
  absl::StatusOr<absl::Duration> register_worker(const WorkerIdentity& worker, int32_t policy_version,
                                                 std::stop_token stop);
  // NOT_FOUND: the gateway does not know this worker (it restarted).
  absl::Status heartbeat(const WorkerIdentity& worker, const Heartbeat& beat, std::stop_token stop);
  absl::Status unregister(const WorkerIdentity& worker);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::rollout
