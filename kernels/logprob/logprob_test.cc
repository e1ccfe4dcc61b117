// Goal: launch() equals reference() for empty, odd and strided shapes, one block of the vocabulary and
// several; a row ignores its neighbours and the number of threads, bit for bit; masked rows are not read;
// minus infinity is a legal logit, NaN and plus infinity spoil their own row only; the backward agrees with
// finite differences; bad arguments are refused by name.
#include "kernels/logprob/logprob.h"

#include <cmath>
#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

LogProb with_outputs(TensorPool& pool, const Tensor& logits, const Tensor& targets, float temperature,
                     bool entropy) {
  const int64_t tokens = logits.size(0);
  return {.logits = logits,
          .targets = targets,
          .logprob = pool.output(DType::kF32, {tokens}),
          .lse = pool.output(DType::kF32, {tokens}),
          .entropy = entropy ? pool.output(DType::kF32, {tokens}) : Tensor(),
          .temperature = temperature};
}

class LogProbTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, float, bool>> {};

TEST_P(LogProbTest, EqualsReference) {
  const auto [tokens, vocab, temperature, entropy] = GetParam();
  TensorPool pool(1);
  const Tensor logits = pool.random(DType::kF32, {tokens, vocab + 3}, -6.0f, 6.0f).slice(1, 1, vocab + 1);
  const Tensor targets = pool.random_ints({tokens}, -1, static_cast<int32_t>(vocab));
  const LogProb args = with_outputs(pool, logits, targets, temperature, entropy);
  const LogProb expected = with_outputs(pool, logits, targets, temperature, entropy);
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.logprob, expected.logprob, testing::tolerance(DType::kF32));
  testing::expect_near(args.lse, expected.lse, testing::tolerance(DType::kF32));
  if (entropy) testing::expect_near(args.entropy, expected.entropy, testing::tolerance(DType::kF32));

  const LogProbBackward backward{.logits = logits,
                                 .targets = targets,
                                 .lse = expected.lse,
                                 .dlogprob = pool.random(DType::kF32, {tokens}),
                                 .entropy = expected.entropy,
                                 .dentropy = entropy ? pool.random(DType::kF32, {tokens}) : Tensor(),
                                 .dlogits = pool.output(DType::kF32, {tokens, vocab}),
                                 .temperature = temperature};
  LogProbBackward expected_backward = backward;
  expected_backward.dlogits = pool.output(DType::kF32, {tokens, vocab});
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dlogits, expected_backward.dlogits, testing::tolerance(DType::kF32));

  LogProbBackward in_place = backward;
  in_place.logits = in_place.dlogits = pool.copy(logits);
  launch(in_place, test_stream());
  testing::expect_same_bits(in_place.dlogits, backward.dlogits);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LogProbTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 20),
                                            ::testing::Values(1, 15, 16, 100, 4096, 4097, 9000),
                                            ::testing::Values(1.0f, 0.7f), ::testing::Bool()));

TEST(LogProbTest, BehaviourCase) {
  TensorPool pool(2);
  const Tensor logits = pool.zeros(DType::kF32, {1, 3});
  logits.f32()[0] = 2.0f, logits.f32()[1] = 1.0f;
  const LogProb args = with_outputs(pool, logits, pool.ints({1}, {1}), 0.8f, false);
  launch(args, test_stream());
  EXPECT_NEAR(args.logprob.f32()[0], -1.5638f, 1e-4f);
}

// 600 rows of two blocks take the path that shares out rows; a row alone the one that shares out blocks.
TEST(LogProbTest, RowIgnoresItsNeighboursAndThreads) {
  TensorPool pool(3);
  const int64_t tokens = 600, vocab = 4100;
  const Tensor logits = pool.random(DType::kF32, {tokens, vocab}, -9.0f, 9.0f);
  const Tensor targets = pool.random_ints({tokens}, 0, vocab);
  const LogProb together = with_outputs(pool, logits, targets, 0.9f, true);
  launch(together, test_stream());
  for (int64_t t = 0; t < tokens; t += 7) {
    for (Stream* stream : {&test_stream(), &testing::single_thread_stream()}) {
      const LogProb alone =
          with_outputs(pool, logits.slice(0, t, t + 1), targets.slice(0, t, t + 1), 0.9f, true);
      launch(alone, *stream);
      testing::expect_same_bits(alone.logprob, together.logprob.slice(0, t, t + 1));
      testing::expect_same_bits(alone.lse, together.lse.slice(0, t, t + 1));
      testing::expect_same_bits(alone.entropy, together.entropy.slice(0, t, t + 1));
    }
  }
  // The log-prob does not depend on whether the entropy is asked for.
  const LogProb plain = with_outputs(pool, logits, targets, 0.9f, false);
  launch(plain, test_stream());
  testing::expect_same_bits(plain.logprob, together.logprob);
}

TEST(LogProbTest, NonFiniteLogitsSpoilTheirRowOnly) {
  TensorPool pool(4);
  const int64_t vocab = 9000;
  const Tensor logits = pool.random(DType::kF32, {5, vocab});
  logits.row(1)[8999] = kNaN;
  logits.row(2)[4096] = kInfinity;
  for (int64_t i = 0; i < vocab; ++i) logits.row(3)[i] = -kInfinity;
  const Tensor targets = pool.ints({5}, {0, 0, 0, 0, 8999});
  const LogProb args = with_outputs(pool, logits, targets, 1.0f, true);
  launch(args, test_stream());
  for (int64_t t = 0; t < 5; ++t) {
    const bool good = t == 0 || t == 4;
    EXPECT_EQ(std::isfinite(args.logprob.f32()[t]), good) << t;
    EXPECT_EQ(std::isfinite(args.lse.f32()[t]), good) << t;
    EXPECT_EQ(std::isfinite(args.entropy.f32()[t]), good) << t;
  }
}

TEST(LogProbTest, MinusInfinityIsAMaskedToken) {
  TensorPool pool(5);
  const int64_t vocab = 3 * 4096;
  const Tensor logits = pool.random(DType::kF32, {1, vocab});
  for (int64_t i = 0; i < vocab; ++i) {
    if (i != 5000 && i != 5003) logits.f32()[i] = -kInfinity;  // blocks 0 and 2 have no finite logit
  }
  logits.f32()[5000] = logits.f32()[5003] = 1.5f;
  const LogProb args = with_outputs(pool, logits, pool.ints({1}, {5003}), 1.0f, true);
  launch(args, test_stream());
  EXPECT_NEAR(args.logprob.f32()[0], -std::log(2.0f), 1e-6f);
  EXPECT_NEAR(args.entropy.f32()[0], std::log(2.0f), 1e-6f);

  const LogProbBackward backward{.logits = logits,
                                 .targets = args.targets,
                                 .lse = args.lse,
                                 .dlogprob = pool.random(DType::kF32, {1}, 1.0f, 1.0f),
                                 .entropy = args.entropy,
                                 .dentropy = pool.random(DType::kF32, {1}, 1.0f, 1.0f),
                                 .dlogits = pool.output(DType::kF32, {1, vocab})};
  launch(backward, test_stream());
  for (int64_t i = 0; i < vocab; ++i) {
    const float expected = i == 5000 ? -0.5f : i == 5003 ? 0.5f : 0.0f;
    ASSERT_NEAR(backward.dlogits.f32()[i], expected, 1e-6f) << i;
  }
}

TEST(LogProbTest, HugeLogitsStayFinite) {
  TensorPool pool(6);
  const Tensor logits = pool.random(DType::kF32, {2, 20}, -1e30f, 1e30f);
  for (int64_t i = 0; i < 20; ++i) logits.row(1)[i] = 3e4f + static_cast<float>(i % 2);
  const LogProb args = with_outputs(pool, logits, pool.ints({2}, {3, 0}), 1.0f, true);
  const LogProb expected = with_outputs(pool, logits, args.targets, 1.0f, true);
  launch(args, test_stream());
  reference(expected);
  for (int64_t t = 0; t < 2; ++t) {
    EXPECT_FLOAT_EQ(args.logprob.f32()[t], expected.logprob.f32()[t]);
    EXPECT_FLOAT_EQ(args.lse.f32()[t], expected.lse.f32()[t]);
    EXPECT_NEAR(args.entropy.f32()[t], expected.entropy.f32()[t], 1e-6f);
  }
}

TEST(LogProbTest, MaskedRowsAreWrittenAsZerosUnread) {
  TensorPool pool(7);
  const int64_t vocab = 5000;
  const Tensor logits = pool.random(DType::kF32, {4, vocab});
  for (int64_t i = 0; i < vocab; ++i) logits.row(1)[i] = logits.row(2)[i] = kNaN;
  const Tensor lse = pool.random(DType::kF32, {4}, 8.0f, 9.0f);
  lse.f32()[1] = lse.f32()[2] = kNaN;
  const Tensor dlogprob = pool.random(DType::kF32, {4}, 1.0f, 2.0f);
  dlogprob.f32()[1] = 0.0f;
  for (const bool entropy : {false, true}) {
    // Row 1 has no gradient; row 2 has one, but for the target -1, whose log-prob is a constant.
    const LogProbBackward args{.logits = logits,
                               .targets = pool.ints({4}, {1, 2, -1, 4}),
                               .lse = lse,
                               .dlogprob = dlogprob,
                               .entropy = entropy ? pool.random(DType::kF32, {4}) : Tensor(),
                               .dentropy = entropy ? pool.zeros(DType::kF32, {4}) : Tensor(),
                               .dlogits = pool.output(DType::kF32, {4, vocab})};
    launch(args, test_stream());
    for (int64_t t = 0; t < 4; ++t) {
      int64_t zeros = 0;
      for (int64_t i = 0; i < vocab; ++i) zeros += args.dlogits.row(t)[i] == 0.0f;
      EXPECT_EQ(zeros, t == 1 || t == 2 ? vocab : 0);
    }
  }
}

TEST(LogProbTest, BackwardIsTheDerivative) {
  TensorPool pool(8);
  const Tensor logits = pool.random(DType::kF32, {3, 21}, -2.0f, 2.0f);
  const Tensor targets = pool.ints({3}, {4, -1, 20});
  const LogProb forward = with_outputs(pool, logits, targets, 0.7f, true);
  const Tensor dlogprob = pool.random(DType::kF32, {3}), dentropy = pool.random(DType::kF32, {3});
  const auto loss = [&] {
    launch(forward, test_stream());
    return testing::dot(forward.logprob, dlogprob) + testing::dot(forward.entropy, dentropy);
  };
  loss();
  const LogProbBackward backward{.logits = logits,
                                 .targets = targets,
                                 .lse = pool.copy(forward.lse),
                                 .dlogprob = dlogprob,
                                 .entropy = pool.copy(forward.entropy),
                                 .dentropy = dentropy,
                                 .dlogits = pool.output(DType::kF32, {3, 21}),
                                 .temperature = 0.7f};
  launch(backward, test_stream());
  testing::expect_gradient(loss, logits, backward.dlogits);
}

TEST(LogProbTest, RefusesByName) {
  TensorPool pool(9);
  const Tensor logits = pool.random(DType::kF32, {2, 8});
  LogProb args = with_outputs(pool, logits, pool.ints({2}, {7, 8}), 1.0f, false);
  EXPECT_EQ(validate(args).message(), "logprob: targets[1]: 8, expected -1..7");
  args.targets = pool.ints({2}, {7, -2});
  EXPECT_EQ(validate(args).message(), "logprob: targets[1]: -2, expected -1..7");
  args.targets = pool.ints({2}, {7, -1});
  EXPECT_TRUE(validate(args).ok());
  args.temperature = 0.0f;
  EXPECT_EQ(validate(args).message(), "logprob: temperature must be > 0");
  args.entropy = pool.output(DType::kF32, {3});
  EXPECT_EQ(validate(args).message(), "logprob: entropy: f32 [3], expected f32 [2]");
  const LogProbBackward backward{.logits = logits,
                                 .targets = args.targets,
                                 .lse = args.lse,
                                 .dlogprob = args.lse,
                                 .entropy = {},
                                 .dentropy = args.lse,
                                 .dlogits = logits};
  EXPECT_EQ(validate(backward).message(), "logprob_backward: entropy: absent, expected f32 [2]");
}

}  // namespace
}  // namespace slipstream::kernels
