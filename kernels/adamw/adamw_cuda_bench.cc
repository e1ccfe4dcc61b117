// 30 bytes a value (gradient read; moments and master read and written; bf16 written) at 4.3 TB/s are the
// floor; 4 of the squares.
#include <cstdio>

#include "kernels/adamw/adamw.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

CUDA_BENCH(adamw) {
  for (const int64_t n : {int64_t{1} << 20, int64_t{1} << 24, int64_t{1} << 30}) {
    const ArenaScope scope(bench.arena());
    const Tensor gradient = bench.random(DType::kF32, {n}), first = bench.random(DType::kF32, {n}),
                 second = bench.random(DType::kF32, {n}, 0.0f, 1.0f), master = bench.random(DType::kF32, {n}),
                 rounded = bench.arena().alloc(DType::kBf16, {n});
    const Tensor nonfinite = bench.arena().zeros(DType::kI32, {1}, bench.stream()),
                 sum = bench.arena().zeros(DType::kI32, {2}, bench.stream());
    const auto report = [&](const char* name, int64_t bytes, double ms) {
      const double floor = static_cast<double>(bytes * n) / 4.3e9;
      std::printf("%-14s %10lld values  %8.4f ms  floor %8.4f ms  %3.0f %% of it\n", name, static_cast<long long>(n), ms,
                  floor, 100.0 * floor / ms);
    };
    report("update", 30, bench.milliseconds([&](int) {
      launch(AdamWStep{.gradient = gradient, .first = first, .second = second, .master = master, .rounded = rounded,
                       .nonfinite = nonfinite, .beta1 = 0.9f, .beta2 = 0.95f, .rate = 1e-3f, .correct2 = 1.7f, .eps = 1e-8f,
                       .decay = 0.999f, .scale = 0.3f},
             bench.stream());
    }));
    report("squares", 4, bench.milliseconds([&](int) { launch(SumSquares{.x = gradient, .sum = sum}, bench.stream()); }));
  }
}

}  // namespace
}  // namespace slipstream::kernels
