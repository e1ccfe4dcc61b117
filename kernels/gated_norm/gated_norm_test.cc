// Goal: launch() equals reference() for empty, odd, strided and unaligned shapes, in place as well; a row
// ignores its neighbours, and dw the number of threads, bit for bit; huge gates open or close and stay
// finite; the backward agrees with finite differences; bad arguments are refused by name.
#include "kernels/gated_norm/gated_norm.h"

#include <cmath>
#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

class GatedNormTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(GatedNormTest, EqualsReference) {
  const auto [rows, dim] = GetParam();
  TensorPool pool(1);
  const GatedNorm args{.x = pool.random(DType::kF32, {rows, dim + 3}).slice(1, 1, dim + 1),
                       .w = pool.random(DType::kF32, {dim}),
                       .gate = pool.random(DType::kF32, {rows, dim}, -6.0f, 6.0f),
                       .y = pool.output(DType::kF32, {rows, dim}),
                       .inv_rms = pool.output(DType::kF32, {rows}),
                       .eps = 1e-5f};
  GatedNorm expected = args;
  expected.y = pool.output(DType::kF32, {rows, dim});
  expected.inv_rms = pool.output(DType::kF32, {rows});
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.y, expected.y, testing::tolerance(DType::kF32));
  testing::expect_near(args.inv_rms, expected.inv_rms, testing::tolerance(DType::kF32));

  GatedNorm in_place = args;
  in_place.x = in_place.y = pool.copy(args.x);
  in_place.inv_rms = Tensor();
  launch(in_place, test_stream());
  testing::expect_same_bits(in_place.y, args.y);

  const Tensor dw = pool.random(DType::kF32, {dim});
  const GatedNormBackward backward{.x = args.x,
                                   .gate = args.gate,
                                   .w = args.w,
                                   .inv_rms = args.inv_rms,
                                   .dy = pool.random(DType::kF32, {rows, dim}),
                                   .dx = pool.output(DType::kF32, {rows, dim}),
                                   .dgate = pool.output(DType::kF32, {rows, dim}),
                                   .dw = pool.copy(dw)};
  GatedNormBackward expected_backward = backward;
  expected_backward.dx = pool.output(DType::kF32, {rows, dim});
  expected_backward.dgate = pool.output(DType::kF32, {rows, dim});
  expected_backward.dw = pool.copy(dw);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, 4e-6f);
  testing::expect_near(backward.dgate, expected_backward.dgate, 4e-6f);
  testing::expect_near(backward.dw, expected_backward.dw, 4e-6f);

  GatedNormBackward over_dy = backward;
  over_dy.dx = over_dy.dy = pool.copy(backward.dy);
  over_dy.dgate = pool.output(DType::kF32, {rows, dim});
  over_dy.dw = pool.copy(dw);
  launch(over_dy, testing::single_thread_stream());
  testing::expect_same_bits(over_dy.dx, backward.dx);
  testing::expect_same_bits(over_dy.dgate, backward.dgate);
  testing::expect_same_bits(over_dy.dw, backward.dw);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, GatedNormTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65, 300),
                                            ::testing::Values(1, 8, 16, 64, 127, 1000)));

TEST(GatedNormTest, RowIgnoresItsNeighbours) {
  TensorPool pool(2);
  const int64_t rows = 300, dim = 100;
  const Tensor x = pool.random(DType::kF32, {rows, dim}), gate = pool.random(DType::kF32, {rows, dim});
  const Tensor w = pool.random(DType::kF32, {dim});
  x.row(17)[3] = gate.row(18)[4] = std::numeric_limits<float>::quiet_NaN();
  const Tensor together = pool.output(DType::kF32, {rows, dim});
  launch(GatedNorm{.x = x, .w = w, .gate = gate, .y = together, .inv_rms = {}, .eps = 1e-6f}, test_stream());
  for (int64_t r = 0; r < rows; ++r) {
    if (r == 17 || r == 18) continue;
    const Tensor alone = pool.output(DType::kF32, {1, dim});
    launch(GatedNorm{.x = x.slice(0, r, r + 1),
                     .w = w,
                     .gate = gate.slice(0, r, r + 1),
                     .y = alone,
                     .inv_rms = {},
                     .eps = 1e-6f},
           testing::single_thread_stream());
    testing::expect_same_bits(alone, together.slice(0, r, r + 1));
  }
  EXPECT_TRUE(std::isnan(together.row(17)[0]));
  EXPECT_TRUE(std::isnan(together.row(18)[4]));
  EXPECT_FALSE(std::isnan(together.row(18)[5]));
}

TEST(GatedNormTest, HugeGatesAndZeroRows) {
  TensorPool pool(3);
  const float gates[] = {-1e38f, -200.0f, 200.0f, 1e38f};
  const Tensor x = pool.random(DType::kF32, {5, 20}, 3.0f, 3.0f), gate = pool.zeros(DType::kF32, {5, 20});
  const Tensor w = pool.random(DType::kF32, {20}, 1.0f, 1.0f), dy = pool.random(DType::kF32, {5, 20});
  for (int64_t r = 0; r < 4; ++r) {
    for (int64_t i = 0; i < 20; ++i) gate.row(r)[i] = gates[r], x.row(4)[i] = 0.0f;
  }
  const Tensor y = pool.output(DType::kF32, {5, 20}), inv_rms = pool.output(DType::kF32, {5});
  const Tensor dx = pool.output(DType::kF32, {5, 20}), dgate = pool.output(DType::kF32, {5, 20});
  launch(GatedNorm{.x = x, .w = w, .gate = gate, .y = y, .inv_rms = inv_rms, .eps = 1e-6f}, test_stream());
  launch(GatedNormBackward{.x = x,
                           .gate = gate,
                           .w = w,
                           .inv_rms = inv_rms,
                           .dy = dy,
                           .dx = dx,
                           .dgate = dgate,
                           .dw = pool.zeros(DType::kF32, {20})},
         test_stream());
  for (int64_t i = 0; i < 20; ++i) {
    for (int64_t r = 0; r < 5; ++r) {
      EXPECT_NEAR(y.row(r)[i], r == 2 || r == 3 ? 1.0f : 0.0f, 1e-6f);
      EXPECT_TRUE(std::isfinite(dx.row(r)[i]));
      EXPECT_NEAR(dgate.row(r)[i], 0.0f, 1e-30f);
    }
  }
}

TEST(GatedNormTest, BackwardIsTheDerivative) {
  TensorPool pool(4);
  const Tensor x = pool.random(DType::kF32, {3, 19}), gate = pool.random(DType::kF32, {3, 19}, -2.0f, 2.0f);
  const Tensor w = pool.random(DType::kF32, {19}), dy = pool.random(DType::kF32, {3, 19});
  const Tensor y = pool.output(DType::kF32, {3, 19}), inv_rms = pool.output(DType::kF32, {3});
  const auto loss = [&] {
    launch(GatedNorm{.x = x, .w = w, .gate = gate, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, test_stream());
    return testing::dot(y, dy);
  };
  loss();
  const GatedNormBackward backward{.x = x,
                                   .gate = gate,
                                   .w = w,
                                   .inv_rms = pool.copy(inv_rms),
                                   .dy = dy,
                                   .dx = pool.output(DType::kF32, {3, 19}),
                                   .dgate = pool.output(DType::kF32, {3, 19}),
                                   .dw = pool.zeros(DType::kF32, {19})};
  launch(backward, test_stream());
  testing::expect_gradient(loss, x, backward.dx);
  testing::expect_gradient(loss, gate, backward.dgate);
  testing::expect_gradient(loss, w, backward.dw);
}

TEST(GatedNormTest, RefusesByName) {
  TensorPool pool(5);
  const Tensor x = pool.random(DType::kF32, {2, 8}), w = pool.random(DType::kF32, {8});
  const GatedNorm args{
      .x = x, .w = w, .gate = pool.random(DType::kF32, {2, 7}), .y = x, .inv_rms = {}, .eps = 1e-5f};
  EXPECT_EQ(validate(args).message(), "gated_norm: gate: f32 [2, 7], expected f32 [2, 8]");
  const GatedNormBackward backward{.x = x,
                                   .gate = x,
                                   .w = w,
                                   .inv_rms = pool.random(DType::kF32, {2}),
                                   .dy = x,
                                   .dx = x,
                                   .dgate = x,
                                   .dw = w};
  EXPECT_EQ(validate(backward).message(), "gated_norm_backward: dgate is dy");
}

}  // namespace
}  // namespace slipstream::kernels
