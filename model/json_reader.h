// Reads typed, bounded values from one JSON object; the first failure is kept and names file, key and expectation.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "common/status.h"
#include "nlohmann/json.hpp"

namespace slipstream::model {

// Getters return a harmless value after a failure, so that a reader can be written straight down and status() checked
// once at the end. null counts as absent, as published configs use it.
class JsonReader {
 public:
  // label: what messages call the object, e.g. "DIR/config.json: text_config".
  JsonReader(const nlohmann::ordered_json& object, std::string label) : object_(object), label_(std::move(label)) {}

  bool has(const char* key) const;       // present and not null
  bool contains(const char* key) const;  // present, perhaps null
  int64_t require_int(const char* key, int64_t low, int64_t high = int64_t{1} << 40);
  int64_t get_int(const char* key, int64_t fallback, int64_t low, int64_t high = int64_t{1} << 40);
  double require_number(const char* key, double low, double high = std::numeric_limits<double>::max());
  double get_number(const char* key, double fallback, double low, double high = std::numeric_limits<double>::max());
  bool get_bool(const char* key, bool fallback);
  std::string require_string(const char* key);
  std::string get_string(const char* key, const std::string& fallback);
  std::vector<std::string> get_strings(const char* key);  // empty when absent
  // The nested object, or one that is empty (and labelled) when absent.
  JsonReader object(const char* key);

  void fail(const char* key, const std::string& expectation);  // "label: key: VALUE, expected ..."
  void adopt(const absl::Status& status);                      // keeps it if nothing failed before
  const absl::Status& status() const { return status_; }
  const nlohmann::ordered_json* find(const char* key) const;

 private:
  const nlohmann::ordered_json& object_;
  std::string label_;
  absl::Status status_;
};

}  // namespace slipstream::model
