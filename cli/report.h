// The report: one self-contained HTML page about a run.
#pragma once

#include <string>

#include "common/status.h"

namespace slipstream::cli {

// Reads a run's directory (runs/<id>) and writes the page to `out`, whole or not at all. NotFound: names the directory.
// PermissionDenied: `out` cannot be written. What the run has not written yet, or only half, leaves a gap in the page.
absl::Status write_report(const std::string& run_directory, const std::string& out);

}  // namespace slipstream::cli
