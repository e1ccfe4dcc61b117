#include "cli/commands.h"
namespace slipstream::cli { Run add_report(CLI::App&) { return [] { return absl::OkStatus(); }; } }
#include "cli/report.h"
namespace slipstream::cli { absl::Status write_report(const std::string&, const std::string&) { return absl::OkStatus(); } }
