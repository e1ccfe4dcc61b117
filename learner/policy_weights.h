// The weights being trained: fp32 masters, and what the forward pass reads.
#pragma once

#include <optional>
#include <string>

#include "common/status.h"
#include "kernels/stream.h"
#include "model/load.h"

namespace slipstream::learner {

// Movable; tensors stay where they are. One thread.
class PolicyWeights {
 public:
  // Reads a checkpoint directory; errors as load_weights has them. dtype: f32 or bf16, of compute(), which is on
  // the device of `compute`; all else is done by `host`, a stream on the CPU (they may be one).
  static absl::StatusOr<PolicyWeights> load(const std::string& dir, kernels::DType dtype,
                                            kernels::Stream& host, kernels::Stream& compute);

  const model::ModelConfig& config() const { return master_.config; }
  model::LoadedWeights& master() { return master_; }
  const model::LoadedWeights& master() const { return master_; }
  // The masters themselves for f32, else their rounding to nearest even as of the last round(). Islands
  // (norms, biases) are fp32 in both.
  const model::ModelWeights& compute() const { return on_device_ ? on_device_->tensors() : on_host().tensors(); }
  kernels::DType dtype() const { return on_host().dtype(); }
  // To be called after the masters changed.
  void round(kernels::Stream& host, kernels::Stream& compute);

 private:
  explicit PolicyWeights(model::LoadedWeights master) : master_(std::move(master)) {}
  model::LoadedWeights master_;
  const model::WeightStore& on_host() const { return rounded_ ? *rounded_ : master_.store; }
  std::optional<model::WeightStore> rounded_;
  std::optional<model::WeightStore> on_device_;  // of rounded_, or of the masters; absent on the CPU
};

// to = from, element by element, f32 to f32 or bf16 (nearest even). Same shapes, dense.
void convert_tensor(const kernels::Tensor& from, const kernels::Tensor& to, kernels::Stream& stream);

}  // namespace slipstream::learner
