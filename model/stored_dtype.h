// The element types of safetensors files, as the format spells them, and their conversion to tensor dtypes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "absl/types/span.h"
#include "kernels/tensor.h"

namespace slipstream::model {

// Every type of the format with whole bytes. F4 and F6 pack elements across bytes: they are unknown here.
enum class StoredDType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kF8E4M3Fnuz,
  kF8E5M2Fnuz,
  kI16,
  kU16,
  kF16,
  kBf16,
  kI32,
  kU32,
  kF32,
  kC64,
  kF64,
  kI64,
  kU64,
};

int64_t size_of(StoredDType dtype);      // bytes of one element
const char* name_of(StoredDType dtype);  // "F32", "BF16", "F8_E4M3", ...
std::optional<StoredDType> parse_stored_dtype(std::string_view name);
StoredDType stored_as(kernels::DType dtype);  // the stored type with the same bits

std::string describe_shape(absl::Span<const int64_t> shape);  // "[3, 64]"; "[]" is a scalar
std::string printable(std::string_view name);  // for messages: control bytes as \x0a, at most 200 bytes

// The conversions that exist: F32, BF16, F16 -> f32, bf16; and I32 -> i32, F8_E4M3 -> f8_e4m3 (bytes copied).
bool can_convert(StoredDType from, kernels::DType to);
// `in` is little-endian and need not be aligned; `in` and `out` do not overlap. Rounds to nearest, ties to
// even; NaN stays NaN, infinities and subnormals are kept. Dies unless can_convert(from, to).
void convert(StoredDType from, const std::byte* in, kernels::DType to, void* out, int64_t count);

float f16_to_f32(uint16_t bits);  // IEEE binary16; exact

}  // namespace slipstream::model
