#include "learner/optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <optional>
#include <vector>

#include "kernels/adamw/adamw.h"

namespace slipstream::learner {
namespace {

// `width` integers for each of `count` parameters where the stream computes; read() gives them to the host.
class Slots {
 public:
  Slots(size_t count, int64_t width, kernels::Stream& stream)
      : stream_(stream), host_(count * static_cast<size_t>(width), 0), width_(width) {
    if (stream.on_cuda()) scope_.emplace(stream.workspace());
    const auto size = static_cast<int64_t>(host_.size());
    all_ = stream.on_cuda() ? stream.workspace().alloc(kernels::DType::kI32, {size})
                            : kernels::Tensor(host_.data(), kernels::DType::kI32, {size});
    stream.zero(all_);
  }
  kernels::Tensor operator[](size_t i) const {
    const auto begin = static_cast<int64_t>(i) * width_;
    return all_.slice(0, begin, begin + width_);
  }
  const std::vector<int32_t>& read() {
    if (stream_.on_cuda()) stream_.download(all_, host_.data());
    return host_;
  }

 private:
  kernels::Stream& stream_;
  std::vector<int32_t> host_;
  int64_t width_;
  std::optional<kernels::ArenaScope> scope_;
  kernels::Tensor all_;
};

}  // namespace

bool is_trained(const model::WeightStore::Entry& gradient) {
  return !gradient.tensor.empty() && gradient.parameter.group != model::ParameterGroup::kMtp;
}

double scheduled_learning_rate(const AdamWConfig& config, int64_t step, int64_t steps) {
  if (step < config.warmup_steps) {
    return config.learning_rate * static_cast<double>(step + 1) / static_cast<double>(config.warmup_steps);
  }
  if (config.schedule == Schedule::kConstant) return config.learning_rate;
  const double span = static_cast<double>(std::max<int64_t>(1, steps - config.warmup_steps));
  const double done = std::min(1.0, static_cast<double>(step - config.warmup_steps) / span);
  return config.min_learning_rate +
         0.5 * (config.learning_rate - config.min_learning_rate) * (1.0 + std::cos(std::numbers::pi * done));
}

GradientCheck check_gradients(const model::WeightStore& gradients, kernels::Stream& stream) {
  const std::vector<model::WeightStore::Entry>& entries = gradients.entries();
  Slots sums(entries.size(), 2, stream);
  for (size_t e = 0; e < entries.size(); ++e) {
    if (is_trained(entries[e])) kernels::launch(kernels::SumSquares{.x = entries[e].tensor, .sum = sums[e]}, stream);
  }
  const std::vector<int32_t>& bits = sums.read();
  GradientCheck check;
  double total = 0.0;
  for (size_t e = 0; e < entries.size(); ++e) {
    double sum = 0.0;  // of what is not trained, too
    std::memcpy(&sum, &bits[2 * e], sizeof sum);
    if (!std::isfinite(sum) && check.offending.empty()) check.offending = entries[e].parameter.name;
    total += sum;
  }
  check.norm = std::sqrt(total);
  return check;
}

absl::StatusOr<AdamW> AdamW::create(const model::ModelConfig& config, bool with_mtp,
                                    const AdamWConfig& options, kernels::Stream& stream) {
  const auto moment = [&]() -> absl::StatusOr<model::WeightStore> {
    ASSIGN_OR_RETURN(model::WeightStore store, model::WeightStore::create_gradients(config, with_mtp, /*train_frozen=*/false,
                                                                                    stream.device()));
    if (stream.on_cuda()) store.zero(stream);  // on the CPU it is, without a page touched
    return store;
  };
  ASSIGN_OR_RETURN(model::WeightStore first, moment());
  ASSIGN_OR_RETURN(model::WeightStore second, moment());
  return AdamW(std::move(first), std::move(second), options, stream);
}

std::string AdamW::update(const model::WeightStore& master, const model::WeightStore& gradients,
                          const model::WeightStore* rounded, double grad_norm, double learning_rate) {
  ++updates_;
  const double n = static_cast<double>(updates_);
  const double clip = options_.grad_clip;
  const std::vector<model::WeightStore::Entry>& entries = gradients.entries();
  Slots nonfinite(entries.size(), 1, *stream_);
  for (size_t e = 0; e < entries.size(); ++e) {
    if (!is_trained(entries[e])) continue;
    const bool decays = entries[e].parameter.storage == model::Storage::kMatrix;
    kernels::launch(
        kernels::AdamWStep{
            .gradient = entries[e].tensor,
            .first = first_.entries()[e].tensor,
            .second = second_.entries()[e].tensor,
            .master = master.entries()[e].tensor,
            .rounded = rounded == nullptr ? kernels::Tensor() : rounded->entries()[e].tensor,
            .nonfinite = nonfinite[e],
            .beta1 = static_cast<float>(options_.beta1),
            .beta2 = static_cast<float>(options_.beta2),
            .rate = static_cast<float>(learning_rate / (1.0 - std::pow(options_.beta1, n))),
            .correct2 = static_cast<float>(1.0 / (1.0 - std::pow(options_.beta2, n))),
            .eps = static_cast<float>(options_.eps),
            .decay = decays ? static_cast<float>(1.0 - learning_rate * options_.weight_decay) : 1.0f,
            .scale = clip > 0.0 && grad_norm > clip ? static_cast<float>(clip / grad_norm) : 1.0f,
        },
        *stream_);
  }
  const std::vector<int32_t>& found = nonfinite.read();
  for (size_t e = 0; e < entries.size(); ++e) {
    if (found[e] != 0) return entries[e].parameter.name;
  }
  return "";
}

void AdamW::reset() {
  if (updates_ == 0) return;
  updates_ = 0;
  first_.zero(*stream_);
  second_.zero(*stream_);
}

}  // namespace slipstream::learner
