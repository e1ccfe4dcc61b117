#include "gateway/gateway_service.h"

#include <utility>

#include "proto/rpc.h"
#include "slipstream/v1/gateway.grpc.pb.h"

namespace slipstream::gateway {
namespace {

// Writes a turn's events as fast as its client takes them. A client that goes away leaves the turn running.
class ChatWriter final : public grpc::ServerWriteReactor<v1::ChatEvent>, public std::enable_shared_from_this<ChatWriter> {
 public:
  static grpc::ServerWriteReactor<v1::ChatEvent>* start(absl::StatusOr<std::shared_ptr<ChatStream>> stream) {
    const auto writer = std::make_shared<ChatWriter>();
    writer->self_ = writer;
    if (stream.ok()) {
      writer->stream_ = *std::move(stream);
      writer->pump();
    } else {
      writer->Finish(rpc::to_grpc(stream.status()));
    }
    return writer.get();
  }

 private:
  void pump() {
    const absl::MutexLock lock(&mutex_);
    if (finished_ || writing_) return;
    std::optional<ChatStream::Next> next = stream_->get(next_, [weak = weak_from_this()] {
      if (const std::shared_ptr<ChatWriter> alive = weak.lock()) alive->pump();
    });
    if (!next.has_value()) return;
    if (!next->event.has_value()) return finish(rpc::to_grpc(next->status));
    event_ = *std::move(next->event);
    ++next_;
    writing_ = true;
    StartWrite(&event_);
  }
  void finish(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }
  void OnWriteDone(bool ok) override {
    {
      const absl::MutexLock lock(&mutex_);
      writing_ = false;
      if (!ok) finish(grpc::Status::CANCELLED);
    }
    pump();
  }
  void OnCancel() override {
    const absl::MutexLock lock(&mutex_);
    if (!writing_) finish(grpc::Status::CANCELLED);  // else when the write ends
  }
  void OnDone() override { self_.reset(); }

  std::shared_ptr<ChatWriter> self_;  // until gRPC is done with it
  std::shared_ptr<ChatStream> stream_;
  absl::Mutex mutex_;
  v1::ChatEvent event_;
  size_t next_ = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;
};

class GatewayService final : public v1::Gateway::CallbackService {
 public:
  GatewayService(DrivingSessions& sessions, std::function<v1::GetStatusResponse()> status)
      : sessions_(sessions), status_(std::move(status)) {}

  grpc::ServerUnaryReactor* OpenSession(grpc::CallbackServerContext* context, const v1::OpenSessionRequest* request,
                                        v1::OpenSessionResponse* response) override {
    return answer(context, sessions_.open(*request), response);
  }
  grpc::ServerWriteReactor<v1::ChatEvent>* Chat(grpc::CallbackServerContext*, const v1::ChatRequest* request) override {
    return ChatWriter::start(sessions_.chat(*request));
  }
  grpc::ServerUnaryReactor* Finish(grpc::CallbackServerContext* context, const v1::FinishRequest* request,
                                   v1::FinishResponse* response) override {
    grpc::ServerUnaryReactor* call = context->DefaultReactor();
    sessions_.finish(*request, [call, response](absl::StatusOr<v1::FinishResponse> result) {
      if (result.ok()) *response = *std::move(result);
      call->Finish(rpc::to_grpc(result.status()));
    });
    return call;
  }
  grpc::ServerUnaryReactor* GetSession(grpc::CallbackServerContext* context, const v1::GetSessionRequest* request,
                                       v1::GetSessionResponse* response) override {
    return answer(context, sessions_.get(*request), response);
  }
  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context, const v1::GetStatusRequest*,
                                      v1::GetStatusResponse* response) override {
    return answer(context, absl::StatusOr<v1::GetStatusResponse>(status_()), response);
  }

 private:
  template <class Response>
  static grpc::ServerUnaryReactor* answer(grpc::CallbackServerContext* context, absl::StatusOr<Response> result,
                                          Response* response) {
    grpc::ServerUnaryReactor* call = context->DefaultReactor();
    if (result.ok()) *response = *std::move(result);
    call->Finish(rpc::to_grpc(result.status()));
    return call;
  }

  DrivingSessions& sessions_;
  const std::function<v1::GetStatusResponse()> status_;
};

}  // namespace

std::unique_ptr<grpc::Service> make_gateway_service(DrivingSessions& sessions,
                                                    std::function<v1::GetStatusResponse()> status) {
  return std::make_unique<GatewayService>(sessions, std::move(status));
}

}  // namespace slipstream::gateway
