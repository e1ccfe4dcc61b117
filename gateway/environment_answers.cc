#include "gateway/environment_answers.h"

#include <set>

#include "common/address.h"
#include "gateway/groups.h"
#include "nlohmann/json.hpp"

namespace slipstream::gateway {
namespace {

constexpr int kMessagesMax = 1'024, kToolsMax = 1'024, kToolCallsMax = 256, kRewardPartsMax = 64;

template <class... Text>
absl::Status refuse(const std::string& field, const Text&... text) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", text...));
}

bool is_json_object(const std::string& text) {
  return nlohmann::json::parse(text, /*cb=*/nullptr, /*allow_exceptions=*/false).is_object();
}

absl::Status validate_message(const std::string& field, const v1::Message& message) {
  const bool from_environment =
      message.role() == v1::ROLE_SYSTEM || message.role() == v1::ROLE_USER || message.role() == v1::ROLE_TOOL;
  if (!from_environment) return refuse(field + ".role", message.role(), ", expected ROLE_SYSTEM, ROLE_USER or ROLE_TOOL");
  // A tool may return nothing; a system or user turn without text is a mistake.
  if (message.content().empty() && message.role() != v1::ROLE_TOOL) return refuse(field + ".content", "empty, expected text");
  if (!message.reasoning().empty()) return refuse(field + ".reasoning", "set, expected in assistant messages only");
  if (message.tool_calls_size() > 0) return refuse(field + ".tool_calls", "set, expected in assistant messages only");
  return absl::OkStatus();
}

absl::Status validate_messages(const google::protobuf::RepeatedPtrField<v1::Message>& messages, int64_t bytes_max) {
  if (messages.size() > kMessagesMax) return refuse("messages", messages.size(), " messages, expected at most ", kMessagesMax);
  int64_t bytes = 0;
  for (int i = 0; i < messages.size(); ++i) {
    RETURN_IF_ERROR(validate_message(absl::StrCat("messages[", i, "]"), messages[i]));
    bytes += static_cast<int64_t>(messages[i].content().size() + messages[i].tool_call_id().size());
  }
  if (bytes > bytes_max) return refuse("messages", bytes, " bytes of text, expected at most ", bytes_max);
  return absl::OkStatus();
}

absl::Status validate_solution(const v1::Message& solution, int64_t bytes_max) {
  if (solution.role() != v1::ROLE_ASSISTANT) return refuse("solution.role", solution.role(), ", expected ROLE_ASSISTANT");
  if (solution.content().empty() && solution.tool_calls_size() == 0) {
    return refuse("solution", "neither content nor tool calls");
  }
  if (solution.tool_calls_size() > kToolCallsMax) {
    return refuse("solution.tool_calls", solution.tool_calls_size(), " calls, expected at most ", kToolCallsMax);
  }
  for (int i = 0; i < solution.tool_calls_size(); ++i) {
    const std::string field = absl::StrCat("solution.tool_calls[", i, "]");
    if (solution.tool_calls(i).name().empty()) return refuse(field + ".name", "empty");
    if (!is_json_object(solution.tool_calls(i).arguments())) return refuse(field + ".arguments", "not a JSON object");
  }
  if (static_cast<int64_t>(solution.ByteSizeLong()) > bytes_max) {
    return refuse("solution", solution.ByteSizeLong(), " bytes, expected at most ", bytes_max);
  }
  return absl::OkStatus();
}

absl::Status validate_tools(const google::protobuf::RepeatedPtrField<v1::Tool>& tools, int64_t bytes_max) {
  if (tools.size() > kToolsMax) return refuse("tools", tools.size(), " tools, expected at most ", kToolsMax);
  std::set<std::string> names;
  int64_t bytes = 0;
  for (int i = 0; i < tools.size(); ++i) {
    const std::string field = absl::StrCat("tools[", i, "]");
    if (tools[i].name().empty()) return refuse(field + ".name", "empty");
    if (!names.insert(tools[i].name()).second) return refuse(field + ".name", "\"", tools[i].name(), "\" is listed twice");
    if (!tools[i].parameters().empty() && !is_json_object(tools[i].parameters())) {
      return refuse(field + ".parameters", "not a JSON object");
    }
    bytes += static_cast<int64_t>(tools[i].ByteSizeLong());
  }
  if (bytes > bytes_max) return refuse("tools", bytes, " bytes, expected at most ", bytes_max);
  return absl::OkStatus();
}

}  // namespace

absl::Status validate(const v1::DescribeResponse& response) {
  if (response.tasks_size() == 0) return refuse("tasks", "empty, expected at least one");
  std::set<std::string> names;
  for (int i = 0; i < response.tasks_size(); ++i) {
    const std::string field = absl::StrCat("tasks[", i, "]");
    const v1::TaskDescription& task = response.tasks(i);
    if (const std::string problem = name_problem(task.name()); !problem.empty()) return refuse(field + ".name", problem);
    if (!names.insert(task.name()).second) return refuse(field + ".name", "\"", task.name(), "\" is listed twice");
    if (task.max_turns() <= 0) return refuse(field + ".max_turns", task.max_turns(), ", expected > 0");
  }
  return absl::OkStatus();
}

absl::Status validate(const v1::ResetResponse& response, bool want_solution, int64_t bytes_max) {
  if (response.messages_size() == 0) return refuse("messages", "empty, expected what the model sees first");
  RETURN_IF_ERROR(validate_messages(response.messages(), bytes_max));
  RETURN_IF_ERROR(validate_tools(response.tools(), bytes_max));
  if (want_solution && !response.has_solution()) return refuse("solution", "missing, expected the right assistant message");
  if (want_solution) RETURN_IF_ERROR(validate_solution(response.solution(), bytes_max));
  return absl::OkStatus();
}

absl::Status validate(const v1::StepResponse& response, bool want_solution, int64_t bytes_max) {
  if (response.messages_size() == 0 && !response.done()) return refuse("messages", "empty although done is false");
  RETURN_IF_ERROR(validate_messages(response.messages(), bytes_max));
  if (!is_reward(response.reward())) return refuse("reward", response.reward(), ", expected a number within +-1e9");
  if (response.reward_parts_size() > kRewardPartsMax) {
    return refuse("reward_parts", response.reward_parts_size(), " parts, expected at most ", kRewardPartsMax);
  }
  for (const auto& [name, value] : response.reward_parts()) {
    if (!is_reward(value)) return refuse("reward_parts[\"" + name + "\"]", value, ", expected a number within +-1e9");
  }
  if (want_solution && !response.done()) {
    if (!response.has_solution()) return refuse("solution", "missing, expected the right assistant message");
    RETURN_IF_ERROR(validate_solution(response.solution(), bytes_max));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::gateway
