// The learner's part of the config file: `model` and `learner`.
#pragma once

#include <string>

#include "common/config.h"
#include "learner/optimizer.h"
#include "learner/objectives.h"
#include "model/model_section.h"

namespace slipstream::learner {

enum class Normalizer { kTokens, kSequence, kConstant };
const char* name_of(Normalizer normalizer);  // as the file has it

struct LossConfig {
  std::string objective = "double_sided";
  ObjectiveOptions options;  // clip_low, clip_high, icepop_beta
  Normalizer normalizer = Normalizer::kTokens;
  double normalizer_constant = 1.0;  // what sums are divided by with `constant`
  double entropy_bonus = 0.0;        // loss -= bonus * mean entropy
};

// Supervised steps on the environments' own solutions, before the first rollout.
struct WarmupConfig {
  int steps = 0;   // most; 0: none
  int batch = 64;  // demonstrations a step
  double learning_rate = 1e-3;
  double until_probability = 1.0;  // stop once the moving mean of a demonstration's probability is this high
  int checkpoint_every = 100;      // steps
};

struct LearnerConfig {
  // model:
  model::ModelSection model;  // dtype: masters are fp32 all the same
  // learner:
  std::string address = "127.0.0.1:0";  // Weights service (rank 0)
  int threads = 0;                      // 0: one a core
  int64_t steps = 100;                  // RL steps of the whole run
  LossConfig loss;
  bool advantage_std = false;
  int64_t micro_batch_tokens = 4096;
  bool recompute = false;  // keep layer inputs only, run layers again in the backward
  AdamWConfig optimizer;
  int max_skipped_steps = 3;  // non-finite gradients in a row before the run stops
  WarmupConfig warmup;
  int64_t checkpoint_every = 0;  // RL steps; 0: as often as a tenth of the time is enough for
  bool repeat_exactly = true;    // a journal's steps: other results than recorded are an error, else a warning
  int keep_checkpoints = 2;
  int log_rollouts = 16;   // trajectories a step in rollouts/*.jsonl
  int record_batches = 0;  // first RL batches kept as they came, in batches/*.pb: to look into a step again
  int reply_timeout_ms = 2'000;      // then the gateway is asked again
  int gateway_timeout_ms = 600'000;  // without any answer to a Hello or Commit: the run stops
  int batch_timeout_ms = 3'600'000;  // without a full batch: the run stops
  // Not in the file: where the gateway hands out trajectories, JobConfig::learner_address with the port it
  // got.
  std::string gateway_address;

  static LearnerConfig from(ConfigNode root);  // errors are found by root.finish()
};

}  // namespace slipstream::learner
