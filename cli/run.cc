// slipstream run: gateway, one rollout worker and the learner in one process, joined by the same sockets as apart.
#include <algorithm>
#include <cstdio>
#include <vector>

#include "cli/commands.h"
#include "cli/environments.h"
#include "cli/job_file.h"
#include "cli/report.h"
#include "cli/signals.h"
#include "cli/training.h"
#include "common/status.h"
#include "gateway/gateway.h"
#include "learner/learner.h"

namespace slipstream::cli {
namespace {

double mean(const double* begin, size_t count) {
  double sum = 0.0;
  for (size_t i = 0; i < count; ++i) sum += begin[i];
  return sum / static_cast<double>(count);
}

// What a user wants to know first. `rewards`: of each RL step that this start of the run took.
void print_summary(int64_t steps, const std::vector<double>& rewards, const std::string& report) {
  if (steps == 0) {
    std::printf("nothing was left to do: the run had ended before. For another one: --set run.id=NAME\n");
  } else if (!rewards.empty()) {
    const size_t count = std::min<size_t>(10, rewards.size());
    std::printf("mean reward %.3f -> %.3f (first and last %zu steps of RL)\n", mean(rewards.data(), count),
                mean(rewards.data() + rewards.size() - count, count), count);
  }
  std::printf("report: %s\n", report.c_str());
}

absl::Status run(const JobFlags& flags) {
  SignalStop signals;
  ASSIGN_OR_RETURN(Job job, read_job(flags));
  RETURN_IF_ERROR(prepare_run(job));
  RETURN_IF_ERROR(write_resolved_config(job));
  ASSIGN_OR_RETURN(const Logger gateway_log, open_log(job, "gateway"));
  ASSIGN_OR_RETURN(const Logger rollout_log, open_log(job, "rollout"));
  ASSIGN_OR_RETURN(const Logger learner_log, open_log(job, "learner"));
  Metrics metrics;
  RETURN_IF_ERROR(serve_metrics(metrics, job.metrics_address, gateway_log));
  const auto fail = [&signals](absl::Status why) { signals.fail(std::move(why)); };
  ASSIGN_OR_RETURN(const Environments environments, start_environments(job, gateway_log, fail));
  ASSIGN_OR_RETURN(const std::unique_ptr<gateway::Gateway> gateway,
                   gateway::Gateway::start(job.gateway, metrics, gateway_log,
                                           {.on_failure = fail, .environments_must_start = true}));
  job.learner.gateway_address = gateway->learner_endpoint();
  ASSIGN_OR_RETURN(const std::unique_ptr<learner::Learner> learner,
                   learner::Learner::create(job.learner, job.shared, parallel::self_group(), metrics, learner_log));
  job.rollout.gateway_address = gateway->address();
  job.rollout.learner_address = learner->weights_address();
  ASSIGN_OR_RETURN(const std::unique_ptr<rollout::Worker> worker, rollout::Worker::start(job.rollout, metrics, rollout_log, fail));

  const std::string directory = job.shared.run_directory();
  std::printf("run %s: model %s, everything below %s/\n", job.shared.run_id.c_str(), job.learner.model.path.c_str(),
              directory.c_str());
  std::vector<double> rewards;
  const int64_t before = learner->step();
  const absl::Status status = train(*learner, job, true, signals.token(), learner_log, &rewards);
  worker->drain(absl::Now() + absl::Milliseconds(500));
  gateway->stop();
  if (absl::IsCancelled(status)) RETURN_IF_ERROR(signals.failure());
  RETURN_IF_ERROR(status);
  const std::string page = directory + "/report.html";
  RETURN_IF_ERROR(write_report(directory, page).status());
  print_summary(learner->step() - before, rewards, page);
  return absl::OkStatus();
}

}  // namespace

Run add_run(CLI::App& app) {
  auto flags = std::make_shared<JobFlags>();
  add_job_flags(app, flags);
  return [flags] { return run(*flags); };
}

}  // namespace slipstream::cli
