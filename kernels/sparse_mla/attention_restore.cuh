// Many queries read a row of fp8 latents many times: then their sequences' pages are restored to a store in the
// workspace first, each once, and attention is that of plain rows. Its bits are the same.
#pragma once

#include <algorithm>
#include <optional>

#include "kernels/sparse_mla/attention_device.cuh"

namespace slipstream::kernels {

constexpr int kRestoreThreads = 256;
constexpr int64_t kRestoredPages = 8;  // for each query

// Block b * pages + i restores page i of sequence b to page b * pages + i.
template <class X>
__global__ void __launch_bounds__(kRestoreThreads)
    restore_rows(DevicePages<e4m3> from, DeviceSequences batch, LatentRow latents, int pages, X* to, int32_t* table) {
  const int b = static_cast<int>(blockIdx.x) / pages, page = static_cast<int>(blockIdx.x) % pages;
  const int page_rows = static_cast<int>(kPageRows), width = latents.rank + latents.rope;
  const int count = batch.cached[b] + batch.row_begin[b + 1] - batch.row_begin[b] - page * page_rows;
  if (threadIdx.x == 0) table[blockIdx.x] = static_cast<int32_t>(blockIdx.x);
  for (int r = static_cast<int>(threadIdx.x) / kWarp; r < min(count, page_rows); r += kRestoreThreads / kWarp) {
    const e4m3* const row = from.row(b, page * page_rows + r);
    X* const out = to + (int64_t{blockIdx.x} * page_rows + r) * width;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    if (sizeof(X) == 2 && width % 8 == 0) {
      for (int c = lane * 8; c < width; c += kWarp * 8) {
        *reinterpret_cast<uint4*>(out + c) = latent_eight(latents, row, c);
      }
    } else {
      for (int c = lane; c < width; c += kWarp) store(out + c, latent_value<X>(latents, row, c));
    }
  }
}

// The call on restored rows, which live in the stream's workspace; none where that has no room or queries are too few.
// A choice that changes no bits. On an H200 a page takes 0.044 us to restore, and a query of 2048 keys 0.63 us longer
// where its rows are restored as they are read. In steps of decode they always are.
template <class X>
std::optional<Attention> restore_pages(const Attention& args, Stream& stream) {
  const Sequences& sequences = args.sequences;
  int64_t pages = 1;
  for (int64_t b = 0; b < sequences.count(); ++b) {
    pages = std::max(pages, divide_up(sequences.cached_tokens(b) + sequences.end(b) - sequences.begin(b), kPageRows));
  }
  const int64_t all = sequences.count() * pages, width = args.q.size(2);
  Arena& workspace = stream.workspace();
  const int64_t bytes = all * (kPageRows * width * int64_t{sizeof(X)} + 4) + 1024;
  const int64_t queries = args.q.size(0);
  const bool many = queries > sequences.count() && kRestoredPages * queries >= all;
  if (!many || bytes > workspace.capacity() - workspace.used()) return std::nullopt;
  Attention plain = args;
  plain.keys = {.pool = workspace.alloc(args.q.dtype(), {all, kPageRows, width}),
                .page_table = workspace.alloc(DType::kI32, {sequences.count(), pages})};
  plain.values = plain.keys;
  restore_rows<X><<<static_cast<unsigned>(all), kRestoreThreads, 0, cuda_stream(stream)>>>(
      on_device<e4m3>(args.keys), on_device(sequences), args.latents, static_cast<int>(pages),
      plain.keys.pool.data<X>(), plain.keys.page_table.i32());
  return plain;
}

}  // namespace slipstream::kernels
