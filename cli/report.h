// The page about a run, for the command and for the end of `slipstream run`.
#pragma once

#include <string>

#include "common/status.h"

namespace slipstream::cli {

// Writes one self-contained HTML file about the run and returns how many steps it shows. NotFound: the
// directory, named. PermissionDenied: the page cannot be written.
absl::StatusOr<size_t> write_report(const std::string& run_directory, const std::string& path);

}  // namespace slipstream::cli
