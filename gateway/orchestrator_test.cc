#include "gateway/orchestrator.h"

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <stdexcept>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "gateway/testing/fake_environment.h"
#include "gateway/testing/fake_worker.h"
#include "gateway/testing/memory_source.h"

namespace slipstream::gateway {
namespace {

using testing::fake_plan;
using testing::FakeEnvironment;
using testing::FakeWorker;
using testing::MemorySource;

class OrchestratorTest : public ::testing::Test {
 protected:
  OrchestratorTest() {
    config_.episode_threads = 4;
    config_.max_tokens = 200;
    environment_.name = "env";
    environment_.quarantine_ms = 10;
    environment_.quarantine_after = 1'000;
  }
  void start(FakeWorker::Options worker, FakeEnvironment::Options environment) {
    worker_ = std::make_unique<FakeWorker>(std::move(worker));
    ASSERT_TRUE(worker_->join(pool_).ok());
    fake_ = std::make_unique<FakeEnvironment>(std::move(environment));
    environment_.address = fake_->address();
    client_ = std::make_unique<EnvironmentClient>(
        environment_,
        [this](const auto&) {
          if (!described_.HasBeenNotified()) described_.Notify();
          return absl::OkStatus();
        },
        metrics_, quiet_logger());
    ASSERT_TRUE(described_.WaitForNotificationWithTimeout(absl::Seconds(20)));
    orchestrator_ = std::make_unique<Orchestrator>(config_, source_, engine_, Orchestrator::Environments{{"env", client_.get()}},
                                                   *format_, metrics_, quiet_logger());
  }
  v1::Trajectory run_one(EpisodePlan plan = fake_plan(1)) {
    source_.plan(plan);
    const auto done = source_.wait_for(1);
    return done.empty() ? v1::Trajectory() : done.begin()->second;
  }

  GatewayConfig config_;
  EnvironmentConfig environment_;
  Metrics metrics_;
  const std::unique_ptr<model::Tokenizer> tokenizer_ = *model::open_tokenizer("bytes");
  const std::unique_ptr<model::ChatFormat> format_ = *model::ChatFormat::create({}, *tokenizer_);
  MemorySource source_;
  WorkerPool pool_{{.heartbeat_ms = 60'000, .heartbeat_misses = 3}, metrics_, quiet_logger()};
  std::unique_ptr<FakeWorker> worker_;
  std::unique_ptr<FakeEnvironment> fake_;
  EngineClient engine_{pool_, quiet_logger()};
  absl::Notification described_;
  std::unique_ptr<EnvironmentClient> client_;
  std::unique_ptr<Orchestrator> orchestrator_;
};

// Goal: the recorded sample is what the engine was given and gave, token for token, over several turns.
TEST_F(OrchestratorTest, RecordsWhatTheEngineSaw) {
  start({.policy_version = 3}, {.turns = 3});
  EpisodePlan plan = fake_plan(9);
  plan.min_policy_version = 2;
  plan.group_index = 5;
  const v1::Trajectory trajectory = run_one(plan);
  ASSERT_EQ(trajectory.samples_size(), 1);
  const v1::Sample& sample = trajectory.samples(0);
  const auto requests = worker_->requests();
  ASSERT_EQ(requests.size(), 3u);
  EXPECT_EQ(std::set<std::string>({requests[0].request_id(), requests[1].request_id(), requests[2].request_id()}).size(), 3u);
  const int32_t stop_id = requests[0].stop_ids(0);
  int action = 0;
  std::vector<int32_t> seen;
  for (const auto& request : requests) {
    EXPECT_EQ(request.session_id(), plan.rollout_id);
    EXPECT_EQ(request.min_policy_version(), 2);
    EXPECT_EQ(request.sampling().seed(), plan.sampling_seed);
    ASSERT_LE(request.prompt_ids_size(), sample.ids_size());
    EXPECT_TRUE(std::equal(seen.begin(), seen.end(), request.prompt_ids().begin()));  // history only grows
    seen.assign(request.prompt_ids().begin(), request.prompt_ids().end());
    do {
      const int64_t position = static_cast<int64_t>(seen.size());
      seen.push_back(testing::fake_token(plan.sampling_seed, position, 16, stop_id));
      ASSERT_LT(action, sample.action_logprobs_size());
      EXPECT_EQ(sample.action_logprobs(action), testing::fake_logprob(plan.sampling_seed, position));
      EXPECT_EQ(sample.action_policy_versions(action), 3);
      ++action;
    } while (seen.back() != stop_id);
  }
  EXPECT_EQ(std::vector<int32_t>(sample.ids().begin(), sample.ids().end()), seen);
  EXPECT_EQ(action, sample.action_logprobs_size());

  EXPECT_EQ(trajectory.rollout_id(), plan.rollout_id);
  EXPECT_EQ(trajectory.group_id(), plan.group_id);
  EXPECT_EQ(trajectory.group_index(), 5);
  EXPECT_EQ(trajectory.kind(), v1::TRAJECTORY_KIND_ROLLOUT);
  EXPECT_EQ(trajectory.environment(), "env");
  EXPECT_EQ(trajectory.task(), "task");
  EXPECT_EQ(trajectory.instance(), 9u);
  EXPECT_DOUBLE_EQ(trajectory.reward(), 1);
  EXPECT_DOUBLE_EQ(trajectory.reward_parts().at("part"), 1.5);
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_ENV_DONE);
  EXPECT_EQ(trajectory.num_turns(), 3);
  EXPECT_EQ(trajectory.min_policy_version(), 3);
  EXPECT_EQ(trajectory.template_fingerprint(), format_->fingerprint());
  EXPECT_EQ(trajectory.sampling().max_tokens(), 200);
  EXPECT_GT(trajectory.start_time_us(), 0);
  EXPECT_GE(trajectory.end_time_us(), trajectory.start_time_us());
  EXPECT_GT(trajectory.environment_time_us(), 0);
  EXPECT_GT(trajectory.engine_time_us(), 0);
  EXPECT_GT(orchestrator_->engine_seconds(), 0);
  EXPECT_GT(orchestrator_->environment_seconds(), 0);

  const auto steps = fake_->steps();
  ASSERT_EQ(steps.size(), 3u);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(steps[i].turn(), i);
    EXPECT_EQ(steps[i].finish_reason(), v1::FINISH_REASON_STOP);
    EXPECT_EQ(steps[i].message().role(), v1::ROLE_ASSISTANT);
    EXPECT_EQ(steps[i].raw_text(), steps[i].message().content());
    EXPECT_EQ(steps[i].raw_text().find("<|"), std::string::npos);
  }
  while (fake_->closed().empty() || worker_->aborted().empty()) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(fake_->closed()[0], steps[0].episode_id());
}

TEST_F(OrchestratorTest, DemonstrationsAreTheEnvironmentsSolutions) {
  start({}, {.turns = 2});
  EpisodePlan plan = fake_plan(1);
  plan.kind = v1::TRAJECTORY_KIND_DEMONSTRATION;
  const v1::Trajectory trajectory = run_one(plan);
  ASSERT_EQ(trajectory.samples_size(), 1);
  EXPECT_EQ(trajectory.kind(), v1::TRAJECTORY_KIND_DEMONSTRATION);
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_ENV_DONE);
  EXPECT_EQ(trajectory.samples(0).action_logprobs_size(), 0);
  const std::string text = tokenizer_->decode({trajectory.samples(0).ids().data(), static_cast<size_t>(trajectory.samples(0).ids_size())});
  EXPECT_NE(text.find("problem 1"), std::string::npos) << text;
  EXPECT_NE(text.find("answer 0"), std::string::npos) << text;
  EXPECT_NE(text.find("turn 1"), std::string::npos) << text;
  EXPECT_NE(text.find("answer 1"), std::string::npos) << text;
  EXPECT_TRUE(fake_->resets()[0].want_solution());
  EXPECT_EQ(fake_->steps()[0].message().content(), "answer 0");
  EXPECT_TRUE(worker_->requests().empty());
}

TEST_F(OrchestratorTest, AReplyCutByLengthEndsTheEpisode) {
  config_.max_tokens = 5;
  start({.stop_in = 0}, {.turns = 4});
  const v1::Trajectory trajectory = run_one();
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_DOUBLE_EQ(trajectory.reward(), 0.25);
  ASSERT_EQ(fake_->steps().size(), 1u);
  EXPECT_EQ(fake_->steps()[0].finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(fake_->steps()[0].raw_text().size(), 5u);
}

TEST_F(OrchestratorTest, MaxTurnsAndMaxSeqLenEndTheEpisode) {
  start({}, {.turns = 100, .max_turns = 3});
  const v1::Trajectory trajectory = run_one();
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(trajectory.num_turns(), 3);
  EXPECT_EQ(fake_->steps().size(), 3u);
}

TEST_F(OrchestratorTest, MaxSeqLenBoundsTheReply) {
  config_.max_seq_len = 40;
  start({.stop_in = 0}, {.turns = 2});
  const v1::Trajectory trajectory = run_one();
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_LENGTH);
  ASSERT_EQ(trajectory.samples_size(), 1);
  EXPECT_EQ(trajectory.samples(0).ids_size(), 40);
  EXPECT_FALSE(trajectory.samples(0).length_truncated());
}

// Goal: each way an environment can fail marks its own episode with the right reason and leaves the others alone.
TEST_F(OrchestratorTest, EnvironmentFailuresMarkTheirOwnEpisodes) {
  environment_.step_timeout_ms = 400;
  absl::Notification end;
  FakeEnvironment::Options options{.turns = 2};
  options.on_reset = [](const v1::ResetRequest& request, v1::ResetResponse& answer) {
    if (request.instance() == 1) return absl::InternalError("cannot start");
    if (request.instance() == 2) answer.clear_messages();
    return absl::OkStatus();
  };
  options.on_step = [&](const v1::StepRequest& request, v1::StepResponse& answer) {
    const std::string& id = request.episode_id();
    if (id.starts_with("run-g3-") && request.turn() == 1) throw std::runtime_error("environment bug");
    if (id.starts_with("run-g4-") && request.turn() == 1) end.WaitForNotification();
    if (id.starts_with("run-g5-")) answer.set_reward(std::nan(""));
    if (id.starts_with("run-g6-")) answer.set_reward(1.7e308);  // twice: the sum is infinite
    return absl::OkStatus();
  };
  start({}, options);
  for (uint64_t i = 1; i <= 12; ++i) source_.plan(fake_plan(i));
  auto done = source_.wait_for(12);
  end.Notify();
  fake_->kill();  // its handlers are done with `end`
  ASSERT_EQ(done.size(), 12u);
  const std::map<uint64_t, v1::FinishReason> expected = {
      {1, v1::FINISH_REASON_ENV_CRASH}, {2, v1::FINISH_REASON_ENV_CRASH}, {3, v1::FINISH_REASON_ENV_CRASH},
      {4, v1::FINISH_REASON_TIMEOUT},   {5, v1::FINISH_REASON_ENV_CRASH}, {6, v1::FINISH_REASON_ENV_CRASH}};
  for (uint64_t i = 1; i <= 12; ++i) {
    const v1::Trajectory& trajectory = done.at(fake_plan(i).rollout_id);
    EXPECT_EQ(trajectory.finish_reason(), expected.contains(i) ? expected.at(i) : v1::FINISH_REASON_ENV_DONE) << i;
    EXPECT_EQ(trajectory.samples_size(), i <= 2 ? 0 : 1) << i;  // what was sampled is kept
  }
}

TEST_F(OrchestratorTest, EngineErrorsAbortTheEpisode) {
  FakeWorker::Options worker;
  worker.before_event = [](const v1::GenerateRequest& request, int) {
    return request.sampling().seed() == 1001 ? absl::InvalidArgumentError("sampling.top_k: no") : absl::OkStatus();
  };
  start(worker, {});
  source_.plan(fake_plan(1));
  source_.plan(fake_plan(2));
  const auto done = source_.wait_for(2);
  ASSERT_EQ(done.size(), 2u);
  EXPECT_EQ(done.at("run-g1-0").finish_reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_EQ(done.at("run-g2-0").finish_reason(), v1::FINISH_REASON_ENV_DONE);
}

TEST_F(OrchestratorTest, AFullContextEndsTheEpisodeWithItsRewards) {
  FakeWorker::Options worker;
  worker.before_event = [turns = 0](const v1::GenerateRequest&, int sent) mutable {
    if (sent == 0 && ++turns == 2) return absl::OutOfRangeError("prompt_ids: no room");
    return absl::OkStatus();
  };
  start(worker, {.turns = 4});
  const v1::Trajectory trajectory = run_one();
  EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_LENGTH);
  EXPECT_EQ(trajectory.num_turns(), 1);
  EXPECT_DOUBLE_EQ(trajectory.reward(), 0.25);
}

// Goal: stop is prompt whatever the episodes wait for, and every one that did not finish is given back.
TEST_F(OrchestratorTest, StopIsPromptAndGivesEpisodesBack) {
  absl::Notification in_step, in_reply, end;
  FakeWorker::Options worker{.stop_in = 0};
  worker.before_event = [&](const v1::GenerateRequest& request, int sent) {
    if (request.sampling().seed() == 1001 && sent == 3) {
      in_reply.Notify();
      end.WaitForNotification();
    }
    return absl::OkStatus();
  };
  FakeEnvironment::Options environment;
  environment.on_step = [&](const v1::StepRequest& request, auto&) {
    if (request.episode_id().starts_with("run-g2-")) {
      in_step.Notify();
      end.WaitForNotification();
    }
    return absl::OkStatus();
  };
  start(worker, environment);
  source_.plan(fake_plan(1));
  source_.plan(fake_plan(2));
  in_reply.WaitForNotification();
  in_step.WaitForNotification();
  const absl::Time asked = absl::Now();
  orchestrator_->stop();
  EXPECT_LT(absl::Now() - asked, absl::Seconds(2));
  std::vector<std::string> cancelled = source_.cancelled();
  std::sort(cancelled.begin(), cancelled.end());
  EXPECT_EQ(cancelled, (std::vector<std::string>{"run-g1-0", "run-g2-0"}));
  EXPECT_TRUE(source_.wait_for(2).empty());
  end.Notify();
  worker_->kill();  // their handlers are done with `end`
  fake_->kill();
}

TEST_F(OrchestratorTest, ATrajectoryThatCannotBeWrittenIsWrittenLater) {
  std::atomic<int> tries = 0;
  source_.on_finish = [&](const v1::Trajectory& trajectory) {
    EXPECT_EQ(trajectory.samples_size(), 1);
    return ++tries < 3 ? absl::ResourceExhaustedError("disk full") : absl::OkStatus();
  };
  start({}, {});
  EXPECT_EQ(run_one().finish_reason(), v1::FINISH_REASON_ENV_DONE);
  EXPECT_EQ(tries, 3);
}

// Goal: a bug in one episode, here an exception out of the source's hands, ends that episode and nothing else.
TEST_F(OrchestratorTest, AnExceptionTakesOneEpisode) {
  std::atomic<int> thrown = 0;
  source_.on_finish = [&](const v1::Trajectory& trajectory) {
    if (trajectory.rollout_id() == "run-g1-0" && thrown++ == 0) throw std::runtime_error("bug");
    return absl::OkStatus();
  };
  config_.episode_threads = 1;
  start({}, {});
  source_.plan(fake_plan(1));
  source_.plan(fake_plan(2));
  const auto done = source_.wait_for(2);
  ASSERT_EQ(done.size(), 2u);
  EXPECT_EQ(done.at("run-g1-0").finish_reason(), v1::FINISH_REASON_ABORTED);
  EXPECT_EQ(done.at("run-g2-0").finish_reason(), v1::FINISH_REASON_ENV_DONE);
}

// Goal: 200 episodes at once, two workers of which one dies in the middle: every episode ends as it would have alone.
TEST_F(OrchestratorTest, ManyEpisodesSurviveAWorker) {
  config_.episode_threads = 200;
  std::atomic<int> replies = 0;
  absl::Notification busy;
  FakeWorker::Options mortal{.id = "mortal"};
  mortal.before_event = [&](const v1::GenerateRequest&, int) {
    if (++replies == 500) busy.Notify();
    return absl::OkStatus();
  };
  FakeWorker second({.id = "second"});
  ASSERT_TRUE(second.join(pool_).ok());
  start(mortal, {.turns = 3});
  for (uint64_t i = 0; i < 400; ++i) source_.plan(fake_plan(i));
  busy.WaitForNotification();
  worker_->kill();
  const auto done = source_.wait_for(400);
  ASSERT_EQ(done.size(), 400u);
  for (const auto& [id, trajectory] : done) {
    EXPECT_EQ(trajectory.finish_reason(), v1::FINISH_REASON_ENV_DONE) << id;
    ASSERT_EQ(trajectory.samples_size(), 1);
    const v1::Sample& sample = trajectory.samples(0);
    int position = 0, action = 0;
    for (const v1::Span& span : sample.spans()) {
      for (int i = 0; i < span.length(); ++i, ++position) {
        if (span.kind() != v1::SPAN_KIND_ACTION) continue;
        const int32_t token = testing::fake_token(trajectory.sampling().seed(), position, 16, format_->stop_ids()[0]);
        ASSERT_EQ(sample.ids(position), token) << id;
        ASSERT_EQ(sample.action_logprobs(action++), testing::fake_logprob(trajectory.sampling().seed(), position)) << id;
      }
    }
  }
}

}  // namespace
}  // namespace slipstream::gateway
