// Goal: every conversion is exact to the bit, at any alignment and length: F16 with its subnormals against
// its definition, fp32 to bf16 against a search for the nearest value.
#include "model/stored_dtype.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/bf16.h"

namespace slipstream::model {
namespace {

using kernels::bf16;
using kernels::DType;

constexpr DType kTensorDTypes[] = {DType::kF32, DType::kBf16, DType::kF8E4M3, DType::kI32};

TEST(StoredDTypeTest, NamesAndSizes) {
  int count = 0;
  for (int i = 0; i <= static_cast<int>(StoredDType::kU64); ++i, ++count) {
    const StoredDType dtype = static_cast<StoredDType>(i);
    EXPECT_EQ(parse_stored_dtype(name_of(dtype)), dtype);
  }
  EXPECT_EQ(count, 19);
  EXPECT_EQ(size_of(StoredDType::kF8E4M3), 1);
  EXPECT_EQ(size_of(StoredDType::kBf16), 2);
  EXPECT_EQ(size_of(StoredDType::kF32), 4);
  EXPECT_EQ(size_of(StoredDType::kI64), 8);
  for (const char* unknown : {"", "f32", "F4", "F32 ", "FLOAT"})
    EXPECT_EQ(parse_stored_dtype(unknown), std::nullopt);
  for (const DType dtype : kTensorDTypes) EXPECT_EQ(size_of(stored_as(dtype)), kernels::size_of(dtype));
}

TEST(StoredDTypeTest, AllHalfValues) {
  for (int bits = 0; bits < 65536; ++bits) {
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    const float actual = f16_to_f32(static_cast<uint16_t>(bits));
    if (exponent == 31 && mantissa != 0) {
      ASSERT_TRUE(std::isnan(actual)) << bits;
      continue;
    }
    double magnitude = std::ldexp(exponent == 0 ? mantissa : 1024 + mantissa, std::max(exponent, 1) - 25);
    if (exponent == 31) magnitude = std::numeric_limits<double>::infinity();
    const float expected = static_cast<float>((bits & 0x8000) != 0 ? -magnitude : magnitude);
    ASSERT_EQ(std::bit_cast<uint32_t>(actual), std::bit_cast<uint32_t>(expected)) << bits;
  }
}

// The bf16 nearest to a finite value, the even one of two equally near; by comparing distances in double.
// Above the largest bf16 the next candidate stands for infinity.
uint16_t nearest_bf16(float value) {
  const uint16_t below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);  // towards zero
  const auto as_double = [](uint32_t bits) {
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if ((bits & 0x7fff) == 0x7f80) return sign * std::ldexp(1.0, 128);
    return static_cast<double>(std::bit_cast<float>(bits << 16));
  };
  const double to_below = std::abs(static_cast<double>(value) - as_double(below));
  const double to_above = std::abs(static_cast<double>(value) - as_double(below + 1u));
  if (to_below != to_above) return to_below < to_above ? below : static_cast<uint16_t>(below + 1);
  return (below & 1) == 0 ? below : static_cast<uint16_t>(below + 1);
}

TEST(StoredDTypeTest, RoundsToNearestEven) {
  std::vector<float> values;
  for (const uint32_t high : {0x0000u, 0x0001u, 0x0080u, 0x3f80u, 0x3f81u, 0x7f7eu, 0x7f7fu}) {
    for (const uint32_t low : {0x0000u, 0x0001u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(high << 16 | low));
      values.push_back(-values.back());
    }
  }
  std::mt19937 random(1);
  while (values.size() < 20000) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(value)) values.push_back(value);
  }
  std::vector<bf16> actual(values.size());
  convert(StoredDType::kF32, reinterpret_cast<const std::byte*>(values.data()), DType::kBf16, actual.data(),
          static_cast<int64_t>(values.size()));
  for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(actual[i].bits, nearest_bf16(values[i])) << values[i];
}

TEST(StoredDTypeTest, InfinityAndNan) {
  const uint32_t in[] = {0x7f800000, 0xff800000, 0x7f800001, 0x7fffffff, 0xffc00000};
  bf16 out[5];
  convert(StoredDType::kF32, reinterpret_cast<const std::byte*>(in), DType::kBf16, out, 5);
  EXPECT_EQ(out[0].bits, 0x7f80);
  EXPECT_EQ(out[1].bits, 0xff80);
  for (int i = 2; i < 5; ++i) EXPECT_TRUE(std::isnan(to_f32(out[i])));
}

// One element at a time, by another way: through fp32.
TEST(StoredDTypeTest, AnyLengthAndAlignment) {
  std::mt19937 random(2);
  for (const StoredDType from : {StoredDType::kF32, StoredDType::kBf16, StoredDType::kF16}) {
    for (const DType to : {DType::kF32, DType::kBf16}) {
      for (const int64_t count : {0, 1, 2, 7, 8, 15, 16, 17, 33, 67}) {
        std::vector<std::byte> in(static_cast<size_t>(count * size_of(from)) + 1);
        for (std::byte& byte : in)
          byte = static_cast<std::byte>(random() & 0x3f);  // no NaN: its bits are not fixed
        const std::byte* unaligned = in.data() + 1;
        std::vector<std::byte> out(static_cast<size_t>(count * kernels::size_of(to)) + 4, std::byte{0xa5});
        convert(from, unaligned, to, out.data(), count);
        for (int64_t i = 0; i < count; ++i) {
          uint16_t half = 0;
          float value = 0;
          std::memcpy(&half, unaligned + 2 * i, 2);
          if (from == StoredDType::kF32) std::memcpy(&value, unaligned + 4 * i, 4);
          if (from == StoredDType::kBf16) value = kernels::to_f32(bf16{half});
          if (from == StoredDType::kF16) value = f16_to_f32(half);
          const bf16 narrow = kernels::to_bf16(value);
          const void* expected = to == DType::kF32 ? static_cast<const void*>(&value) : &narrow;
          const size_t size = static_cast<size_t>(kernels::size_of(to));
          ASSERT_EQ(std::memcmp(out.data() + static_cast<size_t>(i) * size, expected, size), 0)
              << name_of(from) << " " << count << " " << i;
        }
        for (size_t i = out.size() - 4; i < out.size(); ++i) ASSERT_EQ(out[i], std::byte{0xa5});
      }
    }
  }
}

TEST(StoredDTypeTest, WhatConverts) {
  for (int i = 0; i <= static_cast<int>(StoredDType::kU64); ++i) {
    const StoredDType from = static_cast<StoredDType>(i);
    const bool is_float =
        from == StoredDType::kF32 || from == StoredDType::kBf16 || from == StoredDType::kF16;
    EXPECT_EQ(can_convert(from, DType::kF32), is_float) << name_of(from);
    EXPECT_EQ(can_convert(from, DType::kBf16), is_float) << name_of(from);
    EXPECT_EQ(can_convert(from, DType::kI32), from == StoredDType::kI32) << name_of(from);
    EXPECT_EQ(can_convert(from, DType::kF8E4M3), from == StoredDType::kF8E4M3) << name_of(from);
  }
}

TEST(StoredDTypeTest, PrintableIsShortAndPlain) {
  EXPECT_EQ(printable("model.norm.weight"), "model.norm.weight");
  EXPECT_EQ(printable("a\nb\x01"), "a\\x0ab\\x01");
  EXPECT_EQ(printable(std::string(100'000, 'x')), std::string(200, 'x') + "...");
}

}  // namespace
}  // namespace slipstream::model
