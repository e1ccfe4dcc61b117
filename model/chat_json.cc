#include "model/chat_json.h"

#include <set>
#include <vector>

namespace slipstream::model {
namespace {

using nlohmann::ordered_json;

// Comparing and printing recurse: a reply of nothing but brackets must not decide how deep.
constexpr size_t kDepthMax = 100;

// Accepts what parse_strict_json accepts; returning false ends the parse.
struct StrictCheck : nlohmann::json_sax<ordered_json> {
  bool open() {
    keys.emplace_back();
    return keys.size() <= kDepthMax;
  }
  bool close() {
    keys.pop_back();
    return true;
  }
  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return open(); }
  bool key(string_t& name) override { return keys.back().insert(name).second; }
  bool end_object() override { return close(); }
  bool start_array(size_t) override { return open(); }
  bool end_array() override { return close(); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

  std::vector<std::set<std::string>> keys;
};

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
  StrictCheck check;
  if (!ordered_json::sax_parse(text.begin(), text.end(), &check)) return std::nullopt;
  ordered_json value = ordered_json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return std::nullopt;
  return value;
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
