#include "learner/adamw.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <vector>

namespace slipstream::learner {
namespace {

constexpr int64_t kChunk = 1 << 14;  // elements a task; also the pieces in which squares are added

struct Update {
  float beta1, beta2, rate, correct2, eps, decay,
      scale;  // rate: with the first correction; decay: 1 - lr * weight_decay
};

void update_range(const Update& u, const float* g, float* m, float* v, float* w, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const float gradient = g[i] * u.scale;
    m[i] = u.beta1 * m[i] + (1.0f - u.beta1) * gradient;
    v[i] = u.beta2 * v[i] + (1.0f - u.beta2) * gradient * gradient;
    w[i] = w[i] * u.decay - u.rate * m[i] / (std::sqrt(v[i] * u.correct2) + u.eps);
  }
}

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
  GradientCheck check;
  double total = 0.0;
  std::vector<double> sums;
  for (const model::WeightStore::Entry& entry : gradients.entries()) {
    if (!is_trained(entry)) continue;
    const int64_t numel = entry.tensor.numel(), chunks = (numel + kChunk - 1) / kChunk;
    const float* g = entry.tensor.f32();
    sums.assign(static_cast<size_t>(chunks), 0.0);
    stream.parallel_for(chunks, 1, [&](int64_t begin, int64_t end, kernels::Worker&) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        double lanes[4] = {};  // so that additions overlap; always the same four
        const int64_t last = std::min(numel, (chunk + 1) * kChunk);
        for (int64_t i = chunk * kChunk; i < last; ++i) lanes[i % 4] += double{g[i]} * double{g[i]};
        sums[static_cast<size_t>(chunk)] = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
      }
    });
    double sum = 0.0;
    for (const double part : sums) sum += part;
    if (!std::isfinite(sum) && check.offending.empty()) check.offending = entry.parameter.name;
    total += sum;
  }
  check.norm = std::sqrt(total);
  return check;
}

absl::StatusOr<AdamW> AdamW::create(const model::ModelConfig& config, bool with_mtp,
                                    const AdamWConfig& options) {
  ASSIGN_OR_RETURN(model::WeightStore first, model::WeightStore::create_gradients(config, with_mtp));
  ASSIGN_OR_RETURN(model::WeightStore second, model::WeightStore::create_gradients(config, with_mtp));
  return AdamW(std::move(first), std::move(second), options);
}

void AdamW::update(const model::WeightStore& master, const model::WeightStore& gradients, double grad_norm,
                   double learning_rate, kernels::Stream& stream) {
  ++updates_;
  const double n = static_cast<double>(updates_);
  const double clip = options_.grad_clip;
  Update update{
      .beta1 = static_cast<float>(options_.beta1),
      .beta2 = static_cast<float>(options_.beta2),
      .rate = static_cast<float>(learning_rate / (1.0 - std::pow(options_.beta1, n))),
      .correct2 = static_cast<float>(1.0 / (1.0 - std::pow(options_.beta2, n))),
      .eps = static_cast<float>(options_.eps),
      .decay = 1.0f,
      .scale = clip > 0.0 && grad_norm > clip ? static_cast<float>(clip / grad_norm) : 1.0f,
  };
  for (size_t e = 0; e < gradients.entries().size(); ++e) {
    const model::WeightStore::Entry& gradient = gradients.entries()[e];
    if (!is_trained(gradient)) continue;
    const bool decays = gradient.parameter.storage == model::Storage::kMatrix;
    update.decay = decays ? static_cast<float>(1.0 - learning_rate * options_.weight_decay) : 1.0f;
    const float* g = gradient.tensor.f32();
    float* m = first_.entries()[e].tensor.f32();
    float* v = second_.entries()[e].tensor.f32();
    float* w = master.entries()[e].tensor.f32();
    stream.parallel_for(gradient.tensor.numel(), kChunk, [&](int64_t begin, int64_t end, kernels::Worker&) {
      update_range(update, g + begin, m + begin, v + begin, w + begin, end - begin);
    });
  }
}

void AdamW::reset() {
  if (updates_ == 0) return;
  updates_ = 0;
  first_.zero();
  second_.zero();
}

}  // namespace slipstream::learner
