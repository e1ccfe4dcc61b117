// What a finished session is worth to the learner: one sample a leaf.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "gateway/turn.h"

namespace slipstream::gateway {

// Writes one path. `claimed` counts, for each turn, the leading sampled tokens whose loss an earlier sample
// carries.
struct Session::SampleWriter {
  int64_t room;
  std::vector<int64_t>* claimed;
  v1::Sample out;
  std::vector<bool> truncated;
  std::vector<bool> masked;

  // How many of the ids fit; a span for them.
  int64_t add(v1::SpanKind kind, const int32_t* ids, int64_t count, const std::string& worker_id = {}) {
    if (count > room) out.set_length_truncated(true);
    count = std::min(count, room);
    if (count <= 0) return 0;
    room -= count;
    out.mutable_ids()->Add(ids, ids + count);
    const int last = out.spans_size() - 1;
    if (kind == v1::SPAN_KIND_OBSERVATION && last >= 0 && out.spans(last).kind() == kind) {
      out.mutable_spans(last)->set_length(out.spans(last).length() + static_cast<int32_t>(count));
      return count;
    }
    v1::Span* span = out.add_spans();
    span->set_kind(kind);
    span->set_length(static_cast<int32_t>(count));
    span->set_worker_id(worker_id);
    return count;
  }

  // The first `count` sampled tokens of a turn.
  void add_reply(int64_t index, const Turn& turn, int64_t count) {
    int64_t& carried = (*claimed)[static_cast<size_t>(index)];
    const int64_t shared = std::min(carried, count);
    if (add(v1::SPAN_KIND_OBSERVATION, turn.ids.data(), shared) < shared) return;
    const int64_t end =
        shared + add(v1::SPAN_KIND_ACTION, turn.ids.data() + shared, count - shared, turn.worker_id);
    carried = std::max(carried, end);
    turn.policy_versions.copy(shared, end, [&](int32_t value) { out.add_action_policy_versions(value); });
    turn.context_versions.copy(shared, end, [&](int32_t value) { out.add_action_context_versions(value); });
    for (int64_t i = shared; i < end; ++i) {
      const size_t at = static_cast<size_t>(i);
      truncated.push_back(!turn.truncated.empty() && turn.truncated[at]);
      if (!turn.logprobs.empty()) out.add_action_logprobs(turn.logprobs[at]);
      masked.push_back(!turn.logprobs.empty() && !std::isfinite(turn.logprobs[at]));
    }
  }

  // Rows up to the last but one token. A row that two pieces hold is the first one's: it was there when its
  // token was sampled.
  void add_replay(const Turn& turn, int64_t* rows) {
    const int64_t wanted = out.ids_size() - 1;
    for (const v1::Replay& piece : turn.replay) {
      const int64_t end = std::min(piece.first_row() + piece.num_rows(), wanted);
      if (end <= *rows) continue;
      *out.add_replay() = piece;
      out.mutable_replay(out.replay_size() - 1)->set_num_rows(end - piece.first_row());
      *rows = end;
    }
  }

  v1::Sample take() {
    if (std::find(truncated.begin(), truncated.end(), true) != truncated.end()) {
      for (const bool value : truncated) out.add_action_truncated(value);
    }
    if (std::find(masked.begin(), masked.end(), true) != masked.end()) {
      for (const bool value : masked) out.add_action_masked(value);
    }
    return std::move(out);
  }
};

// Leaves, and turns whose stop id no continuation contains. Parents come before their children.
void Session::collect_ends(std::vector<int64_t>* ends) const {
  std::vector<int64_t> open(roots_.rbegin(), roots_.rend());
  while (!open.empty()) {
    const int64_t index = open.back();
    open.pop_back();
    const std::vector<int64_t>& next = turn(index).children;
    if (std::all_of(next.begin(), next.end(), [this](int64_t child) { return turn(child).drops_stop; })) {
      ends->push_back(index);
    }
    open.insert(open.end(), next.rbegin(), next.rend());
  }
}

std::vector<v1::Sample> Session::samples() const {
  std::vector<int64_t> ends;
  collect_ends(&ends);
  std::vector<int64_t> claimed(turns_.size(), 0);
  std::vector<v1::Sample> out;
  for (const int64_t end : ends) {
    std::vector<int64_t> path;
    for (int64_t at = end; at >= 0; at = turn(at).parent) path.push_back(at);
    std::reverse(path.begin(), path.end());
    const bool captured = turn(end).captured;
    const auto broken = std::find_if(path.begin(), path.end(), [&](int64_t index) {
      const Turn& each = turn(index);
      return each.finish_reason == v1::FINISH_REASON_ABORTED || (captured && !each.replay_complete());
    });
    path.erase(broken, path.end());
    if (path.empty()) continue;

    SampleWriter writer{
        .room = options_.max_seq_len > 0 ? options_.max_seq_len : std::numeric_limits<int32_t>::max(),
        .claimed = &claimed,
        .out = {},
        .truncated = {},
        .masked = {}};
    for (size_t i = 0; i < path.size(); ++i) {
      const Turn& each = turn(path[i]);
      writer.add(i == 0 ? v1::SPAN_KIND_PROMPT : v1::SPAN_KIND_OBSERVATION, each.added_ids.data(),
                 static_cast<int64_t>(each.added_ids.size()));
      const bool drops = i + 1 < path.size() && turn(path[i + 1]).drops_stop;
      writer.add_reply(path[i], each, static_cast<int64_t>(each.ids.size()) - (drops ? 1 : 0));
    }
    int64_t rows = 0;
    for (const int64_t index : path) writer.add_replay(turn(index), &rows);
    // All its tokens may be in other samples: a path cut short ends where another one goes on. But a session
    // cut before its first sampled token still says so.
    if (writer.masked.empty() && !(out.empty() && writer.out.length_truncated())) continue;
    out.push_back(writer.take());
  }
  return out;
}

}  // namespace slipstream::gateway
