// Goal: the chunked launch() equals the recurrence of reference(), for any shapes, decays and lengths;
// however a sequence is cut into calls, batched or placed in slots, its outputs and its cache have the same
// bits; the backward equals the recurrence run backwards and agrees with finite differences; bad arguments
// are refused by name.
#include "kernels/kda/kda.h"

#include <algorithm>
#include <cmath>

#include "hwy/targets.h"
#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::sequences_of;
using testing::TensorPool;
using testing::test_stream;

enum class Decays { kTypical, kStrong, kNone, kMixed };

struct Shape {
  int64_t heads, dk, dv;
};

// Unit rows inside wider ones, as a projection of several outputs leaves them.
Tensor unit_rows(TensorPool& pool, int64_t tokens, const Shape& shape) {
  const Tensor rows = pool.random(DType::kF32, {tokens, shape.heads + 1, shape.dk + 3});
  const Tensor view = rows.slice(1, 0, shape.heads).slice(2, 1, shape.dk + 1);
  for (int64_t i = 0; i < tokens * shape.heads; ++i) {
    float* row = view.f32() + i / shape.heads * view.stride(0) + i % shape.heads * view.stride(1);
    double squares = 1e-6;
    for (int64_t d = 0; d < shape.dk; ++d) squares += double{row[d]} * row[d];
    for (int64_t d = 0; d < shape.dk; ++d) row[d] = static_cast<float>(row[d] / std::sqrt(squares));
  }
  return view;
}

Tensor random_decays(TensorPool& pool, int64_t tokens, const Shape& shape, Decays decays) {
  const Tensor g = pool.random(DType::kF32, {tokens, shape.heads, shape.dk}, -0.5f, 0.0f);
  for (int64_t i = 0; i < g.numel(); ++i) {
    const float draw = pool.uniform();
    switch (decays) {
      case Decays::kTypical:
        break;
      case Decays::kStrong:
        g.f32()[i] = -5.0f;
        break;
      case Decays::kNone:
        g.f32()[i] = -1e-6f;
        break;
      case Decays::kMixed:
        g.f32()[i] = draw < 0.3f ? -5.0f : draw < 0.35f ? -300.0f : draw < 0.6f ? 0.0f : -1e-4f;
        break;
    }
  }
  return g;
}

KdaState random_cache(TensorPool& pool, int64_t slots, const Shape& shape) {
  KdaState cache{.state = pool.random(DType::kF32, {slots, shape.heads, shape.dk, shape.dv}),
                 .chunk_k = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}, -0.3f, 0.3f),
                 .chunk_g = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}, 0.2f, 1.0f),
                 .chunk_u = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dv})};
  return cache;
}

KdaState copy_of(TensorPool& pool, const KdaState& cache) {
  return {.state = pool.copy(cache.state),
          .chunk_k = pool.copy(cache.chunk_k),
          .chunk_g = pool.copy(cache.chunk_g),
          .chunk_u = pool.copy(cache.chunk_u)};
}

// Everything is NaN: what is read before it is written shows.
KdaState empty_cache(TensorPool& pool, int64_t slots, const Shape& shape) {
  return {.state = pool.output(DType::kF32, {slots, shape.heads, shape.dk, shape.dv}),
          .chunk_k = pool.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}),
          .chunk_g = pool.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}),
          .chunk_u = pool.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dv})};
}

Kda random_args(TensorPool& pool, const Sequences& sequences, const Shape& shape, Decays decays) {
  const int64_t tokens = sequences.rows();
  return {.q = unit_rows(pool, tokens, shape),
          .k = unit_rows(pool, tokens, shape),
          .v = pool.random(DType::kF32, {tokens, shape.heads, shape.dv + 1}).slice(2, 1, shape.dv + 1),
          .log_decay = random_decays(pool, tokens, shape, decays),
          .beta = pool.random(DType::kF32, {tokens, shape.heads}, 0.0f, 1.0f),
          .sequences = sequences,
          .cache = {},
          .slots = {},
          .o = pool.output(DType::kF32, {tokens, shape.heads, shape.dv}),
          .span_states = {},
          .r = {}};
}

Kda with_outputs_for_backward(TensorPool& pool, Kda args) {
  args.span_states =
      pool.output(DType::kF32, {kda_spans(args.sequences), args.q.size(1), args.q.size(2), args.v.size(2)});
  args.r = pool.output(DType::kF32, {args.q.size(0), args.q.size(1), args.v.size(2)});
  return args;
}

// Of the cache, what a sequence with `tokens` tokens in `slot` has defined.
void expect_same_cache(const KdaState& actual, int64_t slot, const KdaState& expected, int64_t expected_slot,
                       int64_t tokens) {
  if (tokens >= kKdaChunk) testing::expect_same_bits(actual.state[slot], expected.state[expected_slot]);
  const int64_t live = tokens % kKdaChunk;
  testing::expect_same_bits(actual.chunk_k[slot].slice(0, 0, live),
                            expected.chunk_k[expected_slot].slice(0, 0, live));
  testing::expect_same_bits(actual.chunk_g[slot].slice(0, 0, live),
                            expected.chunk_g[expected_slot].slice(0, 0, live));
  testing::expect_same_bits(actual.chunk_u[slot].slice(0, 0, live),
                            expected.chunk_u[expected_slot].slice(0, 0, live));
}

class KdaTest : public ::testing::TestWithParam<std::tuple<Shape, Decays>> {};

TEST_P(KdaTest, EqualsTheRecurrence) {
  const auto [shape, decays] = GetParam();
  TensorPool pool(1);
  // Slot 1 has no full chunk behind it, slots 4 and 5 stand inside one, slot 0 at the start of one.
  const std::vector<int32_t> lengths = {40, 0, 17, 1, 150}, cached = {32, 7, 9, 47, 0};
  Kda args = random_args(pool, sequences_of(pool, lengths, cached), shape, decays);
  args.cache = random_cache(pool, 7, shape);
  args.slots = pool.ints({5}, {0, 6, 1, 5, 4});
  Kda expected = args;
  expected.cache = copy_of(pool, args.cache);
  expected.o = pool.output(DType::kF32, {args.q.size(0), shape.heads, shape.dv});
  launch(args, test_stream());
  reference(expected);
  EXPECT_LE(testing::relative_error(args.o, expected.o), 3e-6);  // the bound of the specification is 1e-5
  testing::expect_near(args.o, expected.o, 1e-5f);
  testing::expect_near(args.cache.state, expected.cache.state, 1e-5f);
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t slot = args.slots.i32()[b], live = (lengths[b] + cached[b]) % kKdaChunk;
    const auto rows = [&](const Tensor& t) { return t[slot].slice(0, 0, live); };
    testing::expect_same_bits(rows(args.cache.chunk_k), rows(expected.cache.chunk_k));
    testing::expect_near(rows(args.cache.chunk_g), rows(expected.cache.chunk_g), 1e-6f);
    testing::expect_near(rows(args.cache.chunk_u), rows(expected.cache.chunk_u), 1e-5f);
  }
  pool.expect_fences_intact();
}

TEST_P(KdaTest, LongSequencesEqualTheRecurrence) {
  const auto [shape, decays] = GetParam();
  TensorPool pool(2);
  const Kda args =
      with_outputs_for_backward(pool, random_args(pool, sequences_of(pool, {430, 64, 3}), shape, decays));
  Kda expected = with_outputs_for_backward(pool, args);
  expected.o = pool.output(DType::kF32, {497, shape.heads, shape.dv});
  launch(args, test_stream());
  reference(expected);
  EXPECT_LE(testing::relative_error(args.o, expected.o), 3e-6);  // the bound of the specification is 1e-5
  testing::expect_near(args.o, expected.o, 1e-5f);
  testing::expect_near(args.r, expected.r, 1e-5f);
  testing::expect_near(args.span_states, expected.span_states, 1e-5f);
  pool.expect_fences_intact();
}

TEST_P(KdaTest, RecurrentEqualsReference) {
  const auto [shape, decays] = GetParam();
  TensorPool pool(3);
  const Kda inputs = random_args(pool, sequences_of(pool, {20, 0, 1, 9, 0}, {0, 3, 5, 8, 0}), shape, decays);
  const auto args_of = [&](const Tensor& state) {
    return KdaRecurrent{.q = inputs.q,
                        .k = inputs.k,
                        .v = inputs.v,
                        .log_decay = inputs.log_decay,
                        .beta = inputs.beta,
                        .sequences = inputs.sequences,
                        .state = state,
                        .slots = pool.ints({5}, {2, 0, 4, 5, 1}),
                        .o = pool.output(DType::kF32, {inputs.q.size(0), shape.heads, shape.dv})};
  };
  const Tensor state = pool.random(DType::kF32, {6, shape.heads, shape.dk, shape.dv});
  const KdaRecurrent expected = args_of(pool.copy(state)), args = args_of(state);
  launch(args, test_stream());
  reference(expected);
  testing::expect_near(args.o, expected.o, 5e-6f);
  testing::expect_near(args.state, expected.state, 5e-6f);
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KdaTest,
    ::testing::Combine(::testing::Values(Shape{2, 8, 8}, Shape{1, 24, 40}, Shape{3, 16, 16}, Shape{2, 64, 64},
                                         Shape{1, 33, 130}, Shape{1, 128, 128}),
                       ::testing::Values(Decays::kTypical, Decays::kStrong, Decays::kNone, Decays::kMixed)));

KdaBackward backward_of(TensorPool& pool, const Kda& forward) {
  const int64_t tokens = forward.q.size(0), heads = forward.q.size(1), dk = forward.q.size(2),
                dv = forward.v.size(2);
  return {.q = forward.q,
          .k = forward.k,
          .log_decay = forward.log_decay,
          .beta = forward.beta,
          .sequences = forward.sequences,
          .span_states = forward.span_states,
          .r = forward.r,
          .d_o = pool.random(DType::kF32, {tokens, heads, dv}),
          .dq = pool.output(DType::kF32, {tokens, heads, dk}),
          .dk = pool.output(DType::kF32, {tokens, heads, dk}),
          .dlog_decay = pool.output(DType::kF32, {tokens, heads, dk}),
          .dv = pool.output(DType::kF32, {tokens, heads, dv}),
          .dbeta = pool.output(DType::kF32, {tokens, heads})};
}

KdaBackward with_fresh_outputs(TensorPool& pool, KdaBackward args) {
  for (Tensor* t : {&args.dq, &args.dk, &args.dlog_decay, &args.dv}) {
    *t = pool.output(DType::kF32, {t->size(0), t->size(1), t->size(2)});
  }
  args.dbeta = pool.output(DType::kF32, {args.beta.size(0), args.beta.size(1)});
  return args;
}

TEST_P(KdaTest, BackwardEqualsTheRecurrenceRunBackwards) {
  const auto [shape, decays] = GetParam();
  TensorPool pool(9);
  const Kda forward = with_outputs_for_backward(
      pool, random_args(pool, sequences_of(pool, {150, 0, 1, 16, 64, 33}), shape, decays));
  for (int64_t t = 0; t < 264; t += 5) forward.beta.row(t)[0] = 0.0f;  // r cannot be found from u here
  launch(forward, test_stream());
  const KdaBackward args = backward_of(pool, forward);
  const KdaBackward expected = with_fresh_outputs(pool, args);
  launch(args, test_stream());
  reference(expected);
  const auto expect_close = [](const Tensor& actual, const Tensor& wanted) {
    EXPECT_LE(testing::relative_error(actual, wanted), 1e-5);
    testing::expect_near(actual, wanted, 1e-5f);
  };
  expect_close(args.dq, expected.dq);
  expect_close(args.dk, expected.dk);
  expect_close(args.dv, expected.dv);
  expect_close(args.dbeta, expected.dbeta);
  expect_close(args.dlog_decay, expected.dlog_decay);
  pool.expect_fences_intact();
}

class KdaCutTest : public ::testing::TestWithParam<Shape> {};

TEST_P(KdaCutTest, AnyCutGivesTheSameBits) {
  const Shape shape = GetParam();
  constexpr int64_t kTokens = 139;
  for (Decays decays : {Decays::kTypical, Decays::kMixed}) {
    TensorPool pool(4);
    Kda whole = random_args(pool, sequences_of(pool, {kTokens}), shape, decays);
    whole.cache = empty_cache(pool, 2, shape);
    whole.slots = pool.ints({1}, {1});
    launch(whole, test_stream());
    // Training computes the same outputs without a cache.
    Kda training = with_outputs_for_backward(pool, whole);
    training.cache = {};
    training.slots = {};
    training.o = pool.output(DType::kF32, {kTokens, shape.heads, shape.dv});
    launch(training, test_stream());
    testing::expect_same_bits(training.o, whole.o);
    for (int64_t piece : {1, 2, 7, 15, 64, 100}) {
      Kda part = whole;
      part.o = pool.output(DType::kF32, {kTokens, shape.heads, shape.dv});
      part.cache = empty_cache(pool, 3, shape);
      part.slots = pool.ints({1}, {0});
      for (int64_t begin = 0; begin < kTokens; begin += piece) {
        const int64_t end = std::min(begin + piece, kTokens);
        Kda call = part;
        call.q = whole.q.slice(0, begin, end);
        call.k = whole.k.slice(0, begin, end);
        call.v = whole.v.slice(0, begin, end);
        call.log_decay = whole.log_decay.slice(0, begin, end);
        call.beta = whole.beta.slice(0, begin, end);
        call.o = part.o.slice(0, begin, end);
        call.sequences =
            sequences_of(pool, {static_cast<int32_t>(end - begin)}, {static_cast<int32_t>(begin)});
        launch(call, testing::single_thread_stream());
      }
      testing::expect_same_bits(part.o, whole.o);
      expect_same_cache(part.cache, 0, whole.cache, 1, kTokens);
    }
    pool.expect_fences_intact();
  }
}

TEST_P(KdaCutTest, SequenceIgnoresItsBatch) {
  const Shape shape = GetParam();
  TensorPool pool(5);
  const std::vector<int32_t> lengths = {33, 5, 16, 90}, cached = {18, 0, 16, 31};
  Kda batch = random_args(pool, sequences_of(pool, lengths, cached), shape, Decays::kTypical);
  batch.cache = random_cache(pool, 6, shape);
  batch.slots = pool.ints({4}, {5, 0, 2, 1});
  const KdaState before = copy_of(pool, batch.cache);
  // The rows of sequence 1 are NaN; nobody else may notice.
  for (int64_t t = 33; t < 38; ++t) {
    for (int64_t i = 0; i < shape.heads * shape.dk; ++i) batch.log_decay[t].f32()[i] = std::nanf("");
  }
  launch(batch, test_stream());
  for (int64_t b : {0, 2, 3}) {
    const int64_t begin = batch.sequences.begin(b), end = batch.sequences.end(b);
    Kda alone = batch;
    for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.log_decay, &alone.beta})
      *t = t->slice(0, begin, end);
    alone.o = pool.output(DType::kF32, {end - begin, shape.heads, shape.dv});
    alone.sequences = sequences_of(pool, {lengths[static_cast<size_t>(b)]}, {cached[static_cast<size_t>(b)]});
    // Another slot of another cache, with the same history.
    const int64_t slot = batch.slots.i32()[b];
    alone.cache = {.state = pool.copy(before.state.slice(0, slot, slot + 1)),
                   .chunk_k = pool.copy(before.chunk_k.slice(0, slot, slot + 1)),
                   .chunk_g = pool.copy(before.chunk_g.slice(0, slot, slot + 1)),
                   .chunk_u = pool.copy(before.chunk_u.slice(0, slot, slot + 1))};
    alone.slots = pool.ints({1}, {0});
    launch(alone, testing::single_thread_stream());
    testing::expect_same_bits(alone.o, batch.o.slice(0, begin, end));
    expect_same_cache(alone.cache, 0, batch.cache, slot, cached[static_cast<size_t>(b)] + end - begin);
  }
  // Slots that nobody names are left alone.
  for (int64_t slot : {3, 4}) {
    testing::expect_same_bits(batch.cache.state[slot], before.state[slot]);
    testing::expect_same_bits(batch.cache.chunk_u[slot], before.chunk_u[slot]);
  }
  pool.expect_fences_intact();
}

TEST_P(KdaCutTest, BackwardOfASequenceIgnoresItsBatch) {
  const Shape shape = GetParam();
  TensorPool pool(10);
  const Kda forward = with_outputs_for_backward(
      pool, random_args(pool, sequences_of(pool, {70, 5, 129}), shape, Decays::kTypical));
  launch(forward, test_stream());
  const KdaBackward batch = backward_of(pool, forward);
  launch(batch, test_stream());
  Kda alone = forward;
  for (Tensor* t : {&alone.q, &alone.k, &alone.v, &alone.log_decay, &alone.beta, &alone.r, &alone.o}) {
    *t = t->slice(0, 75, 204);
  }
  alone.sequences = sequences_of(pool, {129});
  alone.span_states = forward.span_states.slice(0, 3, 6);
  KdaBackward args = backward_of(pool, alone);
  args.d_o = batch.d_o.slice(0, 75, 204);
  launch(args, testing::single_thread_stream());
  testing::expect_same_bits(args.dq, batch.dq.slice(0, 75, 204));
  testing::expect_same_bits(args.dk, batch.dk.slice(0, 75, 204));
  testing::expect_same_bits(args.dv, batch.dv.slice(0, 75, 204));
  testing::expect_same_bits(args.dlog_decay, batch.dlog_decay.slice(0, 75, 204));
  testing::expect_same_bits(args.dbeta, batch.dbeta.slice(0, 75, 204));
}

TEST_P(KdaCutTest, AllTargetsGiveTheSameBits) {
  const Shape shape = GetParam();
  TensorPool pool(12);
  const Kda first = with_outputs_for_backward(
      pool, random_args(pool, sequences_of(pool, {70, 33}), shape, Decays::kTypical));
  launch(first, test_stream());
  const KdaBackward first_backward = backward_of(pool, first);
  launch(first_backward, test_stream());
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    const testing::ScopedTarget chosen(target);
    Kda args = with_outputs_for_backward(pool, first);
    args.o = pool.output(DType::kF32, {103, shape.heads, shape.dv});
    launch(args, test_stream());
    const KdaBackward backward = with_fresh_outputs(pool, first_backward);
    launch(backward, test_stream());
    testing::expect_same_bits(args.o, first.o);
    testing::expect_same_bits(args.r, first.r);
    testing::expect_same_bits(args.span_states, first.span_states);
    testing::expect_same_bits(backward.dq, first_backward.dq);
    testing::expect_same_bits(backward.dk, first_backward.dk);
    testing::expect_same_bits(backward.dv, first_backward.dv);
    testing::expect_same_bits(backward.dbeta, first_backward.dbeta);
    testing::expect_same_bits(backward.dlog_decay, first_backward.dlog_decay);
  }
}

TEST_P(KdaCutTest, EarlierRowsIgnoreLaterOnes) {
  const Shape shape = GetParam();
  TensorPool pool(6);
  const Kda args = random_args(pool, sequences_of(pool, {48}), shape, Decays::kTypical);
  launch(args, test_stream());
  Kda poisoned = args;
  poisoned.v = pool.copy(args.v);
  poisoned.log_decay = pool.copy(args.log_decay);
  poisoned.o = pool.output(DType::kF32, {48, shape.heads, shape.dv});
  for (int64_t i = 0; i < shape.heads * shape.dv; ++i) poisoned.v[21].f32()[i] = std::nanf("");
  for (int64_t i = 0; i < shape.heads * shape.dk; ++i) poisoned.log_decay[25].f32()[i] = std::nanf("");
  launch(poisoned, test_stream());
  testing::expect_same_bits(poisoned.o.slice(0, 0, 21), args.o.slice(0, 0, 21));
}

INSTANTIATE_TEST_SUITE_P(Shapes, KdaCutTest,
                         ::testing::Values(Shape{2, 8, 8}, Shape{2, 24, 40}, Shape{3, 64, 64},
                                           Shape{1, 128, 208}));

// Two chunks and a piece, so that gradients pass through the state, the fold and the pairs of a chunk.
TEST(KdaGradientTest, BackwardIsTheDerivative) {
  TensorPool pool(11);
  const Shape shape{1, 5, 6};
  Kda forward = random_args(pool, sequences_of(pool, {35, 2}), shape, Decays::kTypical);
  forward.q = pool.copy(forward.q);
  forward.k = pool.copy(forward.k);
  forward.v = pool.copy(forward.v);
  forward = with_outputs_for_backward(pool, forward);
  launch(forward, test_stream());
  const KdaBackward args = backward_of(pool, forward);
  launch(args, test_stream());
  const auto loss = [&] {
    launch(forward, test_stream());
    return testing::dot(forward.o, args.d_o);
  };
  testing::expect_gradient(loss, forward.q, args.dq);
  testing::expect_gradient(loss, forward.k, args.dk, 5e-3);
  testing::expect_gradient(loss, forward.v, args.dv);
  testing::expect_gradient(loss, forward.log_decay, args.dlog_decay, 5e-3);
  testing::expect_gradient(loss, forward.beta, args.dbeta);
}

TEST(KdaEmptyTest, NoRowsAndNoSequences) {
  TensorPool pool(7);
  const Shape shape{2, 16, 16};
  Kda args = random_args(pool, sequences_of(pool, {}), shape, Decays::kTypical);
  launch(with_outputs_for_backward(pool, args), test_stream());
  args = random_args(pool, sequences_of(pool, {0, 0}, {5, 0}), shape, Decays::kTypical);
  args.cache = random_cache(pool, 2, shape);
  args.slots = pool.ints({2}, {1, 0});
  const KdaState before = copy_of(pool, args.cache);
  launch(args, test_stream());
  testing::expect_same_bits(args.cache.state, before.state);
  testing::expect_same_bits(args.cache.chunk_u, before.chunk_u);
}

TEST(KdaRefusalTest, RefusesByName) {
  TensorPool pool(8);
  const Shape shape{2, 16, 24};
  Kda args = random_args(pool, sequences_of(pool, {3, 2}, {0, 9}), shape, Decays::kTypical);
  EXPECT_EQ(validate(args).message(), "kda: cache: needed where a sequence has cached tokens");
  args.cache = random_cache(pool, 2, shape);
  EXPECT_EQ(validate(args).message(), "kda: cache and slots: expected all or none");
  args.slots = pool.ints({2}, {1, 2});
  EXPECT_EQ(validate(args).message(), "kda: slots: slot out of range");
  args.slots = pool.ints({2}, {1, 1});
  EXPECT_EQ(validate(args).message(), "kda: slots: two sequences in one slot");
  args.slots = pool.ints({2}, {1, 0});
  EXPECT_TRUE(validate(args).ok());
  EXPECT_EQ(validate(with_outputs_for_backward(pool, args)).message(),
            "kda: span_states: only for whole sequences (cached all 0)");
  args.beta = pool.zeros(DType::kF32, {5, 3});
  EXPECT_EQ(validate(args).message(), "kda: beta: f32 [5, 3], expected f32 [5, 2]");
}

}  // namespace
}  // namespace slipstream::kernels
