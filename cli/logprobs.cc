// slipstream logprobs --model DIR --ids 5,9,17: log p(ids[i] | ids[<i]).
#include <cmath>
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/runtime.h"
#include "model/host_values.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {
namespace {

struct Flags {
  RuntimeFlags runtime;
  std::string ids;
  bool json = false;
};

absl::Status logprobs(const Flags& flags) {
  ASSIGN_OR_RETURN(const std::vector<int32_t> ids, parse_ids("--ids", flags.ids));
  ASSIGN_OR_RETURN(Runtime runtime, Runtime::open(flags.runtime));
  RETURN_IF_ERROR(check_ids("--ids", ids, runtime.model->config()));
  const model::Batch batch{.tokens = ids, .lengths = {static_cast<int64_t>(ids.size())}, .cached = {}};
  ASSIGN_OR_RETURN(const model::PreparedBatch prepared,
                   model::prepare_batch(runtime.model->config(), batch, nullptr, runtime.arena, *runtime.stream));
  model::Step step = runtime.step(prepared);
  const model::ModelWeights& weights = runtime.loaded.store.tensors();
  const kernels::Tensor hidden =
      runtime.model->forward(weights, step, nullptr, {.fp8_latents = flags.runtime.fp8_latents});
  std::vector<int32_t> targets(ids.begin() + (ids.empty() ? 0 : 1), ids.end());
  targets.resize(ids.size(), -1);
  const std::vector<float> values = model::host_values<float>(
      runtime.model->log_probs(weights, hidden, step.upload(targets), /*temperature=*/1.0f, /*entropy=*/false, step)
          .logprob,
      *runtime.stream);

  for (size_t i = 0; i + 1 < ids.size(); ++i) {
    if (std::isfinite(values[i])) continue;
    return absl::DataLossError(absl::StrCat(flags.runtime.model, ": the log-prob of token ", i + 1,
                                            " is not a finite number"));
  }
  nlohmann::ordered_json out;
  out["ids"] = ids;
  out["logprobs"] = nlohmann::ordered_json::array({nullptr});
  for (size_t i = 0; i + 1 < ids.size(); ++i) out["logprobs"].push_back(values[i]);
  if (flags.json) {
    std::printf("%s\n", out.dump().c_str());
  } else {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (i == 0) {
        std::printf("%8d  -\n", ids[i]);
      } else {
        std::printf("%8d  %.6f\n", ids[i], static_cast<double>(values[i - 1]));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

Run add_logprobs(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("--model", flags->runtime.model, "Model directory")->required();
  app.add_option("--ids", flags->ids, "Token ids, such as 5,9,17")->required();
  app.add_option("--dtype", flags->runtime.dtype, "fp32 or bf16");
  app.add_flag("--fp8-weights", flags->runtime.fp8_weights, "Linear layers in fp8, as rollout.fp8_weights");
  app.add_flag("--fp8-latents", flags->runtime.fp8_latents, "Cached latent rows in fp8, as rollout.fp8_latents");
  app.add_option("--device", flags->runtime.device, "cpu, cuda or cuda:N");
  app.add_option("--threads", flags->runtime.threads, "CPU threads")->check(thread_count());
  app.add_flag("--json", flags->json, "One JSON object: {\"ids\": [...], \"logprobs\": [null, ...]}");
  return [flags] { return logprobs(*flags); };
}

}  // namespace slipstream::cli
