#include "gateway/hash_ring.h"

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/hash.h"

namespace slipstream::gateway {

// FNV leaves the high bits of short keys alike.
uint64_t stable_hash(std::string_view text) { return mix64(fnv1a(text)); }

void HashRing::add(const std::string& node) {
  if (!nodes_.insert(node).second) return;
  // Two nodes on one point (2^-64 a pair): the lesser name has it, whichever came first.
  for (int i = 0; i < kVirtualNodes; ++i) {
    std::string& owner = points_[stable_hash(absl::StrCat(node, "#", i))];
    if (owner.empty() || node < owner) owner = node;
  }
}

void HashRing::remove(const std::string& node) {
  if (nodes_.erase(node) == 0) return;
  std::erase_if(points_, [&](const auto& point) { return point.second == node; });
}

const std::string* HashRing::find(std::string_view key, const std::function<bool(const std::string&)>& accepts) const {
  if (points_.empty()) return nullptr;
  std::set<std::string_view> asked;
  auto point = points_.lower_bound(stable_hash(key));
  for (size_t i = 0; i < points_.size() && asked.size() < nodes_.size(); ++i, ++point) {
    if (point == points_.end()) point = points_.begin();
    if (asked.insert(point->second).second && accepts(point->second)) return &point->second;
  }
  return nullptr;
}

int64_t bounded_load(int64_t num_keys, int64_t num_nodes) {
  CHECK_GT(num_nodes, 0);
  return (5 * num_keys + 4 * num_nodes - 1) / (4 * num_nodes);
}

}  // namespace slipstream::gateway
