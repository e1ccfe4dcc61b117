#include "model/stored_dtype.h"

#include <bit>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kernels/bf16.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;

static_assert(std::endian::native == std::endian::little, "safetensors data is little-endian");

struct Row {
  StoredDType dtype;
  const char* name;
  int64_t size;
};
constexpr Row kRows[] = {
    {StoredDType::kBool, "BOOL", 1},
    {StoredDType::kU8, "U8", 1},
    {StoredDType::kI8, "I8", 1},
    {StoredDType::kF8E4M3, "F8_E4M3", 1},
    {StoredDType::kF8E5M2, "F8_E5M2", 1},
    {StoredDType::kF8E8M0, "F8_E8M0", 1},
    {StoredDType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 1},
    {StoredDType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 1},
    {StoredDType::kI16, "I16", 2},
    {StoredDType::kU16, "U16", 2},
    {StoredDType::kF16, "F16", 2},
    {StoredDType::kBf16, "BF16", 2},
    {StoredDType::kI32, "I32", 4},
    {StoredDType::kU32, "U32", 4},
    {StoredDType::kF32, "F32", 4},
    {StoredDType::kC64, "C64", 8},
    {StoredDType::kF64, "F64", 8},
    {StoredDType::kI64, "I64", 8},
    {StoredDType::kU64, "U64", 8},
};

const Row& row_of(StoredDType dtype) {
  const Row& row = kRows[static_cast<size_t>(dtype)];
  CHECK(row.dtype == dtype);
  return row;
}

template <class T>
T load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

float decode(float value) { return value; }
float decode(bf16 value) { return to_f32(value); }
struct Half {
  uint16_t bits;
};
float decode(Half value) { return f16_to_f32(value.bits); }

void encode(float value, float* out) { *out = value; }
void encode(float value, bf16* out) { *out = kernels::to_bf16(value); }

template <class From, class To>
void convert_each(const std::byte* in, To* out, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    encode(decode(load<From>(in + i * static_cast<int64_t>(sizeof(From)))), out + i);
  }
}

template <class To>
void convert_float(StoredDType from, const std::byte* in, To* out, int64_t count) {
  switch (from) {
    case StoredDType::kF32:
      return convert_each<float>(in, out, count);
    case StoredDType::kBf16:
      return convert_each<bf16>(in, out, count);
    default:
      return convert_each<Half>(in, out, count);
  }
}

}  // namespace

int64_t size_of(StoredDType dtype) { return row_of(dtype).size; }
const char* name_of(StoredDType dtype) { return row_of(dtype).name; }

std::optional<StoredDType> parse_stored_dtype(std::string_view name) {
  for (const Row& row : kRows) {
    if (name == row.name) return row.dtype;
  }
  return std::nullopt;
}

StoredDType stored_as(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return StoredDType::kF32;
    case DType::kBf16:
      return StoredDType::kBf16;
    case DType::kF8E4M3:
      return StoredDType::kF8E4M3;
    case DType::kI32:
      return StoredDType::kI32;
  }
  CHECK(false);
}

std::string describe_shape(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

std::string printable(std::string_view name) {
  constexpr size_t kBytesMax = 200;
  std::string text;
  for (const char c : name.substr(0, kBytesMax)) {
    const int byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      absl::StrAppendFormat(&text, "\\x%02x", byte);
    } else {
      text += c;
    }
  }
  if (name.size() > kBytesMax) text += "...";
  return text;
}

bool can_convert(StoredDType from, DType to) {
  if (from == stored_as(to)) return true;
  const bool from_float =
      from == StoredDType::kF32 || from == StoredDType::kBf16 || from == StoredDType::kF16;
  return from_float && (to == DType::kF32 || to == DType::kBf16);
}

void convert(StoredDType from, const std::byte* in, DType to, void* out, int64_t count) {
  CHECK(can_convert(from, to));
  if (count == 0) return;
  if (from == stored_as(to)) {
    std::memcpy(out, in, static_cast<size_t>(count * size_of(from)));
  } else if (to == DType::kF32) {
    convert_float(from, in, static_cast<float*>(out), count);
  } else {
    convert_float(from, in, static_cast<bf16*>(out), count);
  }
}

float f16_to_f32(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  uint32_t magnitude = (bits & 0x7fffu) << 13;
  const uint32_t exponent = magnitude & 0x0f800000u;
  magnitude += (127 - 15) << 23;
  // Infinity and NaN: their exponent must become 255, not 143.
  if (exponent == 0x0f800000u) magnitude += (128 - 16) << 23;
  if (exponent == 0) {
    // Subnormal: give it the implicit one that it lacks and subtract that one's value again. Exact, and no
    // operand is a subnormal fp32, so a thread that flushes those gets the same result.
    magnitude += 1u << 23;
    magnitude = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) - std::bit_cast<float>(113u << 23));
  }
  return std::bit_cast<float>(sign | magnitude);
}

}  // namespace slipstream::model
