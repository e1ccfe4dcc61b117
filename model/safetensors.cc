#include "model/safetensors.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "model/strict_json.h"

namespace slipstream::model {
namespace {

constexpr uint64_t kLengthBytes = 8;

// What the header says of one tensor. The fields are optional until the tensor's object ends.
struct HeaderEntry {
  std::optional<StoredDType> dtype;
  std::optional<std::vector<int64_t>> shape;
  std::optional<std::vector<int64_t>> offsets;  // begin and end, from the end of the header
};

// {"__metadata__": {"key": "value", ...}, "TENSOR": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
// 24]}, ...}
class Header : public StrictJson {
 public:
  std::map<std::string, std::string> metadata;
  std::map<std::string, HeaderEntry> entries;

  bool start_object(std::size_t count) override {
    switch (place_) {
      case Place::kDocument:
        return go(Place::kName);
      case Place::kMetadata:
        return go(Place::kMetadataKey);
      case Place::kEntry:
        return go(Place::kField);
      default:
        return StrictJson::start_object(count);
    }
  }

  bool end_object() override {
    switch (place_) {
      case Place::kName:
        return go(Place::kEnd);
      case Place::kMetadataKey:
        return go(Place::kName);
      case Place::kField:
        return end_entry();
      default:
        return StrictJson::end_object();
    }
  }

  bool key(std::string& name) override {
    switch (place_) {
      case Place::kName:
        return start_entry(name);
      case Place::kMetadataKey:
        return start_metadata(name);
      case Place::kField:
        return start_field(name);
      default:
        return StrictJson::key(name);
    }
  }

  bool string(std::string& value) override {
    if (place_ == Place::kMetadataValue) {
      *metadata_value_ = std::move(value);
      return go(Place::kMetadataKey);
    }
    if (place_ == Place::kDtype) {
      entry_->dtype = parse_stored_dtype(value);
      if (!entry_->dtype.has_value()) return refuse_in(name_, "unknown dtype ", value);
      return go(Place::kField);
    }
    return StrictJson::string(value);
  }

  bool start_array(std::size_t count) override {
    switch (place_) {
      case Place::kShape:
        return go(Place::kDimensions);
      case Place::kOffsets:
        return go(Place::kOffsetValues);
      default:
        return StrictJson::start_array(count);
    }
  }

  bool number_unsigned(uint64_t value) override {
    if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      return StrictJson::number_unsigned(value);
    if (place_ == Place::kDimensions && entry_->shape->size() < SafetensorsFile::kRankMax) {
      entry_->shape->push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsetValues && entry_->offsets->size() < 2) {
      entry_->offsets->push_back(static_cast<int64_t>(value));
      return true;
    }
    return StrictJson::number_unsigned(value);
  }

  bool end_array() override {
    if (place_ == Place::kDimensions) return go(Place::kField);
    if (place_ == Place::kOffsetValues && entry_->offsets->size() == 2) return go(Place::kField);
    return StrictJson::end_array();
  }

 protected:
  bool unexpected(std::string_view found) override {
    return refuse(absl::StrCat(printable(where()), ": ", std::string(found), ", expected ", expected()));
  }

 private:
  // Where the parser stands: what comes next.
  enum class Place {
    kDocument,
    kName,
    kMetadata,
    kMetadataKey,
    kMetadataValue,
    kEntry,
    kField,
    kDtype,
    kShape,
    kDimensions,
    kOffsets,
    kOffsetValues,
    kEnd,
  };

  bool go(Place place) {
    place_ = place;
    return true;
  }

  bool refuse_in(std::string_view where, const char* what, std::string_view name) {
    return refuse(absl::StrCat(printable(where), ": ", what, "\"", printable(name), "\""));
  }

  bool start_entry(const std::string& name) {
    name_ = name;
    if (name == "__metadata__") {
      if (std::exchange(has_metadata_, true)) return refuse("__metadata__: stands twice in the header");
      return go(Place::kMetadata);
    }
    const auto [at, inserted] = entries.try_emplace(name);
    if (!inserted) return refuse(absl::StrCat(printable(name), ": stands twice in the header"));
    entry_ = &at->second;
    return go(Place::kEntry);
  }

  bool start_metadata(const std::string& name) {
    const auto [at, inserted] = metadata.try_emplace(name);
    if (!inserted) return refuse_in(name_, "duplicate key ", name);
    metadata_value_ = &at->second;
    return go(Place::kMetadataValue);
  }

  bool start_field(const std::string& field) {
    if (field == "dtype" && !entry_->dtype.has_value()) return go(Place::kDtype);
    if (field == "shape" && !entry_->shape.has_value()) {
      entry_->shape.emplace();
      return go(Place::kShape);
    }
    if (field == "data_offsets" && !entry_->offsets.has_value()) {
      entry_->offsets.emplace();
      return go(Place::kOffsets);
    }
    const bool known = field == "dtype" || field == "shape" || field == "data_offsets";
    return refuse_in(name_, known ? "duplicate field " : "unknown field ", field);
  }

  bool end_entry() {
    const char* missing = !entry_->dtype.has_value()     ? "dtype"
                          : !entry_->shape.has_value()   ? "shape"
                          : !entry_->offsets.has_value() ? "data_offsets"
                                                         : nullptr;
    if (missing != nullptr) return refuse(absl::StrCat(printable(name_), ": ", missing, " is missing"));
    return go(Place::kName);
  }

  std::string_view where() const {
    if (place_ == Place::kDocument || place_ == Place::kName || place_ == Place::kEnd) return "header";
    return name_;
  }

  const char* expected() const {
    switch (place_) {
      case Place::kDocument:
        return "an object";
      case Place::kName:
        return "a tensor's name";
      case Place::kMetadata:
        return "an object";
      case Place::kMetadataKey:
        return "a key";
      case Place::kMetadataValue:
        return "a string";
      case Place::kEntry:
        return "an object";
      case Place::kField:
        return "dtype, shape or data_offsets";
      case Place::kDtype:
        return "a string in dtype";
      case Place::kShape:
        return "an array in shape";
      case Place::kDimensions:
        return "at most 8 sizes below 2^63 in shape";
      case Place::kOffsets:
        return "an array in data_offsets";
      case Place::kOffsetValues:
        return "two offsets below 2^63 in data_offsets";
      case Place::kEnd:
        return "nothing";
    }
    return "";
  }

  Place place_ = Place::kDocument;
  bool has_metadata_ = false;
  std::string name_;                       // the entry being read
  HeaderEntry* entry_ = nullptr;           // in entries
  std::string* metadata_value_ = nullptr;  // in metadata
};

// Bytes of a tensor, or nothing if they do not fit in 63 bits. Zeros count as ones: then no product of some
// of the sizes, such as a stride, overflows either.
std::optional<int64_t> bytes_of(StoredDType dtype, absl::Span<const int64_t> shape) {
  int64_t bound = size_of(dtype);
  bool has_zero = false;
  for (const int64_t size : shape) {
    has_zero |= size == 0;
    if (__builtin_mul_overflow(bound, std::max<int64_t>(size, 1), &bound)) return std::nullopt;
  }
  return has_zero ? 0 : bound;
}

absl::Status check_entry(const HeaderEntry& entry, int64_t data_bytes) {
  const std::optional<int64_t> bytes = bytes_of(*entry.dtype, *entry.shape);
  const std::string shape = describe_shape(*entry.shape);
  if (!bytes.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("shape ", shape, ": its size overflows 63 bits"));
  }
  const std::string offsets = describe_shape(*entry.offsets);
  const int64_t begin = (*entry.offsets)[0];
  const int64_t end = (*entry.offsets)[1];
  if (begin > end) {
    return absl::InvalidArgumentError(absl::StrCat("data_offsets ", offsets, ", expected begin <= end"));
  }
  if (end - begin != *bytes) {
    return absl::InvalidArgumentError(absl::StrCat("data_offsets ", offsets, " span ", end - begin,
                                                   " bytes, expected ", *bytes, " for ",
                                                   name_of(*entry.dtype), " ", shape));
  }
  if (end > data_bytes) {
    return absl::DataLossError(
        absl::StrCat("data_offsets ", offsets, ", but the file has only ", data_bytes, " bytes of data"));
  }
  return absl::OkStatus();
}

// The tensors must cover the data from its first byte to its last, one after the other.
absl::Status check_cover(const std::map<std::string, HeaderEntry>& entries, int64_t data_bytes) {
  std::vector<std::pair<const std::string*, const std::vector<int64_t>*>> ranges;
  for (const auto& [name, entry] : entries) ranges.emplace_back(&name, &*entry.offsets);
  // By (begin, end): an empty tensor comes before the one that begins at its place.
  std::stable_sort(ranges.begin(), ranges.end(),
                   [](const auto& a, const auto& b) { return *a.second < *b.second; });
  int64_t covered = 0;
  for (const auto& [name, offsets] : ranges) {
    if ((*offsets)[0] != covered) {
      return absl::InvalidArgumentError(absl::StrCat(
          printable(*name), ": data_offsets ", describe_shape(*offsets), ", expected to begin at ", covered,
          ": tensors ", (*offsets)[0] < covered ? "overlap" : "leave a hole"));
    }
    covered = (*offsets)[1];
  }
  if (covered != data_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", data_bytes, " bytes of data, expected ", covered));
  }
  return absl::OkStatus();
}

absl::Status prefixed(std::string_view prefix, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(printable(prefix), ": ", std::string(status.message())));
}

struct Contents {
  std::vector<StoredTensor> tensors;
  std::map<std::string, std::string> metadata;
};

absl::StatusOr<Contents> read_header(absl::Span<const std::byte> file) {
  if (file.size() < kLengthBytes) {
    return absl::DataLossError(absl::StrCat(file.size(), " bytes, expected at least ", kLengthBytes));
  }
  uint64_t header_bytes;
  std::memcpy(&header_bytes, file.data(), kLengthBytes);
  if (header_bytes > SafetensorsFile::kHeaderBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("a header of ", header_bytes, " bytes, expected at most ",
                                                   SafetensorsFile::kHeaderBytesMax));
  }
  if (header_bytes > file.size() - kLengthBytes) {
    return absl::DataLossError(absl::StrCat("a header of ", header_bytes, " bytes, but the file has only ",
                                            file.size() - kLengthBytes, " after its length"));
  }
  Header header;
  const char* text = reinterpret_cast<const char*>(file.data()) + kLengthBytes;
  RETURN_IF_ERROR(header.parse({text, header_bytes}));

  const absl::Span<const std::byte> data = file.subspan(kLengthBytes + header_bytes);
  const int64_t data_bytes = static_cast<int64_t>(data.size());
  for (const auto& [name, entry] : header.entries) {
    if (absl::Status checked = check_entry(entry, data_bytes); !checked.ok()) return prefixed(name, checked);
  }
  RETURN_IF_ERROR(check_cover(header.entries, data_bytes));

  Contents contents{.tensors = {}, .metadata = std::move(header.metadata)};
  contents.tensors.reserve(header.entries.size());
  for (auto& [name, entry] : header.entries) {
    const int64_t begin = (*entry.offsets)[0];
    const int64_t end = (*entry.offsets)[1];
    contents.tensors.push_back(
        {.name = name,
         .dtype = *entry.dtype,
         .shape = *std::move(entry.shape),
         .bytes = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin))});
  }
  return contents;
}

}  // namespace

std::string StoredTensor::describe() const {
  return absl::StrCat(name_of(dtype), " ", describe_shape(shape));
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::parse(absl::Span<const std::byte> file,
                                                       const std::string& path) {
  absl::StatusOr<Contents> contents = read_header(file);
  if (!contents.ok()) {
    return absl::Status(contents.status().code(),
                        absl::StrCat(path, ": ", std::string(contents.status().message())));
  }
  SafetensorsFile result;
  result.path_ = path;
  result.tensors_ = std::move(contents->tensors);
  result.metadata_ = std::move(contents->metadata);
  return result;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  ASSIGN_OR_RETURN(MappedFile file, MappedFile::open(path));
  ASSIGN_OR_RETURN(SafetensorsFile result, parse(file.bytes(), path));
  result.file_ = std::move(file);
  return result;
}

const StoredTensor* SafetensorsFile::find(std::string_view name) const {
  const auto at =
      std::lower_bound(tensors_.begin(), tensors_.end(), name,
                       [](const StoredTensor& tensor, std::string_view key) { return tensor.name < key; });
  return at != tensors_.end() && at->name == name ? &*at : nullptr;
}

}  // namespace slipstream::model
