// Consistent hashing: which worker a session belongs to (gateway-spec, "Routing"). Karger et al. 1997; the bound on a node's
// load is of Mirrokni, Thorup and Zadimoghaddam 2016, arXiv:1608.01350.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>

namespace slipstream::gateway {

// The same on every machine and in every build. Not for adversaries.
uint64_t stable_hash(std::string_view text);

// Nodes on a circle, each at many points. One thread.
class HashRing {
 public:
  static constexpr int kVirtualNodes = 128;  // shares differ by about 1 / sqrt(128)

  void add(const std::string& node);     // adding it again changes nothing
  void remove(const std::string& node);  // nor does removing an unknown one
  bool empty() const { return points_.empty(); }
  int64_t num_nodes() const { return static_cast<int64_t>(nodes_.size()); }

  // The first node at or after the key's point that `accepts`; null when none does. Every node is asked once at most.
  const std::string* find(std::string_view key, const std::function<bool(const std::string&)>& accepts) const;

 private:
  std::map<uint64_t, std::string> points_;
  std::set<std::string> nodes_;
};

// Most keys one of `num_nodes` nodes may hold while `num_keys` are held in all: ceil(1.25 * mean).
int64_t bounded_load(int64_t num_keys, int64_t num_nodes);

}  // namespace slipstream::gateway
