// Copy: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/copy/copy.h"

#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void copy(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0);
  const Copy args{.from = pool.random(DType::kF32, {tokens, 8, 192}).slice(2, 128, 192),
                  .to = pool.output(DType::kF32, {tokens, 8, 320}).slice(2, 256, 320)};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, 2 * args.to.bytes());
}
BENCHMARK(copy)->Arg(16)->Arg(4096)->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
