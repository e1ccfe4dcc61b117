// Goal: the plan is a permutation sorted by expert, token and slot; launch() equals reference() for empty,
// odd and strided shapes and in place; a token ignores its neighbours, bit for bit; gather and combine have
// the gradients that finite differences find; bad arguments are refused by name.
#include "kernels/moe_dispatch/moe_dispatch.h"

#include <tuple>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

MoePlan plan(TensorPool& pool, const Tensor& experts, int64_t num_experts, Stream& stream = test_stream()) {
  const MoePlan args{.experts = experts,
                     .row_begin = pool.output(DType::kI32, {num_experts + 1}),
                     .slot_row = pool.output(DType::kI32, {experts.size(0), experts.size(1)}),
                     .row_token = pool.output(DType::kI32, {experts.size(0) * experts.size(1)})};
  launch(args, stream);
  return args;
}

class MoeDispatchTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t, int64_t>> {};

TEST_P(MoeDispatchTest, EqualsReference) {
  const auto [tokens, slots, num_experts, hidden] = GetParam();
  const int64_t num_rows = tokens * slots;
  TensorPool pool(1);
  // A column range of a wider matrix, unaligned.
  const auto strided = [&](int64_t rows, int64_t columns, float value_range) {
    return pool.random(DType::kF32, {rows, columns + 3}, -value_range, value_range).slice(1, 1, columns + 1);
  };
  const auto strided_output = [&](int64_t rows, int64_t columns) {
    return pool.output(DType::kF32, {rows, columns + 3}).slice(1, 1, columns + 1);
  };
  const Tensor experts =
      pool.random_ints({tokens, slots + 1}, 0, static_cast<int32_t>(num_experts)).slice(1, 1, slots + 1);
  const MoePlan made = plan(pool, experts, num_experts);
  MoePlan expected = made;
  expected.row_begin = pool.output(DType::kI32, {num_experts + 1});
  expected.slot_row = pool.output(DType::kI32, {tokens, slots});
  expected.row_token = pool.output(DType::kI32, {num_rows});
  reference(expected);
  testing::expect_same_bits(made.row_begin, expected.row_begin);
  testing::expect_same_bits(made.slot_row, expected.slot_row);
  testing::expect_same_bits(made.row_token, expected.row_token);

  const Tensor row_token = pool.copy(made.row_token);
  for (int64_t r = 0; r < num_rows; r += 5) row_token.i32()[r] = -1;  // a row of zeros
  const MoeGather gather{.x = strided(tokens, hidden, 1.0f),
                         .row_token = row_token,
                         .rows = strided_output(num_rows, hidden)};
  MoeGather expected_gather = gather;
  expected_gather.rows = pool.output(DType::kF32, {num_rows, hidden});
  launch(gather, test_stream());
  reference(expected_gather);
  testing::expect_same_bits(gather.rows, expected_gather.rows);

  const MoeCombine combine{.rows = strided(num_rows, hidden, 1.0f),
                           .weights = strided(tokens, slots, 1.0f),
                           .slot_row = made.slot_row,
                           .y = strided(tokens, hidden, 1.0f)};
  MoeCombine expected_combine = combine;
  expected_combine.y = pool.copy(combine.y);
  launch(combine, test_stream());
  reference(expected_combine);
  testing::expect_near(combine.y, expected_combine.y, testing::tolerance(DType::kF32));

  const MoeCombineBackward backward{.rows = combine.rows,
                                    .weights = combine.weights,
                                    .slot_row = made.slot_row,
                                    .dy = strided(tokens, hidden, 1.0f),
                                    .drows = strided_output(num_rows, hidden),
                                    .dweights = strided_output(tokens, slots)};
  MoeCombineBackward expected_backward = backward;
  expected_backward.drows = pool.output(DType::kF32, {num_rows, hidden});
  expected_backward.dweights = pool.output(DType::kF32, {tokens, slots});
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_same_bits(backward.drows, expected_backward.drows);  // one product each
  testing::expect_near(backward.dweights, expected_backward.dweights, testing::tolerance(DType::kF32));

  MoeCombineBackward in_place = backward;
  in_place.drows = in_place.rows = pool.copy(backward.rows);
  in_place.dweights = pool.output(DType::kF32, {tokens, slots});
  launch(in_place, test_stream());
  testing::expect_same_bits(in_place.drows, backward.drows);
  testing::expect_same_bits(in_place.dweights, backward.dweights);

  const MoeGatherBackward scatter{
      .drows = backward.drows, .slot_row = made.slot_row, .dx = strided(tokens, hidden, 1.0f)};
  MoeGatherBackward expected_scatter = scatter;
  expected_scatter.dx = pool.copy(scatter.dx);
  launch(scatter, test_stream());
  reference(expected_scatter);
  testing::expect_near(scatter.dx, expected_scatter.dx, testing::tolerance(DType::kF32));
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, MoeDispatchTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65), ::testing::Values(1, 3, 8),
                                            ::testing::Values(1, 5, 64), ::testing::Values(1, 16, 67, 256)));

TEST(MoeDispatchTest, PlanOfAnExample) {
  TensorPool pool(2);
  const MoePlan made = plan(pool, pool.ints({3, 2}, {2, 0, 0, 2, 3, 2}), 5);  // experts 1 and 4 get nothing
  testing::expect_same_bits(made.row_begin, pool.ints({6}, {0, 2, 2, 5, 6, 6}));
  testing::expect_same_bits(made.slot_row, pool.ints({3, 2}, {2, 0, 1, 3, 5, 4}));
  testing::expect_same_bits(made.row_token, pool.ints({6}, {0, 1, 0, 1, 2, 2}));
}

TEST(MoeDispatchTest, TokenIgnoresItsNeighbours) {
  constexpr int64_t kTokens = 41, kSlots = 4, kExperts = 6, kHidden = 150;
  TensorPool pool(3);
  const Tensor experts = pool.random_ints({kTokens, kSlots}, 0, kExperts);
  const Tensor x = pool.random(DType::kF32, {kTokens, kHidden});
  const Tensor weights = pool.random(DType::kF32, {kTokens, kSlots});
  const Tensor shared = pool.random(DType::kF32, {kTokens, kHidden});
  struct Result {
    Tensor y, dx, dweights;
  };
  // Experts that are the identity, forward and backward, on tokens [begin, end).
  const auto run = [&](int64_t begin, int64_t end, Stream& stream) {
    const MoePlan made = plan(pool, experts.slice(0, begin, end), kExperts, stream);
    const Tensor rows = pool.output(DType::kF32, {made.row_token.size(0), kHidden});
    const Tensor drows = pool.output(DType::kF32, {made.row_token.size(0), kHidden});
    Result result{pool.copy(shared.slice(0, begin, end)), pool.copy(shared.slice(0, begin, end)),
                  pool.output(DType::kF32, {end - begin, kSlots})};
    const Tensor some_weights = weights.slice(0, begin, end);
    launch(MoeGather{.x = x.slice(0, begin, end), .row_token = made.row_token, .rows = rows}, stream);
    launch(MoeCombine{.rows = rows, .weights = some_weights, .slot_row = made.slot_row, .y = result.y},
           stream);
    launch(MoeCombineBackward{.rows = rows,
                              .weights = some_weights,
                              .slot_row = made.slot_row,
                              .dy = result.y,
                              .drows = drows,
                              .dweights = result.dweights},
           stream);
    launch(MoeGatherBackward{.drows = drows, .slot_row = made.slot_row, .dx = result.dx}, stream);
    return result;
  };
  const Result together = run(0, kTokens, test_stream());
  for (int64_t t = 0; t < kTokens; ++t) {
    const Result alone = run(t, t + 1, testing::single_thread_stream());
    testing::expect_same_bits(alone.y, together.y.slice(0, t, t + 1));
    testing::expect_same_bits(alone.dx, together.dx.slice(0, t, t + 1));
    testing::expect_same_bits(alone.dweights, together.dweights.slice(0, t, t + 1));
  }
}

TEST(MoeDispatchTest, BackwardIsTheDerivative) {
  constexpr int64_t kTokens = 5, kSlots = 2, kExperts = 4, kHidden = 19;
  TensorPool pool(4);
  const MoePlan made = plan(pool, pool.random_ints({kTokens, kSlots}, 0, kExperts), kExperts);
  const Tensor x = pool.random(DType::kF32, {kTokens, kHidden});
  const Tensor weights = pool.random(DType::kF32, {kTokens, kSlots});
  const Tensor rows = pool.output(DType::kF32, {kTokens * kSlots, kHidden});
  const Tensor dy = pool.random(DType::kF32, {kTokens, kHidden});
  const auto loss = [&] {
    TensorPool inner(1);
    const Tensor y = inner.zeros(DType::kF32, {kTokens, kHidden});
    launch(MoeGather{.x = x, .row_token = made.row_token, .rows = rows}, test_stream());
    launch(MoeCombine{.rows = rows, .weights = weights, .slot_row = made.slot_row, .y = y}, test_stream());
    return testing::dot(y, dy);
  };
  loss();
  const Tensor drows = pool.output(DType::kF32, {kTokens * kSlots, kHidden});
  const Tensor dweights = pool.output(DType::kF32, {kTokens, kSlots});
  const Tensor dx = pool.zeros(DType::kF32, {kTokens, kHidden});
  launch(MoeCombineBackward{.rows = rows,
                            .weights = weights,
                            .slot_row = made.slot_row,
                            .dy = dy,
                            .drows = drows,
                            .dweights = dweights},
         test_stream());
  launch(MoeGatherBackward{.drows = drows, .slot_row = made.slot_row, .dx = dx}, test_stream());
  testing::expect_gradient(loss, x, dx);
  testing::expect_gradient(loss, weights, dweights);
}

TEST(MoeDispatchTest, RefusesByName) {
  TensorPool pool(5);
  const MoePlan made{.experts = pool.ints({2, 2}, {0, 1, 1, 0}),
                     .row_begin = pool.output(DType::kI32, {3}),
                     .slot_row = pool.output(DType::kI32, {2, 1}),
                     .row_token = pool.output(DType::kI32, {4})};
  EXPECT_EQ(validate(made).message(), "moe_plan: slot_row: i32 [2, 1], expected i32 [2, 2]");
  const Tensor rows = pool.random(DType::kF32, {4, 8}), slot_row = pool.ints({2, 2}, {0, 1, 2, 3});
  EXPECT_EQ(validate(MoeGather{.x = pool.random(DType::kF32, {2, 8}),
                               .row_token = pool.ints({4}, {0, 0, 1, 1}),
                               .rows = pool.output(DType::kF32, {4, 7})})
                .message(),
            "moe_gather: rows: f32 [4, 7], expected f32 [4, 8]");
  EXPECT_EQ(validate(MoeCombine{.rows = rows.slice(0, 0, 3),
                                .weights = pool.random(DType::kF32, {2, 2}),
                                .slot_row = slot_row,
                                .y = pool.zeros(DType::kF32, {2, 8})})
                .message(),
            "moe_combine: rows: f32 [3, 8], expected f32 [4, *]");
  EXPECT_EQ(validate(MoeCombineBackward{.rows = rows,
                                        .weights = pool.random(DType::kF32, {2, 2}),
                                        .slot_row = slot_row,
                                        .dy = pool.random(DType::kF32, {2, 8}),
                                        .drows = rows,
                                        .dweights = pool.output(DType::kF32, {2, 3})})
                .message(),
            "moe_combine_backward: dweights: f32 [2, 3], expected f32 [2, 2]");
  EXPECT_EQ(
      validate(MoeGatherBackward{.drows = rows, .slot_row = slot_row, .dx = pool.zeros(DType::kF32, {3, 8})})
          .message(),
      "moe_gather_backward: dx: f32 [3, 8], expected f32 [2, 8]");
}

TEST(MoeDispatchDeathTest, RefusesExpertsOutOfRange) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  TensorPool pool(6);
  EXPECT_DEATH(plan(pool, pool.ints({1, 2}, {0, 4}), 4, testing::single_thread_stream()), "num_experts");
}

}  // namespace
}  // namespace slipstream::kernels
