// pack_transposed: a weight [out x in] turned into a right factor of block_gemm, transposed in registers.
//
// Included by <op>_simd.cc after hwy/foreach_target.h, once per target.
#if defined(SLIPSTREAM_KERNELS_SIMD_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef SLIPSTREAM_KERNELS_SIMD_TRANSPOSE_INL_H_
#undef SLIPSTREAM_KERNELS_SIMD_TRANSPOSE_INL_H_
#else
#define SLIPSTREAM_KERNELS_SIMD_TRANSPOSE_INL_H_
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "hwy/cache_control.h"
#include "kernels/simd/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

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
