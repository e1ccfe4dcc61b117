// logprob_cuda_bench: log-probs of a head, and their gradients down to the hidden states and the head's weights: fused into
// the product, beside a Gemm into stored f32 logits and LogProb, 512 rows at a time. Floor: the products at 790 TFLOP/s.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "kernels/gemm/gemm.h"
#include "kernels/logprob/logprob.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr int64_t kStoredRows = 512;
constexpr double kFlopsPerMillisecond = 790e9;

void report(const char* name, int64_t rows, double products, int64_t vocab, int64_t width, double ms) {
  const double floor = products * 2.0 * static_cast<double>(rows) * static_cast<double>(vocab) *
                       static_cast<double>(width) / kFlopsPerMillisecond;
  std::printf("%-28s %5lld x %6lld x %4lld  %8.3f ms  floor %7.3f ms  %4.0f %% of it\n", name,
              static_cast<long long>(rows), static_cast<long long>(vocab), static_cast<long long>(width), ms, floor,
              100.0 * floor / ms);
}

void run(CudaBench& bench, int64_t rows, int64_t vocab, int64_t width) {
  const ArenaScope scope(bench.arena());
  Stream& stream = bench.stream();
  const Tensor hidden = bench.random(DType::kBf16, {rows, width});
  const Tensor weight = bench.random(DType::kBf16, {vocab, width}, -0.05f, 0.05f);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < rows; ++t) ids.push_back(static_cast<int32_t>(t * 7919 % vocab));
  const Tensor targets = bench.upload(ids.data(), DType::kI32, {rows});
  const auto column = [&] { return bench.random(DType::kF32, {rows}, 0.1f, 1.0f); };
  const Tensor logprob = column(), lse = column(), entropy = column(), dlogprob = column(), dentropy = column();
  const Tensor dlogits = bench.arena().alloc(DType::kBf16, {rows, vocab});
  const Tensor dhidden = bench.arena().alloc(DType::kBf16, {rows, width});
  const Tensor dweight = bench.arena().zeros(DType::kF32, {vocab, width}, stream);
  const int64_t held = std::min(kStoredRows, rows);
  const Tensor logits = bench.arena().alloc(DType::kF32, {held, vocab});

  const auto fused = [&](int) {
    launch(HeadLogProb{.hidden = hidden, .weight = weight, .targets = targets, .logprob = logprob, .lse = lse,
                       .entropy = entropy},
           stream);
  };
  const auto products_of = [&](const Tensor& gradient, const Tensor& part, const Tensor& dpart) {
    launch(Gemm{.a = gradient, .b = part, .c = dweight, .bias = {}, .transpose_a = true, .accumulate = true}, stream);
    launch(Gemm{.a = gradient, .b = weight, .c = dpart, .bias = {}}, stream);
  };
  const auto fused_gradient = [&](int) {
    launch(HeadLogProbBackward{.hidden = hidden, .weight = weight, .targets = targets, .lse = lse,
                               .dlogprob = dlogprob, .entropy = entropy, .dentropy = dentropy, .dlogits = dlogits},
           stream);
  };
  const auto by_rows = [&](auto&& f) {
    for (int64_t begin = 0; begin < rows; begin += held) {
      const int64_t end = std::min(begin + held, rows);
      const Tensor part = hidden.slice(0, begin, end), stored = logits.slice(0, 0, end - begin);
      launch(Gemm{.a = part, .b = weight, .c = stored, .bias = {}, .transpose_b = true}, stream);
      f(begin, end, part, stored);
    }
  };
  const auto stored = [&](int) {
    by_rows([&](int64_t begin, int64_t end, const Tensor&, const Tensor& z) {
      launch(LogProb{.logits = z, .targets = targets.slice(0, begin, end), .logprob = logprob.slice(0, begin, end),
                     .lse = lse.slice(0, begin, end), .entropy = entropy.slice(0, begin, end)},
             stream);
    });
  };
  const auto stored_gradient = [&](int) {
    by_rows([&](int64_t begin, int64_t end, const Tensor& part, const Tensor& z) {
      const Tensor gradient = dlogits.slice(0, 0, end - begin);
      launch(LogProbBackward{.logits = z, .targets = targets.slice(0, begin, end), .lse = lse.slice(0, begin, end),
                             .dlogprob = dlogprob.slice(0, begin, end), .entropy = entropy.slice(0, begin, end),
                             .dentropy = dentropy.slice(0, begin, end), .dlogits = gradient},
             stream);
      products_of(gradient, part, dhidden.slice(0, begin, end));
    });
  };
  const auto product = [&](int) { by_rows([](int64_t, int64_t, const Tensor&, const Tensor&) {}); };
  for (int round = 0; round < 2; ++round) {
    report("product, f32 logits stored", rows, 1, vocab, width, bench.milliseconds(product, 5));
    report("log-probs, stored", rows, 1, vocab, width, bench.milliseconds(stored, 5));
    report("log-probs, fused", rows, 1, vocab, width, bench.milliseconds(fused, 5));
    report("gradient of logits, fused", rows, 1, vocab, width, bench.milliseconds(fused_gradient, 5));
    report("all gradients, stored", rows, 3, vocab, width, bench.milliseconds(stored_gradient, 4));
    report("all gradients, fused", rows, 3, vocab, width, bench.milliseconds(
                                                              [&](int i) {
                                                                fused_gradient(i);
                                                                products_of(dlogits, hidden, dhidden);
                                                              },
                                                              4));
  }
}

CUDA_BENCH(logprob) {
  run(bench, 4096, 154880, 6144);
  run(bench, 256, 154880, 6144);
}

}  // namespace
}  // namespace slipstream::kernels
