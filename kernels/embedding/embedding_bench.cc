// Embedding: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/embedding/embedding.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void embedding(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), hidden = 1024;
  const DType dtype = state.range(1) != 0 ? DType::kBf16 : DType::kF32;
  const Embedding args{.ids = pool.random_ints({tokens}, 0, 16384), .table = pool.random(dtype, {16384, hidden}),
                       .y = pool.output(DType::kF32, {tokens, hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.y.bytes() + tokens * hidden * size_of(dtype));
}
BENCHMARK(embedding)->ArgsProduct({{16, 4096}, {0, 1}})->UseRealTime();

void embedding_backward(benchmark::State& state) {
  testing::TensorPool pool(2);
  const int64_t tokens = state.range(0), hidden = 1024;
  const EmbeddingBackward args{.ids = pool.random_ints({tokens}, 0, 16384),
                               .dy = pool.random(DType::kF32, {tokens, hidden}),
                               .dtable = pool.zeros(DType::kF32, {16384, hidden})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 3 * args.dy.bytes());
}
BENCHMARK(embedding_backward)->Arg(4096)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
