// hostile_env: the arithmetic tasks by a server that is slow, crashes, stalls or answers nonsense, as its
// flags say. For tests of whoever talks to environments, and for measuring what a long tail of latencies
// costs.
#include <memory>

#include "CLI/CLI.hpp"
#include "examples/arithmetic_task.h"
#include "examples/environment_service.h"

int main(int argc, char** argv) {
  using slipstream::examples::RandomFaults;
  CLI::App app(
      "hostile: an environment that misbehaves on purpose. Every Reset and Step draws its fate from the "
      "seed.");
  std::string address = "127.0.0.1:0";
  RandomFaults::Config config;
  app.add_option("--address", address, "host:port to listen on; port 0: any free one")->capture_default_str();
  const auto probability = [&](const char* flag, double* value, const char* help) {
    app.add_option(flag, *value, help)->check(CLI::Range(0.0, 1.0))->capture_default_str();
  };
  probability("--abort-probability", &config.abort_probability, "The call fails with INTERNAL");
  probability("--stall-probability", &config.stall_probability, "The call is never answered");
  probability("--garbage-probability", &config.garbage_probability,
              "The answer breaks the rules of environment.proto");
  probability("--exit-probability", &config.exit_probability, "The process ends on the spot");
  app.add_option("--latency-p50-ms", config.latency_p50_ms, "Median of the log-normal latency; 0: none")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--latency-p99-ms", config.latency_p99_ms,
                 "Its 99 % quantile; 0: every call takes the median")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", config.seed, "Of all draws")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const auto faults = std::make_shared<RandomFaults>(config);
  return slipstream::examples::serve_until_signal(address, {.name = "hostile",
                                                            .tasks = slipstream::examples::arithmetic_tasks(),
                                                            .faults = [faults] { return faults->draw(); },
                                                            .episodes = {}});
}
