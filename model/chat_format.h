// The GLM chat format: conversations to token ids and sampled ids back to messages (gateway-spec, "GLM chat
// format").
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/tokenizer.h"

namespace slipstream::model {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

struct ChatToolCall {
  std::string id{};  // not part of the text
  std::string name{};
  std::string arguments{};  // a JSON object
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content{};
  std::string reasoning{};                 // assistant
  std::vector<ChatToolCall> tool_calls{};  // assistant
  std::string tool_call_id{};              // tool; not part of the text
};

struct ChatTool {
  std::string name{};
  std::string description{};
  std::string parameters{};  // JSON Schema; its key order reaches the prompt
};

// Immutable; any number of threads.
class ChatFormat {
 public:
  struct Options {
    std::string family = "glm47";  // glm47 (GLM-4.7 to 5.2) | glm53
    bool thinking = false;         // glm47: the generation prompt opens <think>. glm53 always opens it
    std::string reasoning_effort = "max";  // glm53, in its first system turn: low | high | max
  };
  // InvalidArgument: unknown family or effort. NotFound: the tokenizer lacks a special token. The tokenizer
  // outlives the format.
  static absl::StatusOr<std::unique_ptr<ChatFormat>> create(const Options& options,
                                                            const Tokenizer& tokenizer);

  // Prefix, tool list, messages; without the generation prompt.
  std::vector<int32_t> render_start(absl::Span<const ChatMessage> messages,
                                    absl::Span<const ChatTool> tools) const;
  // Messages appended after a turn, rendered together in the context of the stored end. `last_id` is the last
  // stored id: an opener that the model sampled itself is not repeated (case C1). -1: none.
  std::vector<int32_t> render_more(absl::Span<const ChatMessage> messages, int32_t last_id) const;
  // What follows the messages before the model speaks: <|assistant|> and, thinking, <think> or its closed
  // form.
  std::vector<int32_t> generation_prompt() const;
  // The ids a model would have sampled for this assistant message after generation_prompt(), its stop id
  // included: a demonstration. parse_reply() gives the message back, except call ids and the spelling of
  // arguments (an argument that its tool does not declare, or declares as possibly a string, comes back as a
  // string).
  std::vector<int32_t> render_reply(const ChatMessage& message) const;
  // Whether a turn that ended in this stop id may be followed by this message (the opener is the same, or the
  // stop is <|endoftext|>); if not, the stop id stays at the end of its own sample and the continuation
  // branches before it.
  bool continues(int32_t stop_id, const ChatMessage& next) const;

  // Sampled ids to a message. With use_tools false calls stay text (case C5); with any tools given, calls of
  // others stay text too. Thinking that was never closed is the answer if the reply ends in a stop id,
  // reasoning if not. Never fails: what does not parse is content. Call ids stay empty.
  ChatMessage parse_reply(absl::Span<const int32_t> ids, absl::Span<const ChatTool> tools,
                          bool use_tools = true) const;
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  std::string fingerprint() const;  // of tokenizer, family and options

 private:
  class Writer;
  struct Ids {
    int32_t endoftext, user, observation, assistant, system, gmask, sop, think, end_think, tool_call,
        end_tool_call, arg_key, end_arg_key, arg_value, end_arg_value, tool_response, end_tool_response;
  };
  ChatFormat(Options options, const Tokenizer& tokenizer, const Ids& ids);

  bool opens_think() const { return glm53_ || options_.thinking; }
  int32_t opener(ChatRole role) const;
  bool is_stop(int32_t id) const { return id == ids_.endoftext || id == ids_.user || id == ids_.observation; }
  bool is_markup(int32_t id) const;
  void write_tools(absl::Span<const ChatTool> tools, Writer* out) const;
  void write_messages(absl::Span<const ChatMessage> messages, int32_t last_id, Writer* out) const;
  void write_calls(absl::Span<const ChatToolCall> calls, Writer* out) const;
  // The index after the call that starts at ids[begin], or 0 when it is none.
  size_t parse_call(absl::Span<const int32_t> ids, size_t begin, absl::Span<const ChatTool> tools,
                    ChatToolCall* call) const;
  bool is_blank(int32_t id) const;

  Options options_;
  const Tokenizer& tokenizer_;
  bool glm53_;
  Ids ids_;
  std::vector<int32_t> markup_;  // all of ids_, sorted
  std::vector<int32_t> stop_ids_;
};

}  // namespace slipstream::model
