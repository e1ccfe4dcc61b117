// Goal: where masters and moments are makes no difference of a bit: on the GPU or in host memory a run of steps gives the
// same weights, and a checkpoint written by one goes on in the other.
#include "gtest/gtest.h"
#include "learner/checkpoint.h"
#include "tests/learning/batches.h"

namespace slipstream::learner {
namespace {

using testing::Bench;

std::string moment_bytes(const Bench& bench) {
  std::string out;
  for (const model::WeightStore* store : {&bench.trainer->optimizer().first(), &bench.trainer->optimizer().second()}) {
    for (const auto& entry : store->entries()) {
      if (entry.tensor.empty()) continue;
      std::string bytes(static_cast<size_t>(entry.tensor.bytes()), '\0');
      bench.trainer->optimizer().stream().download(entry.tensor, bytes.data());
      out += bytes;
    }
  }
  return out;
}

std::string masters(Bench& bench) {
  bench.weights->fetch(*bench.device);
  return testing::master_bytes(*bench.weights);
}

TEST(OptimizerCuda, PlaceChangesNoBit) {
  if (!kernels::Stream::create_cuda(0).ok()) GTEST_SKIP() << "no CUDA device";
  const testing::TemporaryDirectory model, root;
  testing::write_model("glm5_next", model.path());
  TrainerOptions options;
  options.optimizer.weight_decay = 0.1;
  options.optimizer.grad_clip = 0.5;
  for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBf16}) {
    Bench there(model.path(), options, dtype, MasterPlace::kDevice), here(model.path(), options, dtype, MasterPlace::kHost);
    EXPECT_TRUE(there.trainer->optimizer().stream().on_cuda());
    EXPECT_FALSE(here.trainer->optimizer().stream().on_cuda());
    const TrainingBatch batch = testing::training_batch(testing::make_batch({}, there.config().vocab), there.config());
    const auto step = [&](Bench& bench) {
      const absl::StatusOr<StepResult> result = bench.trainer->step(batch, "cispo", 1e-3);
      CHECK_OK(result.status());
      EXPECT_TRUE(result->updated);
      return result->grad_norm;
    };
    for (int i = 0; i < 3; ++i) EXPECT_EQ(step(there), step(here));
    const std::string before = masters(there);
    EXPECT_EQ(before, masters(here));
    EXPECT_EQ(moment_bytes(there), moment_bytes(here));

    // A checkpoint of the one restores the other.
    const Checkpoints checkpoints(root.path() + "/" + kernels::name_of(dtype), 2, model.path(), quiet_logger());
    LearnerState state;
    state.step = 3;
    state.report.step = 3;
    CHECK_OK(checkpoints.save(state, *there.weights, there.trainer->optimizer()));
    const std::string dir = *checkpoints.find();
    const absl::StatusOr<LearnerState> read = checkpoints.read(dir);
    CHECK_OK(read.status());
    step(there), step(here);
    for (const MasterPlace place : {MasterPlace::kDevice, MasterPlace::kHost}) {
      Bench again(dir, options, dtype, place);
      CHECK_OK(Checkpoints::restore(dir, *read, *again.weights, again.trainer->optimizer(), *again.stream, *again.device));
      EXPECT_EQ(masters(again), before);
      step(again);
      EXPECT_EQ(masters(again), masters(here));
      EXPECT_EQ(moment_bytes(again), moment_bytes(there));
    }
  }
}

}  // namespace
}  // namespace slipstream::learner
