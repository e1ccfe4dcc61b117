// slipstream run: gateway, one rollout worker and the learner in one process, joined by the same sockets as apart.
#include <cstdio>

#include "cli/commands.h"
#include "cli/console.h"
#include "cli/environments.h"
#include "cli/job_file.h"
#include "cli/report.h"
#include "cli/signals.h"
#include "common/status.h"
#include "gateway/gateway.h"
#include "learner/learner.h"
#include "learner/tensorboard.h"

namespace slipstream::cli {
namespace {

// The mean of the rewards of the first and last steps of RL: what a user wants to know first.
class RewardSummary {
 public:
  void step(const learner::StepReport& report) {
    if (report.phase != learner::Phase::kRl || !report.reward_mean.has_value()) return;
    rewards_.push_back(*report.reward_mean);
  }
  bool empty() const { return rewards_.empty(); }
  double first() const { return mean(rewards_.begin(), rewards_.begin() + count()); }
  double last() const { return mean(rewards_.end() - count(), rewards_.end()); }

 private:
  using Iterator = std::vector<double>::const_iterator;
  std::ptrdiff_t count() const { return std::min<std::ptrdiff_t>(10, std::ssize(rewards_)); }
  static double mean(Iterator begin, Iterator end) {
    double sum = 0.0;
    for (Iterator i = begin; i != end; ++i) sum += *i;
    return sum / static_cast<double>(end - begin);
  }
  std::vector<double> rewards_;
};

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
  ASSIGN_OR_RETURN(const Environments environments, start_environments(job, gateway_log));
  ASSIGN_OR_RETURN(const std::unique_ptr<gateway::Gateway> gateway,
                   gateway::Gateway::start(job.gateway, metrics, gateway_log));
  job.learner.gateway_address = gateway->learner_endpoint();
  ASSIGN_OR_RETURN(const std::unique_ptr<learner::Learner> learner,
                   learner::Learner::create(job.learner, job.shared, parallel::self_group(), metrics, learner_log));
  job.rollout.gateway_address = gateway->address();
  job.rollout.learner_address = learner->weights_address();
  ASSIGN_OR_RETURN(const std::unique_ptr<rollout::Worker> worker, rollout::Worker::start(job.rollout, metrics, rollout_log));

  ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer, model::open_tokenizer(job.gateway.tokenizer));
  const std::string directory = job.shared.run_directory();
  ASSIGN_OR_RETURN(const std::unique_ptr<learner::TensorBoardWriter> board,
                   learner::TensorBoardWriter::open(directory + "/tensorboard"));
  Console console(stdout);
  RewardSummary rewards;
  std::printf("run %s: model %s, everything below %s/\n", job.shared.run_id.c_str(), job.learner.model_path.c_str(),
              directory.c_str());
  const learner::Observers observers{
      .step = [&](const learner::StepReport& report) {
        console.step(report);
        rewards.step(report);
      },
      .scalars = [&](int64_t step, const std::vector<std::pair<std::string, double>>& values) {
        for (const auto& [name, value] : values) board->scalar(name, step, value);
        board->flush();
      },
      .tokenizer = tokenizer.get()};
  const absl::Status status = learner->run(signals.token(), observers);
  console.finish();
  worker->drain(absl::Now() + absl::Milliseconds(500));
  gateway->stop();
  if (absl::IsCancelled(status)) {
    std::printf("stopped at step %lld; the same command goes on from there\n", static_cast<long long>(learner->step()));
    return absl::OkStatus();
  }
  RETURN_IF_ERROR(status);
  const std::string page = directory + "/report.html";
  RETURN_IF_ERROR(write_report(directory, page));
  if (rewards.empty()) {
    std::printf("nothing left to do: the run had ended before. Another run: --set run.id=NAME\n");
  } else {
    std::printf("mean reward %.3f -> %.3f (first and last ten steps of RL)\n", rewards.first(), rewards.last());
  }
  std::printf("report: %s\n", page.c_str());
  return absl::OkStatus();
}

}  // namespace

Run add_run(CLI::App& app) {
  auto flags = std::make_shared<JobFlags>();
  add_job_flags(app, flags);
  return [flags] { return run(*flags); };
}

}  // namespace slipstream::cli
