// Words for the enums of the wire contracts, as metrics, logs and files have them.
#pragma once

#include <string>

#include "slipstream/v1/trajectory.pb.h"
#include "slipstream/v1/types.pb.h"

namespace slipstream::rpc {

std::string word_of(v1::FinishReason reason);  // FINISH_REASON_ENV_DONE: "env_done"; what has no name: "unspecified"
std::string word_of(v1::SpanKind kind);        // SPAN_KIND_ACTION: "action"

// Whether the episode went wrong: it is excluded, never given a reward (rl-spec 5).
bool is_failure(v1::FinishReason reason);

}  // namespace slipstream::rpc
