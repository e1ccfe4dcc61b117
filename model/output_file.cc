#include "model/output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace slipstream::model {

namespace {

absl::Span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

}  // namespace

absl::StatusOr<OutputFile> OutputFile::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  return OutputFile(path, fd);
}

OutputFile::OutputFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {
  buffer_.reserve(static_cast<size_t>(kBufferBytes));
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), buffer_(std::move(other.buffer_)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);  // not finished: an error has been returned already
}

absl::StatusOr<std::byte*> OutputFile::append_space(int64_t size) {
  CHECK(size >= 0 && size <= kBufferBytes);
  if (static_cast<int64_t>(buffer_.size()) + size > kBufferBytes) RETURN_IF_ERROR(flush());
  const size_t begin = buffer_.size();
  buffer_.resize(begin + static_cast<size_t>(size));
  return reinterpret_cast<std::byte*>(buffer_.data()) + begin;
}

absl::Status OutputFile::append(absl::Span<const std::byte> bytes) {
  RETURN_IF_ERROR(flush());
  return write(bytes);
}

absl::Status OutputFile::append(std::string_view text) { return append(bytes_of(text)); }

absl::Status OutputFile::flush() {
  RETURN_IF_ERROR(write(bytes_of(buffer_)));
  buffer_.clear();
  return absl::OkStatus();
}

absl::Status OutputFile::write(absl::Span<const std::byte> bytes) {
  constexpr size_t kWriteBytesMax = 64 << 20;  // a write() takes 2 GiB at most
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd_, bytes.data(), std::min(bytes.size(), kWriteBytesMax));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return absl::ErrnoToStatus(errno, path_);
    bytes.remove_prefix(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status OutputFile::sync() {
  RETURN_IF_ERROR(flush());
  return ::fsync(fd_) == 0 ? absl::OkStatus() : absl::ErrnoToStatus(errno, path_);
}

absl::Status OutputFile::finish() {
  RETURN_IF_ERROR(sync());
  if (::close(std::exchange(fd_, -1)) != 0) return absl::ErrnoToStatus(errno, path_);
  return absl::OkStatus();
}

absl::Status write_file(const std::string& path, std::string_view text) {
  ASSIGN_OR_RETURN(OutputFile file, OutputFile::create(path));
  RETURN_IF_ERROR(file.append(text));
  return file.finish();
}

absl::Status rename_file(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat(from, " to ", to));
}

absl::Status remove_file(const std::string& path) {
  if (::unlink(path.c_str()) == 0 || errno == ENOENT) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, path);
}

namespace {

absl::Status sync_path(const std::string& path, int flags) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const int result = ::fsync(fd);
  const int error = errno;
  ::close(fd);
  return result == 0 ? absl::OkStatus() : absl::ErrnoToStatus(error, path);
}

}  // namespace

absl::Status sync_file(const std::string& path) { return sync_path(path, 0); }
absl::Status sync_directory(const std::string& dir) { return sync_path(dir, O_DIRECTORY); }

}  // namespace slipstream::model
