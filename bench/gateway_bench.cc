// What the gateway costs: driven episodes against an engine and an environment that do nothing but wait, all in one process,
// over real gRPC. Prints turns a second and the latency that is not the engine's: from one Step's answer to the next Step,
// less the engine's own time; rendering, sessions and both calls are in it.
#include <sys/resource.h>

#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "bench/measuring.h"
#include "common/check.h"
#include "gateway/orchestrator.h"
#include "gateway/testing/fake_environment.h"
#include "gateway/testing/fake_worker.h"
#include "gateway/testing/memory_source.h"

namespace slipstream::gateway {
namespace {

struct Flags {
  int episodes = 1000, concurrent = 64, turns = 4, tokens = 32, tokens_per_event = 8, engine_ms = 0;
};

double cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

void run(const Flags& flags) {
  Metrics metrics;
  const Logger log = quiet_logger();
  const std::unique_ptr<model::Tokenizer> tokenizer = *model::open_tokenizer("bytes");
  const std::unique_ptr<model::ChatFormat> format = *model::ChatFormat::create({}, *tokenizer);
  GatewayConfig config;
  config.episode_threads = flags.concurrent;
  config.max_tokens = flags.tokens;

  // Each reply stops at its last token: its length is fixed and the episode goes on.
  testing::FakeWorker::Options worker_options{.tokens_per_event = flags.tokens_per_event, .stop_in = 0};
  worker_options.before_event = [&](const v1::GenerateRequest&, int sent) {
    if (sent == 0 && flags.engine_ms > 0) absl::SleepFor(absl::Milliseconds(flags.engine_ms));
    return absl::OkStatus();
  };
  worker_options.edit = [&](v1::GenerateEvent& event) {
    if (!event.has_finished()) return;
    event.set_ids(event.ids_size() - 1, format->stop_ids()[0]);
    event.mutable_finished()->set_reason(v1::FINISH_REASON_STOP);
  };
  std::mutex mutex;
  std::map<std::string, absl::Time> answered;
  std::vector<double> added_ms;
  testing::FakeEnvironment::Options environment_options{.turns = flags.turns, .max_turns = flags.turns};
  environment_options.on_step = [&](const v1::StepRequest& request, v1::StepResponse&) {
    const absl::Time now = absl::Now();
    const std::lock_guard lock(mutex);
    if (const auto before = answered.find(request.episode_id()); before != answered.end()) {
      added_ms.push_back(absl::ToDoubleMilliseconds(now - before->second) - flags.engine_ms);
    }
    answered[request.episode_id()] = now;
    return absl::OkStatus();
  };
  testing::MemorySource source;
  testing::FakeWorker worker(worker_options);
  testing::FakeEnvironment environment(environment_options);
  WorkerPool pool({.heartbeat_ms = 3'600'000, .heartbeat_misses = 3}, metrics, log);
  CHECK_OK(worker.join(pool));
  EngineClient engine(pool, log);
  EnvironmentConfig environment_config;
  environment_config.name = "env";
  environment_config.address = environment.address();
  environment_config.max_concurrent = flags.concurrent;
  absl::Notification described;
  EnvironmentClient client(environment_config, [&](const auto&) { return described.Notify(), absl::OkStatus(); }, metrics, log);
  CHECK(described.WaitForNotificationWithTimeout(absl::Minutes(1)));
  Orchestrator orchestrator(config, source, engine, {{"env", &client}}, *format, metrics, log);

  const absl::Time start = absl::Now();
  const double cpu = cpu_seconds();
  for (int i = 0; i < flags.episodes; ++i) source.plan(testing::fake_plan(static_cast<uint64_t>(i)));
  size_t done = 0;
  while (done < static_cast<size_t>(flags.episodes)) done = source.wait_for(flags.episodes).size();
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  const double turns = static_cast<double>(flags.episodes) * flags.turns;
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("%d episodes of %d turns of %d tokens, %d at once, engine %d ms: %.0f turns/s, %.2f ms CPU a turn, added latency "
              "%.2f ms median, %.2f p99, %.2f max; %ld MiB\n",
              flags.episodes, flags.turns, flags.tokens, flags.concurrent, flags.engine_ms, turns / seconds,
              1e3 * (cpu_seconds() - cpu) / turns, bench::quantile(added_ms, 0.5), bench::quantile(added_ms, 0.99),
              bench::quantile(added_ms, 1.0), usage.ru_maxrss / 1024);
}

}  // namespace
}  // namespace slipstream::gateway

int main(int argc, char** argv) {
  slipstream::gateway::Flags flags;
  CLI::App app("turns a second and added latency of the gateway");
  app.add_option("--episodes", flags.episodes)->check(CLI::PositiveNumber);
  app.add_option("--concurrent", flags.concurrent)->check(CLI::PositiveNumber);
  app.add_option("--turns", flags.turns, "of an episode")->check(CLI::Range(2, 1'000'000));
  app.add_option("--tokens", flags.tokens, "of a reply")->check(CLI::PositiveNumber);
  app.add_option("--tokens-per-event", flags.tokens_per_event)->check(CLI::PositiveNumber);
  app.add_option("--engine-ms", flags.engine_ms, "time a reply takes")->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  slipstream::gateway::run(flags);
}
