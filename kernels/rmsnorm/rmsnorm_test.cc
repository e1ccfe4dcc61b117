// Goal: launch() equals reference() for empty, odd, strided and unaligned shapes; a row ignores its neighbours,
// bit for bit; a residual's sum on the way has the bits of Add and changes none of the norm's; the backward agrees with
// finite differences; bad arguments are refused by name.
#include "kernels/rmsnorm/rmsnorm.h"

#include "kernels/add/add.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

class RmsNormTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, bool>> {};

TEST_P(RmsNormTest, EqualsReference) {
  const auto [tokens, hidden, weighted] = GetParam();
  TensorPool pool(1);
  RmsNorm args{.x = pool.random(DType::kF32, {tokens, hidden + 3}).slice(1, 1, hidden + 1),
               .w = weighted ? pool.random(DType::kF32, {hidden}) : Tensor(),
               .y = pool.output(DType::kF32, {tokens, hidden}),
               .inv_rms = pool.output(DType::kF32, {tokens}),
               .eps = 1e-5f};
  RmsNorm expected = args;
  expected.y = pool.output(DType::kF32, {tokens, hidden});
  expected.inv_rms = pool.output(DType::kF32, {tokens});
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.y, expected.y, testing::tolerance(DType::kF32));
  testing::expect_near(args.inv_rms, expected.inv_rms, testing::tolerance(DType::kF32));

  const Tensor dw = weighted ? pool.zeros(DType::kF32, {hidden}) : Tensor();
  RmsNormBackward backward{.x = args.x, .w = args.w, .inv_rms = args.inv_rms,
                           .dy = pool.random(DType::kF32, {tokens, hidden}),
                           .dx = pool.output(DType::kF32, {tokens, hidden}), .dw = dw};
  RmsNormBackward expected_backward = backward;
  expected_backward.dx = pool.output(DType::kF32, {tokens, hidden});
  if (weighted) expected_backward.dw = pool.zeros(DType::kF32, {hidden});
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, 4e-6f);
  if (weighted) testing::expect_near(backward.dw, expected_backward.dw, 4e-6f);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, RmsNormTest,
                         ::testing::Combine(::testing::Values(0, 1, 3, 65), ::testing::Values(1, 8, 16, 127, 1024),
                                            ::testing::Bool()));

TEST(RmsNormTest, RowIgnoresItsNeighbours) {
  TensorPool pool(2);
  const Tensor x = pool.random(DType::kF32, {37, 200});
  const Tensor w = pool.random(DType::kF32, {200});
  const Tensor together = pool.output(DType::kF32, {37, 200});
  launch(RmsNorm{.x = x, .w = w, .y = together, .inv_rms = {}, .eps = 1e-6f}, test_stream());
  for (int64_t t = 0; t < 37; ++t) {
    const Tensor alone = pool.output(DType::kF32, {1, 200});
    launch(RmsNorm{.x = x.slice(0, t, t + 1), .w = w, .y = alone, .inv_rms = {}, .eps = 1e-6f},
           testing::single_thread_stream());
    testing::expect_same_bits(alone, together.slice(0, t, t + 1));
  }
}

TEST_P(RmsNormTest, SumOnTheWay) {
  const auto [tokens, hidden, weighted] = GetParam();
  TensorPool pool(5);
  const Tensor a = pool.random(DType::kF32, {tokens, hidden + 3}).slice(1, 1, hidden + 1), b = pool.random(DType::kF32, {tokens, hidden});
  const Tensor w = weighted ? pool.random(DType::kF32, {hidden}) : Tensor();
  const Tensor sum = pool.output(DType::kF32, {tokens, hidden}), y = pool.output(DType::kF32, {tokens, hidden});
  const Tensor inv_rms = pool.output(DType::kF32, {tokens});
  launch(Add{.a = a, .b = b, .y = sum}, test_stream());
  launch(RmsNorm{.x = sum, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, test_stream());
  for (const bool in_place : {false, true}) {
    const RmsNorm both{.x = a, .w = w, .y = pool.output(DType::kF32, {tokens, hidden}), .inv_rms = pool.output(DType::kF32, {tokens}),
                       .eps = 1e-5f, .b = b, .sum = in_place ? b : pool.output(DType::kF32, {tokens, hidden})};
    launch(both, test_stream());
    testing::expect_same_bits(both.sum, sum);
    testing::expect_same_bits(both.y, y);
    testing::expect_same_bits(both.inv_rms, inv_rms);
  }
  pool.expect_fences_intact();
}

TEST(RmsNormTest, BackwardIsTheDerivative) {
  TensorPool pool(3);
  const Tensor x = pool.random(DType::kF32, {3, 19});
  const Tensor w = pool.random(DType::kF32, {19});
  const Tensor y = pool.output(DType::kF32, {3, 19});
  const Tensor inv_rms = pool.output(DType::kF32, {3});
  const Tensor dy = pool.random(DType::kF32, {3, 19});
  const auto loss = [&] {
    launch(RmsNorm{.x = x, .w = w, .y = y, .inv_rms = inv_rms, .eps = 1e-5f}, test_stream());
    return testing::dot(y, dy);
  };
  loss();
  const Tensor dx = pool.output(DType::kF32, {3, 19});
  const Tensor dw = pool.zeros(DType::kF32, {19});
  launch(RmsNormBackward{.x = x, .w = w, .inv_rms = inv_rms, .dy = dy, .dx = dx, .dw = dw}, test_stream());
  testing::expect_gradient(loss, x, dx);
  testing::expect_gradient(loss, w, dw);
}

TEST(RmsNormTest, RefusesByName) {
  TensorPool pool(4);
  const RmsNorm args{.x = pool.random(DType::kF32, {2, 8}), .w = pool.random(DType::kF32, {7}),
                     .y = pool.output(DType::kF32, {2, 8}), .inv_rms = {}, .eps = 1e-5f};
  EXPECT_EQ(validate(args).message(), "rmsnorm: w: f32 [7], expected f32 [8]");
  RmsNorm sum = args;
  sum.w = {};
  sum.b = pool.random(DType::kF32, {2, 8});
  EXPECT_EQ(validate(sum).message(), "rmsnorm: sum: absent, expected f32 [2, 8]");
  sum.sum = sum.y;
  EXPECT_EQ(validate(sum).message(), "rmsnorm: sum must not be y");
}

}  // namespace
}  // namespace slipstream::kernels
