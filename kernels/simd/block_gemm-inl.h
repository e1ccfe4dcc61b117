// block_gemm: the one matrix product of the CPU operators, on blocks that a single thread owns.
//
// Each element of the result is one chain of fused multiply-adds over ascending k: c = fma(a[m,k], b[k,n], c).
// The chain is the definition. Tiling, packing and the split over threads only choose which chains run side by
// side, so they never change a bit: a row of c is the same alone or in a batch of a thousand.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_SIMD_BLOCK_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SIMD_BLOCK_GEMM_INL_H_
#undef SLIPSTREAM_KERNELS_SIMD_BLOCK_GEMM_INL_H_
#else
#define SLIPSTREAM_KERNELS_SIMD_BLOCK_GEMM_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// a(m, k) is at data[m * row + k * col]: either stride may be 1, so a transposed left factor needs no copy.
struct LeftFactor {
  const float* data;
  int64_t row;
  int64_t col;
};

// Rows x Vectors accumulators of sixteen columns each; the last vector holds `tail` columns (16 = full).
template <int Rows, int Vectors, class TB>
HWY_INLINE void block_gemm_tile(int64_t k_count, LeftFactor a, const TB* HWY_RESTRICT b, int64_t ldb,
                                float* HWY_RESTRICT c, int64_t ldc, int64_t tail, bool accumulate) {
  Lanes acc[Rows][Vectors];
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      const bool partial = v == Vectors - 1 && tail != kLanes;
      const float* from = c + r * ldc + v * kLanes;
      acc[r][v] = !accumulate ? zero_lanes() : partial ? load_first(from, tail) : load(from);
    }
  }
  for (int64_t k = 0; k < k_count; ++k) {
    Lanes right[Vectors];
    for (int v = 0; v < Vectors; ++v) {
      const bool partial = v == Vectors - 1 && tail != kLanes;
      right[v] = partial ? load_first(b + k * ldb + v * kLanes, tail) : load(b + k * ldb + v * kLanes);
    }
    for (int r = 0; r < Rows; ++r) {
      const Lanes left = broadcast(a.data[r * a.row + k * a.col]);
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r) {
    for (int v = 0; v < Vectors; ++v) {
      const bool partial = v == Vectors - 1 && tail != kLanes;
      float* to = c + r * ldc + v * kLanes;
      if (partial) {
        store_first(acc[r][v], to, tail);
      } else {
        store(acc[r][v], to);
      }
    }
  }
}

// Tile heights by register file: 32 AVX-512 registers hold 12 x 2 accumulators, 16 AVX2 ones 6 x 1 pairs.
constexpr int kTileRows = kLanesParts == 1 ? 12 : 6;
constexpr int kTileVectors = kLanesParts == 1 ? 2 : 1;

template <int Vectors, class TB>
HWY_INLINE void block_gemm_columns(int64_t m, int64_t k, LeftFactor a, const TB* b, int64_t ldb, float* c,
                                   int64_t ldc, int64_t tail, bool accumulate) {
  int64_t row = 0;
  const auto at = [&](int64_t r) { return LeftFactor{a.data + r * a.row, a.row, a.col}; };
  for (; row + kTileRows <= m; row += kTileRows) {
    block_gemm_tile<kTileRows, Vectors>(k, at(row), b, ldb, c + row * ldc, ldc, tail, accumulate);
  }
  for (; row + 4 <= m; row += 4) {
    block_gemm_tile<4, Vectors>(k, at(row), b, ldb, c + row * ldc, ldc, tail, accumulate);
  }
  for (; row < m; ++row) {
    block_gemm_tile<1, Vectors>(k, at(row), b, ldb, c + row * ldc, ldc, tail, accumulate);
  }
}

// c[m, n] (row stride ldc) = a[m, k] b[k, n] (row stride ldb), or += when accumulate: the chain then starts at c.
template <class TB>
HWY_INLINE void block_gemm(int64_t m, int64_t n, int64_t k, LeftFactor a, const TB* b, int64_t ldb, float* c,
                           int64_t ldc, bool accumulate) {
  constexpr int64_t kColumns = kTileVectors * kLanes;
  int64_t column = 0;
  for (; column + kColumns <= n; column += kColumns) {
    block_gemm_columns<kTileVectors>(m, k, a, b + column, ldb, c + column, ldc, kLanes, accumulate);
  }
  for (; column < n; column += kLanes) {
    block_gemm_columns<1>(m, k, a, b + column, ldb, c + column, ldc, std::min(kLanes, n - column), accumulate);
  }
}

// out[k, n] (row stride ldo >= n rounded up to 16) = b[n, k]ᵀ (row stride ldb) as fp32; columns n.. of the last
// sixteen are zero. Makes a weight [out x in] the right factor of block_gemm.
template <class TB>
HWY_INLINE void pack_transposed(int64_t n, int64_t k, const TB* b, int64_t ldb, float* out, int64_t ldo) {
  const int64_t padded = (n + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t j = 0; j < n; ++j) out[i * ldo + j] = to_f32(b[j * ldb + i]);
    for (int64_t j = n; j < padded; ++j) out[i * ldo + j] = 0.0f;
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
