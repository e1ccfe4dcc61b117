#include <algorithm>
#include <cmath>

#include "kernels/e4m3.h"
#include "kernels/quantize/quantize.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

int64_t blocks(int64_t count, int64_t block) { return (count + block - 1) / block; }

float value_of(const Tensor& x, int64_t row, int64_t column) {
  const int64_t offset = row * x.stride(0) + column;
  return x.dtype() == DType::kBf16 ? to_f32(x.bf()[offset]) : x.f32()[offset];
}

}  // namespace

absl::Status validate(const Quantize& args) {
  const Operands op("quantize");
  const int64_t rows = args.block_rows;
  RETURN_IF_ERROR(expect_that(op, rows == 1 || rows == 128, "block_rows must be 1 or 128"));
  if (args.x.rank() == 3) {
    RETURN_IF_ERROR(expect_weight(op, "x", args.x, {-1, -1, -1}));
    const int64_t e = args.x.size(0), t = args.x.size(1), k = args.x.size(2);
    RETURN_IF_ERROR(expect_tensor(op, "codes", args.codes, DType::kF8E4M3, {e, t, k}));
    return expect_tensor(op, "scales", args.scales, DType::kF32,
                         {e, blocks(t, rows), blocks(k, kScaleColumns)});
  }
  RETURN_IF_ERROR(expect_weight(op, "x", args.x, {-1, -1}));
  const int64_t t = args.x.size(0), k = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "codes", args.codes, DType::kF8E4M3, {t, k}));
  return expect_tensor(op, "scales", args.scales, DType::kF32, {blocks(t, rows), blocks(k, kScaleColumns)});
}

void reference(const Quantize& args) {
  CHECK_OK(validate(args));
  if (args.x.rank() == 3) {
    for (int64_t e = 0; e < args.x.size(0); ++e)
      reference(Quantize{args.x[e], args.codes[e], args.scales[e], args.block_rows});
    return;
  }
  for (int64_t i = 0; i < args.scales.size(0); ++i) {
    const int64_t row_end = std::min((i + 1) * args.block_rows, args.x.size(0));
    for (int64_t j = 0; j < args.scales.size(1); ++j) {
      const int64_t column_end = std::min((j + 1) * kScaleColumns, args.x.size(1));
      float largest = 0x1p-100f;
      for (int64_t row = i * args.block_rows; row < row_end; ++row) {
        for (int64_t column = j * kScaleColumns; column < column_end; ++column)
          largest = std::fmax(largest, std::abs(value_of(args.x, row, column)));
      }
      args.scales.row(i)[j] = largest / kE4m3Largest;
      const float inverse = kE4m3Largest / largest;
      for (int64_t row = i * args.block_rows; row < row_end; ++row) {
        e4m3* const codes = args.codes.data<e4m3>() + row * args.codes.stride(0);
        for (int64_t column = j * kScaleColumns; column < column_end; ++column)
          codes[column] = to_e4m3(value_of(args.x, row, column) * inverse);
      }
    }
  }
}

}  // namespace slipstream::kernels
