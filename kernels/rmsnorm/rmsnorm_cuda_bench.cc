// rmsnorm_cuda_bench: bytes read once and written once over 4.3 TB/s, the rate of a copy, are the floor.
#include <cstdio>

#include "kernels/rmsnorm/rmsnorm.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void report(const char* name, int64_t rows, int64_t width, int64_t bytes, double ms) {
  const double floor = static_cast<double>(bytes) / 4.3e9;
  std::printf("%-34s %6lld x %5lld  %7.4f ms  floor %7.4f ms  %3.0f %% of it\n", name, static_cast<long long>(rows),
              static_cast<long long>(width), ms, floor, 100.0 * floor / ms);
}

void run(testing::CudaBench& bench, int64_t rows, int64_t width) {
  const ArenaScope scope(bench.arena());
  const Tensor x = bench.random(DType::kBf16, {rows, width}), dy = bench.random(DType::kBf16, {rows, width});
  const Tensor w = bench.random(DType::kF32, {width}), inv_rms = bench.random(DType::kF32, {rows}, 0.5f, 2.0f);
  const Tensor y = bench.arena().alloc(DType::kBf16, {rows, width}), dw = bench.random(DType::kF32, {width});
  report("forward", rows, width, 2 * x.bytes(), bench.milliseconds([&](int) {
    launch(RmsNorm{.x = x, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, bench.stream());
  }));
  report("backward, w frozen", rows, width, 3 * x.bytes(), bench.milliseconds([&](int) {
    launch(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = y, .dw = {}}, bench.stream());
  }));
  report("backward", rows, width, 3 * x.bytes(), bench.milliseconds([&](int) {
    launch(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = y, .dw = dw}, bench.stream());
  }));
}

CUDA_BENCH(rmsnorm) {
  run(bench, 16384, 6144);
  run(bench, 4096, 6144);
  run(bench, 16384, 2048);
  run(bench, 16384, 512);
}

}  // namespace
}  // namespace slipstream::kernels
