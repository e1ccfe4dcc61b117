// What is asked of the engine and what it answers. Plain data: no RPC here.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "common/status.h"
#include "model/replay.h"

namespace slipstream::rollout {

struct Sampling {
  float temperature = 1.0f;  // 0: greedy; else 0.001..100. Log-probs are under softmax(logits / temperature)
  int32_t top_k = 0;         // 0: all
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // [0, 1)
  uint64_t seed = 0;         // with a token's position in the sequence it fixes the draw
  int64_t max_tokens = 1;    // of the reply; >= 1
};

struct Request {
  std::string request_id;           // not empty; no two live requests share one
  std::string session_id;           // what the prefix cache keeps the sequence under; empty: not kept
  std::vector<int32_t> prompt_ids;  // the whole context; at least one
  Sampling sampling;
  std::vector<int32_t> stop_ids;
  int32_t min_policy_version = 0;  // wait for weights at least this new
  model::ReplayKinds capture;
  absl::Time deadline = absl::InfiniteFuture();
};

// One sampled token.
struct SampledToken {
  int32_t id = 0;
  float logprob = 0.0f;         // over the whole vocabulary
  int32_t policy_version = 0;   // of the weights that produced it
  int32_t context_version = 0;  // the oldest weights that any cached row it attended to was computed with
  bool truncated = false;       // top-k, top-p, min-p or temperature 0 changed the distribution it came from
};

enum class FinishReason { kStop, kLength, kAborted };

struct Finished {
  FinishReason reason = FinishReason::kStop;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of the prompt, found in the prefix cache
  std::optional<model::EncodedReplay> replay;
};

// Receives a generation: token() for each token, then finished() once, and nothing after it. Called on the
// engine's thread: must return at once and may call the engine.
class Sink {
 public:
  virtual ~Sink() = default;
  virtual void token(const SampledToken& token) = 0;
  // Errors: DEADLINE_EXCEEDED; CANCELLED (Engine::cancel); DATA_LOSS (the logits are not finite numbers);
  // UNAVAILABLE (the engine shuts down: go on elsewhere).
  virtual void finished(absl::StatusOr<Finished> result) = 0;
};

}  // namespace slipstream::rollout
