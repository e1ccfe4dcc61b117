#include "cli/training.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>

#include "cli/console.h"
#include "cli/report.h"
#include "learner/tensorboard.h"
#include "model/tokenizer.h"

namespace slipstream::cli {

namespace {

bool has_steps(const Job& job) {
  std::error_code none;
  const auto bytes = std::filesystem::file_size(job.shared.run_directory() + "/metrics.jsonl", none);
  return !none && bytes > 0;
}

}  // namespace

absl::Status train(learner::Learner& learner, const Job& job, bool is_root, std::stop_token stop, const Logger& log) {
  if (!is_root) {
    const absl::Status status = learner.run(stop, {});
    return absl::IsCancelled(status) ? absl::OkStatus() : status;
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer, model::open_tokenizer(job.shared.tokenizer));
  ASSIGN_OR_RETURN(learner::TensorBoardWriter board,
                   learner::TensorBoardWriter::open(job.shared.run_directory() + "/tensorboard", std::max<int64_t>(1, learner.step())));
  Console console(stdout);
  bool board_failed = false;
  const learner::Observers observers{
      .accepted = [&] {
        if (learner.step() > 0) {
          std::printf("goes on after step %lld\n", static_cast<long long>(learner.step()));
        } else if (has_steps(job)) {
          std::printf("no checkpoint was written yet: starts over\n");
        }
        return write_resolved_config(job);
      },
      .step = [&](const learner::StepReport& report) { console.step(report); },
      .scalars = [&](int64_t step, const std::vector<std::pair<std::string, double>>& values) {
        for (const auto& [name, value] : values) board.scalar(name, step, value);
        const absl::Status written = board.flush();  // a picture that can't be drawn is no reason to stop training
        if (!written.ok() && !board_failed) log->warn("{}", std::string(written.message()));
        board_failed = !written.ok();
      },
      .tokenizer = tokenizer.get()};
  const absl::Status status = learner.run(stop, observers);
  console.finish();
  if (!absl::IsCancelled(status)) return status;
  return absl::CancelledError(absl::StrCat("interrupted at step ", learner.step(), "; the same command goes on from there"));
}

absl::Status conclude(const Job& job, int64_t steps) {
  const std::string page = job.shared.run_directory() + "/report.html";
  ASSIGN_OR_RETURN(const ReportSummary report, write_report(job.shared.run_directory(), page));
  if (steps == 0) {
    std::printf("nothing was left to do: the run had ended before. For another one: --set run.id=NAME\n");
  } else if (std::isfinite(report.reward.before)) {
    std::printf("mean reward %.3f -> %.3f (first and last %d steps of RL)\n", report.reward.before, report.reward.now,
                kRewardSteps);
  }
  std::printf("report: %s\n", page.c_str());
  return absl::OkStatus();
}

}  // namespace slipstream::cli
