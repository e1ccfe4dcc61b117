#include "gateway/chat_stream.h"

#include <utility>

namespace slipstream::gateway {

void ChatStream::add(v1::ChatEvent event) {
  {
    const absl::MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
  }
  wake();
}

void ChatStream::end(absl::Status status) {
  {
    const absl::MutexLock lock(&mutex_);
    end_ = std::move(status);
  }
  wake();
}

// Outside the lock: who is woken comes back at once with get().
void ChatStream::wake() {
  std::vector<std::function<void()>> waiting;
  {
    const absl::MutexLock lock(&mutex_);
    waiting.swap(waiting_);
  }
  for (const std::function<void()>& ready : waiting) ready();
}

std::optional<ChatStream::Next> ChatStream::get(size_t index, std::function<void()> ready) {
  const absl::MutexLock lock(&mutex_);
  if (index < events_.size()) return Next{events_[index], absl::OkStatus()};
  if (end_.has_value()) return Next{std::nullopt, *end_};
  waiting_.push_back(std::move(ready));
  return std::nullopt;
}

int64_t ChatStream::bytes() const {
  const absl::MutexLock lock(&mutex_);
  int64_t sum = 0;
  for (const v1::ChatEvent& event : events_) sum += static_cast<int64_t>(event.SpaceUsedLong());
  return sum;
}

}  // namespace slipstream::gateway
