// broken_env --defect NAME: an environment that breaks one rule of environment.proto, so that the conformance
// test can be seen to notice. Without a defect it breaks none.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "examples/episode_table.h"
#include "examples/guess_task.h"
#include "proto/rpc.h"
#include "slipstream/v1/environment.grpc.pb.h"

namespace slipstream {
namespace {

// Each with words of the check that has to notice it.
const std::map<std::string, std::string> kDefects = {{"describes_nothing", "Describe answers"},
                                                     {"describe_changes", "Describe answers"},
                                                     {"reset_forgets", "Reset repeated"},
                                                     {"instance_drifts", "word for word"},
                                                     {"any_task", "unknown names"},
                                                     {"any_instance", "does not exist"},
                                                     {"not_found_is_unknown", "unknown names"},
                                                     {"no_messages", "Reset answers"},
                                                     {"bad_role", "Reset answers"},
                                                     {"bad_schema", "Reset answers"},
                                                     {"no_solution", "Reset answers"},
                                                     {"bad_solution", "solutions earn"},
                                                     {"step_forgets", "Step repeated"},
                                                     {"any_turn", "a turn that is not due"},
                                                     {"never_done", "episodes end"},
                                                     {"nan_reward", "rewards are finite"},
                                                     {"dies_of_garbage", "garbage"},
                                                     {"close_forgets", "closed episode"},
                                                     {"episodes_share", "independent"},
                                                     {"stalls", "missed deadlines"},
                                                     {"stream_differs", "Episodes stream"},
                                                     {"stream_loses", "Episodes stream"}};

class BrokenEnvironment final : public v1::Environment::Service {
 public:
  explicit BrokenEnvironment(const std::string& defect)
      : defect_(defect), episodes_("broken", examples::guess_tasks(), {}) {}

  grpc::Status Describe(grpc::ServerContext*, const v1::DescribeRequest*,
                        v1::DescribeResponse* response) override {
    *response = episodes_.describe();
    if (is("describes_nothing")) response->clear_tasks();
    if (is("describe_changes")) response->set_environment(absl::StrCat("broken", ++count_));
    return grpc::Status::OK;
  }
  grpc::Status Reset(grpc::ServerContext* context, const v1::ResetRequest* request,
                     v1::ResetResponse* response) override {
    v1::ResetRequest sent = *request;
    if (is("any_task") && sent.task() == "no such task") sent.set_task("guess");
    if (is("any_instance") && sent.instance() >= 20) sent.set_instance(0);
    auto answer = episodes_.reset(sent, absl::Now());
    if (!answer.ok()) return rpc::to_grpc(answer.status());
    *response = *std::move(answer);
    v1::Message& first = *response->mutable_messages(0);
    if (is("reset_forgets")) first.set_content(absl::StrCat("guess ", ++count_));
    if (is("instance_drifts")) first.set_content("guess, " + sent.episode_id());
    if (is("no_messages")) response->clear_messages();
    if (is("bad_role")) first.set_role(v1::ROLE_ASSISTANT);
    if (is("bad_schema")) response->add_tools()->set_name("tool");
    if (is("no_solution")) response->clear_solution();
    if (is("bad_solution") && response->has_solution()) response->mutable_solution()->set_content("1");
    while (is("stalls") && !context->IsCancelled()) absl::SleepFor(absl::Milliseconds(5));
    return grpc::Status::OK;
  }
  grpc::Status Step(grpc::ServerContext*, const v1::StepRequest* request,
                    v1::StepResponse* response) override {
    if (is("dies_of_garbage") && request->message().content().find('\0') != std::string::npos) std::_Exit(1);
    v1::StepRequest sent = *request;
    if (is("any_turn") && (sent.turn() == 7 || sent.turn() == -1)) sent.set_turn(0);
    auto answer = episodes_.step(sent, absl::Now());
    if (!answer.ok() && is("not_found_is_unknown")) return {grpc::StatusCode::UNKNOWN, "KeyError"};
    if (!answer.ok()) return rpc::to_grpc(answer.status());
    *response = *std::move(answer);
    if (is("step_forgets")) response->set_reward(++count_);
    if (is("nan_reward")) response->set_reward(std::numeric_limits<double>::quiet_NaN());
    if (is("bad_solution") && response->has_solution()) response->mutable_solution()->set_content("1");
    if (is("never_done")) {
      response->set_done(false);
      *response->add_messages() = examples::text_message(v1::ROLE_USER, "go on");
    }
    if (is("episodes_share") && episodes_.num_open() > 1) response->set_reward(-1);
    return grpc::Status::OK;
  }
  grpc::Status Close(grpc::ServerContext*, const v1::CloseRequest* request, v1::CloseResponse*) override {
    if (is("close_forgets")) return grpc::Status::OK;
    return rpc::to_grpc(episodes_.close(*request, absl::Now()));
  }
  grpc::Status Episodes(grpc::ServerContext* context,
                        grpc::ServerReaderWriter<v1::EpisodeResponse, v1::EpisodeRequest>* stream) override {
    if (!is("stream_differs") && !is("stream_loses"))
      return {grpc::StatusCode::UNIMPLEMENTED, "no stream here"};
    v1::EpisodeRequest request;
    while (stream->Read(&request)) {
      v1::EpisodeResponse response;
      grpc::Status status;
      if (request.has_reset()) {
        response.set_episode_id(request.reset().episode_id());
        status = Reset(context, &request.reset(), response.mutable_reset());
      } else if (request.has_step()) {
        response.set_episode_id(request.step().episode_id());
        status = Step(context, &request.step(), response.mutable_step());
        if (is("stream_differs")) response.mutable_step()->set_reward(0.5);
      } else {
        response.set_episode_id(request.close().episode_id());
        status = Close(context, &request.close(), response.mutable_close());
      }
      if (!status.ok()) response.mutable_error()->set_code(status.error_code());
      if (!is("stream_loses") || !request.has_close()) stream->Write(response);
    }
    return grpc::Status::OK;
  }

 private:
  bool is(const char* defect) const { return defect_ == defect; }

  const std::string defect_;
  examples::EpisodeTable episodes_;
  std::atomic<int> count_ = 0;
};

}  // namespace
}  // namespace slipstream

int main(int argc, char** argv) {
  CLI::App app("broken_env: breaks one rule");
  std::string address = "127.0.0.1:0", defect;
  bool list = false;
  app.add_option("--address", address);
  app.add_option("--defect", defect)->check(CLI::IsMember(slipstream::kDefects));
  app.add_flag("--list", list,
               "Print the defects there are, each with words of the check that must notice it");
  CLI11_PARSE(app, argc, argv);
  if (list) {
    for (const auto& [name, check] : slipstream::kDefects)
      std::printf("%s|%s\n", name.c_str(), check.c_str());
    return 0;
  }
  sigset_t ends;
  sigemptyset(&ends);
  sigaddset(&ends, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &ends, nullptr);
  slipstream::BrokenEnvironment service(defect);
  const auto server = slipstream::rpc::serve("broken environment", address, {&service});
  if (!server.ok()) return 1;
  std::printf("listening on %s\n", server->address.c_str());
  std::fflush(stdout);
  int signal = 0;
  sigwait(&ends, &signal);
  server->server->Shutdown(std::chrono::system_clock::now());
  return 0;
}
