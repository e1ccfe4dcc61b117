// Messages and tools on the wire to those the chat format renders, and what it means for two messages to be
// the same.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "google/protobuf/repeated_ptr_field.h"
#include "model/chat_format.h"
#include "slipstream/v1/types.pb.h"

namespace slipstream::gateway {

// InvalidArgument: an unknown role, reasoning or tool calls outside an assistant message, a call without a
// name; names the message's index and the field. Arguments are taken as they are.
absl::StatusOr<std::vector<model::ChatMessage>> from_proto(
    const google::protobuf::RepeatedPtrField<v1::Message>& messages);
absl::StatusOr<model::ChatMessage> from_proto(const v1::Message& message);
v1::Message to_proto(const model::ChatMessage& message);

// InvalidArgument: no name, a name twice, parameters that are no JSON object.
absl::StatusOr<std::vector<model::ChatTool>> from_proto(
    const google::protobuf::RepeatedPtrField<v1::Tool>& tools);

// What differs between a stored message and one sent in its place, in words; nullopt: they are the same.
// Role, text, reasoning and calls count; ids of calls do not. Arguments are compared as JSON values: keys in
// any order, 1 == 1.0, true != 1; what is not JSON, or has a key twice, is compared as text.
std::optional<std::string> difference(const model::ChatMessage& stored, const model::ChatMessage& sent);
bool same_arguments(const std::string& a, const std::string& b);

}  // namespace slipstream::gateway
