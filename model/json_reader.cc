#include "model/json_reader.h"

namespace slipstream::model {
namespace {

const nlohmann::ordered_json& no_object() {
  static const nlohmann::ordered_json empty = nlohmann::ordered_json::object();
  return empty;
}

}  // namespace

const nlohmann::ordered_json* JsonReader::find(const char* key) const {
  if (!object_.is_object()) return nullptr;
  const auto it = object_.find(key);
  return it == object_.end() || it->is_null() ? nullptr : &*it;
}

bool JsonReader::has(const char* key) const { return find(key) != nullptr; }

bool JsonReader::contains(const char* key) const { return object_.is_object() && object_.contains(key); }

void JsonReader::adopt(const absl::Status& status) {
  if (status_.ok()) status_ = status;
}

void JsonReader::fail(const char* key, const std::string& expectation) {
  const nlohmann::ordered_json* value = find(key);
  std::string found = value == nullptr ? "missing"
                                       : value->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (found.size() > 80) found = found.substr(0, 77) + "...";
  adopt(absl::InvalidArgumentError(absl::StrCat(label_, ": ", key, ": ", found, ", expected ", expectation)));
}

int64_t JsonReader::require_int(const char* key, int64_t low, int64_t high) {
  const nlohmann::ordered_json* value = find(key);
  // Integers larger than int64 parse as unsigned; get<int64_t> would wrap them.
  const bool fits = value != nullptr && value->is_number_integer() &&
                    (!value->is_number_unsigned() || value->get<uint64_t>() <= uint64_t{INT64_MAX});
  if (!fits || value->get<int64_t>() < low || value->get<int64_t>() > high) {
    fail(key, absl::StrCat("an integer in [", low, ", ", high, "]"));
    return low;
  }
  return value->get<int64_t>();
}

int64_t JsonReader::get_int(const char* key, int64_t fallback, int64_t low, int64_t high) {
  return has(key) ? require_int(key, low, high) : fallback;
}

double JsonReader::require_number(const char* key, double low, double high) {
  const nlohmann::ordered_json* value = find(key);
  if (value == nullptr || !value->is_number() || !(value->get<double>() >= low) || !(value->get<double>() <= high)) {
    fail(key, absl::StrCat("a number in [", low, ", ", high, "]"));
    return low;
  }
  return value->get<double>();
}

double JsonReader::get_number(const char* key, double fallback, double low, double high) {
  return has(key) ? require_number(key, low, high) : fallback;
}

bool JsonReader::get_bool(const char* key, bool fallback) {
  const nlohmann::ordered_json* value = find(key);
  if (value == nullptr) return fallback;
  if (!value->is_boolean()) {
    fail(key, "true or false");
    return fallback;
  }
  return value->get<bool>();
}

std::string JsonReader::require_string(const char* key) {
  const nlohmann::ordered_json* value = find(key);
  if (value == nullptr || !value->is_string()) {
    fail(key, "a string");
    return "";
  }
  return value->get<std::string>();
}

std::string JsonReader::get_string(const char* key, const std::string& fallback) {
  return has(key) ? require_string(key) : fallback;
}

std::vector<std::string> JsonReader::get_strings(const char* key) {
  const nlohmann::ordered_json* value = find(key);
  if (value == nullptr) return {};
  std::vector<std::string> out;
  bool ok = value->is_array();
  if (ok) {
    for (const auto& item : *value) {
      ok = ok && item.is_string();
      if (item.is_string()) out.push_back(item.get<std::string>());
    }
  }
  if (!ok) fail(key, "a list of strings");
  return out;
}

JsonReader JsonReader::object(const char* key) {
  const nlohmann::ordered_json* value = find(key);
  if (value != nullptr && !value->is_object()) fail(key, "an object");
  const bool usable = value != nullptr && value->is_object();
  return JsonReader(usable ? *value : no_object(), absl::StrCat(label_, ": ", key));
}

}  // namespace slipstream::model
