#include "model/chat_format.h"

#include <algorithm>
#include <utility>

#include "model/chat_json.h"

namespace slipstream::model {
namespace {

// Surrounding white space of an answer is not part of what templates put into a history.
std::string_view stripped(std::string_view text) {
  constexpr std::string_view kBlank = " \t\n\r\v\f\x1c\x1d\x1e\x1f";
  const size_t begin = text.find_first_not_of(kBlank);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(kBlank) - begin + 1);
}

std::string describe(const ChatTool& tool) {
  std::string out = "{\"name\": " + json_string(tool.name);
  if (!tool.description.empty()) out += ", \"description\": " + json_string(tool.description);
  if (!tool.parameters.empty()) {
    const auto parameters = parse_strict_json(tool.parameters);
    out += ", \"parameters\": " + (parameters ? python_json(*parameters) : tool.parameters);
  }
  return out + "}";
}

}  // namespace

// Text between two special tokens is encoded in one piece, as it would be in a whole rendered conversation: a
// tokenizer that merges would encode the pieces differently.
class ChatFormat::Writer {
 public:
  explicit Writer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}
  void text(std::string_view text) { pending_.append(text); }
  void special(int32_t id) {
    flush();
    ids_.push_back(id);
  }
  std::vector<int32_t> take() {
    flush();
    return std::move(ids_);
  }

 private:
  void flush() {
    if (pending_.empty()) return;
    const std::vector<int32_t> encoded = tokenizer_.encode(pending_);
    ids_.insert(ids_.end(), encoded.begin(), encoded.end());
    pending_.clear();
  }

  const Tokenizer& tokenizer_;
  std::string pending_;
  std::vector<int32_t> ids_;
};

absl::StatusOr<std::unique_ptr<ChatFormat>> ChatFormat::create(const Options& options,
                                                               const Tokenizer& tokenizer) {
  if (options.family != "glm47" && options.family != "glm53") {
    return absl::InvalidArgumentError(
        absl::StrCat("chat format \"", options.family, "\": unknown, expected glm47 or glm53"));
  }
  const std::string& effort = options.reasoning_effort;
  if (effort != "low" && effort != "high" && effort != "max") {
    return absl::InvalidArgumentError(
        absl::StrCat("reasoning effort \"", effort, "\": unknown, expected low, high or max"));
  }
  Ids ids{};
  const std::pair<std::string_view, int32_t*> table[] = {{"<|endoftext|>", &ids.endoftext},
                                                         {"<|user|>", &ids.user},
                                                         {"<|observation|>", &ids.observation},
                                                         {"<|assistant|>", &ids.assistant},
                                                         {"<|system|>", &ids.system},
                                                         {"[gMASK]", &ids.gmask},
                                                         {"<sop>", &ids.sop},
                                                         {"<think>", &ids.think},
                                                         {"</think>", &ids.end_think},
                                                         {"<tool_call>", &ids.tool_call},
                                                         {"</tool_call>", &ids.end_tool_call},
                                                         {"<arg_key>", &ids.arg_key},
                                                         {"</arg_key>", &ids.end_arg_key},
                                                         {"<arg_value>", &ids.arg_value},
                                                         {"</arg_value>", &ids.end_arg_value},
                                                         {"<tool_response>", &ids.tool_response},
                                                         {"</tool_response>", &ids.end_tool_response}};
  std::vector<int32_t> markup;
  for (const auto& [spelling, id] : table) {
    ASSIGN_OR_RETURN(*id, tokenizer.special(spelling));
    markup.push_back(*id);
  }
  std::unique_ptr<ChatFormat> format(new ChatFormat(options, tokenizer, ids));
  std::sort(markup.begin(), markup.end());
  format->markup_ = std::move(markup);
  return format;
}

ChatFormat::ChatFormat(Options options, const Tokenizer& tokenizer, const Ids& ids)
    : options_(std::move(options)),
      tokenizer_(tokenizer),
      glm53_(options_.family == "glm53"),
      ids_(ids),
      stop_ids_{ids.endoftext, ids.user, ids.observation} {}

bool ChatFormat::is_markup(int32_t id) const {
  return std::binary_search(markup_.begin(), markup_.end(), id);
}

int32_t ChatFormat::opener(ChatRole role) const {
  switch (role) {
    case ChatRole::kSystem:
      return ids_.system;
    case ChatRole::kUser:
      return ids_.user;
    case ChatRole::kAssistant:
      return ids_.assistant;
    case ChatRole::kTool:
      return ids_.observation;
  }
  return ids_.user;
}

std::vector<int32_t> ChatFormat::render_start(absl::Span<const ChatMessage> messages,
                                              absl::Span<const ChatTool> tools) const {
  Writer out(tokenizer_);
  out.special(ids_.gmask);
  out.special(ids_.sop);
  if (glm53_) {
    out.special(ids_.system);
    std::string effort = options_.reasoning_effort;
    effort[0] = static_cast<char>(effort[0] - 'a' + 'A');
    out.text("Reasoning Effort: " + effort);
  }
  if (!tools.empty()) write_tools(tools, &out);
  write_messages(messages, -1, &out);
  return out.take();
}

std::vector<int32_t> ChatFormat::render_more(absl::Span<const ChatMessage> messages, int32_t last_id) const {
  Writer out(tokenizer_);
  write_messages(messages, last_id, &out);
  return out.take();
}

// The wording is the checkpoints': models were trained on it. Its markup is special tokens; that of the
// schemas is text.
void ChatFormat::write_tools(absl::Span<const ChatTool> tools, Writer* out) const {
  out->special(ids_.system);
  out->text(
      "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
      "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n");
  for (const ChatTool& tool : tools) out->text(describe(tool) + "\n");
  out->text(
      "</tools>\n\nFor each function call, output the function name and arguments within the following XML "
      "format:\n");
  out->special(ids_.tool_call);
  out->text("{function-name}");
  for (const char* index : {"1", "2"}) {
    out->special(ids_.arg_key);
    out->text(std::string("{arg-key-") + index + "}");
    out->special(ids_.end_arg_key);
    out->special(ids_.arg_value);
    out->text(std::string("{arg-value-") + index + "}");
    out->special(ids_.end_arg_value);
  }
  out->text("...");
  out->special(ids_.end_tool_call);
}

void ChatFormat::write_messages(absl::Span<const ChatMessage> messages, int32_t last_id, Writer* out) const {
  bool in_observation = false;
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& message = messages[i];
    const bool is_tool = message.role == ChatRole::kTool;
    const bool already_open = (is_tool && in_observation) || (i == 0 && last_id == opener(message.role));
    if (!already_open) out->special(opener(message.role));
    in_observation = is_tool;
    if (is_tool) {
      out->special(ids_.tool_response);
      out->text(message.content);
      out->special(ids_.end_tool_response);
    } else if (message.role == ChatRole::kAssistant) {
      const std::string_view reasoning =
          glm53_ ? std::string_view(message.reasoning) : stripped(message.reasoning);
      if (glm53_ || !reasoning.empty()) out->special(ids_.think);
      out->text(reasoning);
      out->special(ids_.end_think);
      out->text(stripped(message.content));
      write_calls(message.tool_calls, out);
    } else {
      out->text(message.content);
    }
  }
}

void ChatFormat::write_calls(absl::Span<const ChatToolCall> calls, Writer* out) const {
  for (const ChatToolCall& call : calls) {
    out->special(ids_.tool_call);
    out->text(call.name);
    const auto arguments = parse_strict_json(call.arguments);
    if (arguments && arguments->is_object()) {
      for (const auto& [key, value] : arguments->items()) {
        out->special(ids_.arg_key);
        out->text(key);
        out->special(ids_.end_arg_key);
        out->special(ids_.arg_value);
        out->text(value.is_string() ? value.get_ref<const std::string&>() : python_json(value));
        out->special(ids_.end_arg_value);
      }
    } else {
      out->text(call.arguments);  // a client's broken history: shown as it is
    }
    out->special(ids_.end_tool_call);
  }
}

std::vector<int32_t> ChatFormat::generation_prompt() const {
  return {ids_.assistant, opens_think() ? ids_.think : ids_.end_think};
}

std::vector<int32_t> ChatFormat::render_reply(const ChatMessage& message) const {
  Writer out(tokenizer_);
  if (opens_think() || !message.reasoning.empty()) {
    if (!opens_think()) out.special(ids_.think);  // a model that thinks although its prompt said not to
    out.text(message.reasoning);
    out.special(ids_.end_think);
  }
  out.text(message.content);
  write_calls(message.tool_calls, &out);
  out.special(message.tool_calls.empty() ? ids_.user : ids_.observation);
  return out.take();
}

bool ChatFormat::continues(int32_t stop_id, const ChatMessage& next) const {
  return stop_id == ids_.endoftext || !is_stop(stop_id) || stop_id == opener(next.role);
}

std::string ChatFormat::fingerprint() const {
  std::string out = tokenizer_.fingerprint() + "/" + options_.family + (opens_think() ? "/think" : "/plain");
  if (glm53_) out += "/" + options_.reasoning_effort;
  return out;
}

}  // namespace slipstream::model
