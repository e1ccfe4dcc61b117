// Publisher: the newest published weights, for whoever serves them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "model/load.h"

namespace slipstream::learner {

// A copy that nobody changes: it can be streamed for as long as it takes while training goes on.
struct WeightSnapshot {
  int32_t policy_version;
  model::WeightStore weights;  // fp32
};

// Thread-safe. Holds one snapshot; older ones live as long as somebody streams them.
class Publisher {
 public:
  // Called once, with the snapshot, or null when the publisher closed. It must not block nor call the
  // publisher.
  using Ready = std::function<void(std::shared_ptr<const WeightSnapshot>)>;

  // Copies the masters and wakes everybody who waits for a version as new. ResourceExhausted: no memory for
  // the copy.
  absl::Status publish(int32_t policy_version, const model::LoadedWeights& master, kernels::Stream& stream);

  // Whether anybody ever waited. Until then versions may be withheld instead, without a copy: who comes then waits for one that is
  // published after all.
  bool asked() const;
  void withhold();

  // Calls `ready`, perhaps before it returns, once the newest version is above `have`. The id is for
  // cancel().
  int64_t wait(int32_t have, Ready ready);
  // True: `ready` was not called and never will be.
  bool cancel(int64_t id);
  // Wakes all with null, and from now on everybody who waits.
  void close();

  int32_t policy_version() const;  // -1: nothing to be had
  int64_t waiting() const;         // how many wait

 private:
  struct Waiter {
    int32_t have;
    Ready ready;
  };
  mutable absl::Mutex mutex_;
  std::shared_ptr<const WeightSnapshot> newest_ ABSL_GUARDED_BY(mutex_);
  std::map<int64_t, Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
  int64_t next_id_ ABSL_GUARDED_BY(mutex_) = 1;  // 1: nobody waited yet
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace slipstream::learner
