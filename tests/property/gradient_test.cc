// Goal: the backward of a whole model is its derivative, for every family, with and without recomputation, and neither the
// batch around a sequence nor the number of threads changes what recomputation gives.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>

#include "gtest/gtest.h"
#include "tests/property/test_models.h"

namespace slipstream::model {
namespace {

using kernels::DType;
using testing::TestModel;

// loss = sum over tokens of c_t logprob_t + e_t entropy_t at temperature 0.8, over two sequences.
struct Problem {
  explicit Problem(const std::string& name)
      : m(testing::make_test_model(name, DType::kF32)), stream(*kernels::Stream::create_cpu(2)) {
    batch.lengths = {70, 9};
    batch.tokens = testing::test_tokens(m.config(), 79, 3);
  }

  double loss(WeightStore* gradients, bool recompute, const Choices* replay = nullptr, Choices* capture = nullptr) {
    const kernels::ArenaScope scope(m.arena);
    const absl::StatusOr<PreparedBatch> prepared = prepare_batch(m.config(), batch, nullptr, m.arena, *stream);
    CHECK_OK(prepared.status());
    Step step{*stream, m.arena, *prepared};
    const int64_t rows = prepared->rows();
    SavedForward saved;
    saved.recompute = recompute;
    const Tensor hidden = m.model->forward(m.weights(), step, gradients != nullptr ? &saved : nullptr,
                                           {.replay = replay, .capture = gradients == nullptr ? capture : nullptr});
    const Tensor targets = step.ints({rows}), dlogprob = step.alloc({rows}), dentropy = step.alloc({rows});
    for (int64_t t = 0; t < rows; ++t) {
      targets.i32()[t] = static_cast<int32_t>((t * 31 + 7) % m.config().vocab);
      dlogprob.f32()[t] = t % 5 == 0 ? 0.0f : 0.1f * std::sin(static_cast<float>(t + 1));
      dentropy.f32()[t] = t % 3 == 0 ? 0.0f : 0.05f * std::cos(static_cast<float>(t));
    }
    const Model::LogProbs log_probs = m.model->log_probs(m.weights(), hidden, targets, 0.8f, true, step);
    double sum = 0.0;
    for (int64_t t = 0; t < rows; ++t) {
      sum += double{dlogprob.f32()[t]} * log_probs.logprob.f32()[t] + double{dentropy.f32()[t]} * log_probs.entropy.f32()[t];
    }
    if (gradients != nullptr) {
      gradients->zero();
      const Tensor dhidden = m.model->log_probs_backward(m.weights(), hidden, targets, 0.8f, log_probs, dlogprob,
                                                         dentropy, gradients->tensors(), step);
      m.model->backward(m.weights(), saved, dhidden, gradients->tensors(), step);
    }
    return sum;
  }

  TestModel m;
  std::unique_ptr<kernels::Stream> stream;
  Batch batch;
};

class GradientTest : public ::testing::TestWithParam<std::string> {};

// Along random directions of each parameter: one number a tensor, so every tensor of every family is covered cheaply. The
// discrete choices of the unmoved model are replayed, as the gradient treats them as constants.
TEST_P(GradientTest, DirectionalDerivatives) {
  Problem p(GetParam());
  WeightStore gradients = *WeightStore::create_gradients(p.m.config(), p.m.loaded.store.with_mtp());
  p.loss(&gradients, /*recompute=*/false);
  Choices choices;
  kernels::Arena choice_memory = *kernels::Arena::create_cpu(1 << 24);
  {
    const kernels::ArenaScope scope(p.m.arena);
    Choices captured;
    p.loss(nullptr, false, nullptr, &captured);
    for (const LayerReplay& layer : captured) {  // out of the arena that the next passes reuse
      const auto keep = [&](const Tensor& t) {
        if (t.empty()) return Tensor();
        const Tensor copy = t.rank() == 1 ? choice_memory.alloc(DType::kI32, {t.size(0)})
                                          : choice_memory.alloc(DType::kI32, {t.size(0), t.size(1)});
        std::copy_n(t.i32(), t.numel(), copy.i32());
        return copy;
      };
      choices.push_back({keep(layer.experts), {keep(layer.selection.indices), keep(layer.selection.counts)}});
    }
  }
  int checked = 0;
  for (size_t i = 0; i < gradients.entries().size(); ++i) {
    const Tensor& gradient = gradients.entries()[i].tensor;
    const WeightStore::Entry& weight = p.m.loaded.store.entries()[i];
    if (gradient.empty() || weight.parameter.group == ParameterGroup::kMtp) continue;
    std::vector<float> direction(static_cast<size_t>(gradient.numel()));
    double expected = 0.0, norm = 0.0;
    for (int64_t j = 0; j < gradient.numel(); ++j) {
      direction[static_cast<size_t>(j)] = std::sin(static_cast<float>(j) * 1.7f + static_cast<float>(i));
      norm += double{gradient.f32()[j]} * gradient.f32()[j];
    }
    norm = std::sqrt(norm);
    // Half the direction follows the gradient, so that the derivative is not lost in rounding.
    for (int64_t j = 0; j < gradient.numel(); ++j) {
      float& d = direction[static_cast<size_t>(j)];
      d = d / std::sqrt(static_cast<float>(gradient.numel())) +
          (norm > 0.0 ? static_cast<float>(gradient.f32()[j] / norm) : 0.0f);
      expected += double{d} * gradient.f32()[j];
    }
    const std::vector<float> before(weight.tensor.f32(), weight.tensor.f32() + weight.tensor.numel());
    const auto moved = [&](float by) {
      for (int64_t j = 0; j < weight.tensor.numel(); ++j) {
        weight.tensor.f32()[j] = before[static_cast<size_t>(j)] + by * direction[static_cast<size_t>(j)];
      }
      return p.loss(nullptr, false, &choices);
    };
    constexpr float kStep = 2e-3f;
    // Fourth order: the third derivative of a deep network along a unit vector is not small.
    const double actual = (8.0 * (moved(kStep) - moved(-kStep)) - (moved(2 * kStep) - moved(-2 * kStep))) / (12.0 * kStep);
    std::copy(before.begin(), before.end(), weight.tensor.f32());
    EXPECT_NEAR(actual, expected, 1e-2 * std::abs(expected) + 1e-3) << weight.parameter.name;
    ++checked;
  }
  EXPECT_GT(checked, 20);
}

TEST_P(GradientTest, RecomputationChangesNothing) {
  Problem p(GetParam());
  WeightStore kept = *WeightStore::create_gradients(p.m.config(), p.m.loaded.store.with_mtp());
  WeightStore recomputed = *WeightStore::create_gradients(p.m.config(), p.m.loaded.store.with_mtp());
  EXPECT_EQ(p.loss(&kept, false), p.loss(&recomputed, true));
  for (size_t i = 0; i < kept.entries().size(); ++i) {
    const Tensor& a = kept.entries()[i].tensor;
    const Tensor& b = recomputed.entries()[i].tensor;
    if (a.empty()) continue;
    EXPECT_EQ(std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.bytes())), 0) << kept.entries()[i].parameter.name;
  }
}

// Not the clamped model: finite differences step across the clamp's kinks (kernels/swiglu tests its derivative).
std::vector<std::string> smooth_models() {
  std::vector<std::string> names = testing::test_model_names();
  std::erase(names, "glm5_next clamped");
  return names;
}
INSTANTIATE_TEST_SUITE_P(Families, GradientTest, ::testing::ValuesIn(smooth_models()));

}  // namespace
}  // namespace slipstream::model
