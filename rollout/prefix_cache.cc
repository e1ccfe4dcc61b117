#include "rollout/prefix_cache.h"

#include <algorithm>

namespace slipstream::rollout {
namespace {

bool extends(const std::vector<int32_t>& prompt, const std::vector<int32_t>& ids) {
  return prompt.size() > ids.size() && std::equal(ids.begin(), ids.end(), prompt.begin());
}

}  // namespace

void PrefixCache::put(const std::string& session_id, Entry entry) {
  erase(session_id);
  if (sessions_max_ == 0) {
    CHECK_OK(cache_.free(entry.cache_id));
    return;
  }
  if (sessions() == sessions_max_) evict_oldest();
  pages_ += static_cast<int64_t>(cache_.sequence(entry.cache_id).pages.size());
  by_session_[session_id] = by_use_.insert(by_use_.end(), Held{session_id, std::move(entry)});
}

std::optional<PrefixCache::Entry> PrefixCache::take(const std::string& session_id,
                                                    const std::vector<int32_t>& prompt) {
  const auto it = by_session_.find(session_id);
  if (it == by_session_.end()) return std::nullopt;
  if (!extends(prompt, it->second->entry.ids)) {
    free(it->second);
    return std::nullopt;
  }
  return remove(it->second);
}

void PrefixCache::erase(const std::string& session_id) {
  if (const auto it = by_session_.find(session_id); it != by_session_.end()) free(it->second);
}

bool PrefixCache::evict_oldest() {
  if (by_use_.empty()) return false;
  free(by_use_.begin());
  return true;
}

void PrefixCache::clear() {
  while (evict_oldest()) {
  }
}

PrefixCache::Entry PrefixCache::remove(Position position) {
  Entry entry = std::move(position->entry);
  pages_ -= static_cast<int64_t>(cache_.sequence(entry.cache_id).pages.size());
  by_session_.erase(position->session_id);
  by_use_.erase(position);
  return entry;
}

void PrefixCache::free(Position position) { CHECK_OK(cache_.free(remove(position).cache_id)); }

}  // namespace slipstream::rollout
