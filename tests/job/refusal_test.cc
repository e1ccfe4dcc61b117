// Goal: a job that cannot go on ends soon, with a non-zero code and one line that says why.
#include <csignal>
#include <filesystem>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gtest/gtest.h"
#include "tests/job/small_job.h"

namespace slipstream::testing {
namespace {

using std::chrono::seconds;

// The shortest job that trains: nothing is filtered out.
SmallJob short_job(const std::string& directory) {
  return make_small_job(directory, {{"gateway", "drop_zero_variance: false"},
                                    {"metrics", "gateway: 127.0.0.1:0"},
                                    {"metrics", "learner: 127.0.0.1:0"}});
}

// Where the roles apart find each other.
const std::vector<std::string> kApart = {"gateway.address=127.0.0.1:21350", "gateway.learner_address=tcp://127.0.0.1:21351",
                                         "learner.address=127.0.0.1:21352"};

struct Ended {
  int code = -1;         // -1: not within a minute
  std::string last;      // the line that the command itself says at its end
  std::string everything;
};

Process start(const SmallJob& job, const std::string& role, std::vector<std::string> sets) {
  std::vector<std::string> command = {slipstream_binary(), role, "-c", job.config, "--set", "learner.warmup.steps=1"};
  if (role != "run") sets.insert(sets.end(), kApart.begin(), kApart.end());
  for (const std::string& set : sets) command.insert(command.end(), {"--set", set});
  return Process(command, absl::StrCat(job.directory, "/", role, ".out"));
}

Ended end(const SmallJob& job, const std::string& role, Process process) {
  Ended out;
  out.code = process.wait(seconds(60)).value_or(-1);
  out.everything = read_file(absl::StrCat(job.directory, "/", role, ".out"));
  for (const std::string& line : read_lines(absl::StrCat(job.directory, "/", role, ".out"))) {
    if (line.starts_with(absl::StrCat("slipstream ", role, ": ")) && line.find(": warning: ") == std::string::npos) out.last = line;
  }
  return out;
}

Ended run(const SmallJob& job, const std::vector<std::string>& sets) { return end(job, "run", start(job, "run", sets)); }

void expect_refused(const Ended& ended, const std::vector<std::string>& texts) {
  EXPECT_EQ(ended.code, 1) << ended.everything;
  for (const std::string& text : texts) EXPECT_NE(ended.last.find(text), std::string::npos) << text << "\n" << ended.everything;
}

TEST(Refusal, OfALogThatIsNotTheCheckpoints) {
  const TemporaryDirectory directory;
  const SmallJob job = short_job(directory.path());
  ASSERT_EQ(run(job, {"learner.steps=1"}).code, 0) << read_file(directory.path() + "/run.out");
  const std::string log = job.run() + "/trajectories", aside = job.run() + "/aside";
  std::filesystem::rename(log, aside);
  expect_refused(run(job, {"learner.steps=2"}), {job.run() + "/checkpoints", log});
  std::filesystem::remove_all(log);
  std::filesystem::rename(aside, log);
  EXPECT_EQ(run(job, {"learner.steps=2"}).code, 0) << read_file(directory.path() + "/run.out");
  EXPECT_EQ(broken_invariants(job), std::vector<std::string>());
  expect_refused(run(job, {"learner.steps=3", "rl.group_size=2"}), {"rl.group_size: 2, but the run began with 4", log});
}

TEST(Refusal, OfEnvironmentsThatCannotServe) {
  const TemporaryDirectory directory;
  const SmallJob job = short_job(directory.path());
  const auto environment = [&](const std::string& text) {
    return std::vector<std::string>{absl::StrCat("environments=[{name: e, ", text, "}]")};
  };
  expect_refused(run(job, environment(absl::StrCat("command: [", environment_binary("arithmetic_env"),
                                                   ", --address, \"{address}\"], tasks: [{name: add_smal}]"))),
                 {"environment e at 127.0.0.1:", "no task \"add_smal\", it has: "});
  expect_refused(run(job, environment("command: [sh, -c, \"echo no module named gym >&2; exit 3\", \"{address}\"]")),
                 {"environment e: process ", "ended with code 3: no module named gym"});
  expect_refused(run(job, environment("address: \"127.0.0.1:1\", start_timeout_ms: 300")),
                 {"environment e at 127.0.0.1:1: not up within start_timeout_ms 300: "});
  // The roles apart find the mistake too, and only wait for what may come.
  expect_refused(end(job, "gateway", start(job, "gateway", environment("command: [sh, -c, \"exit 3\", \"{address}\"]"))),
                 {"ended with code 3"});
  Process gateway = start(job, "gateway", environment("address: \"127.0.0.1:1\", start_timeout_ms: 1"));
  ASSERT_TRUE(wait_until([&] { return read_file(directory.path() + "/gateway.out").find("environment e at 127.0.0.1:1: Describe: ") !=
                                      std::string::npos; }, seconds(60)));
  EXPECT_TRUE(gateway.running());
}

TEST(Refusal, OfALearnerWithAnotherGroupSize) {
  const TemporaryDirectory directory;
  const SmallJob job = short_job(directory.path());
  const Process gateway = start(job, "gateway", {});
  expect_refused(end(job, "learner", start(job, "learner", {"rl.group_size=8"})),
                 {"rl.group_size: the learner has 8, this gateway 4"});
}

TEST(Refusal, OfAConfigInOneLine) {
  const TemporaryDirectory directory;
  const SmallJob job = short_job(directory.path());
  expect_refused(run(job, {"sampling.min_p=1"}), {"run: --set sampling.min_p=1: sampling.min_p: \"1\", expected a number from 0"});
  expect_refused(run(job, {"chat.tokenizer=nothing"}), {"--set chat.tokenizer=nothing: chat.tokenizer: "});
  expect_refused(run(job, {"metrics.run=localhost:70000"}), {"metrics.run: \"localhost:70000\", expected host:port"});
  for (const auto& [set, reason] : {std::pair<const char*, const char*>{"model.dtype=fp32", "unless model.dtype is bf16"},
                                    {"rl.publish_every=2", "unless rl.publish_every is 1"},
                                    {"rollout.fp8_weights=true", "unless rollout.fp8_weights is false"}}) {
    expect_refused(run(job, {"rollout.share_weights=true", set}), {"rollout.share_weights: true, expected auto or false ", reason});
  }
  expect_refused(run(job, {"rollout.share_weights=maybe"}), {"rollout.share_weights: \"maybe\", expected"});
  expect_refused(run(job, {"rollout.gateway_address=nowhere"}), {"rollout.gateway_address: \"nowhere\", expected host:port"});
  write_file(job.config, read_file(job.config) + "---\nrl: {group_size: 2}\n");
  expect_refused(run(job, {}), {job.config + ":", "a second YAML document"});
}

TEST(Interrupted, ExitsWith130AndSaysHowToGoOn) {
  const TemporaryDirectory directory;
  const SmallJob job = short_job(directory.path());
  Process process = start(job, "run", {"learner.steps=1000000"});
  ASSERT_TRUE(wait_until([&] { return job.step() > 0; }, seconds(60))) << read_file(directory.path() + "/run.out");
  process.signal(SIGINT);
  const Ended ended = end(job, "run", std::move(process));
  EXPECT_EQ(ended.code, 130) << ended.everything;
  EXPECT_NE(ended.last.find("interrupted at step "), std::string::npos) << ended.everything;
  EXPECT_NE(ended.last.find("the same command goes on from there"), std::string::npos) << ended.everything;
}

}  // namespace
}  // namespace slipstream::testing
