// Few columns from long rows: x bf16 [M, K] times w f32 [N, K]ᵀ, N <= 32. mHC's mixes are 24 sums over 16,384 values: one block would
// take long over a token's, so the k are cut into 64 runs, whose sums are added in a fixed order: those of eight, then those sums.
// An f32 value is the sum of three bf16 ones, as in split_products.cuh.
#pragma once

#include <cooperative_groups.h>

#include "kernels/cuda/split_products.cuh"

namespace slipstream::kernels {

// The runs are those of the eight warps of the eight blocks of a cluster. Rows 64 a cluster; fragments come from memory at once,
// each lane's eight neighbouring k making up its share of two steps of mma in both factors.
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
    for (int j = 0; j < kTilesN; ++j) split_eight(w[j], bf[j]);
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
    if (i >= tiles) continue;
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        partial[warp * kValues + (i * 16 + row + e / 2 * 8) * kColumns + j * 8 + lane % 4 * 2 + e % 2] = sums[i][j][e];
      }
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < tiles * 16 * kColumns; i += kThinWarps * kWarp) {
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
    if (m >= p.m || n >= p.n) continue;
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < kThinBlocks; ++other) sum += cluster.map_shared_rank(partial, other)[at];
    static_cast<float*>(p.c)[m * p.ldc + n] = sum;
  }
  cluster.sync();  // the others have read this block's sums
}

// sums += x times a step's 32 k of eight columns of w: each lane has eight neighbouring k of rows lane / 4 and + 8, and of column
// lane / 4.
template <int kTilesM>
__device__ __forceinline__ void add_thin_step(const uint4 (&x)[kTilesM][2], const float4 (&w)[2], float (&sums)[kTilesM][4]) {
  uint32_t parts[4][3];
  split_eight(w, parts);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int part = 2; part >= 0; --part) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        const uint4 top = x[i][0], bottom = x[i][1];
        const uint32_t factors[4] = {half == 0 ? top.x : top.z, half == 0 ? bottom.x : bottom.z, half == 0 ? top.y : top.w,
                                     half == 0 ? bottom.y : bottom.w};
        mma(sums[i], factors, parts[half * 2][part], parts[half * 2 + 1][part]);
      }
    }
  }
}

// The same of few rows, where a cluster's eight multiprocessors would wait for memory and for each other: a block a run, a warp
// eight columns of it, 8 / kTilesM steps on their way at once. The block that is done last adds up the runs, in the same order.
constexpr int kThinFewRows = 32, kThinFewThreads = 256, kThinRuns = kThinBlocks * kThinWarps;

template <int kTilesM, int kTilesN>
__global__ void __launch_bounds__(kThinFewThreads) thin_product_of_few(Product p, float* runs, unsigned* done) {
  constexpr int kColumns = kTilesN * 8, kAhead = 8 / kTilesM, kStep = 32;
  static_assert(kTilesN * kWarp <= kThinFewThreads);
  __shared__ bool last_block;
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, row = lane / 4, piece = lane % 4 * 8;
  const int64_t steps = p.k / kStep, share = (steps + kThinRuns - 1) / kThinRuns;
  const int64_t first = blockIdx.x * share, last = min(steps, first + share);
  if (warp < kTilesN) {
    const bf16* const a = static_cast<const bf16*>(p.a) + piece;
    const float* const b = static_cast<const float*>(p.b) + (warp * 8 + row) * p.ldb + piece;
    const bool column_exists = warp * 8 + row < p.n;
    float sums[kTilesM][4] = {};
    for (int64_t base = first; base < last; base += kAhead) {
      uint4 x[kAhead][kTilesM][2];
      float4 w[kAhead][2];
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        const bool step_exists = base + s < last;
        const int64_t k = (base + s) * kStep;
#pragma unroll
        for (int i = 0; i < kTilesM * 2; ++i) {
          const int64_t m = i * 8 + row;
          x[s][i / 2][i % 2] = step_exists && m < p.m ? *reinterpret_cast<const uint4*>(a + m * p.lda + k) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) w[s][i] = step_exists && column_exists ? load4(b + k + i * 4) : float4{};
      }
#pragma unroll
      for (int s = 0; s < kAhead; ++s) {
        if (base + s < last) add_thin_step<kTilesM>(x[s], w[s], sums);
      }
    }
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = i * 16 + row + e / 2 * 8;
        if (m < p.m) runs[(blockIdx.x * p.m + m) * kColumns + warp * 8 + lane % 4 * 2 + e % 2] = sums[i][e];
      }
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last_block = atomicInc(done, kThinRuns - 1) == kThinRuns - 1;
    __threadfence();
  }
  __syncthreads();
  if (!last_block) return;
  const int count = static_cast<int>(p.m) * kColumns;
  for (int i = static_cast<int>(threadIdx.x); i < count; i += kThinFewThreads) {
    float parts[kThinRuns];
#pragma unroll
    for (int r = 0; r < kThinRuns; ++r) parts[r] = __ldcg(runs + r * count + i);
    float sum = 0.0f;
#pragma unroll
    for (int r = 0; r < kThinRuns; r += kThinWarps) {
      float block = parts[r];
#pragma unroll
      for (int other = 1; other < kThinWarps; ++other) block += parts[r + other];
      sum += block;
    }
    const int64_t m = i / kColumns, n = i % kColumns;
    if (n < p.n) static_cast<float*>(p.c)[m * p.ldc + n] = sum;
  }
}

// By the weight's shape alone, and by how things lie in memory, which is the same for every number of rows.
inline bool thin_takes(const Product& p, DType a, DType b, DType c, bool transpose_a, bool transpose_b) {
  return a == DType::kBf16 && b == DType::kF32 && c == DType::kF32 && !transpose_a && transpose_b && p.n <= 32 &&
         p.k >= 1024 && p.k % 32 == 0 && p.batch == 1 && p.row_begin == nullptr && p.bias == nullptr && !p.accumulate &&
         p.fast_a && p.fast_b;
}

template <int kTilesN>
void launch_thin_of_few(const Product& p, Stream& stream) {
  const ArenaScope scope(stream.workspace());
  float* const runs = stream.workspace().alloc(DType::kF32, {kThinRuns * p.m * kTilesN * 8}).f32();
  const auto kernel = p.m <= 16 ? thin_product_of_few<1, kTilesN> : thin_product_of_few<2, kTilesN>;
  kernel<<<kThinRuns, kThinFewThreads, 0, cuda_stream(stream)>>>(p, runs, reinterpret_cast<unsigned*>(stream.counters().i32()));
}

inline void launch_thin(const Product& p, Stream& stream) {
  const dim3 grid(kThinBlocks, static_cast<unsigned>(divide_up(p.m, kThinRows)));
  const auto with = [&](auto tiles) {
    if (p.m <= kThinFewRows) return launch_thin_of_few<tiles()>(p, stream);
    constexpr int kBytes = kThinWarps * kThinRows * tiles() * 8 * 4;
    check_cuda(cudaFuncSetAttribute(thin_product<tiles()>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "product");
    thin_product<tiles()><<<grid, kThinWarps * kWarp, kBytes, cuda_stream(stream)>>>(p);
  };
  if (p.n <= 8) return with(std::integral_constant<int, 1>());
  if (p.n <= 24) return with(std::integral_constant<int, 3>());
  with(std::integral_constant<int, 4>());
}

}  // namespace slipstream::kernels
