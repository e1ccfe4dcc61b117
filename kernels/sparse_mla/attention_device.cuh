// What the kernels of attention share: their arguments on the device and the keys of a query.
#pragma once

#include <algorithm>

#include "kernels/cuda/pieces.cuh"
#include "kernels/latent_rows/latent_rows.cuh"
#include "kernels/sparse_mla/attention.h"

namespace slipstream::kernels {

// X: dtype of activations; K: of the stores, e4m3 for rows of fp8 latents.
template <class X, class K>
struct AttentionView {
  Heads<X> q;
  DevicePages<K> keys, values;
  LatentRow latents;  // how e4m3 rows lie
  bool shared;        // values are the first columns of keys
  bool vectors;       // stores may be read 16 bytes at a time
  DeviceSequences batch;
  const int32_t* indices;  // null: every position up to the query's
  int64_t indices_stride;
  const int32_t* counts;
  int heads, kv_heads, key_width, value_width;
  float scale;
  Heads<X> o;
  Rows<float> lse;  // data is null when absent

  __device__ int group() const { return heads / kv_heads; }
};

template <class X, class K>
AttentionView<X, K> view_of(const Attention& args) {
  AttentionView<X, K> view{};
  view.q = heads_of<X>(args.q);
  view.keys = on_device<K>(args.keys);
  view.values = on_device<K>(args.values);
  view.latents = args.latents;
  view.shared = args.values.pool.raw() == args.keys.pool.raw();
  view.vectors = aligned_16(args.keys.pool) && aligned_16(args.values.pool) && args.q.size(2) % 8 == 0 &&
                 args.o.size(2) % 8 == 0;
  view.batch = on_device(args.sequences);
  if (!args.indices.empty()) {
    view.indices = args.indices.i32();
    view.indices_stride = args.indices.stride(0);
    view.counts = args.counts.i32();
  }
  view.heads = static_cast<int>(args.q.size(1));
  view.kv_heads = static_cast<int>(args.kv_heads);
  view.key_width = static_cast<int>(args.q.size(2));
  view.value_width = static_cast<int>(args.o.size(2));
  view.scale = args.scale;
  view.o = heads_of<X>(args.o);
  view.lse = rows_of<float>(args.lse);
  return view;
}

// The keys that query `t` attends to, in ascending position.
struct KeyList {
  int sequence;
  int count;
  const int32_t* selection;  // null: 0, 1, 2, ...

  __device__ int position(int i) const { return selection == nullptr ? i : selection[i]; }
};
template <class View>
__device__ KeyList keys_of(const View& view, int t) {
  const int b = sequence_of(view.batch.row_begin, view.batch.count, t);
  if (view.indices == nullptr) return {b, view.batch.cached[b] + t - view.batch.row_begin[b] + 1, nullptr};
  return {b, view.counts[t], view.indices + t * view.indices_stride};
}

// Column c of a stored row.
template <class X, class K>
__device__ __forceinline__ float stored_value(const AttentionView<X, K>& view, const K* row, int c) {
  if constexpr (sizeof(K) == 1) {
    return latent_value<X>(view.latents, row, c);
  } else {
    return load(row + c);
  }
}

// --- fp32 arithmetic: fmaf chains on the ordinary units ---

constexpr int kFmaHeads = 16;  // of one group, in a block of eight warps with two heads each
constexpr int kFmaKeys = 32;   // a lane each
constexpr int kFmaThreads = 256;

// Floats from one row in shared memory to the next: 16-byte chunks of a column fall into different banks.
__host__ __device__ constexpr int fma_pitch(int width) { return ((width + 3) / 4 | 1) * 4; }

// `count` rows of `width` values, zeros up to the pitch; row(i) is the source or null (zeros), value(source, c) its column c.
template <class T, class Row, class Value>
__device__ void load_rows(float* to, int count, int width, const Row& row, const Value& value) {
  const int pitch = fma_pitch(width);
  for (int r = static_cast<int>(threadIdx.x) / kWarp; r < count; r += kFmaThreads / kWarp) {
    const T* from = row(r);
    for (int c = static_cast<int>(threadIdx.x) % kWarp; c < pitch; c += kWarp) {
      to[r * pitch + c] = from != nullptr && c < width ? value(from, c) : 0.0f;
    }
  }
}
template <class T, class Row>
__device__ void load_rows(float* to, int count, int width, const Row& row) {
  load_rows<T>(to, count, width, row, [](const T* from, int c) { return load(from + c); });
}

// a · b and c · b: chains over ascending columns.
__device__ inline float2 two_products(const float* a, const float* c, const float* b, int width) {
  float2 sum = {0.0f, 0.0f};
  for (int i = 0; i < width; i += 4) {
    const float4 x = *reinterpret_cast<const float4*>(a + i), y = *reinterpret_cast<const float4*>(c + i);
    const float4 z = *reinterpret_cast<const float4*>(b + i);
    sum.x = fmaf(x.w, z.w, fmaf(x.z, z.z, fmaf(x.y, z.y, fmaf(x.x, z.x, sum.x))));
    sum.y = fmaf(y.w, z.w, fmaf(y.z, z.z, fmaf(y.y, z.y, fmaf(y.x, z.x, sum.y))));
  }
  return sum;
}

// The block's share of the work: query blockIdx.x, and of its heads a run of up to kFmaHeads under one key
// head.
struct HeadRun {
  int kv_head, first, count;
};
template <class View>
__device__ HeadRun head_run(const View& view, int index, int heads_a_block) {
  const int runs = (view.group() + heads_a_block - 1) / heads_a_block;
  const int kv_head = index / runs, first = index % runs * heads_a_block;
  return {kv_head, kv_head * view.group() + first, min(heads_a_block, view.group() - first)};
}

}  // namespace slipstream::kernels
