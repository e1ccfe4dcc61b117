// Trainer: one optimiser step on one global batch, shared between data-parallel ranks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/status.h"
#include "kernels/arena.h"
#include "learner/config.h"
#include "learner/packing.h"
#include "learner/policy_weights.h"
#include "learner/training_batch.h"
#include "model/model.h"
#include "parallel/group.h"

namespace slipstream::learner {

struct TrainerOptions {
  LossConfig loss;
  AdamWConfig optimizer;
  int64_t micro_batch_tokens = 4096;
  bool recompute = false;
};

// Of the whole batch, on every rank: each rank adds its samples' log-probs and all compute the rest from
// them, so a figure does not depend on how samples were split.
struct GradientResult {
  std::vector<std::vector<float>> learner_logprob;  // [sample][action token]
  std::vector<std::vector<float>> entropy;          // as above, nats
  std::vector<std::vector<TokenLoss>> tokens;       // as above, without weights and normaliser
  double loss = 0.0;                                // policy (or supervised) loss, without the entropy term
  double entropy_loss = 0.0;
  double entropy_mean = 0.0;   // over tokens in the loss
  int64_t trained_tokens = 0;  // that went through forward and backward: prompts included, repeated rows once
  double expert_load_imbalance =
      0.0;  // largest over mean tokens an expert got, worst MoE layer; 0: no such layer
};

struct StepResult {
  GradientResult gradient;
  double grad_norm = 0.0;
  double learning_rate = 0.0;
  bool updated = false;   // the weights changed
  bool skipped = false;   // they did not because something was not finite
  std::string offending;  // why: the parameter whose gradient is not finite, or what else is not
};

// One thread. All ranks call the same members with the same batch.
class Trainer {
 public:
  // The model runs on `compute`, the sum over ranks on `host`, a stream on the CPU (they may be one); moments and the
  // update are where the weights' masters are. The arguments outlive the trainer. Errors as the model's and the
  // objective's creation have them.
  static absl::StatusOr<std::unique_ptr<Trainer>> create(PolicyWeights& weights,
                                                         const TrainerOptions& options,
                                                         parallel::Group& group, kernels::Stream& host,
                                                         kernels::Stream& compute);

  // Forward and backward over the batch; gradients() then holds the sum over all ranks. objective: a name
  // other than the configured one (warm-up: "sft"). A batch without a selected token gives loss 0 and
  // gradient 0.
  absl::StatusOr<GradientResult> compute_gradient(const TrainingBatch& batch, const std::string& objective);
  // The same, then clipping and the update, unless a gradient is not finite.
  absl::StatusOr<StepResult> step(const TrainingBatch& batch, const std::string& objective,
                                  double learning_rate);

  // Where the masters are.
  model::WeightStore& gradients() { return optimizer_.stream().on_cuda() ? *device_gradients_ : gradients_; }
  AdamW& optimizer() { return optimizer_; }

 private:
  Trainer(PolicyWeights& weights, const TrainerOptions& options, parallel::Group& group,
          kernels::Stream& host, kernels::Stream& compute, std::unique_ptr<model::Model> network,
          model::WeightStore gradients, AdamW optimizer, kernels::Arena arena);
  // What passes add to: the host's gradients, or the device's.
  model::WeightStore& pass_gradients() { return device_gradients_ ? *device_gradients_ : gradients_; }
  std::vector<double> token_scales(const TrainingBatch& batch) const;
  absl::Status run_micro_batch(const TrainingBatch& batch, const MicroBatch& micro, Objective objective,
                               const std::vector<double>& scales, GradientResult& out);
  void score_sample(const TrainingBatch& batch, int64_t sample, Objective objective,
                    GradientResult& out) const;
  void count_experts(const model::SavedForward& saved);
  void gather_gradients();
  void share_gradients();
  void share_columns(std::vector<std::vector<float>>& columns);
  void summarize(const TrainingBatch& batch, Objective objective, const std::vector<double>& scales,
                 GradientResult& out);

  PolicyWeights& weights_;
  TrainerOptions options_;
  parallel::Group& group_;
  kernels::Stream& host_;
  kernels::Stream& compute_;
  std::unique_ptr<model::Model> network_;
  model::WeightStore gradients_;                        // in host memory; on a GPU used as far as the sum or the update needs them there
  std::optional<model::WeightStore> device_gradients_;  // what passes add to on a GPU
  AdamW optimizer_;
  kernels::Arena arena_;
  std::vector<float> expert_counts_;  // [MoE layers, experts]
};

}  // namespace slipstream::learner
