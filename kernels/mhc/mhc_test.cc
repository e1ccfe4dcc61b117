// Goal: launch() equals reference() for empty, odd and strided shapes of one to eight streams, and in place;
// comb is doubly stochastic; a token ignores its neighbours and sums over tokens ignore the threads, bit for
// bit; every backward agrees with finite differences; extreme and NaN tokens stay to themselves; bad
// arguments are refused.
#include "kernels/mhc/mhc.h"
#include "kernels/rmsnorm/rmsnorm.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

constexpr int64_t kIterations = 20;
constexpr float kTolerance = 4e-6f;  // some forty normalisations in a row

struct Shape {
  int64_t tokens, n, width;
  int64_t columns() const { return (2 + n) * n; }
};

// Streams as a column range of wider ones: strided and unaligned.
Tensor random_streams(TensorPool& pool, const Shape& s) {
  return pool.random(DType::kF32, {s.tokens, s.n, s.width + 3}).slice(2, 1, s.width + 1);
}
Tensor output_streams(TensorPool& pool, const Shape& s) {
  return pool.output(DType::kF32, {s.tokens, s.n, s.width + 3}).slice(2, 1, s.width + 1);
}
Tensor random_rows(TensorPool& pool, int64_t rows, int64_t columns) {
  return pool.random(DType::kF32, {rows, columns + 3}, -2.0f, 2.0f).slice(1, 1, columns + 1);
}

// Dense outputs; x, zr, base and scale random.
MhcMix random_mix(TensorPool& pool, const Shape& s) {
  return {.x = random_streams(pool, s),
          .zr = random_rows(pool, s.tokens, s.columns()),
          .base = pool.random(DType::kF32, {s.columns()}),
          .scale = pool.random(DType::kF32, {3}, 0.5f, 1.5f),
          .norm_eps = 1e-5f,
          .eps = 1e-6f,
          .iterations = kIterations,
          .inv_rms = pool.output(DType::kF32, {s.tokens}),
          .post = pool.output(DType::kF32, {s.tokens, s.n}),
          .comb = pool.output(DType::kF32, {s.tokens, s.n, s.n}),
          .u = pool.output(DType::kF32, {s.tokens, s.width})};
}

MhcMixBackward random_mix_backward(TensorPool& pool, const MhcMix& mix) {
  const Shape s{mix.x.size(0), mix.x.size(1), mix.x.size(2)};
  return {.x = mix.x,
          .zr = mix.zr,
          .base = mix.base,
          .scale = mix.scale,
          .eps = mix.eps,
          .iterations = mix.iterations,
          .inv_rms = mix.inv_rms,
          .du = random_rows(pool, s.tokens, s.width),
          .dpost = random_rows(pool, s.tokens, s.n),
          .dcomb = pool.random(DType::kF32, {s.tokens, s.n, s.n}),
          .dx = random_streams(pool, s),
          .dzr = pool.output(DType::kF32, {s.tokens, s.columns() + 1}).slice(1, 0, s.columns()),
          .dbase = pool.random(DType::kF32, {s.columns()}),
          .dscale = pool.random(DType::kF32, {3})};
}

// The same inputs; outputs (and sums) of their own.
MhcMix with_fresh_outputs(TensorPool& pool, MhcMix args) {
  args.inv_rms = pool.output(DType::kF32, {args.x.size(0)});
  args.post = pool.output(DType::kF32, {args.x.size(0), args.x.size(1)});
  args.comb = pool.output(DType::kF32, {args.x.size(0), args.x.size(1), args.x.size(1)});
  args.u = pool.output(DType::kF32, {args.x.size(0), args.x.size(2)});
  return args;
}
MhcMixBackward with_fresh_outputs(TensorPool& pool, MhcMixBackward args) {
  args.dx = pool.copy(args.dx);
  args.dzr = pool.output(DType::kF32, {args.x.size(0), args.zr.size(1)});
  args.dbase = pool.copy(args.dbase);
  args.dscale = pool.copy(args.dscale);
  return args;
}

// A run of tokens; the sums over tokens are shared with `args`.
MhcMix tokens_of(const MhcMix& args, int64_t begin, int64_t end) {
  MhcMix part = args;
  for (Tensor* t : {&part.x, &part.zr, &part.inv_rms, &part.post, &part.comb, &part.u})
    *t = t->slice(0, begin, end);
  return part;
}
MhcMixBackward tokens_of(const MhcMixBackward& args, int64_t begin, int64_t end) {
  MhcMixBackward part = args;
  for (Tensor* t :
       {&part.x, &part.zr, &part.inv_rms, &part.du, &part.dpost, &part.dcomb, &part.dx, &part.dzr}) {
    *t = t->slice(0, begin, end);
  }
  return part;
}

class MhcTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t>> {
 protected:
  Shape shape() const {
    const auto [tokens, n, width] = GetParam();
    return {tokens, n, width};
  }
};

TEST_P(MhcTest, MixEqualsReference) {
  TensorPool pool(1);
  const MhcMix args = random_mix(pool, shape());
  const MhcMix expected = with_fresh_outputs(pool, args);
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.inv_rms, expected.inv_rms, kTolerance);
  testing::expect_near(args.post, expected.post, kTolerance);
  testing::expect_near(args.comb, expected.comb, kTolerance);
  testing::expect_near(args.u, expected.u, kTolerance);

  const MhcMixBackward backward = random_mix_backward(pool, args);
  const MhcMixBackward expected_backward = with_fresh_outputs(pool, backward);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, kTolerance);
  testing::expect_near(backward.dzr, expected_backward.dzr, kTolerance);
  testing::expect_near(backward.dbase, expected_backward.dbase, kTolerance);
  testing::expect_near(backward.dscale, expected_backward.dscale, kTolerance);
  pool.expect_fences_intact();
}

TEST_P(MhcTest, MergeEqualsReference) {
  const Shape s = shape();
  TensorPool pool(2);
  const MhcMerge args{.x = random_streams(pool, s),
                      .y = random_rows(pool, s.tokens, s.width),
                      .post = random_rows(pool, s.tokens, s.n),
                      .comb = pool.random(DType::kF32, {s.tokens, s.n, s.n}),
                      .out = output_streams(pool, s)};
  MhcMerge expected = args;
  expected.out = output_streams(pool, s);
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.out, expected.out, testing::tolerance(DType::kF32));
  MhcMerge in_place = args;
  in_place.x = in_place.out = pool.copy(args.x);
  launch(in_place, test_stream());
  testing::expect_same_bits(in_place.out, args.out);

  const MhcMergeBackward backward{.x = args.x,
                                  .y = args.y,
                                  .post = args.post,
                                  .comb = args.comb,
                                  .dout = random_streams(pool, s),
                                  .dx = output_streams(pool, s),
                                  .dy = pool.output(DType::kF32, {s.tokens, s.width}),
                                  .dpost = pool.output(DType::kF32, {s.tokens, s.n}),
                                  .dcomb = pool.output(DType::kF32, {s.tokens, s.n, s.n})};
  const auto fresh = [&] {
    MhcMergeBackward other = backward;
    other.dx = output_streams(pool, s);
    other.dy = pool.output(DType::kF32, {s.tokens, s.width});
    other.dpost = pool.output(DType::kF32, {s.tokens, s.n});
    other.dcomb = pool.output(DType::kF32, {s.tokens, s.n, s.n});
    return other;
  };
  const MhcMergeBackward expected_backward = fresh();
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dx, expected_backward.dx, testing::tolerance(DType::kF32));
  testing::expect_near(backward.dy, expected_backward.dy, testing::tolerance(DType::kF32));
  testing::expect_near(backward.dpost, expected_backward.dpost, testing::tolerance(DType::kF32));
  testing::expect_near(backward.dcomb, expected_backward.dcomb, testing::tolerance(DType::kF32));
  MhcMergeBackward backward_in_place = fresh();
  backward_in_place.dout = backward_in_place.dx = pool.copy(backward.dout);
  launch(backward_in_place, test_stream());
  testing::expect_same_bits(backward_in_place.dx, backward.dx);
  testing::expect_same_bits(backward_in_place.dcomb, backward.dcomb);
  pool.expect_fences_intact();
}

TEST_P(MhcTest, EndsEqualReference) {
  const Shape s = shape();
  TensorPool pool(3);
  const Tensor row = random_rows(pool, s.tokens, s.width), streams = random_streams(pool, s);
  const auto rows_out = [&] { return pool.output(DType::kF32, {s.tokens, s.width}); };
  const MhcExpand expand{.x = row, .out = output_streams(pool, s)},
      expand_ref{.x = row, .out = output_streams(pool, s)};
  launch(expand, test_stream());
  reference(expand_ref);
  testing::expect_same_bits(expand.out, expand_ref.out);
  const MhcMeanBackward spread{.dout = row, .dx = output_streams(pool, s)},
      spread_ref{.dout = row, .dx = output_streams(pool, s)};
  launch(spread, test_stream());
  reference(spread_ref);
  testing::expect_same_bits(spread.dx, spread_ref.dx);
  const MhcMean mean{.x = streams, .out = rows_out()}, mean_ref{.x = streams, .out = rows_out()};
  launch(mean, test_stream());
  reference(mean_ref);
  testing::expect_near(mean.out, mean_ref.out, testing::tolerance(DType::kF32));
  const MhcExpandBackward sum{.dout = streams, .dx = rows_out()}, sum_ref{.dout = streams, .dx = rows_out()};
  launch(sum, test_stream());
  reference(sum_ref);
  testing::expect_near(sum.dx, sum_ref.dx, testing::tolerance(DType::kF32));
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, MhcTest,
                         ::testing::Combine(::testing::Values(0, 1, 19, 65),
                                            ::testing::Values(1, 2, 3, 4, 5, 8),
                                            ::testing::Values(1, 16, 67)));
INSTANTIATE_TEST_SUITE_P(MoreStreams, MhcTest,
                         ::testing::Combine(::testing::Values(33), ::testing::Values(6, 7),
                                            ::testing::Values(130)));

TEST(MhcTest, OneIterationAndMany) {
  for (const int64_t iterations : {1, 2, 100}) {
    TensorPool pool(4);
    MhcMix args = random_mix(pool, {21, 4, 24});
    args.iterations = iterations;
    const MhcMix expected = with_fresh_outputs(pool, args);
    launch(args, test_stream());
    reference(expected);
    testing::expect_near(args.comb, expected.comb, kTolerance);
    const MhcMixBackward backward = random_mix_backward(pool, args);
    const MhcMixBackward expected_backward = with_fresh_outputs(pool, backward);
    launch(backward, test_stream());
    reference(expected_backward);
    testing::expect_near(backward.dzr, expected_backward.dzr, kTolerance);
  }
}

TEST(MhcTest, CombIsDoublyStochastic) {
  TensorPool pool(5);
  MhcMix args = random_mix(pool, {50, 4, 32});
  args.iterations = 500;
  launch(args, test_stream());
  for (int64_t t = 0; t < 50; ++t) {
    const float* comb = args.comb.row(t);
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_NEAR(comb[4 * i] + comb[4 * i + 1] + comb[4 * i + 2] + comb[4 * i + 3], 1.0f, 1e-4f);
      EXPECT_NEAR(comb[i] + comb[4 + i] + comb[8 + i] + comb[12 + i], 1.0f, 1e-5f);
    }
  }
}

TEST(MhcTest, TokenIgnoresItsNeighbours) {
  constexpr int64_t kTokens = 53;
  for (const int64_t n : {2, 4, 7}) {
    TensorPool pool(6);
    const Shape s{kTokens, n, 90};
    const MhcMix together = random_mix(pool, s), pieces = with_fresh_outputs(pool, together);
    launch(together, test_stream());
    const MhcMixBackward back_together = random_mix_backward(pool, together);
    const MhcMixBackward back_pieces = with_fresh_outputs(pool, back_together);
    launch(back_together, test_stream());
    const MhcMerge merge_together{.x = together.x,
                                  .y = together.u,
                                  .post = together.post,
                                  .comb = together.comb,
                                  .out = output_streams(pool, s)};
    launch(merge_together, test_stream());
    // Runs of 1, 2, ... tokens: every place in a group of sixteen, and groups of every size.
    for (int64_t begin = 0, size = 1; begin < kTokens; begin += size++) {
      const int64_t end = std::min(begin + size, kTokens);
      launch(tokens_of(pieces, begin, end), testing::single_thread_stream());
      launch(tokens_of(back_pieces, begin, end), testing::single_thread_stream());
      const MhcMerge merge{.x = together.x.slice(0, begin, end),
                           .y = together.u.slice(0, begin, end),
                           .post = together.post.slice(0, begin, end),
                           .comb = together.comb.slice(0, begin, end),
                           .out = output_streams(pool, {end - begin, n, s.width})};
      launch(merge, testing::single_thread_stream());
      testing::expect_same_bits(merge.out, merge_together.out.slice(0, begin, end));
    }
    testing::expect_same_bits(pieces.inv_rms, together.inv_rms);
    testing::expect_same_bits(pieces.post, together.post);
    testing::expect_same_bits(pieces.comb, together.comb);
    testing::expect_same_bits(pieces.u, together.u);
    testing::expect_same_bits(back_pieces.dx, back_together.dx);
    testing::expect_same_bits(back_pieces.dzr, back_together.dzr);
  }
}

TEST(MhcTest, SumsOverTokensIgnoreTheThreads) {
  TensorPool pool(7);
  const MhcMix mix = random_mix(pool, {200, 4, 64});
  launch(mix, test_stream());
  const MhcMixBackward first = random_mix_backward(pool, mix);
  const MhcMixBackward second = with_fresh_outputs(pool, first);
  launch(first, test_stream());
  launch(second, testing::single_thread_stream());
  testing::expect_same_bits(first.dbase, second.dbase);
  testing::expect_same_bits(first.dscale, second.dscale);
  testing::expect_same_bits(first.dx, second.dx);
}

// zr is an input of its own here: its part of the gradient of x is the caller's.
TEST(MhcTest, MixBackwardIsTheDerivative) {
  for (const int64_t n : {2, 4}) {
    TensorPool pool(8);
    const MhcMix mix = random_mix(pool, {3, n, 7});
    MhcMixBackward backward = random_mix_backward(pool, mix);
    for (Tensor* t : {&backward.dx, &backward.dbase, &backward.dscale}) {
      *t = pool.copy(*t);
      std::fill(t->f32(), t->f32() + t->numel(), 0.0f);
    }
    const auto loss = [&] {
      launch(mix, test_stream());
      return testing::dot(mix.u, backward.du) + testing::dot(mix.post, backward.dpost) +
             testing::dot(mix.comb, backward.dcomb);
    };
    loss();
    launch(backward, test_stream());
    testing::expect_gradient(loss, mix.x, backward.dx);
    testing::expect_gradient(loss, mix.zr, backward.dzr);
    testing::expect_gradient(loss, mix.base, backward.dbase);
    testing::expect_gradient(loss, mix.scale, backward.dscale);
  }
}

TEST(MhcTest, MergeBackwardIsTheDerivative) {
  TensorPool pool(9);
  const Shape s{3, 4, 7};
  const MhcMerge merge{.x = random_streams(pool, s),
                       .y = random_rows(pool, 3, 7),
                       .post = random_rows(pool, 3, 4),
                       .comb = pool.random(DType::kF32, {3, 4, 4}),
                       .out = output_streams(pool, s)};
  const MhcMergeBackward backward{.x = merge.x,
                                  .y = merge.y,
                                  .post = merge.post,
                                  .comb = merge.comb,
                                  .dout = random_streams(pool, s),
                                  .dx = output_streams(pool, s),
                                  .dy = pool.output(DType::kF32, {3, 7}),
                                  .dpost = pool.output(DType::kF32, {3, 4}),
                                  .dcomb = pool.output(DType::kF32, {3, 4, 4})};
  launch(backward, test_stream());
  const auto loss = [&] {
    launch(merge, test_stream());
    return testing::dot(merge.out, backward.dout);
  };
  testing::expect_gradient(loss, merge.x, backward.dx);
  testing::expect_gradient(loss, merge.y, backward.dy);
  testing::expect_gradient(loss, merge.post, backward.dpost);
  testing::expect_gradient(loss, merge.comb, backward.dcomb);
}

TEST(MhcTest, EndsBackwardIsTheDerivative) {
  TensorPool pool(10);
  const Shape s{3, 4, 7};
  const Tensor row = random_rows(pool, 3, 7), streams = random_streams(pool, s);
  const Tensor row_out = pool.output(DType::kF32, {3, 7}), streams_out = output_streams(pool, s);
  const Tensor drow = random_rows(pool, 3, 7), dstreams = random_streams(pool, s);
  const Tensor row_grad = pool.output(DType::kF32, {3, 7}), streams_grad = output_streams(pool, s);
  launch(MhcExpandBackward{.dout = dstreams, .dx = row_grad}, test_stream());
  testing::expect_gradient(
      [&] {
        launch(MhcExpand{.x = row, .out = streams_out}, test_stream());
        return testing::dot(streams_out, dstreams);
      },
      row, row_grad);
  launch(MhcMeanBackward{.dout = drow, .dx = streams_grad}, test_stream());
  testing::expect_gradient(
      [&] {
        launch(MhcMean{.x = streams, .out = row_out}, test_stream());
        return testing::dot(row_out, drow);
      },
      streams, streams_grad);
}

// A zero token, large and tiny ones, logits that leave the softmax at 0 and 1, and a token of NaN.
TEST(MhcTest, HostileTokensStayToThemselves) {
  constexpr int64_t kTokens = 20, kNaNToken = 3;
  TensorPool pool(11);
  const Shape s{kTokens, 4, 40};
  const MhcMix args = random_mix(pool, s);
  const auto fill = [&](const Tensor& t, int64_t token, float value) {
    for (int64_t i = 0; i < t.size(1); ++i) std::fill(t[token].row(i), t[token].row(i) + t.size(2), value);
  };
  fill(args.x, 0, 0.0f);
  fill(args.x, 1, 1e15f);
  fill(args.x, 2, 1e-30f);
  fill(args.x, kNaNToken, std::numeric_limits<float>::quiet_NaN());
  for (int64_t e = 0; e < s.columns(); ++e) args.zr.row(1)[e] *= 1e15f;
  for (int64_t e = 0; e < s.columns(); ++e) args.zr.row(4)[e] *= e % 3 == 0 ? 1e4f : -1e4f;
  launch(args, test_stream());
  const MhcMixBackward backward = random_mix_backward(pool, args);
  launch(backward, test_stream());
  const MhcMerge merge{
      .x = args.x, .y = args.u, .post = args.post, .comb = args.comb, .out = output_streams(pool, s)};
  launch(merge, test_stream());
  for (int64_t t = 0; t < kTokens; ++t) {
    if (t == kNaNToken) continue;
    for (int64_t i = 0; i < 4; ++i) {
      EXPECT_TRUE(std::isfinite(args.post.row(t)[i])) << "token " << t;
      for (int64_t j = 0; j < 4; ++j) EXPECT_TRUE(std::isfinite(args.comb[t].row(i)[j])) << "token " << t;
      for (int64_t h = 0; h < 40; ++h) {
        EXPECT_TRUE(std::isfinite(merge.out[t].row(i)[h])) << "token " << t;
        EXPECT_TRUE(std::isfinite(backward.dx[t].row(i)[h])) << "token " << t;
      }
    }
    for (int64_t e = 0; e < s.columns(); ++e)
      EXPECT_TRUE(std::isfinite(backward.dzr.row(t)[e])) << "token " << t;
  }
}

TEST_P(MhcTest, MixWithTheNormHasTheBitsOfBoth) {
  TensorPool pool(13);
  const Shape s = shape();
  const MhcMix mix = random_mix(pool, s);
  launch(mix, test_stream());
  for (const Tensor& w : {Tensor(), pool.random(DType::kF32, {s.width})}) {
    const Tensor y = pool.output(DType::kF32, {s.tokens, s.width}), u_inv = pool.output(DType::kF32, {s.tokens});
    launch(RmsNorm{.x = mix.u, .w = w, .y = y, .inv_rms = u_inv, .eps = mix.norm_eps}, test_stream());
    MhcMix both = with_fresh_outputs(pool, mix);
    both.w = w, both.y = pool.output(DType::kF32, {s.tokens, s.width}), both.u_inv = pool.output(DType::kF32, {s.tokens});
    launch(both, test_stream());
    testing::expect_same_bits(both.u, mix.u);
    testing::expect_same_bits(both.y, y);
    testing::expect_same_bits(both.u_inv, u_inv);
    testing::expect_same_bits(both.comb, mix.comb);
  }
}

TEST(MhcTest, RefusesByName) {
  TensorPool pool(12);
  const MhcMix mix = random_mix(pool, {2, 4, 8});
  MhcMix bad = mix;
  bad.zr = pool.random(DType::kF32, {2, 16});
  EXPECT_EQ(validate(bad).message(), "mhc_mix: zr: f32 [2, 16], expected f32 [2, 24]");
  bad = mix;
  bad.x = pool.random(DType::kF32, {2, 9, 8});
  EXPECT_EQ(validate(bad).message(), "mhc_mix: streams must be in 1..8");
  bad = mix;
  bad.eps = 0.0f;
  EXPECT_EQ(validate(bad).message(), "mhc_mix: eps must be > 0");
  bad = mix;
  bad.iterations = 0;
  EXPECT_EQ(validate(bad).message(), "mhc_mix: iterations must be >= 1");
  bad = mix;
  bad.w = pool.random(DType::kF32, {8});
  EXPECT_EQ(validate(bad).message(), "mhc_mix: y: absent, expected f32 [2, 8]");
  MhcMixBackward backward = random_mix_backward(pool, mix);
  backward.dscale = pool.zeros(DType::kF32, {2});
  EXPECT_EQ(validate(backward).message(), "mhc_mix_backward: dscale: f32 [2], expected f32 [3]");
  EXPECT_EQ(
      validate(MhcMerge{.x = mix.x, .y = mix.u, .post = mix.post, .comb = mix.comb, .out = mix.u}).message(),
      "mhc_merge: out: f32 [2, 8], expected f32 [2, 4, 8]");
  EXPECT_EQ(validate(MhcMergeBackward{.x = mix.x,
                                      .y = mix.u,
                                      .post = mix.post,
                                      .comb = mix.comb,
                                      .dout = mix.x,
                                      .dx = mix.x,
                                      .dy = mix.post,
                                      .dpost = mix.post,
                                      .dcomb = mix.comb})
                .message(),
            "mhc_merge_backward: dy: f32 [2, 4], expected f32 [2, 8]");
  EXPECT_EQ(validate(MhcExpand{.x = mix.post, .out = mix.x}).message(),
            "mhc_expand: x: f32 [2, 4], expected f32 [2, 8]");
  EXPECT_EQ(validate(MhcMean{.x = mix.x, .out = mix.post}).message(),
            "mhc_mean: out: f32 [2, 4], expected f32 [2, 8]");
  EXPECT_EQ(validate(MhcExpandBackward{.dout = mix.x, .dx = mix.post}).message(),
            "mhc_expand_backward: dx: f32 [2, 4], expected f32 [2, 8]");
  EXPECT_EQ(validate(MhcMeanBackward{.dout = mix.post, .dx = mix.x}).message(),
            "mhc_mean_backward: dout: f32 [2, 4], expected f32 [2, 8]");
}

}  // namespace
}  // namespace slipstream::kernels
