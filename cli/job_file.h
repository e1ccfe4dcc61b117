// The config file of a job, read for all roles at once: a mistake in any section is found by whichever role starts first.
#pragma once

#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/log.h"
#include "common/metrics.h"
#include "gateway/config.h"
#include "learner/config.h"
#include "rollout/worker.h"

namespace slipstream::cli {

struct JobFlags {
  std::string config;
  std::vector<std::string> sets;  // "section.key=value"
};
void add_job_flags(CLI::App& app, const std::shared_ptr<JobFlags>& flags);

struct Job {
  JobConfig shared;
  gateway::GatewayConfig gateway;
  rollout::Worker::Config rollout;
  learner::LearnerConfig learner;
  // model.init: what model.path is created from when there is no model.
  std::string init_config;
  uint64_t init_seed = 0;
  // metrics: where each role serves /metrics.
  std::string metrics_address = "127.0.0.1:0";           // slipstream run
  std::string gateway_metrics_address = "127.0.0.1:9400";
  std::string learner_metrics_address = "127.0.0.1:9401";
  std::string rollout_metrics_address = "127.0.0.1:0";   // several on one machine
  std::string resolved;  // the file with all defaults
};

absl::StatusOr<Job> read_job(const JobFlags& flags);

// Roles in processes of their own must know each other's addresses: ports the file leaves open get the fixed numbers 7400
// (gateway), 7401 (trajectories), 7402 (weights), and addresses of other roles follow from these.
void fix_addresses(Job& job);

// That this process can compute where the job wants it to, else the field and why not. To be asked before anything is made.
absl::Status expect_rollout_device(const Job& job);
absl::Status expect_learner_device(const Job& job);

// Makes the run's directories and, when it is not there yet, the model.
absl::Status prepare_run(const Job& job);
// As <run directory>/config.yaml; says on stderr what is not as it was when the run was last started.
absl::Status write_resolved_config(const Job& job);
// "rl.max_staleness: 1 -> 2", one line a value, of two YAML texts; nothing when one of them cannot be read.
std::vector<std::string> config_changes(const std::string& before, const std::string& after);

// Logger and /metrics of a role.
absl::StatusOr<Logger> open_log(const Job& job, const std::string& role);
absl::Status serve_metrics(Metrics& metrics, const std::string& address, const Logger& log);

}  // namespace slipstream::cli
