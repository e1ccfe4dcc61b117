// LayerNorm: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/layernorm/layernorm.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void layernorm(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const LayerNorm args{.x = pool.random(DType::kF32, {tokens, hidden}), .w = pool.random(DType::kF32, {hidden}),
                       .b = pool.random(DType::kF32, {hidden}), .y = pool.output(DType::kF32, {tokens, hidden}),
                       .mean = {}, .inv_std = {}, .eps = 1e-6f};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 2 * args.y.bytes());
}
BENCHMARK(layernorm)->Args({16, 128})->Args({4096, 128})->UseRealTime();

void layernorm_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const LayerNormBackward args{.x = pool.random(DType::kF32, {tokens, hidden}),
                               .w = pool.random(DType::kF32, {hidden}),
                               .mean = pool.random(DType::kF32, {tokens}),
                               .inv_std = pool.random(DType::kF32, {tokens}, 0.5f, 2.0f),
                               .dy = pool.random(DType::kF32, {tokens, hidden}),
                               .dx = pool.output(DType::kF32, {tokens, hidden}),
                               .dw = pool.zeros(DType::kF32, {hidden}),
                               .db = pool.zeros(DType::kF32, {hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.x.bytes());
}
BENCHMARK(layernorm_backward)->Args({4096, 128})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
