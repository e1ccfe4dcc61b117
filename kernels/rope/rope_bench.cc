// RoPE, in place, and its table: bytes read and written a second, against the machine's copy rate
// (kernels/testing/bench.h).
#include "kernels/rope/rope.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void rope(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), heads = state.range(1);
  const Rope args{.x = pool.random(DType::kF32, {tokens, heads, 64}), .cos = pool.random(DType::kF32, {tokens, 32}),
                  .sin = pool.random(DType::kF32, {tokens, 32}),
                  .layout = state.range(2) != 0 ? RopeLayout::kHalfSplit : RopeLayout::kInterleaved};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 2 * args.x.bytes());
}
BENCHMARK(rope)->ArgsProduct({{16, 4096}, {16}, {0, 1}})->UseRealTime();

void rope_table(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0);
  const RopeTable args{.positions = pool.random_ints({tokens}, 0, 1 << 20),
                       .cos = pool.output(DType::kF32, {tokens, 32}),
                       .sin = pool.output(DType::kF32, {tokens, 32}),
                       .theta = 8e6};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.cos.bytes() + args.sin.bytes());
}
BENCHMARK(rope_table)->Arg(16)->Arg(4096)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
