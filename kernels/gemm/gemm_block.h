// One thread's share of a matrix product. Gemm and GroupedGemm are lists of these; whole tensors go through
// kernels/gemm/gemm.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::kernels {

// How a block finds b(i, j): at b[i * ldb + j], at b[j * ldb + i], or in panels of sixteen columns at
// b[j / 16 * 16 * k + i * 16 + j % 16] (kernels/pack_panels/pack_panels.h).
enum class GemmLayout : uint8_t { kRows, kTransposed, kPanels };

// c[m, n] = a[m, k] b[k, n] + bias, or c += a b + bias: the chains of Gemm. Pointers need no alignment.
struct GemmBlock {
  int64_t m, n, k;
  const float* a;  // a(i, j) is at a[i * a_row + j * a_col]; a_row or a_col is 1
  int64_t a_row, a_col;
  const void* b;  // f32 or bf16
  DType b_dtype;
  GemmLayout b_layout;
  int64_t ldb;  // not read for panels
  float* c;  // c(i, j) is at c[i * ldc + j]
  int64_t ldc;
  const float* bias;  // n values; may be null
  bool accumulate;

  // The part of the product that computes c[row_begin:row_end, column_begin:column_end]. For panels,
  // column_begin is a multiple of 16.
  GemmBlock part(int64_t row_begin, int64_t row_end, int64_t column_begin, int64_t column_end) const;
};

// Computes a block on the calling thread, with packed factors in worker.scratch.
void run(const GemmBlock& block, Worker& worker);

// How a product [m, k] x [k, n] is cut into blocks. The cut never changes a bit of the result.
struct GemmGrid {
  int64_t rows;     // of a block
  int64_t columns;  // of a block
  int64_t row_blocks;
  int64_t column_blocks;
  int64_t blocks() const { return row_blocks * column_blocks; }
};

// A grid for one of `products` such products that run at the same time on `threads` threads. A small product
// is one block.
GemmGrid gemm_grid(int64_t m, int64_t n, int64_t k, int64_t products, int threads);

// Block `index` of the grid over a whole product.
GemmBlock block_of(const GemmBlock& product, const GemmGrid& grid, int64_t index);

// About the time of a block in units of a fused multiply-add of one element: below kGemmTinyWork, waking
// another thread costs more than it saves.
inline int64_t gemm_work(int64_t m, int64_t n, int64_t k) {
  constexpr int64_t kRowsOfPacking =
      8;  // reading and packing an element of b costs as much as 8 rows of products
  return (m + kRowsOfPacking) * n * std::max<int64_t>(k, 1);
}
constexpr int64_t kGemmTinyWork = int64_t{1} << 18;

}  // namespace slipstream::kernels
