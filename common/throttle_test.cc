// Goal: a line an interval, and the number of those left out.
#include "common/throttle.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(Throttle, CountsWhatItLeavesOut) {
  Throttle throttle(absl::Seconds(5));
  const absl::Time start = absl::FromUnixSeconds(1000);
  EXPECT_EQ(throttle.pass(start), "");
  EXPECT_EQ(throttle.pass(start + absl::Seconds(1)), std::nullopt);
  EXPECT_EQ(throttle.pass(start + absl::Seconds(4)), std::nullopt);
  EXPECT_EQ(throttle.pass(start + absl::Seconds(5)), " (and 2 more like it since the last such line)");
  EXPECT_EQ(throttle.pass(start + absl::Seconds(11)), "");
}

}  // namespace
}  // namespace slipstream
