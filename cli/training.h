// The learner's loop with everybody who looks on: console, event files, rollout texts.
#pragma once

#include <stop_token>
#include <vector>

#include "cli/job_file.h"
#include "learner/learner.h"

namespace slipstream::cli {

// Trains to the end (OK), or until stop (Cancelled: where it stopped, and how it goes on). rewards (may be null) receives the mean reward of each RL step.
// Ranks other than 0 (is_root false) only compute, and return OK at a stop.
absl::Status train(learner::Learner& learner, const Job& job, bool is_root, std::stop_token stop, const Logger& log,
                   std::vector<double>* rewards);

}  // namespace slipstream::cli
