#include <cmath>

#include "kernels/layernorm/layernorm.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const LayerNorm& args) {
  const Operands op("layernorm");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), hidden = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {hidden}));
  RETURN_IF_ERROR(expect_tensor(op, "b", args.b, DType::kF32, {hidden}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, hidden}));
  if (!args.mean.empty() || !args.inv_std.empty()) {
    RETURN_IF_ERROR(expect_tensor(op, "mean", args.mean, DType::kF32, {tokens}));
    RETURN_IF_ERROR(expect_tensor(op, "inv_std", args.inv_std, DType::kF32, {tokens}));
  }
  return expect_that(op, args.eps > 0.0f, "eps must be > 0");
}

absl::Status validate(const LayerNormBackward& args) {
  const Operands op("layernorm_backward");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), hidden = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {hidden}));
  RETURN_IF_ERROR(expect_tensor(op, "mean", args.mean, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "inv_std", args.inv_std, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, hidden}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {tokens, hidden}));
  RETURN_IF_ERROR(expect_tensor(op, "dw", args.dw, DType::kF32, {hidden}));
  return expect_tensor(op, "db", args.db, DType::kF32, {hidden});
}

void reference(const LayerNorm& args) {
  CHECK_OK(validate(args));
  const int64_t hidden = args.x.size(1);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const float* x = args.x.row(t);
    double mean = 0.0, variance = 0.0;
    for (int64_t i = 0; i < hidden; ++i) mean += x[i] / static_cast<double>(hidden);
    for (int64_t i = 0; i < hidden; ++i)
      variance += (x[i] - mean) * (x[i] - mean) / static_cast<double>(hidden);
    const double inv_std = 1.0 / std::sqrt(variance + args.eps);
    for (int64_t i = 0; i < hidden; ++i) {
      args.y.row(t)[i] = static_cast<float>(args.w.f32()[i] * (x[i] - mean) * inv_std + args.b.f32()[i]);
    }
    if (!args.mean.empty()) {
      args.mean.f32()[t] = static_cast<float>(mean);
      args.inv_std.f32()[t] = static_cast<float>(inv_std);
    }
  }
}

void reference(const LayerNormBackward& args) {
  CHECK_OK(validate(args));
  const int64_t hidden = args.x.size(1);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const float* x = args.x.row(t);
    const float* dy = args.dy.row(t);
    const double mean = args.mean.f32()[t], inv_std = args.inv_std.f32()[t];
    double slope_mean = 0.0, dot_mean = 0.0;
    for (int64_t i = 0; i < hidden; ++i) {
      const double slope = double{args.w.f32()[i]} * dy[i];
      slope_mean += slope / static_cast<double>(hidden);
      dot_mean += slope * (x[i] - mean) * inv_std / static_cast<double>(hidden);
    }
    for (int64_t i = 0; i < hidden; ++i) {
      const double grad = dy[i];  // read before dx, which may be dy, is written
      const double normed = (x[i] - mean) * inv_std;
      args.dx.row(t)[i] =
          static_cast<float>(inv_std * (args.w.f32()[i] * grad - slope_mean - normed * dot_mean));
      args.dw.f32()[i] += static_cast<float>(grad * normed);
      args.db.f32()[i] += static_cast<float>(grad);
    }
  }
}

}  // namespace slipstream::kernels
