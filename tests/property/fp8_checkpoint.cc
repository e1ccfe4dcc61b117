#include "tests/property/fp8_checkpoint.h"

#include <algorithm>
#include <cmath>

#include "kernels/e4m3.h"
#include "model/checkpoint_writer.h"

namespace slipstream::model::testing {
namespace {

using kernels::DType;

Tensor view(const void* values, DType dtype, const std::vector<int64_t>& shape) {
  return Tensor(const_cast<void*>(values), dtype, shape.data(), static_cast<int>(shape.size()));
}

Fp8Stored quantized(const float* values, int64_t rows, int64_t columns, const Fp8Writing& writing) {
  const int64_t block = writing.block, scale_rows = (rows + block - 1) / block, scale_columns = (columns + block - 1) / block;
  Fp8Stored out{.rows = rows, .columns = columns, .codes = std::vector<uint8_t>(static_cast<size_t>(rows * columns)),
                .scales_shape = {scale_rows, scale_columns}, .scales = {}};
  for (int64_t i = 0; i < scale_rows * scale_columns; ++i) {
    const int64_t row = i / scale_columns * block, column = i % scale_columns * block;
    float largest = 0;
    const auto for_each = [&](const auto& visit) {
      for (int64_t r = row; r < std::min(row + block, rows); ++r) {
        for (int64_t c = column; c < std::min(column + block, columns); ++c) visit(static_cast<size_t>(r * columns + c));
      }
    };
    for_each([&](size_t at) { largest = std::max(largest, std::abs(values[at])); });
    const float scale = writing.exact ? std::exp2(std::floor(std::log2(largest / kernels::kE4m3Largest)))
                                      : largest / (150.0f + 37.0f * static_cast<float>(i % 5));
    for_each([&](size_t at) { out.codes[at] = kernels::to_e4m3(values[at] / scale).bits; });
    if (writing.exact) out.codes[static_cast<size_t>(row * columns + column)] = kernels::to_e4m3(kernels::kE4m3Largest).bits;
    out.scales.push_back(scale);
  }
  return out;
}

}  // namespace

std::map<std::string, Fp8Stored> save_fp8(const LoadedWeights& weights, const std::string& dir, const Fp8Writing& writing) {
  std::map<std::string, Fp8Stored> all;
  CheckpointWriter writer({});
  for (const WeightStore::Entry& entry : weights.store.entries()) {
    for (const FilePart& part : entry.parameter.parts) {
      const int64_t columns = entry.parameter.numel() / entry.parameter.parts.back().row_end;
      const float* const values = entry.tensor.f32() + part.row_begin * columns;
      if (!writing.in_fp8(part.name)) {
        CHECK_OK(writer.add(part.name, view(values, DType::kF32, part.shape), DType::kF32));
        continue;
      }
      CHECK_EQ(part.shape.size(), 2u);
      Fp8Stored& stored = all[part.name] = quantized(values, part.shape[0], part.shape[1], writing);
      if (writing.damage) writing.damage(part.name, stored);
      const Tensor codes = view(stored.codes.data(), DType::kF8E4M3, {stored.rows, stored.columns});
      CHECK_OK(writer.add(part.name, codes, DType::kF8E4M3));
      if (stored.scales.empty()) continue;
      const Tensor scales = view(stored.scales.data(), DType::kF32, stored.scales_shape);
      CHECK_OK(writer.add(part.name + "_scale_inv", scales, DType::kF32));
    }
  }
  nlohmann::ordered_json config = weights.config.source;
  config["quantization_config"] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"activation_scheme", "dynamic"},
                                   {"weight_block_size", {writing.block, writing.block}}};
  writer.set_config(config.dump());
  CHECK_OK(writer.save(dir));
  return all;
}

}  // namespace slipstream::model::testing
