#include "common/config.h"

#include <charconv>
#include <cmath>
#include <deque>
#include <filesystem>
#include <set>

#include "absl/strings/numbers.h"
#include "common/address.h"
#include "yaml-cpp/yaml.h"

namespace slipstream {

struct ConfigNode::Mapping {
  std::string path;  // "rollout.", or "" at the root
  YAML::Node yaml;   // a map, or undefined
  // In the order of reading: a scalar or list as YAML text, or a nested mapping.
  struct Item {
    std::string key;
    YAML::Node value;
    std::vector<Mapping*> mappings;
    bool is_list = false;
  };
  std::vector<Item> items;
  std::set<std::string> known;
};

struct ConfigNode::File {
  std::string name;
  std::deque<Mapping> mappings;
  std::string error;  // the first
  std::vector<std::pair<std::string, std::string>> sets;  // path and assignment, in order

  // Where the value at `path` comes from: the assignment that set it, or something around it, or else its line.
  std::string where(const std::string& path, const YAML::Node& node) const {
    const bool in_file = node.IsDefined() && node.Mark().line >= 0;
    const auto within = [](const std::string& inner, const std::string& outer) {
      return inner.starts_with(outer) && (inner.size() == outer.size() || inner[outer.size()] == '.' || inner[outer.size()] == '[');
    };
    for (auto set = sets.rbegin(); set != sets.rend(); ++set) {
      // A section that only an assignment made has no line of its own.
      if (within(path, set->first) || (!in_file && within(set->first, path))) return "--set " + set->second;
    }
    return in_file ? absl::StrCat(name, ":", node.Mark().line + 1) : name;
  }
  void set_error(std::string text) {
    if (error.empty()) error = std::move(text);
  }
};

namespace {

std::string as_text(const YAML::Node& node) {
  if (node.IsScalar()) return absl::StrCat("\"", node.Scalar(), "\"");
  return node.IsSequence() ? "a list" : node.IsMap() ? "a mapping" : "nothing";
}

std::string range_text(const char* kind, double least, double most, double no_least, double no_most) {
  if (least > no_least && most < no_most) return absl::StrCat(kind, " from ", least, " to ", most);
  if (least > no_least) return absl::StrCat(kind, " >= ", least);
  if (most < no_most) return absl::StrCat(kind, " <= ", most);
  return kind;
}

std::string integer_range(int64_t least, int64_t most, int64_t no_least, int64_t no_most) {
  if (least != no_least && most != no_most) return absl::StrCat("an integer from ", least, " to ", most);
  if (least != no_least) return absl::StrCat("an integer >= ", least);
  if (most != no_most) return absl::StrCat("an integer <= ", most);
  return "an integer";
}

// yaml-cpp emits floats with all digits that doubles need; shortest form reads better in a resolved config.
template <class T>
YAML::Node to_yaml(const T& value) {
  if constexpr (std::is_floating_point_v<T>) {
    char text[64];
    const auto end = std::to_chars(text, text + sizeof text, value).ptr;
    return YAML::Node(std::string(text, end));
  } else {
    return YAML::Node(value);
  }
}

// YAML::Load would take the first document and leave the rest unread.
YAML::Node load_one(const std::string& text) {
  const std::vector<YAML::Node> documents = YAML::LoadAll(text);
  for (size_t i = 1; i < documents.size(); ++i) {
    if (!documents[i].IsNull()) throw YAML::ParserException(documents[i].Mark(), "a second YAML document, expected one");
  }
  return documents.empty() ? YAML::Node() : documents[0];
}

}  // namespace

absl::StatusOr<ConfigNode> ConfigNode::parse(const std::string& text, const std::string& name) {
  auto file = std::make_shared<File>();
  file->name = name;
  YAML::Node root;
  try {
    root = load_one(text);
  } catch (const YAML::Exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(name, ":", error.mark.line + 1, ": ", error.msg));
  }
  if (root.IsDefined() && !root.IsNull() && !root.IsMap()) {
    return absl::InvalidArgumentError(absl::StrCat(name, ": ", as_text(root), ", expected a mapping of sections"));
  }
  file->mappings.push_back({.path = "", .yaml = root, .items = {}, .known = {}});
  return ConfigNode(file, &file->mappings.back());
}

absl::StatusOr<ConfigNode> ConfigNode::load(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a directory, expected a YAML file"));
  }
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return absl::NotFoundError(absl::StrCat(path, ": cannot be opened, expected a YAML config file"));
  std::string text;
  char buffer[65536];
  for (size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, file)) > 0;) text.append(buffer, n);
  std::fclose(file);
  return parse(text, path);
}

absl::Status ConfigNode::override_value(const std::string& assignment) {
  const auto refuse = [&](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("--set ", assignment, ": ", why));
  };
  const size_t equals = assignment.find('=');
  if (equals == std::string::npos || equals == 0) return refuse("expected section.key=value");
  std::vector<std::string> path;
  for (size_t begin = 0; begin <= equals;) {
    const size_t end = std::min(assignment.find('.', begin), equals);
    path.push_back(assignment.substr(begin, end - begin));
    if (path.back().empty()) return refuse("expected section.key=value");
    begin = end + 1;
  }
  try {
    const YAML::Node value = load_one(assignment.substr(equals + 1));
    if (!mapping_->yaml.IsMap()) mapping_->yaml = YAML::Node(YAML::NodeType::Map);
    YAML::Node node = mapping_->yaml;
    for (size_t i = 0; i + 1 < path.size(); ++i) {
      if (node[path[i]].IsDefined() && !node[path[i]].IsMap()) return refuse(path[i] + " is not a section of mappings");
      if (!node[path[i]].IsDefined()) node[path[i]] = YAML::Node(YAML::NodeType::Map);
      node.reset(node[path[i]]);
    }
    node[path.back()] = value;
  } catch (const YAML::Exception& error) {
    return refuse(error.msg);
  }
  file_->sets.emplace_back(assignment.substr(0, equals), assignment);
  return absl::OkStatus();
}

bool ConfigNode::has(const char* key) const {
  return mapping_->yaml.IsMap() && mapping_->yaml[key].IsDefined() && !mapping_->yaml[key].IsNull();
}

void ConfigNode::fail(const char* key, const std::string& expectation) {
  const YAML::Node node = mapping_->yaml.IsMap() ? mapping_->yaml[key] : YAML::Node(YAML::NodeType::Undefined);
  const std::string path = mapping_->path + key;
  file_->set_error(absl::StrCat(file_->where(path, node.IsDefined() ? node : mapping_->yaml), ": ", path, ": ", expectation));
}

template <class T>
void ConfigNode::read_scalar(const char* key, T* value, const std::string& expected, const auto& parse) {
  mapping_->known.insert(key);
  if (has(key)) {
    const YAML::Node node = mapping_->yaml[key];
    T parsed{};
    if (!node.IsScalar() || !parse(node.Scalar(), &parsed)) return fail(key, as_text(node) + ", expected " + expected);
    *value = parsed;
  }
  mapping_->items.push_back({.key = key, .value = to_yaml(*value), .mappings = {}});
}

void ConfigNode::read(const char* key, bool* value) {
  read_scalar(key, value, "true or false", [](const std::string& text, bool* out) {
    *out = text == "true";
    return text == "true" || text == "false";
  });
}

void ConfigNode::read(const char* key, int64_t* value, int64_t least, int64_t most) {
  const std::string expected = integer_range(least, most, std::numeric_limits<int64_t>::min(),
                                             std::numeric_limits<int64_t>::max());
  read_scalar(key, value, expected, [&](const std::string& text, int64_t* out) {
    return absl::SimpleAtoi(text, out) && *out >= least && *out <= most;
  });
}

void ConfigNode::read(const char* key, int* value, int64_t least, int64_t most) {
  const std::string expected = integer_range(least, most, std::numeric_limits<int>::min(),
                                             std::numeric_limits<int>::max());
  read_scalar(key, value, expected, [&](const std::string& text, int* out) {
    return absl::SimpleAtoi(text, out) && *out >= least && *out <= most;
  });
}

void ConfigNode::read(const char* key, uint64_t* value) {
  read_scalar(key, value, "an integer >= 0",
              [](const std::string& text, uint64_t* out) { return absl::SimpleAtoi(text, out); });
}

void ConfigNode::read(const char* key, double* value, double least, double most) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  read_scalar(key, value, range_text("a number", least, most, -kInfinity, kInfinity),
              [&](const std::string& text, double* out) {
                return absl::SimpleAtod(text, out) && std::isfinite(*out) && *out >= least && *out <= most;
              });
}

void ConfigNode::read(const char* key, float* value, double least, double most) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  read_scalar(key, value, range_text("a number", least, most, -kInfinity, kInfinity),
              [&](const std::string& text, float* out) {
                double wide = 0.0;
                if (!absl::SimpleAtod(text, &wide) || !std::isfinite(wide) || wide < least || wide > most) return false;
                *out = static_cast<float>(wide);
                return true;
              });
}

void ConfigNode::read(const char* key, std::string* value) {
  read_scalar(key, value, "text", [](const std::string& text, std::string* out) {
    *out = text;
    return true;
  });
}

void ConfigNode::read_address(const char* key, std::string* value, int least_port) {
  const bool optional = value->empty();
  read(key, value);
  if (value->empty() && optional) return;
  if (const std::string problem = address_problem(*value, least_port); !problem.empty()) fail(key, problem);
}

void ConfigNode::read_name(const char* key, std::string* value) {
  const bool optional = value->empty();
  read(key, value);
  if (value->empty() && optional) return;
  if (const std::string problem = name_problem(*value); !problem.empty()) fail(key, problem);
}

void ConfigNode::read(const char* key, std::vector<std::string>* value) {
  mapping_->known.insert(key);
  if (has(key)) {
    const YAML::Node node = mapping_->yaml[key];
    if (!node.IsSequence()) return fail(key, as_text(node) + ", expected a list of texts");
    value->clear();
    for (const YAML::Node& item : node) {
      if (!item.IsScalar()) return fail(key, as_text(item) + " in the list, expected texts");
      value->push_back(item.Scalar());
    }
  }
  mapping_->items.push_back({.key = key, .value = YAML::Node(*value), .mappings = {}});
}

ConfigNode ConfigNode::child(const char* key) {
  mapping_->known.insert(key);
  YAML::Node node(YAML::NodeType::Undefined);
  if (has(key)) {
    if (mapping_->yaml[key].IsMap()) {
      node = mapping_->yaml[key];
    } else {
      fail(key, as_text(mapping_->yaml[key]) + ", expected a mapping");
    }
  }
  // A second read of one section (each role reads what it needs of `model`) goes on where the first one was.
  for (Mapping::Item& item : mapping_->items) {
    if (item.key == key && item.mappings.size() == 1) return ConfigNode(file_, item.mappings[0]);
  }
  file_->mappings.push_back({.path = absl::StrCat(mapping_->path, key, "."), .yaml = node, .items = {}, .known = {}});
  mapping_->items.push_back({.key = key, .value = {}, .mappings = {&file_->mappings.back()}});
  return ConfigNode(file_, &file_->mappings.back());
}

std::vector<ConfigNode> ConfigNode::list(const char* key) {
  mapping_->known.insert(key);
  std::vector<ConfigNode> out;
  Mapping::Item list{.key = key, .value = {}, .mappings = {}, .is_list = true};
  if (has(key)) {
    const YAML::Node node = mapping_->yaml[key];
    if (!node.IsSequence()) fail(key, as_text(node) + ", expected a list of mappings");
    for (size_t i = 0; node.IsSequence() && i < node.size(); ++i) {
      if (!node[i].IsMap()) {
        fail(key, absl::StrCat("item ", i, " is ", as_text(node[i]), ", expected a mapping"));
        continue;
      }
      file_->mappings.push_back(
          {.path = absl::StrCat(mapping_->path, key, "[", i, "]."), .yaml = node[i], .items = {}, .known = {}});
      list.mappings.push_back(&file_->mappings.back());
      out.push_back(ConfigNode(file_, &file_->mappings.back()));
    }
  }
  mapping_->items.push_back(std::move(list));
  return out;
}

std::vector<std::string> ConfigNode::keys() const {
  std::vector<std::string> out;
  if (mapping_->yaml.IsMap()) {
    for (const auto& pair : mapping_->yaml) out.push_back(pair.first.Scalar());
  }
  return out;
}

absl::Status ConfigNode::finish() const {
  if (!file_->error.empty()) return absl::InvalidArgumentError(file_->error);
  for (const Mapping& mapping : file_->mappings) {
    if (!mapping.yaml.IsMap()) continue;
    std::set<std::string> seen;
    for (const auto& pair : mapping.yaml) {
      const std::string key = pair.first.IsScalar() ? pair.first.Scalar() : "";
      const std::string where = file_->where(mapping.path + key, pair.first);
      if (!seen.insert(key).second) {
        return absl::InvalidArgumentError(absl::StrCat(where, ": ", mapping.path, key, ": given twice"));
      }
      if (mapping.known.count(key) != 0) continue;
      std::string known;
      for (const std::string& name : mapping.known) known += (known.empty() ? "" : ", ") + name;
      return absl::InvalidArgumentError(
          absl::StrCat(where, ": ", mapping.path, key, ": unknown key, expected one of: ", known));
    }
  }
  return absl::OkStatus();
}

std::string ConfigNode::resolved() const {
  const auto build = [](const auto& self, const Mapping& mapping) -> YAML::Node {
    YAML::Node out(YAML::NodeType::Map);
    for (const Mapping::Item& item : mapping.items) {
      if (item.is_list) {
        out[item.key] = YAML::Node(YAML::NodeType::Sequence);
        for (const Mapping* nested : item.mappings) out[item.key].push_back(self(self, *nested));
      } else if (!item.mappings.empty()) {
        out[item.key] = self(self, *item.mappings[0]);
      } else {
        out[item.key] = item.value;
      }
    }
    return out;
  };
  YAML::Emitter emitter;
  emitter << build(build, file_->mappings.front());
  return std::string(emitter.c_str()) + "\n";
}

}  // namespace slipstream
