// The JSON of tool calls: what models and clients write is read strictly, and written the way chat templates
// do.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "nlohmann/json.hpp"

namespace slipstream::model {

// What parse_json_tree accepts; nullopt: anything else.
std::optional<nlohmann::ordered_json> parse_strict_json(std::string_view text);

// Python's spelling: ", " and ": " between, characters outside ASCII as they are.
std::string python_json(const nlohmann::ordered_json& value);

// A JSON string literal; bytes that are not UTF-8 become U+FFFD.
std::string json_string(std::string_view text);

}  // namespace slipstream::model
