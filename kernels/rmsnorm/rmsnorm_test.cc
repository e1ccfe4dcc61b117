// Goal: launch() equals reference() for empty, odd, strided and unaligned shapes; a row ignores its neighbours,
// bit for bit; the backward agrees with finite differences; bad arguments are refused by name.
#include "kernels/rmsnorm/rmsnorm.h"

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
}

}  // namespace
}  // namespace slipstream::kernels
