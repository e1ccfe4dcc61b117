// FP8 weights with block scales: value = e4m3(code) * scale[row / block_rows, column / block_cols]; e4m3 as
// kernels/e4m3.h has it.
#pragma once

#include <cstdint>

#include "kernels/tensor.h"

namespace slipstream::model {

struct Fp8Blocks {
  const uint8_t* codes;  // [rows, cols], dense
  int64_t rows;
  int64_t cols;
  const float* scales;  // [ceil(rows / block_rows), ceil(cols / block_cols)], dense
  int64_t block_rows;   // > 0
  int64_t block_cols;   // > 0

  int64_t scale_rows() const { return rows / block_rows + (rows % block_rows != 0); }
  int64_t scale_cols() const { return cols / block_cols + (cols % block_cols != 0); }
};

// A block whose scale no quantiser writes: NaN, an infinity, or, where the block holds any code but +0 and
// -0, a scale that is not above zero. An all-zero block is zeros under every finite scale.
struct BadScale {
  bool found = false;
  int64_t row = 0;  // of the scale tensor
  int64_t col = 0;
  float scale = 0;
};
BadScale find_bad_scale(const Fp8Blocks& blocks);

// The fp32 product, rounded to dst's dtype (f32 or bf16; to nearest, ties to even); the code NaN gives NaN.
// dst is [rows, cols] and may be strided.
void dequantize(const Fp8Blocks& blocks, const kernels::Tensor& dst);

}  // namespace slipstream::model
