// What ends a role: Ctrl-C, SIGTERM, and failures that no waiting mends, as one stop token.
#pragma once

#include <mutex>
#include <stop_token>
#include <thread>

#include "absl/status/status.h"

namespace slipstream::cli {

// Made before any other thread starts, so that all inherit the blocked signals. The first SIGINT or SIGTERM requests a stop;
// the second ends the process at once.
class SignalStop {
 public:
  SignalStop();
  ~SignalStop();
  std::stop_token token() const { return source_.get_token(); }
  // Requests a stop for this reason, unless one was requested before. Any thread.
  void fail(absl::Status why);
  // The reason of the stop; OK: a signal, or there was none.
  absl::Status failure() const;
  // Waits for the stop; failure().
  absl::Status wait();

 private:
  mutable std::mutex mutex_;
  absl::Status failure_;  // under the mutex
  std::stop_source source_;
  std::jthread thread_;
};

}  // namespace slipstream::cli
