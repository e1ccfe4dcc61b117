// What kernels share: values as float whatever their dtype, reductions in a fixed order, launches.
//
// Row reductions: thread i of the block adds elements 4i .. 4i+3, then those a block further, ascending; then the fixed tree
// of block_sum(). The number of threads is a function of the row's width alone, so a row's bits depend on nothing else.
// Everything is compiled with --fmad=false: a fused multiply-add happens where the source says fmaf() and nowhere else.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "kernels/arena.h"
#include "kernels/cuda/check.h"
#include "kernels/sequences.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// --- Values -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float load(const float* p) { return *p; }
__device__ __forceinline__ float load(const bf16* p) { return __uint_as_float(uint32_t{p->bits} << 16); }
__device__ __forceinline__ void store(float* p, float value) { *p = value; }
__device__ __forceinline__ void store(bf16* p, float value) {
  p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
}
// The value as X would hold it: what a later read of a stored activation gives.
template <class X>
__device__ __forceinline__ float rounded(float value) {
  X kept;
  store(&kept, value);
  return load(&kept);
}

// 2^x in one instruction: within 2 ulp, 1 for 0, 0 for -infinity.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four values at once; p must be aligned to their size.
__device__ __forceinline__ float4 load4(const float* p) { return *reinterpret_cast<const float4*>(p); }
__device__ __forceinline__ float4 load4(const bf16* p) {
  const uint2 bits = *reinterpret_cast<const uint2*>(p);
  return {__uint_as_float(bits.x << 16), __uint_as_float(bits.x & 0xffff0000u), __uint_as_float(bits.y << 16),
          __uint_as_float(bits.y & 0xffff0000u)};
}
__device__ __forceinline__ void store4(float* p, float4 v) { *reinterpret_cast<float4*>(p) = v; }
__device__ __forceinline__ void store4(bf16* p, float4 v) {
  bf16 kept[4];
  store(kept, v.x), store(kept + 1, v.y), store(kept + 2, v.z), store(kept + 3, v.w);
  uint2 bits;
  bits.x = kept[0].bits | uint32_t{kept[1].bits} << 16;
  bits.y = kept[2].bits | uint32_t{kept[3].bits} << 16;
  *reinterpret_cast<uint2*>(p) = bits;
}

// Rows of a matrix; consecutive values within a row.
template <class X>
struct Rows {
  X* data;
  int64_t stride;
  __device__ X* operator[](int64_t row) const { return data + row * stride; }
};
template <class X>
Rows<X> rows_of(const Tensor& t) {
  return {t.empty() ? nullptr : t.data<X>(), t.empty() ? 0 : t.stride(0)};
}
// Heads of a token: [T, h, d].
template <class X>
struct Heads {
  X* data;
  int64_t row_stride, head_stride;
  __device__ X* at(int64_t row, int64_t head) const { return data + row * row_stride + head * head_stride; }
};
template <class X>
Heads<X> heads_of(const Tensor& t) {
  return {t.empty() ? nullptr : t.data<X>(), t.empty() ? 0 : t.stride(0), t.empty() ? 0 : t.stride(1)};
}
template <class X>
X* data_of(const Tensor& t) {  // null when absent
  return t.empty() ? nullptr : t.data<X>();
}

// Whether every row of t can be read four values at a time: for loops of width / 4 rounds. Absent tensors always can.
inline bool fours(const Tensor& t) {
  if (t.empty()) return true;
  const int64_t bytes = 4 * size_of(t.dtype());
  bool aligned = reinterpret_cast<uintptr_t>(t.raw()) % static_cast<uintptr_t>(bytes) == 0;
  for (int dim = 0; dim + 1 < t.rank(); ++dim) aligned = aligned && t.stride(dim) % 4 == 0;
  return aligned && t.size(t.rank() - 1) % 4 == 0;
}

// Calls f(i, count) for this thread's runs of a row: elements i .. i+count-1, four but at the row's end. The order is that
// of row reductions.
template <class F>
__device__ __forceinline__ void for_fours(int64_t width, F&& f) {
  for (int64_t i = 4 * threadIdx.x; i < width; i += 4 * blockDim.x) f(i, min(int64_t{4}, width - i));
}
// Four values of which `count` exist; the others are 0. `whole` as fours() found.
template <class X>
__device__ __forceinline__ float4 load_run(const X* p, int64_t count, bool whole) {
  if (whole) return load4(p);
  float4 v = {0.0f, 0.0f, 0.0f, 0.0f};
  if (count > 0) v.x = load(p);
  if (count > 1) v.y = load(p + 1);
  if (count > 2) v.z = load(p + 2);
  if (count > 3) v.w = load(p + 3);
  return v;
}
template <class X>
__device__ __forceinline__ void store_run(X* p, float4 v, int64_t count, bool whole) {
  if (whole) return store4(p, v);
  if (count > 0) store(p, v.x);
  if (count > 1) store(p + 1, v.y);
  if (count > 2) store(p + 2, v.z);
  if (count > 3) store(p + 3, v.w);
}

// --- Reductions -------------------------------------------------------------------------------------------------------

constexpr int kWarp = 32;

// The 128 bytes around p are on their way to the L2, at no register.
__device__ __forceinline__ void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// Every lane receives the sum (the largest): five exchanges over distances 16, 8, 4, 2, 1.
__device__ __forceinline__ float warp_sum(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// Every thread of the block's first `warps` receives the sum of all of them: warps first, then the warps' sums ascending. All of
// them must call, and meet in sync(); 32 warps at most.
template <class Sync>
__device__ __forceinline__ float sum_of_warps(float value, unsigned warps, Sync&& sync) {
  __shared__ float partial[kWarp];
  value = warp_sum(value);
  sync();  // an earlier call's partial sums have been read
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  sync();
  float sum = 0.0f;
  for (unsigned w = 0; w < warps; ++w) sum += partial[w];
  return sum;
}
__device__ __forceinline__ float block_sum(float value) {
  return sum_of_warps(value, blockDim.x / kWarp, [] { __syncthreads(); });
}
__device__ __forceinline__ float block_max(float value) {
  __shared__ float partial[kWarp];
  value = warp_max(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  float largest = partial[0];
  for (unsigned w = 1; w < blockDim.x / kWarp; ++w) largest = fmaxf(largest, partial[w]);
  return largest;
}

// --- Batches ----------------------------------------------------------------------------------------------------------

// The sequence of batch row `row`: the last b with row_begin[b] <= row.
__device__ __forceinline__ int sequence_of(const int32_t* row_begin, int count, int64_t row) {
  int low = 0, high = count;  // row_begin[low] <= row < row_begin[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_begin[middle] <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Sequences and PagedRows as kernels see them.
struct DeviceSequences {
  const int32_t* row_begin;
  const int32_t* cached;
  int count;
};
inline DeviceSequences on_device(const Sequences& s) {
  return {s.row_begin.i32(), s.cached.i32(), static_cast<int>(s.count())};
}
template <class X>
struct DevicePages {
  X* pool;
  int64_t page_stride, row_stride;
  const int32_t* table;
  int64_t table_stride;
  __device__ X* row(int64_t b, int64_t p) const {
    return pool + table[b * table_stride + p / kPageRows] * page_stride + p % kPageRows * row_stride;
  }
};
template <class X>
DevicePages<X> on_device(const PagedRows& r) {
  return {r.pool.data<X>(), r.pool.stride(0), r.pool.stride(1), r.page_table.i32(), r.page_table.stride(0)};
}

// --- Launches ---------------------------------------------------------------------------------------------------------

inline cudaStream_t cuda_stream(Stream& stream) { return static_cast<cudaStream_t>(stream.cuda()); }

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Threads for one block a row of this width: whole warps, four values a thread and round. A function of the width alone.
inline int row_threads(int64_t width) {
  const int64_t warps = divide_up(divide_up(width, 4), kWarp);
  return static_cast<int>((warps < 1 ? 1 : warps > 8 ? 8 : warps) * kWarp);
}

inline void check_launch(const char* op) { check_cuda(cudaGetLastError(), op); }

// Calls f(X{}) with the C++ type of an f32 or bf16 dtype: with_type(x.dtype(), [&](auto x) { using X = decltype(x); ... }).
template <class F>
void with_type(DType dtype, F&& f) {
  if (dtype == DType::kBf16) {
    f(bf16{});
  } else {
    CHECK(dtype == DType::kF32);
    f(float{});
  }
}

}  // namespace slipstream::kernels
