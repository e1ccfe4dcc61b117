// Tokens to experts and back: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/moe_dispatch/moe_dispatch.h"

#include <vector>

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void gather_and_combine(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), k = 4, experts = 16, hidden = 1024;
  std::vector<int32_t> chosen;
  for (int64_t i = 0; i < tokens * k; ++i) chosen.push_back(static_cast<int32_t>((i / k * 5 + i % k * 3) % experts));
  const MoePlan plan{.experts = pool.ints({tokens, k}, chosen), .row_begin = pool.output(DType::kI32, {experts + 1}),
                     .slot_row = pool.output(DType::kI32, {tokens, k}), .row_token = pool.output(DType::kI32, {tokens * k})};
  const MoeGather gather{.x = pool.random(DType::kF32, {tokens, hidden}), .row_token = plan.row_token,
                         .rows = pool.output(DType::kF32, {tokens * k, hidden})};
  const MoeCombine combine{.rows = gather.rows, .weights = pool.random(DType::kF32, {tokens, k}),
                           .slot_row = plan.slot_row, .y = pool.zeros(DType::kF32, {tokens, hidden})};
  for (auto _ : state) {
    launch(plan, testing::bench_stream());
    launch(gather, testing::bench_stream());
    launch(combine, testing::bench_stream());
  }
  testing::report_bytes(state, 3 * gather.rows.bytes() + 2 * combine.y.bytes());
}
BENCHMARK(gather_and_combine)->Arg(16)->Arg(2048)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
