#include "model/fp8.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "kernels/bf16.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;

constexpr float decode(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const uint32_t exponent = (code >> 3) & 0xfu;
  const uint32_t mantissa = code & 7u;
  if (exponent == 15 && mantissa == 7) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) / 512.0f;  // mantissa / 8 * 2^-6
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 127 - 7) << 23) | (mantissa << 20));
}

constexpr std::array<float, 256> kValues = [] {
  std::array<float, 256> values{};
  for (size_t code = 0; code < values.size(); ++code) values[code] = decode(static_cast<uint8_t>(code));
  return values;
}();

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
      for (int64_t i = 0; i < count; ++i) store(kValues[codes[begin + i]] * scale, to + i);
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

float e4m3_to_f32(uint8_t code) { return kValues[code]; }

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
