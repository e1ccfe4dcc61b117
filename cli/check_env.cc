// slipstream check-env ADDRESS: does an environment server keep the rules?
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/environment_check.h"
#include "common/address.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {
namespace {

struct Flags {
  std::string address;
  CheckOptions options;
  int timeout_ms = 10'000;
  bool json = false;
};

void print(const CheckResult& result) {
  std::printf("%s  %s%s%s%s%s\n", result.ok ? "pass" : "FAIL", result.task.c_str(),
              result.task.empty() ? "" : ": ", result.name.c_str(), result.detail.empty() ? "" : ": ",
              result.detail.c_str());
  std::fflush(stdout);
}

absl::Status check_env(Flags flags) {
  if (const std::string problem = address_problem(flags.address, 1); !problem.empty()) {
    return absl::InvalidArgumentError("address: " + problem);
  }
  flags.options.timeout = absl::Milliseconds(flags.timeout_ms);
  const auto client = EnvironmentClient::dial(flags.address);
  const auto results = check_environment(*client, flags.options, [&](const CheckResult& result) {
    if (!flags.json) print(result);
  });
  size_t failures = 0;
  nlohmann::ordered_json checks = nlohmann::ordered_json::array();
  for (const CheckResult& result : results) {
    if (!result.ok) ++failures;
    checks.push_back(
        {{"task", result.task}, {"check", result.name}, {"ok", result.ok}, {"detail", result.detail}});
  }
  if (flags.json) {
    const nlohmann::ordered_json out = {{"address", flags.address},
                                        {"passed", results.size() - failures},
                                        {"failed", failures},
                                        {"checks", checks}};
    std::printf("%s\n", out.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace).c_str());
  } else if (failures == 0) {
    std::printf("%s: all %zu checks passed\n", flags.address.c_str(), results.size());
  }
  if (failures == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(flags.address, ": ", failures, " of ", results.size(), " checks failed"));
}

}  // namespace

Run add_check_env(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("address", flags->address, "host:port of the Environment service")->required();
  app.add_option("--task", flags->options.task, "Only this task; default: all that Describe lists");
  app.add_option("--timeout-ms", flags->timeout_ms, "Longest a call may take")
      ->check(CLI::Range(1, 600'000))
      ->capture_default_str();
  app.add_flag("--json", flags->json, "One JSON object instead of lines");
  return [flags] { return check_env(*flags); };
}

}  // namespace slipstream::cli
