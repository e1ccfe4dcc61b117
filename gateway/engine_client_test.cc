#include "gateway/engine_client.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gateway/testing/fake_worker.h"

namespace slipstream::gateway {
namespace {

using testing::FakeWorker;

constexpr int32_t kStop = 300;

v1::GenerateRequest turn(const std::string& session, int max_tokens = 100, uint64_t seed = 7) {
  v1::GenerateRequest request;
  request.set_request_id(session + "/0");
  request.set_session_id(session);
  for (int i = 0; i < 20; ++i) request.add_prompt_ids(i);
  request.mutable_sampling()->set_seed(seed);
  request.mutable_sampling()->set_temperature(1);
  request.mutable_sampling()->set_max_tokens(max_tokens);
  request.add_stop_ids(kStop);
  return request;
}

class EngineClientTest : public ::testing::Test {
 protected:
  absl::StatusOr<Generation> generate(const v1::GenerateRequest& request, absl::Duration timeout = absl::Seconds(20)) {
    return engine_.generate(request, absl::Now() + timeout, cancel_.get_token(), [this](const v1::GenerateEvent& event) {
      const absl::MutexLock lock(&mutex_);
      received_ += event.ids_size();
    });
  }
  // What a worker has sent is not yet what the client has: a cancelled call forgets the difference.
  void wait_for_tokens(int count) {
    const auto have = [&] { return received_ >= count; };
    const absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&have));
    received_ = 0;
  }
  std::unique_ptr<FakeWorker> worker(FakeWorker::Options options) {
    auto out = std::make_unique<FakeWorker>(std::move(options));
    EXPECT_TRUE(out->join(pool_).ok());
    return out;
  }
  Metrics metrics_;
  WorkerPool pool_{{.heartbeat_ms = 60'000, .heartbeat_misses = 3}, metrics_, quiet_logger()};
  EngineClient engine_{pool_, quiet_logger()};
  std::stop_source cancel_;
  absl::Mutex mutex_;
  int received_ = 0;
};

void expect_same(const Reply& reply, const Reply& expected) {
  EXPECT_EQ(reply.ids, expected.ids);
  EXPECT_EQ(reply.logprobs, expected.logprobs);
  EXPECT_EQ(reply.policy_versions, expected.policy_versions);
  EXPECT_EQ(reply.finish_reason, expected.finish_reason);
}

TEST_F(EngineClientTest, StreamsAReply) {
  const auto fake = worker({.tokens_per_event = 3, .policy_version = 4});
  std::vector<int32_t> streamed;
  v1::GenerateRequest request = turn("s");
  request.set_capture_experts(true);
  request.set_min_policy_version(3);
  const auto generation = engine_.generate(request, absl::Now() + absl::Seconds(20), {}, [&](const v1::GenerateEvent& event) {
    streamed.insert(streamed.end(), event.ids().begin(), event.ids().end());
  });
  ASSERT_TRUE(generation.ok()) << generation.status();
  const Reply& reply = generation->reply;
  EXPECT_EQ(streamed, reply.ids);
  ASSERT_FALSE(reply.ids.empty());
  EXPECT_EQ(reply.ids.back(), kStop);
  EXPECT_EQ(reply.finish_reason, v1::FINISH_REASON_STOP);
  for (size_t i = 0; i < reply.ids.size(); ++i) {
    EXPECT_EQ(reply.ids[i], testing::fake_token(7, 20 + static_cast<int64_t>(i), 16, kStop));
    EXPECT_EQ(reply.logprobs[i], testing::fake_logprob(7, 20 + static_cast<int64_t>(i)));
    EXPECT_EQ(reply.policy_versions[i], 4);
  }
  EXPECT_TRUE(reply.truncated.empty());
  ASSERT_EQ(reply.replay.size(), 1u);
  EXPECT_EQ(reply.replay[0].num_rows(), 20 + static_cast<int64_t>(reply.ids.size()) - 1);
  EXPECT_EQ(reply.worker_id, "w0");
  EXPECT_EQ(generation->prompt_tokens, 20);
  EXPECT_EQ(fake->requests()[0].min_policy_version(), 3);
}

// Goal: wherever in the reply its worker dies, another one finishes it, and nothing but the worker's name tells.
TEST_F(EngineClientTest, AKilledWorkersReplyGoesOnElsewhere) {
  for (const int killed_at : {0, 1, 5, 30}) {
    absl::Notification reached, go;
    FakeWorker::Options mortal{.id = "mortal", .stop_in = 0};
    mortal.before_event = [&](const v1::GenerateRequest&, int sent) {
      if (sent == killed_at) {
        reached.Notify();
        go.WaitForNotification();
      }
      return absl::OkStatus();
    };
    auto first = worker(mortal);
    const v1::GenerateRequest request = turn(absl::StrCat("s", killed_at), 31);
    absl::StatusOr<Generation> generation = absl::UnknownError("not run");
    std::jthread caller([&] { generation = generate(request); });
    reached.WaitForNotification();
    wait_for_tokens(killed_at);
    const auto second = worker({.id = "heir", .start_time_us = killed_at + 1, .stop_in = 0});
    std::jthread killer([&] { first->kill(); });  // waits for the handler, whose stream is broken at once
    // The handler is let go only when its call is known to be lost.
    while (second->requests().empty()) absl::SleepFor(absl::Milliseconds(1));
    go.Notify();
    killer.join();
    caller.join();
    ASSERT_TRUE(generation.ok()) << generation.status();
    EXPECT_EQ(generation->attempts, 2);
    EXPECT_EQ(generation->reply.worker_id, killed_at == 0 ? "heir" : "mortal,heir");
    EXPECT_EQ(second->requests()[0].prompt_ids_size(), 20 + killed_at);
    EXPECT_EQ(second->requests()[0].sampling().max_tokens(), 31 - killed_at);
    EXPECT_EQ(second->requests()[0].sampling().seed(), 7u);
    const auto whole = generate(turn("whole", 31));
    ASSERT_TRUE(whole.ok()) << whole.status();
    expect_same(generation->reply, whole->reply);
    wait_for_tokens(0);
    v1::UnregisterRequest gone;
    for (const char* id : {"mortal", "heir"}) {
      gone.set_worker_id(id);
      gone.set_start_time_us(killed_at + 1);
      pool_.remove(gone);
      gone.set_start_time_us(1);
      pool_.remove(gone);
    }
  }
}

TEST_F(EngineClientTest, AWorkerDeclaredDeadIsLeft) {
  absl::Notification reached, end;
  FakeWorker::Options hanging{.id = "hanging", .stop_in = 0};
  hanging.before_event = [&](const v1::GenerateRequest&, int sent) {
    if (sent == 3) {
      reached.Notify();
      end.WaitForNotification();
    }
    return absl::OkStatus();
  };
  const auto first = worker(hanging);
  absl::StatusOr<Generation> generation = absl::UnknownError("not run");
  std::jthread caller([&] { generation = generate(turn("s", 10)); });
  reached.WaitForNotification();
  wait_for_tokens(3);
  const auto second = worker({.id = "alive", .stop_in = 0});
  v1::UnregisterRequest gone;
  gone.set_worker_id("hanging");
  gone.set_start_time_us(1);
  pool_.remove(gone);
  caller.join();
  end.Notify();
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_EQ(generation->reply.ids.size(), 10u);
  EXPECT_EQ(generation->reply.worker_id, "hanging,alive");
}

// Goal: a stream that breaks between the last token and `finished` loses nothing.
TEST_F(EngineClientTest, ABreakAfterTheLastTokenCompletesTheReply) {
  FakeWorker::Options options{.id = "w", .stop_in = 0};
  options.before_event = [](const v1::GenerateRequest& request, int sent) {
    return sent == 5 && request.prompt_ids_size() == 20 ? absl::UnavailableError("broken") : absl::OkStatus();
  };
  options.edit = [events = 0](v1::GenerateEvent& event) mutable {
    if (++events == 5) event.set_ids(0, kStop);
  };
  const auto fake = worker(options);
  const auto generation = generate(turn("s", 100));
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_EQ(generation->reply.finish_reason, v1::FINISH_REASON_STOP);
  EXPECT_EQ(generation->reply.ids.back(), kStop);
  EXPECT_EQ(generation->attempts, 1);
}

TEST_F(EngineClientTest, AFullWorkerIsAskedAgain) {
  std::atomic<int> calls = 0;
  FakeWorker::Options options;
  options.before_event = [&](const v1::GenerateRequest&, int) {
    return calls++ < 3 ? absl::ResourceExhaustedError("full") : absl::OkStatus();
  };
  const auto fake = worker(options);
  const auto generation = generate(turn("s"));
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_EQ(generation->attempts, 4);
  std::set<std::string> ids;
  for (const auto& request : fake->requests()) ids.insert(request.request_id());
  EXPECT_EQ(ids.size(), 4u);
}

TEST_F(EngineClientTest, OtherErrorsArePassedThrough) {
  FakeWorker::Options options;
  options.before_event = [](const v1::GenerateRequest&, int) { return absl::OutOfRangeError("prompt_ids: 20, no room"); };
  const auto fake = worker(options);
  const auto generation = generate(turn("s"));
  EXPECT_TRUE(absl::IsOutOfRange(generation.status())) << generation.status();
  EXPECT_NE(generation.status().ToString().find("worker w0: prompt_ids: 20, no room"), std::string::npos);
  EXPECT_EQ(fake->requests().size(), 1u);
}

TEST_F(EngineClientTest, RefusesColumnsThatDisagree) {
  struct Case {
    const char* expected;
    std::function<void(v1::GenerateEvent&)> edit;
  };
  const Case cases[] = {
      {"logprobs: 0 values for 1 ids", [](auto& event) { event.clear_logprobs(); }},
      {"policy_versions: 2 values", [](auto& event) { event.add_policy_versions(1); }},
      {"context_versions: 0 values", [](auto& event) { event.clear_context_versions(); }},
      {"truncated: 2 values", [](auto& event) { event.add_truncated(true), event.add_truncated(true); }},
      {"a token after a stop token", [](auto& event) { event.clear_finished(), event.set_ids(0, kStop); }},
      {"finished.reason", [](auto& event) { event.mutable_finished()->set_reason(v1::FINISH_REASON_ENV_DONE); }},
      {"is not a stop token", [](auto& event) { event.mutable_finished()->set_reason(v1::FINISH_REASON_STOP), event.set_ids(0, 1); }},
      {"without `finished`", [](auto& event) { event.clear_finished(); }},
      {"at most 3 were asked for", [](auto& event) {
         event.clear_finished();
         for (int i = 0; i < 4; ++i) event.add_ids(1), event.add_logprobs(0), event.add_policy_versions(0), event.add_context_versions(0);
       }},
  };
  for (const Case& c : cases) {
    const auto fake = worker({.id = "w", .stop_in = 0, .edit = c.edit});
    const auto generation = generate(turn("s", 3));
    EXPECT_EQ(generation.status().code(), absl::StatusCode::kInternal) << c.expected;
    EXPECT_NE(generation.status().ToString().find(c.expected), std::string::npos) << generation.status();
    v1::UnregisterRequest gone;
    gone.set_worker_id("w");
    gone.set_start_time_us(1);
    pool_.remove(gone);
  }
}

TEST_F(EngineClientTest, NonFiniteLogprobsTravelAndTruncationIsKept) {
  int events = 0;
  const auto fake = worker({.stop_in = 0, .edit = [&](v1::GenerateEvent& event) {
                              if (events == 1) event.set_logprobs(0, -std::numeric_limits<float>::infinity());
                              if (events++ == 2) event.add_truncated(true);
                            }});
  const auto generation = generate(turn("s", 4));
  ASSERT_TRUE(generation.ok()) << generation.status();
  EXPECT_TRUE(std::isinf(generation->reply.logprobs[1]));
  EXPECT_EQ(generation->reply.truncated, (std::vector<bool>{false, false, true, false}));
}

TEST_F(EngineClientTest, CancelIsPromptAndReachesTheWorker) {
  absl::Notification reached;
  FakeWorker::Options options{.stop_in = 0};
  options.before_event = [&](const v1::GenerateRequest&, int sent) {
    if (sent == 2) reached.Notify();
    return absl::OkStatus();
  };
  const auto fake = worker(options);
  absl::StatusOr<Generation> generation = absl::UnknownError("not run");
  std::jthread caller([&] { generation = generate(turn("s", 1'000'000'000), absl::Hours(1)); });
  reached.WaitForNotification();
  const absl::Time asked = absl::Now();
  cancel_.request_stop();
  caller.join();
  EXPECT_LT(absl::Now() - asked, absl::Seconds(2));
  EXPECT_TRUE(absl::IsCancelled(generation.status())) << generation.status();
  fake->kill();  // waits for the handler
  EXPECT_EQ(fake->cancelled(), 1);
}

TEST_F(EngineClientTest, EverythingEndsAtTheDeadline) {
  const auto nobody = generate(turn("s"), absl::Milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(nobody.status())) << nobody.status();
  const auto slow = worker({.stop_in = 0});
  const auto endless = generate(turn("s", 1'000'000'000), absl::Milliseconds(50));
  EXPECT_TRUE(absl::IsDeadlineExceeded(endless.status())) << endless.status();
  slow->kill();
  const auto full = worker({.id = "full", .before_event = [](const auto&, int) { return absl::ResourceExhaustedError("full"); }});
  EXPECT_TRUE(absl::IsDeadlineExceeded(generate(turn("t"), absl::Milliseconds(50)).status()));
}

TEST_F(EngineClientTest, TheEndOfASessionReachesItsWorker) {
  const auto fake = worker({});
  ASSERT_TRUE(generate(turn("s")).ok());
  engine_.end_session("s");
  engine_.end_session("unknown");
  while (fake->aborted().empty()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(fake->aborted(), std::vector<std::string>{"s"});
}

}  // namespace
}  // namespace slipstream::gateway
