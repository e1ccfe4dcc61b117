#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels/adamw/adamw.h"
#include "kernels/bf16.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

absl::Status expect_dense(const Operands& op, const char* name, const Tensor& t, const Tensor& like, bool may_be_bf16) {
  const bool dtype_ok = t.dtype() == DType::kF32 || (may_be_bf16 && t.dtype() == DType::kBf16);
  if (t.empty() || !dtype_ok || !t.dense() || !t.same_shape(like)) {
    return absl::InvalidArgumentError(absl::StrCat(op.op(), ": ", name, ": ", t.describe(), ", expected a dense ",
                                                   may_be_bf16 ? "f32 or bf16" : "f32", " tensor of the shape of ",
                                                   like.describe()));
  }
  return op.join(name, t);
}

double pieces_sum(const std::vector<double>& values) {
  double lanes[kSquareLanes] = {};
  for (size_t i = 0; i < values.size(); ++i) lanes[i % kSquareLanes] += values[i];
  for (int half = kSquareLanes / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  }
  return lanes[0];
}

}  // namespace

absl::Status validate(const AdamWStep& args) {
  const Operands op("adamw");
  RETURN_IF_ERROR(expect_dense(op, "gradient", args.gradient, args.gradient, false));
  RETURN_IF_ERROR(expect_dense(op, "first", args.first, args.gradient, false));
  RETURN_IF_ERROR(expect_dense(op, "second", args.second, args.gradient, false));
  RETURN_IF_ERROR(expect_dense(op, "master", args.master, args.gradient, false));
  if (!args.rounded.empty()) RETURN_IF_ERROR(expect_dense(op, "rounded", args.rounded, args.gradient, true));
  return expect_tensor(op, "nonfinite", args.nonfinite, DType::kI32, {1});
}

absl::Status validate(const SumSquares& args) {
  const Operands op("sum_squares");
  RETURN_IF_ERROR(expect_dense(op, "x", args.x, args.x, false));
  return expect_tensor(op, "sum", args.sum, DType::kI32, {2});
}

void reference(const AdamWStep& args) {
  CHECK_OK(validate(args));
  for (int64_t i = 0; i < args.gradient.numel(); ++i) {
    float &m = args.first.f32()[i], &v = args.second.f32()[i], &w = args.master.f32()[i];
    const float g = args.gradient.f32()[i] * args.scale;
    m = args.beta1 * m + (1.0f - args.beta1) * g;
    v = args.beta2 * v + (1.0f - args.beta2) * g * g;
    w = w * args.decay - args.rate * m / (std::sqrt(v * args.correct2) + args.eps);
    if (!std::isfinite(w)) args.nonfinite.i32()[0] = 1;
    if (args.rounded.empty()) continue;
    if (args.rounded.dtype() == DType::kF32) {
      args.rounded.f32()[i] = w;
    } else {
      args.rounded.bf()[i] = to_bf16(w);
    }
  }
}

void reference(const SumSquares& args) {
  CHECK_OK(validate(args));
  std::vector<double> pieces;
  for (int64_t begin = 0; begin < args.x.numel(); begin += kSquarePiece) {
    std::vector<double> squares;
    for (int64_t i = begin; i < std::min(begin + kSquarePiece, args.x.numel()); ++i) {
      squares.push_back(double{args.x.f32()[i]} * double{args.x.f32()[i]});
    }
    pieces.push_back(pieces_sum(squares));
  }
  const double sum = pieces_sum(pieces);
  std::memcpy(args.sum.raw(), &sum, sizeof sum);
}

}  // namespace slipstream::kernels
