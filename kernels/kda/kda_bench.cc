// KDA: multiply-adds of the chunked form a second, against the machine's FMA rate; bytes of state for decode
// (kernels/testing/bench.h).
#include "kernels/kda/kda.h"
#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

using testing::even_sequences;

Kda random_args(testing::TensorPool& pool, const Sequences& sequences, int64_t heads, int64_t d) {
  const int64_t tokens = sequences.rows();
  const float size = 1.0f / std::sqrt(static_cast<float>(d));
  const auto values = [&](float low, float high) {
    return pool.random(DType::kF32, {tokens, heads, d}, low, high);
  };
  return {.q = values(-size, size),
          .k = values(-size, size),
          .v = values(-1, 1),
          .log_decay = values(-0.5f, 0),
          .beta = pool.random(DType::kF32, {tokens, heads}, 0, 1),
          .sequences = sequences,
          .cache = {},
          .slots = {},
          .o = values(0, 1),
          .span_states = {},
          .r = {}};
}

Kda for_training(testing::TensorPool& pool, Kda args) {
  args.span_states =
      pool.zeros(DType::kF32, {kda_spans(args.sequences), args.q.size(1), args.q.size(2), args.v.size(2)});
  args.r = pool.zeros(DType::kF32, {args.v.size(0), args.v.size(1), args.v.size(2)});
  return args;
}

// Two products with the state and the fold; inside a chunk A, B, u and o, each over 8 rows on average.
int64_t forward_flops(int64_t tokens, int64_t heads, int64_t d) {
  return 2 * tokens * heads * (3 * d * d + 4 * 8 * d);
}
// Six products of that size, and twice the work inside a chunk.
int64_t backward_flops(int64_t tokens, int64_t heads, int64_t d) {
  return 2 * tokens * heads * (6 * d * d + 8 * 8 * d);
}

// Arguments: tokens, heads, d.
void kda_forward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const Kda args =
      random_args(pool, even_sequences(pool, 1, {0, state.range(0)}), state.range(1), state.range(2));
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, forward_flops(state.range(0), state.range(1), state.range(2)));
}
BENCHMARK(kda_forward)
    ->Args({2048, 8, 64})
    ->Args({2048, 16, 128})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void kda_forward_for_training(benchmark::State& state) {
  testing::TensorPool pool(1);
  const Kda args = for_training(
      pool, random_args(pool, even_sequences(pool, 1, {0, state.range(0)}), state.range(1), state.range(2)));
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, forward_flops(state.range(0), state.range(1), state.range(2)));
}
BENCHMARK(kda_forward_for_training)
    ->Args({2048, 8, 64})
    ->Args({2048, 16, 128})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void kda_backward(benchmark::State& state) {
  testing::TensorPool pool(1);
  const Kda forward = for_training(
      pool, random_args(pool, even_sequences(pool, 1, {0, state.range(0)}), state.range(1), state.range(2)));
  launch(forward, testing::bench_stream());
  const KdaBackward args{.q = forward.q,
                         .k = forward.k,
                         .log_decay = forward.log_decay,
                         .beta = forward.beta,
                         .sequences = forward.sequences,
                         .span_states = forward.span_states,
                         .r = forward.r,
                         .d_o = forward.v,
                         .dq = pool.copy(forward.q),
                         .dk = pool.copy(forward.q),
                         .dlog_decay = pool.copy(forward.q),
                         .dv = pool.copy(forward.v),
                         .dbeta = pool.copy(forward.beta)};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, backward_flops(state.range(0), state.range(1), state.range(2)));
}
BENCHMARK(kda_backward)
    ->Args({2048, 8, 64})
    ->Args({2048, 16, 128})
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

// Arguments: batch, heads, d, position in the chunk. Eight caches take turns, as the layers of a model do, so
// that the state comes from memory.
void kda_decode(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t count = state.range(0), heads = state.range(1), d = state.range(2);
  Kda args = random_args(pool, even_sequences(pool, count, {64 + state.range(3), 1}), heads, d);
  args.slots = pool.zeros(DType::kI32, {count});
  for (int64_t b = 0; b < count; ++b) args.slots.i32()[b] = static_cast<int32_t>(b);
  std::vector<KdaState> caches;
  for (int i = 0; i < 8; ++i) {
    const auto rows = [&] { return pool.random(DType::kF32, {count, kKdaChunk, heads, d}, 0, 1); };
    caches.push_back({.state = pool.random(DType::kF32, {count, heads, d, d}),
                      .chunk_k = rows(),
                      .chunk_g = rows(),
                      .chunk_u = rows()});
  }
  size_t turn = 0;
  for (auto _ : state) {
    args.cache = caches[turn++ % caches.size()];
    launch(args, testing::bench_stream());
  }
  testing::report_bytes(state, count * heads * d * d * 4);
}
BENCHMARK(kda_decode)
    ->ArgsProduct({{1, 16}, {8}, {64}, {0, 7, 15}})
    ->ArgsProduct({{1, 16}, {16}, {128}, {0, 7, 15}})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

void kda_recurrent(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t count = state.range(0), heads = state.range(1), d = state.range(2);
  const Kda inputs = random_args(pool, even_sequences(pool, count, {64, 1}), heads, d);
  KdaRecurrent args{.q = inputs.q,
                    .k = inputs.k,
                    .v = inputs.v,
                    .log_decay = inputs.log_decay,
                    .beta = inputs.beta,
                    .sequences = inputs.sequences,
                    .state = {},
                    .slots = pool.zeros(DType::kI32, {count}),
                    .o = inputs.o};
  for (int64_t b = 0; b < count; ++b) args.slots.i32()[b] = static_cast<int32_t>(b);
  std::vector<Tensor> states;
  for (int i = 0; i < 8; ++i) states.push_back(pool.random(DType::kF32, {count, heads, d, d}));
  size_t turn = 0;
  for (auto _ : state) {
    args.state = states[turn++ % states.size()];
    launch(args, testing::bench_stream());
  }
  testing::report_bytes(state, 2 * count * heads * d * d * 4);
}
BENCHMARK(kda_recurrent)
    ->Args({1, 8, 64})
    ->Args({16, 8, 64})
    ->Args({1, 16, 128})
    ->Args({16, 16, 128})
    ->UseRealTime()
    ->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace slipstream::kernels
