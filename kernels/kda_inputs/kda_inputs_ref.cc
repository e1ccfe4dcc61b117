#include <cmath>
#include <vector>

#include "kernels/kda_inputs/kda_inputs.h"
#include "kernels/validate.h"

namespace slipstream::kernels {
namespace {

constexpr double kNormEps = 1e-6;

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// y = scale x / sqrt(sum x^2 + eps).
void unit(const float* x, int64_t d, double scale, float* y) {
  double squares = kNormEps;
  for (int64_t i = 0; i < d; ++i) squares += double{x[i]} * x[i];
  for (int64_t i = 0; i < d; ++i) y[i] = static_cast<float>(scale * x[i] / std::sqrt(squares));
}

// With r = 1 / sqrt(sum x^2 + eps):  dx = scale r (dy - x r^2 sum(x dy)).
void unit_backward(const float* x, const float* dy, int64_t d, double scale, float* dx) {
  double squares = kNormEps, dot = 0.0;
  for (int64_t i = 0; i < d; ++i) {
    squares += double{x[i]} * x[i];
    dot += double{x[i]} * dy[i];
  }
  for (int64_t i = 0; i < d; ++i) {
    dx[i] = static_cast<float>(scale / std::sqrt(squares) * (dy[i] - x[i] * dot / squares));
  }
}

}  // namespace

absl::Status validate(const KdaInputs& args) {
  const Operands op("kda_inputs");
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  RETURN_IF_ERROR(expect_supported(op, on_host(args.q) || d <= kKdaInputsWidthCuda, "q: more than 128 channels on CUDA"));
  RETURN_IF_ERROR(expect_activation(op, "k", args.k, {tokens, heads, d}));
  RETURN_IF_ERROR(expect_tensor(op, "decay_logit", args.decay_logit, DType::kF32, {tokens, heads, d}));
  RETURN_IF_ERROR(expect_tensor(op, "beta_logit", args.beta_logit, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_tensor(op, "a_log", args.a_log, DType::kF32, {heads}));
  RETURN_IF_ERROR(expect_tensor(op, "dt_bias", args.dt_bias, DType::kF32, {heads, d}));
  RETURN_IF_ERROR(expect_that(op, args.lower_bound <= 0.0f, "lower_bound must be <= 0"));
  RETURN_IF_ERROR(expect_activation(op, "q_hat", args.q_hat, {tokens, heads, d}));
  RETURN_IF_ERROR(expect_activation(op, "k_hat", args.k_hat, {tokens, heads, d}));
  RETURN_IF_ERROR(expect_tensor(op, "log_decay", args.log_decay, DType::kF32, {tokens, heads, d}));
  return expect_tensor(op, "beta", args.beta, DType::kF32, {tokens, heads});
}

absl::Status validate(const KdaInputsBackward& args) {
  const Operands op("kda_inputs_backward");
  RETURN_IF_ERROR(expect_activation(op, "q", args.q, {-1, -1, -1}));
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  RETURN_IF_ERROR(expect_supported(op, on_host(args.q) || d <= kKdaInputsWidthCuda, "q: more than 128 channels on CUDA"));
  const auto values = [&](const char* name, const Tensor& t) {
    return expect_activation(op, name, t, {tokens, heads, d});
  };
  const auto decays = [&](const char* name, const Tensor& t) {
    return expect_tensor(op, name, t, DType::kF32, {tokens, heads, d});
  };
  RETURN_IF_ERROR(values("k", args.k));
  RETURN_IF_ERROR(decays("decay_logit", args.decay_logit));
  RETURN_IF_ERROR(expect_tensor(op, "beta_logit", args.beta_logit, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_tensor(op, "a_log", args.a_log, DType::kF32, {heads}));
  RETURN_IF_ERROR(expect_tensor(op, "dt_bias", args.dt_bias, DType::kF32, {heads, d}));
  RETURN_IF_ERROR(expect_that(op, args.lower_bound <= 0.0f, "lower_bound must be <= 0"));
  RETURN_IF_ERROR(values("dq_hat", args.dq_hat));
  RETURN_IF_ERROR(values("dk_hat", args.dk_hat));
  RETURN_IF_ERROR(decays("dlog_decay", args.dlog_decay));
  RETURN_IF_ERROR(expect_tensor(op, "dbeta", args.dbeta, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(values("dq", args.dq));
  RETURN_IF_ERROR(values("dk", args.dk));
  RETURN_IF_ERROR(decays("ddecay_logit", args.ddecay_logit));
  RETURN_IF_ERROR(expect_tensor(op, "dbeta_logit", args.dbeta_logit, DType::kF32, {tokens, heads}));
  RETURN_IF_ERROR(expect_tensor(op, "da_log", args.da_log, DType::kF32, {heads}));
  return expect_tensor(op, "ddt_bias", args.ddt_bias, DType::kF32, {heads, d});
}

void reference(const KdaInputs& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), d = args.q.size(2);
  for (int64_t t = 0; t < args.q.size(0); ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      unit(args.q.row(t, h), d, 1.0 / std::sqrt(static_cast<double>(d)), args.q_hat.row(t, h));
      unit(args.k.row(t, h), d, 1.0, args.k_hat.row(t, h));
      args.beta.row(t)[h] = static_cast<float>(sigmoid(args.beta_logit.row(t)[h]));
      const double rate = std::exp(double{args.a_log.f32()[h]});
      for (int64_t i = 0; i < d; ++i) {
        const double x = double{args.decay_logit.row(t, h)[i]} + args.dt_bias.row(h)[i];
        const double decay =
            args.lower_bound < 0.0f ? args.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
        args.log_decay.row(t, h)[i] = static_cast<float>(decay);
      }
    }
  }
}

void reference(const KdaInputsBackward& args) {
  CHECK_OK(validate(args));
  const int64_t heads = args.q.size(1), d = args.q.size(2);
  for (int64_t h = 0; h < heads; ++h) {
    const double rate = std::exp(double{args.a_log.f32()[h]});
    double da_log = 0.0;
    std::vector<double> dbias(static_cast<size_t>(d), 0.0);
    for (int64_t t = 0; t < args.q.size(0); ++t) {
      unit_backward(args.q.row(t, h), args.dq_hat.row(t, h), d, 1.0 / std::sqrt(static_cast<double>(d)),
                    args.dq.row(t, h));
      unit_backward(args.k.row(t, h), args.dk_hat.row(t, h), d, 1.0, args.dk.row(t, h));
      const double beta = sigmoid(args.beta_logit.row(t)[h]);
      args.dbeta_logit.row(t)[h] = static_cast<float>(args.dbeta.row(t)[h] * beta * (1.0 - beta));
      for (int64_t i = 0; i < d; ++i) {
        const double x = double{args.decay_logit.row(t, h)[i]} + args.dt_bias.row(h)[i];
        const double slope = args.dlog_decay.row(t, h)[i];
        double dx, dlog_rate;  // of log_decay, with respect to x and to a_log
        if (args.lower_bound < 0.0f) {
          const double s = sigmoid(rate * x);
          dx = args.lower_bound * s * (1.0 - s) * rate;
          dlog_rate = dx * x;
        } else {
          dx = -rate * sigmoid(x);
          dlog_rate = -rate * softplus(x);
        }
        args.ddecay_logit.row(t, h)[i] = static_cast<float>(slope * dx);
        dbias[static_cast<size_t>(i)] += slope * dx;
        da_log += slope * dlog_rate;
      }
    }
    args.da_log.f32()[h] += static_cast<float>(da_log);
    for (int64_t i = 0; i < d; ++i)
      args.ddt_bias.row(h)[i] += static_cast<float>(dbias[static_cast<size_t>(i)]);
  }
}

}  // namespace slipstream::kernels
