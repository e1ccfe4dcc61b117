// Sessions of agents that drive themselves: they ask for turns and report the reward (gateway.proto).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/metrics.h"
#include "gateway/answers.h"
#include "gateway/chat_stream.h"
#include "gateway/config.h"
#include "gateway/engine_client.h"
#include "gateway/episode.h"
#include "gateway/executor.h"
#include "gateway/session.h"
#include "slipstream/v1/gateway.pb.h"

namespace slipstream::gateway {

// Thread-safe; no call blocks. Errors are those of gateway.proto, and FailedPrecondition: a turn of the session is under way,
// or it is over; NotFound: no such session; Unavailable: the gateway stops.
class DrivingSessions {
 public:
  using FinishDone = std::function<void(absl::StatusOr<v1::FinishResponse>)>;
  static constexpr int kTurnsMax = 1'024;                 // at once; more wait
  static constexpr int64_t kAnswerBytesMax = 256 << 20;   // of turns that are kept for repetitions

  // What the arguments refer to outlives it.
  DrivingSessions(const GatewayConfig& config, EpisodeSource& source, EngineClient& engine, const model::ChatFormat& format,
                  Metrics& metrics, Logger log);
  ~DrivingSessions();

  absl::StatusOr<v1::OpenSessionResponse> open(const v1::OpenSessionRequest& request);
  // The turn runs to its end whoever reads the stream.
  absl::StatusOr<std::shared_ptr<ChatStream>> chat(const v1::ChatRequest& request);
  // `done` is called once, when the trajectory is on disk or the call has failed.
  void finish(const v1::FinishRequest& request, FinishDone done);
  absl::StatusOr<v1::GetSessionResponse> get(const v1::GetSessionRequest& request) const;

  // Cancels the turns under way and gives the open sessions' episodes back.
  void stop();
  double engine_seconds() const;  // of turns that ended

 private:
  enum class State { kOpen, kFinished, kFailed, kExpired };
  struct Entry {
    EpisodePlan plan;
    v1::Sampling sampling;
    int64_t start_time_us = 0;
    State state = State::kOpen;
    bool busy = false;                 // whoever set it has the session to himself
    std::unique_ptr<Session> session;  // while open
    absl::Time last_used;
    int64_t num_turns = 0, num_tokens = 0, engine_time_us = 0;
  };
  // The answer to Finish, for as many calls as ask for it.
  struct Finishing {
    std::optional<absl::StatusOr<v1::FinishResponse>> result;
    std::vector<FinishDone> waiting;
  };

  absl::StatusOr<std::shared_ptr<Entry>> take(const std::string& session_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void run_turn(const v1::ChatRequest& request, Entry& entry, ChatStream& stream);
  absl::StatusOr<v1::ChatEvent> sample_turn(const v1::ChatRequest& request, Entry& entry, ChatStream& stream);
  void run_finish(const v1::FinishRequest& request, std::shared_ptr<Entry> entry);
  void finished(const v1::FinishRequest& request, Entry& entry, absl::StatusOr<uint64_t> offset);
  v1::Trajectory trajectory(const Entry& entry, v1::FinishReason reason) const;
  void close(Entry& entry, State state) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void expire(std::stop_token stop);
  void expire_one(std::shared_ptr<Entry> entry);

  const GatewayConfig config_;
  EpisodeSource& source_;
  EngineClient& engine_;
  const model::ChatFormat& format_;
  Metrics& metrics_;
  const Logger log_;
  std::stop_source stop_;

  mutable absl::Mutex mutex_;
  absl::CondVar written_;
  absl::flat_hash_map<std::string, std::shared_ptr<Entry>> sessions_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> closed_ ABSL_GUARDED_BY(mutex_);  // in sessions_ too, until there are many
  int num_open_ ABSL_GUARDED_BY(mutex_) = 0;
  int num_writing_ ABSL_GUARDED_BY(mutex_) = 0;  // trajectories on their way to the disk
  int64_t engine_time_us_ ABSL_GUARDED_BY(mutex_) = 0;
  Answers<v1::OpenSessionResponse> opened_ ABSL_GUARDED_BY(mutex_);
  Answers<ChatStream> chats_ ABSL_GUARDED_BY(mutex_);
  Answers<Finishing> finishes_ ABSL_GUARDED_BY(mutex_);

  Executor turns_, writes_;
  std::jthread expirer_;
};

}  // namespace slipstream::gateway
