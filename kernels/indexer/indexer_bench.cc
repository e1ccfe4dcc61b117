// IndexerSelect and IndexerScores: multiply-adds of the scores a second, against the machine's rate
// (kernels/testing/bench.h); prefill of 2048 queries, decode of one query a sequence, given positions forward and
// backward, and the running top-k alone against std::nth_element.
#include "kernels/indexer/indexer.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/indexer_bench.cc"
#include "hwy/foreach_target.h"

#include "kernels/indexer/topk-inl.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

int64_t running_topk(const float* scores, int64_t n, int64_t k, int32_t* keys, int32_t* rows) {
  RunningTopK top{.keys = keys, .rows = rows};
  for (int64_t i = 0; i < n; i += kPushMax) push(top, k, scores + i, i, std::min(kPushMax, n - i));
  settle(top, k);
  return top.count;
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(running_topk);

namespace {

// `count` sequences of `cached` + `fresh` tokens with their queries and keys.
struct World {
  World(testing::TensorPool& pool, int64_t count, int64_t cached, int64_t fresh, int64_t heads, int64_t width) {
    const int64_t pages = (cached + fresh + kPageRows - 1) / kPageRows, rows = count * fresh;
    q = pool.random(DType::kF32, {rows, heads, width});
    weights = pool.random(DType::kF32, {rows, heads});
    keys = {.pool = pool.random(DType::kF32, {count * pages, kPageRows, width}),
            .page_table = testing::pages_in_turn(pool, count, pages)};
    sequences = testing::even_sequences(pool, count, {cached, fresh});
    key_scale = 1.0f / std::sqrt(static_cast<float>(width));
  }
  Tensor q, weights;
  PagedRows keys;
  Sequences sequences;
  float key_scale;
};

// topk 256.
void select(benchmark::State& state, int64_t count, int64_t cached, int64_t fresh, int64_t heads,
            int64_t width) {
  testing::TensorPool pool(1);
  const World world(pool, count, cached, fresh, heads, width);
  const int64_t rows = count * fresh;
  const IndexerSelect args{.q = world.q,
                           .weights = world.weights,
                           .keys = world.keys,
                           .sequences = world.sequences,
                           .topk = 256,
                           .key_scale = world.key_scale,
                           .indices = pool.output(DType::kI32, {rows, 256}),
                           .counts = pool.output(DType::kI32, {rows})};
  for (auto _ : state) launch(args, testing::bench_stream());
  int64_t pairs = 0;  // of a query and a key
  for (int64_t t = cached; t < cached + fresh; ++t) pairs += t + 1 > 256 ? t + 1 : 0;
  testing::report_flops(state, 2 * count * pairs * heads * width);
}

// Keys of the longest query, heads, width.
void prefill(benchmark::State& state) {
  select(state, 1, state.range(0) - 2048, 2048, state.range(1), state.range(2));
}
BENCHMARK(prefill)
    ->Args({2048, 8, 64})
    ->Args({2048, 16, 128})
    ->Args({2048, 32, 128})
    ->Args({8192, 8, 64})
    ->Args({8192, 32, 128})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

// Sequences, keys, heads, width.
void decode(benchmark::State& state) {
  select(state, state.range(0), state.range(1) - 1, 1, state.range(2), state.range(3));
}
BENCHMARK(decode)
    ->Args({1, 8192, 8, 64})
    ->Args({16, 8192, 8, 64})
    ->Args({1, 65536, 8, 64})
    ->Args({16, 65536, 8, 64})
    ->Args({1, 65536, 32, 128})
    ->Unit(benchmark::kMicrosecond)
    ->UseRealTime();

// Given positions, up to 256 a query, as the indexer's own loss scores them.
constexpr int64_t kGiven = 256;

struct GivenRows {
  GivenRows(testing::TensorPool& pool, int64_t tokens)
      : rows(pool.ints({tokens, kGiven}, std::vector<int32_t>(static_cast<size_t>(tokens * kGiven), -1))) {
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t count = std::min(t + 1, kGiven);
      pairs += count;
      for (int64_t i = 0; i < count; ++i) rows.i32()[t * kGiven + i] = static_cast<int32_t>(i * (t + 1) / count);
    }
  }
  Tensor rows;
  int64_t pairs = 0;  // of a query and a key
};

// Tokens of one sequence, heads, width.
void scores(benchmark::State& state) {
  testing::TensorPool pool(3);
  const int64_t tokens = state.range(0), heads = state.range(1), width = state.range(2);
  const World world(pool, 1, 0, tokens, heads, width);
  const GivenRows given(pool, tokens);
  const IndexerScores args{.q = world.q,
                           .weights = world.weights,
                           .keys = world.keys,
                           .sequences = world.sequences,
                           .key_scale = world.key_scale,
                           .rows = given.rows,
                           .scores = pool.output(DType::kF32, {tokens, kGiven})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, 2 * given.pairs * heads * width);
}
BENCHMARK(scores)->Args({2048, 8, 64})->Args({2048, 32, 128})->Unit(benchmark::kMillisecond)->UseRealTime();

void scores_backward(benchmark::State& state) {
  testing::TensorPool pool(4);
  const int64_t tokens = state.range(0), heads = state.range(1), width = state.range(2);
  const World world(pool, 1, 0, tokens, heads, width);
  const GivenRows given(pool, tokens);
  const IndexerScoresBackward args{.q = world.q,
                                   .weights = world.weights,
                                   .keys = world.keys,
                                   .sequences = world.sequences,
                                   .key_scale = world.key_scale,
                                   .rows = given.rows,
                                   .dscores = pool.random(DType::kF32, {tokens, kGiven}),
                                   .dq = pool.output(DType::kF32, {tokens, heads, width}),
                                   .dweights = pool.output(DType::kF32, {tokens, heads}),
                                   .dkeys = pool.output(DType::kF32, {tokens, width})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, 6 * given.pairs * heads * width);  // the scores again, then two gradients
}
BENCHMARK(scores_backward)
    ->Args({2048, 8, 64})
    ->Args({2048, 32, 128})
    ->Unit(benchmark::kMillisecond)
    ->UseRealTime();

enum Order { kRandom, kRising, kEqual };

std::vector<float> make_scores(testing::TensorPool& pool, int64_t n, int64_t order) {
  std::vector<float> scores(static_cast<size_t>(n) + 32);
  for (float& score : scores) score = order == kEqual ? 0.0f : pool.uniform();
  if (order == kRising) std::sort(scores.begin(), scores.end());
  return scores;
}

// Scores, k, their order.
void topk_running(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t n = state.range(0), k = state.range(1);
  const std::vector<float> scores = make_scores(pool, n, state.range(2));
  std::vector<int32_t> keys(static_cast<size_t>(2 * k + 64)), rows(keys.size());
  for (auto _ : state) {
    benchmark::DoNotOptimize(
        HWY_DYNAMIC_DISPATCH(running_topk)(scores.data(), n, k, keys.data(), rows.data()));
  }
  state.SetItemsProcessed(state.iterations() * n);
}

// The same selection by std::nth_element over (score, position) packed into 64 bits, then a sort of the
// positions.
void topk_nth_element(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t n = state.range(0), k = state.range(1);
  const std::vector<float> scores = make_scores(pool, n, state.range(2));
  std::vector<uint64_t> packed(static_cast<size_t>(n));
  for (auto _ : state) {
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = std::bit_cast<int32_t>(scores[static_cast<size_t>(i)]);
      const uint32_t key = ~(static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u);
      packed[static_cast<size_t>(i)] = (uint64_t{key} << 32) | static_cast<uint32_t>(i);
    }
    std::nth_element(packed.begin(), packed.begin() + k, packed.end());
    for (int64_t i = 0; i < k; ++i) packed[static_cast<size_t>(i)] &= 0xffffffffu;
    std::sort(packed.begin(), packed.begin() + k);
    benchmark::DoNotOptimize(packed.data());
  }
  state.SetItemsProcessed(state.iterations() * n);
}

void topk_shapes(benchmark::internal::Benchmark* bench) {
  for (const int64_t order : {kRandom, kRising, kEqual}) bench->Args({8192, 256, order});
  bench->Args({65536, 256, kRandom})->Args({65536, 2048, kRandom})->Unit(benchmark::kMicrosecond);
}
BENCHMARK(topk_running)->Apply(topk_shapes);
BENCHMARK(topk_nth_element)->Apply(topk_shapes);

}  // namespace
}  // namespace slipstream::kernels
#endif  // HWY_ONCE
