// ShortConv: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/short_conv/short_conv.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

using testing::even_sequences;

void short_conv(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t count = state.range(0), rows = state.range(1), channels = state.range(2);
  const Tensor slots = pool.zeros(DType::kI32, {count});
  for (int64_t b = 0; b < count; ++b) slots.i32()[b] = static_cast<int32_t>(b);
  const ShortConv args{.x = pool.random(DType::kF32, {count * rows, channels}),
                       .w = pool.random(DType::kF32, {channels, 4}),
                       .sequences = even_sequences(pool, count, {0, rows}),
                       .tail = pool.zeros(DType::kF32, {count, 3, channels}),
                       .slots = slots,
                       .y = pool.output(DType::kF32, {count * rows, channels})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + args.y.bytes());
}
BENCHMARK(short_conv)->Args({1, 2048, 1536})->Args({16, 1, 1536})->Args({1, 1, 1536})->UseRealTime();

void short_conv_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t rows = state.range(0), channels = state.range(1);
  const ShortConvBackward args{.x = pool.random(DType::kF32, {rows, channels}),
                               .w = pool.random(DType::kF32, {channels, 4}),
                               .sequences = even_sequences(pool, 1, {0, rows}),
                               .dy = pool.random(DType::kF32, {rows, channels}),
                               .dx = pool.output(DType::kF32, {rows, channels}),
                               .dw = pool.zeros(DType::kF32, {channels, 4})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.x.bytes() + args.dy.bytes() + args.dx.bytes());
}
BENCHMARK(short_conv_backward)->Args({2048, 1536})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
