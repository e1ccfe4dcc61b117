// What a session keeps of one turn. Private to session*.cc.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "gateway/session.h"

namespace slipstream::gateway {

// A column whose neighbours are mostly equal.
class RunColumn {
 public:
  RunColumn() = default;
  explicit RunColumn(const std::vector<int32_t>& values) {
    for (const int32_t value : values) {
      if (runs_.empty() || runs_.back().value != value) runs_.push_back({value, 0});
      ++runs_.back().length;
    }
    runs_.shrink_to_fit();
  }
  // Calls append(value) for each of the entries begin .. end-1.
  template <class Append>
  void copy(int64_t begin, int64_t end, Append append) const {
    int64_t at = 0;
    for (const Run& run : runs_) {
      const int64_t stop = at + run.length;
      for (int64_t i = begin > at ? begin : at; i < (stop < end ? stop : end); ++i) append(run.value);
      at = stop;
    }
  }

 private:
  struct Run {
    int32_t value;
    int32_t length;
  };
  std::vector<Run> runs_;
};

// Ids and log-probs take 8 bytes a token, versions next to nothing; the text, for history checks, takes the
// rest of the 16.
struct Session::Turn {
  int64_t parent = -1;
  // This turn's context leaves out the parent's last id: a stop id that opens another kind of message than
  // the one that came.
  bool drops_stop = false;
  std::vector<int64_t> children;
  std::vector<model::ChatMessage> added;
  std::vector<int32_t> added_ids;
  int64_t prompt_tokens = 0;  // of the whole context, added_ids included

  model::ChatMessage reply;
  std::vector<int32_t> ids;
  std::vector<float> logprobs;  // these three are empty in a demonstration
  RunColumn policy_versions;
  RunColumn context_versions;
  std::vector<bool> truncated;
  v1::FinishReason finish_reason = v1::FINISH_REASON_STOP;
  std::string worker_id;
  std::vector<v1::Replay> replay;
  bool captured = false;  // this turn or one before it has replay
  // Rows 0 .. replay_rows-1 of the path that ends here are in the pieces of its turns, without a gap before
  // them.
  int64_t replay_rows = 0;

  int64_t total_tokens() const { return prompt_tokens + static_cast<int64_t>(ids.size()); }
  // The last sampled token has no row.
  bool replay_complete() const { return replay_rows >= total_tokens() - 1; }
};

}  // namespace slipstream::gateway
