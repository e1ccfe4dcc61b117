// Sampling: bytes of logits a second, against the machine's copy rate (kernels/testing/bench.h).
#include <vector>

#include "kernels/sampling/sampling.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void sample(benchmark::State& state, const SamplingRow& row) {
  testing::TensorPool pool(1);
  const int64_t count = state.range(0), vocab = state.range(1);
  std::vector<SamplingRow> rows(static_cast<size_t>(count), row);
  for (size_t t = 0; t < rows.size(); ++t) rows[t].counter = t;
  const Sampling args{.logits = pool.random(DType::kF32, {count, vocab}, -8.0f, 8.0f),
                      .rows = rows.data(),
                      .tokens = pool.output(DType::kI32, {count}),
                      .logprob = pool.output(DType::kF32, {count}),
                      .truncated = pool.output(DType::kI32, {count})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.logits.bytes());
}

void plain(benchmark::State& state) { sample(state, {}); }
void greedy(benchmark::State& state) { sample(state, {.temperature = 0.0f}); }
void min_p(benchmark::State& state) { sample(state, {.min_p = 0.05f}); }
void top_k_top_p(benchmark::State& state) { sample(state, {.top_k = 50, .top_p = 0.95f}); }
BENCHMARK(plain)->Args({1, 154880})->Args({16, 154880})->Args({16, 32768})->UseRealTime();
BENCHMARK(greedy)->Args({1, 154880})->UseRealTime();
BENCHMARK(min_p)->Args({1, 154880})->UseRealTime();
BENCHMARK(top_k_top_p)->Args({1, 154880})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
