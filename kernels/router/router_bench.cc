// Router: bytes of logits read and of choices written a second, against the machine's copy rate.
#include "kernels/router/router.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kSlots = 8;

void router(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), experts = state.range(1), groups = state.range(2);
  const Router args{.logits = pool.random(DType::kF32, {tokens, experts}, -3.0f, 3.0f),
                    .bias = pool.random(DType::kF32, {experts}, -0.1f, 0.1f),
                    .experts = pool.output(DType::kI32, {tokens, kSlots}),
                    .weights = pool.output(DType::kF32, {tokens, kSlots}),
                    .groups = groups,
                    .groups_kept = (groups + 1) / 2};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.logits.bytes() + args.experts.bytes() + args.weights.bytes());
}
BENCHMARK(router)
    ->Args({16, 64, 1})
    ->Args({4096, 64, 1})
    ->Args({4096, 288, 1})
    ->Args({4096, 256, 8})
    ->UseRealTime();

void router_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), experts = state.range(1);
  const RouterBackward args{.logits = pool.random(DType::kF32, {tokens, experts}, -3.0f, 3.0f),
                            .experts = pool.random_ints({tokens, kSlots}, 0, static_cast<int32_t>(experts)),
                            .dweights = pool.random(DType::kF32, {tokens, kSlots}),
                            .dlogits = pool.output(DType::kF32, {tokens, experts})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.dlogits.bytes() + args.experts.bytes() + args.dweights.bytes());
}
BENCHMARK(router_backward)->Args({4096, 64})->Args({4096, 288})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
