// The words every operator's validate() uses, so that a refusal always names operator, tensor and expectation.
#pragma once

#include <initializer_list>

#include "common/status.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// The operands of one call as validate() meets them: they are all on one device, and its activations have one dtype. Made
// from the operator's name.
class Operands {
 public:
  Operands(const char* op) : op_(op) {}  // implicit: a name stands for operands that nothing else is known of
  const char* op() const { return op_; }
  // InvalidArgument unless the tensor is on the device of those before it.
  absl::Status join(const char* name, const Tensor& t) const;
  // InvalidArgument unless the activation has the dtype of those before it.
  absl::Status join_activation(const char* name, const Tensor& t) const;

 private:
  const char* op_;
  mutable Tensor first_, first_activation_;
};

// "rmsnorm: w: f32 [63], expected f32 [64]" (InvalidArgument) unless t has exactly this dtype and shape.
// -1 in `shape` accepts any size there. The last dimension must be dense; outer strides are free.
absl::Status expect_tensor(const Operands& op, const char* name, const Tensor& t, DType dtype,
                           std::initializer_list<int64_t> shape);
// The same for a weight, which may be f32 or bf16.
absl::Status expect_weight(const Operands& op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape);
// The same for an activation: f32; on CUDA f32 or bf16, one dtype for all activations of a call.
absl::Status expect_activation(const Operands& op, const char* name, const Tensor& t,
                               std::initializer_list<int64_t> shape);
// InvalidArgument("op: message") unless condition.
absl::Status expect_that(const Operands& op, bool condition, const char* message);
// Unimplemented("op: message") unless condition: right, but nothing computes it.
absl::Status expect_supported(const Operands& op, bool condition, const char* message);
// Whether host code may read the tensor's values.
inline bool on_host(const Tensor& t) { return t.device().kind == DeviceKind::kCpu; }

}  // namespace slipstream::kernels
