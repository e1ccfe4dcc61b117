// Goal: whatever agents, engines and environments do, a sample is exactly the concatenation of what the
// engine was given and what it sampled, every sampled token carries loss once, and refused calls leave no
// trace. Random sessions against a plain record.
#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "gateway/messages.h"
#include "gateway/session.h"
#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

using model::ChatFormat;
using model::ChatMessage;
using model::ChatRole;
using Ids = std::vector<int32_t>;

class Agent {
 public:
  explicit Agent(uint64_t seed) : random_(seed) {}
  uint64_t below(uint64_t n) { return random_() % n; }
  bool one_in(uint64_t n) { return below(n) == 0; }

  std::string text() {
    static const char* const pieces[] = {"a", "b", "\n", " ", "<|user|>", "<tool_call>", "☀", "\"", "{", "7"};
    std::string out;
    for (uint64_t n = below(6); n > 0; --n) out += pieces[below(std::size(pieces))];
    if (one_in(8)) out.push_back(static_cast<char>(below(256)));
    return out;
  }
  std::vector<ChatMessage> messages(bool start) {
    static constexpr ChatRole kRoles[] = {ChatRole::kUser, ChatRole::kTool, ChatRole::kTool,
                                          ChatRole::kSystem, ChatRole::kAssistant};
    std::vector<ChatMessage> out;
    for (uint64_t n = 1 + below(3); n > 0; --n) {
      out.push_back({.role = start ? ChatRole::kUser : kRoles[below(one_in(4) ? 5 : 3)], .content = text()});
    }
    return out;
  }
  // Any ids at all, ending as replies end.
  Reply reply(bool may_stop_early) {
    Reply out;
    for (uint64_t n = below(12); n > 0; --n) {
      static constexpr int32_t kMarkup[] = {259, 260, 263, 264, 265, 266, 267, 268, 269, 270, 271, 272};
      out.ids.push_back(one_in(2) ? kMarkup[below(std::size(kMarkup))]
                                  : static_cast<int32_t>(one_in(9) ? below(2000) + 300 : below(256)));
    }
    if (one_in(5)) {
      for (const int32_t id : Ids{265, 'f', 267, 'k', 268, 269, 'v', 270, 266}) out.ids.push_back(id);
    }
    const uint64_t end = below(may_stop_early ? 8 : 6);
    if (end == 6) out.finish_reason = v1::FINISH_REASON_LENGTH;
    if (end == 7) out.finish_reason = v1::FINISH_REASON_ABORTED;
    if (end < 6) out.ids.push_back(256 + static_cast<int32_t>(std::min<uint64_t>(end, 2)));
    if (out.ids.empty()) out.ids.push_back('x');
    for (size_t i = 0; i < out.ids.size(); ++i) {
      out.logprobs.push_back(-static_cast<float>(below(1000)) / 64.0f);
      out.policy_versions.push_back(static_cast<int32_t>(below(3)));
      out.context_versions.push_back(static_cast<int32_t>(below(2)));
    }
    return out;
  }
  // The same message, as a client might send it back.
  ChatMessage echo(ChatMessage message) {
    for (model::ChatToolCall& call : message.tool_calls) {
      call.id = one_in(2) ? "" : "other";
      if (one_in(2)) call.arguments = " " + call.arguments + "\n";
    }
    return message;
  }
  ChatMessage distort(ChatMessage message) {
    switch (below(4)) {
      case 0:
        message.content += "!";
        break;
      case 1:
        message.reasoning += "!";
        break;
      case 2:
        message.role = message.role == ChatRole::kUser ? ChatRole::kSystem : ChatRole::kUser;
        break;
      default:
        message.tool_calls.push_back({.name = "never", .arguments = "{}"});
    }
    return message;
  }

 private:
  std::mt19937_64 random_;
};

// What was given and sampled, kept the simplest way.
struct Record {
  Ids prompt;
  Reply reply;
  std::vector<ChatMessage> conversation;  // reply included
  bool alive = true;
};

struct World {
  explicit World(bool thinking, Session::Options options)
      : tokenizer(model::open_tokenizer("bytes").value()),
        format(ChatFormat::create({.thinking = thinking}, *tokenizer).value()),
        session(*format, std::move(options)) {}
  std::unique_ptr<model::Tokenizer> tokenizer;
  std::unique_ptr<ChatFormat> format;
  Session session;
  std::map<int64_t, Record> records;  // by turn
  int64_t turns = 0;

  // Recording must work.
  void commit(const PendingTurn& turn, Agent* agent, bool may_stop_early) {
    Reply reply = agent->reply(may_stop_early);
    Record record{.prompt = turn.prompt_ids, .reply = reply, .conversation = {}};
    if (turn.parent >= 0) record.conversation = records.at(turn.parent).conversation;
    for (const ChatMessage& message : turn.added) record.conversation.push_back(message);
    // A reply that does not add up first: it must leave no trace.
    if (agent->one_in(4)) {
      Reply bad = reply;
      bad.logprobs.pop_back();
      const std::string before = session.serialize();
      ASSERT_EQ(session.commit(turn, std::move(bad)).status().code(), absl::StatusCode::kInvalidArgument);
      ASSERT_EQ(session.serialize(), before);
    }
    const auto message = session.commit(turn, std::move(reply));
    ASSERT_TRUE(message.ok()) << message.status();
    record.conversation.push_back(*message);
    if (turn.replaces) records.at(turn.replaced).alive = false;
    records.emplace(turns++, std::move(record));
  }

  Ids whole(const Record& record) const {
    Ids out = record.prompt;
    out.insert(out.end(), record.reply.ids.begin(), record.reply.ids.end());
    return out;
  }
};

Ids ids_of(const v1::Sample& sample) { return {sample.ids().begin(), sample.ids().end()}; }

// Samples are whole records; loss and log-probs are each sampled token's own, once.
void check_samples(const World& world, bool aborts) {
  std::multiset<std::pair<int32_t, float>> trained, sampled;
  std::set<Ids> wholes;
  for (const auto& [index, record] : world.records) {
    if (!record.alive) continue;
    wholes.insert(world.whole(record));
    for (size_t i = 0; i < record.reply.ids.size(); ++i)
      sampled.emplace(record.reply.ids[i], record.reply.logprobs[i]);
  }
  for (const v1::Sample& sample : world.session.samples()) {
    const Ids ids = ids_of(sample);
    ASSERT_TRUE(wholes.contains(ids)) << "a sample that no engine call saw";
    ASSERT_FALSE(sample.length_truncated());
    size_t at = 0;
    int action = 0;
    ASSERT_EQ(sample.spans(0).kind(), v1::SPAN_KIND_PROMPT);
    for (const v1::Span& span : sample.spans()) {
      ASSERT_GT(span.length(), 0);
      for (int i = 0; i < span.length(); ++i, ++at) {
        if (span.kind() == v1::SPAN_KIND_ACTION) trained.emplace(ids[at], sample.action_logprobs(action++));
      }
    }
    ASSERT_EQ(at, ids.size());
    ASSERT_EQ(action, sample.action_logprobs_size());
    ASSERT_EQ(action, sample.action_policy_versions_size());
    ASSERT_EQ(action, sample.action_context_versions_size());
    ASSERT_GT(action, 0);
  }
  if (aborts) {
    ASSERT_TRUE(std::includes(sampled.begin(), sampled.end(), trained.begin(), trained.end()));
  } else {
    ASSERT_EQ(trained, sampled);
  }
}

// Driving and driven sessions of the same conversation give the engine the same ids.
TEST(SessionPropertyTest, BeginAndExtendAgree) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Agent agent(seed), same(seed ^ 0x5555), twin(seed ^ 0x5555);
    World driving(seed % 2 == 0, {}), driven(seed % 2 == 0, {});
    std::vector<ChatMessage> conversation;
    for (int turn = 0; turn < 8; ++turn) {
      const std::vector<ChatMessage> added = agent.messages(turn == 0);
      conversation.insert(conversation.end(), added.begin(), added.end());
      const auto begun = driving.session.begin(conversation);
      const auto extended = driven.session.extend(added);
      ASSERT_TRUE(begun.ok()) << begun.status() << " seed " << seed;
      ASSERT_TRUE(extended.ok()) << extended.status();
      ASSERT_EQ(begun->prompt_ids, extended->prompt_ids);
      ASSERT_EQ(begun->added_ids, extended->added_ids);
      driving.commit(*begun, &same, false);
      driven.commit(*extended, &twin, false);
      conversation.push_back(agent.echo(driving.records.at(turn).conversation.back()));
    }
    ASSERT_EQ(driving.session.serialize(), driven.session.serialize());
    check_samples(driving, false);
    // Each prompt starts with the one before it and what was sampled, less a stop that opened the wrong
    // message.
    for (int64_t turn = 1; turn < driving.turns; ++turn) {
      Ids before = driving.whole(driving.records.at(turn - 1));
      const Ids& prompt = driving.records.at(turn).prompt;
      if (before.size() > prompt.size() || !std::equal(before.begin(), before.end(), prompt.begin()))
        before.pop_back();
      ASSERT_TRUE(before.size() < prompt.size() && std::equal(before.begin(), before.end(), prompt.begin()));
    }
  }
}

// Agents that retry, rewind, edit and compact; engines that cut and abort.
TEST(SessionPropertyTest, RandomAgents) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const bool branching = seed % 2 == 0, aborts = seed % 4 < 2;
    Agent agent(seed);
    World world(seed % 3 == 0, {.branching = branching});
    int refused = 0, accepted = 0;
    for (int step = 0; step < 30; ++step) {
      // Somewhere in what was said before, go on, repeat, cut short or distort.
      std::vector<ChatMessage> conversation;
      if (!world.records.empty()) {
        auto from = world.records.begin();
        std::advance(from, static_cast<int64_t>(agent.one_in(2) ? world.records.size() - 1
                                                                : agent.below(world.records.size())));
        conversation = from->second.conversation;
        for (ChatMessage& message : conversation) message = agent.echo(message);
        if (agent.one_in(4)) conversation.pop_back();
        if (agent.one_in(6)) conversation.resize(agent.below(conversation.size()) + 1);
        if (agent.one_in(6)) {
          ChatMessage& message = conversation[agent.below(conversation.size())];
          message = agent.distort(message);
        }
      }
      if (!agent.one_in(3) || conversation.empty()) {
        for (ChatMessage& message : agent.messages(conversation.empty()))
          conversation.push_back(std::move(message));
      }
      const std::string before = world.session.serialize();
      const auto turn = agent.one_in(10) && conversation.size() > 1
                            ? world.session.extend({conversation.back()})
                            : world.session.begin(conversation);
      ASSERT_EQ(world.session.serialize(), before);
      if (!turn.ok()) {
        ASSERT_EQ(turn.status().code(), absl::StatusCode::kInvalidArgument);
        ASSERT_NE(turn.status().message().find("message "), absl::string_view::npos) << turn.status();
        ++refused;
        continue;
      }
      ++accepted;
      if (agent.one_in(8)) continue;  // the engine failed
      world.commit(*turn, &agent, aborts);
      if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
      const auto alive = std::count_if(world.records.begin(), world.records.end(),
                                       [](const auto& each) { return each.second.alive; });
      ASSERT_EQ(world.session.num_turns(), alive);
    }
    ASSERT_GT(accepted, 0);
    ASSERT_TRUE(branching || refused > 0) << seed;
    check_samples(world, aborts);
    if (testing::Test::HasFatalFailure()) FAIL() << "seed " << seed;
  }
}

// Truncated samples are the full ones, cut.
TEST(SessionPropertyTest, TruncationIsAPrefix) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    Agent agent(seed);
    const int limit = 1 + static_cast<int>(agent.below(120));
    World full(false, {}), cut(false, {.max_seq_len = limit});
    for (int turn = 0; turn < 5; ++turn) {
      const std::vector<ChatMessage> added = agent.messages(turn == 0);
      Agent engine(seed * 100 + static_cast<uint64_t>(turn)), twin(seed * 100 + static_cast<uint64_t>(turn));
      full.commit(full.session.extend(added).value(), &engine, false);
      cut.commit(cut.session.extend(added).value(), &twin, false);
    }
    const std::vector<v1::Sample> expected = full.session.samples(), got = cut.session.samples();
    ASSERT_LE(got.size(), expected.size());
    ASSERT_GE(got.size(), 1u);
    size_t next = 0;
    for (const v1::Sample& sample : got) {
      const Ids ids = ids_of(sample);
      // Samples with nothing left to train are left out, so the match is the next one that starts with these
      // ids.
      for (;; ++next) {
        ASSERT_LT(next, expected.size());
        Ids start = ids_of(expected[next]);
        start.resize(std::min<size_t>(start.size(), static_cast<size_t>(limit)));
        if (start == ids) break;
      }
      ASSERT_EQ(sample.length_truncated(), expected[next].ids_size() > limit);
      for (int i = 0; i < sample.action_logprobs_size(); ++i) {
        ASSERT_EQ(sample.action_logprobs(i), expected[next].action_logprobs(i));
        ASSERT_EQ(sample.action_policy_versions(i), expected[next].action_policy_versions(i));
      }
      ++next;
    }
  }
}

}  // namespace
}  // namespace slipstream::gateway
