// Work on the new rows of every sequence in pieces of one size.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/limits.cuh"

namespace slipstream::kernels {

// At most T / size + B pieces exist; what is beyond the last has sequence -1.
struct Piece {
  int sequence, first;  // of the sequence's new rows
};
// Called by whole warps.
__device__ inline Piece find_piece(const DeviceSequences& batch, int size, int index) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int base = 0; base < batch.count; base += kWarp) {
    const int b = base + lane;
    const int pieces = b < batch.count ? (batch.row_begin[b + 1] - batch.row_begin[b] + size - 1) / size : 0;
    int end = pieces;
    for (int step = 1; step < kWarp; step *= 2) {
      const int below = __shfl_up_sync(~0u, end, static_cast<unsigned>(step));
      if (lane >= step) end += below;
    }
    const unsigned mine = __ballot_sync(~0u, index >= end - pieces && index < end);
    if (mine != 0) {
      const int owner = __ffs(static_cast<int>(mine)) - 1;
      const int begin = __shfl_sync(~0u, end - pieces, owner);
      return {base + owner, (index - begin) * size};
    }
    index -= __shfl_sync(~0u, end, kWarp - 1);
  }
  return {-1, 0};
}

inline unsigned pieces_at_most(const Sequences& sequences, int64_t size) {
  return static_cast<unsigned>(sequences.rows() / size + sequences.count());
}

// Whether rows may be read 16 bytes at a time.
inline bool aligned_16(const Tensor& t) {
  bool aligned = reinterpret_cast<uintptr_t>(t.raw()) % 16 == 0;
  for (int dim = 0; dim + 1 < t.rank(); ++dim)
    aligned = aligned && t.stride(dim) * size_of(t.dtype()) % 16 == 0;
  return aligned && t.size(t.rank() - 1) * size_of(t.dtype()) % 16 == 0;
}

}  // namespace slipstream::kernels
