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
  // Makes the directories; of a metrics.jsonl that is there, lines after `restored_step` are cut: those steps
  // will be done again. rollouts_max: trajectories logged per step.
  static absl::StatusOr<std::unique_ptr<RunFiles>> open(const std::string& run_directory,
                                                        int64_t restored_step, int rollouts_max);

  // A line of metrics.jsonl, in the file when this returns.
  absl::Status append(const StepReport& report);
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
  std::ofstream metrics_;
};

}  // namespace slipstream::learner
