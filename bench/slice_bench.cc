// slice_bench CONFIG.json [--layers 4] [--device cuda] [--fp8] [--trace [--timeline]] [--check TOKENS]: a published shape cut to its first
// layers, with random weights: tokens a second and share of the roofline of prefill, decode and a training step, and the memory
// they take. One table.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/kernel_trace.h"
#include "bench/measuring.h"
#include "common/hash.h"
#include "common/status.h"
#include "kernels/e4m3.h"
#include "model/accounting.h"
#include "model/decode_graphs.h"
#include "model/host_values.h"
#include "model/model.h"
#include "nlohmann/json.hpp"

namespace slipstream::model {
namespace {

using kernels::DType;

struct Flags {
  std::string config;
  int layers = 4;
  std::string device = "cuda";
  std::vector<int64_t> prefill = {8192, 65536};
  std::vector<int64_t> batches = {1, 32, 128};
  int64_t context = 8192;      // of decode
  int64_t train_tokens = 16384;
  int64_t chunk = 8192;        // rows of a prefill pass
  bool fp8 = false;            // linear layers in e4m3
  bool trace = false, timeline = false;
  int64_t check = 0;           // tokens; 0: no check
  double teraflops = 989;      // bf16 peak of an H200
  double fp8_teraflops = 1979;
  double terabytes = 4.3;      // a second, as copies reach
};

absl::StatusOr<ModelConfig> read_slice(const std::string& path, int layers) {
  std::ifstream file(path);
  if (!file || std::filesystem::is_directory(path)) return absl::NotFoundError(absl::StrCat(path, ": cannot be read, expected a config.json"));
  const auto json = nlohmann::ordered_json::parse(file, nullptr, false);
  if (!json.is_object()) return absl::InvalidArgumentError(absl::StrCat(path, ": expected a config.json, an object"));
  ASSIGN_OR_RETURN(const ModelConfig whole, parse_model_config(json, path));
  if (static_cast<size_t>(layers) > whole.layers.size()) {
    return absl::InvalidArgumentError(absl::StrCat("--layers: ", layers, ", expected at most the ", whole.layers.size(), " of ", path));
  }
  nlohmann::ordered_json slice = json;
  nlohmann::ordered_json& text = slice.contains("text_config") ? slice["text_config"] : slice;
  text["num_hidden_layers"] = layers;
  text["num_nextn_predict_layers"] = 0;
  for (const char* key : {"layer_types", "mlp_layer_types", "indexer_types"}) {
    if (!text.contains(key)) continue;
    while (text[key].size() > static_cast<size_t>(layers)) text[key].erase(text[key].size() - 1);
  }
  if (text.contains("linear_attn_config")) {
    for (const char* key : {"full_attn_layers", "kda_layers"}) {
      nlohmann::ordered_json kept = nlohmann::ordered_json::array();
      for (const auto& layer : text["linear_attn_config"][key]) {
        if (layer.get<int>() < layers) kept.push_back(layer);
      }
      text["linear_attn_config"][key] = kept;
    }
  }
  return parse_model_config(slice, path);
}

// Values are repeated every few megabytes: kernels do not mind, and the host need not make billions of them.
void fill(const WeightStore& weights, float std, kernels::Stream& stream) {
  constexpr int64_t kCount = int64_t{1} << 22;
  const float range = std * std::sqrt(3.0f);
  std::vector<float> random(kCount), ones(kCount, 1.0f), zeros(kCount, 0.0f);
  std::vector<kernels::bf16> rounded(kCount);
  std::vector<kernels::e4m3> codes(kCount);
  const float scale = range / kernels::kE4m3Largest;
  for (int64_t i = 0; i < kCount; ++i) {
    const double unit = static_cast<double>(splitmix64(static_cast<uint64_t>(i)) >> 11) * 0x1p-53;
    random[static_cast<size_t>(i)] = range * static_cast<float>(2.0 * unit - 1.0);
    rounded[static_cast<size_t>(i)] = kernels::to_bf16(random[static_cast<size_t>(i)]);
    codes[static_cast<size_t>(i)] = kernels::to_e4m3(random[static_cast<size_t>(i)] / scale);
  }
  for (const auto& [weight, scales] : weights.scales()) {
    stream.upload(std::vector<float>(static_cast<size_t>(scales.numel()), scale).data(), scales);
  }
  for (const WeightStore::Entry& entry : weights.entries()) {
    const Tensor& t = entry.tensor;
    const Init init = entry.parameter.init;
    const std::vector<float>& f32 = init == Init::kOnes ? ones : init == Init::kNormal ? random : zeros;
    const void* from = t.dtype() == DType::kBf16     ? static_cast<const void*>(rounded.data())
                       : t.dtype() == DType::kF8E4M3 ? static_cast<const void*>(codes.data())
                                                     : f32.data();
    for (int64_t begin = 0; begin < t.numel(); begin += kCount) {
      char* const at = static_cast<char*>(t.raw()) + begin * kernels::size_of(t.dtype());
      stream.upload(from, Tensor(at, t.dtype(), {std::min(kCount, t.numel() - begin)}, t.device()));
    }
  }
  stream.synchronize();
}

struct Bench {
  const Flags& flags;
  kernels::Stream& stream;
  ModelConfig config;
  WeightStore weights;
  std::unique_ptr<Model> model;
  kernels::Arena arena;
  DecodeGraphs graphs = {};

  Step step(const PreparedBatch& prepared) {
    return {stream, arena, prepared, nullptr, activation_dtype(stream, weights.dtype()), &weights.scales()};
  }
};

double gib(int64_t bytes) { return static_cast<double>(bytes) / (int64_t{1} << 30); }

void print(const std::string& name, double seconds, double tokens, const char* bound, double share, int64_t bytes) {
  std::printf("%-34s %10.3f ms %12.0f tokens/s %6.1f %% of %-9s %7.1f GiB\n", name.c_str(), seconds * 1e3, tokens / seconds,
              100 * share, bound, gib(bytes));
  std::fflush(stdout);
}

// One more pass, traced, where that was asked for.
template <class Pass>
absl::Status trace(const Bench& b, const std::string& what, int passes, const Pass& run_pass) {
  if (!b.flags.trace) return absl::OkStatus();
  RETURN_IF_ERROR(bench::KernelTrace::start());
  for (int i = 0; i < passes; ++i) RETURN_IF_ERROR(run_pass());
  bench::KernelTrace::report(what, passes, b.flags.timeline);
  return absl::OkStatus();
}

// The logits of a decode step, [B, V].
Tensor decode(Bench& b, Step& step) {
  if (b.stream.on_cuda()) return b.graphs.run(*b.model, b.weights.tensors(), step, /*capture=*/false).logits;
  return b.model->logits(b.weights.tensors(), b.model->forward(b.weights.tensors(), step, nullptr), step);
}

// With `logits`, a decode step.
absl::Status pass(Bench& b, Cache& cache, const std::vector<int64_t>& sequences, const std::vector<int32_t>& ids, bool logits) {
  const kernels::ArenaScope scope(b.arena);
  const auto count = static_cast<int64_t>(ids.size() / sequences.size());
  const Batch batch{.tokens = ids, .lengths = std::vector<int64_t>(sequences.size(), count), .cached = sequences};
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.config, batch, &cache, b.arena, b.stream));
  Step step = b.step(prepared);
  if (logits) {
    decode(b, step);
  } else {
    b.model->forward(b.weights.tensors(), step, nullptr);
  }
  b.stream.synchronize();
  return absl::OkStatus();
}

// Seconds to bring a new sequence to `tokens`.
absl::StatusOr<double> prefill(Bench& b, Cache& cache, int64_t sequence, int64_t tokens) {
  const auto start = bench::Clock::now();
  for (int64_t begin = 0; begin < tokens; begin += b.flags.chunk) {
    const int64_t count = std::min(b.flags.chunk, tokens - begin);
    RETURN_IF_ERROR(pass(b, cache, {sequence}, bench::random_ids(count, b.config.vocab, static_cast<uint64_t>(begin)), false));
  }
  return bench::seconds_since(start);
}

// The part of a parameter that is used where a layer uses so many experts.
double used(const Bench& b, const Parameter& parameter, double experts) {
  return parameter.expert ? experts / static_cast<double>(b.config.moe->experts) : 1.0;
}

// Operations a token in products with e4m3.
double fp8_flops(const Bench& b) {
  double flops = 0;
  for (const WeightStore::Entry& entry : b.weights.entries()) {
    if (entry.tensor.dtype() != DType::kF8E4M3) continue;
    const double experts = b.config.moe ? static_cast<double>(b.config.moe->per_token) : 0;
    flops += 2 * used(b, entry.parameter, experts) * static_cast<double>(entry.tensor.numel());
  }
  return flops;
}

absl::Status bench_prefill(Bench& b) {
  for (const int64_t tokens : b.flags.prefill) {
    ASSIGN_OR_RETURN(const auto cache, Cache::create(b.config, {.tokens = tokens + 64, .sequences = 1, .dtype = b.weights.dtype()}, &b.stream));
    double best = 1e30;
    for (int i = 0; i < 3; ++i) {
      ASSIGN_OR_RETURN(const int64_t sequence, cache->open());
      ASSIGN_OR_RETURN(const double seconds, prefill(b, *cache, sequence, tokens));
      RETURN_IF_ERROR(cache->free(sequence));
      if (i > 0) best = std::min(best, seconds);
    }
    ASSIGN_OR_RETURN(const Accounting cost, account(b.config, tokens / 2));
    const double fp8 = fp8_flops(b);
    const double bf16 = static_cast<double>(cost.flops.total() - 2 * b.config.vocab * b.config.hidden) - fp8;
    const double least = static_cast<double>(tokens) * (bf16 / b.flags.teraflops + fp8 / b.flags.fp8_teraflops) * 1e-12;
    print(absl::StrCat("prefill ", tokens), best, static_cast<double>(tokens), b.flags.fp8 ? "peaks" : "bf16 peak", least / best,
          b.arena.peak() + cache->usage().bytes_total);
    const auto once_more = [&]() -> absl::Status {
      ASSIGN_OR_RETURN(const int64_t sequence, cache->open());
      RETURN_IF_ERROR(prefill(b, *cache, sequence, tokens).status());
      return cache->free(sequence);
    };
    RETURN_IF_ERROR(trace(b, absl::StrCat("prefill ", tokens), 1, once_more));
  }
  return absl::OkStatus();
}

// Experts that some token of a decode step uses, all MoE layers together.
absl::StatusOr<int64_t> experts_used(Bench& b, Cache& cache, const std::vector<int64_t>& sequences, const std::vector<int32_t>& ids) {
  const kernels::ArenaScope scope(b.arena);
  const Batch batch{.tokens = ids, .lengths = std::vector<int64_t>(sequences.size(), 1), .cached = sequences};
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.config, batch, &cache, b.arena, b.stream));
  Step step = b.step(prepared);
  Choices choices;
  b.model->forward(b.weights.tensors(), step, nullptr, {.replay = nullptr, .capture = &choices});
  int64_t used = 0;
  for (const LayerReplay& choice : choices) {
    if (choice.experts.empty()) continue;
    const std::vector<int32_t> experts = host_values<int32_t>(choice.experts, b.stream);
    used += static_cast<int64_t>(std::set<int32_t>(experts.begin(), experts.end()).size());
  }
  return used;
}

// Bytes one decode step of `batch` sequences must read: weights once, of experts those that some token uses, and each
// sequence's attended rows, indexer keys and recurrent state (read and written).
double decode_bytes(const Bench& b, const Accounting& cost, int64_t batch, int64_t experts) {
  double moe_layers = 0, weights = 0;
  for (const LayerConfig& layer : b.config.layers) moe_layers += layer.moe;
  for (const WeightStore::Entry& entry : b.weights.entries()) {
    if (entry.parameter.group == ParameterGroup::kEmbedding) continue;
    const auto scales = b.weights.scales().find(entry.tensor.raw());
    const int64_t bytes = entry.tensor.bytes() + (scales == b.weights.scales().end() ? 0 : scales->second.bytes());
    weights += used(b, entry.parameter, static_cast<double>(experts) / moe_layers) * static_cast<double>(bytes);
  }
  const auto context = static_cast<double>(b.flags.context);
  const double cache = context * (cost.decode_fraction * static_cast<double>(cost.latent_bytes_per_token) +
                                  static_cast<double>(cost.indexer_bytes_per_token)) +
                       2.0 * static_cast<double>(cost.state_bytes);
  return weights + static_cast<double>(batch) * cache;
}

absl::Status bench_decode(Bench& b) {
  constexpr int kSteps = 20, kFirst = 3;
  const int64_t most = *std::max_element(b.flags.batches.begin(), b.flags.batches.end());
  // The sequences share the pages of one prompt: what a step reads is the same, and the prompt is computed once.
  ASSIGN_OR_RETURN(const auto cache, Cache::create(b.config, {.tokens = b.flags.context + (most + 1) * 128, .sequences = most + 1,
                                                              .dtype = b.weights.dtype()}, &b.stream));
  ASSIGN_OR_RETURN(const int64_t prompt, cache->open());
  RETURN_IF_ERROR(prefill(b, *cache, prompt, b.flags.context).status());
  ASSIGN_OR_RETURN(const Accounting cost, account(b.config, b.flags.context));
  for (const int64_t batch : b.flags.batches) {
    std::vector<int64_t> sequences;
    for (int64_t i = 0; i < batch; ++i) {
      ASSIGN_OR_RETURN(const int64_t sequence, cache->fork(prompt));
      sequences.push_back(sequence);
    }
    auto start = bench::Clock::now();
    for (int step = 0; step < kFirst + kSteps; ++step) {
      if (step == kFirst) start = bench::Clock::now();
      RETURN_IF_ERROR(pass(b, *cache, sequences, bench::random_ids(batch, b.config.vocab, static_cast<uint64_t>(step)), true));
    }
    const double seconds = bench::seconds_since(start) / kSteps;
    ASSIGN_OR_RETURN(const int64_t experts, experts_used(b, *cache, sequences, bench::random_ids(batch, b.config.vocab, kSteps)));
    print(absl::StrCat("decode, batch ", batch, ", context ", b.flags.context), seconds, static_cast<double>(batch), "bandwidth",
          decode_bytes(b, cost, batch, experts) / seconds / (b.flags.terabytes * 1e12), b.arena.peak() + cache->usage().bytes_total);
    RETURN_IF_ERROR(trace(b, absl::StrCat("decode, batch ", batch), kFirst, [&] {
      return pass(b, *cache, sequences, bench::random_ids(batch, b.config.vocab, kSteps), true);
    }));
    for (const int64_t sequence : sequences) RETURN_IF_ERROR(cache->free(sequence));
  }
  return absl::OkStatus();
}

absl::Status train_step(Bench& b, const WeightStore& gradients, ModelWeights& dw) {
  const kernels::ArenaScope scope(b.arena);
  const int64_t rows = b.flags.train_tokens, length = std::min(rows, b.flags.context);
  const std::vector<int32_t> ids = bench::random_ids(rows, b.config.vocab, 1);
  const Batch batch{.tokens = ids, .lengths = std::vector<int64_t>(static_cast<size_t>(rows / length), length), .cached = {}};
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.config, batch, nullptr, b.arena, b.stream));
  Step step = b.step(prepared);
  gradients.zero(b.stream);
  SavedForward saved;
  saved.recompute = true;
  const Tensor hidden = b.model->forward(b.weights.tensors(), step, &saved);
  const Tensor targets = step.upload(ids);
  const Tensor dlogprob = step.upload(std::vector<float>(static_cast<size_t>(rows), -1.0f / static_cast<float>(rows)));
  const Model::LogProbs log_probs = b.model->log_probs(b.weights.tensors(), hidden, targets, 1.0f, true, step);
  const Tensor dhidden = b.model->log_probs_backward(b.weights.tensors(), hidden, targets, 1.0f, log_probs, dlogprob, {}, dw, step);
  b.model->backward(b.weights.tensors(), saved, dhidden, dw, step);
  b.stream.synchronize();
  return absl::OkStatus();
}

absl::Status bench_train(Bench& b) {
  if (b.flags.train_tokens == 0) return absl::OkStatus();
  if (b.flags.fp8) {
    std::printf("training step: not with --fp8, as weights in fp8 are not trained\n");
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(WeightStore gradients, WeightStore::create_gradients(b.config, false, false, b.stream.device()));
  double best = 1e30;
  for (int i = 0; i < 2; ++i) {
    const auto start = bench::Clock::now();
    RETURN_IF_ERROR(train_step(b, gradients, gradients.tensors()));
    if (i > 0) best = bench::seconds_since(start);
  }
  ASSIGN_OR_RETURN(const Accounting cost, account(b.config, std::min(b.flags.train_tokens, b.flags.context) / 2));
  // Forward and twice as much backward; what recomputation adds does not count as useful.
  const double flops = 3.0 * static_cast<double>(b.flags.train_tokens) * static_cast<double>(cost.flops.total());
  print(absl::StrCat("training step, ", b.flags.train_tokens, " tokens"), best, static_cast<double>(b.flags.train_tokens), "bf16 peak",
        flops / best / (b.flags.teraflops * 1e12), b.arena.peak() + gradients.bytes());
  return trace(b, "training step", 1, [&] { return train_step(b, gradients, gradients.tensors()); });
}

absl::StatusOr<std::vector<float>> decode_logits(Bench& b, Cache& cache, const std::vector<int64_t>& sequences, int32_t id) {
  const kernels::ArenaScope scope(b.arena);
  const Batch batch{.tokens = std::vector<int32_t>(sequences.size(), id), .lengths = std::vector<int64_t>(sequences.size(), 1),
                    .cached = sequences};
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.config, batch, &cache, b.arena, b.stream));
  Step step = b.step(prepared);
  return host_values<float>(decode(b, step), b.stream);
}

// A row's logits at the model's true widths: as a training forward has them, after a prefill in pieces, and in decode alone and in
// batches up to 128. DataLoss when a bit differs.
absl::Status check_rows(Bench& b) {
  constexpr int64_t kDecoded = 8;
  const int64_t tokens = std::max<int64_t>(b.flags.check, 128), prompt = tokens - kDecoded, vocab = b.config.vocab;
  const std::vector<int32_t> ids = bench::random_ids(tokens, vocab, 3);
  std::vector<float> expected;
  {
    const kernels::ArenaScope scope(b.arena);
    const Batch batch{.tokens = ids, .lengths = {tokens}, .cached = {}};
    ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(b.config, batch, nullptr, b.arena, b.stream));
    Step step = b.step(prepared);
    SavedForward saved;
    saved.recompute = true;
    const Tensor hidden = b.model->forward(b.weights.tensors(), step, &saved);
    expected = host_values<float>(b.model->logits(b.weights.tensors(), hidden.slice(0, prompt, tokens), step), b.stream);
  }
  const auto same = [&](const std::vector<float>& logits, int64_t row, const std::string& what) -> absl::Status {
    for (size_t i = 0; i < logits.size(); ++i) {
      const float want = expected[static_cast<size_t>(row * vocab) + i % static_cast<size_t>(vocab)];
      if (std::memcmp(&logits[i], &want, sizeof want) == 0) continue;
      return absl::DataLossError(absl::StrCat(what, ", token ", prompt + row, ", logit ", i, ": ", logits[i], ", the training forward has ", want));
    }
    return absl::OkStatus();
  };
  ASSIGN_OR_RETURN(const auto cache, Cache::create(b.config, {.tokens = tokens + 300 * 128, .sequences = 130, .dtype = b.weights.dtype()},
                                                   &b.stream));
  ASSIGN_OR_RETURN(const int64_t sequence, cache->open());
  const std::vector<int64_t> pieces = {prompt - 100, 1, 64, 35};
  for (int64_t begin = 0; const int64_t count : pieces) {
    RETURN_IF_ERROR(pass(b, *cache, {sequence}, {ids.begin() + begin, ids.begin() + begin + count}, false));
    begin += count;
  }
  for (const int64_t batch : {1, 2, 32, 128}) {
    std::vector<int64_t> forks;
    for (int64_t i = 0; i < batch; ++i) {
      ASSIGN_OR_RETURN(const int64_t fork, cache->fork(sequence));
      forks.push_back(fork);
    }
    ASSIGN_OR_RETURN(const std::vector<float> logits, decode_logits(b, *cache, forks, ids[static_cast<size_t>(prompt)]));
    RETURN_IF_ERROR(same(logits, 0, absl::StrCat("decode in a batch of ", batch)));
    for (const int64_t fork : forks) RETURN_IF_ERROR(cache->free(fork));
  }
  for (int64_t row = 0; row < kDecoded; ++row) {
    ASSIGN_OR_RETURN(const std::vector<float> logits, decode_logits(b, *cache, {sequence}, ids[static_cast<size_t>(prompt + row)]));
    RETURN_IF_ERROR(same(logits, row, "decode"));
  }
  std::printf("ok the training forward, %lld tokens in pieces and decode in batches of 1 to 128 have the same bits\n",
              static_cast<long long>(tokens));
  return absl::OkStatus();
}

absl::Status run(const Flags& flags) {
  const int64_t length = std::min(flags.train_tokens, flags.context);
  if (length > 0 && (length < 2 || flags.train_tokens % length != 0)) {
    return absl::InvalidArgumentError(absl::StrCat("--train: ", flags.train_tokens, ", expected 0, 2.. --context ", flags.context,
                                                   ", or a multiple of it"));
  }
  ASSIGN_OR_RETURN(ModelConfig config, read_slice(flags.config, flags.layers));
  ASSIGN_OR_RETURN(const kernels::Device device, kernels::parse_device(flags.device));
  ASSIGN_OR_RETURN(const auto stream, kernels::Stream::create(device, 2));
  ASSIGN_OR_RETURN(WeightStore weights, WeightStore::create_weights(config, DType::kBf16, false, device, [&](const Parameter& p) {
                     return flags.fp8 && may_be_fp8(p, device.kind);
                   }));
  fill(weights, config.init_std, *stream);
  ASSIGN_OR_RETURN(auto model, Model::create(config));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(device, int64_t{1} << 37));
  Bench b{flags, *stream, std::move(config), std::move(weights), std::move(model), std::move(arena)};
  std::printf("%s, %d layers, bf16%s, weights %.1f GiB\n", flags.config.c_str(), flags.layers,
              flags.fp8 ? " with linear layers in fp8" : "", gib(b.weights.bytes()));
  if (flags.check > 0) RETURN_IF_ERROR(check_rows(b));
  RETURN_IF_ERROR(bench_prefill(b));
  RETURN_IF_ERROR(bench_decode(b));
  return bench_train(b);
}

}  // namespace
}  // namespace slipstream::model

int main(int argc, char** argv) {
  slipstream::model::Flags flags;
  CLI::App app("Speed of the first layers of a published shape, with random weights.");
  app.add_option("config", flags.config, "config.json")->required();
  app.add_option("--layers", flags.layers)->check(CLI::PositiveNumber);
  app.add_option("--device", flags.device, "cpu, cuda or cuda:N");
  app.add_option("--prefill", flags.prefill, "Tokens of each prompt, at least 2")->delimiter(',')->check(CLI::Range(int64_t{2}, int64_t{1} << 30));
  app.add_option("--batches", flags.batches, "Sequences of each decode")->delimiter(',')->check(CLI::PositiveNumber);
  app.add_option("--context", flags.context, "Tokens before the decode")->check(CLI::PositiveNumber);
  app.add_option("--train", flags.train_tokens, "Tokens of the training step; 0: none")->check(CLI::NonNegativeNumber);
  app.add_option("--chunk", flags.chunk, "Rows of a prefill pass")->check(CLI::PositiveNumber);
  app.add_option("--check", flags.check, "Compare the logits of so many tokens (128 or more), bit for bit, first")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  app.add_flag("--fp8", flags.fp8, "Linear layers in fp8, as rollout.fp8_weights; no training step then");
  CLI::Option* const trace = app.add_flag("--trace", flags.trace, "Print which kernels the time goes to; needs CUPTI");
  app.add_flag("--timeline", flags.timeline, "And every launch of one pass, in order")->needs(trace);
  app.add_option("--tflops", flags.teraflops, "The device's bf16 peak");
  app.add_option("--fp8-tflops", flags.fp8_teraflops, "Its e4m3 peak");
  app.add_option("--tbps", flags.terabytes, "The device's memory bandwidth");
  CLI11_PARSE(app, argc, argv);
  std::string problem;
  try {
    const absl::Status status = slipstream::model::run(flags);
    if (status.ok()) return 0;
    problem = std::string(status.message());
  } catch (const nlohmann::json::exception& error) {  // cutting a config of odd types
    problem = flags.config + ": " + error.what();
  }
  std::fprintf(stderr, "slice_bench: %s\n", problem.c_str());
  return 1;
}
