// One generation on its way through the engine.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "rollout/request.h"

namespace slipstream::rollout {

struct Generation {
  uint64_t handle = 0;  // grows with arrival: the smaller, the older
  Request request;
  std::shared_ptr<Sink> sink;
  std::vector<int32_t> ids;  // prompt, then what was sampled

  // The stored part: ids[0, rows) are in cache sequence cache_id (-1: none).
  int64_t cache_id = -1;
  int64_t rows = 0;
  int32_t oldest_version = 0;  // of the stored rows; nothing while rows == 0

  bool admitted = false;  // has run before: the prefix cache was asked
  int64_t cached_tokens = 0;
  std::optional<model::ReplayEncoder> replay;
  absl::Time arrived, last_token;

  int64_t tokens() const { return static_cast<int64_t>(ids.size()); }
  int64_t pending() const { return tokens() - rows; }  // >= 1: the last id has no row yet
  int64_t sampled() const { return tokens() - static_cast<int64_t>(request.prompt_ids.size()); }
};

}  // namespace slipstream::rollout
