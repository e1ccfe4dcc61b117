// Goal: choices survive packing bit for bit, whatever they are; moving selections are small; bytes nobody
// packed are refused without harm; pieces join as recorded turns do.
#include "model/replay.h"

#include <algorithm>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "kernels/indexer/indexer.h"

namespace slipstream::model {
namespace {

using kernels::DType;
constexpr ReplayKinds kBoth{.experts = true, .selections = true};

struct Shape {
  int64_t experts = 8, per_token = 2, topk = 32, pool = 4;
  bool tail = true;
};

ModelConfig config_of(const Shape& s) {
  ModelConfig config;
  config.moe = MoeConfig{.experts = s.experts, .per_token = s.per_token};
  config.mla = MlaConfig{};
  config.mla->indexer =
      IndexerConfig{.heads = 1, .head_dim = 1, .topk = s.topk, .pool = s.pool, .tail = s.tail};
  config.layers = {{.attention = AttentionKind::kMla, .indexer = IndexerMode::kFull, .moe = false},
                   {.attention = AttentionKind::kMla, .indexer = IndexerMode::kShared, .moe = true},
                   {.attention = AttentionKind::kMla, .indexer = IndexerMode::kFull, .moe = true}};
  return config;
}

enum class Pattern { kRandom, kRegular, kMoving };

// Choices of `rows` rows. kRandom: any positions; kRegular: random pools as the operator selects them;
// kMoving: a set of which one pool in twelve changes a row.
Choices make_choices(const ModelConfig& config, int64_t rows, Pattern pattern, uint64_t seed,
                     kernels::Arena& arena) {
  const ReplayLayout layout = ReplayLayout::of(config);
  std::mt19937_64 random(seed);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  Choices choices = allocate_choices(config, kBoth, rows, rows, arena);
  for (LayerReplay& layer : choices) {
    for (int64_t i = 0; !layer.experts.empty() && i < layer.experts.numel(); ++i) {
      layer.experts.i32()[i] = static_cast<int32_t>(below(layout.experts));
    }
    if (layer.selection.empty()) continue;
    std::set<int64_t> pools;
    for (int64_t t = 0; t < rows; ++t) {
      std::vector<int64_t> positions;
      const int64_t n = (t + 1) / layout.pool, k = std::min(n, layout.topk / layout.pool);
      if (pattern == Pattern::kRandom) {
        std::set<int64_t> any;
        for (int64_t i = below(std::min(t + 1, layer.selection.indices.size(1)) + 1); i > 0; --i)
          any.insert(below(t + 1));
        positions.assign(any.begin(), any.end());
      } else {
        if (pattern == Pattern::kRegular) pools.clear();
        for (auto it = pools.begin(); it != pools.end();)
          it = below(12) == 0 ? pools.erase(it) : std::next(it);
        while (static_cast<int64_t>(pools.size()) < k) pools.insert(below(n));
        for (const int64_t pool : pools) {
          for (int64_t j = 0; j < layout.pool; ++j) positions.push_back(pool * layout.pool + j);
        }
        for (int64_t p = n * layout.pool; layout.tail && p <= t; ++p) positions.push_back(p);
      }
      layer.selection.counts.i32()[t] = static_cast<int32_t>(positions.size());
      std::copy(positions.begin(), positions.end(),
                layer.selection.indices.i32() + t * layer.selection.indices.size(1));
    }
  }
  return choices;
}

EncodedReplay encode(const ModelConfig& config, const Choices& choices, int64_t begin, int64_t end,
                     ReplayKinds kinds = kBoth) {
  ReplayEncoder encoder(ReplayLayout::of(config), kinds, begin);
  for (int64_t row = begin; row < end; ++row) encoder.add(choices, row);
  EXPECT_EQ(encoder.next_row(), end);
  return encoder.finish();
}

void expect_same(const Choices& a, const Choices& b, int64_t rows) {
  const auto same = [&](const Tensor& x, const Tensor& y) {
    ASSERT_EQ(x.empty(), y.empty());
    if (x.empty()) return;
    const int64_t width = x.rank() == 1 ? 1 : x.size(1);
    for (int64_t i = 0; i < rows * width; ++i) ASSERT_EQ(x.i32()[i], y.i32()[i]) << "element " << i;
  };
  for (size_t l = 0; l < a.size(); ++l) {
    same(a[l].experts, b[l].experts);
    same(a[l].selection.indices, b[l].selection.indices);
    same(a[l].selection.counts, b[l].selection.counts);
  }
}

class ReplayTest : public ::testing::Test {
 protected:
  kernels::Arena arena_ = *kernels::Arena::create_cpu(int64_t{1} << 32);
};

TEST_F(ReplayTest, RoundTrip) {
  const std::vector<Shape> shapes = {{},
                                     {.experts = 256, .per_token = 8, .topk = 24, .pool = 1, .tail = false},
                                     {.experts = 257, .per_token = 3, .topk = 27, .pool = 3, .tail = false},
                                     {.experts = 600, .per_token = 1, .topk = 8, .pool = 8, .tail = true}};
  uint64_t seed = 1;
  for (const Shape& shape : shapes) {
    const ModelConfig config = config_of(shape);
    const ReplayLayout layout = ReplayLayout::of(config);
    for (const Pattern pattern : {Pattern::kRandom, Pattern::kRegular, Pattern::kMoving}) {
      for (const int64_t rows : {0, 1, 7, 300}) {
        const kernels::ArenaScope scope(arena_);
        const Choices choices = make_choices(config, rows, pattern, ++seed, arena_);
        for (const int64_t cut : {int64_t{0}, rows / 3, rows}) {
          std::vector<DecodedReplay> pieces;
          for (const auto& [begin, end] : {std::pair{int64_t{0}, cut}, std::pair{cut, rows}}) {
            const EncodedReplay encoded = encode(config, choices, begin, end);
            const absl::StatusOr<DecodedReplay> decoded = decode_replay(layout, encoded, rows);
            ASSERT_TRUE(decoded.ok()) << decoded.status();
            pieces.push_back(*decoded);
          }
          Choices back = allocate_choices(config, kBoth, rows, rows, arena_);
          const absl::Status placed = place_choices(layout, kBoth, pieces, rows, 0, back);
          ASSERT_TRUE(placed.ok()) << placed;
          expect_same(choices, back, rows);
        }
      }
    }
  }
}

TEST_F(ReplayTest, ExpertBits) {
  for (const auto& [experts, bytes] : {std::pair{256, 4}, std::pair{288, 5}}) {  // 2 layers of 2 ids
    const ModelConfig config = config_of({.experts = experts});
    Choices choices = make_choices(config, 1, Pattern::kRegular, 1, arena_);
    for (const size_t l : {1, 2}) choices[l].experts.i32()[0] = experts - 1;
    EXPECT_EQ(encode(config, choices, 0, 1).experts.size(), static_cast<size_t>(bytes));
  }
}

// Of raw int32, a set that changes by a twelfth a row takes a few percent; one that keeps still next to
// nothing.
TEST_F(ReplayTest, MovingSelectionsAreSmall) {
  const ModelConfig config = config_of({.topk = 512, .pool = 4});
  const int64_t rows = 4000;
  const Choices choices = make_choices(config, rows, Pattern::kMoving, 5, arena_);
  const EncodedReplay encoded = encode(config, choices, 0, rows, {.selections = true});
  EXPECT_EQ(encoded.raw_bytes, rows * 2 * 515 * 4);
  EXPECT_LT(static_cast<double>(encoded.selections.size()), 0.02 * static_cast<double>(encoded.raw_bytes));
  const EncodedReplay dense = encode(config, choices, 0, 500, {.selections = true});
  EXPECT_LT(dense.selections.size(), 100u);
}

// Case C6: turn 1 has 4 + 3 ids and 6 rows, turn 2 has 9 + 2 and 10 rows: rows 0-5 are turn 1's, row 6 and on
// turn 2's.
TEST_F(ReplayTest, TurnsJoin) {
  const ModelConfig config = config_of({});
  const ReplayLayout layout = ReplayLayout::of(config);
  const Choices first = make_choices(config, 10, Pattern::kRegular, 1, arena_);
  const Choices second = make_choices(config, 10, Pattern::kRegular, 2, arena_);
  const auto piece = [&](const Choices& choices, int64_t begin, int64_t end) {
    return *decode_replay(layout, encode(config, choices, begin, end), 10);
  };
  Choices merged = allocate_choices(config, kBoth, 10, 10, arena_);
  ASSERT_TRUE(place_choices(layout, kBoth, {piece(first, 0, 6), piece(second, 0, 10)}, 10, 0, merged).ok());
  const size_t k = static_cast<size_t>(layout.per_token);
  for (size_t row = 0; row < 10; ++row) {
    const Choices& from = row < 6 ? first : second;
    for (size_t i = 0; i < k; ++i)
      EXPECT_EQ(merged[1].experts.i32()[row * k + i], from[1].experts.i32()[row * k + i]);
  }
  // A piece that starts at row 6, as with a reused prefix, gives the same; one that starts at 7 leaves a
  // hole.
  Choices again = allocate_choices(config, kBoth, 10, 10, arena_);
  ASSERT_TRUE(place_choices(layout, kBoth, {piece(first, 0, 6), piece(second, 6, 10)}, 10, 0, again).ok());
  expect_same(merged, again, 10);
  EXPECT_EQ(place_choices(layout, kBoth, {piece(first, 0, 6), piece(second, 7, 10)}, 10, 0, again).code(),
            absl::StatusCode::kDataLoss);
  EXPECT_TRUE(place_choices(layout, kBoth, {piece(first, 0, 6)}, 6, 0, again).ok());
  EXPECT_EQ(place_choices(layout, kBoth, {piece(first, 0, 6)}, 7, 0, again).code(),
            absl::StatusCode::kDataLoss);
}

// A sample cut at max_seq_len lowers num_rows and cannot cut the bytes, which the gateway does not read.
TEST_F(ReplayTest, FewerRowsThanTheBytesHoldAreThePrefix) {
  const ModelConfig config = config_of({.experts = 7});
  const ReplayLayout layout = ReplayLayout::of(config);
  EncodedReplay encoded = encode(config, make_choices(config, 200, Pattern::kMoving, 3, arena_), 0, 200);
  const absl::StatusOr<DecodedReplay> whole = decode_replay(layout, encoded, 200);
  ASSERT_TRUE(whole.ok()) << whole.status();
  for (const int64_t rows : {199, 64, 1, 0}) {
    encoded.num_rows = rows;
    const absl::StatusOr<DecodedReplay> cut = decode_replay(layout, encoded, 200);
    ASSERT_TRUE(cut.ok()) << cut.status();
    EXPECT_TRUE(std::equal(cut->experts.begin(), cut->experts.end(), whole->experts.begin()));
    for (size_t i = 0; i < cut->selections.size(); ++i) {
      const auto& a = cut->selections[i];
      EXPECT_EQ(static_cast<int64_t>(a.row_end.size()), rows);
      EXPECT_TRUE(std::equal(a.positions.begin(), a.positions.end(), whole->selections[i].positions.begin()));
    }
  }
  encoded.num_rows = 200;
  encoded.experts.pop_back();
  EXPECT_FALSE(decode_replay(layout, encoded, 200).ok());
}

TEST_F(ReplayTest, GarbageIsHarmless) {
  const ModelConfig config = config_of({.experts = 7});
  const ReplayLayout layout = ReplayLayout::of(config);
  const Choices choices = make_choices(config, 200, Pattern::kMoving, 3, arena_);
  const EncodedReplay good = encode(config, choices, 0, 200);
  std::mt19937_64 random(9);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    EncodedReplay bad = good;
    std::string& bytes = i % 2 == 0 ? bad.selections : bad.experts;
    if (i % 3 == 0) bytes.resize(random() % bytes.size());
    if (i % 3 == 1) bytes[random() % bytes.size()] = static_cast<char>(random());
    if (i % 3 == 2) bytes += static_cast<char>(random());
    if (!decode_replay(layout, bad, 200).ok()) ++refused;
  }
  EXPECT_GT(refused, 100);
  for (const int64_t rows : {int64_t{-1}, int64_t{201}, INT64_MAX}) {
    EncodedReplay bad = good;
    bad.num_rows = rows;
    EXPECT_FALSE(decode_replay(layout, bad, 200).ok());
  }
}

}  // namespace
}  // namespace slipstream::model
