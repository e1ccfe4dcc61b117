// Goal: any role may be killed at any moment and started again with the same command. Nothing that was finished is lost,
// nothing is trained twice, and the run reaches its end.
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/job/cluster.h"

namespace slipstream::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TEST(KilledRoles, LoseNothingAndTrainNothingTwice) {
  constexpr int kKills = 30, kSteps = 240;
  const TemporaryDirectory directory;
  const ClusterJob job = make_cluster_job(directory.path(), {{"learner", absl::StrCat("steps: ", kSteps)}});
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
}

}  // namespace
}  // namespace slipstream::testing
