// IndexerSelect: rounds of queries whose scores fit the workspace; in a round first all scores, then a block
// a query finds the rank of the last one selected by its digits and writes the selection in ascending
// position.
#pragma once

#include "kernels/indexer/indexer_scores.cuh"

namespace slipstream::kernels {

// Queries come in pieces of `queries` rows of one sequence, which share the keys they load: row i of piece p
// has its scores in row (p - first_piece) * queries + i of `scores`.
struct SelectRound {
  int first_piece, queries;
  int topk_rows;  // topk / pool
  float* scores;
  int64_t columns;
};

// The query rows of a block's piece and how many of their sequence's key rows the last of them sees.
struct QueryPiece {
  int sequence, first, count;  // rows of the batch
  int position;                // of the first
};
__device__ inline QueryPiece query_piece(const DeviceSequences& batch, const SelectRound& round, int index) {
  const Piece piece = find_piece(batch, round.queries, round.first_piece + index);
  if (piece.sequence < 0) return {-1, 0, 0, 0};
  const int begin = batch.row_begin[piece.sequence], end = batch.row_begin[piece.sequence + 1];
  return {piece.sequence, begin + piece.first, min(round.queries, end - begin - piece.first),
          batch.cached[piece.sequence] + piece.first};
}

template <class X, class K>
__global__ void __launch_bounds__(kPlainThreads)
    select_scores_plain(const IndexerView<X, K> view, const SelectRound round) {
  extern __shared__ float shared[];
  const PlainShared s(shared, view);
  const QueryPiece piece = query_piece(view.batch, round, static_cast<int>(blockIdx.y));
  const int first = static_cast<int>(blockIdx.x) * kPlainKeys;
  if (piece.sequence < 0) return;
  const int most = view.candidates(piece.position + piece.count - 1);
  if (first >= most || most <= round.topk_rows) return;
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
    round.scores[(static_cast<int64_t>(blockIdx.y) * round.queries + i) * round.columns + first + key] =
        plain_score(view, q, weights, s.keys + key * plain_pitch(view.width));
  }
}

template <int kSteps>
__global__ void __launch_bounds__(kMmaThreads)
    select_scores_mma(const IndexerView<bf16, bf16> view, const SelectRound round) {
  __shared__ __align__(128) unsigned char tiles[2][QueryTile<kSteps>::kBytes];
  __shared__ __align__(8) float weights[2][kMmaHeadsMax];
  const QueryPiece piece = query_piece(view.batch, round, static_cast<int>(blockIdx.y));
  if (piece.sequence < 0) return;
  const int most = view.candidates(piece.position + piece.count - 1);
  const int block_first = static_cast<int>(blockIdx.x) * kMmaBlockKeys;
  if (block_first >= most || most <= round.topk_rows) return;
  const int first = block_first + static_cast<int>(threadIdx.x) / kWarp * 32;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const auto tile = [&](int i) {
    return SwizzledTile{shared_address(tiles[i & 1]), QueryTile<kSteps>::kRowBytes};
  };
  // The first queries of the piece may see none of these keys.
  const int skipped = max(0, min(piece.count, (block_first + 1) * view.pool - 1 - piece.position));
  QueryTile<kSteps>::fetch(tile(skipped), view, piece.first + skipped, weights[skipped & 1]);
  const KeyFragments<kSteps> keys([&](int i) -> const bf16* {
    return first + i < most ? view.keys.row(piece.sequence, first + i) : nullptr;
  });
  for (int i = skipped; i < piece.count; ++i) {
    wait_for_copies();
    __syncthreads();  // query i is here, and everybody is done with the one before
    if (i + 1 < piece.count)
      QueryTile<kSteps>::fetch(tile(i + 1), view, piece.first + i + 1, weights[(i + 1) & 1]);
    float values[4];
    keys.score(tile(i), weights[i & 1], view.heads, view.key_scale, values);
    float* const to =
        round.scores + (static_cast<int64_t>(blockIdx.y) * round.queries + i) * round.columns + first;
    const int candidates = view.candidates(piece.position + i) - first;
    if (lane % 4 != 0) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (8 * j + lane / 4 < candidates) to[8 * j + lane / 4] = values[j];
    }
  }
}

constexpr int kSelectThreads = 512;
constexpr int kDigitBits = 11, kDigits = 1 << kDigitBits;

// Larger for what comes earlier in the order of scores: 0 for NaN, and one value for both zeros.
__device__ inline uint32_t rank_of(float score) {
  if (score != score) return 0;
  const uint32_t bits = __float_as_uint(score == 0.0f ? 0.0f : score);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

struct SelectShared {
  int histogram[kDigits];
  int warps[kSelectThreads / kWarp];
  int digit, remaining;
};

// Sums of `value` over the threads before this one, and over all. Two barriers.
struct Scan {
  int before, total;
};
__device__ inline Scan block_scan(int value, int* warps) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, static_cast<unsigned>(step));
    if (lane >= step) sum += below;
  }
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  int before = 0, total = 0;
  for (int w = 0; w < kSelectThreads / kWarp; ++w) {
    if (w == warp) before = total;
    total += warps[w];
  }
  __syncthreads();
  return {before + sum - value, total};
}

// The rank of the k-th largest of n > k scores, and in `remaining` how many scores of that rank belong to the
// k.
__device__ inline uint32_t last_rank(const float* scores, int n, int k, SelectShared& s, int& remaining) {
  const int thread = static_cast<int>(threadIdx.x);
  uint32_t prefix = 0, mask = 0;
  for (int shift = 32 - kDigitBits;; shift = max(shift - kDigitBits, 0)) {
    const uint32_t digit_mask = static_cast<uint32_t>(kDigits - 1) << shift;
    for (int i = thread; i < kDigits; i += kSelectThreads) s.histogram[i] = 0;
    __syncthreads();
    for (int i = thread; i < n; i += kSelectThreads) {
      const uint32_t rank = rank_of(scores[i]);
      if ((rank & mask) == prefix)
        atomicAdd(&s.histogram[(rank & digit_mask & ~mask) >> shift], 1);  // counts: any order
    }
    __syncthreads();
    // Largest digits first: thread i holds digits kDigits - 1 - 4 i and the three below.
    constexpr int kOwn = kDigits / kSelectThreads;
    const int highest = kDigits - 1 - kOwn * thread;
    int own = 0;
    for (int j = 0; j < kOwn; ++j) own += s.histogram[highest - j];
    const Scan scan = block_scan(own, s.warps);
    if (scan.before < k && k <= scan.before + own) {
      int above = scan.before, digit = highest;
      while (above + s.histogram[digit] < k) above += s.histogram[digit--];
      s.digit = digit;
      s.remaining = k - above;
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(s.digit) << shift;
    k = s.remaining;
    mask |= digit_mask;
    __syncthreads();
    if (shift == 0) break;
  }
  remaining = k;
  return prefix;
}

static __global__ void __launch_bounds__(kSelectThreads)
    select_rows(const DeviceSequences batch, const SelectRound round, int pool, bool tail,
                Rows<int32_t> indices, int width, int32_t* counts) {
  __shared__ SelectShared s;
  const QueryPiece piece = query_piece(batch, round, static_cast<int>(blockIdx.x) / round.queries);
  const int row = static_cast<int>(blockIdx.x) % round.queries;
  if (piece.sequence < 0 || row >= piece.count) return;
  const int t = piece.first + row, position = piece.position + row, thread = static_cast<int>(threadIdx.x);
  const int candidates = (position + 1) / pool;
  int32_t* const out = indices[t];
  const int chosen = min(candidates, round.topk_rows);
  if (candidates <= round.topk_rows) {
    for (int i = thread; i < candidates * pool; i += kSelectThreads) out[i] = i;
  } else {
    const float* const scores = round.scores + static_cast<int64_t>(blockIdx.x) * round.columns;
    int ties;
    const uint32_t last = last_rank(scores, candidates, round.topk_rows, s, ties);
    int better = 0, equal = 0;  // before the tile
    for (int base = 0; base < candidates; base += kSelectThreads) {
      const int i = base + thread;
      const uint32_t rank = i < candidates ? rank_of(scores[i]) : 0;
      const bool is_better = i < candidates && rank > last, is_equal = i < candidates && rank == last;
      const Scan scan = block_scan((is_better ? 1 : 0) + (is_equal ? 1 << 16 : 0), s.warps);
      const int equal_before = equal + (scan.before >> 16);
      if (is_better || (is_equal && equal_before < ties)) {
        const int at = better + (scan.before & 0xffff) + min(equal_before, ties);
        for (int r = 0; r < pool; ++r) out[at * pool + r] = i * pool + r;
      }
      better += scan.total & 0xffff;
      equal += scan.total >> 16;
      if (better + min(equal, ties) == chosen) break;
    }
  }
  int count = chosen * pool;
  const int open = tail ? position + 1 - candidates * pool : 0;
  for (int i = thread; i < open; i += kSelectThreads) out[count + i] = candidates * pool + i;
  count += open;
  for (int i = count + thread; i < width; i += kSelectThreads) out[i] = -1;
  if (thread == 0) counts[t] = count;
}

}  // namespace slipstream::kernels
