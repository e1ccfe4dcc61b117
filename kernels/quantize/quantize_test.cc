// Goal: all 256 codes have the value of their definition, and values become the nearest; every block has its
// own scale, with the largest value at 448, for shapes that the blocks do not divide, of zeros, tiny and huge
// values; launch() equals reference(); a wrong block or shape is refused.
#include "kernels/quantize/quantize.h"

#include <bit>
#include <cmath>
#include <limits>

#include "kernels/e4m3.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

TEST(E4m3Test, AllCodes) {
  for (int code = 0; code < 256; ++code) {
    const float actual = to_f32(e4m3{static_cast<uint8_t>(code)});
    if (code == 0x7f || code == 0xff) {
      EXPECT_TRUE(std::isnan(actual));
      continue;
    }
    const int exponent = (code >> 3) & 15;
    const double significand = (exponent == 0 ? 0.0 : 1.0) + (code & 7) / 8.0;
    const double magnitude = significand * std::pow(2.0, std::max(exponent, 1) - 7);
    const float expected = static_cast<float>(code >= 128 ? -magnitude : magnitude);
    EXPECT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << code;
  }
  // Values of the paper's table 1.
  EXPECT_EQ(to_f32(e4m3{0x7e}), 448.0f);
  EXPECT_EQ(to_f32(e4m3{0x08}), 0x1p-6f);
  EXPECT_EQ(to_f32(e4m3{0x07}), 0.875f * 0x1p-6f);
  EXPECT_EQ(to_f32(e4m3{0x01}), 0x1p-9f);
}

TEST(E4m3Test, RoundsToNearestAndTiesToEven) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = kE4m3Values[static_cast<size_t>(code)],
                high = kE4m3Values[static_cast<size_t>(code + 1)];
    const float middle = (low + high) / 2;  // exact in f32
    for (const bool negative : {false, true}) {
      const auto expect = [&](float value, int expected) {
        EXPECT_EQ(to_e4m3(negative ? -value : value).bits, expected + (negative ? 0x80 : 0)) << value;
      };
      expect(low, code);
      expect(std::nextafter(middle, 0.0f), code);
      expect(middle, code % 2 == 0 ? code : code + 1);
      expect(std::nextafter(middle, kE4m3Largest), code + 1);
    }
  }
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_e4m3(500.0f).bits, 0x7e);
  EXPECT_EQ(to_e4m3(-inf).bits, 0xfe);
  EXPECT_EQ(to_e4m3(std::numeric_limits<float>::quiet_NaN()).bits, 0x7f);
  EXPECT_TRUE(std::isnan(to_f32(e4m3{0x7f})));
}

struct Case {
  int64_t rows, columns, block_rows;
};

TEST(QuantizeTest, BlocksHaveTheirOwnScales) {
  for (const Case c : {Case{1, 1, 1},
                       {3, 128, 1},
                       {5, 300, 1},
                       {128, 128, 128},
                       {130, 300, 128},
                       {0, 64, 1},
                       {300, 70, 128}}) {
    for (const DType dtype : {DType::kF32, DType::kBf16}) {
      SCOPED_TRACE(absl::StrCat(c.rows, " x ", c.columns, " by ", c.block_rows));
      TensorPool pool(1);
      const int64_t scale_rows = (c.rows + c.block_rows - 1) / c.block_rows,
                    scale_columns = (c.columns + 127) / 128;
      const Quantize args{
          .x = pool.random(dtype, {c.rows, c.columns + 3}, -5.0f, 5.0f).slice(1, 2, c.columns + 2),
          .codes = pool.output(DType::kF8E4M3, {c.rows, c.columns}),
          .scales = pool.output(DType::kF32, {scale_rows, scale_columns}),
          .block_rows = c.block_rows};
      launch(args, test_stream());
      Quantize expected = args;
      expected.codes = pool.output(DType::kF8E4M3, {c.rows, c.columns});
      expected.scales = pool.output(DType::kF32, {scale_rows, scale_columns});
      reference(expected);
      testing::expect_same_bits(args.codes, expected.codes);
      testing::expect_same_bits(args.scales, expected.scales);
      // Half of the last of three mantissa bits, or half of the smallest step where the code is below 2^-6.
      std::vector<float> largest(static_cast<size_t>(scale_rows * scale_columns), 0.0f);
      for (int64_t row = 0; row < c.rows; ++row) {
        for (int64_t column = 0; column < c.columns; ++column) {
          const int64_t at = row * args.x.stride(0) + column;
          const float x = dtype == DType::kBf16 ? to_f32(args.x.bf()[at]) : args.x.f32()[at];
          const float scale = args.scales.row(row / c.block_rows)[column / 128];
          const float code = to_f32(args.codes.data<e4m3>()[row * c.columns + column]);
          EXPECT_LE(std::abs(code * scale - x), std::max(std::abs(x) / 16, scale * 0x1p-10f) * 1.0001f);
          float& most = largest[static_cast<size_t>(row / c.block_rows * scale_columns + column / 128)];
          most = std::max(most, std::abs(code));
        }
      }
      for (const float most : largest) EXPECT_EQ(most, kE4m3Largest);
      pool.expect_fences_intact();
    }
  }
}

TEST(QuantizeTest, ZerosTinyAndHugeValues) {
  TensorPool pool(2);
  const Tensor x = pool.zeros(DType::kF32, {4, 128});
  for (int64_t i = 0; i < 128; ++i) {
    x.row(1)[i] = 1e-40f;
    x.row(2)[i] = i == 5 ? -3e38f : 1e38f;
    x.row(3)[i] = i == 7 ? std::numeric_limits<float>::quiet_NaN() : 1.0f;
  }
  const Quantize args{
      .x = x, .codes = pool.output(DType::kF8E4M3, {4, 128}), .scales = pool.output(DType::kF32, {4, 1})};
  reference(args);
  const e4m3* const codes = args.codes.data<e4m3>();
  for (int64_t row = 0; row < 4; ++row)
    EXPECT_TRUE(std::isfinite(args.scales.row(row)[0]) && args.scales.row(row)[0] > 0);
  for (int64_t i = 0; i < 128; ++i) {
    EXPECT_EQ(codes[i].bits, 0);
    EXPECT_EQ(codes[128 + i].bits, 0);
    EXPECT_NEAR(to_f32(codes[256 + i]) * args.scales.row(2)[0], x.row(2)[i], 1e37f);
    EXPECT_EQ(codes[384 + i].bits, i == 7 ? 0x7f : 0x7e);
  }
}

// What a checkpoint in FP8 goes through on its way to a worker: values rounded to bf16 get their codes back.
TEST(QuantizeTest, CodesSurviveBf16) {
  TensorPool pool(5);
  const int64_t rows = 256, columns = 384;
  const Quantize first{pool.random(DType::kF32, {rows, columns}),
                       pool.output(DType::kF8E4M3, {rows, columns}), pool.output(DType::kF32, {2, 3}), 128};
  reference(first);
  const Tensor values = pool.zeros(DType::kBf16, {rows, columns});
  for (int64_t i = 0; i < rows * columns; ++i) {
    const float scale = first.scales.row(i / columns / 128)[i % columns / 128];
    values.bf()[i] = to_bf16(to_f32(first.codes.data<e4m3>()[i]) * scale);
  }
  const Quantize again{values, pool.output(DType::kF8E4M3, {rows, columns}), pool.output(DType::kF32, {2, 3}),
                       128};
  reference(again);
  testing::expect_same_bits(again.codes, first.codes);
}

TEST(QuantizeTest, ExpertsAreMatrices) {
  TensorPool pool(3);
  const Quantize args{.x = pool.random(DType::kBf16, {3, 130, 140}),
                      .codes = pool.output(DType::kF8E4M3, {3, 130, 140}),
                      .scales = pool.output(DType::kF32, {3, 2, 2}),
                      .block_rows = 128};
  launch(args, test_stream());
  for (int64_t e = 0; e < 3; ++e) {
    const Quantize one{args.x[e], pool.output(DType::kF8E4M3, {130, 140}), pool.output(DType::kF32, {2, 2}),
                       128};
    reference(one);
    testing::expect_same_bits(args.codes[e], one.codes);
    testing::expect_same_bits(args.scales[e], one.scales);
  }
}

TEST(QuantizeTest, RefusesWrongArguments) {
  TensorPool pool(4);
  Quantize args{.x = pool.zeros(DType::kF32, {3, 200}),
                .codes = pool.zeros(DType::kF8E4M3, {3, 200}),
                .scales = pool.zeros(DType::kF32, {3, 2}),
                .block_rows = 2};
  EXPECT_EQ(validate(args).message(), "quantize: block_rows must be 1 or 128");
  args.block_rows = 128;
  EXPECT_EQ(validate(args).message(), "quantize: scales: f32 [3, 2], expected f32 [1, 2]");
  args.codes = args.x;
  EXPECT_EQ(validate(args).message(), "quantize: codes: f32 [3, 200], expected f8_e4m3 [3, 200]");
}

}  // namespace
}  // namespace slipstream::kernels
