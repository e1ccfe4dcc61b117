// For tests of the engine: a sink that records, and weights made once.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "absl/synchronization/notification.h"
#include "rollout/engine.h"
#include "tests/property/test_models.h"

namespace slipstream::rollout::testing {

// Everything that a generation told. Read it after wait().
class RecordingSink : public Sink {
 public:
  // on_token(i) is called after the i-th token (from 1) on the engine's thread.
  explicit RecordingSink(std::function<void(size_t)> on_token = {}) : on_token_(std::move(on_token)) {}
  void token(const SampledToken& token) override {
    tokens.push_back(token);
    if (on_token_) on_token_(tokens.size());
  }
  void finished(absl::StatusOr<Finished> result_now) override {
    result = std::move(result_now);
    done_.Notify();
  }
  // Dies when a generation takes minutes.
  const absl::StatusOr<Finished>& wait() {
    CHECK(done_.WaitForNotificationWithTimeout(absl::Minutes(5)));
    return result;
  }
  std::vector<int32_t> ids() const {
    std::vector<int32_t> out;
    for (const SampledToken& token : tokens) out.push_back(token.id);
    return out;
  }

  std::vector<SampledToken> tokens;
  absl::StatusOr<Finished> result = absl::UnknownError("not finished");

 private:
  std::function<void(size_t)> on_token_;
  absl::Notification done_;
};

// Weights of the test model `name`, another set for each seed.
inline Engine::Weights make_weights(const std::string& name, kernels::DType dtype, uint64_t seed) {
  return std::make_shared<const model::WeightStore>(
      std::move(model::testing::make_test_model(name, dtype, seed).loaded.store));
}

}  // namespace slipstream::rollout::testing
