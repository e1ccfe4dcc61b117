#include "kernels/gemm/gemm.h"

#include "kernels/launch_cuda.h"
#include "kernels/gemm/gemm_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/gemm_simd.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/block_gemm-inl.h"
#include "kernels/simd/transpose-inl.h"

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
// A transposed left factor is packed for this many rows of c at a time (a multiple of 16): each k is a page
// of its own, and should give more than one cache line.
constexpr int64_t kLeftRows = 48;
// Every strip reads an unpacked b again: good for few strips, or when b stays in L1.
constexpr int64_t kInPlaceRows = 2 * kTileRows;
constexpr int64_t kInPlaceValues = 8192;
// More strips than these read panels from scratch, where no two of them lie a power of two apart.
constexpr int64_t kPanelRows = 8 * kTileRows;

void add_bias(const GemmBlock& g) {
  for (int64_t i = 0; i < g.m; ++i) {
    float* c = g.c + i * g.ldc;
    for_lanes(g.n, [&](int64_t j, auto chunk)
                       HWY_ATTR { chunk.store(add(chunk.load(c + j), chunk.load(g.bias + j)), c + j); });
  }
}

// out[k, n] (row stride ldo, sixteen columns every `panel` values) = b[k, n] as fp32, columns n.. of the last
// sixteen zero.
template <class TB>
HWY_INLINE void pack_rows(int64_t n, int64_t k, const TB* b, int64_t ldb, float* out, int64_t ldo,
                          int64_t panel) {
  for (int64_t i = 0; i < k; ++i, b += ldb, out += ldo) {
    float* to = out;
    for_lanes(n, [&](int64_t j, auto chunk) HWY_ATTR {
      store(chunk.load(b + j), to);
      to += panel;
    });
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

// b is in panels already (PackPanels): few rows read them where they are.
template <class TB>
void multiply_panels(const GemmBlock& g, const TB* b) {
  const RightFactor<TB> right{b, kLanes, kLanes * g.k};
  // One strip of rows reads a panel once, at any depth; several read it again from L1.
  const int64_t depth = g.m <= kTileRows ? g.k : kStreamedDepth;
  const int64_t width = g.m <= kTileRows ? g.n : kTileColumns;
  for (int64_t j = 0; j < g.n; j += width) {
    for (int64_t k = 0; k < g.k; k += depth) {
      RightFactor<TB> part = right.from_column(j);
      part.data += k * kLanes;
      for_row_strips(g.m, [&](int64_t row, int64_t rows) HWY_ATTR {
        block_gemm_strip(rows, std::min(width, g.n - j), std::min(depth, g.k - k),
                         LeftFactor{g.a + row * g.a_row + k * g.a_col, g.a_row, g.a_col}, part,
                         g.c + row * g.ldc + j, g.ldc, g.accumulate || k > 0);
      });
    }
  }
}

template <class TB>
void multiply_packed(const GemmBlock& g, const TB* b, Worker& worker) {
  const bool streamed = g.m <= kStreamedRows;
  const int64_t width = g.m <= kWideRows ? kWideColumns : kTileColumns;
  const int64_t depth = std::min(g.k, streamed ? kStreamedDepth : kPackedDepth);
  const int64_t columns_at_once = streamed ? width : g.n;
  // Panels of sixteen columns, each [depth x 16].
  float* panels = worker.scratch<float>((columns_at_once + kLanes - 1) / kLanes * kLanes * depth);
  const RightFactor<float> right{panels, kLanes, kLanes * depth};
  float* left = g.a_col == 1 ? nullptr : worker.scratch<float>(kLeftRows * depth);
  for (int64_t column = 0; column < g.n; column += columns_at_once) {
    const int64_t column_end = std::min(column + columns_at_once, g.n);
    for (int64_t k = 0; k < g.k; k += depth) {
      const int64_t count = std::min(depth, g.k - k);
      switch (g.b_layout) {
        case GemmLayout::kRows:
          // Four panels at a time: whole pieces of rows, and no more lines to write to than the cache has ways.
          for (int64_t j = column; j < column_end; j += kWideColumns) {
            pack_rows(std::min(kWideColumns, column_end - j), count, b + k * g.ldb + j, g.ldb,
                      panels + (j - column) * depth, kLanes, right.panel);
          }
          break;
        case GemmLayout::kTransposed:
          for (int64_t j = column; j < column_end; j += kLanes) {
            const TB* next = k + depth < g.k ? b + j * g.ldb + k + depth : b + (j + columns_at_once) * g.ldb;
            pack_transposed(std::min(kLanes, column_end - j), count, b + j * g.ldb + k, g.ldb,
                            panels + (j - column) * depth, kLanes, next);
          }
          break;
        case GemmLayout::kPanels:
          for (int64_t j = column; j < column_end; j += kLanes) {
            pack_rows(kLanes, count, b + j * g.k + k * kLanes, kLanes, panels + (j - column) * depth, kLanes,
                      right.panel);
          }
          break;
      }
      const auto multiply_rows = [&](int64_t row, int64_t rows, LeftFactor a) HWY_ATTR {
        for_row_strips(rows, [&](int64_t first, int64_t height) HWY_ATTR {
          const LeftFactor strip{a.data + first * a.row, a.row, a.col};
          float* c = g.c + (row + first) * g.ldc;
          block_gemm_strip(height, column_end - column, count, strip, right, c + column, g.ldc,
                           g.accumulate || k > 0);
        });
      };
      if (left == nullptr) {
        multiply_rows(0, g.m, LeftFactor{g.a + k, g.a_row, 1});
        continue;
      }
      const auto pack_and_multiply = [&](int64_t row, int64_t rows) HWY_ATTR {
        pack_rows(rows, count, g.a + row + k * g.a_col, g.a_col, left, kLeftRows, kLanes);
        multiply_rows(row, rows, LeftFactor{left, 1, kLeftRows});
      };
      for_row_strips(g.m, pack_and_multiply, kLeftRows);
    }
  }
}

template <class TB>
void multiply(const GemmBlock& g, const TB* b, Worker& worker) {
  if (g.b_layout == GemmLayout::kRows && (g.m <= kInPlaceRows || g.n * g.k <= kInPlaceValues)) {
    multiply_in_place(g, b);
  } else if (g.b_layout == GemmLayout::kPanels && g.m <= kPanelRows) {
    multiply_panels(g, b);
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
  const int64_t column = b_layout == GemmLayout::kRows ? 1 : b_layout == GemmLayout::kPanels ? k : ldb;
  out.b = static_cast<const char*>(b) + column_begin * column * size_of(b_dtype);
  out.c += row_begin * ldc + column_begin;
  if (bias != nullptr) out.bias += column_begin;
  return out;
}

namespace {
// Columns of a block: whole tiles. A product of few rows has wide ones.
constexpr int64_t kColumnsMax = 512;
int64_t columns_unit(int64_t m) { return m <= 8 ? 64 : 32; }
// Every block packs its columns of b again: with this many rows that is a few per cent.
constexpr int64_t kRowsMin = 192;
// With this many rows it costs a third: still better than a thread with nothing to do.
constexpr int64_t kRowsAtAll = 24;
// Blocks for each thread: the last one to finish holds up the others for a fraction of the whole only.
constexpr int64_t kBlocksPerThread = 4;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
}  // namespace

GemmGrid gemm_grid(int64_t m, int64_t n, int64_t k, int64_t products, int threads) {
  const int64_t useful = std::max<int64_t>(gemm_work(m, n, k) / kGemmTinyWork, 1);
  const int64_t wanted = threads == 1 ? 1 : std::min(useful, ceil_div(threads * kBlocksPerThread, products));
  // Columns first: splitting them repeats no packing. A tall product is cut into rows alone, each read once.
  const int64_t unit = columns_unit(m), column_parts = m >= wanted * kRowsMin ? 1 : wanted;
  const int64_t columns = ceil_div(ceil_div(n, column_parts), unit) * unit;
  GemmGrid grid{.rows = m,
                .columns = std::clamp(columns, unit, kColumnsMax),
                .row_blocks = 1,
                .column_blocks = 1};
  grid.column_blocks = ceil_div(n, grid.columns);
  const int64_t blocks = grid.column_blocks * products, busy = std::min<int64_t>(threads, wanted * products);
  const int64_t row_blocks = std::max(std::min(ceil_div(wanted, grid.column_blocks), m / kRowsMin),
                                      blocks < busy ? std::min(ceil_div(busy, blocks), m / kRowsAtAll) : 1);
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
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int outer = args.c.rank() - 2;  // 0, or 1 with a leading dimension
  const bool in_panels = !args.b_panels.empty();
  const Tensor& b = in_panels ? args.b_panels : args.b;
  const int64_t batch = outer == 0 ? 1 : args.c.size(0);
  const GemmBlock first{.m = args.c.size(outer),
                        .n = args.c.size(outer + 1),
                        .k = args.a.size(args.transpose_a ? outer : outer + 1),
                        .a = args.a.f32(),
                        .a_row = args.transpose_a ? 1 : args.a.stride(outer),
                        .a_col = args.transpose_a ? args.a.stride(outer) : 1,
                        .b = b.raw(),
                        .b_dtype = b.dtype(),
                        .b_layout = in_panels          ? GemmLayout::kPanels
                                    : args.transpose_b ? GemmLayout::kTransposed
                                                       : GemmLayout::kRows,
                        .ldb = args.b.stride(outer),
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
        product.b = static_cast<const char*>(first.b) + index * b.stride(0) * size_of(first.b_dtype);
        product.c += index * args.c.stride(0);
      }
      worker.reset();
      run(block_of(product, grid, i % grid.blocks()), worker);
    }
  });
}

void launch(const Gemms& args, Stream& stream) {
  if (!stream.on_cuda()) {
    for (const Gemm& product : args.products) launch(product, stream);
    return;
  }
  for (const Gemm& product : args.products) CHECK_OK(validate(product));
  launch_cuda(args, stream);
}

}  // namespace slipstream::kernels
#endif  // HWY_ONCE
