// Calls whose answers nobody waits for. For *_client.cc only: it includes gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace slipstream::gateway {

// Thread-safe. Its destructor cancels what is on its way and waits for it.
class BackgroundCalls {
 public:
  using Start = std::function<void(grpc::ClientContext*, std::function<void(grpc::Status)>)>;
  static constexpr size_t kMost = 4'096;  // more at once are not made: each of them may be missed

  BackgroundCalls() = default;
  ~BackgroundCalls() {
    const absl::MutexLock lock(&mutex_);
    for (grpc::ClientContext* context : contexts_) context->TryCancel();
    mutex_.Await(absl::Condition(+[](BackgroundCalls* self) { return self->contexts_.empty(); }, this));
  }

  // `begin` makes an asynchronous call and has its argument called at the end.
  void start(absl::Duration timeout, const Start& begin) {
    auto context = std::make_shared<grpc::ClientContext>();
    context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    {
      const absl::MutexLock lock(&mutex_);
      if (contexts_.size() >= kMost) return;
      contexts_.insert(context.get());
    }
    begin(context.get(), [this, context](const grpc::Status&) {
      const absl::MutexLock lock(&mutex_);
      contexts_.erase(context.get());
    });
  }

 private:
  absl::Mutex mutex_;
  std::set<grpc::ClientContext*> contexts_;
};

}  // namespace slipstream::gateway
