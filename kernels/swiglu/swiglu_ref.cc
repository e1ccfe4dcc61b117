#include <algorithm>
#include <cmath>

#include "kernels/swiglu/swiglu.h"
#include "kernels/validate.h"

namespace slipstream::kernels {

absl::Status validate(const SwiGlu& args) {
  const Operands op("swiglu");
  RETURN_IF_ERROR(expect_activation(op, "gate", args.gate, {-1, -1}));
  const int64_t tokens = args.gate.size(0), width = args.gate.size(1);
  RETURN_IF_ERROR(expect_activation(op, "up", args.up, {tokens, width}));
  RETURN_IF_ERROR(expect_activation(op, "y", args.y, {tokens, width}));
  return expect_that(op, args.limit > 0.0f, "limit must be > 0");
}

absl::Status validate(const SwiGluBackward& args) {
  const Operands op("swiglu_backward");
  RETURN_IF_ERROR(expect_activation(op, "gate", args.gate, {-1, -1}));
  const int64_t tokens = args.gate.size(0), width = args.gate.size(1);
  RETURN_IF_ERROR(expect_activation(op, "up", args.up, {tokens, width}));
  RETURN_IF_ERROR(expect_activation(op, "dy", args.dy, {tokens, width}));
  RETURN_IF_ERROR(expect_activation(op, "dgate", args.dgate, {tokens, width}));
  RETURN_IF_ERROR(expect_activation(op, "dup", args.dup, {tokens, width}));
  RETURN_IF_ERROR(
      expect_that(op, tokens * width == 0 || args.dup.raw() != args.dgate.raw(), "dup is dgate"));
  return expect_that(op, args.limit > 0.0f, "limit must be > 0");
}

void reference(const SwiGlu& args) {
  CHECK_OK(validate(args));
  const double limit = args.limit;
  for (int64_t t = 0; t < args.gate.size(0); ++t) {
    for (int64_t i = 0; i < args.gate.size(1); ++i) {
      const double gate = std::min(double{args.gate.row(t)[i]}, limit);
      const double up = std::clamp(double{args.up.row(t)[i]}, -limit, limit);
      args.y.row(t)[i] = static_cast<float>(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
}

void reference(const SwiGluBackward& args) {
  CHECK_OK(validate(args));
  const double limit = args.limit;
  for (int64_t t = 0; t < args.gate.size(0); ++t) {
    for (int64_t i = 0; i < args.gate.size(1); ++i) {
      const double raw_gate = args.gate.row(t)[i], raw_up = args.up.row(t)[i], dy = args.dy.row(t)[i];
      const double gate = std::min(raw_gate, limit);
      const double up = std::clamp(raw_up, -limit, limit);
      const double sigmoid = 1.0 / (1.0 + std::exp(-gate));
      const double slope = sigmoid * (1.0 + gate * (1.0 - sigmoid));  // of silu
      args.dgate.row(t)[i] = raw_gate > limit ? 0.0f : static_cast<float>(dy * up * slope);
      args.dup.row(t)[i] = std::abs(raw_up) > limit ? 0.0f : static_cast<float>(dy * gate * sigmoid);
    }
  }
}

}  // namespace slipstream::kernels
