// Goal: an element depends on seed, name and position alone, to the bit, and the values are normal: by their
// moments, their distribution, and their independence of neighbours, names and seeds.
#include "model/random_init.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/testing/op_test.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using kernels::Tensor;
using kernels::testing::expect_same_bits;
using kernels::testing::single_thread_stream;
using kernels::testing::TensorPool;
using kernels::testing::test_stream;

std::vector<float> draw(uint64_t seed, const std::string& name, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  init_normal({.seed = seed, .name = name, .std = 1.0f}, Tensor(values.data(), DType::kF32, {count}),
              test_stream());
  return values;
}

// By the definition, with another library's log and cos.
TEST(RandomInitTest, KnownValues) {
  const std::vector<float> values = draw(42, "model.embed_tokens.weight", 4);
  EXPECT_EQ(values, (std::vector<float>{-0.382780492f, 0.85278374f, -0.0179102588f, -1.02578139f}));
}

TEST(RandomInitTest, IgnoresThreadsShapeAndStrides) {
  TensorPool pool(1);
  const NormalInit init{.seed = 7, .name = "w", .std = 0.5f};
  const Tensor flat = pool.output(DType::kF32, {6 * 5 * 999});
  init_normal(init, flat, single_thread_stream());
  const Tensor shaped = pool.output(DType::kF32, {6, 5, 999});
  init_normal(init, shaped, test_stream());
  expect_same_bits(shaped.view({6 * 5 * 999}), flat);
  const Tensor strided = pool.output(DType::kF32, {6, 7, 1003}).slice(1, 1, 6).slice(2, 2, 1001);
  init_normal(init, strided, test_stream());
  expect_same_bits(strided, shaped);
  const Tensor short_rows = pool.output(DType::kF32, {6 * 5 * 333, 3});
  init_normal(init, short_rows, test_stream());
  expect_same_bits(short_rows.view({6 * 5 * 999}), flat);
  const Tensor start = pool.output(DType::kF32, {10});
  init_normal(init, start, test_stream());
  expect_same_bits(start, flat.slice(0, 0, 10));
  const Tensor narrow = pool.output(DType::kBf16, {6 * 5 * 999});
  init_normal(init, narrow, test_stream());
  for (int64_t i = 0; i < flat.numel(); ++i) ASSERT_EQ(narrow.bf()[i], kernels::to_bf16(flat.f32()[i]));
  init_normal(init, pool.output(DType::kF32, {3, 0}), test_stream());
  pool.expect_fences_intact();
}

TEST(RandomInitTest, StdScales) {
  TensorPool pool(2);
  const std::vector<float> unit = draw(3, "w", 1000);
  const Tensor scaled = pool.output(DType::kF32, {1000});
  init_normal({.seed = 3, .name = "w", .std = 0.02f}, scaled, test_stream());
  for (size_t i = 0; i < unit.size(); ++i) ASSERT_EQ(scaled.f32()[i], 0.02f * unit[i]);
  init_normal({.seed = 3, .name = "w", .std = 0.0f}, scaled, test_stream());
  for (size_t i = 0; i < unit.size(); ++i) ASSERT_EQ(scaled.f32()[i], 0.0f);
}

// The Kolmogorov-Smirnov distance to the normal distribution; 1.95 / sqrt(n) is exceeded by one sample in a
// thousand.
TEST(RandomInitTest, IsNormal) {
  constexpr int64_t kCount = 1'000'000;
  std::vector<float> values = draw(1, "model.layers.0.mlp.gate.weight", kCount);
  double sum = 0, square = 0, fourth = 0, lag = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double v = static_cast<double>(values[i]);
    sum += v;
    square += v * v;
    fourth += v * v * v * v;
    if (i > 0) lag += v * static_cast<double>(values[i - 1]);
  }
  const double n = kCount;
  EXPECT_NEAR(sum / n, 0.0, 4 / std::sqrt(n));
  EXPECT_NEAR(square / n, 1.0, 4 * std::sqrt(2 / n));
  EXPECT_NEAR(fourth / n, 3.0, 4 * std::sqrt(96 / n));
  EXPECT_NEAR(lag / n, 0.0, 4 / std::sqrt(n));
  std::sort(values.begin(), values.end());
  double distance = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const double cdf = 0.5 * std::erfc(-static_cast<double>(values[i]) / std::sqrt(2.0));
    distance = std::max({distance, std::abs(cdf - static_cast<double>(i) / n),
                         std::abs(cdf - static_cast<double>(i + 1) / n)});
  }
  EXPECT_LT(distance, 1.95 / std::sqrt(n));
  EXPECT_LT(values.back(), 7.5f);
  EXPECT_GT(values.back(), 4.0f);
  EXPECT_LT(values.front(), -4.0f);
}

TEST(RandomInitTest, NamesAndSeedsAreIndependent) {
  constexpr int64_t kCount = 100'000;
  const std::vector<float> base = draw(5, "a.weight", kCount);
  const std::pair<uint64_t, const char*> others[] = {{5, "b.weight"}, {6, "a.weight"},
                                                     {5, ""},         {5, "a.weight "},
                                                     {0, "a.weight"}, {~uint64_t{0}, "a.weight"}};
  for (const auto& [seed, name] : others) {
    const std::vector<float> other = draw(seed, name, kCount);
    double correlation = 0;
    for (size_t i = 0; i < base.size(); ++i) correlation += static_cast<double>(base[i] * other[i]);
    EXPECT_NEAR(correlation / kCount, 0.0, 4 / std::sqrt(kCount)) << seed << " " << name;
  }
}

}  // namespace
}  // namespace slipstream::model
