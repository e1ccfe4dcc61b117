// Attention over 2048 selected latents, 64 heads, bf16, on a GPU: prefill of 4096
// queries of one sequence and decode of many sequences. The share of the floor: of the tensor cores' time at
// 790 TFLOP/s in prefill, of the memory's at 4.3 TB/s in decode, where every sequence has rows of its own; rows
// are bf16 or fp8. The peer is FlashMLA on the same card (decode: its fp8 cache), as measured on its own.
#include <cmath>
#include <cstdio>
#include <vector>

#include "common/hash.h"
#include "kernels/latent_rows/latent_rows.h"
#include "kernels/sparse_mla/sparse_mla.h"
#include "kernels/testing/cuda_bench.h"

namespace slipstream::kernels {
namespace {

using testing::CudaBench;

constexpr int64_t kHeads = 64, kRank = 512, kSelected = 2048;

struct Shape {
  const char* name;
  int64_t sequences, queries, rows, width;  // `queries` of each sequence, which see all its rows
  double peer_ms;
  bool fp8 = false;
};

// The rows of a store in fp8.
Tensor quantized(const Tensor& rows, CudaBench& bench) {
  const LatentRow layout = latent_row(kRank, rows.size(2) - kRank);
  const int64_t pages = rows.size(0), count = pages * kPageRows;
  const Tensor out = bench.arena().zeros(DType::kF8E4M3, {pages, kPageRows, layout.bytes}, bench.stream());
  std::vector<int32_t> table(static_cast<size_t>(pages));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  std::vector<int32_t> begin = {0, static_cast<int32_t>(count)}, cached = {0};
  launch(LatentWrite{.rows = rows.view({count, rows.size(2)}),
                     .rank = kRank,
                     .sequences = {.row_begin = bench.upload(begin.data(), DType::kI32, {2}),
                                   .cached = bench.upload(cached.data(), DType::kI32, {1}),
                                   .host_row_begin = Tensor(begin.data(), DType::kI32, {2}),
                                   .host_cached = Tensor(cached.data(), DType::kI32, {1})},
                     .store = {.pool = out, .page_table = bench.upload(table.data(), DType::kI32, {1, pages})}},
         bench.stream());
  return out;
}

// Ascending, without repetition, another choice for every query: one row of each of equal stretches.
std::vector<int32_t> select(int64_t queries, int64_t rows) {
  std::vector<int32_t> chosen(static_cast<size_t>(queries * kSelected));
  const auto stretch = static_cast<uint64_t>(rows / kSelected);
  for (size_t i = 0; i < chosen.size(); ++i) {
    chosen[i] = static_cast<int32_t>((i % kSelected) * stretch + splitmix64(i) % stretch);
  }
  return chosen;
}

void measure(const Shape& shape, CudaBench& bench) {
  const ArenaScope scope(bench.arena());
  const int64_t queries = shape.sequences * shape.queries, pages = shape.rows / kPageRows;
  SparseMla call;
  call.q = bench.random(DType::kBf16, {queries, kHeads, shape.width});
  call.keys.pool = bench.random(DType::kBf16, {shape.sequences * pages, kPageRows, shape.width});
  if (shape.fp8) call.keys.pool = quantized(call.keys.pool, bench);
  std::vector<int32_t> table(static_cast<size_t>(shape.sequences * pages)), begin, cached;
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  call.keys.page_table = bench.upload(table.data(), DType::kI32, {shape.sequences, pages});
  for (int64_t b = 0; b <= shape.sequences; ++b) begin.push_back(static_cast<int32_t>(b * shape.queries));
  for (int64_t b = 0; b < shape.sequences; ++b)
    cached.push_back(static_cast<int32_t>(shape.rows - shape.queries));
  call.sequences.row_begin = bench.upload(begin.data(), DType::kI32, {shape.sequences + 1});
  call.sequences.cached = bench.upload(cached.data(), DType::kI32, {shape.sequences});
  call.sequences.host_row_begin = Tensor(begin.data(), DType::kI32, {shape.sequences + 1});
  call.sequences.host_cached = Tensor(cached.data(), DType::kI32, {shape.sequences});
  const std::vector<int32_t> counts(static_cast<size_t>(queries), static_cast<int32_t>(kSelected));
  call.indices = bench.upload(select(queries, shape.rows).data(), DType::kI32, {queries, kSelected});
  call.counts = bench.upload(counts.data(), DType::kI32, {queries});
  call.scale = 1.0f / std::sqrt(256.0f);
  call.o = bench.arena().zeros(DType::kBf16, {queries, kHeads, kRank}, bench.stream());
  call.lse = bench.arena().zeros(DType::kF32, {queries, kHeads}, bench.stream());

  const double flops = 2.0 * static_cast<double>(queries * kHeads * kSelected * (shape.width + kRank));
  const int64_t row_bytes = call.keys.pool.size(2) * size_of(call.keys.pool.dtype());
  const double bytes = static_cast<double>(queries) *
                       static_cast<double>(kSelected * row_bytes + 2 * kHeads * (shape.width + kRank));
  const bool prefill = shape.queries > 1;
  const double floor = prefill ? flops / 790e9 : bytes / 4.3e9;
  for (int round = 0; round < 2; ++round) {
    const double ms = bench.milliseconds([&](int) { launch(call, bench.stream()); }, prefill ? 10 : 50);
    std::printf("%-22s key %lld %s  %8.4f ms %6.0f TFLOP/s %6.0f GB/s  floor %.2f  peer %.4f ms  ratio %.2f\n",
                shape.name, static_cast<long long>(shape.width), shape.fp8 ? "fp8 " : "bf16", ms, flops / ms * 1e-9, bytes / ms * 1e-6,
                floor / ms, shape.peer_ms, ms / shape.peer_ms);
  }
}

CUDA_BENCH(sparse_mla) {
  const Shape shapes[] = {
      {"prefill, 8K rows", 1, 4096, 8192, 576, 1.77},     {"prefill, 32K rows", 1, 4096, 32768, 576, 2.14},
      {"prefill, 128K rows", 1, 4096, 131072, 576, 2.24}, {"prefill, 8K rows", 1, 4096, 8192, 512, 1.97},
      {"prefill, 32K rows", 1, 4096, 32768, 512, 1.94},   {"prefill, 128K rows", 1, 4096, 131072, 512, 2.20},
      {"decode, batch 1", 1, 1, 8192, 576, 0.0167},       {"decode, batch 16", 16, 1, 8192, 576, 0.0273},
      {"decode, batch 32", 32, 1, 8192, 576, 0.0400},     {"decode, batch 64", 64, 1, 8192, 576, 0.0735},
      {"decode, batch 128", 128, 1, 8192, 576, 0.111},    {"decode, batch 256", 256, 1, 8192, 576, 0.2185},
      {"decode, batch 128", 128, 1, 8192, 512, 0.111}};
  for (const Shape& shape : shapes) measure(shape, bench);
  for (const int64_t width : {576, 512}) {
    const Shape fp8[] = {{"prefill, 8K rows", 1, 4096, 8192, width, 1.77, true},
                         {"prefill, 128K rows", 1, 4096, 131072, width, 2.24, true},
                         {"prefill of 512, 128K", 1, 512, 131072, width, 0.28, true},
                         {"decode, batch 1", 1, 1, 8192, width, 0.0167, true},
                         {"decode, batch 16", 16, 1, 8192, width, 0.0273, true},
                         {"decode, batch 32", 32, 1, 8192, width, 0.0400, true},
                         {"decode, batch 64", 64, 1, 8192, width, 0.0735, true},
                         {"decode, batch 128", 128, 1, 8192, width, 0.111, true},
                         {"decode, batch 256", 256, 1, 8192, width, 0.2185, true}};
    for (const Shape& shape : fp8) measure(shape, bench);
  }
}

}  // namespace
}  // namespace slipstream::kernels
