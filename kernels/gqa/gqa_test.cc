// Goal: launch() equals reference() for ragged, paged and oddly shaped batches and any grouping of heads; a
// token's bits do not depend on how its sequence was cut into calls, on its neighbours, on the pages or on
// the threads; the backward is the derivative and repeats its bits on any number of threads; bad arguments
// are refused by name.
#include "kernels/gqa/gqa.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::expect_same_bits;
using testing::Piece;
using testing::single_thread_stream;
using testing::TensorPool;
using testing::test_stream;

struct Shape {
  int64_t heads, kv_heads, width;
};

// Whole sequences of these lengths, one after the other.
struct World {
  World(TensorPool& pool, Shape sizes, std::vector<int64_t> sequence_lengths, DType dtype)
      : shape(sizes), lengths(std::move(sequence_lengths)) {
    tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    q = pool.random(DType::kF32, {tokens, shape.heads, shape.width}, -2.0f, 2.0f);
    k = pool.random(dtype, {tokens, shape.kv_heads * shape.width}, -2.0f, 2.0f);
    v = pool.random(dtype, {tokens, shape.kv_heads * shape.width}, -2.0f, 2.0f);
  }

  Shape shape;
  testing::Lengths lengths;
  int64_t tokens = 0;
  Tensor q, k, v;
};

Gqa make_call(TensorPool& pool, const World& world, const std::vector<Piece>& pieces, uint64_t seed) {
  const Sequences sequences = testing::sequences_of_pieces(pool, pieces);
  const int64_t tokens = sequences.rows();
  const auto [heads, kv_heads, width] = world.shape;
  Gqa call{.q = pool.output(DType::kF32, {tokens, heads, width + 3}).slice(2, 1, 1 + width),
           .k = testing::store_pieces(pool, world.k, world.lengths, pieces, seed),
           .v = testing::store_pieces(pool, world.v, world.lengths, pieces, seed + 1),
           .sequences = sequences,
           .kv_heads = kv_heads,
           .scale = 1.0f / std::sqrt(static_cast<float>(width)),
           .o = pool.output(DType::kF32, {tokens, heads, width}),
           .lse = pool.output(DType::kF32, {tokens, heads})};
  testing::copy_pieces(world.q, world.lengths, pieces, call.q);
  return call;
}

std::vector<Piece> whole(const World& world) { return testing::whole_sequences(world.lengths); }

// The outputs of a call have the bits of the same tokens in a call on whole sequences.
void expect_same_tokens(const Gqa& call, const World& world, const std::vector<Piece>& pieces,
                        const Gqa& all) {
  testing::expect_same_tokens(call.o, world.lengths, pieces, all.o);
  testing::expect_same_tokens(call.lse, world.lengths, pieces, all.lse);
}

// The backward of a forward call, with fresh outputs.
GqaBackward make_backward(TensorPool& pool, const Gqa& call, const Tensor& d_o) {
  const int64_t tokens = call.q.size(0), heads = call.q.size(1), width = call.q.size(2);
  return {.q = call.q,
          .k = call.k,
          .v = call.v,
          .sequences = call.sequences,
          .kv_heads = call.kv_heads,
          .scale = call.scale,
          .o = call.o,
          .lse = call.lse,
          .d_o = d_o,
          .dq = pool.output(DType::kF32, {tokens, heads, width}),
          .dk = pool.output(DType::kF32, {tokens, call.kv_heads + 1, width}).slice(1, 1, call.kv_heads + 1),
          .dv = pool.output(DType::kF32, {tokens, call.kv_heads, width})};
}

class GqaShapes : public ::testing::TestWithParam<std::tuple<Shape, DType>> {};

TEST_P(GqaShapes, EqualsReference) {
  const auto [shape, dtype] = GetParam();
  TensorPool pool(1);
  const World world(pool, shape, {3, 150, 1, 90}, dtype);
  const Gqa call = make_call(pool, world, {{0, 0, 3}, {1, 31, 150}, {2, 1, 1}, {3, 89, 90}}, 1);
  Gqa expected = call;
  expected.o = pool.output(DType::kF32, {call.o.size(0), shape.heads, shape.width});
  expected.lse = pool.output(DType::kF32, {call.o.size(0), shape.heads});
  launch(call, test_stream());
  reference(expected);
  testing::expect_near(call.o, expected.o, testing::tolerance(dtype));
  testing::expect_near(call.lse, expected.lse, testing::tolerance(dtype));
  pool.expect_fences_intact();
}

TEST_P(GqaShapes, BackwardEqualsReference) {
  const auto [shape, dtype] = GetParam();
  TensorPool pool(2);
  const World world(pool, shape, {3, 150, 0, 65}, dtype);
  const Gqa call = make_call(pool, world, whole(world), 0);
  reference(call);
  const Tensor d_o = pool.random(DType::kF32, {world.tokens, shape.heads, shape.width});
  const GqaBackward args = make_backward(pool, call, d_o), expected = make_backward(pool, call, d_o),
                    one_thread = make_backward(pool, call, d_o);
  launch(args, test_stream());
  reference(expected);
  launch(one_thread, single_thread_stream());
  testing::expect_near(args.dq, expected.dq, 4e-6f);
  testing::expect_near(args.dk, expected.dk, 4e-6f);
  testing::expect_near(args.dv, expected.dv, 4e-6f);
  expect_same_bits(args.dq, one_thread.dq);
  expect_same_bits(args.dk, one_thread.dk);
  expect_same_bits(args.dv, one_thread.dv);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, GqaShapes,
                         ::testing::Combine(::testing::Values(Shape{1, 1, 1}, Shape{3, 3, 10},
                                                              Shape{8, 2, 64}, Shape{6, 2, 33},
                                                              Shape{10, 1, 16}),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

// Chunked prefill, decode and other batches: any cut gives the bits of whole sequences on one thread.
TEST(GqaTest, CutsDoNotChangeBits) {
  for (const DType dtype : {DType::kF32, DType::kBf16}) {
    TensorPool pool(3);
    const World world(pool, {6, 2, 20}, {131, 70, 2}, dtype);
    const Gqa all = make_call(pool, world, whole(world), 0);
    launch(all, single_thread_stream());
    const std::vector<std::vector<Piece>> calls{whole(world),
                                                {{0, 0, 64}},
                                                {{0, 64, 100}, {1, 0, 1}},
                                                {{1, 1, 70}, {0, 100, 131}, {2, 0, 2}},
                                                {{2, 2, 2}, {1, 69, 70}}};
    for (const std::vector<Piece>& pieces : calls) {
      const Gqa call = make_call(pool, world, pieces, 3);
      launch(call, test_stream());
      expect_same_tokens(call, world, pieces, all);
    }
    for (int64_t t = 0; t < 131; ++t) {
      const std::vector<Piece> pieces{{0, t, t + 1},
                                      {1, std::min<int64_t>(t, 69), std::min<int64_t>(t, 69) + 1}};
      const Gqa call = make_call(pool, world, pieces, static_cast<uint64_t>(t));
      launch(call, test_stream());
      expect_same_tokens(call, world, pieces, all);
    }
  }
}

// Decode steps long enough to be split over threads by keys, rows and columns, and over several softmax
// blocks.
TEST(GqaTest, SplitDecodeHasTheBitsOfPrefill) {
  TensorPool pool(4);
  const World world(pool, {8, 1, 64}, {2500}, DType::kF32);
  const Gqa prefill = make_call(pool, world, {{0, 2480, 2500}}, 0);
  launch(prefill, single_thread_stream());
  for (Stream* stream : {&test_stream(), &single_thread_stream()}) {
    const Gqa decode = make_call(pool, world, {{0, 2499, 2500}}, 0);
    launch(decode, *stream);
    expect_same_bits(decode.o, prefill.o.slice(0, 19, 20));
    expect_same_bits(decode.lse, prefill.lse.slice(0, 19, 20));
  }
  const Gqa expected = make_call(pool, world, {{0, 2499, 2500}}, 0);
  reference(expected);
  testing::expect_near(prefill.o.slice(0, 19, 20), expected.o, testing::tolerance(DType::kF32));
  testing::expect_near(prefill.lse.slice(0, 19, 20), expected.lse, testing::tolerance(DType::kF32));
}

TEST(GqaTest, NanStaysWithTheQueriesThatSeeIt) {
  TensorPool pool(5);
  const World world(pool, {4, 2, 24}, {40, 30}, DType::kF32);
  const Gqa clean = make_call(pool, world, whole(world), 0), dirty = make_call(pool, world, whole(world), 0);
  launch(clean, test_stream());
  dirty.v.pool.f32()[dirty.v.offset(0, 20)] = std::numeric_limits<float>::quiet_NaN();
  launch(dirty, test_stream());
  expect_same_bits(dirty.o.slice(0, 0, 20), clean.o.slice(0, 0, 20));
  expect_same_bits(dirty.o.slice(0, 40, 70), clean.o.slice(0, 40, 70));
  EXPECT_TRUE(std::isnan(dirty.o.row(20)[0]));
  EXPECT_EQ(dirty.o.row(20)[3 * 24], clean.o.row(20)[3 * 24]);  // the other value head
}

TEST(GqaTest, BackwardIsTheDerivative) {
  TensorPool pool(6);
  const World world(pool, {6, 2, 9}, {14, 1, 9}, DType::kF32);
  const Gqa call = make_call(pool, world, whole(world), 0);
  const Tensor d_o = pool.random(DType::kF32, {world.tokens, 6, 9});
  const auto loss = [&] {
    launch(call, test_stream());
    return testing::dot(call.o, d_o);
  };
  loss();
  const GqaBackward backward = make_backward(pool, call, d_o);
  launch(backward, test_stream());
  testing::expect_gradient(loss, call.q, backward.dq);
  for (int64_t b = 0; b < 3; ++b) {
    const int64_t begin = call.sequences.begin(b), end = call.sequences.end(b);
    const Tensor k = call.k.pool[call.k.page_table.i32()[b]].slice(0, 0, end - begin);
    const Tensor v = call.v.pool[call.v.page_table.i32()[b]].slice(0, 0, end - begin);
    testing::expect_gradient(loss, k, pool.copy(backward.dk.slice(0, begin, end)).view({end - begin, 18}));
    testing::expect_gradient(loss, v, backward.dv.slice(0, begin, end).view({end - begin, 18}));
  }
}

TEST(GqaTest, EmptyBatch) {
  TensorPool pool(7);
  const World none(pool, {2, 1, 8}, {}, DType::kF32);
  launch(make_call(pool, none, {}, 1), test_stream());
  launch(make_backward(pool, make_call(pool, none, {}, 1), pool.output(DType::kF32, {0, 2, 8})),
         test_stream());
}

TEST(GqaTest, RefusesByName) {
  TensorPool pool(8);
  const World world(pool, {4, 2, 8}, {20}, DType::kF32);
  const Gqa good = make_call(pool, world, {{0, 5, 20}}, 0);
  EXPECT_TRUE(validate(good).ok());
  Gqa bad = good;
  bad.kv_heads = 3;
  EXPECT_EQ(validate(bad).message(), "gqa: kv_heads must divide the heads of q");
  bad = good;
  bad.kv_heads = 1;
  EXPECT_FALSE(validate(bad).ok());
  bad = good;
  bad.o = pool.output(DType::kF32, {15, 4, 9});
  EXPECT_EQ(validate(bad).message(), "gqa: o: f32 [15, 4, 9], expected f32 [15, 4, 8]");
  EXPECT_EQ(validate(make_backward(pool, good, good.o)).message(), "gqa_backward: every sequence must be whole: cached == 0");
}

}  // namespace
}  // namespace slipstream::kernels
