#include "common/address.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Address, IsHostAndPort) {
  for (const char* good : {"localhost:1", "127.0.0.1:65535", "0.0.0.0:7400", "[::1]:80", "env-0.envs.svc:50051", "*:7401"}) {
    EXPECT_EQ(address_problem(good, 1), "") << good;
  }
  for (const char* bad : {"", "localhost", ":80", "localhost:", "localhost:65536", "localhost:99999999", "localhost:-1",
                          "localhost:+1", "localhost: 1", "local host:1", "::1:80", "[]:80", "http://localhost:80", "localhost:8x",
                          "a\n:1"}) {
    EXPECT_NE(address_problem(bad, 1).find("expected host:port, port from 1 to 65535"), std::string::npos) << bad;
  }
  EXPECT_EQ(address_problem("localhost:99999999", 1), "\"localhost:99999999\", expected host:port, port from 1 to 65535");
  EXPECT_NE(address_problem("localhost:0", 1), "");
  EXPECT_EQ(address_problem("localhost:0", 0), "");
}

TEST(Name, IsShortAndPrintable) {
  EXPECT_EQ(name_problem("worker-0 (rack 7)"), "");
  EXPECT_EQ(name_problem(std::string(128, 'x')), "");
  EXPECT_EQ(name_problem(""), "0 bytes, expected 1 to 128");
  EXPECT_EQ(name_problem(std::string(129, 'x')), "129 bytes, expected 1 to 128");
  EXPECT_EQ(name_problem("a\nb"), "\"a\\nb\", expected printable ASCII");
  EXPECT_EQ(name_problem("\xff"), "\"\\xff\", expected printable ASCII");
}

}  // namespace
}  // namespace slipstream
