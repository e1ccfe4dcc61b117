// Goal: the whole loop against a gateway's end of the line: warm-up, RL, publications, commits; stopped,
// killed at every window and restarted it trains every trajectory once and ends with the same weights, whether
// every version is a checkpoint or most are in a journal; a lost or restarted gateway costs nothing. A journal that
// was cut short, damaged, or written with other settings.
#include "learner/learner.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <random>

#include "absl/strings/str_format.h"
#include "gtest/gtest.h"
#include "learner/manifest.h"
#include "nlohmann/json.hpp"
#include "proto/rpc.h"
#include "slipstream/v1/weights.grpc.pb.h"
#include "tests/learning/batches.h"
#include "tests/learning/fake_gateway.h"
#include "tests/testing/process.h"

namespace slipstream::learner {
namespace {

namespace fs = std::filesystem;
using testing::FakeGateway;
using testing::FakeGatewayOptions;

constexpr int64_t kVocab = 97;

FakeGatewayOptions gateway_options() {
  FakeGatewayOptions options;
  options.group = [](uint64_t number, int version) {
    return testing::make_group({.group_size = 3, .policy_version = version}, kVocab, number);
  };
  options.demonstration = [](uint64_t number) { return testing::make_demonstration({}, kVocab, number); };
  return options;
}

class LearnerTest : public ::testing::Test {
 protected:
  LearnerTest() {
    testing::write_model("glm5_next", dir.path() + "/model");
    config.model.path = dir.path() + "/model";
    config.threads = 1;
    config.steps = 6;
    config.loss.options = {.clip_low = 1.0, .clip_high = 1e6};  // the made-up log-probs are far off
    config.optimizer.learning_rate = 1e-3;
    config.warmup = {
        .steps = 5, .batch = 4, .learning_rate = 1e-3, .until_probability = 1.0, .checkpoint_every = 2};
    config.checkpoint_every = 1;
    config.reply_timeout_ms = 50;
    config.log_rollouts = 1000;
    job.run_parent = dir.path();
    job.groups_per_batch = 2;
    job.group_size = 3;
    job.publish_every = 2;
  }

  absl::StatusOr<std::unique_ptr<Learner>> open(const FakeGateway& gateway) {
    config.gateway_address = gateway.address();
    return Learner::create(config, job, parallel::self_group(), metrics, quiet_logger());
  }
  // One life: until done, or until the observer asks for a stop.
  absl::Status live(const FakeGateway& gateway, const std::function<bool(const StepReport&)>& go_on = {}) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Learner> learner, open(gateway));
    std::stop_source stop;
    Observers observers;
    observers.scalars = board(*learner);
    observers.step = [&](const StepReport& report) {
      reports.push_back(report);
      if (go_on && !go_on(report)) stop.request_stop();
    };
    return learner->run(stop.get_token(), observers);
  }
  std::string final_weights() const {
    std::ifstream in(job.run_directory() + "/checkpoints/latest/model.safetensors", std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::vector<nlohmann::json> metrics_lines() const {
    std::vector<nlohmann::json> out;
    std::ifstream in(job.run_directory() + "/metrics.jsonl");
    for (std::string line; std::getline(in, line);) out.push_back(nlohmann::json::parse(line));
    return out;
  }

  // A board for scalars. What a life says from its first step on supersedes what earlier ones said, as in
  // TensorBoard.
  ScalarSink board(const Learner& learner) const {
    const auto out = std::make_shared<std::ofstream>(job.run_parent + "/board", std::ios::app);
    *out << nlohmann::json({{"first_step", learner.step()}}) << std::endl;
    return [out](int64_t step, const std::vector<std::pair<std::string, double>>& values) {
      nlohmann::json point = {{"step", step}};
      for (const auto& [name, value] : values) point[name] = value;
      *out << point << std::endl;
    };
  }
  std::vector<nlohmann::json> board_points() const {
    std::vector<nlohmann::json> out;
    std::ifstream in(job.run_parent + "/board");
    for (std::string line; std::getline(in, line);) {
      const nlohmann::json json = nlohmann::json::parse(line);
      if (json.contains("step")) out.push_back(json);
      if (!json.contains("first_step")) continue;
      std::erase_if(out, [&](const nlohmann::json& point) { return point["step"] >= json["first_step"]; });
    }
    return out;
  }
  // metrics.jsonl, the board and rollouts/ tell of the same steps, each once.
  void expect_each_step_once(size_t steps, int64_t warmup_steps) const {
    const std::vector<nlohmann::json> lines = metrics_lines(), points = board_points();
    ASSERT_EQ(lines.size(), steps);
    ASSERT_EQ(points.size(), steps);
    std::set<std::string> rollouts, expected;
    for (size_t i = 0; i < steps; ++i) {
      const auto step = static_cast<int64_t>(i) + 1;
      EXPECT_EQ(lines[i]["step"], step);
      EXPECT_EQ(points[i]["step"], step);
      EXPECT_EQ(points[i]["loss/policy"], lines[i]["loss"]) << step;
      EXPECT_EQ(points[i]["trajectories/trained"], lines[i]["trained"]) << step;
      EXPECT_EQ(points[i].contains("time/publish_seconds"), lines[i]["publish_seconds"].is_number()) << step;
      if (step > warmup_steps) expected.insert(absl::StrFormat("step_%06d.jsonl", step));
    }
    for (const auto& file : fs::directory_iterator(job.run_directory() + "/rollouts")) {
      rollouts.insert(file.path().filename());
    }
    EXPECT_EQ(rollouts, expected);
  }

  // The command that starts ALifeThatIsKilled. at: "scalars" or "step", the observer that it dies in.
  std::vector<std::string> life_command(const FakeGateway& gateway, const std::string& at, int step) const {
    return {"/usr/bin/env",
            "LEARNER_TEST_DIR=" + dir.path(),
            "LEARNER_TEST_GATEWAY=" + gateway.address(),
            "LEARNER_TEST_AT=" + at,
            absl::StrCat("LEARNER_TEST_STEP=", step),
            absl::StrCat("LEARNER_TEST_PUBLISH_EVERY=", job.publish_every),
            absl::StrCat("LEARNER_TEST_CHECKPOINT_EVERY=", config.checkpoint_every),
            fs::read_symlink("/proc/self/exe").string(),
            "--gtest_also_run_disabled_tests",
            "--gtest_filter=*ALifeThatIsKilled"};
  }
  void die(const FakeGateway& gateway, const std::string& at, int step) const {
    slipstream::testing::Process life(life_command(gateway, at, step), dir.path() + "/life.out");
    ASSERT_EQ(life.wait(std::chrono::minutes(1)), 9)
        << slipstream::testing::read_file(dir.path() + "/life.out");
  }

  // Rollout ids that two steps of the run's final history trained on.
  int trained_twice() const {
    int twice = 0;
    std::set<std::string> seen;
    for (const auto& file : fs::directory_iterator(job.run_directory() + "/rollouts")) {
      std::ifstream in(file.path());
      for (std::string line; std::getline(in, line);)
        twice += !seen.insert(nlohmann::json::parse(line)["rollout_id"]).second;
    }
    return twice;
  }

  testing::TemporaryDirectory dir;
  LearnerConfig config;
  JobConfig job;
  Metrics metrics;
  std::vector<StepReport> reports;
};

TEST_F(LearnerTest, WholeRun) {
  config.record_batches = 2;
  FakeGateway gateway(gateway_options());
  const absl::Status status = live(gateway);
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(reports.size(), 11u);
  EXPECT_EQ(reports[4].phase, Phase::kWarmup);
  EXPECT_EQ(reports[5].phase, Phase::kRl);
  // Version 1 after the warm-up, then one every two steps.
  EXPECT_EQ(reports[5].policy_version, 1);
  EXPECT_EQ(reports[6].policy_version, 1);
  EXPECT_EQ(reports[7].policy_version, 2);
  EXPECT_EQ(reports.back().policy_version, 3);
  EXPECT_EQ(metrics.value(metric::kPolicyVersion, {"learner"}), 4);
  EXPECT_EQ(gateway.trained().size(), 6u * 2 * 3);
  EXPECT_EQ(trained_twice(), 0);
  EXPECT_TRUE(gateway.heard_final());
  EXPECT_EQ(reports.back().trained, 36u);
  // Only right after a publication can a token be of exactly the learner's weights.
  EXPECT_TRUE(reports[5].mismatch_abs_mean.has_value());
  EXPECT_FALSE(reports[6].mismatch_abs_mean.has_value());
  EXPECT_FALSE(reports[0].mismatch_abs_mean.has_value());
  const std::vector<nlohmann::json> lines = metrics_lines();
  ASSERT_EQ(lines.size(), 11u);
  for (const char* key :
       {"step", "policy_version", "reward_mean", "staleness_mean", "mismatch_abs_mean", "mismatch_abs_max",
        "drift_abs_mean", "masked_low_fraction", "masked_high_fraction", "grad_norm", "trained_tokens",
        "produced", "trained", "dropped", "queued", "wall_seconds"}) {
    for (const nlohmann::json& line : lines) EXPECT_TRUE(line.contains(key)) << key;
  }
  EXPECT_TRUE(lines[6]["mismatch_abs_mean"].is_null());
  EXPECT_EQ(lines[5]["phase"], "rl");
  EXPECT_EQ(lines[0]["phase"], "warmup");
  std::ifstream rollouts(job.run_directory() + "/rollouts/step_000006.jsonl");
  std::string line;
  ASSERT_TRUE(std::getline(rollouts, line));
  const nlohmann::json rollout = nlohmann::json::parse(line);
  EXPECT_EQ(rollout["rollout_id"], "run-g0-0");
  EXPECT_EQ(rollout["learner_logprobs"].size(), rollout["action_logprobs"].size());
  EXPECT_EQ(rollout["ids"].size(), 6 + rollout["action_logprobs"].size());

  v1::Batch recorded;
  std::ifstream batch_file(job.run_directory() + "/batches/step_000007.pb", std::ios::binary);
  ASSERT_TRUE(recorded.ParseFromIstream(&batch_file));
  EXPECT_EQ(recorded.groups(0).group_number(), 2u);
  EXPECT_FALSE(fs::exists(job.run_directory() + "/batches/step_000008.pb"));

  // A finished run that is started again says so to the gateway and ends.
  reports.clear();
  EXPECT_TRUE(live(gateway).ok());
  EXPECT_TRUE(reports.empty());
  EXPECT_EQ(trained_twice(), 0);
  // A learner says what its config and its checkpoint commit it to.
  const v1::Hello first = gateway.hellos().front(), last = gateway.hellos().back();
  EXPECT_EQ(last.settings().at("rl.group_size"), "3");
  EXPECT_EQ(first.log_id(), "");
  EXPECT_EQ(first.groups_end(), 0u);
  EXPECT_EQ(last.log_id(), "log");
  EXPECT_EQ(last.groups_end(), 12u);
}

TEST_F(LearnerTest, WarmupEndsWhenDemonstrationsAreProbable) {
  config.warmup = {
      .steps = 400, .batch = 16, .learning_rate = 1e-2, .until_probability = 0.5, .checkpoint_every = 1000};
  config.steps = 1;
  FakeGateway gateway(gateway_options());
  ASSERT_TRUE(live(gateway).ok());
  ASSERT_LT(reports.size(), 400u);
  // Reports hold the warm-up and the one step after it. It ended at the first step whose window of five was good.
  const auto mean_before = [&](size_t end) {
    double sum = 0.0;
    for (size_t i = end - 5; i < end; ++i) sum += *reports[i].demonstration_probability;
    return sum / 5;
  };
  const size_t warmup = reports.size() - 1;
  ASSERT_GT(warmup, 5u);
  EXPECT_GE(mean_before(warmup), 0.5);
  EXPECT_LT(mean_before(warmup - 1), 0.5);
}

class LearnerLivesTest : public LearnerTest, public ::testing::WithParamInterface<int> {
 protected:
  LearnerLivesTest() { config.checkpoint_every = GetParam(); }
};
INSTANTIATE_TEST_SUITE_P(CheckpointEvery, LearnerLivesTest, ::testing::Values(1, 3, 100));

// The same weights whether it ran through, was stopped in either phase, or was killed; and with two threads.
TEST_P(LearnerLivesTest, StoppedAndRestartedEndsTheSame) {
  std::string through;
  {
    FakeGateway gateway(gateway_options());
    ASSERT_TRUE(live(gateway).ok());
    through = final_weights();
  }
  for (const std::vector<int64_t>& stops : {std::vector<int64_t>{3}, {7}, {1, 2, 5, 7, 9}}) {
    fs::remove_all(job.run_directory());
    FakeGateway gateway(gateway_options());
    for (const int64_t at : stops) {
      const absl::Status status = live(gateway, [&](const StepReport& report) { return report.step < at; });
      EXPECT_EQ(status.code(), absl::StatusCode::kCancelled) << status;
    }
    config.threads = 2;
    const absl::Status status = live(gateway);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(trained_twice(), 0);
    EXPECT_EQ(gateway.trained().size(), 36u);
    EXPECT_EQ(final_weights(), through);
    const std::vector<nlohmann::json> lines = metrics_lines();
    ASSERT_EQ(lines.size(), 11u);
    for (size_t i = 0; i < lines.size(); ++i) EXPECT_EQ(lines[i]["step"], i + 1);
  }
}

// The other process of the tests below: exits without a word to anybody at a step.
TEST_F(LearnerTest, DISABLED_ALifeThatIsKilled) {
  config.model.path = std::string(std::getenv("LEARNER_TEST_DIR")) + "/model";
  config.gateway_address = std::getenv("LEARNER_TEST_GATEWAY");
  config.reply_timeout_ms = 60'000;  // a reply that the gateway loses stays lost
  job.run_parent = std::getenv("LEARNER_TEST_DIR");
  job.publish_every = std::stoi(std::getenv("LEARNER_TEST_PUBLISH_EVERY"));
  config.checkpoint_every = std::stoi(std::getenv("LEARNER_TEST_CHECKPOINT_EVERY"));
  const std::unique_ptr<Learner> learner =
      *Learner::create(config, job, parallel::self_group(), metrics, quiet_logger());
  const std::string at = std::getenv("LEARNER_TEST_AT");
  const int64_t last = std::stoi(std::getenv("LEARNER_TEST_STEP"));
  Observers observers;
  observers.scalars = [&, say = board(*learner), first = learner->step()](int64_t step, const auto& values) {
    if (at == "scalars" && step == last && step > first) ::_exit(9);
    say(step, values);
  };
  observers.step = [&](const StepReport& report) {
    if (at == "step" && report.step == last) ::_exit(9);
  };
  FAIL() << learner->run({}, observers);
}

// The process dies in the middle of a step (nothing of it durable), after the checkpoint before the commit,
// and after the commit before its reply. Each time the next life ends the run with the weights of an
// undisturbed one.
TEST_P(LearnerLivesTest, CrashWindows) {
  job.publish_every = 1;
  std::string through;
  {
    FakeGateway gateway(gateway_options());
    ASSERT_TRUE(live(gateway).ok());
    through = final_weights();
  }
  fs::remove_all(job.run_directory());
  FakeGateway gateway(gateway_options());
  config.gateway_address = gateway.address();
  die(gateway, "step", 3);  // warm-up, a step past its checkpoint
  die(gateway, "step", 7);  // RL, durable and committed
  // After the checkpoint, before the commit is heard: the learner waits for a reply that never comes, and is
  // killed.
  gateway.lose_next_commit_reply();
  config.gateway_timeout_ms = 400;
  config.reply_timeout_ms = 60'000;
  const absl::Status lost = live(gateway);
  EXPECT_EQ(lost.code(), absl::StatusCode::kDeadlineExceeded) << lost;
  config.gateway_timeout_ms = 60'000;
  config.reply_timeout_ms = 50;
  const absl::Status status = live(gateway);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(trained_twice(), 0);
  EXPECT_EQ(gateway.trained().size(), 36u);
  EXPECT_EQ(final_weights(), through);
  // The life after the lost reply repeated the commit in its Hello.
  EXPECT_EQ(gateway.hellos().back().last_commit().trained_rollout_ids_size(), 6);
}

// Killed wherever a step's checkpoint, line and point on the board can come apart; with checkpoints at every
// second step only, in the warm-up and after it.
TEST_P(LearnerLivesTest, EveryStepIsToldOnceWhereverLivesEnd) {
  std::string through;
  {
    FakeGateway gateway(gateway_options());
    ASSERT_TRUE(live(gateway).ok());
    expect_each_step_once(11, 5);
    through = final_weights();
  }
  fs::remove_all(job.run_directory());
  fs::remove(job.run_parent + "/board");
  FakeGateway gateway(gateway_options());
  die(gateway, "step", 3);     // warm-up: a step past its checkpoint
  die(gateway, "scalars", 4);  // warm-up: checkpoint and line, no point
  // Steps 5 and 7: the checkpoint is durable, the commit is sent and never answered; no line, no point.
  for (const int step : {5, 7}) {
    gateway.lose_next_commit_reply();
    slipstream::testing::Process life(life_command(gateway, "step", step), dir.path() + "/life.out");
    ASSERT_TRUE(gateway.wait_for_commit(step)) << slipstream::testing::read_file(dir.path() + "/life.out");
    life.kill_now();
    ASSERT_EQ(metrics_lines().size(), static_cast<size_t>(step) - 1);
  }
  die(gateway, "scalars", 8);  // a step past its checkpoint: line, no point
  die(gateway, "scalars", 9);  // checkpoint and line, no point
  {
    std::ofstream cut(job.run_directory() + "/metrics.jsonl", std::ios::app);
    cut << "{\"step\": 10, \"po";  // and a line that was being written
  }
  const absl::Status status = live(gateway);
  ASSERT_TRUE(status.ok()) << status;
  expect_each_step_once(11, 5);
  EXPECT_TRUE(metrics_lines()[6]["publish_seconds"].is_null())
      << "of the step whose line the checkpoint gave";
  EXPECT_EQ(metrics_lines()[6]["trained"], 0) << "counts are of before its commit";
  EXPECT_EQ(final_weights(), through);
  EXPECT_EQ(trained_twice(), 0);
}

TEST_F(LearnerTest, GatewayRestartsAndLosesMessages) {
  FakeGatewayOptions options = gateway_options();
  options.drop_every = 5;
  options.repeat_replies = 2;
  options.parts = 2;
  FakeGateway gateway(std::move(options));
  const absl::Status status = live(gateway, [&](const StepReport& report) {
    if (report.step % 2 == 0) gateway.restart();
    return true;
  });
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(trained_twice(), 0);
  EXPECT_EQ(gateway.trained().size(), 36u);
}

TEST_F(LearnerTest, MalformedTrajectoriesAreDroppedWithTheirReason) {
  FakeGatewayOptions options = gateway_options();
  const auto good = options.group;
  options.group = [good](uint64_t number, int version) {
    v1::Group group = good(number, version);
    if (number == 1) group.mutable_trajectories(2)->mutable_samples(0)->set_ids(0, -5);
    return group;
  };
  FakeGateway gateway(std::move(options));
  ASSERT_TRUE(live(gateway).ok());
  EXPECT_EQ(gateway.dropped(), (std::map<std::string, std::string>{{"run-g1-2", "malformed"}}));
  EXPECT_EQ(gateway.trained().size(), 35u);
}

TEST_F(LearnerTest, SkippedStepsStopTheRunWithAName) {
  config.loss.normalizer = Normalizer::kConstant;
  config.loss.normalizer_constant = 1e-300;  // every gradient overflows
  config.warmup.steps = 0;
  config.max_skipped_steps = 2;
  FakeGateway gateway(gateway_options());
  const absl::Status status = live(gateway);
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted);
  EXPECT_NE(status.message().find("2 steps in a row skipped: "), absl::string_view::npos) << status;
  EXPECT_EQ(metrics.value(metric::kSkippedSteps), 2);
  EXPECT_TRUE(reports.back().skipped);
}

TEST_F(LearnerTest, WhatIsWrongAtTheStartIsNamed) {
  FakeGateway gateway(gateway_options());
  config.model.path = dir.path() + "/nothing";
  const absl::Status missing = open(gateway).status();
  EXPECT_NE(missing.message().find(config.model.path), absl::string_view::npos) << missing;
  config.model.path = dir.path() + "/model";
  const std::unique_ptr<Learner> first = *open(gateway);
  const absl::Status second = open(gateway).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(second.message(),
            absl::StrCat(job.run_directory(), ": another learner has this run; expected it to end first"));
  config.address = first->weights_address();
  job.run_id = "another";
  const absl::Status taken = open(gateway).status();
  EXPECT_EQ(taken.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(taken.message().find(config.address), absl::string_view::npos) << taken;
}

TEST_F(LearnerTest, GoesOnInTheShapeItBeganWith) {
  FakeGateway gateway(gateway_options());
  ASSERT_TRUE(live(gateway).ok());
  testing::write_model("glm_moe_dsa", dir.path() + "/other");
  config.model.path = dir.path() + "/other";
  const absl::Status other = open(gateway).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(other.message().find("model.path: " + config.model.path), absl::string_view::npos) << other;
  EXPECT_NE(other.message().find("/checkpoints/step_"), absl::string_view::npos) << other;
}

// What a killed life left, with steps 6 to 10, versions 2 to 6, in the journal of the warm-up's checkpoint.
class JournalTest : public LearnerTest {
 protected:
  JournalTest() : gateway(gateway_options()) {
    job.publish_every = 1;
    config.checkpoint_every = 100;
    die(gateway, "step", 10);
    path = job.run_directory() + "/checkpoints/latest/journal.log";
    whole = slipstream::testing::read_file(path);
  }
  void write(const std::string& bytes) const { std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes; }

  FakeGateway gateway;
  std::string path, whole;
};

TEST_F(JournalTest, VersionsComeBackWithoutCheckpoints) {
  ASSERT_EQ(fs::read_symlink(job.run_directory() + "/checkpoints/latest"), "step_00000005");
  std::stop_source stop;
  stop.request_stop();
  const absl::Status stopped =
      Learner::create(config, job, parallel::self_group(), metrics, quiet_logger(), stop.get_token()).status();
  EXPECT_TRUE(absl::IsCancelled(stopped)) << stopped;
  const std::unique_ptr<Learner> learner = *open(gateway);
  EXPECT_EQ(learner->step(), 10);
  EXPECT_EQ(learner->policy_version(), 6);
}

// So that settings may be changed then; no other checkpoint keeps a journal.
TEST_F(LearnerTest, AStopMakesACheckpoint) {
  job.publish_every = 1;
  config.checkpoint_every = 100;
  FakeGateway gateway(gateway_options());
  ASSERT_TRUE(absl::IsCancelled(live(gateway, [](const StepReport& report) { return report.step < 9; })));
  EXPECT_EQ(fs::read_symlink(job.run_directory() + "/checkpoints/latest"), "step_00000009");
  EXPECT_TRUE(fs::exists(job.run_directory() + "/checkpoints/step_00000005"));
  EXPECT_FALSE(fs::exists(job.run_directory() + "/checkpoints/step_00000005/journal.log"));
}

// A kill, a power cut or a bit that turned: the versions before it are there, and what is left out is told.
TEST_F(JournalTest, WhatIsNotWholeDoesNotCount) {
  const std::string checkpoint = job.run_directory() + "/checkpoints/latest";
  const auto versions = [&](const std::string& bytes) {
    write(bytes);
    const absl::StatusOr<JournalContents> journal = read_journal(checkpoint);
    CHECK_OK(journal.status());
    return std::pair(journal->versions.size(), journal->left_out);
  };
  EXPECT_EQ(versions(whole), std::pair(size_t{5}, std::string()));
  std::mt19937 random(1);
  size_t before = 5;
  for (size_t size = whole.size() - 1; size > 0; size -= std::min<size_t>(size, 1 + random() % (whole.size() / 8))) {
    const auto [found, left_out] = versions(whole.substr(0, size) + std::string(random() % 3 * 10, '\0'));  // the file may have grown first
    EXPECT_LE(found, before);
    before = found;
  }
  EXPECT_EQ(before, 0u);
  for (size_t at = 0; at < whole.size(); at += 1 + random() % 97) {
    std::string bytes = whole;
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    const auto [found, left_out] = versions(bytes);
    EXPECT_LT(found, 5u) << at;
    EXPECT_NE(left_out.find("journal.log: the last "), std::string::npos) << at << left_out;
  }
  // As much as a large batch, cut: no search for records in it.
  std::string cut = whole + std::string("\xff\xff\xff\x0f\0\0\0\0\2", 9);
  while (cut.size() < (size_t{64} << 20)) cut.push_back(static_cast<char>(random()));
  EXPECT_EQ(versions(cut).first, 5u);
  // To go on from an earlier version than was published is for the gateway to refuse.
  write(whole.substr(0, whole.size() / 2));
  EXPECT_LT((*open(gateway))->step(), 10);
  fs::remove(path);
  EXPECT_EQ((*open(gateway))->step(), 5);
}

// The life that repeated them makes a checkpoint as soon as the gateway has accepted it, also when nothing is left to do.
TEST_F(JournalTest, RepeatedOnce) {
  config.steps = 3;
  const absl::Status status = live(gateway);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(reports.empty());
  EXPECT_EQ(fs::read_symlink(job.run_directory() + "/checkpoints/latest"), "step_00000010");
  config.optimizer.beta2 = 0.9;
  EXPECT_EQ((*open(gateway))->policy_version(), 6);
}

TEST_F(JournalTest, OtherSettingsWaitForACheckpoint) {
  config.optimizer.beta2 = 0.9;
  const absl::Status other = open(gateway).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(other.message().find("learner.optimizer.beta2: 0.9"), absl::string_view::npos) << other;
  EXPECT_NE(other.message().find("trained with 0.95; expected that value for now"), absl::string_view::npos) << other;
  config.repeat_exactly = false;
  EXPECT_EQ((*open(gateway))->policy_version(), 6);
  // Its rates are in the journal: they, the number of threads and what comes later may change.
  config.repeat_exactly = true;
  config.optimizer.beta2 = 0.95;
  config.optimizer.learning_rate = 1e-4;
  config.steps = 8;
  config.threads = 2;
  EXPECT_EQ((*open(gateway))->policy_version(), 6);
}

// Repeated with other results, as another program might: refused, since workers have sampled with those versions, but for one who knows.
TEST_F(JournalTest, OtherResultsAreRefused) {
  const std::string weights = job.run_directory() + "/checkpoints/latest/model.safetensors";
  testing::write_model("glm5_next", dir.path() + "/other", 2);
  fs::remove_all(job.run_directory() + "/checkpoints/latest/optimizer");
  fs::copy_file(dir.path() + "/other/model.safetensors", weights, fs::copy_options::overwrite_existing);
  fs::remove(job.run_directory() + "/checkpoints/latest/manifest.json");
  LearnerState state = *Checkpoints::read_state(job.run_directory() + "/checkpoints/latest");
  state.optimizer_updates = 0;
  std::ofstream(job.run_directory() + "/checkpoints/latest/learner.json") << to_json(state);
  ASSERT_TRUE(write_manifest(job.run_directory() + "/checkpoints/latest").ok());
  const absl::Status status = open(gateway).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("journal.log: step 6 repeated: loss"), absl::string_view::npos) << status;
  config.repeat_exactly = false;
  EXPECT_EQ((*open(gateway))->step(), 10);
}

// An engine reads the weights where they are, so versions are withheld; then a worker fetches that has been promised to the
// gateway: it must get the newest version at once, as no batch comes without it.
TEST_F(LearnerTest, WhoComesLateGetsTheWithheldVersion) {
  job.publish_every = 1;
  config.model.dtype = kernels::DType::kBf16;
  config.warmup.steps = 0;
  std::string address;
  int fetched = -1;
  FakeGatewayOptions options = gateway_options();
  options.group = [&, make = options.group](uint64_t number, int version) {
    if (version == 3 && fetched < 0) {
      grpc::ClientContext context;
      context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(30));
      v1::FetchRequest request;
      request.set_have_version(0);
      request.set_dtype("bf16");
      const auto reader = v1::Weights::NewStub(rpc::dial(address))->Fetch(&context, request);
      v1::WeightChunk chunk;
      fetched = reader->Read(&chunk) ? chunk.header().policy_version() : -2;
      while (reader->Read(&chunk)) {
      }
    }
    return make(number, version);
  };
  FakeGateway gateway(std::move(options));
  const std::unique_ptr<Learner> learner = *open(gateway);
  address = learner->weights_address();
  learner->share_weights([](int32_t, absl::FunctionRef<void()> write) { write(); });
  const absl::Status status = learner->run({}, {});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(fetched, 3);
}

}  // namespace
}  // namespace slipstream::learner
