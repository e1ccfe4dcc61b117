#include "cli/environment_client.h"

#include <chrono>

#include "proto/rpc.h"
#include "slipstream/v1/environment.grpc.pb.h"

namespace slipstream::cli {
namespace {

absl::Status from_peer(const grpc::Status& status) {
  const absl::Status out = rpc::from_grpc(status);
  return absl::Status(out.code(), rpc::printable(status.error_message()));
}

class Stream final : public EnvironmentStream {
 public:
  Stream(v1::Environment::Stub& stub, absl::Duration timeout) {
    context_.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout));
    stream_ = stub.Episodes(&context_);
  }
  ~Stream() override {
    context_.TryCancel();
    static_cast<void>(finish());
  }
  absl::StatusOr<std::vector<v1::EpisodeResponse>> exchange(
      const std::vector<v1::EpisodeRequest>& requests) override {
    for (const v1::EpisodeRequest& request : requests) {
      if (!stream_->Write(request)) return broken();
    }
    std::vector<v1::EpisodeResponse> responses(requests.size());
    for (v1::EpisodeResponse& response : responses) {
      if (!stream_->Read(&response)) return broken();
    }
    return responses;
  }
  absl::Status finish() override {
    if (finished_) return absl::OkStatus();
    stream_->WritesDone();
    v1::EpisodeResponse extra;
    const bool more = stream_->Read(&extra);
    if (more) context_.TryCancel();
    finished_ = true;
    const grpc::Status status = stream_->Finish();
    if (more) return absl::FailedPreconditionError("a response nobody asked for");
    return from_peer(status);
  }

 private:
  absl::Status broken() {
    finished_ = true;
    const absl::Status status = from_peer(stream_->Finish());
    return status.ok() ? absl::UnavailableError("the server ended the stream before it had answered")
                       : status;
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::EpisodeRequest, v1::EpisodeResponse>> stream_;
  bool finished_ = false;
};

class Client final : public EnvironmentClient {
 public:
  explicit Client(const std::string& address) : stub_(v1::Environment::NewStub(rpc::dial(address))) {}

  absl::StatusOr<v1::DescribeResponse> describe(absl::Duration timeout) override {
    return call<v1::DescribeResponse>(&v1::Environment::Stub::Describe, v1::DescribeRequest(), timeout);
  }
  absl::StatusOr<v1::ResetResponse> reset(const v1::ResetRequest& request, absl::Duration timeout) override {
    return call<v1::ResetResponse>(&v1::Environment::Stub::Reset, request, timeout);
  }
  absl::StatusOr<v1::StepResponse> step(const v1::StepRequest& request, absl::Duration timeout) override {
    return call<v1::StepResponse>(&v1::Environment::Stub::Step, request, timeout);
  }
  absl::StatusOr<v1::CloseResponse> close(const v1::CloseRequest& request, absl::Duration timeout) override {
    return call<v1::CloseResponse>(&v1::Environment::Stub::Close, request, timeout);
  }
  std::unique_ptr<EnvironmentStream> stream(absl::Duration timeout) override {
    return std::make_unique<Stream>(*stub_, timeout);
  }

 private:
  template <class Response, class Method, class Request>
  absl::StatusOr<Response> call(Method method, const Request& request, absl::Duration timeout) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoMicroseconds(timeout));
    Response response;
    const grpc::Status status = ((*stub_).*method)(&context, request, &response);
    if (!status.ok()) return from_peer(status);
    return response;
  }

  std::unique_ptr<v1::Environment::Stub> stub_;
};

}  // namespace

std::unique_ptr<EnvironmentClient> EnvironmentClient::dial(const std::string& address) {
  return std::make_unique<Client>(address);
}

}  // namespace slipstream::cli
