// What stands between KDA's projections and KDA, at the shape of GLM-5.3-Flash: 64 heads x 128, bf16, decays in f32; q and k are
// thirds of the convolution's rows.
#include "kernels/kda_inputs/kda_inputs.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kHeads = 64, kWidth = 128;

void run(testing::CudaBench& bench, int64_t tokens) {
  const ArenaScope scope(bench.arena());
  const auto thirds = [&](const Tensor& mixed, int64_t part) {
    return mixed.slice(1, part * kHeads * kWidth, (part + 1) * kHeads * kWidth).split_last(kHeads);
  };
  const auto heads = [&](DType dtype) { return bench.arena().alloc(dtype, {tokens, kHeads, kWidth}); };
  const Tensor mixed = bench.random(DType::kBf16, {tokens, 3 * kHeads * kWidth});
  const Tensor beta = bench.arena().alloc(DType::kF32, {tokens, kHeads});
  const KdaInputs args{.q = thirds(mixed, 0),
                       .k = thirds(mixed, 1),
                       .decay_logit = bench.random(DType::kF32, {tokens, kHeads, kWidth}),
                       .beta_logit = bench.random(DType::kF32, {tokens, kHeads}),
                       .a_log = bench.random(DType::kF32, {kHeads}),
                       .dt_bias = bench.random(DType::kF32, {kHeads, kWidth}),
                       .lower_bound = -5.0f,
                       .q_hat = heads(DType::kBf16),
                       .k_hat = heads(DType::kBf16),
                       .log_decay = heads(DType::kF32),
                       .beta = beta};
  const int64_t values = tokens * kHeads * kWidth;
  bench.memory_row("forward", tokens, values * 16 + beta.bytes() * 2, [&](int) { launch(args, bench.stream()); });
  if (tokens <= 128) return;  // decode
  const Tensor dmixed = bench.arena().alloc(DType::kBf16, {tokens, 3 * kHeads * kWidth});
  const KdaInputsBackward backward{.q = args.q,
                                   .k = args.k,
                                   .decay_logit = args.decay_logit,
                                   .beta_logit = args.beta_logit,
                                   .a_log = args.a_log,
                                   .dt_bias = args.dt_bias,
                                   .lower_bound = args.lower_bound,
                                   .dq_hat = bench.random(DType::kBf16, {tokens, kHeads, kWidth}),
                                   .dk_hat = bench.random(DType::kBf16, {tokens, kHeads, kWidth}),
                                   .dlog_decay = bench.random(DType::kF32, {tokens, kHeads, kWidth}),
                                   .dbeta = bench.random(DType::kF32, {tokens, kHeads}),
                                   .dq = thirds(dmixed, 0),
                                   .dk = thirds(dmixed, 1),
                                   .ddecay_logit = heads(DType::kF32),
                                   .dbeta_logit = beta,
                                   .da_log = bench.random(DType::kF32, {kHeads}),
                                   .ddt_bias = bench.random(DType::kF32, {kHeads, kWidth})};
  bench.memory_row("backward", tokens, values * 24 + beta.bytes() * 3, [&](int) { launch(backward, bench.stream()); });
}

CUDA_BENCH(kda_inputs) {
  for (const int64_t tokens : {1, 128, 8192, 16384}) run(bench, tokens);
}

}  // namespace
}  // namespace slipstream::kernels
