// golden_check [--device cpu|cuda] [--dtype fp32|bf16] DIR...: compares a model directory with the values `transformers` computed for it (golden.safetensors beside
// model.safetensors and config.json; tests/golden/fixtures/README.md says what it holds). Prints one line a quantity with
// its error and its limit; exits 1 when any limit is passed. In bf16 (weights; on CUDA activations too) the smallest difference
// makes these small models choose other experts and positions, so the choices are those of an fp32 pass.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_replace.h"
#include "common/status.h"
#include "model/host_values.h"
#include "model/load.h"
#include "model/model.h"
#include "model/safetensors.h"

namespace slipstream::model {
namespace {

using kernels::DType;

constexpr double kLogitsMax = 2e-4;           // largest |difference|
constexpr double kHiddenMax = 2e-4;           // ‖difference‖ / ‖reference‖
constexpr double kGradientMax = 1e-3;         // ‖difference‖ / ‖reference‖
constexpr double kDecodeLogprobMax = 1e-4;    // largest |difference|
constexpr double kRouterWeightMax = 1e-4;     // largest |difference|
constexpr double kLossMax = 1e-4;             // |difference|
constexpr double kBf16LogprobMax = 2e-2;      // ‖difference‖ / ‖reference‖, in bf16
// The same of residual streams, whose errors add up: at the last layer of glm53_flash transformers in bf16 is at 2.5e-1.
constexpr double kBf16HiddenMax = 1e-1;
constexpr double kBf16GradientMax = 1e-1;    // ‖difference‖ / ‖reference‖, in bf16

// Prints results and remembers failures.
class Report {
 public:
  explicit Report(std::string name) : name_(std::move(name)) {}
  void line(const std::string& quantity, double error, double limit) {
    const bool ok = error <= limit;  // false for NaN
    failures_ += ok ? 0 : 1;
    std::printf("%s %s %s %.3e (limit %.0e)\n", ok ? "ok  " : "FAIL", name_.c_str(), quantity.c_str(), error, limit);
  }
  int failures() const { return failures_; }

 private:
  std::string name_;
  int failures_ = 0;
};

class Golden {
 public:
  static absl::StatusOr<Golden> open(const std::string& path) {
    ASSIGN_OR_RETURN(SafetensorsFile file, SafetensorsFile::open(path));
    return Golden(std::move(file));
  }
  const std::vector<StoredTensor>& tensors() const { return file_.tensors(); }
  bool has(const std::string& name) const { return file_.find(name) != nullptr; }
  std::vector<int64_t> shape(const std::string& name) const { return at(name).shape; }
  template <class T>
  std::vector<T> values(const std::string& name) const {
    const StoredTensor& tensor = at(name);
    std::vector<T> out(tensor.bytes.size() / sizeof(T));
    std::memcpy(out.data(), tensor.bytes.data(), out.size() * sizeof(T));
    return out;
  }

 private:
  explicit Golden(SafetensorsFile file) : file_(std::move(file)) {}
  const StoredTensor& at(const std::string& name) const {
    const StoredTensor* tensor = file_.find(name);
    if (tensor == nullptr) {
      std::fprintf(stderr, "%s: %s: missing\n", file_.path().c_str(), name.c_str());
      std::exit(2);
    }
    return *tensor;
  }
  SafetensorsFile file_;
};

double max_difference(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return INFINITY;
  double worst = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double difference = std::abs(double{a[i]} - b[i]);
    if (!(difference <= worst)) worst = difference;  // keeps NaN
  }
  return worst;
}

double relative_difference(const std::vector<float>& a, const std::vector<float>& reference) {
  if (a.size() != reference.size()) return INFINITY;
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double{a[i]} - reference[i]) * (double{a[i]} - reference[i]);
    norm += double{reference[i]} * reference[i];
  }
  if (difference == 0.0) return 0.0;
  return std::sqrt(difference / norm);
}

// Everything one fixture needs: model, memory, expectations.
struct Case {
  LoadedWeights loaded;
  std::unique_ptr<Model> model;
  std::unique_ptr<kernels::Stream> stream;
  kernels::Arena arena;
  Golden golden;
  std::optional<LoadedWeights> exact;  // in bf16: the weights in fp32

  Step step(const PreparedBatch& prepared) {
    return {*stream, arena, prepared, nullptr, stream->on_cuda() ? loaded.store.dtype() : DType::kF32};
  }
};

// In-memory names of the oracle for one of our parameters.
std::string oracle_name(const std::string& name) {
  std::string out = absl::StrReplaceAll(name, {{"hc_attn_", "attn_hc."}, {"hc_ffn_", "ffn_hc."}});
  for (const char* gate : {"f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias"}) {
    const std::string suffix = absl::StrCat("self_attn.", gate);
    if (absl::EndsWith(out, suffix)) {
      out = absl::StrCat(out.substr(0, out.size() - suffix.size()), "self_attn.forget_gate.", gate);
    }
  }
  return out;
}

// Our gradients under the oracle's names; gate and up of the experts become one tensor [E, 2F, H].
std::map<std::string, std::vector<float>> gradients_by_oracle_name(const WeightStore& gradients, kernels::Stream& stream) {
  std::map<std::string, std::vector<float>> out;
  std::map<std::string, const Tensor*> gates;
  for (const WeightStore::Entry& entry : gradients.entries()) {
    if (entry.tensor.empty()) continue;
    const std::string name = oracle_name(entry.parameter.name);
    if (absl::EndsWith(name, "mlp.experts.gate_proj")) {
      gates[name] = &entry.tensor;
    } else if (absl::EndsWith(name, "mlp.experts.up_proj")) {
      const std::string stem = name.substr(0, name.size() - std::strlen("up_proj"));
      const Tensor& gate = *gates.at(stem + "gate_proj");
      std::vector<float>& both = out["grad." + stem + "gate_up_proj"];
      for (int64_t e = 0; e < gate.size(0); ++e) {
        for (const Tensor& half : {gate[e], entry.tensor[e]}) {
          const std::vector<float> values = host_values<float>(half, stream);
          both.insert(both.end(), values.begin(), values.end());
        }
      }
    } else {
      out["grad." + name] = host_values<float>(entry.tensor, stream);
    }
  }
  return out;
}

void check_gradients(const WeightStore& gradients, const Golden& golden, kernels::Stream& stream, double limit,
                     Report& report) {
  const auto ours = gradients_by_oracle_name(gradients, stream);
  double worst = -1.0;  // so that the first one is reported, and none at all
  std::string worst_name;
  for (const StoredTensor& tensor : golden.tensors()) {
    if (!absl::StartsWith(tensor.name, "grad.")) continue;
    const auto it = ours.find(tensor.name);
    const double error =
        it == ours.end() ? INFINITY : relative_difference(it->second, golden.values<float>(tensor.name));
    if (!(error <= limit)) report.line(tensor.name, error, limit);
    if (!(error <= worst)) {
      worst = error;
      worst_name = tensor.name;
    }
  }
  int unexpected = 0;
  for (const auto& [name, values] : ours) {
    if (golden.has(name)) continue;
    // The oracle leaves out gradients it never computed; ours must then be zero.
    unexpected += std::any_of(values.begin(), values.end(), [](float v) { return v != 0.0f; }) ? 1 : 0;
  }
  report.line("gradients, worst: " + worst_name, worst_name.empty() ? INFINITY : worst, limit);
  report.line("gradients the reference does not have", unexpected, 0.0);
}

// Selected positions, as sets.
void check_selection(const std::string& name, const Selection& selection, int64_t length, const Golden& golden,
                     kernels::Stream& stream, Report& report) {
  const std::vector<int32_t> expected = golden.values<int32_t>(name);
  const int64_t width = golden.shape(name).back(), rows = static_cast<int64_t>(expected.size()) / width;
  int different = selection.empty() ? static_cast<int>(rows) : 0;
  std::vector<int32_t> indices, counts;
  if (!selection.empty()) {
    indices = host_values<int32_t>(selection.indices, stream);
    counts = host_values<int32_t>(selection.counts, stream);
  }
  for (int64_t r = 0; r < rows && !selection.empty(); ++r) {
    std::set<int32_t> theirs, ours;
    for (int64_t i = 0; i < width; ++i) {
      const int32_t position = expected[static_cast<size_t>(r * width + i)];
      if (position >= 0 && position <= r % length) theirs.insert(position);
    }
    const int32_t* row = indices.data() + r * selection.indices.size(1);
    ours.insert(row, row + counts[static_cast<size_t>(r)]);
    different += ours != theirs ? 1 : 0;
  }
  report.line(name + " queries that differ", different, 0.0);
}

// Chosen experts, as sets, with their weights.
void check_router(const std::string& gate, const Moe::Saved& moe, int64_t per_token, const Golden& golden,
                  kernels::Stream& stream, Report& report) {
  const std::vector<int32_t> our_experts = host_values<int32_t>(moe.experts, stream);
  const std::vector<float> our_weights = host_values<float>(moe.weights, stream);
  const std::vector<int32_t> experts = golden.values<int32_t>("router.experts." + gate);
  const std::vector<float> weights = golden.values<float>("router.weights." + gate);
  const int64_t rows = static_cast<int64_t>(experts.size()) / per_token;
  int different = moe.experts.size(0) == rows ? 0 : static_cast<int>(rows);
  double worst = 0.0;
  for (int64_t t = 0; t < rows && different < rows; ++t) {
    std::map<int32_t, float> ours, theirs;
    for (int64_t i = t * per_token; i < (t + 1) * per_token; ++i) {
      ours[our_experts[static_cast<size_t>(i)]] = our_weights[static_cast<size_t>(i)];
      theirs[experts[static_cast<size_t>(i)]] = weights[static_cast<size_t>(i)];
    }
    bool same = ours.size() == theirs.size();
    for (const auto& [expert, weight] : theirs) {
      same = same && ours.count(expert) == 1;
      const double error = same ? std::abs(double{weight} - ours[expert]) : 0.0;
      if (!(error <= worst)) worst = error;  // keeps NaN
    }
    different += same ? 0 : 1;
  }
  report.line(absl::StrCat("router.experts.", gate, " tokens that differ"), different, 0.0);
  report.line(absl::StrCat("router.weights.", gate), worst, kRouterWeightMax);
}

// All discrete choices that the reference recorded: one that no layer of ours answers for is a failure.
void check_choices(const SavedForward& saved, const ModelConfig& config, int64_t length, const Golden& golden,
                   kernels::Stream& stream, Report& report) {
  int64_t unanswered = std::count_if(golden.tensors().begin(), golden.tensors().end(), [](const StoredTensor& tensor) {
    return absl::StartsWith(tensor.name, "topk.") || absl::StartsWith(tensor.name, "router.experts.");
  });
  for (size_t l = 0; l < config.layers.size(); ++l) {
    const std::string layer = absl::StrCat(config.prefix, "layers.", l, ".");
    const std::string topk = absl::StrCat("topk.", layer, "self_attn.indexer"), gate = layer + "mlp.gate";
    if (golden.has(topk)) {
      check_selection(topk, saved.choices[l].selection, length, golden, stream, report);
      --unanswered;
    }
    if (golden.has("router.experts." + gate)) {
      check_router(gate, saved.layers[l].moe, config.moe->per_token, golden, stream, report);
      --unanswered;
    }
  }
  report.line("choices of layers we do not have", static_cast<double>(unanswered), 0.0);
}

absl::Status check_training(Case& c, Report& report) {
  const ModelConfig& config = c.model->config();
  const std::vector<int64_t> shape = c.golden.shape("input_ids");
  const int64_t sequences = shape[0], length = shape[1];
  const Batch batch{.tokens = c.golden.values<int32_t>("input_ids"),
                    .lengths = std::vector<int64_t>(static_cast<size_t>(sequences), length),
                    .cached = {}};
  const kernels::ArenaScope scope(c.arena);
  ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(config, batch, nullptr, c.arena, *c.stream));
  Step step = c.step(prepared);
  const ModelWeights& w = c.loaded.store.tensors();
  SavedForward saved;
  Choices choices;
  if (c.exact) {
    Step exact{*c.stream, c.arena, prepared};
    c.model->forward(c.exact->store.tensors(), exact, nullptr, {.replay = nullptr, .capture = &choices});
  }
  const Tensor hidden = c.model->forward(w, step, &saved, {.replay = c.exact ? &choices : nullptr, .capture = nullptr});

  for (size_t l = 0; l < config.layers.size(); ++l) {
    const std::string name = absl::StrCat("hidden.", config.prefix, "layers.", l);
    report.line(name, relative_difference(host_values<float>(saved.states[l + 1], *c.stream), c.golden.values<float>(name)), c.exact ? kBf16HiddenMax : kHiddenMax);
  }
  if (!c.exact) check_choices(saved, config, length, c.golden, *c.stream, report);
  if (!c.exact) {
    report.line("logits", max_difference(host_values<float>(c.model->logits(w, hidden, step), *c.stream),
                                         c.golden.values<float>("logits")),
                kLogitsMax);
  }

  // loss = -sum(w * logprob) / count(w != 0) over the tokens that have a predecessor.
  const std::vector<float> loss_weights = c.golden.values<float>("loss_weights");
  const double count = static_cast<double>(
      std::count_if(loss_weights.begin(), loss_weights.end(), [](float weight) { return weight != 0.0f; }));
  std::vector<int32_t> targets;
  std::vector<float> dlogprob;
  for (int64_t b = 0; b < sequences; ++b) {
    for (int64_t t = 0; t < length; ++t) {
      const int64_t row = b * length + t;
      const bool last = t == length - 1;
      targets.push_back(last ? -1 : batch.tokens[static_cast<size_t>(row + 1)]);
      dlogprob.push_back(last ? 0.0f
                              : static_cast<float>(-loss_weights[static_cast<size_t>(b * (length - 1) + t)] / count));
    }
  }
  const Tensor target_rows = step.upload(targets);
  const Model::LogProbs log_probs = c.model->log_probs(w, hidden, target_rows, 1.0f, /*entropy=*/false, step);
  const std::vector<float> logprobs = host_values<float>(log_probs.logprob, *c.stream);
  std::vector<float> token_logprobs;
  double loss = 0.0;
  for (size_t row = 0; row < targets.size(); ++row) {
    if (targets[row] < 0) continue;
    token_logprobs.push_back(logprobs[row]);
    loss += double{dlogprob[row]} * logprobs[row];
  }
  const std::vector<float> expected = c.golden.values<float>("token_logprobs");
  if (c.exact) {
    report.line("token_logprobs", relative_difference(token_logprobs, expected), kBf16LogprobMax);
  } else {
    report.line("token_logprobs", max_difference(token_logprobs, expected), kLogitsMax);
  }
  report.line("loss", std::abs(loss - c.golden.values<float>("loss")[0]), c.exact ? kBf16LogprobMax : kLossMax);

  ASSIGN_OR_RETURN(const WeightStore zeros, WeightStore::create_gradients(config, c.loaded.store.with_mtp()));
  ASSIGN_OR_RETURN(WeightStore gradients, zeros.copy_to(config, *c.stream));
  const Tensor dhidden = c.model->log_probs_backward(w, hidden, target_rows, 1.0f, log_probs, step.upload(dlogprob), {},
                                                     gradients.tensors(), step);
  c.model->backward(w, saved, dhidden, gradients.tensors(), step);
  // Gradients of the small models with residual streams err 200 times as much as others' in fp32; in bf16 half of each is
  // noise, which is only shown.
  const double limit = !c.exact ? kGradientMax : config.hyper ? INFINITY : kBf16GradientMax;
  check_gradients(gradients, c.golden, *c.stream, limit, report);
  return absl::OkStatus();
}

absl::Status check_decode(Case& c, Report& report) {
  const ModelConfig& config = c.model->config();
  const ModelWeights& w = c.loaded.store.tensors();
  std::vector<int32_t> tokens = c.golden.values<int32_t>("decode_prompt");
  const std::vector<int32_t> expected_ids = c.golden.values<int32_t>("decode_ids");
  ASSIGN_OR_RETURN(const std::unique_ptr<Cache> cache,
                   Cache::create(config, {.tokens = 1024, .sequences = 1, .dtype = c.loaded.store.dtype()}, c.stream.get()));
  ASSIGN_OR_RETURN(const int64_t sequence, cache->open());
  std::vector<float> logprobs;
  int different = 0;
  for (const int32_t expected : expected_ids) {
    const kernels::ArenaScope scope(c.arena);
    const Batch batch{.tokens = tokens, .lengths = {static_cast<int64_t>(tokens.size())}, .cached = {sequence}};
    ASSIGN_OR_RETURN(const PreparedBatch prepared, prepare_batch(config, batch, cache.get(), c.arena, *c.stream));
    Step step = c.step(prepared);
    const Tensor hidden = c.model->forward(w, step, nullptr);
    const Tensor last = hidden.slice(0, prepared.rows() - 1, prepared.rows());
    const Tensor logits = c.model->logits(w, last, step);
    const std::vector<float> row = host_values<float>(logits, *c.stream);
    const int32_t id = static_cast<int32_t>(std::max_element(row.begin(), row.end()) - row.begin());
    const Tensor target = step.upload(std::vector<int32_t>{id});
    logprobs.push_back(host_values<float>(c.model->log_probs(w, last, target, 1.0f, false, step).logprob, *c.stream)[0]);
    different += id != expected ? 1 : 0;
    tokens = {id};
  }
  report.line("decode_ids that differ", different, 0.0);
  report.line("decode_logprobs", max_difference(logprobs, c.golden.values<float>("decode_logprobs")), kDecodeLogprobMax);
  return absl::OkStatus();
}

struct Options {
  bool cuda = false;
  DType dtype = DType::kF32;
};

absl::StatusOr<int> check_directory(const std::string& dir, const Options& options) {
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(2));
  ASSIGN_OR_RETURN(LoadedWeights loaded, load_weights(dir, options.dtype, *stream));
  std::optional<LoadedWeights> exact;
  if (options.dtype == DType::kBf16) {
    ASSIGN_OR_RETURN(exact, load_weights(dir, DType::kF32, *stream));
  }
  if (options.cuda) {
    ASSIGN_OR_RETURN(stream, kernels::Stream::create_cuda(0));
    ASSIGN_OR_RETURN(loaded.store, loaded.store.copy_to(loaded.config, *stream));
    if (exact) {
      ASSIGN_OR_RETURN(exact->store, exact->store.copy_to(exact->config, *stream));
    }
  }
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, Model::create(loaded.config));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(stream->device(), int64_t{1} << (options.cuda ? 33 : 36)));
  ASSIGN_OR_RETURN(Golden golden, Golden::open(dir + "/golden.safetensors"));
  Case c{std::move(loaded), std::move(model), std::move(stream), std::move(arena), std::move(golden), std::move(exact)};
  Report report(dir.substr(dir.find_last_of('/') + 1));
  RETURN_IF_ERROR(check_training(c, report));
  if (!c.exact) RETURN_IF_ERROR(check_decode(c, report));  // in bf16 decode has prefill's bits: the invariance test
  return report.failures();
}

}  // namespace
}  // namespace slipstream::model

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: golden_check [--device cpu|cuda] [--dtype fp32|bf16] DIR...\n");
    return 2;
  }
  slipstream::model::Options options;
  int failures = 0;
  for (int i = 1; i < argc; ++i) {
    std::string dir = argv[i];
    if (dir == "--device" && i + 1 < argc) {
      options.cuda = std::string(argv[++i]) == "cuda";
      continue;
    }
    if (dir == "--dtype" && i + 1 < argc) {
      const bool bf16 = std::string(argv[++i]) == "bf16";
      options.dtype = bf16 ? slipstream::kernels::DType::kBf16 : slipstream::kernels::DType::kF32;
      continue;
    }
    while (dir.size() > 1 && dir.back() == '/') dir.pop_back();
    const absl::StatusOr<int> result = slipstream::model::check_directory(dir, options);
    if (!result.ok()) {
      std::fprintf(stderr, "golden_check: %s\n", std::string(result.status().message()).c_str());
      return 2;
    }
    failures += *result;
  }
  return failures == 0 ? 0 : 1;
}
