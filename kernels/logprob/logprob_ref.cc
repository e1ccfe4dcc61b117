#include <algorithm>
#include <cmath>

#include "kernels/logprob/logprob.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

absl::Status expect_targets(const Operands& op, const Tensor& targets, int64_t vocab) {
  for (int64_t t = 0; t < targets.size(0) && on_host(targets); ++t) {
    const int32_t id = targets.i32()[t];
    if (id < -1 || id >= vocab) {
      return absl::InvalidArgumentError(
          absl::StrCat(op.op(), ": targets[", t, "]: ", id, ", expected -1..", vocab - 1));
    }
  }
  return absl::OkStatus();
}

absl::Status expect_temperature(const Operands& op, float temperature) {
  return expect_that(op, temperature > 0.0f && std::isnormal(temperature), "temperature must be > 0");
}

}  // namespace

absl::Status validate(const LogProb& args) {
  const Operands op("logprob");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  const int64_t tokens = args.logits.size(0), vocab = args.logits.size(1);
  RETURN_IF_ERROR(expect_that(op, vocab > 0, "logits: the vocabulary is empty"));
  RETURN_IF_ERROR(expect_tensor(op, "targets", args.targets, DType::kI32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "logprob", args.logprob, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "lse", args.lse, DType::kF32, {tokens}));
  if (!args.entropy.empty())
    RETURN_IF_ERROR(expect_tensor(op, "entropy", args.entropy, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_temperature(op, args.temperature));
  return expect_targets(op, args.targets, vocab);
}

absl::Status validate(const LogProbBackward& args) {
  const Operands op("logprob_backward");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  const int64_t tokens = args.logits.size(0), vocab = args.logits.size(1);
  RETURN_IF_ERROR(expect_that(op, vocab > 0, "logits: the vocabulary is empty"));
  RETURN_IF_ERROR(expect_tensor(op, "targets", args.targets, DType::kI32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "lse", args.lse, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "dlogprob", args.dlogprob, DType::kF32, {tokens}));
  if (!args.dentropy.empty()) {
    RETURN_IF_ERROR(expect_tensor(op, "entropy", args.entropy, DType::kF32, {tokens}));
    RETURN_IF_ERROR(expect_tensor(op, "dentropy", args.dentropy, DType::kF32, {tokens}));
  }
  RETURN_IF_ERROR(expect_activation(op, "dlogits", args.dlogits, {tokens, vocab}));
  RETURN_IF_ERROR(expect_temperature(op, args.temperature));
  return expect_targets(op, args.targets, vocab);
}

void reference(const LogProb& args) {
  CHECK_OK(validate(args));
  const int64_t vocab = args.logits.size(1);
  for (int64_t t = 0; t < args.logits.size(0); ++t) {
    const float* logits = args.logits.row(t);
    const double top = double{*std::max_element(logits, logits + vocab)} / args.temperature;
    double sum = 0.0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(logits[i] / double{args.temperature} - top);
    const double lse = top + std::log(sum);
    double entropy = 0.0;
    for (int64_t i = 0; i < vocab; ++i) {
      const double log_p = logits[i] / double{args.temperature} - lse;
      if (std::exp(log_p) != 0.0) entropy -= std::exp(log_p) * log_p;
    }
    const int32_t target = args.targets.i32()[t];
    const double logprob = target < 0 ? 0.0 : logits[target] / double{args.temperature} - lse;
    args.logprob.f32()[t] = static_cast<float>(logprob);
    args.lse.f32()[t] = static_cast<float>(lse);
    if (!args.entropy.empty()) args.entropy.f32()[t] = static_cast<float>(entropy);
  }
}

void reference(const LogProbBackward& args) {
  CHECK_OK(validate(args));
  const int64_t vocab = args.logits.size(1);
  for (int64_t t = 0; t < args.logits.size(0); ++t) {
    const int32_t target = args.targets.i32()[t];
    const double dlogprob = target < 0 ? 0.0 : args.dlogprob.f32()[t];  // the logprob of -1 is the constant 0
    const double dentropy = args.dentropy.empty() ? 0.0 : args.dentropy.f32()[t];
    for (int64_t i = 0; i < vocab; ++i) {
      double grad = 0.0;
      if (dlogprob != 0.0 || dentropy != 0.0) {
        const double log_p = args.logits.row(t)[i] / double{args.temperature} - args.lse.f32()[t];
        const double p = std::exp(log_p);
        grad = dlogprob * ((i == target ? 1.0 : 0.0) - p);
        if (dentropy != 0.0 && p != 0.0) grad -= dentropy * p * (log_p + args.entropy.f32()[t]);
      }
      args.dlogits.row(t)[i] = static_cast<float>(grad / args.temperature);
    }
  }
}

}  // namespace slipstream::kernels
