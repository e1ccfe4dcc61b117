// Durable writing: a file that is on disk when finish() says so, and the directory changes around it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "common/status.h"

namespace slipstream::model {

// Owns a descriptor and a buffer of 1 MiB. Errors are the system's, with the path: ResourceExhausted for a
// full disk.
class OutputFile {
 public:
  // Creates the file or empties the one there.
  static absl::StatusOr<OutputFile> create(const std::string& path);
  ~OutputFile();
  OutputFile(OutputFile&& other) noexcept;
  OutputFile& operator=(OutputFile&&) = delete;

  absl::Status append(absl::Span<const std::byte> bytes);
  absl::Status append(std::string_view text);
  // Room for `size` <= kBufferBytes more bytes, to be filled in place. Valid until the next call.
  absl::StatusOr<std::byte*> append_space(int64_t size);
  // Writes what is buffered and fsyncs; more may follow.
  absl::Status sync();
  // The same, and closes. Nothing may follow.
  absl::Status finish();

  static constexpr int64_t kBufferBytes = 1 << 20;

 private:
  OutputFile(std::string path, int fd);
  absl::Status flush();
  absl::Status write(absl::Span<const std::byte> bytes);

  std::string path_;
  int fd_;
  std::string buffer_;  // its size is what is pending
};

// A whole file, on disk when this returns OK.
absl::Status write_file(const std::string& path, std::string_view text);

absl::Status rename_file(const std::string& from, const std::string& to);
// OK if the file is not there.
absl::Status remove_file(const std::string& path);
// fsyncs a file that something else wrote.
absl::Status sync_file(const std::string& path);
// Makes renames and removals in the directory durable.
absl::Status sync_directory(const std::string& dir);

}  // namespace slipstream::model
