// learner_bench --config configs/models/flash-nano.json ...: tokens a second of a training step on short samples, and what an
// update, a checkpoint and a publication cost, in fp32 and bf16; with --device cuda with the optimiser there and in host memory.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/measuring.h"
#include "common/testing/temporary_directory.h"
#include "learner/checkpoint.h"
#include "learner/publisher.h"
#include "learner/trainer.h"

namespace slipstream::learner {
namespace {

using bench::Clock;
using bench::seconds_since;

struct Flags {
  std::string config;
  std::string device = "cpu";
  int64_t micro_batch_tokens = 4096;
  int threads = 2;
  int repeats = 15;
};

constexpr int kSamples = 128, kPrompt = 18, kAction = 12;

double median(const std::vector<double>& values) { return bench::quantile(values, 0.5); }

v1::Batch make_batch(int64_t vocab) {
  v1::Batch batch;
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
    for (const int32_t id : bench::random_ids(kPrompt + kAction, vocab, static_cast<uint64_t>(i))) sample.add_ids(id);
    for (int t = 0; t < kAction; ++t) {
      sample.add_action_logprobs(-5.6f);
      sample.add_action_policy_versions(0);
    }
  }
  return batch;
}

// Seconds of each part of a step, by repeat.
struct Times {
  std::vector<double> step, update, checkpoint, publish;
};

absl::StatusOr<Times> measure(const Flags& flags, Trainer& trainer, const TrainingBatch& batch, const Checkpoints& checkpoints,
                              PolicyWeights& weights, kernels::Stream& host, kernels::Stream& compute) {
  Times out;
  Publisher publisher;
  LearnerState state;
  for (int i = 0; i < flags.repeats; ++i) {
    Clock::time_point begin = Clock::now();
    ASSIGN_OR_RETURN(const StepResult result, trainer.step(batch, "cispo", 1e-4));
    out.step.push_back(seconds_since(begin));
    begin = Clock::now();
    trainer.optimizer().update(weights.trained(), trainer.gradients(), weights.rounded(), result.grad_norm, 1e-6);
    weights.updated(compute);
    compute.synchronize();
    out.update.push_back(seconds_since(begin));
    state.step = i + 1;
    begin = Clock::now();
    weights.fetch(compute);
    RETURN_IF_ERROR(checkpoints.save(state, weights, trainer.optimizer()));
    out.checkpoint.push_back(seconds_since(begin));
    begin = Clock::now();
    RETURN_IF_ERROR(publisher.publish(i, weights.master(), host));
    out.publish.push_back(seconds_since(begin));
  }
  return out;
}

absl::Status run_one(const Flags& flags, const v1::Batch& message, const std::string& dir, kernels::DType dtype, MasterPlace place,
                     kernels::Stream& host, kernels::Stream& compute) {
  const std::string model = dir + "/model";
  ASSIGN_OR_RETURN(PolicyWeights weights, PolicyWeights::load(model, dtype, host, compute, place));
  TrainerOptions options;
  options.loss.objective = "cispo";  // every token has a gradient, whatever its ratio
  options.micro_batch_tokens = flags.micro_batch_tokens;
  ASSIGN_OR_RETURN(const auto trainer, Trainer::create(weights, options, parallel::self_group(), host, compute));
  const TrainingBatch batch = make_training_batch(message,
                                                  {.vocab = weights.config().vocab,
                                                   .max_positions = weights.config().max_positions,
                                                   .kind = v1::TRAJECTORY_KIND_ROLLOUT,
                                                   .advantages = {},
                                                   .trained = nullptr},
                                                  quiet_logger());
  const Checkpoints checkpoints(absl::StrCat(dir, "/", kernels::name_of(dtype), place == MasterPlace::kHost ? "" : "_device"), 2, model, quiet_logger());
  ASSIGN_OR_RETURN(const Times times, measure(flags, *trainer, batch, checkpoints, weights, host, compute));
  int64_t parameters = 0;
  for (const auto& entry : weights.master().store.entries()) parameters += entry.tensor.numel();
  const double tokens = static_cast<double>(batch.num_tokens());
  std::printf("%s %s: %.2f M parameters, %.0f tokens a step, %d threads%s: step %.1f ms, %.0f tokens/s (best %.0f); "
              "AdamW %.1f ms; checkpoint %.1f ms; publish %.1f ms\n",
              std::filesystem::path(flags.config).filename().c_str(), kernels::name_of(dtype),
              static_cast<double>(parameters) / 1e6, tokens, flags.threads,
              !compute.on_cuda() ? "" : place == MasterPlace::kHost ? ", optimiser in host memory" : ", optimiser on the GPU", median(times.step) * 1e3,
              tokens / median(times.step), tokens / *std::min_element(times.step.begin(), times.step.end()),
              median(times.update) * 1e3, median(times.checkpoint) * 1e3, median(times.publish) * 1e3);
  return absl::OkStatus();
}

absl::Status run(const Flags& flags) {
  ASSIGN_OR_RETURN(const auto stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::read_model_config(flags.config));
  const slipstream::testing::TemporaryDirectory dir;
  const std::string model = dir.path() + "/model";
  ASSIGN_OR_RETURN(const model::LoadedWeights fresh, model::random_weights(config, kernels::DType::kF32, 1, *stream));
  RETURN_IF_ERROR(model::save_weights(fresh, model, {}));
  const v1::Batch message = make_batch(config.vocab);
  ASSIGN_OR_RETURN(const kernels::Device device, kernels::parse_device(flags.device));
  std::unique_ptr<kernels::Stream> device_stream;
  if (device != kernels::Device{}) {
    ASSIGN_OR_RETURN(device_stream, kernels::Stream::create(device, 0));
  }
  kernels::Stream& compute = device_stream != nullptr ? *device_stream : *stream;
  std::vector<MasterPlace> places = {MasterPlace::kHost};
  if (compute.on_cuda()) places.push_back(MasterPlace::kDevice);
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBf16}) {
    for (const MasterPlace place : places) {
      RETURN_IF_ERROR(run_one(flags, message, dir.path(), dtype, place, *stream, compute));
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace slipstream::learner

int main(int argc, char** argv) {
  slipstream::learner::Flags flags;
  CLI::App app("What a training step costs.");
  app.add_option("--config", flags.config, "config.json of a model")->required();
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N");
  app.add_option("--micro-batch-tokens", flags.micro_batch_tokens)->check(CLI::PositiveNumber);
  app.add_option("--threads", flags.threads)->check(CLI::Range(1, 256));
  app.add_option("--repeats", flags.repeats)->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slipstream::learner::run(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "learner_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
