// Goal: event files are framed and encoded as TFRecord and tensorflow.Event say, and a restart adds a file.
// The real reader is asked in tests/tensorboard_test.py.
#include "learner/tensorboard.h"

#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>

#include "common/crc32c.h"
#include "gtest/gtest.h"

namespace slipstream::learner {
namespace {

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

uint32_t unmasked(uint32_t crc) {
  const uint32_t rotated = crc - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}

template <class T>
T read_raw(const std::string& bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(T));
  return value;
}

std::vector<std::string> records(const std::string& bytes) {
  std::vector<std::string> out;
  for (size_t at = 0; at < bytes.size();) {
    const auto length = read_raw<uint64_t>(bytes, at);
    EXPECT_EQ(unmasked(read_raw<uint32_t>(bytes, at + 8)), crc32c(bytes.substr(at, 8)));
    out.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(unmasked(read_raw<uint32_t>(bytes, at + 12 + length)), crc32c(out.back()));
    at += 16 + length;
  }
  return out;
}

class TensorBoardTest : public ::testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(directory_.parent_path()); }
  void TearDown() override { std::filesystem::remove_all(directory_.parent_path()); }
  std::set<std::filesystem::path> files() const {
    std::set<std::filesystem::path> out;
    for (const auto& entry : std::filesystem::directory_iterator(directory_)) out.insert(entry.path());
    return out;
  }
  const std::filesystem::path directory_ =
      std::filesystem::path(::testing::TempDir()) / ("tensorboard_test_" + std::to_string(getpid())) / "logs";
};

TEST_F(TensorBoardTest, WritesFramedEvents) {
  auto writer = TensorBoardWriter::open(directory_.string(), 0);
  ASSERT_TRUE(writer.ok()) << writer.status();
  writer->scalar("reward", 300, 0.5);
  ASSERT_TRUE(writer->flush().ok());
  ASSERT_EQ(files().size(), 1u);
  const std::vector<std::string> got = records(read_file(*files().begin()));
  ASSERT_EQ(got.size(), 3u);
  // wall_time (1, fixed64), step (2, varint), then file_version (3), session_log (7), summary (5).
  EXPECT_EQ(got[0].substr(9), std::string("\x10\x00\x1a\x0d", 4) + "brain.Event:2");
  EXPECT_EQ(got[1].substr(9), std::string("\x10\x00\x3a\x02\x08\x01", 6));
  EXPECT_EQ(got[2][0], '\x09');
  EXPECT_GT(read_raw<double>(got[2], 1), 1.6e9);
  EXPECT_EQ(got[2].substr(9), std::string("\x10\xac\x02\x2a\x0f\x0a\x0d\x0a\x06", 9) + "reward" +
                                  std::string("\x15\x00\x00\x00\x3f", 5));
}

TEST_F(TensorBoardTest, EveryStartHasItsOwnFileInOrder) {
  for (int start = 0; start < 12; ++start) {
    auto writer = TensorBoardWriter::open(directory_.string(), start);
    ASSERT_TRUE(writer.ok()) << writer.status();
    EXPECT_EQ(files().size(), static_cast<size_t>(start) + 1);
  }
}

TEST_F(TensorBoardTest, AFileWhereTheDirectoryShouldBeIsAnError) {
  std::ofstream(directory_.string()) << "x";
  const auto writer = TensorBoardWriter::open(directory_.string(), 0);
  ASSERT_FALSE(writer.ok());
  EXPECT_NE(std::string(writer.status().message()).find(directory_.string()), std::string::npos)
      << writer.status();
}

}  // namespace
}  // namespace slipstream::learner
