// Writes a checkpoint in the published format, so that transformers and Checkpoint load it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "model/safetensors.h"

namespace slipstream::model {

struct CheckpointWriterOptions {
  // No shard file is larger, unless a single tensor is. 5 GB is what transformers takes.
  int64_t shard_bytes_max = 5'000'000'000;
  // Called before each step that changes what a reader of the directory sees, with a name such as
  // "rename model.safetensors": fault tests stop the process there. May be empty.
  std::function<void(std::string_view step)> before_step;
  // Of tensors on another device than the CPU: their values come through it, 1 MiB at a time.
  kernels::Stream* stream = nullptr;
};

// Tensors are added as views; save() reads them, one run of elements at a time. Memory is a buffer of 1 MiB
// and the headers, whatever the size of the checkpoint. One thread uses a writer.
class CheckpointWriter {
 public:
  explicit CheckpointWriter(CheckpointWriterOptions options) : options_(std::move(options)) {}

  // tensor: on the CPU or the stream's device, not absent, may be strided; f32 or bf16 is written as file_dtype f32 or bf16, rounded
  // to nearest even; f8_e4m3 and i32 as themselves. It must hold its values until save() returns.
  // InvalidArgument: a name that is empty, over 1,024 bytes, not UTF-8, or "__metadata__"; a dtype
  // that is not listed here. AlreadyExists: the name was added before.
  absl::Status add(std::string_view name, const kernels::Tensor& tensor, kernels::DType file_dtype);
  // Byte for byte; `bytes` must live until save() returns. InvalidArgument: as above, and bytes of another
  // length than the shape's.
  absl::Status add_raw(const StoredTensor& tensor);

  // DIR/config.json, written and published by save() together with the tensors.
  void set_config(std::string text) { config_ = std::move(text); }

  // Writes DIR/model.safetensors if all fits in one shard, else DIR/model-00001-of-000NN.safetensors, ... and
  // DIR/model.safetensors.index.json; makes DIR if it is not there. A single writer at a time in one
  // directory.
  //
  // A crash at any time leaves a directory that loads as the old checkpoint, as the new one, or not at all;
  // never as a mixture. All files are written under *.tmp names and fsync'd first. Then they are renamed, the
  // index last. Only if a new shard replaces an old one of the same name is the old index removed first: from
  // there until the rename of the new index, some milliseconds, nothing loads; save into a fresh directory to
  // avoid that. Files of an earlier save that the new checkpoint does not have are removed at the end. An old
  // config.json of other contents is removed before the first rename, and the new one appears after all else: weights
  // never stand beside another model's config.
  // InvalidArgument: nothing was added, or more than 99,999 shards; ResourceExhausted and others: as the
  // system says. On an error the files written so far are removed, unless renaming had begun.
  absl::Status save(const std::string& dir);

 private:
  struct Entry {
    StoredTensor tensor;                               // as it will lie in the file; bytes only if raw
    kernels::Tensor source;                            // absent if raw
    kernels::DType file_dtype = kernels::DType::kF32;  // of a source
    int64_t file_bytes = 0;
    std::string json_name;  // quoted and escaped
  };
  // One file: its header, then the entries one after the other.
  struct Shard {
    std::string file_name;
    std::string header;  // with the 8 bytes of its length
    std::vector<const Entry*> entries;
    int64_t data_bytes = 0;
  };

  absl::Status add_entry(Entry entry);
  absl::StatusOr<std::vector<Shard>> plan() const;
  static std::string format_header(const Shard& shard);
  absl::Status write_shard(const Shard& shard, const std::string& path) const;
  absl::Status write_files(const std::string& dir, const std::vector<Shard>& shards) const;
  absl::Status publish(const std::string& dir, const std::vector<Shard>& shards) const;
  void before(const std::string& step) const {
    if (options_.before_step) options_.before_step(step);
  }

  CheckpointWriterOptions options_;
  std::vector<Entry> entries_;
  std::set<std::string> names_;
  std::optional<std::string> config_;
};

// Copies one small file, such as config.json, from one directory to another: under a temporary name, fsync'd,
// renamed. Nothing to do if both are the same file. NotFound: from_dir has no such file. InvalidArgument:
// `name` has a slash, or the file is larger than 64 MiB.
absl::Status copy_side_file(const std::string& from_dir, const std::string& to_dir, const std::string& name);

}  // namespace slipstream::model
