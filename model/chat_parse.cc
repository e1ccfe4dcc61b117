// Sampled ids to a message. Markup is special ids only: the same letters in ordinary tokens are text, so that
// a model can quote the format without calling anything.
#include <cmath>
#include <optional>
#include <utility>

#include "model/chat_format.h"
#include "model/chat_json.h"

namespace slipstream::model {
namespace {

using nlohmann::ordered_json;

constexpr std::string_view kBlank = " \t\n\r\v\f";

// JSON types as a set.
enum Kind : unsigned {
  kNull = 1,
  kBoolean = 2,
  kInteger = 4,
  kNumber = 8,
  kString = 16,
  kArray = 32,
  kObject = 64,
  kAnything = 127,
};

unsigned kind_named(const ordered_json& name) {
  if (name == "null") return kNull;
  if (name == "boolean") return kBoolean;
  if (name == "integer") return kInteger;
  if (name == "number") return kNumber | kInteger;
  if (name == "array") return kArray;
  if (name == "object") return kObject;
  return name == "string" ? kString : kAnything;
}

unsigned kind_of(const ordered_json& value) {
  if (value.is_null()) return kNull;
  if (value.is_boolean()) return kBoolean;
  if (value.is_number_integer()) return kInteger;
  if (value.is_number()) {
    const double number = value.get<double>();
    // 1.0 is an integer, and so is one with more digits than fit.
    return std::trunc(number) == number ? kNumber | kInteger : kNumber;
  }
  if (value.is_string()) return kString;
  return value.is_array() ? kArray : kObject;
}

// The types a schema lets through; whatever it does not say is possible.
unsigned kinds_of(const ordered_json& schema) {
  if (!schema.is_object()) return kAnything;
  unsigned kinds = 0;
  if (const auto type = schema.find("type"); type != schema.end()) {
    if (!type->is_array()) return kind_named(*type);
    for (const ordered_json& name : *type) kinds |= kind_named(name);
    return kinds == 0 ? kAnything : kinds;
  }
  if (const auto values = schema.find("enum"); values != schema.end() && values->is_array()) {
    for (const ordered_json& value : *values) kinds |= kind_of(value);
    return kinds == 0 ? kAnything : kinds;
  }
  if (const auto value = schema.find("const"); value != schema.end()) return kind_of(*value);
  for (const char* key : {"anyOf", "oneOf"}) {
    const auto choices = schema.find(key);
    if (choices == schema.end() || !choices->is_array()) continue;
    for (const ordered_json& choice : *choices) kinds |= kinds_of(choice);
    return kinds == 0 ? kAnything : kinds;
  }
  return kAnything;
}

unsigned kinds_of_parameter(const ordered_json& schema, const std::string& key) {
  const auto properties = schema.find("properties");
  if (properties == schema.end() || !properties->is_object()) return kAnything;
  const auto property = properties->find(key);
  return property == properties->end() ? kAnything : kinds_of(*property);
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

// The value as JSON. Numbers and nested values keep the model's own spelling: digits a double cannot hold
// survive.
std::string value_json(const ordered_json& schema, const std::string& key, const std::string& text) {
  const unsigned kinds = kinds_of_parameter(schema, key);
  if ((kinds & kString) == 0) {
    const std::optional<ordered_json> value = parse_strict_json(text);
    if (value && (kind_of(*value) & kinds) != 0) return std::string(trimmed(text));
  }
  return json_string(text);
}

// A JSON object of the arguments; a key given twice keeps its last value.
class Arguments {
 public:
  void set(const std::string& key, std::string value) {
    for (auto& [name, old] : items_) {
      if (name == key) {
        old = std::move(value);
        return;
      }
    }
    items_.emplace_back(key, std::move(value));
  }
  std::string json() const {
    std::string out = "{";
    for (const auto& [name, value] : items_) {
      if (out.size() > 1) out.push_back(',');
      out.append(json_string(name)).append(":").append(value);
    }
    return out + "}";
  }

 private:
  std::vector<std::pair<std::string, std::string>> items_;
};

}  // namespace

bool ChatFormat::is_blank(int32_t id) const {
  return !is_markup(id) && tokenizer_.decode({id}).find_first_not_of(kBlank) == std::string::npos;
}

ChatMessage ChatFormat::parse_reply(absl::Span<const int32_t> ids, absl::Span<const ChatTool> tools,
                                    bool use_tools) const {
  ChatMessage message;
  message.role = ChatRole::kAssistant;
  const bool stopped = !ids.empty() && is_stop(ids.back());
  if (stopped) ids.remove_suffix(1);
  bool thinking = opens_think();
  size_t text_begin = 0;  // ids before it are dealt with
  const auto take_text = [&](size_t end) {
    std::string& part = thinking ? message.reasoning : message.content;
    part += tokenizer_.decode(ids.subspan(text_begin, end - text_begin));
  };
  for (size_t i = 0; i < ids.size();) {
    size_t next = 0;  // after the markup at i; 0: none here
    ChatToolCall call;
    if (ids[i] == ids_.end_think && thinking) {
      take_text(i);
      thinking = false;
      next = i + 1;
    } else if (ids[i] == ids_.think && i == 0 && !opens_think()) {
      thinking = true;
      next = 1;
    } else if (ids[i] == ids_.tool_call && use_tools && (next = parse_call(ids, i, tools, &call)) > 0) {
      take_text(i);
      thinking = false;  // a call ends reasoning, closed or not
      message.tool_calls.push_back(std::move(call));
    }
    if (next > 0) text_begin = next;
    i = next > 0 ? next : i + 1;
  }
  take_text(ids.size());
  if (thinking && stopped) {
    message.content = std::move(message.reasoning);
    message.reasoning.clear();
  }
  return message;
}

size_t ChatFormat::parse_call(absl::Span<const int32_t> ids, size_t begin, absl::Span<const ChatTool> tools,
                              ChatToolCall* call) const {
  size_t at = begin + 1;
  // Text up to `end`, which is consumed; with `quotes`, markup that cannot end a call is part of it.
  const auto read_until = [&](int32_t end, bool quotes) -> std::optional<std::string> {
    const size_t first = at;
    for (; at < ids.size(); ++at) {
      if (ids[at] == end) return tokenizer_.decode(ids.subspan(first, at++ - first));
      if (quotes ? ids[at] == ids_.tool_call || ids[at] == ids_.end_tool_call : is_markup(ids[at])) break;
    }
    return std::nullopt;
  };
  while (at < ids.size() && !is_markup(ids[at])) ++at;
  call->name = std::string(trimmed(tokenizer_.decode(ids.subspan(begin + 1, at - begin - 1))));
  if (call->name.empty()) return 0;
  ordered_json schema;
  if (!tools.empty()) {
    const ChatTool* tool = nullptr;
    for (const ChatTool& candidate : tools) {
      if (candidate.name == call->name) tool = &candidate;
    }
    if (tool == nullptr) return 0;
    schema = parse_strict_json(tool->parameters).value_or(ordered_json());
  }
  Arguments arguments;
  const auto skip_blanks = [&](size_t from) {
    while (from < ids.size() && is_blank(ids[from])) ++from;
    return from;
  };
  while (at < ids.size() && ids[at] == ids_.arg_key) {
    ++at;
    const std::optional<std::string> key = read_until(ids_.end_arg_key, /*quotes=*/false);
    if (!key) return 0;
    // <arg_value> is sometimes forgotten: then the value starts where the key ends.
    if (const size_t value = skip_blanks(at); value < ids.size() && ids[value] == ids_.arg_value)
      at = value + 1;
    const std::optional<std::string> value = read_until(ids_.end_arg_value, /*quotes=*/true);
    if (!value) return 0;
    arguments.set(*key, value_json(schema, *key, *value));
    at = skip_blanks(at);
  }
  if (at >= ids.size() || ids[at] != ids_.end_tool_call) return 0;
  call->arguments = arguments.json();
  return at + 1;
}

}  // namespace slipstream::model
