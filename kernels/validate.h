// The words every operator's validate() uses, so that a refusal always names operator, tensor and expectation.
#pragma once

#include <initializer_list>

#include "common/status.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// "rmsnorm: w: f32 [63], expected f32 [64]" (InvalidArgument) unless t has exactly this dtype and shape.
// -1 in `shape` accepts any size there. The last dimension must be dense; outer strides are free.
absl::Status expect_tensor(const char* op, const char* name, const Tensor& t, DType dtype,
                           std::initializer_list<int64_t> shape);
// The same for a weight, which may be f32 or bf16.
absl::Status expect_weight(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape);
// InvalidArgument("op: message") unless condition.
absl::Status expect_that(const char* op, bool condition, const char* message);

}  // namespace slipstream::kernels
