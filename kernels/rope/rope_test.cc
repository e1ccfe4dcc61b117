// Goal: the table has the published models' fp32 frequencies and angles, up to a million positions; launch()
// equals reference() in both layouts for empty, odd and strided shapes; a token ignores its neighbours, bit
// for bit; the inverse is the backward; bad arguments are refused by name.
#include "kernels/rope/rope.h"

#include <cmath>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

TEST(RopeTableTest, EqualsReference) {
  TensorPool pool(1);
  for (const int64_t half : {1, 7, 8, 32}) {
    for (const double theta : {1e4, 1e6, 8e6}) {
      const Tensor positions = pool.random_ints({300}, 0, 1'048'576);
      const RopeTable args{.positions = positions,
                           .cos = pool.output(DType::kF32, {300, half + 1}).slice(1, 1, half + 1),
                           .sin = pool.output(DType::kF32, {300, half}),
                           .theta = theta};
      RopeTable expected = args;
      expected.cos = pool.output(DType::kF32, {300, half});
      expected.sin = pool.output(DType::kF32, {300, half});
      launch(args, test_stream());
      reference(expected);
      testing::expect_near(args.cos, expected.cos, 3e-8f);  // half an ulp of one: 6e-8 over 1 + max
      testing::expect_near(args.sin, expected.sin, 3e-8f);
    }
  }
  pool.expect_fences_intact();
}

// Frequencies printed by transformers 5.24 for theta 1e6 and 8e6 at R = 8; cos and sin of the fp32 angles.
TEST(RopeTableTest, HasThePublishedFrequencies) {
  TensorPool pool(2);
  const float frequencies[2][4] = {{0x1p0f, 0x1.030dc6p-5f, 0x1.0624dep-10f, 0x1.094564p-15f},
                                   {0x1p0f, 0x1.341190p-6f, 0x1.72ba42p-12f, 0x1.be2188p-18f}};
  const Tensor positions = pool.ints({5}, {0, 1, 77, 202'751, 1'048'575});
  for (int k = 0; k < 2; ++k) {
    const Tensor cos = pool.output(DType::kF32, {5, 4}), sin = pool.output(DType::kF32, {5, 4});
    launch(RopeTable{.positions = positions, .cos = cos, .sin = sin, .theta = k == 0 ? 1e6 : 8e6},
           test_stream());
    for (int64_t t = 0; t < 5; ++t) {
      for (int64_t i = 0; i < 4; ++i) {
        const float angle = static_cast<float>(positions.i32()[t]) * frequencies[k][i];
        EXPECT_NEAR(cos.row(t)[i], std::cos(double{angle}), 6e-8) << angle;
        EXPECT_NEAR(sin.row(t)[i], std::sin(double{angle}), 6e-8) << angle;
      }
    }
  }
}

class RopeTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t, RopeLayout, bool>> {};

Rope random_rope(TensorPool& pool, int64_t tokens, int64_t heads, int64_t dims, RopeLayout layout,
                 bool inverse) {
  const Tensor wide = pool.random(DType::kF32, {tokens, heads, dims + 5});
  return {.x = wide.slice(2, 3, dims + 3),
          .cos = pool.random(DType::kF32, {tokens, dims / 2}),
          .sin = pool.random(DType::kF32, {tokens, dims / 2}),
          .layout = layout,
          .inverse = inverse};
}

TEST_P(RopeTest, EqualsReference) {
  const auto [tokens, heads, dims, layout, inverse] = GetParam();
  TensorPool pool(3);
  const Rope args = random_rope(pool, tokens, heads, dims, layout, inverse);
  Rope expected = args;
  expected.x = pool.copy(args.x);
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.x, expected.x, testing::tolerance(DType::kF32));
  pool.expect_fences_intact();
}

TEST_P(RopeTest, TokenIgnoresItsNeighbours) {
  const auto [tokens, heads, dims, layout, inverse] = GetParam();
  TensorPool pool(4);
  const Rope together = random_rope(pool, tokens, heads, dims, layout, inverse);
  const Tensor before = pool.copy(together.x);
  launch(together, test_stream());
  for (int64_t t = 0; t < tokens; ++t) {
    Rope alone = together;
    alone.x = before.slice(0, t, t + 1);
    alone.cos = together.cos.slice(0, t, t + 1);
    alone.sin = together.sin.slice(0, t, t + 1);
    launch(alone, testing::single_thread_stream());
    testing::expect_same_bits(alone.x, together.x.slice(0, t, t + 1));
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RopeTest,
                         ::testing::Combine(::testing::Values(0, 1, 130), ::testing::Values(1, 3),
                                            ::testing::Values(2, 14, 16, 64, 70),
                                            ::testing::Values(RopeLayout::kInterleaved,
                                                              RopeLayout::kHalfSplit),
                                            ::testing::Bool()));

TEST(RopeTest, PairsOfEachLayout) {
  TensorPool pool(5);
  const Tensor cos = pool.zeros(DType::kF32, {1, 2}), sin = pool.random(DType::kF32, {1, 2}, 1.0f, 1.0f);
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    const Tensor x = pool.zeros(DType::kF32, {1, 1, 4});
    for (int i = 0; i < 4; ++i) x.f32()[i] = static_cast<float>(i + 1);
    launch(Rope{.x = x, .cos = cos, .sin = sin, .layout = layout}, test_stream());
    // A quarter turn: (a, b) -> (-b, a).
    const bool interleaved = layout == RopeLayout::kInterleaved;
    EXPECT_EQ(x.f32()[0], interleaved ? -2.0f : -3.0f);
    EXPECT_EQ(x.f32()[1], interleaved ? 1.0f : -4.0f);
    EXPECT_EQ(x.f32()[2], interleaved ? -4.0f : 1.0f);
    EXPECT_EQ(x.f32()[3], interleaved ? 3.0f : 2.0f);
  }
}

TEST(RopeTest, InverseIsTheBackward) {
  TensorPool pool(6);
  for (const RopeLayout layout : {RopeLayout::kInterleaved, RopeLayout::kHalfSplit}) {
    const Rope args = random_rope(pool, 2, 2, 20, layout, /*inverse=*/false);
    const Tensor input = pool.copy(args.x), dy = pool.random(DType::kF32, {2, 2, 20});
    const auto loss = [&] {
      Rope forward = args;
      forward.x = pool.copy(input);
      launch(forward, test_stream());
      return testing::dot(forward.x, dy);
    };
    Rope backward = args;
    backward.x = pool.copy(dy);
    backward.inverse = true;
    launch(backward, test_stream());
    testing::expect_gradient(loss, input, backward.x);
  }
}

TEST(RopeTest, RefusesByName) {
  TensorPool pool(7);
  Rope args = random_rope(pool, 2, 1, 8, RopeLayout::kInterleaved, false);
  args.sin = pool.random(DType::kF32, {2, 3});
  EXPECT_EQ(validate(args).message(), "rope: sin: f32 [2, 3], expected f32 [2, 4]");
  args.x = pool.random(DType::kF32, {2, 1, 7});
  EXPECT_EQ(validate(args).message(), "rope: x: the number of dimensions must be even");
  const RopeTable table{.positions = pool.ints({1}, {0}),
                        .cos = pool.output(DType::kF32, {1, 4}),
                        .sin = pool.output(DType::kF32, {1, 4}),
                        .theta = 0.0};
  EXPECT_EQ(validate(table).message(), "rope_table: theta must be > 0");
}

}  // namespace
}  // namespace slipstream::kernels
