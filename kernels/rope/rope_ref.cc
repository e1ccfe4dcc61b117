#include <cmath>

#include "kernels/rope/rope.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const RopeTable& args) {
  const Operands op("rope_table");
  RETURN_IF_ERROR(expect_tensor(op, "positions", args.positions, DType::kI32, {-1}));
  RETURN_IF_ERROR(expect_tensor(op, "cos", args.cos, DType::kF32, {args.positions.size(0), -1}));
  RETURN_IF_ERROR(
      expect_tensor(op, "sin", args.sin, DType::kF32, {args.positions.size(0), args.cos.size(1)}));
  return expect_that(op, args.theta > 0.0 && std::isfinite(args.theta), "theta must be > 0");
}

absl::Status validate(const Rope& args) {
  const Operands op("rope");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1, -1}));
  const int64_t tokens = args.x.size(0), dims = args.x.size(2);
  RETURN_IF_ERROR(expect_that(op, dims % 2 == 0, "x: the number of dimensions must be even"));
  RETURN_IF_ERROR(expect_tensor(op, "cos", args.cos, DType::kF32, {tokens, dims / 2}));
  return expect_tensor(op, "sin", args.sin, DType::kF32, {tokens, dims / 2});
}

// fp32 on purpose, step by step: at position 10^6 an angle rounded otherwise is another rotation.
void reference(const RopeTable& args) {
  CHECK_OK(validate(args));
  const int64_t half = args.cos.size(1);
  for (int64_t t = 0; t < args.positions.size(0); ++t) {
    for (int64_t i = 0; i < half; ++i) {
      const float exponent = static_cast<float>(2 * i) / static_cast<float>(2 * half);
      const float power =
          static_cast<float>(std::pow(double{static_cast<float>(args.theta)}, double{exponent}));
      const float inverse_frequency = 1.0f / power;
      const float angle = static_cast<float>(args.positions.i32()[t]) * inverse_frequency;
      args.cos.row(t)[i] = static_cast<float>(std::cos(double{angle}));
      args.sin.row(t)[i] = static_cast<float>(std::sin(double{angle}));
    }
  }
}

void reference(const Rope& args) {
  CHECK_OK(validate(args));
  const int64_t half = args.cos.size(1);
  const bool interleaved = args.layout == RopeLayout::kInterleaved;
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    for (int64_t head = 0; head < args.x.size(1); ++head) {
      float* x = args.x.row(t) + head * args.x.stride(1);
      for (int64_t i = 0; i < half; ++i) {
        float& first = x[interleaved ? 2 * i : i];
        float& second = x[interleaved ? 2 * i + 1 : i + half];
        const double a = first, b = second;
        const double cos = args.cos.row(t)[i], sin = args.inverse ? -args.sin.row(t)[i] : args.sin.row(t)[i];
        first = static_cast<float>(a * cos - b * sin);
        second = static_cast<float>(b * cos + a * sin);
      }
    }
  }
}

}  // namespace slipstream::kernels
