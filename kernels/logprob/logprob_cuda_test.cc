// Goal: on CUDA launch() is reference() within tolerance, forward and backward; masked rows are not read; a broken row breaks no
// other; a row ignores its neighbours, bit for bit.
#include "kernels/logprob/logprob.h"

#include <cmath>
#include <limits>

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class LogProbCudaTest : public testing::CudaTest,
                        public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t, float>> {};

TEST_P(LogProbCudaTest, EqualsReference) {
  const auto [dtype, tokens, vocab, temperature] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const Tensor logits = host.random(kF32, {tokens, vocab}, -6.0f, 6.0f);
  const Tensor targets = host.random_ints({tokens}, -1, static_cast<int32_t>(vocab));
  const LogProb args{.logits = device.copy(logits), .targets = device.copy(targets),
                     .logprob = device.output(kF32, {tokens}), .lse = device.output(kF32, {tokens}),
                     .entropy = device.output(kF32, {tokens}), .temperature = temperature};
  const LogProb expected{.logits = logits, .targets = targets, .logprob = host.output(kF32, {tokens}),
                         .lse = host.output(kF32, {tokens}), .entropy = host.output(kF32, {tokens}),
                         .temperature = temperature};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.logprob, expected.logprob);
  expect_close(args.lse, expected.lse);
  expect_close(args.entropy, expected.entropy, 4.0f);
  for (int64_t t = 0; t < std::min<int64_t>(tokens, 3); ++t) {
    const LogProb alone{.logits = args.logits.slice(0, t, t + 1), .targets = args.targets.slice(0, t, t + 1),
                        .logprob = device.output(kF32, {1}), .lse = device.output(kF32, {1}), .entropy = {},
                        .temperature = temperature};
    launch(alone, cuda_stream());
    testing::expect_same_bits_on_device(alone.logprob, args.logprob.slice(0, t, t + 1));
    testing::expect_same_bits_on_device(alone.lse, args.lse.slice(0, t, t + 1));
  }

  const Tensor dlogprob = host.random(kF32, {tokens}), dentropy = host.random(kF32, {tokens});
  if (tokens > 1) dlogprob.f32()[1] = dentropy.f32()[1] = 0.0f;
  const LogProbBackward backward{.logits = args.logits, .targets = args.targets, .lse = device.copy(expected.lse),
                                 .dlogprob = device.copy(dlogprob), .entropy = device.copy(expected.entropy),
                                 .dentropy = device.copy(dentropy), .dlogits = device.output(dtype, {tokens, vocab}),
                                 .temperature = temperature};
  const LogProbBackward expected_backward{.logits = logits, .targets = targets, .lse = expected.lse,
                                          .dlogprob = dlogprob, .entropy = expected.entropy, .dentropy = dentropy,
                                          .dlogits = host.output(kF32, {tokens, vocab}), .temperature = temperature};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dlogits, expected_backward.dlogits, 4.0f);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LogProbCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 9),
                                            ::testing::Values(1, 97, 5000, 154880), ::testing::Values(1.0f, 0.7f)));

using LogProbRowsCudaTest = testing::CudaTest;

TEST_F(LogProbRowsCudaTest, ABrokenRowBreaksNoOther) {
  TensorPool host(2);
  CudaPool device;
  const int64_t vocab = 700;
  const Tensor logits = host.random(kF32, {4, vocab}), targets = host.ints({4}, {3, 3, 3, 3});
  logits.row(0)[5] = std::numeric_limits<float>::quiet_NaN();
  logits.row(1)[5] = std::numeric_limits<float>::infinity();
  for (int64_t i = 0; i < vocab; ++i) logits.row(2)[i] = -std::numeric_limits<float>::infinity();
  logits.row(3)[6] = -std::numeric_limits<float>::infinity();
  const LogProb args{.logits = device.copy(logits), .targets = device.copy(targets), .logprob = device.output(kF32, {4}),
                     .lse = device.output(kF32, {4}), .entropy = device.output(kF32, {4})};
  launch(args, cuda_stream());
  const Tensor logprob = testing::on_host(host, args.logprob), entropy = testing::on_host(host, args.entropy);
  for (int64_t t = 0; t < 3; ++t) EXPECT_FALSE(std::isfinite(logprob.f32()[t])) << t;
  EXPECT_TRUE(std::isfinite(logprob.f32()[3]));
  EXPECT_TRUE(std::isfinite(entropy.f32()[3]));
}

}  // namespace
}  // namespace slipstream::kernels
