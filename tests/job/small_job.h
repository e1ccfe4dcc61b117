// A job small enough for tests: the real binary, environment and roles, a tiny model, a few steps.
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"
#include "tests/testing/process.h"

namespace slipstream::testing {

struct SmallJob {
  std::string directory;  // everything is below it
  std::string config;     // the file

  std::string run() const { return directory + "/runs/job"; }
  // Lines of metrics.jsonl, whole ones.
  std::vector<nlohmann::json> metrics() const;
  // The last step written, 0 before the first.
  int64_t step() const;
};

// `more` is appended to the YAML of its section: {{"rl", "max_staleness: 0"}, ...}.
SmallJob make_small_job(const std::string& directory,
                        const std::vector<std::pair<std::string, std::string>>& more = {});

// Checks that hold for every run at its end: steps follow each other, trajectories are conserved, every RL step left its
// rollouts, no rollout id stands in two steps, the log-prob difference on tokens of the learner's own version is exactly 0
// wherever there were any. Returns complaints.
std::vector<std::string> broken_invariants(const SmallJob& job);

const std::string& slipstream_binary();
const std::string& environment_binary(const std::string& name);

}  // namespace slipstream::testing
