// slipstream: one binary, one subcommand a task.
#include <algorithm>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "cli/commands.h"
#include "common/log.h"

int main(int argc, char** argv) {
  using slipstream::cli::Run;
  CLI::App app("Slipstream: asynchronous reinforcement learning of agents for sparse and hybrid language models.");
  app.require_subcommand(1);
  struct Command {
    const char* name;
    const char* help;
    Run (*add)(CLI::App&);
  };
  const Command commands[] = {
      {"run", "A whole job in one process: gateway, rollout worker, learner", &slipstream::cli::add_run},
      {"gateway", "The gateway of a job: episodes, sessions, trajectories", &slipstream::cli::add_gateway},
      {"rollout", "A rollout worker of a job", &slipstream::cli::add_rollout},
      {"learner", "The learner of a job; under mpirun one data-parallel rank", &slipstream::cli::add_learner},
      {"inspect", "What a model is and costs, from its config.json", &slipstream::cli::add_inspect},
      {"init", "Write a checkpoint with random weights", &slipstream::cli::add_init},
      {"logprobs", "Log-probabilities of a token sequence", &slipstream::cli::add_logprobs},
      {"generate", "Continue a token sequence", &slipstream::cli::add_generate},
      {"convert", "Rewrite a checkpoint in another dtype or other shards", &slipstream::cli::add_convert},
      {"check-env", "Does an environment server keep the rules of environment.proto?", &slipstream::cli::add_check_env},
      {"report", "One HTML page about a run", &slipstream::cli::add_report},
  };
  std::vector<std::pair<CLI::App*, Run>> runs;
  for (const Command& command : commands) {
    CLI::App* sub = app.add_subcommand(command.name, command.help);
    runs.emplace_back(sub, command.add(*sub));
  }
  const auto named = [&](const Command& command) { return std::string_view(argv[1]) == command.name; };
  if (argc > 1 && argv[1][0] != '-' && std::none_of(std::begin(commands), std::end(commands), named)) {
    std::fprintf(stderr, "slipstream: %s: no such command, expected one of", argv[1]);
    for (const Command& command : commands) std::fprintf(stderr, " %s", command.name);
    std::fprintf(stderr, " (slipstream --help)\n");
    return 2;
  }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    return code == 0 ? 0 : 2;  // 0: help was asked for
  }
  for (const auto& [sub, run] : runs) {
    if (!sub->parsed()) continue;
    const absl::Status status = run();
    if (status.ok()) return 0;
    const std::string why(status.message());
    std::fprintf(stderr, "slipstream %s: %s\n", sub->get_name().c_str(), slipstream::one_line(why).c_str());
    return absl::IsCancelled(status) ? 130 : 1;  // 130: a signal asked for the end, and the work is not done
  }
  return 2;
}
