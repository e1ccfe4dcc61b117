// Goal: on CUDA the experts chosen are those of reference(), groups and ties included, and the weights near its own.
#include "kernels/router/router.h"

#include <cmath>
#include <limits>

#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::CudaPool;
using testing::cuda_stream;
using testing::expect_close;
using testing::random_as;
using testing::TensorPool;

constexpr DType kF32 = DType::kF32, kBf16 = DType::kBf16;

struct Case {
  int64_t tokens, experts, slots, groups, kept;
  bool normalize;
};

class RouterCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<Case> {};

TEST_P(RouterCudaTest, EqualsReference) {
  const Case c = GetParam();
  TensorPool host(1);
  CudaPool device;
  // Few different values: ties are common.
  const Tensor logits = random_as(host, kBf16, {c.tokens, c.experts}), bias = host.zeros(kF32, {c.experts});
  for (int64_t i = 0; i < logits.numel(); ++i) logits.f32()[i] = std::round(logits.f32()[i] * 4.0f) / 4.0f;
  if (c.tokens > 2) logits.row(1)[c.experts / 2] = std::numeric_limits<float>::quiet_NaN();
  Router args{.logits = device.copy(logits), .bias = device.copy(bias),
              .experts = device.output(DType::kI32, {c.tokens, c.slots}),
              .weights = device.output(kF32, {c.tokens, c.slots}), .groups = c.groups, .groups_kept = c.kept,
              .normalize = c.normalize, .scale = 2.5f};
  Router expected{.logits = logits, .bias = bias, .experts = host.output(DType::kI32, {c.tokens, c.slots}),
                  .weights = host.output(kF32, {c.tokens, c.slots}), .groups = c.groups, .groups_kept = c.kept,
                  .normalize = c.normalize, .scale = 2.5f};
  launch(args, cuda_stream());
  reference(expected);
  expect_close(args.experts, expected.experts);
  expect_close(args.weights, expected.weights);

  args.replayed = true;
  args.weights = device.output(kF32, {c.tokens, c.slots});
  launch(args, cuda_stream());
  expect_close(args.weights, expected.weights);

  // Slots that repeat an expert, as a replay may.
  for (int64_t t = 0; t < c.tokens; ++t) expected.experts.i32()[t * c.slots + c.slots - 1] = expected.experts.i32()[t * c.slots];
  args.experts = device.copy(expected.experts);
  const Tensor dweights = host.random(kF32, {c.tokens, c.slots});
  const RouterBackward backward{.logits = args.logits, .experts = args.experts, .dweights = device.copy(dweights),
                                .dlogits = device.output(kF32, {c.tokens, c.experts}), .normalize = c.normalize,
                                .scale = 2.5f};
  const RouterBackward expected_backward{.logits = logits, .experts = expected.experts, .dweights = dweights,
                                         .dlogits = host.output(kF32, {c.tokens, c.experts}),
                                         .normalize = c.normalize, .scale = 2.5f};
  launch(backward, cuda_stream());
  reference(expected_backward);
  expect_close(backward.dlogits, expected_backward.dlogits);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RouterCudaTest,
                         ::testing::Values(Case{0, 8, 2, 1, 1, true}, Case{1, 6, 2, 1, 1, true},
                                           Case{37, 12, 3, 4, 2, true}, Case{65, 288, 8, 1, 1, true},
                                           Case{5, 256, 8, 8, 4, false}, Case{6, 100, 40, 1, 1, true},
                                           Case{9, 20, 3, 1, 1, false}));

}  // namespace
}  // namespace slipstream::kernels
