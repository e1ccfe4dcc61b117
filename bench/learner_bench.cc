// learner_bench MODEL_CONFIG [micro_batch_tokens [threads]]: tokens a second of a training step on short
// samples, and what a checkpoint and a publication cost. Whole-system numbers: docs/performance.md.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "learner/checkpoint.h"
#include "learner/publisher.h"
#include "learner/trainer.h"

namespace slipstream::learner {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSamples = 128, kPrompt = 18, kAction = 12, kRepeats = 15;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

v1::Batch make_batch(int64_t vocab) {
  v1::Batch batch;
  uint64_t state = 1;
  for (int i = 0; i < kSamples; ++i) {
    if (i % 8 == 0) batch.add_groups()->set_group_id(std::to_string(i));
    v1::Trajectory& trajectory = *batch.mutable_groups()->rbegin()->add_trajectories();
    trajectory.set_rollout_id(std::to_string(i));
    trajectory.set_group_id(batch.groups().rbegin()->group_id());
    trajectory.set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
    trajectory.set_reward(i % 3);
    v1::Sample& sample = *trajectory.add_samples();
    for (const auto& [kind, length] :
         {std::pair(v1::SPAN_KIND_PROMPT, kPrompt), std::pair(v1::SPAN_KIND_ACTION, kAction)}) {
      v1::Span& span = *sample.add_spans();
      span.set_kind(kind);
      span.set_length(length);
    }
    for (int t = 0; t < kPrompt + kAction; ++t) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      sample.add_ids(static_cast<int32_t>((state >> 33) % static_cast<uint64_t>(vocab)));
    }
    for (int t = 0; t < kAction; ++t) {
      sample.add_action_logprobs(-5.6f);
      sample.add_action_policy_versions(0);
    }
  }
  return batch;
}

absl::Status run(const std::string& config_path, int64_t micro_batch_tokens, int threads) {
  ASSIGN_OR_RETURN(const auto stream, kernels::Stream::create_cpu(threads));
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::read_model_config(config_path));
  const std::string dir = (std::filesystem::temp_directory_path() / "slipstream_learner_bench").string();
  ASSIGN_OR_RETURN(const model::LoadedWeights fresh,
                   model::random_weights(config, kernels::DType::kF32, 1, *stream));
  RETURN_IF_ERROR(model::save_weights(fresh, dir + "/model", {}));
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBf16}) {
    ASSIGN_OR_RETURN(PolicyWeights weights, PolicyWeights::load(dir + "/model", dtype, *stream));
    TrainerOptions options;
    options.loss.objective = "cispo";  // every token has a gradient, whatever its ratio
    options.micro_batch_tokens = micro_batch_tokens;
    ASSIGN_OR_RETURN(const auto trainer, Trainer::create(weights, options, parallel::self_group(), *stream));
    const v1::Batch message = make_batch(config.vocab);
    const TrainingBatch batch = make_training_batch(message,
                                                    {.vocab = config.vocab,
                                                     .max_positions = config.max_positions,
                                                     .kind = v1::TRAJECTORY_KIND_ROLLOUT,
                                                     .advantages = {},
                                                     .trained = nullptr},
                                                    quiet_logger());
    std::vector<double> steps, updates, saves, publishes;
    const Checkpoints checkpoints(dir + "/checkpoints", 2, dir + "/model", quiet_logger());
    Publisher publisher;
    LearnerState state;
    for (int i = 0; i < kRepeats; ++i) {
      Clock::time_point begin = Clock::now();
      ASSIGN_OR_RETURN(const StepResult result, trainer->step(batch, options.loss.objective, 1e-4));
      steps.push_back(seconds_since(begin));
      begin = Clock::now();
      trainer->optimizer().update(weights.master().store, trainer->gradients(), result.grad_norm, 1e-6,
                                  *stream);
      updates.push_back(seconds_since(begin));
      state.step = i + 1;
      begin = Clock::now();
      RETURN_IF_ERROR(checkpoints.save(state, weights, trainer->optimizer()));
      saves.push_back(seconds_since(begin));
      begin = Clock::now();
      RETURN_IF_ERROR(publisher.publish(i, weights.master(), *stream));
      publishes.push_back(seconds_since(begin));
    }
    int64_t parameters = 0;
    for (const auto& entry : weights.master().store.entries()) parameters += entry.tensor.numel();
    const double tokens = static_cast<double>(batch.num_tokens());
    std::printf(
        "%s %s: %.2f M parameters, %.0f tokens a step, %d threads: step %.1f ms, %.0f tokens/s (best %.0f); "
        "AdamW %.1f ms; "
        "checkpoint %.1f ms; publish %.1f ms\n",
        std::filesystem::path(config_path).filename().c_str(), kernels::name_of(dtype),
        static_cast<double>(parameters) / 1e6, tokens, threads, median(steps) * 1e3, tokens / median(steps),
        tokens / *std::min_element(steps.begin(), steps.end()), median(updates) * 1e3, median(saves) * 1e3,
        median(publishes) * 1e3);
  }
  std::filesystem::remove_all(dir);
  return absl::OkStatus();
}

}  // namespace
}  // namespace slipstream::learner

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: learner_bench MODEL_CONFIG [micro_batch_tokens [threads]]\n");
    return 2;
  }
  const absl::Status status = slipstream::learner::run(argv[1], argc > 2 ? std::atoll(argv[2]) : 4096,
                                                       argc > 3 ? std::atoi(argv[3]) : 2);
  if (status.ok()) return 0;
  std::fprintf(stderr, "learner_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
