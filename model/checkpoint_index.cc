#include "model/checkpoint_index.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "model/strict_json.h"

namespace slipstream::model {
namespace {

bool is_plain_file_name(std::string_view name) {
  return name.ends_with(".safetensors") && !name.starts_with('.') &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

class Index : public StrictJson {
 public:
  CheckpointIndex index;
  bool has_weight_map = false;

  bool null() override { return skipped() || StrictJson::null(); }
  bool boolean(bool value) override { return skipped() || StrictJson::boolean(value); }
  bool number_integer(int64_t value) override { return skipped() || StrictJson::number_integer(value); }
  bool number_unsigned(uint64_t value) override { return skipped() || StrictJson::number_unsigned(value); }
  bool number_float(double value, const std::string& text) override {
    return skipped() || StrictJson::number_float(value, text);
  }

  bool string(std::string& value) override {
    if (skipped()) return true;
    if (place_ != Place::kFile) return StrictJson::string(value);
    if (!is_plain_file_name(value)) {
      return refuse(absl::StrCat(printable(tensor_), ": file \"", printable(value),
                                 "\", expected a name in this directory that ends in .safetensors"));
    }
    *file_ = std::move(value);
    place_ = Place::kTensor;
    return true;
  }

  bool start_object(std::size_t count) override {
    switch (place_) {
      case Place::kDocument:
        place_ = Place::kField;
        return true;
      case Place::kWeightMap:
        place_ = Place::kTensor;
        return true;
      case Place::kSkip:
        ++depth_;
        return true;
      default:
        return StrictJson::start_object(count);
    }
  }

  bool key(std::string& name) override {
    switch (place_) {
      case Place::kField:
        return start_field(name);
      case Place::kTensor:
        return start_tensor(name);
      case Place::kSkip:
        return true;
      default:
        return StrictJson::key(name);
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::kField:
        place_ = Place::kEnd;
        return true;
      case Place::kTensor:
        place_ = Place::kField;
        return true;
      case Place::kSkip:
        --depth_;
        return skipped();
      default:
        return StrictJson::end_object();
    }
  }

  bool start_array(std::size_t count) override {
    if (place_ != Place::kSkip) return StrictJson::start_array(count);
    ++depth_;
    return true;
  }

  bool end_array() override {
    if (place_ != Place::kSkip) return StrictJson::end_array();
    --depth_;
    return skipped();
  }

 protected:
  bool unexpected(std::string_view found) override {
    return refuse(absl::StrCat(place_ == Place::kFile ? printable(tensor_) : "index", ": ",
                               std::string(found), ", expected ", expected()));
  }

 private:
  // Where the parser stands: what comes next. kSkip: any value of a field that is not weight_map.
  enum class Place { kDocument, kField, kSkip, kWeightMap, kTensor, kFile, kEnd };

  // Whether the value just read belongs to a skipped field; a whole value at depth 0 ends the field.
  bool skipped() {
    if (place_ != Place::kSkip) return false;
    if (depth_ == 0) place_ = Place::kField;
    return true;
  }

  bool start_field(std::string_view name) {
    place_ = name == "weight_map" ? Place::kWeightMap : Place::kSkip;
    if (place_ == Place::kWeightMap && std::exchange(has_weight_map, true))
      return refuse("weight_map stands twice");
    return true;
  }

  bool start_tensor(const std::string& name) {
    const auto [at, inserted] = index.weight_map.try_emplace(name);
    if (!inserted) return refuse(absl::StrCat(printable(name), ": stands twice in weight_map"));
    tensor_ = name;
    file_ = &at->second;
    place_ = Place::kFile;
    return true;
  }

  const char* expected() const {
    switch (place_) {
      case Place::kDocument:
        return "an object";
      case Place::kField:
        return "a field";
      case Place::kSkip:
        return "a value";
      case Place::kWeightMap:
        return "an object in weight_map";
      case Place::kTensor:
        return "a tensor's name in weight_map";
      case Place::kFile:
        return "a file name";
      case Place::kEnd:
        return "nothing";
    }
    return "";
  }

  Place place_ = Place::kDocument;
  int64_t depth_ = 0;            // open objects and arrays of a skipped value
  std::string tensor_;           // the entry being read
  std::string* file_ = nullptr;  // in index.weight_map
};

}  // namespace

absl::StatusOr<CheckpointIndex> parse_checkpoint_index(std::string_view text, const std::string& path) {
  Index handler;
  absl::Status parsed = handler.parse(text);
  if (parsed.ok() && !handler.has_weight_map) parsed = absl::InvalidArgumentError("weight_map is missing");
  if (!parsed.ok()) {
    return absl::Status(parsed.code(), absl::StrCat(path, ": ", std::string(parsed.message())));
  }
  return std::move(handler.index);
}

std::string format_checkpoint_index(const CheckpointIndex& index, int64_t total_bytes) {
  nlohmann::json document;
  document["metadata"]["total_size"] = total_bytes;
  document["weight_map"] = index.weight_map;
  return document.dump(2) + "\n";
}

}  // namespace slipstream::model
