// Products of an f32 factor with a bf16 one, or with a bf16 result: router and mHC weights and their gradients. An f32 value is
// the exact sum of three bf16 ones, so tensor cores compute the product of its parts with the other factor's, the smallest
// first; of two f32 factors those pairs of parts that reach 2^-24 of the product. What is left of the error is that of f32 sums.
#pragma once

#include "kernels/cuda/products.cuh"

namespace slipstream::kernels {

template <class T>
constexpr int kParts = sizeof(T) == 4 ? 3 : 1;

// Two neighbouring values as pairs of parts, the largest first.
__device__ __forceinline__ void split_pair(float low, float high, uint32_t (&parts)[3]) {
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    parts[i] = pack_bf16(low, high);
    low -= __uint_as_float(parts[i] << 16);  // exact
    high -= __uint_as_float(parts[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ void split_eight(const float4 (&values)[2], uint32_t (&pairs)[4][3]) {
  split_pair(values[0].x, values[0].y, pairs[0]);
  split_pair(values[0].z, values[0].w, pairs[1]);
  split_pair(values[1].x, values[1].y, pairs[2]);
  split_pair(values[1].z, values[1].w, pairs[3]);
}

// --- Any shape: 64 x 64 tiles by 2 x 2 warps, 32 k a step ---------------------------------------------------------------

constexpr int kSplitTile = 64, kSplitDepth = 32, kSplitThreads = 128;

// A stored matrix's part of a tile: fetched into registers while the step before is computed, then kept as bf16 parts in
// shared memory in its stored order. Arguments as PartReader's.
template <class T, int kOuter, int kInner, bool kDepthInner>
struct SplitReader {
  using Part = SharedPart<kOuter, kInner>;
  static constexpr int kPieces = kInner / 8, kCount = kOuter * kPieces / kSplitThreads;
  const T* matrix;
  int64_t ld, side0, side_end;
  bool fast;
  float values[kCount][8];

  __device__ void fetch(int64_t k0, int64_t k_end) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kSplitThreads, row = at / kPieces, column = at % kPieces * 8;
      const int64_t outer = (kDepthInner ? side0 : k0) + row, inner = (kDepthInner ? k0 : side0) + column;
      const bool row_exists = outer < (kDepthInner ? side_end : k_end);
      const int64_t left = row_exists ? (kDepthInner ? k_end : side_end) - inner : 0;
      const T* const from = matrix + outer * ld + inner;
      if (fast && left >= 8) {
        const float4 first = load4(from), second = load4(from + 4);
        values[i][0] = first.x, values[i][1] = first.y, values[i][2] = first.z, values[i][3] = first.w;
        values[i][4] = second.x, values[i][5] = second.y, values[i][6] = second.z, values[i][7] = second.w;
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) values[i][j] = j < left ? load(from + j) : 0.0f;
      }
    }
  }
  __device__ void keep(Part* parts) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kSplitThreads, row = at / kPieces, column = at % kPieces * 8;
      uint32_t pairs[4][3];
#pragma unroll
      for (int j = 0; j < 4; ++j) split_pair(values[i][2 * j], values[i][2 * j + 1], pairs[j]);
#pragma unroll
      for (int part = 0; part < kParts<T>; ++part) {
        *reinterpret_cast<uint4*>(parts[part].values + row * Part::kStride + column) = {pairs[0][part], pairs[1][part],
                                                                                      pairs[2][part], pairs[3][part]};
      }
    }
  }
};

template <class A, class B, class C, bool kTransposeA, bool kTransposeB>
__global__ void __launch_bounds__(kSplitThreads) split_product(Product p) {
  using ReadA = SplitReader<A, kTransposeA ? kSplitDepth : kSplitTile, kTransposeA ? kSplitTile : kSplitDepth, !kTransposeA>;
  using ReadB = SplitReader<B, kTransposeB ? kSplitTile : kSplitDepth, kTransposeB ? kSplitDepth : kSplitTile, kTransposeB>;
  __shared__ __align__(16) typename ReadA::Part as[kParts<A>];
  __shared__ __align__(16) typename ReadB::Part bs[kParts<B>];
  Tile tile;
  if (!find_tile<kSplitTile, kSplitTile>(p, tile) || (tile.k == 0 && p.accumulate)) return;
  const auto [a, b, c] = operands_of<A, B, C>(p, tile);
  ReadA read_a{a, p.lda, tile.m0, tile.m, p.fast_a, {}};
  ReadB read_b{b, p.ldb, tile.n0, p.n, p.fast_b, {}};

  constexpr int kFragmentsM = 2, kFragmentsN = 4;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int warp_m = warp / 2 * 32, warp_n = warp % 2 * 32;
  WarpSums<kFragmentsM, kFragmentsN, C> sums(p, tile, c, warp_m, warp_n);
  if (tile.k > 0) read_a.fetch(0, tile.k), read_b.fetch(0, tile.k);
  for (int64_t k0 = 0; k0 < tile.k; k0 += kSplitDepth) {
    __syncthreads();  // the step before has been read
    read_a.keep(as);
    read_b.keep(bs);
    __syncthreads();
    if (k0 + kSplitDepth < tile.k) read_a.fetch(k0 + kSplitDepth, tile.k), read_b.fetch(k0 + kSplitDepth, tile.k);
#pragma unroll
    for (int k = 0; k < kSplitDepth; k += 16) {
      uint32_t af[kParts<A>][kFragmentsM][4], bf[kParts<B>][kFragmentsN / 2][4];
#pragma unroll
      for (int part = 0; part < kParts<A>; ++part) {
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          const int m = warp_m + i * 16;
          if constexpr (kTransposeA) {
            load_tiles_transposed(af[part][i], as[part].at(k + lane / 16 * 8 + lane % 8, m + lane / 8 % 2 * 8));
          } else {
            load_tiles(af[part][i], as[part].at(m + lane / 8 % 2 * 8 + lane % 8, k + lane / 16 * 8));
          }
        }
      }
#pragma unroll
      for (int part = 0; part < kParts<B>; ++part) {
#pragma unroll
        for (int j = 0; j < kFragmentsN / 2; ++j) {
          const int n = warp_n + j * 16;
          if constexpr (kTransposeB) {
            load_tiles(bf[part][j], bs[part].at(n + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
          } else {
            load_tiles_transposed(bf[part][j], bs[part].at(k + lane / 8 % 2 * 8 + lane % 8, n + lane / 16 * 8));
          }
        }
      }
#pragma unroll
      for (int order = 2; order >= 0; --order) {  // of magnitude: parts whose numbers add up to it
#pragma unroll
        for (int of_a = 0; of_a < kParts<A>; ++of_a) {
          const int of_b = order - of_a;
          if (of_b < 0 || of_b >= kParts<B>) continue;
#pragma unroll
          for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
            for (int j = 0; j < kFragmentsN; ++j) {
              mma(sums.at[i][j], af[of_a][i], bf[of_b][j / 2][j % 2 * 2], bf[of_b][j / 2][j % 2 * 2 + 1]);
            }
          }
        }
      }
    }
  }
  sums.store_all();
}

template <class A, class B, class C>
void split_product_as(const Product& p, bool transpose_a, bool transpose_b, Stream& stream) {
  const dim3 grid(static_cast<unsigned>(divide_up(p.n, kSplitTile)), static_cast<unsigned>(row_tiles(p, kSplitTile)),
                  static_cast<unsigned>(p.rows_grouped ? 1 : p.batch));
  const auto with = [&](auto ta, auto tb) {
    split_product<A, B, C, ta(), tb()><<<grid, kSplitThreads, 0, cuda_stream(stream)>>>(p);
  };
  constexpr std::true_type yes;
  constexpr std::false_type no;
  if (transpose_a) {
    transpose_b ? with(yes, yes) : with(yes, no);
  } else {
    transpose_b ? with(no, yes) : with(no, no);
  }
}

}  // namespace slipstream::kernels
