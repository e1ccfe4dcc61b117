// What a run left in its directory, as `slipstream report` needs it. Reads what is there: a missing file, a
// torn last line or a field of the wrong type leaves a gap, never an error.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cli/report_column.h"
#include "common/status.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {

struct RolloutSamples {
  int64_t step = 0;
  std::vector<nlohmann::json> trajectories;  // objects; a few of the step's
};

struct RunData {
  std::string name;
  std::string config;          // config.yaml as it is
  std::vector<int64_t> steps;  // one entry a step, rising
  std::vector<bool> warmup;    // by step
  // By step; NaN: missing. Objects are flattened: "dropped_by_reason/stale".
  std::map<std::string, Column> columns;
  std::vector<RolloutSamples> samples;  // early, middle, late
  std::vector<std::string> notes;       // what could not be read

  // All NaN when there is no such column.
  Column column(const std::string& name) const;
  // {"stale": column of "dropped_by_reason/stale", ...}
  std::map<std::string, Column> columns_under(const std::string& prefix) const;
};

// NotFound: names the directory.
absl::StatusOr<RunData> load_run(const std::string& directory);

// Valid UTF-8 whatever came in: bytes that are not become U+FFFD.
std::string valid_utf8(std::string_view bytes);

}  // namespace slipstream::cli
