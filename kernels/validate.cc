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

absl::Status refuse(const char* op, const char* name, const Tensor& t, const std::string& dtype,
                    std::initializer_list<int64_t> shape) {
  std::string expected = dtype + " [";
  for (int64_t n : shape) {
    if (expected.back() != '[') expected += ", ";
    expected += n < 0 ? "*" : std::to_string(n);
  }
  return absl::InvalidArgumentError(absl::StrCat(op, ": ", name, ": ", t.describe(), ", expected ", expected, "]"));
}

absl::Status expect_cpu(const char* op, const char* name, const Tensor& t) {
  if (t.device().kind == DeviceKind::kCpu) return absl::OkStatus();
  return absl::UnimplementedError(absl::StrCat(op, ": ", name, ": no code for CUDA tensors in this build"));
}

}  // namespace

absl::Status expect_tensor(const char* op, const char* name, const Tensor& t, DType dtype,
                           std::initializer_list<int64_t> shape) {
  if (t.dtype() != dtype || !fits(t, shape)) return refuse(op, name, t, name_of(dtype), shape);
  return expect_cpu(op, name, t);
}

absl::Status expect_weight(const char* op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  const bool dtype_ok = t.dtype() == DType::kF32 || t.dtype() == DType::kBf16;
  if (!dtype_ok || !fits(t, shape)) return refuse(op, name, t, "f32 or bf16", shape);
  return expect_cpu(op, name, t);
}

absl::Status expect_that(const char* op, bool condition, const char* message) {
  return condition ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(op, ": ", message));
}

}  // namespace slipstream::kernels
