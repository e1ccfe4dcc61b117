// slipstream run: gateway, one rollout worker and the learner in one process, joined by the same sockets as apart.
#include <cstdio>
#include <optional>

#include "cli/commands.h"
#include "cli/environments.h"
#include "cli/job_file.h"
#include "cli/signals.h"
#include "cli/training.h"
#include "common/status.h"
#include "gateway/gateway.h"
#include "learner/learner.h"

namespace slipstream::cli {
namespace {

// Whether the worker reads the learner's own weights; an error says what is in the way of `true`.
absl::StatusOr<bool> shares_weights(const Job& job) {
  std::string problem;
  const auto expect = [&](bool good, const char* what) {
    if (!good && problem.empty()) problem = what;
  };
  expect(job.rollout.engine.device == job.learner.model.device, "rollout.device and learner.device are the same");
  expect(job.learner.model.dtype == kernels::DType::kBf16, "model.dtype is bf16 (in fp32 a step would change the weights in use)");
  expect(job.shared.publish_every == 1, "rl.publish_every is 1 (the steps between would change the weights in use)");
  expect(!job.rollout.engine.fp8_weights, "rollout.fp8_weights is false");
  if (job.rollout.share_weights == rollout::ShareWeights::kAlways && !problem.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("rollout.share_weights: true, expected auto or false unless ", problem));
  }
  return problem.empty() && job.rollout.share_weights != rollout::ShareWeights::kNever;
}

absl::Status run(const JobFlags& flags) {
  SignalStop signals;
  ASSIGN_OR_RETURN(Job job, read_job(flags));
  ASSIGN_OR_RETURN(const bool shares, shares_weights(job));
  RETURN_IF_ERROR(expect_rollout_device(job));
  RETURN_IF_ERROR(expect_learner_device(job));
  RETURN_IF_ERROR(prepare_run(job));
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
                   learner::Learner::create(job.learner, job.shared, parallel::self_group(), metrics, learner_log,
                                            signals.token()));
  job.rollout.gateway_address = gateway->address();
  job.rollout.learner_address = learner->weights_address();
  std::optional<rollout::Worker::Policy> policy;
  if (shares) policy = {.config = learner->model_config(), .weights = &learner->weights(), .version = learner->policy_version()};
  ASSIGN_OR_RETURN(const std::unique_ptr<rollout::Worker> worker,
                   rollout::Worker::start(job.rollout, metrics, rollout_log, fail, std::move(policy)));
  if (shares) {
    learner->share_weights([&](int32_t version, absl::FunctionRef<void()> write) { worker->engine().rewrite_weights(version, write); });
  }

  std::printf("run %s: model %s, everything below %s/\n", job.shared.run_id.c_str(), job.learner.model.path.c_str(),
              job.shared.run_directory().c_str());
  const int64_t before = learner->step();
  const absl::Status status = train(*learner, job, true, signals.token(), learner_log);
  gateway->stop_episodes();
  worker->drain(absl::Now() + absl::Milliseconds(500));
  gateway->stop();
  if (absl::IsCancelled(status)) RETURN_IF_ERROR(signals.failure());
  RETURN_IF_ERROR(status);
  return conclude(job, learner->step() - before);
}

}  // namespace

Run add_run(CLI::App& app) {
  auto flags = std::make_shared<JobFlags>();
  add_job_flags(app, flags);
  return [flags] { return run(*flags); };
}

}  // namespace slipstream::cli
