#include "gateway/hash_ring.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/strings/str_cat.h"

namespace slipstream::gateway {
namespace {

bool any(const std::string&) { return true; }

std::map<std::string, std::string> owners(const HashRing& ring, int num_keys) {
  std::map<std::string, std::string> out;
  for (int i = 0; i < num_keys; ++i) {
    const std::string key = absl::StrCat("run-g", i / 8, "-", i % 8);
    out[key] = *ring.find(key, any);
  }
  return out;
}

// Goal: a node that joins takes keys only for itself, about its share; when it leaves, every key is where it was.
TEST(HashRingTest, JoiningAndLeavingMovesOnlyTheShare) {
  constexpr int kKeys = 4000;
  for (int num_nodes = 1; num_nodes <= 9; ++num_nodes) {
    HashRing ring;
    for (int i = 0; i < num_nodes; ++i) ring.add(absl::StrCat("worker", i));
    const auto before = owners(ring, kKeys);
    ring.add("new");
    const auto during = owners(ring, kKeys);
    int moved = 0;
    for (const auto& [key, node] : during) {
      if (node == before.at(key)) continue;
      EXPECT_EQ(node, "new") << key;
      ++moved;
    }
    EXPECT_GT(moved, 0.6 * kKeys / (num_nodes + 1));
    EXPECT_LT(moved, 1.5 * kKeys / (num_nodes + 1));
    ring.remove("new");
    EXPECT_EQ(owners(ring, kKeys), before);
  }
}

TEST(HashRingTest, OrderOfJoiningDoesNotMatter) {
  HashRing one, other;
  for (int i = 0; i < 8; ++i) one.add(absl::StrCat("w", i));
  for (int i = 7; i >= 0; --i) other.add(absl::StrCat("w", i));
  other.add("w3");
  other.add("gone");
  other.remove("gone");
  EXPECT_EQ(owners(one, 1000), owners(other, 1000));
}

TEST(HashRingTest, AsksEachNodeOnceAndTheOwnerFirst) {
  HashRing ring;
  EXPECT_EQ(ring.find("k", any), nullptr);
  for (int i = 0; i < 5; ++i) ring.add(absl::StrCat("w", i));
  std::vector<std::string> asked;
  EXPECT_EQ(ring.find("k", [&](const std::string& node) { return asked.push_back(node), false; }), nullptr);
  EXPECT_EQ(asked.size(), 5u);
  EXPECT_EQ(std::set<std::string>(asked.begin(), asked.end()).size(), 5u);
  EXPECT_EQ(*ring.find("k", any), asked[0]);
  EXPECT_EQ(*ring.find("k", [&](const std::string& node) { return node != asked[0]; }), asked[1]);
}

// Goal: with the bound no node holds more than 1.25 times the mean, however keys and nodes fall, and one always has room.
TEST(HashRingTest, BoundedLoadHolds) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20; ++round) {
    HashRing ring;
    const int num_nodes = 1 + static_cast<int>(random() % 7);
    for (int i = 0; i < num_nodes; ++i) ring.add(absl::StrCat("w", random()));
    std::map<std::string, int64_t> held;
    for (int64_t i = 1; i <= 500; ++i) {
      const int64_t most = bounded_load(i, num_nodes);
      const std::string* node =
          ring.find(absl::StrCat(random()), [&](const std::string& name) { return held[name] < most; });
      ASSERT_NE(node, nullptr);
      ++held[*node];
      for (const auto& [name, count] : held) ASSERT_LE(count, bounded_load(i, num_nodes));
    }
  }
  EXPECT_EQ(bounded_load(1, 1), 2);  // a node alone is never full
  EXPECT_EQ(bounded_load(4, 4), 2);
  EXPECT_EQ(bounded_load(100, 4), 32);
}

}  // namespace
}  // namespace slipstream::gateway
