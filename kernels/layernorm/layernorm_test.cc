// Goal: launch() equals reference() for empty, odd, strided and unaligned shapes, in place as well; a row
// ignores its neighbours, bit for bit; a large mean does not cancel the variance; the backward agrees with
// finite differences; bad arguments are refused by name.
#include "kernels/layernorm/layernorm.h"

#include <cmath>
#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

class LayerNormTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(LayerNormTest, EqualsReference) {
  const auto [tokens, hidden] = GetParam();
  TensorPool pool(1);
  const LayerNorm args{.x = pool.random(DType::kF32, {tokens, hidden + 3}).slice(1, 1, hidden + 1),
                       .w = pool.random(DType::kF32, {hidden}),
                       .b = pool.random(DType::kF32, {hidden}),
                       .y = pool.output(DType::kF32, {tokens, hidden}),
                       .mean = pool.output(DType::kF32, {tokens}),
                       .inv_std = pool.output(DType::kF32, {tokens}),
                       .eps = 1e-2f};  // at width 1 and 2 a smaller one would magnify rounding
  LayerNorm expected = args;
  expected.y = pool.output(DType::kF32, {tokens, hidden});
  expected.mean = pool.output(DType::kF32, {tokens});
  expected.inv_std = pool.output(DType::kF32, {tokens});
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.y, expected.y, testing::tolerance(DType::kF32));
  testing::expect_near(args.mean, expected.mean, testing::tolerance(DType::kF32));
  testing::expect_near(args.inv_std, expected.inv_std, testing::tolerance(DType::kF32));

  LayerNorm in_place = args;
  in_place.x = in_place.y = pool.copy(args.x);
  in_place.mean = in_place.inv_std = Tensor();
  launch(in_place, test_stream());
  testing::expect_same_bits(in_place.y, args.y);

  const Tensor dw = pool.random(DType::kF32, {hidden}), db = pool.random(DType::kF32, {hidden});
  const LayerNormBackward backward{.x = args.x,
                                   .w = args.w,
                                   .mean = args.mean,
                                   .inv_std = args.inv_std,
                                   .dy = pool.random(DType::kF32, {tokens, hidden}),
                                   .dx = pool.output(DType::kF32, {tokens, hidden}),
                                   .dw = pool.copy(dw),
                                   .db = pool.copy(db)};
  LayerNormBackward expected_backward = backward;
  expected_backward.dx = pool.output(DType::kF32, {tokens, hidden});
  expected_backward.dw = pool.copy(dw);
  expected_backward.db = pool.copy(db);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, 4e-6f);
  testing::expect_near(backward.dw, expected_backward.dw, 4e-6f);
  testing::expect_near(backward.db, expected_backward.db, 4e-6f);

  LayerNormBackward over_dy = backward;
  over_dy.dx = over_dy.dy = pool.copy(backward.dy);
  over_dy.dw = pool.copy(dw);
  over_dy.db = pool.copy(db);
  launch(over_dy, testing::single_thread_stream());
  testing::expect_same_bits(over_dy.dx, backward.dx);
  testing::expect_same_bits(over_dy.dw, backward.dw);
  testing::expect_same_bits(over_dy.db, backward.db);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, LayerNormTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65),
                                            ::testing::Values(1, 8, 16, 127, 1024)));

TEST(LayerNormTest, RowIgnoresItsNeighbours) {
  TensorPool pool(2);
  const Tensor x = pool.random(DType::kF32, {300, 128});
  const Tensor w = pool.random(DType::kF32, {128}), b = pool.random(DType::kF32, {128});
  x.row(17)[3] = std::numeric_limits<float>::quiet_NaN();
  const Tensor together = pool.output(DType::kF32, {300, 128});
  launch(LayerNorm{.x = x, .w = w, .b = b, .y = together, .mean = {}, .inv_std = {}, .eps = 1e-6f},
         test_stream());
  for (int64_t t = 0; t < 300; ++t) {
    if (t == 17) continue;
    const Tensor alone = pool.output(DType::kF32, {1, 128});
    launch(
        LayerNorm{
            .x = x.slice(0, t, t + 1), .w = w, .b = b, .y = alone, .mean = {}, .inv_std = {}, .eps = 1e-6f},
        testing::single_thread_stream());
    testing::expect_same_bits(alone, together.slice(0, t, t + 1));
  }
  EXPECT_TRUE(std::isnan(together.row(17)[0]));
}

TEST(LayerNormTest, ZeroRowAndLargeMean) {
  TensorPool pool(3);
  const Tensor x = pool.zeros(DType::kF32, {2, 100}), y = pool.output(DType::kF32, {2, 100});
  for (int64_t i = 0; i < 100; ++i) x.row(1)[i] = i % 2 == 0 ? 10'001.0f : 9'999.0f;
  const Tensor w = pool.random(DType::kF32, {100}, 1.0f, 1.0f),
               b = pool.random(DType::kF32, {100}, 0.5f, 0.5f);
  launch(LayerNorm{.x = x, .w = w, .b = b, .y = y, .mean = {}, .inv_std = {}, .eps = 1e-6f}, test_stream());
  for (int64_t i = 0; i < 100; ++i) {
    EXPECT_EQ(y.row(0)[i], 0.5f);
    EXPECT_NEAR(y.row(1)[i], i % 2 == 0 ? 1.5f : -0.5f, 1e-3f);
  }
}

TEST(LayerNormTest, BackwardIsTheDerivative) {
  TensorPool pool(4);
  const Tensor x = pool.random(DType::kF32, {3, 19});
  const Tensor w = pool.random(DType::kF32, {19}), b = pool.random(DType::kF32, {19});
  const LayerNorm forward{.x = x,
                          .w = w,
                          .b = b,
                          .y = pool.output(DType::kF32, {3, 19}),
                          .mean = pool.output(DType::kF32, {3}),
                          .inv_std = pool.output(DType::kF32, {3}),
                          .eps = 1e-5f};
  const Tensor dy = pool.random(DType::kF32, {3, 19});
  const auto loss = [&] {
    launch(forward, test_stream());
    return testing::dot(forward.y, dy);
  };
  loss();
  const LayerNormBackward backward{.x = x,
                                   .w = w,
                                   .mean = pool.copy(forward.mean),
                                   .inv_std = pool.copy(forward.inv_std),
                                   .dy = dy,
                                   .dx = pool.output(DType::kF32, {3, 19}),
                                   .dw = pool.zeros(DType::kF32, {19}),
                                   .db = pool.zeros(DType::kF32, {19})};
  launch(backward, test_stream());
  testing::expect_gradient(loss, x, backward.dx);
  testing::expect_gradient(loss, w, backward.dw);
  testing::expect_gradient(loss, b, backward.db);
}

TEST(LayerNormTest, RefusesByName) {
  TensorPool pool(5);
  LayerNorm args{.x = pool.random(DType::kF32, {2, 8}),
                 .w = pool.random(DType::kF32, {8}),
                 .b = pool.random(DType::kF32, {7}),
                 .y = pool.output(DType::kF32, {2, 8}),
                 .mean = {},
                 .inv_std = {},
                 .eps = 1e-5f};
  EXPECT_EQ(validate(args).message(), "layernorm: b: f32 [7], expected f32 [8]");
  args.b = args.w;
  args.mean = pool.output(DType::kF32, {2});
  EXPECT_EQ(validate(args).message(), "layernorm: inv_std: absent, expected f32 [2]");
  args.inv_std = args.mean;
  args.eps = 0.0f;
  EXPECT_EQ(validate(args).message(), "layernorm: eps must be > 0");
}

}  // namespace
}  // namespace slipstream::kernels
