#include "kernels/kda_inputs/kda_inputs.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr float kNormEps = 1e-6f;

// 1 / sqrt(sum x^2 + eps) of a head's values; all threads of the block call.
template <class X>
__device__ float inverse_norm(const X* x, int64_t d) {
  float squares = 0.0f;
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) squares = fmaf(load(x + i), load(x + i), squares);
  return 1.0f / sqrtf(block_sum(squares) + kNormEps);
}

// One block a token and head.
template <class X>
__global__ void kda_inputs(Heads<const X> q, Heads<const X> k, Heads<const float> decay_logit,
                           Rows<const float> beta_logit, const float* a_log, Rows<const float> dt_bias,
                           float lower_bound, Heads<X> q_hat, Heads<X> k_hat, Heads<float> log_decay, Rows<float> beta,
                           int64_t heads, int64_t d) {
  const int64_t t = blockIdx.x / heads, h = blockIdx.x % heads;
  const float q_scale = inverse_norm(q.at(t, h), d) * (1.0f / sqrtf(static_cast<float>(d)));
  const float k_scale = inverse_norm(k.at(t, h), d);
  const float rate = expf(a_log[h]);
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) {
    store(q_hat.at(t, h) + i, load(q.at(t, h) + i) * q_scale);
    store(k_hat.at(t, h) + i, load(k.at(t, h) + i) * k_scale);
    const float x = decay_logit.at(t, h)[i] + dt_bias[h][i];
    log_decay.at(t, h)[i] = lower_bound < 0.0f ? lower_bound * sigmoid(rate * x) : -rate * softplus(x);
  }
  if (threadIdx.x == 0) beta[t][h] = sigmoid(beta_logit[t][h]);
}

// With r = 1 / sqrt(sum x^2 + eps):  dx = scale r (dy - x r^2 sum(x dy)).
template <class X>
__device__ void unit_backward(const X* x, const X* dy, int64_t d, float scale, X* dx) {
  const float r = inverse_norm(x, d);
  float dot = 0.0f;
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) dot = fmaf(load(x + i), load(dy + i), dot);
  const float share = block_sum(dot) * (r * r);
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) {
    store(dx + i, scale * r * fmaf(-load(x + i), share, load(dy + i)));
  }
}

// Of log_decay, with respect to x = f + dt_bias and to a_log.
struct DecaySlope {
  float x, log_rate;
};
__device__ DecaySlope decay_slope(float x, float a_log, float lower_bound) {
  const float rate = expf(a_log);
  if (lower_bound < 0.0f) {
    const float s = sigmoid(rate * x), dx = lower_bound * (s * (1.0f - s)) * rate;
    return {dx, dx * x};
  }
  return {-rate * sigmoid(x), -rate * softplus(x)};
}

template <class X>
__global__ void kda_inputs_backward(Heads<const X> q, Heads<const X> k, Heads<const float> decay_logit,
                                    Rows<const float> beta_logit, const float* a_log, Rows<const float> dt_bias,
                                    float lower_bound, Heads<const X> dq_hat, Heads<const X> dk_hat,
                                    Heads<const float> dlog_decay, Rows<const float> dbeta, Heads<X> dq, Heads<X> dk,
                                    Heads<float> ddecay_logit, Rows<float> dbeta_logit, int64_t heads, int64_t d) {
  const int64_t t = blockIdx.x / heads, h = blockIdx.x % heads;
  unit_backward(q.at(t, h), dq_hat.at(t, h), d, 1.0f / sqrtf(static_cast<float>(d)), dq.at(t, h));
  unit_backward(k.at(t, h), dk_hat.at(t, h), d, 1.0f, dk.at(t, h));
  for (int64_t i = threadIdx.x; i < d; i += blockDim.x) {
    const DecaySlope slope = decay_slope(decay_logit.at(t, h)[i] + dt_bias[h][i], a_log[h], lower_bound);
    ddecay_logit.at(t, h)[i] = dlog_decay.at(t, h)[i] * slope.x;
  }
  if (threadIdx.x == 0) {
    const float s = sigmoid(beta_logit[t][h]);
    dbeta_logit[t][h] = dbeta[t][h] * (s * (1.0f - s));
  }
}

// y[h] += sum over i, ascending, of x[h, i].
__global__ void sum_heads(const float* x, int64_t heads, int64_t d, float* y) {
  const int64_t h = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (h >= heads) return;
  float sum = 0.0f;
  for (int64_t i = 0; i < d; ++i) sum += x[h * d + i];
  y[h] += sum;
}

void parameter_grads(const KdaInputsBackward& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  const Heads<const float> logit = heads_of<const float>(args.decay_logit), dlog = heads_of<const float>(args.dlog_decay);
  const Rows<const float> dt_bias = rows_of<const float>(args.dt_bias);
  const float* const a_log = args.a_log.f32();
  const float lower_bound = args.lower_bound;
  CHECK(args.ddt_bias.dense());
  const ArenaScope scope(stream.workspace());
  const Tensor by_channel = stream.workspace().zeros(DType::kF32, {heads, d}, stream);
  add_column_sums([=] __device__(int64_t t, int64_t column) {
    const int64_t h = column / d, i = column % d;
    return dlog.at(t, h)[i] * decay_slope(logit.at(t, h)[i] + dt_bias[h][i], a_log[h], lower_bound).log_rate;
  }, tokens, heads * d, by_channel.f32(), stream);
  sum_heads<<<static_cast<unsigned>(divide_up(heads, 32)), 32, 0, cuda_stream(stream)>>>(by_channel.f32(), heads, d,
                                                                                        args.da_log.f32());
  add_column_sums([=] __device__(int64_t t, int64_t column) {
    const int64_t h = column / d, i = column % d;
    return dlog.at(t, h)[i] * decay_slope(logit.at(t, h)[i] + dt_bias[h][i], a_log[h], lower_bound).x;
  }, tokens, heads * d, args.ddt_bias.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<KdaInputs>(const KdaInputs& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  if (tokens * heads == 0) return;
  with_type(args.q.dtype(), [&](auto x) {
    using X = decltype(x);
    kda_inputs<X><<<static_cast<unsigned>(tokens * heads), row_threads(d), 0, cuda_stream(stream)>>>(
        heads_of<const X>(args.q), heads_of<const X>(args.k), heads_of<const float>(args.decay_logit),
        rows_of<const float>(args.beta_logit), args.a_log.f32(), rows_of<const float>(args.dt_bias), args.lower_bound,
        heads_of<X>(args.q_hat), heads_of<X>(args.k_hat), heads_of<float>(args.log_decay), rows_of<float>(args.beta),
        heads, d);
  });
  check_launch("kda_inputs");
}

template <>
void launch_cuda<KdaInputsBackward>(const KdaInputsBackward& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  if (tokens * heads == 0) return;
  parameter_grads(args, stream);  // first: ddecay_logit may overwrite dlog_decay
  with_type(args.q.dtype(), [&](auto x) {
    using X = decltype(x);
    kda_inputs_backward<X><<<static_cast<unsigned>(tokens * heads), row_threads(d), 0, cuda_stream(stream)>>>(
        heads_of<const X>(args.q), heads_of<const X>(args.k), heads_of<const float>(args.decay_logit),
        rows_of<const float>(args.beta_logit), args.a_log.f32(), rows_of<const float>(args.dt_bias), args.lower_bound,
        heads_of<const X>(args.dq_hat), heads_of<const X>(args.dk_hat), heads_of<const float>(args.dlog_decay),
        rows_of<const float>(args.dbeta), heads_of<X>(args.dq), heads_of<X>(args.dk), heads_of<float>(args.ddecay_logit),
        rows_of<float>(args.dbeta_logit), heads, d);
  });
  check_launch("kda_inputs_backward");
}

}  // namespace slipstream::kernels
