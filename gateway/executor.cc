#include "gateway/executor.h"

#include <utility>

namespace slipstream::gateway {

bool Executor::submit(std::function<void()> task) {
  const absl::MutexLock lock(&mutex_);
  if (stopped_ || tasks_.size() >= queue_max_) return false;
  tasks_.push_back(std::move(task));
  if (tasks_.size() > idle_ && threads_.size() < static_cast<size_t>(threads_max_)) threads_.emplace_back([this] { work(); });
  return true;
}

void Executor::stop() {
  std::vector<std::jthread> threads;
  {
    const absl::MutexLock lock(&mutex_);
    stopped_ = true;
    threads.swap(threads_);
  }
  threads.clear();  // joins
}

void Executor::work() {
  while (true) {
    std::function<void()> task;
    {
      const absl::MutexLock lock(&mutex_);
      ++idle_;
      mutex_.Await(absl::Condition(this, &Executor::has_work_or_stops));
      --idle_;
      if (tasks_.empty()) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    task();
  }
}

}  // namespace slipstream::gateway
