// Does a server keep the rules of proto/slipstream/v1/environment.proto? The checks anyone can point at their
// own.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "cli/environment_client.h"

namespace slipstream::cli {

struct CheckResult {
  std::string task;  // empty: about the whole server
  std::string name;  // what is expected
  bool ok = false;
  std::string detail;  // what was seen
};

struct CheckOptions {
  std::string task;                            // only this one; empty: all that Describe lists
  absl::Duration timeout = absl::Seconds(10);  // of every call; one that takes longer fails its check
};

// Runs all checks and hands over each result as it is known. Episodes it opened are closed again.
std::vector<CheckResult> check_environment(EnvironmentClient& client, const CheckOptions& options,
                                           const std::function<void(const CheckResult&)>& report);

}  // namespace slipstream::cli
