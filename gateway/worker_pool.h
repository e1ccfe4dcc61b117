// Which rollout workers are up, and which of them a session goes to.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/throttle.h"
#include "common/status.h"
#include "gateway/hash_ring.h"
#include "slipstream/v1/gateway.pb.h"
#include "slipstream/v1/rollout.pb.h"

namespace slipstream::gateway {

// One life of a worker: a restart is another.
struct Worker {
  std::string id;
  std::string address;  // of its Rollout service
  int64_t start_time_us = 0;
  int max_concurrent = 0;
  int max_context = 0;
  std::stop_token gone;  // requested when the pool gives this life up: what runs there will not end
};

// Thread-safe.
class WorkerPool {
 public:
  struct Options {
    int heartbeat_ms = 2'000;
    int heartbeat_misses = 3;  // a worker is dead after this many
  };
  static constexpr int64_t kWorkersMax = 4'096;  // known at once, dead ones included

  WorkerPool(Options options, Metrics& metrics, Logger log);
  ~WorkerPool();

  // ---- the Workers service
  // Registering again is harmless; a later start_time_us ends the earlier life. InvalidArgument: names the field.
  // AlreadyExists: a later life of this worker is up.
  absl::Status add(const v1::RegisterRequest& request);
  // NotFound: unknown, dead, or another life; the worker registers again. InvalidArgument: names the field.
  absl::Status heartbeat(const v1::HeartbeatRequest& request);
  void remove(const v1::UnregisterRequest& request);  // unknown: nothing happens
  int heartbeat_ms() const { return options_.heartbeat_ms; }

  // ---- routing
  // The session's worker: the one it had while that one is up, else the next on the ring with less than 1.25 times the mean
  // number of sessions. When workers join, the sessions whose share they take move at their next call. Waits while none is
  // up. DeadlineExceeded, Cancelled.
  absl::StatusOr<std::shared_ptr<const Worker>> route(const std::string& session_id, absl::Time deadline,
                                                      std::stop_token cancel);
  // The session is over. Returns the worker that has its cache, null when none has.
  std::shared_ptr<const Worker> release(const std::string& session_id);
  // A call to it failed as if it were not there: nothing is sent to it until its next heartbeat.
  void suspect(const Worker& worker);

  // ---- reports
  std::vector<v1::WorkerStatus> status() const;
  // Since this object was made, over all lives: tokens generated, and idle seconds as a mean over workers.
  uint64_t generated_tokens() const;
  double idle_seconds() const;

 private:
  struct Entry {
    std::shared_ptr<Worker> worker;
    std::stop_source gone;
    bool up = false;
    bool draining = false;
    bool suspected = false;
    absl::Time last_heartbeat;
    int64_t joined = 0;    // the epoch in which it entered the ring
    int64_t sessions = 0;  // assigned to it
    int policy_version = 0;
    int running = 0;
    // Of this life, and of the lives before.
    uint64_t generated_tokens = 0, generated_tokens_before = 0;
    double idle_seconds = 0, idle_seconds_before = 0;
  };
  struct Assignment {
    std::string worker_id;
    int64_t epoch = 0;
  };

  void watch(std::stop_token stop);
  void join(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void leave(Entry& entry, const char* why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void forget_one_dead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry* find(const std::string& id, int64_t start_time_us) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool usable(const std::string& id) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::shared_ptr<const Worker> choose(const std::string& session_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void assign(Assignment& assignment, const std::string& worker_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Options options_;
  Metrics& metrics_;
  const Logger log_;
  mutable absl::Mutex mutex_;
  absl::CondVar changed_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  HashRing ring_ ABSL_GUARDED_BY(mutex_);  // workers that are up and not draining
  int64_t epoch_ ABSL_GUARDED_BY(mutex_) = 0;  // counts joins
  absl::flat_hash_map<std::string, Assignment> sessions_ ABSL_GUARDED_BY(mutex_);
  Throttle waits_{absl::Seconds(30)};
  std::unique_ptr<Metrics::Collector> collector_;
  std::jthread watcher_;
};

}  // namespace slipstream::gateway
