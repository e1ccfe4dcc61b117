// mHC: bytes of streams and sublayer rows read and written a second, against the machine's copy rate.
#include "kernels/mhc/mhc.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kIterations = 20;

// {tokens, streams, width}
void shapes(benchmark::internal::Benchmark* b) {
  b->Args({16, 4, 1024})->Args({4096, 4, 512})->Args({2048, 4, 1024})->Args({4096, 2, 1024})->UseRealTime();
}

MhcMix mix_args(testing::TensorPool& pool, int64_t tokens, int64_t n, int64_t width) {
  return {.x = pool.random(DType::kF32, {tokens, n, width}),
          .zr = pool.random(DType::kF32, {tokens, (2 + n) * n}),
          .base = pool.random(DType::kF32, {(2 + n) * n}),
          .scale = pool.random(DType::kF32, {3}),
          .norm_eps = 1e-5f,
          .eps = 1e-6f,
          .iterations = kIterations,
          .inv_rms = pool.output(DType::kF32, {tokens}),
          .post = pool.output(DType::kF32, {tokens, n}),
          .comb = pool.output(DType::kF32, {tokens, n, n}),
          .u = pool.output(DType::kF32, {tokens, width})};
}

void mhc_mix(benchmark::State& state) {
  testing::TensorPool pool(1);
  const MhcMix args = mix_args(pool, state.range(0), state.range(1), state.range(2));
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + args.u.bytes());
}
BENCHMARK(mhc_mix)->Apply(shapes);

// The smallest streams: what is left is the iterations.
BENCHMARK(mhc_mix)->Name("mhc_sinkhorn")->Args({4096, 4, 1})->Args({4096, 2, 1})->UseRealTime();

void mhc_mix_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), n = state.range(1), width = state.range(2);
  const MhcMix mix = mix_args(pool, tokens, n, width);
  launch(mix, testing::bench_stream());
  const MhcMixBackward args{.x = mix.x,
                            .zr = mix.zr,
                            .base = mix.base,
                            .scale = mix.scale,
                            .eps = mix.eps,
                            .iterations = kIterations,
                            .inv_rms = mix.inv_rms,
                            .du = pool.random(DType::kF32, {tokens, width}),
                            .dpost = pool.random(DType::kF32, {tokens, n}),
                            .dcomb = pool.random(DType::kF32, {tokens, n, n}),
                            .dx = pool.zeros(DType::kF32, {tokens, n, width}),
                            .dzr = pool.output(DType::kF32, {tokens, (2 + n) * n}),
                            .dbase = pool.zeros(DType::kF32, {(2 + n) * n}),
                            .dscale = pool.zeros(DType::kF32, {3})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + 2 * args.dx.bytes() + args.du.bytes());
}
BENCHMARK(mhc_mix_backward)->Apply(shapes);
BENCHMARK(mhc_mix_backward)
    ->Name("mhc_sinkhorn_backward")
    ->Args({4096, 4, 1})
    ->Args({4096, 2, 1})
    ->UseRealTime();

void mhc_merge(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), n = state.range(1), width = state.range(2);
  const MhcMerge args{.x = pool.random(DType::kF32, {tokens, n, width}),
                      .y = pool.random(DType::kF32, {tokens, width}),
                      .post = pool.random(DType::kF32, {tokens, n}),
                      .comb = pool.random(DType::kF32, {tokens, n, n}),
                      .out = pool.output(DType::kF32, {tokens, n, width})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + args.out.bytes() + args.y.bytes());
}
BENCHMARK(mhc_merge)->Apply(shapes);

void mhc_merge_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), n = state.range(1), width = state.range(2);
  const MhcMergeBackward args{.x = pool.random(DType::kF32, {tokens, n, width}),
                              .y = pool.random(DType::kF32, {tokens, width}),
                              .post = pool.random(DType::kF32, {tokens, n}),
                              .comb = pool.random(DType::kF32, {tokens, n, n}),
                              .dout = pool.random(DType::kF32, {tokens, n, width}),
                              .dx = pool.output(DType::kF32, {tokens, n, width}),
                              .dy = pool.output(DType::kF32, {tokens, width}),
                              .dpost = pool.output(DType::kF32, {tokens, n}),
                              .dcomb = pool.output(DType::kF32, {tokens, n, n})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + 2 * args.dx.bytes() + 2 * args.y.bytes());
}
BENCHMARK(mhc_merge_backward)->Apply(shapes);

// MhcExpand and MhcMean; their backwards are the same loops with another divisor.
void mhc_ends(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), n = state.range(1), width = state.range(2);
  const MhcExpand expand{.x = pool.random(DType::kF32, {tokens, width}),
                         .out = pool.output(DType::kF32, {tokens, n, width})};
  const MhcMean mean{.x = expand.out, .out = pool.output(DType::kF32, {tokens, width})};
  for (auto _ : state) {
    launch(expand, testing::bench_stream());
    launch(mean, testing::bench_stream());
  }
  testing::report_bytes(state, 2 * (expand.x.bytes() + expand.out.bytes()));
}
BENCHMARK(mhc_ends)->Apply(shapes);

}  // namespace
}  // namespace slipstream::kernels
