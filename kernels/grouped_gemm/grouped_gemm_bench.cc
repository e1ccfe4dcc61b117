// GroupedGemm and its weight gradient: GFLOP/s, and for decoding (few rows an expert) the bytes of the
// experts read.
#include <vector>

#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

constexpr int64_t kTopK = 4;

// Expert e of row r of `rows` = tokens * kTopK, evenly and in order: what the dispatch makes of a balanced
// router.
Tensor balanced(testing::TensorPool& pool, int64_t rows, int64_t experts) {
  std::vector<int32_t> begin;
  for (int64_t e = 0; e <= experts; ++e) begin.push_back(static_cast<int32_t>(rows * e / experts));
  return pool.ints({experts + 1}, begin);
}

// Args: bf16, tokens, experts, outputs, inputs.
void grouped_gemm(benchmark::State& state) {
  const DType dtype = state.range(0) == 0 ? DType::kF32 : DType::kBf16;
  const int64_t rows = state.range(1) * kTopK, experts = state.range(2);
  const int64_t outputs = state.range(3), inputs = state.range(4);
  testing::TensorPool pool(1);
  const GroupedGemm args{.x = pool.random(DType::kF32, {rows, inputs}),
                         .w = pool.random(dtype, {experts, outputs, inputs}),
                         .row_begin = balanced(pool, rows, experts),
                         .y = pool.output(DType::kF32, {rows, outputs})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, 2 * rows * outputs * inputs);
  const int64_t read = std::min(rows, experts) * args.w[0].bytes();
  state.counters["GB/s"] =
      benchmark::Counter(static_cast<double>(read * state.iterations()) * 1e-9, benchmark::Counter::kIsRate);
}
BENCHMARK(grouped_gemm)
    ->ArgNames({"bf16", "tokens", "experts", "outputs", "inputs"})
    ->ArgsProduct({{0, 1}, {1, 16, 1024}, {32}, {512}, {1024}})
    ->UseRealTime();

// Args: tokens, experts, outputs, inputs.
void grouped_weight_grad(benchmark::State& state) {
  const int64_t rows = state.range(0) * kTopK, experts = state.range(1);
  const int64_t outputs = state.range(2), inputs = state.range(3);
  testing::TensorPool pool(1);
  const GroupedWeightGrad args{.dy = pool.random(DType::kF32, {rows, outputs}),
                               .x = pool.random(DType::kF32, {rows, inputs}),
                               .row_begin = balanced(pool, rows, experts),
                               .dw = pool.zeros(DType::kF32, {experts, outputs, inputs})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_flops(state, 2 * rows * outputs * inputs);
}
BENCHMARK(grouped_weight_grad)
    ->ArgNames({"tokens", "experts", "outputs", "inputs"})
    ->ArgsProduct({{64, 1024, 4096}, {32}, {512}, {1024}})
    ->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
