#include "learner/packing.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "common/check.h"

namespace slipstream::learner {
namespace {

// Longest first to the lightest rank so far: at worst a third above the best possible split.
std::vector<std::vector<int64_t>> split_over_ranks(absl::Span<const PackItem> items, int ranks) {
  std::vector<int64_t> order(items.size());
  std::iota(order.begin(), order.end(), 0);
  const auto tokens = [&](int64_t i) { return items[static_cast<size_t>(i)].tokens; };
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return tokens(a) > tokens(b); });
  std::vector<std::vector<int64_t>> out(static_cast<size_t>(ranks));
  std::vector<int64_t> load(out.size(), 0);
  for (const int64_t item : order) {
    const auto lightest = std::min_element(load.begin(), load.end()) - load.begin();
    out[static_cast<size_t>(lightest)].push_back(item);
    load[static_cast<size_t>(lightest)] += tokens(item);
  }
  for (std::vector<int64_t>& rank : out) std::sort(rank.begin(), rank.end());
  return out;
}

}  // namespace

std::vector<std::vector<MicroBatch>> pack(absl::Span<const PackItem> items, int64_t micro_batch_tokens,
                                          int ranks) {
  CHECK_GE(ranks, 1);
  std::vector<std::vector<MicroBatch>> out;
  for (const std::vector<int64_t>& mine : split_over_ranks(items, ranks)) {
    std::vector<MicroBatch>& batches = out.emplace_back();
    std::map<float, size_t> open;  // temperature -> the batch being filled
    for (const int64_t item : mine) {
      const PackItem& add = items[static_cast<size_t>(item)];
      const auto found = open.find(add.temperature);
      if (found == open.end() || batches[found->second].tokens + add.tokens > micro_batch_tokens) {
        open[add.temperature] = batches.size();
        batches.push_back({.items = {}, .temperature = add.temperature, .tokens = 0});
      }
      MicroBatch& batch = batches[open[add.temperature]];
      batch.items.push_back(item);
      batch.tokens += add.tokens;
    }
  }
  return out;
}

}  // namespace slipstream::learner
