// Goal: launch() equals reference() for empty, odd, strided and grouped shapes; ties go to the lower expert;
// replayed experts get the bits of chosen ones; a row ignores its neighbours, bit for bit; the backward
// agrees with finite differences; hostile rows stay finite or to themselves; bad arguments are refused by
// name.
#include "kernels/router/router.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

struct Shape {
  int64_t tokens, experts, slots, groups, groups_kept;
};

class RouterTest : public ::testing::TestWithParam<std::tuple<Shape, bool>> {};

TEST_P(RouterTest, EqualsReference) {
  const auto [shape, normalize] = GetParam();
  const auto [tokens, num_experts, slots, groups, groups_kept] = shape;
  TensorPool pool(1);
  const Router args{
      .logits = pool.random(DType::kF32, {tokens, num_experts + 3}, -3.0f, 3.0f).slice(1, 1, num_experts + 1),
      .bias = pool.random(DType::kF32, {num_experts}, -0.2f, 0.2f),
      .experts = pool.output(DType::kI32, {tokens, slots + 1}).slice(1, 0, slots),
      .weights = pool.output(DType::kF32, {tokens, slots + 2}).slice(1, 1, slots + 1),
      .groups = groups,
      .groups_kept = groups_kept,
      .normalize = normalize,
      .scale = 2.5f};
  Router expected = args;
  expected.experts = pool.output(DType::kI32, {tokens, slots});
  expected.weights = pool.output(DType::kF32, {tokens, slots});
  launch(args, test_stream());
  reference(expected);
  testing::expect_same_bits(args.experts, expected.experts);
  testing::expect_near(args.weights, expected.weights, testing::tolerance(DType::kF32));

  Router replayed = args;
  replayed.replayed = true;
  replayed.weights = pool.output(DType::kF32, {tokens, slots});
  launch(replayed, test_stream());
  testing::expect_same_bits(replayed.weights, args.weights);

  const RouterBackward backward{
      .logits = args.logits,
      .experts = args.experts,
      .dweights = pool.random(DType::kF32, {tokens, slots}),
      .dlogits = pool.output(DType::kF32, {tokens, num_experts + 1}).slice(1, 0, num_experts),
      .normalize = normalize,
      .scale = 2.5f};
  RouterBackward expected_backward = backward;
  expected_backward.dlogits = pool.output(DType::kF32, {tokens, num_experts});
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dlogits, expected_backward.dlogits, testing::tolerance(DType::kF32));
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RouterTest,
                         ::testing::Combine(::testing::Values(Shape{0, 8, 2, 1, 1}, Shape{1, 1, 1, 1, 1},
                                                              Shape{3, 7, 7, 1, 1}, Shape{65, 64, 8, 1, 1},
                                                              Shape{33, 288, 8, 1, 1},
                                                              Shape{9, 160, 20, 1, 1}, Shape{40, 32, 4, 8, 3},
                                                              Shape{40, 63, 5, 3, 1}, Shape{17, 12, 4, 6, 2}),
                                            ::testing::Bool()));

TEST(RouterTest, RowIgnoresItsNeighbours) {
  TensorPool pool(2);
  const Tensor logits = pool.random(DType::kF32, {70, 72}, -4.0f, 4.0f);
  const Tensor bias = pool.random(DType::kF32, {72});
  const auto route = [&](const Tensor& rows, Stream& stream) {
    Router args{.logits = rows,
                .bias = bias,
                .experts = pool.output(DType::kI32, {rows.size(0), 6}),
                .weights = pool.output(DType::kF32, {rows.size(0), 6}),
                .groups = 4,
                .groups_kept = 2};
    launch(args, stream);
    return args;
  };
  const Tensor dweights = pool.random(DType::kF32, {70, 6});
  const auto route_back = [&](const Tensor& rows, const Tensor& experts, const Tensor& dy, Stream& stream) {
    const Tensor dlogits = pool.output(DType::kF32, {rows.size(0), 72});
    launch(RouterBackward{.logits = rows, .experts = experts, .dweights = dy, .dlogits = dlogits}, stream);
    return dlogits;
  };
  const Router together = route(logits, test_stream());
  const Tensor dtogether = route_back(logits, together.experts, dweights, test_stream());
  for (int64_t t = 0; t < 70; ++t) {
    const Router alone = route(logits.slice(0, t, t + 1), testing::single_thread_stream());
    testing::expect_same_bits(alone.experts, together.experts.slice(0, t, t + 1));
    testing::expect_same_bits(alone.weights, together.weights.slice(0, t, t + 1));
    testing::expect_same_bits(route_back(logits.slice(0, t, t + 1), alone.experts,
                                         dweights.slice(0, t, t + 1), testing::single_thread_stream()),
                              dtogether.slice(0, t, t + 1));
  }
}

// Logits from three values only: almost every choice is a tie. The expected order is a stable sort by logit.
TEST(RouterTest, TiesGoToTheLowerExpert) {
  constexpr int64_t kTokens = 50, kExperts = 37, kSlots = 9;
  TensorPool pool(3);
  const Tensor logits = pool.random(DType::kF32, {kTokens, kExperts}, 0.0f, 3.0f);
  for (int64_t i = 0; i < logits.numel(); ++i) logits.f32()[i] = std::floor(logits.f32()[i]);
  const Router args{.logits = logits,
                    .bias = pool.zeros(DType::kF32, {kExperts}),
                    .experts = pool.output(DType::kI32, {kTokens, kSlots}),
                    .weights = pool.output(DType::kF32, {kTokens, kSlots})};
  launch(args, test_stream());
  for (int64_t t = 0; t < kTokens; ++t) {
    std::vector<int32_t> order(kExperts);
    for (size_t e = 0; e < order.size(); ++e) order[e] = static_cast<int32_t>(e);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return logits.row(t)[a] > logits.row(t)[b]; });
    for (int64_t k = 0; k < kSlots; ++k) {
      EXPECT_EQ(args.experts.i32()[t * kSlots + k], order[static_cast<size_t>(k)])
          << "token " << t << " slot " << k;
    }
  }
}

TEST(RouterTest, TiedGroupsGoToTheLowerGroup) {
  TensorPool pool(4);
  const Router args{.logits = pool.zeros(DType::kF32, {1, 12}),
                    .bias = pool.zeros(DType::kF32, {12}),
                    .experts = pool.output(DType::kI32, {1, 4}),
                    .weights = pool.output(DType::kF32, {1, 4}),
                    .groups = 4,
                    .groups_kept = 2};
  // Group 0's best two sum to less than the others', which tie: 1 and 2 stay, 3 goes although its experts
  // score alike.
  args.logits.f32()[0] = -1.0f;
  args.logits.f32()[1] = -1.0f;
  launch(args, test_stream());
  testing::expect_same_bits(args.experts, pool.ints({1, 4}, {3, 4, 5, 6}));
}

TEST(RouterTest, BiasSteersTheChoiceAndNotTheWeight) {
  TensorPool pool(5);
  const Tensor logits = pool.random(DType::kF32, {1, 16});
  const Tensor bias = pool.zeros(DType::kF32, {16});
  bias.f32()[11] = 5.0f;
  const Router args{.logits = logits,
                    .bias = bias,
                    .experts = pool.output(DType::kI32, {1, 1}),
                    .weights = pool.output(DType::kF32, {1, 1}),
                    .normalize = false};
  launch(args, test_stream());
  EXPECT_EQ(args.experts.i32()[0], 11);
  EXPECT_NEAR(args.weights.f32()[0], 1.0 / (1.0 + std::exp(-logits.f32()[11])), 1e-6);
}

TEST(RouterTest, HostileRowsStayToThemselves) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  TensorPool pool(6);
  const Tensor logits = pool.random(DType::kF32, {5, 24});
  std::fill(logits.row(1), logits.row(1) + 24, kNaN);
  std::fill(logits.row(2), logits.row(2) + 24, -1e30f);  // every score is 0
  std::fill(logits.row(3), logits.row(3) + 24, 1e30f);
  for (const int64_t groups : {1, 4}) {
    const Router args{.logits = logits,
                      .bias = pool.zeros(DType::kF32, {24}),
                      .experts = pool.output(DType::kI32, {5, 6}),
                      .weights = pool.output(DType::kF32, {5, 6}),
                      .groups = groups,
                      .groups_kept = groups == 1 ? 1 : 2};
    launch(args, test_stream());
    const RouterBackward backward{.logits = logits,
                                  .experts = args.experts,
                                  .dweights = pool.random(DType::kF32, {5, 6}),
                                  .dlogits = pool.output(DType::kF32, {5, 24})};
    launch(backward, test_stream());
    for (int64_t t = 0; t < 5; ++t) {
      const int32_t* experts = args.experts.i32() + t * 6;
      const std::set<int32_t> distinct(experts, experts + 6);
      EXPECT_EQ(distinct.size(), 6u);
      EXPECT_GE(*distinct.begin(), 0);
      EXPECT_LT(*distinct.rbegin(), 24);
      if (t == 1) continue;
      for (int64_t k = 0; k < 6; ++k) EXPECT_TRUE(std::isfinite(args.weights.row(t)[k])) << "token " << t;
      for (int64_t e = 0; e < 24; ++e)
        EXPECT_TRUE(std::isfinite(backward.dlogits.row(t)[e])) << "token " << t;
    }
  }
}

TEST(RouterTest, BackwardIsTheDerivative) {
  for (const bool normalize : {false, true}) {
    TensorPool pool(7);
    Router args{.logits = pool.random(DType::kF32, {4, 12}, -2.0f, 2.0f),
                .bias = pool.zeros(DType::kF32, {12}),
                .experts = pool.output(DType::kI32, {4, 3}),
                .weights = pool.output(DType::kF32, {4, 3}),
                .normalize = normalize,
                .scale = 1.7f};
    const Tensor dweights = pool.random(DType::kF32, {4, 3});
    launch(args, test_stream());
    args.replayed = true;  // the choice is a constant
    const Tensor dlogits = pool.output(DType::kF32, {4, 12});
    launch(RouterBackward{.logits = args.logits,
                          .experts = args.experts,
                          .dweights = dweights,
                          .dlogits = dlogits,
                          .normalize = normalize,
                          .scale = 1.7f},
           test_stream());
    const auto loss = [&] {
      launch(args, test_stream());
      return testing::dot(args.weights, dweights);
    };
    testing::expect_gradient(loss, args.logits, dlogits);
  }
}

TEST(RouterTest, RefusesByName) {
  TensorPool pool(8);
  const Router args{.logits = pool.random(DType::kF32, {2, 8}),
                    .bias = pool.random(DType::kF32, {8}),
                    .experts = pool.output(DType::kI32, {2, 4}),
                    .weights = pool.output(DType::kF32, {2, 4})};
  EXPECT_TRUE(validate(args).ok());
  Router bad = args;
  bad.bias = pool.random(DType::kF32, {7});
  EXPECT_EQ(validate(bad).message(), "router: bias: f32 [7], expected f32 [8]");
  bad = args;
  bad.groups = 3;
  EXPECT_EQ(validate(bad).message(), "router: groups must divide the number of experts");
  bad = args;
  bad.groups = bad.groups_kept = 8;
  EXPECT_EQ(validate(bad).message(), "router: a group must have at least two experts");
  bad = args;
  bad.groups = 4;
  bad.groups_kept = 1;
  EXPECT_EQ(validate(bad).message(), "router: slots must be in 1..eligible experts");
  const RouterBackward backward{.logits = args.logits,
                                .experts = args.experts,
                                .dweights = args.weights,
                                .dlogits = pool.output(DType::kF32, {2, 9})};
  EXPECT_EQ(validate(backward).message(), "router_backward: dlogits: f32 [2, 9], expected f32 [2, 8]");
}

TEST(RouterDeathTest, RefusesReplayedExpertsOutOfRange) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  TensorPool pool(9);
  const Router args{.logits = pool.random(DType::kF32, {1, 8}),
                    .bias = pool.random(DType::kF32, {8}),
                    .experts = pool.ints({1, 2}, {3, 8}),
                    .weights = pool.output(DType::kF32, {1, 2}),
                    .replayed = true};
  EXPECT_DEATH(launch(args, testing::single_thread_stream()), "num_experts");
}

}  // namespace
}  // namespace slipstream::kernels
