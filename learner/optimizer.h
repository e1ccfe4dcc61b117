// AdamW over a model's parameters. Loshchilov & Hutter 2019, arXiv:1711.05101.
#pragma once

#include <string>

#include "common/status.h"
#include "kernels/stream.h"
#include "model/weights.h"

namespace slipstream::learner {

enum class Schedule { kConstant, kCosine };
// Where masters and moments of a model on a GPU are kept and updated: there, or in host memory, which costs a copy of all
// gradients and weights each step. kAuto: there if they, weights and gradients take two thirds of its free memory at most.
enum class Offload { kAuto, kAlways, kNever };

struct AdamWConfig {
  double learning_rate = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.0;  // of matrices; norms, biases and other fp32 islands do not decay
  double grad_clip = 1.0;     // largest global gradient norm; 0: no clipping
  int64_t warmup_steps = 0;   // linear from 0
  Schedule schedule = Schedule::kConstant;
  double min_learning_rate = 0.0;  // where cosine ends
  bool reset_on_publish = false;   // forget the moments with every published version
  Offload offload = Offload::kAuto;
};

// Of update number `step` (0 is the first) in a run of `steps`.
double scheduled_learning_rate(const AdamWConfig& config, int64_t step, int64_t steps);

// What a gradient is like as a whole.
struct GradientCheck {
  double norm = 0.0;      // over all parameters; not finite when one of them is not
  std::string offending;  // the first parameter with a NaN or an infinity; empty: none
};
// Added in fp64 in an order that neither the device nor the number of threads changes. Gradients are on the stream's device.
GradientCheck check_gradients(const model::WeightStore& gradients, kernels::Stream& stream);

// Moments in fp32, on the device of the stream it was made with, which outlives it and runs the updates. Frozen parameters
// and the MTP block, which has no gradient here, are left alone. The same bits on any device, for any number of threads. One
// thread drives it.
class AdamW {
 public:
  static absl::StatusOr<AdamW> create(const model::ModelConfig& config, bool with_mtp,
                                      const AdamWConfig& options, kernels::Stream& stream);

  // master -= learning_rate (m / (sqrt(v) + eps) + weight_decay master), moments bias-corrected, after
  // scaling the gradient to norm grad_clip if its norm is larger. All gradients finite. rounded, if not null, receives
  // the masters that moved in its own dtypes. All on the stream's device. Returns the first parameter that
  // is not finite now; empty: none.
  std::string update(const model::WeightStore& master, const model::WeightStore& gradients,
                     const model::WeightStore* rounded, double grad_norm, double learning_rate);
  // As if freshly created.
  void reset();

  // Updates since creation or reset: the exponent of the bias correction. 0: the moments are zero.
  int64_t updates() const { return updates_; }
  void set_updates(int64_t updates) { updates_ = updates; }
  // m and v, absent where nothing is trained; for checkpoints.
  const model::WeightStore& first() const { return first_; }
  const model::WeightStore& second() const { return second_; }
  const AdamWConfig& options() const { return options_; }
  kernels::Stream& stream() const { return *stream_; }

 private:
  AdamW(model::WeightStore first, model::WeightStore second, const AdamWConfig& options, kernels::Stream& stream)
      : stream_(&stream), first_(std::move(first)), second_(std::move(second)), options_(options) {}
  kernels::Stream* stream_;
  model::WeightStore first_, second_;
  AdamWConfig options_;
  int64_t updates_ = 0;
};

// Whether a parameter is updated at all.
bool is_trained(const model::WeightStore::Entry& gradient);

}  // namespace slipstream::learner
