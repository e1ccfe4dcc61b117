// What the learner leaves in the run's directory for people and programs to look at: metrics.jsonl, rollouts/
// and batches/.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <string>

#include "common/status.h"
#include "learner/step_report.h"
#include "learner/trainer.h"
#include "model/tokenizer.h"

namespace slipstream::learner {

// One thread.
class RunFiles {
 public:
  // Makes the directories and brings what is there to the step of the checkpoint, `restored`: lines of
  // metrics.jsonl, rollouts and batches of later steps are removed, those steps will be done again; and if
  // the process died between that step's checkpoint and its line, the line is written now. So every step
  // stands in metrics.jsonl exactly once, wherever earlier lives ended. rollouts_max: trajectories logged per
  // step.
  static absl::StatusOr<std::unique_ptr<RunFiles>> open(const std::string& run_directory,
                                                        const StepReport& restored, int rollouts_max);

  // The last line of metrics.jsonl when it was opened; step 0: there was none.
  const StepReport& restored() const { return restored_; }
  // A line of metrics.jsonl, in the file when this returns; on the disk after sync().
  absl::Status append(const StepReport& report);
  absl::Status sync() const;
  // rollouts/step_000012.jsonl: one object a trajectory, of the batch's first ones. tokenizer may be null: no
  // text then.
  absl::Status write_rollouts(int64_t step, int32_t policy_version, const TrainingBatch& batch,
                              const GradientResult& result, const model::Tokenizer* tokenizer);
  // batches/step_000012.pb: the serialised message, for tests/learning/learner_step and its like.
  absl::Status write_batch(int64_t step, const v1::Batch& batch);

 private:
  RunFiles(std::string directory, int rollouts_max)
      : directory_(std::move(directory)), rollouts_max_(rollouts_max) {}
  std::string directory_;
  int rollouts_max_;
  StepReport restored_;
  std::ofstream metrics_;
};

}  // namespace slipstream::learner
