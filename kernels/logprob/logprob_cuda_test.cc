// Goal: on CUDA launch() is reference() within tolerance, forward and backward; masked rows are not read; a broken row breaks no
// other; a row ignores its neighbours, bit for bit; a head's log-probs have the bits of those of its stored logits.
#include "kernels/logprob/logprob.h"

#include <cmath>
#include <limits>

#include "kernels/gemm/gemm.h"
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

struct Head {
  int64_t tokens, vocab, width;
  float temperature;
};

class HeadLogProbCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<Head> {};

TEST_P(HeadLogProbCudaTest, IsLogProbOfStoredLogits) {
  const auto [tokens, vocab, width, temperature] = GetParam();
  TensorPool host(3);
  CudaPool device;
  const Tensor hidden = device.copy(testing::random_as(host, kBf16, {tokens, width}, -2.0f, 2.0f), kBf16);
  const Tensor weight = device.copy(testing::random_as(host, kBf16, {vocab, width}), kBf16);
  const Tensor targets = host.random_ints({tokens}, -1, static_cast<int32_t>(vocab));
  if (tokens > 0) targets.i32()[tokens - 1] = static_cast<int32_t>(vocab - 1);
  const auto column = [&] { return device.output(kF32, {tokens}); };
  const HeadLogProb args{.hidden = hidden, .weight = weight, .targets = device.copy(targets), .logprob = column(),
                         .lse = column(), .entropy = column(), .temperature = temperature};
  launch(args, cuda_stream());
  const Tensor logits = device.output(kF32, {tokens, vocab});
  launch(Gemm{.a = hidden, .b = weight, .c = logits, .bias = {}, .transpose_b = true}, cuda_stream());
  const LogProb stored{.logits = logits, .targets = args.targets, .logprob = column(), .lse = column(),
                       .entropy = column(), .temperature = temperature};
  launch(stored, cuda_stream());
  testing::expect_same_bits_on_device(args.logprob, stored.logprob);
  testing::expect_same_bits_on_device(args.lse, stored.lse);
  testing::expect_same_bits_on_device(args.entropy, stored.entropy);

  const Tensor dlogprob = host.random(kF32, {tokens}), dentropy = host.random(kF32, {tokens});
  if (tokens > 1) dlogprob.f32()[1] = dentropy.f32()[1] = 0.0f;
  for (const bool with_entropy : {true, false}) {
    const HeadLogProbBackward backward{.hidden = hidden, .weight = weight, .targets = args.targets, .lse = args.lse,
                                       .dlogprob = device.copy(dlogprob),
                                       .entropy = with_entropy ? args.entropy : Tensor(),
                                       .dentropy = with_entropy ? device.copy(dentropy) : Tensor(),
                                       .dlogits = device.output(kBf16, {tokens, vocab}), .temperature = temperature};
    launch(backward, cuda_stream());
    const LogProbBackward stored_backward{.logits = logits, .targets = args.targets, .lse = args.lse,
                                          .dlogprob = backward.dlogprob, .entropy = backward.entropy,
                                          .dentropy = backward.dentropy, .dlogits = device.output(kBf16, {tokens, vocab}),
                                          .temperature = temperature};
    launch(stored_backward, cuda_stream());
    testing::expect_same_bits_on_device(backward.dlogits, stored_backward.dlogits);
  }
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, HeadLogProbCudaTest,
                         ::testing::Values(Head{0, 512, 64, 1.0f}, Head{1, 97, 64, 1.0f}, Head{3, 1000, 72, 0.7f},
                                           Head{130, 513, 256, 1.3f}, Head{300, 5000, 128, 1.0f},
                                           Head{17, 154880, 256, 0.9f}));

TEST(HeadLogProb, IsRefusedWhereNothingComputesIt) {
  TensorPool host(4);
  const Tensor hidden = host.random(kF32, {2, 8}), weight = host.random(kF32, {5, 8});
  EXPECT_FALSE(takes_head(hidden, weight));
  const auto column = [&] { return host.output(kF32, {2}); };
  EXPECT_EQ(validate(HeadLogProb{.hidden = hidden, .weight = weight, .targets = host.ints({2}, {0, 1}),
                                 .logprob = column(), .lse = column(), .entropy = {}})
                .code(),
            absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace slipstream::kernels
