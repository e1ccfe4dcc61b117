// Goal: launch() equals reference() bit for bit for experts with none, one or many rows, in both forms, from
// panels and in both dtypes, strided and unaligned; a row ignores how the others were routed; the backward agrees with finite
// differences; a bad partition is refused.
#include "kernels/grouped_gemm/grouped_gemm.h"

#include "kernels/pack_panels/pack_panels.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

std::vector<int32_t> begins_of(const std::vector<int32_t>& rows) {
  std::vector<int32_t> begin{0};
  for (const int32_t r : rows) begin.push_back(begin.back() + r);
  return begin;
}

Tensor random_view(TensorPool& pool, int64_t rows, int64_t columns) {
  return pool.random(DType::kF32, {rows, columns + 5}).slice(1, 3, columns + 3);
}

struct Case {
  std::vector<int32_t> rows;  // of each expert
  int64_t outputs, inputs;
};

std::vector<Case> cases() {
  return {{{}, 5, 7},
          {{0, 0, 0}, 5, 7},
          {{1}, 1, 1},
          {{3, 0, 1, 25, 0}, 33, 19},
          {{0, 0, 70, 2}, 130, 47},
          {{1, 1, 0, 1, 1, 0, 0, 1}, 200, 300},
          {{7, 400, 0, 13}, 65, 40},
          {{2, 3}, 16, 0},
          {{2, 3}, 0, 16},
          {std::vector<int32_t>(600, 1), 17, 9}};  // more experts than one list holds
}

TEST(GroupedGemmTest, EqualsReference) {
  for (const Case& c : cases()) {
    const auto experts = static_cast<int64_t>(c.rows.size());
    SCOPED_TRACE(absl::StrCat(experts, " experts, ", c.outputs, " x ", c.inputs));
    for (const bool transpose_w : {true, false}) {
      for (const DType dtype : {DType::kF32, DType::kBf16}) {
        TensorPool pool(1);
        const Tensor row_begin = pool.ints({experts + 1}, begins_of(c.rows));
        const int64_t rows = row_begin.i32()[experts];
        const Tensor w =
            transpose_w ? pool.random(dtype, {experts, c.outputs, c.inputs + 3}).slice(2, 1, c.inputs + 1)
                        : pool.random(dtype, {experts, c.inputs, c.outputs + 3}).slice(2, 1, c.outputs + 1);
        GroupedGemm args{.x = random_view(pool, rows, c.inputs),
                         .w = w,
                         .row_begin = row_begin,
                         .y = pool.output(DType::kF32, {rows, c.outputs + 2}).slice(1, 1, c.outputs + 1),
                         .transpose_w = transpose_w};
        GroupedGemm expected = args;
        expected.y = pool.output(DType::kF32, {rows, c.outputs});
        launch(args, test_stream());
        reference(expected);
        testing::expect_same_bits(args.y, expected.y);
        const Tensor alone = pool.output(DType::kF32, {rows, c.outputs});
        args.y = alone;
        launch(args, testing::single_thread_stream());
        testing::expect_same_bits(alone, expected.y);
        if (transpose_w) {
          args.y = pool.output(DType::kF32, {rows, c.outputs});
          args.w_panels = pool.output(dtype, {experts, (c.outputs + 15) / 16, c.inputs, 16});
          launch(PackPanels{w, args.w_panels}, test_stream());
          launch(args, test_stream());
          testing::expect_same_bits(args.y, expected.y);
        }
        pool.expect_fences_intact();
      }
    }
  }
}

TEST(GroupedGemmTest, WeightGradEqualsReference) {
  for (const Case& c : cases()) {
    const auto experts = static_cast<int64_t>(c.rows.size());
    SCOPED_TRACE(absl::StrCat(experts, " experts, ", c.outputs, " x ", c.inputs));
    TensorPool pool(2);
    const Tensor row_begin = pool.ints({experts + 1}, begins_of(c.rows));
    const int64_t rows = row_begin.i32()[experts];
    const Tensor dw = pool.random(DType::kF32, {experts, c.outputs, c.inputs + 3}).slice(2, 1, c.inputs + 1);
    GroupedWeightGrad args{.dy = random_view(pool, rows, c.outputs),
                           .x = random_view(pool, rows, c.inputs),
                           .row_begin = row_begin,
                           .dw = dw};
    GroupedWeightGrad expected = args;
    expected.dw = pool.copy(dw);
    launch(args, test_stream());
    reference(expected);
    testing::expect_same_bits(args.dw, expected.dw);
    pool.expect_fences_intact();
  }
}

// The same token, with the same expert, among 40 others or alone.
TEST(GroupedGemmTest, RowIgnoresItsNeighbours) {
  TensorPool pool(3);
  const Tensor w = pool.random(DType::kBf16, {3, 90, 130});
  const Tensor x = pool.random(DType::kF32, {41, 130});
  const Tensor together = pool.output(DType::kF32, {41, 90});
  launch(GroupedGemm{.x = x, .w = w, .row_begin = pool.ints({4}, {0, 8, 8, 41}), .y = together},
         test_stream());
  for (int64_t t = 0; t < 41; ++t) {
    const Tensor alone = pool.output(DType::kF32, {1, 90});
    const std::vector<int32_t> begin =
        t < 8 ? std::vector<int32_t>{0, 1, 1, 1} : std::vector<int32_t>{0, 0, 0, 1};
    launch(GroupedGemm{.x = x.slice(0, t, t + 1), .w = w, .row_begin = pool.ints({4}, begin), .y = alone},
           testing::single_thread_stream());
    testing::expect_same_bits(alone, together.slice(0, t, t + 1));
  }
}

TEST(GroupedGemmTest, GradientsAreTheDerivative) {
  TensorPool pool(4);
  const Tensor x = pool.random(DType::kF32, {9, 11}), w = pool.random(DType::kF32, {4, 6, 11});
  const Tensor row_begin = pool.ints({5}, {0, 2, 2, 8, 9});
  const Tensor y = pool.output(DType::kF32, {9, 6}), dy = pool.random(DType::kF32, {9, 6});
  const auto loss = [&] {
    launch(GroupedGemm{.x = x, .w = w, .row_begin = row_begin, .y = y}, test_stream());
    return testing::dot(y, dy);
  };
  const Tensor dx = pool.output(DType::kF32, {9, 11}), dw = pool.zeros(DType::kF32, {4, 6, 11});
  launch(GroupedGemm{.x = dy, .w = w, .row_begin = row_begin, .y = dx, .transpose_w = false}, test_stream());
  launch(GroupedWeightGrad{.dy = dy, .x = x, .row_begin = row_begin, .dw = dw}, test_stream());
  testing::expect_gradient(loss, x, dx);
  testing::expect_gradient(loss, w, dw);
}

TEST(GroupedGemmTest, RefusesByName) {
  TensorPool pool(5);
  const Tensor x = pool.random(DType::kF32, {4, 8}), w = pool.random(DType::kBf16, {2, 3, 8});
  const Tensor y = pool.output(DType::kF32, {4, 3}), dw = pool.zeros(DType::kF32, {2, 3, 8});
  const auto with = [&](std::vector<int32_t> begin) {
    const auto size = static_cast<int64_t>(begin.size());
    return GroupedGemm{.x = x, .w = w, .row_begin = pool.ints({size}, begin), .y = y};
  };
  EXPECT_TRUE(validate(with({0, 1, 4})).ok());
  EXPECT_EQ(validate(with({0, 4})).message(), "grouped_gemm: row_begin: i32 [2], expected i32 [3]");
  for (const std::vector<int32_t>& begin :
       {std::vector<int32_t>{0, 5, 4}, {0, 1, 3}, {1, 2, 4}, {0, -1, 4}}) {
    EXPECT_EQ(validate(with(begin)).message(),
              "grouped_gemm: row_begin must ascend from 0 to the number of rows");
  }
  GroupedGemm args = with({0, 1, 4});
  args.transpose_w = false;
  EXPECT_EQ(validate(args).message(), "grouped_gemm: w: bf16 [2, 3, 8], expected f32 or bf16 [*, 8, 3]");
  EXPECT_EQ(validate(GroupedWeightGrad{.dy = y, .x = x, .row_begin = args.row_begin, .dw = dw.slice(1, 0, 2)})
                .message(),
            "grouped_weight_grad: dw: f32 [2, 2, 8], expected f32 [*, 3, 8]");
}

}  // namespace
}  // namespace slipstream::kernels
