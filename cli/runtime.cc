#include "cli/runtime.h"

#include "cli/commands.h"

namespace slipstream::cli {
namespace {
constexpr int64_t kArenaBytes = int64_t{1} << 37;  // address space, touched as needed; ThreadSanitizer has no more
constexpr int64_t kCudaArenaBytes = int64_t{1} << 33;  // device memory
}

absl::StatusOr<Runtime> Runtime::open(const RuntimeFlags& flags) {
  ASSIGN_OR_RETURN(const kernels::DType dtype, parse_dtype(flags.dtype));
  const bool cuda = flags.device == "cuda";
  if (!cuda && flags.device != "cpu") {
    return absl::InvalidArgumentError(absl::StrCat("--device: ", flags.device, ", expected cpu or cuda"));
  }
  std::unique_ptr<kernels::Stream> device_stream;
  if (cuda) {  // before the weights are read
    ASSIGN_OR_RETURN(device_stream, kernels::Stream::create_cuda(0));
  }
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::load_weights(flags.model, dtype, *stream));
  ASSIGN_OR_RETURN(std::unique_ptr<model::Model> model, model::Model::create(loaded.config));
  if (cuda) {
    ASSIGN_OR_RETURN(loaded.store, loaded.store.copy_to(loaded.config, *device_stream));
    stream = std::move(device_stream);
  }
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create(stream->device(), cuda ? kCudaArenaBytes : kArenaBytes));
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
