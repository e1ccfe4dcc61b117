// The gRPC service that hands published weights to rollout workers (weights.proto).
#pragma once

#include <memory>
#include <string>

#include "common/log.h"
#include "common/status.h"
#include "learner/publisher.h"

namespace slipstream::learner {

// What goes with every header (weights.proto).
struct WeightsOrigin {
  std::string weights_id;
  kernels::DType dtype = kernels::DType::kF32;  // of the learner's forward passes
};

// Serves until it dies; calls under way are then cut and waiting ones answered UNAVAILABLE. Thread-safe.
class WeightsServer {
 public:
  // host:port, port 0: any free one. UNAVAILABLE: the address cannot be bound. `publisher` outlives the
  // server and is closed by its destructor.
  static absl::StatusOr<std::unique_ptr<WeightsServer>> start(const std::string& address,
                                                              Publisher& publisher, WeightsOrigin origin,
                                                              Logger log);
  ~WeightsServer();

  const std::string& address() const;  // with the bound port

 private:
  struct Impl;
  explicit WeightsServer(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::learner
