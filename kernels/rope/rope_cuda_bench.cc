// The last 64 of 256 columns of 64 heads turned, bf16, interleaved and in halves, as GLM-5's queries and its indexer's are.
#include "kernels/rope/rope.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void run(testing::CudaBench& bench, int64_t tokens, RopeLayout layout) {
  const ArenaScope scope(bench.arena());
  const int64_t heads = 64, width = 64;
  const Tensor x = bench.random(DType::kBf16, {tokens, heads, 256}).slice(2, 192, 256);
  const Tensor cos = bench.random(DType::kF32, {tokens, width / 2}), sin = bench.random(DType::kF32, {tokens, width / 2});
  bench.memory_row(layout == RopeLayout::kInterleaved ? "interleaved" : "halves", tokens, 4 * tokens * heads * width, [&](int) {
    launch(Rope{.x = x, .cos = cos, .sin = sin, .layout = layout}, bench.stream());
  });
}

CUDA_BENCH(rope) {
  for (const int64_t tokens : {1, 128, 8192}) {
    for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) run(bench, tokens, layout);
  }
}

}  // namespace
}  // namespace slipstream::kernels
