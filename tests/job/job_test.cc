// Goal: the job as its users start it. One process or many, it trains, conserves trajectories, and its rollout and learner
// log-probs agree to the bit.
#include <csignal>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/job/cluster.h"

namespace slipstream::testing {
namespace {

using std::chrono::seconds;

std::string complaints(const SmallJob& job) {
  std::string out;
  for (const std::string& text : broken_invariants(job)) out += text + "\n";
  return out;
}

int run_embedded(const SmallJob& job, const std::vector<std::string>& sets = {}) {
  std::vector<std::string> command = {slipstream_binary(), "run", "-c", job.config};
  for (const std::string& set : sets) command.insert(command.end(), {"--set", set});
  Process process(command, job.directory + "/run.out");
  return process.wait(seconds(300)).value_or(-1);
}

bool saw_mismatch_measured(const SmallJob& job) {
  for (const nlohmann::json& line : job.metrics()) {
    if (!line["mismatch_abs_max"].is_null()) return true;
  }
  return false;
}

class EmbeddedJob : public ::testing::TestWithParam<const char*> {};

TEST_P(EmbeddedJob, TrainsExactlyAndLeavesItsFiles) {
  const TemporaryDirectory directory;
  const SmallJob job = make_small_job(directory.path(), {{"learner", "steps: 8"}, {"rl", "max_staleness: 1"},
                                                         {"model", absl::StrCat("dtype: ", GetParam())}});
  ASSERT_EQ(run_embedded(job), 0) << read_file(directory.path() + "/run.out");
  EXPECT_EQ(complaints(job), "");
  EXPECT_TRUE(saw_mismatch_measured(job));
  EXPECT_EQ(job.metrics().back()["phase"], "rl");
  for (const char* file : {"config.yaml", "metrics.jsonl", "logs/gateway.log", "logs/rollout.log", "logs/learner.log",
                           "checkpoints/latest", "report.html"}) {
    EXPECT_TRUE(std::filesystem::exists(job.run() + "/" + file)) << file;
  }
}
INSTANTIATE_TEST_SUITE_P(Dtypes, EmbeddedJob, ::testing::Values("fp32", "bf16"));

std::string final_weights(const SmallJob& job) {
  return read_file(job.run() + "/checkpoints/latest/model.safetensors");
}

TEST(SynchronousJob, RepeatsBitForBit) {
  std::string weights[2];
  std::vector<nlohmann::json> rewards[2];
  for (int i = 0; i < 2; ++i) {
    const TemporaryDirectory directory;
    const SmallJob job = make_small_job(directory.path(), {{"learner", "steps: 6"}, {"rl", "max_staleness: 0"}});
    ASSERT_EQ(run_embedded(job), 0) << read_file(directory.path() + "/run.out");
    EXPECT_EQ(complaints(job), "");
    weights[i] = final_weights(job);
    for (const nlohmann::json& line : job.metrics()) {
      rewards[i].push_back({line["reward_mean"], line["loss"], line["grad_norm"], line["staleness_mean"]});
    }
  }
  ASSERT_FALSE(weights[0].empty());
  EXPECT_TRUE(weights[0] == weights[1]);
  EXPECT_EQ(rewards[0], rewards[1]);
}

// A job with the worker in the learner's process reads its weights in place; what it learns is what one learns that fetches them.
TEST(SharedWeights, ChangeNothingThatIsLearned) {
  std::string weights[2];
  for (const bool share : {false, true}) {
    const TemporaryDirectory directory;
    const SmallJob job = make_small_job(directory.path(), {{"learner", "steps: 6"}, {"rl", "max_staleness: 0"}});
    ASSERT_EQ(run_embedded(job, {absl::StrCat("rollout.share_weights=", share ? "true" : "false")}), 0) << read_file(directory.path() + "/run.out");
    EXPECT_EQ(complaints(job), "");
    EXPECT_TRUE(saw_mismatch_measured(job));
    const std::string log = read_file(job.run() + "/logs/rollout.log");
    EXPECT_EQ(log.find("the learner's weights") != std::string::npos, share) << log;
    weights[share] = final_weights(job);
  }
  ASSERT_FALSE(weights[0].empty());
  EXPECT_TRUE(weights[0] == weights[1]);
}

// Every reply is cut off and masked: versions follow each other without a change of the weights, and still reach the worker.
TEST(SharedWeights, GoOnWithoutAnythingToLearn) {
  const TemporaryDirectory directory;
  const SmallJob job = make_small_job(directory.path(), {{"learner", "steps: 4"}, {"rl", "max_staleness: 0"}, {"gateway", "overlong: mask"}});
  ASSERT_EQ(run_embedded(job, {"sampling.max_tokens=1", "gateway.drop_zero_variance=false"}), 0) << read_file(directory.path() + "/run.out");
  EXPECT_EQ(complaints(job), "");
  EXPECT_EQ(job.metrics().back()["phase_step"], 4);
}

TEST(ResumedJob, GoesOnWhereItStopped) {
  const TemporaryDirectory directory;
  const SmallJob job = make_small_job(directory.path(), {{"learner", "steps: 6"}, {"rl", "max_staleness: 0"}});
  ASSERT_EQ(run_embedded(job, {"learner.steps=3"}), 0);
  const int64_t half = job.step();
  ASSERT_EQ(run_embedded(job), 0) << read_file(directory.path() + "/run.out");
  EXPECT_EQ(job.step(), half + 3);
  EXPECT_EQ(complaints(job), "");

  const TemporaryDirectory other;
  const SmallJob whole = make_small_job(other.path(), {{"learner", "steps: 6"}, {"rl", "max_staleness: 0"}});
  ASSERT_EQ(run_embedded(whole), 0);
  EXPECT_TRUE(final_weights(job) == final_weights(whole)) << "resuming equals not stopping";
}

TEST(SeparateRoles, TrainAsTheOneProcessDoes) {
  constexpr int kSteps = 12;
  const TemporaryDirectory directory;
  const ClusterJob job = make_cluster_job(directory.path(), {{"learner", absl::StrCat("steps: ", kSteps)}});
  Cluster cluster(job, /*learner_ranks=*/2);
  const std::optional<int> code = cluster["learner"].wait(seconds(300));
  ASSERT_TRUE(code.has_value()) << cluster.outputs();
  EXPECT_EQ(*code, 0) << cluster.outputs();
  EXPECT_EQ(complaints(job), "");
  EXPECT_TRUE(saw_mismatch_measured(job));
  EXPECT_EQ(job.metrics().back()["phase_step"], kSteps);
  for (const char* role : {"gateway", "rollout-0", "rollout-1"}) {
    cluster[role].signal(SIGTERM);
    EXPECT_EQ(cluster[role].wait(seconds(40)), 0) << role << "\n" << cluster.outputs();
  }
}

}  // namespace
}  // namespace slipstream::testing
