#include "cli/signals.h"

#include <unistd.h>

#include <condition_variable>
#include <csignal>
#include <ctime>
#include <mutex>

namespace slipstream::cli {
namespace {

sigset_t stop_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGTERM);
  return set;
}

}  // namespace

SignalStop::SignalStop() {
  const sigset_t set = stop_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  thread_ = std::jthread([this, set](std::stop_token ended) {
    for (int count = 0; !ended.stop_requested();) {
      const timespec tick{.tv_sec = 0, .tv_nsec = 100'000'000};
      if (sigtimedwait(&set, nullptr, &tick) < 0) continue;
      if (++count == 2) _exit(130);
      source_.request_stop();
    }
  });
}

SignalStop::~SignalStop() { thread_.request_stop(); }

void SignalStop::fail(absl::Status why) {
  {
    const std::lock_guard lock(mutex_);
    if (!failure_.ok() || source_.stop_requested()) return;
    failure_ = std::move(why);
  }
  source_.request_stop();
}

absl::Status SignalStop::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

absl::Status SignalStop::wait() {
  std::mutex mutex;
  std::condition_variable_any woken;
  std::unique_lock lock(mutex);
  woken.wait(lock, token(), [] { return false; });
  return failure();
}

}  // namespace slipstream::cli
