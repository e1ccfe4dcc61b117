// Session: the exact token history of one episode, a tree of turns whose usual form is a path (gateway-spec,
// "Sessions").
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"
#include "model/chat_format.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::gateway {

// One sampled reply, columns of equal length.
struct Reply {
  std::vector<int32_t> ids{};
  std::vector<float> logprobs{};  // a non-finite one masks its token, is counted, and travels
  std::vector<int32_t> policy_versions{};
  std::vector<int32_t> context_versions{};
  std::vector<bool> truncated{};  // empty: none
  v1::FinishReason finish_reason = v1::FINISH_REASON_STOP;
  // Pieces in row order, as the worker(s) returned them; empty: not captured. Rows count from the start of
  // the context.
  std::vector<v1::Replay> replay{};
  std::string worker_id{};
};

// A request on its way: where it continues and the prompt it needs. Refers to a session state by number;
// holding one changes nothing.
struct PendingTurn {
  int64_t parent = -1;    // the turn it continues; -1: the root
  bool replaces = false;  // a retry: takes the place of the turn `replaced`, a child of the parent
  int64_t replaced = -1;
  bool drops_stop = false;  // the context leaves out the parent's sampled stop id: the wrong opener
  std::vector<model::ChatMessage> added{};  // messages since the parent's reply
  std::vector<int32_t> added_ids{};         // their ids and the generation prompt
  std::vector<int32_t> prompt_ids{};        // the whole context for the engine
};

// One thread at a time. Validate first, mutate last: a call that fails leaves the session as it was.
class Session {
 public:
  struct Options {
    bool branching = false;
    int max_seq_len = 0;         // samples are cut here; 0: never
    bool use_tools = true;       // false: calls in replies stay text
    bool demonstration = false;  // replies are the environment's, without log-probs and versions
    std::vector<model::ChatTool> tools{};
  };
  Session(const model::ChatFormat& format, Options options);  // the format outlives it
  Session(Session&&) noexcept;
  ~Session();

  // Driving agents: the whole conversation, which must extend a stored path. InvalidArgument: names the first
  // message that differs, or discards more than one finished turn, or extends a turn that ended by length.
  absl::StatusOr<PendingTurn> begin(absl::Span<const model::ChatMessage> conversation) const;
  // Driven environments: only what is new after the last turn. InvalidArgument: nothing is, or that turn
  // ended by length.
  absl::StatusOr<PendingTurn> extend(absl::Span<const model::ChatMessage> messages) const;
  // Records the reply and returns it parsed, its calls with ids. InvalidArgument: columns disagree, a
  // log-prob is missing, a replay row lies outside. FailedPrecondition: another reply was recorded since
  // `turn` was made.
  absl::StatusOr<model::ChatMessage> commit(const PendingTurn& turn, Reply reply);

  // One sample a leaf; a shared prefix carries loss in exactly one of them. Empty before the first commit. A
  // path ends before its first aborted turn, and before the first turn whose replay rows have a gap although
  // others were captured.
  std::vector<v1::Sample> samples() const;
  int64_t num_turns() const;   // replaced ones not counted
  int64_t num_tokens() const;  // stored; a prefix that branches share counts once
  // Of all replies so far, replaced ones included.
  int64_t non_finite_logprobs() const { return non_finite_logprobs_; }
  std::string serialize() const;  // of everything stored: equal strings, equal states

 private:
  struct Turn;
  struct Place;
  struct SampleWriter;

  Turn& turn(int64_t index) { return *turns_[static_cast<size_t>(index)]; }
  const Turn& turn(int64_t index) const { return *turns_[static_cast<size_t>(index)]; }
  bool is_alive(int64_t index) const {
    return index >= 0 && index < static_cast<int64_t>(turns_.size()) &&
           turns_[static_cast<size_t>(index)] != nullptr;
  }
  std::vector<int64_t>& children(int64_t parent);
  const std::vector<int64_t>& children(int64_t parent) const;
  int64_t context_tokens(int64_t parent, bool drops_stop) const;
  void find(absl::Span<const model::ChatMessage> conversation, Place* best) const;
  absl::StatusOr<PendingTurn> continue_from(int64_t parent, absl::Span<const model::ChatMessage> added) const;
  void append_context(int64_t parent, bool drops_stop, std::vector<int32_t>* ids) const;
  absl::Status check_place(const PendingTurn& turn) const;
  absl::Status check_reply(const Reply& reply, int64_t prompt_tokens) const;
  void inherit_rows(const PendingTurn& pending, Turn* fresh) const;
  // Visits the turns whose path gives a sample, in order.
  void collect_ends(std::vector<int64_t>* ends) const;

  const model::ChatFormat& format_;
  Options options_;
  std::vector<std::unique_ptr<Turn>> turns_;  // by number; null: replaced
  std::vector<int64_t> roots_;
  int64_t last_ = -1;  // recorded last
  int64_t num_turns_ = 0;
  int64_t num_tokens_ = 0;
  int64_t non_finite_logprobs_ = 0;
};

}  // namespace slipstream::gateway
