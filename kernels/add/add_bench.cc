// Add and ColumnSum: bytes read and written a second, against the machine's copy rate
// (kernels/testing/bench.h).
#include "kernels/add/add.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void add(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const Add args{.a = pool.random(DType::kF32, {tokens, hidden}), .b = pool.random(DType::kF32, {tokens, hidden}),
                 .y = pool.output(DType::kF32, {tokens, hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.y.bytes());
}
BENCHMARK(add)->Args({16, 1024})->Args({4096, 1024})->UseRealTime();

void column_sum(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), hidden = state.range(1);
  const ColumnSum args{.x = pool.random(DType::kF32, {tokens, hidden}),
                       .y = pool.zeros(DType::kF32, {hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes());
}
BENCHMARK(column_sum)->Args({4096, 1024})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
