// Reading a YAML config file into the structs of the components. Every key is read by name; a key nobody reads, a wrong type
// and a value out of range are errors that say file, line, field and expectation:
//   quickstart.yaml:12: rollout.max_concurrent: "many", expected an integer >= 1
// A value that --set gave is named by its assignment instead of file and line.
#pragma once

#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"

namespace slipstream {

// One mapping of the file. Reads never fail at once: the first error is kept and finish() of the root returns it, so that
// a component's from() is a plain list of reads. Values that are absent keep their default; what was read or defaulted is
// remembered for resolved(). Copies share the file. One thread.
class ConfigNode {
 public:
  // NotFound, InvalidArgument (YAML syntax, more than one document; with the line).
  static absl::StatusOr<ConfigNode> load(const std::string& path);
  static absl::StatusOr<ConfigNode> parse(const std::string& text, const std::string& name);
  // Sets "section.key=value" over what the file says (value is YAML). InvalidArgument: not of that form. Before any read.
  absl::Status override_value(const std::string& assignment);

  // Bounds are inclusive.
  void read(const char* key, bool* value);
  void read(const char* key, int* value, int64_t least = std::numeric_limits<int>::min(),
            int64_t most = std::numeric_limits<int>::max());
  void read(const char* key, int64_t* value, int64_t least = std::numeric_limits<int64_t>::min(),
            int64_t most = std::numeric_limits<int64_t>::max());
  void read(const char* key, uint64_t* value);
  void read(const char* key, double* value, double least = -std::numeric_limits<double>::infinity(),
            double most = std::numeric_limits<double>::infinity());
  void read(const char* key, float* value, double least = -std::numeric_limits<double>::infinity(),
            double most = std::numeric_limits<double>::infinity());
  void read(const char* key, std::string* value);
  void read(const char* key, std::vector<std::string>* value);
  // host:port as address_problem() has it; empty where it is empty by default.
  void read_address(const char* key, std::string* value, int least_port);
  // As name_problem() has it; empty where it is empty by default.
  void read_name(const char* key, std::string* value);
  // One of a few words, each with its value: read_choice("on_update", &u, {{"keep", kKeep}, {"recompute", kRecompute}}).
  template <class E>
  void read_choice(const char* key, E* value, std::initializer_list<std::pair<const char*, E>> choices) {
    std::string text;
    for (const auto& [word, meaning] : choices) {
      if (meaning == *value) text = word;
    }
    const std::string before = text;
    read(key, &text);
    std::string words;
    for (const auto& [word, meaning] : choices) {
      if (text == word) return void(*value = meaning);
      words += (words.empty() ? "" : " | ") + std::string(word);
    }
    fail(key, "\"" + text + "\", expected " + words);
  }

  bool has(const char* key) const;
  // A nested mapping (empty when absent), and a list of mappings.
  ConfigNode child(const char* key);
  std::vector<ConfigNode> list(const char* key);
  // Every key of this mapping, for maps with free names.
  std::vector<std::string> keys() const;

  // Records an error about `key` of this mapping: `expectation` follows "file:line: path.key: ".
  void fail(const char* key, const std::string& expectation);
  // The first error of the whole file, or an unknown key anywhere in it.
  absl::Status finish() const;
  // The whole file with defaults filled in, as YAML.
  std::string resolved() const;

 private:
  struct File;
  struct Mapping;
  ConfigNode(std::shared_ptr<File> file, Mapping* mapping) : file_(std::move(file)), mapping_(mapping) {}
  template <class T>
  void read_scalar(const char* key, T* value, const std::string& expected, const auto& parse);

  std::shared_ptr<File> file_;
  Mapping* mapping_;
};

}  // namespace slipstream
