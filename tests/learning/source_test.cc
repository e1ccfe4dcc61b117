// Goal: the source gets its answers from a gateway that loses, doubles, splits and forgets; it ends on time,
// at a stop and at a refusal, with a message that says what it waited for.
#include "learner/source.h"

#include <chrono>
#include <sstream>

#include "gtest/gtest.h"
#include "spdlog/sinks/ostream_sink.h"
#include "tests/learning/batches.h"
#include "tests/learning/fake_gateway.h"

namespace slipstream::learner {
namespace {

using testing::FakeGateway;
using testing::FakeGatewayOptions;

FakeGatewayOptions gateway_options() {
  FakeGatewayOptions options;
  options.group = [](uint64_t number, int version) {
    return testing::make_group({.policy_version = version}, 90, number);
  };
  options.demonstration = [](uint64_t number) { return testing::make_demonstration({}, 90, number); };
  return options;
}

std::unique_ptr<Source> connect(const std::string& address, int reply_ms = 20, int gateway_ms = 20'000,
                                Logger log = quiet_logger()) {
  absl::StatusOr<std::unique_ptr<Source>> source =
      Source::connect({.address = address, .reply_timeout_ms = reply_ms, .gateway_timeout_ms = gateway_ms, .batch_timeout_ms = gateway_ms},
                      std::move(log));
  CHECK_OK(source.status());
  return *std::move(source);
}

v1::Hello hello(int64_t incarnation) {
  v1::Hello out;
  out.set_run_id("run");
  out.set_incarnation(incarnation);
  return out;
}

v1::BatchRequest request(int64_t incarnation, int64_t step, int groups = 7) {
  v1::BatchRequest out;
  out.set_incarnation(incarnation);
  out.set_step(step);
  out.set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
  out.set_num_groups(groups);
  return out;
}

v1::Commit commit(int64_t incarnation, const v1::Batch& batch) {
  v1::Commit out;
  out.set_incarnation(incarnation);
  out.set_step(batch.step());
  for (const v1::Group& group : batch.groups()) {
    for (const v1::Trajectory& trajectory : group.trajectories())
      out.add_trained_rollout_ids(trajectory.rollout_id());
  }
  return out;
}

std::vector<uint64_t> numbers(const v1::Batch& batch) {
  std::vector<uint64_t> out;
  for (const v1::Group& group : batch.groups()) out.push_back(group.group_number());
  return out;
}

TEST(Source, LostDoubledAndSplitMessages) {
  FakeGatewayOptions options = gateway_options();
  options.parts = 3;
  options.drop_every = 2;
  options.repeat_replies = 3;
  FakeGateway gateway(std::move(options));
  const std::unique_ptr<Source> source = connect(gateway.address());
  ASSERT_TRUE(source->hello(hello(1), {}).ok());
  for (int64_t step = 1; step <= 20; ++step) {
    const absl::StatusOr<v1::Batch> batch = source->batch(request(1, step), {});
    ASSERT_TRUE(batch.ok()) << batch.status();
    EXPECT_EQ(batch->step(), step);
    std::vector<uint64_t> expected;
    for (uint64_t i = 0; i < 7; ++i) expected.push_back(static_cast<uint64_t>(step - 1) * 7 + i);
    EXPECT_EQ(numbers(*batch), expected);
    const absl::StatusOr<v1::CommitReply> reply = source->commit(commit(1, *batch), {});
    ASSERT_TRUE(reply.ok()) << reply.status();
    EXPECT_EQ(reply->counts().trained(), static_cast<uint64_t>(step) * 28);
  }
}

TEST(Source, ReconnectsToAGatewayThatComesBackAndMustBeGreeted) {
  FakeGateway gateway(gateway_options());
  const std::unique_ptr<Source> source = connect(gateway.address());
  EXPECT_EQ(source->batch(request(1, 1), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);  // before any Hello
  ASSERT_TRUE(source->hello(hello(1), {}).ok());
  ASSERT_TRUE(source->batch(request(1, 1), {}).ok());
  gateway.restart();
  const absl::Status refused = source->batch(request(1, 2), {}).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused.message(), "gateway refused the BatchRequest of step 2: say Hello first");
  ASSERT_TRUE(source->hello(hello(1), {}).ok());
  const absl::StatusOr<v1::Batch> batch = source->batch(request(1, 2), {});
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(numbers(*batch)[0], 0u);  // what was delivered and not committed comes again
}

// The address of a gateway that is gone.
std::string deserted_address() {
  const FakeGateway first(gateway_options());
  return first.address();
}

TEST(Source, GatewayThatIsNotThereYetIsWaitedFor) {
  FakeGatewayOptions options = gateway_options();
  options.address = deserted_address();
  const std::unique_ptr<Source> source = connect(options.address);
  absl::Status status;
  std::jthread waiting([&] { status = source->hello(hello(1), {}).status(); });
  FakeGateway gateway(std::move(options));
  waiting.join();
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Source, GatewayThatNeverComesIsNamed) {
  const std::string address = deserted_address();
  std::ostringstream text;
  const auto log = std::make_shared<spdlog::logger>("learner", std::make_shared<spdlog::sinks::ostream_sink_mt>(text));
  const std::unique_ptr<Source> source = connect(address, 20, 350, log);
  const auto begin = std::chrono::steady_clock::now();
  const absl::Status status = source->hello(hello(1), {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(status.message(), absl::StrCat("gateway ", address, ": no answer to Hello within 350 ms"));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
  // It is no silent wait: every 100 ms here.
  const std::string warning = absl::StrCat("gateway ", address, ": no answer to Hello for ");
  const size_t first = text.str().find(warning);
  ASSERT_NE(first, std::string::npos) << text.str();
  EXPECT_NE(text.str().find(warning, first + 1), std::string::npos) << text.str();
}

TEST(Source, StopEndsAWaitAtOnce) {
  FakeGateway gateway([] {
    FakeGatewayOptions options = gateway_options();
    options.drop_every = 1;
    return options;
  }());
  const std::unique_ptr<Source> source = connect(gateway.address(), 60'000, 600'000);
  std::stop_source stop;
  absl::Status status;
  std::jthread waiting([&] { status = source->hello(hello(1), stop.get_token()).status(); });
  stop.request_stop();
  waiting.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kCancelled);
}

TEST(Source, GarbageIsIgnored) {
  FakeGateway gateway(gateway_options());
  const std::unique_ptr<Source> source = connect(gateway.address());
  ASSERT_TRUE(source->hello(hello(1), {}).ok());
  gateway.send_garbage();
  for (int64_t step = 1; step <= 5; ++step) ASSERT_TRUE(source->batch(request(1, step), {}).ok());
}

TEST(Source, BadAddressIsNamed) {
  const absl::Status status = Source::connect({.address = "nonsense"}, quiet_logger()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("nonsense"), absl::string_view::npos);
}

}  // namespace
}  // namespace slipstream::learner
