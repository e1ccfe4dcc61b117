#include "gateway/environment_client.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gateway/environment_answers.h"
#include "gateway/testing/fake_environment.h"

namespace slipstream::gateway {
namespace {

using testing::FakeEnvironment;

v1::ResetRequest reset(const std::string& episode) {
  v1::ResetRequest request;
  request.set_episode_id(episode);
  request.set_task("task");
  return request;
}

v1::StepRequest step(const std::string& episode, int turn) {
  v1::StepRequest request;
  request.set_episode_id(episode);
  request.set_turn(turn);
  return request;
}

class EnvironmentClientTest : public ::testing::Test {
 protected:
  EnvironmentConfig config(const std::string& address) {
    EnvironmentConfig out;
    out.name = "env";
    out.address = address;
    out.quarantine_ms = 20;
    out.quarantine_after = 3;
    return out;
  }
  std::unique_ptr<EnvironmentClient> client(EnvironmentConfig c) {
    return std::make_unique<EnvironmentClient>(
        std::move(c), [this](const v1::DescribeResponse&) { return on_described(); }, metrics_, quiet_logger());
  }
  absl::Status on_described() {
    if (!described_.HasBeenNotified()) described_.Notify();
    return absl::OkStatus();
  }
  Metrics metrics_;
  absl::Notification described_;
  std::stop_source stop_;
};

TEST_F(EnvironmentClientTest, DescribesResetsStepsCloses) {
  FakeEnvironment fake({.turns = 2});
  const auto env = client(config(fake.address()));
  auto place = env->take_place(stop_.get_token());
  ASSERT_TRUE(place.has_value());
  const auto first = env->reset(reset("e"), stop_.get_token());
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_TRUE(described_.HasBeenNotified());
  EXPECT_EQ(env->task("task")->max_turns(), 8);
  EXPECT_FALSE(env->task("other").has_value());
  EXPECT_EQ(first->messages(0).content(), "problem 0");
  EXPECT_FALSE(env->step(step("e", 0), stop_.get_token())->done());
  EXPECT_TRUE(env->step(step("e", 1), stop_.get_token())->done());
  env->close("e", *std::move(place));
  while (fake.closed().empty()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(fake.closed()[0], "e");
  EXPECT_EQ(metrics_.value(metric::kEnvironmentUp, {"env"}), 1);
  EXPECT_TRUE(env->status().up());
}

// Goal: a service that is not there yet is waited for, without holding up anybody.
TEST_F(EnvironmentClientTest, WaitsForAServiceThatStartsLater) {
  std::string address;
  { address = FakeEnvironment({}).address(); }  // a port that was free a moment ago
  const auto env = client(config(address));
  EXPECT_FALSE(env->status().up());
  const FakeEnvironment fake({.address = address});
  ASSERT_TRUE(described_.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_TRUE(env->reset(reset("e"), stop_.get_token()).ok());
}

TEST_F(EnvironmentClientTest, ADescriptionThatWillNotDoKeepsItDown) {
  FakeEnvironment fake({});
  std::atomic<int> asked = 0;
  std::vector<absl::Status> failures;  // of the client's thread, before it describes
  EnvironmentConfig c = config(fake.address());
  const EnvironmentClient env(
      c, [&](const auto&) { return ++asked < 3 ? absl::NotFoundError("task \"x\" is missing") : on_described(); }, metrics_,
      quiet_logger(), [&](absl::Status status) { failures.push_back(std::move(status)); });
  ASSERT_TRUE(described_.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(asked, 3);
  EXPECT_EQ(failures, std::vector<absl::Status>(2, absl::NotFoundError(absl::StrCat(
                          "environment env at ", fake.address(), ": task \"x\" is missing"))));
  EXPECT_EQ(env.status().last_error(), "task \"x\" is missing");
}

// Goal: who cannot wait for ever hears of a service that does not come, and of one that once was up nothing.
TEST_F(EnvironmentClientTest, AStartThatTakesTooLongIsReported) {
  std::string address;
  { address = FakeEnvironment({}).address(); }
  EnvironmentConfig c = config(address);
  c.start_timeout_ms = 30;
  absl::Notification failed;
  absl::Status failure;
  const auto on_failure = [&](absl::Status status) {
    if (failed.HasBeenNotified()) return;
    failure = std::move(status);
    failed.Notify();
  };
  {
    const EnvironmentClient env(
        c, [this](const auto&) { return on_described(); }, metrics_, quiet_logger(), on_failure, absl::Milliseconds(30));
    ASSERT_TRUE(failed.WaitForNotificationWithTimeout(absl::Seconds(20)));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(failure)) << failure;
  EXPECT_NE(failure.message().find(absl::StrCat("environment env at ", address, ": not up within start_timeout_ms 30: ")),
            absl::string_view::npos) << failure;

  auto fake = std::make_unique<FakeEnvironment>(FakeEnvironment::Options{.address = address});
  c.start_timeout_ms = c.reset_timeout_ms = 20'000;
  c.quarantine_after = 1;
  std::atomic<int> reports = 0;
  EnvironmentClient env(
      c, [this](const auto&) { return on_described(); }, metrics_, quiet_logger(), [&](absl::Status) { ++reports; },
      absl::Milliseconds(20'000));
  ASSERT_TRUE(env.reset(reset("a"), stop_.get_token()).ok());
  fake.reset();
  EXPECT_FALSE(env.reset(reset("b"), stop_.get_token()).ok());
  fake = std::make_unique<FakeEnvironment>(FakeEnvironment::Options{.address = address});
  EXPECT_TRUE(env.reset(reset("c"), stop_.get_token()).ok());
  EXPECT_EQ(reports, 0);
}

TEST_F(EnvironmentClientTest, UnavailableIsRetriedWithTheSameKey) {
  std::atomic<int> calls = 0;
  FakeEnvironment fake({.on_step = [&](const auto&, auto&) {
    return ++calls < 3 ? absl::UnavailableError("busy") : absl::OkStatus();
  }});
  const auto env = client(config(fake.address()));
  ASSERT_TRUE(env->step(step("e", 4), stop_.get_token()).ok());
  ASSERT_EQ(fake.steps().size(), 3u);
  for (const auto& request : fake.steps()) EXPECT_EQ(request.SerializeAsString(), step("e", 4).SerializeAsString());
}

TEST_F(EnvironmentClientTest, AStallEndsAtTheDeadlineAndTouchesNobodyElse) {
  absl::Notification end;
  FakeEnvironment fake({.on_reset = [&](const v1::ResetRequest& request, auto&) {
    if (request.episode_id() == "stalls") end.WaitForNotification();
    return absl::OkStatus();
  }});
  EnvironmentConfig c = config(fake.address());
  c.reset_timeout_ms = 300;
  const auto env = client(c);
  ASSERT_TRUE(described_.WaitForNotificationWithTimeout(absl::Seconds(20)));
  absl::Status stalled;
  std::jthread other([&] { stalled = env->reset(reset("stalls"), stop_.get_token()).status(); });
  EXPECT_TRUE(env->reset(reset("fine"), stop_.get_token()).ok());
  other.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(stalled)) << stalled;
  end.Notify();
}

TEST_F(EnvironmentClientTest, CancelIsPrompt) {
  absl::Notification reached, end;
  FakeEnvironment fake({.on_reset = [&](const auto&, auto&) {
    reached.Notify();
    end.WaitForNotification();
    return absl::OkStatus();
  }});
  const auto env = client(config(fake.address()));
  absl::Status status;
  std::jthread caller([&] { status = env->reset(reset("e"), stop_.get_token()).status(); });
  reached.WaitForNotification();
  const absl::Time asked = absl::Now();
  stop_.request_stop();
  caller.join();
  EXPECT_LT(absl::Now() - asked, absl::Seconds(2));
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  end.Notify();
}

// Goal: after failures in a row the service is left alone, and it comes back by itself.
TEST_F(EnvironmentClientTest, QuarantineAndReturn) {
  std::atomic<bool> broken = true;
  std::atomic<int> describes = 0;
  absl::Mutex mutex;
  bool may_describe = true;
  FakeEnvironment fake({.on_describe =
                            [&](auto&) {
                              ++describes;
                              const absl::MutexLock lock(&mutex);
                              mutex.Await(absl::Condition(&may_describe));
                              return absl::OkStatus();
                            },
                        .on_reset = [&](const auto&, auto&) {
                          return broken ? absl::InternalError("bug") : absl::OkStatus();
                        }});
  EnvironmentConfig c = config(fake.address());
  c.reset_timeout_ms = 10'000;
  const auto env = client(c);
  ASSERT_TRUE(described_.WaitForNotificationWithTimeout(absl::Seconds(20)));
  {
    const absl::MutexLock lock(&mutex);
    may_describe = false;  // it stays down until we have looked
  }
  for (int i = 0; i < 3; ++i) {
    const absl::Status status = env->reset(reset(absl::StrCat(i)), stop_.get_token()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
    EXPECT_NE(status.ToString().find("environment env: Reset: bug"), std::string::npos) << status;
  }
  EXPECT_EQ(metrics_.value(metric::kEnvironmentUp, {"env"}), 0);
  EXPECT_FALSE(env->status().up());
  EXPECT_EQ(env->status().last_error(), "bug");
  broken = false;
  {
    const absl::MutexLock lock(&mutex);
    may_describe = true;
  }
  EXPECT_TRUE(env->reset(reset("again"), stop_.get_token()).ok());  // waits for the return
  EXPECT_EQ(metrics_.value(metric::kEnvironmentUp, {"env"}), 1);
  EXPECT_GE(describes, 2);
}

TEST_F(EnvironmentClientTest, GoesAwayAndReturns) {
  auto fake = std::make_unique<FakeEnvironment>(FakeEnvironment::Options{});
  const std::string address = fake->address();
  EnvironmentConfig c = config(address);
  c.reset_timeout_ms = 20'000;
  c.quarantine_after = 1;
  const auto env = client(c);
  ASSERT_TRUE(env->reset(reset("a"), stop_.get_token()).ok());
  fake.reset();
  EXPECT_TRUE(absl::IsUnavailable(env->reset(reset("b"), stop_.get_token()).status()));
  EXPECT_EQ(metrics_.value(metric::kEnvironmentUp, {"env"}), 0);
  fake = std::make_unique<FakeEnvironment>(FakeEnvironment::Options{.address = address});
  EXPECT_TRUE(env->reset(reset("c"), stop_.get_token()).ok());
}

TEST_F(EnvironmentClientTest, OpenEpisodesAreBounded) {
  FakeEnvironment fake({});
  EnvironmentConfig c = config(fake.address());
  c.max_concurrent = 1;
  const auto env = client(c);
  auto first = env->take_place(stop_.get_token());
  ASSERT_TRUE(first.has_value());
  absl::Notification second;
  std::jthread waiting([&] {
    const auto place = env->take_place(stop_.get_token());
    second.Notify();
  });
  EXPECT_FALSE(second.WaitForNotificationWithTimeout(absl::Milliseconds(20)));
  env->close("e", *std::move(first));
  EXPECT_TRUE(second.WaitForNotificationWithTimeout(absl::Seconds(10)));
  waiting.join();
  const auto third = env->take_place(stop_.get_token());
  std::jthread stopped([&] { EXPECT_FALSE(env->take_place(stop_.get_token()).has_value()); });
  stop_.request_stop();
}

TEST_F(EnvironmentClientTest, GarbageIsNamed) {
  std::function<void(v1::ResetResponse&)> edit_reset = [](auto&) {};
  std::function<void(v1::StepResponse&)> edit_step = [](auto&) {};
  FakeEnvironment fake({.turns = 2,
                        .on_reset = [&](const auto&, auto& answer) { return edit_reset(answer), absl::OkStatus(); },
                        .on_step = [&](const auto&, auto& answer) { return edit_step(answer), absl::OkStatus(); }});
  EnvironmentConfig c = config(fake.address());
  c.quarantine_after = 1'000;
  const auto env = client(c);
  const auto expect = [](const absl::Status& status, const char* text) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << text;
    EXPECT_NE(status.ToString().find(text), std::string::npos) << status << ", expected " << text;
  };
  const auto bad_reset = [&](const char* text, std::function<void(v1::ResetResponse&)> edit) {
    edit_reset = std::move(edit);
    v1::ResetRequest request = reset("e");
    request.set_want_solution(true);
    expect(env->reset(request, {}).status(), text);
  };
  const auto bad_step = [&](const char* text, std::function<void(v1::StepResponse&)> edit) {
    edit_step = std::move(edit);
    expect(env->step(step("e", 0), {}).status(), text);
  };
  bad_reset("messages: empty", [](auto& a) { a.clear_messages(); });
  bad_reset("messages[0].role: 3", [](auto& a) { a.mutable_messages(0)->set_role(v1::ROLE_ASSISTANT); });
  bad_reset("messages[0].role: 77", [](auto& a) { a.mutable_messages(0)->set_role(static_cast<v1::Role>(77)); });
  bad_reset("messages[0].content: empty", [](auto& a) { a.mutable_messages(0)->clear_content(); });
  bad_reset("messages[0].tool_calls", [](auto& a) { a.mutable_messages(0)->add_tool_calls(); });
  bad_reset("bytes of text, expected at most", [](auto& a) { a.mutable_messages(0)->set_content(std::string(17 << 20, 'x')); });
  bad_reset("tools[0].name: empty", [](auto& a) { a.add_tools(); });
  bad_reset("tools[1].name: \"t\" is listed twice", [](auto& a) { a.add_tools()->set_name("t"), a.add_tools()->set_name("t"); });
  bad_reset("tools[0].parameters", [](auto& a) { a.add_tools()->set_name("t"), a.mutable_tools(0)->set_parameters("{"); });
  bad_reset("solution: missing", [](auto& a) { a.clear_solution(); });
  bad_reset("solution.role", [](auto& a) { a.mutable_solution()->set_role(v1::ROLE_USER); });
  bad_reset("solution.tool_calls[0].arguments", [](auto& a) { a.mutable_solution()->add_tool_calls()->set_name("f"); });
  bad_step("messages: empty although done is false", [](auto& a) { a.clear_messages(); });
  bad_step("reward: nan", [](auto& a) { a.set_reward(std::nan("")); });
  bad_step("reward: inf", [](auto& a) { a.set_reward(std::numeric_limits<double>::infinity()); });
  bad_step("reward_parts[\"x\"]: nan", [](auto& a) { (*a.mutable_reward_parts())["x"] = std::nan(""); });
  // More than a message may hold: gRPC itself refuses it, and the next call is fine.
  edit_step = [](auto& a) { a.mutable_messages(0)->set_content(std::string(65 << 20, 'x')); };
  EXPECT_TRUE(absl::IsResourceExhausted(env->step(step("e", 0), {}).status()));
  edit_step = [](auto&) {};
  EXPECT_TRUE(env->step(step("e", 0), {}).ok());
}

TEST(EnvironmentAnswersTest, Descriptions) {
  v1::DescribeResponse answer;
  EXPECT_EQ(validate(answer).message(), "tasks: empty, expected at least one");
  answer.add_tasks()->set_name("a");
  EXPECT_EQ(validate(answer).message(), "tasks[0].max_turns: 0, expected > 0");
  answer.mutable_tasks(0)->set_max_turns(1);
  EXPECT_TRUE(validate(answer).ok());
  answer.mutable_tasks(0)->set_name(std::string(200, 'a'));
  EXPECT_EQ(validate(answer).message(), "tasks[0].name: 200 bytes, expected 1 to 128");
  answer.mutable_tasks(0)->set_name("a\x1b");
  EXPECT_EQ(validate(answer).message(), "tasks[0].name: \"a\\x1b\", expected printable ASCII");
  answer.mutable_tasks(0)->set_name("a");
  *answer.add_tasks() = answer.tasks(0);
  EXPECT_EQ(validate(answer).message(), "tasks[1].name: \"a\" is listed twice");
}

}  // namespace
}  // namespace slipstream::gateway
