// The learner's loop with everybody who looks on: console, event files, rollout texts.
#pragma once

#include <stop_token>

#include "cli/job_file.h"
#include "learner/learner.h"

namespace slipstream::cli {

// Trains to the end (OK), or until stop (Cancelled: where it stopped, and how it goes on). Writes the job's config into the
// run's directory once the gateway has accepted the learner. Ranks other than 0 (is_root false) only compute, and return OK at
// a stop.
absl::Status train(learner::Learner& learner, const Job& job, bool is_root, std::stop_token stop, const Logger& log);

// After the end: writes report.html and prints what a user wants to know first. steps: that this start of the run took.
absl::Status conclude(const Job& job, int64_t steps);

}  // namespace slipstream::cli
