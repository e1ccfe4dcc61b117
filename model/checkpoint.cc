#include "model/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "model/checkpoint_index.h"
#include "model/fp8.h"
#include "model/tensor_rows.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr size_t kIndexBytesMax = 100'000'000;

absl::Status check_options(const CheckpointOptions& options) {
  if (options.fp8_block_rows >= 1 && options.fp8_block_cols >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weight_block_size ", describe_shape({options.fp8_block_rows, options.fp8_block_cols}),
                   ", expected sizes of at least 1"));
}

absl::Status at(const std::string& path, std::string_view tensor, absl::StatusCode code,
                const std::string& message) {
  return absl::Status(code, absl::StrCat(path, ": ", printable(tensor), ": ", message));
}

absl::StatusOr<CheckpointIndex> read_index(const std::string& path) {
  ASSIGN_OR_RETURN(const MappedFile file, MappedFile::open(path));
  const absl::Span<const std::byte> bytes = file.bytes();
  if (bytes.size() > kIndexBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", bytes.size(), " bytes, expected at most ", kIndexBytesMax));
  }
  return parse_checkpoint_index({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path);
}

// The index and the shards must agree on every tensor, in both directions.
absl::Status check_index(const std::string& index_path, const CheckpointIndex& index,
                         const std::map<std::string, const SafetensorsFile*>& shards) {
  for (const auto& [tensor, shard] : index.weight_map) {
    if (shards.at(shard)->find(tensor) == nullptr) {
      return at(index_path, tensor, absl::StatusCode::kInvalidArgument,
                absl::StrCat("not in ", shard, ", where weight_map has it"));
    }
  }
  for (const auto& [shard, file] : shards) {
    for (const StoredTensor& tensor : file->tensors()) {
      const auto entry = index.weight_map.find(tensor.name);
      if (entry == index.weight_map.end()) {
        return at(file->path(), tensor.name, absl::StatusCode::kInvalidArgument,
                  "not in weight_map of the index");
      }
      if (entry->second != shard) {
        return at(file->path(), tensor.name, absl::StatusCode::kInvalidArgument,
                  absl::StrCat("stands in two shards; weight_map has it in ", entry->second));
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<SafetensorsFile>> open_shards(const std::string& dir,
                                                         const std::string& index_path) {
  ASSIGN_OR_RETURN(const CheckpointIndex index, read_index(index_path));
  std::set<std::string> names;
  for (const auto& [tensor, shard] : index.weight_map) names.insert(shard);
  std::vector<SafetensorsFile> files;
  files.reserve(names.size());  // `shards` points into it
  std::map<std::string, const SafetensorsFile*> shards;
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(absl::StrCat(dir, "/", name)));
    files.push_back(std::move(file));
    shards[name] = &files.back();
  }
  RETURN_IF_ERROR(check_index(index_path, index, shards));
  return files;
}

}  // namespace

struct Checkpoint::Fp8Weight {
  Fp8Blocks blocks;           // its scales are those below
  std::vector<float> scales;  // a copy: the file may hold them unaligned
  Entry scale_entry;
};

absl::StatusOr<Checkpoint> Checkpoint::open(const std::string& dir, const CheckpointOptions& options) {
  RETURN_IF_ERROR(check_options(options));
  const std::string single_path = absl::StrCat(dir, "/", kSingleFileName);
  const std::string index_path = absl::StrCat(dir, "/", kIndexFileName);
  std::error_code error;  // a path that cannot be looked at is reported by the open below
  if (std::filesystem::exists(single_path, error)) {
    ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(single_path));
    std::vector<SafetensorsFile> files;
    files.push_back(std::move(file));
    return Checkpoint(dir, std::move(files), options);
  }
  if (!std::filesystem::exists(index_path, error)) {
    return absl::NotFoundError(absl::StrCat(dir, ": neither ", kSingleFileName, " nor ", kIndexFileName));
  }
  ASSIGN_OR_RETURN(std::vector<SafetensorsFile> files, open_shards(dir, index_path));
  return Checkpoint(dir, std::move(files), options);
}

absl::StatusOr<Checkpoint> Checkpoint::open_file(SafetensorsFile file, const CheckpointOptions& options) {
  RETURN_IF_ERROR(check_options(options));
  std::vector<SafetensorsFile> files;
  const std::string where = file.path();
  files.push_back(std::move(file));
  return Checkpoint(where, std::move(files), options);
}

Checkpoint::Checkpoint(std::string where, std::vector<SafetensorsFile> files,
                       const CheckpointOptions& options)
    : where_(std::move(where)), options_(options), files_(std::move(files)) {
  for (const SafetensorsFile& file : files_) {
    for (const StoredTensor& tensor : file.tensors()) {
      const int64_t index = static_cast<int64_t>(entries_.size());
      entries_[tensor.name] = {.tensor = &tensor, .path = &file.path(), .index = index};
    }
  }
  read_ = std::make_unique<std::atomic<bool>[]>(entries_.size());
}

std::vector<std::string> Checkpoint::names() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) names.emplace_back(name);
  return names;
}

const StoredTensor* Checkpoint::find(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : found->second.tensor;
}

absl::StatusOr<Checkpoint::Entry> Checkpoint::entry(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return at(where_, name, absl::StatusCode::kNotFound, "no such tensor");
  return found->second;
}

absl::StatusOr<Checkpoint::Entry> Checkpoint::entry_of_shape(std::string_view name, const std::vector<int64_t>& expected) const {
  ASSIGN_OR_RETURN(const Entry found, entry(name));
  if (found.tensor->shape == expected) return found;
  return at(*found.path, name, absl::StatusCode::kInvalidArgument,
            absl::StrCat("shape ", describe_shape(found.tensor->shape), ", expected ", describe_shape(expected)));
}

absl::Status Checkpoint::read_into(std::string_view name, const Tensor& dst) {
  CHECK(!dst.empty());
  CHECK(dst.device() == kernels::Device{});
  ASSIGN_OR_RETURN(const Entry from, entry_of_shape(name, shape_of(dst)));
  const StoredTensor& tensor = *from.tensor;
  if (can_convert(tensor.dtype, dst.dtype())) {
    const std::byte* in = tensor.bytes.data();
    for_each_run(dst, [&](void* out, int64_t count) {
      convert(tensor.dtype, in, dst.dtype(), out, count);
      in += count * size_of(tensor.dtype);
    });
  } else if (tensor.dtype == StoredDType::kF8E4M3 && dst.dtype() != DType::kI32) {
    ASSIGN_OR_RETURN(const Fp8Weight weight, fp8_weight(from));
    dequantize(weight.blocks, dst);
    mark_read(weight.scale_entry);
  } else {
    return at(*from.path, name, absl::StatusCode::kInvalidArgument,
              absl::StrCat("dtype ", name_of(tensor.dtype), ", expected one that converts to ",
                           kernels::name_of(dst.dtype())));
  }
  mark_read(from);
  return absl::OkStatus();
}

absl::Status Checkpoint::read_fp8_into(std::string_view name, const Tensor& codes, const Tensor& scales) {
  CHECK(codes.dtype() == DType::kF8E4M3 && codes.dense() && codes.device() == kernels::Device{});
  ASSIGN_OR_RETURN(const Entry from, entry_of_shape(name, shape_of(codes)));
  if (from.tensor->dtype != StoredDType::kF8E4M3) {
    return at(*from.path, name, absl::StatusCode::kInvalidArgument,
              absl::StrCat("dtype ", name_of(from.tensor->dtype), ", expected F8_E4M3"));
  }
  ASSIGN_OR_RETURN(const Fp8Weight weight, fp8_weight(from));
  CHECK(scales.dense() && scales.has_shape({weight.blocks.scale_rows(), weight.blocks.scale_cols()}));
  std::copy_n(weight.blocks.codes, codes.numel(), static_cast<uint8_t*>(codes.raw()));
  std::copy(weight.scales.begin(), weight.scales.end(), scales.f32());
  mark_read(weight.scale_entry);
  mark_read(from);
  return absl::OkStatus();
}

absl::StatusOr<Checkpoint::Fp8Weight> Checkpoint::fp8_weight(const Entry& weight) const {
  const StoredTensor& codes = *weight.tensor;
  const std::string scale_name = absl::StrCat(codes.name, "_scale_inv");
  const auto found = entries_.find(scale_name);
  if (found == entries_.end()) {
    return at(*weight.path, codes.name, absl::StatusCode::kNotFound,
              absl::StrCat("F8_E4M3 without its scales: no tensor ", printable(scale_name)));
  }
  const Entry& scale_entry = found->second;
  const StoredTensor& scale = *scale_entry.tensor;
  if (codes.shape.size() != 2) {
    return at(*weight.path, codes.name, absl::StatusCode::kInvalidArgument,
              absl::StrCat("shape ", describe_shape(codes.shape),
                           ", expected a matrix for F8_E4M3 with block scales"));
  }
  Fp8Weight out{.blocks = {.codes = reinterpret_cast<const uint8_t*>(codes.bytes.data()),
                           .rows = codes.shape[0],
                           .cols = codes.shape[1],
                           .scales = nullptr,
                           .block_rows = options_.fp8_block_rows,
                           .block_cols = options_.fp8_block_cols},
                .scales = {},
                .scale_entry = scale_entry};
  const std::vector<int64_t> expected = {out.blocks.scale_rows(), out.blocks.scale_cols()};
  if (scale.dtype != StoredDType::kF32 || scale.shape != expected) {
    return at(*scale_entry.path, scale_name, absl::StatusCode::kInvalidArgument,
              absl::StrCat(scale.describe(), ", expected F32 ", describe_shape(expected)));
  }
  out.scales.resize(scale.bytes.size() / sizeof(float));
  if (!out.scales.empty()) std::memcpy(out.scales.data(), scale.bytes.data(), scale.bytes.size());
  out.blocks.scales = out.scales.data();
  if (const BadScale bad = find_bad_scale(out.blocks); bad.found) {
    return at(*scale_entry.path, scale_name, absl::StatusCode::kInvalidArgument,
              absl::StrCat("block [", bad.row, ", ", bad.col, "]: scale ", bad.scale,
                           ", expected a finite one, above 0 where the block is not all zeros"));
  }
  return out;
}

std::vector<std::string> Checkpoint::unread() const {
  std::vector<std::string> names;
  for (const auto& [name, entry] : entries_) {
    if (!read_[static_cast<size_t>(entry.index)].load(std::memory_order_relaxed)) names.emplace_back(name);
  }
  return names;
}

}  // namespace slipstream::model
