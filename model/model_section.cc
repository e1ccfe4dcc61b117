#include "model/model_section.h"

#include "common/check.h"

namespace slipstream::model {
namespace {

using kernels::DType;

constexpr const char* kF32Word = "fp32";
constexpr const char* kBf16Word = "bf16";

}  // namespace

ModelSection ModelSection::from(ConfigNode root, const char* role) {
  ModelSection out;
  ConfigNode section = root.child("model");
  section.read("path", &out.path);
  if (out.path.empty()) section.fail("path", "missing, expected a checkpoint directory");
  section.read_choice("dtype", &out.dtype, {{kF32Word, DType::kF32}, {kBf16Word, DType::kBf16}});
  std::string word = "cpu";
  const auto read_device = [&](ConfigNode node) {
    node.read("device", &word);
    if (const auto device = kernels::parse_device(word); device.ok()) {
      out.device = *device;
    } else {
      node.fail("device", std::string(device.status().message()));
    }
  };
  read_device(root);
  read_device(root.child(role));
  return out;
}

absl::StatusOr<DType> parse_weight_dtype(const std::string& word) {
  if (word == kF32Word) return DType::kF32;
  if (word == kBf16Word) return DType::kBf16;
  return absl::InvalidArgumentError(absl::StrCat("\"", word, "\", expected ", kF32Word, " or ", kBf16Word));
}

const char* weight_dtype_word(DType dtype) {
  CHECK(dtype == DType::kF32 || dtype == DType::kBf16);
  return dtype == DType::kF32 ? kF32Word : kBf16Word;
}

}  // namespace slipstream::model
