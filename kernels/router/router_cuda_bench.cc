// The router of GLM-5: 256 experts, eight a token, hidden size 6144; and of Flash: 288, 4096. Beside the choice alone, the
// choice and the product that makes its logits in f32 of bf16 rows and weights.
#include "kernels/router/router.h"

#include <string>

#include "kernels/gemm/gemm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void run(testing::CudaBench& bench, int64_t tokens, int64_t experts, int64_t hidden) {
  const ArenaScope scope(bench.arena());
  const Tensor x = bench.random(DType::kBf16, {tokens, hidden}), w = bench.random(DType::kBf16, {experts, hidden}, -0.02f, 0.02f);
  const Router args{.logits = bench.random(DType::kF32, {tokens, experts}),
                    .bias = bench.random(DType::kF32, {experts}, -0.1f, 0.1f),
                    .experts = bench.arena().alloc(DType::kI32, {tokens, 8}),
                    .weights = bench.arena().alloc(DType::kF32, {tokens, 8}),
                    .scale = 2.5f};
  const std::string of = ", " + std::to_string(experts) + " experts";
  bench.memory_row("choice" + of, tokens, args.logits.bytes(), [&](int) { launch(args, bench.stream()); });
  bench.memory_row("product and choice" + of, tokens, x.bytes() + w.bytes() + 2 * args.logits.bytes(), [&](int) {
    launch(Gemm{.a = x, .b = w, .c = args.logits, .bias = {}, .transpose_b = true}, bench.stream());
    launch(args, bench.stream());
  });
  if (tokens <= 128) return;  // decode
  const RouterBackward backward{.logits = args.logits, .experts = args.experts, .dweights = args.weights,
                                .dlogits = bench.random(DType::kF32, {tokens, experts}), .scale = 2.5f};
  bench.memory_row("backward" + of, tokens, args.logits.bytes(), [&](int) { launch(backward, bench.stream()); });
}

CUDA_BENCH(router) {
  for (const int64_t tokens : {1, 128, 4096}) run(bench, tokens, 256, 6144);
  for (const int64_t tokens : {1, 128, 8192}) run(bench, tokens, 288, 4096);
}

}  // namespace
}  // namespace slipstream::kernels
