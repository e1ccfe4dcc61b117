// Goal: Philox gives the published numbers; launch() draws the token reference() draws, with every filter,
// for one block of the vocabulary and several; draws follow the distribution (chi-square); the log-prob has
// LogProb's bits; ties go to the lower id; a row gives the same token alone and in any batch; bad rows and
// arguments are refused by name, bad logits give -1.
#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/logprob/logprob.h"
#include "kernels/sampling/philox.h"
#include "kernels/testing/op_test.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;
using testing::test_stream;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// rows must outlive the result.
Sampling with_outputs(TensorPool& pool, const Tensor& logits, const std::vector<SamplingRow>& rows) {
  const int64_t count = logits.size(0);
  CHECK_EQ(count, static_cast<int64_t>(rows.size()));
  return {.logits = logits,
          .rows = rows.data(),
          .tokens = pool.output(DType::kI32, {count}),
          .logprob = pool.output(DType::kF32, {count}),
          .truncated = pool.output(DType::kI32, {count})};
}

// Every row the same logits.
Tensor repeated(TensorPool& pool, int64_t rows, const std::vector<float>& logits) {
  const Tensor t = pool.zeros(DType::kF32, {rows, static_cast<int64_t>(logits.size())});
  for (int64_t r = 0; r < rows; ++r) std::copy(logits.begin(), logits.end(), t.row(r));
  return t;
}

// Known answers of Random123 1.09 (kat_vectors).
TEST(PhiloxTest, KnownAnswers) {
  using Words = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffffu;
  EXPECT_EQ(philox4x32_10({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(PhiloxTest, UniformIsTheUpper24BitsOfTheFirstWord) {
  EXPECT_EQ(uniform_at(0, 0), static_cast<float>(0x6627e8) * 0x1p-24f);
  double sum = 0.0;
  float low = 1.0f, high = 0.0f;
  for (uint64_t i = 0; i < 10'000; ++i) {
    const float u = uniform_at(77, i);
    sum += u;
    low = std::min(low, u);
    high = std::max(high, u);
  }
  EXPECT_NEAR(sum / 10'000, 0.5, 0.01);  // 3.5 standard deviations
  EXPECT_TRUE(0.0f <= low && low < 1e-3f && 0.999f < high && high < 1.0f);
  EXPECT_NE(uniform_at(1, 0), uniform_at(uint64_t{1} << 32, 0));  // all 64 bits of seed and counter count
  EXPECT_NE(uniform_at(0, 1), uniform_at(0, uint64_t{1} << 32));
}

struct Filters {
  const char* name;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
};

class SamplingTest : public ::testing::TestWithParam<Filters> {
 protected:
  static SamplingRow row(uint64_t seed, uint64_t counter) {
    const Filters& f = GetParam();
    return {.temperature = f.temperature,
            .top_k = f.top_k,
            .top_p = f.top_p,
            .min_p = f.min_p,
            .seed = seed,
            .counter = counter};
  }
};

TEST_P(SamplingTest, EqualsReference) {
  TensorPool pool(1);
  for (const int64_t vocab : {1, 7, 16, 100, 4096, 9001}) {
    const int64_t count = 40;
    const Tensor logits = pool.random(DType::kF32, {count, vocab + 3}, -5.0f, 5.0f).slice(1, 1, vocab + 1);
    for (int64_t i = 0; i < vocab; i += 5) logits.row(3)[i] = -kInfinity;
    logits.row(3)[vocab - 1] = 1.0f;
    for (int64_t i = 0; i < vocab; ++i) logits.row(4)[i] = std::round(logits.row(4)[i]);  // many ties
    std::vector<SamplingRow> rows;
    for (int64_t t = 0; t < count; ++t) rows.push_back(row(5, static_cast<uint64_t>(t)));
    const Sampling args = with_outputs(pool, logits, rows), expected = with_outputs(pool, logits, rows);
    launch(args, test_stream());
    reference(expected);
    testing::expect_same_bits(args.tokens, expected.tokens);
    testing::expect_same_bits(args.truncated, expected.truncated);
    testing::expect_near(args.logprob, expected.logprob, testing::tolerance(DType::kF32));
  }
  pool.expect_fences_intact();
}

// 1200 rows take the path that shares out rows, one row the one that shares out blocks.
TEST_P(SamplingTest, RowIgnoresItsNeighboursAndThreads) {
  TensorPool pool(2);
  const int64_t count = 1200, vocab = 300;
  const Tensor logits = pool.random(DType::kF32, {count, vocab}, -4.0f, 4.0f);
  logits.row(17)[5] = kNaN;
  std::vector<SamplingRow> rows;
  for (int64_t t = 0; t < count; ++t) rows.push_back(row(9, static_cast<uint64_t>(t)));
  const Sampling together = with_outputs(pool, logits, rows);
  launch(together, test_stream());
  EXPECT_EQ(together.tokens.i32()[17], -1);
  for (int64_t t = 0; t < count; t += 11) {
    if (t == 17) continue;
    for (Stream* stream : {&test_stream(), &testing::single_thread_stream()}) {
      const std::vector<SamplingRow> own = {rows[static_cast<size_t>(t)]};
      const Sampling alone = with_outputs(pool, logits.slice(0, t, t + 1), own);
      launch(alone, *stream);
      testing::expect_same_bits(alone.tokens, together.tokens.slice(0, t, t + 1));
      testing::expect_same_bits(alone.logprob, together.logprob.slice(0, t, t + 1));
      testing::expect_same_bits(alone.truncated, together.truncated.slice(0, t, t + 1));
    }
  }
}

TEST_P(SamplingTest, LogProbHasTheBitsOfLogProb) {
  TensorPool pool(3);
  const int64_t count = 50, vocab = 9001;
  const Tensor logits = pool.random(DType::kF32, {count, vocab}, -7.0f, 7.0f);
  std::vector<SamplingRow> rows;
  for (int64_t t = 0; t < count; ++t) rows.push_back(row(21, static_cast<uint64_t>(t)));
  const Sampling args = with_outputs(pool, logits, rows);
  launch(args, test_stream());
  const LogProb learner{.logits = logits,
                        .targets = args.tokens,
                        .logprob = pool.output(DType::kF32, {count}),
                        .lse = pool.output(DType::kF32, {count}),
                        .entropy = pool.output(DType::kF32, {count}),
                        .temperature = GetParam().temperature == 0.0f ? 1.0f : GetParam().temperature};
  launch(learner, testing::single_thread_stream());
  testing::expect_same_bits(args.logprob, learner.logprob);
}

// Pearson's statistic of 20,000 draws with fixed seeds against the distribution worked out here in the
// plainest way. The bound is the 99.99 % quantile of chi-square for 11 degrees of freedom, generous for
// fewer.
TEST_P(SamplingTest, DrawsFollowTheDistribution) {
  const Filters& filters = GetParam();
  if (filters.temperature == 0.0f) return;  // nothing is drawn: GreedyTakesTheFirstMaximum
  TensorPool pool(4);
  const std::vector<float> logits = {0.3f, -1.0f, 2.0f, 1.4f, -0.2f, 0.9f,
                                     1.7f, -2.5f, 0.1f, 1.1f, -0.6f, 0.7f};
  const size_t vocab = logits.size();
  const int64_t draws = 20'000;
  std::vector<SamplingRow> rows;
  for (int64_t t = 0; t < draws; ++t) rows.push_back(row(1234, static_cast<uint64_t>(t)));
  const Sampling args = with_outputs(pool, repeated(pool, draws, logits), rows);
  launch(args, test_stream());
  std::vector<double> seen(vocab, 0.0);
  for (int64_t t = 0; t < draws; ++t) seen[static_cast<size_t>(args.tokens.i32()[t])] += 1.0;

  std::vector<size_t> order(vocab);
  for (size_t i = 0; i < vocab; ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  const auto normalise = [](std::vector<double>& p) {
    double sum = 0.0;
    for (double v : p) sum += v;
    for (double& v : p) v /= sum;
  };
  std::vector<double> p(vocab);
  for (size_t i = 0; i < vocab; ++i) p[i] = std::exp(logits[i] / filters.temperature);
  normalise(p);
  const double top = p[order[0]];
  const auto drop_after = [&](size_t count) {
    for (size_t i = count; i < vocab; ++i) p[order[i]] = 0.0;
  };
  if (filters.top_k > 0) drop_after(static_cast<size_t>(filters.top_k));
  std::vector<double> renormalised = p;
  normalise(renormalised);
  if (filters.top_p < 1.0f) {
    size_t count = 0;
    for (double sum = 0.0; sum < filters.top_p; ++count) sum += renormalised[order[count]];
    drop_after(count);
  }
  for (double& v : p) v = v < filters.min_p * top ? 0.0 : v;
  normalise(p);

  double statistic = 0.0;
  int dropped = 0;
  for (size_t i = 0; i < vocab; ++i) {
    const double expected = p[i] * static_cast<double>(draws);
    if (expected == 0.0) {
      ++dropped;
      EXPECT_EQ(seen[i], 0.0) << "token " << i << " was filtered out";
    } else {
      statistic += (seen[i] - expected) * (seen[i] - expected) / expected;
    }
  }
  EXPECT_LT(statistic, 37.4) << filters.name;
  EXPECT_EQ(args.truncated.i32()[0], dropped > 0 ? 1 : 0);
  EXPECT_EQ(dropped > 0, filters.top_k > 0 || filters.top_p < 1.0f || filters.min_p > 0.0f);
}

INSTANTIATE_TEST_SUITE_P(
    Filters, SamplingTest,
    ::testing::Values(Filters{"plain", 1.0f, 0, 1.0f, 0.0f}, Filters{"cool", 0.6f, 0, 1.0f, 0.0f},
                      Filters{"greedy", 0.0f, 0, 1.0f, 0.0f}, Filters{"top_k", 0.9f, 5, 1.0f, 0.0f},
                      Filters{"top_1", 1.0f, 1, 1.0f, 0.0f}, Filters{"top_p", 1.3f, 0, 0.8f, 0.0f},
                      Filters{"min_p", 1.0f, 0, 1.0f, 0.2f}, Filters{"top_k_top_p", 1.0f, 6, 0.7f, 0.0f},
                      Filters{"all", 1.1f, 7, 0.9f, 0.3f}),
    [](const auto& filters) { return filters.param.name; });

TEST(SamplingCasesTest, BehaviourCase) {
  TensorPool pool(5);
  std::vector<SamplingRow> rows;
  for (uint64_t i = 0; i < 20; ++i) rows.push_back({.temperature = 0.8f, .seed = 3, .counter = i});
  const Sampling args = with_outputs(pool, repeated(pool, 20, {2.0f, 1.0f, 0.0f}), rows);
  launch(args, test_stream());
  int drawn = 0;
  for (int64_t t = 0; t < 20; ++t) {
    if (args.tokens.i32()[t] != 1) continue;
    ++drawn;
    EXPECT_NEAR(args.logprob.f32()[t], -1.5638f, 1e-4f);
    EXPECT_EQ(args.truncated.i32()[t], 0);
  }
  EXPECT_GT(drawn, 0);
}

TEST(SamplingCasesTest, GreedyTakesTheFirstMaximum) {
  TensorPool pool(6);
  const Tensor logits = pool.random(DType::kF32, {1, 9000});
  logits.f32()[4500] = logits.f32()[8999] = logits.f32()[4501] = 3.0f;
  const std::vector<SamplingRow> rows = {{.temperature = 0.0f}};
  const Sampling args = with_outputs(pool, logits, rows);
  launch(args, test_stream());
  EXPECT_EQ(args.tokens.i32()[0], 4500);
  EXPECT_EQ(args.truncated.i32()[0], 1);
}

// Nine equal logits: the filters keep the lowest ids among them.
TEST(SamplingCasesTest, TiesGoToTheLowerId) {
  TensorPool pool(7);
  std::vector<float> logits(5000, -1.0f);
  for (size_t i = 1; i <= 9; ++i) logits[i * 500] = 8.0f;
  std::vector<SamplingRow> rows;
  for (uint64_t i = 0; i < 200; ++i) {
    rows.push_back(i % 2 == 0 ? SamplingRow{.top_k = 3, .seed = 1, .counter = i}
                              : SamplingRow{.top_k = 9, .top_p = 0.4f, .seed = 1, .counter = i});
  }
  const Sampling args = with_outputs(pool, repeated(pool, 200, logits), rows);
  launch(args, test_stream());
  int32_t highest[2] = {0, 0};
  for (int64_t t = 0; t < 200; ++t) highest[t % 2] = std::max(highest[t % 2], args.tokens.i32()[t]);
  EXPECT_EQ(highest[0], 1500);  // three of nine
  EXPECT_EQ(highest[1], 2000);  // 3/9 < 0.4 <= 4/9
}

TEST(SamplingCasesTest, OneTokenHasAllTheProbability) {
  TensorPool pool(8);
  std::vector<float> logits(10'000, -1e30f);
  logits[7777] = 1e30f;
  logits[3] = -kInfinity;
  std::vector<SamplingRow> rows;
  for (uint64_t i = 0; i < 50; ++i) {
    rows.push_back(
        {.top_k = i % 2 == 0 ? 0 : 100, .top_p = i % 4 < 2 ? 1.0f : 0.5f, .seed = i, .counter = i});
  }
  const Sampling args = with_outputs(pool, repeated(pool, 50, logits), rows);
  launch(args, test_stream());
  for (int64_t t = 0; t < 50; ++t) {
    EXPECT_EQ(args.tokens.i32()[t], 7777);
    EXPECT_EQ(args.logprob.f32()[t], 0.0f);
  }
}

TEST(SamplingCasesTest, MinusInfinityIsNeverDrawnAndRemovingItIsNoTruncation) {
  TensorPool pool(9);
  std::vector<float> logits(40, -kInfinity);
  logits[7] = logits[30] = 0.5f;
  std::vector<SamplingRow> rows;
  for (uint64_t i = 0; i < 100; ++i)
    rows.push_back({.top_k = static_cast<int32_t>(i % 3), .seed = 1, .counter = i});
  const Sampling args = with_outputs(pool, repeated(pool, 100, logits), rows);
  launch(args, test_stream());
  for (int64_t t = 0; t < 100; ++t) {
    EXPECT_TRUE(args.tokens.i32()[t] == 7 || (args.tokens.i32()[t] == 30 && t % 3 != 1)) << t;
    EXPECT_EQ(args.truncated.i32()[t], t % 3 == 1 ? 1 : 0);  // top-2 of two finite tokens removes nothing
  }
}

TEST(SamplingCasesTest, BadLogitsGiveNoToken) {
  TensorPool pool(10);
  const Tensor logits = pool.random(DType::kF32, {4, 5000});
  logits.row(0)[4999] = kNaN;
  logits.row(1)[0] = kInfinity;
  for (int64_t i = 0; i < 5000; ++i) logits.row(2)[i] = -kInfinity;
  for (const float temperature : {0.0f, 1.0f}) {
    const SamplingRow row{.temperature = temperature, .top_k = 5, .top_p = 0.9f, .min_p = 0.1f};
    const std::vector<SamplingRow> rows(4, row);
    for (const bool vectors : {true, false}) {
      const Sampling args = with_outputs(pool, logits, rows);
      vectors ? launch(args, test_stream()) : reference(args);
      for (int64_t t = 0; t < 4; ++t) {
        EXPECT_EQ(args.tokens.i32()[t] == -1, t < 3);
        EXPECT_EQ(std::isnan(args.logprob.f32()[t]), t < 3);
        EXPECT_EQ(args.truncated.i32()[t], t < 3 ? 0 : 1);
      }
    }
  }
}

TEST(SamplingCasesTest, NoRows) {
  TensorPool pool(11);
  launch(with_outputs(pool, pool.random(DType::kF32, {0, 5}), {}), test_stream());
}

TEST(SamplingCasesTest, RefusesByName) {
  TensorPool pool(12);
  const Tensor logits = pool.random(DType::kF32, {2, 8});
  const auto message = [&](const SamplingRow& second) {
    const std::vector<SamplingRow> rows = {{}, second};
    return std::string(validate(with_outputs(pool, logits, rows)).message());
  };
  EXPECT_EQ(message({}), "");
  EXPECT_EQ(message({.temperature = -1.0f}), "sampling: rows[1].temperature: -1, expected >= 0");
  EXPECT_EQ(message({.temperature = kNaN}), "sampling: rows[1].temperature: nan, expected >= 0");
  EXPECT_EQ(message({.top_k = -1}), "sampling: rows[1].top_k: -1, expected >= 0");
  EXPECT_EQ(message({.top_p = 0.0f}), "sampling: rows[1].top_p: 0, expected in (0, 1]");
  EXPECT_EQ(message({.min_p = 1.0f}), "sampling: rows[1].min_p: 1, expected in [0, 1)");
  const std::vector<SamplingRow> rows(2);
  Sampling args = with_outputs(pool, logits, rows);
  args.tokens = pool.output(DType::kI32, {3});
  EXPECT_EQ(validate(args).message(), "sampling: tokens: i32 [3], expected i32 [2]");
}

}  // namespace
}  // namespace slipstream::kernels
