// Batches for tests of learning: a small model, trajectories over its vocabulary, log-probs near its own.
#pragma once

#include <memory>
#include <string>

#include "common/testing/temporary_directory.h"
#include "learner/trainer.h"
#include "tests/property/test_models.h"

namespace slipstream::learner::testing {

using slipstream::testing::TemporaryDirectory;

// Writes a small model of the family to dir.
void write_model(const std::string& family, const std::string& dir, uint64_t seed = 1);

struct BatchShape {
  int groups = 4;
  int group_size = 4;
  int prompt_tokens = 6;
  int action_tokens = 8;  // varied by up to half
  int policy_version = 0;
  float temperature = 1.0f;
};

// Group `number` of an endless, fixed sequence of them: rewards differ inside each group; rollout log-probs
// are a guess (-2).
v1::Group make_group(const BatchShape& shape, int64_t vocab, uint64_t number);
v1::Batch make_batch(const BatchShape& shape, int64_t vocab, uint64_t first_group = 0);
// The same as demonstrations: groups of one, no log-probs.
v1::Group make_demonstration(const BatchShape& shape, int64_t vocab, uint64_t number);

// Replaces rollout log-probs by the policy's own plus `noise` times something fixed between -1 and 1.
void set_rollout_logprobs(Trainer& trainer, const model::ModelConfig& config, double noise, v1::Batch* batch);

TrainingBatch training_batch(const v1::Batch& message, const model::ModelConfig& config,
                             v1::TrajectoryKind kind = v1::TRAJECTORY_KIND_ROLLOUT);

// A policy loaded from `dir` with its trainer and stream.
struct Bench {
  std::unique_ptr<kernels::Stream> stream;
  std::unique_ptr<kernels::Stream> device;  // where the model runs, if not on the CPU
  std::unique_ptr<PolicyWeights> weights;
  std::unique_ptr<Trainer> trainer;

  Bench(const std::string& dir, const TrainerOptions& options = {},
        kernels::DType dtype = kernels::DType::kF32, int threads = 1,
        parallel::Group& group = parallel::self_group());
  // The same on the first GPU.
  Bench(const std::string& dir, const TrainerOptions& options, kernels::DType dtype, MasterPlace place);
  const model::ModelConfig& config() const { return weights->config(); }

 private:
  void load(const std::string& dir, const TrainerOptions& options, kernels::DType dtype, parallel::Group& group,
            kernels::Stream& compute, MasterPlace place);
};

// Bytes of all masters, for comparing bit by bit.
std::string master_bytes(const PolicyWeights& weights);
std::vector<float> flat(const model::WeightStore& store);

}  // namespace slipstream::learner::testing
