#include "learner/trainer.h"

#include <algorithm>
#include <cmath>

#include "kernels/range.h"
#include "model/host_values.h"

namespace slipstream::learner {
namespace {

using kernels::Tensor;

// Address space only; memory is what micro_batch_tokens makes of it.
constexpr int64_t kArenaBytes = int64_t{1} << 38;
constexpr int64_t kBucket = 1 << 22;  // gradient elements summed at a time

}  // namespace

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::create(PolicyWeights& weights,
                                                         const TrainerOptions& options,
                                                         parallel::Group& group, kernels::Stream& host,
                                                         kernels::Stream& compute) {
  RETURN_IF_ERROR(find_objective(options.loss.objective).status());
  const model::ModelConfig& config = weights.config();
  const bool with_mtp = weights.with_mtp();
  ASSIGN_OR_RETURN(std::unique_ptr<model::Model> network, model::Model::create(config));
  ASSIGN_OR_RETURN(model::WeightStore gradients, model::WeightStore::create_gradients(config, with_mtp));
  ASSIGN_OR_RETURN(AdamW optimizer, AdamW::create(config, with_mtp, options.optimizer,
                                                  weights.trained_by(host, compute)));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(compute.device(), kArenaBytes));
  std::unique_ptr<Trainer> out(new Trainer(weights, options, group, host, compute, std::move(network),
                                           std::move(gradients), std::move(optimizer), std::move(arena)));
  if (compute.on_cuda()) {
    ASSIGN_OR_RETURN(out->device_gradients_,
                     model::WeightStore::create_gradients(config, with_mtp, /*train_frozen=*/false, compute.device()));
  }
  return out;
}

Trainer::Trainer(PolicyWeights& weights, const TrainerOptions& options, parallel::Group& group,
                 kernels::Stream& host, kernels::Stream& compute, std::unique_ptr<model::Model> network,
                 model::WeightStore gradients, AdamW optimizer, kernels::Arena arena)
    : weights_(weights),
      options_(options),
      group_(group),
      host_(host),
      compute_(compute),
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
    for (const int32_t expert : model::host_values<int32_t>(choice.experts, compute_)) {
      expert_counts_[static_cast<size_t>(layer * experts + expert)] += 1.0f;
    }
    ++layer;
  }
}

absl::Status Trainer::run_micro_batch(const TrainingBatch& batch, const MicroBatch& micro,
                                      Objective objective, const std::vector<double>& scales,
                                      GradientResult& out) {
  const kernels::Range range("micro batch");
  const kernels::ArenaScope scope(arena_);
  model::Batch input;
  std::vector<int32_t> rows, targets;  // of each action token: the hidden state that predicts it, its id
  for (const int64_t item : micro.items) {
    const TrainingSample& sample = batch.samples[static_cast<size_t>(item)];
    const int64_t first = static_cast<int64_t>(input.tokens.size());
    input.lengths.push_back(static_cast<int64_t>(sample.ids.size()));
    input.tokens.insert(input.tokens.end(), sample.ids.begin(), sample.ids.end());
    for (const int32_t position : sample.positions) {
      rows.push_back(static_cast<int32_t>(first + position - 1));
      targets.push_back(sample.ids[static_cast<size_t>(position)]);
    }
  }
  if (rows.empty()) return absl::OkStatus();
  const model::ModelWeights& weights = weights_.compute();
  ASSIGN_OR_RETURN(const model::PreparedBatch prepared,
                   model::prepare_batch(weights_.config(), input, nullptr, arena_, compute_));
  model::Step step{compute_, arena_, prepared, nullptr, model::activation_dtype(compute_, weights_.dtype())};
  model::SavedForward saved;
  saved.recompute = options_.recompute;
  const Tensor hidden = network_->forward(weights, step, &saved);
  count_experts(saved);
  // The head sees action tokens alone; its rows do not depend on one another.
  const size_t scored = rows.size();
  const Tensor chosen = gather_rows(step, hidden, rows), target_ids = step.upload(targets);
  const model::Model::LogProbs log_probs =
      network_->log_probs(weights, chosen, target_ids, micro.temperature, /*entropy=*/true, step);
  const auto logprobs = model::host_values<float>(log_probs.logprob, compute_);
  const auto entropies = model::host_values<float>(log_probs.entropy, compute_);
  const bool with_entropy = options_.loss.entropy_bonus > 0.0;
  std::vector<float> dlogprobs(scored), dentropies(with_entropy ? scored : 0);
  size_t row = 0;
  for (const int64_t item : micro.items) {
    const size_t s = static_cast<size_t>(item);
    const size_t count = batch.samples[s].positions.size();
    std::copy_n(&logprobs[row], count, out.learner_logprob[s].begin());
    std::copy_n(&entropies[row], count, out.entropy[s].begin());
    score_sample(batch, item, objective, out);
    for (size_t i = 0; i < count; ++i, ++row) {
      const TokenLoss& token = out.tokens[s][i];
      dlogprobs[row] = token.dlogprob == 0.0f ? 0.0f : static_cast<float>(token.dlogprob * scales[s]);
      if (!with_entropy) continue;
      // Not where the objective is masked: with nothing to hold against it the bonus alone would drive such tokens, and
      // with them the policy, ever further from what was sampled.
      const bool trained = token.fate == TokenFate::kTrained;
      dentropies[row] = trained ? static_cast<float>(-options_.loss.entropy_bonus * scales[s]) : 0.0f;
    }
  }
  model::ModelWeights& gradients = pass_gradients().tensors();
  const Tensor dlogprob = step.upload(dlogprobs), dentropy = with_entropy ? step.upload(dentropies) : Tensor();
  const Tensor dchosen =
      network_->log_probs_backward(weights, chosen, target_ids, micro.temperature, log_probs, dlogprob,
                                   dentropy, gradients, step);
  std::vector<int32_t> scattered(static_cast<size_t>(hidden.size(0)), -1);  // no row is scored twice
  for (size_t i = 0; i < scored; ++i) scattered[static_cast<size_t>(rows[i])] = static_cast<int32_t>(i);
  network_->backward(weights, saved, gather_rows(step, dchosen, scattered), gradients, step);
  return absl::OkStatus();
}

// To gradients(), the sum over all ranks.
void Trainer::gather_gradients() {
  const bool update_there = optimizer_.stream().on_cuda();
  if (device_gradients_ && (group_.size() > 1 || !update_there)) gradients_.download_from(*device_gradients_, compute_);
  share_gradients();
  if (group_.size() > 1 && update_there) gradients_.upload_to(*device_gradients_, compute_);
}

// Many small tensors in one sum: a collective costs more than its copy.
void Trainer::share_gradients() {
  if (group_.size() == 1) return;
  std::vector<float> bucket;
  std::vector<Tensor> inside;
  const auto flush = [&] {
    if (inside.empty()) return;
    group_.all_reduce_sum(Tensor(bucket.data(), kernels::DType::kF32, {static_cast<int64_t>(bucket.size())}),
                          host_);
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
  group_.all_reduce_sum(Tensor(flat.data(), kernels::DType::kF32, {static_cast<int64_t>(flat.size())}), host_);
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
      if (token.fate == TokenFate::kTrained) {
        out.entropy_loss -= options_.loss.entropy_bonus * scales[s] * out.entropy[s][i];
      }
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
  pass_gradients().zero(compute_);
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
  gather_gradients();
  share_columns(out.learner_logprob);
  share_columns(out.entropy);
  if (!expert_counts_.empty()) {
    group_.all_reduce_sum(
        Tensor(expert_counts_.data(), kernels::DType::kF32, {static_cast<int64_t>(expert_counts_.size())}),
        host_);
  }
  summarize(batch, objective, scales, out);
  return out;
}

absl::StatusOr<StepResult> Trainer::step(const TrainingBatch& batch, const std::string& objective,
                                         double learning_rate) {
  StepResult result;
  result.learning_rate = learning_rate;
  ASSIGN_OR_RETURN(result.gradient, compute_gradient(batch, objective));
  const kernels::Range range("update");
  const GradientCheck check = check_gradients(gradients(), optimizer_.stream());
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
  const std::string diverged =
      optimizer_.update(weights_.trained(), gradients(), weights_.rounded(), check.norm, learning_rate);
  weights_.updated(compute_);
  // Before anything is saved or published: such weights would be the run's newest for good.
  if (!diverged.empty()) {
    return absl::DataLossError(absl::StrCat("the update made ", diverged, " not finite: the policy has diverged (learning rate ",
                                            learning_rate, ", gradient norm ", check.norm, ")"));
  }
  result.updated = true;
  return result;
}

}  // namespace slipstream::learner
