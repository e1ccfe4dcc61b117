// The gateway's end of the line to the learner, without a gateway: an endless sequence of groups, delivered,
// committed and delivered again as the contract says, with faults on demand.
#pragma once

#include <atomic>
#include <functional>
#include <future>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::learner::testing {

struct FakeGatewayOptions {
  std::function<v1::Group(uint64_t number, int policy_version)> group;  // rollouts
  std::function<v1::Group(uint64_t number)> demonstration;
  std::string address = "tcp://127.0.0.1:*";
  int parts = 1;                 // a batch comes in so many messages
  int drop_every = 0;            // every n-th message from the learner is lost; 0: none
  int repeat_replies = 1;        // each answer is sent so often
};

// Thread-safe.
class FakeGateway {
 public:
  explicit FakeGateway(FakeGatewayOptions options);
  ~FakeGateway();
  FakeGateway(const FakeGateway&) = delete;

  std::string address() const { return address_; }
  // As after SIGKILL: what is on disk (committed ids) stays, who the learner is and what was delivered is
  // forgotten.
  void restart();
  // The next answer to a Commit is not sent (the gateway dies between writing and replying).
  void lose_next_commit_reply() { lose_commit_reply_ = true; }
  // Sends bytes that are no message to whoever spoke last.
  void send_garbage();

  std::set<std::string> trained() const;               // ids of all commits
  std::map<std::string, std::string> dropped() const;  // id -> reason
  std::vector<v1::Hello> hellos() const;
  std::vector<v1::Commit> commits() const;
  std::vector<v1::BatchRequest> requests() const;  // repeated ones included
  bool heard_final() const;
  // Returns when a commit of this step or a later one has come; false after a minute without.
  bool wait_for_commit(int64_t step) const;

 private:
  // The thread: tells where it is bound, then answers.
  void serve(std::stop_token stop, std::promise<std::string>& bound);
  std::vector<v1::GatewayMessage> answer(const v1::LearnerMessage& message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void record(const v1::Commit& commit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<v1::GatewayMessage> batch(const v1::BatchRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Counts counts() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  FakeGatewayOptions options_;
  std::string address_;
  std::atomic<bool> lose_commit_reply_ = false;
  std::atomic<bool> garbage_ = false;
  mutable absl::Mutex mutex_;
  // On disk.
  std::set<std::string> trained_ ABSL_GUARDED_BY(mutex_);
  std::map<std::string, std::string> dropped_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> done_groups_ ABSL_GUARDED_BY(mutex_);
  // In memory.
  int64_t incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int64_t, std::vector<uint64_t>> delivered_ ABSL_GUARDED_BY(mutex_);  // step -> group numbers
  // Records.
  bool final_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<v1::Hello> hellos_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::Commit> commits_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::BatchRequest> requests_ ABSL_GUARDED_BY(mutex_);
  std::jthread thread_;
};

}  // namespace slipstream::learner::testing
