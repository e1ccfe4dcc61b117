// Goal: on CUDA the tokens drawn are those of reference(), its log-probs have LogProb's bits, ties and broken rows are its own; a
// row ignores its neighbours.
#include "kernels/sampling/sampling.h"

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/logprob/logprob.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32;

struct Drawn {
  Tensor tokens, logprob, truncated;
};

Drawn outputs(const auto& make, int64_t rows) {
  return {make(DType::kI32, rows), make(kF32, rows), make(DType::kI32, rows)};
}

class SamplingCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<int64_t> {};

TEST_P(SamplingCudaTest, EqualsReference) {
  const int64_t vocab = GetParam(), count = 48;
  TensorPool host(1);
  CudaPool device;
  const Tensor logits = host.random(kF32, {count, vocab}, -5.0f, 5.0f);
  for (int64_t i = 0; i < logits.numel(); i += 3) logits.f32()[i] = std::round(logits.f32()[i]);  // ties
  std::vector<SamplingRow> rows;
  for (int64_t t = 0; t < count; ++t) {
    const float temperatures[] = {1.0f, 0.0f, 0.6f, 1.7f};
    const int32_t top_ks[] = {0, 1, 5, 40};
    rows.push_back({.temperature = temperatures[t % 4], .top_k = top_ks[t / 4 % 4], .top_p = t % 3 == 0 ? 0.8f : 1.0f,
                    .min_p = t % 5 == 0 ? 0.05f : 0.0f, .seed = 7, .counter = static_cast<uint64_t>(t)});
  }
  const Drawn made = outputs([&](DType dtype, int64_t n) { return device.output(dtype, {n}); }, count);
  const Drawn expected = outputs([&](DType dtype, int64_t n) { return host.output(dtype, {n}); }, count);
  const Tensor on_device = device.copy(logits);
  launch(Sampling{.logits = on_device, .rows = rows.data(), .tokens = made.tokens, .logprob = made.logprob,
                  .truncated = made.truncated},
         cuda_stream());
  reference(Sampling{.logits = logits, .rows = rows.data(), .tokens = expected.tokens, .logprob = expected.logprob,
                     .truncated = expected.truncated});
  expect_close(made.tokens, expected.tokens);
  expect_close(made.truncated, expected.truncated);
  expect_close(made.logprob, expected.logprob);
  for (int64_t t = 0; t < count; t += 7) {
    const Drawn alone = outputs([&](DType dtype, int64_t n) { return device.output(dtype, {n}); }, 1);
    launch(Sampling{.logits = on_device.slice(0, t, t + 1), .rows = &rows[static_cast<size_t>(t)],
                    .tokens = alone.tokens, .logprob = alone.logprob, .truncated = alone.truncated},
           cuda_stream());
    testing::expect_same_bits_on_device(alone.tokens, made.tokens.slice(0, t, t + 1));
    const float temperature = rows[static_cast<size_t>(t)].temperature;
    const LogProb again{.logits = on_device.slice(0, t, t + 1), .targets = alone.tokens,
                        .logprob = device.output(kF32, {1}), .lse = device.output(kF32, {1}), .entropy = {},
                        .temperature = temperature == 0.0f ? 1.0f : temperature};
    launch(again, cuda_stream());
    testing::expect_same_bits_on_device(again.logprob, alone.logprob);
  }
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Vocabularies, SamplingCudaTest, ::testing::Values(1, 97, 513, 154880));

using SamplingRowsCudaTest = testing::CudaTest;

TEST_F(SamplingRowsCudaTest, BrokenRowsGiveNoToken) {
  TensorPool host(2);
  CudaPool device;
  const Tensor logits = host.random(kF32, {3, 50});
  logits.row(0)[5] = std::numeric_limits<float>::quiet_NaN();
  logits.row(1)[5] = std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < 50; ++i) logits.row(2)[i] = -std::numeric_limits<float>::infinity();
  const std::vector<SamplingRow> rows(3);
  const Drawn made = outputs([&](DType dtype, int64_t n) { return device.output(dtype, {n}); }, 3);
  launch(Sampling{.logits = device.copy(logits), .rows = rows.data(), .tokens = made.tokens, .logprob = made.logprob,
                  .truncated = made.truncated},
         cuda_stream());
  const Tensor tokens = testing::on_host(host, made.tokens), logprob = testing::on_host(host, made.logprob);
  for (int64_t t = 0; t < 3; ++t) {
    EXPECT_EQ(tokens.i32()[t], -1);
    EXPECT_TRUE(std::isnan(logprob.f32()[t]));
  }
}

// Equal logits overflow what a filter collects, and the largest vocabulary what a block keeps.
TEST_F(SamplingRowsCudaTest, EqualLogitsRankById) {
  for (const int64_t vocab : {int64_t{300}, int64_t{154880}, int64_t{1} << 19}) {
    TensorPool host(3);
    CudaPool device;
    const int64_t count = 5;
    const Tensor logits = host.output(kF32, {count, vocab});
    for (int64_t i = 0; i < logits.numel(); ++i) logits.f32()[i] = i % 3 == 0 ? 2.0f : 1.9f;
    const int32_t third = static_cast<int32_t>(vocab / 3);
    std::vector<SamplingRow> rows = {{.top_k = 7}, {.top_p = 0.1f}, {.top_k = third, .top_p = 0.5f}, {.top_k = third + 50}, {}};
    for (size_t t = 0; t < rows.size(); ++t) rows[t].seed = 11 + t;
    const Drawn made = outputs([&](DType dtype, int64_t n) { return device.output(dtype, {n}); }, count);
    const Drawn expected = outputs([&](DType dtype, int64_t n) { return host.output(dtype, {n}); }, count);
    launch(Sampling{.logits = device.copy(logits), .rows = rows.data(), .tokens = made.tokens, .logprob = made.logprob,
                    .truncated = made.truncated},
           cuda_stream());
    reference(Sampling{.logits = logits, .rows = rows.data(), .tokens = expected.tokens, .logprob = expected.logprob,
                       .truncated = expected.truncated});
    expect_close(made.tokens, expected.tokens);
    expect_close(made.truncated, expected.truncated);
    expect_close(made.logprob, expected.logprob);
    device.expect_fences_intact();
  }
}

}  // namespace
}  // namespace slipstream::kernels
