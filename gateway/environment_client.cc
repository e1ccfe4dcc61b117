#include "gateway/environment_client.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "gateway/background_calls.h"
#include "gateway/environment_answers.h"
#include "common/pause.h"
#include "proto/rpc.h"
#include "slipstream/v1/environment.grpc.pb.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kCloseTimeout = absl::Seconds(2);
constexpr absl::Duration kPauseMost = absl::Seconds(30);
constexpr absl::Duration kWarnEvery = absl::Seconds(10);
constexpr absl::Duration kFirstAsk = absl::Milliseconds(100);  // between the first Describes, while a service starts

}  // namespace

struct EnvironmentClient::Stub {
  std::unique_ptr<v1::Environment::Stub> stub;
  BackgroundCalls closes;
};

EnvironmentClient::EnvironmentClient(EnvironmentConfig config, OnDescribed on_described, Metrics& metrics, Logger log,
                                     OnFailure on_failure, absl::Duration start_timeout)
    : config_(std::move(config)),
      on_described_(std::move(on_described)),
      on_failure_(std::move(on_failure)),
      start_deadline_(absl::Now() + start_timeout),
      metrics_(metrics),
      log_(std::move(log)),
      pause_(absl::Milliseconds(config_.quarantine_ms)),
      stub_(std::make_unique<Stub>()) {
  stub_->stub = v1::Environment::NewStub(rpc::dial(config_.address));
  metrics_.set(metric::kEnvironmentUp, 0, {config_.name});
  keeper_ = std::jthread([this](std::stop_token stop) { keep_up(stop); });
}

EnvironmentClient::~EnvironmentClient() {
  keeper_.request_stop();
  keeper_.join();
  stub_.reset();  // waits for the closes, which give places back
}

std::optional<EnvironmentClient::Place> EnvironmentClient::take_place(std::stop_token stop) {
  const std::stop_callback wake(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  const absl::MutexLock lock(&mutex_);
  while (open_ >= config_.max_concurrent && !stop.stop_requested()) changed_.Wait(&mutex_);
  if (stop.stop_requested()) return std::nullopt;
  ++open_;
  return Place(this);
}

void EnvironmentClient::give_back_place() {
  const absl::MutexLock lock(&mutex_);
  --open_;
  changed_.SignalAll();
}

bool EnvironmentClient::wait_until_up(absl::Time deadline, std::stop_token stop) {
  const std::stop_callback wake(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  const absl::MutexLock lock(&mutex_);
  while (!up_ && !stop.stop_requested() && absl::Now() < deadline) changed_.WaitWithDeadline(&mutex_, deadline);
  return up_;
}

// One call until the deadline, repeated while nobody answers: its key makes that harmless.
template <class Request, class Response>
absl::Status EnvironmentClient::call_until(absl::Time deadline, const Request& request, std::stop_token stop,
                                           const auto& method, Response& response) {
  Backoff backoff(absl::Milliseconds(50), absl::Seconds(1));
  for (int attempt = 1;; ++attempt) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(deadline));
    grpc::Status status;
    {
      const std::stop_callback cancel(stop, [&] { context.TryCancel(); });
      status = (*stub_->stub.*method)(&context, request, &response);
    }
    if (stop.stop_requested()) return absl::CancelledError("the call was cancelled");
    if (status.error_code() != grpc::UNAVAILABLE || attempt == kAttempts) return rpc::from_grpc(status);
    const absl::Duration wait = backoff.next();
    if (absl::Now() + wait >= deadline) return rpc::from_grpc(status);
    if (!pause(wait, stop)) return absl::CancelledError("the call was cancelled");
  }
}

template <class Request, class Response>
absl::StatusOr<Response> EnvironmentClient::call(const char* name, int timeout_ms, const Request& request,
                                                 std::stop_token stop, const auto& method, const auto& validate_answer) {
  const absl::Time start = absl::Now();
  const absl::Time deadline = start + absl::Milliseconds(timeout_ms);
  const auto named = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("environment ", config_.name, ": ", name, ": ", status.message()));
  };
  if (!wait_until_up(deadline, stop)) {
    if (stop.stop_requested()) return absl::CancelledError("the call was cancelled");
    const absl::MutexLock lock(&mutex_);
    return named(absl::UnavailableError(absl::StrCat("the service is down: ", last_error_)));
  }
  Response response;
  absl::Status status = call_until(deadline, request, stop, method, response);
  if (absl::IsCancelled(status) && stop.stop_requested()) return status;
  if (status.ok()) {
    if (const absl::Status valid = validate_answer(response); !valid.ok()) status = absl::InternalError(valid.message());
  }
  metrics_.observe(metric::kEnvironmentCallSeconds, absl::ToDoubleSeconds(absl::Now() - start), {config_.name});
  record(status);
  if (!status.ok()) return named(status);
  return response;
}

absl::StatusOr<v1::ResetResponse> EnvironmentClient::reset(const v1::ResetRequest& request, std::stop_token stop) {
  return call<v1::ResetRequest, v1::ResetResponse>(
      "Reset", config_.reset_timeout_ms, request, stop, &v1::Environment::Stub::Reset,
      [&](const v1::ResetResponse& answer) { return validate(answer, request.want_solution(), kAnswerBytesMax); });
}

absl::StatusOr<v1::StepResponse> EnvironmentClient::step(const v1::StepRequest& request, std::stop_token stop) {
  return call<v1::StepRequest, v1::StepResponse>(
      "Step", config_.step_timeout_ms, request, stop, &v1::Environment::Stub::Step,
      [&](const v1::StepResponse& answer) { return validate(answer, request.want_solution(), kAnswerBytesMax); });
}

void EnvironmentClient::close(const std::string& episode_id, Place place) {
  struct Call {
    v1::CloseRequest request;
    v1::CloseResponse response;
    std::optional<Place> place;
  };
  const auto call = std::make_shared<Call>();
  call->request.set_episode_id(episode_id);
  call->place.emplace(std::move(place));
  stub_->closes.start(kCloseTimeout, call,
                      [this, raw = call.get()](grpc::ClientContext* context, std::function<void(grpc::Status)> done) {
                        stub_->stub->async()->Close(context, &raw->request, &raw->response,
                                                    [raw, done = std::move(done)](grpc::Status status) {
                                                      raw->place.reset();
                                                      done(std::move(status));
                                                    });
                      });
}

void EnvironmentClient::record(const absl::Status& status) {
  const absl::MutexLock lock(&mutex_);
  if (status.ok()) {
    failures_ = 0;
    pause_ = absl::Milliseconds(config_.quarantine_ms);
    return;
  }
  last_error_ = rpc::printable({status.message().data(), status.message().size()});
  if (++failures_ < config_.quarantine_after || !up_) return;
  up_ = false;
  metrics_.set(metric::kEnvironmentUp, 0, {config_.name});
  log_->warn("environment {} at {}: {} calls failed in a row, it is left alone for {} ms; the last: {}", config_.name,
             config_.address, failures_, absl::ToInt64Milliseconds(pause_), last_error_);
  changed_.SignalAll();
}

// Asks a service that is not up to describe itself, until it does.
void EnvironmentClient::keep_up(std::stop_token stop) {
  const std::stop_callback wake(stop, [this] {
    const absl::MutexLock lock(&mutex_);
    changed_.SignalAll();
  });
  Backoff first_asks(kFirstAsk, absl::Seconds(2));
  while (!stop.stop_requested()) {
    absl::Duration wait = absl::ZeroDuration();
    {
      const absl::MutexLock lock(&mutex_);
      while (up_ && !stop.stop_requested()) changed_.Wait(&mutex_);
      if (was_up_) {
        wait = pause_;
        pause_ = std::min(2 * pause_, kPauseMost);
      }
    }
    if (!pause(wait, stop)) return;
    bool answered = false;
    const absl::Status status = describe(stop, &answered);
    if (status.ok() || stop.stop_requested()) continue;
    report_down(status, answered);
    bool first = false;
    {
      const absl::MutexLock lock(&mutex_);
      first = !was_up_;
    }
    if (first && !pause(first_asks.next(), stop)) return;
  }
}

void EnvironmentClient::report_down(const absl::Status& status, bool answered) {
  const std::string error = rpc::printable({status.message().data(), status.message().size()});
  const std::string who = absl::StrCat("environment ", config_.name, " at ", config_.address);
  const absl::Time now = absl::Now();
  absl::Status failure;
  {
    const absl::MutexLock lock(&mutex_);
    if (error != last_error_ || now >= warned_ + kWarnEvery) {
      log_->warn("{}: Describe: {}; asking on", who, error);
      warned_ = now;
    }
    last_error_ = error;
    if (was_up_) return;
  }
  if (on_failure_ == nullptr) return;
  if (answered) {
    on_failure_(absl::Status(status.code(), absl::StrCat(who, ": ", error)));
  } else if (now >= start_deadline_) {
    on_failure_(absl::DeadlineExceededError(absl::StrCat(who, ": not up within start_timeout_ms ", config_.start_timeout_ms, ": ",
                                                         error)));
  }
}

absl::Status EnvironmentClient::describe(std::stop_token stop, bool* answered) {
  v1::DescribeResponse answer;
  // The start's deadline must not have to wait for one call's.
  const absl::Time deadline = absl::Now() + absl::Milliseconds(std::min(config_.reset_timeout_ms, config_.start_timeout_ms));
  RETURN_IF_ERROR(call_until(deadline, v1::DescribeRequest(), stop, &v1::Environment::Stub::Describe, answer));
  *answered = true;
  RETURN_IF_ERROR(validate(answer));
  {
    const absl::MutexLock lock(&mutex_);
    description_ = answer;  // first: the callback may start episodes, which look their task up
  }
  if (on_described_) RETURN_IF_ERROR(on_described_(answer));
  const absl::MutexLock lock(&mutex_);
  failures_ = was_up_ ? config_.quarantine_after - 1 : 0;  // after a pause it is on trial: the next call decides
  up_ = was_up_ = true;
  metrics_.set(metric::kEnvironmentUp, 1, {config_.name});
  log_->info("environment {} at {} is up, {} tasks", config_.name, config_.address, answer.tasks_size());
  changed_.SignalAll();
  return absl::OkStatus();
}

std::optional<v1::TaskDescription> EnvironmentClient::task(const std::string& name) const {
  const absl::MutexLock lock(&mutex_);
  if (!description_.has_value()) return std::nullopt;
  for (const v1::TaskDescription& task : description_->tasks()) {
    if (task.name() == name) return task;
  }
  return std::nullopt;
}

v1::EnvironmentStatus EnvironmentClient::status() const {
  const absl::MutexLock lock(&mutex_);
  v1::EnvironmentStatus out;
  out.set_name(config_.name);
  out.set_address(config_.address);
  out.set_up(up_);
  out.set_last_error(last_error_);
  return out;
}

}  // namespace slipstream::gateway
