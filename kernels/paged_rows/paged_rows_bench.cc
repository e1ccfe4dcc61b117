// PagedWrite: bytes read and written a second, against the machine's copy rate (kernels/testing/bench.h).
#include "kernels/paged_rows/paged_rows.h"

#include <vector>

#include "kernels/testing/batches.h"
#include "kernels/testing/bench.h"

namespace slipstream::kernels {
namespace {

void paged_write(benchmark::State& state) {
  testing::TensorPool pool(1);
  const int64_t tokens = state.range(0), width = 576, pages = tokens / kPageRows + 1;
  const DType dtype = state.range(1) != 0 ? DType::kBf16 : DType::kF32;
  std::vector<int32_t> table;
  for (int64_t page = 0; page < pages; ++page) table.push_back(static_cast<int32_t>(page * 7 % pages));
  const PagedWrite args{.rows = pool.random(DType::kF32, {tokens, width}),
                        .sequences = testing::even_sequences(pool, 1, {0, tokens}),
                        .store = {.pool = pool.output(dtype, {pages, kPageRows, width}),
                                  .page_table = pool.ints({1, pages}, table)}};
  for (auto _ : state) launch(args, testing::bench_stream());
  testing::report_bytes(state, args.rows.bytes() + tokens * width * size_of(dtype));
}
BENCHMARK(paged_write)->ArgsProduct({{16, 4096}, {0, 1}})->UseRealTime();

}  // namespace
}  // namespace slipstream::kernels
