#include "model/architectures/registry.h"

namespace slipstream::model {
namespace {

constexpr Architecture kArchitectures[] = {
    {"glm4_moe", &read_glm4_moe},
    {"glm4_moe_lite", &read_glm4_moe_lite},
    {"glm5_next", &read_glm5_next},
    {"glm_moe_dsa", &read_glm_moe_dsa},
};

}  // namespace

const Architecture* find_architecture(const std::string& model_type) {
  for (const Architecture& architecture : kArchitectures) {
    if (model_type == architecture.model_type) return &architecture;
  }
  return nullptr;
}

std::string known_architectures() {
  std::string names;
  for (const Architecture& architecture : kArchitectures) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", architecture.model_type);
  }
  return names;
}

}  // namespace slipstream::model
