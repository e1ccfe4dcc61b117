#include <cmath>

#include "kernels/add/add.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const RmsNorm& args) {
  const Operands op("rmsnorm");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), hidden = args.x.size(1);
  if (!args.w.empty()) RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {hidden}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, hidden}));
  if (!args.inv_rms.empty()) RETURN_IF_ERROR(expect_tensor(op, "inv_rms", args.inv_rms, DType::kF32, {tokens}));
  if (!args.b.empty() || !args.sum.empty()) {
    RETURN_IF_ERROR(expect_activation(op, "b", args.b, {tokens, hidden}));
    RETURN_IF_ERROR(expect_activation(op, "sum", args.sum, {tokens, hidden}));
    RETURN_IF_ERROR(expect_that(op, args.sum.raw() != args.y.raw() || tokens * hidden == 0, "sum must not be y"));
  }
  return expect_that(op, args.eps > 0.0f, "eps must be > 0");
}

absl::Status validate(const RmsNormBackward& args) {
  const Operands op("rmsnorm_backward");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t tokens = args.x.size(0), hidden = args.x.size(1);
  if (!args.w.empty()) RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {hidden}));
  RETURN_IF_ERROR(expect_tensor(op, "inv_rms", args.inv_rms, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, hidden}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {tokens, hidden}));
  if (!args.dw.empty()) RETURN_IF_ERROR(expect_tensor(op, "dw", args.dw, DType::kF32, {hidden}));
  return absl::OkStatus();
}

void reference(const RmsNorm& args) {
  CHECK_OK(validate(args));
  if (!args.b.empty()) {
    reference(Add{.a = args.x, .b = args.b, .y = args.sum});
    RmsNorm rest = args;
    rest.x = args.sum;
    rest.b = rest.sum = {};
    return reference(rest);
  }
  const int64_t hidden = args.x.size(1);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const float* x = args.x.row(t);
    double square_sum = 0.0;
    for (int64_t i = 0; i < hidden; ++i) square_sum += double{x[i]} * x[i];
    const double inv_rms = 1.0 / std::sqrt(square_sum / static_cast<double>(hidden) + args.eps);
    for (int64_t i = 0; i < hidden; ++i) {
      const double w = args.w.empty() ? 1.0 : args.w.f32()[i];
      args.y.row(t)[i] = static_cast<float>(w * x[i] * inv_rms);
    }
    if (!args.inv_rms.empty()) args.inv_rms.f32()[t] = static_cast<float>(inv_rms);
  }
}

void reference(const RmsNormBackward& args) {
  CHECK_OK(validate(args));
  const int64_t hidden = args.x.size(1);
  for (int64_t t = 0; t < args.x.size(0); ++t) {
    const float* x = args.x.row(t);
    const float* dy = args.dy.row(t);
    const double inv_rms = args.inv_rms.f32()[t];
    const auto weight = [&](int64_t i) { return args.w.empty() ? 1.0 : double{args.w.f32()[i]}; };
    double mean = 0.0;
    for (int64_t i = 0; i < hidden; ++i) mean += weight(i) * dy[i] * x[i] * inv_rms;
    mean /= static_cast<double>(hidden);
    for (int64_t i = 0; i < hidden; ++i) {
      const double normed = x[i] * inv_rms;
      const double slope = dy[i];  // read before dx, which may be dy, is written
      args.dx.row(t)[i] = static_cast<float>(inv_rms * (weight(i) * slope - normed * mean));
      if (!args.dw.empty()) args.dw.f32()[i] += static_cast<float>(slope * normed);
    }
  }
}

}  // namespace slipstream::kernels
