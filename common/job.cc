#include "common/job.h"

#include <algorithm>

#include "absl/strings/ascii.h"

namespace slipstream {

JobConfig JobConfig::from(ConfigNode root) {
  JobConfig job;
  ConfigNode run = root.child("run");
  run.read("id", &job.run_id);
  const bool plain = std::all_of(job.run_id.begin(), job.run_id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  if (!plain || job.run_id.empty() || job.run_id[0] == '.') {
    run.fail("id", absl::StrCat("\"", job.run_id, "\", expected letters, digits, '-', '_' and '.', not first"));
  }
  run.read("dir", &job.run_parent);
  run.read("seed", &job.seed);
  ConfigNode rl = root.child("rl");
  rl.read("max_staleness", &job.max_staleness, 0, 1'000'000);
  rl.read("max_version_span", &job.max_version_span, -1, 1'000'000);
  rl.read("group_size", &job.group_size, 1, 65'536);
  rl.read("groups_per_batch", &job.groups_per_batch, 1, 1'000'000);
  rl.read("publish_every", &job.publish_every, 1, 1'000'000);
  root.child("gateway").read("learner_address", &job.learner_address);
  root.child("chat").read("tokenizer", &job.tokenizer);
  return job;
}

}  // namespace slipstream
