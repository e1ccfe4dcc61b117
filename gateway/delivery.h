// The learner's door: a ZeroMQ ROUTER socket that speaks LearnerMessage and GatewayMessage, one protobuf a frame. One thread
// owns the socket; it never waits for the ledger, which calls back, nor for a learner that does not read.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/log.h"
#include "common/status.h"
#include "gateway/ledger.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

// Splits a batch into serialized GatewayMessages of at most part_bytes, or one group where a group alone is more. Equal
// batches give equal bytes. ResourceExhausted: a group of more than 1 GiB.
absl::StatusOr<std::vector<std::string>> split_batch(v1::Batch batch, int64_t part_bytes);

class Delivery {
 public:
  static constexpr int64_t kPartBytes = 32 << 20;
  using ActivitySource = std::function<v1::Activity()>;

  // Binds `address` (tcp://host:port; port 0: any free one). Unavailable: names the address when it cannot be bound.
  // `activity` (may be empty) is asked for each answer, by any thread. The ledger outlives the Delivery or stops before.
  static absl::StatusOr<std::unique_ptr<Delivery>> start(const std::string& address, Ledger& ledger, Logger logger,
                                                         ActivitySource activity = nullptr);
  ~Delivery();

  const std::string& endpoint() const;  // the bound one: tcp://127.0.0.1:40123

 private:
  struct Impl;
  explicit Delivery(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  std::jthread thread_;
};

}  // namespace slipstream::gateway
