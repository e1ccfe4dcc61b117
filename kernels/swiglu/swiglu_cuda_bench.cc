// SwiGLU in bf16: dense layers of GLM-5.3-Flash (12288 wide) and experts' rows (2048).
#include "kernels/swiglu/swiglu.h"

#include <string>

#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void run(testing::CudaBench& bench, int64_t tokens, int64_t width) {
  const ArenaScope scope(bench.arena());
  const auto rows = [&] { return bench.random(DType::kBf16, {tokens, width}, -3.0f, 3.0f); };
  const SwiGlu args{.gate = rows(), .up = rows(), .y = rows(), .limit = 7.0f};
  const std::string wide = std::to_string(width);
  bench.memory_row("forward, width " + wide, tokens, 3 * args.y.bytes(), [&](int) { launch(args, bench.stream()); });
  if (tokens <= 128) return;  // decode
  const SwiGluBackward backward{.gate = args.gate, .up = args.up, .dy = rows(), .dgate = args.y, .dup = rows(), .limit = 7.0f};
  bench.memory_row("backward, width " + wide, tokens, 5 * args.y.bytes(), [&](int) { launch(backward, bench.stream()); });
}

CUDA_BENCH(swiglu) {
  for (const int64_t tokens : {1, 128, 8192}) run(bench, tokens, 12288);
  for (const int64_t tokens : {8, 16384, 65536}) run(bench, tokens, 2048);
}

}  // namespace
}  // namespace slipstream::kernels
