// The gradients of attention in two passes over rounds of queries. First a query's probabilities p, their
// gradients
//   ds = p (dO · v - dO · o) scale
// and dq; then every tile of keys adds the shares of the round's queries to its rows, in ascending order of
// queries. No two blocks add to one element, and where rounds end changes nothing: the sums wait in fp32.
#pragma once

#include <cuda_runtime.h>

#include "kernels/sparse_mla/attention_device.cuh"

namespace slipstream::kernels {

template <class X, class K>
struct GradientView {
  AttentionView<X, K> forward;
  Heads<X> d_o, dq;
  int first, last;  // queries of the round
  // [last - first, heads, entries]: entry i belongs to the i-th key of the query's list.
  float *p, *ds;
  int64_t entries;
  float *key_sums, *value_sums;  // [T, kv_heads, width]; no value_sums when values are shared

  __device__ int64_t entry(int t, int head) const {
    return (static_cast<int64_t>(t - first) * forward.heads + head) * entries;
  }
};

template <class X, class K, int kColumns>
__global__ void __launch_bounds__(kFmaThreads) attend_backward_queries(const GradientView<X, K> view) {
  extern __shared__ float shared[];
  const AttentionView<X, K>& forward = view.forward;
  const int key_pitch = fma_pitch(forward.key_width), value_pitch = fma_pitch(forward.value_width);
  float* const queries = shared;
  float* const slopes = queries + kFmaHeads * key_pitch;  // dO
  float* const keys = slopes + kFmaHeads * value_pitch;
  float* const values = forward.shared ? keys : keys + kFmaKeys * key_pitch;
  const int values_pitch = forward.shared ? key_pitch : value_pitch;
  const int t = view.first + static_cast<int>(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  const HeadRun run = head_run(forward, static_cast<int>(blockIdx.y), kFmaHeads);
  const KeyList list = keys_of(forward, t);

  load_rows<X>(queries, kFmaHeads, forward.key_width,
               [&](int h) { return h < run.count ? forward.q.at(t, run.first + h) : nullptr; });
  load_rows<X>(slopes, kFmaHeads, forward.value_width,
               [&](int h) { return h < run.count ? view.d_o.at(t, run.first + h) : nullptr; });
  __syncthreads();
  float mean[2] = {}, lse[2] = {}, out[2][kColumns] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int head = 2 * warp + h;
    if (head >= run.count) continue;
    const X* const o = forward.o.at(t, run.first + head);
    for (int c = lane; c < forward.value_width; c += kWarp) {
      mean[h] = fmaf(slopes[head * value_pitch + c], load(o + c), mean[h]);
    }
    mean[h] = warp_sum(mean[h]);
    lse[h] = forward.lse[t][run.first + head];
  }
  for (int begin = 0; begin < list.count; begin += kFmaKeys) {
    const int count = min(kFmaKeys, list.count - begin);
    __syncthreads();
    const auto row = [&](const DevicePages<K>& store, int width) {
      return [&, width](int i) {
        return i < count ? store.row(list.sequence, list.position(begin + i)) + run.kv_head * width : nullptr;
      };
    };
    load_rows<K>(keys, kFmaKeys, forward.key_width, row(forward.keys, forward.key_width));
    if (!forward.shared)
      load_rows<K>(values, kFmaKeys, forward.value_width, row(forward.values, forward.value_width));
    __syncthreads();
    const int first = 2 * warp, second = first + 1;
    const float2 products = two_products(queries + first * key_pitch, queries + second * key_pitch,
                                         keys + lane * key_pitch, key_pitch);
    // The padding of dO's rows is zero, so it may meet the values' other columns.
    const float2 dp = two_products(slopes + first * value_pitch, slopes + second * value_pitch,
                                   values + lane * values_pitch, (forward.value_width + 3) / 4 * 4);
    float ds[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float score = (h == 0 ? products.x : products.y) * forward.scale;
      const float p = lane < count ? expf(score - lse[h]) : 0.0f;
      ds[h] = lane < count ? p * ((h == 0 ? dp.x : dp.y) - mean[h]) * forward.scale : 0.0f;
      if (lane < count && first + h < run.count) {
        const int64_t at = view.entry(t, run.first + first + h) + begin + lane;
        view.p[at] = p;
        view.ds[at] = ds[h];
      }
    }
    for (int i = 0; i < count; ++i) {
      const float ds0 = __shfl_sync(~0u, ds[0], i), ds1 = __shfl_sync(~0u, ds[1], i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        if (c * kWarp + lane >= forward.key_width) continue;
        const float key = keys[i * key_pitch + c * kWarp + lane];
        out[0][c] = fmaf(ds0, key, out[0][c]);
        out[1][c] = fmaf(ds1, key, out[1][c]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (2 * warp + h >= run.count) continue;
    X* const to = view.dq.at(t, run.first + 2 * warp + h);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c * kWarp + lane < forward.key_width) store(to + c * kWarp + lane, out[h][c]);
    }
  }
}

constexpr int kGradKeys = 64;     // of a tile
constexpr int kGradColumns = 64;  // of a block
constexpr int kGradHeads = 32;    // in shared memory at a time
constexpr int kGradThreads = 256;

struct GradShared {
  float q[kGradHeads][kGradColumns], d_o[kGradHeads][kGradColumns];
  float ds[kGradHeads][kGradKeys], p[kGradHeads][kGradKeys];
  float sums[kGradKeys][kGradColumns];
  int begin[kGradThreads], end[kGradThreads];  // of the tile in the lists of the next queries
  int key[kGradKeys];
};

// The first entry of a query's list whose position is not below `position`.
__device__ inline int first_entry(const KeyList& list, int position) {
  if (list.selection == nullptr) return min(position, list.count);
  int low = 0, high = list.count;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (list.selection[middle] < position) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Block (x, y): tile x of the keys; y: a key head and 64 columns of the keys or, after those, of separate
// values.
template <class X, class K>
__global__ void __launch_bounds__(kGradThreads) attend_backward_keys(const GradientView<X, K> view) {
  extern __shared__ __align__(16) unsigned char bytes[];
  GradShared& s = *reinterpret_cast<GradShared*>(bytes);
  const AttentionView<X, K>& forward = view.forward;
  const int thread = static_cast<int>(threadIdx.x);
  const Piece piece = find_piece(forward.batch, kGradKeys, static_cast<int>(blockIdx.x));
  if (piece.sequence < 0) return;
  const int begin = forward.batch.row_begin[piece.sequence],
            end = forward.batch.row_begin[piece.sequence + 1];
  const int key_slices = (forward.key_width + kGradColumns - 1) / kGradColumns;
  const int value_slices = forward.shared ? 0 : (forward.value_width + kGradColumns - 1) / kGradColumns;
  const int slice = static_cast<int>(blockIdx.y) % (key_slices + value_slices);
  const int kv_head = static_cast<int>(blockIdx.y) / (key_slices + value_slices);
  const bool of_keys = slice < key_slices, of_values = forward.shared || !of_keys;
  const int first_column = (of_keys ? slice : slice - key_slices) * kGradColumns;
  const int width = of_keys ? forward.key_width : forward.value_width;
  float* const sums = of_keys ? view.key_sums : view.value_sums;
  const int column = thread % kGradColumns, quarter = thread / kGradColumns;
  const auto sum_at = [&](int key) {
    return sums + (static_cast<int64_t>(begin + piece.first + key) * forward.kv_heads + kv_head) * width +
           first_column;
  };
  const int keys = min(kGradKeys, end - begin - piece.first);
  for (int key = quarter; key < keys; key += kGradThreads / kGradColumns) {
    if (first_column + column < width) s.sums[key][column] = sum_at(key)[column];
  }
  const int first_query = max(view.first, begin + piece.first), last_query = min(view.last, end);
  const int group = forward.group();
  for (int base = first_query; base < last_query; base += kGradThreads) {
    __syncthreads();
    if (base + thread < last_query) {
      const int t = base + thread;
      const KeyList list{piece.sequence, forward.indices == nullptr ? t - begin + 1 : forward.counts[t],
                         forward.indices == nullptr ? nullptr : forward.indices + t * forward.indices_stride};
      s.begin[thread] = first_entry(list, piece.first);
      s.end[thread] = first_entry(list, piece.first + kGradKeys);
    }
    for (int i = 0; i < min(kGradThreads, last_query - base); ++i) {
      if (i == 0) __syncthreads();
      const int t = base + i, first_entry_of_tile = s.begin[i], entries = s.end[i] - first_entry_of_tile;
      if (entries == 0) continue;
      for (int h0 = 0; h0 < group; h0 += kGradHeads) {
        const int heads = min(kGradHeads, group - h0), head = kv_head * group + h0;
        __syncthreads();
        if (h0 == 0 && thread < entries) {
          const int entry = first_entry_of_tile + thread;
          s.key[thread] =
              (forward.indices == nullptr ? entry : forward.indices[t * forward.indices_stride + entry]) -
              piece.first;
        }
        for (int j = thread; j < heads * 64; j += kGradThreads) {
          const int h = j / 64, c = j % 64;
          if (of_keys) {
            s.q[h][c] = first_column + c < forward.key_width
                            ? load(forward.q.at(t, head + h) + first_column + c)
                            : 0.0f;
            s.ds[h][c] = c < entries ? view.ds[view.entry(t, head + h) + first_entry_of_tile + c] : 0.0f;
          }
          if (of_values) {
            s.d_o[h][c] = first_column + c < forward.value_width
                              ? load(view.d_o.at(t, head + h) + first_column + c)
                              : 0.0f;
            s.p[h][c] = c < entries ? view.p[view.entry(t, head + h) + first_entry_of_tile + c] : 0.0f;
          }
        }
        __syncthreads();
        for (int e = quarter * 4; e < entries; e += kGradThreads / kGradColumns * 4) {
          float sum[4] = {};
          const auto add = [&](const float(&left)[kGradHeads][kGradKeys],
                               const float(&right)[kGradHeads][kGradColumns]) {
            for (int h = 0; h < heads; ++h) {
              const float4 factor = *reinterpret_cast<const float4*>(&left[h][e]);
              const float value = right[h][column];
              sum[0] = fmaf(factor.x, value, sum[0]);
              sum[1] = fmaf(factor.y, value, sum[1]);
              sum[2] = fmaf(factor.z, value, sum[2]);
              sum[3] = fmaf(factor.w, value, sum[3]);
            }
          };
          if (of_keys) add(s.ds, s.q);
          if (of_values) add(s.p, s.d_o);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (e + j < entries) s.sums[s.key[e + j]][column] += sum[j];
          }
        }
      }
    }
  }
  __syncthreads();
  for (int key = quarter; key < keys; key += kGradThreads / kGradColumns) {
    if (first_column + column < width) sum_at(key)[column] = s.sums[key][column];
  }
}

// sums [T, heads, width] -> the gradient in the activations' dtype.
template <class X>
__global__ void round_sums(const float* sums, Heads<X> to, int heads, int width) {
  const int64_t t = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < heads * width; i += static_cast<int>(blockDim.x)) {
    store(to.at(t, i / width) + i % width, sums[t * heads * width + i]);
  }
}

}  // namespace slipstream::kernels
