// Rows of which every thread keeps its runs of four columns in registers, as they are stored: all reads of a kernel are on their
// way before the first value is used, and memory is read once. Runs and their order are those of for_fours().
#pragma once

#include "kernels/cuda/device.cuh"

namespace slipstream::kernels {

// Four values as they are stored.
template <class X>
struct Four {
  float4 kept;
  Four() = default;
  __device__ explicit Four(const X* p) : kept(load4(p)) {}
  __device__ explicit Four(float4 values) : kept(values) {}
  __device__ float4 values() const { return kept; }
};
template <>
struct Four<bf16> {
  uint2 bits;
  Four() = default;
  __device__ explicit Four(const bf16* p) : bits(*reinterpret_cast<const uint2*>(p)) {}
  __device__ explicit Four(float4 v) {  // values that bf16 holds
    bits.x = __float_as_uint(v.x) >> 16 | (__float_as_uint(v.y) & 0xffff0000u);
    bits.y = __float_as_uint(v.z) >> 16 | (__float_as_uint(v.w) & 0xffff0000u);
  }
  __device__ float4 values() const {
    return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
            __uint_as_float(bits.y & 0xffff0000u)};
  }
};
// `count` and `whole` as for load_run().
template <class X>
__device__ __forceinline__ Four<X> load_four(const X* p, int count, bool whole) {
  return whole ? Four<X>(p) : Four<X>(load_run(p, count, false));
}

// What one of `threads` threads has of a row: columns 4 (thread + r threads) .. + 3 for r = 0, 1, ...
struct RowShare {
  int thread, threads, width;
  bool whole;  // as fours() found
  __device__ int column(int r) const { return 4 * (thread + r * threads); }
};
// Of a block's row.
__device__ __forceinline__ RowShare block_share(int width, bool whole) {
  return {static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), width, whole};
}

// The first kRuns runs of a row, read when this is made. Runs beyond are read where they are used.
template <class X, int kRuns>
class HeldRow {
 public:
  HeldRow() = default;
  __device__ __forceinline__ HeldRow(const X* row, const RowShare& share) : row_(row) {
#pragma unroll
    for (int r = 0; r < kRuns; ++r) {
      const int column = share.column(r);
      if (column < share.width) runs_[r] = load_four(row + column, share.width - column, share.whole);
    }
  }
  // Of a row that is yet to be written: keep() its first runs, and the others before at() wants them.
  __device__ __forceinline__ explicit HeldRow(const X* row) : row_(row) {}
  __device__ __forceinline__ void keep(int r, float4 values) { runs_[r] = Four<X>(values); }  // values that X holds
  // Run r, a constant, which begins at `column`.
  __device__ __forceinline__ float4 at(int r, int column, const RowShare& share) const {
    return r < kRuns ? runs_[r].values() : load_run(row_ + column, share.width - column, share.whole);
  }

 private:
  const X* row_;
  Four<X> runs_[kRuns];
};

// f(r, column) for a thread's runs, ascending: r is a constant, kRuns for all runs that are not held.
template <int kRuns, class F>
__device__ __forceinline__ void for_runs(const RowShare& share, F&& f) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    if (share.column(r) < share.width) f(r, share.column(r));
  }
  for (int r = kRuns; share.column(r) < share.width; ++r) f(kRuns, share.column(r));
}

__device__ __forceinline__ float add_squares(float4 v, float sum) {
  return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}
__device__ __forceinline__ float add_products(float4 a, float4 b, float sum) {
  return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}
// y + a x
__device__ __forceinline__ float4 add_scaled(float a, float4 x, float4 y) {
  return {fmaf(a, x.x, y.x), fmaf(a, x.y, y.y), fmaf(a, x.z, y.z), fmaf(a, x.w, y.w)};
}

// --- Values one by one: blocks of a row and a part of its columns, kRuns runs a thread ---

constexpr int kPartThreads = 256;
template <int kRuns>
inline dim3 part_grid(int64_t rows, int64_t width) {
  return dim3(static_cast<unsigned>(rows), static_cast<unsigned>(divide_up(width, 4 * kRuns * kPartThreads)));
}
// f(r, column) for the runs of this thread in the block's part, r a constant. A kernel reads all it needs in one such loop and
// writes in the next: what it writes may be what it reads.
template <int kRuns, class F>
__device__ __forceinline__ void for_part(int width, F&& f) {
#pragma unroll
  for (int r = 0; r < kRuns; ++r) {
    const int column = 4 * static_cast<int>((blockIdx.y * kRuns + r) * kPartThreads + threadIdx.x);
    if (column < width) f(r, column);
  }
}

}  // namespace slipstream::kernels
