// PackPanels: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/pack_panels/pack_panels.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void pack_panels(benchmark::State& state) {
  testing::TensorPool pool(1);
  const DType dtype = state.range(0) == 0 ? DType::kF32 : DType::kBf16;
  const int64_t n = state.range(1), k = state.range(2);
  const PackPanels args{pool.random(dtype, {n, k}), pool.output(dtype, {(n + 15) / 16, k, 16})};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 2 * args.w.bytes());
}
BENCHMARK(pack_panels)->ArgNames({"bf16", "outputs", "inputs"})->ArgsProduct({{0, 1}, {64, 4096}, {64, 1024}})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
