#include <algorithm>
#include <cmath>
#include <vector>

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

absl::Status validate_outputs(const Operands& op, const auto& args, int64_t tokens, int64_t vocab) {
  RETURN_IF_ERROR(expect_that(op, vocab > 0, "the vocabulary is empty"));
  RETURN_IF_ERROR(expect_tensor(op, "targets", args.targets, DType::kI32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "logprob", args.logprob, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_tensor(op, "lse", args.lse, DType::kF32, {tokens}));
  if (!args.entropy.empty())
    RETURN_IF_ERROR(expect_tensor(op, "entropy", args.entropy, DType::kF32, {tokens}));
  RETURN_IF_ERROR(expect_temperature(op, args.temperature));
  return expect_targets(op, args.targets, vocab);
}

absl::Status validate_gradients(const Operands& op, const auto& args, int64_t tokens, int64_t vocab) {
  RETURN_IF_ERROR(expect_that(op, vocab > 0, "the vocabulary is empty"));
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

// Factors of the head. On the CPU they are f32, for reference() alone.
absl::Status validate_head(const Operands& op, const Tensor& hidden, const Tensor& weight) {
  RETURN_IF_ERROR(expect_activation(op, "hidden", hidden, {-1, -1}));
  return expect_weight(op, "weight", weight, {-1, hidden.size(1)});
}

absl::Status expect_taken(const Operands& op, const Tensor& hidden, const Tensor& weight) {
  return expect_supported(op, takes_head(hidden, weight), "only bf16 rows of whole 16-byte pieces on CUDA");
}

absl::Status validate_shapes(const Operands& op, const HeadLogProb& args) {
  RETURN_IF_ERROR(validate_head(op, args.hidden, args.weight));
  return validate_outputs(op, args, args.hidden.size(0), args.weight.size(0));
}

absl::Status validate_shapes(const Operands& op, const HeadLogProbBackward& args) {
  RETURN_IF_ERROR(validate_head(op, args.hidden, args.weight));
  return validate_gradients(op, args, args.hidden.size(0), args.weight.size(0));
}

// A Gemm's chains.
std::vector<float> logits_of(const Tensor& hidden, const Tensor& weight, int64_t t) {
  std::vector<float> logits(static_cast<size_t>(weight.size(0)), 0.0f);
  for (size_t v = 0; v < logits.size(); ++v) {
    for (int64_t k = 0; k < hidden.size(1); ++k) {
      logits[v] = std::fma(hidden.row(t)[k], weight.row(static_cast<int64_t>(v))[k], logits[v]);
    }
  }
  return logits;
}

}  // namespace

absl::Status validate(const LogProb& args) {
  const Operands op("logprob");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  return validate_outputs(op, args, args.logits.size(0), args.logits.size(1));
}

absl::Status validate(const LogProbBackward& args) {
  const Operands op("logprob_backward");
  RETURN_IF_ERROR(expect_tensor(op, "logits", args.logits, DType::kF32, {-1, -1}));
  return validate_gradients(op, args, args.logits.size(0), args.logits.size(1));
}

absl::Status validate(const HeadLogProb& args) {
  const Operands op("head_logprob");
  RETURN_IF_ERROR(validate_shapes(op, args));
  return expect_taken(op, args.hidden, args.weight);
}

absl::Status validate(const HeadLogProbBackward& args) {
  const Operands op("head_logprob_backward");
  RETURN_IF_ERROR(validate_shapes(op, args));
  return expect_taken(op, args.hidden, args.weight);
}

bool takes_head(const Tensor& hidden, const Tensor& weight) {
  const auto whole = [](const Tensor& t) {
    return t.device().kind == DeviceKind::kCuda && t.dtype() == DType::kBf16 && t.size(1) > 0 && t.size(1) % 8 == 0 &&
           t.stride(0) % 8 == 0 && reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  };
  return whole(hidden) && whole(weight);
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

void reference(const HeadLogProb& args) {
  CHECK_OK(validate_shapes("head_logprob", args));
  for (int64_t t = 0; t < args.hidden.size(0); ++t) {
    std::vector<float> logits = logits_of(args.hidden, args.weight, t);
    reference(LogProb{.logits = Tensor(logits.data(), DType::kF32, {1, args.weight.size(0)}),
                      .targets = args.targets.slice(0, t, t + 1), .logprob = args.logprob.slice(0, t, t + 1),
                      .lse = args.lse.slice(0, t, t + 1),
                      .entropy = args.entropy.empty() ? Tensor() : args.entropy.slice(0, t, t + 1),
                      .temperature = args.temperature});
  }
}

void reference(const HeadLogProbBackward& args) {
  CHECK_OK(validate_shapes("head_logprob_backward", args));
  for (int64_t t = 0; t < args.hidden.size(0); ++t) {
    std::vector<float> logits = logits_of(args.hidden, args.weight, t);
    reference(LogProbBackward{.logits = Tensor(logits.data(), DType::kF32, {1, args.weight.size(0)}),
                              .targets = args.targets.slice(0, t, t + 1), .lse = args.lse.slice(0, t, t + 1),
                              .dlogprob = args.dlogprob.slice(0, t, t + 1),
                              .entropy = args.dentropy.empty() ? Tensor() : args.entropy.slice(0, t, t + 1),
                              .dentropy = args.dentropy.empty() ? Tensor() : args.dentropy.slice(0, t, t + 1),
                              .dlogits = args.dlogits.slice(0, t, t + 1), .temperature = args.temperature});
  }
}

}  // namespace slipstream::kernels
