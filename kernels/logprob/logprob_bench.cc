// LogProb: bytes of logits a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/logprob/logprob.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void logprob(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), vocab = state.range(1);
  LogProb args{.logits = pool.random(DType::kF32, {tokens, vocab}, -8.0f, 8.0f),
               .targets = pool.random_ints({tokens}, 0, static_cast<int32_t>(vocab)),
               .logprob = pool.output(DType::kF32, {tokens}),
               .lse = pool.output(DType::kF32, {tokens}),
               .entropy = {}};
  if (state.range(2) != 0) args.entropy = pool.output(DType::kF32, {tokens});
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.logits.bytes());
}
BENCHMARK(logprob)
    ->ArgNames({"T", "V", "entropy"})
    ->Args({1, 154880, 0})
    ->Args({16, 154880, 0})
    ->Args({2048, 32768, 0})
    ->Args({2048, 32768, 1})
    ->UseRealTime();

void logprob_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), vocab = state.range(1);
  const LogProbBackward args{.logits = pool.random(DType::kF32, {tokens, vocab}, -8.0f, 8.0f),
                             .targets = pool.random_ints({tokens}, 0, static_cast<int32_t>(vocab)),
                             .lse = pool.random(DType::kF32, {tokens}, 15.0f, 16.0f),
                             .dlogprob = pool.random(DType::kF32, {tokens}),
                             .entropy = {},
                             .dentropy = {},
                             .dlogits = pool.output(DType::kF32, {tokens, vocab})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 2 * args.logits.bytes());
}
BENCHMARK(logprob_backward)->ArgNames({"T", "V"})->Args({2048, 32768})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
