#include "model/fp8.h"

#include <algorithm>
#include <cmath>

#include "kernels/bf16.h"
#include "kernels/e4m3.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;

void store(float value, float* out) { *out = value; }
void store(float value, bf16* out) { *out = kernels::to_bf16(value); }

template <class T>
void dequantize_to(const Fp8Blocks& blocks, T* out, int64_t row_stride) {
  const int64_t scale_cols = blocks.scale_cols();
  for (int64_t row = 0; row < blocks.rows; ++row) {
    const uint8_t* codes = blocks.codes + row * blocks.cols;
    const float* scales = blocks.scales + row / blocks.block_rows * scale_cols;
    for (int64_t block = 0; block < scale_cols; ++block) {
      const int64_t begin = block * blocks.block_cols;
      const int64_t count = std::min(blocks.block_cols, blocks.cols - begin);
      const float scale = scales[block];
      T* to = out + row * row_stride + begin;
      for (int64_t i = 0; i < count; ++i) store(kernels::kE4m3Values[codes[begin + i]] * scale, to + i);
    }
  }
}

bool all_zero(const Fp8Blocks& blocks, int64_t scale_row, int64_t scale_col) {
  const int64_t row_begin = scale_row * blocks.block_rows;
  const int64_t row_end = row_begin + std::min(blocks.block_rows, blocks.rows - row_begin);
  const int64_t col_begin = scale_col * blocks.block_cols;
  const int64_t col_end = col_begin + std::min(blocks.block_cols, blocks.cols - col_begin);
  for (int64_t row = row_begin; row < row_end; ++row) {
    for (int64_t col = col_begin; col < col_end; ++col) {
      if ((blocks.codes[row * blocks.cols + col] & 0x7f) != 0) return false;
    }
  }
  return true;
}

}  // namespace

BadScale find_bad_scale(const Fp8Blocks& blocks) {
  const int64_t scale_rows = blocks.scale_rows();
  const int64_t scale_cols = blocks.scale_cols();
  for (int64_t row = 0; row < scale_rows; ++row) {
    for (int64_t col = 0; col < scale_cols; ++col) {
      const float scale = blocks.scales[row * scale_cols + col];
      const bool good = std::isfinite(scale) && (scale > 0 || all_zero(blocks, row, col));
      if (!good) return {.found = true, .row = row, .col = col, .scale = scale};
    }
  }
  return {};
}

void dequantize(const Fp8Blocks& blocks, const kernels::Tensor& dst) {
  CHECK(dst.has_shape({blocks.rows, blocks.cols}));
  CHECK(blocks.block_rows > 0 && blocks.block_cols > 0);
  if (dst.dtype() == DType::kBf16) return dequantize_to(blocks, dst.bf(), dst.stride(0));
  dequantize_to(blocks, dst.f32(), dst.stride(0));
}

}  // namespace slipstream::model
