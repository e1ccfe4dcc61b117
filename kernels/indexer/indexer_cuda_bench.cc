// GLM-5's indexer (32 heads x 128 channels, top-2048) in bf16. IndexerSelect is scoring
// and selection together; their floor is the products at 790 TFLOP/s, or the keys read once at 4.3 TB/s.
// Given rows: 2048 of each query, as the indexer's own loss scores them; their bytes are the gathered keys,
// mostly of the L2.
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/indexer/indexer.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr int64_t kHeads = 32, kWidth = 128, kTopk = 2048;
constexpr double kFlopsOfPeak = 790e12, kBytesOfPeak = 4.3e12;

// `count` sequences of `cached` + `fresh` tokens.
struct World {
  World(CudaBench& bench, int64_t count, int64_t cached, int64_t fresh, int64_t pool = 1) {
    const int64_t rows = count * fresh, pages = ((cached + fresh) / pool + kPageRows - 1) / kPageRows;
    begins.resize(static_cast<size_t>(count) + 1);
    for (size_t b = 0; b < begins.size(); ++b)
      begins[b] = static_cast<int32_t>(static_cast<int64_t>(b) * fresh);
    caches.assign(static_cast<size_t>(count), static_cast<int32_t>(cached));
    // Pages of a sequence lie anywhere.
    table.resize(static_cast<size_t>(count * pages));
    for (int64_t i = 0; i < count * pages; ++i) {
      int64_t step = 7919;
      while (std::gcd(step, count * pages) != 1) ++step;
      table[static_cast<size_t>(i)] = static_cast<int32_t>(i * step % (count * pages));
    }
    const auto on_host = [](std::vector<int32_t>& values) {
      return Tensor(values.data(), DType::kI32, {static_cast<int64_t>(values.size())}, Device{});
    };
    sequences = {.row_begin = bench.upload(begins.data(), DType::kI32, {count + 1}),
                 .cached = bench.upload(caches.data(), DType::kI32, {count}),
                 .host_row_begin = on_host(begins),
                 .host_cached = on_host(caches)};
    q = bench.random(DType::kBf16, {rows, kHeads, kWidth});
    weights = bench.random(DType::kF32, {rows, kHeads});
    keys = {.pool = bench.random(DType::kBf16, {count * pages, kPageRows, kWidth}),
            .page_table = bench.upload(table.data(), DType::kI32, {count, pages})};
  }
  std::vector<int32_t> begins, caches, table;
  Sequences sequences;
  Tensor q, weights;
  PagedRows keys;
};

const float kScale = 1.0f / std::sqrt(static_cast<float>(kHeads * kWidth));

void print(const char* name, int64_t count, int64_t fresh, int64_t keys, double ms, double flops,
           double bytes) {
  const double floor = std::max(flops / kFlopsOfPeak, bytes / kBytesOfPeak) * 1e3;
  std::printf("%-22s %3lld x %5lld queries, %6lld keys  %8.4f ms %6.0f TFLOP/s %6.0f GB/s  %.2f x floor\n",
              name, static_cast<long long>(count), static_cast<long long>(fresh),
              static_cast<long long>(keys), ms, flops / ms * 1e-9, bytes / ms * 1e-6, ms / floor);
}

void select(CudaBench& bench, const char* name, int64_t count, int64_t longest, int64_t fresh,
            int64_t pool = 1) {
  const ArenaScope scope(bench.arena());
  const int64_t cached = longest - fresh, rows = count * fresh;
  const World world(bench, count, cached, fresh, pool);
  const IndexerSelect args{.q = world.q,
                           .weights = world.weights,
                           .keys = world.keys,
                           .sequences = world.sequences,
                           .topk = kTopk,
                           .pool = pool,
                           .tail = pool > 1,
                           .key_scale = kScale,
                           .indices = bench.arena().alloc(DType::kI32, {rows, kTopk + pool}),
                           .counts = bench.arena().alloc(DType::kI32, {rows})};
  double pairs = 0;
  for (int64_t t = cached; t < longest; ++t) pairs += static_cast<double>((t + 1) / pool);
  const double ms = bench.milliseconds([&](int) { launch(args, bench.stream()); });
  print(name, count, fresh, longest, ms, 2.0 * static_cast<double>(count * kHeads * kWidth) * pairs,
        static_cast<double>(count * (longest / pool) * kWidth * 2));
}

void given(CudaBench& bench, int64_t tokens, bool backward) {
  const ArenaScope scope(bench.arena());
  const World world(bench, 1, 0, tokens);
  std::vector<int32_t> rows(static_cast<size_t>(tokens * kTopk), -1);
  double pairs = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t asked = std::min(t + 1, kTopk);
    pairs += static_cast<double>(asked);
    for (int64_t i = 0; i < asked; ++i)
      rows[static_cast<size_t>(t * kTopk + i)] = static_cast<int32_t>(i * (t + 1) / asked);
  }
  const Tensor asked = bench.upload(rows.data(), DType::kI32, {tokens, kTopk});
  const double flops = 2.0 * static_cast<double>(kHeads * kWidth) * pairs, bytes = pairs * kWidth * 2;
  if (!backward) {
    const IndexerScores args{.q = world.q,
                             .weights = world.weights,
                             .keys = world.keys,
                             .sequences = world.sequences,
                             .key_scale = kScale,
                             .rows = asked,
                             .scores = bench.arena().alloc(DType::kF32, {tokens, kTopk})};
    print("given rows", 1, tokens, tokens, bench.milliseconds([&](int) { launch(args, bench.stream()); }),
          flops, bytes);
    return;
  }
  const IndexerScoresBackward args{.q = world.q,
                                   .weights = world.weights,
                                   .keys = world.keys,
                                   .sequences = world.sequences,
                                   .key_scale = kScale,
                                   .rows = asked,
                                   .dscores = bench.random(DType::kF32, {tokens, kTopk}),
                                   .dq = bench.arena().alloc(DType::kBf16, {tokens, kHeads, kWidth}),
                                   .dweights = bench.arena().alloc(DType::kF32, {tokens, kHeads}),
                                   .dkeys = bench.arena().alloc(DType::kBf16, {tokens, kWidth})};
  print("given rows, backward", 1, tokens, tokens,
        bench.milliseconds([&](int) { launch(args, bench.stream()); }, 1), 3.0 * flops, bytes);
}

CUDA_BENCH(indexer) {
  for (const int64_t longest : {8192, 32768, 131072}) select(bench, "prefill", 1, longest, 2048);
  select(bench, "prefill", 1, 16384, 16384);
  select(bench, "prefill, pools of 4", 1, 131072, 2048, 4);
  select(bench, "prefill", 1, 131072, 1024);
  select(bench, "prefill", 1, 1 << 20, 1024);
  select(bench, "decode", 64, 65536, 1);
  select(bench, "decode", 64, 8192, 1);
  select(bench, "decode", 1, 131072, 1);
  select(bench, "decode, 2 a sequence", 64, 65536, 2);
  given(bench, 4096, false);
  given(bench, 4096, true);
}

}  // namespace
}  // namespace slipstream::kernels
