// slipstream report runs/ID: one self-contained HTML page about a run.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>

#include "cli/report.h"

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
  const std::string path = flags.out.empty() ? (std::filesystem::path(flags.run) / "report.html").string() : flags.out;
  RETURN_IF_ERROR(write_report(flags.run, path));
  std::printf("%s\n", path.c_str());
  return absl::OkStatus();
}

}  // namespace

absl::Status write_report(const std::string& run_directory, const std::string& out) {
  ASSIGN_OR_RETURN(const RunData run, load_run(run_directory));
  const std::string temporary = out + ".tmp";  // nobody sees half a page
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << render_page(run);
  file.close();
  std::error_code error;
  if (file) std::filesystem::rename(temporary, out, error);
  if (!file || error) return absl::PermissionDeniedError(absl::StrCat(out, ": cannot be written"));
  return absl::OkStatus();
}

Run add_report(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("run", flags->run, "The run's directory, as runs/ID")->required();
  app.add_option("--out", flags->out, "The page to write; default: report.html in the run's directory");
  return [flags] { return report(*flags); };
}

}  // namespace slipstream::cli
