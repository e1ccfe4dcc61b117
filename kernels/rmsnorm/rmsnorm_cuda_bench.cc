// RMSNorm in bf16.
#include <string>

#include "kernels/add/add.h"
#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void run(testing::CudaBench& bench, int64_t rows, int64_t width) {
  const ArenaScope scope(bench.arena());
  const Tensor x = bench.random(DType::kBf16, {rows, width}), dy = bench.random(DType::kBf16, {rows, width});
  const Tensor w = bench.random(DType::kF32, {width}), inv_rms = bench.random(DType::kF32, {rows}, 0.5f, 2.0f);
  const Tensor y = bench.arena().alloc(DType::kBf16, {rows, width}), sum = bench.arena().alloc(DType::kBf16, {rows, width});
  const Tensor dw = bench.random(DType::kF32, {width});
  const std::string wide = std::to_string(width);
  bench.memory_row("forward, width " + wide, rows, 2 * x.bytes(), [&](int) {
    launch(RmsNorm{.x = x, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, bench.stream());
  });
  bench.memory_row("with a residual's sum, width " + wide, rows, 4 * x.bytes(), [&](int) {
    launch(RmsNorm{.x = x, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f, .b = dy, .sum = sum}, bench.stream());
  });
  bench.memory_row("the same in two, width " + wide, rows, 4 * x.bytes(), [&](int) {
    launch(Add{.a = x, .b = dy, .y = sum}, bench.stream());
    launch(RmsNorm{.x = sum, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, bench.stream());
  });
  if (rows <= 128) return;  // decode
  bench.memory_row("backward, w frozen, width " + wide, rows, 3 * x.bytes(), [&](int) {
    launch(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = y, .dw = {}}, bench.stream());
  });
  bench.memory_row("backward, width " + wide, rows, 3 * x.bytes(), [&](int) {
    launch(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = y, .dw = dw}, bench.stream());
  });
}

CUDA_BENCH(rmsnorm) {
  for (const int64_t rows : {1, 128}) run(bench, rows, 4096);
  run(bench, 8192, 4096);
  run(bench, 16384, 6144);
  run(bench, 4096, 6144);
  run(bench, 16384, 2048);
  run(bench, 16384, 512);
}

}  // namespace
}  // namespace slipstream::kernels
