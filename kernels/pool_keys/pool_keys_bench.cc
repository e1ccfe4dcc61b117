// PoolKeys: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/pool_keys/pool_keys.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

// One sequence of new tokens, pools of four, Di channels.
void pool_keys(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), width = state.range(1), pages = tokens / 4 / kPageRows + 1;
  const PoolKeys args{.k = pool.random(DType::kF32, {tokens, width}),
                      .gate = pool.random(DType::kF32, {tokens, width}),
                      .ape = pool.random(DType::kF32, {4, width}),
                      .sequences = testing::even_sequences(pool, 1, {0, tokens}),
                      .open = pool.zeros(DType::kF32, {1, 4, 2, width}),
                      .slots = pool.ints({1}, {0}),
                      .pooled = {.pool = pool.zeros(DType::kF32, {pages, kPageRows, width}),
                                 .page_table = testing::pages_in_turn(pool, 1, pages)}};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.k.bytes() + args.gate.bytes() + args.k.bytes() / 4);
}
BENCHMARK(pool_keys)->Args({1, 128})->Args({2048, 64})->Args({2048, 128})->UseRealTime();

void pool_keys_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), width = state.range(1);
  const PoolKeysBackward args{.k = pool.random(DType::kF32, {tokens, width}),
                              .gate = pool.random(DType::kF32, {tokens, width}),
                              .ape = pool.random(DType::kF32, {4, width}),
                              .sequences = testing::even_sequences(pool, 1, {0, tokens}),
                              .dpooled = pool.random(DType::kF32, {tokens / 4, width}),
                              .dk = pool.output(DType::kF32, {tokens, width}),
                              .dgate = pool.output(DType::kF32, {tokens, width}),
                              .dape = pool.zeros(DType::kF32, {4, width})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 4 * args.k.bytes() + args.k.bytes() / 4);
}
BENCHMARK(pool_keys_backward)->Args({2048, 128})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
