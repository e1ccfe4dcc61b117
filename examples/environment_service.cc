#include "examples/environment_service.h"

#include <grpcpp/alarm.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <unordered_map>

#include "CLI/CLI.hpp"
#include "proto/rpc.h"
#include "slipstream/v1/environment.grpc.pb.h"

namespace slipstream::examples {
namespace {

constexpr int kPendingMax = 1024;  // answers under way on one stream; then it is not read further
constexpr auto kShutdown = std::chrono::seconds(2);

gpr_timespec after(absl::Duration delay) {
  if (delay == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_time_from_nanos(absl::ToInt64Nanoseconds(delay), GPR_TIMESPAN));
}

// Answers now or when the delay has passed; at once when the client gives up. Owns itself.
class Answer final : public grpc::ServerUnaryReactor {
 public:
  Answer(grpc::Status status, absl::Duration delay) : status_(std::move(status)) {
    if (delay <= absl::ZeroDuration()) {
      Finish(status_);
    } else {
      alarm_.Set(after(delay), [this](bool) { Finish(status_); });
    }
  }
  void OnCancel() override { alarm_.Cancel(); }
  void OnDone() override { delete this; }

 private:
  const grpc::Status status_;
  grpc::Alarm alarm_;
};

// What the unary calls and the stream share: an answer, and the fault that befalls it.
class Handler {
 public:
  Handler(EpisodeTable& episodes, FaultSource faults) : episodes_(episodes), faults_(std::move(faults)) {}

  const EpisodeTable& episodes() const { return episodes_; }

  // Fills *response; *delay is how long to hold the answer back.
  grpc::Status handle(const v1::ResetRequest& request, v1::ResetResponse* response, absl::Duration* delay) {
    return faulty(episodes_.reset(request, absl::Now()), response, delay);
  }
  grpc::Status handle(const v1::StepRequest& request, v1::StepResponse* response, absl::Duration* delay) {
    return faulty(episodes_.step(request, absl::Now()), response, delay);
  }
  grpc::Status handle(const v1::CloseRequest& request, v1::CloseResponse*, absl::Duration*) {
    return rpc::to_grpc(episodes_.close(request, absl::Now()));
  }

 private:
  template <class Response>
  grpc::Status faulty(absl::StatusOr<Response> answer, Response* response, absl::Duration* delay) {
    const Fault fault = faults_ ? faults_() : Fault{};
    if (fault.kind == FaultKind::kExit) std::_Exit(1);
    *delay = fault.kind == FaultKind::kStall ? absl::InfiniteDuration() : fault.delay;
    if (fault.kind == FaultKind::kAbort)
      return {grpc::StatusCode::INTERNAL, "this environment crashes on purpose"};
    if (!answer.ok()) return rpc::to_grpc(answer.status());
    *response = *std::move(answer);
    if (fault.kind == FaultKind::kGarbage) make_garbage(fault.garbage, response);
    return grpc::Status::OK;
  }

  EpisodeTable& episodes_;
  const FaultSource faults_;
};

// One Episodes stream. Answers go out as they become due. Owns itself: whoever calls Finish may not touch it
// afterwards, so it is called outside the lock.
class EpisodeStream final : public grpc::ServerBidiReactor<v1::EpisodeRequest, v1::EpisodeResponse> {
 public:
  explicit EpisodeStream(Handler& handler) : handler_(handler) { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    if (!ok) {
      mutex_.Lock();
      reading_ = false;
      no_more_requests_ = true;
      return advance_and_unlock();
    }
    absl::Duration delay;
    v1::EpisodeResponse response = respond(request_, &delay);
    mutex_.Lock();
    reading_ = false;
    if (delay <= absl::ZeroDuration() || cancelled_) {
      ready_.push_back(std::move(response));
    } else {
      auto held = std::make_shared<Held>();
      held->response = std::move(response);
      held_[held.get()] = held;
      held->alarm.Set(after(delay), [this, key = held.get()](bool) { release(key); });
    }
    advance_and_unlock();
  }
  void OnWriteDone(bool ok) override {
    mutex_.Lock();
    writing_ = false;
    ready_.pop_front();
    if (!ok) broken_ = true;
    advance_and_unlock();
  }
  void OnCancel() override {
    std::unordered_map<const Held*, std::shared_ptr<Held>> held;
    {
      const absl::MutexLock lock(&mutex_);
      cancelled_ = true;
      held = held_;
    }
    for (const auto& [key, one] : held) one->alarm.Cancel();  // each then calls release
  }
  void OnDone() override { delete this; }

 private:
  struct Held {
    v1::EpisodeResponse response;
    grpc::Alarm alarm;
  };

  v1::EpisodeResponse respond(const v1::EpisodeRequest& request, absl::Duration* delay) {
    v1::EpisodeResponse out;
    grpc::Status status;
    switch (request.request_case()) {
      case v1::EpisodeRequest::kReset:
        out.set_episode_id(request.reset().episode_id());
        status = handler_.handle(request.reset(), out.mutable_reset(), delay);
        break;
      case v1::EpisodeRequest::kStep:
        out.set_episode_id(request.step().episode_id());
        status = handler_.handle(request.step(), out.mutable_step(), delay);
        break;
      case v1::EpisodeRequest::kClose:
        out.set_episode_id(request.close().episode_id());
        status = handler_.handle(request.close(), out.mutable_close(), delay);
        break;
      case v1::EpisodeRequest::REQUEST_NOT_SET:
        status = {grpc::StatusCode::INVALID_ARGUMENT, "request: empty, expected reset, step or close"};
    }
    if (!status.ok()) {
      out.mutable_error()->set_code(status.error_code());
      out.mutable_error()->set_message(status.error_message());
    }
    return out;
  }

  void release(const Held* held) {
    mutex_.Lock();
    const auto found = held_.find(held);
    ready_.push_back(std::move(found->second->response));
    held_.erase(found);
    advance_and_unlock();
  }

  // Starts what can be started; finishes when nothing is left.
  void advance_and_unlock() ABSL_UNLOCK_FUNCTION(mutex_) {
    if (cancelled_ || broken_) no_more_requests_ = true;
    if (!no_more_requests_ && !reading_ && held_.size() + ready_.size() < kPendingMax) {
      reading_ = true;
      StartRead(&request_);
    }
    if (!writing_ && !ready_.empty()) {
      if (cancelled_ || broken_) {
        ready_.clear();
      } else {
        writing_ = true;
        StartWrite(&ready_.front());
      }
    }
    const bool finish =
        no_more_requests_ && !reading_ && !writing_ && held_.empty() && ready_.empty() && !finished_;
    if (finish) finished_ = true;
    mutex_.Unlock();
    if (finish) Finish(grpc::Status::OK);
  }

  Handler& handler_;
  v1::EpisodeRequest request_;  // the read's
  absl::Mutex mutex_;
  std::unordered_map<const Held*, std::shared_ptr<Held>> held_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::EpisodeResponse> ready_
      ABSL_GUARDED_BY(mutex_);  // the front one is being written when writing_
  bool reading_ ABSL_GUARDED_BY(mutex_) = true;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_requests_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class EnvironmentService final : public v1::Environment::CallbackService {
 public:
  explicit EnvironmentService(Handler& handler) : handler_(handler) {}

  grpc::ServerUnaryReactor* Describe(grpc::CallbackServerContext*, const v1::DescribeRequest*,
                                     v1::DescribeResponse* response) override {
    *response = handler_.episodes().describe();
    return new Answer(grpc::Status::OK, absl::ZeroDuration());
  }
  grpc::ServerUnaryReactor* Reset(grpc::CallbackServerContext*, const v1::ResetRequest* request,
                                  v1::ResetResponse* response) override {
    return answer(*request, response);
  }
  grpc::ServerUnaryReactor* Step(grpc::CallbackServerContext*, const v1::StepRequest* request,
                                 v1::StepResponse* response) override {
    return answer(*request, response);
  }
  grpc::ServerUnaryReactor* Close(grpc::CallbackServerContext*, const v1::CloseRequest* request,
                                  v1::CloseResponse* response) override {
    return answer(*request, response);
  }
  grpc::ServerBidiReactor<v1::EpisodeRequest, v1::EpisodeResponse>* Episodes(
      grpc::CallbackServerContext*) override {
    return new EpisodeStream(handler_);
  }

 private:
  template <class Request, class Response>
  grpc::ServerUnaryReactor* answer(const Request& request, Response* response) {
    absl::Duration delay;
    grpc::Status status = handler_.handle(request, response, &delay);
    return new Answer(std::move(status), delay);
  }

  Handler& handler_;
};

class Server final : public EnvironmentServer {
 public:
  explicit Server(EnvironmentProgram program)
      : episodes_(program.name, std::move(program.tasks), program.episodes),
        handler_(episodes_, std::move(program.faults)),
        service_(handler_) {}
  ~Server() override {
    if (server_.server != nullptr) server_.server->Shutdown(std::chrono::system_clock::now() + kShutdown);
  }
  const std::string& address() const override { return server_.address; }
  absl::Status bind(const std::string& address) {
    ASSIGN_OR_RETURN(server_, rpc::serve("environment", address, {&service_}));
    return absl::OkStatus();
  }

 private:
  EpisodeTable episodes_;
  Handler handler_;
  EnvironmentService service_;
  rpc::Server server_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<EnvironmentServer>> EnvironmentServer::start(const std::string& address,
                                                                            EnvironmentProgram program) {
  auto server = std::make_unique<Server>(std::move(program));
  RETURN_IF_ERROR(server->bind(address));
  return server;
}

int serve_until_signal(const std::string& address, EnvironmentProgram program) {
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  sigaddset(&ends, SIGINT);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);  // gRPC's threads inherit it, so that only sigwait sees them
  const std::string name = program.name;
  const auto server = EnvironmentServer::start(address, std::move(program));
  if (!server.ok()) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), std::string(server.status().message()).c_str());
    return 1;
  }
  std::printf("listening on %s\n", (*server)->address().c_str());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&ends, &signal);
  return 0;
}

int environment_main(int argc, char** argv, EnvironmentProgram program) {
  CLI::App app(program.name + ": an environment for Slipstream, served over gRPC until SIGTERM");
  std::string address = "127.0.0.1:0";
  app.add_option("--address", address, "host:port to listen on; port 0: any free one")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  return serve_until_signal(address, std::move(program));
}

}  // namespace slipstream::examples
