// From the gateway's batch message to what the trainer works on: checked samples with advantages and weights.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/log.h"
#include "common/status.h"
#include "learner/advantages.h"
#include "slipstream/v1/trajectory.pb.h"

namespace slipstream::learner {

// One token sequence. Columns have one entry per action token, in order.
struct TrainingSample {
  int64_t trajectory = 0;  // index into TrainingBatch::trajectories
  std::vector<int32_t> ids;
  float temperature = 1.0f;             // of its log-probs
  std::vector<int32_t> positions;       // of the token in ids; >= 1
  std::vector<float> rollout_logprob;   // empty in demonstrations
  std::vector<int32_t> policy_version;  // as above
  std::vector<int32_t> context_version;
  std::vector<uint8_t> selected;  // 1: in the loss

  int64_t num_selected() const;
};

struct TrainingTrajectory {
  const v1::Trajectory* message = nullptr;  // lives in the batch message
  int weight = 1;                           // rows of the padded group it stands for
  float advantage = 0.0f;
  int64_t num_selected = 0;  // tokens in the loss, over its samples
  std::vector<int64_t> samples;
};

struct TrainingBatch {
  std::vector<TrainingTrajectory> trajectories;  // in the message's order
  std::vector<TrainingSample> samples;
  std::map<std::string, std::vector<std::string>>
      refused;           // rollout ids by reason: not trained, to be reported as dropped
  int64_t repeated = 0;  // trajectories trained before and left out

  int64_t num_tokens() const;
  std::vector<std::string> rollout_ids() const;
};

struct TrainingBatchOptions {
  int64_t vocab = 0;
  int64_t max_positions = 0;
  v1::TrajectoryKind kind = v1::TRAJECTORY_KIND_ROLLOUT;
  AdvantageOptions advantages;
  const std::set<std::string>* trained = nullptr;  // ids consumed before; may be null
};

// Trajectories that make no sense (columns that do not add up, ids outside the vocabulary, a sequence too
// long, a reward that is not finite) are refused with the reason "malformed" and a line in the log; the rest
// goes on without them. `message` must outlive the result.
TrainingBatch make_training_batch(const v1::Batch& message, const TrainingBatchOptions& options,
                                  const Logger& log);

}  // namespace slipstream::learner
