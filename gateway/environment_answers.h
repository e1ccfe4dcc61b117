// Checks of what environments answer. InvalidArgument names the field, its value and what was expected.
#pragma once

#include "common/status.h"
#include "slipstream/v1/environment.pb.h"

namespace slipstream::gateway {

absl::Status validate(const v1::DescribeResponse& response);
// want_solution: the task has solutions and one was asked for.
absl::Status validate(const v1::ResetResponse& response, bool want_solution, int64_t bytes_max);
absl::Status validate(const v1::StepResponse& response, bool want_solution, int64_t bytes_max);

}  // namespace slipstream::gateway
