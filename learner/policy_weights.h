// The weights being trained: fp32 masters, and what the forward pass reads.
#pragma once

#include <optional>
#include <string>

#include "common/check.h"
#include "common/status.h"
#include "kernels/stream.h"
#include "model/load.h"

namespace slipstream::learner {

// Where the masters are that training changes. The model is on the device of `compute`, a stream that may be `host`.
enum class MasterPlace { kHost, kDevice };

// Movable; tensors stay where they are. One thread.
class PolicyWeights {
 public:
  // Reads a checkpoint directory; errors as load_weights has them. dtype: f32 or bf16, of compute(), which is on
  // the device of `compute`; what is done on the CPU is done by `host`, a stream there (they may be one).
  static absl::StatusOr<PolicyWeights> load(const std::string& dir, kernels::DType dtype,
                                            kernels::Stream& host, kernels::Stream& compute,
                                            MasterPlace place = MasterPlace::kHost);

  const model::ModelConfig& config() const { return master_.config; }
  // The masters in host memory, to read or to restore. Dies if they changed elsewhere since fetch().
  model::LoadedWeights& master() {
    CHECK(!stale_);
    return master_;
  }
  const model::LoadedWeights& master() const {
    CHECK(!stale_);
    return master_;
  }
  bool with_mtp() const { return master_.store.with_mtp(); }
  // The masters themselves for f32, else their rounding to nearest even as of the last round(), updated() or follow().
  // Islands (norms, biases) are fp32 in both. Dies while they are behind().
  const model::ModelWeights& compute() const {
    CHECK(!behind_);
    return compute_store().tensors();
  }
  const model::WeightStore& compute_store() const { return on_device_ ? *on_device_ : on_host(); }
  kernels::DType dtype() const { return dtype_; }

  // From now on others read compute_store() too, and only follow() changes it: an update leaves it behind the masters. bf16
  // only: in f32 the masters are what passes read.
  void share();
  bool behind() const { return behind_; }
  void follow(kernels::Stream& host, kernels::Stream& compute);  // returns when it is done

  // What an optimiser updates, and what it writes the rounded masters to as well (null: nothing). On the stream of trained_by().
  const model::WeightStore& trained() const { return masters_on_device() ? *device_master() : master_.store; }
  const model::WeightStore* rounded() const;
  kernels::Stream& trained_by(kernels::Stream& host, kernels::Stream& compute) const {
    return masters_on_device() ? compute : host;
  }
  // To be called after an update of trained() and rounded(): compute() follows unless it is shared, master() waits for fetch().
  void updated(kernels::Stream& compute);
  // The masters come to host memory if they changed elsewhere.
  void fetch(kernels::Stream& compute);
  // To be called after master() was changed in host memory: all else follows.
  void round(kernels::Stream& host, kernels::Stream& compute);

 private:
  PolicyWeights(model::LoadedWeights master, kernels::DType dtype) : master_(std::move(master)), dtype_(dtype) {}
  const model::WeightStore& on_host() const { return rounded_ ? *rounded_ : master_.store; }
  bool masters_on_device() const { return place_ == MasterPlace::kDevice; }
  const model::WeightStore* device_master() const { return device_master_ ? &*device_master_ : &*on_device_; }

  model::LoadedWeights master_;
  kernels::DType dtype_;
  MasterPlace place_ = MasterPlace::kHost;
  bool stale_ = false;                              // master_ is older than device_master()
  bool shared_ = false, behind_ = false;            // compute_store() is read by others; is older than the masters
  std::optional<model::WeightStore> rounded_;       // on the CPU; absent for f32 and while masters are on the device
  std::optional<model::WeightStore> on_device_;     // compute() on a GPU
  std::optional<model::WeightStore> device_master_;  // where on_device_ is bf16 and masters are there
};

// to = from, tensor by tensor, f32 to f32 or bf16 (nearest even), on the stream's device.
void convert_weights(const model::WeightStore& from, const model::WeightStore& to, kernels::Stream& stream);

}  // namespace slipstream::learner
