#include "proto/words.h"

#include <string_view>

#include "absl/strings/ascii.h"

namespace slipstream::rpc {
namespace {

std::string word(const std::string& name, std::string_view prefix) {
  return name.empty() ? "unspecified" : absl::AsciiStrToLower(name.substr(prefix.size()));
}

}  // namespace

std::string word_of(v1::FinishReason reason) { return word(v1::FinishReason_Name(reason), "FINISH_REASON_"); }
std::string word_of(v1::SpanKind kind) { return word(v1::SpanKind_Name(kind), "SPAN_KIND_"); }

bool is_failure(v1::FinishReason reason) {
  return reason == v1::FINISH_REASON_ENV_CRASH || reason == v1::FINISH_REASON_TIMEOUT || reason == v1::FINISH_REASON_ABORTED;
}

}  // namespace slipstream::rpc
