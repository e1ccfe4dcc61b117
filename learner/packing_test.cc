// Goal: every sample once, budgets kept, temperatures apart, ranks balanced, the same split every time.
#include "learner/packing.h"

#include <algorithm>
#include <set>

#include "gtest/gtest.h"

namespace slipstream::learner {
namespace {

std::vector<PackItem> make_items(size_t count) {
  std::vector<PackItem> items;
  uint64_t state = 7;
  for (size_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    items.push_back(
        {.tokens = static_cast<int64_t>((state >> 33) % 300 + 1), .temperature = i % 3 == 0 ? 0.7f : 1.0f});
  }
  return items;
}

TEST(Packing, EverySampleOnceWithinBudget) {
  for (const int ranks : {1, 2, 5}) {
    const std::vector<PackItem> items = make_items(101);
    std::set<int64_t> seen;
    std::vector<int64_t> load;
    for (const auto& rank : pack(items, 256, ranks)) {
      load.push_back(0);
      for (const MicroBatch& batch : rank) {
        int64_t tokens = 0;
        for (const int64_t item : batch.items) {
          EXPECT_TRUE(seen.insert(item).second);
          EXPECT_EQ(items[static_cast<size_t>(item)].temperature, batch.temperature);
          tokens += items[static_cast<size_t>(item)].tokens;
        }
        EXPECT_EQ(tokens, batch.tokens);
        EXPECT_TRUE(tokens <= 256 || batch.items.size() == 1);
        EXPECT_TRUE(std::is_sorted(batch.items.begin(), batch.items.end()));
        load.back() += tokens;
      }
    }
    EXPECT_EQ(seen.size(), items.size());
    ASSERT_EQ(load.size(), static_cast<size_t>(ranks));
    EXPECT_LE(*std::max_element(load.begin(), load.end()) - *std::min_element(load.begin(), load.end()), 300);
  }
}

TEST(Packing, IsAFunctionOfItsArguments) {
  const std::vector<PackItem> items = make_items(64);
  const auto first = pack(items, 512, 3), second = pack(items, 512, 3);
  for (size_t r = 0; r < first.size(); ++r) {
    ASSERT_EQ(first[r].size(), second[r].size());
    for (size_t b = 0; b < first[r].size(); ++b) EXPECT_EQ(first[r][b].items, second[r][b].items);
  }
}

TEST(Packing, NothingAndFewerSamplesThanRanks) {
  EXPECT_EQ(pack({}, 100, 2).size(), 2u);
  const std::vector<PackItem> one = {{.tokens = 1000}};
  const auto split = pack(one, 100, 3);
  EXPECT_EQ(split[0].size(), 1u);
  EXPECT_TRUE(split[1].empty() && split[2].empty());
}

}  // namespace
}  // namespace slipstream::learner
