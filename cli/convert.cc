// slipstream convert MODEL OUT: a checkpoint in another dtype or other shards; FP8 weights come out dequantised.
#include <cstdio>
#include <filesystem>
#include <memory>

#include "cli/commands.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "model/load.h"

namespace slipstream::cli {
namespace {

struct Flags {
  std::string model;
  std::string out;
  std::string dtype = "bf16";
  int64_t shard_bytes_max = 5'000'000'000;
  int threads = 2;
  bool force = false;
};

// Names the dtype wherever the config has it, so that the next reader believes the files.
void set_dtype(model::ModelConfig& config, kernels::DType dtype) {
  const char* name = dtype == kernels::DType::kF32 ? "float32" : "bfloat16";
  config.dtype = dtype;
  config.source["dtype"] = name;
  config.source.erase("torch_dtype");
  if (config.source.contains("text_config") && config.source["text_config"].is_object()) {
    config.source["text_config"].erase("torch_dtype");
    config.source["text_config"]["dtype"] = name;
  }
}

absl::Status convert(const Flags& flags) {
  ASSIGN_OR_RETURN(const kernels::DType dtype, parse_dtype(flags.dtype));
  std::error_code error;
  if (std::filesystem::equivalent(flags.model, flags.out, error)) {
    return absl::InvalidArgumentError(flags.out + ": expected another directory than the model's");
  }
  RETURN_IF_ERROR(check_replaces_nothing(flags.out, flags.force));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights weights, model::load_weights(flags.model, dtype, *stream));
  set_dtype(weights.config, dtype);
  RETURN_IF_ERROR(model::save_weights(weights, flags.out,
                                      {.shard_bytes_max = flags.shard_bytes_max, .carry_from = flags.model}));
  std::printf("%s: written from %s as %s\n", flags.out.c_str(), flags.model.c_str(), flags.dtype.c_str());
  return absl::OkStatus();
}

}  // namespace

Run add_convert(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("model", flags->model, "Model directory")->required();
  app.add_option("out", flags->out, "Where the converted checkpoint goes")->required();
  app.add_option("--dtype", flags->dtype, "fp32 or bf16");
  app.add_option("--shard-bytes", flags->shard_bytes_max, "Largest shard file")->check(integer_in(1));
  app.add_option("--threads", flags->threads, "CPU threads")->check(thread_count());
  app.add_flag("--force", flags->force, "Replace a model that is already there");
  return [flags] { return convert(*flags); };
}

}  // namespace slipstream::cli
