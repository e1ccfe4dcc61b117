// What gateway and learner must agree on: the `run` and `rl` sections of the config file, the address where they meet and
// the tokenizer.
#pragma once

#include <map>
#include <string>

#include "common/config.h"

namespace slipstream {

struct JobConfig {
  // run:
  std::string run_id = "run";    // letters, digits, '-', '_', '.'
  std::string run_parent = "runs";
  uint64_t seed = 1;             // of everything random in the run
  // rl:
  int max_staleness = 1;         // versions a trajectory may be behind the learner; 0: fully synchronous
  int max_version_span = -1;     // newest less oldest version inside one trajectory; -1: no bound
  int group_size = 8;            // G
  int groups_per_batch = 16;     // groups a learner step consumes
  int publish_every = 1;         // steps between policy versions
  // gateway:
  std::string learner_address = "tcp://127.0.0.1:0";  // where the gateway hands out trajectories, over ZeroMQ
  // chat:
  std::string tokenizer = "bytes";  // or a tokenizer.json

  std::string run_directory() const { return run_parent + "/" + run_id; }
  int64_t batch_trajectories() const { return int64_t{group_size} * groups_per_batch; }
  // What both must have alike, by config key: "rl.group_size" -> "8".
  std::map<std::string, std::string> settings() const;
  // Reads these; errors are found by root.finish().
  static JobConfig from(ConfigNode root);
};

}  // namespace slipstream
