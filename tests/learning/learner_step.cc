// learner_step CONFIG BATCH OUT: the loss and gradient of one recorded batch. CONFIG is a job's YAML
// (model.path, learner.loss, ...), BATCH a serialised slipstream.v1.Batch. OUT receives the gradients under
// the checkpoint's tensor names (zeros where nothing is trained) and result.json.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "learner/trainer.h"
#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

absl::StatusOr<v1::Batch> read_batch(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  v1::Batch batch;
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  if (!batch.ParseFromIstream(&in))
    return absl::DataLossError(absl::StrCat(path, ": no slipstream.v1.Batch"));
  return batch;
}

// Gradients as if they were weights, so that they are written under the published names.
absl::Status save_gradients(const PolicyWeights& weights, const model::WeightStore& gradients,
                            const std::string& out) {
  model::LoadedWeights as_weights{weights.config(),
                                  *model::WeightStore::create_weights(weights.config(), kernels::DType::kF32,
                                                                      weights.master().store.with_mtp())};
  as_weights.config.dtype = kernels::DType::kF32;
  as_weights.store.zero();
  for (size_t i = 0; i < gradients.entries().size(); ++i) {
    const kernels::Tensor& from = gradients.entries()[i].tensor;
    if (from.empty()) continue;
    std::memcpy(as_weights.store.entries()[i].tensor.raw(), from.raw(), static_cast<size_t>(from.bytes()));
  }
  return model::save_weights(as_weights, out, {});
}

absl::Status run(const std::string& config_path, const std::string& batch_path, const std::string& out) {
  ASSIGN_OR_RETURN(ConfigNode root, ConfigNode::load(config_path));
  const LearnerConfig config = LearnerConfig::from(root);
  RETURN_IF_ERROR(root.finish());
  ASSIGN_OR_RETURN(const v1::Batch message, read_batch(batch_path));
  ASSIGN_OR_RETURN(const auto stream, kernels::Stream::create_cpu(config.threads > 0 ? config.threads : 2));
  ASSIGN_OR_RETURN(PolicyWeights weights, PolicyWeights::load(config.model.path, config.model.dtype, *stream, *stream));
  ASSIGN_OR_RETURN(const auto trainer, Trainer::create(weights,
                                                       {.loss = config.loss,
                                                        .optimizer = config.optimizer,
                                                        .micro_batch_tokens = config.micro_batch_tokens,
                                                        .recompute = config.recompute},
                                                       parallel::self_group(), *stream, *stream));
  ASSIGN_OR_RETURN(const Logger log, make_logger("learner_step", ""));
  const TrainingBatch batch = make_training_batch(message,
                                                  {.vocab = weights.config().vocab,
                                                   .max_positions = weights.config().max_positions,
                                                   .kind = v1::TRAJECTORY_KIND_ROLLOUT,
                                                   .advantages = {.std = config.advantage_std},
                                                   .trained = nullptr},
                                                  log);
  ASSIGN_OR_RETURN(const GradientResult result, trainer->compute_gradient(batch, config.loss.objective));
  RETURN_IF_ERROR(save_gradients(weights, trainer->gradients(), out));
  nlohmann::json advantages = nlohmann::json::array(), fates = nlohmann::json::array();
  for (const TrainingTrajectory& trajectory : batch.trajectories) advantages.push_back(trajectory.advantage);
  for (const auto& tokens : result.tokens) {
    fates.push_back(nlohmann::json::array());
    for (const TokenLoss& token : tokens) fates.back().push_back(static_cast<int>(token.fate));
  }
  const nlohmann::json json = {{"loss", result.loss},      {"entropy_loss", result.entropy_loss},
                               {"advantages", advantages}, {"learner_logprobs", result.learner_logprob},
                               {"fates", fates},           {"refused", batch.refused.size()}};
  std::ofstream file(out + "/result.json");
  file << json.dump() << "\n";
  return file.flush() ? absl::OkStatus()
                      : absl::UnavailableError(absl::StrCat(out, "/result.json: cannot be written"));
}

}  // namespace
}  // namespace slipstream::learner

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: learner_step CONFIG BATCH OUT\n");
    return 2;
  }
  const absl::Status status = slipstream::learner::run(argv[1], argv[2], argv[3]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "learner_step: %s\n", std::string(status.message()).c_str());
  return 1;
}
