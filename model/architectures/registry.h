// The families this build knows: model_type -> how its config.json is read. A new family is one file and one row.
#pragma once

#include <string>

#include "model/config.h"
#include "model/json_reader.h"

namespace slipstream::model {

struct Architecture {
  const char* model_type;
  // Fills `config` from the top-level object; failures go to reader.fail().
  void (*read)(JsonReader& reader, ModelConfig& config);
};

// Null when unknown.
const Architecture* find_architecture(const std::string& model_type);
std::string known_architectures();  // "glm4_moe, glm4_moe_lite, ..."

void read_glm_moe_dsa(JsonReader& reader, ModelConfig& config);
void read_glm5_next(JsonReader& reader, ModelConfig& config);
void read_glm4_moe_lite(JsonReader& reader, ModelConfig& config);
void read_glm4_moe(JsonReader& reader, ModelConfig& config);

}  // namespace slipstream::model
