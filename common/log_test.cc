// Goal: a line of a log is one line, whatever a peer put into it.
#include "common/log.h"

#include <fstream>
#include <iterator>

#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(OneLine, EscapesWhatIsNoText) {
  EXPECT_EQ(one_line("plain, \xc3\xa9t\xc3\xa9, \xe4\xb8\xad"), "plain, \xc3\xa9t\xc3\xa9, \xe4\xb8\xad");
  EXPECT_EQ(one_line("a\nb\tc\x1b[31m\x7f"), "a\\nb\\tc\\x1b[31m\\x7f");
  EXPECT_EQ(one_line("\xff\xc3"), "\\xff\\xc3");           // no lead byte; cut off
  EXPECT_EQ(one_line("\xc3(\xe4\xb8"), "\\xc3(\\xe4\\xb8");
  EXPECT_EQ(one_line({"\0x", 2}), "\\x00x");
}

TEST(Logger, WritesOneLine) {
  const testing::TemporaryDirectory directory;
  const absl::StatusOr<Logger> log = make_logger("role", directory.path());
  ASSERT_TRUE(log.ok());
  (*log)->info("environment says {}", "boom\nsecond\xff");
  std::ifstream file(directory.path() + "/role.log");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  EXPECT_TRUE(text.ends_with(" I environment says boom\\nsecond\\xff\n")) << text;
}

}  // namespace
}  // namespace slipstream
