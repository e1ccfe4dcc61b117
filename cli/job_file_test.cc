// Goal: docs/configuration.yaml names every key there is and tells its default; the recipes are read without complaint and
// name presets that exist; ports and addresses that a file leaves open are filled in alike for every role.
#include "cli/job_file.h"

#include <filesystem>
#include <fstream>
#include <set>

#include "cli/presets.h"
#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"
#include "yaml-cpp/yaml.h"

namespace slipstream::cli {
namespace {

// "rl.max_staleness", "environments.tasks.weight", ...
void collect_keys(const YAML::Node& node, const std::string& prefix, std::set<std::string>* out) {
  if (node.IsSequence()) {
    for (const YAML::Node& item : node) collect_keys(item, prefix, out);
  } else if (node.IsMap()) {
    for (const auto& entry : node) {
      const std::string key = prefix + entry.first.as<std::string>();
      out->insert(key);
      collect_keys(entry.second, key + ".", out);
    }
  }
}

std::set<std::string> keys_of(const YAML::Node& node) {
  std::set<std::string> out;
  collect_keys(node, "", &out);
  return out;
}

const std::string kSource = SLIPSTREAM_SOURCE_DIR;

TEST(Configuration, NamesEveryKeyAndItsDefault) {
  const testing::TemporaryDirectory directory;
  const std::string minimal = directory.path() + "/job.yaml";
  std::ofstream(minimal) << "model: {path: runs/models/mine}\n"
                            "environments: [{name: mine, address: \"localhost:50051\", tasks: [{name: add}]}]\n";
  const absl::StatusOr<Job> expected = read_job({.config = minimal, .sets = {}});
  ASSERT_TRUE(expected.ok()) << expected.status();
  const std::string path = kSource + "/docs/configuration.yaml";
  const absl::StatusOr<Job> documented = read_job({.config = path, .sets = {}});
  ASSERT_TRUE(documented.ok()) << documented.status();
  // prefix_sessions_max follows max_running, so it is right in both or in neither.
  EXPECT_EQ(documented->resolved, expected->resolved);
  EXPECT_EQ(keys_of(YAML::LoadFile(path)), keys_of(YAML::Load(expected->resolved)));
}

TEST(Recipes, AreReadAndNamePresets) {
  int recipes = 0;
  for (const auto& file : std::filesystem::directory_iterator(kSource + "/configs")) {
    if (file.path().extension() != ".yaml") continue;
    const absl::StatusOr<Job> job = read_job({.config = file.path().string(), .sets = {}});
    ASSERT_TRUE(job.ok()) << job.status();
    EXPECT_TRUE(read_config_or_preset(job->init_config).ok()) << file.path() << ": " << job->init_config;
    ++recipes;
  }
  EXPECT_GE(recipes, 2);
}

TEST(FixAddresses, EveryRoleFindsTheOthers) {
  absl::StatusOr<Job> job = read_job({.config = kSource + "/configs/quickstart.yaml", .sets = {"rollout.learner_address=far:9"}});
  ASSERT_TRUE(job.ok()) << job.status();
  fix_addresses(*job);
  EXPECT_EQ(job->gateway.address, "127.0.0.1:7400");
  EXPECT_EQ(job->gateway.learner_address, "tcp://127.0.0.1:7401");
  EXPECT_EQ(job->learner.address, "127.0.0.1:7402");
  EXPECT_EQ(job->learner.gateway_address, job->gateway.learner_address);
  EXPECT_EQ(job->rollout.gateway_address, job->gateway.address);
  EXPECT_EQ(job->rollout.learner_address, "far:9");  // what the file names stays
}

}  // namespace
}  // namespace slipstream::cli
