// Calls whose answers nobody waits for. For *_client.cc only: it includes gRPC.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <list>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace slipstream::gateway {

// Thread-safe. Its destructor cancels what is on its way and waits for it.
//
// A context keeps its channel alive, and the last channel to die joins the threads that gRPC calls back on: it must not die
// on one of those. So whatever a call holds is let go by our own threads, later, never by its callback.
class BackgroundCalls {
 public:
  using Begin = std::function<void(grpc::ClientContext*, std::function<void(grpc::Status)>)>;
  static constexpr size_t kMost = 4'096;  // more at once are not made: each of them may be missed

  BackgroundCalls() = default;
  ~BackgroundCalls() {
    const absl::MutexLock lock(&mutex_);
    for (Call& call : running_) call.context.TryCancel();
    mutex_.Await(absl::Condition(+[](std::list<Call>* running) { return running->empty(); }, &running_));
  }

  // `begin` makes an asynchronous call and has its second argument called at the end, after anything else that belongs to
  // the end. `state` is what the call needs until then: request, response, stub.
  void start(absl::Duration timeout, std::shared_ptr<void> state, const Begin& begin) {
    std::list<Call> fresh(1), ended;
    const std::list<Call>::iterator call = fresh.begin();
    call->state = std::move(state);
    call->context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
    {
      const absl::MutexLock lock(&mutex_);
      ended.swap(ended_);
      if (running_.size() >= kMost) return;
      running_.splice(running_.end(), fresh);
    }
    begin(&call->context, [this, call](const grpc::Status&) {
      const absl::MutexLock lock(&mutex_);
      ended_.splice(ended_.end(), running_, call);
    });
  }

 private:
  struct Call {
    grpc::ClientContext context;
    std::shared_ptr<void> state;
  };
  absl::Mutex mutex_;
  std::list<Call> running_ ABSL_GUARDED_BY(mutex_);
  std::list<Call> ended_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace slipstream::gateway
