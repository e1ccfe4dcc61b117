// Goal: on CUDA launch() is reference() within tolerance, forward and backward, with a lower bound of the decay and without; in
// place, and a token ignores its neighbours, bit for bit.
#include "kernels/kda_inputs/kda_inputs.h"

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

class KdaInputsCudaTest : public testing::CudaTest,
                          public ::testing::WithParamInterface<std::tuple<DType, int64_t, int64_t, float>> {};

TEST_P(KdaInputsCudaTest, EqualsReference) {
  const auto [dtype, tokens, d, lower_bound] = GetParam();
  TensorPool host(1);
  CudaPool device;
  const int64_t h = 9;  // more than a block's warps
  const Tensor q = random_as(host, dtype, {tokens, h, d}), k = random_as(host, dtype, {tokens, h, d});
  const Tensor logit = host.random(kF32, {tokens, h, d}, -3.0f, 3.0f), beta_logit = host.random(kF32, {tokens, h}, -3.0f, 3.0f);
  const Tensor a_log = host.random(kF32, {h}), dt_bias = host.random(kF32, {h, d});
  const KdaInputs args{.q = device.copy(q, dtype), .k = device.copy(k, dtype), .decay_logit = device.copy(logit),
                       .beta_logit = device.copy(beta_logit), .a_log = device.copy(a_log),
                       .dt_bias = device.copy(dt_bias), .lower_bound = lower_bound,
                       .q_hat = device.output(dtype, {tokens, h, d}), .k_hat = device.output(dtype, {tokens, h, d}),
                       .log_decay = device.output(kF32, {tokens, h, d}), .beta = device.output(kF32, {tokens, h})};
  const KdaInputs expected{.q = q, .k = k, .decay_logit = logit, .beta_logit = beta_logit, .a_log = a_log,
                           .dt_bias = dt_bias, .lower_bound = lower_bound, .q_hat = host.output(kF32, {tokens, h, d}),
                           .k_hat = host.output(kF32, {tokens, h, d}), .log_decay = host.output(kF32, {tokens, h, d}),
                           .beta = host.output(kF32, {tokens, h})};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.q_hat, expected.q_hat);
  expect_close(args.k_hat, expected.k_hat);
  expect_close(args.log_decay, expected.log_decay);
  expect_close(args.beta, expected.beta);
  KdaInputs in_place = args;
  in_place.q = in_place.q_hat = device.copy(q, dtype);
  in_place.k = in_place.k_hat = device.copy(k, dtype);
  in_place.decay_logit = in_place.log_decay = device.copy(logit);
  for (int64_t t = 0; t < tokens; t += t + 1) {  // pieces of 1, 2, 4, ... tokens
    KdaInputs piece = in_place;
    for (const auto member : {&KdaInputs::q, &KdaInputs::k, &KdaInputs::decay_logit, &KdaInputs::beta_logit, &KdaInputs::q_hat,
                              &KdaInputs::k_hat, &KdaInputs::log_decay, &KdaInputs::beta}) {
      piece.*member = (in_place.*member).slice(0, t, std::min(2 * t + 1, tokens));
    }
    launch(piece, cuda_stream());
  }
  testing::expect_same_bits_on_device(in_place.q_hat, args.q_hat);
  testing::expect_same_bits_on_device(in_place.k_hat, args.k_hat);
  testing::expect_same_bits_on_device(in_place.log_decay, args.log_decay);

  const Tensor dq = random_as(host, dtype, {tokens, h, d}), dk = random_as(host, dtype, {tokens, h, d});
  const Tensor dlog = host.random(kF32, {tokens, h, d}), dbeta = host.random(kF32, {tokens, h});
  const KdaInputsBackward backward{
      .q = args.q, .k = args.k, .decay_logit = args.decay_logit, .beta_logit = args.beta_logit, .a_log = args.a_log,
      .dt_bias = args.dt_bias, .lower_bound = lower_bound, .dq_hat = device.copy(dq, dtype),
      .dk_hat = device.copy(dk, dtype), .dlog_decay = device.copy(dlog), .dbeta = device.copy(dbeta),
      .dq = device.output(dtype, {tokens, h, d}), .dk = device.output(dtype, {tokens, h, d}),
      .ddecay_logit = device.output(kF32, {tokens, h, d}), .dbeta_logit = device.output(kF32, {tokens, h}),
      .da_log = device.zeros(kF32, {h}), .ddt_bias = device.zeros(kF32, {h, d})};
  const KdaInputsBackward expected_backward{
      .q = q, .k = k, .decay_logit = logit, .beta_logit = beta_logit, .a_log = a_log, .dt_bias = dt_bias,
      .lower_bound = lower_bound, .dq_hat = dq, .dk_hat = dk, .dlog_decay = dlog, .dbeta = dbeta,
      .dq = host.output(kF32, {tokens, h, d}), .dk = host.output(kF32, {tokens, h, d}),
      .ddecay_logit = host.output(kF32, {tokens, h, d}), .dbeta_logit = host.output(kF32, {tokens, h}),
      .da_log = host.zeros(kF32, {h}), .ddt_bias = host.zeros(kF32, {h, d})};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dq, expected_backward.dq);
  expect_close(backward.dk, expected_backward.dk);
  expect_close(backward.ddecay_logit, expected_backward.ddecay_logit);
  expect_close(backward.dbeta_logit, expected_backward.dbeta_logit);
  expect_close(backward.da_log, expected_backward.da_log);
  expect_close(backward.ddt_bias, expected_backward.ddt_bias);
  KdaInputsBackward overwritten = backward;
  overwritten.dq = overwritten.dq_hat = device.copy(dq, dtype);
  overwritten.dk = overwritten.dk_hat = device.copy(dk, dtype);
  overwritten.ddecay_logit = overwritten.dlog_decay = device.copy(dlog);
  overwritten.da_log = device.zeros(kF32, {h});
  overwritten.ddt_bias = device.zeros(kF32, {h, d});
  launch(overwritten, cuda_stream());
  for (const auto member : {&KdaInputsBackward::dq, &KdaInputsBackward::dk, &KdaInputsBackward::ddecay_logit,
                            &KdaInputsBackward::da_log, &KdaInputsBackward::ddt_bias}) {
    testing::expect_same_bits_on_device(overwritten.*member, backward.*member);
  }
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, KdaInputsCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16), ::testing::Values(0, 1, 70, 1203),
                                            ::testing::Values(4, 17, 128), ::testing::Values(-5.0f, 0.0f)));

}  // namespace
}  // namespace slipstream::kernels
