// A directory for a test, gone with it.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "common/check.h"

namespace slipstream::testing {

class TemporaryDirectory {
 public:
  enum class Where {
    kDisk,    // below the system's temporary directory
    kMemory,  // where there is such a place: a test of a hundred saves must not wait for a disk a hundred times
  };
  explicit TemporaryDirectory(Where where = Where::kDisk) {
    const bool in_memory = where == Where::kMemory && std::filesystem::is_directory("/dev/shm");
    path_ = (in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/slipstream-XXXXXX";
    CHECK(::mkdtemp(path_.data()) != nullptr);
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace slipstream::testing
