// The safetensors file format: 8 bytes of header length, a JSON header, the tensors' bytes.
// https://github.com/huggingface/safetensors, "Format".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "common/status.h"
#include "model/mapped_file.h"
#include "model/stored_dtype.h"

namespace slipstream::model {

// A tensor as it lies in a file: row-major, little-endian, at any alignment.
struct StoredTensor {
  std::string name;
  StoredDType dtype = StoredDType::kF32;
  std::vector<int64_t> shape;         // at most 8 dimensions; [] is a scalar
  absl::Span<const std::byte> bytes;  // not owned; as long as the product of shape and size_of(dtype)

  std::string describe() const;  // "F32 [3, 64]"
};

// One file, its header checked in full; immutable, so any number of threads may use it.
//
// What is refused, beyond what makes no sense: duplicate names or fields, fields the format lacks, a header
// over 100 MB, tensors that overlap, leave a hole or do not end with the file, shapes whose size overflows,
// and dtypes that are unknown here, even of tensors that nobody reads, because their size cannot be checked.
// Every error is InvalidArgument, or DataLoss where the file ends too early, and reads "PATH: TENSOR: what,
// expected what".
class SafetensorsFile {
 public:
  static constexpr uint64_t kHeaderBytesMax = 100'000'000;
  static constexpr int kRankMax = 8;

  // Maps the file; errors of the system as MappedFile has them.
  static absl::StatusOr<SafetensorsFile> open(const std::string& path);
  // The same over memory that outlives the result. `path` is the name in error messages.
  static absl::StatusOr<SafetensorsFile> parse(absl::Span<const std::byte> file, const std::string& path);

  const std::string& path() const { return path_; }
  const std::vector<StoredTensor>& tensors() const { return tensors_; }  // by name
  const StoredTensor* find(std::string_view name) const;                 // null if there is none
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

 private:
  std::string path_;
  MappedFile file_;
  std::vector<StoredTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

}  // namespace slipstream::model
