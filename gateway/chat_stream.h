// The events of one turn of a driving agent: written once, read by the call that asked for it and by its repetitions.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "common/status.h"
#include "slipstream/v1/gateway.pb.h"

namespace slipstream::gateway {

// Thread-safe. One writer.
class ChatStream {
 public:
  void add(v1::ChatEvent event);
  void end(absl::Status status);  // nothing is added after it

  struct Next {
    std::optional<v1::ChatEvent> event;  // none: the stream has ended
    absl::Status status;                 // then: how
  };
  // Event `index`, or the end. nullopt: neither is there yet, and `ready` will be called once when one is.
  std::optional<Next> get(size_t index, std::function<void()> ready);

  int64_t bytes() const;  // what its events take, about

 private:
  void wake();

  mutable absl::Mutex mutex_;
  std::vector<v1::ChatEvent> events_ ABSL_GUARDED_BY(mutex_);
  std::optional<absl::Status> end_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::function<void()>> waiting_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace slipstream::gateway
