// SwiGLU: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/swiglu/swiglu.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void swiglu(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), width = state.range(1);
  const SwiGlu args{.gate = pool.random(DType::kF32, {tokens, width}, -4.0f, 4.0f),
                    .up = pool.random(DType::kF32, {tokens, width}),
                    .y = pool.output(DType::kF32, {tokens, width}),
                    .limit = 10.0f};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.gate.bytes());
}
BENCHMARK(swiglu)->Args({16, 2048})->Args({4096, 2048})->UseRealTime();

void swiglu_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), width = state.range(1);
  const SwiGluBackward args{.gate = pool.random(DType::kF32, {tokens, width}, -4.0f, 4.0f),
                            .up = pool.random(DType::kF32, {tokens, width}),
                            .dy = pool.random(DType::kF32, {tokens, width}),
                            .dgate = pool.output(DType::kF32, {tokens, width}),
                            .dup = pool.output(DType::kF32, {tokens, width}),
                            .limit = 10.0f};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 5 * args.gate.bytes());
}
BENCHMARK(swiglu_backward)->Args({4096, 2048})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
