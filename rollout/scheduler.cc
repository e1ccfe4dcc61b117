#include "rollout/scheduler.h"

#include <algorithm>

#include "common/check.h"

namespace slipstream::rollout {

Scheduler::Scheduler(const SchedulerLimits& limits, OnUpdate on_update, model::Cache& cache)
    : limits_(limits), on_update_(on_update), cache_(cache), prefixes_(cache, limits.prefix_sessions_max) {
  CHECK_LE(limits.max_running, limits.step_tokens_max);
}

void Scheduler::add(std::unique_ptr<Generation> generation) {
  waiting_[generation->handle] = std::move(generation);
}

std::vector<Piece> Scheduler::plan(int32_t policy_version) {
  admit(policy_version);
  std::vector<Piece> pieces;
  int64_t budget = limits_.step_tokens_max;
  for (const bool prefill : {false, true}) {
    // make_room may preempt any generation, this one included, so the next is found by its age.
    for (auto it = running_.begin(); it != running_.end() && budget > 0;) {
      const uint64_t handle = it->first;
      Generation& generation = *it->second;
      if ((generation.pending() > 1) == prefill) {
        const int64_t count = std::min(generation.pending(), budget);
        if (make_room(generation, count, pieces)) {
          pieces.push_back({&generation, count});
          budget -= count;
        }
      }
      it = running_.upper_bound(handle);
    }
  }
  return pieces;
}

void Scheduler::stored(const Piece& piece, int32_t policy_version) {
  Generation& generation = *piece.generation;
  generation.oldest_version =
      generation.rows == 0 ? policy_version : std::min(generation.oldest_version, policy_version);
  generation.rows += piece.count;
}

std::unique_ptr<Generation> Scheduler::remove(uint64_t handle, bool keep_prefix) {
  for (ByAge* list : {&running_, &waiting_}) {
    const auto it = list->find(handle);
    if (it == list->end()) continue;
    std::unique_ptr<Generation> generation = std::move(it->second);
    list->erase(it);
    if (keep_prefix && generation->cache_id >= 0 && generation->rows > 0 &&
        !generation->request.session_id.empty()) {
      std::vector<int32_t> ids(generation->ids.begin(), generation->ids.begin() + generation->rows);
      prefixes_.put(generation->request.session_id,
                    {std::move(ids), std::exchange(generation->cache_id, -1), generation->oldest_version});
    }
    release(*generation);
    return generation;
  }
  return nullptr;
}

void Scheduler::weights_changed() {
  if (on_update_ == OnUpdate::kKeep) return;
  prefixes_.clear();
  for (const auto& [handle, generation] : running_) restart(*generation);
}

void Scheduler::visit(const std::function<void(const Generation&)>& visitor) const {
  for (const ByAge* list : {&running_, &waiting_}) {
    for (const auto& [handle, generation] : *list) visitor(*generation);
  }
}

void Scheduler::admit(int32_t policy_version) {
  for (auto it = waiting_.begin(); it != waiting_.end() && running() < limits_.max_running;) {
    Generation& generation = *it->second;
    if (generation.request.min_policy_version > policy_version) {
      ++it;
      continue;
    }
    if (!fits(generation)) return;  // nobody overtakes it: it would starve
    start(generation);
    running_[it->first] = std::move(it->second);
    it = waiting_.erase(it);
  }
}

// Whether its ids and the next one find room beside what the running ones will still need for theirs.
bool Scheduler::fits(const Generation& generation) const {
  if (running_.empty()) return true;
  const model::CacheUsage usage = cache_.usage();
  int64_t free = usage.pages_total - usage.pages_used + prefixes_.pages();
  for (const auto& [handle, other] : running_) {
    const int64_t held = static_cast<int64_t>(cache_.sequence(other->cache_id).pages.size());
    free -= std::max<int64_t>(model::pages_for(other->tokens() + 1) - held, 0);
  }
  return model::pages_for(generation.tokens() + 1) <= free;
}

void Scheduler::start(Generation& generation) {
  if (!generation.admitted) {
    generation.admitted = true;
    if (std::optional<PrefixCache::Entry> entry =
            prefixes_.take(generation.request.session_id, generation.ids)) {
      generation.cache_id = entry->cache_id;
      generation.rows = generation.cached_tokens = static_cast<int64_t>(entry->ids.size());
      generation.oldest_version = entry->oldest_version;
      return;
    }
  }
  absl::StatusOr<int64_t> id = cache_.open();
  while (!id.ok() && prefixes_.evict_oldest()) id = cache_.open();
  CHECK_OK(id.status());  // there are sequences for max_running
  generation.cache_id = *id;
  generation.rows = 0;
}

// Its rows are computed again from its ids; what was sampled stays.
void Scheduler::restart(Generation& generation) {
  release(generation);
  start(generation);
}

void Scheduler::release(Generation& generation) {
  if (generation.cache_id >= 0) CHECK_OK(cache_.free(generation.cache_id));
  generation.cache_id = -1;
  generation.rows = 0;
}

void Scheduler::preempt(uint64_t handle, std::vector<Piece>& pieces) {
  const auto it = running_.find(handle);
  std::erase_if(pieces, [&](const Piece& piece) { return piece.generation == it->second.get(); });
  release(*it->second);
  waiting_[handle] = std::move(it->second);
  running_.erase(it);
  ++preemptions_;
}

bool Scheduler::make_room(const Generation& generation, int64_t count, std::vector<Piece>& pieces) {
  while (!cache_.reserve(generation.cache_id, count).ok()) {
    if (prefixes_.evict_oldest()) continue;
    const uint64_t youngest = running_.rbegin()->first;
    CHECK(running_.size() > 1);  // one alone always has room: longer ones are refused or end
    preempt(youngest, pieces);
    if (youngest == generation.handle) return false;
  }
  return true;
}

}  // namespace slipstream::rollout
