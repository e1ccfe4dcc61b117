#include <cmath>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/pack_panels/pack_panels.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

// row_begin ascends from 0 to `rows`.
absl::Status expect_partition(const Operands& op, const Tensor& row_begin, int64_t experts, int64_t rows) {
  RETURN_IF_ERROR(expect_tensor(op, "row_begin", row_begin, DType::kI32, {experts + 1}));
  if (!on_host(row_begin)) return absl::OkStatus();
  const int32_t* begin = row_begin.i32();
  bool ascending = begin[0] == 0 && begin[experts] == rows;
  for (int64_t e = 0; e < experts; ++e) ascending = ascending && begin[e] <= begin[e + 1];
  return expect_that(op, ascending, "row_begin must ascend from 0 to the number of rows");
}

float weight_of(const Tensor& w, int64_t expert, int64_t row, int64_t column) {
  const int64_t offset = expert * w.stride(0) + row * w.stride(1) + column;
  return w.dtype() == DType::kBf16 ? to_f32(w.bf()[offset]) : w.f32()[offset];
}

}  // namespace

absl::Status validate(const GroupedGemm& args) {
  const Operands op("grouped_gemm");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {args.x.size(0), -1}));
  const int64_t k = args.x.size(1), n = args.y.size(1);
  RETURN_IF_ERROR(args.transpose_w ? expect_weight(op, "w", args.w, {-1, n, k})
                                   : expect_weight(op, "w", args.w, {-1, k, n}));
  if (!args.w_panels.empty()) {
    RETURN_IF_ERROR(expect_that(op, args.transpose_w, "w_panels needs transpose_w"));
    RETURN_IF_ERROR(expect_panels(op, "w_panels", args.w_panels, args.w));
  }
  return expect_partition(op, args.row_begin, args.w.size(0), args.x.size(0));
}

absl::Status validate(const GroupedWeightGrad& args) {
  const Operands op("grouped_weight_grad");
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {-1, -1}));
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {args.dy.size(0), -1}));
  RETURN_IF_ERROR(expect_tensor(op, "dw", args.dw, DType::kF32, {-1, args.dy.size(1), args.x.size(1)}));
  return expect_partition(op, args.row_begin, args.dw.size(0), args.dy.size(0));
}

void reference(const GroupedGemm& args) {
  CHECK_OK(validate(args));
  const int32_t* row_begin = args.row_begin.i32();
  for (int64_t e = 0; e < args.w.size(0); ++e) {
    for (int64_t r = row_begin[e]; r < row_begin[e + 1]; ++r) {
      for (int64_t n = 0; n < args.y.size(1); ++n) {
        float sum = 0.0f;
        for (int64_t k = 0; k < args.x.size(1); ++k) {
          const float w = args.transpose_w ? weight_of(args.w, e, n, k) : weight_of(args.w, e, k, n);
          sum = std::fma(args.x.row(r)[k], w, sum);
        }
        args.y.row(r)[n] = sum;
      }
    }
  }
}

void reference(const GroupedWeightGrad& args) {
  CHECK_OK(validate(args));
  const int32_t* row_begin = args.row_begin.i32();
  for (int64_t e = 0; e < args.dw.size(0); ++e) {
    const Tensor dw = args.dw[e];
    for (int64_t n = 0; n < dw.size(0); ++n) {
      for (int64_t k = 0; k < dw.size(1); ++k) {
        float sum = dw.row(n)[k];
        for (int64_t r = row_begin[e]; r < row_begin[e + 1]; ++r) {
          sum = std::fma(args.dy.row(r)[n], args.x.row(r)[k], sum);
        }
        dw.row(n)[k] = sum;
      }
    }
  }
}

}  // namespace slipstream::kernels
