#include "learner/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace slipstream::learner {
namespace {

using kernels::Tensor;

// Address space only; memory is what micro_batch_tokens makes of it.
constexpr int64_t kArenaBytes = int64_t{1} << 38;
constexpr int64_t kBucket = 1 << 22;  // gradient elements summed at a time

// Rows of `from` [T, H] into to [R, H].
void gather_rows(const Tensor& from, const std::vector<int64_t>& rows, const Tensor& to,
                 kernels::Stream& stream) {
  const size_t bytes = static_cast<size_t>(from.size(1)) * sizeof(float);
  stream.parallel_for(static_cast<int64_t>(rows.size()), 64,
                      [&](int64_t begin, int64_t end, kernels::Worker&) {
                        for (int64_t i = begin; i < end; ++i)
                          std::memcpy(to.row(i), from.row(rows[static_cast<size_t>(i)]), bytes);
                      });
}

// The reverse; no row is named twice.
void scatter_rows(const Tensor& from, const std::vector<int64_t>& rows, const Tensor& to,
                  kernels::Stream& stream) {
  const size_t bytes = static_cast<size_t>(from.size(1)) * sizeof(float);
  stream.parallel_for(static_cast<int64_t>(rows.size()), 64,
                      [&](int64_t begin, int64_t end, kernels::Worker&) {
                        for (int64_t i = begin; i < end; ++i)
                          std::memcpy(to.row(rows[static_cast<size_t>(i)]), from.row(i), bytes);
                      });
}

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(PolicyWeights& weights,
                                                         const TrainerOptions& options,
                                                         parallel::Group& group, kernels::Stream& stream) {
  RETURN_IF_ERROR(find_objective(options.loss.objective).status());
  const model::ModelConfig& config = weights.config();
  const bool with_mtp = weights.master().store.with_mtp();
  ASSIGN_OR_RETURN(std::unique_ptr<model::Model> network, model::Model::create(config));
  ASSIGN_OR_RETURN(model::WeightStore gradients, model::WeightStore::create_gradients(config, with_mtp));
  ASSIGN_OR_RETURN(AdamW optimizer, AdamW::create(config, with_mtp, options.optimizer));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(kArenaBytes));
  return std::unique_ptr<Trainer>(new Trainer(weights, options, group, stream, std::move(network),
                                              std::move(gradients), std::move(optimizer), std::move(arena)));
}

Trainer::Trainer(PolicyWeights& weights, const TrainerOptions& options, parallel::Group& group,
                 kernels::Stream& stream, std::unique_ptr<model::Model> network, model::WeightStore gradients,
                 AdamW optimizer, kernels::Arena arena)
    : weights_(weights),
      options_(options),
      group_(group),
      stream_(stream),
      network_(std::move(network)),
      gradients_(std::move(gradients)),
      optimizer_(std::move(optimizer)),
      arena_(std::move(arena)) {}

// What a selected token of each sample counts for: its trajectory's rows over the normaliser, which is
// counted over the whole batch on every rank.
std::vector<double> Trainer::token_scales(const TrainingBatch& batch) const {
  double tokens = 0.0, trajectories = 0.0;
  for (const TrainingTrajectory& trajectory : batch.trajectories) {
    tokens += static_cast<double>(trajectory.num_selected) * trajectory.weight;
    if (trajectory.num_selected > 0) trajectories += trajectory.weight;
  }
  std::vector<double> scales;
  for (const TrainingSample& sample : batch.samples) {
    const TrainingTrajectory& trajectory = batch.trajectories[static_cast<size_t>(sample.trajectory)];
    double normalizer = options_.loss.normalizer_constant;
    if (options_.loss.normalizer == Normalizer::kTokens) normalizer = tokens;
    if (options_.loss.normalizer == Normalizer::kSequence)
      normalizer = trajectories * static_cast<double>(trajectory.num_selected);
    scales.push_back(trajectory.num_selected == 0 ? 0.0 : trajectory.weight / normalizer);
  }
  return scales;
}

void Trainer::score_sample(const TrainingBatch& batch, int64_t index, Objective objective,
                           GradientResult& out) const {
  const size_t s = static_cast<size_t>(index);
  const TrainingSample& sample = batch.samples[s];
  const std::vector<float> advantage(sample.positions.size(),
                                     batch.trajectories[static_cast<size_t>(sample.trajectory)].advantage);
  out.tokens[s].assign(sample.positions.size(), {});
  objective({.learner_logprob = out.learner_logprob[s],
             .rollout_logprob = sample.rollout_logprob,
             .advantage = advantage,
             .selected = sample.selected},
            options_.loss.options, absl::MakeSpan(out.tokens[s]));
}

void Trainer::count_experts(const model::SavedForward& saved) {
  if (expert_counts_.empty()) return;
  const int64_t experts = weights_.config().moe->experts;
  int64_t layer = 0;
  for (const model::LayerReplay& choice : saved.choices) {
    if (choice.experts.empty()) continue;
    for (int64_t i = 0; i < choice.experts.numel(); ++i) {
      expert_counts_[static_cast<size_t>(layer * experts + choice.experts.i32()[i])] += 1.0f;
    }
    ++layer;
  }
}

absl::Status Trainer::run_micro_batch(const TrainingBatch& batch, const MicroBatch& micro,
                                      Objective objective, const std::vector<double>& scales,
                                      GradientResult& out) {
  const kernels::ArenaScope scope(arena_);
  model::Batch input;
  std::vector<int64_t> rows;  // of the hidden state that predicts each action token
  std::vector<int32_t> targets;
  for (const int64_t item : micro.items) {
    const TrainingSample& sample = batch.samples[static_cast<size_t>(item)];
    const int64_t first = static_cast<int64_t>(input.tokens.size());
    input.lengths.push_back(static_cast<int64_t>(sample.ids.size()));
    input.tokens.insert(input.tokens.end(), sample.ids.begin(), sample.ids.end());
    for (const int32_t position : sample.positions) {
      rows.push_back(first + position - 1);
      targets.push_back(sample.ids[static_cast<size_t>(position)]);
    }
  }
  if (rows.empty()) return absl::OkStatus();
  const model::ModelWeights& weights = weights_.compute();
  ASSIGN_OR_RETURN(const model::PreparedBatch prepared,
                   model::prepare_batch(weights_.config(), input, nullptr, arena_, stream_));
  model::Step step{stream_, arena_, prepared};
  model::SavedForward saved;
  saved.recompute = options_.recompute;
  const Tensor hidden = network_->forward(weights, step, &saved);
  count_experts(saved);
  // The head sees action tokens alone; its rows do not depend on one another.
  const int64_t scored = static_cast<int64_t>(rows.size()), width = hidden.size(1);
  const Tensor chosen = step.alloc({scored, width}), target_ids = step.ints({scored});
  gather_rows(hidden, rows, chosen, stream_);
  std::copy(targets.begin(), targets.end(), target_ids.i32());
  const model::Model::LogProbs log_probs =
      network_->log_probs(weights, chosen, target_ids, micro.temperature, /*entropy=*/true, step);
  const bool with_entropy = options_.loss.entropy_bonus > 0.0;
  const Tensor dlogprob = step.alloc({scored}), dentropy = with_entropy ? step.alloc({scored}) : Tensor();
  int64_t row = 0;
  for (const int64_t item : micro.items) {
    const size_t s = static_cast<size_t>(item);
    const int64_t count = static_cast<int64_t>(batch.samples[s].positions.size());
    out.learner_logprob[s].assign(log_probs.logprob.f32() + row, log_probs.logprob.f32() + row + count);
    out.entropy[s].assign(log_probs.entropy.f32() + row, log_probs.entropy.f32() + row + count);
    score_sample(batch, item, objective, out);
    for (int64_t i = 0; i < count; ++i, ++row) {
      const TokenLoss& token = out.tokens[s][static_cast<size_t>(i)];
      dlogprob.f32()[row] = token.dlogprob == 0.0f ? 0.0f : static_cast<float>(token.dlogprob * scales[s]);
      if (!with_entropy) continue;
      const bool counts = token.fate != TokenFate::kUnselected && token.fate != TokenFate::kNonFinite;
      dentropy.f32()[row] = counts ? static_cast<float>(-options_.loss.entropy_bonus * scales[s]) : 0.0f;
    }
  }
  const Tensor dchosen =
      network_->log_probs_backward(weights, chosen, target_ids, micro.temperature, log_probs, dlogprob,
                                   dentropy, gradients_.tensors(), step);
  const Tensor dhidden = arena_.zeros(kernels::DType::kF32, {hidden.size(0), width}, stream_);
  scatter_rows(dchosen, rows, dhidden, stream_);
  network_->backward(weights, saved, dhidden, gradients_.tensors(), step);
  return absl::OkStatus();
}

// Many small tensors in one sum: a collective costs more than its copy.
void Trainer::share_gradients() {
  if (group_.size() == 1) return;
  std::vector<float> bucket;
  std::vector<Tensor> inside;
  const auto flush = [&] {
    if (inside.empty()) return;
    group_.all_reduce_sum(Tensor(bucket.data(), kernels::DType::kF32, {static_cast<int64_t>(bucket.size())}),
                          stream_);
    const float* at = bucket.data();
    for (const Tensor& tensor : inside) {
      std::copy_n(at, tensor.numel(), tensor.f32());
      at += tensor.numel();
    }
    bucket.clear();
    inside.clear();
  };
  for (const model::WeightStore::Entry& entry : gradients_.entries()) {
    if (!is_trained(entry)) continue;
    bucket.insert(bucket.end(), entry.tensor.f32(), entry.tensor.f32() + entry.tensor.numel());
    inside.push_back(entry.tensor);
    if (static_cast<int64_t>(bucket.size()) >= kBucket) flush();
  }
  flush();
}

// Every column is filled on one rank and empty on the others; adding zeros changes no bit.
void Trainer::share_columns(std::vector<std::vector<float>>& columns) {
  if (group_.size() == 1) return;
  std::vector<float> flat;
  for (const std::vector<float>& column : columns) flat.insert(flat.end(), column.begin(), column.end());
  if (flat.empty()) return;
  group_.all_reduce_sum(Tensor(flat.data(), kernels::DType::kF32, {static_cast<int64_t>(flat.size())}),
                        stream_);
  auto at = flat.begin();
  for (std::vector<float>& column : columns) {
    std::copy_n(at, column.size(), column.begin());
    at += static_cast<std::ptrdiff_t>(column.size());
  }
}

void Trainer::summarize(const TrainingBatch& batch, Objective objective, const std::vector<double>& scales,
                        GradientResult& out) {
  double entropy = 0.0;
  int64_t counted = 0;
  for (size_t s = 0; s < batch.samples.size(); ++s) {
    score_sample(batch, static_cast<int64_t>(s), objective, out);
    for (size_t i = 0; i < out.tokens[s].size(); ++i) {
      const TokenLoss& token = out.tokens[s][i];
      if (token.fate == TokenFate::kUnselected || token.fate == TokenFate::kNonFinite) continue;
      out.loss += token.loss * scales[s];
      out.entropy_loss -= options_.loss.entropy_bonus * scales[s] * out.entropy[s][i];
      entropy += out.entropy[s][i];
      ++counted;
    }
  }
  out.entropy_mean = counted > 0 ? entropy / static_cast<double>(counted) : 0.0;
  out.trained_tokens = batch.num_tokens();
  if (expert_counts_.empty()) return;
  const size_t experts = static_cast<size_t>(weights_.config().moe->experts);
  for (size_t begin = 0; begin < expert_counts_.size(); begin += experts) {
    double most = 0.0, sum = 0.0;
    for (size_t e = begin; e < begin + experts; ++e) {
      most = std::max(most, double{expert_counts_[e]});
      sum += expert_counts_[e];
    }
    if (sum > 0.0)
      out.expert_load_imbalance =
          std::max(out.expert_load_imbalance, most * static_cast<double>(experts) / sum);
  }
}

absl::StatusOr<GradientResult> Trainer::compute_gradient(const TrainingBatch& batch,
                                                         const std::string& objective_name) {
  ASSIGN_OR_RETURN(const Objective objective, find_objective(objective_name));
  gradients_.zero();
  const model::ModelConfig& config = weights_.config();
  const auto moe_layers =
      std::count_if(config.layers.begin(), config.layers.end(), [](const auto& layer) { return layer.moe; });
  expert_counts_.assign(static_cast<size_t>(moe_layers * (config.moe ? config.moe->experts : 0)), 0.0f);
  GradientResult out;
  std::vector<PackItem> items;
  for (const TrainingSample& sample : batch.samples) {
    items.push_back({.tokens = static_cast<int64_t>(sample.ids.size()), .temperature = sample.temperature});
    out.learner_logprob.emplace_back(sample.positions.size(), 0.0f);
    out.entropy.emplace_back(sample.positions.size(), 0.0f);
    out.tokens.emplace_back(sample.positions.size());
  }
  const std::vector<double> scales = token_scales(batch);
  const auto plan = pack(items, options_.micro_batch_tokens, group_.size());
  absl::Status status;
  for (const MicroBatch& micro : plan[static_cast<size_t>(group_.rank())]) {
    if (status.ok()) status = run_micro_batch(batch, micro, objective, scales, out);
  }
  if (group_.all_reduce_max(status.ok() ? 0 : 1) != 0) {  // before anybody waits for a sum that will not come
    return status.ok() ? absl::InternalError("another rank failed in this step; its log says why") : status;
  }
  share_gradients();
  share_columns(out.learner_logprob);
  share_columns(out.entropy);
  if (!expert_counts_.empty()) {
    group_.all_reduce_sum(
        Tensor(expert_counts_.data(), kernels::DType::kF32, {static_cast<int64_t>(expert_counts_.size())}),
        stream_);
  }
  summarize(batch, objective, scales, out);
  return out;
}

absl::StatusOr<StepResult> Trainer::step(const TrainingBatch& batch, const std::string& objective,
                                         double learning_rate) {
  StepResult result;
  result.learning_rate = learning_rate;
  ASSIGN_OR_RETURN(result.gradient, compute_gradient(batch, objective));
  const GradientCheck check = check_gradients(gradients_, stream_);
  result.grad_norm = check.norm;
  result.offending = check.offending;
  int64_t selected = 0, finite = 0;
  for (const std::vector<TokenLoss>& tokens : result.gradient.tokens) {
    for (const TokenLoss& token : tokens) {
      selected += token.fate != TokenFate::kUnselected;
      finite += token.fate != TokenFate::kUnselected && token.fate != TokenFate::kNonFinite;
    }
  }
  // A broken model masks every token, and a zero gradient would look like health.
  if (selected > 0 && finite == 0 && result.offending.empty())
    result.offending = "the log-probs of all action tokens";
  result.skipped = !result.offending.empty();
  if (result.skipped || selected == 0)
    return result;  // nothing to learn from: old momentum alone moves nothing
  optimizer_.update(weights_.master().store, gradients_, check.norm, learning_rate, stream_);
  weights_.round(stream_);
  result.updated = true;
  return result;
}

}  // namespace slipstream::learner
