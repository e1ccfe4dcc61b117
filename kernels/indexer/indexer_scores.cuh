// I(t, s) on the device, in two forms chosen by dtypes, heads and widths alone; IndexerSelect and
// IndexerScores share them, so what is ranked is what is reported. Here the plain one, the chains of fmaf of
// the definition, whose bits are those of the CPU; tensor cores in indexer_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>

#include "kernels/indexer/indexer.h"
#include "kernels/indexer/indexer_round.cuh"

namespace slipstream::kernels {

template <class X, class K>
struct IndexerView {
  Heads<X> q;
  Rows<float> weights;
  DevicePages<K> keys;
  DeviceSequences batch;
  int heads, width, pool;
  float key_scale;

  // Key rows that a query at this position may choose from.
  __device__ int candidates(int position) const { return (position + 1) / pool; }
};

template <class X, class K, class Args>
IndexerView<X, K> view_of(const Args& args) {
  return {heads_of<X>(args.q),
          rows_of<float>(args.weights),
          on_device<K>(args.keys),
          on_device(args.sequences),
          static_cast<int>(args.q.size(1)),
          static_cast<int>(args.q.size(2)),
          static_cast<int>(args.pool),
          args.key_scale};
}

// A NaN stays one.
__device__ inline float relu(float x) { return x < 0.0f ? 0.0f : x; }

// --- plain: a thread a key ---

constexpr int kPlainKeys = 64, kPlainQueries = 4, kPlainThreads = kPlainKeys * kPlainQueries;

__host__ __device__ constexpr int plain_pitch(int width) { return width | 1; }
inline int plain_shared_bytes(int64_t heads, int64_t width) {
  return static_cast<int>(
      4 * (kPlainKeys * plain_pitch(static_cast<int>(width)) + kPlainQueries * heads * (width + 1)));
}

// Shared memory of a block: keys [kPlainKeys, pitch], queries [kPlainQueries, heads, width], weights
// [kPlainQueries, heads].
struct PlainShared {
  float *keys, *queries, *weights;
  template <class View>
  __device__ PlainShared(float* shared, const View& view)
      : keys(shared),
        queries(keys + kPlainKeys * plain_pitch(view.width)),
        weights(queries + kPlainQueries * view.heads * view.width) {}
};

template <class View>
__device__ void load_query(const View& view, int t, float* q, float* weights, int thread, int threads) {
  for (int i = thread; i < view.heads * view.width; i += threads) {
    q[i] = load(view.q.at(t, i / view.width) + i % view.width);
  }
  for (int h = thread; h < view.heads; h += threads) weights[h] = view.weights[t][h];
}

template <class View, class K>
__device__ void load_key(const View& view, const K* from, float* to, int thread, int threads) {
  for (int i = thread; i < view.width; i += threads) to[i] = from == nullptr ? 0.0f : load(from + i);
}

// Four heads side by side; each is a chain over ascending channels.
template <class View>
__device__ float plain_score(const View& view, const float* q, const float* weights, const float* key) {
  float sum = 0.0f;
  for (int h = 0; h < view.heads; h += 4) {
    const int last = view.heads - 1 - h;
    const float* const rows[4] = {q + h * view.width, q + (h + min(1, last)) * view.width,
                                  q + (h + min(2, last)) * view.width, q + (h + min(3, last)) * view.width};
    float product[4] = {};
    for (int i = 0; i < view.width; ++i) {
      const float k = key[i];
#pragma unroll
      for (int j = 0; j < 4; ++j) product[j] = fmaf(rows[j][i], k, product[j]);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j <= last) sum = fmaf(weights[h + j], relu(product[j] * view.key_scale), sum);
    }
  }
  return sum;
}

// Ranks of a round: a block a piece and 64 keys.
template <class X, class K>
__global__ void __launch_bounds__(kPlainThreads)
    select_scores_plain(const IndexerView<X, K> view, const SelectRound round) {
  extern __shared__ float shared[];
  const PlainShared s(shared, view);
  const int place = static_cast<int>(blockIdx.y), first = static_cast<int>(blockIdx.x) * kPlainKeys;
  if (first / kPageRows >= round.page_begin[place + 1] - round.page_begin[place]) return;
  const QueryPiece piece = round.pieces[place];
  const int most = view.candidates(piece.position + piece.count - 1);
  const int thread = static_cast<int>(threadIdx.x);
  for (int i = thread / kWarp; i < kPlainKeys; i += kPlainThreads / kWarp) {
    load_key(view, first + i < most ? view.keys.row(piece.sequence, first + i) : nullptr,
             s.keys + i * plain_pitch(view.width), thread % kWarp, kWarp);
  }
  const int key = thread % kPlainKeys, slot = thread / kPlainKeys;
  float* const q = s.queries + slot * view.heads * view.width;
  float* const weights = s.weights + slot * view.heads;
  for (int i = slot; i < (piece.count + kPlainQueries - 1) / kPlainQueries * kPlainQueries;
       i += kPlainQueries) {
    __syncthreads();
    if (i < piece.count) load_query(view, piece.first + i, q, weights, key, kPlainKeys);
    __syncthreads();
    if (i >= piece.count || first + key >= view.candidates(piece.position + i)) continue;
    round.row(place, i)[first + key] =
        rank_of(plain_score(view, q, weights, s.keys + key * plain_pitch(view.width)));
  }
}

// Scores of given rows.
template <class X, class K>
__global__ void __launch_bounds__(kPlainThreads)
    given_scores_plain(const IndexerView<X, K> view, Rows<int32_t> rows, int asked, Rows<float> scores) {
  extern __shared__ float shared[];
  const PlainShared s(shared, view);
  const int t = static_cast<int>(blockIdx.x), first = static_cast<int>(blockIdx.y) * kPlainKeys;
  const int b = sequence_of(view.batch.row_begin, view.batch.count, t);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = static_cast<int>(threadIdx.x) % kWarp;
  load_query(view, t, s.queries, s.weights, static_cast<int>(threadIdx.x), kPlainThreads);
  for (int i = warp; i < kPlainKeys; i += kPlainThreads / kWarp) {
    const int row = first + i < asked ? rows[t][first + i] : -1;
    load_key(view, row < 0 ? nullptr : view.keys.row(b, row), s.keys + i * plain_pitch(view.width), lane,
             kWarp);
  }
  __syncthreads();
  const int i = static_cast<int>(threadIdx.x);
  if (i >= kPlainKeys || first + i >= asked) return;
  const float score = plain_score(view, s.queries, s.weights, s.keys + i * plain_pitch(view.width));
  scores[t][first + i] = rows[t][first + i] < 0 ? 0.0f : score;
}

}  // namespace slipstream::kernels
