// Goal: launch() equals reference() bit for bit, whatever the number of threads; a master that is no number is reported; bad
// arguments are refused by name.
#include "kernels/adamw/adamw.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

AdamWStep random_step(TensorPool& pool, int64_t n, const Tensor& rounded) {
  return {.gradient = pool.random(DType::kF32, {n}), .first = pool.random(DType::kF32, {n}),
          .second = pool.random(DType::kF32, {n}, 0.0f, 1.0f), .master = pool.random(DType::kF32, {n}),
          .rounded = rounded, .nonfinite = pool.zeros(DType::kI32, {1}), .beta1 = 0.9f, .beta2 = 0.95f, .rate = 1e-3f,
          .correct2 = 1.7f, .eps = 1e-8f, .decay = 0.999f, .scale = 0.3f};
}

class AdamWTest : public ::testing::TestWithParam<int64_t> {};

TEST_P(AdamWTest, EqualsReference) {
  const int64_t n = GetParam();
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    for (Stream* stream : {&test_stream(), &testing::single_thread_stream()}) {
      TensorPool pool(1);
      const AdamWStep args = random_step(pool, n, pool.output(dtype, {n}));
      AdamWStep expected = args;
      expected.first = pool.copy(args.first), expected.second = pool.copy(args.second);
      expected.master = pool.copy(args.master), expected.rounded = pool.output(dtype, {n});
      reference(expected);
      launch(args, *stream);
      testing::expect_same_bits(args.first, expected.first);
      testing::expect_same_bits(args.second, expected.second);
      testing::expect_same_bits(args.master, expected.master);
      testing::expect_same_bits(args.rounded, expected.rounded);
      EXPECT_EQ(args.nonfinite.i32()[0], 0);
      pool.expect_fences_intact();
    }
  }
}

TEST_P(AdamWTest, SquaresEqualReference) {
  const int64_t n = GetParam();
  TensorPool pool(2);
  const Tensor x = pool.random(DType::kF32, {n}, -3.0f, 3.0f);
  const Tensor sum = pool.output(DType::kI32, {2}), alone = pool.output(DType::kI32, {2}), expected = pool.output(DType::kI32, {2});
  launch(SumSquares{.x = x, .sum = sum}, test_stream());
  launch(SumSquares{.x = x, .sum = alone}, testing::single_thread_stream());
  reference(SumSquares{.x = x, .sum = expected});
  testing::expect_same_bits(sum, expected);
  testing::expect_same_bits(alone, expected);
  double value = 0.0, plain = 0.0;
  std::memcpy(&value, sum.raw(), sizeof value);
  for (int64_t i = 0; i < n; ++i) plain += double{x.f32()[i]} * double{x.f32()[i]};
  EXPECT_NEAR(value, plain, 1e-12 * (1.0 + plain));
}

INSTANTIATE_TEST_SUITE_P(Sizes, AdamWTest, ::testing::Values(0, 1, 7, 255, 256, 16384, 16385, 100000));

TEST(AdamWTest, MastersThatAreNoNumbersAreReported) {
  for (const float bad : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    TensorPool pool(3);
    const AdamWStep args = random_step(pool, 100, {});
    args.master.f32()[99] = bad;
    launch(args, test_stream());
    EXPECT_EQ(args.nonfinite.i32()[0], 1);
  }
}

TEST(AdamWTest, RefusesByName) {
  TensorPool pool(4);
  AdamWStep args = random_step(pool, 8, {});
  args.master = pool.random(DType::kF32, {7});
  EXPECT_EQ(validate(args).message(), "adamw: master: f32 [7], expected a dense f32 tensor of the shape of f32 [8]");
  const Tensor x = pool.random(DType::kF32, {2, 9}).slice(1, 0, 8);
  EXPECT_EQ(validate(SumSquares{.x = x, .sum = pool.zeros(DType::kI32, {2})}).message(),
            "sum_squares: x: f32 [2, 8], expected a dense f32 tensor of the shape of f32 [2, 8]");
}

}  // namespace
}  // namespace slipstream::kernels
