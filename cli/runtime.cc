#include "cli/runtime.h"

#include "cli/commands.h"

namespace slipstream::cli {
namespace {
constexpr int64_t kArenaBytes = int64_t{1} << 37;  // address space, touched as needed; ThreadSanitizer has no more
}

absl::StatusOr<Runtime> Runtime::open(const RuntimeFlags& flags) {
  ASSIGN_OR_RETURN(const kernels::DType dtype, parse_dtype(flags.dtype));
  const absl::StatusOr<kernels::Device> device = kernels::parse_device(flags.device);
  if (!device.ok()) return absl::InvalidArgumentError(absl::StrCat("--device: ", device.status().message()));
  const bool on_cuda = device->kind == kernels::DeviceKind::kCuda;
  if (flags.fp8_weights && on_cuda && dtype != kernels::DType::kBf16) {
    return absl::InvalidArgumentError("--fp8-weights: expected --dtype bf16 on a GPU");
  }
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, kernels::Stream::create(*device, flags.threads));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> host, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::load_weights(flags.model, dtype, *host,
                                                                     {.keep_fp8_for = flags.fp8_weights
                                                                                          ? std::optional(device->kind)
                                                                                          : std::nullopt}));
  ASSIGN_OR_RETURN(std::unique_ptr<model::Model> model, model::Model::create(loaded.config));
  if (flags.fp8_latents && !loaded.config.mla) {
    return absl::InvalidArgumentError(absl::StrCat("--fp8-latents: expected a model with latent attention, ", flags.model, " has none"));
  }
  if (on_cuda || flags.fp8_weights) {
    ASSIGN_OR_RETURN(loaded.store, loaded.store.copy_to(loaded.config, *stream, flags.fp8_weights));
  }
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(*device, kArenaBytes));
  return Runtime{std::move(stream), std::move(loaded), std::move(model), std::move(arena)};
}

absl::Status check_ids(const std::string& flag, const std::vector<int32_t>& ids, const model::ModelConfig& config) {
  if (static_cast<int64_t>(ids.size()) > config.max_positions) {
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", ids.size(), " tokens, expected at most ",
                                                   "max_position_embeddings ", config.max_positions));
  }
  for (const int32_t id : ids) {
    if (id >= 0 && id < config.vocab) continue;
    return absl::InvalidArgumentError(absl::StrCat(flag, ": ", id, ", expected ids in 0..", config.vocab - 1));
  }
  return absl::OkStatus();
}

}  // namespace slipstream::cli
