#include <algorithm>
#include <array>

#include "kernels/gemm/gemm_block.h"
#include "kernels/grouped_gemm/grouped_gemm.h"

#include "kernels/launch_cuda.h"

namespace slipstream::kernels {
namespace {

// Experts whose blocks are handed out together: a bound for the list on the stack, above any published
// model's count.
constexpr size_t kExpertsAtOnce = 512;

// One expert's product, and the index of its first block among all of the list.
struct ExpertProduct {
  int64_t expert;
  int64_t rows;
  GemmGrid grid;
  int64_t first_block;
};

// Runs product_of(expert), cut into blocks, for each expert that has rows. shape_of(rows) is the {m, n, k} of
// an expert's product. Threads take blocks one by one, the largest products first: few large ones must not be
// left for the end.
template <class ShapeOf, class ProductOf>
void run_experts(const int32_t* row_begin, int64_t experts, Stream& stream, ShapeOf&& shape_of,
                 ProductOf&& product_of) {
  int64_t active_experts = 0;
  for (int64_t e = 0; e < experts; ++e) active_experts += row_begin[e + 1] > row_begin[e] ? 1 : 0;
  std::array<ExpertProduct, kExpertsAtOnce> products;
  for (int64_t e = 0; e < experts;) {
    size_t count = 0;
    for (; e < experts && count < kExpertsAtOnce; ++e) {
      const int64_t rows = row_begin[e + 1] - row_begin[e];
      if (rows == 0) continue;
      const auto [m, n, k] = shape_of(rows);
      products[count++] = {.expert = e,
                           .rows = rows,
                           .grid = gemm_grid(m, n, k, active_experts, stream.threads()),
                           .first_block = 0};
    }
    const auto end = products.begin() + static_cast<std::ptrdiff_t>(count);
    std::sort(products.begin(), end, [](const ExpertProduct& a, const ExpertProduct& b) {
      return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
    });
    int64_t blocks = 0, work = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto [m, n, k] = shape_of(products[i].rows);
      products[i].first_block = blocks;
      blocks += products[i].grid.blocks();
      work += gemm_work(m, n, k);
    }
    if (blocks == 0) continue;
    const int64_t grain = std::max<int64_t>(kGemmTinyWork * blocks / std::max<int64_t>(work, 1), 1);
    stream.parallel_for(blocks, grain, [&](int64_t begin, int64_t block_end, Worker& worker) {
      const auto after =
          std::upper_bound(products.begin(), end, begin,
                           [](int64_t block, const ExpertProduct& p) { return block < p.first_block; });
      const ExpertProduct* product = &*after - 1;
      for (int64_t block = begin; block < block_end; ++block) {
        if (block - product->first_block == product->grid.blocks()) ++product;
        worker.reset();
        run(block_of(product_of(product->expert), product->grid, block - product->first_block), worker);
      }
    });
  }
}

struct Shape {
  int64_t m, n, k;
};

}  // namespace

void launch(const GroupedGemm& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t n = args.y.size(1), k = args.x.size(1);
  if (n == 0) return;
  const int32_t* row_begin = args.row_begin.i32();
  const bool in_panels = !args.w_panels.empty();
  const Tensor& w = in_panels ? args.w_panels : args.w;
  const GemmLayout layout = in_panels          ? GemmLayout::kPanels
                            : args.transpose_w ? GemmLayout::kTransposed
                                               : GemmLayout::kRows;
  run_experts(
      row_begin, args.w.size(0), stream,
      [&](int64_t rows) {
        return Shape{rows, n, k};
      },
      [&](int64_t e) {
        return GemmBlock{
            .m = row_begin[e + 1] - row_begin[e],
            .n = n,
            .k = k,
            .a = args.x.row(row_begin[e]),
            .a_row = args.x.stride(0),
            .a_col = 1,
            .b = static_cast<const char*>(w.raw()) + e * w.stride(0) * size_of(w.dtype()),
            .b_dtype = w.dtype(),
            .b_layout = layout,
            .ldb = args.w.stride(1),
            .c = args.y.row(row_begin[e]),
            .ldc = args.y.stride(0),
            .bias = nullptr,
            .accumulate = false};
      });
}

void launch(const GroupedWeightGrad& args, Stream& stream) {
  CHECK_OK(validate(args));
  if (stream.on_cuda()) return launch_cuda(args, stream);
  const int64_t n = args.dy.size(1), k = args.x.size(1);
  if (n == 0 || k == 0) return;
  const int32_t* row_begin = args.row_begin.i32();
  run_experts(
      row_begin, args.dw.size(0), stream,
      [&](int64_t rows) {
        return Shape{n, k, rows};
      },
      [&](int64_t e) {
        return GemmBlock{.m = n,
                         .n = k,
                         .k = row_begin[e + 1] - row_begin[e],
                         .a = args.dy.row(row_begin[e]),
                         .a_row = 1,
                         .a_col = args.dy.stride(0),
                         .b = args.x.row(row_begin[e]),
                         .b_dtype = DType::kF32,
                         .b_layout = GemmLayout::kRows,
                         .ldb = args.x.stride(0),
                         .c = args.dw.f32() + e * args.dw.stride(0),
                         .ldc = args.dw.stride(1),
                         .bias = nullptr,
                         .accumulate = true};
      });
}

}  // namespace slipstream::kernels
