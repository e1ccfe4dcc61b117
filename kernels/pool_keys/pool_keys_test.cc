// Goal: launch() equals reference() for every pool size, ragged, strided, bf16 and empty inputs; a sequence
// cut into calls in any way gives the same bits, pools and open tokens alike; only completed pools are
// written; the backward agrees with finite differences; bad arguments are refused by name.
#include "kernels/pool_keys/pool_keys.h"

#include <algorithm>
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

// Pages dealt to the sequences in turn, slots in reverse order.
PoolKeys make_args(TensorPool& pool, const std::vector<Length>& lengths, int64_t size, int64_t width,
                   DType dtype = DType::kF32) {
  const Sequences sequences = make_sequences(pool, lengths);
  const int64_t tokens = sequences.rows(), count = sequences.count();
  int64_t columns = 1;
  for (const Length& length : lengths) {
    columns = std::max(columns, (length.cached + length.fresh) / size / kPageRows + 1);
  }
  std::vector<int32_t> slots;
  for (int64_t b = 0; b < count; ++b) slots.push_back(static_cast<int32_t>(count - b));
  return {.k = pool.random(DType::kF32, {tokens, width + 3}).slice(1, 1, width + 1),
          .gate = pool.random(DType::kF32, {tokens, width + 5}, -3.0f, 3.0f).slice(1, 2, width + 2),
          .ape = pool.random(DType::kF32, {size, width + 1}).slice(1, 0, width),
          .sequences = sequences,
          .open = pool.random(DType::kF32, {count + 1, size, 2, width}),
          .slots = pool.ints({count}, slots),
          .pooled = {.pool = pool.output(dtype, {count * columns, kPageRows, width}),
                     .page_table = testing::pages_in_turn(pool, count, columns)}};
}

PoolKeys with_own_outputs(TensorPool& pool, PoolKeys args) {
  args.open = pool.copy(args.open);
  args.pooled.pool = pool.copy(args.pooled.pool);
  return args;
}

// NaN marks a row that neither wrote: compared as a value of its own.
Tensor without_nan(TensorPool& pool, const Tensor& t) {
  const Tensor out = pool.copy(t);
  for (int64_t i = 0; i < out.numel(); ++i) {
    if (out.dtype() == DType::kBf16) {
      if (to_f32(out.bf()[i]) != to_f32(out.bf()[i])) out.bf()[i] = to_bf16(1e9f);
    } else if (out.f32()[i] != out.f32()[i]) {
      out.f32()[i] = 1e9f;
    }
  }
  return out;
}

struct Shape {
  std::vector<Length> lengths;
  int64_t size, width;
  DType dtype = DType::kF32;
};

class PoolKeysTest : public ::testing::TestWithParam<Shape> {};

TEST_P(PoolKeysTest, EqualsReference) {
  const Shape& shape = GetParam();
  TensorPool pool(1);
  const PoolKeys args = make_args(pool, shape.lengths, shape.size, shape.width, shape.dtype);
  const PoolKeys expected = with_own_outputs(pool, args), one_thread = with_own_outputs(pool, args);
  launch(args, test_stream());
  {
    const testing::ScopedTarget narrow(HWY_AVX2);
    launch(one_thread, single_thread_stream());
  }
  reference(expected);
  // A bf16 result may round to the other side of a tie: one part in 256.
  const float tolerance = shape.dtype == DType::kBf16 ? 4e-3f : testing::tolerance(DType::kF32);
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const Length& length = shape.lengths[static_cast<size_t>(b)];
    for (int64_t p = length.cached / shape.size; p < (length.cached + length.fresh) / shape.size; ++p) {
      const auto row = [&](const PoolKeys& of) {
        const int64_t page = of.pooled.page_table.i32()[b * of.pooled.page_table.stride(0) + p / kPageRows];
        return of.pooled.pool[page].slice(0, p % kPageRows, p % kPageRows + 1);
      };
      testing::expect_near(row(args), row(expected), tolerance);
    }
  }
  // Where the reference writes nothing, nothing is written: NaN stands against NaN only.
  const Tensor written = without_nan(pool, args.pooled.pool),
               wanted = without_nan(pool, expected.pooled.pool);
  int64_t stray = 0;
  for (int64_t i = 0; i < written.numel(); ++i) {
    const bool bf = shape.dtype == DType::kBf16;
    const float a = bf ? to_f32(written.bf()[i]) : written.f32()[i],
                e = bf ? to_f32(wanted.bf()[i]) : wanted.f32()[i];
    stray += (a > 1e8f) != (e > 1e8f);
  }
  EXPECT_EQ(stray, 0);
  testing::expect_same_bits(written, without_nan(pool, one_thread.pooled.pool));
  // The reference passes every token through `open`; what counts is the incomplete pool.
  for (int64_t b = 0; b < args.sequences.count(); ++b) {
    const Length& length = shape.lengths[static_cast<size_t>(b)];
    const int64_t slot = args.slots.i32()[b], left = (length.cached + length.fresh) % shape.size;
    testing::expect_same_bits(args.open[slot].slice(0, 0, left), expected.open[slot].slice(0, 0, left));
  }
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, PoolKeysTest,
                         ::testing::Values(Shape{{}, 4, 8}, Shape{{{0, 0}}, 4, 8}, Shape{{{0, 3}}, 4, 8},
                                           Shape{{{0, 70}, {3, 1}, {2, 2}, {5, 0}}, 4, 64},
                                           Shape{{{0, 9}, {1, 5}, {200, 1}}, 1, 19},
                                           Shape{{{0, 700}, {1, 1}}, 2, 128, DType::kBf16},
                                           Shape{{{2, 300}, {1, 31}}, 3, 17},
                                           Shape{{{4, 401}, {13, 2}}, 5, 33}));

// However the tokens are dealt to calls, pages and open tokens have the bits of one call.
TEST(PoolKeysTest, CutsChangeNothing) {
  for (const int64_t size : {1, 2, 3, 4, 5}) {
    TensorPool pool(2);
    constexpr int64_t kTokens = 331;  // pools of 2 and more cross a page, at odd places for 3 and 5
    const PoolKeys whole = make_args(pool, {{0, kTokens}}, size, 24);
    launch(whole, test_stream());
    for (const int64_t piece : {1, 2, 3, 7, 64, 100}) {
      PoolKeys cut = whole;
      cut.open = pool.output(DType::kF32, {2, size, 2, 24});
      cut.pooled.pool = pool.output(DType::kF32, {whole.pooled.pool.size(0), kPageRows, 24});
      for (int64_t t = 0; t < kTokens; t += piece) {
        const int64_t end = std::min(t + piece, kTokens);
        PoolKeys part = cut;
        part.k = whole.k.slice(0, t, end);
        part.gate = whole.gate.slice(0, t, end);
        part.sequences = make_sequences(pool, {{t, end - t}});
        launch(part, piece % 2 == 0 ? test_stream() : single_thread_stream());
      }
      testing::expect_same_bits(without_nan(pool, cut.pooled.pool), without_nan(pool, whole.pooled.pool));
      const int64_t left = kTokens % size;
      testing::expect_same_bits(cut.open[1].slice(0, 0, left), whole.open[1].slice(0, 0, left));
    }
  }
}

TEST(PoolKeysTest, SequenceIgnoresItsNeighbours) {
  TensorPool pool(3);
  const PoolKeys together = make_args(pool, {{2, 30}, {5, 41}}, 4, 40);
  PoolKeys alone = together;
  alone.k = together.k.slice(0, 30, 71);
  alone.gate = together.gate.slice(0, 30, 71);
  alone.sequences = make_sequences(pool, {{5, 41}});
  alone.open = pool.copy(together.open);
  alone.slots = together.slots.slice(0, 1, 2);
  alone.pooled = {.pool = pool.output(DType::kF32, {2, kPageRows, 40}),
                  .page_table = together.pooled.page_table.slice(0, 1, 2)};
  launch(together, test_stream());
  launch(alone, single_thread_stream());
  testing::expect_same_bits(alone.pooled.pool[1].slice(0, 1, 11), together.pooled.pool[1].slice(0, 1, 11));
}

TEST(PoolKeysTest, LargeGatesPickOneToken) {
  TensorPool pool(4);
  const PoolKeys args = make_args(pool, {{0, 4}}, 4, 16);
  for (int64_t t = 0; t < 4; ++t) {
    for (int64_t i = 0; i < 16; ++i) args.gate.row(t)[i] = t == i % 4 ? 3e38f : -3e38f;
  }
  launch(args, test_stream());
  for (int64_t i = 0; i < 16; ++i) EXPECT_EQ(args.pooled.pool.f32()[i], args.k.row(i % 4)[i]);
}

PoolKeysBackward make_backward(TensorPool& pool, const PoolKeys& forward) {
  const int64_t size = forward.ape.size(0), width = forward.k.size(1), tokens = forward.k.size(0);
  int64_t pools = 0;
  for (int64_t b = 0; b < forward.sequences.count(); ++b) {
    pools += (forward.sequences.end(b) - forward.sequences.begin(b)) / size;
  }
  return {.k = forward.k,
          .gate = forward.gate,
          .ape = forward.ape,
          .sequences = forward.sequences,
          .dpooled = pool.random(DType::kF32, {pools, width}),
          .dk = pool.output(DType::kF32, {tokens, width}),
          .dgate = pool.output(DType::kF32, {tokens, width}),
          .dape = pool.zeros(DType::kF32, {size, width})};
}

TEST(PoolKeysBackwardTest, EqualsReference) {
  for (const Shape& shape :
       {Shape{{}, 4, 8}, Shape{{{0, 3}}, 4, 8}, Shape{{{0, 601}, {0, 0}, {0, 18}}, 4, 64},
        Shape{{{0, 9}}, 1, 19}, Shape{{{0, 16}, {0, 31}}, 3, 17}, Shape{{{0, 44}}, 5, 33}}) {
    TensorPool pool(5);
    const PoolKeysBackward args =
        make_backward(pool, make_args(pool, shape.lengths, shape.size, shape.width));
    std::fill_n(args.dape.f32(), args.dape.numel(), 1.0f);  // added to
    PoolKeysBackward expected = args, one_thread = args;
    for (PoolKeysBackward* other : {&expected, &one_thread}) {
      other->dk = pool.copy(args.dk);
      other->dgate = pool.copy(args.dgate);
      other->dape = pool.copy(args.dape);
    }
    launch(args, test_stream());
    launch(one_thread, single_thread_stream());
    reference(expected);
    testing::expect_near(args.dk, expected.dk, 4e-6f);
    testing::expect_near(args.dgate, expected.dgate, 4e-6f);
    testing::expect_near(args.dape, expected.dape, 4e-6f);
    testing::expect_same_bits(args.dk, one_thread.dk);
    testing::expect_same_bits(args.dgate, one_thread.dgate);
    testing::expect_same_bits(args.dape, one_thread.dape);
    pool.expect_fences_intact();
  }
}

TEST(PoolKeysBackwardTest, IsTheDerivative) {
  TensorPool pool(6);
  PoolKeys forward = make_args(pool, {{0, 7}, {0, 10}}, 3, 5);
  forward.k = pool.copy(forward.k);
  forward.gate = pool.copy(forward.gate);
  forward.ape = pool.copy(forward.ape);
  const PoolKeysBackward backward = make_backward(pool, forward);
  launch(backward, test_stream());
  const auto loss = [&] {
    launch(forward, single_thread_stream());
    return testing::dot(forward.pooled.pool[0].slice(0, 0, 2), backward.dpooled.slice(0, 0, 2)) +
           testing::dot(forward.pooled.pool[1].slice(0, 0, 3), backward.dpooled.slice(0, 2, 5));
  };
  testing::expect_gradient(loss, forward.k, backward.dk);
  testing::expect_gradient(loss, forward.gate, backward.dgate);
  testing::expect_gradient(loss, forward.ape, backward.dape);
}

TEST(PoolKeysTest, RefusesByName) {
  TensorPool pool(7);
  PoolKeys args = make_args(pool, {{0, 9}}, 4, 8);
  args.slots.i32()[0] = 2;
  EXPECT_EQ(validate(args).message(), "pool_keys: slots: slot out of range");
  args = make_args(pool, {{0, 9}, {0, 2}}, 4, 8);
  args.slots.i32()[0] = args.slots.i32()[1];
  EXPECT_EQ(validate(args).message(), "pool_keys: slots: two sequences in one slot");
  args = make_args(pool, {{0, 9}}, 4, 8);
  args.open = pool.zeros(DType::kF32, {2, 3, 2, 8});
  EXPECT_EQ(validate(args).message(), "pool_keys: open: f32 [2, 3, 2, 8], expected f32 [*, 4, 2, 8]");
  const PoolKeysBackward backward = make_backward(pool, make_args(pool, {{4, 5}}, 4, 8));
  EXPECT_EQ(validate(backward).message(), "pool_keys_backward: every sequence must be whole: cached == 0");
}

}  // namespace
}  // namespace slipstream::kernels
