// The client of one environment service: calls with deadlines, retries, checks of every answer, and a pause for a service
// that fails again and again.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "common/log.h"
#include "common/metrics.h"
#include "common/status.h"
#include "gateway/config.h"
#include "slipstream/v1/environment.pb.h"
#include "slipstream/v1/gateway.pb.h"

namespace slipstream::gateway {

// Thread-safe; calls block their caller. Errors are Cancelled (stop was requested), DeadlineExceeded (no answer in time) and
// whatever else the environment made of the call: what breaks the contract of environment.proto is Internal and names the field.
class EnvironmentClient {
 public:
  static constexpr int kAttempts = 5;                   // of a call that finds no service (Unavailable)

  // Called from the client's own thread with every valid answer to Describe: the first one, and one after each pause. An
  // error means that the answer will not do: the service stays down and is asked again.
  using OnDescribed = std::function<absl::Status(const v1::DescribeResponse&)>;
  // Before the service was first up, from the same thread: its answer to Describe will not do, which no waiting mends; or it
  // has not been up within start_timeout (DeadlineExceeded). Perhaps again: the service is asked on.
  using OnFailure = std::function<void(absl::Status)>;

  // Returns at once; the service is asked to describe itself until it does. What keeps it down is logged every 10 s.
  EnvironmentClient(EnvironmentConfig config, OnDescribed on_described, Metrics& metrics, Logger log,
                    OnFailure on_failure = nullptr, absl::Duration start_timeout = absl::InfiniteDuration());
  ~EnvironmentClient();

  // One of max_concurrent places; an open episode holds one until it is closed. nullopt: stop was requested.
  class Place {
   public:
    Place(Place&& other) noexcept : client_(std::exchange(other.client_, nullptr)) {}
    Place& operator=(Place&&) = delete;
    ~Place() { if (client_ != nullptr) client_->give_back_place(); }

   private:
    friend EnvironmentClient;
    explicit Place(EnvironmentClient* client) : client_(client) {}
    EnvironmentClient* client_;
  };
  std::optional<Place> take_place(std::stop_token stop);

  // While the service is paused a call waits for its return, within its deadline.
  absl::StatusOr<v1::ResetResponse> reset(const v1::ResetRequest& request, std::stop_token stop);
  absl::StatusOr<v1::StepResponse> step(const v1::StepRequest& request, std::stop_token stop);
  // Does not wait for the answer; the place is given back when there is one.
  void close(const std::string& episode_id, Place place);

  std::optional<v1::TaskDescription> task(const std::string& name) const;
  const EnvironmentConfig& config() const { return config_; }
  v1::EnvironmentStatus status() const;

 private:
  struct Stub;
  template <class Request, class Response>
  absl::StatusOr<Response> call(const char* name, int timeout_ms, const Request& request, std::stop_token stop,
                                const auto& method, const auto& validate);
  template <class Request, class Response>
  absl::Status call_until(absl::Time deadline, const Request& request, std::stop_token stop, const auto& method,
                          Response& response);
  bool wait_until_up(absl::Time deadline, std::stop_token stop);
  void record(const absl::Status& status);
  void keep_up(std::stop_token stop);
  absl::Status describe(std::stop_token stop, bool* answered);
  void report_down(const absl::Status& status, bool answered);
  void give_back_place();

  const EnvironmentConfig config_;
  const OnDescribed on_described_;
  const OnFailure on_failure_;
  const absl::Time start_deadline_;
  Metrics& metrics_;
  const Logger log_;
  mutable absl::Mutex mutex_;
  absl::CondVar changed_;
  bool up_ ABSL_GUARDED_BY(mutex_) = false;  // it described itself and is not paused
  bool was_up_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<v1::DescribeResponse> description_ ABSL_GUARDED_BY(mutex_);
  int failures_ ABSL_GUARDED_BY(mutex_) = 0;  // in a row
  absl::Duration pause_ ABSL_GUARDED_BY(mutex_);
  std::string last_error_ ABSL_GUARDED_BY(mutex_);
  absl::Time warned_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // of a Describe that failed
  int open_ ABSL_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<Stub> stub_;
  std::jthread keeper_;
};

}  // namespace slipstream::gateway
