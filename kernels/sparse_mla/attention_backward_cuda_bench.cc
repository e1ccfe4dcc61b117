// The gradients of sparse and of dense MLA on a GPU. The floor is all five products at the rate of a large bf16
// product (790 TFLOP/s). Selections are random: one position of each of the top-k equal parts of a query's
// prefix.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <vector>

#include "common/hash.h"
#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr double kPeakTflops = 790.0;

struct Case {
  const char* name;
  int64_t tokens, idle;  // the first `idle` queries select nothing
  int64_t width, topk;   // topk 0: every position up to the query's
  int64_t workspace_mib;
};

void measure(const Case& c, CudaBench& bench) {
  constexpr int64_t kHeads = 64, kRank = 512;
  const ArenaScope scope(bench.arena()), workspace(bench.stream().workspace());
  const int64_t pages = (c.tokens + kPageRows - 1) / kPageRows;
  std::vector<int32_t> table(static_cast<size_t>(pages));
  std::iota(table.rbegin(), table.rend(), 0);
  std::vector<int32_t> row_begin{0, static_cast<int32_t>(c.tokens)}, cached{0};
  std::vector<int32_t> indices(static_cast<size_t>(c.tokens * c.topk)),
      counts(static_cast<size_t>(c.topk > 0 ? c.tokens : 0));
  double entries = 0.0;
  for (int64_t t = c.idle; t < c.tokens; ++t) {
    const int64_t count = c.topk > 0 ? std::min(c.topk, t + 1) : t + 1;
    entries += static_cast<double>(count);
    if (c.topk == 0) continue;
    counts[static_cast<size_t>(t)] = static_cast<int32_t>(count);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t begin = i * (t + 1) / count, end = (i + 1) * (t + 1) / count;
      const uint64_t random = splitmix64(static_cast<uint64_t>(t * c.topk + i));
      indices[static_cast<size_t>(t * c.topk + i)] =
          static_cast<int32_t>(begin + static_cast<int64_t>(random % static_cast<uint64_t>(end - begin)));
    }
  }
  const auto upload = [&](const std::vector<int32_t>& values, std::initializer_list<int64_t> shape) {
    return values.empty() ? Tensor() : bench.upload(values.data(), DType::kI32, shape);
  };
  const Device host{DeviceKind::kCpu, 0};
  const Sequences sequences{.row_begin = upload(row_begin, {2}),
                            .cached = upload(cached, {1}),
                            .host_row_begin = Tensor(row_begin.data(), DType::kI32, {2}, host),
                            .host_cached = Tensor(cached.data(), DType::kI32, {1}, host)};
  SparseMla forward{.q = bench.random(DType::kBf16, {c.tokens, kHeads, c.width}),
                    .keys = {.pool = bench.random(DType::kBf16, {pages, kPageRows, c.width}),
                             .page_table = upload(table, {1, pages})},
                    .sequences = sequences,
                    .indices = upload(indices, {c.tokens, c.topk}),
                    .counts = upload(counts, {c.tokens}),
                    .scale = 1.0f / std::sqrt(static_cast<float>(c.width)),
                    .o = bench.arena().alloc(DType::kBf16, {c.tokens, kHeads, kRank}),
                    .lse = bench.arena().alloc(DType::kF32, {c.tokens, kHeads})};
  launch(forward, bench.stream());
  const SparseMlaBackward args{.q = forward.q,
                               .keys = forward.keys,
                               .sequences = sequences,
                               .indices = forward.indices,
                               .counts = forward.counts,
                               .scale = forward.scale,
                               .o = forward.o,
                               .lse = forward.lse,
                               .d_o = bench.random(DType::kBf16, {c.tokens, kHeads, kRank}),
                               .dq = bench.arena().alloc(DType::kBf16, {c.tokens, kHeads, c.width}),
                               .dkeys = bench.arena().alloc(DType::kBf16, {c.tokens, c.width})};
  Arena& memory = bench.stream().workspace();
  memory.alloc(DType::kF8E4M3, {memory.capacity() - (c.workspace_mib << 20)});
  const double ms = bench.milliseconds([&](int) { launch(args, bench.stream()); }, 5);
  const double flops = 2.0 * kHeads * static_cast<double>(3 * c.width + 2 * kRank) * entries,
               floor = flops / kPeakTflops * 1e-9;
  std::printf(
      "%-34s width %lld %6lld tokens %5.0f keys a query, workspace %5lld MiB %9.3f ms %5.0f TFLOP/s  %.2f of "
      "the floor\n",
      c.name, static_cast<long long>(c.width), static_cast<long long>(c.tokens - c.idle),
      entries / static_cast<double>(c.tokens - c.idle), static_cast<long long>(c.workspace_mib), ms,
      flops / ms * 1e-9, floor / ms);
  std::fflush(stdout);
}

CUDA_BENCH(sparse_mla_backward) {
  constexpr int64_t kAll = 2047, kDefault = 256;
  for (const Case& c : {Case{"sparse, 2048 keys each", 8192, 4096, 576, 2048, kAll},
                        Case{"sparse, 2048 keys each", 8192, 4096, 576, 2048, kDefault},
                        Case{"sparse, 2048 keys each", 8192, 4096, 512, 2048, kAll},
                        Case{"sparse, one sequence", 4096, 0, 576, 2048, kAll},
                        Case{"sparse, one sequence", 16384, 0, 576, 2048, kAll},
                        Case{"dense, one sequence", 2048, 0, 576, 0, kAll},
                        Case{"dense, one sequence", 4096, 0, 576, 0, kAll},
                        Case{"dense, one sequence", 4096, 0, 512, 0, kAll}}) {
    measure(c, bench);
  }
}

}  // namespace
}  // namespace slipstream::kernels
