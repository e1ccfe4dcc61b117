// A rollout worker whose replies follow from seed and position alone, as a real one's do, without a model.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "gateway/worker_pool.h"
#include "slipstream/v1/rollout.pb.h"

namespace slipstream::gateway::testing {

class FakeWorker {
 public:
  struct Options {
    std::string id = "w0";
    int64_t start_time_us = 1;
    int tokens_per_event = 1;
    int policy_version = 0;
    int stop_in = 16;  // one token in so many is a stop token; 0: none
    // Called before each event with the tokens already sent; may block, or end the call with an error.
    std::function<absl::Status(const v1::GenerateRequest&, int sent)> before_event = nullptr;
    // Last word on what is sent.
    std::function<void(v1::GenerateEvent&)> edit = nullptr;
  };
  explicit FakeWorker(Options options);
  ~FakeWorker();

  // Tells the pool of it, as a worker's Register and Heartbeat would.
  absl::Status join(WorkerPool& pool, int64_t max_context = 1 << 20);
  absl::Status beat(WorkerPool& pool, bool draining = false);
  // Every stream breaks at once and nobody listens any more.
  void kill();

  std::vector<v1::GenerateRequest> requests() const;
  std::vector<std::string> aborted() const;
  int cancelled() const;  // generations whose caller left
  const std::string& address() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// What any FakeWorker samples at this position of a sequence.
int32_t fake_token(uint64_t seed, int64_t position, int stop_in, int32_t stop_id);
float fake_logprob(uint64_t seed, int64_t position);

}  // namespace slipstream::gateway::testing
