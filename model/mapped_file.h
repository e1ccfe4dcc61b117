// A read-only mapping of a whole file.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "common/status.h"

namespace slipstream::model {

// The owner of one mapping. The file must not shrink while it is mapped: touching a page past the new end
// kills the process (SIGBUS). Replacing it by rename, as CheckpointWriter does, is safe: the mapping keeps
// the old bytes.
class MappedFile {
 public:
  // NotFound, PermissionDenied, ...: as the system says, with the path. InvalidArgument: not a regular file.
  static absl::StatusOr<MappedFile> open(const std::string& path);
  MappedFile() = default;
  ~MappedFile();
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&& other) noexcept;

  // Valid as long as this object or the one it was moved to.
  absl::Span<const std::byte> bytes() const { return bytes_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()}; }

 private:
  absl::Span<const std::byte> bytes_;
};

}  // namespace slipstream::model
