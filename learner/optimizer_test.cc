// Goal: the update is AdamW's formula, element by element; what must not move does not; the number of threads
// changes no bit; schedules go where they say.
#include "learner/optimizer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "gtest/gtest.h"
#include "model/load.h"
#include "model/testing/small_model.h"

namespace slipstream::learner {
namespace {

struct Problem {
  explicit Problem(const AdamWConfig& config, int threads = 1)
      : stream(*kernels::Stream::create_cpu(threads)),
        weights(*model::random_weights(model::testing::small_model(300, 80, /*mtp=*/true),
                                       kernels::DType::kF32, 5, *stream)),
        gradients(*model::WeightStore::create_gradients(weights.config, true)),
        optimizer(*AdamW::create(weights.config, true, config, *stream)) {}

  void fill(int step) {
    for (size_t e = 0; e < gradients.entries().size(); ++e) {
      const kernels::Tensor& tensor = gradients.entries()[e].tensor;
      for (int64_t i = 0; !tensor.empty() && i < tensor.numel(); ++i) tensor.f32()[i] = gradient(step, e, i);
    }
  }
  static float gradient(int step, size_t entry, int64_t i) {
    return 0.01f * std::sin(static_cast<float>(i) * 0.7f + static_cast<float>(entry) +
                            static_cast<float>(step) * 1.9f);
  }
  GradientCheck update(int step, double rate) {
    fill(step);
    const GradientCheck check = check_gradients(gradients, *stream);
    EXPECT_EQ(optimizer.update(weights.store, gradients, /*rounded=*/nullptr, check.norm, rate), "");
    return check;
  }

  std::unique_ptr<kernels::Stream> stream;
  model::LoadedWeights weights;
  model::WeightStore gradients;
  AdamW optimizer;
};

TEST(AdamW, IsItsFormulaAndLeavesTheRestAlone) {
  const AdamWConfig config{.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6, .weight_decay = 0.1, .grad_clip = 0.2};
  Problem before(config), p(config);
  constexpr double kRate = 1e-2;
  double norms[3];
  for (int step = 0; step < 3; ++step) norms[step] = p.update(step, kRate).norm;
  EXPECT_GT(norms[0], config.grad_clip);
  int decayed = 0, plain = 0, untouched = 0;
  for (size_t e = 0; e < p.gradients.entries().size(); ++e) {
    const auto& entry = p.weights.store.entries()[e];
    const float* start = before.weights.store.entries()[e].tensor.f32();
    const bool trained =
        !p.gradients.entries()[e].tensor.empty() && entry.parameter.group != model::ParameterGroup::kMtp;
    const bool decays = entry.parameter.storage == model::Storage::kMatrix;
    ++(!trained ? untouched : decays ? decayed : plain);
    for (int64_t i = 0; i < entry.tensor.numel(); i += 7) {
      double w = start[i], m = 0.0, v = 0.0;
      for (int step = 0; trained && step < 3; ++step) {
        const double g = Problem::gradient(step, e, i) * config.grad_clip / norms[step], n = step + 1;
        m = config.beta1 * m + (1 - config.beta1) * g;
        v = config.beta2 * v + (1 - config.beta2) * g * g;
        const double move = m / (1 - std::pow(config.beta1, n)) /
                            (std::sqrt(v / (1 - std::pow(config.beta2, n))) + config.eps);
        w -= kRate * (move + (decays ? config.weight_decay * w : 0.0));
      }
      ASSERT_NEAR(entry.tensor.f32()[i], w, trained ? 2e-5 : 0.0) << entry.parameter.name << " " << i;
    }
  }
  EXPECT_GT(decayed, 10);
  EXPECT_GT(plain, 5);
  EXPECT_GT(untouched, 5);
}

TEST(AdamW, ThreadsChangeNoBit) {
  Problem one({}, 1), three({}, 3);
  for (int step = 0; step < 3; ++step) EXPECT_EQ(one.update(step, 1e-3).norm, three.update(step, 1e-3).norm);
  for (size_t e = 0; e < one.weights.store.entries().size(); ++e) {
    const kernels::Tensor &a = one.weights.store.entries()[e].tensor,
                          &b = three.weights.store.entries()[e].tensor;
    EXPECT_EQ(std::memcmp(a.raw(), b.raw(), static_cast<size_t>(a.bytes())), 0);
  }
}

TEST(AdamW, ResetIsAsIfFresh) {
  Problem p({}), fresh({});
  p.update(0, 1e-3);
  p.optimizer.reset();
  EXPECT_EQ(p.optimizer.updates(), 0);
  for (size_t e = 0; e < p.weights.store.entries().size(); ++e) {
    const kernels::Tensor& tensor = p.weights.store.entries()[e].tensor;
    std::memcpy(tensor.raw(), fresh.weights.store.entries()[e].tensor.raw(),
                static_cast<size_t>(tensor.bytes()));
  }
  p.update(1, 1e-3);
  fresh.update(1, 1e-3);
  for (size_t e = 0; e < p.weights.store.entries().size(); ++e) {
    const kernels::Tensor& tensor = p.weights.store.entries()[e].tensor;
    EXPECT_EQ(std::memcmp(tensor.raw(), fresh.weights.store.entries()[e].tensor.raw(),
                          static_cast<size_t>(tensor.bytes())),
              0);
  }
}

TEST(AdamW, NonFiniteGradientsAreNamed) {
  Problem p({});
  p.fill(0);
  EXPECT_EQ(check_gradients(p.gradients, *p.stream).offending, "");
  for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    p.fill(0);
    const auto& entry = p.gradients.entries()[3];
    ASSERT_FALSE(entry.tensor.empty());
    entry.tensor.f32()[entry.tensor.numel() - 1] = bad;
    const GradientCheck check = check_gradients(p.gradients, *p.stream);
    EXPECT_EQ(check.offending, entry.parameter.name);
    EXPECT_FALSE(std::isfinite(check.norm));
  }
}

TEST(AdamW, Schedules) {
  AdamWConfig config{.learning_rate = 2.0, .warmup_steps = 4};
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 0, 100), 0.5);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 3, 100), 2.0);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 99, 100), 2.0);
  config.schedule = Schedule::kCosine;
  config.min_learning_rate = 0.5;
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 4, 100), 2.0);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 52, 100), 1.25);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 100, 100), 0.5);
  EXPECT_DOUBLE_EQ(scheduled_learning_rate(config, 5000, 100), 0.5);
}

}  // namespace
}  // namespace slipstream::learner
