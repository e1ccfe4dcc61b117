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
#include <cstring>
#include <type_traits>

#include "hwy/cache_control.h"
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

// Tile sizes by register file: 32 AVX-512 registers hold 12 x 2 accumulators, two vectors of b and a
// broadcast; 16 AVX2 ones hold 6 x 1 pairs. A product of few rows takes a wide tile instead: chains to hide
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
constexpr int64_t kTileColumns = kTileVectors * kLanes;
constexpr int64_t kWideColumns = kWideVectors * kLanes;

// Sixteen columns of a row of b or c, or the first `columns` of them.
template <bool Masked, class T>
HWY_INLINE Lanes load_columns(const T* p, int64_t columns) {
  if constexpr (Masked) {
    return load_first(p, columns);
  } else {
    return load(p);
  }
}

template <int Rows, int Vectors>
using TileSums = Lanes[Rows][Vectors];

// One step of k: sums[r][v] += value_of_row(r) * b[16 v ..].
template <bool Masked, int Rows, int Vectors, class TB, class ValueOfRow>
HWY_INLINE void tile_step(TileSums<Rows, Vectors>& sums, const TB* HWY_RESTRICT b, int64_t columns,
                          ValueOfRow&& value_of_row) {
  Lanes right[Vectors];
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) right[v] = load_columns<Masked>(b + v * kLanes, columns);
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    const Lanes left = broadcast(value_of_row(r));
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) sums[r][v] = fma(left, right[v], sums[r][v]);
  }
}

// Rows x Vectors accumulators of sixteen columns each. With Masked there is one vector, of `columns` (1..15).
// The address arithmetic of the k loops is as little as possible: it runs on the ports of the multiply-adds.
template <int Rows, int Vectors, bool Masked, class TB>
HWY_NOINLINE void block_gemm_tile(int64_t k_count, LeftFactor a, const TB* HWY_RESTRICT b, int64_t ldb,
                                  float* HWY_RESTRICT c, int64_t ldc, int64_t columns, bool accumulate) {
  static_assert(!Masked || Vectors == 1);
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
      for (int v = 0; v < Vectors; ++v) sums[r][v] = load_columns<Masked>(from + v * kLanes, columns);
    }
  }
  if (a.col == 1) {
    // A pointer for three rows: twelve of them would not fit the general registers.
    constexpr int kPointers = (Rows + 2) / 3;
    const float* left[kPointers];
#pragma GCC unroll 16
    for (int p = 0; p < kPointers; ++p) left[p] = a.data + 3 * p * a.row;
    for (int64_t k = 0; k < k_count; ++k, b += ldb) {
      tile_step<Masked>(sums, b, columns, [&](int r) HWY_ATTR { return left[r / 3][r % 3 * a.row]; });
#pragma GCC unroll 16
      for (int p = 0; p < kPointers; ++p) ++left[p];
    }
  } else {  // a.row == 1, or a single row
    for (int64_t k = 0; k < k_count; ++k, a.data += a.col, b += ldb) {
      tile_step<Masked>(sums, b, columns, [&](int r) HWY_ATTR { return a.data[r]; });
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r, c += ldc) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      if constexpr (Masked) {
        store_first(sums[r][v], c + v * kLanes, columns);
      } else {
        store(sums[r][v], c + v * kLanes);
      }
    }
  }
}

template <int Vectors, bool Masked, class TB>
HWY_INLINE void block_gemm_rows(int64_t rows, int64_t k, LeftFactor a, const TB* b, int64_t ldb, float* c,
                                int64_t ldc, int64_t columns, bool accumulate) {
  constexpr int kRowsMax = Vectors > kTileVectors ? kWideRows : kTileRows;
  static_assert(kRowsMax <= 12);
  const auto run = [&](auto count) {
    constexpr int kRows = std::min<int>(count, kRowsMax);
    block_gemm_tile<kRows, Vectors, Masked>(k, a, b, ldb, c, ldc, columns, accumulate);
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

// One row of tiles: c[rows, n] with rows <= kTileRows.
template <class TB>
HWY_INLINE void block_gemm_strip(int64_t rows, int64_t n, int64_t k, LeftFactor a, const TB* b, int64_t ldb,
                                 float* c, int64_t ldc, bool accumulate) {
  int64_t column = 0;
  if (rows <= kWideRows) {
    for (; column + kWideColumns <= n; column += kWideColumns) {
      block_gemm_rows<kWideVectors, false>(rows, k, a, b + column, ldb, c + column, ldc, kLanes, accumulate);
    }
  }
  for (; column + kTileColumns <= n; column += kTileColumns) {
    block_gemm_rows<kTileVectors, false>(rows, k, a, b + column, ldb, c + column, ldc, kLanes, accumulate);
  }
  if constexpr (kTileVectors > 1) {
    if (column + kLanes <= n) {
      block_gemm_rows<1, false>(rows, k, a, b + column, ldb, c + column, ldc, kLanes, accumulate);
      column += kLanes;
    }
  }
  if (column < n) {
    block_gemm_rows<1, true>(rows, k, a, b + column, ldb, c + column, ldc, n - column, accumulate);
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
HWY_INLINE void block_gemm(int64_t m, int64_t n, int64_t k, LeftFactor a, const TB* b, int64_t ldb, float* c,
                           int64_t ldc, bool accumulate) {
  // The tiles want one stride to be 1; nothing but speed is lost when neither is.
  const int64_t height = a.row == 1 || a.col == 1 ? kTileRows : 1;
  for_row_strips(
      m,
      [&](int64_t row, int64_t rows) {
        block_gemm_strip(rows, n, k, LeftFactor{a.data + row * a.row, a.row, a.col}, b, ldb, c + row * ldc,
                         ldc, accumulate);
      },
      height);
}

// Four 32-bit words of the rows 0, 4, 8 and 12 below p (rows `stride` bytes apart), a 128-bit block each.
HWY_INLINE Lanes load_four_rows(const char* p, int64_t stride) {
  const hn::CappedTag<float, 4> d;
  const auto at = [&](int64_t row)
                      HWY_ATTR { return hn::LoadU(d, reinterpret_cast<const float*>(p + row * stride)); };
#if HWY_TARGET <= HWY_AVX3
  // Inserts from memory need no shuffle port, which Combine would.
  __m512 rows = _mm512_castps128_ps512(at(0).raw);
  rows = _mm512_insertf32x4(rows, at(4).raw, 1);
  rows = _mm512_insertf32x4(rows, at(8).raw, 2);
  return {{LanesVec{_mm512_insertf32x4(rows, at(12).raw, 3)}}};
#else
  return {{hn::Combine(LanesTag(), at(4), at(0)), hn::Combine(LanesTag(), at(12), at(8))}};
#endif
}

// Word w of sixteen rows of sixteen words, for each w: store_word(w, lanes) with row r in lane r.
template <class StoreWord>
HWY_INLINE void transpose_words(const char* p, int64_t stride, StoreWord&& store_word) {
  Lanes rows[4][4];  // [r][q]: words 4q..4q+3 of rows r, r+4, r+8, r+12. A cache line is read at one go.
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) rows[r][q] = load_four_rows(p + r * stride + 16 * q, stride);
  }
  const LanesTag d;
  const hn::Repartition<double, LanesTag> pairs;
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    Lanes words[4];
    for (int64_t i = 0; i < kLanesParts; ++i) {
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, rows[0][q].part[i], rows[1][q].part[i]));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, rows[2][q].part[i], rows[3][q].part[i]));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, rows[0][q].part[i], rows[1][q].part[i]));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, rows[2][q].part[i], rows[3][q].part[i]));
      words[0].part[i] = hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23));
      words[1].part[i] = hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23));
      words[2].part[i] = hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23));
      words[3].part[i] = hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23));
    }
#pragma GCC unroll 4
    for (int w = 0; w < 4; ++w) store_word(4 * q + w, words[w]);
  }
}

// Sixteen rows of 64 bytes (sixteen fp32 or thirty-two bf16) at p, transposed to out[k, 16] as fp32; only the
// first `k_count` rows of out are written.
template <bool Whole>
HWY_INLINE void transpose_block(const float*, const char* p, int64_t stride, int64_t k_count, float* out,
                                int64_t ldo) {
  transpose_words(p, stride, [&](int64_t k, const Lanes& x) HWY_ATTR {
    if (Whole || k < k_count) store(x, out + k * ldo);
  });
}
template <bool Whole>
HWY_INLINE void transpose_block(const bf16*, const char* p, int64_t stride, int64_t k_count, float* out,
                                int64_t ldo) {
  // A word holds the bf16 of k in its lower and of k + 1 in its upper half: fp32 values but for a shift and a
  // mask.
  const hn::RebindToUnsigned<LanesTag> bits;
  transpose_words(p, stride, [&](int64_t pair, const Lanes& x) HWY_ATTR {
    const int64_t k = 2 * pair;
    const Lanes even = map([&](int64_t i) HWY_ATTR {
      return hn::BitCast(LanesTag(), hn::ShiftLeft<16>(hn::BitCast(bits, x.part[i])));
    });
    const Lanes odd = map([&](int64_t i) HWY_ATTR {
      return hn::BitCast(LanesTag(), hn::And(hn::BitCast(bits, x.part[i]), hn::Set(bits, 0xffff0000u)));
    });
    if (Whole || k < k_count) store(even, out + k * ldo);
    if (Whole || k + 1 < k_count) store(odd, out + (k + 1) * ldo);
  });
}

// out[k, n] (row stride ldo >= n rounded up to 16) = b[n, k]ᵀ (row stride ldb) as fp32; columns n.. of the
// last sixteen are zero. Makes a weight [out x in] the right factor of block_gemm. `next`, when given, is the
// block of the same shape and stride that is wanted next: it is fetched meanwhile, since sixteen interleaved
// rows are more than the hardware's prefetcher follows. Its addresses need not be valid.
template <class TB>
HWY_NOINLINE void pack_transposed(int64_t n, int64_t k, const TB* b, int64_t ldb, float* out, int64_t ldo,
                                  const TB* next = nullptr) {
  constexpr int64_t kSize = sizeof(TB), kDepth = 64 / kSize;
  const int64_t stride = ldb * kSize;
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t rows = std::min(kLanes, n - j);
    const char* from = reinterpret_cast<const char*>(b) + j * stride;
    const char* ahead = next == nullptr ? nullptr : reinterpret_cast<const char*>(next) + j * stride;
    int64_t i = 0;
    if (rows == kLanes) {
      for (; i + kDepth <= k; i += kDepth, from += 64) {
        if (ahead != nullptr) {
          const char* line = ahead;
          for (int r = 0; r < kLanes; ++r, line += stride) hwy::Prefetch(line);
          ahead += 64;
        }
        transpose_block<true>(b, from, stride, kDepth, out + i * ldo + j, ldo);
      }
    }
    for (; i < k; i += kDepth, from += 64) {  // the edges go through a whole block, zero where b has nothing
      const int64_t count = std::min(kDepth, k - i);
      alignas(64) char whole[kLanes * 64] = {};
      for (int64_t r = 0; r < rows; ++r) {
        std::memcpy(whole + r * 64, from + r * stride, static_cast<size_t>(count * kSize));
      }
      transpose_block<false>(b, whole, 64, count, out + i * ldo + j, ldo);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
