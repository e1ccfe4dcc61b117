// Goal: the learner gets exactly the ids the engine saw and sampled, whatever clients do in between. Cases
// C1, C2, C3, C4 and C6 of the field cases and others of their kind.
#include "gateway/session.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

using model::ChatFormat;
using model::ChatMessage;
using model::ChatRole;

constexpr int32_t kEndOfText = 256, kUser = 257, kObservation = 258;

ChatMessage user(std::string text) { return {.role = ChatRole::kUser, .content = std::move(text)}; }
ChatMessage tool(std::string text) { return {.role = ChatRole::kTool, .content = std::move(text)}; }

// One id a byte, but "ab" is one of its own, and markup sits where a test wants it.
class OtherTokenizer : public model::Tokenizer {
 public:
  static constexpr int32_t kAb = 800;
  std::vector<int32_t> encode(std::string_view text) const override {
    std::vector<int32_t> ids;
    for (size_t i = 0; i < text.size(); ++i) {
      const bool pair = text.substr(i, 2) == "ab";
      ids.push_back(pair ? kAb : static_cast<unsigned char>(text[i]));
      i += pair;
    }
    return ids;
  }
  std::string decode(absl::Span<const int32_t> ids) const override {
    std::string text;
    for (const int32_t id : ids) {
      if (id == kAb)
        text += "ab";
      else if (id >= 0 && id < 256)
        text.push_back(static_cast<char>(id));
    }
    return text;
  }
  absl::StatusOr<int32_t> special(std::string_view spelling) const override {
    if (spelling == "<tool_response>") return 900;
    if (spelling == "</tool_response>") return 901;
    const auto at = others_.emplace(spelling, 1000 + static_cast<int32_t>(others_.size())).first;
    return at->second;
  }
  int64_t vocab_size() const override { return 1100; }
  std::string fingerprint() const override { return "other"; }

 private:
  mutable std::map<std::string, int32_t> others_;
};

Reply reply(std::vector<int32_t> ids, std::vector<float> logprobs = {}) {
  const size_t n = ids.size();
  if (logprobs.empty()) logprobs.assign(n, -0.5f);
  return {.ids = std::move(ids),
          .logprobs = std::move(logprobs),
          .policy_versions = std::vector<int32_t>(n, 0),
          .context_versions = std::vector<int32_t>(n, 0)};
}

v1::Replay piece(int64_t first_row, int64_t num_rows, const std::string& bytes = "opaque") {
  v1::Replay out;
  out.set_first_row(first_row);
  out.set_num_rows(num_rows);
  out.set_experts(bytes);
  return out;
}

class SessionTest : public testing::Test {
 protected:
  SessionTest()
      : tokenizer_(model::open_tokenizer("bytes").value()),
        format_(ChatFormat::create({}, *tokenizer_).value()) {}

  std::vector<int32_t> bytes(const std::string& text, int32_t stop = -1) {
    std::vector<int32_t> ids = tokenizer_->encode(text);
    if (stop >= 0) ids.push_back(stop);
    return ids;
  }
  std::string text(absl::Span<const int32_t> ids) { return tokenizer_->decode(ids); }
  static absl::Span<const int32_t> ids_of(const v1::Sample& sample) {
    return {sample.ids().data(), static_cast<size_t>(sample.ids_size())};
  }

  // One turn that must work.
  ChatMessage take(Session* session, const std::vector<ChatMessage>& conversation, Reply sampled) {
    const auto turn = session->begin(conversation);
    EXPECT_TRUE(turn.ok()) << turn.status();
    if (!turn.ok()) return {};
    const auto message = session->commit(*turn, std::move(sampled));
    EXPECT_TRUE(message.ok()) << message.status();
    return message.value_or(ChatMessage());
  }
  // "P12 A3 O4 A2"
  static std::string spans(const v1::Sample& sample) {
    std::string out;
    int total = 0;
    for (const v1::Span& span : sample.spans()) {
      if (!out.empty()) out += " ";
      out += "?PAO"[span.kind()] + std::to_string(span.length());
      total += span.length();
    }
    EXPECT_EQ(total, sample.ids_size());
    return out;
  }
  static int64_t rows(const v1::Sample& sample) {
    int64_t end = 0;
    for (const v1::Replay& each : sample.replay()) {
      EXPECT_LE(each.first_row(), end) << "a gap";
      EXPECT_GT(each.first_row() + each.num_rows(), end) << "a useless piece";
      end = std::max(end, each.first_row() + each.num_rows());
    }
    return end;
  }
  // A call that must fail and change nothing.
  std::string refusal(const Session& session, const std::vector<ChatMessage>& conversation) {
    const std::string before = session.serialize();
    const auto turn = session.begin(conversation);
    EXPECT_EQ(turn.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session.serialize(), before);
    return std::string(turn.status().message());
  }

  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::unique_ptr<ChatFormat> format_;
};

TEST_F(SessionTest, StopTokenBoundary) {  // C1
  const OtherTokenizer tokenizer;
  const auto format = ChatFormat::create({.thinking = true}, tokenizer).value();
  const int32_t observation = tokenizer.special("<|observation|>").value(),
                user_id = tokenizer.special("<|user|>").value();
  const int32_t assistant = tokenizer.special("<|assistant|>").value(),
                think = tokenizer.special("<think>").value();
  Session session(*format, {});
  const auto first = session.extend({user("1234567")});
  ASSERT_TRUE(first.ok());
  const std::vector<int32_t> p = first->prompt_ids;
  ASSERT_EQ(p.size(), 12u);
  ASSERT_TRUE(session.commit(*first, reply({501, 502, observation}, {-.1f, -.2f, -.3f})).ok());

  const auto second = session.extend({tool("")});
  ASSERT_TRUE(second.ok());
  std::vector<int32_t> expected = p;
  for (const int32_t id : {501, 502, observation, 900, 901, assistant, think}) expected.push_back(id);
  EXPECT_EQ(second->prompt_ids, expected);
  ASSERT_TRUE(session.commit(*second, reply({601, user_id}, {-.4f, -.5f})).ok());
  expected.push_back(601);
  expected.push_back(user_id);

  const std::vector<v1::Sample> samples = session.samples();
  ASSERT_EQ(samples.size(), 1u);
  EXPECT_EQ(ids_of(samples[0]), absl::MakeConstSpan(expected));
  EXPECT_EQ(spans(samples[0]), "P12 A3 O4 A2");
  EXPECT_EQ(std::vector<float>(samples[0].action_logprobs().begin(), samples[0].action_logprobs().end()),
            std::vector<float>({-.1f, -.2f, -.3f, -.4f, -.5f}));
}

TEST_F(SessionTest, EndOfTextStaysInTheContext) {  // C1, another stop
  Session session(*format_, {});
  take(&session, {user("a")}, reply(bytes("b", kEndOfText)));
  const auto next = session.extend({user("c")});
  EXPECT_EQ(text(next->prompt_ids),
            "[gMASK]<sop><|user|>a<|assistant|></think>b<|endoftext|><|user|>c<|assistant|></think>");
  EXPECT_FALSE(next->drops_stop);
}

TEST_F(SessionTest, WrongOpenerBranches) {  // C1, the model stopped for another kind of message
  Session session(*format_, {});
  const ChatMessage b = take(&session, {user("a")}, reply(bytes("b", kUser), {-1, -2}));
  const auto next = session.begin({user("a"), b, tool("c")});
  ASSERT_TRUE(next.ok());
  EXPECT_TRUE(next->drops_stop);
  EXPECT_EQ(text(next->prompt_ids),
            "[gMASK]<sop><|user|>a<|assistant|></think>b<|observation|><tool_response>c</"
            "tool_response><|assistant|></think>");
  ASSERT_TRUE(session.commit(*next, reply(bytes("d", kUser), {-3, -4})).ok());
  const std::vector<v1::Sample> samples = session.samples();
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(text(ids_of(samples[0])), "[gMASK]<sop><|user|>a<|assistant|></think>b<|user|>");
  EXPECT_EQ(spans(samples[0]), "P6 A2");
  EXPECT_EQ(samples[0].action_logprobs(1), -2);
  EXPECT_EQ(text(ids_of(samples[1])), text(next->prompt_ids) + "d<|user|>");
  EXPECT_EQ(spans(samples[1]), "P6 O7 A2");  // b is trained in the first
  EXPECT_EQ(samples[1].action_logprobs(0), -3);
  // The path goes on, and its last turn can be asked for again.
  const auto again = session.begin({user("a"), b, tool("c")});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->replaces);
  EXPECT_EQ(again->prompt_ids, next->prompt_ids);
}

TEST_F(SessionTest, AReplyOfOnlyAWrongStop) {
  Session session(*format_, {});
  const ChatMessage empty = take(&session, {user("a")}, reply({kObservation}));
  take(&session, {user("a"), empty, user("b")}, reply({kUser}));
  const auto samples = session.samples();
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(spans(samples[0]), "P6 A1");
  EXPECT_EQ(spans(samples[1]), "P6 O4 A1");
}

TEST_F(SessionTest, SampledIdsAreNeverEncodedAgain) {  // C2
  const OtherTokenizer tokenizer;
  const auto format = ChatFormat::create({}, tokenizer).value();
  const int32_t user_id = tokenizer.special("<|user|>").value();
  ASSERT_EQ(tokenizer.encode("ab").size(), 1u);
  Session session(*format, {});
  auto turn = session.begin({user("q")});
  const std::vector<int32_t> sampled = {'a', 'b', user_id};
  ChatMessage said = session.commit(*turn, reply(sampled)).value();
  EXPECT_EQ(said.content, "ab");
  std::vector<ChatMessage> conversation = {user("q")};
  for (int i = 0; i < 3; ++i) {  // in every later prompt
    conversation.push_back(said);
    conversation.push_back(user("ab"));
    turn = session.begin(conversation);
    ASSERT_TRUE(turn.ok()) << turn.status();
    EXPECT_EQ(absl::MakeConstSpan(turn->prompt_ids).subspan(6, 3), absl::MakeConstSpan(sampled));
    said = session.commit(*turn, reply(sampled)).value();
  }
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(ids_of(sample).subspan(6, 3), absl::MakeConstSpan(sampled));
  EXPECT_EQ(ids_of(sample).last(3), absl::MakeConstSpan(sampled));
}

TEST_F(SessionTest, AdjacentMessagesAreRenderedTogether) {  // C3
  Session session(*format_, {});
  take(&session, {user("a")}, reply(bytes("b", kObservation)));
  const auto both = session.extend({tool("1"), tool("2")});
  std::vector<int32_t> expected = format_->render_more({tool("1"), tool("2")}, kObservation);
  const std::vector<int32_t> prompt = format_->generation_prompt();
  expected.insert(expected.end(), prompt.begin(), prompt.end());
  EXPECT_EQ(both->added_ids, expected);
  EXPECT_EQ(text(both->added_ids),
            "<tool_response>1</tool_response><tool_response>2</tool_response><|assistant|></think>");
}

TEST_F(SessionTest, RetryReplacesTheLastTurn) {  // C4
  Session session(*format_, {});
  const ChatMessage u1 = user("u1"), t1 = tool("t1");
  take(&session, {u1}, reply(bytes("lost", kObservation)));
  const ChatMessage a1 = take(&session, {u1}, reply(bytes("second", kObservation)));
  EXPECT_EQ(session.num_turns(), 1);
  const ChatMessage a2 = take(&session, {u1, a1, t1}, reply(bytes("x", kUser)));
  EXPECT_EQ(text(ids_of(session.samples().at(0))).find("lost"), std::string::npos);
  EXPECT_NE(text(ids_of(session.samples().at(0))).find("</think>second<|observation|><tool_response>t1"),
            std::string::npos);

  const auto again = session.begin({u1, a1, t1});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->replaces);
  const std::string before = session.serialize();
  EXPECT_EQ(refusal(session, {u1}),
            "message 1: missing, expected the stored reply: only the last turn can be asked for again, and "
            "more than one follows");
  EXPECT_EQ(session.serialize(), before);
  ASSERT_TRUE(session.commit(*again, reply(bytes("y", kUser))).ok());
  EXPECT_EQ(session.num_turns(), 2);
  EXPECT_NE(session.serialize(), before);
  const std::string sample = text(ids_of(session.samples().at(0)));
  EXPECT_EQ(sample.substr(sample.size() - 17), "</think>y<|user|>");
  // The reply that was lost is not history.
  EXPECT_EQ(refusal(session, {u1, a1, t1, a2, user("go on")}),
            "message 3: content differs at byte 0: got \"x\", expected \"y\"");
}

TEST_F(SessionTest, HistoryThatDiffersIsNamed) {
  Session session(*format_, {});
  const ChatMessage u1 = user("u1"), t1 = tool("t1");
  EXPECT_EQ(refusal(session, {}), "messages: empty, expected a conversation");
  const ChatMessage a1 = take(&session, {u1}, reply(bytes("one", kObservation)));
  EXPECT_EQ(refusal(session, {u1, a1}), "message 2: missing, expected something new after the stored reply");
  EXPECT_EQ(refusal(session, {user("u2")}),
            "message 0: content differs at byte 1: got \"u2\", expected \"u1\"");
  EXPECT_EQ(refusal(session, {u1, user("more")}), "message 1: role differs: got user, expected assistant");
  const ChatMessage a2 = take(&session, {u1, a1, t1, tool("t2")}, reply(bytes("two", kUser)));
  EXPECT_EQ(refusal(session, {u1, a1, t1}), "message 3: missing, expected the stored message");
  EXPECT_EQ(refusal(session, {u1, a1}), "message 2: missing, expected the stored message");
  EXPECT_EQ(refusal(session, {u1, a1, t1, tool("t3"), a2, u1}),
            "message 3: content differs at byte 1: got \"t3\", expected \"t2\"");
  EXPECT_EQ(refusal(session, {u1, a1, t1, tool("t2"), user("x")}),
            "message 4: role differs: got user, expected assistant");
  ChatMessage edited = a1;
  edited.reasoning = "because";
  EXPECT_EQ(refusal(session, {u1, edited, t1, tool("t2"), a2, u1}),
            "message 1: reasoning differs at byte 0: got \"because\", expected \"\"");
}

TEST_F(SessionTest, CallsComeBackInOtherWords) {
  const model::ChatTool ls{
      .name = "ls",
      .description = "",
      .parameters = R"({"properties": {"path": {"type": "string"}, "depth": {"type": "integer"}}})"};
  Session session(*format_, {.tools = {ls}});
  const ChatMessage call{.role = ChatRole::kAssistant,
                         .tool_calls = {{.name = "ls", .arguments = R"({"path":"/","depth":1})"}}};
  ChatMessage parsed = take(&session, {user("look")}, reply(format_->render_reply(call)));
  ASSERT_EQ(parsed.tool_calls.size(), 1u);
  EXPECT_EQ(parsed.tool_calls[0].id, "call_0_0");
  EXPECT_EQ(parsed.tool_calls[0].arguments, R"({"path":"/","depth":1})");
  parsed.tool_calls[0].id = "toolu_77";
  parsed.tool_calls[0].arguments = R"({ "depth": 1.0, "path": "/" })";
  const auto next = session.begin({user("look"), parsed, tool("bin")});
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(text(next->prompt_ids).find("1.0"), std::string::npos);  // stored ids count
  parsed.tool_calls[0].arguments = R"({"depth": true, "path": "/"})";
  EXPECT_NE(refusal(session, {user("look"), parsed, tool("bin")})
                .find("message 1: tool_calls[0].arguments differs"),
            std::string::npos);
}

TEST_F(SessionTest, ToolChoiceNoneKeepsText) {  // C5: ids do not depend on parsing
  Session with(*format_, {}), without(*format_, {.use_tools = false});
  const ChatMessage call{.role = ChatRole::kAssistant, .tool_calls = {{.name = "now", .arguments = "{}"}}};
  const Reply sampled = reply(format_->render_reply(call));
  EXPECT_EQ(take(&with, {user("a")}, sampled).tool_calls.size(), 1u);
  EXPECT_EQ(take(&without, {user("a")}, sampled).content, "<tool_call>now</tool_call>");
  EXPECT_EQ(with.samples().at(0).SerializeAsString(), without.samples().at(0).SerializeAsString());
}

TEST_F(SessionTest, LengthEndsAPath) {
  for (const bool branching : {false, true}) {
    Session session(*format_, {.branching = branching});
    Reply cut = reply(bytes("abc"));
    cut.finish_reason = v1::FINISH_REASON_LENGTH;
    const ChatMessage a = take(&session, {user("q")}, cut);
    EXPECT_EQ(refusal(session, {user("q"), a, user("more")}),
              "message 2: follows a reply that was cut by length, which nothing can follow");
    EXPECT_EQ(session.extend({user("more")}).status().code(), absl::StatusCode::kInvalidArgument);
    take(&session, {user("q")}, reply(bytes("ok", kUser)));  // but it can be asked for again
    EXPECT_TRUE(session.extend({user("more")}).ok());
  }
}

TEST_F(SessionTest, RepliesThatDoNotAddUpAreRefused) {
  Session session(*format_, {});
  const auto turn = session.extend({user("q")});
  const std::string before = session.serialize();
  const auto refused = [&](auto change) {
    Reply bad = reply(bytes("ab", kUser));
    change(&bad);
    const auto result = session.commit(*turn, bad);
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(session.serialize(), before);
    return std::string(result.status().message());
  };
  EXPECT_EQ(refused([](Reply* r) { r->logprobs.pop_back(); }), "reply: 2 log-probs, expected 3");
  EXPECT_EQ(refused([](Reply* r) { r->logprobs.clear(); }), "reply: 0 log-probs, expected 3");
  EXPECT_EQ(refused([](Reply* r) { r->policy_versions.push_back(0); }),
            "reply: 4 policy versions, expected 3");
  EXPECT_EQ(refused([](Reply* r) { r->context_versions.pop_back(); }),
            "reply: 2 context versions, expected 3");
  EXPECT_EQ(refused([](Reply* r) { r->truncated = {true}; }), "reply: 1 truncation flags, expected 3");
  EXPECT_EQ(refused([](Reply* r) { r->ids[1] = -5; }), "reply: token 1 has id -5, expected 0 or more");
  EXPECT_EQ(refused([](Reply* r) { *r = Reply(); }), "reply: no tokens");
  EXPECT_EQ(refused([](Reply* r) { r->finish_reason = v1::FINISH_REASON_TIMEOUT; }),
            "reply: finish reason 5, expected stop, length or aborted");
  EXPECT_EQ(refused([](Reply* r) { r->replay = {piece(0, 9)}; }),
            "reply: replay of 9 rows from row 0, expected rows in order, from 0 to 7");
  EXPECT_EQ(refused([](Reply* r) {
              r->replay = {piece(4, 2), piece(3, 2)};
            }),
            "reply: replay of 2 rows from row 3, expected rows in order, from 4 to 7");
  EXPECT_EQ(refused([](Reply* r) { r->replay = {piece(INT64_MAX, INT64_MAX)}; }).substr(0, 14),
            "reply: replay ");
  EXPECT_EQ(refused([](Reply* r) { r->replay = {piece(1, INT64_MAX)}; }).substr(0, 14), "reply: replay ");
  EXPECT_EQ(refused([](Reply* r) { r->replay = {piece(-1, 2)}; }).substr(0, 14), "reply: replay ");
  EXPECT_EQ(session.num_turns(), 0);
  EXPECT_TRUE(session.samples().empty());
}

TEST_F(SessionTest, OutdatedTurnsAreRefused) {
  Session session(*format_, {});
  const auto one = session.extend({user("q")}), two = session.extend({user("q")});
  ASSERT_TRUE(session.commit(*one, reply({'a', kUser})).ok());
  EXPECT_EQ(session.commit(*two, reply({'b', kUser})).status().code(), absl::StatusCode::kFailedPrecondition);
  const auto retry = session.begin({user("q")}), other = session.begin({user("q")});
  ASSERT_TRUE(session.commit(*retry, reply({'c', kUser})).ok());
  const std::string before = session.serialize();
  EXPECT_EQ(session.commit(*other, reply({'d', kUser})).status().code(),
            absl::StatusCode::kFailedPrecondition);
  PendingTurn astray = *other;
  astray.parent = 99;
  EXPECT_EQ(session.commit(astray, reply({'d', kUser})).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(session.serialize(), before);
}

TEST_F(SessionTest, ColumnsTravel) {  // C9, C10
  Session session(*format_, {});
  Reply first =
      reply(bytes("abcd", kUser), {-1, std::nanf(""), -3, -std::numeric_limits<float>::infinity(), -5});
  first.policy_versions = {3, 3, 4, 4, 4};
  first.context_versions = {2, 2, 2, 4, 4};
  first.truncated = {false, true, false, false, false};
  first.worker_id = "w1";
  take(&session, {user("q")}, first);
  EXPECT_EQ(session.non_finite_logprobs(), 2);
  Reply second = reply(bytes("e", kUser));
  second.worker_id = "w2";
  ASSERT_TRUE(session.commit(*session.extend({user("r")}), second).ok());
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(spans(sample), "P6 A5 O3 A2");
  EXPECT_EQ(sample.spans(1).worker_id(), "w1");
  EXPECT_EQ(sample.spans(3).worker_id(), "w2");
  EXPECT_EQ(
      std::vector<int32_t>(sample.action_policy_versions().begin(), sample.action_policy_versions().end()),
      std::vector<int32_t>({3, 3, 4, 4, 4, 0, 0}));
  EXPECT_EQ(
      std::vector<int32_t>(sample.action_context_versions().begin(), sample.action_context_versions().end()),
      std::vector<int32_t>({2, 2, 2, 4, 4, 0, 0}));
  EXPECT_EQ(std::vector<bool>(sample.action_masked().begin(), sample.action_masked().end()),
            std::vector<bool>({false, true, false, true, false, false, false}));
  EXPECT_EQ(std::vector<bool>(sample.action_truncated().begin(), sample.action_truncated().end()),
            std::vector<bool>({false, true, false, false, false, false, false}));
  ASSERT_EQ(sample.action_logprobs_size(), 7);
  EXPECT_TRUE(std::isnan(sample.action_logprobs(1)));
  EXPECT_TRUE(std::isinf(sample.action_logprobs(3)));
  EXPECT_EQ(sample.action_logprobs(4), -5);
}

TEST_F(SessionTest, Demonstrations) {
  Session session(*format_, {.demonstration = true});
  const ChatMessage solution{.role = ChatRole::kAssistant, .content = "42"};
  const auto turn = session.extend({user("6*7")});
  EXPECT_FALSE(session.commit(*turn, reply(format_->render_reply(solution))).ok());
  ASSERT_TRUE(session.commit(*turn, {.ids = format_->render_reply(solution)}).ok());
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(spans(sample), "P8 A3");
  EXPECT_EQ(sample.action_logprobs_size() + sample.action_policy_versions_size() +
                sample.action_context_versions_size() + sample.action_masked_size() +
                sample.action_truncated_size(),
            0);
}

// ---- replay and truncation

class ReplayTest : public SessionTest {
 protected:
  // Turn 1 of case C6 has 4 prompt ids, turn 2 a prompt of 9, which no chat prompt is as short as: the turns
  // are made by hand.
  static PendingTurn turn(int64_t parent, int added) {
    return {.parent = parent,
            .added = {user("x")},
            .added_ids = std::vector<int32_t>(static_cast<size_t>(added), 'p')};
  }
  static Reply sampled(int n, std::vector<v1::Replay> replay,
                       v1::FinishReason reason = v1::FINISH_REASON_STOP) {
    Reply out = reply(std::vector<int32_t>(static_cast<size_t>(n), 's'));
    out.replay = std::move(replay);
    out.finish_reason = reason;
    return out;
  }
};

TEST_F(ReplayTest,
       RowsAreMerged) {  // C6, whether turn 2's prompt pass recomputed everything or only what is new
  for (const bool whole : {true, false}) {
    Session session(*format_, {});
    ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 6, "one")})).ok());
    ASSERT_TRUE(
        session.commit(turn(0, 2), sampled(2, {whole ? piece(0, 10, "two") : piece(6, 4, "two")})).ok());
    const v1::Sample sample = session.samples().at(0);
    EXPECT_EQ(sample.ids_size(), 11);
    EXPECT_EQ(rows(sample), 10);
    EXPECT_FALSE(sample.length_truncated());
    ASSERT_EQ(sample.replay_size(), 2);
    EXPECT_EQ(sample.replay(0).first_row(), 0);
    EXPECT_EQ(sample.replay(0).num_rows(), 6);  // rows 0-5 from turn 1: the first piece that has a row counts
    EXPECT_EQ(sample.replay(0).experts(), "one");
    EXPECT_EQ(sample.replay(1).experts(), "two");
  }
}

TEST_F(ReplayTest, TruncationCutsRowsToo) {  // C6
  for (const bool whole : {true, false}) {
    for (int limit = 1; limit <= 12; ++limit) {
      Session session(*format_, {.max_seq_len = limit});
      ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 6)})).ok());
      ASSERT_TRUE(session.commit(turn(0, 2), sampled(2, {whole ? piece(0, 10) : piece(6, 4)})).ok());
      const std::vector<v1::Sample> samples = session.samples();
      ASSERT_EQ(samples.size(), 1u);
      const v1::Sample& sample = samples[0];
      EXPECT_EQ(sample.ids_size(), std::min(limit, 11));
      EXPECT_EQ(rows(sample), std::min(limit, 11) - 1);
      EXPECT_EQ(sample.length_truncated(), limit < 11);
      const int actions = std::clamp(limit - 4, 0, 3) + std::clamp(limit - 9, 0, 2);
      EXPECT_EQ(sample.action_logprobs_size(), actions);
      EXPECT_EQ(sample.action_policy_versions_size(), actions);
      EXPECT_EQ(sample.action_context_versions_size(), actions);
      spans(sample);
    }
  }
}

TEST_F(ReplayTest, MergingStopsBeforeAGap) {  // C6
  Session session(*format_, {});
  ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 6)})).ok());
  ASSERT_TRUE(session.commit(turn(0, 2), sampled(2, {})).ok());
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(sample.ids_size(), 7);
  EXPECT_EQ(rows(sample), 6);
  EXPECT_FALSE(sample.length_truncated());
  // A later turn that has them all does not mend it: what was sampled in between is not known to be
  // replayable.
  ASSERT_TRUE(session.commit(turn(1, 2), sampled(2, {piece(0, 14)})).ok());
  EXPECT_EQ(session.samples().at(0).ids_size(), 7);
}

TEST_F(ReplayTest, OneRowMissingIsAGap) {
  Session session(*format_, {});
  ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 6)})).ok());
  ASSERT_TRUE(session.commit(turn(0, 2), sampled(2, {piece(7, 3)})).ok());  // row 6, of turn 1's last token
  EXPECT_EQ(session.samples().at(0).ids_size(), 7);
  Session short_tail(*format_, {});
  ASSERT_TRUE(short_tail.commit(turn(-1, 4), sampled(3, {piece(0, 6)})).ok());
  ASSERT_TRUE(short_tail.commit(turn(0, 2), sampled(2, {piece(6, 3)})).ok());
  EXPECT_EQ(short_tail.samples().at(0).ids_size(), 7);
  Session inside(*format_, {});
  ASSERT_TRUE(inside.commit(turn(-1, 4), sampled(3, {piece(0, 2), piece(3, 3)})).ok());
  EXPECT_TRUE(inside.samples().empty());
}

TEST_F(ReplayTest, PiecesOfSeveralWorkers) {
  Session session(*format_, {});
  ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 5, "a"), piece(0, 6, "b")}))
                  .ok());  // moved after a token
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(rows(sample), 6);
  EXPECT_EQ(sample.replay_size(), 2);
}

TEST_F(ReplayTest, MergingStopsBeforeAnAbortedTurn) {  // C6
  Session session(*format_, {});
  ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {})).ok());
  ASSERT_TRUE(session.commit(turn(0, 2), sampled(2, {}, v1::FINISH_REASON_ABORTED)).ok());
  ASSERT_TRUE(session.commit(turn(1, 2), sampled(2, {})).ok());
  ASSERT_EQ(session.samples().size(), 1u);
  EXPECT_EQ(spans(session.samples()[0]), "P4 A3");
  Session at_once(*format_, {});
  ASSERT_TRUE(at_once.commit(turn(-1, 4), sampled(0, {}, v1::FINISH_REASON_ABORTED)).ok());
  EXPECT_TRUE(at_once.samples().empty());
}

TEST_F(ReplayTest, ALostAttemptKeepsTheRowsOfItsPrompt) {
  Session session(*format_, {});
  ASSERT_TRUE(session.commit(turn(-1, 4), sampled(3, {piece(0, 6)})).ok());
  ASSERT_TRUE(session.commit(turn(0, 2), sampled(2, {piece(6, 4, "lost")})).ok());
  PendingTurn retry = turn(0, 2);
  retry.replaces = true;
  retry.replaced = 1;
  // The worker still had the prompt, 9 tokens, in its cache.
  ASSERT_TRUE(session.commit(retry, sampled(3, {piece(9, 2, "new")})).ok());
  const v1::Sample sample = session.samples().at(0);
  EXPECT_EQ(sample.ids_size(), 12);
  EXPECT_EQ(rows(sample), 11);
  ASSERT_EQ(sample.replay_size(), 3);
  EXPECT_EQ(sample.replay(1).experts(), "lost");
  EXPECT_EQ(sample.replay(1).num_rows(), 3);
}

TEST_F(ReplayTest, SiblingBranchesShareRowsOfTheIdsTheyShare) {
  Session session(*format_, {.branching = true});
  ASSERT_TRUE(session.commit(turn(-1, 6), sampled(2, {piece(0, 7, "first")})).ok());
  PendingTurn other = turn(-1, 6);
  other.added_ids[5] = 'q';
  ASSERT_TRUE(session.commit(other, sampled(2, {piece(5, 2)})).ok());  // ids 0-4 agree
  ASSERT_EQ(session.samples().size(), 2u);
  EXPECT_EQ(rows(session.samples()[1]), 7);
  other.added_ids[3] = 'q';
  ASSERT_TRUE(session.commit(other, sampled(2, {piece(5, 2)})).ok());  // here they do not
  EXPECT_EQ(session.samples().size(), 2u);
}

TEST_F(ReplayTest, WrongOpenerKeepsItsRows) {
  Session session(*format_, {});
  const auto first = session.extend({user("a")});
  Reply one = reply({'b', kUser});
  one.replay = {piece(0, 7)};
  ASSERT_TRUE(session.commit(*first, one).ok());
  const auto second = session.extend({tool("c")});
  ASSERT_EQ(second->prompt_ids.size(), 13u);
  Reply two = reply({'d', kUser});
  two.replay = {piece(7, 7)};  // the row of 'b' is turn 1's last one, that of the dropped stop never was
  ASSERT_TRUE(session.commit(*second, two).ok());
  const auto samples = session.samples();
  ASSERT_EQ(samples.size(), 2u);
  EXPECT_EQ(rows(samples[0]), 7);
  EXPECT_EQ(rows(samples[1]), 14);
}

// ---- branches

TEST_F(SessionTest, BranchesTrainASharedPrefixOnce) {
  Session session(*format_, {.branching = true});
  const ChatMessage a1 = take(&session, {user("q")}, reply(bytes("one", kUser)));
  const ChatMessage a2 = take(&session, {user("q"), a1, user("x")}, reply(bytes("two", kUser)));
  take(&session, {user("q"), a1, user("x"), a2, user("y")}, reply(bytes("three", kUser)));
  const ChatMessage b2 =
      take(&session, {user("q"), a1, user("z")}, reply(bytes("other", kUser)));  // differs inside history
  take(&session, {user("compacted")}, reply(bytes("four", kUser)));
  take(&session, {user("q"), a1, user("z"), b2, user("w")},
       reply(bytes("five", kUser)));  // goes on with an old branch
  EXPECT_EQ(session.num_turns(), 6);
  const std::vector<v1::Sample> samples = session.samples();
  ASSERT_EQ(samples.size(), 3u);
  EXPECT_EQ(spans(samples[0]), "P6 A4 O3 A4 O3 A6");
  EXPECT_EQ(spans(samples[1]), "P6 O7 A6 O3 A5");
  EXPECT_EQ(spans(samples[2]), "P14 A5");
  EXPECT_NE(text(ids_of(samples[1]))
                .find("one<|user|>z<|assistant|></think>other<|user|>w<|assistant|></think>five"),
            std::string::npos);
}

TEST_F(SessionTest, BranchingStillRetriesTheLastTurn) {
  Session session(*format_, {.branching = true});
  const ChatMessage a1 = take(&session, {user("q")}, reply(bytes("one", kUser)));
  take(&session, {user("q")}, reply(bytes("again", kUser)));
  EXPECT_EQ(session.num_turns(), 1);
  const ChatMessage a = take(&session, {user("q")}, reply(bytes("third", kUser)));
  take(&session, {user("q"), a, user("x")}, reply(bytes("two", kUser)));
  take(&session, {user("q")}, reply(bytes("new branch", kUser)));  // two turns deep: not a lost reply
  EXPECT_EQ(session.num_turns(), 3);
  EXPECT_EQ(session.samples().size(), 2u);
}

TEST_F(SessionTest, TruncatedBranchesWithNothingNewAreLeftOut) {
  Session session(*format_, {.branching = true, .max_seq_len = 10});
  const ChatMessage a1 = take(&session, {user("q")}, reply(bytes("one", kUser)));
  take(&session, {user("q"), a1, user("x")}, reply(bytes("two", kUser)));
  take(&session, {user("q"), a1, user("y")}, reply(bytes("two", kUser)));
  ASSERT_EQ(session.samples().size(), 1u);
  EXPECT_EQ(spans(session.samples()[0]), "P6 A4");
  EXPECT_TRUE(session.samples()[0].length_truncated());
}

TEST_F(SessionTest, CountsTokensOnce) {
  Session session(*format_, {});
  take(&session, {user("q")}, reply(bytes("one", kUser)));
  EXPECT_EQ(session.num_tokens(), 10);
  take(&session, {user("q")}, reply(bytes("twoo", kUser)));
  EXPECT_EQ(session.num_tokens(), 11);
  ASSERT_TRUE(session.commit(*session.extend({user("x")}), reply(bytes("y", kUser))).ok());
  EXPECT_EQ(session.num_tokens(), session.samples().at(0).ids_size());
}

}  // namespace
}  // namespace slipstream::gateway
