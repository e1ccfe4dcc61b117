// I(t, s) on the device, in two forms chosen by dtypes and widths alone; IndexerSelect and IndexerScores
// share them, so what is ranked is what is reported.
//   plain: the chains of fmaf of the definition, so the bits are those of the CPU;
//   tensor cores (bf16 queries and keys): products of whole rows by mma, then in a lane the heads it holds,
//   ascending, and the four lanes of a key together.
#pragma once

#include <cuda_runtime.h>

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/indexer/indexer.h"

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

// --- tensor cores: a warp holds 32 keys in registers ---

constexpr int kMmaWarps = 8, kMmaThreads = kMmaWarps * kWarp, kMmaBlockKeys = kMmaWarps * 32;
constexpr int kMmaHeadsMax = 64;

// kSteps x 16 channels.
template <int kSteps>
struct KeyFragments {
  uint32_t a[2][kSteps][4];

  // row(i): key row i (0..31) of the warp, or null.
  template <class Row>
  __device__ explicit KeyFragments(const Row& row) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      const bf16* const from = row(half * 8 + lane / 4);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const uint32_t* const words = reinterpret_cast<const uint32_t*>(from + step * 16) + lane % 4;
        a[half / 2][step][half % 2] = from == nullptr ? 0u : words[0];
        a[half / 2][step][half % 2 + 2] = from == nullptr ? 0u : words[4];
      }
    }
  }

  // scores[i] of key row 8 i + lane / 4: the same in its four lanes.
  __device__ void score(const SwizzledTile& q, const float* weights, int heads, float key_scale,
                        float (&scores)[4]) const {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
#pragma unroll
    for (float& s : scores) s = 0.0f;
    for (int h = 0; h < heads; h += 16) {
      float c[2][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b[4];
        load_b(b, q, h, step * 16, lane);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          mma(c[m][0], a[m][step], b[0], b[1]);
          mma(c[m][1], a[m][step], b[2], b[3]);
        }
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 w = *reinterpret_cast<const float2*>(weights + h + 8 * n + lane % 4 * 2);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[i] = fmaf(w.x, relu(c[i / 2][n][i % 2 * 2] * key_scale), scores[i]);
          scores[i] = fmaf(w.y, relu(c[i / 2][n][i % 2 * 2 + 1] * key_scale), scores[i]);
        }
      }
    }
#pragma unroll
    for (float& s : scores) {
      s += __shfl_xor_sync(~0u, s, 1);
      s += __shfl_xor_sync(~0u, s, 2);
    }
  }
};

// A query in shared memory, as KeyFragments reads it.
template <int kSteps>
struct QueryTile {
  static constexpr int kRowBytes = kSteps * 32;
  static_assert(kRowBytes % 128 == 0);
  static constexpr int kBytes = kMmaHeadsMax * kRowBytes;

  static __device__ void fetch(const SwizzledTile& to, const IndexerView<bf16, bf16>& view, int t,
                               float* weights) {
    constexpr int kChunks = kRowBytes / 16;
    for (int i = static_cast<int>(threadIdx.x); i < view.heads * kChunks; i += kMmaThreads) {
      copy_async(to.chunk(static_cast<uint32_t>(i / kChunks), static_cast<uint32_t>(i % kChunks)),
                 view.q.at(t, i / kChunks) + i % kChunks * 8);
    }
    for (int h = static_cast<int>(threadIdx.x); h < view.heads; h += kMmaThreads)
      weights[h] = view.weights[t][h];
    commit_copies();
  }
};

// Calls f with 4 or 8, the channels over 16, and returns true where the tensor cores take this shape.
template <class Args, class F>
bool for_mma_steps(const Args& args, F&& f) {
  const int64_t heads = args.q.size(1), width = args.q.size(2);
  const bool bf16s = args.q.dtype() == DType::kBf16 && args.keys.pool.dtype() == DType::kBf16;
  if (!bf16s || heads % 16 != 0 || heads > kMmaHeadsMax || (width != 64 && width != 128)) return false;
  CHECK(aligned_16(args.q) && aligned_16(args.keys.pool));
  if (width == 64) {
    f(std::integral_constant<int, 4>());
  } else {
    f(std::integral_constant<int, 8>());
  }
  return true;
}

// --- scores of given rows ---

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

template <int kSteps>
__global__ void __launch_bounds__(kMmaThreads)
    given_scores_mma(const IndexerView<bf16, bf16> view, Rows<int32_t> rows, int asked, Rows<float> scores) {
  __shared__ __align__(128) unsigned char tile[QueryTile<kSteps>::kBytes];
  __shared__ __align__(8) float weights[kMmaHeadsMax];
  const SwizzledTile q{shared_address(tile), QueryTile<kSteps>::kRowBytes};
  const int t = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % kWarp;
  const int first = static_cast<int>(blockIdx.y) * kMmaBlockKeys + static_cast<int>(threadIdx.x) / kWarp * 32;
  const int b = sequence_of(view.batch.row_begin, view.batch.count, t);
  QueryTile<kSteps>::fetch(q, view, t, weights);
  const auto row = [&](int i) { return first + i < asked ? rows[t][first + i] : -1; };
  const KeyFragments<kSteps> keys([&](int i) -> const bf16* {
    const int r = row(i);
    return r < 0 ? nullptr : view.keys.row(b, r);
  });
  wait_for_copies();
  __syncthreads();
  float values[4];
  keys.score(q, weights, view.heads, view.key_scale, values);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = 8 * i + lane / 4;
    if (lane % 4 == 0 && first + at < asked) scores[t][first + at] = row(at) < 0 ? 0.0f : values[i];
  }
}

}  // namespace slipstream::kernels
