// slipstream gateway, rollout and learner: the roles of `slipstream run` in processes of their own, from the same file.
#include <cstdio>
#include <cstdlib>
#include <optional>

#include "cli/commands.h"
#include "cli/environments.h"
#include "cli/job_file.h"
#include "cli/signals.h"
#include "cli/training.h"
#include "common/address.h"
#include "common/status.h"
#include "gateway/gateway.h"
#include "learner/learner.h"
#include "parallel/mpi_group.h"

namespace slipstream::cli {
namespace {

struct RoleFlags {
  JobFlags job;
  std::optional<std::string> metrics_address;
  std::optional<std::string> address;
  std::optional<std::string> worker_id;
};

absl::Status check_flags(const RoleFlags& flags) {
  const auto refuse = [](const char* flag, const std::string& problem) {
    return problem.empty() ? absl::OkStatus() : absl::InvalidArgumentError(absl::StrCat(flag, ": ", problem));
  };
  if (flags.metrics_address) RETURN_IF_ERROR(refuse("--metrics-address", address_problem(*flags.metrics_address, 0)));
  if (flags.address) RETURN_IF_ERROR(refuse("--address", address_problem(*flags.address, 0)));
  if (flags.worker_id) RETURN_IF_ERROR(refuse("--worker-id", file_name_problem(*flags.worker_id)));
  return absl::OkStatus();
}

absl::StatusOr<Job> read_role(const RoleFlags& flags, absl::Status (*expect)(const Job&) = nullptr) {
  RETURN_IF_ERROR(check_flags(flags));
  ASSIGN_OR_RETURN(Job job, read_job(flags.job));
  fix_addresses(job);
  if (expect != nullptr) RETURN_IF_ERROR(expect(job));
  RETURN_IF_ERROR(prepare_run(job));
  return job;
}

absl::Status run_gateway(const RoleFlags& flags) {
  SignalStop signals;
  ASSIGN_OR_RETURN(Job job, read_role(flags));
  ASSIGN_OR_RETURN(const Logger log, open_log(job, "gateway"));
  Metrics metrics;
  RETURN_IF_ERROR(serve_metrics(metrics, flags.metrics_address.value_or(job.gateway_metrics_address), log));
  const auto fail = [&signals](absl::Status why) { signals.fail(std::move(why)); };
  ASSIGN_OR_RETURN(const Environments environments, start_environments(job, log, fail));
  ASSIGN_OR_RETURN(const std::unique_ptr<gateway::Gateway> gateway,
                   gateway::Gateway::start(job.gateway, metrics, log, {.on_failure = fail}));
  RETURN_IF_ERROR(write_resolved_config(job));
  std::printf("gateway at %s, learners at %s\n", gateway->address().c_str(), gateway->learner_endpoint().c_str());
  std::fflush(stdout);
  const absl::Status status = signals.wait();
  gateway->stop();
  return status;
}

absl::Status run_rollout(const RoleFlags& flags) {
  SignalStop signals;
  ASSIGN_OR_RETURN(Job job, read_role(flags, expect_rollout_device));
  if (job.rollout.share_weights == rollout::ShareWeights::kAlways) {
    return absl::InvalidArgumentError("rollout.share_weights: true, expected auto or false: only `slipstream run` has worker and learner in one process");
  }
  job.rollout.engine.worker_id = flags.worker_id.value_or(job.rollout.engine.worker_id);
  job.rollout.address = flags.address.value_or(job.rollout.address);
  ASSIGN_OR_RETURN(const Logger log, open_log(job, job.rollout.engine.worker_id == "worker-0" ? "rollout" : "rollout-" + job.rollout.engine.worker_id));
  Metrics metrics;
  RETURN_IF_ERROR(serve_metrics(metrics, flags.metrics_address.value_or(job.rollout_metrics_address), log));
  ASSIGN_OR_RETURN(const std::unique_ptr<rollout::Worker> worker, rollout::Worker::start(job.rollout, metrics, log,
                                                 [&signals](absl::Status why) { signals.fail(std::move(why)); }));
  std::printf("rollout worker %s at %s\n", job.rollout.engine.worker_id.c_str(), worker->address().c_str());
  std::fflush(stdout);
  const absl::Status status = signals.wait();
  worker->drain(absl::Now() + absl::Milliseconds(job.rollout.drain_timeout_ms));
  return status;
}

// Under mpirun every rank is one process of the data-parallel group; alone it is a group of one and MPI stays out of it.
bool under_mpirun() {
  return std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr || std::getenv("PMI_SIZE") != nullptr;
}

absl::Status run_learner(const RoleFlags& flags) {
  SignalStop signals;
  std::unique_ptr<parallel::MpiWorld> world;
  if (under_mpirun()) {
    ASSIGN_OR_RETURN(world, parallel::MpiWorld::create());
  }
  parallel::Group& group = world == nullptr ? parallel::self_group() : world->group();
  const bool root = group.rank() == 0;
  // What only one rank knows of (its config cannot be read, its port is taken) must not leave the others waiting.
  const absl::Status status = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(Job job, read_role(flags, expect_learner_device));
    ASSIGN_OR_RETURN(const Logger log, open_log(job, root ? "learner" : absl::StrCat("learner-", group.rank())));
    Metrics metrics;
    if (root) RETURN_IF_ERROR(serve_metrics(metrics, flags.metrics_address.value_or(job.learner_metrics_address), log));
    ASSIGN_OR_RETURN(const std::unique_ptr<learner::Learner> learner,
                     learner::Learner::create(job.learner, job.shared, group, metrics, log, signals.token()));
    if (root) {
      std::printf("learner: %d rank(s), weights at %s\n", group.size(), learner->weights_address().c_str());
      std::fflush(stdout);  // a file gets it before the first step too
    }
    const int64_t before = learner->step();
    RETURN_IF_ERROR(train(*learner, job, root, signals.token(), log));
    return root && learner->finished() ? conclude(job, learner->step() - before) : absl::OkStatus();
  }();
  if (!status.ok() && !absl::IsCancelled(status) && world != nullptr) {
    std::fprintf(stderr, "slipstream learner: rank %d: %s\n", group.rank(), std::string(status.message()).c_str());
    world->abort(1);
  }
  return status;
}

Run add_role(CLI::App& app, absl::Status (*role)(const RoleFlags&), bool is_rollout) {
  auto flags = std::make_shared<RoleFlags>();
  auto job = std::shared_ptr<JobFlags>(flags, &flags->job);
  add_job_flags(app, job);
  app.add_option("--metrics-address", flags->metrics_address, "Where /metrics is served, host:port; overrides metrics.*");
  if (is_rollout) {
    app.add_option("--worker-id", flags->worker_id, "Of this worker; overrides rollout.worker_id");
    app.add_option("--address", flags->address, "Where it listens, host:port; overrides rollout.address");
  }
  return [flags, role] { return role(*flags); };
}

}  // namespace

Run add_gateway(CLI::App& app) { return add_role(app, run_gateway, false); }
Run add_rollout(CLI::App& app) { return add_role(app, run_rollout, true); }
Run add_learner(CLI::App& app) { return add_role(app, run_learner, false); }

}  // namespace slipstream::cli
