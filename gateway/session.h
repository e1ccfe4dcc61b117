// Session: the exact token history of one episode, a tree of turns whose usual form is a path (gateway-spec, "Sessions").
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"
#include "model/chat_format.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

// One sampled reply, columns of equal length.
struct Reply {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int32_t> policy_versions;
  std::vector<int32_t> context_versions;
  std::vector<bool> truncated;      // empty: none
  v1::FinishReason finish_reason = v1::FINISH_REASON_STOP;
  std::vector<v1::Replay> replay;   // pieces in row order, as the worker(s) returned them; empty: not captured
  std::string worker_id;
};

// A request on its way: where it continues and the prompt it needs. Refers to a session state by number; holding one
// changes nothing.
struct PendingTurn {
  int64_t parent = -1;                      // the turn it continues; -1: the root
  bool replaces = false;                    // a retry: takes the place of the parent's last child
  int64_t replaced = -1;
  std::vector<model::ChatMessage> added;    // messages since the parent's reply
  std::vector<int32_t> added_ids;           // their ids and the generation prompt
  std::vector<int32_t> prompt_ids;          // the whole context for the engine
};

// One thread at a time. Validate first, mutate last: a call that fails leaves the session as it was.
class Session {
 public:
  struct Options {
    bool branching = false;
    int max_seq_len = 0;  // samples are cut here; 0: never
    bool use_tools = true;
    bool demonstration = false;  // replies are the environment's, without log-probs
    std::vector<model::ChatTool> tools;
  };
  Session(const model::ChatFormat& format, Options options);  // the format outlives it

  // Driving agents: the whole conversation, which must extend a stored path. InvalidArgument: names the first message that
  // differs, or discards more than one finished turn, or extends a turn that ended by length.
  absl::StatusOr<PendingTurn> begin(absl::Span<const model::ChatMessage> conversation) const;
  // Driven environments: only what is new after the last turn.
  absl::StatusOr<PendingTurn> extend(absl::Span<const model::ChatMessage> messages) const;
  // Records the reply and returns it parsed. InvalidArgument: columns disagree, a log-prob is missing.
  absl::StatusOr<model::ChatMessage> commit(const PendingTurn& turn, Reply reply);

  // One sample a leaf; a shared prefix carries loss in exactly one of them. Empty before the first commit.
  std::vector<v1::Sample> samples() const;
  int64_t num_turns() const;
  int64_t num_tokens() const;
  int64_t non_finite_logprobs() const;
  std::string serialize() const;  // of everything stored: equal strings, equal states

 private:
  // As the implementation needs.
  const model::ChatFormat& format_;
  Options options_;
};

}  // namespace slipstream::gateway
