// Sequences kept between the requests of a session, so that the next prompt is not computed again.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/cache.h"

namespace slipstream::rollout {

// Owns the cache sequences it holds: at most sessions_max, the least recently used go first. One thread.
class PrefixCache {
 public:
  struct Entry {
    std::vector<int32_t> ids;  // one for each stored row
    int64_t cache_id = -1;
    int32_t oldest_version = 0;
  };

  PrefixCache(model::Cache& cache, int64_t sessions_max) : cache_(cache), sessions_max_(sessions_max) {}
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  // Replaces what the session had.
  void put(const std::string& session_id, Entry entry);
  // Hands over the session's sequence when `prompt` goes on from it, with at least one more id. A prompt that
  // differs earlier frees it: recurrent states cannot go back.
  std::optional<Entry> take(const std::string& session_id, const std::vector<int32_t>& prompt);
  void erase(const std::string& session_id);
  bool evict_oldest();  // false: empty
  void clear();

  int64_t pages() const { return pages_; }  // token pages held
  int64_t sessions() const { return static_cast<int64_t>(by_session_.size()); }

 private:
  struct Held {
    std::string session_id;
    Entry entry;
  };
  using Position = std::list<Held>::iterator;
  Entry remove(Position position);
  void free(Position position);

  model::Cache& cache_;
  int64_t sessions_max_;
  std::list<Held> by_use_;  // the oldest first
  std::unordered_map<std::string, Position> by_session_;
  int64_t pages_ = 0;
};

}  // namespace slipstream::rollout
