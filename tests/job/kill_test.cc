// Goal: any role may be killed at any moment and started again with the same command. Nothing that was finished is lost,
// nothing is trained twice, and the run reaches its end.
#include <csignal>
#include <cstdlib>
#include <map>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/job/small_job.h"

namespace slipstream::testing {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// The roles of a job in processes of their own.
class Cluster {
 public:
  explicit Cluster(const SmallJob& job) : job_(job) {
    commands_["environment"] = {environment_binary("arithmetic_env"), "--address", "127.0.0.1:21377"};
    commands_["gateway"] = {slipstream_binary(), "gateway", "-c", job.config};
    commands_["rollout-0"] = {slipstream_binary(), "rollout", "-c", job.config};
    commands_["rollout-1"] = {slipstream_binary(), "rollout", "-c", job.config, "--worker-id", "worker-1"};
    commands_["learner"] = {slipstream_binary(), "learner", "-c", job.config};
    for (const auto& [role, command] : commands_) start(role);
  }
  void start(const std::string& role) {
    processes_.insert_or_assign(role, Process(commands_.at(role), absl::StrCat(job_.directory, "/", role, ".out")));
  }
  Process& operator[](const std::string& role) { return processes_.at(role); }
  std::vector<std::string> roles() const {
    std::vector<std::string> out;
    for (const auto& [role, command] : commands_) out.push_back(role);
    return out;
  }
  std::string outputs() const {
    std::string out;
    for (const auto& [role, command] : commands_) {
      const std::string text = read_file(absl::StrCat(job_.directory, "/", role, ".out"));
      absl::StrAppend(&out, "== ", role, "\n", text.substr(text.size() > 3000 ? text.size() - 3000 : 0), "\n");
    }
    return out;
  }

 private:
  const SmallJob& job_;
  std::map<std::string, std::vector<std::string>> commands_;
  std::map<std::string, Process> processes_;
};

TEST(KilledRoles, LoseNothingAndTrainNothingTwice) {
  constexpr int kKills = 30, kSteps = 240;
  const TemporaryDirectory directory;
  SmallJob job = make_small_job(
      directory.path(), {{"learner", absl::StrCat("steps: ", kSteps)},
                         {"learner", "reply_timeout_ms: 300"},
                         {"learner", "address: 127.0.0.1:21374"},
                         {"gateway", "address: 127.0.0.1:21375"},
                         {"gateway", "learner_address: tcp://127.0.0.1:21376"},
                         {"metrics", "gateway: 127.0.0.1:0"},
                         {"metrics", "learner: 127.0.0.1:0"}});
  // The environment is one more process that may die: the gateway is told where it is and does not start it.
  std::string yaml = read_file(job.config);
  const size_t begin = yaml.find("  command: ["), end = yaml.find('\n', begin);
  yaml.replace(begin, end - begin, "  address: 127.0.0.1:21377");
  write_file(job.config, yaml);
  Cluster cluster(job);
  ASSERT_TRUE(wait_until([&] { return job.step() > 0; }, seconds(120))) << cluster.outputs();

  std::mt19937 random(7);
  const std::vector<std::string> roles = cluster.roles();
  std::string history;
  int kills = 0;
  for (int kill = 0; kill < kKills && cluster["learner"].running(); ++kill) {
    // At a random moment of the job's own time: after so many lines or so many milliseconds, whichever comes first.
    const int64_t until = job.step() + 3;
    const auto moment = milliseconds(50 + random() % 900);
    wait_until([&] { return job.step() >= until || !cluster["learner"].running(); }, moment);
    if (!cluster["learner"].running()) break;
    const std::string& role = roles[random() % roles.size()];
    absl::StrAppend(&history, role, "@", job.step(), " ");
    cluster[role].kill_now();
    cluster.start(role);
    ++kills;
  }
  EXPECT_EQ(kills, kKills) << "the job ended too early to be tried: " << history;
  const std::optional<int> code = cluster["learner"].wait(seconds(400));
  ASSERT_TRUE(code.has_value()) << "no end at step " << job.step() << " after " << history << "\n" << cluster.outputs();
  EXPECT_EQ(*code, 0) << history << "\n" << cluster.outputs();
  EXPECT_EQ(absl::StrJoin(broken_invariants(job), "\n"), "") << history;
  EXPECT_EQ(job.metrics().back()["phase_step"], kSteps) << history;
  // What the gateway knows agrees with the learner's last word: its log opens and its role answers.
  EXPECT_TRUE(cluster["gateway"].running());
}

}  // namespace
}  // namespace slipstream::testing
