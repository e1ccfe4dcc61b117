// The environment servers of a job that have a command: started here, their addresses filled in.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "cli/child_process.h"
#include "cli/job_file.h"

namespace slipstream::cli {

using Environments = std::vector<std::unique_ptr<ChildProcess>>;

// Picks a free port where the config names no address and puts it in for {address}. on_failure: ChildProcess's.
absl::StatusOr<Environments> start_environments(Job& job, const Logger& log,
                                                const std::function<void(absl::Status)>& on_failure);

}  // namespace slipstream::cli
