// Goal: on CUDA the chunked launch() is the recurrence of reference() within tolerance, forward and backward,
// for any decays and lengths in f32 and bf16; however a sequence is cut into calls, batched or placed in
// slots, its outputs and its cache have the same bits; runs repeat.
#include <algorithm>
#include <cmath>

#include "kernels/kda/kda.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/cuda_test.h"

namespace slipstream::kernels {
namespace {

using testing::cuda_stream;
using testing::CudaPool;
using testing::sequences_of;
using testing::TensorPool;

enum class Decays { kTypical, kStrong, kMixed, kWeak };

struct Shape {
  int64_t heads, dk, dv;
};

// Where the tensor cores compute, factors are rounded to bf16 (products with the state) or tf32 and so are
// off by 2^-9; what f32 tensors hold of it is then as exact as that, not as their own dtype.
float f32_slack(const Shape& shape, DType dtype) {
  return dtype == DType::kBf16 && shape.dk == 128 && shape.dv == 128 ? 400.0f : 1.0f;
}

// Unit rows, as `dtype` holds them.
Tensor unit_rows(TensorPool& pool, DType dtype, int64_t tokens, int64_t heads, int64_t dk) {
  const Tensor rows = pool.random(DType::kF32, {tokens, heads, dk});
  for (int64_t i = 0; i < tokens * heads; ++i) {
    float* row = rows.f32() + i * dk;
    double squares = 1e-6;
    for (int64_t d = 0; d < dk; ++d) squares += double{row[d]} * row[d];
    for (int64_t d = 0; d < dk; ++d) {
      row[d] = static_cast<float>(row[d] / std::sqrt(squares));
      if (dtype == DType::kBf16) row[d] = to_f32(to_bf16(row[d]));
    }
  }
  return rows;
}

Kda make_call(TensorPool& pool, DType dtype, const Sequences& sequences, const Shape& shape, Decays decays) {
  const int64_t tokens = sequences.rows();
  const Tensor g = pool.random(DType::kF32, {tokens, shape.heads, shape.dk}, -0.5f, 0.0f);
  for (int64_t i = 0; i < g.numel(); ++i) {
    const float draw = pool.uniform();
    if (decays == Decays::kStrong) g.f32()[i] = -5.0f;
    if (decays == Decays::kWeak) g.f32()[i] = -1e-3f * draw;
    if (decays == Decays::kMixed)
      g.f32()[i] = draw < 0.3f ? -5.0f : draw < 0.35f ? -300.0f : draw < 0.6f ? 0.0f : -1e-4f;
  }
  return {.q = unit_rows(pool, dtype, tokens, shape.heads, shape.dk),
          .k = unit_rows(pool, dtype, tokens, shape.heads, shape.dk),
          .v = testing::random_as(pool, dtype, {tokens, shape.heads, shape.dv}),
          .log_decay = g,
          .beta = pool.random(DType::kF32, {tokens, shape.heads}, 0.0f, 1.0f),
          .sequences = sequences,
          .cache = {},
          .slots = {},
          .o = pool.output(DType::kF32, {tokens, shape.heads, shape.dv}),
          .span_states = {},
          .r = {}};
}

KdaState random_cache(TensorPool& pool, int64_t slots, const Shape& shape) {
  return {.state = pool.random(DType::kF32, {slots, shape.heads, shape.dk, shape.dv}),
          .chunk_k = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}, -0.3f, 0.3f),
          .chunk_g = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}, 0.2f, 1.0f),
          .chunk_u = pool.random(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dv})};
}

KdaState on_cuda(CudaPool& device, const KdaState& host) {
  return {.state = device.copy(host.state),
          .chunk_k = device.copy(host.chunk_k),
          .chunk_g = device.copy(host.chunk_g),
          .chunk_u = device.copy(host.chunk_u)};
}

// The inputs on the device; everything is NaN in outputs and what the host's call lacks is absent.
Kda on_cuda(CudaPool& device, const Kda& host, DType dtype) {
  Kda args = host;
  args.q = device.copy(host.q, dtype);
  args.k = device.copy(host.k, dtype);
  args.v = device.copy(host.v, dtype);
  args.log_decay = device.copy(host.log_decay);
  args.beta = device.copy(host.beta);
  args.sequences = device.copy(host.sequences);
  args.cache = on_cuda(device, host.cache);
  args.slots = device.copy(host.slots);
  args.o = device.output(dtype, {host.o.size(0), host.o.size(1), host.o.size(2)});
  args.span_states = device.copy(host.span_states);
  args.r = device.copy(host.r);
  return args;
}

Kda with_outputs_for_backward(TensorPool& pool, Kda args) {
  args.span_states =
      pool.output(DType::kF32, {kda_spans(args.sequences), args.q.size(1), args.q.size(2), args.v.size(2)});
  args.r = pool.output(DType::kF32, {args.q.size(0), args.q.size(1), args.v.size(2)});
  return args;
}

class KdaCudaTest : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<Shape, Decays, DType>> {};

TEST_P(KdaCudaTest, EqualsTheRecurrence) {
  const auto [shape, decays, dtype] = GetParam();
  TensorPool pool(1);
  CudaPool device;
  // Slot 1 has no full chunk behind it, slots 4 and 5 stand inside one, slot 0 at the start of one.
  const std::vector<int32_t> lengths = {40, 0, 17, 1, 150}, cached = {32, 7, 9, 47, 0};
  Kda expected = make_call(pool, dtype, sequences_of(pool, lengths, cached), shape, decays);
  expected.cache = random_cache(pool, 7, shape);
  expected.slots = pool.ints({5}, {0, 6, 1, 5, 4});
  const Kda args = on_cuda(device, expected, dtype);
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_close(args.o, expected.o);
  for (size_t b = 0; b < lengths.size(); ++b) {
    const int64_t slot = expected.slots.i32()[b], live = (lengths[b] + cached[b]) % kKdaChunk;
    const float slack = f32_slack(shape, dtype);
    testing::expect_close(args.cache.state[slot], expected.cache.state[slot], slack);
    const auto expect_rows = [&](const Tensor& actual, const Tensor& wanted) {
      testing::expect_close(actual[slot].slice(0, 0, live), wanted[slot].slice(0, 0, live), slack);
    };
    expect_rows(args.cache.chunk_k, expected.cache.chunk_k);
    expect_rows(args.cache.chunk_g, expected.cache.chunk_g);
    expect_rows(args.cache.chunk_u, expected.cache.chunk_u);
  }
  for (const int64_t slot : {2, 3}) {  // slots that nobody names are left alone
    testing::expect_same_bits(testing::on_host(pool, args.cache.state[slot]), expected.cache.state[slot]);
  }
  device.expect_fences_intact();
}

TEST_P(KdaCudaTest, BackwardEqualsTheRecurrenceRunBackwards) {
  const auto [shape, decays, dtype] = GetParam();
  if (shape.dv > 128) GTEST_SKIP() << "the backward takes d_v <= 128";
  TensorPool pool(9);
  CudaPool device;
  const Kda forward = with_outputs_for_backward(
      pool, make_call(pool, dtype, sequences_of(pool, {150, 0, 1, 16, 64, 33}), shape, decays));
  for (int64_t t = 0; t < 264; t += 5) forward.beta.row(t)[0] = 0.0f;  // r cannot be found from u here
  const Kda args = on_cuda(device, forward, dtype);
  launch(args, cuda_stream());
  reference(forward);
  testing::expect_close(args.o, forward.o);
  testing::expect_close(args.r, forward.r, f32_slack(shape, dtype));
  testing::expect_close(args.span_states, forward.span_states, f32_slack(shape, dtype));

  const int64_t tokens = forward.q.size(0), heads = shape.heads;
  const KdaBackward expected{.q = forward.q,
                             .k = forward.k,
                             .log_decay = forward.log_decay,
                             .beta = forward.beta,
                             .sequences = forward.sequences,
                             .span_states = forward.span_states,
                             .r = forward.r,
                             .d_o = testing::random_as(pool, dtype, {tokens, heads, shape.dv}),
                             .dq = pool.output(DType::kF32, {tokens, heads, shape.dk}),
                             .dk = pool.output(DType::kF32, {tokens, heads, shape.dk}),
                             .dlog_decay = pool.output(DType::kF32, {tokens, heads, shape.dk}),
                             .dv = pool.output(DType::kF32, {tokens, heads, shape.dv}),
                             .dbeta = pool.output(DType::kF32, {tokens, heads})};
  reference(expected);
  const auto on_device = [&] {
    return KdaBackward{.q = args.q,
                       .k = args.k,
                       .log_decay = args.log_decay,
                       .beta = args.beta,
                       .sequences = args.sequences,
                       .span_states = device.copy(forward.span_states),
                       .r = device.copy(forward.r),
                       .d_o = device.copy(expected.d_o, dtype),
                       .dq = device.output(dtype, {tokens, heads, shape.dk}),
                       .dk = device.output(dtype, {tokens, heads, shape.dk}),
                       .dlog_decay = device.output(DType::kF32, {tokens, heads, shape.dk}),
                       .dv = device.output(dtype, {tokens, heads, shape.dv}),
                       .dbeta = device.output(DType::kF32, {tokens, heads})};
  };
  const KdaBackward backward = on_device(), again = on_device();
  launch(backward, cuda_stream());
  launch(again, cuda_stream());
  testing::expect_close(backward.dq, expected.dq);
  testing::expect_close(backward.dk, expected.dk);
  testing::expect_close(backward.dv, expected.dv);
  testing::expect_close(backward.dbeta, expected.dbeta, 2.0f * f32_slack(shape, dtype));
  testing::expect_close(backward.dlog_decay, expected.dlog_decay, 2.0f * f32_slack(shape, dtype));
  testing::expect_same_bits_on_device(again.dq, backward.dq);
  testing::expect_same_bits_on_device(again.dk, backward.dk);
  testing::expect_same_bits_on_device(again.dlog_decay, backward.dlog_decay);
  device.expect_fences_intact();
}

TEST_P(KdaCudaTest, RecurrentEqualsReference) {
  const auto [shape, decays, dtype] = GetParam();
  TensorPool pool(3);
  CudaPool device;
  const Kda inputs =
      make_call(pool, dtype, sequences_of(pool, {20, 0, 1, 9, 0}, {0, 3, 5, 8, 0}), shape, decays);
  const KdaRecurrent expected{.q = inputs.q,
                              .k = inputs.k,
                              .v = inputs.v,
                              .log_decay = inputs.log_decay,
                              .beta = inputs.beta,
                              .sequences = inputs.sequences,
                              .state = pool.random(DType::kF32, {6, shape.heads, shape.dk, shape.dv}),
                              .slots = pool.ints({5}, {2, 0, 4, 5, 1}),
                              .o = inputs.o};
  const Kda on_device = on_cuda(device, inputs, dtype);
  const KdaRecurrent args{.q = on_device.q,
                          .k = on_device.k,
                          .v = on_device.v,
                          .log_decay = on_device.log_decay,
                          .beta = on_device.beta,
                          .sequences = on_device.sequences,
                          .state = device.copy(expected.state),
                          .slots = device.copy(expected.slots),
                          .o = on_device.o};
  launch(args, cuda_stream());
  reference(expected);
  testing::expect_close(args.o, expected.o);
  testing::expect_close(args.state, expected.state);
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, KdaCudaTest,
    ::testing::Combine(::testing::Values(Shape{2, 8, 8}, Shape{1, 24, 40}, Shape{2, 64, 64},
                                         Shape{1, 33, 130}, Shape{2, 128, 128}),
                       ::testing::Values(Decays::kTypical, Decays::kStrong, Decays::kMixed),
                       ::testing::Values(DType::kF32, DType::kBf16)));

class KdaCudaBits : public testing::CudaTest,
                    public ::testing::WithParamInterface<std::tuple<Shape, DType>> {};

// Of the cache, what a sequence with `tokens` tokens has defined.
void expect_same_cache(const KdaState& actual, const KdaState& expected, int64_t expected_slot,
                       int64_t tokens) {
  if (tokens >= kKdaChunk)
    testing::expect_same_bits_on_device(actual.state[0], expected.state[expected_slot]);
  const int64_t live = tokens % kKdaChunk;
  const auto expect_rows = [&](const Tensor& a, const Tensor& b) {
    testing::expect_same_bits_on_device(a[0].slice(0, 0, live), b[expected_slot].slice(0, 0, live));
  };
  expect_rows(actual.chunk_k, expected.chunk_k);
  expect_rows(actual.chunk_g, expected.chunk_g);
  expect_rows(actual.chunk_u, expected.chunk_u);
}

// Everything is NaN: what is read before it is written shows.
KdaState empty_cache(CudaPool& device, int64_t slots, const Shape& shape) {
  return {.state = device.output(DType::kF32, {slots, shape.heads, shape.dk, shape.dv}),
          .chunk_k = device.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}),
          .chunk_g = device.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dk}),
          .chunk_u = device.output(DType::kF32, {slots, kKdaChunk, shape.heads, shape.dv})};
}

TEST_P(KdaCudaBits, AnyCutGivesTheSameBits) {
  const auto [shape, dtype] = GetParam();
  constexpr int64_t kTokens = 139;
  TensorPool pool(4);
  CudaPool device;
  const Kda host = make_call(pool, dtype, sequences_of(pool, {kTokens, 20}), shape, Decays::kMixed);
  Kda whole = on_cuda(device, host, dtype);
  whole.cache = empty_cache(device, 3, shape);
  whole.slots = device.copy(pool.ints({2}, {1, 2}));
  launch(whole, cuda_stream());
  // Training computes the same outputs without a cache.
  const Kda training = on_cuda(device, with_outputs_for_backward(pool, host), dtype);
  launch(training, cuda_stream());
  testing::expect_same_bits_on_device(training.o, whole.o);
  for (const int64_t piece : {1, 2, 7, 15, 64, 100}) {
    Kda part = whole;
    part.o = device.output(dtype, {kTokens, shape.heads, shape.dv});
    part.cache = empty_cache(device, 1, shape);
    part.slots = device.copy(pool.ints({1}, {0}));
    for (int64_t begin = 0; begin < kTokens; begin += piece) {
      const int64_t end = std::min(begin + piece, kTokens);
      Kda call = part;
      for (const auto member : {&Kda::q, &Kda::k, &Kda::v, &Kda::log_decay, &Kda::beta}) {
        call.*member = (whole.*member).slice(0, begin, end);
      }
      call.o = part.o.slice(0, begin, end);
      call.sequences =
          device.copy(sequences_of(pool, {static_cast<int32_t>(end - begin)}, {static_cast<int32_t>(begin)}));
      launch(call, cuda_stream());
    }
    testing::expect_same_bits_on_device(part.o, whole.o.slice(0, 0, kTokens));
    expect_same_cache(part.cache, whole.cache, 1, kTokens);
  }
  device.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, KdaCudaBits,
                         ::testing::Combine(::testing::Values(Shape{2, 8, 8}, Shape{1, 33, 130},
                                                              Shape{2, 128, 128}),
                                            ::testing::Values(DType::kF32, DType::kBf16)));

class KdaCudaLong : public testing::CudaTest {};

// More chunks than a pass has records for, over sequences' ends: the bits of shorter calls.
TEST_F(KdaCudaLong, PassesGiveTheBitsOfOne) {
  const Shape shape{64, 128, 128};
  const std::vector<int32_t> lengths = {700, 900, 30, 1500}, slots = {2, 0, 3, 1};
  TensorPool pool(5);
  CudaPool device;
  const Kda host = make_call(pool, DType::kBf16, sequences_of(pool, lengths), shape, Decays::kMixed);
  Kda whole = on_cuda(device, host, DType::kBf16);
  whole.cache = empty_cache(device, 4, shape);
  whole.slots = device.copy(pool.ints({4}, slots));
  launch(whole, cuda_stream());
  Kda parts = whole;
  parts.o = device.output(DType::kBf16, {3130, shape.heads, shape.dv});
  parts.cache = empty_cache(device, 1, shape);
  parts.slots = device.copy(pool.ints({1}, {0}));
  for (int64_t b = 0, begin = 0; b < 4; begin += lengths[static_cast<size_t>(b++)]) {
    const int32_t length = lengths[static_cast<size_t>(b)];
    for (int32_t from = 0; from < length; from += 555) {
      const int32_t to = std::min(from + 555, length);
      Kda call = parts;
      for (const auto member : {&Kda::q, &Kda::k, &Kda::v, &Kda::log_decay, &Kda::beta, &Kda::o})
        call.*member = (parts.*member).slice(0, begin + from, begin + to);
      call.sequences = device.copy(sequences_of(pool, {to - from}, {from}));
      launch(call, cuda_stream());
    }
    testing::expect_same_bits_on_device(parts.o.slice(0, begin, begin + length),
                                        whole.o.slice(0, begin, begin + length));
    expect_same_cache(parts.cache, whole.cache, slots[static_cast<size_t>(b)], length);
  }
  device.expect_fences_intact();
}

// More spans than the workspace holds at once, over sequences' ends: the gradients of each sequence alone.
TEST_F(KdaCudaLong, SegmentsOfTheBackwardGiveTheBitsOfOne) {
  const Shape shape{64, 128, 128};
  const std::vector<int32_t> lengths = {1000, 40, 300, 900};
  TensorPool pool(7);
  CudaPool device;
  const Kda host = with_outputs_for_backward(
      pool, make_call(pool, DType::kBf16, sequences_of(pool, lengths), shape, Decays::kTypical));
  const Kda forward = on_cuda(device, host, DType::kBf16);
  launch(forward, cuda_stream());
  const auto outputs = [&](KdaBackward args) {
    const int64_t tokens = args.q.size(0);
    args.dq = device.output(DType::kBf16, {tokens, shape.heads, shape.dk});
    args.dk = device.output(DType::kBf16, {tokens, shape.heads, shape.dk});
    args.dlog_decay = device.output(DType::kF32, {tokens, shape.heads, shape.dk});
    args.dv = device.output(DType::kBf16, {tokens, shape.heads, shape.dv});
    args.dbeta = device.output(DType::kF32, {tokens, shape.heads});
    return args;
  };
  const KdaBackward whole = outputs({.q = forward.q,
                                     .k = forward.k,
                                     .log_decay = forward.log_decay,
                                     .beta = forward.beta,
                                     .sequences = forward.sequences,
                                     .span_states = forward.span_states,
                                     .r = forward.r,
                                     .d_o = forward.v,
                                     .dq = {},
                                     .dk = {},
                                     .dlog_decay = {},
                                     .dv = {},
                                     .dbeta = {}});
  launch(whole, cuda_stream());
  int64_t begin = 0, span = 0;
  for (const int32_t length : lengths) {
    KdaBackward one = whole;
    for (const auto member : {&KdaBackward::q, &KdaBackward::k, &KdaBackward::log_decay, &KdaBackward::beta,
                              &KdaBackward::r, &KdaBackward::d_o})
      one.*member = (whole.*member).slice(0, begin, begin + length);
    one.span_states = whole.span_states.slice(0, span, span + kda_spans(length));
    one.sequences = device.copy(sequences_of(pool, {length}));
    one = outputs(one);
    launch(one, cuda_stream());
    for (const auto member : {&KdaBackward::dq, &KdaBackward::dk, &KdaBackward::dv, &KdaBackward::dlog_decay,
                              &KdaBackward::dbeta})
      testing::expect_same_bits_on_device(one.*member, (whole.*member).slice(0, begin, begin + length));
    begin += length;
    span += kda_spans(length);
  }
  device.expect_fences_intact();
}

// The state after many tokens is that of the f32 form to 2e-3: rounding does not accumulate.
TEST_F(KdaCudaLong, StateStaysAccurate) {
  const Shape shape{2, 128, 128};
  constexpr int32_t kTokens = 16384;
  for (const Decays decays : {Decays::kTypical, Decays::kStrong, Decays::kMixed, Decays::kWeak}) {
    TensorPool pool(6);
    CudaPool device;
    const Kda host = make_call(pool, DType::kBf16, sequences_of(pool, {kTokens}), shape, decays);
    KdaState states[2];
    Tensor outputs[2];
    for (const int i : {0, 1}) {
      Kda args = on_cuda(device, host, i == 0 ? DType::kF32 : DType::kBf16);
      args.cache = empty_cache(device, 1, shape);
      args.slots = device.copy(pool.ints({1}, {0}));
      launch(args, cuda_stream());
      states[i] = args.cache;
      outputs[i] = args.o;
    }
    const double state_error = testing::relative_error(testing::on_host(pool, states[1].state),
                                                       testing::on_host(pool, states[0].state));
    const double output_error =
        testing::relative_error(testing::on_host(pool, outputs[1]), testing::on_host(pool, outputs[0]));
    EXPECT_LE(state_error, 2e-3);
    EXPECT_LE(output_error, 4e-3);
    device.expect_fences_intact();
  }
}

}  // namespace
}  // namespace slipstream::kernels
