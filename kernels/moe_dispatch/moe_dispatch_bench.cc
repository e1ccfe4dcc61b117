// Tokens to experts and back: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/moe_dispatch/moe_dispatch.h"

#include <vector>

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kSlots = 4, kExperts = 16, kHidden = 1024;

// Every token to four of sixteen experts, evenly.
MoePlan make_plan(testing::TensorPool& pool, int64_t tokens) {
  std::vector<int32_t> chosen;
  for (int64_t i = 0; i < tokens * kSlots; ++i) {
    chosen.push_back(static_cast<int32_t>((i / kSlots * 5 + i % kSlots * 3) % kExperts));
  }
  return {.experts = pool.ints({tokens, kSlots}, chosen),
          .row_begin = pool.output(DType::kI32, {kExperts + 1}),
          .slot_row = pool.output(DType::kI32, {tokens, kSlots}),
          .row_token = pool.output(DType::kI32, {tokens * kSlots})};
}

void gather_and_combine(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0);
  const MoePlan plan = make_plan(pool, tokens);
  const MoeGather gather{.x = pool.random(DType::kF32, {tokens, kHidden}),
                         .row_token = plan.row_token,
                         .rows = pool.output(DType::kF32, {tokens * kSlots, kHidden})};
  const MoeCombine combine{.rows = gather.rows,
                           .weights = pool.random(DType::kF32, {tokens, kSlots}),
                           .slot_row = plan.slot_row,
                           .y = pool.zeros(DType::kF32, {tokens, kHidden})};
  for (auto _ : state) {
    launch(plan, testing::bench_stream());
    launch(gather, testing::bench_stream());
    launch(combine, testing::bench_stream());
  }
  testing::report_bytes(state, 3 * gather.rows.bytes() + 2 * combine.y.bytes());
}
BENCHMARK(gather_and_combine)->Arg(16)->Arg(2048)->UseRealTime();

void combine_and_gather_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0);
  const MoePlan plan = make_plan(pool, tokens);
  launch(plan, testing::bench_stream());
  const MoeCombineBackward combine{.rows = pool.random(DType::kF32, {tokens * kSlots, kHidden}),
                                   .weights = pool.random(DType::kF32, {tokens, kSlots}),
                                   .slot_row = plan.slot_row,
                                   .dy = pool.random(DType::kF32, {tokens, kHidden}),
                                   .drows = pool.output(DType::kF32, {tokens * kSlots, kHidden}),
                                   .dweights = pool.output(DType::kF32, {tokens, kSlots})};
  const MoeGatherBackward gather{
      .drows = combine.drows, .slot_row = plan.slot_row, .dx = pool.zeros(DType::kF32, {tokens, kHidden})};
  for (auto _ : state) {
    launch(combine, testing::bench_stream());
    launch(gather, testing::bench_stream());
  }
  testing::report_bytes(state, 3 * combine.rows.bytes() + 3 * combine.dy.bytes());
}
BENCHMARK(combine_and_gather_backward)->Arg(2048)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
