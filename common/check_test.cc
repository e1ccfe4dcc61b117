// Goal: a failed CHECK names the condition and both operands; the status macros return early and only then.
#include "common/check.h"

#include "common/status.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

TEST(CheckTest, FailureNamesOperands) {
  EXPECT_DEATH(CHECK_EQ(1 + 1, 3), "1 \\+ 1 == 3 \\(2 against 3\\)");
  EXPECT_DEATH(CHECK_OK(absl::NotFoundError("weights")), "weights");
  CHECK_LT(1, 2);
}

absl::StatusOr<int> doubled(absl::StatusOr<int> value) {
  ASSIGN_OR_RETURN(const int number, std::move(value));
  RETURN_IF_ERROR(number < 0 ? absl::InvalidArgumentError("negative") : absl::OkStatus());
  return 2 * number;
}

TEST(StatusMacroTest, ReturnsTheFirstError) {
  EXPECT_EQ(*doubled(21), 42);
  EXPECT_EQ(doubled(-1).status().message(), "negative");
  EXPECT_EQ(doubled(absl::NotFoundError("none")).status().message(), "none");
}

}  // namespace
}  // namespace slipstream
