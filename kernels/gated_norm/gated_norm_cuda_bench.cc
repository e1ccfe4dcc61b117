// KDA's output norm at the shape of GLM-5.3-Flash, 64 rows of 128 a token, bf16.
#include "kernels/gated_norm/gated_norm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void run(testing::CudaBench& bench, int64_t tokens) {
  const ArenaScope scope(bench.arena());
  const int64_t rows = tokens * 64, width = 128;
  const GatedNorm args{.x = bench.random(DType::kBf16, {rows, width}),
                       .w = bench.random(DType::kF32, {width}),
                       .gate = bench.random(DType::kBf16, {rows, width}, -4.0f, 4.0f),
                       .y = bench.arena().alloc(DType::kBf16, {rows, width}),
                       .inv_rms = bench.random(DType::kF32, {rows}, 0.5f, 2.0f),
                       .eps = 1e-5f};
  bench.memory_row("forward", tokens, 3 * args.x.bytes(), [&](int) { launch(args, bench.stream()); });
  if (tokens <= 128) return;  // decode
  const GatedNormBackward backward{.x = args.x,
                                   .gate = args.gate,
                                   .w = args.w,
                                   .inv_rms = args.inv_rms,
                                   .dy = bench.random(DType::kBf16, {rows, width}),
                                   .dx = args.y,
                                   .dgate = bench.arena().alloc(DType::kBf16, {rows, width}),
                                   .dw = bench.random(DType::kF32, {width})};
  bench.memory_row("backward", tokens, 5 * args.x.bytes(), [&](int) { launch(backward, bench.stream()); });
}

CUDA_BENCH(gated_norm) {
  for (const int64_t tokens : {1, 128, 8192, 16384}) run(bench, tokens);
}

}  // namespace
}  // namespace slipstream::kernels
