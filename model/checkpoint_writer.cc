#include "model/checkpoint_writer.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "model/checkpoint_index.h"
#include "model/mapped_file.h"
#include "model/output_file.h"
#include "model/strict_json.h"
#include "model/tensor_rows.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr char kTemporary[] = ".tmp";
constexpr char kConfigFileName[] = "config.json";
constexpr size_t kNameBytesMax = 1024;
constexpr int64_t kShardsMax = 99'999;  // five digits in the file names
constexpr int64_t kLengthBytes = 8;     // in front of the header
constexpr char kHeaderBegin[] = R"({"__metadata__":{"format":"pt"})";

std::string format_entry(const std::string& json_name, const StoredTensor& tensor, int64_t begin,
                         int64_t end) {
  std::string shape = describe_shape(tensor.shape);
  std::erase(shape, ' ');
  return absl::StrCat(",", json_name, ":{\"dtype\":\"", name_of(tensor.dtype), "\",\"shape\":", shape,
                      ",\"data_offsets\":[", begin, ",", end, "]}");
}

// Digits follow `prefix`; returns what is after them, or "" if there are fewer than five.
std::string_view after_number(std::string_view text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return "";
  text.remove_prefix(prefix.size());
  size_t digits = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits])) != 0) ++digits;
  return digits < 5 ? "" : text.substr(digits);
}

// A file that a save, finished or not, may have left: these and no others are removed.
bool is_checkpoint_file(std::string_view name) {
  if (name.ends_with(kTemporary)) name.remove_suffix(std::strlen(kTemporary));
  if (name == kSingleFileName || name == kIndexFileName) return true;
  return after_number(after_number(name, "model-"), "-of-") == ".safetensors";
}

std::string temporary(const std::string& path) { return absl::StrCat(path, kTemporary); }

// Is there something at `path` that is not a file of this text?
bool holds_other_than(const std::string& path, const std::string& text) {
  const absl::StatusOr<MappedFile> file = MappedFile::open(path);
  if (!file.ok()) return !absl::IsNotFound(file.status());
  return file->text() != text;
}

absl::Status make_directory(const std::string& dir) {
  std::error_code error;
  const bool made = std::filesystem::create_directories(dir, error);
  if (error) return absl::ErrnoToStatus(error.value(), dir);
  return made ? sync_directory(absl::StrCat(dir, "/..")) : absl::OkStatus();
}

// The checkpoint files that are in the directory now.
absl::StatusOr<std::set<std::string>> list_checkpoint_files(const std::string& dir) {
  std::set<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator at(dir, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    if (is_checkpoint_file(name)) names.insert(name);
  }
  if (error) return absl::ErrnoToStatus(error.value(), dir);
  return names;
}

}  // namespace

absl::Status CheckpointWriter::add(std::string_view name, const Tensor& tensor, DType file_dtype) {
  CHECK(!tensor.empty());
  CHECK(tensor.device() == kernels::Device{} ||
        (options_.stream != nullptr && tensor.device() == options_.stream->device()));
  if (!can_convert(stored_as(tensor.dtype()), file_dtype)) {
    return absl::InvalidArgumentError(absl::StrCat(printable(name), ": ", tensor.describe(),
                                                   " cannot be written as ", kernels::name_of(file_dtype)));
  }
  StoredTensor stored{
      .name = std::string(name), .dtype = stored_as(file_dtype), .shape = shape_of(tensor), .bytes = {}};
  return add_entry({.tensor = std::move(stored),
                    .source = tensor,
                    .file_dtype = file_dtype,
                    .file_bytes = tensor.numel() * size_of(file_dtype),
                    .json_name = {}});
}

absl::Status CheckpointWriter::add_raw(const StoredTensor& tensor) {
  int64_t bytes = size_of(tensor.dtype);
  bool fits = tensor.shape.size() <= SafetensorsFile::kRankMax;
  for (const int64_t size : tensor.shape)
    fits = fits && size >= 0 && !__builtin_mul_overflow(bytes, size, &bytes);
  if (!fits || bytes != static_cast<int64_t>(tensor.bytes.size())) {
    return absl::InvalidArgumentError(absl::StrCat(printable(tensor.name), ": ", tensor.describe(), " with ",
                                                   tensor.bytes.size(), " bytes"));
  }
  return add_entry({.tensor = tensor, .source = {}, .file_dtype = {}, .file_bytes = bytes, .json_name = {}});
}

absl::Status CheckpointWriter::add_entry(Entry entry) {
  const std::string& name = entry.tensor.name;
  const std::optional<std::string> json_name = to_json_string(name);
  if (name.empty() || name.size() > kNameBytesMax || name == "__metadata__" || !json_name.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat("tensor name \"", printable(name), "\", expected 1 to ",
                                                   kNameBytesMax, " bytes of UTF-8 other than __metadata__"));
  }
  entry.json_name = *json_name;
  if (!names_.insert(name).second)
    return absl::AlreadyExistsError(absl::StrCat(printable(name), ": added twice"));
  entries_.push_back(std::move(entry));
  return absl::OkStatus();
}

std::string CheckpointWriter::format_header(const Shard& shard) {
  std::string text = kHeaderBegin;
  int64_t offset = 0;
  for (const Entry* entry : shard.entries) {
    text += format_entry(entry->json_name, entry->tensor, offset, offset + entry->file_bytes);
    offset += entry->file_bytes;
  }
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');  // the data then begins at a multiple of 8
  const uint64_t length = text.size();
  std::string header(kLengthBytes, '\0');
  std::memcpy(header.data(), &length, kLengthBytes);
  return header + text;
}

absl::StatusOr<std::vector<CheckpointWriter::Shard>> CheckpointWriter::plan() const {
  if (entries_.empty()) return absl::InvalidArgumentError("a checkpoint without tensors");
  // Length, both braces, padding.
  constexpr int64_t kFrameBytes = kLengthBytes + static_cast<int64_t>(sizeof(kHeaderBegin)) + 8;
  constexpr int64_t kWidest =
      std::numeric_limits<int64_t>::max();  // offsets are not known before the shard is full
  std::vector<Shard> shards;
  int64_t header_bound = 0;
  for (const Entry& entry : entries_) {
    const int64_t entry_bound =
        static_cast<int64_t>(format_entry(entry.json_name, entry.tensor, kWidest, kWidest).size());
    const auto fits = [&] {
      int64_t total = 0;
      const bool overflow = __builtin_add_overflow(shards.back().data_bytes, entry.file_bytes, &total) ||
                            __builtin_add_overflow(total, header_bound + entry_bound, &total);
      return !overflow && total <= options_.shard_bytes_max &&
             header_bound + entry_bound <= static_cast<int64_t>(SafetensorsFile::kHeaderBytesMax);
    };
    if (shards.empty() || !fits()) {
      shards.emplace_back();
      header_bound = kFrameBytes;
    }
    shards.back().entries.push_back(&entry);
    shards.back().data_bytes += entry.file_bytes;
    header_bound += entry_bound;
  }
  const int64_t count = static_cast<int64_t>(shards.size());
  if (count > kShardsMax) {
    return absl::InvalidArgumentError(absl::StrCat("shard_bytes_max ", options_.shard_bytes_max, " makes ",
                                                   count, " shards, expected at most ", kShardsMax));
  }
  for (int64_t i = 0; i < count; ++i) {
    Shard& shard = shards[static_cast<size_t>(i)];
    shard.file_name =
        count == 1 ? kSingleFileName : absl::StrFormat("model-%05d-of-%05d.safetensors", i + 1, count);
    // Widest elements first, so that each tensor begins at a multiple of its element size: readers that view
    // the mapped file as typed arrays need it.
    std::stable_sort(shard.entries.begin(), shard.entries.end(), [](const Entry* a, const Entry* b) {
      return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
    });
    shard.header = format_header(shard);
  }
  return shards;
}

absl::Status CheckpointWriter::write_shard(const Shard& shard, const std::string& path) const {
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  RETURN_IF_ERROR(file.append(shard.header));
  std::vector<std::byte> fetched;
  for (const Entry* entry : shard.entries) {
    if (entry->source.empty()) {
      RETURN_IF_ERROR(file.append(entry->tensor.bytes));
      continue;
    }
    const StoredDType from = stored_as(entry->source.dtype());
    const int64_t file_size = size_of(entry->file_dtype);
    absl::Status status;
    for_each_run(entry->source, [&](const void* run, int64_t count) {
      const std::byte* in = static_cast<const std::byte*>(run);
      while (count > 0 && status.ok()) {
        const int64_t piece = std::min(count, OutputFile::kBufferBytes / file_size);
        const absl::StatusOr<std::byte*> space = file.append_space(piece * file_size);
        status = space.status();
        if (!status.ok()) return;
        const std::byte* values = in;
        if (entry->source.device() != kernels::Device{}) {
          fetched.resize(static_cast<size_t>(piece * size_of(from)));
          options_.stream->download(Tensor(const_cast<std::byte*>(in), entry->source.dtype(), {piece}, entry->source.device()),
                                    fetched.data());
          values = fetched.data();
        }
        convert(from, values, entry->file_dtype, *space, piece);
        in += piece * size_of(from);
        count -= piece;
      }
    });
    RETURN_IF_ERROR(status);
  }
  return file.finish();
}

absl::Status CheckpointWriter::write_files(const std::string& dir, const std::vector<Shard>& shards) const {
  CheckpointIndex index;
  int64_t total_bytes = 0;
  for (const Shard& shard : shards) {
    RETURN_IF_ERROR(write_shard(shard, temporary(absl::StrCat(dir, "/", shard.file_name))));
    for (const Entry* entry : shard.entries) index.weight_map[entry->tensor.name] = shard.file_name;
    total_bytes += shard.data_bytes;
  }
  if (config_) RETURN_IF_ERROR(write_file(temporary(absl::StrCat(dir, "/", kConfigFileName)), *config_));
  if (shards.size() == 1) return absl::OkStatus();
  const std::string text = format_checkpoint_index(index, total_bytes);
  return write_file(temporary(absl::StrCat(dir, "/", kIndexFileName)), text);
}

// Readers take model.safetensors before an index. So it is the rename of model.safetensors or of the index,
// and after the latter the removal of an old model.safetensors, that makes the new checkpoint the
// directory's.
absl::Status CheckpointWriter::publish(const std::string& dir, const std::vector<Shard>& shards) const {
  const std::string index_path = absl::StrCat(dir, "/", kIndexFileName);
  const std::string config_path = absl::StrCat(dir, "/", kConfigFileName);
  ASSIGN_OR_RETURN(std::set<std::string> stale, list_checkpoint_files(dir));
  if (config_ && holds_other_than(config_path, *config_)) {
    before(absl::StrCat("remove ", kConfigFileName));
    RETURN_IF_ERROR(remove_file(config_path));
    RETURN_IF_ERROR(sync_directory(dir));
  }
  const bool sharded = shards.size() > 1;
  const bool replaces_shard = std::any_of(
      shards.begin(), shards.end(), [&](const Shard& shard) { return stale.contains(shard.file_name); });
  if (sharded && replaces_shard && stale.contains(kIndexFileName)) {
    // The old index must not speak for new shards.
    before(absl::StrCat("remove ", kIndexFileName));
    RETURN_IF_ERROR(remove_file(index_path));
    RETURN_IF_ERROR(sync_directory(dir));
  }
  for (const Shard& shard : shards) {
    const std::string path = absl::StrCat(dir, "/", shard.file_name);
    before(absl::StrCat("rename ", shard.file_name));
    RETURN_IF_ERROR(rename_file(temporary(path), path));
    stale.erase(shard.file_name);
  }
  if (sharded) {
    RETURN_IF_ERROR(sync_directory(dir));  // the shards' names are on disk before the index that lists them
    before(absl::StrCat("rename ", kIndexFileName));
    RETURN_IF_ERROR(rename_file(temporary(index_path), index_path));
    stale.erase(kIndexFileName);
  }
  RETURN_IF_ERROR(sync_directory(dir));
  // An old index goes before its shards and an old model.safetensors before all else: no reader finds one
  // that names files which are gone.
  for (const char* first : {kSingleFileName, kIndexFileName}) {
    if (stale.erase(first) == 0) continue;
    before(absl::StrCat("remove ", first));
    RETURN_IF_ERROR(remove_file(absl::StrCat(dir, "/", first)));
    RETURN_IF_ERROR(sync_directory(dir));
  }
  for (const std::string& name : stale) {  // our own temporaries as well, which are gone by now
    before(absl::StrCat("remove ", name));
    RETURN_IF_ERROR(remove_file(absl::StrCat(dir, "/", name)));
  }
  RETURN_IF_ERROR(sync_directory(dir));
  if (!config_) return absl::OkStatus();
  before(absl::StrCat("rename ", kConfigFileName));
  RETURN_IF_ERROR(rename_file(temporary(config_path), config_path));
  return sync_directory(dir);
}

absl::Status CheckpointWriter::save(const std::string& dir) {
  ASSIGN_OR_RETURN(const std::vector<Shard> shards, plan());
  RETURN_IF_ERROR(make_directory(dir));
  if (absl::Status written = write_files(dir, shards); !written.ok()) {
    for (const Shard& shard : shards) {
      remove_file(temporary(absl::StrCat(dir, "/", shard.file_name))).IgnoreError();  // `written` tells more
    }
    for (const char* name : {kIndexFileName, kConfigFileName}) {
      remove_file(temporary(absl::StrCat(dir, "/", name))).IgnoreError();
    }
    return written;
  }
  return publish(dir, shards);
}

absl::Status copy_side_file(const std::string& from_dir, const std::string& to_dir, const std::string& name) {
  constexpr size_t kBytesMax = 64 << 20;
  if (name.empty() || name.front() == '.' || name.find('/') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("side file \"", printable(name), "\", expected a plain name"));
  }
  const std::string from = absl::StrCat(from_dir, "/", name);
  const std::string to = absl::StrCat(to_dir, "/", name);
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(from));
  if (file.bytes().size() > kBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(from, ": ", file.bytes().size(), " bytes, expected at most ", kBytesMax));
  }
  RETURN_IF_ERROR(make_directory(to_dir));
  std::error_code error;
  if (std::filesystem::equivalent(from, to, error)) return absl::OkStatus();
  RETURN_IF_ERROR(write_file(temporary(to), file.text()));
  RETURN_IF_ERROR(rename_file(temporary(to), to));
  return sync_directory(to_dir);
}

}  // namespace slipstream::model
