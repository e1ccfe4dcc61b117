#include "model/load.h"

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "absl/strings/match.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "model/random_init.h"

namespace slipstream::model {
namespace {

using kernels::DType;

// Where the backbone's names may begin, the saved form first.
std::vector<std::string> prefixes_of(const ModelConfig& config) {
  if (config.prefix == "model.") return {config.prefix};
  return {config.prefix, "model."};
}

absl::StatusOr<std::string> find_prefix(const Checkpoint& checkpoint, const ModelConfig& config,
                                        const std::string& dir) {
  for (const std::string& prefix : prefixes_of(config)) {
    if (checkpoint.find(prefix + "embed_tokens.weight") != nullptr) return prefix;
  }
  return absl::NotFoundError(absl::StrCat(dir, ": ", config.prefix, "embed_tokens.weight: no such tensor"));
}

std::string mtp_prefix(const ModelConfig& config) {
  return absl::StrCat(config.prefix, "layers.", config.layers.size(), ".");
}

bool has_mtp(const Checkpoint& checkpoint, const ModelConfig& config) {
  if (config.mtp_layers == 0) return false;
  return checkpoint.find(mtp_prefix(config) + "eh_proj.weight") != nullptr;
}

// Tensors that a checkpoint may hold and a model does not read.
bool may_stay_unread(const std::string& name, const ModelConfig& config) {
  if (absl::EndsWith(name, "rotary_emb.inv_freq")) return true;
  if (!config.vision_prefix.empty() && absl::StartsWith(name, config.vision_prefix)) return true;
  const std::string mtp = mtp_prefix(config);
  return name == mtp + "embed_tokens.weight" || name == mtp + "shared_head.head.weight";
}

absl::Status check_unread(const Checkpoint& checkpoint, const ModelConfig& config, const std::string& dir) {
  for (const std::string& name : checkpoint.unread()) {
    if (may_stay_unread(name, config)) continue;
    if (checkpoint.find(name)->bytes.empty()) continue;  // transformers writes the tensors of zero shared experts
    return absl::InvalidArgumentError(absl::StrCat(dir, ": ", name, ": not a tensor of this ", config.model_type,
                                                   " configuration"));
  }
  return absl::OkStatus();
}

// The part of a parameter that one file tensor holds, in the file's shape.
Tensor part_of(const Tensor& tensor, const FilePart& part) {
  const int64_t rows = tensor.rank() == 3 ? tensor.size(0) * tensor.size(1) : tensor.size(0);
  const Tensor matrix = tensor.rank() == 1 ? tensor : tensor.view({rows, tensor.numel() / std::max<int64_t>(rows, 1)});
  const Tensor slice = matrix.slice(0, part.row_begin, part.row_end);
  return Tensor(slice.raw(), slice.dtype(), part.shape.data(), static_cast<int>(part.shape.size()));
}

struct PartToRead {
  const FilePart* part;
  Tensor to;
  Tensor scales;  // absent unless `to` is e4m3
};

absl::Status read_parts(Checkpoint& checkpoint, const WeightStore& store, kernels::Stream& stream) {
  std::vector<PartToRead> parts;
  for (const WeightStore::Entry& entry : store.entries()) {
    const auto found = store.scales().find(entry.tensor.raw());
    const Tensor scales = found == store.scales().end() ? Tensor() : found->second;
    int64_t expert = 0;  // of stacked ones each is a tensor of the file
    for (const FilePart& part : entry.parameter.parts) {
      parts.push_back({&part, part_of(entry.tensor, part), scales.rank() == 3 ? scales[expert++] : scales});
    }
  }
  std::vector<absl::Status> results(parts.size());
  stream.parallel_for(static_cast<int64_t>(parts.size()), 1, [&](int64_t begin, int64_t end, kernels::Worker&) {
    for (int64_t i = begin; i < end; ++i) {
      const PartToRead& part = parts[static_cast<size_t>(i)];
      const std::string& name = part.part->name;
      results[static_cast<size_t>(i)] = part.scales.empty() ? checkpoint.read_into(name, part.to)
                                                            : checkpoint.read_fp8_into(name, part.to, part.scales);
    }
  });
  for (const absl::Status& result : results) RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

// One expert in bf16, and all of them are read into the model's dtype.
bool stored_as_fp8(const Checkpoint& checkpoint, const Parameter& parameter) {
  return std::all_of(parameter.parts.begin(), parameter.parts.end(), [&](const FilePart& part) {
    const StoredTensor* stored = checkpoint.find(part.name);
    return stored != nullptr && stored->dtype == StoredDType::kF8E4M3;
  });
}

std::string config_text(const ModelConfig& config) {
  nlohmann::ordered_json json = config.source;
  json.erase("quantization_config");
  if (json.contains("text_config") && json["text_config"].is_object()) json["text_config"].erase("quantization_config");
  return json.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

// Everything beside the weights that another program expects to find in a model directory.
absl::Status copy_side_files(const std::string& from, const std::string& to) {
  for (const char* name : {"generation_config.json", "tokenizer.json", "tokenizer_config.json",
                           "special_tokens_map.json", "chat_template.jinja", "preprocessor_config.json"}) {
    std::error_code error;
    if (std::filesystem::exists(from + "/" + name, error)) RETURN_IF_ERROR(copy_side_file(from, to, name));
  }
  return absl::OkStatus();
}

void fill(const Tensor& tensor, const std::function<float(int64_t)>& value) {
  for (int64_t i = 0; i < tensor.numel(); ++i) tensor.f32()[i] = value(i);
}

}  // namespace

absl::StatusOr<LoadedWeights> load_weights(const std::string& dir, DType dtype, kernels::Stream& stream,
                                           const LoadOptions& options) {
  ASSIGN_OR_RETURN(ModelConfig config, read_model_config(dir));
  CheckpointOptions blocks;
  if (config.fp8) blocks = {.fp8_block_rows = config.fp8->block_rows, .fp8_block_cols = config.fp8->block_columns};
  ASSIGN_OR_RETURN(Checkpoint checkpoint, Checkpoint::open(dir, blocks));
  ASSIGN_OR_RETURN(config.prefix, find_prefix(checkpoint, config, dir));
  const bool keep = options.keep_fp8_for && blocks.fp8_block_rows == kFp8Block && blocks.fp8_block_cols == kFp8Block;
  const auto kept = [&](const Parameter& p) {
    return keep && may_be_fp8(p, *options.keep_fp8_for) && stored_as_fp8(checkpoint, p);
  };
  ASSIGN_OR_RETURN(WeightStore store,
                   WeightStore::create_weights(config, dtype, has_mtp(checkpoint, config), /*device=*/{}, kept));
  RETURN_IF_ERROR(read_parts(checkpoint, store, stream));
  RETURN_IF_ERROR(check_unread(checkpoint, config, dir));
  return LoadedWeights{std::move(config), std::move(store)};
}

absl::Status save_weights(const LoadedWeights& weights, const std::string& dir, const SaveOptions& options) {
  CHECK(weights.store.scales().empty());
  CheckpointWriter writer({.shard_bytes_max = options.shard_bytes_max, .before_step = {}});
  for (const WeightStore::Entry& entry : weights.store.entries()) {
    const DType file_dtype = entry.parameter.storage == Storage::kFp32 ? DType::kF32 : weights.config.dtype;
    for (const FilePart& part : entry.parameter.parts) {
      RETURN_IF_ERROR(writer.add(part.name, part_of(entry.tensor, part), file_dtype));
    }
  }
  std::optional<Checkpoint> source;  // its mapping must live until save()
  if (!options.carry_from.empty() && !weights.config.vision_prefix.empty()) {
    ASSIGN_OR_RETURN(source, Checkpoint::open(options.carry_from, {}));
    for (const std::string& name : source->names()) {
      if (absl::StartsWith(name, weights.config.vision_prefix)) RETURN_IF_ERROR(writer.add_raw(*source->find(name)));
    }
  }
  writer.set_config(config_text(weights.config));
  RETURN_IF_ERROR(writer.save(dir));
  return options.carry_from.empty() ? absl::OkStatus() : copy_side_files(options.carry_from, dir);
}

absl::StatusOr<LoadedWeights> random_weights(const ModelConfig& config, DType dtype, uint64_t seed,
                                             kernels::Stream& stream) {
  ASSIGN_OR_RETURN(WeightStore store, WeightStore::create_weights(config, dtype, config.mtp_layers > 0));
  for (const WeightStore::Entry& entry : store.entries()) {
    const bool bounded = config.kda && config.kda->lower_bound < 0.0f;
    // Spread evenly over the range the published initialisation draws from uniformly.
    const auto position = [&](int64_t i) {
      return (static_cast<double>(i) + 0.5) / static_cast<double>(entry.tensor.numel());
    };
    switch (entry.parameter.init) {
      case Init::kNormal:
        init_normal({.seed = seed, .name = entry.parameter.name, .std = config.init_std}, entry.tensor, stream);
        break;
      case Init::kOnes: fill(entry.tensor, [](int64_t) { return 1.0f; }); break;
      case Init::kZeros: fill(entry.tensor, [](int64_t) { return 0.0f; }); break;
      case Init::kDecay:  // 0 with a lower bound, else log of 1..16
        fill(entry.tensor, [&](int64_t i) {
          return bounded ? 0.0f : static_cast<float>(std::log(1.0 + 15.0 * position(i)));
        });
        break;
      case Init::kDecayBias:  // softplus⁻¹ of time steps from 1e-3 to 1e-1
        fill(entry.tensor, [&](int64_t i) {
          const double dt = std::exp(std::log(1e-3) + position(i) * std::log(1e2));
          return static_cast<float>(dt + std::log(-std::expm1(-dt)));
        });
        break;
    }
  }
  return LoadedWeights{config, std::move(store)};
}

}  // namespace slipstream::model
