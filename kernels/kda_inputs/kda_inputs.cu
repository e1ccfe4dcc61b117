#include "kernels/kda_inputs/kda_inputs.h"

#include "kernels/cuda/activations.cuh"
#include "kernels/cuda/column_sums.cuh"
#include "kernels/cuda/row_values.cuh"
#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

constexpr float kNormEps = 1e-6f;
constexpr int kWarps = 8;   // of a block, each with its own head
constexpr int kTokens = 2;  // of a warp, read together
static_assert(kKdaInputsWidthCuda == 4 * kWarp);  // a head's channels are a warp's, four a lane

// 1 / sqrt(sum x^2 + eps) of a head's values, a warp's.
__device__ __forceinline__ float inverse_norm(float4 x) {
  return 1.0f / sqrtf(warp_sum(add_squares(x, 0.0f)) + kNormEps);
}

__device__ __forceinline__ float4 scaled(float4 v, float s) { return {v.x * s, v.y * s, v.z * s, v.w * s}; }

template <class X>
struct View {
  Heads<const X> q, k;
  Heads<const float> decay_logit;
  Rows<const float> beta_logit, dt_bias;
  const float* a_log;
  float lower_bound;
  Heads<X> q_hat, k_hat;
  Heads<float> log_decay;
  Rows<float> beta;
  int64_t tokens;
  int heads, d;
  bool whole;
};

// One warp for a head of kTokens tokens.
template <class X>
__global__ void __launch_bounds__(kWarps* kWarp, sizeof(X) == 2 ? 5 : 4) kda_inputs(const View<X> view) {
  const unsigned head_blocks = (view.heads + kWarps - 1) / kWarps;
  const int h = static_cast<int>(blockIdx.x % head_blocks * kWarps + threadIdx.x / kWarp);
  if (h >= view.heads) return;
  const int64_t first = int64_t{blockIdx.x / head_blocks} * kTokens;
  const int column = 4 * (static_cast<int>(threadIdx.x) % kWarp), count = view.d - column;
  // f(u, token) for the tokens that exist.
  const auto for_tokens = [&](auto&& f) {
#pragma unroll
    for (int u = 0; u < kTokens; ++u) {
      if (first + u < view.tokens) f(u, first + u);
    }
  };
  const auto zero = float4{0.0f, 0.0f, 0.0f, 0.0f};
  Four<X> q[kTokens], k[kTokens];
  float4 logit[kTokens], bias = zero;
  float beta_logit[kTokens];
#pragma unroll
  for (int u = 0; u < kTokens; ++u) q[u] = Four<X>(zero), k[u] = Four<X>(zero);
  for_tokens([&](int u, int64_t t) {
    if (count > 0) {
      q[u] = load_four(view.q.at(t, h) + column, count, view.whole);
      k[u] = load_four(view.k.at(t, h) + column, count, view.whole);
      logit[u] = load_run(view.decay_logit.at(t, h) + column, count, view.whole);
    }
    beta_logit[u] = view.beta_logit[t][h];
  });
  if (count > 0) bias = load_run(view.dt_bias[h] + column, count, view.whole);
  const float rate = expf(view.a_log[h]), head_scale = 1.0f / sqrtf(static_cast<float>(view.d));
  const auto decay = [&](float x) {
    return view.lower_bound < 0.0f ? view.lower_bound * sigmoid(rate * x) : -rate * softplus(x);
  };
  for_tokens([&](int u, int64_t t) {
    const float4 q_values = q[u].values(), k_values = k[u].values(), f = logit[u];
    const float q_scale = inverse_norm(q_values) * head_scale, k_scale = inverse_norm(k_values);
    if (column == 0) view.beta[t][h] = sigmoid(beta_logit[u]);
    if (count <= 0) return;
    store_run(view.q_hat.at(t, h) + column, scaled(q_values, q_scale), count, view.whole);
    store_run(view.k_hat.at(t, h) + column, scaled(k_values, k_scale), count, view.whole);
    store_run(view.log_decay.at(t, h) + column,
              {decay(f.x + bias.x), decay(f.y + bias.y), decay(f.z + bias.z), decay(f.w + bias.w)}, count, view.whole);
  });
}

// Of log_decay, with respect to x = f + dt_bias and to a_log; rate = exp(a_log).
struct DecaySlope {
  float x, log_rate;
};
__device__ __forceinline__ DecaySlope decay_slope(float x, float rate, float lower_bound) {
  if (lower_bound < 0.0f) {
    const float s = sigmoid(rate * x), dx = lower_bound * (s * (1.0f - s)) * rate;
    return {dx, dx * x};
  }
  return {-rate * sigmoid(x), -rate * softplus(x)};
}

template <class X>
struct BackwardView {
  Heads<const X> q, k, dq_hat, dk_hat;
  Heads<const float> decay_logit, dlog_decay;
  Rows<const float> beta_logit, dbeta, dt_bias;
  const float* a_log;
  float lower_bound;
  Heads<X> dq, dk;
  Heads<float> ddecay_logit;
  Rows<float> dbeta_logit;
  int64_t tokens, piece;
  float *bias_partial, *rate_partial;  // [pieces, heads d] and [pieces, heads]
  int heads, d;
  bool whole;
};

// With r = 1 / sqrt(sum x^2 + eps):  dx = scale r (dy - x r^2 sum(x dy)).
__device__ __forceinline__ float4 unit_backward(float4 x, float4 dy, float scale) {
  const float r = inverse_norm(x), share = warp_sum(add_products(x, dy, 0.0f)) * (r * r), factor = scale * r;
  const float4 rest = add_scaled(-share, x, dy);
  return scaled(rest, factor);
}

// A warp goes through a piece of the tokens with one head, and keeps the parameters' sums. The next token is on its way while one
// is worked on.
template <class X>
__global__ void __launch_bounds__(kWarps* kWarp, 3) kda_inputs_backward(const BackwardView<X> view) {
  const unsigned head_blocks = (view.heads + kWarps - 1) / kWarps;
  const int h = static_cast<int>(blockIdx.x % head_blocks * kWarps + threadIdx.x / kWarp);
  if (h >= view.heads) return;
  const int64_t piece = blockIdx.x / head_blocks, begin = piece * view.piece, end = min(begin + view.piece, view.tokens);
  const int column = 4 * (static_cast<int>(threadIdx.x) % kWarp), count = view.d - column;
  const auto zero = float4{0.0f, 0.0f, 0.0f, 0.0f};
  struct Token {
    Four<X> q, k, dq, dk;
    float4 logit, dlog;
  };
  const auto read = [&](int64_t t) {
    if (count <= 0) return Token{Four<X>(zero), Four<X>(zero), Four<X>(zero), Four<X>(zero), zero, zero};
    return Token{load_four(view.q.at(t, h) + column, count, view.whole),
                 load_four(view.k.at(t, h) + column, count, view.whole),
                 load_four(view.dq_hat.at(t, h) + column, count, view.whole),
                 load_four(view.dk_hat.at(t, h) + column, count, view.whole),
                 load_run(view.decay_logit.at(t, h) + column, count, view.whole),
                 load_run(view.dlog_decay.at(t, h) + column, count, view.whole)};
  };
  const float4 bias = count > 0 ? load_run(view.dt_bias[h] + column, count, view.whole) : zero;
  const float rate = expf(view.a_log[h]), head_scale = 1.0f / sqrtf(static_cast<float>(view.d));
  float4 bias_sums = zero;
  float rate_sum = 0.0f;
  Token next = read(begin);
  for (int64_t t = begin; t < end; ++t) {
    const Token now = next;  // whole before anything is written: gradients may overwrite gradients
    next = read(min(t + 1, end - 1));
    const float4 dq = unit_backward(now.q.values(), now.dq.values(), head_scale);
    const float4 dk = unit_backward(now.k.values(), now.dk.values(), 1.0f);
    const auto slope = [&](float f, float b, float dlog) {
      const DecaySlope at = decay_slope(f + b, rate, view.lower_bound);
      rate_sum += dlog * at.log_rate;
      return dlog * at.x;
    };
    const float4 df = {slope(now.logit.x, bias.x, now.dlog.x), slope(now.logit.y, bias.y, now.dlog.y),
                       slope(now.logit.z, bias.z, now.dlog.z), slope(now.logit.w, bias.w, now.dlog.w)};
    bias_sums = add_scaled(1.0f, df, bias_sums);
    if (column == 0) {
      const float s = sigmoid(view.beta_logit[t][h]);
      view.dbeta_logit[t][h] = view.dbeta[t][h] * (s * (1.0f - s));
    }
    if (count <= 0) continue;
    store_run(view.dq.at(t, h) + column, dq, count, view.whole);
    store_run(view.dk.at(t, h) + column, dk, count, view.whole);
    store_run(view.ddecay_logit.at(t, h) + column, df, count, view.whole);
  }
  rate_sum = warp_sum(rate_sum);
  if (column == 0) view.rate_partial[piece * view.heads + h] = rate_sum;
  if (count > 0) store_run(view.bias_partial + (piece * view.heads + h) * view.d + column, bias_sums, count, view.whole);
}

template <class X>
void backward(const KdaInputsBackward& args, Stream& stream) {
  // Pieces of tokens such that all heads' are the warps that 132 multiprocessors hold at once: the sums' order, and no property
  // of the device.
  constexpr int64_t kWarpsAtOnce = 132 * 3 * kWarps;
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), d = args.q.size(2);
  const int64_t head_blocks = divide_up(heads, kWarps);
  const int64_t piece = divide_up(tokens, std::max<int64_t>(1, kWarpsAtOnce / (head_blocks * kWarps)));
  const int64_t pieces = divide_up(tokens, piece);
  CHECK(args.ddt_bias.dense());
  const ArenaScope scope(stream.workspace());
  float* const bias_partial = stream.workspace().alloc(DType::kF32, {pieces, heads * d}).f32();
  float* const rate_partial = stream.workspace().alloc(DType::kF32, {pieces, heads}).f32();
  bool whole = true;
  for (const Tensor& t : {args.q, args.k, args.dq_hat, args.dk_hat, args.dq, args.dk, args.decay_logit, args.dlog_decay,
                          args.ddecay_logit, args.dt_bias}) {
    whole = whole && fours(t);
  }
  kda_inputs_backward<X><<<static_cast<unsigned>(head_blocks * pieces), kWarps * kWarp, 0, cuda_stream(stream)>>>(
      {.q = heads_of<const X>(args.q),
       .k = heads_of<const X>(args.k),
       .dq_hat = heads_of<const X>(args.dq_hat),
       .dk_hat = heads_of<const X>(args.dk_hat),
       .decay_logit = heads_of<const float>(args.decay_logit),
       .dlog_decay = heads_of<const float>(args.dlog_decay),
       .beta_logit = rows_of<const float>(args.beta_logit),
       .dbeta = rows_of<const float>(args.dbeta),
       .dt_bias = rows_of<const float>(args.dt_bias),
       .a_log = args.a_log.f32(),
       .lower_bound = args.lower_bound,
       .dq = heads_of<X>(args.dq),
       .dk = heads_of<X>(args.dk),
       .ddecay_logit = heads_of<float>(args.ddecay_logit),
       .dbeta_logit = rows_of<float>(args.dbeta_logit),
       .tokens = tokens,
       .piece = piece,
       .bias_partial = bias_partial,
       .rate_partial = rate_partial,
       .heads = static_cast<int>(heads),
       .d = static_cast<int>(d),
       .whole = whole});
  add_pieces(bias_partial, pieces, heads * d, args.ddt_bias.f32(), stream);
  add_pieces(rate_partial, pieces, heads, args.da_log.f32(), stream);
}

}  // namespace

template <>
void launch_cuda<KdaInputs>(const KdaInputs& args, Stream& stream) {
  const int64_t tokens = args.q.size(0), heads = args.q.size(1);
  if (tokens * heads == 0) return;
  bool whole = true;
  for (const Tensor& t : {args.q, args.k, args.decay_logit, args.dt_bias, args.q_hat, args.k_hat, args.log_decay}) {
    whole = whole && fours(t);
  }
  const unsigned blocks = static_cast<unsigned>(divide_up(heads, kWarps) * divide_up(tokens, kTokens));
  with_type(args.q.dtype(), [&](auto x) {
    using X = decltype(x);
    kda_inputs<X><<<blocks, kWarps * kWarp, 0, cuda_stream(stream)>>>({.q = heads_of<const X>(args.q),
                                                                       .k = heads_of<const X>(args.k),
                                                                       .decay_logit = heads_of<const float>(args.decay_logit),
                                                                       .beta_logit = rows_of<const float>(args.beta_logit),
                                                                       .dt_bias = rows_of<const float>(args.dt_bias),
                                                                       .a_log = args.a_log.f32(),
                                                                       .lower_bound = args.lower_bound,
                                                                       .q_hat = heads_of<X>(args.q_hat),
                                                                       .k_hat = heads_of<X>(args.k_hat),
                                                                       .log_decay = heads_of<float>(args.log_decay),
                                                                       .beta = rows_of<float>(args.beta),
                                                                       .tokens = tokens,
                                                                       .heads = static_cast<int>(heads),
                                                                       .d = static_cast<int>(args.q.size(2)),
                                                                       .whole = whole});
  });
  check_launch("kda_inputs");
}

template <>
void launch_cuda<KdaInputsBackward>(const KdaInputsBackward& args, Stream& stream) {
  if (args.q.size(0) * args.q.size(1) == 0) return;
  with_type(args.q.dtype(), [&](auto x) { backward<decltype(x)>(args, stream); });
  check_launch("kda_inputs_backward");
}

}  // namespace slipstream::kernels
