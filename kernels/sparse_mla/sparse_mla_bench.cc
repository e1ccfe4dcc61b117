// Sparse MLA: multiply-adds a second, against the machine's FMA rate (kernels/testing/bench.h). Prefill,
// decode and backward at h = 8, dense (topk 0) and with random selections. Rows are counted as the arithmetic
// needs them: W + rank multiply-adds a query head and key forward; 3 W + 2 rank backward.
#include <algorithm>
#include <cmath>

#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

using testing::bench_stream;

struct Call {
  SparseMla args;
  int64_t pairs = 0;  // (query, key) pairs
};

// `batch` sequences with `fresh` new tokens each after `cached` ones.
Call make_call(testing::TensorPool& pool, int64_t batch, int64_t cached, int64_t fresh, int64_t heads,
               int64_t rank, int64_t rope, int64_t topk, DType dtype) {
  const int64_t tokens = batch * fresh, pages = (cached + fresh + kPageRows - 1) / kPageRows;
  Call call;
  call.args = {
      .q = pool.random(DType::kF32, {tokens, heads, rank + rope}),
      .keys = {.pool = pool.random(dtype, {batch * pages, kPageRows, rank + rope}),
               .page_table = testing::pages_in_turn(pool, batch, pages)},
      .sequences = testing::even_sequences(pool, batch, {cached, fresh}),
      .indices = {},
      .counts = {},
      .scale = 1.0f / std::sqrt(static_cast<float>(rank + rope)),
      .o = pool.output(DType::kF32, {tokens, heads, rank}),
      .lse = pool.output(DType::kF32, {tokens, heads})};
  if (topk > 0) {
    call.args.indices = pool.zeros(DType::kI32, {tokens, topk});
    call.args.counts = pool.zeros(DType::kI32, {tokens});
  }
  for (int64_t row = 0; row < tokens; ++row) {
    const int64_t sees = cached + row % fresh + 1;
    int64_t left = topk == 0 ? sees : std::min(topk, sees);
    call.pairs += left;
    if (topk == 0) continue;
    int32_t& count = call.args.counts.i32()[row];
    for (int64_t s = 0; s < sees && left > 0; ++s) {
      if (pool.uniform() * static_cast<float>(sees - s) > static_cast<float>(left)) continue;
      call.args.indices.i32()[row * topk + count++] = static_cast<int32_t>(s);
      --left;
    }
  }
  return call;
}

void prefill(benchmark::State& state, DType dtype) {
  testing::TensorPool pool(1);
  const int64_t rank = state.range(1), rope = state.range(2);
  const Call call = make_call(pool, 1, 0, state.range(0), 8, rank, rope, state.range(3), dtype);
  for (auto _ : state) launch(call.args, bench_stream());
  testing::report_flops(state, 2 * call.pairs * 8 * (2 * rank + rope));
}
BENCHMARK_CAPTURE(prefill, f32, DType::kF32)
    ->ArgNames({"T", "rank", "rope", "topk"})
    ->Args({2048, 192, 32, 0})
    ->Args({2048, 192, 32, 256})
    ->Args({2048, 256, 0, 0})
    ->Args({2048, 256, 0, 256})
    ->UseRealTime();
BENCHMARK_CAPTURE(prefill, bf16, DType::kBf16)
    ->ArgNames({"T", "rank", "rope", "topk"})
    ->Args({2048, 256, 0, 0})
    ->Args({2048, 256, 0, 256})
    ->UseRealTime();

void decode(benchmark::State& state, DType dtype) {
  testing::TensorPool pool(1);
  const int64_t batch = state.range(0), context = state.range(1), heads = state.range(2);
  const Call call = make_call(pool, batch, context - 1, 1, heads, 256, 0, state.range(3), dtype);
  for (auto _ : state) launch(call.args, bench_stream());
  testing::report_flops(state, 2 * call.pairs * heads * 512);
}
BENCHMARK_CAPTURE(decode, f32, DType::kF32)
    ->ArgNames({"batch", "context", "heads", "topk"})
    ->Args({1, 2048, 8, 0})
    ->Args({16, 2048, 8, 0})
    ->Args({16, 2048, 8, 256})
    ->Args({1, 32768, 8, 0})
    ->Args({1, 2048, 16, 0})
    ->UseRealTime();
BENCHMARK_CAPTURE(decode, bf16, DType::kBf16)
    ->ArgNames({"batch", "context", "heads", "topk"})
    ->Args({1, 2048, 8, 0})
    ->Args({16, 2048, 8, 0})
    ->UseRealTime();

void backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), rank = state.range(1), rope = state.range(2);
  const Call call = make_call(pool, 1, 0, tokens, 8, rank, rope, state.range(3), DType::kF32);
  launch(call.args, bench_stream());
  const SparseMla& forward = call.args;
  const SparseMlaBackward args{.q = forward.q,
                               .keys = forward.keys,
                               .sequences = forward.sequences,
                               .indices = forward.indices,
                               .counts = forward.counts,
                               .scale = forward.scale,
                               .o = forward.o,
                               .lse = forward.lse,
                               .d_o = pool.random(DType::kF32, {tokens, 8, rank}),
                               .dq = pool.output(DType::kF32, {tokens, 8, rank + rope}),
                               .dkeys = pool.output(DType::kF32, {tokens, rank + rope})};
  for (auto _ : state) launch(args, bench_stream());
  testing::report_flops(state, 2 * call.pairs * 8 * (5 * rank + 3 * rope));
}
BENCHMARK(backward)
    ->ArgNames({"T", "rank", "rope", "topk"})
    ->Args({2048, 192, 32, 0})
    ->Args({2048, 192, 32, 256})
    ->Args({2048, 256, 0, 0})
    ->Args({2048, 256, 0, 256})
    ->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
