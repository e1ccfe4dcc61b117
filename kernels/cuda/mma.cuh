// Tensor cores by mma.sync: C[16, 8] += A[16, 16] B[16, 8] in bf16 with fp32 sums, and the loads that feed
// it. An element of C depends on its row of A and its column of B alone, so rows of other tokens may share a
// tile.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace slipstream::kernels {

__device__ inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 tiles; lane l gives the address of row l % 8 of tile l / 8 (16 bytes, aligned).
__device__ inline void load_tiles(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_tiles_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ inline void store_tiles(uint32_t address, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Lane l of C holds rows l / 4 and l / 4 + 8, columns 2 (l % 4) and 2 (l % 4) + 1.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// 16 aligned bytes to shared memory behind the thread's back.
__device__ inline void copy_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// The same, of which the first `bytes` are read and the rest become 0.
__device__ inline void copy_async(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Of all groups but the last kLeft.
template <int kLeft = 0>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Plain loads and stores of aligned bytes in shared memory.
__device__ __forceinline__ void store_shared(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float4 load_shared_floats(uint32_t from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

// A bf16 matrix in shared memory whose rows are whole 128-byte lines: chunk c (16 bytes) of row r lies at c ^
// (r % 8), so that eight rows' chunks of one column fall into different banks.
struct SwizzledTile {
  uint32_t base;       // 128-byte aligned
  uint32_t row_bytes;  // a multiple of 128

  __device__ uint32_t chunk(uint32_t row, uint32_t c) const {
    return base + row * row_bytes + ((c ^ (row & 7)) << 4);
  }
  __device__ uint32_t element(uint32_t row, uint32_t column) const {
    return chunk(row, column >> 3) + ((column & 7) << 1);
  }
};

// A of mma: rows [row, row + 16), columns [column, column + 16) of a row-major tile.
__device__ inline void load_a(uint32_t (&a)[4], const SwizzledTile& tile, uint32_t row, uint32_t column,
                              uint32_t lane) {
  load_tiles(a, tile.chunk(row + (lane & 15), (column >> 3) + (lane >> 4)));
}
// A from a tile that holds it transposed: rows of the tile are columns of A.
__device__ inline void load_a_transposed(uint32_t (&a)[4], const SwizzledTile& tile, uint32_t row,
                                         uint32_t column, uint32_t lane) {
  load_tiles_transposed(a,
                        tile.chunk(column + (lane & 7) + ((lane >> 4) << 3), (row >> 3) + ((lane >> 3) & 1)));
}
// B of two neighbouring mma's, columns [n, n + 16), from a tile that holds Bᵀ: a row is a column of B.
// b[0], b[1] belong to the first, b[2], b[3] to the second.
__device__ inline void load_b(uint32_t (&b)[4], const SwizzledTile& tile, uint32_t n, uint32_t k,
                              uint32_t lane) {
  load_tiles(b, tile.chunk(n + (lane & 7) + ((lane >> 4) << 3), (k >> 3) + ((lane >> 3) & 1)));
}
// The same from a tile that holds B itself: rows [k, k + 16).
__device__ inline void load_b_transposed(uint32_t (&b)[4], const SwizzledTile& tile, uint32_t n, uint32_t k,
                                         uint32_t lane) {
  load_tiles_transposed(b, tile.chunk(k + (lane & 15), (n >> 3) + (lane >> 4)));
}

}  // namespace slipstream::kernels
