// What checkpoint tests share: files made of a header and data, and a directory that goes away.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "common/check.h"
#include "common/testing/temporary_directory.h"

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

// With files in it.
class TemporaryDirectory : public slipstream::testing::TemporaryDirectory {
 public:
  TemporaryDirectory() : slipstream::testing::TemporaryDirectory(Where::kMemory) {}
  std::string file(std::string_view name) const { return path() + "/" + std::string(name); }
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
    for (const auto& entry : std::filesystem::directory_iterator(path()))
      names.push_back(entry.path().filename());
    std::sort(names.begin(), names.end());
    return names;
  }
};

}  // namespace slipstream::model::testing
