// Which rows the next forward pass computes: continuous batching with chunked prefill over one paged cache.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "model/cache.h"
#include "rollout/generation.h"
#include "rollout/prefix_cache.h"

namespace slipstream::rollout {

// What happens to rows computed by older weights when new ones come.
enum class OnUpdate { kRecompute, kKeep };

struct SchedulerLimits {
  int64_t max_running = 64;       // sequences in the cache at once; at most step_tokens_max
  int64_t step_tokens_max = 512;  // rows of one forward pass
  int64_t prefix_sessions_max = 64;
};

// The next `count` ids of a generation; when they are its last, the pass samples a token.
struct Piece {
  Generation* generation;
  int64_t count;
  bool samples() const { return count == generation->pending(); }
};

// Owns the generations and their places in the cache. Waiting ones are admitted in order of arrival, except
// those that need newer weights, which hold up nobody. When memory runs out, kept prefixes go first, then the
// youngest running generation waits again, to be recomputed from its ids. One thread.
class Scheduler {
 public:
  // The cache outlives it and has max_running + prefix_sessions_max sequences.
  Scheduler(const SchedulerLimits& limits, OnUpdate on_update, model::Cache& cache);

  void add(std::unique_ptr<Generation> generation);
  // The pieces of the next pass: single tokens first, then prefills, with room in the cache. Empty: nothing
  // can run. Pointers are good until the next call of anything else but stored().
  std::vector<Piece> plan(int32_t policy_version);
  // A pass with weights of this version has computed the piece's rows.
  static void stored(const Piece& piece, int32_t policy_version);
  // Takes out a generation. keep_prefix: its rows stay for the session's next request. Null: unknown handle.
  std::unique_ptr<Generation> remove(uint64_t handle, bool keep_prefix);
  void erase_prefix(const std::string& session_id) { prefixes_.erase(session_id); }
  // New weights: with kRecompute, running generations start again from their ids and prefixes are gone.
  void weights_changed();

  void visit(const std::function<void(const Generation&)>& visitor) const;  // all of them
  int64_t running() const { return static_cast<int64_t>(running_.size()); }
  int64_t waiting() const { return static_cast<int64_t>(waiting_.size()); }
  int64_t preemptions() const { return preemptions_; }
  const PrefixCache& prefixes() const { return prefixes_; }

 private:
  using ByAge = std::map<uint64_t, std::unique_ptr<Generation>>;
  void admit(int32_t policy_version);
  bool fits(const Generation& generation) const;
  void start(Generation& generation);
  void restart(Generation& generation);
  void release(Generation& generation);
  void preempt(uint64_t handle, std::vector<Piece>& pieces);
  bool make_room(const Generation& generation, int64_t count, std::vector<Piece>& pieces);

  SchedulerLimits limits_;
  OnUpdate on_update_;
  model::Cache& cache_;
  PrefixCache prefixes_;
  ByAge waiting_, running_;
  int64_t preemptions_ = 0;
};

}  // namespace slipstream::rollout
