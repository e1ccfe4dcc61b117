// GatedNorm: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/gated_norm/gated_norm.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void gated_norm(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t rows = state.range(0), dim = state.range(1);
  const GatedNorm args{.x = pool.random(DType::kF32, {rows, dim}),
                       .w = pool.random(DType::kF32, {dim}),
                       .gate = pool.random(DType::kF32, {rows, dim}, -4.0f, 4.0f),
                       .y = pool.output(DType::kF32, {rows, dim}),
                       .inv_rms = pool.output(DType::kF32, {rows}),
                       .eps = 1e-5f};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.x.bytes());
}
BENCHMARK(gated_norm)->Args({16 * 8, 128})->Args({4096 * 8, 128})->UseRealTime();

void gated_norm_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t rows = state.range(0), dim = state.range(1);
  const GatedNormBackward args{.x = pool.random(DType::kF32, {rows, dim}),
                               .gate = pool.random(DType::kF32, {rows, dim}, -4.0f, 4.0f),
                               .w = pool.random(DType::kF32, {dim}),
                               .inv_rms = pool.random(DType::kF32, {rows}, 0.5f, 2.0f),
                               .dy = pool.random(DType::kF32, {rows, dim}),
                               .dx = pool.output(DType::kF32, {rows, dim}),
                               .dgate = pool.output(DType::kF32, {rows, dim}),
                               .dw = pool.zeros(DType::kF32, {dim})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 5 * args.x.bytes());
}
BENCHMARK(gated_norm_backward)->Args({4096 * 8, 128})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
