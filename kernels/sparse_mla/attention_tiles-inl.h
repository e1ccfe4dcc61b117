// The two products of attention, on rows that lie anywhere: keys and values are reached through row pointers,
// so selected, paged and neighbouring rows all run the same code and give the same bits.
//
//   dot products   s[m, i] = q_m · key_i, as four chains of fused multiply-adds over w = 0, 4, 8, ..; 1, 5,
//   9, ..;
//                  2, 6, ..; 3, 7, .. folded (0 + 2) + (1 + 3). Sixteen lanes hold four q rows times four
//                  chains, so four heads fill a register and neither keys nor queries are transposed.
//   row sums       c_m += sum over k, ascending, of a[m, k] b_k: one chain per element, as in block_gemm.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_SPARSE_MLA_ATTENTION_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SPARSE_MLA_ATTENTION_TILES_INL_H_
#undef SLIPSTREAM_KERNELS_SPARSE_MLA_ATTENTION_TILES_INL_H_
#else
#define SLIPSTREAM_KERNELS_SPARSE_MLA_ATTENTION_TILES_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr int64_t kChains = 4;         // chains of a dot product, and q rows a register
constexpr int64_t kGroupColumns = 12;  // q rows packed side by side: three registers
constexpr int64_t kDotRows = 8;        // keys a tile

// p[0..3] in each 128-bit block.
HWY_INLINE Lanes load_repeated(const float* p) {
  return map([&](int64_t) HWY_ATTR { return hn::LoadDup128(LanesTag(), p); });
}

// Block j of the result: for x in a, b, c, d, the sum (x0 + x2) + (x1 + x3) of block j of x.
HWY_INLINE Lanes fold_chains(const Lanes& a, const Lanes& b, const Lanes& c, const Lanes& d) {
  const LanesTag f;
  const hn::RepartitionToWide<LanesTag> pairs;
  return map([&](int64_t i) HWY_ATTR {
    const auto ab =
        hn::Add(hn::InterleaveLower(f, a.part[i], b.part[i]), hn::InterleaveUpper(f, a.part[i], b.part[i]));
    const auto cd =
        hn::Add(hn::InterleaveLower(f, c.part[i], d.part[i]), hn::InterleaveUpper(f, c.part[i], d.part[i]));
    const auto even = hn::InterleaveLower(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, cd));
    const auto odd = hn::InterleaveUpper(pairs, hn::BitCast(pairs, ab), hn::BitCast(pairs, cd));
    return hn::Add(hn::BitCast(f, even), hn::BitCast(f, odd));
  });
}

// Floats of the packed form of m rows of `width` values.
HWY_INLINE int64_t packed_size(int64_t m, int64_t width) {
  return (m + kChains - 1) / kChains * ((width + kChains - 1) / kChains) * kLanes;
}

// Packs m rows in groups of twelve: [group][width / 4][row / 4][row % 4][w % 4], missing rows and values as
// zeros.
HWY_INLINE void pack_rows(int64_t m, int64_t width, const float* const* rows, float* HWY_RESTRICT out) {
  const int64_t steps = (width + kChains - 1) / kChains;
  for (int64_t first = 0; first < m; first += kGroupColumns) {
    const int64_t vectors = (std::min(kGroupColumns, m - first) + kChains - 1) / kChains;
    for (int64_t j = 0; j < vectors * kChains; ++j) {
      const float* row = first + j < m ? rows[first + j] : nullptr;
      float* to = out + j * kChains;
      for (int64_t i = 0; i < steps; ++i, to += vectors * kLanes) {
        const int64_t count = row == nullptr ? 0 : std::min(kChains, width - i * kChains);
        if (count == kChains) {
          std::memcpy(to, row + i * kChains, sizeof(float) * kChains);
        } else {
          for (int64_t w = 0; w < kChains; ++w) to[w] = w < count ? row[i * kChains + w] : 0.0f;
        }
      }
    }
    out += steps * vectors * kLanes;
  }
}

// s[j, 0 .. 7] = row j of a packed group (j < columns) · eight keys of 4 * steps values. Ahead: fetches
// keys[8 .. 15] into the cache meanwhile, a line of each every fourth step; scattered rows and decode would
// wait for memory.
template <int Vectors, bool Ahead>
HWY_INLINE void dot_tile(int64_t steps, const float* const* keys, const float* HWY_RESTRICT q,
                         int64_t columns, float* HWY_RESTRICT s, int64_t lds) {
  // Keys that share the registers: all eight with AVX-512, fewer at a time with AVX2's sixteen half-size
  // ones.
  constexpr int kRows = kLanesParts == 1 ? kDotRows : 4 / Vectors < 1 ? 1 : 4 / Vectors;
  Lanes sums[kDotRows][Vectors];
  for (int64_t first = 0; first < kDotRows; first += kRows) {
    Lanes acc[kRows][Vectors];
    const float* key[kRows];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      key[r] = keys[first + r];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) acc[r][v] = zero_lanes();
    }
    for (int64_t i = 0; i < steps; ++i) {
      Lanes right[Vectors];
      for (int v = 0; v < Vectors; ++v) right[v] = load(q + (i * Vectors + v) * kLanes);
      if (Ahead) {
        const int64_t line = i / kChains * kLanes, row = kDotRows + i % kChains * 2;
        __builtin_prefetch(keys[row] + line);
        __builtin_prefetch(keys[row + 1] + line);
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Lanes left = load_repeated(key[r] + i * kChains);
#pragma GCC unroll 16
        for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sums[first + r][v] = acc[r][v];
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < Vectors; ++v) {
    for (int64_t r = 0; r < kDotRows; r += kChains) {
      float folded[kLanes];
      store(fold_chains(sums[r][v], sums[r + 1][v], sums[r + 2][v], sums[r + 3][v]), folded);
      const int64_t left = std::min(kChains, columns - v * kChains);
      for (int64_t j = 0; j < left; ++j) {
        std::memcpy(s + (v * kChains + j) * lds + r, folded + j * kChains, sizeof(float) * kChains);
      }
    }
  }
}

template <bool Ahead>
HWY_INLINE void dot_group(int64_t steps, const float* const* keys, int64_t count, const float* packed,
                          int64_t columns, float* s, int64_t lds) {
  for (int64_t i = 0; i < count; i += kDotRows) {
    if (columns > 2 * kChains) {
      dot_tile<3, Ahead>(steps, keys + i, packed, columns, s + i, lds);
    } else if (columns > kChains) {
      dot_tile<2, Ahead>(steps, keys + i, packed, columns, s + i, lds);
    } else {
      dot_tile<1, Ahead>(steps, keys + i, packed, columns, s + i, lds);
    }
  }
}

// s[j, i] (row stride lds) = packed row j · keys[i] for j < m, i < count. Keys hold `width` rounded up to
// four values. Columns up to count rounded up to eight are written. `keys` has room for 16 more pointers; the
// first `ahead` of them are rows that will be asked for next.
static HWY_NOINLINE void dot_products(int64_t m, int64_t width, const float* packed, const float** keys,
                                      int64_t count, int64_t ahead, float* s, int64_t lds) {
  const int64_t steps = (width + kChains - 1) / kChains;
  const int64_t padded = (count + kDotRows - 1) / kDotRows * kDotRows;
  for (int64_t i = count + ahead; i < padded + kDotRows; ++i) keys[i] = keys[0];
  for (int64_t first = 0; first < m; first += kGroupColumns) {
    const int64_t columns = std::min(kGroupColumns, m - first);
    if (first == 0) {
      dot_group<true>(steps, keys, padded, packed, columns, s, lds);
    } else {
      dot_group<false>(steps, keys, padded, packed, columns, s + first * lds, lds);
    }
    packed += steps * ((columns + kChains - 1) / kChains) * kLanes;
  }
}

// a(m, k) of a row sum, in either order. The unit stride is known to the compiler: twelve addresses in
// general strides do not fit the registers, and moving them about costs an eighth of the multiply-adds.
struct RowMajor {
  const float* data;
  int64_t stride;
  HWY_INLINE float operator()(int64_t m, int64_t k) const { return data[m * stride + k]; }
  HWY_INLINE RowMajor from(int64_t m) const { return {data + m * stride, stride}; }
};
struct ColumnMajor {
  const float* data;
  int64_t stride;
  HWY_INLINE float operator()(int64_t m, int64_t k) const { return data[m + k * stride]; }
  HWY_INLINE ColumnMajor from(int64_t m) const { return {data + m, stride}; }
};

// Rows x Vectors accumulators of c_m[at ..]; Tail: the last vector holds `tail` columns.
template <int Rows, int Vectors, bool Tail, class Left>
HWY_INLINE void row_sum_tile(int64_t k_count, Left a, const float* const* b, float* const* c, int64_t at,
                             int64_t tail, bool accumulate) {
  Lanes acc[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      const float* from = c[r] + at + v * kLanes;
      acc[r][v] = !accumulate ? zero_lanes() : Tail && v == Vectors - 1 ? load_first(from, tail) : load(from);
    }
  }
  for (int64_t k = 0; k < k_count; ++k) {
    Lanes right[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      const float* from = b[k] + at + v * kLanes;
      right[v] = Tail && v == Vectors - 1 ? load_first(from, tail) : load(from);
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const Lanes left = broadcast(a(r, k));
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      float* to = c[r] + at + v * kLanes;
      if (Tail && v == Vectors - 1) {
        store_first(acc[r][v], to, tail);
      } else {
        store(acc[r][v], to);
      }
    }
  }
}

// `tiles` tiles of Rows rows each, over columns [at, end).
template <int Rows, int Vectors, class Left>
HWY_INLINE void row_sum_panel(int64_t tiles, int64_t k, Left a, const float* const* b, float* const* c,
                              int64_t at, int64_t end, bool accumulate) {
  for (; at + Vectors * kLanes <= end; at += Vectors * kLanes) {
    for (int64_t i = 0; i < tiles; ++i) {
      // The accumulators of the next tile come from further away than one tile's arithmetic can hide.
      float* const* next = i + 1 < tiles ? c + (i + 1) * Rows : c;
      for (int r = 0; r < Rows; ++r) {
        for (int v = 0; v < Vectors; ++v) {
          __builtin_prefetch(next[r] + at + (i + 1 < tiles ? v : Vectors + v) * kLanes, 1);
        }
      }
      row_sum_tile<Rows, Vectors, false>(k, a.from(i * Rows), b, c + i * Rows, at, 0, accumulate);
    }
  }
  for (; at + kLanes <= end; at += kLanes) {
    for (int64_t i = 0; i < tiles; ++i) {
      row_sum_tile<Rows, 1, false>(k, a.from(i * Rows), b, c + i * Rows, at, 0, accumulate);
    }
  }
  if (at == end) return;
  for (int64_t i = 0; i < tiles; ++i) {
    row_sum_tile<Rows, 1, true>(k, a.from(i * Rows), b, c + i * Rows, at, end - at, accumulate);
  }
}

// c[i][at .. end) = sum over k of a(i, k) b[k][at .. end) for i < m, or += when accumulate.
template <class Left>
HWY_NOINLINE void row_sums(int64_t m, int64_t k, Left a, const float* const* b, float* const* c, int64_t at,
                           int64_t end, bool accumulate) {
  // Tile shapes by register file, as in block_gemm; the low ones are wide so that enough chains run side by
  // side.
  constexpr int kTall = kLanesParts == 1 ? 12 : 6, kTallVectors = kLanesParts == 1 ? 2 : 1;
  constexpr int kMiddle = kLanesParts == 1 ? 8 : 4, kMiddleVectors = kLanesParts == 1 ? 3 : 1;
  int64_t row = 0;
  if (m >= kTall) {
    row_sum_panel<kTall, kTallVectors>(m / kTall, k, a, b, c, at, end, accumulate);
    row = m / kTall * kTall;
  }
  if (m - row >= kMiddle) {
    row_sum_panel<kMiddle, kMiddleVectors>(1, k, a.from(row), b, c + row, at, end, accumulate);
    row += kMiddle;
  }
  if (kMiddle > 4 && m - row >= 4) {
    row_sum_panel<4, 4>(1, k, a.from(row), b, c + row, at, end, accumulate);
    row += 4;
  }
  if (m - row == 3) {
    row_sum_panel<3, kLanesParts == 1 ? 5 : 1>(1, k, a.from(row), b, c + row, at, end, accumulate);
  } else if (m - row == 2) {
    row_sum_panel<2, kLanesParts == 1 ? 8 : 2>(1, k, a.from(row), b, c + row, at, end, accumulate);
  } else if (m - row == 1) {
    row_sum_panel<1, kLanesParts == 1 ? 8 : 4>(1, k, a.from(row), b, c + row, at, end, accumulate);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
