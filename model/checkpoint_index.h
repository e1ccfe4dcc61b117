// model.safetensors.index.json: which shard of a checkpoint holds which tensor.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "common/status.h"

namespace slipstream::model {

// The names that transformers gives to a checkpoint's files.
inline constexpr char kSingleFileName[] = "model.safetensors";
inline constexpr char kIndexFileName[] = "model.safetensors.index.json";

struct CheckpointIndex {
  std::map<std::string, std::string> weight_map;  // tensor name -> file name in the same directory
};

// {"metadata": {...}, "weight_map": {"TENSOR": "FILE", ...}}. Metadata is not read: published total_size
// values are often wrong. InvalidArgument, with `path` in front: not JSON, weight_map absent or not strings,
// a tensor that stands twice, and a file name that is not plain and "*.safetensors" (anything with a slash:
// it could leave the directory).
absl::StatusOr<CheckpointIndex> parse_checkpoint_index(std::string_view text, const std::string& path);

// `total_bytes` are the tensors' bytes, as metadata.total_size has them.
std::string format_checkpoint_index(const CheckpointIndex& index, int64_t total_bytes);

}  // namespace slipstream::model
