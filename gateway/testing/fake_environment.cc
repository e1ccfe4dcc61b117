#include "gateway/testing/fake_environment.h"

#include <chrono>
#include <mutex>

#include "common/check.h"
#include "proto/rpc.h"
#include "slipstream/v1/environment.grpc.pb.h"

namespace slipstream::gateway::testing {

struct FakeEnvironment::Impl final : v1::Environment::Service {
  explicit Impl(Options given) : options(std::move(given)) {}

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest*, v1::DescribeResponse* response) override {
    response->set_environment("fake");
    v1::TaskDescription& task = *response->add_tasks();
    task.set_name("task");
    task.set_max_turns(options.max_turns);
    task.set_has_solutions(true);
    return options.on_describe ? rpc::to_grpc(options.on_describe(*response)) : grpc::Status::OK;
  }
  grpc::Status Reset(grpc::ServerContext*, const v1::ResetRequest* request, v1::ResetResponse* response) override {
    {
      const std::lock_guard lock(mutex);
      resets.push_back(*request);
    }
    v1::Message& message = *response->add_messages();
    message.set_role(v1::ROLE_USER);
    message.set_content(absl::StrCat("problem ", request->instance()));
    if (request->want_solution()) *response->mutable_solution() = solution(0);
    return options.on_reset ? rpc::to_grpc(options.on_reset(*request, *response)) : grpc::Status::OK;
  }
  grpc::Status Step(grpc::ServerContext*, const v1::StepRequest* request, v1::StepResponse* response) override {
    {
      const std::lock_guard lock(mutex);
      steps.push_back(*request);
    }
    response->set_done(request->turn() + 1 >= options.turns);
    response->set_reward(1.0 / options.turns);
    (*response->mutable_reward_parts())["part"] = 0.5;
    if (!response->done()) {
      v1::Message& message = *response->add_messages();
      message.set_role(v1::ROLE_USER);
      message.set_content(absl::StrCat("turn ", request->turn() + 1));
      if (request->want_solution()) *response->mutable_solution() = solution(request->turn() + 1);
    }
    return options.on_step ? rpc::to_grpc(options.on_step(*request, *response)) : grpc::Status::OK;
  }
  grpc::Status Close(grpc::ServerContext*, const v1::CloseRequest* request, v1::CloseResponse*) override {
    const std::lock_guard lock(mutex);
    closed.push_back(request->episode_id());
    return grpc::Status::OK;
  }
  static v1::Message solution(int turn) {
    v1::Message message;
    message.set_role(v1::ROLE_ASSISTANT);
    message.set_content(absl::StrCat("answer ", turn));
    return message;
  }

  const Options options;
  rpc::Server server;
  mutable std::mutex mutex;
  std::vector<v1::ResetRequest> resets;
  std::vector<v1::StepRequest> steps;
  std::vector<std::string> closed;
};

FakeEnvironment::FakeEnvironment(Options options) : impl_(std::make_unique<Impl>(std::move(options))) {
  absl::StatusOr<rpc::Server> server = rpc::serve("fake environment", impl_->options.address, {impl_.get()});
  CHECK_OK(server.status());
  impl_->server = *std::move(server);
}

FakeEnvironment::~FakeEnvironment() { kill(); }

void FakeEnvironment::kill() {
  if (impl_->server.server == nullptr) return;
  impl_->server.server->Shutdown(std::chrono::system_clock::now());
  impl_->server.server.reset();
}

const std::string& FakeEnvironment::address() const { return impl_->server.address; }
std::vector<v1::ResetRequest> FakeEnvironment::resets() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->resets;
}
std::vector<v1::StepRequest> FakeEnvironment::steps() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->steps;
}
std::vector<std::string> FakeEnvironment::closed() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->closed;
}

}  // namespace slipstream::gateway::testing
