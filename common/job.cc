#include "common/job.h"

#include <algorithm>

#include "common/address.h"

namespace slipstream {

JobConfig JobConfig::from(ConfigNode root) {
  JobConfig job;
  ConfigNode run = root.child("run");
  run.read("id", &job.run_id);
  if (const std::string problem = file_name_problem(job.run_id); !problem.empty()) run.fail("id", problem);
  run.read("dir", &job.run_parent);
  run.read("seed", &job.seed);
  ConfigNode rl = root.child("rl");
  // Bounds whose product, the number of trajectories that may be under way, fits 63 bits.
  rl.read("max_staleness", &job.max_staleness, 0, 10'000);
  rl.read("max_version_span", &job.max_version_span, -1, 1'000'000);
  rl.read("group_size", &job.group_size, 1, 65'536);
  rl.read("groups_per_batch", &job.groups_per_batch, 1, 1'000'000);
  rl.read("publish_every", &job.publish_every, 1, 10'000);
  ConfigNode gateway = root.child("gateway");
  gateway.read("learner_address", &job.learner_address);
  const std::string_view learner_address = job.learner_address;
  const size_t scheme = learner_address.starts_with("tcp://") ? 6 : 0;
  if (const std::string problem = address_problem(learner_address.substr(scheme), 0); !problem.empty()) {
    gateway.fail("learner_address", problem);
  }
  root.child("chat").read("tokenizer", &job.tokenizer);
  return job;
}

std::map<std::string, std::string> JobConfig::settings() const {
  return {{"run.seed", absl::StrCat(seed)},
          {"rl.max_staleness", absl::StrCat(max_staleness)},
          {"rl.max_version_span", absl::StrCat(max_version_span)},
          {"rl.group_size", absl::StrCat(group_size)},
          {"rl.groups_per_batch", absl::StrCat(groups_per_batch)},
          {"rl.publish_every", absl::StrCat(publish_every)}};
}

}  // namespace slipstream
