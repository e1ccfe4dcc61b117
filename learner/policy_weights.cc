#include "learner/policy_weights.h"

#include <cstring>

#include "kernels/bf16.h"

namespace slipstream::learner {

using kernels::DType;

void convert_tensor(const kernels::Tensor& from, const kernels::Tensor& to, kernels::Stream& stream) {
  CHECK(from.dense() && to.dense() && from.same_shape(to));
  const float* in = from.f32();
  stream.parallel_for(from.numel(), 1 << 16, [&](int64_t begin, int64_t end, kernels::Worker&) {
    if (to.dtype() == DType::kF32) {
      std::memcpy(to.f32() + begin, in + begin, static_cast<size_t>(end - begin) * sizeof(float));
      return;
    }
    for (int64_t i = begin; i < end; ++i) to.bf()[i] = kernels::to_bf16(in[i]);
  });
}

absl::StatusOr<PolicyWeights> PolicyWeights::load(const std::string& dir, DType dtype,
                                                  kernels::Stream& host, kernels::Stream& compute) {
  ASSIGN_OR_RETURN(model::LoadedWeights master, model::load_weights(dir, DType::kF32, host));
  PolicyWeights out(std::move(master));
  if (dtype != DType::kF32) {
    ASSIGN_OR_RETURN(out.rounded_,
                     model::WeightStore::create_weights(out.config(), dtype, out.master_.store.with_mtp()));
  }
  if (compute.on_cuda()) {
    ASSIGN_OR_RETURN(out.on_device_,
                     model::WeightStore::create_weights(out.config(), dtype, out.master_.store.with_mtp(), compute.device()));
  }
  out.round(host, compute);
  return out;
}

void PolicyWeights::round(kernels::Stream& host, kernels::Stream& compute) {
  if (rounded_) {
    for (size_t i = 0; i < rounded_->entries().size(); ++i) {
      convert_tensor(master_.store.entries()[i].tensor, rounded_->entries()[i].tensor, host);
    }
  }
  if (on_device_) on_host().upload_to(*on_device_, compute);
}

}  // namespace slipstream::learner
