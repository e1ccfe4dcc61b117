#include <cmath>

#include "kernels/gated_norm/gated_norm.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const GatedNorm& args) {
  const Operands op("gated_norm");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t rows = args.x.size(0), dim = args.x.size(1);
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {dim}));
  RETURN_IF_ERROR(expect_activation(op, "gate", args.gate, {rows, dim}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {rows, dim}));
  if (!args.inv_rms.empty())
    RETURN_IF_ERROR(expect_tensor(op, "inv_rms", args.inv_rms, DType::kF32, {rows}));
  return expect_that(op, args.eps > 0.0f, "eps must be > 0");
}

absl::Status validate(const GatedNormBackward& args) {
  const Operands op("gated_norm_backward");
  RETURN_IF_ERROR(expect_activation(op, "x", args.x, {-1, -1}));
  const int64_t rows = args.x.size(0), dim = args.x.size(1);
  RETURN_IF_ERROR(expect_activation(op, "gate", args.gate, {rows, dim}));
  RETURN_IF_ERROR(expect_tensor(op, "w", args.w, DType::kF32, {dim}));
  RETURN_IF_ERROR(expect_tensor(op, "inv_rms", args.inv_rms, DType::kF32, {rows}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {rows, dim}));
  RETURN_IF_ERROR(expect_activation(op, "dx", args.dx, {rows, dim}));
  RETURN_IF_ERROR(expect_activation(op, "dgate", args.dgate, {rows, dim}));
  RETURN_IF_ERROR(expect_that(op, rows * dim == 0 || args.dgate.raw() != args.dy.raw(), "dgate is dy"));
  RETURN_IF_ERROR(expect_that(op, dim <= kGatedNormDimMax, "x: rows are wider than 8192"));
  return expect_tensor(op, "dw", args.dw, DType::kF32, {dim});
}

void reference(const GatedNorm& args) {
  CHECK_OK(validate(args));
  const int64_t dim = args.x.size(1);
  for (int64_t r = 0; r < args.x.size(0); ++r) {
    const float* x = args.x.row(r);
    double square_sum = 0.0;
    for (int64_t i = 0; i < dim; ++i) square_sum += double{x[i]} * x[i];
    const double inv_rms = 1.0 / std::sqrt(square_sum / static_cast<double>(dim) + args.eps);
    for (int64_t i = 0; i < dim; ++i) {
      const double sigmoid = 1.0 / (1.0 + std::exp(-double{args.gate.row(r)[i]}));
      args.y.row(r)[i] = static_cast<float>(args.w.f32()[i] * (x[i] * inv_rms) * sigmoid);
    }
    if (!args.inv_rms.empty()) args.inv_rms.f32()[r] = static_cast<float>(inv_rms);
  }
}

void reference(const GatedNormBackward& args) {
  CHECK_OK(validate(args));
  const int64_t dim = args.x.size(1);
  for (int64_t r = 0; r < args.x.size(0); ++r) {
    const double inv_rms = args.inv_rms.f32()[r];
    const auto normed = [&](int64_t i) { return args.x.row(r)[i] * inv_rms; };
    const auto sigmoid = [&](int64_t i) { return 1.0 / (1.0 + std::exp(-double{args.gate.row(r)[i]})); };
    double mean = 0.0;
    for (int64_t i = 0; i < dim; ++i) {
      mean += args.dy.row(r)[i] * sigmoid(i) * args.w.f32()[i] * normed(i) / static_cast<double>(dim);
    }
    for (int64_t i = 0; i < dim; ++i) {
      const double dy = args.dy.row(r)[i];  // read before dx, which may be dy, is written
      const double w = args.w.f32()[i], s = sigmoid(i), n = normed(i);
      args.dx.row(r)[i] = static_cast<float>(inv_rms * (dy * s * w - n * mean));
      args.dgate.row(r)[i] = static_cast<float>(dy * w * n * s * (1.0 - s));
      args.dw.f32()[i] += static_cast<float>(dy * s * n);
    }
  }
}

}  // namespace slipstream::kernels
