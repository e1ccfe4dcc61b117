// Goal: on CUDA the plan is that of reference(); rows go to their experts and come back within tolerance, in place too.
#include "kernels/moe_dispatch/moe_dispatch.h"

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
  int64_t tokens, slots, experts, hidden;
};

class MoeDispatchCudaTest : public testing::CudaTest, public ::testing::WithParamInterface<std::tuple<DType, Case>> {};

TEST_P(MoeDispatchCudaTest, EqualsReference) {
  const auto [dtype, c] = GetParam();
  const int64_t rows = c.tokens * c.slots;
  TensorPool host(1);
  CudaPool device;
  const Tensor experts = host.random_ints({c.tokens, c.slots}, 0, static_cast<int32_t>(c.experts));
  const MoePlan plan{.experts = device.copy(experts), .row_begin = device.output(DType::kI32, {c.experts + 1}),
                     .slot_row = device.output(DType::kI32, {c.tokens, c.slots}),
                     .row_token = device.output(DType::kI32, {rows})};
  const MoePlan expected{.experts = experts, .row_begin = host.output(DType::kI32, {c.experts + 1}),
                         .slot_row = host.output(DType::kI32, {c.tokens, c.slots}),
                         .row_token = host.output(DType::kI32, {rows})};
  launch(plan, cuda_stream());
  reference(expected);
  expect_close(plan.row_begin, expected.row_begin);
  expect_close(plan.slot_row, expected.slot_row);
  expect_close(plan.row_token, expected.row_token);

  const Tensor x = random_as(host, dtype, {c.tokens, c.hidden}), weights = host.random(kF32, {c.tokens, c.slots});
  const MoeGather gather{.x = device.copy(x, dtype), .row_token = plan.row_token,
                         .rows = device.output(dtype, {rows, c.hidden})};
  const MoeGather expected_gather{.x = x, .row_token = expected.row_token, .rows = host.output(kF32, {rows, c.hidden})};
  launch(gather, cuda_stream());
  reference(expected_gather);
  expect_close(gather.rows, expected_gather.rows);

  const Tensor some = host.copy(expected.row_token);
  for (int64_t r = 0; r < rows; r += 5) some.i32()[r] = -1;  // a row of zeros
  const MoeGather spread{.x = gather.x, .row_token = device.copy(some), .rows = device.output(dtype, {rows, c.hidden})};
  const MoeGather expected_spread{.x = x, .row_token = some, .rows = host.output(kF32, {rows, c.hidden})};
  launch(spread, cuda_stream());
  reference(expected_spread);
  expect_close(spread.rows, expected_spread.rows);

  const Tensor before = random_as(host, dtype, {c.tokens, c.hidden});
  const MoeCombine combine{.rows = gather.rows, .weights = device.copy(weights), .slot_row = plan.slot_row,
                           .y = device.copy(before, dtype)};
  const MoeCombine expected_combine{.rows = expected_gather.rows, .weights = weights, .slot_row = expected.slot_row,
                                    .y = host.copy(before)};
  launch(combine, cuda_stream());
  reference(expected_combine);
  expect_close(combine.y, expected_combine.y);

  const MoeCombineBackward back{.rows = gather.rows, .weights = combine.weights, .slot_row = plan.slot_row,
                                .dy = device.copy(before, dtype), .drows = gather.rows,
                                .dweights = device.output(kF32, {c.tokens, c.slots})};
  const MoeCombineBackward expected_back{.rows = expected_gather.rows, .weights = weights, .slot_row = expected.slot_row,
                                         .dy = before, .drows = host.output(kF32, {rows, c.hidden}),
                                         .dweights = host.output(kF32, {c.tokens, c.slots})};
  launch(back, cuda_stream());
  reference(expected_back);
  expect_close(back.drows, expected_back.drows);
  expect_close(back.dweights, expected_back.dweights, dtype == kBf16 ? 1.0f : 4.0f);

  const MoeGatherBackward scatter{.drows = device.copy(expected_gather.rows, dtype), .slot_row = plan.slot_row,
                                  .dx = device.copy(before, dtype)};
  const MoeGatherBackward expected_scatter{.drows = expected_gather.rows, .slot_row = expected.slot_row,
                                           .dx = host.copy(before)};
  launch(scatter, cuda_stream());
  reference(expected_scatter);
  expect_close(scatter.dx, expected_scatter.dx);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, MoeDispatchCudaTest,
                         ::testing::Combine(::testing::Values(kF32, kBf16),
                                            ::testing::Values(Case{0, 2, 4, 8}, Case{1, 1, 1, 3}, Case{7, 3, 5, 33},
                                                              Case{5, 11, 20, 2100}, Case{300, 8, 288, 64},
                                                              Case{40, 8, 1500, 4096})));

}  // namespace
}  // namespace slipstream::kernels
