// slipstream generate --model DIR --ids 5,9,17: sampled continuation, with the log-prob of each token.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <optional>

#include "cli/commands.h"
#include "cli/runtime.h"
#include "kernels/sampling/sampling.h"
#include "model/host_values.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {
namespace {

constexpr int64_t kPrefillTokens = 512;  // of one forward pass; bounds its memory, not its result

struct Flags {
  RuntimeFlags runtime;
  std::string ids;
  int64_t max_tokens = 32;
  float temperature = 1.0f;
  int32_t top_k = 0;
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint64_t seed = 0;
  bool ignore_eos = false;
  bool weight_panels = true;
  bool json = false;
};

struct Generation {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  const char* finish_reason = "length";
};

absl::Status check_flags(const Flags& flags) {
  const auto refuse = [](const char* flag, const char* expected) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": expected ", expected));
  };
  const bool greedy = flags.temperature == 0.0f;
  if (!greedy && !(flags.temperature >= 1e-3f && flags.temperature <= 100.0f)) {
    return refuse("--temperature", "0 or 0.001..100");
  }
  if (!(flags.top_p > 0.0f) || flags.top_p > 1.0f) return refuse("--top-p", "more than 0, at most 1");
  if (!(flags.min_p >= 0.0f) || flags.min_p >= 1.0f) return refuse("--min-p", "at least 0, less than 1");
  return absl::OkStatus();
}

absl::StatusOr<Generation> generate_tokens(const Flags& flags, const std::vector<int32_t>& prompt, Runtime& runtime) {
  const model::ModelConfig& config = runtime.model->config();
  const model::ModelWeights& weights = runtime.loaded.store.tensors();
  const int64_t prompt_tokens = static_cast<int64_t>(prompt.size());
  RETURN_IF_ERROR(check_ids("--ids", prompt, config));
  // The last token sampled is never stored, so one more than the positions left can be.
  const int64_t max_tokens = std::min(flags.max_tokens, config.max_positions - prompt_tokens + 1);
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Cache> cache,
                   model::Cache::create(config, {.tokens = prompt_tokens + max_tokens, .sequences = 1,
                                                 .dtype = runtime.loaded.store.dtype(),
                                                 .fp8_latents = flags.runtime.fp8_latents},
                                        runtime.stream.get()));
  ASSIGN_OR_RETURN(const int64_t sequence, cache->open());
  std::optional<model::WeightPanels> panels;
  if (flags.weight_panels && !runtime.stream->on_cuda()) {
    ASSIGN_OR_RETURN(panels, model::WeightPanels::create(runtime.loaded.store));
  }
  Generation out;
  std::vector<int32_t> pending = prompt;  // not yet in the cache
  while (static_cast<int64_t>(out.ids.size()) < max_tokens) {
    const kernels::ArenaScope scope(runtime.arena);
    const int64_t count = std::min<int64_t>(static_cast<int64_t>(pending.size()), kPrefillTokens);
    const model::Batch batch{.tokens = {pending.begin(), pending.begin() + count}, .lengths = {count},
                             .cached = {sequence}};
    ASSIGN_OR_RETURN(const model::PreparedBatch prepared,
                     model::prepare_batch(config, batch, cache.get(), runtime.arena, *runtime.stream));
    model::Step step = runtime.step(prepared, panels ? &*panels : nullptr);
    const kernels::Tensor hidden = runtime.model->forward(weights, step, nullptr);
    pending.erase(pending.begin(), pending.begin() + count);
    if (!pending.empty()) continue;
    const kernels::Tensor logits = runtime.model->logits(weights, hidden.slice(0, count - 1, count), step);
    const kernels::SamplingRow row{.temperature = flags.temperature, .top_k = flags.top_k, .top_p = flags.top_p,
                                   .min_p = flags.min_p, .seed = flags.seed,
                                   .counter = static_cast<uint64_t>(prompt_tokens) + out.ids.size()};
    const kernels::Tensor token = step.ints({1}), logprob = step.island({1}), truncated = step.ints({1});
    kernels::launch(kernels::Sampling{.logits = logits, .rows = &row, .tokens = token, .logprob = logprob,
                                      .truncated = truncated},
                    *runtime.stream);
    const int32_t id = model::host_values<int32_t>(token, *runtime.stream)[0];
    if (id < 0) {
      return absl::DataLossError(absl::StrCat(flags.runtime.model, ": the logits of token ", out.ids.size(),
                                              " are not finite numbers"));
    }
    out.ids.push_back(id);
    out.logprobs.push_back(model::host_values<float>(logprob, *runtime.stream)[0]);
    pending = {id};
    if (!flags.ignore_eos && std::find(config.eos.begin(), config.eos.end(), id) != config.eos.end()) {
      out.finish_reason = "stop";
      break;
    }
  }
  return out;
}

absl::Status generate(const Flags& flags) {
  RETURN_IF_ERROR(check_flags(flags));
  ASSIGN_OR_RETURN(const std::vector<int32_t> prompt, parse_ids("--ids", flags.ids));
  ASSIGN_OR_RETURN(Runtime runtime, Runtime::open(flags.runtime));
  ASSIGN_OR_RETURN(const Generation generation, generate_tokens(flags, prompt, runtime));
  if (flags.json) {
    const nlohmann::ordered_json out = {{"ids", generation.ids},
                                        {"logprobs", generation.logprobs},
                                        {"finish_reason", generation.finish_reason}};
    std::printf("%s\n", out.dump().c_str());
  } else {
    for (size_t i = 0; i < generation.ids.size(); ++i) std::printf("%s%d", i == 0 ? "" : ",", generation.ids[i]);
    std::printf("\n");
  }
  return absl::OkStatus();
}

}  // namespace

Run add_generate(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("--model", flags->runtime.model, "Model directory")->required();
  app.add_option("--ids", flags->ids, "Prompt token ids, such as 5,9,17")->required();
  app.add_option("--max-tokens", flags->max_tokens, "Most tokens to sample")->check(integer_in(1));
  app.add_option("--temperature", flags->temperature, "0: always the most probable token")->check(finite_number());
  app.add_option("--top-k", flags->top_k, "Sample among the k most probable tokens; 0: all")
      ->check(integer_in(0, std::numeric_limits<int32_t>::max()));
  app.add_option("--top-p", flags->top_p, "Sample among the most probable tokens that reach this probability")
      ->check(finite_number());
  app.add_option("--min-p", flags->min_p, "Sample among tokens at least this fraction as probable as the first")
      ->check(finite_number());
  app.add_option("--seed", flags->seed, "Of the random draws")->check(seed_number());
  app.add_flag("--ignore-eos", flags->ignore_eos, "Go on after an end-of-sequence token");
  app.add_flag("!--no-weight-panels", flags->weight_panels, "Keep one copy of the weights: less memory, slower");
  app.add_option("--dtype", flags->runtime.dtype, "fp32 or bf16");
  app.add_flag("--fp8-weights", flags->runtime.fp8_weights, "Linear layers in fp8, as rollout.fp8_weights");
  app.add_flag("--fp8-latents", flags->runtime.fp8_latents, "Cached latent rows in fp8, as rollout.fp8_latents");
  app.add_option("--device", flags->runtime.device, "cpu, cuda or cuda:N");
  app.add_option("--threads", flags->runtime.threads, "CPU threads")->check(thread_count());
  app.add_flag("--json", flags->json, "One JSON object: {\"ids\": [...], \"logprobs\": [...]}");
  return [flags] { return generate(*flags); };
}

}  // namespace slipstream::cli
