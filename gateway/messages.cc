#include "gateway/messages.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/escaping.h"
#include "model/chat_json.h"

namespace slipstream::gateway {
namespace {

using model::ChatMessage;
using model::ChatRole;
using model::ChatTool;
using model::ChatToolCall;
using nlohmann::ordered_json;

std::string quoted(const std::string& text) {
  return absl::StrCat("\"", absl::Utf8SafeCHexEscape(text), "\"");
}

// Not nlohmann's ==: it compares a large unsigned number with a negative one after a cast, and objects in key
// order.
bool same_number(const ordered_json& a, const ordered_json& b) {
  if (a.is_number_float() || b.is_number_float()) return a.get<double>() == b.get<double>();
  const bool a_negative = !a.is_number_unsigned() && a.get<int64_t>() < 0;
  const bool b_negative = !b.is_number_unsigned() && b.get<int64_t>() < 0;
  return a_negative == b_negative && a.get<uint64_t>() == b.get<uint64_t>();
}

bool same_value(const ordered_json& a, const ordered_json& b) {
  if (a.is_number() && b.is_number()) return same_number(a, b);
  if (a.type() != b.type()) return false;
  if (a.is_array()) return std::equal(a.begin(), a.end(), b.begin(), b.end(), same_value);
  if (!a.is_object()) return a == b;
  if (a.size() != b.size()) return false;
  std::vector<std::pair<std::string_view, const ordered_json*>> left, right;
  for (const auto& [key, value] : a.items()) left.emplace_back(key, &value);
  for (const auto& [key, value] : b.items()) right.emplace_back(key, &value);
  std::sort(left.begin(), left.end());
  std::sort(right.begin(), right.end());
  return std::equal(left.begin(), left.end(), right.begin(), [](const auto& x, const auto& y) {
    return x.first == y.first && same_value(*x.second, *y.second);
  });
}

const char* name_of(ChatRole role) {
  switch (role) {
    case ChatRole::kSystem:
      return "system";
    case ChatRole::kUser:
      return "user";
    case ChatRole::kAssistant:
      return "assistant";
    case ChatRole::kTool:
      return "tool";
  }
  return "unknown";
}

// The first place where two texts part, with a little around it.
std::string text_difference(const std::string& field, const std::string& stored, const std::string& sent) {
  const size_t at = static_cast<size_t>(
      std::mismatch(stored.begin(), stored.end(), sent.begin(), sent.end()).first - stored.begin());
  const size_t from = at < 12 ? 0 : at - 12;
  return absl::StrCat(field, " differs at byte ", at, ": got ", quoted(sent.substr(from, 40)), ", expected ",
                      quoted(stored.substr(from, 40)));
}

absl::Status bad_message(const std::string& what) { return absl::InvalidArgumentError(what); }

absl::Status at_index(const char* list, int index, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(list, "[", index, "].", status.message()));
}

}  // namespace

absl::StatusOr<ChatMessage> from_proto(const v1::Message& message) {
  ChatMessage out;
  switch (message.role()) {
    case v1::ROLE_SYSTEM:
      out.role = ChatRole::kSystem;
      break;
    case v1::ROLE_USER:
      out.role = ChatRole::kUser;
      break;
    case v1::ROLE_ASSISTANT:
      out.role = ChatRole::kAssistant;
      break;
    case v1::ROLE_TOOL:
      out.role = ChatRole::kTool;
      break;
    default:
      return bad_message(absl::StrCat("role: ", static_cast<int>(message.role()),
                                      ", expected system, user, assistant or tool"));
  }
  if (out.role != ChatRole::kAssistant) {
    if (!message.reasoning().empty())
      return bad_message(absl::StrCat("reasoning: only an assistant has it, not ", name_of(out.role)));
    if (message.tool_calls_size() > 0)
      return bad_message(absl::StrCat("tool_calls: only an assistant has them, not ", name_of(out.role)));
  }
  out.content = message.content();
  out.reasoning = message.reasoning();
  out.tool_call_id = message.tool_call_id();
  for (int i = 0; i < message.tool_calls_size(); ++i) {
    const v1::ToolCall& call = message.tool_calls(i);
    if (call.name().empty())
      return bad_message(absl::StrCat("tool_calls[", i, "].name: empty, expected a tool's name"));
    out.tool_calls.push_back({.id = call.id(), .name = call.name(), .arguments = call.arguments()});
  }
  return out;
}

absl::StatusOr<std::vector<ChatMessage>> from_proto(
    const google::protobuf::RepeatedPtrField<v1::Message>& messages) {
  std::vector<ChatMessage> out;
  out.reserve(static_cast<size_t>(messages.size()));
  for (int i = 0; i < messages.size(); ++i) {
    absl::StatusOr<ChatMessage> message = from_proto(messages[i]);
    if (!message.ok()) return at_index("messages", i, message.status());
    out.push_back(*std::move(message));
  }
  return out;
}

v1::Message to_proto(const ChatMessage& message) {
  v1::Message out;
  switch (message.role) {
    case ChatRole::kSystem:
      out.set_role(v1::ROLE_SYSTEM);
      break;
    case ChatRole::kUser:
      out.set_role(v1::ROLE_USER);
      break;
    case ChatRole::kAssistant:
      out.set_role(v1::ROLE_ASSISTANT);
      break;
    case ChatRole::kTool:
      out.set_role(v1::ROLE_TOOL);
      break;
  }
  out.set_content(message.content);
  out.set_reasoning(message.reasoning);
  out.set_tool_call_id(message.tool_call_id);
  for (const ChatToolCall& call : message.tool_calls) {
    v1::ToolCall* item = out.add_tool_calls();
    item->set_id(call.id);
    item->set_name(call.name);
    item->set_arguments(call.arguments);
  }
  return out;
}

absl::StatusOr<std::vector<ChatTool>> from_proto(const google::protobuf::RepeatedPtrField<v1::Tool>& tools) {
  std::vector<ChatTool> out;
  std::set<std::string> names;
  for (int i = 0; i < tools.size(); ++i) {
    const v1::Tool& tool = tools[i];
    if (tool.name().empty()) return at_index("tools", i, bad_message("name: empty, expected a name"));
    if (!names.insert(tool.name()).second) {
      return at_index("tools", i,
                      bad_message(absl::StrCat("name: ", quoted(tool.name()), " is given to two tools")));
    }
    const auto parameters = model::parse_strict_json(tool.parameters());
    if (!tool.parameters().empty() && !(parameters && parameters->is_object())) {
      return at_index("tools", i,
                      bad_message(absl::StrCat("parameters: ", quoted(tool.parameters().substr(0, 60)),
                                               ", expected a JSON object")));
    }
    out.push_back({.name = tool.name(), .description = tool.description(), .parameters = tool.parameters()});
  }
  return out;
}

bool same_arguments(const std::string& a, const std::string& b) {
  if (a == b) return true;
  const auto left = model::parse_strict_json(a.empty() ? "{}" : a);
  if (!left) return false;
  const auto right = model::parse_strict_json(b.empty() ? "{}" : b);
  return right && same_value(*left, *right);
}

std::optional<std::string> difference(const ChatMessage& stored, const ChatMessage& sent) {
  if (stored.role != sent.role) {
    return absl::StrCat("role differs: got ", name_of(sent.role), ", expected ", name_of(stored.role));
  }
  if (stored.content != sent.content) return text_difference("content", stored.content, sent.content);
  if (stored.reasoning != sent.reasoning)
    return text_difference("reasoning", stored.reasoning, sent.reasoning);
  if (stored.tool_calls.size() != sent.tool_calls.size()) {
    return absl::StrCat("tool_calls differ: got ", sent.tool_calls.size(), ", expected ",
                        stored.tool_calls.size());
  }
  for (size_t i = 0; i < stored.tool_calls.size(); ++i) {
    const ChatToolCall& expected = stored.tool_calls[i];
    const ChatToolCall& got = sent.tool_calls[i];
    const std::string field = absl::StrCat("tool_calls[", i, "]");
    if (expected.name != got.name) return text_difference(field + ".name", expected.name, got.name);
    if (!same_arguments(expected.arguments, got.arguments)) {
      return text_difference(field + ".arguments", expected.arguments, got.arguments);
    }
  }
  return std::nullopt;
}

}  // namespace slipstream::gateway
