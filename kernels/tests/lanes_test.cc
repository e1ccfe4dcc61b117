// Goal: Lanes on every target: loads and stores of a part touch nothing else, bf16 rounds as to_bf16() does, reductions
// fold in the documented order, exp and sigmoid keep their accuracy and their ends, for_lanes covers each element once.
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "gtest/gtest.h"
#include "hwy/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/tests/lanes_test.cc"
#include "hwy/foreach_target.h"
#include "kernels/simd/lanes-inl.h"
#include "kernels/testing/op_test.h"

HWY_BEFORE_NAMESPACE();
namespace slipstream::kernels {
namespace HWY_NAMESPACE {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// Values of every size and both signs whose sums depend on the order.
std::vector<float> uneven_values(int64_t n) {
  std::vector<float> out;
  uint32_t state = 7;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    out.push_back(std::ldexp(static_cast<float>(state >> 8) / 8388608.0f - 1.0f, static_cast<int>(i * 5 % 23)));
  }
  return out;
}

std::vector<float> lanes_of(const Lanes& x) {
  std::vector<float> out(kLanes);
  store(x, out.data());
  return out;
}

void check_parts() {
  const std::vector<float> values = uneven_values(kLanes + 3);
  std::vector<bf16> halves;
  for (const float v : values) halves.push_back(to_bf16(v));
  for (int64_t n = 1; n <= kLanes; ++n) {
    const std::vector<float> whole = lanes_of(load_first(values.data() + 1, n, 2.5f));
    const std::vector<float> half = lanes_of(load_first(halves.data() + 1, n, 2.5f));
    std::vector<float> to(kLanes, -1.0f);
    std::vector<bf16> to_half(kLanes, to_bf16(-1.0f));
    store_first(load(values.data()), to.data(), n);
    store_first(load(values.data()), to_half.data(), n);
    for (int64_t i = 0; i < kLanes; ++i) {
      const auto at = static_cast<size_t>(i);
      EXPECT_EQ(whole[at], i < n ? values[at + 1] : 2.5f);
      EXPECT_EQ(half[at], i < n ? to_f32(halves[at + 1]) : 2.5f);
      EXPECT_EQ(to[at], i < n ? values[at] : -1.0f);
      EXPECT_EQ(to_half[at], i < n ? halves[at] : to_bf16(-1.0f));
    }
  }
}

void check_bf16() {
  std::vector<float> values = uneven_values(4 * kLanes);
  for (const uint32_t bits : {0x3f808000u, 0x3f818000u, 0x3f808001u, 0x7f7fffffu, 0x00000001u, 0x80000000u, 0x7f800000u}) {
    values.push_back(std::bit_cast<float>(bits));  // ties, overflow, subnormal, -0, infinity
  }
  values.resize((values.size() / kLanes + 1) * kLanes, kNaN);
  for (size_t i = 0; i < values.size(); i += kLanes) {
    bf16 out[kLanes];
    store(load(values.data() + i), out);
    for (size_t j = 0; j < static_cast<size_t>(kLanes); ++j) EXPECT_EQ(out[j].bits, to_bf16(values[i + j]).bits) << values[i + j];
  }
}

void check_folds() {
  const std::vector<float> values = uneven_values(kLanes);
  std::vector<float> folded = values;
  for (size_t width = kLanes / 2; width >= 1; width /= 2) {
    for (size_t i = 0; i < width; ++i) folded[i] += folded[i + width];
  }
  EXPECT_EQ(sum_lanes(load(values.data())), folded[0]);
  for (size_t top = 0; top < static_cast<size_t>(kLanes); ++top) {
    std::vector<float> low(kLanes, -3.0f);
    low[top] = 5.0f;
    EXPECT_EQ(max_lanes(load(low.data())), 5.0f);
    low[top] = kNaN;
    EXPECT_TRUE(std::isnan(sum_lanes(load(low.data()))));
  }
}

void check_functions() {
  const auto ulps = [](float actual, double expected) {
    const float nearest = static_cast<float>(expected);
    return std::abs(static_cast<double>(actual) - expected) / (std::nextafter(nearest, kInfinity) - nearest);
  };
  for (float x = -86.9f; x < 88.7f; x += 0.37f) {
    EXPECT_LE(ulps(lanes_of(exp(broadcast(x)))[3], std::exp(static_cast<double>(x))), 1.0) << x;
    EXPECT_NEAR(lanes_of(sigmoid(broadcast(x)))[5], 1.0 / (1.0 + std::exp(-static_cast<double>(x))), 2e-7) << x;
  }
  const auto exp_of = [](float x) HWY_ATTR { return lanes_of(exp(broadcast(x)))[0]; };
  const auto sigmoid_of = [](float x) HWY_ATTR { return lanes_of(sigmoid(broadcast(x)))[0]; };
  EXPECT_EQ(exp_of(0.0f), 1.0f);
  EXPECT_EQ(exp_of(-87.2f), 0.0f);
  EXPECT_EQ(exp_of(-kInfinity), 0.0f);
  EXPECT_EQ(exp_of(89.0f), kInfinity);
  EXPECT_EQ(exp_of(kInfinity), kInfinity);
  EXPECT_TRUE(std::isnan(exp_of(kNaN)));
  EXPECT_EQ(sigmoid_of(-kInfinity), 0.0f);
  EXPECT_EQ(sigmoid_of(kInfinity), 1.0f);
  EXPECT_TRUE(std::isnan(sigmoid_of(kNaN)));
}

void check_for_lanes() {
  for (int64_t n = 0; n <= 50; ++n) {
    std::vector<float> values(static_cast<size_t>(n) + 1, 1.0f);
    values.back() = 9.0f;  // beyond the end
    for_lanes(n, [&](int64_t i, auto chunk) HWY_ATTR {
      chunk.store(add(chunk.load(values.data() + i), broadcast(1.0f)), values.data() + i);
    });
    EXPECT_EQ(std::accumulate(values.begin(), values.end(), 0.0f), 2.0f * static_cast<float>(n) + 9.0f);
  }
}

void check_lanes() {
  check_parts();
  check_bf16();
  check_folds();
  check_functions();
  check_for_lanes();
}

}  // namespace HWY_NAMESPACE
}  // namespace slipstream::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace slipstream::kernels {
namespace {

HWY_EXPORT(check_lanes);

TEST(LanesTest, EveryTarget) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    const testing::ScopedTarget chosen(target);
    HWY_DYNAMIC_DISPATCH(check_lanes)();
  }
}

}  // namespace
}  // namespace slipstream::kernels
#endif  // HWY_ONCE
