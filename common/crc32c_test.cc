#include "common/crc32c.h"

#include <string>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

// RFC 3720, appendix B.4.
TEST(Crc32c, PublishedValues) {
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(""), 0u);
}

TEST(Crc32c, GoesOnWhereItStopped) {
  const std::string text = "what is cut anywhere has one checksum";
  for (size_t cut = 0; cut <= text.size(); ++cut) {
    EXPECT_EQ(crc32c(text.substr(cut), crc32c(text.substr(0, cut))), crc32c(text));
  }
}

}  // namespace
}  // namespace slipstream
