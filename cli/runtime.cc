#include "cli/runtime.h"

#include "cli/commands.h"

namespace slipstream::cli {
namespace {
constexpr int64_t kArenaBytes = int64_t{1} << 37;  // address space, touched as needed; ThreadSanitizer has no more
}

absl::StatusOr<Runtime> Runtime::open(const RuntimeFlags& flags) {
  ASSIGN_OR_RETURN(const kernels::DType dtype, parse_dtype(flags.dtype));
  ASSIGN_OR_RETURN(std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(flags.threads));
  ASSIGN_OR_RETURN(model::LoadedWeights loaded, model::load_weights(flags.model, dtype, *stream));
  ASSIGN_OR_RETURN(std::unique_ptr<model::Model> model, model::Model::create(loaded.config));
  ASSIGN_OR_RETURN(kernels::Arena arena, kernels::Arena::create_cpu(kArenaBytes));
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
