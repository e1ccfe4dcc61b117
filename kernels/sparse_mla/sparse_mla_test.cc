// Goal: launch() equals reference() for ragged, paged, selected, empty and oddly shaped batches; a token's
// bits do not depend on how its sequence was cut into calls, on its neighbours, on the pages, on the threads,
// or on whether its prefix is given by absent or explicit indices; a store of fp8 latents gives the bits of one that holds
// their values; the backward is the derivative and repeats
// its bits on any number of threads; bad arguments are refused by name.
#include "kernels/sparse_mla/sparse_mla.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "hwy/targets.h"
#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::expect_same_bits;
using testing::Piece;
using testing::single_thread_stream;
using testing::TensorPool;
using testing::test_stream;

struct Shape {
  int64_t heads, rank, rope;
  int64_t width() const { return rank + rope; }
};

// Whole sequences of these lengths, in order, with all their keys.
struct World {
  World(TensorPool& pool, Shape sizes, std::vector<int64_t> sequence_lengths, int64_t topk, DType dtype)
      : shape(sizes), lengths(std::move(sequence_lengths)) {
    tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    q = pool.random(DType::kF32, {tokens, shape.heads, shape.width()}, -2.0f, 2.0f);
    rows = pool.random(dtype, {tokens, shape.width()}, -2.0f, 2.0f);
    if (topk == 0) return;
    // Each query keeps a position with the chance topk / (t + 1), so early ones see everything and some see
    // nothing.
    indices = pool.zeros(DType::kI32, {tokens, topk});
    counts = pool.zeros(DType::kI32, {tokens});
    for (size_t b = 0; b < lengths.size(); ++b) {
      for (int64_t t = 0; t < lengths[b]; ++t) {
        const int64_t row = testing::first_row(lengths, static_cast<int64_t>(b)) + t;
        int32_t& count = counts.i32()[row];
        if (t % 11 == 10) continue;
        for (int64_t s = 0; s <= t && count < topk; ++s) {
          if (pool.uniform() * static_cast<float>(t + 1) <= static_cast<float>(topk)) {
            indices.i32()[row * topk + count++] = static_cast<int32_t>(s);
          }
        }
      }
    }
  }

  Shape shape;
  testing::Lengths lengths;
  int64_t tokens = 0;
  Tensor q, rows, indices, counts;
};

// One call on these pieces.
SparseMla make_call(TensorPool& pool, const World& world, const std::vector<Piece>& pieces, uint64_t seed) {
  const int64_t heads = world.shape.heads, width = world.shape.width();
  SparseMla call;
  call.sequences = testing::sequences_of_pieces(pool, pieces);
  const int64_t tokens = call.sequences.rows();
  call.q = pool.output(DType::kF32, {tokens, heads, width + 5}).slice(2, 2, 2 + width);
  testing::copy_pieces(world.q, world.lengths, pieces, call.q);
  call.keys = testing::store_pieces(pool, world.rows, world.lengths, pieces, seed);
  if (!world.indices.empty()) {
    const int64_t topk = world.indices.size(1);
    call.indices = pool.output(DType::kI32, {tokens, topk});
    call.counts = pool.output(DType::kI32, {tokens});
    int64_t row = 0;
    for (const Piece& piece : pieces) {
      const int64_t from = testing::first_row(world.lengths, piece.sequence) + piece.begin;
      const int64_t count = piece.end - piece.begin;
      std::copy_n(world.indices.i32() + from * topk, count * topk, call.indices.i32() + row * topk);
      std::copy_n(world.counts.i32() + from, count, call.counts.i32() + row);
      row += count;
    }
  }
  call.scale = 1.0f / std::sqrt(static_cast<float>(width));
  call.o = pool.output(DType::kF32, {tokens, heads, world.shape.rank});
  call.lse = pool.output(DType::kF32, {tokens, heads});
  return call;
}

std::vector<Piece> whole(const World& world) { return testing::whole_sequences(world.lengths); }

// The backward of a forward call; its outputs are given.
SparseMlaBackward make_backward(const SparseMla& call, const Tensor& d_o, const Tensor& dq, const Tensor& dkeys) {
  return {.q = call.q,
          .keys = call.keys,
          .sequences = call.sequences,
          .indices = call.indices,
          .counts = call.counts,
          .scale = call.scale,
          .o = call.o,
          .lse = call.lse,
          .d_o = d_o,
          .dq = dq,
          .dkeys = dkeys};
}

// The outputs of a call have the bits of the same tokens in a call on whole sequences.
void expect_same_tokens(const SparseMla& call, const World& world, const std::vector<Piece>& pieces,
                        const SparseMla& all) {
  testing::expect_same_tokens(call.o, world.lengths, pieces, all.o);
  testing::expect_same_tokens(call.lse, world.lengths, pieces, all.lse);
}

// Several pages where the plain loops of the reference can afford it.
int64_t longest_of(Shape shape) { return shape.heads > 50 ? 30 : 150; }

class SparseMlaShapes : public ::testing::TestWithParam<std::tuple<Shape, int64_t, DType>> {};

TEST_P(SparseMlaShapes, EqualsReference) {
  const auto [shape, topk, dtype] = GetParam();
  TensorPool pool(1);
  const int64_t longest = longest_of(shape);
  const World world(pool, shape, {3, longest, 1, 90}, topk, dtype);
  const std::vector<Piece> pieces{{0, 0, 3}, {1, longest - 25, longest}, {2, 1, 1}, {3, 89, 90}};
  const SparseMla call = make_call(pool, world, pieces, 2);
  SparseMla expected = call;
  expected.o = pool.output(DType::kF32, {call.o.size(0), shape.heads, shape.rank});
  expected.lse = pool.output(DType::kF32, {call.o.size(0), shape.heads});
  launch(call, test_stream());
  reference(expected);
  testing::expect_near(call.o, expected.o, testing::tolerance(dtype));
  testing::expect_near(call.lse, expected.lse, testing::tolerance(dtype));
  pool.expect_fences_intact();
}

TEST_P(SparseMlaShapes, BackwardEqualsReference) {
  const auto [shape, topk, dtype] = GetParam();
  TensorPool pool(2);
  const World world(pool, shape, {3, longest_of(shape), 0, 65}, topk, dtype);
  const SparseMla call = make_call(pool, world, whole(world), 3);
  reference(call);
  const Tensor d_o = pool.random(DType::kF32, {world.tokens, shape.heads, shape.rank});
  const auto backward = [&, heads = shape.heads, width = shape.width()] {
    return make_backward(call, d_o, pool.output(DType::kF32, {world.tokens, heads, width}),
                         pool.output(DType::kF32, {world.tokens, width + 3}).slice(1, 1, 1 + width));
  };
  const SparseMlaBackward args = backward(), expected = backward(), one_thread = backward();
  launch(args, test_stream());
  reference(expected);
  // p carries the rounding of scores up to 10 (1e-6), and a key's gradient adds up to 10,000 such terms.
  testing::expect_near(args.dq, expected.dq, 4e-6f);
  testing::expect_near(args.dkeys, expected.dkeys, 1e-5f);
  launch(one_thread, single_thread_stream());
  expect_same_bits(args.dq, one_thread.dq);
  expect_same_bits(args.dkeys, one_thread.dkeys);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, SparseMlaShapes,
                         ::testing::Combine(::testing::Values(Shape{1, 1, 0}, Shape{3, 24, 8},
                                                              Shape{8, 64, 0}, Shape{5, 33, 6},
                                                              Shape{13, 48, 16}, Shape{100, 20, 5}),
                                            ::testing::Values(0, 24),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

// Chunked prefill, decode and other batches: any cut gives the bits of whole sequences on one thread.
TEST(SparseMlaTest, CutsDoNotChangeBits) {
  for (const int64_t topk : {0, 24}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      TensorPool pool(3);
      const World world(pool, {3, 24, 8}, {131, 70, 2}, topk, dtype);
      const SparseMla all = make_call(pool, world, whole(world), 1);
      launch(all, single_thread_stream());
      const SparseMla two_threads = make_call(pool, world, whole(world), 2);
      launch(two_threads, test_stream());
      expect_same_tokens(two_threads, world, whole(world), all);
      const std::vector<std::vector<Piece>> calls{{{0, 0, 64}},
                                                  {{0, 64, 100}, {1, 0, 1}},
                                                  {{1, 1, 70}, {0, 100, 131}, {2, 0, 2}},
                                                  {{2, 2, 2}, {1, 69, 70}}};
      for (const std::vector<Piece>& pieces : calls) {
        const SparseMla call = make_call(pool, world, pieces, 3);
        launch(call, test_stream());
        expect_same_tokens(call, world, pieces, all);
      }
      for (int64_t t = 0; t < 131; ++t) {
        const std::vector<Piece> pieces{{0, t, t + 1},
                                        {1, std::min<int64_t>(t, 69), std::min<int64_t>(t, 69) + 1}};
        const SparseMla call = make_call(pool, world, pieces, static_cast<uint64_t>(t));
        launch(call, test_stream());
        expect_same_tokens(call, world, pieces, all);
      }
    }
  }
}

// Decode steps long enough to be split over threads by keys, rows and columns, and over several softmax
// blocks.
TEST(SparseMlaTest, SplitDecodeHasTheBitsOfPrefill) {
  TensorPool pool(4);
  const World world(pool, {8, 64, 16}, {2500}, 0, DType::kF32);
  const std::vector<Piece> tail{{0, 2480, 2500}}, last{{0, 2499, 2500}};
  const SparseMla prefill = make_call(pool, world, tail, 1);
  launch(prefill, single_thread_stream());
  for (Stream* stream : {&test_stream(), &single_thread_stream()}) {
    const SparseMla decode = make_call(pool, world, last, 2);
    launch(decode, *stream);
    expect_same_bits(decode.o, prefill.o.slice(0, 19, 20));
    expect_same_bits(decode.lse, prefill.lse.slice(0, 19, 20));
  }
  const SparseMla expected = make_call(pool, world, last, 2);
  reference(expected);
  testing::expect_near(prefill.o.slice(0, 19, 20), expected.o, testing::tolerance(DType::kF32));
  testing::expect_near(prefill.lse.slice(0, 19, 20), expected.lse, testing::tolerance(DType::kF32));
}

TEST(SparseMlaTest, ExplicitPrefixHasTheBitsOfAbsentIndices) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    TensorPool pool(5);
    World world(pool, {3, 24, 8}, {150, 9}, 0, dtype);
    const SparseMla absent = make_call(pool, world, whole(world), 1);
    launch(absent, test_stream());
    world.indices = pool.zeros(DType::kI32, {world.tokens, 150});
    world.counts = pool.zeros(DType::kI32, {world.tokens});
    for (int64_t row = 0; row < world.tokens; ++row) {
      std::iota(world.indices.i32() + row * 150, world.indices.i32() + row * 150 + 150, 0);
      world.counts.i32()[row] = static_cast<int32_t>(row < 150 ? row + 1 : row - 149);
    }
    const SparseMla present = make_call(pool, world, whole(world), 2);
    launch(present, test_stream());
    expect_same_bits(present.o, absent.o);
    expect_same_bits(present.lse, absent.lse);
    // The query's own position left out: now a selection of the positions before it, the bits of the token
    // before with this query.
    for (int64_t row = 1; row < 150; ++row) --world.counts.i32()[row];
    const SparseMla selected = make_call(pool, world, whole(world), 2);
    launch(selected, test_stream());
    SparseMla shifted = make_call(pool, world, {{0, 0, 149}}, 3);
    shifted.indices = shifted.counts = {};
    for (int64_t row = 0; row < 149; ++row) {
      for (int64_t head = 0; head < 3; ++head) {
        std::copy_n(world.q.row(row + 1) + head * 32, 32, shifted.q.row(row) + head * shifted.q.stride(1));
      }
    }
    launch(shifted, test_stream());
    expect_same_bits(selected.o.slice(0, 1, 150), shifted.o);
    expect_same_bits(selected.lse.slice(0, 1, 150), shifted.lse);
  }
}

// The call on keys in fp8, and the same on the values that those have.
struct LatentCalls {
  SparseMla latents, plain;
};
LatentCalls with_latents(TensorPool& pool, const SparseMla& call) {
  const int64_t rank = call.o.size(2);
  LatentCalls out{call, call};
  out.latents.keys = testing::latent_store(pool, call.keys, rank);
  out.plain.keys =
      testing::restored_store(pool, out.latents.keys, latent_row(rank, call.q.size(2) - rank), DType::kF32);
  out.plain.o = pool.output(DType::kF32, {call.o.size(0), call.o.size(1), rank});
  out.plain.lse = pool.output(DType::kF32, {call.o.size(0), call.o.size(1)});
  return out;
}

TEST(SparseMlaTest, Fp8LatentsHaveTheBitsOfTheirValues) {
  for (const Shape shape : {Shape{1, 1, 0}, Shape{3, 24, 8}, Shape{5, 33, 6}, Shape{8, 64, 0}, Shape{13, 130, 16},
                            Shape{2, 512, 64}, Shape{100, 20, 5}}) {
    for (const int64_t topk : {0, 24}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        TensorPool pool(13);
        const World world(pool, shape, {3, longest_of(shape), 1, 90}, topk, dtype);
        const LatentCalls all = with_latents(pool, make_call(pool, world, whole(world), 1));
        launch(all.latents, test_stream());
        launch(all.plain, test_stream());
        expect_same_bits(all.latents.o, all.plain.o);
        expect_same_bits(all.latents.lse, all.plain.lse);
        // Pieces, among them single tokens.
        const int64_t longest = longest_of(shape);
        const std::vector<Piece> pieces{{0, 0, 3}, {1, longest - 1, longest}, {2, 1, 1}, {3, 80, 90}};
        const LatentCalls part = with_latents(pool, make_call(pool, world, pieces, 2));
        launch(part.latents, single_thread_stream());
        expect_same_tokens(part.latents, world, pieces, all.latents);
        reference(part.plain);
        testing::expect_near(part.latents.o, part.plain.o, testing::tolerance(dtype));
        SparseMla expected = part.latents;
        expected.o = part.plain.o, expected.lse = part.plain.lse;
        reference(expected);
        testing::expect_near(part.latents.o, expected.o, testing::tolerance(dtype));
        testing::expect_near(part.latents.lse, expected.lse, testing::tolerance(dtype));
        pool.expect_fences_intact();
      }
    }
  }
}

// Decode steps that are split over threads by keys and columns.
TEST(SparseMlaTest, SplitDecodeOfFp8LatentsHasTheBitsOfPrefill) {
  TensorPool pool(14);
  const World world(pool, {8, 160, 16}, {2500}, 0, DType::kBf16);
  const SparseMla prefill = with_latents(pool, make_call(pool, world, {{0, 2480, 2500}}, 1)).latents;
  launch(prefill, single_thread_stream());
  for (Stream* stream : {&test_stream(), &single_thread_stream()}) {
    const SparseMla decode = with_latents(pool, make_call(pool, world, {{0, 2499, 2500}}, 2)).latents;
    launch(decode, *stream);
    expect_same_bits(decode.o, prefill.o.slice(0, 19, 20));
    expect_same_bits(decode.lse, prefill.lse.slice(0, 19, 20));
  }
}

TEST(SparseMlaTest, NanStaysWithTheQueriesThatSeeIt) {
  TensorPool pool(6);
  const World world(pool, {3, 24, 8}, {40, 30}, 0, DType::kF32);
  const SparseMla clean = make_call(pool, world, whole(world), 1),
                  dirty = make_call(pool, world, whole(world), 1);
  launch(clean, test_stream());
  dirty.keys.pool.f32()[dirty.keys.offset(0, 20)] = std::numeric_limits<float>::quiet_NaN();
  dirty.q.row(7)[0] = std::numeric_limits<float>::quiet_NaN();
  launch(dirty, test_stream());
  expect_same_bits(dirty.o.slice(0, 0, 7), clean.o.slice(0, 0, 7));
  expect_same_bits(dirty.o.slice(0, 8, 20), clean.o.slice(0, 8, 20));
  expect_same_bits(dirty.o.slice(0, 40, 70), clean.o.slice(0, 40, 70));
  EXPECT_TRUE(std::isnan(dirty.o.row(20)[0]));
}

// Where the CPU has AVX-512, the AVX2 form gives the same bits, forward and backward.
TEST(SparseMlaTest, VectorWidthDoesNotChangeBits) {
  for (const int64_t topk : {0, 24}) {
    TensorPool pool(11);
    const World world(pool, {5, 33, 6}, {150, 40}, topk, DType::kF32);
    std::vector<SparseMlaBackward> results;
    for (const int64_t target : {int64_t{0}, int64_t{HWY_AVX2}}) {
      const testing::ScopedTarget chosen(target);
      const SparseMla call = make_call(pool, world, whole(world), 1);
      launch(call, test_stream());
      TensorPool gradients(12);
      results.push_back(make_backward(call, pool.copy(gradients.random(DType::kF32, {190, 5, 33})),
                                      pool.output(DType::kF32, {190, 5, 39}),
                                      pool.output(DType::kF32, {190, 39})));
      launch(results.back(), test_stream());
    }
    expect_same_bits(results[1].o, results[0].o);
    expect_same_bits(results[1].lse, results[0].lse);
    expect_same_bits(results[1].dq, results[0].dq);
    expect_same_bits(results[1].dkeys, results[0].dkeys);
  }
}

TEST(SparseMlaTest, LargeScoresStayFinite) {
  TensorPool pool(7);
  World world(pool, {2, 16, 0}, {100}, 0, DType::kF32);
  for (int64_t i = 0; i < world.q.numel(); ++i) world.q.f32()[i] *= 1e12f;
  for (int64_t i = 0; i < world.rows.numel(); ++i) world.rows.f32()[i] *= 1e12f;
  const SparseMla call = make_call(pool, world, whole(world), 1);
  launch(call, test_stream());
  for (int64_t i = 0; i < call.o.numel(); ++i) ASSERT_TRUE(std::isfinite(call.o.f32()[i]));
  for (int64_t i = 0; i < call.lse.numel(); ++i) ASSERT_TRUE(std::isfinite(call.lse.f32()[i]));
}

TEST(SparseMlaTest, EmptyBatchesAndSelections) {
  TensorPool pool(8);
  const World none(pool, {2, 8, 0}, {}, 0, DType::kF32);
  launch(make_call(pool, none, {}, 1), test_stream());
  World world(pool, {2, 8, 0}, {70}, 4, DType::kF32);
  std::fill_n(world.counts.i32(), 70, 0);
  const SparseMla call = make_call(pool, world, whole(world), 1);
  launch(call, test_stream());
  expect_same_bits(call.o, pool.zeros(DType::kF32, {70, 2, 8}));
  for (int64_t i = 0; i < call.lse.numel(); ++i)
    EXPECT_EQ(call.lse.f32()[i], -std::numeric_limits<float>::infinity());
  const SparseMlaBackward backward =
      make_backward(call, pool.random(DType::kF32, {70, 2, 8}), pool.output(DType::kF32, {70, 2, 8}),
                    pool.output(DType::kF32, {70, 8}));
  launch(backward, test_stream());
  expect_same_bits(backward.dq, pool.zeros(DType::kF32, {70, 2, 8}));
  expect_same_bits(backward.dkeys, pool.zeros(DType::kF32, {70, 8}));
}

TEST(SparseMlaTest, BackwardIsTheDerivative) {
  for (const int64_t topk : {0, 5}) {
    TensorPool pool(9);
    const Shape shape{3, 12, 4};
    World world(pool, shape, {14, 1, 9}, topk, DType::kF32);
    const SparseMla call = make_call(pool, world, whole(world), 1);
    const Tensor d_o = pool.random(DType::kF32, {world.tokens, shape.heads, shape.rank});
    const auto loss = [&] {
      launch(call, test_stream());
      return testing::dot(call.o, d_o);
    };
    loss();
    const SparseMlaBackward backward =
        make_backward(call, d_o, pool.output(DType::kF32, {world.tokens, shape.heads, shape.width()}),
                      pool.output(DType::kF32, {world.tokens, shape.width()}));
    launch(backward, test_stream());
    testing::expect_gradient(loss, call.q, backward.dq);
    for (int64_t b = 0; b < 3; ++b) {
      const Tensor page = call.keys.pool[call.keys.page_table.i32()[b]];
      testing::expect_gradient(loss, page.slice(0, 0, world.lengths[static_cast<size_t>(b)]),
                               backward.dkeys.slice(0, call.sequences.begin(b), call.sequences.end(b)));
    }
  }
}

TEST(SparseMlaTest, RefusesByName) {
  TensorPool pool(10);
  const World world(pool, {2, 8, 4}, {20}, 4, DType::kF32);
  const SparseMla good = make_call(pool, world, {{0, 5, 20}}, 1);
  EXPECT_TRUE(validate(good).ok());
  SparseMla bad = good;
  bad.o = pool.output(DType::kF32, {15, 2, 13});
  EXPECT_EQ(validate(bad).message(), "sparse_mla: o: rank must be in 1..W");
  bad = good;
  bad.lse = pool.output(DType::kF32, {15, 3});
  EXPECT_EQ(validate(bad).message(), "sparse_mla: lse: f32 [15, 3], expected f32 [15, 2]");
  bad = good;
  bad.counts = {};
  EXPECT_FALSE(validate(bad).ok());
  bad = good;
  bad.indices = {};
  EXPECT_EQ(validate(bad).message(), "sparse_mla: counts without indices");
  bad = good;
  bad.indices = pool.copy(good.indices);
  bad.counts = pool.copy(good.counts);
  bad.counts.i32()[3] = 5;
  EXPECT_EQ(validate(bad).message(), "sparse_mla: counts out of range");
  bad.counts.i32()[3] = 1;
  bad.indices.i32()[3 * 4] = 9;  // the query's position is 8
  EXPECT_EQ(validate(bad).message(), "sparse_mla: indices must ascend from 0 to the query's position");
  bad.indices.i32()[3 * 4] = 8;
  EXPECT_TRUE(validate(bad).ok());
  EXPECT_EQ(validate(make_backward(good, good.o, good.q, pool.output(DType::kF32, {15, 12}))).message(),
            "sparse_mla_backward: every sequence must be whole: cached == 0");
  SparseMla latents = good;
  latents.keys = testing::latent_store(pool, good.keys, 8);
  EXPECT_TRUE(validate(latents).ok());
  EXPECT_EQ(validate(make_backward(latents, good.o, good.q, pool.output(DType::kF32, {15, 12}))).message(),
            "sparse_mla_backward: keys: f8_e4m3 [3, 64, 48], expected f32 or bf16 [*, 64, 12]");
  latents.o = pool.output(DType::kF32, {15, 2, 12});
  EXPECT_EQ(validate(latents).message(), "sparse_mla: keys: f8_e4m3 [3, 64, 48], expected f8_e4m3 [*, 64, 32]");
}

}  // namespace
}  // namespace slipstream::kernels
