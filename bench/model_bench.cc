// model_bench train|decode --model DIR ...: tokens a second and peak memory of a whole model, as one JSON object.
//   train:  forward and backward of `batch` sequences of `tokens` random ids, loss = mean log-prob
//   decode: `batch` sequences with a prompt of `tokens` ids, then `steps` greedy tokens each; only the steps are timed
// bench/model_vs_transformers.py runs it beside its peer.
#include <sys/resource.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/measuring.h"
#include "common/status.h"
#include "model/load.h"
#include "model/model.h"

namespace slipstream::model {
namespace {

struct Flags {
  std::string mode;
  std::string model;
  std::string dtype = "fp32";
  int threads = 2;
  int64_t batch = 1;
  int64_t tokens = 1024;
  int64_t steps = 64;
  int repeats = 3;
  bool recompute = false;
  bool panels = true;
};

constexpr uint64_t kSeed = 12345;  // of the ids

struct Bench {
  std::unique_ptr<kernels::Stream> stream;
  LoadedWeights loaded;
  std::unique_ptr<Model> model;
  kernels::Arena arena;
  std::optional<WeightPanels> panels = {};

  const ModelWeights& weights() const { return loaded.store.tensors(); }
};

absl::StatusOr<double> train_step(Bench& b, const Flags& flags, WeightStore& gradients) {
  const int64_t rows = flags.batch * flags.tokens;
  const std::vector<int32_t> ids = bench::random_ids(rows, b.model->config().vocab, kSeed);
  const auto start = bench::Clock::now();
  const kernels::ArenaScope scope(b.arena);
  const Batch batch{.tokens = ids, .lengths = std::vector<int64_t>(static_cast<size_t>(flags.batch), flags.tokens),
                    .cached = {}};
  ASSIGN_OR_RETURN(const PreparedBatch prepared,
                   prepare_batch(b.model->config(), batch, nullptr, b.arena, *b.stream));
  Step step{*b.stream, b.arena, prepared};
  SavedForward saved;
  saved.recompute = flags.recompute;
  gradients.zero();
  const Tensor hidden = b.model->forward(b.weights(), step, &saved);
  const Tensor targets = step.ints({rows}), dlogprob = step.alloc({rows});
  for (int64_t t = 0; t < rows; ++t) {
    targets.i32()[t] = ids[static_cast<size_t>((t + 1) % rows)];
    dlogprob.f32()[t] = -1.0f / static_cast<float>(rows);
  }
  const Model::LogProbs log_probs = b.model->log_probs(b.weights(), hidden, targets, 1.0f, false, step);
  const Tensor dhidden = b.model->log_probs_backward(b.weights(), hidden, targets, 1.0f, log_probs, dlogprob, {},
                                                     gradients.tensors(), step);
  b.model->backward(b.weights(), saved, dhidden, gradients.tensors(), step);
  return bench::seconds_since(start);
}

absl::StatusOr<double> train(Bench& b, const Flags& flags) {
  ASSIGN_OR_RETURN(WeightStore gradients, WeightStore::create_gradients(b.model->config(), b.loaded.store.with_mtp()));
  double best = 1e30;
  for (int i = 0; i <= flags.repeats; ++i) {  // the first run touches the memory
    ASSIGN_OR_RETURN(const double seconds, train_step(b, flags, gradients));
    if (i > 0) best = std::min(best, seconds);
  }
  return static_cast<double>(flags.batch * flags.tokens) / best;
}

// One forward of `count` new ids a sequence; returns the greedy next id of each.
absl::StatusOr<std::vector<int32_t>> advance(Bench& b, Cache& cache, const std::vector<int64_t>& sequences,
                                             const std::vector<int32_t>& ids) {
  const kernels::ArenaScope scope(b.arena);
  const int64_t count = static_cast<int64_t>(ids.size() / sequences.size());
  const Batch batch{.tokens = ids, .lengths = std::vector<int64_t>(sequences.size(), count), .cached = sequences};
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.model->config(), batch, &cache, b.arena, *b.stream));
  Step step{*b.stream, b.arena, prepared, b.panels ? &*b.panels : nullptr};
  const Tensor hidden = b.model->forward(b.weights(), step, nullptr);
  const int64_t width = hidden.size(1);
  const Tensor last = step.alloc({static_cast<int64_t>(sequences.size()), width});
  for (int64_t i = 0; i < last.size(0); ++i) std::copy_n(hidden.row((i + 1) * count - 1), width, last.row(i));
  const Tensor logits = b.model->logits(b.weights(), last, step);
  std::vector<int32_t> next;
  for (int64_t i = 0; i < last.size(0); ++i) {
    next.push_back(static_cast<int32_t>(std::max_element(logits.row(i), logits.row(i) + logits.size(1)) - logits.row(i)));
  }
  return next;
}

absl::StatusOr<double> decode(Bench& b, const Flags& flags) {
  double best = 1e30;
  for (int i = 0; i < flags.repeats; ++i) {
    ASSIGN_OR_RETURN(const std::unique_ptr<Cache> cache,
                     Cache::create(b.model->config(), {.tokens = flags.batch * (flags.tokens + flags.steps + 64),
                                                       .sequences = flags.batch, .dtype = b.loaded.store.dtype()}));
    std::vector<int64_t> sequences;
    for (int64_t s = 0; s < flags.batch; ++s) {
      ASSIGN_OR_RETURN(const int64_t id, cache->open());
      sequences.push_back(id);
    }
    ASSIGN_OR_RETURN(std::vector<int32_t> next,
                     advance(b, *cache, sequences,
                             bench::random_ids(flags.batch * flags.tokens, b.model->config().vocab, kSeed)));
    const auto start = bench::Clock::now();
    for (int64_t s = 0; s < flags.steps; ++s) {
      ASSIGN_OR_RETURN(next, advance(b, *cache, sequences, next));
    }
    best = std::min(best, bench::seconds_since(start));
  }
  return static_cast<double>(flags.batch * flags.steps) / best;
}

absl::Status run(const Flags& flags) {
  const kernels::DType dtype = flags.dtype == "bf16" ? kernels::DType::kBf16 : kernels::DType::kF32;
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(LoadedWeights loaded, load_weights(flags.model, dtype, *stream));
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::create(loaded.config));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(int64_t{1} << 38));
  Bench b{std::move(stream), std::move(loaded), std::move(model), std::move(arena)};
  if (flags.mode == "decode" && flags.panels) {
    ASSIGN_OR_RETURN(b.panels, WeightPanels::create(b.loaded.store));
  }
  ASSIGN_OR_RETURN(const double rate, flags.mode == "train" ? train(b, flags) : decode(b, flags));
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  std::printf("{\"tokens_per_second\": %.2f, \"peak_mib\": %.1f}\n", rate, static_cast<double>(usage.ru_maxrss) / 1024.0);
  return absl::OkStatus();
}

}  // namespace
}  // namespace slipstream::model

int main(int argc, char** argv) {
  slipstream::model::Flags flags;
  CLI::App app("Tokens a second of a whole model.");
  app.add_option("mode", flags.mode, "train or decode")->required()->check(CLI::IsMember({"train", "decode"}));
  app.add_option("--model", flags.model)->required();
  app.add_option("--dtype", flags.dtype)->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--threads", flags.threads)->check(CLI::Range(1, 256));
  app.add_option("--batch", flags.batch)->check(CLI::PositiveNumber);
  app.add_option("--tokens", flags.tokens)->check(CLI::PositiveNumber);
  app.add_option("--steps", flags.steps)->check(CLI::PositiveNumber);
  app.add_option("--repeats", flags.repeats)->check(CLI::PositiveNumber);
  app.add_flag("--recompute", flags.recompute);
  app.add_flag("--panels,!--no-panels", flags.panels, "Decode from panels of the weights");
  CLI11_PARSE(app, argc, argv);
  const absl::Status status = slipstream::model::run(flags);
  if (status.ok()) return 0;
  std::fprintf(stderr, "model_bench: %s\n", std::string(status.message()).c_str());
  return 1;
}
