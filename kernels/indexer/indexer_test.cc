// Goal: launch() equals reference() exactly (both follow the order of the header) for pools, tails, ties,
// NaN, long contexts that are split over threads, and ragged, strided, bf16 and empty inputs; a query's
// selection ignores batch, threads, cuts and SIMD width; the gradients of the scores agree with finite
// differences; bad arguments are refused.
#include "kernels/indexer/indexer.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "hwy/targets.h"
#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::Length;
using testing::make_sequences;
using testing::single_thread_stream;
using testing::TensorPool;
using testing::test_stream;

// Random keys in pages dealt to the sequences in turn. Rows that no sequence has reached are NaN: never to be
// read.
PagedRows make_keys(TensorPool& pool, DType dtype, const std::vector<Length>& lengths, int64_t width,
                    int64_t tokens) {
  int64_t columns = 1;
  for (const Length& length : lengths)
    columns = std::max(columns, (length.cached + length.fresh) / kPageRows + 1);
  const int64_t count = static_cast<int64_t>(lengths.size());
  PagedRows keys{.pool = pool.output(dtype, {count * columns, kPageRows, width}),
                 .page_table = testing::pages_in_turn(pool, count, columns)};
  for (int64_t b = 0; b < count; ++b) {
    const Length& length = lengths[static_cast<size_t>(b)];
    for (int64_t row = 0; row < (length.cached + length.fresh) / tokens; ++row) {
      for (int64_t i = 0; i < width; ++i) {
        const float value = 2.0f * pool.uniform() - 1.0f;
        if (dtype == DType::kBf16) {
          keys.pool.bf()[keys.offset(b, row) + i] = to_bf16(value);
        } else {
          keys.pool.f32()[keys.offset(b, row) + i] = value;
        }
      }
    }
  }
  return keys;
}

struct Shape {
  std::vector<Length> lengths;
  int64_t heads = 8, width = 16, topk = 8, pool = 1;
  bool tail = false;
  DType dtype = DType::kF32;
};

// Outputs one column wider than they need to be, inputs with gaps between rows.
IndexerSelect make_select(TensorPool& pool, const Shape& shape) {
  const Sequences sequences = make_sequences(pool, shape.lengths);
  const int64_t rows = sequences.rows();
  int64_t longest = 0;
  for (const Length& length : shape.lengths) longest = std::max(longest, length.cached + length.fresh);
  const int64_t columns = selection_width(shape.topk, shape.pool, shape.tail, longest) + 1;
  return {.q = pool.random(DType::kF32, {rows, shape.heads, shape.width + 3}).slice(2, 1, shape.width + 1),
          .weights = pool.random(DType::kF32, {rows, shape.heads + 1}).slice(1, 1, shape.heads + 1),
          .keys = make_keys(pool, shape.dtype, shape.lengths, shape.width, shape.pool),
          .sequences = sequences,
          .topk = shape.topk,
          .pool = shape.pool,
          .tail = shape.tail,
          .key_scale = 1.0f / std::sqrt(static_cast<float>(shape.width)),
          .indices = pool.output(DType::kI32, {rows, columns}),
          .counts = pool.output(DType::kI32, {rows})};
}

IndexerSelect with_fresh_outputs(TensorPool& pool, IndexerSelect args) {
  args.indices = pool.output(DType::kI32, {args.indices.size(0), args.indices.size(1)});
  args.counts = pool.output(DType::kI32, {args.counts.size(0)});
  return args;
}

std::vector<int32_t> selection_of(const IndexerSelect& args, int64_t t) {
  const int32_t* row = args.indices.i32() + t * args.indices.stride(0);
  return {row, row + args.counts.i32()[t]};
}

// On one and on two threads, with each vector width.
void expect_reference(TensorPool& pool, const IndexerSelect& args) {
  const IndexerSelect expected = with_fresh_outputs(pool, args);
  reference(expected);
  for (const int64_t target : {int64_t{0}, int64_t{HWY_AVX2}}) {
    for (Stream* stream : {&test_stream(), &single_thread_stream()}) {
      const testing::ScopedTarget chosen(target);
      const IndexerSelect actual = with_fresh_outputs(pool, args);
      launch(actual, *stream);
      testing::expect_same_bits(actual.indices, expected.indices);
      testing::expect_same_bits(actual.counts, expected.counts);
    }
  }
  pool.expect_fences_intact();
}

class IndexerSelectTest : public ::testing::TestWithParam<Shape> {};

TEST_P(IndexerSelectTest, EqualsReference) {
  TensorPool pool(1);
  expect_reference(pool, make_select(pool, GetParam()));
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, IndexerSelectTest,
    ::testing::Values(
        Shape{.lengths = {}}, Shape{.lengths = {{0, 0}}}, Shape{.lengths = {{0, 1}}},
        Shape{.lengths = {{0, 7}, {5, 0}, {0, 200}, {63, 2}}},
        Shape{.lengths = {{0, 70}, {130, 33}}, .heads = 13, .width = 17, .topk = 5},
        Shape{.lengths = {{0, 150}}, .heads = 32, .width = 128, .topk = 64, .dtype = DType::kBf16},
        Shape{.lengths = {{300, 1}, {0, 90}}, .heads = 1, .width = 1, .topk = 1},
        Shape{.lengths = {{40, 50}, {3, 1}},
              .width = 6,
              .topk = 16,
              .pool = 2,
              .tail = true,
              .dtype = DType::kBf16},
        Shape{.lengths = {{0, 50}, {33, 1}, {400, 9}}, .topk = 16, .pool = 4, .tail = true},
        Shape{.lengths = {{0, 50}, {33, 1}, {400, 9}}, .topk = 16, .pool = 4},
        Shape{.lengths = {{1000, 60}}, .topk = 15, .pool = 5, .tail = true},
        Shape{.lengths = {{0, 10}}, .topk = 3, .pool = 3},
        // Long enough for the keys to be split over two threads, with a short neighbour.
        Shape{.lengths = {{5000, 1}, {9, 3}, {3000, 40}}, .topk = 100},
        Shape{.lengths = {{9000, 2}}, .topk = 64, .pool = 4, .tail = true}));

// Small integers make most scores equal, many of them zero; one half of the keys decides nothing.
TEST(IndexerSelectTest, EqualScoresGoToTheLowerPosition) {
  for (const Length length : {Length{0, 200}, Length{4500, 1}}) {
    TensorPool pool(2);
    const IndexerSelect args = make_select(pool, {.lengths = {length}, .heads = 4, .width = 4, .topk = 24});
    for (int64_t t = 0; t < args.q.size(0); ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        args.weights.row(t)[h] = std::round(args.weights.row(t)[h]);
        for (int64_t i = 0; i < 4; ++i)
          args.q.row(t)[h * args.q.stride(1) + i] = std::round(2.0f * pool.uniform() - 1.0f);
      }
    }
    for (int64_t i = 0; i < args.keys.pool.numel(); ++i)
      args.keys.pool.f32()[i] = std::round(2.0f * pool.uniform() - 1.0f);
    expect_reference(pool, args);
  }
}

TEST(IndexerSelectTest, AllScoresEqualSelectsThePrefix) {
  for (const float weight : {0.0f, 1.0f}) {
    TensorPool pool(3);
    const IndexerSelect args = make_select(pool, {.lengths = {{4000, 3}}, .topk = 40});
    for (int64_t i = 0; i < args.keys.pool.numel(); ++i) args.keys.pool.f32()[i] = weight;
    launch(args, test_stream());
    std::vector<int32_t> prefix(40);
    std::iota(prefix.begin(), prefix.end(), 0);
    EXPECT_EQ(selection_of(args, 2), prefix);
  }
}

// One head, one channel: the score of a position is relu(key) * weight.
IndexerSelect with_scores(TensorPool& pool, const std::vector<float>& keys, int64_t topk,
                          float weight = 1.0f) {
  const int64_t count = static_cast<int64_t>(keys.size());
  const IndexerSelect args =
      make_select(pool, {.lengths = {{count - 1, 1}}, .heads = 1, .width = 1, .topk = topk});
  args.q.row(0)[0] = 1.0f;
  args.weights.row(0)[0] = weight;
  for (int64_t i = 0; i < count; ++i)
    args.keys.pool.f32()[args.keys.offset(0, i)] = keys[static_cast<size_t>(i)];
  return args;
}

TEST(IndexerSelectTest, NanComesLastAndMinusZeroIsZero) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInf = std::numeric_limits<float>::infinity();
  for (const int64_t target : {int64_t{0}, int64_t{HWY_AVX2}}) {
    const testing::ScopedTarget chosen(target);
    TensorPool pool(4);
    const auto select = [&](const std::vector<float>& keys, int64_t topk, float weight = 1.0f) {
      const IndexerSelect args = with_scores(pool, keys, topk, weight);
      launch(args, test_stream());
      return selection_of(args, 0);
    };
    using Rows = std::vector<int32_t>;
    EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 3), (Rows{1, 4, 5}));
    EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 4), (Rows{1, 3, 4, 5}));
    EXPECT_EQ(select({kNan, 1, -kNan, -1, kInf, 3}, 5), (Rows{0, 1, 3, 4, 5}));
    EXPECT_EQ(select({kNan, kInf, 2, 1}, 2, -1.0f), (Rows{2, 3}));
    EXPECT_EQ(select({kNan, kInf, 2, kNan}, 2, -1.0f), (Rows{1, 2}));
    // 1e-30 * -1e-30 rounds to -0; the others are +0.
    EXPECT_EQ(select({1e-30f, 0, 1e-30f, -1}, 2, -1e-30f), (Rows{0, 1}));
    EXPECT_EQ(select({0, 1e-30f, 1, 1e-30f, 0}, 3, -1e-30f), (Rows{0, 1, 3}));
  }
}

TEST(IndexerSelectTest, NanQueryDoesNotPoisonOthers) {
  TensorPool pool(5);
  const IndexerSelect args = make_select(pool, {.lengths = {{100, 40}}});
  const IndexerSelect clean = with_fresh_outputs(pool, args);
  launch(clean, test_stream());
  args.q.row(20)[0] = std::numeric_limits<float>::quiet_NaN();
  launch(args, test_stream());
  for (int64_t t = 0; t < 40; ++t) {
    if (t == 20) continue;
    EXPECT_EQ(selection_of(args, t), selection_of(clean, t));
  }
  EXPECT_EQ(selection_of(args, 20), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7}));
}

// Rising scores admit every key, so the running selection settles as often as it can.
TEST(IndexerSelectTest, SortedScores) {
  std::vector<float> rising(3000);
  std::iota(rising.begin(), rising.end(), 1.0f);
  const std::vector<float> falling(rising.rbegin(), rising.rend());
  for (const int64_t topk : {1, 7, 100, 2999}) {
    TensorPool pool(6);
    const IndexerSelect up = with_scores(pool, rising, topk), down = with_scores(pool, falling, topk);
    launch(up, test_stream());
    launch(down, test_stream());
    std::vector<int32_t> expected(static_cast<size_t>(topk));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(selection_of(down, 0), expected);
    std::iota(expected.begin(), expected.end(), static_cast<int32_t>(3000 - topk));
    EXPECT_EQ(selection_of(up, 0), expected);
  }
}

// A query alone, with everything before it cached, selects what it selects in a whole prefill.
TEST(IndexerSelectTest, IgnoresBatchAndCuts) {
  for (const int64_t tokens_per_row : {1, 4}) {
    TensorPool pool(7);
    const Shape shape{.lengths = {{0, 150}, {40, 77}}, .topk = 24, .pool = tokens_per_row, .tail = true};
    const IndexerSelect whole = make_select(pool, shape);
    launch(whole, test_stream());
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t t = whole.sequences.begin(b); t < whole.sequences.end(b); ++t) {
        IndexerSelect alone = whole;
        const int64_t cached = whole.sequences.cached_tokens(b) + t - whole.sequences.begin(b);
        alone.sequences = make_sequences(pool, {{cached, 1}});
        alone.q = whole.q.slice(0, t, t + 1);
        alone.weights = whole.weights.slice(0, t, t + 1);
        alone.keys.page_table = whole.keys.page_table.slice(0, b, b + 1);
        alone.indices = pool.output(DType::kI32, {1, whole.indices.size(1)});
        alone.counts = pool.output(DType::kI32, {1});
        launch(alone, single_thread_stream());
        ASSERT_EQ(selection_of(alone, 0), selection_of(whole, t)) << "query " << t;
      }
    }
  }
}

TEST(IndexerSelectTest, QueryBeforeTheFirstPool) {
  for (const bool tail : {false, true}) {
    TensorPool pool(8);
    const IndexerSelect args = make_select(pool, {.lengths = {{0, 6}}, .topk = 4, .pool = 4, .tail = tail});
    launch(args, test_stream());
    using Rows = std::vector<int32_t>;
    EXPECT_EQ(selection_of(args, 0), tail ? (Rows{0}) : (Rows{}));
    EXPECT_EQ(selection_of(args, 2), tail ? (Rows{0, 1, 2}) : (Rows{}));
    EXPECT_EQ(selection_of(args, 3), (Rows{0, 1, 2, 3}));
    EXPECT_EQ(selection_of(args, 5), tail ? (Rows{0, 1, 2, 3, 4, 5}) : (Rows{0, 1, 2, 3}));
  }
}

TEST(IndexerSelectTest, RefusesByName) {
  TensorPool pool(9);
  const IndexerSelect args = make_select(pool, {.lengths = {{0, 20}}, .topk = 8, .pool = 4, .tail = true});
  IndexerSelect bad = args;
  bad.topk = 10;
  EXPECT_EQ(validate(bad).message(), "indexer_select: topk must be a positive multiple of pool");
  bad = args;
  bad.indices = pool.output(DType::kI32, {20, 10});
  EXPECT_EQ(validate(bad).message(), "indexer_select: indices: fewer columns than selection_width()");
  bad = args;
  bad.weights = pool.random(DType::kF32, {20, 7});
  EXPECT_EQ(validate(bad).message(), "indexer_select: weights: f32 [20, 7], expected f32 [20, 8]");
}

// Scores of some rows of each query's sequence, in any order, some twice, some absent.
IndexerScores make_scores(TensorPool& pool, const Shape& shape, int64_t asked) {
  const IndexerSelect select = make_select(pool, shape);
  const int64_t tokens = select.q.size(0);
  const Tensor rows = pool.random_ints({tokens, asked + 2}, -1, 1).slice(1, 1, asked + 1);
  for (int64_t b = 0; b < select.sequences.count(); ++b) {
    const Length& length = shape.lengths[static_cast<size_t>(b)];
    const int64_t limit = (length.cached + length.fresh) / shape.pool;
    for (int64_t t = select.sequences.begin(b); t < select.sequences.end(b); ++t) {
      int32_t* row = rows.i32() + t * rows.stride(0);
      for (int64_t s = 0; s < asked; ++s)
        row[s] = static_cast<int32_t>(pool.uniform() * static_cast<float>(limit + 1)) - 1;
    }
  }
  return {.q = select.q,
          .weights = select.weights,
          .keys = select.keys,
          .sequences = select.sequences,
          .pool = shape.pool,
          .key_scale = select.key_scale,
          .rows = rows,
          .scores = pool.output(DType::kF32, {tokens, asked})};
}

IndexerScoresBackward make_backward(TensorPool& pool, const IndexerScores& args) {
  int64_t keys = 0;
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    keys += (args.sequences.end(b) - args.sequences.begin(b)) / args.pool;
  }
  const int64_t tokens = args.q.size(0), heads = args.q.size(1), width = args.q.size(2);
  return {.q = args.q,
          .weights = args.weights,
          .keys = args.keys,
          .sequences = args.sequences,
          .pool = args.pool,
          .key_scale = args.key_scale,
          .rows = args.rows,
          .dscores = pool.random(DType::kF32, {tokens, args.rows.size(1)}),
          .dq = pool.output(DType::kF32, {tokens, heads, width}),
          .dweights = pool.output(DType::kF32, {tokens, heads}),
          .dkeys = pool.output(DType::kF32, {keys, width})};
}

IndexerScoresBackward with_fresh_outputs(TensorPool& pool, IndexerScoresBackward args) {
  args.dq = pool.output(DType::kF32, {args.dq.size(0), args.dq.size(1), args.dq.size(2)});
  args.dweights = pool.output(DType::kF32, {args.dweights.size(0), args.dweights.size(1)});
  args.dkeys = pool.output(DType::kF32, {args.dkeys.size(0), args.dkeys.size(1)});
  return args;
}

class IndexerScoresTest : public ::testing::TestWithParam<std::pair<Shape, int64_t>> {};

TEST_P(IndexerScoresTest, EqualsReference) {
  const auto [shape, asked] = GetParam();
  TensorPool pool(10);
  const IndexerScores args = make_scores(pool, shape, asked);
  IndexerScores expected = args;
  expected.scores = pool.output(DType::kF32, {args.q.size(0), asked});
  launch(args, test_stream());
  reference(expected);
  testing::expect_same_bits(args.scores, expected.scores);

  const IndexerScoresBackward backward = make_backward(pool, args);
  const IndexerScoresBackward expected_backward = with_fresh_outputs(pool, backward);
  launch(backward, test_stream());
  reference(expected_backward);
  testing::expect_near(backward.dq, expected_backward.dq, 4e-6f);
  testing::expect_near(backward.dweights, expected_backward.dweights, 4e-6f);
  testing::expect_near(backward.dkeys, expected_backward.dkeys, 4e-6f);
  const IndexerScoresBackward one_thread = with_fresh_outputs(pool, backward);
  {
    const testing::ScopedTarget narrow(HWY_AVX2);
    launch(one_thread, single_thread_stream());
  }
  testing::expect_same_bits(one_thread.dq, backward.dq);
  testing::expect_same_bits(one_thread.dweights, backward.dweights);
  testing::expect_same_bits(one_thread.dkeys, backward.dkeys);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, IndexerScoresTest,
    ::testing::Values(std::pair{Shape{.lengths = {}}, 5}, std::pair{Shape{.lengths = {{0, 3}}}, 0},
                      std::pair{Shape{.lengths = {{0, 2}, {0, 0}, {0, 70}}}, 40},
                      std::pair{Shape{.lengths = {{0, 33}, {0, 9}},
                                      .heads = 5,
                                      .width = 19,
                                      .pool = 4,
                                      .tail = true,
                                      .dtype = DType::kBf16},
                                17},
                      std::pair{Shape{.lengths = {{0, 600}}, .heads = 9, .width = 32}, 21}));

TEST(IndexerScoresTest, QueryIgnoresItsNeighbours) {
  TensorPool pool(11);
  const IndexerScores whole = make_scores(pool, {.lengths = {{0, 40}, {11, 30}}}, 35);
  launch(whole, test_stream());
  for (int64_t t = 40; t < 70; ++t) {
    IndexerScores alone = whole;
    alone.sequences = make_sequences(pool, {{40, 1}});
    alone.q = whole.q.slice(0, t, t + 1);
    alone.weights = whole.weights.slice(0, t, t + 1);
    alone.rows = whole.rows.slice(0, t, t + 1);
    alone.keys.page_table = whole.keys.page_table.slice(0, 1, 2);
    alone.scores = pool.output(DType::kF32, {1, 35});
    launch(alone, single_thread_stream());
    testing::expect_same_bits(alone.scores, whole.scores.slice(0, t, t + 1));
  }
}

// Positive keys and queries of one sign a head keep every product away from the kink of relu: half the heads
// are on.
TEST(IndexerScoresTest, BackwardIsTheDerivative) {
  TensorPool pool(12);
  const IndexerScores args = make_scores(pool, {.lengths = {{0, 9}, {0, 6}}, .heads = 4, .width = 5}, 6);
  for (int64_t i = 0; i < args.keys.pool.numel(); ++i) args.keys.pool.f32()[i] = 0.5f + pool.uniform();
  const Tensor q = pool.random(DType::kF32, {15, 4, 5}, 0.5f, 1.5f);
  for (int64_t i = 0; i < q.numel(); ++i) q.f32()[i] *= i / 5 % 2 == 0 ? 1.0f : -1.0f;
  const Tensor weights = pool.copy(args.weights);
  IndexerScores forward = args;
  forward.q = q;
  forward.weights = weights;
  const IndexerScoresBackward backward = make_backward(pool, forward);
  launch(backward, test_stream());
  const auto loss = [&] {
    launch(forward, single_thread_stream());
    return testing::dot(forward.scores, backward.dscores);
  };
  testing::expect_gradient(loss, q, backward.dq);
  testing::expect_gradient(loss, weights, backward.dweights);
  testing::expect_gradient(loss, args.keys.pool[0].slice(0, 0, 9), backward.dkeys.slice(0, 0, 9));
  testing::expect_gradient(loss, args.keys.pool[1].slice(0, 0, 6), backward.dkeys.slice(0, 9, 15));
}

TEST(IndexerScoresTest, RefusesByName) {
  TensorPool pool(13);
  IndexerScores args = make_scores(pool, {.lengths = {{0, 9}}, .pool = 2}, 3);
  args.rows.i32()[0] = 4;
  EXPECT_EQ(validate(args).message(), "indexer_scores: rows: row out of range");
  args = make_scores(pool, {.lengths = {{5, 4}}}, 3);
  const IndexerScoresBackward backward = make_backward(pool, args);
  EXPECT_EQ(validate(backward).message(),
            "indexer_scores_backward: every sequence must be whole: cached == 0");
}

}  // namespace
}  // namespace slipstream::kernels
