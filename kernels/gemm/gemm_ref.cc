#include <cmath>

#include "kernels/gemm/gemm.h"
#include "kernels/pack_panels/pack_panels.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// Factors and results of any mixture of dtypes on CUDA; f32 on the CPU.
absl::Status expect_values(const Operands& op, const char* name, const Tensor& t, std::initializer_list<int64_t> shape) {
  return on_host(t) ? expect_tensor(op, name, t, DType::kF32, shape) : expect_weight(op, name, t, shape);
}

float value_of(const Tensor& matrix, int64_t row, int64_t column) {
  const int64_t offset = row * matrix.stride(0) + column;
  return matrix.dtype() == DType::kBf16 ? to_f32(matrix.bf()[offset]) : matrix.f32()[offset];
}

absl::Status validate_product(const Operands& op, const Gemm& args) {
  RETURN_IF_ERROR(expect_values(op, "c", args.c, {-1, -1}));
  RETURN_IF_ERROR(expect_values(op, "a", args.a, {-1, -1}));
  const int64_t m = args.c.size(0), n = args.c.size(1);
  const int64_t k = args.a.size(args.transpose_a ? 0 : 1);
  RETURN_IF_ERROR(args.transpose_a ? expect_values(op, "a", args.a, {k, m})
                                   : expect_values(op, "a", args.a, {m, k}));
  RETURN_IF_ERROR(args.transpose_b ? expect_weight(op, "b", args.b, {n, k})
                                   : expect_weight(op, "b", args.b, {k, n}));
  if (!args.bias.empty()) return expect_tensor(op, "bias", args.bias, DType::kF32, {n});
  return absl::OkStatus();
}

absl::Status validate_batch(const Operands& op, const Gemm& args) {
  RETURN_IF_ERROR(expect_values(op, "c", args.c, {-1, -1, -1}));
  const int64_t batch = args.c.size(0), m = args.c.size(1), n = args.c.size(2);
  RETURN_IF_ERROR(expect_values(op, "a", args.a, {batch, -1, -1}));
  const int64_t k = args.a.size(args.transpose_a ? 1 : 2);
  RETURN_IF_ERROR(args.transpose_a ? expect_values(op, "a", args.a, {batch, k, m})
                                   : expect_values(op, "a", args.a, {batch, m, k}));
  RETURN_IF_ERROR(args.transpose_b ? expect_weight(op, "b", args.b, {batch, n, k})
                                   : expect_weight(op, "b", args.b, {batch, k, n}));
  return expect_that(op, args.bias.empty(), "bias must be absent when there is a leading dimension");
}

}  // namespace

absl::Status validate(const Gemm& args) {
  const Operands op("gemm");
  RETURN_IF_ERROR(args.c.rank() == 3 ? validate_batch(op, args) : validate_product(op, args));
  if (args.b_panels.empty()) return absl::OkStatus();
  RETURN_IF_ERROR(expect_that(op, args.transpose_b, "b_panels needs transpose_b"));
  return expect_panels(op, "b_panels", args.b_panels, args.b);
}

void reference(const Gemm& args) {
  CHECK_OK(validate(args));
  if (args.c.rank() == 3) {
    for (int64_t i = 0; i < args.c.size(0); ++i) {
      Gemm product = args;
      product.a = args.a[i];
      product.b = args.b[i];
      product.c = args.c[i];
      product.b_panels = {};
      reference(product);
    }
    return;
  }
  const int64_t inner = args.a.size(args.transpose_a ? 0 : 1);
  for (int64_t m = 0; m < args.c.size(0); ++m) {
    for (int64_t n = 0; n < args.c.size(1); ++n) {
      float sum = args.accumulate ? args.c.row(m)[n] : 0.0f;
      for (int64_t k = 0; k < inner; ++k) {
        const float a = args.transpose_a ? value_of(args.a, k, m) : value_of(args.a, m, k);
        const float b = args.transpose_b ? value_of(args.b, n, k) : value_of(args.b, k, n);
        sum = std::fma(a, b, sum);
      }
      args.c.row(m)[n] = args.bias.empty() ? sum : sum + args.bias.f32()[n];
    }
  }
}

}  // namespace slipstream::kernels
