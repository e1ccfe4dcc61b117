// Goal: two ranks train as one does, up to the rounding of sums; repeated runs agree bit for bit; ranks stay
// equal; each figure of a step is the same on every rank and the same as without ranks. Run by mpirun; every
// rank checks.
#include <cmath>
#include <cstdio>

#include "learner/learner.h"
#include "parallel/mpi_group.h"
#include "tests/learning/batches.h"
#include "tests/learning/fake_gateway.h"

namespace slipstream::learner {
namespace {

using testing::Bench;

constexpr int64_t kVocab = 97;

std::vector<float> gradient(Bench& bench, const v1::Batch& message, GradientResult* result) {
  auto computed =
      bench.trainer->compute_gradient(testing::training_batch(message, bench.config()), "double_sided");
  CHECK_OK(computed.status());
  *result = *std::move(computed);
  return testing::flat(bench.trainer->gradients());
}

void check_same_on_all_ranks(parallel::Group& group, const std::string& bytes) {
  std::string roots = bytes;
  group.broadcast(roots, 0);
  CHECK(roots == bytes);
}

void gradients_agree(parallel::Group& group, const std::string& model) {
  Bench alone(model), together(model, {}, kernels::DType::kF32, 1, group);
  v1::Batch batch = testing::make_batch({}, kVocab);
  testing::set_rollout_logprobs(*alone.trainer, alone.config(), 0.15, &batch);
  GradientResult single, shared, again;
  const std::vector<float> expected = gradient(alone, batch, &single);
  const std::vector<float> actual = gradient(together, batch, &shared);
  CHECK(gradient(together, batch, &again) == actual);
  CHECK(shared.learner_logprob == single.learner_logprob);
  CHECK_EQ(shared.loss, single.loss);
  CHECK_EQ(shared.entropy_mean, single.entropy_mean);
  CHECK_EQ(shared.expert_load_imbalance, single.expert_load_imbalance);
  CHECK_EQ(shared.trained_tokens, single.trained_tokens);
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < actual.size(); ++i) {
    difference += (double{actual[i]} - expected[i]) * (double{actual[i]} - expected[i]);
    norm += double{expected[i]} * expected[i];
  }
  CHECK_LE(std::sqrt(difference), 1e-5 * std::sqrt(norm));
  for (int step = 0; step < 3; ++step) {
    CHECK(together.trainer->step(testing::training_batch(batch, together.config()), "double_sided", 1e-3)
              ->updated);
  }
  check_same_on_all_ranks(group, testing::master_bytes(*together.weights));
}

// The whole learner: rank 0 talks to the gateway, the other follows, both end alike, also when stopped and
// when it fails; both repeat what the journal has.
void learner_runs(parallel::Group& group, const std::string& dir) {
  std::unique_ptr<testing::FakeGateway> gateway;
  if (group.rank() == 0) {
    testing::FakeGatewayOptions options;
    options.group = [](uint64_t number, int version) {
      return testing::make_group({.policy_version = version}, kVocab, number);
    };
    options.demonstration = [](uint64_t number) { return testing::make_demonstration({}, kVocab, number); };
    gateway = std::make_unique<testing::FakeGateway>(std::move(options));
  }
  LearnerConfig config;
  config.model.path = dir + "/model";
  config.threads = 1;
  config.steps = 8;
  config.checkpoint_every = 100;
  config.loss.options = {.clip_low = 1.0, .clip_high = 1e6};
  config.warmup.steps = 3;
  config.warmup.batch = 4;
  config.reply_timeout_ms = 100;
  config.optimizer.reset_on_publish = true;
  if (gateway != nullptr) config.gateway_address = gateway->address();
  JobConfig job;
  job.run_parent = dir;
  job.groups_per_batch = 2;
  job.group_size = 4;
  job.publish_every = 2;
  Metrics metrics;
  constexpr int64_t kLost = 8;  // the commit of step 9, whose version is in the journal of step 7, is never answered
  for (const int64_t stop_at : {int64_t{2}, int64_t{5}, kLost, int64_t{100}}) {
    config.gateway_timeout_ms = stop_at == kLost ? 400 : 60'000;
    config.reply_timeout_ms = stop_at == kLost ? 60'000 : 100;
    auto learner = Learner::create(config, job, group, metrics, quiet_logger());
    CHECK_OK(learner.status());
    CHECK_EQ((*learner)->weights_address().empty(), group.rank() != 0);
    if (stop_at == 100) CHECK_EQ((*learner)->step(), 9);
    std::stop_source stop;
    Observers observers;
    observers.step = [&](const StepReport& report) {
      if (stop_at == kLost && report.step == kLost) gateway->lose_next_commit_reply();
      if (stop_at != kLost && report.step >= stop_at) stop.request_stop();
    };
    const absl::Status status = (*learner)->run(stop.get_token(), observers);
    if (stop_at == 100) {
      CHECK_OK(status);
    } else if (stop_at == kLost) {
      CHECK(absl::IsDeadlineExceeded(status));
    } else {
      CHECK(absl::IsCancelled(status));
    }
    check_same_on_all_ranks(
        group, absl::StrCat((*learner)->step(), " ", (*learner)->policy_version(), " ", status.ToString()));
  }
  if (gateway != nullptr) {
    CHECK_EQ(gateway->trained().size(), size_t{8 * 2 * 4});
  }
  job.run_id = "broken";
  config.loss.normalizer = Normalizer::kConstant;
  config.loss.normalizer_constant = 1e-300;
  auto learner = Learner::create(config, job, group, metrics, quiet_logger());
  CHECK_OK(learner.status());
  const absl::Status status = (*learner)->run({}, {});
  CHECK(absl::IsAborted(status));
  // What fails on one rank at the start fails on all.
  if (group.rank() == 1) config.model.path = dir + "/nothing";
  job.run_id = "missing";
  CHECK(!Learner::create(config, job, group, metrics, quiet_logger()).ok());
}

int run() {
  auto world = parallel::MpiWorld::create();
  CHECK_OK(world.status());
  parallel::Group& group = (*world)->group();
  std::unique_ptr<testing::TemporaryDirectory> dir;
  std::string path;
  if (group.rank() == 0) {
    dir = std::make_unique<testing::TemporaryDirectory>();
    path = dir->path();
    testing::write_model("glm5_next", path + "/model");
  }
  group.broadcast(path, 0);
  gradients_agree(group, path + "/model");
  learner_runs(group, path);
  group.barrier();
  if (group.rank() == 0) std::printf("data_parallel_test: %d ranks ok\n", group.size());
  return 0;
}

}  // namespace
}  // namespace slipstream::learner

int main() { return slipstream::learner::run(); }
