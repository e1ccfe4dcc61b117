#include "cli/training.h"

#include <algorithm>
#include <cstdio>

#include "cli/console.h"
#include "learner/tensorboard.h"
#include "model/tokenizer.h"

namespace slipstream::cli {

absl::Status train(learner::Learner& learner, const Job& job, bool is_root, std::stop_token stop, const Logger& log,
                   std::vector<double>* rewards) {
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
      .step = [&](const learner::StepReport& report) {
        console.step(report);
        if (rewards != nullptr && report.phase == learner::Phase::kRl && report.reward_mean.has_value()) {
          rewards->push_back(*report.reward_mean);
        }
      },
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

}  // namespace slipstream::cli
