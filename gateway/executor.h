// A bounded pool for work that blocks.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace slipstream::gateway {

// Threads are started when there is work for them and stay. Thread-safe.
class Executor {
 public:
  Executor(int threads_max, size_t queue_max) : threads_max_(threads_max), queue_max_(queue_max) {}
  ~Executor() { stop(); }

  // False: queue_max tasks wait already, or stop() was called. Tasks don't throw.
  bool submit(std::function<void()> task);
  // Runs what was submitted, then ends the threads.
  void stop();

 private:
  void work();
  bool has_work_or_stops() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return stopped_ || !tasks_.empty(); }

  const int threads_max_;
  const size_t queue_max_;
  absl::Mutex mutex_;
  std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  size_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::jthread> threads_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace slipstream::gateway
