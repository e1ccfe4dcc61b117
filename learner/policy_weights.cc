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
                                                  kernels::Stream& host, kernels::Stream& compute,
                                                  MasterPlace place) {
  CHECK(place == MasterPlace::kHost || compute.on_cuda());
  ASSIGN_OR_RETURN(model::LoadedWeights master, model::load_weights(dir, DType::kF32, host));
  PolicyWeights out(std::move(master), dtype);
  out.place_ = place;
  const auto create = [&](DType of, kernels::Device device) {
    return model::WeightStore::create_weights(out.config(), of, out.with_mtp(), device);
  };
  if (compute.on_cuda()) {
    ASSIGN_OR_RETURN(out.on_device_, create(dtype, compute.device()));
  }
  if (dtype != DType::kF32 && place == MasterPlace::kDevice) {
    ASSIGN_OR_RETURN(out.device_master_, create(DType::kF32, compute.device()));
  } else if (dtype != DType::kF32) {
    ASSIGN_OR_RETURN(out.rounded_, create(dtype, {}));
  }
  RETURN_IF_ERROR(out.round(host, compute));
  return out;
}

const model::WeightStore* PolicyWeights::rounded() const {
  if (masters_on_device()) return device_master_ ? &*on_device_ : nullptr;
  return rounded_ ? &*rounded_ : nullptr;
}

void PolicyWeights::updated(kernels::Stream& compute) {
  if (masters_on_device()) {
    stale_ = true;
  } else if (on_device_) {
    on_host().upload_to(*on_device_, compute);
  }
}

void PolicyWeights::fetch(kernels::Stream& compute) {
  if (!stale_) return;
  master_.store.download_from(*device_master(), compute);
  stale_ = false;
}

absl::Status PolicyWeights::round(kernels::Stream& host, kernels::Stream& compute) {
  CHECK(!stale_);
  const auto round_to = [&](const model::WeightStore& to) {
    for (size_t i = 0; i < to.entries().size(); ++i) {
      convert_tensor(master_.store.entries()[i].tensor, to.entries()[i].tensor, host);
    }
  };
  if (rounded_) round_to(*rounded_);
  if (device_master_) {
    ASSIGN_OR_RETURN(const model::WeightStore once, model::WeightStore::create_weights(config(), dtype_, with_mtp()));
    round_to(once);
    master_.store.upload_to(*device_master_, compute);
    once.upload_to(*on_device_, compute);
  } else if (on_device_) {
    on_host().upload_to(*on_device_, compute);
  }
  return absl::OkStatus();
}

}  // namespace slipstream::learner
