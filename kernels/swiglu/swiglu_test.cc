// Goal: launch() equals reference() for empty, odd and strided shapes, with and without the clamp, in place
// as well; a row ignores its neighbours, bit for bit; huge values give finite results and NaN stays visible;
// the backward agrees with finite differences and is zero beyond the clamp; bad arguments are refused by
// name.
#include "kernels/swiglu/swiglu.h"

#include <cmath>
#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

constexpr float kNoLimit = std::numeric_limits<float>::infinity();

class SwiGluTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, float>> {};

TEST_P(SwiGluTest, EqualsReference) {
  const auto [tokens, width, limit] = GetParam();
  TensorPool pool(1);
  const SwiGlu args{.gate = pool.random(DType::kF32, {tokens, width + 3}, -9.0f, 9.0f).slice(1, 1, width + 1),
                    .up = pool.random(DType::kF32, {tokens, width}, -9.0f, 9.0f),
                    .y = pool.output(DType::kF32, {tokens, width}),
                    .limit = limit};
  SwiGlu expected = args;
  expected.y = pool.output(DType::kF32, {tokens, width});
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.y, expected.y, testing::tolerance(DType::kF32));

  for (const bool over_gate : {true, false}) {
    SwiGlu in_place = args;
    in_place.gate = pool.copy(args.gate);
    in_place.up = pool.copy(args.up);
    in_place.y = over_gate ? in_place.gate : in_place.up;
    launch(in_place, test_stream());
    testing::expect_same_bits(in_place.y, args.y);
  }

  const SwiGluBackward backward{.gate = args.gate,
                                .up = args.up,
                                .dy = pool.random(DType::kF32, {tokens, width}),
                                .dgate = pool.output(DType::kF32, {tokens, width}),
                                .dup = pool.output(DType::kF32, {tokens, width}),
                                .limit = limit};
  SwiGluBackward expected_backward = backward;
  expected_backward.dgate = pool.output(DType::kF32, {tokens, width});
  expected_backward.dup = pool.output(DType::kF32, {tokens, width});
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dgate, expected_backward.dgate, testing::tolerance(DType::kF32));
  testing::expect_near(backward.dup, expected_backward.dup, testing::tolerance(DType::kF32));

  SwiGluBackward over_dy = backward;  // dgate may be dy, dup may be up
  over_dy.dy = over_dy.dgate = pool.copy(backward.dy);
  over_dy.up = over_dy.dup = pool.copy(args.up);
  launch(over_dy, test_stream());
  testing::expect_same_bits(over_dy.dgate, backward.dgate);
  testing::expect_same_bits(over_dy.dup, backward.dup);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, SwiGluTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65),
                                            ::testing::Values(1, 16, 127, 1024),
                                            ::testing::Values(2.5f, kNoLimit)));

TEST(SwiGluTest, RowIgnoresItsNeighbours) {
  TensorPool pool(2);
  const Tensor gate = pool.random(DType::kF32, {37, 1003}, -5.0f, 5.0f);
  const Tensor up = pool.random(DType::kF32, {37, 1003});
  const Tensor together = pool.output(DType::kF32, {37, 1003});
  launch(SwiGlu{.gate = gate, .up = up, .y = together, .limit = 3.0f}, test_stream());
  for (int64_t t = 0; t < 37; ++t) {
    const Tensor alone = pool.output(DType::kF32, {1, 1003});
    launch(SwiGlu{.gate = gate.slice(0, t, t + 1), .up = up.slice(0, t, t + 1), .y = alone, .limit = 3.0f},
           testing::single_thread_stream());
    testing::expect_same_bits(alone, together.slice(0, t, t + 1));
  }
}

TEST(SwiGluTest, HugeValuesStayFinite) {
  TensorPool pool(3);
  const int64_t n = 17;
  const float gates[] = {-1e38f, -1000.0f, -200.0f, -90.0f, -87.0f, 0.0f, 200.0f, 1e30f};
  const Tensor gate = pool.zeros(DType::kF32, {8, n}), up = pool.zeros(DType::kF32, {8, n});
  const Tensor dy = pool.zeros(DType::kF32, {8, n}), y = pool.output(DType::kF32, {8, n});
  const Tensor dgate = pool.output(DType::kF32, {8, n}), dup = pool.output(DType::kF32, {8, n});
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t i = 0; i < n; ++i) gate.row(t)[i] = gates[t], up.row(t)[i] = 2.0f, dy.row(t)[i] = 1.0f;
  }
  launch(SwiGlu{.gate = gate, .up = up, .y = y, .limit = kNoLimit}, test_stream());
  launch(SwiGluBackward{.gate = gate, .up = up, .dy = dy, .dgate = dgate, .dup = dup, .limit = kNoLimit},
         test_stream());
  const float expected_y[] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 400.0f, 2e30f};
  const float expected_dgate[] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 1.0f, 2.0f, 2.0f};
  for (int64_t t = 0; t < 8; ++t) {
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_NEAR(y.row(t)[i], expected_y[t], 1e-30f) << gates[t];
      EXPECT_NEAR(dgate.row(t)[i], expected_dgate[t], 1e-30f) << gates[t];
      EXPECT_NEAR(dup.row(t)[i], expected_y[t] / 2.0f, 1e-30f) << gates[t];
    }
  }
}

TEST(SwiGluTest, NaNStaysInItsPlace) {
  TensorPool pool(4);
  const Tensor gate = pool.random(DType::kF32, {2, 40}), up = pool.random(DType::kF32, {2, 40});
  const Tensor y = pool.output(DType::kF32, {2, 40});
  gate.row(0)[5] = up.row(1)[38] = std::numeric_limits<float>::quiet_NaN();
  launch(SwiGlu{.gate = gate, .up = up, .y = y, .limit = 1.0f}, test_stream());
  for (int64_t i = 0; i < 40; ++i) {
    EXPECT_EQ(std::isnan(y.row(0)[i]), i == 5);
    EXPECT_EQ(std::isnan(y.row(1)[i]), i == 38);
  }
}

TEST(SwiGluTest, BackwardIsTheDerivative) {
  TensorPool pool(5);
  // Values stay a step away from the clamp's edges at +-2 (integer grid plus 0.5): differences across them
  // lie.
  const Tensor gate = pool.zeros(DType::kF32, {4, 19}), up = pool.zeros(DType::kF32, {4, 19});
  for (int64_t i = 0; i < 4 * 19; ++i) {
    gate.f32()[i] = static_cast<float>(i % 7) - 2.5f;
    up.f32()[i] = static_cast<float>(i % 8) - 3.5f;
  }
  const Tensor y = pool.output(DType::kF32, {4, 19}), dy = pool.random(DType::kF32, {4, 19});
  const Tensor dgate = pool.output(DType::kF32, {4, 19}), dup = pool.output(DType::kF32, {4, 19});
  const auto loss = [&] {
    launch(SwiGlu{.gate = gate, .up = up, .y = y, .limit = 2.0f}, test_stream());
    return testing::dot(y, dy);
  };
  launch(SwiGluBackward{.gate = gate, .up = up, .dy = dy, .dgate = dgate, .dup = dup, .limit = 2.0f},
         test_stream());
  testing::expect_gradient(loss, gate, dgate);
  testing::expect_gradient(loss, up, dup);
  EXPECT_EQ(dgate.f32()[5], 0.0f);  // gate 2.5 lies beyond the limit
  EXPECT_EQ(dup.f32()[0], 0.0f);    // up -3.5 as well
}

TEST(SwiGluTest, GradientPassesAtTheEdge) {
  TensorPool pool(6);
  const Tensor gate = pool.random(DType::kF32, {1, 2}, 2.0f, 2.0f),
               up = pool.random(DType::kF32, {1, 2}, -2.0f, -2.0f);
  const Tensor dy = pool.random(DType::kF32, {1, 2}, 1.0f, 1.0f);
  const Tensor dgate = pool.output(DType::kF32, {1, 2}), dup = pool.output(DType::kF32, {1, 2});
  launch(SwiGluBackward{.gate = gate, .up = up, .dy = dy, .dgate = dgate, .dup = dup, .limit = 2.0f},
         test_stream());
  EXPECT_LT(dgate.f32()[0], -1.0f);
  EXPECT_GT(dup.f32()[1], 1.0f);
}

TEST(SwiGluTest, RefusesByName) {
  TensorPool pool(7);
  SwiGlu args{.gate = pool.random(DType::kF32, {2, 8}),
              .up = pool.random(DType::kF32, {2, 7}),
              .y = pool.output(DType::kF32, {2, 8}),
              .limit = 10.0f};
  EXPECT_EQ(validate(args).message(), "swiglu: up: f32 [2, 7], expected f32 [2, 8]");
  args.up = args.gate;
  args.limit = 0.0f;
  EXPECT_EQ(validate(args).message(), "swiglu: limit must be > 0");
  const SwiGluBackward backward{
      .gate = args.gate, .up = args.up, .dy = args.gate, .dgate = args.y, .dup = args.y, .limit = 1.0f};
  EXPECT_EQ(validate(backward).message(), "swiglu_backward: dup is dgate");
}

}  // namespace
}  // namespace slipstream::kernels
