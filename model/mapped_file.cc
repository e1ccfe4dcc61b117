#include "model/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"

namespace slipstream::model {
namespace {

absl::StatusOr<absl::Span<const std::byte>> map(int fd, const std::string& path) {
  struct stat status;
  if (::fstat(fd, &status) != 0) return absl::ErrnoToStatus(errno, path);
  if (!S_ISREG(status.st_mode)) return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  const size_t size = static_cast<size_t>(status.st_size);
  if (size == 0) return absl::Span<const std::byte>();  // mmap refuses a length of 0
  void* base = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
  if (base == MAP_FAILED) return absl::ErrnoToStatus(errno, path);
  return absl::Span<const std::byte>(static_cast<const std::byte*>(base), size);
}

}  // namespace

absl::StatusOr<MappedFile> MappedFile::open(const std::string& path) {
  // O_NONBLOCK: opening a pipe must fail below, not wait for a writer.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  absl::StatusOr<absl::Span<const std::byte>> bytes = map(fd, path);
  ::close(fd);
  if (!bytes.ok()) return bytes.status();
  MappedFile file;
  file.bytes_ = *bytes;
  return file;
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

MappedFile::MappedFile(MappedFile&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}

MappedFile& MappedFile::operator=(MappedFile&& other) noexcept {
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace slipstream::model
