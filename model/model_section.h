// The `model` section of a job's config file. Workers and learner read it here: a default that differed between the two would
// make every log-prob differ too.
#pragma once

#include <string>

#include "common/config.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace slipstream::model {

struct ModelSection {
  std::string path;                               // checkpoint directory: policy version 0
  kernels::DType dtype = kernels::DType::kBf16;   // of the weights in forward passes: fp32 or bf16
  kernels::Device device;                         // where the role computes: `device` of its section, else of the file
  static ModelSection from(ConfigNode root, const char* role);  // errors are found by root.finish()
};

// Users' and peers' word for a dtype of weights. InvalidArgument: `"fp16", expected fp32 or bf16`.
absl::StatusOr<kernels::DType> parse_weight_dtype(const std::string& word);
const char* weight_dtype_word(kernels::DType dtype);

}  // namespace slipstream::model
