// block_gemm: the one matrix product of the CPU operators, on blocks that a single thread owns.
//
// Each element of the result is one chain of fused multiply-adds over ascending k: c = fma(a[m,k], b[k,n],
// c). The chain is the definition. Tiling, packing and the split over threads only choose which chains run
// side by side, so they never change a bit: a row of c is the same alone or in a batch of a thousand.
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
#include <type_traits>

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

// b(k, n) is at data[k * row + n / 16 * panel + n % 16]: rows of a matrix (panel = 16), or panels of sixteen
// columns, each [K x 16] and without gaps (row = 16).
template <class TB>
struct RightFactor {
  const TB* data;
  int64_t row;
  int64_t panel;

  HWY_INLINE RightFactor from_column(int64_t n) const { return {data + n / kLanes * panel, row, panel}; }
};

// Tile sizes by register file: 32 AVX-512 registers hold 12 x 2 accumulators, two vectors of b and a
// broadcast; 16 AVX2 ones hold 6 x 1 pairs. A product of few rows takes a wider tile instead: chains to hide
// latency.
// Under AddressSanitizer a tall tile takes the compiler minutes.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kTileRows = 3;
#else
constexpr int kTileRows = kLanesParts == 1 ? 12 : 6;
#endif
constexpr int kTileVectors = kLanesParts == 1 ? 2 : 1;
constexpr int kWideRows = (kTileRows + 1) / 2;
constexpr int kWideVectors = kTileVectors * 2;
constexpr int kWidestRows = kLanesParts == 1 ? 2 : 1;
constexpr int kWidestVectors = kWideVectors * 2;
constexpr int64_t kTileColumns = kTileVectors * kLanes;
constexpr int64_t kWideColumns = kWideVectors * kLanes;
constexpr int64_t kWidestColumns = kWidestVectors * kLanes;

// Vector v of a row of b or c in a tile of `Vectors`. With Masked the last one holds `last` columns (1..16).
template <bool Masked, int Vectors, class T>
HWY_INLINE Lanes load_columns(const T* p, int v, int64_t last) {
  return Masked && v == Vectors - 1 ? load_first(p, last) : load(p);
}

template <int Rows, int Vectors>
using TileSums = Lanes[Rows][Vectors];

// One step of k: sums[r][v] += value_of_row(r) * b[panel v ..].
template <bool Masked, int Rows, int Vectors, class TB, class ValueOfRow>
HWY_INLINE void tile_step(TileSums<Rows, Vectors>& sums, const TB* HWY_RESTRICT b, int64_t panel,
                          int64_t last, ValueOfRow&& value_of_row) {
  Lanes right[Vectors];
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) right[v] = load_columns<Masked, Vectors>(b + v * panel, v, last);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const Lanes left = broadcast(value_of_row(r));
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
  }
}

// Rows x Vectors accumulators of sixteen columns each; with Masked the last vector has `last` columns.
// The address arithmetic of the k loops is as little as possible: it runs on the ports of the multiply-adds.
// Factors come by reference: copied as arguments, their words would be read back before they are stored.
template <int Rows, int Vectors, bool Masked, class TB>
HWY_NOINLINE void block_gemm_tile(int64_t k_count, const LeftFactor& a, const RightFactor<TB>& right,
                                  float* HWY_RESTRICT c, int64_t ldc, int64_t last, bool accumulate) {
  const float* a_data = a.data;
  const int64_t a_row = a.row, a_col = a.col;
  const TB* HWY_RESTRICT b = right.data;
  const int64_t ldb = right.row, panel = right.panel;
  TileSums<Rows, Vectors> sums;
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sums[r][v] = zero_lanes();
  }
  if (accumulate) {
    const float* from = c;
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r, from += ldc) {
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load_columns<Masked, Vectors>(from + v * kLanes, v, last);
    }
  }
  if (a_col == 1) {
    // A pointer for three rows: twelve of them would not fit the general registers.
    constexpr int kPointers = (Rows + 2) / 3;
    const float* left[kPointers];
#pragma GCC unroll 16
    for (int p = 0; p < kPointers; ++p) left[p] = a_data + 3 * p * a_row;
    for (int64_t k = 0; k < k_count; ++k, b += ldb) {
      tile_step<Masked>(sums, b, panel, last, [&](int r) HWY_ATTR { return left[r / 3][r % 3 * a_row]; });
#pragma GCC unroll 16
      for (int p = 0; p < kPointers; ++p) ++left[p];
    }
  } else {  // a.row == 1, or a single row
    for (int64_t k = 0; k < k_count; ++k, a_data += a_col, b += ldb) {
      tile_step<Masked>(sums, b, panel, last, [&](int r) HWY_ATTR { return a_data[r]; });
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r, c += ldc) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      if (Masked && v == Vectors - 1) {
        store_first(sums[r][v], c + v * kLanes, last);
      } else {
        store(sums[r][v], c + v * kLanes);
      }
    }
  }
}

template <int Vectors, bool Masked, class TB>
HWY_INLINE void block_gemm_rows(int64_t rows, int64_t k, const LeftFactor& a, const RightFactor<TB>& b,
                                float* c, int64_t ldc, int64_t last, bool accumulate) {
  constexpr int kRowsMax = Vectors > kWideVectors   ? kWidestRows
                           : Vectors > kTileVectors ? kWideRows
                                                    : kTileRows;
  static_assert(kRowsMax <= 12);
  const auto run = [&](auto count) {
    constexpr int kRows = std::min<int>(count, kRowsMax);
    block_gemm_tile<kRows, Vectors, Masked>(k, a, b, c, ldc, last, accumulate);
  };
  switch (rows) {
    case 1:
      return run(std::integral_constant<int, 1>());
    case 2:
      return run(std::integral_constant<int, 2>());
    case 3:
      return run(std::integral_constant<int, 3>());
    case 4:
      return run(std::integral_constant<int, 4>());
    case 5:
      return run(std::integral_constant<int, 5>());
    case 6:
      return run(std::integral_constant<int, 6>());
    case 7:
      return run(std::integral_constant<int, 7>());
    case 8:
      return run(std::integral_constant<int, 8>());
    case 9:
      return run(std::integral_constant<int, 9>());
    case 10:
      return run(std::integral_constant<int, 10>());
    case 11:
      return run(std::integral_constant<int, 11>());
    default:
      return run(std::integral_constant<int, 12>());
  }
}

// The columns from `column` on that whole tiles of `Vectors` fill; returns the first column left over.
template <int Vectors, class TB>
HWY_INLINE int64_t block_gemm_columns(int64_t column, int64_t rows, int64_t n, int64_t k, const LeftFactor& a,
                                      const RightFactor<TB>& b, float* c, int64_t ldc, bool accumulate) {
  for (; column + Vectors * kLanes <= n; column += Vectors * kLanes) {
    block_gemm_rows<Vectors, false>(rows, k, a, b.from_column(column), c + column, ldc, kLanes, accumulate);
  }
  return column;
}

// One row of tiles: c[rows, n] with rows <= kTileRows.
template <class TB>
HWY_INLINE void block_gemm_strip(int64_t rows, int64_t n, int64_t k, const LeftFactor& a,
                                 const RightFactor<TB>& b, float* c, int64_t ldc, bool accumulate) {
  int64_t column = 0;
  if (rows <= kWidestRows) {
    column = block_gemm_columns<kWidestVectors>(column, rows, n, k, a, b, c, ldc, accumulate);
  }
  if (rows <= kWideRows) {
    column = block_gemm_columns<kWideVectors>(column, rows, n, k, a, b, c, ldc, accumulate);
  }
  column = block_gemm_columns<kTileVectors>(column, rows, n, k, a, b, c, ldc, accumulate);
  if (column == n) return;
  const int64_t left = n - column;
  if (kTileVectors > 1 && left > kLanes) {
    block_gemm_rows<kTileVectors, true>(rows, k, a, b.from_column(column), c + column, ldc, left - kLanes,
                                        accumulate);
  } else {
    block_gemm_rows<1, true>(rows, k, a, b.from_column(column), c + column, ldc, left, accumulate);
  }
}

// Calls body(first row, rows) for m rows in strips of nearly equal height: 13 rows are 7 + 6, never 12 + 1.
template <class Body>
HWY_INLINE void for_row_strips(int64_t m, Body&& body, int64_t height = kTileRows) {
  const int64_t strips = (m + height - 1) / height;
  for (int64_t i = 0; i < strips; ++i) {
    const int64_t begin = m * i / strips, end = m * (i + 1) / strips;
    body(begin, end - begin);
  }
}

// c[m, n] (row stride ldc) = a[m, k] b[k, n] (row stride ldb), or += when accumulate: the chain then starts
// at c.
template <class TB>
HWY_INLINE void block_gemm(int64_t m, int64_t n, int64_t k, const LeftFactor& a, const TB* b, int64_t ldb,
                           float* c, int64_t ldc, bool accumulate) {
  // The tiles want one stride to be 1; nothing but speed is lost when neither is.
  const int64_t height = a.row == 1 || a.col == 1 ? kTileRows : 1;
  for_row_strips(
      m,
      [&](int64_t row, int64_t rows) {
        block_gemm_strip(rows, n, k, LeftFactor{a.data + row * a.row, a.row, a.col},
                         RightFactor<TB>{b, ldb, kLanes}, c + row * ldc, ldc, accumulate);
      },
      height);
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
