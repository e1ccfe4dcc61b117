// The page about a run, for the command and for the end of `slipstream run`.
#pragma once

#include <string>

#include "cli/report_advice.h"
#include "common/status.h"

namespace slipstream::cli {

struct ReportSummary {
  size_t steps = 0;  // on the page
  RewardChange reward;
};

// Writes one self-contained HTML file about the run. NotFound: the directory, named. PermissionDenied: the page
// cannot be written.
absl::StatusOr<ReportSummary> write_report(const std::string& run_directory, const std::string& path);

}  // namespace slipstream::cli
