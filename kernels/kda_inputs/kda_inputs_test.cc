// Goal: launch() equals reference() with and without the decay's lower bound, for empty, odd and strided
// shapes and in place; a token ignores its neighbours, bit for bit; the backward agrees with finite
// differences; extreme and zero inputs stay finite; bad arguments are refused by name.
#include "kernels/kda_inputs/kda_inputs.h"

#include "hwy/targets.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

// Heads of d values inside rows of heads * d + 5, from column 2: what a projection of several outputs looks
// like.
Tensor strided_heads(TensorPool& pool, int64_t tokens, int64_t heads, int64_t d, float size) {
  const Tensor wide = pool.random(DType::kF32, {tokens, heads + 1, d + 5}, -size, size);
  return wide.slice(1, 1, heads + 1).slice(2, 2, d + 2);
}

KdaInputs random_args(TensorPool& pool, int64_t tokens, int64_t heads, int64_t d, float lower_bound) {
  return {.q = strided_heads(pool, tokens, heads, d, 2),
          .k = strided_heads(pool, tokens, heads, d, 2),
          .decay_logit = strided_heads(pool, tokens, heads, d, 4),
          .beta_logit = pool.random(DType::kF32, {tokens, heads}, -4, 4),
          .a_log = pool.random(DType::kF32, {heads}, -1, 2),
          .dt_bias = pool.random(DType::kF32, {heads, d}, -2, 1),
          .lower_bound = lower_bound,
          .q_hat = pool.output(DType::kF32, {tokens, heads, d}),
          .k_hat = pool.output(DType::kF32, {tokens, heads, d}),
          .log_decay = pool.output(DType::kF32, {tokens, heads, d}),
          .beta = pool.output(DType::kF32, {tokens, heads})};
}

KdaInputsBackward random_backward(TensorPool& pool, const KdaInputs& forward) {
  const int64_t tokens = forward.q.size(0), heads = forward.q.size(1), d = forward.q.size(2);
  const auto slope = [&] { return pool.random(DType::kF32, {tokens, heads, d}); };
  const auto output = [&] { return pool.output(DType::kF32, {tokens, heads, d}); };
  return {.q = forward.q,
          .k = forward.k,
          .decay_logit = forward.decay_logit,
          .beta_logit = forward.beta_logit,
          .a_log = forward.a_log,
          .dt_bias = forward.dt_bias,
          .lower_bound = forward.lower_bound,
          .dq_hat = slope(),
          .dk_hat = slope(),
          .dlog_decay = slope(),
          .dbeta = pool.random(DType::kF32, {tokens, heads}),
          .dq = output(),
          .dk = output(),
          .ddecay_logit = output(),
          .dbeta_logit = pool.output(DType::kF32, {tokens, heads}),
          .da_log = pool.random(DType::kF32, {heads}),
          .ddt_bias = pool.random(DType::kF32, {heads, d})};
}

class KdaInputsTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t, float>> {};

TEST_P(KdaInputsTest, EqualsReference) {
  const auto [tokens, heads, d, lower_bound] = GetParam();
  TensorPool pool(1);
  const KdaInputs args = random_args(pool, tokens, heads, d, lower_bound);
  KdaInputs expected = args;
  expected.q_hat = pool.output(DType::kF32, {tokens, heads, d});
  expected.k_hat = pool.output(DType::kF32, {tokens, heads, d});
  expected.log_decay = pool.output(DType::kF32, {tokens, heads, d});
  expected.beta = pool.output(DType::kF32, {tokens, heads});
  launch(args, test_stream());
  reference(expected);
  const float tolerance = testing::tolerance(DType::kF32);
  testing::expect_near(args.q_hat, expected.q_hat, tolerance);
  testing::expect_near(args.k_hat, expected.k_hat, tolerance);
  testing::expect_near(args.log_decay, expected.log_decay, tolerance);
  testing::expect_near(args.beta, expected.beta, tolerance);

  // In place: every output is its own input. On the narrower target, which must not show.
  const Tensor q = pool.copy(args.q), k = pool.copy(args.k), logit = pool.copy(args.decay_logit);
  const Tensor beta = pool.copy(args.beta_logit);
  const KdaInputs over_inputs{.q = q,
                              .k = k,
                              .decay_logit = logit,
                              .beta_logit = beta,
                              .a_log = args.a_log,
                              .dt_bias = args.dt_bias,
                              .lower_bound = lower_bound,
                              .q_hat = q,
                              .k_hat = k,
                              .log_decay = logit,
                              .beta = beta};
  {
    const testing::ScopedTarget narrow(HWY_AVX2);
    launch(over_inputs, test_stream());
  }
  testing::expect_same_bits(q, args.q_hat);
  testing::expect_same_bits(k, args.k_hat);
  testing::expect_same_bits(logit, args.log_decay);
  testing::expect_same_bits(beta, args.beta);

  const KdaInputsBackward backward = random_backward(pool, args);
  KdaInputsBackward expected_backward = backward;
  expected_backward.dq = pool.copy(backward.dq_hat);  // the reference in place, launch() out of place
  expected_backward.dq_hat = expected_backward.dq;
  expected_backward.dk = pool.output(DType::kF32, {tokens, heads, d});
  expected_backward.ddecay_logit = pool.output(DType::kF32, {tokens, heads, d});
  expected_backward.dbeta_logit = pool.output(DType::kF32, {tokens, heads});
  expected_backward.da_log = pool.copy(backward.da_log);
  expected_backward.ddt_bias = pool.copy(backward.ddt_bias);
  KdaInputsBackward in_place = backward;
  in_place.dq_hat = in_place.dq = pool.copy(backward.dq_hat);
  in_place.dk_hat = in_place.dk = pool.copy(backward.dk_hat);
  in_place.dlog_decay = in_place.ddecay_logit = pool.copy(backward.dlog_decay);
  in_place.dbeta = in_place.dbeta_logit = pool.copy(backward.dbeta);
  in_place.da_log = pool.copy(backward.da_log);
  in_place.ddt_bias = pool.copy(backward.ddt_bias);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dq, expected_backward.dq, 4e-6f);
  testing::expect_near(backward.dk, expected_backward.dk, 4e-6f);
  testing::expect_near(backward.ddecay_logit, expected_backward.ddecay_logit, 4e-6f);
  testing::expect_near(backward.dbeta_logit, expected_backward.dbeta_logit, 4e-6f);
  testing::expect_near(backward.da_log, expected_backward.da_log, 1e-5f);
  testing::expect_near(backward.ddt_bias, expected_backward.ddt_bias, 1e-5f);
  {
    const testing::ScopedTarget narrow(HWY_AVX2);
    launch(in_place, testing::single_thread_stream());
  }
  testing::expect_same_bits(in_place.dq, backward.dq);
  testing::expect_same_bits(in_place.dk, backward.dk);
  testing::expect_same_bits(in_place.ddecay_logit, backward.ddecay_logit);
  testing::expect_same_bits(in_place.dbeta_logit, backward.dbeta_logit);
  testing::expect_same_bits(in_place.da_log, backward.da_log);
  testing::expect_same_bits(in_place.ddt_bias, backward.ddt_bias);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, KdaInputsTest,
                         ::testing::Combine(::testing::Values(0, 1, 33), ::testing::Values(1, 3, 17),
                                            ::testing::Values(8, 16, 24, 64),
                                            ::testing::Values(0.0f, -5.0f)));

TEST(KdaInputsTest, TokenIgnoresItsNeighbours) {
  for (float lower_bound : {0.0f, -5.0f}) {
    TensorPool pool(2);
    const KdaInputs args = random_args(pool, 29, 3, 40, lower_bound);
    launch(args, test_stream());
    for (int64_t t = 0; t < 29; ++t) {
      KdaInputs alone = args;
      alone.q = args.q.slice(0, t, t + 1);
      alone.k = args.k.slice(0, t, t + 1);
      alone.decay_logit = args.decay_logit.slice(0, t, t + 1);
      alone.beta_logit = args.beta_logit.slice(0, t, t + 1);
      alone.q_hat = pool.output(DType::kF32, {1, 3, 40});
      alone.k_hat = pool.output(DType::kF32, {1, 3, 40});
      alone.log_decay = pool.output(DType::kF32, {1, 3, 40});
      alone.beta = pool.output(DType::kF32, {1, 3});
      launch(alone, testing::single_thread_stream());
      testing::expect_same_bits(alone.q_hat, args.q_hat.slice(0, t, t + 1));
      testing::expect_same_bits(alone.k_hat, args.k_hat.slice(0, t, t + 1));
      testing::expect_same_bits(alone.log_decay, args.log_decay.slice(0, t, t + 1));
      testing::expect_same_bits(alone.beta, args.beta.slice(0, t, t + 1));
    }
  }
}

TEST(KdaInputsTest, ExtremesAreFiniteAndNeverGrow) {
  for (float lower_bound : {0.0f, -5.0f}) {
    TensorPool pool(3);
    KdaInputs args = random_args(pool, 6, 2, 20, lower_bound);
    args.q = pool.zeros(DType::kF32, {6, 2, 20});
    args.k = pool.random(DType::kF32, {6, 2, 20}, -1e15f, 1e15f);
    args.decay_logit = pool.random(DType::kF32, {6, 2, 20}, -1e4f, 1e4f);
    args.beta_logit = pool.random(DType::kF32, {6, 2}, -1e4f, 1e4f);
    launch(args, test_stream());
    KdaInputsBackward backward = random_backward(pool, args);
    launch(backward, test_stream());
    for (int64_t i = 0; i < args.q.numel(); ++i) {
      EXPECT_EQ(args.q_hat.f32()[i], 0.0f);
      EXPECT_LE(std::abs(args.k_hat.f32()[i]), 1.0f);
      EXPECT_LE(args.log_decay.f32()[i], 0.0f);
      EXPECT_TRUE(std::isfinite(args.log_decay.f32()[i]));
      EXPECT_TRUE(std::isfinite(backward.dq.f32()[i]));
      EXPECT_TRUE(std::isfinite(backward.dk.f32()[i]));
      EXPECT_TRUE(std::isfinite(backward.ddecay_logit.f32()[i]));
    }
  }
}

TEST(KdaInputsTest, BackwardIsTheDerivative) {
  for (float lower_bound : {0.0f, -5.0f}) {
    TensorPool pool(4);
    KdaInputs args = random_args(pool, 3, 2, 19, lower_bound);
    args.q = pool.copy(args.q);
    args.k = pool.copy(args.k);
    args.decay_logit = pool.random(DType::kF32, {3, 2, 19});
    args.a_log = pool.random(DType::kF32, {2});
    KdaInputsBackward backward = random_backward(pool, args);
    backward.da_log = pool.zeros(DType::kF32, {2});
    backward.ddt_bias = pool.zeros(DType::kF32, {2, 19});
    launch(backward, test_stream());
    const auto loss = [&] {
      launch(args, test_stream());
      return testing::dot(args.q_hat, backward.dq_hat) + testing::dot(args.k_hat, backward.dk_hat) +
             testing::dot(args.log_decay, backward.dlog_decay) + testing::dot(args.beta, backward.dbeta);
    };
    testing::expect_gradient(loss, args.q, backward.dq);
    testing::expect_gradient(loss, args.k, backward.dk);
    testing::expect_gradient(loss, args.decay_logit, backward.ddecay_logit);
    testing::expect_gradient(loss, args.beta_logit, backward.dbeta_logit);
    testing::expect_gradient(loss, args.a_log, backward.da_log);
    testing::expect_gradient(loss, args.dt_bias, backward.ddt_bias);
  }
}

TEST(KdaInputsTest, RefusesByName) {
  TensorPool pool(5);
  KdaInputs args = random_args(pool, 2, 3, 8, 1.0f);
  EXPECT_EQ(validate(args).message(), "kda_inputs: lower_bound must be <= 0");
  args.beta_logit = pool.zeros(DType::kF32, {2, 4});
  EXPECT_EQ(validate(args).message(), "kda_inputs: beta_logit: f32 [2, 4], expected f32 [2, 3]");
  KdaInputsBackward backward = random_backward(pool, random_args(pool, 2, 3, 8, 0.0f));
  backward.ddt_bias = pool.zeros(DType::kF32, {3, 9});
  EXPECT_EQ(validate(backward).message(), "kda_inputs_backward: ddt_bias: f32 [3, 9], expected f32 [3, 8]");
}

}  // namespace
}  // namespace slipstream::kernels
