#include "tests/learning/batches.h"

#include <cmath>

#include "common/hash.h"

namespace slipstream::learner::testing {
namespace {

v1::Trajectory make_trajectory(const BatchShape& shape, int64_t vocab, uint64_t number, int index) {
  const uint64_t key = splitmix64(number * 1000 + static_cast<uint64_t>(index));
  v1::Trajectory out;
  out.set_rollout_id(absl::StrCat("run-g", number, "-", index));
  out.set_group_id(absl::StrCat("run-g", number));
  out.set_group_index(index);
  out.set_kind(v1::TRAJECTORY_KIND_ROLLOUT);
  out.set_environment("fake");
  out.set_task(number % 2 == 0 ? "even" : "odd");
  out.set_instance(number);
  out.set_reward(index == 0 ? 1.0 : static_cast<double>(key % 4) * 0.25 - (index == 1 ? 1.0 : 0.0));
  out.set_finish_reason(v1::FINISH_REASON_STOP);
  out.mutable_sampling()->set_temperature(shape.temperature);
  out.set_num_turns(1);
  out.set_min_policy_version(shape.policy_version);
  v1::Sample& sample = *out.add_samples();
  const int actions =
      shape.action_tokens - static_cast<int>(key % static_cast<uint64_t>(shape.action_tokens / 2 + 1));
  v1::Span* span = sample.add_spans();
  span->set_kind(v1::SPAN_KIND_PROMPT);
  span->set_length(shape.prompt_tokens);
  span = sample.add_spans();
  span->set_kind(v1::SPAN_KIND_ACTION);
  span->set_length(actions);
  for (int i = 0; i < shape.prompt_tokens + actions; ++i) {
    const uint64_t of = i < shape.prompt_tokens ? splitmix64(number) : key;  // members of a group share the prompt
    sample.add_ids(
        static_cast<int32_t>(splitmix64(of + static_cast<uint64_t>(i) * 77) % static_cast<uint64_t>(vocab)));
  }
  for (int i = 0; i < actions; ++i) {
    sample.add_action_logprobs(-2.0f);
    sample.add_action_policy_versions(shape.policy_version);
    sample.add_action_context_versions(shape.policy_version);
  }
  return out;
}

}  // namespace

void write_model(const std::string& family, const std::string& dir, uint64_t seed) {
  const model::testing::TestModel made = model::testing::make_test_model(family, kernels::DType::kF32, seed);
  CHECK_OK(model::save_weights(made.loaded, dir, {}));
}

v1::Group make_group(const BatchShape& shape, int64_t vocab, uint64_t number) {
  v1::Group group;
  group.set_group_id(absl::StrCat("run-g", number));
  group.set_group_number(number);
  for (int i = 0; i < shape.group_size; ++i) {
    *group.add_trajectories() = make_trajectory(shape, vocab, number, i);
    group.add_rows(i);
  }
  return group;
}

v1::Batch make_batch(const BatchShape& shape, int64_t vocab, uint64_t first_group) {
  v1::Batch batch;
  for (int g = 0; g < shape.groups; ++g)
    *batch.add_groups() = make_group(shape, vocab, first_group + static_cast<uint64_t>(g));
  return batch;
}

v1::Group make_demonstration(const BatchShape& shape, int64_t vocab, uint64_t number) {
  v1::Group group;
  group.set_group_id(absl::StrCat("demo-", number));
  v1::Trajectory trajectory =
      make_trajectory(shape, vocab, number % 8, 0);  // few, so that they can be learned
  trajectory.set_rollout_id(absl::StrCat("demo-", number));
  trajectory.set_group_id(group.group_id());
  trajectory.set_kind(v1::TRAJECTORY_KIND_DEMONSTRATION);
  for (v1::Sample& sample : *trajectory.mutable_samples()) {
    sample.clear_action_logprobs();
    sample.clear_action_policy_versions();
    sample.clear_action_context_versions();
  }
  *group.add_trajectories() = std::move(trajectory);
  group.add_rows(0);
  return group;
}

void set_rollout_logprobs(Trainer& trainer, const model::ModelConfig& config, double noise,
                          v1::Batch* batch) {
  const TrainingBatch scored = training_batch(*batch, config);
  const absl::StatusOr<GradientResult> result = trainer.compute_gradient(scored, "sft");
  CHECK_OK(result.status());
  size_t s = 0;
  for (v1::Group& group : *batch->mutable_groups()) {
    for (v1::Trajectory& trajectory : *group.mutable_trajectories()) {
      for (v1::Sample& sample : *trajectory.mutable_samples()) {
        for (int i = 0; i < sample.action_logprobs_size(); ++i) {
          const double wave = std::sin(static_cast<double>(s) * 1.3 + static_cast<double>(i) * 2.1);
          sample.set_action_logprobs(
              i, static_cast<float>(result->learner_logprob[s][static_cast<size_t>(i)] + noise * wave));
        }
        ++s;
      }
    }
  }
}

TrainingBatch training_batch(const v1::Batch& message, const model::ModelConfig& config,
                             v1::TrajectoryKind kind) {
  return make_training_batch(message,
                             {.vocab = config.vocab,
                              .max_positions = config.max_positions,
                              .kind = kind,
                              .advantages = {},
                              .trained = nullptr},
                             quiet_logger());
}

Bench::Bench(const std::string& dir, const TrainerOptions& options, kernels::DType dtype, int threads,
             parallel::Group& group)
    : stream(*kernels::Stream::create_cpu(threads)) {
  load(dir, options, dtype, group, *stream, MasterPlace::kHost);
}

Bench::Bench(const std::string& dir, const TrainerOptions& options, kernels::DType dtype, MasterPlace place)
    : stream(*kernels::Stream::create_cpu(2)), device(*kernels::Stream::create_cuda(0)) {
  load(dir, options, dtype, parallel::self_group(), *device, place);
}

void Bench::load(const std::string& dir, const TrainerOptions& options, kernels::DType dtype, parallel::Group& group,
                 kernels::Stream& compute, MasterPlace place) {
  absl::StatusOr<PolicyWeights> loaded = PolicyWeights::load(dir, dtype, *stream, compute, place);
  CHECK_OK(loaded.status());
  weights = std::make_unique<PolicyWeights>(*std::move(loaded));
  absl::StatusOr<std::unique_ptr<Trainer>> made = Trainer::create(*weights, options, group, *stream, compute);
  CHECK_OK(made.status());
  trainer = *std::move(made);
}

std::string master_bytes(const PolicyWeights& weights) {
  std::string out;
  for (const auto& entry : weights.master().store.entries()) {
    out.append(static_cast<const char*>(entry.tensor.raw()), static_cast<size_t>(entry.tensor.bytes()));
  }
  return out;
}

std::vector<float> flat(const model::WeightStore& store) {
  std::vector<float> out;
  for (const auto& entry : store.entries()) {
    if (!entry.tensor.empty())
      out.insert(out.end(), entry.tensor.f32(), entry.tensor.f32() + entry.tensor.numel());
  }
  return out;
}

}  // namespace slipstream::learner::testing
