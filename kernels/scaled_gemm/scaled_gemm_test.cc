// Goal: the product of codes and scales is that of the values they stand for, dense and by expert, where
// blocks do not divide the shape; launch() equals reference(); wrong scales and a missing row_begin are
// refused.
#include "kernels/scaled_gemm/scaled_gemm.h"

#include "kernels/e4m3.h"
#include "kernels/quantize/quantize.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

int64_t blocks(int64_t n) { return (n + 127) / 128; }

double value(const Tensor& codes, const Tensor& scales, int64_t block_rows, int64_t row, int64_t k) {
  return double{to_f32(codes.data<e4m3>()[row * codes.stride(0) + k])} *
         scales.row(row / block_rows)[k / 128];
}

TEST(ScaledGemmTest, MultipliesTheValues) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1},
                                {3, 130, 300},
                                {20, 256, 128},
                                {0, 4, 4},
                                {4, 4, 0}}) {
    SCOPED_TRACE(absl::StrCat(m, " x ", n, " x ", k));
    TensorPool pool(1);
    const Quantize a{pool.random(DType::kF32, {m, k}), pool.output(DType::kF8E4M3, {m, k}),
                     pool.output(DType::kF32, {m, blocks(k)})};
    const Quantize b{pool.random(DType::kBf16, {n, k}), pool.output(DType::kF8E4M3, {n, k}),
                     pool.output(DType::kF32, {blocks(n), blocks(k)}), 128};
    reference(a);
    reference(b);
    ScaledGemm args{.a = a.codes,
                    .a_scales = a.scales,
                    .b = b.codes,
                    .b_scales = b.scales,
                    .c = pool.output(DType::kF32, {m, n})};
    launch(args, test_stream());
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = 0; j < n; ++j) {
        double sum = 0.0;
        for (int64_t l = 0; l < k; ++l)
          sum += value(a.codes, a.scales, 1, i, l) * value(b.codes, b.scales, 128, j, l);
        EXPECT_NEAR(args.c.row(i)[j], sum, 1e-5);
      }
    }
    const Tensor launched = args.c;
    args.c = pool.output(DType::kF32, {m, n});
    reference(args);
    testing::expect_same_bits(launched, args.c);
    pool.expect_fences_intact();
  }
}

TEST(ScaledGemmTest, RowsMeetTheirExperts) {
  TensorPool pool(2);
  const int64_t rows = 12, n = 140, k = 200, experts = 4;
  const Quantize a{pool.random(DType::kF32, {rows, k}), pool.output(DType::kF8E4M3, {rows, k}),
                   pool.output(DType::kF32, {rows, blocks(k)})};
  const Quantize b{pool.random(DType::kF32, {experts, n, k}), pool.output(DType::kF8E4M3, {experts, n, k}),
                   pool.output(DType::kF32, {experts, blocks(n), blocks(k)}), 128};
  reference(a);
  reference(b);
  const ScaledGemm args{.a = a.codes,
                        .a_scales = a.scales,
                        .b = b.codes,
                        .b_scales = b.scales,
                        .row_begin = pool.ints({experts + 1}, {0, 3, 3, 11, 12}),
                        .c = pool.output(DType::kF32, {rows, n})};
  launch(args, test_stream());
  for (int64_t e = 0; e < experts; ++e) {
    const int64_t begin = args.row_begin.i32()[e], end = args.row_begin.i32()[e + 1];
    const ScaledGemm one{.a = a.codes.slice(0, begin, end),
                         .a_scales = a.scales.slice(0, begin, end),
                         .b = b.codes[e],
                         .b_scales = b.scales[e],
                         .c = pool.output(DType::kF32, {end - begin, n})};
    reference(one);
    testing::expect_same_bits(args.c.slice(0, begin, end), one.c);
  }
  pool.expect_fences_intact();
}

TEST(ScaledGemmTest, RefusesWrongArguments) {
  TensorPool pool(3);
  ScaledGemm args{.a = pool.zeros(DType::kF8E4M3, {3, 200}),
                  .a_scales = pool.zeros(DType::kF32, {3, 1}),
                  .b = pool.zeros(DType::kF8E4M3, {5, 200}),
                  .b_scales = pool.zeros(DType::kF32, {1, 2}),
                  .c = pool.zeros(DType::kF32, {3, 5})};
  EXPECT_EQ(validate(args).message(), "scaled_gemm: a_scales: f32 [3, 1], expected f32 [3, 2]");
  args.a_scales = pool.zeros(DType::kF32, {3, 2});
  EXPECT_TRUE(validate(args).ok());
  args.row_begin = pool.ints({2}, {0, 3});
  EXPECT_EQ(validate(args).message(), "scaled_gemm: row_begin needs a weight for each expert");
  args.b = args.b.view({1, 5, 200});
  EXPECT_EQ(validate(args).message(), "scaled_gemm: b_scales: f32 [1, 2], expected f32 [1, 1, 2]");
}

}  // namespace
}  // namespace slipstream::kernels
