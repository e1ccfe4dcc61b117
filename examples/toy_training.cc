// toy_training MODEL OUT: teaches a small model to count. Sequences go s, s+d, s+2d, ... modulo 64; after two tokens the
// rest can be known. AdamW on the log-probs of tokens 2.. of each sequence, then the checkpoint is saved to OUT.
// It shows a whole training step in one page: batch, forward, log-probs, backward, update.
#include <cstdio>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/status.h"
#include "learner/optimizer.h"
#include "model/load.h"
#include "model/model.h"

namespace slipstream {
namespace {

constexpr int32_t kModulus = 64;

struct Flags {
  std::string model;
  std::string out;
  int steps = 300;
  int64_t sequences = 16;
  int64_t length = 16;
  float learning_rate = 3e-3f;
  int threads = 2;
};

model::Batch counting_batch(const Flags& flags, uint64_t& state) {
  model::Batch batch;
  for (int64_t s = 0; s < flags.sequences; ++s) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    const int32_t start = static_cast<int32_t>((state >> 33) % kModulus), stride = static_cast<int32_t>((state >> 43) % 8 + 1);
    for (int64_t t = 0; t < flags.length; ++t) {
      batch.tokens.push_back((start + stride * static_cast<int32_t>(t)) % kModulus);
    }
    batch.lengths.push_back(flags.length);
  }
  return batch;
}

absl::Status run(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::load_weights(flags.model, kernels::DType::kF32, *stream));
  if (loaded.config.vocab < kModulus) {
    return absl::InvalidArgumentError(absl::StrCat(flags.model, ": vocab_size: ", loaded.config.vocab, ", expected at least ",
                                                   kModulus));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Model> network, model::Model::create(loaded.config));
  ASSIGN_OR_RETURN(model::WeightStore gradients,
                   model::WeightStore::create_gradients(loaded.config, loaded.store.with_mtp()));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(int64_t{1} << 38));
  const model::ModelWeights& weights = loaded.store.tensors();
  ASSIGN_OR_RETURN(learner::AdamW adam, learner::AdamW::create(loaded.config, loaded.store.with_mtp(),
                                                              {.beta1 = 0.9, .beta2 = 0.99, .grad_clip = 0.0}, *stream));
  uint64_t state = 1;
  for (int i = 1; i <= flags.steps; ++i) {
    const kernels::ArenaScope scope(arena);
    const model::Batch batch = counting_batch(flags, state);
    ASSIGN_OR_RETURN(const model::PreparedBatch prepared,
                     model::prepare_batch(loaded.config, batch, nullptr, arena, *stream));
    model::Step step{*stream, arena, prepared};
    const int64_t rows = prepared.rows();
    const kernels::Tensor targets = step.ints({rows}), dlogprob = step.alloc({rows});
    const float share = 1.0f / static_cast<float>(flags.sequences * (flags.length - 2));
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t t = r % flags.length;
      const bool scored = t >= 1 && t + 1 < flags.length;
      targets.i32()[r] = scored ? batch.tokens[static_cast<size_t>(r + 1)] : -1;
      dlogprob.f32()[r] = scored ? -share : 0.0f;
    }
    model::SavedForward saved;
    gradients.zero();
    const kernels::Tensor hidden = network->forward(weights, step, &saved);
    const model::Model::LogProbs log_probs = network->log_probs(weights, hidden, targets, 1.0f, false, step);
    const kernels::Tensor dhidden = network->log_probs_backward(weights, hidden, targets, 1.0f, log_probs, dlogprob, {},
                                                                gradients.tensors(), step);
    network->backward(weights, saved, dhidden, gradients.tensors(), step);
    adam.update(loaded.store, gradients, /*rounded=*/nullptr, /*grad_norm=*/0.0, flags.learning_rate);
    if (i == 1 || i % 50 == 0) {
      double loss = 0.0;
      for (int64_t r = 0; r < rows; ++r) loss += double{dlogprob.f32()[r]} * log_probs.logprob.f32()[r];
      std::printf("step %4d  loss %.4f nats a token\n", i, loss);
      std::fflush(stdout);
    }
  }
  return model::save_weights(loaded, flags.out, {.carry_from = flags.model});
}

}  // namespace
}  // namespace slipstream

int main(int argc, char** argv) {
  slipstream::Flags flags;
  CLI::App app("Teaches a small model to count.");
  app.add_option("model", flags.model, "Model directory")->required();
  app.add_option("out", flags.out, "Where the trained model goes")->required();
  app.add_option("--steps", flags.steps)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--learning-rate", flags.learning_rate)->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--threads", flags.threads)->check(CLI::Range(1, 256))->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slipstream::run(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "toy_training: %s\n", std::string(status.message()).c_str());
  return 1;
}
