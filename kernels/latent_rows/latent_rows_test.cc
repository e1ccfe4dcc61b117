// Goal: launch() stores the bits of reference() for ragged, paged and odd shapes and touches nothing else; what is read back
// is within e4m3's half step of what was written, and NaN in groups of which not all is finite; bad arguments are refused by name.
#include "kernels/latent_rows/latent_rows.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/testing/batches.h"

namespace slipstream::kernels {
namespace {

using testing::TensorPool;

// Bytes, not values: scales and gaps may look like NaN.
Tensor as_words(const Tensor& pool) {
  return Tensor(pool.raw(), DType::kI32, {pool.size(0), pool.size(1), pool.size(2) / 4});
}

TEST(LatentRowTest, PartsBeginOn16Bytes) {
  const LatentRow real = latent_row(512, 64);
  EXPECT_EQ(real.scales, 512);
  EXPECT_EQ(real.ropes, 528);
  EXPECT_EQ(real.bytes, 656);
  const LatentRow odd = latent_row(129, 3);
  EXPECT_EQ(odd.scales, 144);
  EXPECT_EQ(odd.groups(), 2);
  EXPECT_EQ(odd.ropes, 160);
  EXPECT_EQ(odd.bytes, 176);
  EXPECT_EQ(latent_row(512, 0).bytes, 528);
}

class LatentRowsTest : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(LatentRowsTest, EqualsReference) {
  const auto [rank, rope] = GetParam();
  const LatentRow layout = latent_row(rank, rope);
  TensorPool pool(1);
  const Sequences sequences = testing::sequences_of(pool, {1, 0, 70, 130}, {63, 5, 0, 100});
  // Rows lie strided, and of magnitudes from 2^-20 to 2^20.
  const Tensor rows = pool.random(DType::kF32, {sequences.rows(), rank + rope + 3}).slice(1, 2, 2 + rank + rope);
  for (int64_t r = 0; r < rows.size(0); ++r) {
    for (int64_t i = 0; i < rank + rope; ++i) rows.row(r)[i] *= std::ldexp(1.0f, static_cast<int>(r % 41) - 20);
  }
  std::fill_n(rows.row(7), rank, 0.0f);
  const auto store = [&] {
    return PagedRows{.pool = pool.zeros(DType::kF8E4M3, {20, kPageRows, layout.bytes}),
                     .page_table = testing::pages_in_turn(pool, 4, 4)};
  };
  const LatentWrite args{.rows = rows, .rank = rank, .sequences = sequences, .store = store()};
  LatentWrite expected = args;
  expected.store = store();
  launch(args, testing::test_stream());
  reference(expected);
  testing::expect_same_bits(as_words(args.store.pool), as_words(expected.store.pool));
  pool.expect_fences_intact();

  std::vector<float> back(static_cast<size_t>(rank + rope)), part(static_cast<size_t>(rank + rope));
  for (int64_t b = 0; b < sequences.count(); ++b) {
    for (int64_t r = sequences.begin(b); r < sequences.end(b); ++r) {
      const e4m3* const row = args.store.pool.data<e4m3>() +
                              args.store.offset(b, sequences.cached_tokens(b) + r - sequences.begin(b));
      read_latent_row(layout, row, 0, rank + rope, back.data());
      for (int64_t i = 0; i < rank; ++i) {
        const int64_t begin = i / kScaleColumns * kScaleColumns, end = std::min(begin + kScaleColumns, rank);
        float largest = 0.0f;
        for (int64_t j = begin; j < end; ++j) largest = std::max(largest, std::abs(rows.row(r)[j]));
        const float x = rows.row(r)[i];
        const float scale = reinterpret_cast<const float*>(row + layout.scales)[i / kScaleColumns];
        ASSERT_EQ(scale, to_f32(to_bf16(scale)));
        ASSERT_LE(std::abs(back[static_cast<size_t>(i)] - x), std::abs(x) / 16.0f + largest / (448.0f * 1000.0f)) << i;
      }
      for (int64_t i = rank; i < rank + rope; ++i) {
        ASSERT_EQ(back[static_cast<size_t>(i)], to_f32(to_bf16(rows.row(r)[i])));
      }
      // Any part of a row reads as the whole does.
      const int64_t from = r % (rank + rope), to = from + (r * 7) % (rank + rope - from) + 1;
      read_latent_row(layout, row, from, to, part.data());
      ASSERT_TRUE(std::equal(part.begin(), part.begin() + (to - from), back.begin() + from));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, LatentRowsTest,
                         ::testing::Values(std::pair<int64_t, int64_t>{512, 64}, std::pair<int64_t, int64_t>{512, 0},
                                           std::pair<int64_t, int64_t>{1, 0}, std::pair<int64_t, int64_t>{33, 6},
                                           std::pair<int64_t, int64_t>{129, 1}, std::pair<int64_t, int64_t>{300, 64}));

TEST(LatentRowsTest, GroupsThatAreNotFiniteAreNan) {
  TensorPool pool(3);
  constexpr int64_t kRank = 300, kGroup = kScaleColumns;
  const LatentRow layout = latent_row(kRank, 0);
  const Tensor values = pool.random(DType::kF32, {1, kRank});
  values.row(0)[5] = std::numeric_limits<float>::infinity();
  values.row(0)[7] = 0.0f;
  values.row(0)[kRank - 1] = -std::numeric_limits<float>::quiet_NaN();
  std::vector<e4m3> row(static_cast<size_t>(layout.bytes));
  write_latent_row(layout, values.row(0), row.data());
  std::vector<float> back(kRank);
  read_latent_row(layout, row.data(), 0, kRank, back.data());
  for (int64_t i = 0; i < kRank; ++i) EXPECT_EQ(std::isnan(back[static_cast<size_t>(i)]), i / kGroup != 1) << i;
}

TEST(LatentRowsTest, RefusesByName) {
  TensorPool pool(2);
  const Sequences sequences = testing::sequences_of(pool, {5});
  const LatentWrite good{.rows = pool.random(DType::kF32, {5, 40}), .rank = 32, .sequences = sequences,
                         .store = {.pool = pool.zeros(DType::kF8E4M3, {1, kPageRows, 64}),
                                   .page_table = testing::pages_in_turn(pool, 1, 1)}};
  EXPECT_TRUE(validate(good).ok());
  LatentWrite bad = good;
  bad.rank = 41;
  EXPECT_EQ(validate(bad).message(), "latent_write: rank must be in 1..W");
  bad = good;
  bad.rank = 16;
  EXPECT_EQ(validate(bad).message(), "latent_write: store: f8_e4m3 [1, 64, 64], expected f8_e4m3 [*, 64, 80]");
  bad = good;
  bad.store.pool = pool.zeros(DType::kBf16, {1, kPageRows, 64});
  EXPECT_EQ(validate(bad).message(), "latent_write: store: bf16 [1, 64, 64], expected f8_e4m3 [*, 64, 64]");
  bad = good;
  bad.store.page_table = pool.ints({1, 1}, {1});
  EXPECT_EQ(validate(bad).message(), "latent_write: page_table: page out of range");
}

}  // namespace
}  // namespace slipstream::kernels
