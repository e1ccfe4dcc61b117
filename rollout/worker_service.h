// The Rollout gRPC service in front of an engine: decodes, hands over, encodes. Never blocks a gRPC thread.
#pragma once

#include <memory>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "common/log.h"
#include "rollout/engine.h"

namespace slipstream::rollout {

// Thread-safe.
class WorkerService {
 public:
  // Listens on host:port (port 0: any). UNAVAILABLE: cannot be bound. The engine outlives it.
  static absl::StatusOr<std::unique_ptr<WorkerService>> start(const std::string& address, Engine& engine,
                                                              Logger log);
  ~WorkerService();  // ends open calls

  std::string address() const;  // host:port as bound
  // No new generations; health says NOT_SERVING.
  void drain();
  // Requested once drain() was called, by us or a peer.
  std::stop_token draining() const;
  // Waits for open calls until the deadline, then cancels them. Nothing is served afterwards.
  void shutdown(absl::Time deadline);

 private:
  struct Impl;
  explicit WorkerService(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::rollout
