// Products of at most eight rows of bf16 by a stored [k, n] of few k: a decode step's queries by each head's absorbed weight. As
// few_rows.cuh, but a stage's 64 k are rows of the weight: one warp takes 64 of its columns, so that it reads whole lines, and a
// chain is so short that nearly all of it is on its way at once. The bits are again those of wgmma_products.cuh.
#pragma once

#include "kernels/cuda/limits.cuh"
#include "kernels/cuda/products.cuh"
#include "kernels/cuda/wgmma_products.cuh"

namespace slipstream::kernels {

// 64 k of 64 columns of the weight, and of eight rows of A. Rows are 16 bytes longer than their values, so that neighbours fall
// into other banks.
struct AcrossStage {
  static constexpr int kDepth = 64, kColumns = 64, kPitch = 64 * 2 + 16;
  unsigned char weight[kDepth * kPitch], rows[8 * kPitch];
};
constexpr int kAcrossStages = 4;

inline __global__ void __launch_bounds__(kWarp) few_rows_across(const __grid_constant__ Product p) {
  using Stage = AcrossStage;
  extern __shared__ __align__(16) unsigned char memory[];
  Stage* const ring = reinterpret_cast<Stage*>(memory);
  const int lane = static_cast<int>(threadIdx.x), piece = lane % 8 * 8, row = lane / 8;
  const int64_t n0 = int64_t{blockIdx.x} * Stage::kColumns, batch = blockIdx.y;
  const int depth = static_cast<int>(p.k);
  // A lane copies 16 bytes of every fourth row. What does not exist becomes zeros.
  const bool columns_exist = n0 + piece < p.n;
  const bf16* const weight = static_cast<const bf16*>(p.b) + batch * p.stride_b + (columns_exist ? n0 + piece : 0);
  const bf16* const a = static_cast<const bf16*>(p.a) + batch * p.stride_a;
  int copied = 0, next_stage = 0;
  const auto copy_stage = [&] {
    if (copied < depth) {
      const uint32_t to = shared_address(ring[next_stage].weight + row * Stage::kPitch + piece * 2);
      const uint32_t to_rows = shared_address(ring[next_stage].rows + row * Stage::kPitch + piece * 2);
#pragma unroll
      for (int i = 0; i < Stage::kDepth / 4; ++i) {
        const int k = copied + row + 4 * i;
        copy_async(to + static_cast<uint32_t>(4 * i * Stage::kPitch), weight + min(k, depth - 1) * p.ldb,
                   columns_exist && k < depth ? 16 : 0);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int m = row + 4 * i, k = copied + piece;
        const bool exists = m < p.m && k < depth;
        copy_async(to_rows + static_cast<uint32_t>(4 * i * Stage::kPitch), exists ? a + m * p.lda + k : a, exists ? 16 : 0);
      }
    }
    commit_copies();
    copied += Stage::kDepth;
    next_stage = (next_stage + 1) % kAcrossStages;
  };

  float sums[4][4] = {};
  for (int i = 0; i < kAcrossStages - 1; ++i) copy_stage();
  for (int k0 = 0, place = 0; k0 < depth; k0 += Stage::kDepth, place = (place + 1) % kAcrossStages) {
    wait_for_copies<kAcrossStages - 2>();
    __syncwarp();  // the stage is there, and the one before it has been read by all
    const Stage& stage = ring[place];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t rows[4];  // of 32 k
      load_tiles(rows, shared_address(stage.rows + lane % 8 * Stage::kPitch + (half * 4 + lane / 8) * 16));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const int k = half * 32 + step * 16 + lane / 16 * 8 + lane % 8;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          uint32_t columns[4];  // sixteen, and sixteen k
          load_tiles_transposed(columns, shared_address(stage.weight + k * Stage::kPitch + (tile * 16 + lane / 8 % 2 * 8) * 2));
          mma(sums[tile], columns, rows[step * 2], rows[step * 2 + 1]);
        }
      }
    }
    copy_stage();
  }

#pragma unroll
  for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t m = lane % 4 * 2 + i % 2, n = n0 + tile * 16 + lane / 4 + i / 2 * 8;
      if (m >= p.m || n >= p.n) continue;
      const float sum = p.bias == nullptr ? sums[tile][i] : sums[tile][i] + p.bias[n];
      store(static_cast<bf16*>(p.c) + batch * p.stride_c + m * p.ldc + n, sum);
    }
  }
}

inline bool few_rows_across_takes(const Product& p, DType a, DType b, DType c, bool transpose_a, bool transpose_b) {
  return a == DType::kBf16 && b == DType::kBf16 && c == DType::kBf16 && !transpose_a && !transpose_b && p.m <= 8 && p.k <= 512 &&
         p.row_begin == nullptr && !p.accumulate && wgmma_takes(p, transpose_a, transpose_b);
}

inline void launch_few_rows_across(const Product& p, Stream& stream) {
  constexpr int kBytes = kAcrossStages * static_cast<int>(sizeof(AcrossStage));
  allow_shared(few_rows_across, kBytes);
  const dim3 grid(static_cast<unsigned>(divide_up(p.n, AcrossStage::kColumns)), static_cast<unsigned>(p.batch));
  few_rows_across<<<grid, kWarp, kBytes, cuda_stream(stream)>>>(p);
}

}  // namespace slipstream::kernels
