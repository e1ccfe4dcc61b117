// Rows to eight of 288 experts and back, 4096 wide in bf16, as in GLM-5.3-Flash. The floor of the gather counts the tokens' rows
// once, not once an expert.
#include "kernels/moe_dispatch/moe_dispatch.h"

#include <vector>

#include "common/hash.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kExperts = 288, kSlots = 8, kWidth = 4096;

void run(testing::CudaBench& bench, int64_t tokens) {
  const ArenaScope scope(bench.arena());
  std::vector<int32_t> chosen(static_cast<size_t>(tokens * kSlots));
  for (size_t i = 0; i < chosen.size(); ++i) {  // eight that differ: one of each eighth
    chosen[i] = static_cast<int32_t>(splitmix64(i) % (kExperts / kSlots) * kSlots + i % kSlots);
  }
  const int64_t count = tokens * kSlots;
  const MoePlan plan{.experts = bench.upload(chosen.data(), DType::kI32, {tokens, kSlots}),
                     .row_begin = bench.arena().alloc(DType::kI32, {kExperts + 1}),
                     .slot_row = bench.arena().alloc(DType::kI32, {tokens, kSlots}),
                     .row_token = bench.arena().alloc(DType::kI32, {count})};
  const Tensor x = bench.random(DType::kBf16, {tokens, kWidth}), rows = bench.random(DType::kBf16, {count, kWidth});
  const Tensor weights = bench.random(DType::kF32, {tokens, kSlots});
  bench.memory_row("plan", tokens, 4 * count * 4, [&](int) { launch(plan, bench.stream()); });
  bench.memory_row("gather", tokens, x.bytes() + rows.bytes(), [&](int) {
    launch(MoeGather{.x = x, .row_token = plan.row_token, .rows = rows}, bench.stream());
  });
  bench.memory_row("combine", tokens, 2 * x.bytes() + rows.bytes(), [&](int) {
    launch(MoeCombine{.rows = rows, .weights = weights, .slot_row = plan.slot_row, .y = x}, bench.stream());
  });
  if (tokens <= 128) return;  // decode
  const Tensor drows = bench.random(DType::kBf16, {count, kWidth}), dweights = bench.random(DType::kF32, {tokens, kSlots});
  bench.memory_row("combine, backward", tokens, x.bytes() + 2 * rows.bytes(), [&](int) {
    launch(MoeCombineBackward{.rows = rows, .weights = weights, .slot_row = plan.slot_row, .dy = x, .drows = drows,
                              .dweights = dweights},
           bench.stream());
  });
}

CUDA_BENCH(moe_dispatch) {
  for (const int64_t tokens : {1, 128, 8192}) run(bench, tokens);
}

}  // namespace
}  // namespace slipstream::kernels
