// Goal: block scales fall on the right elements for shapes that the blocks do not divide, and into strided
// tensors; a scale that no quantiser writes is found.
#include "model/fp8.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/e4m3.h"
#include "kernels/testing/op_test.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;
using kernels::testing::TensorPool;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Matrix {
  std::vector<uint8_t> codes;
  std::vector<float> scales;
  Fp8Blocks blocks;
};

Matrix random_matrix(int64_t rows, int64_t cols, int64_t block_rows, int64_t block_cols) {
  Matrix m;
  m.blocks = {.codes = nullptr,
              .rows = rows,
              .cols = cols,
              .scales = nullptr,
              .block_rows = block_rows,
              .block_cols = block_cols};
  for (int64_t i = 0; i < rows * cols; ++i) {
    const uint8_t code = static_cast<uint8_t>((i * 2654435761u) >> 7);
    m.codes.push_back((code & 0x7f) == 0x7f ? 0 : code);
  }
  const int64_t scale_rows = (rows + block_rows - 1) / block_rows;
  const int64_t scale_cols = (cols + block_cols - 1) / block_cols;
  for (int64_t i = 0; i < scale_rows * scale_cols; ++i)
    m.scales.push_back(0.001f * static_cast<float>(i + 1));
  m.blocks.codes = m.codes.data();
  m.blocks.scales = m.scales.data();
  return m;
}

class Fp8ShapeTest : public ::testing::TestWithParam<std::tuple<int64_t, int64_t, int64_t, int64_t>> {};

TEST_P(Fp8ShapeTest, EachElementHasItsBlocksScale) {
  const auto [rows, cols, block_rows, block_cols] = GetParam();
  const Matrix m = random_matrix(rows, cols, block_rows, block_cols);
  ASSERT_FALSE(find_bad_scale(m.blocks).found);
  TensorPool pool(1);
  const Tensor wide = pool.output(DType::kF32, {rows, cols + 5});
  const Tensor narrow = pool.output(DType::kBf16, {rows, cols});
  dequantize(m.blocks, wide.slice(1, 2, cols + 2));
  dequantize(m.blocks, narrow);
  const int64_t scale_cols = (cols + block_cols - 1) / block_cols;
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t col = 0; col < cols; ++col) {
      const size_t code = static_cast<size_t>(row * cols + col);
      const size_t block = static_cast<size_t>(row / block_rows * scale_cols + col / block_cols);
      const float expected = to_f32(kernels::e4m3{m.codes[code]}) * m.scales[block];
      ASSERT_EQ(wide.row(row)[col + 2], expected) << row << " " << col;
      ASSERT_EQ(narrow.bf()[row * cols + col], kernels::to_bf16(expected)) << row << " " << col;
    }
    for (const int64_t outside : {int64_t{0}, int64_t{1}, cols + 2, cols + 4}) {
      ASSERT_TRUE(std::isnan(wide.row(row)[outside]));
    }
  }
  pool.expect_fences_intact();
}

INSTANTIATE_TEST_SUITE_P(Shapes, Fp8ShapeTest,
                         ::testing::Combine(::testing::Values(0, 1, 128, 130),
                                            ::testing::Values(0, 1, 127, 257), ::testing::Values(1, 128),
                                            ::testing::Values(3, 128)));

TEST(Fp8Test, NanCodesStayNan) {
  const uint8_t codes[] = {0x7f, 0xff, 0x38};
  const float scale = 2;
  float out[3];
  dequantize({.codes = codes, .rows = 1, .cols = 3, .scales = &scale, .block_rows = 128, .block_cols = 128},
             Tensor(out, DType::kF32, {1, 3}));
  EXPECT_TRUE(std::isnan(out[0]));
  EXPECT_TRUE(std::isnan(out[1]));
  EXPECT_EQ(out[2], 2.0f);
}

TEST(Fp8Test, FindsBadScales) {
  Matrix m = random_matrix(5, 7, 2, 3);  // 3 x 3 blocks
  const size_t block = 1 * 3 + 2;
  for (const float scale : {kNan, kInf, -kInf, 0.0f, -0.0f, -1.0f}) {
    m.scales[block] = scale;
    const BadScale bad = find_bad_scale(m.blocks);
    ASSERT_TRUE(bad.found) << scale;
    EXPECT_EQ(bad.row, 1);
    EXPECT_EQ(bad.col, 2);
    EXPECT_EQ(std::bit_cast<uint32_t>(bad.scale), std::bit_cast<uint32_t>(scale));
  }
  // The block's one column, rows 2 and 3.
  m.codes[2 * 7 + 6] = 0x80;
  m.codes[3 * 7 + 6] = 0x00;
  for (const float scale : {0.0f, -0.0f, -1.0f, 3.0f}) {
    m.scales[block] = scale;
    EXPECT_FALSE(find_bad_scale(m.blocks).found) << scale;
    std::vector<float> out(35);
    dequantize(m.blocks, Tensor(out.data(), DType::kF32, {5, 7}));
    EXPECT_EQ(out[2 * 7 + 6], 0.0f);
    EXPECT_EQ(out[3 * 7 + 6], 0.0f);
  }
  for (const float scale : {kNan, kInf}) {
    m.scales[block] = scale;
    EXPECT_TRUE(find_bad_scale(m.blocks).found) << scale;
  }
}

}  // namespace
}  // namespace slipstream::model
