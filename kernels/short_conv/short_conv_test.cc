// Goal: launch() equals reference() for ragged, odd and strided shapes and any width; a sequence cut into any
// pieces, or in any batch, gives the same bits and leaves the same tail; the backward agrees with finite
// differences; bad arguments are refused by name.
#include "kernels/short_conv/short_conv.h"

#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::sequences_of;
using testing::TensorPool;
using testing::test_stream;

class ShortConvTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t>> {};

TEST_P(ShortConvTest, EqualsReference) {
  const auto [channels, taps] = GetParam();
  TensorPool pool(1);
  const Sequences sequences = sequences_of(pool, {5, 0, 1, 2, 70}, {0, 4, 9, 0, 1});
  const int64_t tokens = sequences.rows();
  const Tensor tail = pool.random(DType::kF32, {6, taps - 1, channels});
  ShortConv args{.x = pool.random(DType::kF32, {tokens, channels + 3}, -3, 3).slice(1, 1, channels + 1),
                 .w = pool.random(DType::kF32, {channels, taps}),
                 .sequences = sequences,
                 .tail = tail,
                 .slots = pool.ints({5}, {3, 0, 5, 1, 2}),
                 .y = pool.output(DType::kF32, {tokens, channels})};
  ShortConv expected = args;
  expected.tail = pool.copy(tail);
  expected.y = pool.output(DType::kF32, {tokens, channels});
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.y, expected.y, testing::tolerance(DType::kF32));
  testing::expect_same_bits(args.tail, expected.tail);

  ShortConvBackward backward{.x = args.x,
                             .w = args.w,
                             .sequences = sequences_of(pool, {5, 0, 1, 2, 70}),
                             .dy = pool.random(DType::kF32, {tokens, channels}),
                             .dx = pool.output(DType::kF32, {tokens, channels}),
                             .dw = pool.random(DType::kF32, {channels, taps})};
  ShortConvBackward expected_backward = backward;
  expected_backward.dx = pool.output(DType::kF32, {tokens, channels});
  expected_backward.dw = pool.copy(backward.dw);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, 4e-6f);
  testing::expect_near(backward.dw, expected_backward.dw, 4e-6f);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, ShortConvTest,
                         ::testing::Combine(::testing::Values(1, 16, 40, 300),
                                            ::testing::Values(1, 2, 4, 5)));

TEST(ShortConvTest, NoRowsAndNoSequences) {
  TensorPool pool(2);
  const Tensor w = pool.random(DType::kF32, {8, 4});
  const Tensor tail = pool.output(DType::kF32, {1, 3, 8});
  // A sequence without rows that has seen nothing keeps nothing: zeros.
  launch(ShortConv{.x = pool.output(DType::kF32, {0, 8}),
                   .w = w,
                   .sequences = sequences_of(pool, {0}),
                   .tail = tail,
                   .slots = pool.ints({1}, {0}),
                   .y = pool.output(DType::kF32, {0, 8})},
         test_stream());
  testing::expect_same_bits(tail, pool.zeros(DType::kF32, {1, 3, 8}));
  launch(ShortConv{.x = pool.output(DType::kF32, {0, 8}),
                   .w = w,
                   .sequences = sequences_of(pool, {}),
                   .tail = {},
                   .slots = {},
                   .y = pool.output(DType::kF32, {0, 8})},
         test_stream());
}

TEST(ShortConvTest, AnyCutGivesTheSameBits) {
  constexpr int64_t kTokens = 41, kChannels = 150, kTaps = 4;
  TensorPool pool(3);
  const Tensor x = pool.random(DType::kF32, {kTokens, kChannels}, -2, 2);
  const Tensor w = pool.random(DType::kF32, {kChannels, kTaps});
  const Tensor whole = pool.output(DType::kF32, {kTokens, kChannels});
  const Tensor whole_tail = pool.output(DType::kF32, {1, kTaps - 1, kChannels});
  const Tensor slot = pool.ints({1}, {0});
  launch(ShortConv{.x = x,
                   .w = w,
                   .sequences = sequences_of(pool, {kTokens}),
                   .tail = whole_tail,
                   .slots = slot,
                   .y = whole},
         test_stream());
  for (int64_t piece : {1, 2, 3, 7, 40}) {
    const Tensor y = pool.output(DType::kF32, {kTokens, kChannels});
    const Tensor tail = pool.output(DType::kF32, {1, kTaps - 1, kChannels});
    for (int64_t begin = 0; begin < kTokens; begin += piece) {
      const int64_t end = std::min(begin + piece, kTokens);
      launch(ShortConv{.x = x.slice(0, begin, end),
                       .w = w,
                       .sequences = sequences_of(pool, {static_cast<int32_t>(end - begin)},
                                                 {static_cast<int32_t>(begin)}),
                       .tail = tail,
                       .slots = slot,
                       .y = y.slice(0, begin, end)},
             testing::single_thread_stream());
    }
    testing::expect_same_bits(y, whole);
    testing::expect_same_bits(tail, whole_tail);
  }
  // In a batch, beside a sequence whose rows are NaN.
  const Tensor both = pool.output(DType::kF32, {kTokens + 3, kChannels});
  for (int64_t t = 0; t < kTokens; ++t) std::copy(x.row(t), x.row(t) + kChannels, both.row(t + 3));
  const Tensor y = pool.output(DType::kF32, {kTokens + 3, kChannels});
  launch(
      ShortConv{
          .x = both, .w = w, .sequences = sequences_of(pool, {3, kTokens}), .tail = {}, .slots = {}, .y = y},
      test_stream());
  testing::expect_same_bits(y.slice(0, 3, kTokens + 3), whole);
}

TEST(ShortConvTest, ExtremeInputsStayFinite) {
  TensorPool pool(4);
  const Tensor x = pool.random(DType::kF32, {6, 20}, -1e30f, 1e30f);
  const Tensor w = pool.random(DType::kF32, {20, 4});
  const Tensor y = pool.output(DType::kF32, {6, 20});
  const Sequences sequences = sequences_of(pool, {6});
  launch(ShortConv{.x = x, .w = w, .sequences = sequences, .tail = {}, .slots = {}, .y = y}, test_stream());
  const Tensor dx = pool.output(DType::kF32, {6, 20});
  launch(ShortConvBackward{.x = x,
                           .w = w,
                           .sequences = sequences,
                           .dy = pool.random(DType::kF32, {6, 20}),
                           .dx = dx,
                           .dw = pool.zeros(DType::kF32, {20, 4})},
         test_stream());
  for (int64_t i = 0; i < y.numel(); ++i) {
    EXPECT_TRUE(std::isfinite(y.f32()[i])) << i;
    EXPECT_TRUE(std::isfinite(dx.f32()[i])) << i;
  }
}

TEST(ShortConvTest, BackwardIsTheDerivative) {
  TensorPool pool(5);
  const Sequences sequences = sequences_of(pool, {6, 2});
  const Tensor x = pool.random(DType::kF32, {8, 19});
  const Tensor w = pool.random(DType::kF32, {19, 4});
  const Tensor y = pool.output(DType::kF32, {8, 19});
  const Tensor dy = pool.random(DType::kF32, {8, 19});
  const auto loss = [&] {
    launch(ShortConv{.x = x, .w = w, .sequences = sequences, .tail = {}, .slots = {}, .y = y}, test_stream());
    return testing::dot(y, dy);
  };
  const Tensor dx = pool.output(DType::kF32, {8, 19});
  const Tensor dw = pool.zeros(DType::kF32, {19, 4});
  launch(ShortConvBackward{.x = x, .w = w, .sequences = sequences, .dy = dy, .dx = dx, .dw = dw},
         test_stream());
  testing::expect_gradient(loss, x, dx);
  testing::expect_gradient(loss, w, dw);
}

TEST(ShortConvTest, RefusesByName) {
  TensorPool pool(6);
  ShortConv args{.x = pool.random(DType::kF32, {2, 8}),
                 .w = pool.random(DType::kF32, {8, 4}),
                 .sequences = sequences_of(pool, {2}, {3}),
                 .tail = {},
                 .slots = {},
                 .y = pool.output(DType::kF32, {2, 8})};
  EXPECT_EQ(validate(args).message(), "short_conv: tail: needed where a sequence has cached tokens");
  args.tail = pool.zeros(DType::kF32, {2, 4, 8});
  args.slots = pool.ints({1}, {2});
  EXPECT_EQ(validate(args).message(), "short_conv: tail: f32 [2, 4, 8], expected f32 [*, 3, 8]");
  args.tail = pool.zeros(DType::kF32, {2, 3, 8});
  EXPECT_EQ(validate(args).message(), "short_conv: slots: slot out of range");
  args.sequences = sequences_of(pool, {1, 1});
  args.slots = pool.ints({2}, {1, 1});
  EXPECT_EQ(validate(args).message(), "short_conv: slots: two sequences in one slot");
  args.sequences = sequences_of(pool, {3});
  EXPECT_EQ(validate(args).message(), "short_conv: row_begin must ascend from 0 to the number of rows");
}

}  // namespace
}  // namespace slipstream::kernels
