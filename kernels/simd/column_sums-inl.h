// Sums down the columns of a matrix: bias and norm-weight gradients.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_SIMD_COLUMN_SUMS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SIMD_COLUMN_SUMS_INL_H_
#undef SLIPSTREAM_KERNELS_SIMD_COLUMN_SUMS_INL_H_
#else
#define SLIPSTREAM_KERNELS_SIMD_COLUMN_SUMS_INL_H_
#endif

#include <algorithm>
#include <cstdint>

#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// The (up to 16 * Vectors) columns from `column` on, their sums in registers; the last vector has `last` columns.
template <int Vectors, class AddRow>
HWY_INLINE void add_column_block(int64_t rows, int64_t column, int64_t last, float* sums, AddRow&& add_row) {
  Lanes sum[Vectors];
  const auto with_chunk = [&](int v, auto&& body) HWY_ATTR {
    if (v == Vectors - 1 && last != kLanes) {
      body(TailChunk{last});
    } else {
      body(FullChunk{});
    }
  };
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    with_chunk(v, [&](auto chunk) HWY_ATTR { sum[v] = chunk.load(sums + column + v * kLanes); });
  }
  for (int64_t t = 0; t < rows; ++t) {
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      with_chunk(v, [&](auto chunk) HWY_ATTR { sum[v] = add_row(sum[v], t, column + v * kLanes, chunk); });
    }
  }
#pragma GCC unroll 4
  for (int v = 0; v < Vectors; ++v) {
    with_chunk(v, [&](auto chunk) HWY_ATTR { chunk.store(sum[v], sums + column + v * kLanes); });
  }
}

// For columns [begin, end): sums[c] = add_row(sums[c], row, c, chunk) over the rows in order, sixteen columns at a
// time. A caller gives each thread columns of its own, so no sum is ever shared.
template <class AddRow>
HWY_INLINE void add_column_sums(int64_t rows, int64_t begin, int64_t end, float* sums, AddRow&& add_row) {
  constexpr int kVectors = 4;
  int64_t column = begin;
  for (; column + kVectors * kLanes <= end; column += kVectors * kLanes) {
    add_column_block<kVectors>(rows, column, kLanes, sums, add_row);
  }
  for (; column < end; column += kLanes) {
    add_column_block<1>(rows, column, std::min(kLanes, end - column), sums, add_row);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
