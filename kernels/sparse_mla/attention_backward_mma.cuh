// The two passes of attention_backward.cuh on tensor cores, for bf16 activations and stores: p and ds are
// kept in bf16.
#pragma once

#include "kernels/sparse_mla/attention_backward.cuh"
#include "kernels/sparse_mla/attention_forward.cuh"

namespace slipstream::kernels {

// Warp (r, c): scores of key range c for head rows [16 r, 16 r + 16), then kTiles x 8 columns of dq for them.
template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
struct MmaGradQueries {
  static constexpr int kThreads = kRowTiles * kColumnWarps * kWarp;
  static constexpr int kHeads = kRowTiles * 16;
  static constexpr int kKeyTiles = kMmaKeys / 8 / kColumnWarps;
  static constexpr int kKeyWidthMax = kColumnWarps * kTiles * 8;

  static constexpr int shared_bytes(int key_width, int value_width) {
    const int key_row = mma_row_bytes(key_width), value_row = mma_row_bytes(value_width);
    return (kHeads + kMmaKeys) * key_row + (kHeads + (kShared ? 0 : kMmaKeys)) * value_row +
           kHeads * kMmaKeys * 2 + kHeads * 8;
  }
};

template <int kRowTiles, int kColumnWarps, int kTiles, bool kShared>
__global__ void __launch_bounds__(kRowTiles* kColumnWarps* kWarp)
    attend_backward_queries_mma(const GradientView<bf16, bf16> view, bf16* kept_p, bf16* kept_ds,
                                bool query_vectors) {
  using Shape = MmaGradQueries<kRowTiles, kColumnWarps, kTiles, kShared>;
  extern __shared__ __align__(128) unsigned char tiles[];
  const AttentionView<bf16, bf16>& forward = view.forward;
  const uint32_t key_row = static_cast<uint32_t>(mma_row_bytes(forward.key_width));
  const uint32_t value_row = static_cast<uint32_t>(mma_row_bytes(forward.value_width));
  const SwizzledTile queries{shared_address(tiles), key_row};
  const SwizzledTile slopes{queries.base + Shape::kHeads * key_row, value_row};  // dO
  const SwizzledTile keys{slopes.base + Shape::kHeads * value_row, key_row};
  const SwizzledTile values = kShared ? keys : SwizzledTile{keys.base + kMmaKeys * key_row, value_row};
  const SwizzledTile ds_tile{keys.base + kMmaKeys * (key_row + (kShared ? 0 : value_row)), kMmaKeys * 2};
  float* const means =
      reinterpret_cast<float*>(tiles + (ds_tile.base - queries.base) + Shape::kHeads * kMmaKeys * 2);
  float* const lses = means + Shape::kHeads;

  const int t = view.first + static_cast<int>(blockIdx.x);
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const int row_tile = warp / kColumnWarps, column_warp = warp % kColumnWarps;
  const HeadRun run = head_run(forward, static_cast<int>(blockIdx.y), Shape::kHeads);
  const KeyList list = keys_of(forward, t);

  fetch_rows<Shape::kThreads, Shape::kHeads>(queries, forward.key_width, query_vectors, [&](int h) {
    return h < run.count ? forward.q.at(t, run.first + h) : nullptr;
  });
  fetch_rows<Shape::kThreads, Shape::kHeads>(slopes, forward.value_width, query_vectors, [&](int h) {
    return h < run.count ? view.d_o.at(t, run.first + h) : nullptr;
  });
  commit_copies();
  constexpr float kLog2e = 1.4426950408889634f;
  for (int h = warp; h < Shape::kHeads; h += Shape::kThreads / kWarp) {
    float mean = 0.0f;
    if (h < run.count) {
      const bf16* const o = forward.o.at(t, run.first + h);
      const bf16* const d_o = view.d_o.at(t, run.first + h);
      for (int c = lane; c < forward.value_width; c += kWarp) mean = fmaf(load(d_o + c), load(o + c), mean);
    }
    mean = warp_sum(mean);
    if (lane == 0) {
      means[h] = mean;
      lses[h] = h < run.count ? forward.lse[t][run.first + h] * kLog2e : 0.0f;
    }
  }

  const float scale = forward.scale * kLog2e;
  float out[kTiles][4] = {};
  for (int begin = 0; begin < list.count; begin += kMmaKeys) {
    __syncthreads();  // everybody is done with the block before
    const auto row = [&](const DevicePages<bf16>& store, int width) {
      return [&, width](int i) {
        return begin + i < list.count
                   ? store.row(list.sequence, list.position(begin + i)) + run.kv_head * width
                   : nullptr;
      };
    };
    fetch_rows<Shape::kThreads, kMmaKeys>(keys, forward.key_width, forward.vectors,
                                          row(forward.keys, forward.key_width));
    if (!kShared) {
      fetch_rows<Shape::kThreads, kMmaKeys>(values, forward.value_width, forward.vectors,
                                            row(forward.values, forward.value_width));
    }
    commit_copies();
    wait_for_copies();
    __syncthreads();
    float scores[Shape::kKeyTiles][4] = {}, dp[Shape::kKeyTiles][4] = {};
    const auto multiply = [&](const SwizzledTile& left, const SwizzledTile& right, int width,
                              float(&c)[Shape::kKeyTiles][4]) {
      for (int k = 0; k < width; k += 16) {
        uint32_t a[4];
        load_a(a, left, row_tile * 16, k, lane);
#pragma unroll
        for (int n = 0; n < Shape::kKeyTiles; n += 2) {
          uint32_t b[4];
          load_b(b, right, (column_warp * Shape::kKeyTiles + n) * 8, k, lane);
          mma(c[n], a, b[0], b[1]);
          mma(c[n + 1], a, b[2], b[3]);
        }
      }
    };
    multiply(queries, keys, forward.key_width, scores);
    // Columns of dO beyond the values' width are zero, so they may meet the keys' other columns.
    multiply(slopes, values, forward.value_width, dp);
#pragma unroll
    for (int n = 0; n < Shape::kKeyTiles; ++n) {
      const int key = (column_warp * Shape::kKeyTiles + n) * 8 + lane % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int head = row_tile * 16 + lane / 4 + 8 * r;
        float p[2], ds[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const bool present = begin + key + i < list.count && head < run.count;
          p[i] = present ? exp2f(scores[n][2 * r + i] * scale - lses[head]) : 0.0f;
          ds[i] = present ? p[i] * (dp[n][2 * r + i] - means[head]) * forward.scale : 0.0f;
          if (present) {
            const int64_t at = view.entry(t, run.first + head) + begin + key + i;
            store(kept_p + at, p[i]);
            store(kept_ds + at, ds[i]);
          }
        }
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(ds_tile.element(head, key)), "r"(pack_bf16(ds[0], ds[1]))
                     : "memory");
      }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMmaKeys; k += 16) {
      uint32_t a[4];
      load_a(a, ds_tile, row_tile * 16, k, lane);
#pragma unroll
      for (int n = 0; n < kTiles; n += 2) {
        const int column = (column_warp * kTiles + n) * 8;
        if (column >= forward.key_width) continue;
        uint32_t b[4];
        load_b_transposed(b, keys, column, k, lane);
        mma(out[n], a, b[0], b[1]);
        mma(out[n + 1], a, b[2], b[3]);
      }
    }
  }
  wait_for_copies();  // of a query without keys
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int head = row_tile * 16 + lane / 4 + 8 * r;
    if (head >= run.count) continue;
    bf16* const to = view.dq.at(t, run.first + head);
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const int column = (column_warp * kTiles + n) * 8 + lane % 4 * 2;
      if (column < forward.key_width) store(to + column, out[n][2 * r]);
      if (column + 1 < forward.key_width) store(to + column + 1, out[n][2 * r + 1]);
    }
  }
}

// --- the keys' pass: dK[entry] += sum over heads of ds[head, entry] q[head], scattered to the entries' keys
// ---

constexpr int kMmaGradHeads = 64;  // of a key head, at most

struct MmaGradShared {
  unsigned char q[2][kMmaGradHeads * 128], d_o[2][kMmaGradHeads * 128];  // 64 columns
  unsigned char ds[kMmaGradHeads * 128], p[kMmaGradHeads * 128];         // 64 entries
  float sums[kGradKeys][kGradColumns + 8];  // the pitch spreads a fragment's rows over banks
  int begin[kGradThreads], end[kGradThreads];
  int key[kGradKeys];
};

// Blocks as those of attend_backward_keys; its eight warps have 8 of the 64 columns each.
static __global__ void __launch_bounds__(kGradThreads)
    attend_backward_keys_mma(const GradientView<bf16, bf16> view, const bf16* kept_p, const bf16* kept_ds,
                             bool query_vectors) {
  extern __shared__ __align__(128) unsigned char tiles[];
  MmaGradShared& s = *reinterpret_cast<MmaGradShared*>(tiles);
  const AttentionView<bf16, bf16>& forward = view.forward;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const Piece piece = find_piece(forward.batch, kGradKeys, static_cast<int>(blockIdx.x));
  if (piece.sequence < 0) return;
  const int begin = forward.batch.row_begin[piece.sequence],
            end = forward.batch.row_begin[piece.sequence + 1];
  const int key_slices = (forward.key_width + kGradColumns - 1) / kGradColumns;
  const int value_slices = forward.shared ? 0 : (forward.value_width + kGradColumns - 1) / kGradColumns;
  const int slice = static_cast<int>(blockIdx.y) % (key_slices + value_slices);
  const int kv_head = static_cast<int>(blockIdx.y) / (key_slices + value_slices);
  const bool of_keys = slice < key_slices;
  const int first_column = (of_keys ? slice : slice - key_slices) * kGradColumns;
  const bool of_values = (forward.shared || !of_keys) && first_column < forward.value_width;
  const int width = of_keys ? forward.key_width : forward.value_width;
  float* const sums = of_keys ? view.key_sums : view.value_sums;
  const int group = forward.group(), head = kv_head * group;
  const int keys = min(kGradKeys, end - begin - piece.first);
  const auto sum_at = [&](int key) {
    return sums + (static_cast<int64_t>(begin + piece.first + key) * forward.kv_heads + kv_head) * width +
           first_column;
  };
  for (int i = thread; i < keys * kGradColumns; i += kGradThreads) {
    const int key = i / kGradColumns, c = i % kGradColumns;
    s.sums[key][c] = first_column + c < width ? sum_at(key)[c] : 0.0f;
  }
  // Queries of the round that see the tile, in ascending order.
  const int first_query = max(view.first, begin + piece.first), last_query = min(view.last, end);
  const auto fetch_query = [&](int t, int buffer) {
    const auto fetch = [&](unsigned char* to, const Heads<bf16>& from, int all) {
      fetch_rows<kGradThreads, kMmaGradHeads>(
          {shared_address(to), 128}, min(all - first_column, kGradColumns), query_vectors,
          [&](int h) { return h < group ? from.at(t, head + h) + first_column : nullptr; });
    };
    if (of_keys) fetch(s.q[buffer], forward.q, forward.key_width);
    if (of_values) fetch(s.d_o[buffer], view.d_o, forward.value_width);
    commit_copies();
  };
  for (int base = first_query; base < last_query; base += kGradThreads) {
    __syncthreads();
    if (base + thread < last_query) {
      const int t = base + thread;
      const KeyList list{piece.sequence, forward.indices == nullptr ? t - begin + 1 : forward.counts[t],
                         forward.indices == nullptr ? nullptr : forward.indices + t * forward.indices_stride};
      s.begin[thread] = first_entry(list, piece.first);
      s.end[thread] = first_entry(list, piece.first + kGradKeys);
    }
    __syncthreads();
    const int queries = min(kGradThreads, last_query - base);
    const auto next_query = [&](int i) {
      while (i < queries && s.begin[i] == s.end[i]) ++i;
      return i;
    };
    int buffer = 0, i = next_query(0);
    if (i < queries) fetch_query(base + i, buffer);
    while (i < queries) {
      const int t = base + i, first = s.begin[i], entries = s.end[i] - first, row_tiles = (entries + 15) / 16;
      const int next = next_query(i + 1);
      // ds and p of the tile's entries, zeros to whole tiles of 16 entries and all 64 heads. Everybody was
      // done with the query before when the last barrier fell.
      for (int j = thread; j < kMmaGradHeads * row_tiles * 16; j += kGradThreads) {
        const int h = j / (row_tiles * 16), e = j % (row_tiles * 16);
        const bool present = h < group && e < entries;
        const int64_t at = present ? view.entry(t, head + h) + first + e : 0;
        const SwizzledTile shape{0, 128};
        const uint32_t offset = shape.element(static_cast<uint32_t>(h), static_cast<uint32_t>(e));
        if (of_keys) *reinterpret_cast<uint16_t*>(s.ds + offset) = present ? kept_ds[at].bits : uint16_t{0};
        if (of_values) *reinterpret_cast<uint16_t*>(s.p + offset) = present ? kept_p[at].bits : uint16_t{0};
      }
      if (thread < entries) {
        s.key[thread] =
            (forward.indices == nullptr ? first + thread
                                        : forward.indices[t * forward.indices_stride + first + thread]) -
            piece.first;
      }
      wait_for_copies();
      __syncthreads();
      if (next < queries) fetch_query(base + next, buffer ^ 1);
      for (int m = 0; m < row_tiles; ++m) {
        float c[4] = {};
        const auto add = [&](unsigned char* left, unsigned char* right) {
          const SwizzledTile a_tile{shared_address(left), 128}, b_tile{shared_address(right), 128};
          for (int k = 0; k < group; k += 16) {
            uint32_t a[4], b[4];
            load_a_transposed(a, a_tile, m * 16, k, lane);
            load_b_transposed(b, b_tile, warp / 2 * 16, k, lane);
            mma(c, a, b[warp % 2 * 2], b[warp % 2 * 2 + 1]);
          }
        };
        if (of_keys) add(s.ds, s.q[buffer]);
        if (of_values) add(s.p, s.d_o[buffer]);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int e = m * 16 + lane / 4 + j / 2 * 8;
          if (e < entries) s.sums[s.key[e]][warp * 8 + lane % 4 * 2 + j % 2] += c[j];
        }
      }
      __syncthreads();
      i = next;
      buffer ^= 1;
    }
  }
  __syncthreads();
  for (int i = thread; i < keys * kGradColumns; i += kGradThreads) {
    const int key = i / kGradColumns, c = i % kGradColumns;
    if (first_column + c < width) sum_at(key)[c] = s.sums[key][c];
  }
}

}  // namespace slipstream::kernels
