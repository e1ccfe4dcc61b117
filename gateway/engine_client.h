// Generates replies on the rollout workers of a pool, whatever happens to the workers meanwhile.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>
#include <string>

#include "absl/time/time.h"
#include "common/log.h"
#include "common/status.h"
#include "common/throttle.h"
#include "gateway/session.h"
#include "gateway/worker_pool.h"
#include "slipstream/v1/rollout.pb.h"

namespace slipstream::gateway {

struct Generation {
  Reply reply;             // worker_id: all that sampled it, in order, with commas between
  int prompt_tokens = 0;
  int cached_tokens = 0;   // of the prompt, when the reply began
  int attempts = 0;        // 1: no worker was lost, none was full
};

// Thread-safe; each generate() blocks its caller.
class EngineClient {
 public:
  // Tokens as they come, from the thread in generate(). An event is given once: what a lost worker had sent is kept.
  using OnTokens = std::function<void(const v1::GenerateEvent&)>;

  EngineClient(WorkerPool& pool, Logger log);
  ~EngineClient();

  // `request` is a whole turn with its max_tokens; request_id (unique) is extended by the number of the attempt. When the
  // worker is lost mid-reply the tokens so far become part of the prompt of another one, which continues as the first would
  // have: draws are keyed by seed and position. A full worker (ResourceExhausted) is asked again. Any other error is the
  // worker's. Internal: a worker sent what the contract forbids. DeadlineExceeded, Cancelled.
  absl::StatusOr<Generation> generate(const v1::GenerateRequest& request, absl::Time deadline, std::stop_token cancel,
                                      const OnTokens& on_tokens = nullptr);

  // The session is over: its worker may free its cache. Does not wait for it.
  void end_session(const std::string& session_id);

 private:
  class Connections;
  absl::Status run_once(const std::shared_ptr<const Worker>& worker, const v1::GenerateRequest& request,
                        absl::Time deadline, std::stop_token cancel, const OnTokens& on_tokens, Generation& out);

  WorkerPool& pool_;
  const Logger log_;
  const std::unique_ptr<Connections> connections_;
  Throttle losses_{absl::Seconds(5)};
};

}  // namespace slipstream::gateway
