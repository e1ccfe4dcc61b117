// RMSNorm: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void rmsnorm(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const RmsNorm args{.x = pool.random(DType::kF32, {tokens, hidden}), .w = pool.random(DType::kF32, {hidden}),
                     .y = pool.output(DType::kF32, {tokens, hidden}), .inv_rms = {}, .eps = 1e-5f};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + args.y.bytes());
}
BENCHMARK(rmsnorm)->Args({16, 1024})->Args({4096, 1024})->UseRealTime();

void rmsnorm_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const RmsNormBackward args{.x = pool.random(DType::kF32, {tokens, hidden}),
                             .w = pool.random(DType::kF32, {hidden}),
                             .inv_rms = pool.random(DType::kF32, {tokens}, 0.5f, 2.0f),
                             .dy = pool.random(DType::kF32, {tokens, hidden}),
                             .dx = pool.output(DType::kF32, {tokens, hidden}),
                             .dw = pool.zeros(DType::kF32, {hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.x.bytes());
}
BENCHMARK(rmsnorm_backward)->Args({4096, 1024})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
