// What IndexerSelect scores in one round: pieces of query rows and the pages of keys they see. The plan is
// made on the device, so that grids follow from T, B and the table's width alone while the work follows from
// what sequences really hold.
#pragma once

#include "kernels/cuda/pieces.cuh"

namespace slipstream::kernels {

// Query rows of one sequence that share the keys they are scored against.
struct QueryPiece {
  int sequence, first, count;  // rows of the batch; sequence -1: none
  int position;                // of the first
};

// Row i of piece p has its ranks in row p * queries + i. Larger ranks come earlier in the order of scores.
struct SelectRound {
  const QueryPiece* pieces;
  const int* page_begin;  // [pieces + 1]: pages to score before each piece, counted from any origin
  int piece_count, queries;
  int topk_rows;  // topk / pool
  uint32_t* ranks;
  int64_t columns;

  __device__ uint32_t* row(int piece, int i) const {
    return ranks + (static_cast<int64_t>(piece) * queries + i) * columns;
  }
};

// Larger for what comes earlier in the order of scores: 0 for NaN, and one value for both zeros.
__device__ inline uint32_t rank_of(float score) {
  const uint32_t bits = __float_as_uint(score + 0.0f);  // -0 + 0 = 0
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
  return score == score ? bits ^ (negative | 0x80000000u) : 0;
}

// Sums of `value` over the threads before this one, and over all. Two barriers.
struct Scan {
  int before, total;
};
__device__ inline Scan block_scan(int value, int (&warps)[kWarp]) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  int sum = value;
  for (int step = 1; step < kWarp; step *= 2) {
    const int below = __shfl_up_sync(~0u, sum, static_cast<unsigned>(step));
    if (lane >= step) sum += below;
  }
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  const int of_lane = lane < static_cast<int>(blockDim.x) / kWarp ? warps[lane] : 0;
  const int before = __reduce_add_sync(~0u, lane < warp ? of_lane : 0),
            total = __reduce_add_sync(~0u, of_lane);
  __syncthreads();
  return {before + sum - value, total};
}

// One block. The pieces of sequence b begin at place row_begin[b] / queries + b: no prefix sum is needed, and
// at most one place a sequence stays empty. Places: pieces_at_most(sequences, queries).
constexpr int kPlanThreads = 1024;
static __global__ void __launch_bounds__(kPlanThreads)
    plan_pieces(const DeviceSequences batch, int queries, int places, int pool, int topk_rows,
                QueryPiece* pieces, int* page_begin) {
  __shared__ int warps[kWarp];
  const auto place_of = [&](int b) { return batch.row_begin[b] / queries + b; };
  int pages_before = 0;
  for (int base = 0; base < places; base += kPlanThreads) {
    const int place = base + static_cast<int>(threadIdx.x);
    int pages = 0;
    if (place < places) {
      int low = 0, high = batch.count;  // place_of(low) <= place < place_of(high)
      while (high - low > 1) {
        const int middle = (low + high) / 2;
        (place_of(middle) <= place ? low : high) = middle;
      }
      const int begin = batch.row_begin[low], rows = batch.row_begin[low + 1] - begin;
      const int first = (place - place_of(low)) * queries;
      QueryPiece piece = {-1, 0, 0, 0};
      if (first < rows) {
        piece = {low, begin + first, min(queries, rows - first), batch.cached[low] + first};
        const int candidates = (piece.position + piece.count) / pool;
        if (candidates > topk_rows)  // else all are selected, whatever their scores
          pages = static_cast<int>((candidates + kPageRows - 1) / kPageRows);
      }
      pieces[place] = piece;
    }
    const Scan scan = block_scan(pages, warps);
    if (place < places) page_begin[place] = pages_before + scan.before;
    pages_before += scan.total;
  }
  if (threadIdx.x == 0) page_begin[places] = pages_before;
}

}  // namespace slipstream::kernels
