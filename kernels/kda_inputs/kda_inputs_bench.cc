// KdaInputs: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/kda_inputs/kda_inputs.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

KdaInputs random_args(testing::TensorPool& pool, int64_t tokens, int64_t heads, int64_t d,
                      float lower_bound) {
  const auto values = [&] { return pool.random(DType::kF32, {tokens, heads, d}); };
  return {.q = values(),
          .k = values(),
          .decay_logit = values(),
          .beta_logit = pool.random(DType::kF32, {tokens, heads}),
          .a_log = pool.random(DType::kF32, {heads}),
          .dt_bias = pool.random(DType::kF32, {heads, d}),
          .lower_bound = lower_bound,
          .q_hat = values(),
          .k_hat = values(),
          .log_decay = values(),
          .beta = pool.random(DType::kF32, {tokens, heads})};
}

// Arguments: tokens, heads, d, -lower bound.
void kda_inputs(benchmark::State& state) {
  testing::TensorPool pool(1);
  const KdaInputs args =
      random_args(pool, state.range(0), state.range(1), state.range(2), -static_cast<float>(state.range(3)));
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 6 * args.q.bytes());
}
BENCHMARK(kda_inputs)->Args({2048, 8, 64, 5})->Args({2048, 8, 64, 0})->Args({16, 8, 64, 5})->UseRealTime();

void kda_inputs_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const KdaInputs forward =
      random_args(pool, state.range(0), state.range(1), state.range(2), -static_cast<float>(state.range(3)));
  const KdaInputsBackward args{.q = forward.q,
                               .k = forward.k,
                               .decay_logit = forward.decay_logit,
                               .beta_logit = forward.beta_logit,
                               .a_log = forward.a_log,
                               .dt_bias = forward.dt_bias,
                               .lower_bound = forward.lower_bound,
                               .dq_hat = forward.q_hat,
                               .dk_hat = forward.k_hat,
                               .dlog_decay = forward.log_decay,
                               .dbeta = forward.beta,
                               .dq = forward.q_hat,
                               .dk = forward.k_hat,
                               .ddecay_logit = forward.log_decay,
                               .dbeta_logit = forward.beta,
                               .da_log = pool.zeros(DType::kF32, {state.range(1)}),
                               .ddt_bias = pool.zeros(DType::kF32, {state.range(1), state.range(2)})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 9 * args.q.bytes());
}
BENCHMARK(kda_inputs_backward)->Args({2048, 8, 64, 5})->Args({2048, 8, 64, 0})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
