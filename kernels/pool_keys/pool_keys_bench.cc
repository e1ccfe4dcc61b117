// PoolKeys: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include <numeric>
#include <vector>

#include "kernels/pool_keys/pool_keys.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

// One sequence of new tokens, pools of four, Di channels.
void pool_keys(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), width = state.range(1), pages = tokens / 4 / kPageRows + 1;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.begin(), table.end(), 0);
  const PoolKeys args{.k = pool.random(DType::kF32, {tokens, width}),
                      .gate = pool.random(DType::kF32, {tokens, width}),
                      .ape = pool.random(DType::kF32, {4, width}),
                      .sequences = {.row_begin = pool.ints({2}, {0, static_cast<int32_t>(tokens)}),
                                    .cached = pool.ints({1}, {0})},
                      .open = pool.zeros(DType::kF32, {1, 4, 2, width}),
                      .slots = pool.ints({1}, {0}),
                      .pooled = {.pool = pool.zeros(DType::kF32, {pages, kPageRows, width}),
                                 .page_table = pool.ints({1, pages}, table)}};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.k.bytes() + args.gate.bytes() + args.k.bytes() / 4);
}
BENCHMARK(pool_keys)->Args({1, 128})->Args({2048, 64})->Args({2048, 128})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
