// GQA: multiply-adds a second, against the machine's FMA rate (kernels/testing/bench.h), at h = 16 heads of
// 64 with 4 key/value heads: 2 d multiply-adds a query head and key forward, 5 d backward.
#include <cmath>

#include "kernels/gqa/gqa.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

using testing::bench_stream;

constexpr int64_t kHeads = 16, kKvHeads = 4, kWidth = 64;

// `batch` sequences with `fresh` new tokens each after `cached` ones.
Gqa make_call(testing::TensorPool& pool, int64_t batch, int64_t cached, int64_t fresh) {
  const int64_t tokens = batch * fresh, pages = (cached + fresh + kPageRows - 1) / kPageRows;
  const auto store = [&] {
    return PagedRows{.pool = pool.random(DType::kF32, {batch * pages, kPageRows, kKvHeads * kWidth}),
                     .page_table = testing::pages_in_turn(pool, batch, pages)};
  };
  return {.q = pool.random(DType::kF32, {tokens, kHeads, kWidth}),
          .k = store(),
          .v = store(),
          .sequences = testing::even_sequences(pool, batch, {cached, fresh}),
          .kv_heads = kKvHeads,
          .scale = 1.0f / std::sqrt(static_cast<float>(kWidth)),
          .o = pool.output(DType::kF32, {tokens, kHeads, kWidth}),
          .lse = pool.output(DType::kF32, {tokens, kHeads})};
}

void prefill(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0);
  const Gqa args = make_call(pool, 1, 0, tokens);
  for (auto _ : state) launch(args, bench_stream());
  testing::report_flops(state, tokens * (tokens + 1) * kHeads * 2 * kWidth);
}
BENCHMARK(prefill)->ArgName("T")->Arg(512)->Arg(2048)->UseRealTime();

void decode(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t batch = state.range(0), context = state.range(1);
  const Gqa args = make_call(pool, batch, context - 1, 1);
  for (auto _ : state) launch(args, bench_stream());
  testing::report_flops(state, 2 * batch * context * kHeads * 2 * kWidth);
}
BENCHMARK(decode)->ArgNames({"batch", "context"})->Args({1, 2048})->Args({16, 2048})->UseRealTime();

void backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0);
  const Gqa call = make_call(pool, 1, 0, tokens);
  launch(call, bench_stream());
  const GqaBackward args{.q = call.q,
                         .k = call.k,
                         .v = call.v,
                         .sequences = call.sequences,
                         .kv_heads = kKvHeads,
                         .scale = call.scale,
                         .o = call.o,
                         .lse = call.lse,
                         .d_o = pool.random(DType::kF32, {tokens, kHeads, kWidth}),
                         .dq = pool.output(DType::kF32, {tokens, kHeads, kWidth}),
                         .dk = pool.output(DType::kF32, {tokens, kKvHeads, kWidth}),
                         .dv = pool.output(DType::kF32, {tokens, kKvHeads, kWidth})};
  for (auto _ : state) launch(args, bench_stream());
  testing::report_flops(state, tokens * (tokens + 1) * kHeads * 5 * kWidth);
}
BENCHMARK(backward)->ArgName("T")->Arg(512)->Arg(2048)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
