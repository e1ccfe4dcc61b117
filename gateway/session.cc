#include "gateway/session.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/check.h"
#include "gateway/messages.h"
#include "gateway/turn.h"

namespace slipstream::gateway {
namespace {

using model::ChatMessage;

absl::Status bad_message(size_t index, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("message ", index, ": ", what));
}

absl::Status bad_reply(const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("reply: ", what));
}

template <class Column>
absl::Status check_column(const char* name, const Column& column, size_t expected) {
  if (column.size() == expected) return absl::OkStatus();
  return bad_reply(absl::StrCat(column.size(), " ", name, ", expected ", expected));
}

// For serialize(): fields one after another, texts with their length.
class Bytes {
 public:
  void number(int64_t value) { out_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void text(const std::string& value) {
    number(static_cast<int64_t>(value.size()));
    out_.append(value);
  }
  template <class T>
  void column(const std::vector<T>& values) {
    number(static_cast<int64_t>(values.size()));
    out_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  void message(const ChatMessage& message) {
    number(static_cast<int64_t>(message.role));
    text(message.content);
    text(message.reasoning);
    text(message.tool_call_id);
    number(static_cast<int64_t>(message.tool_calls.size()));
    for (const model::ChatToolCall& call : message.tool_calls) {
      text(call.id);
      text(call.name);
      text(call.arguments);
    }
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

}  // namespace

// Where a conversation leaves what is stored.
struct Session::Place {
  int64_t parent = -1;  // the last turn whose messages and reply it repeats
  size_t matched = 0;   // messages up to there
  int64_t repeated =
      -1;  // a child of the parent whose messages are the rest, exactly: its reply is asked for again
  size_t differs_at = 0;  // the first message that is not as stored, where it comes latest over all paths
  std::string what;
};

Session::Session(const model::ChatFormat& format, Options options)
    : format_(format), options_(std::move(options)) {}
Session::Session(Session&&) noexcept = default;
Session::~Session() = default;

std::vector<int64_t>& Session::children(int64_t parent) {
  return parent < 0 ? roots_ : turn(parent).children;
}

const std::vector<int64_t>& Session::children(int64_t parent) const {
  return parent < 0 ? roots_ : turn(parent).children;
}

int64_t Session::num_turns() const { return num_turns_; }
int64_t Session::num_tokens() const { return num_tokens_; }

int64_t Session::context_tokens(int64_t parent, bool drops_stop) const {
  return parent < 0 ? 0 : turn(parent).total_tokens() - (drops_stop ? 1 : 0);
}

// Walks every path the conversation repeats. Branches whose messages are the same can share one: the most
// recent wins, and one where the conversation is a retry before one where it would go on.
void Session::find(absl::Span<const ChatMessage> conversation, Place* best) const {
  struct Step {
    int64_t parent;
    size_t matched;
  };
  const auto differs = [best](size_t index, std::string what) {
    if (!best->what.empty() && index <= best->differs_at) return;
    best->differs_at = index;
    best->what = std::move(what);
  };
  // The index after `messages`, or nullopt where they part.
  const auto match = [&](absl::Span<const ChatMessage> messages, size_t at) -> std::optional<size_t> {
    for (const ChatMessage& message : messages) {
      if (at == conversation.size()) {
        differs(at, absl::StrCat("missing, expected the stored ",
                                 message.role == model::ChatRole::kAssistant ? "reply" : "message"));
        return std::nullopt;
      }
      if (auto what = difference(message, conversation[at])) {
        differs(at, *std::move(what));
        return std::nullopt;
      }
      ++at;
    }
    return at;
  };
  std::vector<Step> steps = {{-1, 0}};
  bool first = true;
  while (!steps.empty()) {
    const Step step = steps.back();
    steps.pop_back();
    int64_t repeated = -1;
    for (const int64_t child : children(step.parent)) {
      const Turn& candidate = turn(child);
      const std::optional<size_t> after_added = match(candidate.added, step.matched);
      if (!after_added) continue;
      if (*after_added == conversation.size()) repeated = child;
      const std::optional<size_t> after_reply = match({&candidate.reply, 1}, *after_added);
      if (after_reply) steps.push_back({child, *after_reply});
    }
    const bool better = first || step.matched > best->matched ||
                        (step.matched == best->matched && best->repeated < 0 && repeated >= 0);
    first = false;
    if (!better) continue;
    best->parent = step.parent;
    best->matched = step.matched;
    best->repeated = repeated;
  }
}

absl::StatusOr<PendingTurn> Session::begin(absl::Span<const ChatMessage> conversation) const {
  if (conversation.empty()) return absl::InvalidArgumentError("messages: empty, expected a conversation");
  Place place;
  find(conversation, &place);
  if (place.repeated >= 0 && turn(place.repeated).children.empty()) {
    const Turn& lost = turn(place.repeated);
    PendingTurn out{.parent = place.parent,
                    .replaces = true,
                    .replaced = place.repeated,
                    .drops_stop = lost.drops_stop,
                    .added = lost.added,
                    .added_ids = lost.added_ids};
    append_context(out.parent, out.drops_stop, &out.prompt_ids);
    out.prompt_ids.insert(out.prompt_ids.end(), out.added_ids.begin(), out.added_ids.end());
    return out;
  }
  if (!options_.branching && !children(place.parent).empty()) {
    if (place.repeated < 0) return bad_message(place.differs_at, place.what);
    return bad_message(conversation.size(),
                       "missing, expected the stored reply: only the last turn can be asked for again, and "
                       "more than one follows");
  }
  if (place.matched == conversation.size()) {
    return bad_message(place.matched, "missing, expected something new after the stored reply");
  }
  absl::StatusOr<PendingTurn> out = continue_from(place.parent, conversation.subspan(place.matched));
  if (!out.ok()) return bad_message(place.matched, std::string(out.status().message()));
  return out;
}

absl::StatusOr<PendingTurn> Session::extend(absl::Span<const ChatMessage> messages) const {
  if (messages.empty())
    return absl::InvalidArgumentError("messages: empty, expected something new after the last turn");
  absl::StatusOr<PendingTurn> out = continue_from(last_, messages);
  if (!out.ok()) return bad_message(0, std::string(out.status().message()));
  return out;
}

absl::StatusOr<PendingTurn> Session::continue_from(int64_t parent,
                                                   absl::Span<const ChatMessage> added) const {
  PendingTurn out{.parent = parent, .added = {added.begin(), added.end()}};
  if (parent < 0) {
    out.added_ids = format_.render_start(added, options_.tools);
  } else {
    const Turn& end = turn(parent);
    if (end.finish_reason == v1::FINISH_REASON_LENGTH) {
      return absl::InvalidArgumentError("follows a reply that was cut by length, which nothing can follow");
    }
    const int32_t last_id = end.ids.empty() ? -1 : end.ids.back();
    out.drops_stop = !end.ids.empty() && !format_.continues(last_id, added.front());
    out.added_ids = format_.render_more(added, out.drops_stop ? -1 : last_id);
  }
  const std::vector<int32_t> prompt = format_.generation_prompt();
  out.added_ids.insert(out.added_ids.end(), prompt.begin(), prompt.end());
  append_context(parent, out.drops_stop, &out.prompt_ids);
  out.prompt_ids.insert(out.prompt_ids.end(), out.added_ids.begin(), out.added_ids.end());
  return out;
}

void Session::append_context(int64_t parent, bool drops_stop, std::vector<int32_t>* ids) const {
  std::vector<int64_t> path;
  for (int64_t at = parent; at >= 0; at = turn(at).parent) path.push_back(at);
  ids->reserve(static_cast<size_t>(context_tokens(parent, drops_stop)) + 64);
  for (size_t i = path.size(); i-- > 0;) {
    const Turn& each = turn(path[i]);
    const bool drops = i > 0 ? turn(path[i - 1]).drops_stop : drops_stop;
    ids->insert(ids->end(), each.added_ids.begin(), each.added_ids.end());
    ids->insert(ids->end(), each.ids.begin(), each.ids.end() - (drops ? 1 : 0));
  }
}

absl::Status Session::check_place(const PendingTurn& pending) const {
  const auto outdated = [] {
    return absl::FailedPreconditionError(
        "the turn is out of date: another reply was recorded since it was begun");
  };
  if (pending.parent >= 0 && !is_alive(pending.parent)) return outdated();
  if (pending.replaces) {
    if (!is_alive(pending.replaced) || turn(pending.replaced).parent != pending.parent) return outdated();
    if (!turn(pending.replaced).children.empty()) return outdated();
  } else if (!options_.branching && !children(pending.parent).empty()) {
    return outdated();
  }
  return absl::OkStatus();
}

absl::Status Session::check_reply(const Reply& reply, int64_t prompt_tokens) const {
  const size_t count = reply.ids.size();
  const size_t sampled = options_.demonstration ? 0 : count;
  RETURN_IF_ERROR(check_column("log-probs", reply.logprobs, sampled));
  RETURN_IF_ERROR(check_column("policy versions", reply.policy_versions, sampled));
  RETURN_IF_ERROR(check_column("context versions", reply.context_versions, sampled));
  if (!reply.truncated.empty()) RETURN_IF_ERROR(check_column("truncation flags", reply.truncated, count));
  const v1::FinishReason reason = reply.finish_reason;
  if (reason != v1::FINISH_REASON_STOP && reason != v1::FINISH_REASON_LENGTH &&
      reason != v1::FINISH_REASON_ABORTED) {
    return bad_reply(
        absl::StrCat("finish reason ", static_cast<int>(reason), ", expected stop, length or aborted"));
  }
  if (count == 0 && reason != v1::FINISH_REASON_ABORTED) return bad_reply("no tokens");
  for (size_t i = 0; i < count; ++i) {
    if (reply.ids[i] < 0)
      return bad_reply(absl::StrCat("token ", i, " has id ", reply.ids[i], ", expected 0 or more"));
  }
  const int64_t rows = prompt_tokens + static_cast<int64_t>(count) - 1;  // the last token has none
  int64_t before = 0;
  for (const v1::Replay& piece : reply.replay) {
    if (piece.first_row() < before || piece.num_rows() < 0 || piece.first_row() > rows ||
        piece.num_rows() > rows - piece.first_row()) {
      return bad_reply(absl::StrCat("replay of ", piece.num_rows(), " rows from row ", piece.first_row(),
                                    ", expected rows in order, from ", before, " to ", rows - 1));
    }
    before = piece.first_row();
  }
  return absl::OkStatus();
}

// A worker returns only the rows it computed now. The rows of a prompt that a lost attempt or a sibling
// branch made it compute before are in their pieces: as far as the contexts agree they are this turn's too.
void Session::inherit_rows(const PendingTurn& pending, Turn* fresh) const {
  const int64_t first = fresh->replay.front().first_row();
  const int64_t context = context_tokens(pending.parent, pending.drops_stop);
  for (const int64_t index : children(pending.parent)) {
    const Turn& donor = turn(index);
    if (donor.drops_stop != fresh->drops_stop || donor.replay_rows < first) continue;
    const auto agreed = std::mismatch(donor.added_ids.begin(), donor.added_ids.end(),
                                      fresh->added_ids.begin(), fresh->added_ids.end())
                            .first -
                        donor.added_ids.begin();
    if (context + agreed < first) continue;
    std::vector<v1::Replay> pieces;
    for (const v1::Replay& piece : donor.replay) {
      if (piece.first_row() >= first) continue;
      pieces.push_back(piece);
      pieces.back().set_num_rows(std::min(piece.num_rows(), first - piece.first_row()));
    }
    std::move(fresh->replay.begin(), fresh->replay.end(), std::back_inserter(pieces));
    fresh->replay = std::move(pieces);
    return;
  }
}

absl::StatusOr<ChatMessage> Session::commit(const PendingTurn& pending, Reply reply) {
  RETURN_IF_ERROR(check_place(pending));
  const int64_t prompt_tokens =
      context_tokens(pending.parent, pending.drops_stop) + static_cast<int64_t>(pending.added_ids.size());
  RETURN_IF_ERROR(check_reply(reply, prompt_tokens));

  const int64_t index = static_cast<int64_t>(turns_.size());
  auto fresh = std::make_unique<Turn>();
  fresh->parent = pending.parent;
  fresh->drops_stop = pending.drops_stop;
  fresh->added = pending.added;
  fresh->added_ids = pending.added_ids;
  fresh->prompt_tokens = prompt_tokens;
  fresh->reply = format_.parse_reply(reply.ids, options_.tools, options_.use_tools);
  for (size_t i = 0; i < fresh->reply.tool_calls.size(); ++i) {
    fresh->reply.tool_calls[i].id = absl::StrCat("call_", index, "_", i);
  }
  fresh->ids = std::move(reply.ids);
  fresh->ids.shrink_to_fit();
  fresh->logprobs = std::move(reply.logprobs);
  fresh->logprobs.shrink_to_fit();
  fresh->policy_versions = RunColumn(reply.policy_versions);
  fresh->context_versions = RunColumn(reply.context_versions);
  fresh->truncated = std::move(reply.truncated);
  fresh->finish_reason = reply.finish_reason;
  fresh->worker_id = std::move(reply.worker_id);
  fresh->replay = std::move(reply.replay);
  const Turn* parent = pending.parent < 0 ? nullptr : &turn(pending.parent);
  fresh->captured = !fresh->replay.empty() || (parent != nullptr && parent->captured);
  fresh->replay_rows = parent == nullptr ? 0 : parent->replay_rows;
  if (!fresh->replay.empty() && fresh->replay.front().first_row() > fresh->replay_rows)
    inherit_rows(pending, fresh.get());
  for (const v1::Replay& piece : fresh->replay) {
    if (piece.first_row() > fresh->replay_rows) break;
    fresh->replay_rows = std::max(fresh->replay_rows, piece.first_row() + piece.num_rows());
  }

  ++num_turns_;
  num_tokens_ += static_cast<int64_t>(fresh->added_ids.size() + fresh->ids.size());
  non_finite_logprobs_ += std::count_if(fresh->logprobs.begin(), fresh->logprobs.end(),
                                        [](float x) { return !std::isfinite(x); });
  std::vector<int64_t>& siblings = children(pending.parent);
  if (pending.replaces) {
    std::unique_ptr<Turn>& lost = turns_[static_cast<size_t>(pending.replaced)];
    --num_turns_;
    num_tokens_ -= static_cast<int64_t>(lost->added_ids.size() + lost->ids.size());
    std::replace(siblings.begin(), siblings.end(), pending.replaced, index);
    lost.reset();
  } else {
    siblings.push_back(index);
  }
  ChatMessage parsed = fresh->reply;
  turns_.push_back(std::move(fresh));
  last_ = index;
  return parsed;
}

std::string Session::serialize() const {
  Bytes out;
  out.number(last_);
  out.number(non_finite_logprobs_);
  out.column(roots_);
  out.number(static_cast<int64_t>(turns_.size()));
  for (const std::unique_ptr<Turn>& each : turns_) {
    out.number(each != nullptr);
    if (each == nullptr) continue;
    out.number(each->parent);
    out.number(each->drops_stop);
    out.column(each->children);
    out.number(static_cast<int64_t>(each->added.size()));
    for (const ChatMessage& message : each->added) out.message(message);
    out.column(each->added_ids);
    out.message(each->reply);
    out.column(each->ids);
    out.column(each->logprobs);
    const int64_t count = static_cast<int64_t>(each->ids.size());
    each->policy_versions.copy(0, count, [&](int32_t value) { out.number(value); });
    each->context_versions.copy(0, count, [&](int32_t value) { out.number(value); });
    for (const bool value : each->truncated) out.number(value);
    out.number(each->finish_reason);
    out.text(each->worker_id);
    for (const v1::Replay& piece : each->replay) {
      out.number(piece.first_row());
      out.number(piece.num_rows());
      out.text(piece.experts());
      out.text(piece.selections());
      out.number(piece.raw_bytes());
    }
  }
  return out.take();
}

}  // namespace slipstream::gateway
