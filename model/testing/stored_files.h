// What checkpoint tests share: files made of a header and data, and a directory that goes away.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "common/check.h"

namespace slipstream::model::testing {

// A safetensors file, written out by hand: nothing here checks that header and data agree.
inline std::string stored_file(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file.append(header).append(data);
}

inline absl::Span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

// The bytes of values, for the data of a file.
template <class T>
std::string data_of(const std::vector<T>& values) {
  std::string data(values.size() * sizeof(T), '\0');
  if (!values.empty()) std::memcpy(data.data(), values.data(), data.size());
  return data;
}

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    // In memory where there is such a place: a test of a hundred saves must not wait for a disk a hundred
    // times.
    const bool in_memory = std::filesystem::is_directory("/dev/shm");
    std::string pattern =
        (in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string()) + "/slipstream-XXXXXX";
    CHECK(::mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() { std::filesystem::remove_all(path_); }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;

  const std::string& path() const { return path_; }
  std::string file(std::string_view name) const { return path_ + "/" + std::string(name); }
  void write(std::string_view name, std::string_view contents) const {
    std::ofstream out(file(name), std::ios::binary | std::ios::trunc);
    out.write(contents.data(), static_cast<std::streamsize>(contents.size()));
    out.close();
    CHECK(out.good());
  }
  std::string read(std::string_view name) const {
    std::ifstream in(file(name), std::ios::binary);
    CHECK(in.good());
    return std::string(std::istreambuf_iterator<char>(in), {});
  }
  std::vector<std::string> names() const {  // sorted
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }

 private:
  std::string path_;
};

}  // namespace slipstream::model::testing
