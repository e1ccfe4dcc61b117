#include "learner/policy_weights.h"

#include <algorithm>

#include "kernels/copy/copy.h"

namespace slipstream::learner {

using kernels::DType;

void convert_weights(const model::WeightStore& from, const model::WeightStore& to, kernels::Stream& stream) {
  for (size_t i = 0; i < to.entries().size(); ++i) {
    const kernels::Tensor &source = from.entries()[i].tensor, &target = to.entries()[i].tensor;
    if (target.empty()) continue;
    const int64_t width = source.size(source.rank() - 1), rows = source.numel() / std::max<int64_t>(width, 1);
    kernels::launch(kernels::Copy{.from = source.view({rows, 1, width}), .to = target.view({rows, 1, width})}, stream);
  }
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
  out.round(host, compute);
  return out;
}

const model::WeightStore* PolicyWeights::rounded() const {
  const model::WeightStore* const to = masters_on_device() ? (device_master_ ? &*on_device_ : nullptr)
                                                           : (rounded_ ? &*rounded_ : nullptr);
  return shared_ && to == &compute_store() ? nullptr : to;
}

void PolicyWeights::share() {
  CHECK(dtype_ != DType::kF32);
  shared_ = true;
}

void PolicyWeights::updated(kernels::Stream& compute) {
  stale_ = masters_on_device();
  if (shared_) {
    behind_ = true;
  } else if (!masters_on_device() && on_device_) {
    on_host().upload_to(*on_device_, compute);
  }
}

void PolicyWeights::follow(kernels::Stream& host, kernels::Stream& compute) {
  if (device_master_) {
    convert_weights(*device_master_, *on_device_, compute);
  } else if (!masters_on_device() && on_device_) {
    on_host().upload_to(*on_device_, compute);
  } else if (rounded_) {
    convert_weights(master_.store, *rounded_, host);
  }
  compute.synchronize();
  behind_ = false;
}

void PolicyWeights::fetch(kernels::Stream& compute) {
  if (!stale_) return;
  master_.store.download_from(*device_master(), compute);
  stale_ = false;
}

void PolicyWeights::round(kernels::Stream& host, kernels::Stream& compute) {
  CHECK(!stale_);
  if (masters_on_device()) {
    master_.store.upload_to(*device_master(), compute);
  } else if (rounded_ && on_device_) {
    convert_weights(master_.store, *rounded_, host);
  }
  follow(host, compute);
}

}  // namespace slipstream::learner
