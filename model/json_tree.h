// JSON that others wrote, as a tree that is safe to walk.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace slipstream::model {

// One complete JSON value, keys in their order. InvalidArgument: not JSON (NaN, hex, a NUL byte, a byte-order
// mark and invalid UTF-8 included), a number outside double's range, a key twice in one object, of which a
// reader would take either, or brackets nested deeper than 100.
absl::StatusOr<nlohmann::ordered_json> parse_json_tree(std::string_view text);

}  // namespace slipstream::model
