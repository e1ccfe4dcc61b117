#include "cli/environments.h"

#include "absl/strings/str_replace.h"

namespace slipstream::cli {

absl::StatusOr<Environments> start_environments(Job& job, const Logger& log,
                                                const std::function<void(absl::Status)>& on_failure) {
  Environments started;
  for (gateway::EnvironmentConfig& environment : job.gateway.environments) {
    if (environment.command.empty()) continue;
    if (environment.address.empty()) {
      ASSIGN_OR_RETURN(const int port, unused_port());
      environment.address = absl::StrCat("127.0.0.1:", port);
    }
    ChildProcess::Options options{.name = absl::StrCat("environment ", environment.name), .command = environment.command,
                                  .output = absl::StrCat(job.shared.run_directory(), "/logs/environment-", environment.name, ".log"),
                                  .on_failure = on_failure};
    for (std::string& word : options.command) {
      word = absl::StrReplaceAll(word, {{"{address}", environment.address}});
    }
    ASSIGN_OR_RETURN(std::unique_ptr<ChildProcess> child, ChildProcess::start(std::move(options), log));
    started.push_back(std::move(child));
  }
  return started;
}

}  // namespace slipstream::cli
