#include "gateway/gateway.h"

#include <grpcpp/generic/generic_stub.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <zmq.hpp>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "common/testing/temporary_directory.h"
#include "gateway/testing/fake_environment.h"
#include "gateway/testing/fake_worker.h"
#include "proto/rpc.h"
#include "slipstream/v1/gateway.grpc.pb.h"
#include "slipstream/v1/rollout.grpc.pb.h"

namespace slipstream::gateway {
namespace {

using testing::FakeEnvironment;
using testing::FakeWorker;

// A learner's words over its socket.
class Learner {
 public:
  explicit Learner(const std::string& endpoint) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::rcvtimeo, 30'000);
    socket_.connect(endpoint);
  }
  v1::GatewayMessage ask(const v1::LearnerMessage& message) {
    socket_.send(zmq::buffer(message.SerializeAsString()), zmq::send_flags::none);
    zmq::message_t frame;
    v1::GatewayMessage answer;
    if (!socket_.recv(frame).has_value() || !answer.ParseFromArray(frame.data(), static_cast<int>(frame.size()))) {
      ADD_FAILURE() << "no answer";
    }
    return answer;
  }
  v1::GatewayMessage hello(int64_t incarnation, int64_t committed_step) {
    v1::LearnerMessage message;
    message.mutable_hello()->set_run_id("run");
    message.mutable_hello()->set_incarnation(incarnation);
    message.mutable_hello()->set_committed_step(committed_step);
    return ask(message);
  }
  v1::Batch batch(int64_t incarnation, int64_t step, int version, v1::TrajectoryKind kind, int num_groups) {
    v1::LearnerMessage message;
    v1::BatchRequest& request = *message.mutable_batch_request();
    request.set_incarnation(incarnation);
    request.set_step(step);
    request.set_policy_version(version);
    request.set_kind(kind);
    request.set_num_groups(num_groups);
    const v1::GatewayMessage answer = ask(message);
    EXPECT_TRUE(answer.has_batch()) << answer.ShortDebugString();
    return answer.batch();
  }
  v1::CommitReply commit(int64_t incarnation, int64_t step, const v1::Batch& batch) {
    v1::LearnerMessage message;
    message.mutable_commit()->set_incarnation(incarnation);
    message.mutable_commit()->set_step(step);
    for (const auto& group : batch.groups()) {
      for (const auto& trajectory : group.trajectories()) message.mutable_commit()->add_trained_rollout_ids(trajectory.rollout_id());
    }
    const v1::GatewayMessage answer = ask(message);
    EXPECT_TRUE(answer.has_commit_reply()) << answer.ShortDebugString();
    return answer.commit_reply();
  }

 private:
  zmq::context_t context_;
  zmq::socket_t socket_{context_, zmq::socket_type::dealer};
};

uint64_t dropped(const v1::Counts& counts) {
  uint64_t sum = 0;
  for (const auto& [reason, count] : counts.dropped()) sum += count;
  return sum;
}

class GatewayTest : public ::testing::Test {
 protected:
  GatewayTest() {
    config_.job.run_parent = directory_.path();
    config_.job.group_size = 4;
    config_.job.groups_per_batch = 2;
    config_.episode_threads = 8;
    config_.heartbeat_ms = 60'000;
    config_.drop_zero_variance = false;
    EnvironmentConfig environment;
    environment.name = "env";
    environment.address = fake_.address();
    config_.environments.push_back(environment);
  }
  ~GatewayTest() override { gateway_.reset(); }
  void start() {
    absl::StatusOr<std::unique_ptr<Gateway>> gateway = Gateway::start(config_, metrics_, quiet_logger());
    ASSERT_TRUE(gateway.ok()) << gateway.status();
    gateway_ = *std::move(gateway);
    const auto channel = rpc::dial(gateway_->address());
    workers_ = v1::Workers::NewStub(channel);
    api_ = v1::Gateway::NewStub(channel);
  }
  void join(const FakeWorker& worker, const std::string& id = "w0") {
    v1::RegisterRequest request;
    request.set_worker_id(id);
    request.set_address(worker.address());
    request.set_max_concurrent(100);
    request.set_max_context(1 << 20);
    request.set_start_time_us(1);
    grpc::ClientContext context;
    v1::RegisterResponse response;
    const grpc::Status status = workers_->Register(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(response.heartbeat_ms(), config_.heartbeat_ms);
  }
  std::string open(const std::string& key) {
    v1::OpenSessionRequest request;
    request.set_idempotency_key(key);
    request.set_task("agent");
    grpc::ClientContext context;
    v1::OpenSessionResponse response;
    const grpc::Status status = api_->OpenSession(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.session_id();
  }
  v1::GetStatusResponse status() {
    grpc::ClientContext context;
    v1::GetStatusResponse response;
    EXPECT_TRUE(api_->GetStatus(&context, {}, &response).ok());
    return response;
  }

  const slipstream::testing::TemporaryDirectory directory_;
  FakeEnvironment fake_{{.turns = 2}};
  GatewayConfig config_;
  Metrics metrics_;
  std::unique_ptr<Gateway> gateway_;
  std::unique_ptr<v1::Workers::Stub> workers_;
  std::unique_ptr<v1::Gateway::Stub> api_;
};

// Goal: a learner is served demonstrations, then rollouts, over the real sockets; counts balance; a new life of the gateway
// goes on where the old one was.
TEST_F(GatewayTest, ServesALearnerThroughARestart) {
  const FakeWorker worker({});
  start();
  join(worker);
  std::set<std::string> seen;
  {
    Learner learner(gateway_->learner_endpoint());
    EXPECT_TRUE(learner.hello(1, 0).has_hello_reply());
    const v1::Batch demonstrations = learner.batch(1, 1, 0, v1::TRAJECTORY_KIND_DEMONSTRATION, 3);
    ASSERT_EQ(demonstrations.groups_size(), 3);
    EXPECT_EQ(demonstrations.groups(0).trajectories(0).kind(), v1::TRAJECTORY_KIND_DEMONSTRATION);
    EXPECT_EQ(status().counts().produced(), 0u);
    for (int step = 2; step <= 3; ++step) {
      const v1::Batch batch = learner.batch(1, step, 0, v1::TRAJECTORY_KIND_ROLLOUT, 2);
      ASSERT_EQ(batch.groups_size(), 2);
      for (const v1::Group& group : batch.groups()) {
        EXPECT_EQ(group.trajectories_size(), 4);
        for (const v1::Trajectory& trajectory : group.trajectories()) {
          EXPECT_TRUE(seen.insert(trajectory.rollout_id()).second) << trajectory.rollout_id();
          EXPECT_EQ(trajectory.instance(), group.trajectories(0).instance());
          EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_ENV_DONE);
        }
      }
      const v1::CommitReply reply = learner.commit(1, step, batch);
      EXPECT_EQ(reply.counts().trained(), seen.size());
      EXPECT_EQ(reply.counts().produced(), reply.counts().trained() + dropped(reply.counts()) + reply.counts().queued());
      EXPECT_GT(reply.activity().environment_seconds(), 0);
      EXPECT_GT(reply.activity().engine_seconds(), 0);
    }
  }
  const v1::GetStatusResponse before = status();
  EXPECT_TRUE(before.learner_connected());
  ASSERT_EQ(before.workers_size(), 1);
  EXPECT_TRUE(before.workers(0).up());
  ASSERT_EQ(before.environments_size(), 1);
  EXPECT_TRUE(before.environments(0).up());
  const absl::Time asked = absl::Now();
  gateway_.reset();
  EXPECT_LT(absl::Now() - asked, absl::Seconds(5));

  start();
  join(worker);
  EXPECT_EQ(status().counts().trained(), seen.size());
  Learner learner(gateway_->learner_endpoint());
  EXPECT_TRUE(learner.hello(2, 3).has_hello_reply());
  const v1::Batch batch = learner.batch(2, 4, 0, v1::TRAJECTORY_KIND_ROLLOUT, 2);
  for (const v1::Group& group : batch.groups()) {
    for (const v1::Trajectory& trajectory : group.trajectories()) {
      EXPECT_TRUE(seen.insert(trajectory.rollout_id()).second) << trajectory.rollout_id();
    }
  }
  EXPECT_EQ(learner.commit(2, 4, batch).counts().trained(), seen.size());
}

// Goal: an agent whose connection breaks in the middle of a turn gets the whole turn when it repeats the call.
TEST_F(GatewayTest, ADrivingAgentSurvivesItsConnection) {
  absl::Notification reached, go;
  FakeWorker::Options options{.stop_in = 0};
  options.before_event = [&](const v1::GenerateRequest& request, int sent) {
    if (sent == 3 && request.sampling().max_tokens() == 7) {
      reached.Notify();
      go.WaitForNotification();
    }
    return absl::OkStatus();
  };
  const FakeWorker worker(options);
  config_.environments.clear();
  start();
  join(worker);
  Learner learner(gateway_->learner_endpoint());
  ASSERT_TRUE(learner.hello(1, 0).has_hello_reply());
  v1::LearnerMessage rollouts;  // opens admission; its answer is not waited for
  rollouts.mutable_batch_request()->set_incarnation(1);
  rollouts.mutable_batch_request()->set_step(1);
  rollouts.mutable_batch_request()->set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
  rollouts.mutable_batch_request()->set_num_groups(1);
  std::jthread asking([&] { EXPECT_TRUE(learner.ask(rollouts).has_batch()); });
  v1::OpenSessionRequest open_request;
  open_request.set_idempotency_key("open");
  open_request.set_task("agent");
  v1::OpenSessionResponse opened;
  while (true) {  // until the request has arrived
    grpc::ClientContext context;
    const grpc::Status status = api_->OpenSession(&context, open_request, &opened);
    if (status.ok()) break;
    ASSERT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
    absl::SleepFor(absl::Milliseconds(1));
  }
  v1::ChatRequest chat;
  chat.set_idempotency_key("turn");
  chat.set_session_id(opened.session_id());
  chat.add_messages()->set_role(v1::ROLE_USER);
  chat.mutable_messages(0)->set_content("hello");
  chat.mutable_sampling()->set_temperature(1);
  chat.mutable_sampling()->set_max_tokens(7);
  {
    grpc::ClientContext context;
    const auto reader = api_->Chat(&context, chat);
    v1::ChatEvent event;
    ASSERT_TRUE(reader->Read(&event));
    EXPECT_EQ(event.ids_size(), 1);
    reached.WaitForNotification();
    context.TryCancel();
    EXPECT_EQ(reader->Finish().error_code(), grpc::CANCELLED);
  }
  go.Notify();
  int ids = 0;
  std::string text;
  v1::ChatFinished finished;
  {
    grpc::ClientContext context;
    const auto reader = api_->Chat(&context, chat);
    v1::ChatEvent event;
    while (reader->Read(&event)) {
      ids += event.ids_size();
      text += event.text();
      if (event.has_finished()) finished = event.finished();
    }
    const grpc::Status status = reader->Finish();
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  EXPECT_EQ(ids, 7);
  EXPECT_EQ(finished.completion_tokens(), 7);
  EXPECT_EQ(finished.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(finished.message().content(), text);
  EXPECT_EQ(worker.requests().size(), 1u);
  v1::FinishRequest finish;
  finish.set_idempotency_key("finish");
  finish.set_session_id(opened.session_id());
  finish.set_reward(1);
  grpc::ClientContext context;
  v1::FinishResponse response;
  const grpc::Status status = api_->Finish(&context, finish, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  asking.join();
  EXPECT_EQ(this->status().counts().produced(), 1u);
  grpc::ClientContext bad_context;
  finish.set_reward(NAN);
  finish.set_idempotency_key("bad");
  EXPECT_EQ(api_->Finish(&bad_context, finish, &response).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(GatewayTest, OneClearLineWhenItCannotStart) {
  start();
  const auto refused = [&](const GatewayConfig& config, absl::StatusCode code, const std::string& text) {
    Metrics metrics;
    const absl::Status status = Gateway::start(config, metrics, quiet_logger()).status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_NE(status.ToString().find(text), std::string::npos) << status;
    EXPECT_EQ(status.ToString().find('\n'), std::string::npos) << status;
  };
  GatewayConfig config = config_;
  config.job.run_id = "other";
  config.address = gateway_->address();
  refused(config, absl::StatusCode::kUnavailable, gateway_->address());
  config.address = "127.0.0.1:0";
  config.job.learner_address = gateway_->learner_endpoint();
  refused(config, absl::StatusCode::kUnavailable, gateway_->learner_endpoint());
  config.job.learner_address = "tcp://127.0.0.1:0";
  config.environments[0].address.clear();
  refused(config, absl::StatusCode::kInvalidArgument, "\"env\" has no address");
  config.environments.clear();
  config.chat_format = "glm99";
  refused(config, absl::StatusCode::kInvalidArgument, "glm99");
}

// Goal: whatever bytes an agent or a worker sends, the gateway answers with an error and lives.
TEST_F(GatewayTest, GarbageIsRefused) {
  start();
  grpc::GenericStub stub(rpc::dial(gateway_->address()));
  for (const char* method : {"Gateway/OpenSession", "Gateway/Finish", "Gateway/GetSession", "Workers/Register",
                                   "Workers/Heartbeat", "Workers/Nothing"}) {
    for (const std::string& bytes : {std::string(100'000, '\xff'), std::string(), std::string("\x0a\x02\xff\xfe")}) {
      const grpc::Slice slice(bytes);
      const grpc::ByteBuffer request(&slice, 1);
      grpc::ByteBuffer response;
      grpc::ClientContext context;
      grpc::Status status;
      absl::Notification done;
      stub.UnaryCall(&context, std::string("/slipstream.v1.") + method, {}, &request, &response, [&](grpc::Status given) {
        status = std::move(given);
        done.Notify();
      });
      done.WaitForNotification();
      EXPECT_FALSE(status.ok()) << method;
      EXPECT_NE(status.error_code(), grpc::UNAVAILABLE) << method << ": " << status.error_message();
    }
  }
  EXPECT_FALSE(status().learner_connected());
}

}  // namespace
}  // namespace slipstream::gateway
