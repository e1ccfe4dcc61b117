#include <algorithm>
#include <cmath>

#include "kernels/e4m3.h"
#include "kernels/quantize/quantize.h"
#include "kernels/scaled_gemm/scaled_gemm.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kBlock = kScaleColumns;

int64_t blocks(int64_t count) { return (count + kBlock - 1) / kBlock; }

// Whether the copy engine can read the codes: every row begins on 16 bytes.
bool sixteens(const Tensor& codes) {
  bool aligned = reinterpret_cast<uintptr_t>(codes.raw()) % 16 == 0 && codes.size(codes.rank() - 1) % 16 == 0;
  for (int dim = 0; dim + 1 < codes.rank(); ++dim) aligned = aligned && codes.stride(dim) % 16 == 0;
  return aligned;
}

float code_of(const Tensor& codes, int64_t row, int64_t column) {
  return to_f32(codes.data<e4m3>()[row * codes.stride(0) + column]);
}

}  // namespace

absl::Status validate(const ScaledGemm& args) {
  const Operands op("scaled_gemm");
  RETURN_IF_ERROR(expect_tensor(op, "a", args.a, DType::kF8E4M3, {-1, -1}));
  const int64_t m = args.a.size(0), k = args.a.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "a_scales", args.a_scales, DType::kF32, {m, blocks(k)}));
  RETURN_IF_ERROR(expect_tensor(op, "c", args.c, on_host(args.c) ? DType::kF32 : DType::kBf16, {m, -1}));
  const int64_t n = args.c.size(1);
  if (args.b.rank() == 3) {
    RETURN_IF_ERROR(expect_tensor(op, "b", args.b, DType::kF8E4M3, {-1, n, k}));
    const int64_t experts = args.b.size(0);
    RETURN_IF_ERROR(
        expect_tensor(op, "b_scales", args.b_scales, DType::kF32, {experts, blocks(n), blocks(k)}));
    RETURN_IF_ERROR(expect_tensor(op, "row_begin", args.row_begin, DType::kI32, {experts + 1}));
  } else {
    RETURN_IF_ERROR(expect_tensor(op, "b", args.b, DType::kF8E4M3, {n, k}));
    RETURN_IF_ERROR(expect_tensor(op, "b_scales", args.b_scales, DType::kF32, {blocks(n), blocks(k)}));
    RETURN_IF_ERROR(expect_that(op, args.row_begin.empty(), "row_begin needs a weight for each expert"));
  }
  if (on_host(args.a)) return absl::OkStatus();
  return expect_supported(op, k > 0 && sixteens(args.a) && sixteens(args.b),
                          "K and the strides of a and b must be multiples of 16 on CUDA");
}

void reference(const ScaledGemm& args) {
  CHECK_OK(validate(args));
  if (args.b.rank() == 3) {
    const int32_t* const begin = args.row_begin.i32();
    for (int64_t e = 0; e < args.b.size(0); ++e) {
      reference(ScaledGemm{.a = args.a.slice(0, begin[e], begin[e + 1]),
                           .a_scales = args.a_scales.slice(0, begin[e], begin[e + 1]),
                           .b = args.b[e],
                           .b_scales = args.b_scales[e],
                           .c = args.c.slice(0, begin[e], begin[e + 1])});
    }
    return;
  }
  const int64_t inner = args.a.size(1);
  for (int64_t m = 0; m < args.c.size(0); ++m) {
    for (int64_t n = 0; n < args.c.size(1); ++n) {
      float sum = 0.0f;
      for (int64_t g = 0; g < blocks(inner); ++g) {
        float block = 0.0f;
        for (int64_t k = g * kBlock; k < std::min((g + 1) * kBlock, inner); ++k)
          block = std::fma(code_of(args.a, m, k), code_of(args.b, n, k), block);
        sum = std::fma(block, args.a_scales.row(m)[g] * args.b_scales.row(n / kBlock)[g], sum);
      }
      args.c.row(m)[n] = sum;
    }
  }
}

}  // namespace slipstream::kernels
