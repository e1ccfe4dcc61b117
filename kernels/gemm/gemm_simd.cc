#include "kernels/gemm/gemm.h"
#include "kernels/gemm/gemm_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/gemm_simd.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/block_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

// Depths of k a block works on at a time. A strip of rows passes over all packed panels of b, which stay in
// L2 (sixteen of 256 x 32 fp32 are 512 KiB). For few rows one panel is packed and used at once, in L1, while
// the next is on its way from memory. Rows of an unpacked b are read side by side, few enough for the
// hardware's prefetcher.
constexpr int64_t kPackedDepth = 256;
constexpr int64_t kStreamedDepth = 128;
constexpr int64_t kInPlaceDepth = 32;
constexpr int64_t kStreamedRows = 4 * kTileRows;
// Every strip reads an unpacked b again: good for few strips, or when b stays in L1.
constexpr int64_t kInPlaceRows = 2 * kTileRows;
constexpr int64_t kInPlaceValues = 8192;

void add_bias(const GemmBlock& g) {
  for (int64_t i = 0; i < g.m; ++i) {
    float* c = g.c + i * g.ldc;
    for_lanes(g.n, [&](int64_t j, auto chunk)
                       HWY_ATTR { chunk.store(add(chunk.load(c + j), chunk.load(g.bias + j)), c + j); });
  }
}

// out[k, n] (row stride ldo >= n rounded up to 16) = b[k, n] as fp32, columns n.. of the last sixteen zero.
template <class TB>
HWY_INLINE void pack_rows(int64_t n, int64_t k, const TB* b, int64_t ldb, float* out, int64_t ldo) {
  for (int64_t i = 0; i < k; ++i) {
    for_lanes(n,
              [&](int64_t j, auto chunk) HWY_ATTR { store(chunk.load(b + i * ldb + j), out + i * ldo + j); });
  }
}

template <class TB>
void multiply_in_place(const GemmBlock& g, const TB* b) {
  const int64_t depth = g.n * g.k <= kInPlaceValues ? g.k : kInPlaceDepth;
  for (int64_t k = 0; k < g.k; k += depth) {
    block_gemm(g.m, g.n, std::min(depth, g.k - k), LeftFactor{g.a + k * g.a_col, g.a_row, g.a_col},
               b + k * g.ldb, g.ldb, g.c, g.ldc, g.accumulate || k > 0);
  }
}

template <class TB>
void multiply_packed(const GemmBlock& g, const TB* b, Worker& worker) {
  const bool streamed = g.m <= kStreamedRows;
  const int64_t width = g.m <= kWideRows ? kWideColumns : kTileColumns;
  const int64_t depth = std::min(g.k, streamed ? kStreamedDepth : kPackedDepth);
  const int64_t columns_at_once = streamed ? width : g.n;
  float* panels = worker.scratch<float>((columns_at_once + width - 1) / width * width * depth);
  float* left = g.a_col == 1 ? nullptr : worker.scratch<float>(kLanes * depth);
  for (int64_t column = 0; column < g.n; column += columns_at_once) {
    const int64_t column_end = std::min(column + columns_at_once, g.n);
    for (int64_t k = 0; k < g.k; k += depth) {
      const int64_t count = std::min(depth, g.k - k);
      for (int64_t j = column; j < column_end; j += width) {
        const int64_t columns = std::min(width, column_end - j);
        float* panel = panels + (j - column) * depth;
        if (g.transpose_b) {
          const TB* next = k + depth < g.k ? b + j * g.ldb + k + depth : b + (j + width) * g.ldb;
          pack_transposed(columns, count, b + j * g.ldb + k, g.ldb, panel, width, next);
        } else {
          pack_rows(columns, count, b + k * g.ldb + j, g.ldb, panel, width);
        }
      }
      for_row_strips(g.m, [&](int64_t row, int64_t rows) HWY_ATTR {
        LeftFactor a{g.a + row * g.a_row + k * g.a_col, g.a_row, g.a_col};
        if (left != nullptr) {  // a row of k would be a page for each k
          pack_rows(rows, count, a.data, a.col, left, kLanes);
          a = {left, 1, kLanes};
        }
        for (int64_t j = column; j < column_end; j += width) {
          block_gemm_strip(rows, std::min(width, column_end - j), count, a, panels + (j - column) * depth,
                           width, g.c + row * g.ldc + j, g.ldc, g.accumulate || k > 0);
        }
      });
    }
  }
}

template <class TB>
void multiply(const GemmBlock& g, const TB* b, Worker& worker) {
  const bool in_place = !g.transpose_b && (g.m <= kInPlaceRows || g.n * g.k <= kInPlaceValues);
  if (in_place) {
    multiply_in_place(g, b);
  } else {
    multiply_packed(g, b, worker);
  }
}

void gemm_block(const GemmBlock& g, Worker& worker) {
  if (g.k == 0 && !g.accumulate) {
    for (int64_t i = 0; i < g.m; ++i) std::fill_n(g.c + i * g.ldc, g.n, 0.0f);
  } else if (g.b_dtype == DType::kBf16) {
    multiply(g, static_cast<const bf16*>(g.b), worker);
  } else {
    multiply(g, static_cast<const float*>(g.b), worker);
  }
  if (g.bias != nullptr) add_bias(g);
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {

HWY_EXPORT(gemm_block);

void run(const GemmBlock& block, Worker& worker) { HWY_DYNAMIC_DISPATCH(gemm_block)(block, worker); }

GemmBlock GemmBlock::part(int64_t row_begin, int64_t row_end, int64_t column_begin,
                          int64_t column_end) const {
  GemmBlock out = *this;
  out.m = row_end - row_begin;
  out.n = column_end - column_begin;
  out.a += row_begin * a_row;
  out.b = static_cast<const char*>(b) + column_begin * (transpose_b ? ldb : 1) * size_of(b_dtype);
  out.c += row_begin * ldc + column_begin;
  if (bias != nullptr) out.bias += column_begin;
  return out;
}

namespace {
constexpr int64_t kColumnsMin = 64, kColumnsMax = 512;
// Every block packs its columns of b again: with this many rows that is a few per cent.
constexpr int64_t kRowsMin = 192;
// Blocks for each thread: the last one to finish holds up the others for a fraction of the whole only.
constexpr int64_t kBlocksPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace

GemmGrid gemm_grid(int64_t m, int64_t n, int64_t k, int64_t products, int threads) {
  const int64_t useful = std::max<int64_t>(gemm_work(m, n, k) / kGemmTinyWork, 1);
  const int64_t wanted = threads == 1 ? 1 : std::min(useful, ceil_div(threads * kBlocksPerThread, products));
  // Columns first: splitting them repeats no packing.
  const int64_t columns = ceil_div(ceil_div(n, wanted), kColumnsMin) * kColumnsMin;
  GemmGrid grid{.rows = m,
                .columns = std::clamp(columns, kColumnsMin, kColumnsMax),
                .row_blocks = 1,
                .column_blocks = 1};
  grid.column_blocks = ceil_div(n, grid.columns);
  const int64_t row_blocks = std::min(ceil_div(wanted, grid.column_blocks), m / kRowsMin);
  if (row_blocks > 1) {
    grid.rows = ceil_div(m, row_blocks);
    grid.row_blocks = ceil_div(m, grid.rows);
  }
  return grid;
}

GemmBlock block_of(const GemmBlock& product, const GemmGrid& grid, int64_t index) {
  const int64_t row = index / grid.column_blocks * grid.rows;
  const int64_t column = index % grid.column_blocks * grid.columns;
  return product.part(row, std::min(row + grid.rows, product.m), column,
                      std::min(column + grid.columns, product.n));
}

void launch(const Gemm& args, Stream& stream) {
  CHECK_OK(validate(args));
  const int outer = args.c.rank() - 2;  // 0, or 1 with a leading dimension
  const int64_t batch = outer == 0 ? 1 : args.c.size(0);
  const GemmBlock first{.m = args.c.size(outer),
                        .n = args.c.size(outer + 1),
                        .k = args.a.size(args.transpose_a ? outer : outer + 1),
                        .a = args.a.f32(),
                        .a_row = args.transpose_a ? 1 : args.a.stride(outer),
                        .a_col = args.transpose_a ? args.a.stride(outer) : 1,
                        .b = args.b.raw(),
                        .b_dtype = args.b.dtype(),
                        .ldb = args.b.stride(outer),
                        .transpose_b = args.transpose_b,
                        .c = args.c.f32(),
                        .ldc = args.c.stride(outer),
                        .bias = args.bias.empty() ? nullptr : args.bias.f32(),
                        .accumulate = args.accumulate};
  if (batch == 0 || first.m == 0 || first.n == 0) return;
  const GemmGrid grid = gemm_grid(first.m, first.n, first.k, batch, stream.threads());
  const int64_t block_work = gemm_work(grid.rows, grid.columns, first.k);
  const int64_t grain = std::max<int64_t>(kGemmTinyWork / block_work, 1);
  stream.parallel_for(batch * grid.blocks(), grain, [&](int64_t begin, int64_t end, Worker& worker) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t index = i / grid.blocks();
      GemmBlock product = first;
      if (outer == 1) {
        product.a += index * args.a.stride(0);
        product.b = static_cast<const char*>(first.b) + index * args.b.stride(0) * size_of(first.b_dtype);
        product.c += index * args.c.stride(0);
      }
      worker.reset();
      run(block_of(product, grid, i % grid.blocks()), worker);
    }
  });
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
