#include "kernels/validate.h"

#include <string>

namespace slipstream::kernels {
namespace {

bool fits(const Tensor& t, std::initializer_list<int64_t> shape) {
  if (t.rank() != static_cast<int>(shape.size())) return false;
  int dim = 0;
  for (int64_t n : shape) {
    if (n >= 0 && t.size(dim) != n) return false;
    ++dim;
  }
  return t.rank() == 0 || t.size(t.rank() - 1) <= 1 || t.stride(t.rank() - 1) == 1;
}

absl::Status refuse(const Operands& op, const char* name, const Tensor& t, const std::string& dtype,
                    std::initializer_list<int64_t> shape) {
  std::string expected = dtype + " [";
  for (int64_t n : shape) {
    if (expected.back() != '[') expected += ", ";
    expected += n < 0 ? "*" : std::to_string(n);
  }
  return absl::InvalidArgumentError(
      absl::StrCat(op.op(), ": ", name, ": ", t.describe(), ", expected ", expected, "]"));
}

}  // namespace

absl::Status Operands::join(const char* name, const Tensor& t) const {
  if (first_.empty()) first_ = t;
  if (t.device() == first_.device()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op_, ": ", name, ": on another device than the operands before it"));
}

absl::Status Operands::join_activation(const char* name, const Tensor& t) const {
  if (first_activation_.empty()) first_activation_ = t;
  if (t.dtype() == first_activation_.dtype()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(op_, ": ", name, ": ", t.describe(), ", expected the activations' ",
                                                 name_of(first_activation_.dtype())));
}

absl::Status expect_tensor(const Operands& op, const char* name, const Tensor& t, DType dtype,
                           std::initializer_list<int64_t> shape) {
  if (t.dtype() != dtype || !fits(t, shape)) return refuse(op, name, t, name_of(dtype), shape);
  return op.join(name, t);
}

absl::Status expect_weight(const Operands& op, const char* name, const Tensor& t,
                           std::initializer_list<int64_t> shape) {
  const bool dtype_ok = t.dtype() == DType::kF32 || t.dtype() == DType::kBf16;
  if (!dtype_ok || !fits(t, shape)) return refuse(op, name, t, "f32 or bf16", shape);
  return op.join(name, t);
}

absl::Status expect_activation(const Operands& op, const char* name, const Tensor& t,
                               std::initializer_list<int64_t> shape) {
  const bool bf16_ok = t.device().kind == DeviceKind::kCuda;
  const bool dtype_ok = t.dtype() == DType::kF32 || (bf16_ok && t.dtype() == DType::kBf16);
  if (!dtype_ok || !fits(t, shape)) return refuse(op, name, t, bf16_ok ? "f32 or bf16" : "f32", shape);
  RETURN_IF_ERROR(op.join_activation(name, t));
  return op.join(name, t);
}

absl::Status expect_that(const Operands& op, bool condition, const char* message) {
  return condition ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(op.op(), ": ", message));
}

absl::Status expect_supported(const Operands& op, bool condition, const char* message) {
  return condition ? absl::OkStatus() : absl::UnimplementedError(absl::StrCat(op.op(), ": ", message));
}

}  // namespace slipstream::kernels
