#include "model/config.h"

#include <filesystem>
#include <fstream>
#include <sstream>

#include "model/architectures/registry.h"
#include "model/json_reader.h"
#include "model/json_tree.h"

namespace slipstream::model {
namespace {

constexpr int64_t kConfigBytesMax = 16 << 20;

void read_dtype(JsonReader& reader, ModelConfig& config) {
  const std::string name = reader.has("dtype") ? reader.require_string("dtype")
                                               : reader.get_string("torch_dtype", "bfloat16");
  if (name == "float32") {
    config.dtype = kernels::DType::kF32;
  } else if (name == "bfloat16") {
    config.dtype = kernels::DType::kBf16;
  } else {
    reader.fail(reader.has("dtype") ? "dtype" : "torch_dtype", "\"float32\" or \"bfloat16\"");
  }
}

void read_eos(JsonReader& reader, ModelConfig& config) {
  const nlohmann::ordered_json* value = reader.find("eos_token_id");
  if (value == nullptr) return;
  const nlohmann::ordered_json list = value->is_array() ? *value : nlohmann::ordered_json::array({*value});
  for (const auto& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() >= config.vocab) {
      return reader.fail("eos_token_id", absl::StrCat("token ids below vocab_size ", config.vocab));
    }
    config.eos.push_back(id.get<int32_t>());
  }
}

void read_fp8(JsonReader& reader, ModelConfig& config) {
  if (!reader.has("quantization_config")) return;
  JsonReader quantization = reader.object("quantization_config");
  if (quantization.require_string("quant_method") != "fp8") quantization.fail("quant_method", "\"fp8\"");
  if (quantization.get_string("fmt", "e4m3") != "e4m3") quantization.fail("fmt", "\"e4m3\"");
  Fp8Config fp8;
  if (const nlohmann::ordered_json* block = quantization.find("weight_block_size"); block != nullptr) {
    const auto positive = [](const nlohmann::ordered_json& n) {
      return n.is_number_integer() && n.get<int64_t>() > 0 && n.get<int64_t>() <= 1 << 16;
    };
    if (block->is_array() && block->size() == 2 && positive((*block)[0]) && positive((*block)[1])) {
      fp8.block_rows = (*block)[0].get<int64_t>();
      fp8.block_columns = (*block)[1].get<int64_t>();
    } else {
      quantization.fail("weight_block_size", "two positive integers");
    }
  }
  config.fp8 = fp8;
  reader.adopt(quantization.status());
}

}  // namespace

absl::StatusOr<ModelConfig> parse_model_config(const nlohmann::ordered_json& json, const std::string& label) {
  if (!json.is_object()) return absl::InvalidArgumentError(label + ": expected a JSON object");
  JsonReader reader(json, label);
  std::string model_type = reader.require_string("model_type");
  RETURN_IF_ERROR(reader.status());
  if (model_type == "glm5_next_text") model_type = "glm5_next";  // a flat, text-only config
  const Architecture* architecture = find_architecture(model_type);
  if (architecture == nullptr) {
    reader.fail("model_type", absl::StrCat("one of ", known_architectures()));
    return reader.status();
  }
  ModelConfig config;
  config.model_type = model_type;
  config.source = json;
  architecture->read(reader, config);
  JsonReader text = reader.object("text_config");
  JsonReader& inner = reader.has("text_config") ? text : reader;
  read_dtype(reader.has("dtype") || reader.has("torch_dtype") ? reader : inner, config);
  read_eos(inner, config);
  read_fp8(reader.has("quantization_config") ? reader : inner, config);
  reader.adopt(text.status());
  RETURN_IF_ERROR(reader.status());
  return config;
}

absl::StatusOr<ModelConfig> read_model_config(const std::string& path) {
  std::error_code error;
  const std::string file = std::filesystem::is_directory(path, error) ? path + "/config.json" : path;
  // A pipe in its place would be waited for forever.
  if (std::filesystem::exists(file, error) && !std::filesystem::is_regular_file(file, error)) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": expected a regular file"));
  }
  std::ifstream stream(file, std::ios::binary);
  if (!stream) return absl::NotFoundError(absl::StrCat(file, ": cannot be opened"));
  const uintmax_t size = std::filesystem::file_size(file, error);
  if (error || size > kConfigBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(file, ": expected a file of at most ", kConfigBytesMax, " bytes"));
  }
  std::stringstream text;
  text << stream.rdbuf();
  const absl::StatusOr<nlohmann::ordered_json> json = parse_json_tree(text.str());
  if (!json.ok()) return absl::InvalidArgumentError(absl::StrCat(file, ": ", json.status().message()));
  return parse_model_config(*json, file);
}

}  // namespace slipstream::model
