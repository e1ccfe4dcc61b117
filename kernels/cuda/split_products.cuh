// Products of an f32 factor with a bf16 one, or with a bf16 result: router and mHC weights and their gradients. An f32 value is
// the exact sum of three bf16 ones, so tensor cores compute the product of its parts with the other factor's, the smallest
// first; of two f32 factors those pairs of parts that reach 2^-24 of the product. What is left of the error is that of f32 sums.
#pragma once

#include <cooperative_groups.h>

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

// --- Few columns from long rows: x bf16 [M, K] times w f32 [N, K]ᵀ, N <= 32 ----------------------------------------------

// mHC's mixes are 24 sums over 16,384 values: one block would take long over a token's, so the k are cut into 64 runs, those
// of the eight warps of the eight blocks of a cluster, whose sums are added in that order. Rows 64 a cluster; fragments come
// from memory at once, each lane's eight neighbouring k making up its share of two steps of mma in both factors.
constexpr int kThinRows = 64, kThinWarps = 8, kThinBlocks = 8;

template <int kTilesN>
__global__ void __cluster_dims__(kThinBlocks) __launch_bounds__(kThinWarps* kWarp) thin_product(Product p) {
  namespace cg = cooperative_groups;
  constexpr int kColumns = kTilesN * 8, kValues = kThinRows * kColumns, kTilesM = kThinRows / 16, kStep = 32;
  extern __shared__ float partial[];  // [warps][kThinRows][kColumns]; then the block's sums in the first
  const cg::cluster_group cluster = cg::this_cluster();
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = lane / 4, piece = lane % 4 * 8;
  const int64_t m0 = int64_t{blockIdx.y} * kThinRows;
  const int tiles = static_cast<int>(min(int64_t{kTilesM}, (p.m - m0 + 15) / 16));
  const int64_t steps = p.k / kStep, share = (steps + kThinBlocks * kThinWarps - 1) / (kThinBlocks * kThinWarps);
  const int64_t first = (cluster.block_rank() * kThinWarps + warp) * share, last = min(steps, first + share);
  const bf16* const a = static_cast<const bf16*>(p.a);
  const float* const b = static_cast<const float*>(p.b);

  uint4 x[kTilesM][2];
  float4 w[kTilesN][2];
  const auto fetch = [&](int64_t step) {
    const int64_t k = step * kStep + piece;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t m = m0 + i * 16 + half * 8 + row;
        x[i][half] = m < p.m ? *reinterpret_cast<const uint4*>(a + m * p.lda + k) : uint4{};
      }
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      const int64_t n = j * 8 + row;
      w[j][0] = n < p.n ? load4(b + n * p.ldb + k) : float4{};
      w[j][1] = n < p.n ? load4(b + n * p.ldb + k + 4) : float4{};
    }
  };
  float sums[kTilesM][kTilesN][4] = {};
  if (first < last) fetch(first);
  for (int64_t step = first; step < last; ++step) {
    uint32_t af[2][kTilesM][4], bf[kTilesN][4][3];
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      const uint4 top = x[i][0], bottom = x[i][1];
      af[0][i][0] = top.x, af[0][i][1] = bottom.x, af[0][i][2] = top.y, af[0][i][3] = bottom.y;
      af[1][i][0] = top.z, af[1][i][1] = bottom.z, af[1][i][2] = top.w, af[1][i][3] = bottom.w;
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      split_pair(w[j][0].x, w[j][0].y, bf[j][0]);
      split_pair(w[j][0].z, w[j][0].w, bf[j][1]);
      split_pair(w[j][1].x, w[j][1].y, bf[j][2]);
      split_pair(w[j][1].z, w[j][1].w, bf[j][3]);
    }
    if (step + 1 < last) fetch(step + 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int part = 2; part >= 0; --part) {
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          if (i >= tiles) continue;
#pragma unroll
          for (int j = 0; j < kTilesN; ++j) mma(sums[i][j], af[half][i], bf[j][half * 2][part], bf[j][half * 2 + 1][part]);
        }
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        partial[warp * kValues + (i * 16 + row + e / 2 * 8) * kColumns + j * 8 + lane % 4 * 2 + e % 2] = sums[i][j][e];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kValues; i += kThinWarps * kWarp) {
    float sum = partial[i];
#pragma unroll
    for (int other = 1; other < kThinWarps; ++other) sum += partial[other * kValues + i];
    partial[i] = sum;  // of a place that no other thread reads
  }
  cluster.sync();
  // Each block finishes an eighth of the rows.
  constexpr int kOwn = kValues / kThinBlocks;
  for (int i = static_cast<int>(threadIdx.x); i < kOwn; i += kThinWarps * kWarp) {
    const int at = static_cast<int>(cluster.block_rank()) * kOwn + i;
    const int64_t m = m0 + at / kColumns, n = at % kColumns;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kThinBlocks; ++other) sum += cluster.map_shared_rank(partial, other)[at];
    if (m < p.m && n < p.n) static_cast<float*>(p.c)[m * p.ldc + n] = sum;
  }
  cluster.sync();  // the others have read this block's sums
}

// By the weight's shape alone, and by how things lie in memory, which is the same for every number of rows.
inline bool thin_takes(const Product& p, DType a, DType b, DType c, bool transpose_a, bool transpose_b) {
  return a == DType::kBf16 && b == DType::kF32 && c == DType::kF32 && !transpose_a && transpose_b && p.n <= 32 &&
         p.k >= 1024 && p.k % 32 == 0 && p.batch == 1 && p.row_begin == nullptr && p.bias == nullptr && !p.accumulate &&
         p.fast_a && p.fast_b;
}

inline void launch_thin(const Product& p, Stream& stream) {
  const dim3 grid(kThinBlocks, static_cast<unsigned>(divide_up(p.m, kThinRows)));
  const auto with = [&](auto tiles) {
    constexpr int kBytes = kThinWarps * kThinRows * tiles() * 8 * 4;
    check_cuda(cudaFuncSetAttribute(thin_product<tiles()>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "product");
    thin_product<tiles()><<<grid, kThinWarps * kWarp, kBytes, cuda_stream(stream)>>>(p);
  };
  if (p.n <= 8) return with(std::integral_constant<int, 1>());
  if (p.n <= 24) return with(std::integral_constant<int, 3>());
  with(std::integral_constant<int, 4>());
}

}  // namespace slipstream::kernels
