// slipstream report runs/ID: one self-contained HTML page about a run.
#include "cli/report.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include "cli/commands.h"
#include "cli/report_data.h"
#include "cli/report_page.h"

namespace slipstream::cli {
namespace {

struct Flags {
  std::string run;
  std::string out;
};

absl::Status report(const Flags& flags) {
  const std::string path =
      flags.out.empty() ? (std::filesystem::path(flags.run) / "report.html").string() : flags.out;
  ASSIGN_OR_RETURN(const ReportSummary summary, write_report(flags.run, path));
  std::printf("%s: %zu steps\n", path.c_str(), summary.steps);
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ReportSummary> write_report(const std::string& run_directory, const std::string& path) {
  ASSIGN_OR_RETURN(const RunData run, load_run(run_directory));
  const std::string temporary = path + ".tmp";  // nobody sees half a page
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << render_page(run);
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, path, error);
  if (!file || error) return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be written"));
  return ReportSummary{run.steps.size(), reward_change(run)};
}

Run add_report(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("run", flags->run, "The run's directory, as runs/ID")->required();
  app.add_option("--out", flags->out, "The page to write; default: report.html in the run's directory");
  return [flags] { return report(*flags); };
}

}  // namespace slipstream::cli
