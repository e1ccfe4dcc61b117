// Goal: a learner on a real socket gets its batches whole, whoever restarts, and no bytes it sends do harm.
#include "gateway/delivery.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <zmq.hpp>

#include "gateway/testing/test_gateway.h"

namespace slipstream::gateway {
namespace {

using testing::Gateway;

// The learner's end: a DEALER that repeats a request until it is answered.
class Learner {
 public:
  explicit Learner(const std::string& endpoint) : socket_(context_, zmq::socket_type::dealer) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::reconnect_ivl, 10);
    socket_.connect(endpoint);
  }
  void send(const v1::LearnerMessage& message) { send(message.SerializeAsString()); }
  void send(const std::string& frame) { socket_.send(zmq::buffer(frame)); }
  void send(const std::vector<std::string>& frames) {
    for (size_t i = 0; i < frames.size(); ++i) {
      socket_.send(zmq::buffer(frames[i]), i + 1 < frames.size() ? zmq::send_flags::sndmore : zmq::send_flags::none);
    }
  }
  std::optional<v1::GatewayMessage> receive(std::chrono::milliseconds patience = testing::kPatience) {
    zmq::pollitem_t items[] = {{socket_.handle(), 0, ZMQ_POLLIN, 0}};
    if (zmq::poll(items, 1, patience) == 0) return std::nullopt;
    zmq::message_t frame;
    EXPECT_TRUE(socket_.recv(frame).has_value());
    EXPECT_FALSE(frame.more());
    v1::GatewayMessage out;
    EXPECT_TRUE(out.ParseFromArray(frame.data(), static_cast<int>(frame.size())));
    return out;
  }
  v1::GatewayMessage ask(const v1::LearnerMessage& message) {
    for (int i = 0; i < 100; ++i) {
      send(message);
      if (auto answer = receive(std::chrono::milliseconds(2000))) return *answer;
    }
    ADD_FAILURE() << "no answer";
    return {};
  }
  v1::GatewayMessage hello(int64_t incarnation, int64_t committed_step = 0) {
    v1::LearnerMessage message;
    message.mutable_hello()->set_run_id("run");
    message.mutable_hello()->set_incarnation(incarnation);
    message.mutable_hello()->set_committed_step(committed_step);
    return ask(message);
  }

 private:
  zmq::context_t context_{1};
  zmq::socket_t socket_;
};

v1::LearnerMessage batch_request(int64_t incarnation, int64_t step) {
  v1::LearnerMessage message;
  v1::BatchRequest* request = message.mutable_batch_request();
  request->set_incarnation(incarnation);
  request->set_step(step);
  request->set_policy_version(static_cast<int>(step));
  request->set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
  request->set_num_groups(1);
  return message;
}

v1::LearnerMessage commit_of(const v1::Batch& batch) {
  v1::LearnerMessage message;
  message.mutable_commit()->set_incarnation(batch.incarnation());
  message.mutable_commit()->set_step(batch.step());
  for (const std::string& id : testing::ids(batch)) message.mutable_commit()->add_trained_rollout_ids(id);
  return message;
}

void finish_all(Gateway& gateway, size_t count, int version) {
  std::vector<EpisodePlan> plans;
  while (plans.size() < count) {
    for (const EpisodePlan& plan : gateway.take_all()) plans.push_back(plan);
    std::this_thread::yield();  // the request is on its way
  }
  for (const EpisodePlan& plan : plans) {
    ASSERT_TRUE(gateway.finish(plan, plan.group_index, v1::FINISH_REASON_STOP, version).ok());
  }
}

absl::StatusOr<std::unique_ptr<Delivery>> start(Gateway& gateway, const std::string& address = "tcp://127.0.0.1:0") {
  return Delivery::start(address, gateway.ledger(), quiet_logger(), [] {
    v1::Activity activity;
    activity.set_generated_tokens(7);
    return activity;
  });
}

TEST(Delivery, BatchesSurviveRestartsOfEitherSide) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  auto delivery = start(gateway);
  ASSERT_TRUE(delivery.ok()) << delivery.status();
  const std::string endpoint = (*delivery)->endpoint();
  EXPECT_EQ(endpoint.rfind("tcp://127.0.0.1:", 0), 0u) << endpoint;
  auto learner = std::make_unique<Learner>(endpoint);
  EXPECT_EQ(learner->hello(1).hello_reply().incarnation(), 1);
  learner->send(batch_request(1, 0));
  finish_all(gateway, 2, 0);
  const v1::Batch first = learner->receive().value().batch();
  ASSERT_EQ(first.groups_size(), 1);
  EXPECT_EQ(first.num_parts(), 1);
  EXPECT_EQ(first.counts().queued(), 2u);
  EXPECT_EQ(first.activity().generated_tokens(), 7u);

  // The gateway restarts at its address: the learner's socket finds it, and its requests go on.
  delivery->reset();
  gateway.reopen();
  delivery = start(gateway, endpoint);
  ASSERT_TRUE(delivery.ok()) << delivery.status();
  EXPECT_EQ(testing::bytes(learner->ask(batch_request(1, 0)).batch()), testing::bytes(first));
  const v1::CommitReply reply = learner->ask(commit_of(first)).commit_reply();
  EXPECT_EQ(reply.counts().trained(), 2u);
  EXPECT_EQ(reply.activity().generated_tokens(), 7u);

  // The learner dies waiting, and another life of it gets what it waited for.
  learner->send(batch_request(1, 1));
  finish_all(gateway, 2, 1);
  learner = std::make_unique<Learner>(endpoint);
  EXPECT_EQ(learner->hello(2).refused().code(), static_cast<int>(absl::StatusCode::kOk)) << "committed step 0 is ours";
  const v1::Batch second = learner->ask(batch_request(2, 1)).batch();
  EXPECT_EQ(testing::ids(second), (std::vector<std::string>{"run-g1-0", "run-g1-1"}));
  EXPECT_EQ(learner->ask(batch_request(1, 1)).refused().code(), static_cast<int>(absl::StatusCode::kFailedPrecondition));
}

TEST(Delivery, GarbageIsRefusedAndHarmless) {
  Gateway gateway({});
  auto delivery = start(gateway);
  ASSERT_TRUE(delivery.ok()) << delivery.status();
  Learner learner((*delivery)->endpoint());
  const int invalid = static_cast<int>(absl::StatusCode::kInvalidArgument);
  for (const std::string& frame : {std::string(), std::string("\xff\xff garbage"), std::string(1 << 20, '\x0a')}) {
    learner.send(frame);
    EXPECT_EQ(learner.receive().value().refused().code(), invalid);
  }
  learner.send(std::vector<std::string>{"", "two frames"});
  EXPECT_EQ(learner.receive().value().refused().code(), invalid);

  const int raw = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const std::string& endpoint = (*delivery)->endpoint();
  address.sin_port = htons(static_cast<uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1))));
  ASSERT_EQ(::connect(raw, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  const std::string http = "GET / HTTP/1.1\r\n\r\n";
  EXPECT_EQ(::send(raw, http.data(), http.size(), MSG_NOSIGNAL), static_cast<ssize_t>(http.size()));
  ::close(raw);
  EXPECT_TRUE(learner.hello(1).has_hello_reply());
}

TEST(Delivery, BusyAddressIsAnErrorThatNamesIt) {
  Gateway gateway({});
  auto first = start(gateway);
  ASSERT_TRUE(first.ok()) << first.status();
  for (const std::string& address : {(*first)->endpoint(), std::string("tcp://no such host:1"), std::string("nonsense://x")}) {
    const absl::Status status = start(gateway, address).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_NE(std::string(status.message()).find(address), std::string::npos) << status;
  }
}

TEST(Delivery, PartsAreWholeGroupsOfBoundedSize) {
  v1::Batch batch;
  batch.set_incarnation(3);
  batch.set_step(4);
  batch.mutable_counts()->set_produced(9);
  for (const size_t bytes : {400u, 400u, 400u, 3000u, 100u}) {
    v1::Group* group = batch.add_groups();
    group->set_group_number(static_cast<uint64_t>(batch.groups_size()));
    group->set_group_id(std::string(bytes, 'g'));
  }
  const auto parts = split_batch(batch, 1000);
  ASSERT_TRUE(parts.ok());
  std::vector<int> sizes;
  uint64_t number = 0;
  for (const std::string& text : *parts) {
    v1::GatewayMessage message;
    ASSERT_TRUE(message.ParseFromString(text));
    EXPECT_EQ(message.batch().part(), static_cast<int>(sizes.size()));
    EXPECT_EQ(message.batch().num_parts(), 4);
    EXPECT_EQ(message.batch().step(), 4);
    EXPECT_EQ(message.batch().counts().produced(), 9u);
    sizes.push_back(message.batch().groups_size());
    for (const v1::Group& group : message.batch().groups()) EXPECT_EQ(group.group_number(), ++number);
  }
  EXPECT_EQ(sizes, (std::vector<int>{2, 1, 1, 1}));
  EXPECT_EQ(*split_batch(batch, 1000), *parts);
  EXPECT_EQ(split_batch(v1::Batch(), 1000)->size(), 1u);
}

// A learner that asks again and again and reads nothing: the gateway stays well, and another life is served.
TEST(Delivery, ASilentLearnerHoldsUpNobody) {
  Gateway gateway({.group_size = 2, .groups_per_batch = 1});
  auto delivery = start(gateway);
  ASSERT_TRUE(delivery.ok()) << delivery.status();
  Learner silent((*delivery)->endpoint());
  EXPECT_TRUE(silent.hello(1).has_hello_reply());
  silent.send(batch_request(1, 0));
  finish_all(gateway, 2, 0);
  for (int i = 0; i < 5000; ++i) silent.send(batch_request(1, 0));
  Learner other((*delivery)->endpoint());
  EXPECT_TRUE(other.hello(2).has_hello_reply());
  EXPECT_EQ(other.ask(batch_request(2, 0)).batch().groups_size(), 1);
}

}  // namespace
}  // namespace slipstream::gateway
