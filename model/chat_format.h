// The GLM chat format: conversations to token ids and sampled ids back to messages (gateway-spec, "GLM chat format").
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "model/tokenizer.h"

namespace slipstream::model {

enum class ChatRole { kSystem, kUser, kAssistant, kTool };

struct ChatToolCall {
  std::string id;         // not part of the text
  std::string name;
  std::string arguments;  // a JSON object
};

struct ChatMessage {
  ChatRole role = ChatRole::kUser;
  std::string content;
  std::string reasoning;                 // assistant
  std::vector<ChatToolCall> tool_calls;  // assistant
  std::string tool_call_id;              // tool; not part of the text
};

struct ChatTool {
  std::string name;
  std::string description;
  std::string parameters;  // JSON Schema; its key order reaches the prompt
};

// Immutable; any number of threads.
class ChatFormat {
 public:
  struct Options {
    std::string family = "glm47";  // glm47 | glm53
    bool thinking = false;         // the generation prompt opens <think>
  };
  // InvalidArgument: unknown family. NotFound: the tokenizer lacks a special token. The tokenizer outlives the format.
  static absl::StatusOr<std::unique_ptr<ChatFormat>> create(const Options& options, const Tokenizer& tokenizer);

  // Prefix, tool list, messages; without the generation prompt.
  std::vector<int32_t> render_start(absl::Span<const ChatMessage> messages, absl::Span<const ChatTool> tools) const;
  // Messages appended after a turn, rendered together in the context of the stored end. `last_id` is the last stored id: an
  // opener that the model sampled itself is not repeated (case C1). -1: none.
  std::vector<int32_t> render_more(absl::Span<const ChatMessage> messages, int32_t last_id) const;
  // What follows the messages before the model speaks: <|assistant|> and, thinking, <think> or its closed form.
  std::vector<int32_t> generation_prompt() const;
  // The ids a model would have sampled for this assistant message after generation_prompt(), its stop id included: a
  // demonstration.
  std::vector<int32_t> render_reply(const ChatMessage& message) const;
  // Whether a turn that ended in this stop id may be followed by this message (the opener is the same, or the stop is
  // <|endoftext|>); if not, the stop id stays at the end of its own sample and the continuation branches before it.
  bool continues(int32_t stop_id, const ChatMessage& next) const;

  // Sampled ids (stop id included or not) to a message. With use_tools false calls stay text (case C5). Never fails: what does
  // not parse is content.
  ChatMessage parse_reply(absl::Span<const int32_t> ids, absl::Span<const ChatTool> tools, bool use_tools = true) const;
  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  std::string fingerprint() const;  // of tokenizer, family and options

 private:
  ChatFormat(Options options, const Tokenizer& tokenizer);
  Options options_;
  const Tokenizer& tokenizer_;
  std::vector<int32_t> stop_ids_;
  // Further members (ids of the special tokens) as the implementation needs.
};

}  // namespace slipstream::model
