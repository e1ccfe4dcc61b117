// Waiting between attempts.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <stop_token>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace slipstream::gateway {

// Sleeps for `length` or until stop is requested, which it says by false.
inline bool pause(absl::Duration length, std::stop_token stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock lock(mutex);
  never.wait_for(lock, stop, absl::ToChronoNanoseconds(length), [] { return false; });
  return !stop.stop_requested();
}

// Lengths of successive pauses: doubling up to a bound.
class Backoff {
 public:
  Backoff(absl::Duration first, absl::Duration most) : first_(first), most_(most), next_(first) {}
  absl::Duration next() {
    const absl::Duration now = next_;
    next_ = std::min(2 * next_, most_);
    return now;
  }
  void reset() { next_ = first_; }

 private:
  absl::Duration first_, most_, next_;
};

}  // namespace slipstream::gateway
