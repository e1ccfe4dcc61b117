// sampling_cuda_bench: a token for each row. Floor: the logits once from memory at 4.3 TB/s; they stay in the L2 here.
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/hash.h"
#include "kernels/sampling/sampling.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

void measure(testing::CudaBench& bench, const char* name, const Tensor& logits, SamplingRow row) {
  const int64_t rows = logits.size(0);
  std::vector<SamplingRow> all(static_cast<size_t>(rows), row);
  for (size_t t = 0; t < all.size(); ++t) all[t].counter = t;
  const Tensor tokens = bench.arena().alloc(DType::kI32, {rows}), truncated = bench.arena().alloc(DType::kI32, {rows}),
               logprob = bench.arena().alloc(DType::kF32, {rows});
  const double ms = bench.milliseconds([&](int) {
    launch(Sampling{.logits = logits, .rows = all.data(), .tokens = tokens, .logprob = logprob, .truncated = truncated},
           bench.stream());
  });
  const double floor = static_cast<double>(logits.bytes()) / 4.3e9;
  std::printf("%-30s %3lld x %6lld  %7.4f ms  floor %7.4f ms\n", name, static_cast<long long>(rows),
              static_cast<long long>(logits.size(1)), ms, floor);
}

CUDA_BENCH(sampling) {
  for (const int64_t rows : {1, 16, 64, 256}) {
    const int64_t vocab = 154880;
    std::vector<float> normal(static_cast<size_t>(vocab * rows));  // standard deviation 2.5, as models' logits have about
    for (size_t i = 0; i < normal.size(); ++i) {
      const auto unit = [&](uint64_t of) { return (static_cast<double>(splitmix64(of) >> 11) + 0.5) * 0x1p-53; };
      normal[i] = static_cast<float>(2.5 * std::sqrt(-2.0 * std::log(unit(2 * i))) *
                                     std::cos(6.283185307179586 * unit(2 * i + 1)));
    }
    const Tensor logits = bench.upload(normal.data(), DType::kF32, {rows, vocab});
    const Tensor uniform = bench.random(DType::kF32, {rows, vocab}, -5.0f, 5.0f);
    measure(bench, "whole vocabulary", logits, {});
    measure(bench, "top-k 40", logits, {.top_k = 40});
    measure(bench, "top-p 0.95", logits, {.top_p = 0.95f});
    measure(bench, "top-k 50, top-p 0.9, min-p", logits, {.temperature = 0.8f, .top_k = 50, .top_p = 0.9f, .min_p = 0.02f});
    measure(bench, "flat, top-k 40 and top-p 0.8", uniform, {.top_k = 40, .top_p = 0.8f});
    measure(bench, "flat, top-p 0.8", uniform, {.top_p = 0.8f});
  }
}

}  // namespace
}  // namespace slipstream::kernels
