#include "learner/publisher.h"

#include "learner/policy_weights.h"

namespace slipstream::learner {

absl::Status Publisher::publish(int32_t policy_version, const model::LoadedWeights& master,
                                kernels::Stream& stream) {
  ASSIGN_OR_RETURN(
      model::WeightStore copy,
      model::WeightStore::create_weights(master.config, kernels::DType::kF32, master.store.with_mtp()));
  convert_weights(master.store, copy, stream);
  auto snapshot = std::make_shared<const WeightSnapshot>(WeightSnapshot{policy_version, std::move(copy)});
  const absl::MutexLock lock(&mutex_);
  newest_ = std::move(snapshot);
  for (auto it = waiters_.begin(); it != waiters_.end();) {
    if (newest_->policy_version <= it->second.have) {
      ++it;
      continue;
    }
    it->second.ready(newest_);
    it = waiters_.erase(it);
  }
  return absl::OkStatus();
}

bool Publisher::asked() const {
  const absl::MutexLock lock(&mutex_);
  return next_id_ > 1;
}

void Publisher::withhold() {
  const absl::MutexLock lock(&mutex_);
  newest_ = nullptr;
}

int64_t Publisher::wait(int32_t have, Ready ready) {
  const absl::MutexLock lock(&mutex_);
  const int64_t id = next_id_++;
  if (closed_) {
    ready(nullptr);
  } else if (newest_ != nullptr && newest_->policy_version > have) {
    ready(newest_);
  } else {
    waiters_.emplace(id, Waiter{have, std::move(ready)});
  }
  return id;
}

bool Publisher::cancel(int64_t id) {
  const absl::MutexLock lock(&mutex_);
  return waiters_.erase(id) > 0;
}

void Publisher::close() {
  const absl::MutexLock lock(&mutex_);
  closed_ = true;
  for (auto& [id, waiter] : waiters_) waiter.ready(nullptr);
  waiters_.clear();
}

int32_t Publisher::policy_version() const {
  const absl::MutexLock lock(&mutex_);
  return newest_ == nullptr ? -1 : newest_->policy_version;
}

int64_t Publisher::waiting() const {
  const absl::MutexLock lock(&mutex_);
  return static_cast<int64_t>(waiters_.size());
}

}  // namespace slipstream::learner
