// Goal: any role may be killed at any moment and started again with the same command. Nothing that was finished is lost,
// nothing is trained twice, and the run reaches its end and the reward of a run that nobody disturbed.
#include <cmath>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "tests/job/cluster.h"

namespace slipstream::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// Ten sums instead of a hundred: in 240 steps the reward goes from 0.2 to 0.6, so that what was not learnt is seen, and
// it is still so far from 1 that the spread of a step's reward is that of its episodes.
template <class Job>  // SmallJob or ClusterJob
Job with_few_instances(Job job) {
  std::string yaml = read_file(job.config);
  const std::string task = "{name: add_small}";
  yaml.replace(yaml.find(task), task.size(), "{name: add_small, instances: 10}");
  write_file(job.config, yaml);
  return job;
}

struct Reward {
  double mean = 0.0;
  double error = 0.0;  // standard error of the mean, from the spread between steps
};

std::vector<double> step_rewards(const SmallJob& job) {
  std::vector<double> out;
  for (const nlohmann::json& line : job.metrics()) {
    if (line["phase"] == "rl" && line["reward_mean"].is_number()) out.push_back(line["reward_mean"]);
  }
  return out;
}

// Over steps, each the mean of the episodes of its groups.
Reward reward_over(absl::Span<const double> rewards) {
  const auto count = static_cast<double>(rewards.size());
  Reward out;
  for (const double reward : rewards) out.mean += reward / count;
  double squares = 0.0;
  for (const double reward : rewards) squares += (reward - out.mean) * (reward - out.mean);
  out.error = std::sqrt(squares / (count - 1) / count);
  return out;
}

TEST(KilledRoles, LoseNothingAndTrainNothingTwice) {
  constexpr int kKills = 30, kSteps = 240;
  constexpr double kErrors = 5.0;
  const std::string steps = absl::StrCat("steps: ", kSteps, "\n  checkpoint_every: 4");  // most versions are in journals
  const TemporaryDirectory directory;
  const ClusterJob job = with_few_instances(make_cluster_job(directory.path(), {{"learner", steps}}));
  Cluster cluster(job, /*learner_ranks=*/1);
  ASSERT_TRUE(wait_until([&] { return job.step() > 0; }, seconds(120))) << cluster.outputs();

  std::mt19937 random(7);
  const std::vector<std::string> roles = cluster.roles();
  std::string history;
  int kills = 0;
  while (kills < kKills) {
    // At a random moment of the job's own time: after some steps or some milliseconds, whichever comes first.
    const int64_t until = job.step() + 3;
    const milliseconds moment(50 + random() % 900);
    wait_until([&] { return job.step() >= until || !cluster["learner"].running(); }, moment);
    if (!cluster["learner"].running()) break;
    const std::string& role = roles[random() % roles.size()];
    absl::StrAppend(&history, role, "@", job.step(), " ");
    cluster.restart(role);
    ++kills;
  }
  EXPECT_EQ(kills, kKills) << "the job ended too early to be tried: " << history << "\n" << cluster.outputs();
  const std::optional<int> code = cluster["learner"].wait(seconds(400));
  ASSERT_TRUE(code.has_value()) << "no end at step " << job.step() << " after " << history << "\n" << cluster.outputs();
  EXPECT_EQ(*code, 0) << history << "\n" << cluster.outputs();
  EXPECT_EQ(absl::StrJoin(broken_invariants(job), "\n"), "") << history;
  EXPECT_EQ(job.metrics().back()["phase_step"], kSteps) << history;
  EXPECT_TRUE(cluster["gateway"].running());

  const TemporaryDirectory quiet;
  const SmallJob undisturbed = with_few_instances(make_small_job(quiet.path(), {{"learner", steps}}));
  Process process({slipstream_binary(), "run", "-c", undisturbed.config}, quiet.path() + "/run.out");
  ASSERT_EQ(process.wait(seconds(300)), 0) << read_file(quiet.path() + "/run.out");
  const std::vector<double> with_kills = step_rewards(job), without = step_rewards(undisturbed);
  ASSERT_GE(with_kills.size(), kSteps / 2u);
  ASSERT_GE(without.size(), kSteps / 2u);
  const Reward killed = reward_over(absl::MakeConstSpan(with_kills).last(with_kills.size() / 4));
  const Reward expected = reward_over(absl::MakeConstSpan(without).last(without.size() / 4));
  const Reward start = reward_over(absl::MakeConstSpan(without).first(without.size() / 8));
  const double bound = kErrors * std::hypot(killed.error, expected.error);
  RecordProperty("reward_undisturbed", absl::StrCat(expected.mean, " +- ", expected.error));
  RecordProperty("reward_killed", absl::StrCat(killed.mean, " +- ", killed.error));
  EXPECT_GE(killed.mean, expected.mean - bound) << history;
  // That the bound tells learning from none: a run that stayed where the warm-up left it would be below it.
  EXPECT_LT(start.mean, expected.mean - bound);
}

}  // namespace
}  // namespace slipstream::testing
