// Attention, one query and some of its heads a block. The softmax runs over blocks of the query's key list at
// fixed places, each rescaling what came before, so the bits of a row do not depend on what else is computed
// with it.
#pragma once

#include <cuda_runtime.h>

#include <limits>

#include "kernels/cuda/mma.cuh"
#include "kernels/sparse_mla/attention_device.cuh"

namespace slipstream::kernels {

// --- on the ordinary units: a lane scores a key, then owns columns lane, lane + 32, ... of the output ---

template <class X, class K, int kColumns>
__global__ void __launch_bounds__(kFmaThreads) attend_fma(const AttentionView<X, K> view) {
  extern __shared__ float shared[];
  const int key_pitch = fma_pitch(view.key_width),
            value_pitch = view.shared ? key_pitch : fma_pitch(view.value_width);
  float* const queries = shared;
  float* const keys = queries + kFmaHeads * key_pitch;
  float* const values = view.shared ? keys : keys + kFmaKeys * key_pitch;
  const int t = static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const HeadRun run = head_run(view, static_cast<int>(blockIdx.y), kFmaHeads);
  const KeyList list = keys_of(view, t);

  load_rows<X>(queries, kFmaHeads, view.key_width,
               [&](int h) { return h < run.count ? view.q.at(t, run.first + h) : nullptr; });
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, out[2][kColumns] = {};
  for (int begin = 0; begin < list.count; begin += kFmaKeys) {
    const int count = min(kFmaKeys, list.count - begin);
    __syncthreads();
    const auto row = [&](const DevicePages<K>& store, int width) {
      return [&, width](int i) {
        return i < count ? store.row(list.sequence, list.position(begin + i)) + run.kv_head * width : nullptr;
      };
    };
    const auto value = [&](const K* from, int c) { return stored_value(view, from, c); };
    load_rows<K>(keys, kFmaKeys, view.key_width, row(view.keys, view.key_width), value);
    if (!view.shared) load_rows<K>(values, kFmaKeys, view.value_width, row(view.values, view.value_width), value);
    __syncthreads();
    const float2 products = two_products(queries + 2 * warp * key_pitch, queries + (2 * warp + 1) * key_pitch,
                                         keys + lane * key_pitch, key_pitch);
    float p[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float score = lane < count ? (h == 0 ? products.x : products.y) * view.scale : -INFINITY;
      const float new_top = fmaxf(top[h], warp_max(score));
      p[h] = lane < count ? expf(score - new_top) : 0.0f;
      const float rescale = expf(top[h] - new_top);
      top[h] = new_top;
      sum[h] = fmaf(sum[h], rescale, p[h]);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) out[h][c] *= rescale;
    }
    for (int i = 0; i < count; ++i) {
      const float p0 = __shfl_sync(~0u, p[0], i), p1 = __shfl_sync(~0u, p[1], i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c * kWarp + lane >= view.value_width) continue;
        const float value = values[i * value_pitch + c * kWarp + lane];
        out[0][c] = fmaf(p0, value, out[0][c]);
        out[1][c] = fmaf(p1, value, out[1][c]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float total = warp_sum(sum[h]);
    const int head = run.first + 2 * warp + h;
    if (2 * warp + h >= run.count) continue;
    const float factor = list.count == 0 ? 0.0f : 1.0f / total;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c * kWarp + lane < view.value_width) {
        store(view.o.at(t, head) + c * kWarp + lane, out[h][c] * factor);
      }
    }
    if (lane == 0 && view.lse.data != nullptr) {
      view.lse[t][head] = list.count == 0 ? -INFINITY : top[h] + logf(total);
    }
  }
}

// --- on tensor cores: bf16 activations; stores of bf16 or of fp8 latents ---

constexpr int kMmaKeys = 64;  // of a block of the softmax

// Rows of bf16 in shared memory: whole 128-byte lines.
__host__ __device__ constexpr int mma_row_bytes(int width) { return (width * 2 + 127) / 128 * 128; }

// Fetches rows of a store or of queries; `row(r)` is the source or null (zeros). Asynchronous where vectors
// allow it.
template <int kThreads, int kRows, class Row>
__device__ void fetch_rows(const SwizzledTile& tile, int width, bool vectors, const Row& row) {
  constexpr int kThreadsARow = kThreads / kRows;
  static_assert(kThreadsARow * kRows == kThreads);
  const int r = static_cast<int>(threadIdx.x) / kThreadsARow,
            part = static_cast<int>(threadIdx.x) % kThreadsARow;
  const bf16* from = row(r);
  const int chunks = static_cast<int>(tile.row_bytes / 16);
  for (int c = part; c < chunks; c += kThreadsARow) {
    const uint32_t to = tile.chunk(static_cast<uint32_t>(r), static_cast<uint32_t>(c));
    const bool present = from != nullptr && c * 8 < width;
    if (vectors && present) {
      copy_async(to, from + c * 8);
      continue;
    }
    uint32_t words[4] = {};
    if (present) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t value = c * 8 + i < width ? uint32_t{from[c * 8 + i].bits} : 0u;
        words[i / 2] |= value << (i % 2 * 16);
      }
    }
    store_shared(to, {words[0], words[1], words[2], words[3]});
  }
}

// The same of rows of fp8 latents.
template <int kThreads, int kRows, class Row>
__device__ void fetch_latent_rows(const SwizzledTile& tile, const LatentRow& layout, const Row& row) {
  constexpr int kThreadsARow = kThreads / kRows;
  static_assert(kThreadsARow * kRows == kThreads);
  const int r = static_cast<int>(threadIdx.x) / kThreadsARow;
  const e4m3* from = row(r);
  for (int c = static_cast<int>(threadIdx.x) % kThreadsARow; c < static_cast<int>(tile.row_bytes / 16); c += kThreadsARow) {
    store_shared(tile.chunk(static_cast<uint32_t>(r), static_cast<uint32_t>(c)),
                 from != nullptr ? latent_eight(layout, from, c * 8) : uint4{});
  }
}

// kRowTiles x kColumnWarps warps. Warp (r, c) scores key range c for head rows [16 r, 16 r + 16), then adds
// up kTiles x 8 columns of the output for them.
template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
struct MmaAttention {
  static constexpr int kThreads = kRowTiles * kColumnWarps * kWarp;
  static constexpr int kHeads = kRowTiles * 16;
  static constexpr int kKeyTiles = kMmaKeys / 8 / kColumnWarps;  // n8 tiles of scores a warp
  static constexpr int kValueWidthMax = kColumnWarps * kTiles * 8;

  static constexpr int shared_bytes(int key_width, int value_width) {
    const int key_row = mma_row_bytes(key_width), value_row = kShared ? 0 : mma_row_bytes(value_width);
    return kHeads * key_row + 2 * kMmaKeys * (key_row + value_row) + kHeads * kMmaKeys * 2 +
           kHeads * kColumnWarps * 4;
  }
};

template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared, class K>
__global__ void __launch_bounds__(kRowTiles* kColumnWarps* kWarp)
    attend_mma(const AttentionView<bf16, K> view, bool query_vectors) {
  using Shape = MmaAttention<kRowTiles, kColumnWarps, kTiles, kShared>;
  extern __shared__ __align__(128) unsigned char tiles[];
  const uint32_t key_row = static_cast<uint32_t>(mma_row_bytes(view.key_width));
  const uint32_t value_row = kShared ? key_row : static_cast<uint32_t>(mma_row_bytes(view.value_width));
  const uint32_t base = shared_address(tiles);
  const SwizzledTile queries{base, key_row};
  const uint32_t key_base = base + Shape::kHeads * key_row;
  const uint32_t value_base = key_base + 2 * kMmaKeys * key_row;
  const uint32_t p_base = kShared ? value_base : value_base + 2 * kMmaKeys * value_row;
  const SwizzledTile probabilities{p_base, kMmaKeys * 2};
  float* const maxima = reinterpret_cast<float*>(tiles + (p_base - base) + Shape::kHeads * kMmaKeys * 2);

  const int t = static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row_tile = warp / kColumnWarps, column_warp = warp % kColumnWarps;
  const HeadRun run = head_run(view, static_cast<int>(blockIdx.y), Shape::kHeads);
  const KeyList list = keys_of(view, t);

  const auto fetch_block = [&](int block) {
    const int begin = block * kMmaKeys, buffer = block & 1;
    const auto row = [&](const DevicePages<K>& store, int width) {
      return [&, width](int i) {
        return begin + i < list.count
                   ? store.row(list.sequence, list.position(begin + i)) + run.kv_head * width
                   : nullptr;
      };
    };
    const SwizzledTile to{key_base + buffer * kMmaKeys * key_row, key_row};
    if constexpr (sizeof(K) == 1) {
      static_assert(kShared);
      fetch_latent_rows<Shape::kThreads, kMmaKeys>(to, view.latents, row(view.keys, 0));
    } else {
      fetch_rows<Shape::kThreads, kMmaKeys>(to, view.key_width, view.vectors, row(view.keys, view.key_width));
    }
    if constexpr (!kShared) {
      fetch_rows<Shape::kThreads, kMmaKeys>({value_base + buffer * kMmaKeys * value_row, value_row},
                                            view.value_width, view.vectors,
                                            row(view.values, view.value_width));
    }
    commit_copies();
  };
  fetch_rows<Shape::kThreads, Shape::kHeads>(queries, view.key_width, query_vectors, [&](int h) {
    return h < run.count ? view.q.at(t, run.first + h) : nullptr;
  });
  fetch_block(0);

  constexpr float kLog2e = 1.4426950408889634f;
  const float scale = view.scale * kLog2e;
  float top[2] = {-INFINITY, -INFINITY},
        sum[2] = {0.0f, 0.0f};  // of rows lane / 4 and lane / 4 + 8; log base 2
  float out[kTiles][4] = {};
  const int blocks = (list.count + kMmaKeys - 1) / kMmaKeys;
  for (int block = 0; block < blocks; ++block) {
    wait_for_copies();
    __syncthreads();  // this block's keys are here, and everybody is done with the block before
    if (block + 1 < blocks) fetch_block(block + 1);
    const SwizzledTile keys{key_base + (block & 1) * kMmaKeys * key_row, key_row};
    const SwizzledTile values =
        kShared ? keys : SwizzledTile{value_base + (block & 1) * kMmaKeys * value_row, value_row};

    float scores[Shape::kKeyTiles][4] = {};
    for (int k = 0; k < view.key_width; k += 16) {
      uint32_t a[4];
      load_a(a, queries, row_tile * 16, k, lane);
#pragma unroll
      for (int n = 0; n < Shape::kKeyTiles; n += 2) {
        uint32_t b[4];
        load_b(b, keys, (column_warp * Shape::kKeyTiles + n) * 8, k, lane);
        mma(scores[n], a, b[0], b[1]);
        mma(scores[n + 1], a, b[2], b[3]);
      }
    }
    float block_top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = block * kMmaKeys + (column_warp * Shape::kKeyTiles + n) * 8 + lane % 4 * 2 + i % 2;
        scores[n][i] = key < list.count ? scores[n][i] * scale : -INFINITY;
        block_top[i / 2] = fmaxf(block_top[i / 2], scores[n][i]);
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      block_top[r] = fmaxf(block_top[r], __shfl_xor_sync(~0u, block_top[r], 1));
      block_top[r] = fmaxf(block_top[r], __shfl_xor_sync(~0u, block_top[r], 2));
      if (lane % 4 == 0)
        maxima[(row_tile * 16 + lane / 4 + 8 * r) * kColumnWarps + column_warp] = block_top[r];
    }
    __syncthreads();
    float rescale[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float new_top = top[r];
#pragma unroll
      for (int c = 0; c < kColumnWarps; ++c) {
        new_top = fmaxf(new_top, maxima[(row_tile * 16 + lane / 4 + 8 * r) * kColumnWarps + c]);
      }
      rescale[r] = exp2f(top[r] - new_top);
      top[r] = new_top;
      sum[r] *= rescale[r];
    }
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; ++n) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float low = exp2f(scores[n][2 * r] - top[r]), high = exp2f(scores[n][2 * r + 1] - top[r]);
        sum[r] += low + high;
        const uint32_t to = probabilities.element(row_tile * 16 + lane / 4 + 8 * r,
                                                  (column_warp * Shape::kKeyTiles + n) * 8 + lane % 4 * 2);
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(pack_bf16(low, high)) : "memory");
      }
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[n][i] *= rescale[i / 2];
    }
#pragma unroll
    for (int k = 0; k < kMmaKeys; k += 16) {
      uint32_t a[4];
      load_a(a, probabilities, row_tile * 16, k, lane);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        const int column = (column_warp * kTiles + n) * 8;
        if (column >= view.value_width) continue;
        uint32_t b[4];
        load_b_transposed(b, values, column, k, lane);
        mma(out[n], a, b[0], b[1]);
        mma(out[n + 1], a, b[2], b[3]);
      }
    }
  }
  wait_for_copies();  // of a query without keys
  // The sum of a row: its lanes, then the column warps in order.
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] += __shfl_xor_sync(~0u, sum[r], 1);
    sum[r] += __shfl_xor_sync(~0u, sum[r], 2);
    if (lane % 4 == 0) maxima[(row_tile * 16 + lane / 4 + 8 * r) * kColumnWarps + column_warp] = sum[r];
  }
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = row_tile * 16 + lane / 4 + 8 * r;
    if (row >= run.count) continue;
    float total = 0.0f;
#pragma unroll
    for (int c = 0; c < kColumnWarps; ++c) total += maxima[row * kColumnWarps + c];
    const float factor = list.count == 0 ? 0.0f : 1.0f / total;
    bf16* const to = view.o.at(t, run.first + row);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int column = (column_warp * kTiles + n) * 8 + lane % 4 * 2;
      if (column < view.value_width) store(to + column, out[n][2 * r] * factor);
      if (column + 1 < view.value_width) store(to + column + 1, out[n][2 * r + 1] * factor);
    }
    if (column_warp == 0 && lane % 4 == 0 && view.lse.data != nullptr) {
      constexpr float kLn2 = 0.6931471805599453f;
      view.lse[t][run.first + row] = list.count == 0 ? -INFINITY : (top[r] + log2f(total)) * kLn2;
    }
  }
}

}  // namespace slipstream::kernels
