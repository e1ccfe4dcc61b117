// slipstream init DIR --config PRESET|PATH: a checkpoint with random weights in the published format.
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/presets.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "model/load.h"

namespace slipstream::cli {
namespace {

struct Flags {
  std::string directory;
  std::string config;
  uint64_t seed = 0;
  int64_t shard_bytes_max = 5'000'000'000;
  int threads = 2;
  bool force = false;
};

// 744 B random parameters are a typing mistake, not a wish.
constexpr int64_t kParametersMax = 20'000'000'000;

absl::Status init(const Flags& flags) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, read_config_or_preset(flags.config));
  RETURN_IF_ERROR(check_replaces_nothing(flags.directory, flags.force));
  int64_t parameters = 0;
  for (const model::Parameter& p : model::list_parameters(config, config.mtp_layers > 0)) parameters += p.numel();
  if (parameters > kParametersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(flags.config, ": ", parameters, " parameters, expected at most ", kParametersMax));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(const model::LoadedWeights weights,
                   model::random_weights(config, config.dtype, flags.seed, *stream));
  RETURN_IF_ERROR(model::save_weights(weights, flags.directory,
                                      {.shard_bytes_max = flags.shard_bytes_max, .carry_from = ""}));
  std::printf("%s: %s, %lld parameters\n", flags.directory.c_str(), config.model_type.c_str(),
              static_cast<long long>(parameters));
  return absl::OkStatus();
}

}  // namespace

Run add_init(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("directory", flags->directory, "Where the checkpoint goes")->required();
  app.add_option("--config", flags->config, "A config.json, a model directory, or a preset: " + preset_names())
      ->required();
  app.add_option("--seed", flags->seed, "Of the random weights")->check(seed_number());
  app.add_option("--shard-bytes", flags->shard_bytes_max, "Largest shard file")->check(integer_in(1));
  app.add_option("--threads", flags->threads, "CPU threads")->check(thread_count());
  app.add_flag("--force", flags->force, "Replace a model that is already there");
  return [flags] { return init(*flags); };
}

}  // namespace slipstream::cli
