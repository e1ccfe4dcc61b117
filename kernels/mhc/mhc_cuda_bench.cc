// mHC around a sublayer of GLM-5.3-Flash: four bf16 streams of 4096, twenty iterations. The floors are of each operator alone;
// a form that also made the product of the streams would read them once for both.
#include "kernels/mhc/mhc.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kStreams = 4, kWidth = 4096, kColumns = (2 + kStreams) * kStreams;

void run(testing::CudaBench& bench, int64_t tokens) {
  const ArenaScope scope(bench.arena());
  const auto streams = [&] { return bench.random(DType::kBf16, {tokens, kStreams, kWidth}); };
  const auto rows = [&] { return bench.random(DType::kBf16, {tokens, kWidth}); };
  const auto floats = [&](int64_t columns) { return bench.random(DType::kF32, {tokens, columns}); };
  const Tensor comb = bench.random(DType::kF32, {tokens, kStreams, kStreams}, 0.0f, 0.5f);
  const MhcMix mix{.x = streams(),
                   .zr = floats(kColumns),
                   .base = bench.random(DType::kF32, {kColumns}),
                   .scale = bench.random(DType::kF32, {3}),
                   .norm_eps = 1e-5f,
                   .eps = 1e-6f,
                   .iterations = 20,
                   .inv_rms = bench.random(DType::kF32, {tokens}, 0.5f, 2.0f),
                   .post = floats(kStreams),
                   .comb = comb,
                   .u = rows()};
  const MhcMerge merge{.x = mix.x, .y = rows(), .post = mix.post, .comb = comb, .out = streams()};
  const int64_t row = mix.u.bytes();
  bench.memory_row("mix", tokens, 5 * row, [&](int) { launch(mix, bench.stream()); });
  MhcMix normed = mix;
  normed.w = bench.random(DType::kF32, {kWidth}), normed.y = rows();
  bench.memory_row("mix with the norm", tokens, 6 * row, [&](int) { launch(normed, bench.stream()); });
  bench.memory_row("merge", tokens, 9 * row, [&](int) { launch(merge, bench.stream()); });
  if (tokens <= 128) return;  // decode
  const Tensor dx = streams();
  const MhcMixBackward mix_backward{.x = mix.x,
                                    .zr = mix.zr,
                                    .base = mix.base,
                                    .scale = mix.scale,
                                    .eps = mix.eps,
                                    .iterations = mix.iterations,
                                    .inv_rms = mix.inv_rms,
                                    .du = rows(),
                                    .dpost = floats(kStreams),
                                    .dcomb = bench.random(DType::kF32, {tokens, kStreams, kStreams}),
                                    .dx = dx,
                                    .dzr = floats(kColumns),
                                    .dbase = bench.random(DType::kF32, {kColumns}),
                                    .dscale = bench.random(DType::kF32, {3})};
  const MhcMergeBackward merge_backward{.x = mix.x,
                                        .y = merge.y,
                                        .post = mix.post,
                                        .comb = comb,
                                        .dout = merge.out,
                                        .dx = dx,
                                        .dy = mix.u,
                                        .dpost = mix_backward.dpost,
                                        .dcomb = mix_backward.dcomb};
  bench.memory_row("mix, backward", tokens, 13 * row, [&](int) { launch(mix_backward, bench.stream()); });
  bench.memory_row("merge, backward", tokens, 14 * row, [&](int) { launch(merge_backward, bench.stream()); });
}

CUDA_BENCH(mhc) {
  for (const int64_t tokens : {1, 128, 8192, 16384}) run(bench, tokens);
}

}  // namespace
}  // namespace slipstream::kernels
