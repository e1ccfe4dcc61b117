#include "gateway/driving_sessions.h"

#include <gtest/gtest.h>

#include <cmath>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gateway/testing/fake_worker.h"
#include "gateway/testing/memory_source.h"

namespace slipstream::gateway {
namespace {

using testing::FakeWorker;
using testing::MemorySource;

struct Turn {
  absl::Status status;
  std::vector<v1::ChatEvent> events;
  const v1::ChatFinished& finished() const { return events.back().finished(); }
};

// Reads a stream to its end.
Turn read(const absl::StatusOr<std::shared_ptr<ChatStream>>& stream) {
  if (!stream.ok()) return {stream.status(), {}};
  Turn out;
  for (size_t i = 0;;) {
    auto ready = std::make_shared<absl::Notification>();
    const auto next = (*stream)->get(i, [ready] { ready->Notify(); });
    if (!next.has_value()) {
      if (!ready->WaitForNotificationWithTimeout(absl::Seconds(60))) return {absl::UnknownError("no end"), {}};
      continue;
    }
    if (!next->event.has_value()) {
      out.status = next->status;
      return out;
    }
    out.events.push_back(*next->event);
    ++i;
  }
}

class DrivingSessionsTest : public ::testing::Test {
 protected:
  DrivingSessionsTest() { config_.max_tokens = 100; }
  void start(FakeWorker::Options worker = {}) {
    worker_ = std::make_unique<FakeWorker>(std::move(worker));
    ASSERT_TRUE(worker_->join(pool_).ok());
    sessions_ = std::make_unique<DrivingSessions>(config_, source_, engine_, *format_, metrics_, quiet_logger());
  }
  std::string open(const std::string& key = "open") {
    v1::OpenSessionRequest request;
    request.set_idempotency_key(key);
    request.set_task("task");
    const auto response = sessions_->open(request);
    EXPECT_TRUE(response.ok()) << response.status();
    return response.ok() ? response->session_id() : "";
  }
  static v1::ChatRequest chat(const std::string& session, const std::string& key) {
    v1::ChatRequest request;
    request.set_session_id(session);
    request.set_idempotency_key(key);
    return request;
  }
  static void say(v1::ChatRequest& request, const std::string& text) {
    v1::Message& message = *request.add_messages();
    message.set_role(v1::ROLE_USER);
    message.set_content(text);
  }
  absl::StatusOr<v1::FinishResponse> finish(const v1::FinishRequest& request) {
    auto result = std::make_shared<absl::StatusOr<v1::FinishResponse>>(absl::UnknownError("not called"));
    auto called = std::make_shared<absl::Notification>();
    sessions_->finish(request, [=](absl::StatusOr<v1::FinishResponse> given) {
      *result = std::move(given);
      called->Notify();
    });
    EXPECT_TRUE(called->WaitForNotificationWithTimeout(absl::Seconds(60)));
    return *result;
  }
  static v1::FinishRequest reward(const std::string& session, double value, const std::string& key = "finish") {
    v1::FinishRequest request;
    request.set_session_id(session);
    request.set_idempotency_key(key);
    request.set_reward(value);
    return request;
  }
  v1::GetSessionResponse state(const std::string& session) {
    v1::GetSessionRequest request;
    request.set_session_id(session);
    return sessions_->get(request).value();
  }

  GatewayConfig config_;
  Metrics metrics_;
  const std::unique_ptr<model::Tokenizer> tokenizer_ = *model::open_tokenizer("bytes");
  const std::unique_ptr<model::ChatFormat> format_ = *model::ChatFormat::create({}, *tokenizer_);
  MemorySource source_;
  WorkerPool pool_{{.heartbeat_ms = 60'000, .heartbeat_misses = 3}, metrics_, quiet_logger()};
  std::unique_ptr<FakeWorker> worker_;
  EngineClient engine_{pool_, quiet_logger()};
  std::unique_ptr<DrivingSessions> sessions_;
};

TEST_F(DrivingSessionsTest, AConversationBecomesATrajectory) {
  start({.tokens_per_event = 4});
  const std::string session = open();
  v1::ChatRequest request = chat(session, "1");
  say(request, "hello");
  const Turn first = read(sessions_->chat(request));
  ASSERT_TRUE(first.status.ok()) << first.status;
  std::string text;
  int ids = 0;
  for (const auto& event : first.events) {
    text += event.text();
    ids += event.ids_size();
    EXPECT_EQ(event.logprobs_size(), event.ids_size());
    EXPECT_EQ(event.policy_versions_size(), event.ids_size());
  }
  EXPECT_EQ(first.finished().message().content(), text);
  EXPECT_EQ(first.finished().completion_tokens(), ids);
  EXPECT_EQ(first.finished().prompt_tokens(), worker_->requests()[0].prompt_ids_size());
  EXPECT_EQ(first.finished().finish_reason(), v1::FINISH_REASON_STOP);

  *request.add_messages() = first.finished().message();
  say(request, "go on");
  request.set_idempotency_key("2");
  ASSERT_TRUE(read(sessions_->chat(request)).status.ok());
  EXPECT_EQ(state(session).state(), "open");
  EXPECT_EQ(state(session).num_turns(), 2);
  const auto offset = finish(reward(session, 0.75));
  ASSERT_TRUE(offset.ok()) << offset.status();
  EXPECT_EQ(offset->log_offset(), 1u);
  EXPECT_EQ(state(session).state(), "finished");
  const v1::Trajectory trajectory = source_.wait_for(1).at(session);
  EXPECT_EQ(trajectory.reward(), 0.75);
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_ENV_DONE);
  EXPECT_EQ(trajectory.num_turns(), 2);
  ASSERT_EQ(trajectory.samples_size(), 1);
  EXPECT_GT(trajectory.engine_time_us(), 0);
  EXPECT_EQ(finish(reward(session, 0.75))->log_offset(), 1u);  // repeated
  EXPECT_TRUE(absl::IsFailedPrecondition(finish(reward(session, 0.75, "other key")).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(sessions_->chat(chat(session, "3")).status()));
}

// Goal: a repeated call gets the first answer, also while that is still being made; another body under its key is refused.
TEST_F(DrivingSessionsTest, IdempotencyKeys) {
  absl::Notification reached, go;
  FakeWorker::Options worker;
  worker.before_event = [&](const v1::GenerateRequest&, int sent) {
    if (sent == 1 && !reached.HasBeenNotified()) {
      reached.Notify();
      go.WaitForNotification();
    }
    return absl::OkStatus();
  };
  worker.stop_in = 0;
  config_.max_tokens = 10;
  start(worker);
  const std::string session = open("same");
  EXPECT_EQ(open("same"), session);
  EXPECT_NE(open("another"), session);
  v1::ChatRequest request = chat(session, "turn");
  say(request, "hello");
  const auto first = sessions_->chat(request);
  ASSERT_TRUE(first.ok()) << first.status();
  reached.WaitForNotification();
  const auto again = sessions_->chat(request);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_EQ(*first, *again);
  v1::ChatRequest other = request;
  say(other, "something else");
  EXPECT_TRUE(absl::IsAlreadyExists(sessions_->chat(other).status()));
  other.set_idempotency_key("other turn");
  EXPECT_TRUE(absl::IsFailedPrecondition(sessions_->chat(other).status()));  // one turn at a time
  EXPECT_TRUE(absl::IsFailedPrecondition(finish(reward(session, 1)).status()));
  go.Notify();
  const Turn turn = read(first);
  ASSERT_TRUE(turn.status.ok()) << turn.status;
  EXPECT_EQ(read(sessions_->chat(request)).events.size(), turn.events.size());
  EXPECT_EQ(worker_->requests().size(), 1u);
  v1::ChatRequest keyless = request;
  keyless.clear_idempotency_key();
  EXPECT_TRUE(absl::IsInvalidArgument(sessions_->chat(keyless).status()));
  ASSERT_TRUE(finish(reward(session, 1)).ok());
  EXPECT_TRUE(absl::IsAlreadyExists(finish(reward(session, 2)).status()));
}

TEST_F(DrivingSessionsTest, ARefusedTurnChangesNothingAndCanBeRepeated) {
  std::atomic<bool> broken = true;
  FakeWorker::Options worker;
  worker.before_event = [&](const v1::GenerateRequest&, int) {
    return broken ? absl::InternalError("engine bug") : absl::OkStatus();
  };
  start(worker);
  const std::string session = open();
  v1::ChatRequest request = chat(session, "1");
  EXPECT_TRUE(absl::IsInvalidArgument(read(sessions_->chat(request)).status));  // no messages
  say(request, "hello");
  const Turn failed = read(sessions_->chat(request));
  EXPECT_EQ(failed.status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(failed.status.ToString().find("engine bug"), std::string::npos);
  EXPECT_EQ(state(session).num_turns(), 0);
  EXPECT_TRUE(absl::IsFailedPrecondition(finish(reward(session, 1)).status()));  // a reward for nothing
  broken = false;
  EXPECT_TRUE(read(sessions_->chat(request)).status.ok());  // the same key: nothing was answered yet
  v1::ChatRequest diverging = chat(session, "2");
  say(diverging, "hallo");
  const Turn refused = read(sessions_->chat(diverging));
  EXPECT_TRUE(absl::IsInvalidArgument(refused.status)) << refused.status;
  EXPECT_NE(refused.status.ToString().find("message 0"), std::string::npos) << refused.status;
  EXPECT_EQ(state(session).num_turns(), 1);
}

TEST_F(DrivingSessionsTest, RefusesBadRequests) {
  start();
  v1::OpenSessionRequest request;
  request.set_idempotency_key("k");
  EXPECT_TRUE(absl::IsInvalidArgument(sessions_->open(request).status()));  // no task
  request.set_task("task");
  request.mutable_sampling()->set_temperature(NAN);
  EXPECT_TRUE(absl::IsInvalidArgument(sessions_->open(request).status()));
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_max_tokens(-1);
  EXPECT_TRUE(absl::IsInvalidArgument(sessions_->open(request).status()));
  request.clear_sampling();
  request.add_tools();
  EXPECT_TRUE(absl::IsInvalidArgument(sessions_->open(request).status()));
  request.clear_tools();
  request.set_task("closed");
  EXPECT_TRUE(absl::IsResourceExhausted(sessions_->open(request).status()));  // admission's
  EXPECT_TRUE(absl::IsNotFound(sessions_->chat(chat("nobody", "k")).status()));
  const std::string session = open();
  v1::ChatRequest hello = chat(session, "h");
  say(hello, "hello");
  ASSERT_TRUE(read(sessions_->chat(hello)).status.ok());
  EXPECT_TRUE(absl::IsInvalidArgument(finish(reward(session, NAN)).status()));
  v1::FinishRequest parts = reward(session, 1);
  (*parts.mutable_reward_parts())["x"] = INFINITY;
  EXPECT_TRUE(absl::IsInvalidArgument(finish(parts).status()));
  v1::FinishRequest failure = reward(session, NAN);
  failure.set_failure(v1::FINISH_REASON_STOP);
  EXPECT_TRUE(absl::IsInvalidArgument(finish(failure).status()));
  failure.set_failure(v1::FINISH_REASON_ENV_CRASH);
  ASSERT_TRUE(finish(failure).ok());
  EXPECT_EQ(state(session).state(), "failed");
  EXPECT_EQ(source_.wait_for(1).at(session).finish_reason(), v1::FINISH_REASON_ENV_CRASH);
  EXPECT_EQ(source_.wait_for(1).at(session).reward(), 0);
}

TEST_F(DrivingSessionsTest, SessionsAreBoundedAndExpire) {
  config_.sessions_max = 2;
  config_.session_idle_ms = 50;
  start();
  const std::string first = open("1");
  open("2");
  v1::OpenSessionRequest request;
  request.set_idempotency_key("3");
  request.set_task("task");
  EXPECT_TRUE(absl::IsResourceExhausted(sessions_->open(request).status()));
  const auto expired = source_.wait_for(2);
  ASSERT_EQ(expired.size(), 2u);
  EXPECT_EQ(expired.at(first).finish_reason(), v1::FINISH_REASON_ABORTED);
  while (state(first).state() == "open") absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(state(first).state(), "expired");
}

TEST_F(DrivingSessionsTest, AFinishThatCannotBeWrittenCanBeRepeated) {
  std::atomic<bool> full = true;
  source_.on_finish = [&](const auto&) { return full ? absl::ResourceExhaustedError("disk full") : absl::OkStatus(); };
  start();
  const std::string session = open();
  v1::ChatRequest hello = chat(session, "h");
  say(hello, "hello");
  ASSERT_TRUE(read(sessions_->chat(hello)).status.ok());
  EXPECT_TRUE(absl::IsResourceExhausted(finish(reward(session, 1)).status()));
  EXPECT_EQ(state(session).state(), "open");
  full = false;
  EXPECT_TRUE(finish(reward(session, 1)).ok());
}

TEST_F(DrivingSessionsTest, StopEndsTurnsAndGivesEpisodesBack) {
  absl::Notification reached, end;
  FakeWorker::Options worker;
  worker.before_event = [&](const v1::GenerateRequest&, int) {
    reached.Notify();
    end.WaitForNotification();
    return absl::OkStatus();
  };
  start(worker);
  const std::string session = open();
  v1::ChatRequest hello = chat(session, "h");
  say(hello, "hello");
  const auto stream = sessions_->chat(hello);
  reached.WaitForNotification();
  const absl::Time asked = absl::Now();
  sessions_->stop();
  EXPECT_LT(absl::Now() - asked, absl::Seconds(2));
  EXPECT_TRUE(absl::IsUnavailable(read(stream).status));
  EXPECT_EQ(source_.cancelled(), std::vector<std::string>{session});
  EXPECT_TRUE(absl::IsUnavailable(sessions_->chat(chat(session, "x")).status()));
  end.Notify();
  worker_->kill();  // its handler is done with `end`
}

TEST(AnswersTest, TheOldestCompleteAnswersAreForgotten) {
  Answers<int> answers(2, 1'000);
  const auto known = [&](const std::string& key) { return *answers.find(key, "body") != nullptr; };
  answers.begin("running", "body", std::make_shared<int>(0));
  for (const char* key : {"a", "b", "c"}) {
    answers.begin(key, "body", std::make_shared<int>(1));
    answers.complete(key, 10);
  }
  EXPECT_TRUE(known("running"));
  EXPECT_FALSE(known("a"));
  EXPECT_TRUE(known("b"));
  answers.begin("large", "body", std::make_shared<int>(1));
  answers.complete("large", 995);
  EXPECT_FALSE(known("c"));
  EXPECT_TRUE(known("large"));
  answers.forget("running");
  EXPECT_FALSE(known("running"));
  EXPECT_TRUE(absl::IsAlreadyExists(answers.find("large", "other").status()));
}

}  // namespace
}  // namespace slipstream::gateway
