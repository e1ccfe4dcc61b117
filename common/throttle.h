// Repeated lines of a log: a fault that hits hundreds of episodes a second is told once in a while, with its count.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace slipstream {

// Thread-safe.
class Throttle {
 public:
  explicit Throttle(absl::Duration interval) : interval_(interval) {}

  // What to end the line with, which tells how many were left out since the last; nullopt: leave this one out.
  std::optional<std::string> pass(absl::Time now = absl::Now()) {
    const absl::MutexLock lock(&mutex_);
    if (now < next_) {
      ++left_out_;
      return std::nullopt;
    }
    std::string end = left_out_ == 0 ? "" : absl::StrCat(" (and ", left_out_, " more like it since the last such line)");
    next_ = now + interval_;
    left_out_ = 0;
    return end;
  }

 private:
  const absl::Duration interval_;
  absl::Mutex mutex_;
  absl::Time next_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace slipstream
