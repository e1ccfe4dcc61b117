#include "kernels/kda_inputs/kda_inputs.h"

#include "kernels/launch_cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/kda_inputs/kda_inputs_simd.cc"
#include <algorithm>
#include <cmath>

#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr float kNormEps = 1e-6f;

HWY_INLINE Lanes negate(const Lanes& x) { return sub(zero_lanes(), x); }

// log(1 + e^x) without overflow, exact to rounding far below zero, where it is e^x.
HWY_INLINE Lanes softplus(const Lanes& x) {
  return map([&](int64_t i) HWY_ATTR {
    const LanesTag d;
    const LanesVec tail = hn::Log1p(d, exp_part(hn::Neg(hn::Abs(x.part[i]))));
    return hn::Add(hn::Max(x.part[i], hn::Zero(d)), tail);
  });
}

// exp(a_log) of one head, by the arithmetic of the lanes.
HWY_INLINE float rate_of(const Tensor& a_log, int64_t head) {
  float rate[kLanes];
  store(exp(broadcast(a_log.f32()[head])), rate);
  return rate[0];
}

// y = scale x / sqrt(sum x^2 + eps).
HWY_INLINE void unit(const float* x, int64_t d, float scale, float* y) {
  Lanes squares = zero_lanes();
  for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes v = chunk.load(x + i);
    squares = fma(v, v, squares);
  });
  const Lanes factor = broadcast(scale / std::sqrt(sum_lanes(squares) + kNormEps));
  for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR { chunk.store(mul(chunk.load(x + i), factor), y + i); });
}

// With r = 1 / sqrt(sum x^2 + eps):  dx = scale r (dy - x r^2 sum(x dy)).
HWY_INLINE void unit_backward(const float* x, const float* dy, int64_t d, float scale, float* dx) {
  Lanes squares = zero_lanes(), dots = zero_lanes();
  for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR {
    const Lanes v = chunk.load(x + i);
    squares = fma(v, v, squares);
    dots = fma(v, chunk.load(dy + i), dots);
  });
  const float inv = 1.0f / std::sqrt(sum_lanes(squares) + kNormEps);
  const Lanes factor = broadcast(scale * inv), pull = broadcast(sum_lanes(dots) * inv * inv);
  for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR {
    chunk.store(mul(factor, fnma(chunk.load(x + i), pull, chunk.load(dy + i))), dx + i);
  });
}

void kda_inputs_rows(const KdaInputs& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t heads = args.q.size(1), d = args.q.size(2);
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(d));
  const bool bounded = args.lower_bound < 0.0f;
  const Lanes bound = broadcast(args.lower_bound);
  float* rates = worker.scratch<float>(heads);
  for (int64_t h = 0; h < heads; ++h) rates[h] = rate_of(args.a_log, h);
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      unit(args.q.row(t, h), d, query_scale, args.q_hat.row(t, h));
      unit(args.k.row(t, h), d, 1.0f, args.k_hat.row(t, h));
      const float* logit = args.decay_logit.row(t, h);
      const float* bias = args.dt_bias.row(h);
      float* log_decay = args.log_decay.row(t, h);
      const Lanes rate = broadcast(rates[h]);
      for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR {
        const Lanes x = add(chunk.load(logit + i), chunk.load(bias + i));
        chunk.store(bounded ? mul(bound, sigmoid(mul(rate, x))) : negate(mul(rate, softplus(x))),
                    log_decay + i);
      });
    }
    const float* beta_logit = args.beta_logit.row(t);
    float* beta = args.beta.row(t);
    for_lanes(heads, [&](int64_t i, auto chunk)
                         HWY_ATTR { chunk.store(sigmoid(chunk.load(beta_logit + i)), beta + i); });
  }
}

// A thread owns whole heads, so that the sums over tokens (da_log, ddt_bias) are never shared.
void kda_inputs_backward_heads(const KdaInputsBackward& args, int64_t begin, int64_t end, Worker& worker) {
  const int64_t tokens = args.q.size(0), d = args.q.size(2);
  const float query_scale = 1.0f / std::sqrt(static_cast<float>(d));
  const bool bounded = args.lower_bound < 0.0f;
  const Lanes bound = broadcast(args.lower_bound), one = broadcast(1.0f);
  float* dbias = worker.scratch<float>(d);
  for (int64_t h = begin; h < end; ++h) {
    const Lanes rate = broadcast(rate_of(args.a_log, h));
    const float* bias = args.dt_bias.row(h);
    std::fill(dbias, dbias + d, 0.0f);
    Lanes da_log = zero_lanes();
    for (int64_t t = 0; t < tokens; ++t) {
      unit_backward(args.q.row(t, h), args.dq_hat.row(t, h), d, query_scale, args.dq.row(t, h));
      unit_backward(args.k.row(t, h), args.dk_hat.row(t, h), d, 1.0f, args.dk.row(t, h));
      const float* logit = args.decay_logit.row(t, h);
      const float* dlog_decay = args.dlog_decay.row(t, h);
      float* dlogit = args.ddecay_logit.row(t, h);
      for_lanes(d, [&](int64_t i, auto chunk) HWY_ATTR {
        const Lanes x = add(chunk.load(logit + i), chunk.load(bias + i));
        const Lanes slope = chunk.load(dlog_decay + i);  // 0 in the lanes beyond d, and so is what they add
        Lanes dx;
        if (bounded) {
          const Lanes s = sigmoid(mul(rate, x));
          dx = mul(slope, mul(mul(bound, rate), mul(s, sub(one, s))));
          da_log = fma(dx, x, da_log);
        } else {
          const Lanes scaled = mul(slope, negate(rate));
          dx = mul(scaled, sigmoid(x));
          da_log = fma(scaled, softplus(x), da_log);
        }
        chunk.store(dx, dlogit + i);
        chunk.store(add(dx, chunk.load(dbias + i)), dbias + i);
      });
    }
    args.da_log.f32()[h] += sum_lanes(da_log);
    for (int64_t i = 0; i < d; ++i) args.ddt_bias.row(h)[i] += dbias[i];
  }
}

void kda_beta_backward_rows(const KdaInputsBackward& args, int64_t begin, int64_t end) {
  const Lanes one = broadcast(1.0f);
  for (int64_t t = begin; t < end; ++t) {
    const float* logit = args.beta_logit.row(t);
    const float* dbeta = args.dbeta.row(t);
    float* dlogit = args.dbeta_logit.row(t);
    for_lanes(args.q.size(1), [&](int64_t i, auto chunk) HWY_ATTR {
      const Lanes s = sigmoid(chunk.load(logit + i));
      chunk.store(mul(chunk.load(dbeta + i), mul(s, sub(one, s))), dlogit + i);
    });
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(kda_inputs_rows);
HWY_EXPORT(kda_inputs_backward_heads);
HWY_EXPORT(kda_beta_backward_rows);

void launch(const KdaInputs& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  constexpr int64_t kTaskValues = 8192;  // of q; there are five such rows a token, with exponentials
  const int64_t grain = task_rows(args.q.size(1) * args.q.size(2), kTaskValues);
  stream.parallel_for(args.q.size(0), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(kda_inputs_rows)(args, begin, end, worker);
  });
}

void launch(const KdaInputsBackward& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  stream.parallel_for(args.q.size(1), 1, [&](int64_t begin, int64_t end, Worker& worker) {
    HWY_DYNAMIC_DISPATCH(kda_inputs_backward_heads)(args, begin, end, worker);
  });
  stream.parallel_for(args.q.size(0), 1024, [&](int64_t begin, int64_t end, Worker&) {
    HWY_DYNAMIC_DISPATCH(kda_beta_backward_rows)(args, begin, end);
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
