// Goal: messages cross the wire unharmed, bad ones are refused by field, and two messages are the same
// exactly when a model would have meant the same by them.
#include "gateway/messages.h"

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

using model::ChatMessage;
using model::ChatRole;

TEST(SameArgumentsTest, ComparesJsonValues) {
  const std::pair<const char*, const char*> same[] = {
      {R"({"a":1,"b":[1,2]})", R"({ "b" : [1, 2], "a" : 1 })"},
      {R"({"a":1})", R"({"a":1.0})"},
      {R"({"a":1})", R"({"a":10e-1})"},
      {R"({"a":-0.0})", R"({"a":0})"},
      {R"({"a":{"x":1,"y":{"p":null,"q":true}}})", R"({"a":{"y":{"q":true,"p":null},"x":1}})"},
      {R"({"a":"\u00e9\n"})", "{\"a\":\"é\\u000a\"}"},
      {"", "{}"},
      {"not json", "not json"},
      {R"({"a":1,"a":2})", R"({"a":1,"a":2})"},
      {"{\"a\":\"\xff\"}", "{\"a\":\"\xff\"}"},
  };
  for (const auto& [a, b] : same) {
    EXPECT_TRUE(same_arguments(a, b)) << a << b;
    EXPECT_TRUE(same_arguments(b, a)) << a << b;
  }
  const std::pair<const char*, const char*> different[] = {
      {R"({"a":1})", R"({"a":true})"},
      {R"({"a":0})", R"({"a":false})"},
      {R"({"a":1})", R"({"a":"1"})"},
      {R"({"a":null})", R"({})"},
      {R"({"a":[1,2]})", R"({"a":[2,1]})"},
      {R"({"a":[1,2]})", R"({"a":[1,2,3]})"},
      {R"({"a":[]})", R"({"a":{}})"},
      {R"({"a":""})", R"({"a":null})"},
      {R"({"a":1})", R"({"b":1})"},
      {R"({"a":1,"b":1})", R"({"a":1})"},
      {R"({"a":18446744073709551615})", R"({"a":-1})"},
      {R"({"a":9007199254740993})", R"({"a":9007199254740992})"},
      {R"({"a":1,"a":2})", R"({"a":2})"},  // a key twice is text
      {R"({"a":1,"a":2})", R"({"a":1, "a":2})"},
      {R"({"a":{"b":1,"b":1}})", R"({"a":{"b":1,"b":1} })"},
      {"{\"a\":NaN}", "{\"a\": NaN}"},
      {"not json", "not  json"},
      {"", "null"},
  };
  for (const auto& [a, b] : different) {
    EXPECT_FALSE(same_arguments(a, b)) << a << b;
    EXPECT_FALSE(same_arguments(b, a)) << a << b;
  }
  const std::string deep = std::string(50'000, '[') + std::string(50'000, ']');
  EXPECT_TRUE(same_arguments(deep, deep));
  EXPECT_FALSE(same_arguments(deep, " " + deep));
}

TEST(DifferenceTest, IdsDoNotCount) {
  ChatMessage a{.role = ChatRole::kAssistant,
                .content = "x",
                .tool_calls = {{.id = "1", .name = "f", .arguments = "{}"}}};
  ChatMessage b{.role = ChatRole::kAssistant,
                .content = "x",
                .tool_calls = {{.id = "2", .name = "f", .arguments = ""}}};
  EXPECT_EQ(difference(a, b), std::nullopt);
  const ChatMessage t1{.role = ChatRole::kTool, .content = "r", .tool_call_id = "1"};
  const ChatMessage t2{.role = ChatRole::kTool, .content = "r"};
  EXPECT_EQ(difference(t1, t2), std::nullopt);
}

TEST(DifferenceTest, SaysWhatDiffers) {
  const ChatMessage stored{.role = ChatRole::kAssistant,
                           .content = "the answer is 42",
                           .reasoning = "why",
                           .tool_calls = {{.name = "f", .arguments = R"({"a":1})"}}};
  const auto changed = [&](auto change) {
    ChatMessage sent = stored;
    change(&sent);
    return difference(stored, sent).value_or("the same");
  };
  EXPECT_EQ(changed([](ChatMessage* m) { m->role = ChatRole::kUser; }),
            "role differs: got user, expected assistant");
  EXPECT_EQ(changed([](ChatMessage* m) { m->content = "the answer is 43"; }),
            "content differs at byte 15: got \" answer is 43\", expected \" answer is 42\"");
  EXPECT_EQ(changed([](ChatMessage* m) { m->content += "\n"; }),
            "content differs at byte 16: got \"answer is 42\\n\", expected \"answer is 42\"");
  EXPECT_EQ(changed([](ChatMessage* m) { m->reasoning.clear(); }),
            "reasoning differs at byte 0: got \"\", expected \"why\"");
  EXPECT_EQ(changed([](ChatMessage* m) { m->tool_calls.clear(); }), "tool_calls differ: got 0, expected 1");
  EXPECT_EQ(changed([](ChatMessage* m) { m->tool_calls[0].name = "g"; }),
            "tool_calls[0].name differs at byte 0: got \"g\", expected \"f\"");
  EXPECT_EQ(changed([](ChatMessage* m) { m->tool_calls[0].arguments = R"({"a":2})"; }),
            R"(tool_calls[0].arguments differs at byte 5: got "{\"a\":2}", expected "{\"a\":1}")");
}

TEST(MessagesTest, CrossTheWire) {
  const std::vector<ChatMessage> messages = {
      {.role = ChatRole::kSystem, .content = "s"},
      {.role = ChatRole::kUser, .content = std::string("\xff\0x", 3)},
      {.role = ChatRole::kAssistant,
       .content = "c",
       .reasoning = "r",
       .tool_calls = {{.id = "i", .name = "n", .arguments = "a"}, {.id = "", .name = "m", .arguments = ""}}},
      {.role = ChatRole::kTool, .content = "t", .tool_call_id = "i"}};
  google::protobuf::RepeatedPtrField<v1::Message> wire;
  for (const ChatMessage& message : messages) *wire.Add() = to_proto(message);
  const auto back = from_proto(wire);
  ASSERT_TRUE(back.ok()) << back.status();
  ASSERT_EQ(back->size(), messages.size());
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_EQ(difference(messages[i], (*back)[i]), std::nullopt);
    EXPECT_EQ((*back)[i].tool_call_id, messages[i].tool_call_id);
  }
  EXPECT_EQ((*back)[2].tool_calls[0].id, "i");
}

TEST(MessagesTest, BadOnesAreRefusedByField) {
  google::protobuf::RepeatedPtrField<v1::Message> wire;
  wire.Add()->set_role(v1::ROLE_USER);
  v1::Message* bad = wire.Add();
  const auto refusal = [&] { return std::string(from_proto(wire).status().message()); };
  EXPECT_EQ(refusal(), "messages[1].role: 0, expected system, user, assistant or tool");
  bad->set_role(static_cast<v1::Role>(77));
  EXPECT_EQ(refusal(), "messages[1].role: 77, expected system, user, assistant or tool");
  bad->set_role(v1::ROLE_TOOL);
  bad->set_reasoning("x");
  EXPECT_EQ(refusal(), "messages[1].reasoning: only an assistant has it, not tool");
  bad->clear_reasoning();
  bad->add_tool_calls();
  EXPECT_EQ(refusal(), "messages[1].tool_calls: only an assistant has them, not tool");
  bad->set_role(v1::ROLE_ASSISTANT);
  EXPECT_EQ(refusal(), "messages[1].tool_calls[0].name: empty, expected a tool's name");
  bad->mutable_tool_calls(0)->set_name("f");
  EXPECT_TRUE(from_proto(wire).ok());
}

TEST(ToolsTest, BadOnesAreRefusedByField) {
  google::protobuf::RepeatedPtrField<v1::Tool> wire;
  v1::Tool* tool = wire.Add();
  const auto refusal = [&] { return std::string(from_proto(wire).status().message()); };
  EXPECT_EQ(refusal(), "tools[0].name: empty, expected a name");
  tool->set_name("f");
  EXPECT_TRUE(from_proto(wire).ok());
  for (const char* parameters : {"{", "[]", "1", "{} {}"}) {
    tool->set_parameters(parameters);
    EXPECT_EQ(refusal(), absl::StrCat("tools[0].parameters: \"", parameters, "\", expected a JSON object"));
  }
  tool->set_parameters(R"({"type":"object"})");
  tool->set_description("d");
  const auto tools = from_proto(wire);
  ASSERT_TRUE(tools.ok());
  EXPECT_EQ((*tools)[0].name, "f");
  EXPECT_EQ((*tools)[0].description, "d");
  EXPECT_EQ((*tools)[0].parameters, R"({"type":"object"})");
  wire.Add()->set_name("f");
  EXPECT_EQ(refusal(), "tools[1].name: \"f\" is given to two tools");
}

}  // namespace
}  // namespace slipstream::gateway
