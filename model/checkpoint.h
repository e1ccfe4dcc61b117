// A checkpoint in the published format: one model.safetensors, or shards with model.safetensors.index.json.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "kernels/tensor.h"
#include "model/safetensors.h"

namespace slipstream::model {

struct CheckpointOptions {
  // quantization_config.weight_block_size of the checkpoint's config.json: how many rows and columns of an
  // FP8 weight share one element of its weight_scale_inv.
  int64_t fp8_block_rows = 128;
  int64_t fp8_block_cols = 128;
};

// Every header is read and checked by open(); tensors are read from the mapped files when asked for. All
// members may be called by any number of threads at once. The files must not change meanwhile, except by
// rename.
class Checkpoint {
 public:
  // Reads DIR/model.safetensors if there is one (as transformers does), else DIR/model.safetensors.index.json
  // and the shards that it names. NotFound: neither, or a shard is missing. InvalidArgument, DataLoss: a
  // malformed file, block sizes below 1, a tensor of weight_map that its shard lacks, that stands in two
  // shards, or that weight_map lacks.
  static absl::StatusOr<Checkpoint> open(const std::string& dir, const CheckpointOptions& options);
  // One file, whatever its name.
  static absl::StatusOr<Checkpoint> open_file(SafetensorsFile file, const CheckpointOptions& options);

  std::vector<std::string> names() const;  // sorted
  // A tensor as stored, for a look or to be carried elsewhere byte for byte; null if there is none. Lives as
  // long as the checkpoint.
  const StoredTensor* find(std::string_view name) const;

  // Reads a tensor, converted to dst's dtype with rounding to nearest even:
  //   F32, BF16, F16   to f32, bf16
  //   F8_E4M3          to f32, bf16: "X.weight" times its block scales "X.weight_scale_inv" (fp8.h)
  //   F8_E4M3, I32     to f8_e4m3, i32: the bytes (the scales remain unread)
  // dst is on the CPU and may be a strided slice of a larger tensor. NotFound: no such tensor or no scales.
  // InvalidArgument: shape, dtype or a scale is not what dst demands; "FILE: TENSOR: shape [2, 3], expected
  // [2, 4]". dst is as it was, unless the answer is OK.
  absl::Status read_into(std::string_view name, const kernels::Tensor& dst);

  // Reads an F8_E4M3 matrix as it is stored: codes [rows, cols] f8_e4m3 and its block scales
  // [ceil(rows / fp8_block_rows), ceil(cols / fp8_block_cols)] f32, both dense and on the CPU. Errors as those of read_into().
  absl::Status read_fp8_into(std::string_view name, const kernels::Tensor& codes, const kernels::Tensor& scales);

  // Names that no read_into() has asked for with success, sorted. A scale is read with its weight.
  std::vector<std::string> unread() const;

 private:
  struct Entry {
    const StoredTensor* tensor;  // in files_
    const std::string* path;     // of its file
    int64_t index;               // in read_
  };

  Checkpoint(std::string where, std::vector<SafetensorsFile> files, const CheckpointOptions& options);
  absl::StatusOr<Entry> entry(std::string_view name) const;
  // What `name` is, if its shape is `expected`.
  absl::StatusOr<Entry> entry_of_shape(std::string_view name, const std::vector<int64_t>& expected) const;
  // A weight's codes, where they lie in the file, and its scales, checked.
  struct Fp8Weight;
  absl::StatusOr<Fp8Weight> fp8_weight(const Entry& weight) const;
  void mark_read(const Entry& entry) {
    read_[static_cast<size_t>(entry.index)].store(true, std::memory_order_relaxed);
  }

  std::string where_;  // the directory or file, for messages
  CheckpointOptions options_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string_view, Entry> entries_;  // keys live in files_
  std::unique_ptr<std::atomic<bool>[]> read_;  // of each entry
};

}  // namespace slipstream::model
