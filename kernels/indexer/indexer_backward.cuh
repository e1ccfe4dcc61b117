// IndexerScoresBackward in two passes over rounds of queries: a query's slopes d score / d product, dq and
// dweights; then every tile of key rows adds the shares of the round's queries, ascending. The sums of dkeys
// wait in fp32, so where rounds end changes nothing.
#pragma once

#include "kernels/indexer/indexer_scores.cuh"

namespace slipstream::kernels {

constexpr int kGradThreads = 256, kGradWarps = kGradThreads / kWarp;
constexpr int kGradHeadsMax = 64, kGradWidthMax = 256;  // of the backward

template <class X, class K>
struct IndexerGradView {
  IndexerView<X, K> forward;
  Rows<int32_t> rows;
  int asked;  // rows a query
  Rows<float> dscores;
  Heads<X> dq;
  Rows<float> dweights;
  int first, last;  // queries of the round
  float* slopes;    // [last - first, heads, asked]
  float* key_sums;  // [K, width]

  __device__ float* slopes_at(int t, int head) const {
    return slopes + (static_cast<int64_t>(t - first) * forward.heads + head) * asked;
  }
};

inline int grad_queries_shared_bytes(int64_t heads, int64_t width) {
  return static_cast<int>(4 * (heads * (width + 1) + kWarp * plain_pitch(static_cast<int>(width))));
}

// A block a query. Warp w has heads w, w + 8, ...; a lane scores a row, then owns channels lane, lane + 32,
// ... of dq.
template <class X, class K>
__global__ void __launch_bounds__(kGradThreads) indexer_backward_queries(const IndexerGradView<X, K> view) {
  constexpr int kHeads = kGradHeadsMax / kGradWarps, kColumns = kGradWidthMax / kWarp;
  extern __shared__ float shared[];
  const IndexerView<X, K>& forward = view.forward;
  const int heads = forward.heads, width = forward.width, pitch = plain_pitch(width);
  float* const q = shared;
  float* const weights = q + heads * width;
  float* const keys = weights + heads;
  const int t = view.first + static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const int b = sequence_of(forward.batch.row_begin, forward.batch.count, t);
  load_query(forward, t, q, weights, thread, kGradThreads);
  float dq[kHeads][kColumns] = {}, dweights[kHeads] = {};
  for (int base = 0; base < view.asked; base += kWarp) {
    __syncthreads();
    for (int i = warp; i < kWarp; i += kGradWarps) {
      const int row = base + i < view.asked ? view.rows[t][base + i] : -1;
      load_key(forward, row < 0 ? nullptr : forward.keys.row(b, row), keys + i * pitch, lane, kWarp);
    }
    __syncthreads();
    const bool present = base + lane < view.asked && view.rows[t][base + lane] >= 0;
    const float dscore = present ? view.dscores[t][base + lane] : 0.0f;
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      const int head = warp + h * kGradWarps;
      if (head >= heads) continue;
      float product = 0.0f;
      for (int i = 0; i < width; ++i) product = fmaf(q[head * width + i], keys[lane * pitch + i], product);
      product *= forward.key_scale;
      const bool on = present && product > 0.0f;
      const float slope = on ? dscore * weights[head] * forward.key_scale : 0.0f;
      if (on) dweights[h] = fmaf(dscore, product, dweights[h]);
      if (base + lane < view.asked) view.slopes_at(t, head)[base + lane] = slope;
      for (int i = 0; i < kWarp; ++i) {
        const float factor = __shfl_sync(~0u, slope, i);
        if (factor == 0.0f) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = c * kWarp + lane;
          if (column < width) dq[h][c] = fmaf(factor, keys[i * pitch + column], dq[h][c]);
        }
      }
    }
  }
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
    const int head = warp + h * kGradWarps;
    if (head >= heads) continue;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (c * kWarp + lane < width) store(view.dq.at(t, head) + c * kWarp + lane, dq[h][c]);
    }
    const float total = warp_sum(dweights[h]);
    if (lane == 0) view.dweights[t][head] = total;
  }
}

constexpr int kGradTileKeys = 64, kGradTileColumns = 64;

struct IndexerGradShared {
  float sums[kGradTileKeys][kGradTileColumns];
  float q[kGradHeadsMax][kGradTileColumns];
  int entry[kGradThreads], key[kGradThreads];  // of the next rows asked for, those in the tile, ascending
  int warps[kGradWarps];
};

// Block (x, y): tile x of the key rows, columns [64 y, 64 y + 64). The four quarters of the block have every
// fourth key.
template <class X, class K>
__global__ void __launch_bounds__(kGradThreads) indexer_backward_keys(const IndexerGradView<X, K> view) {
  extern __shared__ __align__(16) unsigned char bytes[];
  IndexerGradShared& s = *reinterpret_cast<IndexerGradShared*>(bytes);
  const IndexerView<X, K>& forward = view.forward;
  const DeviceSequences& batch = forward.batch;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / kWarp, lane = thread % kWarp;
  const Piece piece = find_piece(batch, kGradTileKeys * forward.pool, static_cast<int>(blockIdx.x));
  if (piece.sequence < 0) return;
  int key_base = 0;  // key rows of the sequences before
  for (int b = lane; b < piece.sequence; b += kWarp)
    key_base += (batch.row_begin[b + 1] - batch.row_begin[b]) / forward.pool;
  key_base = static_cast<int>(__reduce_add_sync(~0u, static_cast<unsigned>(key_base)));
  const int begin = batch.row_begin[piece.sequence], end = batch.row_begin[piece.sequence + 1];
  const int first = piece.first / forward.pool,
            keys = min(kGradTileKeys, (end - begin) / forward.pool - first);
  const int first_column = static_cast<int>(blockIdx.y) * kGradTileColumns;
  const int column = thread % kGradTileColumns, quarter = thread / kGradTileColumns;
  constexpr int kQuarters = kGradThreads / kGradTileColumns;
  const bool inside = first_column + column < forward.width;
  const auto sum_at = [&](int key) {
    return view.key_sums + static_cast<int64_t>(key_base + first + key) * forward.width + first_column +
           column;
  };
  for (int key = quarter; key < keys; key += kQuarters) s.sums[key][column] = inside ? *sum_at(key) : 0.0f;
  for (int t = max(view.first, begin); t < min(view.last, end); ++t) {
    bool fetched = false;
    for (int base = 0; base < view.asked; base += kGradThreads) {
      const int i = base + thread;
      const int key = i < view.asked ? view.rows[t][i] - first : -1;
      const bool mine = key >= 0 && key < keys;
      const unsigned lanes = __ballot_sync(~0u, mine);
      if (lane == 0) s.warps[warp] = __popc(lanes);
      __syncthreads();
      int at = __popc(lanes & ((1u << lane) - 1)), count = 0;
      for (int w = 0; w < kGradWarps; ++w) {
        if (w < warp) at += s.warps[w];
        count += s.warps[w];
      }
      if (mine) {
        s.entry[at] = i;
        s.key[at] = key;
      }
      if (count > 0 && !fetched) {
        fetched = true;
        for (int j = thread; j < forward.heads * kGradTileColumns; j += kGradThreads) {
          const int c = first_column + j % kGradTileColumns;
          s.q[j / kGradTileColumns][j % kGradTileColumns] =
              c < forward.width ? load(forward.q.at(t, j / kGradTileColumns) + c) : 0.0f;
        }
      }
      __syncthreads();
      for (int e = 0; e < count; ++e) {
        if (s.key[e] % kQuarters != quarter) continue;
        float sum = 0.0f;
        for (int h = 0; h < forward.heads; ++h)
          sum = fmaf(view.slopes_at(t, h)[s.entry[e]], s.q[h][column], sum);
        s.sums[s.key[e]][column] += sum;
      }
      __syncthreads();
    }
  }
  for (int key = quarter; key < keys; key += kQuarters) {
    if (inside) *sum_at(key) = s.sums[key][column];
  }
}

template <class X>
__global__ void round_key_sums(const float* sums, Rows<X> to, int width) {
  const int64_t row = blockIdx.x;
  for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
    store(to[row] + i, sums[row * width + i]);
  }
}

}  // namespace slipstream::kernels
