#include "model/chat_json.h"

#include <utility>

#include "model/json_tree.h"

namespace slipstream::model {
namespace {

using nlohmann::ordered_json;

void append_python(const ordered_json& value, std::string* out) {
  if (value.is_object()) {
    out->push_back('{');
    bool first = true;
    for (const auto& [name, item] : value.items()) {
      if (!first) out->append(", ");
      first = false;
      out->append(json_string(name)).append(": ");
      append_python(item, out);
    }
    out->push_back('}');
  } else if (value.is_array()) {
    out->push_back('[');
    for (size_t i = 0; i < value.size(); ++i) {
      if (i > 0) out->append(", ");
      append_python(value[i], out);
    }
    out->push_back(']');
  } else {
    out->append(value.dump(-1, ' ', false, ordered_json::error_handler_t::replace));
  }
}

}  // namespace

std::optional<ordered_json> parse_strict_json(std::string_view text) {
  absl::StatusOr<ordered_json> value = parse_json_tree(text);
  if (!value.ok()) return std::nullopt;
  return *std::move(value);
}

std::string python_json(const ordered_json& value) {
  std::string out;
  append_python(value, &out);
  return out;
}

std::string json_string(std::string_view text) {
  return ordered_json(text).dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace slipstream::model
