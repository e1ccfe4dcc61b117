// Products of few rows with a weight of few columns, which decode is made of: x bf16 [M <= 32, K] times w bf16 [N, K]ᵀ.
//
// An element is one chain over k, and on an H200 a step of it (sixteen k) takes wgmma some 80 cycles whatever the tile's width,
// mma.sync some 33: with 4096 k a product of any width would take 15 us, where its weights are read in 8. So here each warp has
// eight columns and chains of mma.sync, and blocks of four warps are many enough to keep the memory busy.
//
// The bits are those of wgmma (wgmma_products.cuh), which takes over where there are more rows. No manual promises it; the tests
// of Gemm compare every number of rows up to 300, bit for bit, with one product of 4096 rows.
#pragma once

#include "kernels/cuda/products.cuh"

namespace slipstream::kernels {

constexpr int kFewColumns = 32, kFewThreads = kFewColumns / 8 * kWarp, kFewDepth = 128;  // of a block; k of a stage

// kTiles x 16 rows.
template <int kTiles>
struct FewRowsShape {
  static constexpr int kRows = kTiles * 16, kStages = kTiles == 1 ? 8 : 6;
  static constexpr int kRowBytes = kFewDepth * 2, kStageBytes = (kRows + kFewColumns) * kRowBytes;
};

template <int kTiles, class C>
__global__ void __launch_bounds__(kFewThreads) few_rows_product(Product p) {
  using Shape = FewRowsShape<kTiles>;
  constexpr int kPieces = Shape::kRowBytes / 16;  // of 16 bytes a row of a stage
  extern __shared__ __align__(128) unsigned char memory[];
  const uint32_t base = shared_address(memory);
  const bf16* const a = static_cast<const bf16*>(p.a);
  const bf16* const b = static_cast<const bf16*>(p.b);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t n0 = int64_t{blockIdx.x} * kFewColumns;
  const int rows = static_cast<int>(p.m);
  // Rows of x that do not exist are zeros, written once.
  for (int i = static_cast<int>(threadIdx.x); i < Shape::kStages * Shape::kRows * kPieces; i += kFewThreads) {
    const int stage = i / (Shape::kRows * kPieces), row = i / kPieces % Shape::kRows;
    if (row >= rows) *reinterpret_cast<uint4*>(memory + stage * Shape::kStageBytes + row * Shape::kRowBytes + i % kPieces * 16) = {};
  }
  // Rows of x first, then the weight's.
  const auto tile_of = [&](int stage, int row) {
    return SwizzledTile{base + stage * Shape::kStageBytes + row * Shape::kRowBytes, Shape::kRowBytes};
  };
  const int steps = static_cast<int>((p.k + kFewDepth - 1) / kFewDepth);
  const auto fetch = [&](int step) {
    if (step < steps) {
      const int stage = step % Shape::kStages;
      const SwizzledTile x = tile_of(stage, 0), w = tile_of(stage, Shape::kRows);
      for (int i = static_cast<int>(threadIdx.x); i < rows * kPieces; i += kFewThreads) {
        const int row = i / kPieces, piece = i % kPieces;
        const int64_t k = int64_t{step} * kFewDepth + piece * 8;
        copy_async(x.chunk(row, piece), a + row * p.lda + (k < p.k ? k : 0), k < p.k ? 16 : 0);
      }
#pragma unroll
      for (int i = 0; i < kFewColumns * kPieces / kFewThreads; ++i) {
        const int at = static_cast<int>(threadIdx.x) + i * kFewThreads, row = at / kPieces, piece = at % kPieces;
        const int64_t n = n0 + row, k = int64_t{step} * kFewDepth + piece * 8;
        const bool exists = n < p.n && k < p.k;
        copy_async(w.chunk(row, piece), exists ? b + n * p.ldb + k : b, exists ? 16 : 0);
      }
    }
    commit_copies();  // an empty group too, so that counting groups counts steps
  };
  float sums[kTiles][4] = {};
  for (int step = 0; step < Shape::kStages - 1; ++step) fetch(step);
  for (int step = 0; step < steps; ++step) {
    await_copies<Shape::kStages - 2>();
    __syncthreads();  // the step's data is there for all, and the stage fetched into next has been read by all
    fetch(step + Shape::kStages - 1);
    const SwizzledTile x = tile_of(step % Shape::kStages, 0), w = tile_of(step % Shape::kStages, Shape::kRows);
#pragma unroll
    for (int k = 0; k < kFewDepth; k += 32) {
      uint32_t bf[4];  // of two steps
      load_tiles(bf, w.chunk(warp * 8 + lane % 8, k / 8 + lane / 8));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          uint32_t af[4];
          load_a(af, x, i * 16, k + half * 16, lane);
          mma(sums[i], af, bf[half * 2], bf[half * 2 + 1]);
        }
      }
    }
  }
  await_copies<0>();
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t row = i * 16 + lane / 4 + e / 2 * 8, column = n0 + warp * 8 + lane % 4 * 2 + e % 2;
      if (row >= p.m || column >= p.n) continue;
      store(static_cast<C*>(p.c) + row * p.ldc + column, p.bias == nullptr ? sums[i][e] : sums[i][e] + p.bias[column]);
    }
  }
}

// Of products that wgmma takes. Wider weights are read at full speed by its form too.
inline bool few_rows_takes(const Product& p, bool transpose_a, bool transpose_b) {
  return p.m <= 32 && p.n <= 16384 && !transpose_a && transpose_b && p.batch == 1 && p.row_begin == nullptr && !p.accumulate;
}

template <class C>
void launch_few_rows(const Product& p, Stream& stream) {
  const auto with = [&](auto tiles) {
    constexpr int kBytes = FewRowsShape<tiles()>::kStages * FewRowsShape<tiles()>::kStageBytes;
    const auto kernel = few_rows_product<tiles(), C>;
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "product");
    kernel<<<static_cast<unsigned>(divide_up(p.n, kFewColumns)), kFewThreads, kBytes, cuda_stream(stream)>>>(p);
  };
  p.m <= 16 ? with(std::integral_constant<int, 1>()) : with(std::integral_constant<int, 2>());
}

}  // namespace slipstream::kernels
