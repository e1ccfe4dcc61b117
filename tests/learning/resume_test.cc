// Goal: a restored learner takes the same next step, bit for bit; whatever instant the process dies at, what
// find() gives is a whole checkpoint, this one or the one before; damage is named.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "absl/strings/match.h"
#include "gtest/gtest.h"
#include "learner/checkpoint.h"
#include "nlohmann/json.hpp"
#include "tests/learning/batches.h"

namespace slipstream::learner {
namespace {

namespace fs = std::filesystem;
using testing::Bench;

class CheckpointTest : public ::testing::Test {
 protected:
  CheckpointTest() : model(dir.path() + "/model"), root(dir.path() + "/checkpoints") {
    testing::write_model("glm5_next", model);
  }

  Checkpoints checkpoints(int keep = 2, Checkpoints::Hook hook = {}) const {
    return Checkpoints(root, keep, model, quiet_logger(), std::move(hook));
  }
  static void train(Bench& bench, uint64_t first_group) {
    v1::Batch batch = testing::make_batch({.groups = 2}, bench.config().vocab, first_group);
    testing::set_rollout_logprobs(*bench.trainer, bench.config(), 0.1, &batch);
    const auto result =
        bench.trainer->step(testing::training_batch(batch, bench.config()), "double_sided", 1e-3);
    ASSERT_TRUE(result.ok() && result->updated);
  }
  static LearnerState state_at(int64_t step) {
    LearnerState state;
    state.step = step;
    state.rl_steps = step - 1;
    state.warmup_steps = 1;
    state.phase = Phase::kRl;
    state.policy_version = static_cast<int32_t>(step) * 2;
    state.incarnation = 123456789012345;
    state.skipped_in_row = 1;
    state.wall_seconds = 12.3456789;
    state.demonstration_probabilities = {0.1, 1.0 / 3.0};
    state.commit.set_step(step);
    state.commit.add_trained_rollout_ids("run-g1-0");
    state.commit.add_trained_rollout_ids(std::string("\x00\xff", 2));
    (*state.commit.mutable_dropped())["malformed"].add_rollout_ids("bad");
    state.log_id = "0123456789abcdef";
    state.groups_end = 9223372036854775807u;
    state.report.step = step;
    state.report.grad_norm = 1.0 / 3.0;
    state.report.loss = std::nan("");
    state.report.reward_by_task = {{"add", 0.25}, {"guess", std::nan("")}};
    state.report.drift_by_age = {{0, 1e-3}, {8, 2e-3}};
    state.report.dropped_by_reason = {{"stale", 3}};
    return state;
  }

  testing::TemporaryDirectory dir;
  std::string model, root;
};

// fp32 and bf16 weights over an fp32 file, and over a bf16 file that cannot hold the masters; with and
// without moments.
TEST_F(CheckpointTest, ResumingEqualsNotStopping) {
  for (const bool bf16_file : {false, true}) {
    const std::string start = bf16_file ? dir.path() + "/bf16_model" : model;
    if (bf16_file) {
      auto stream = *kernels::Stream::create_cpu(1);
      model::LoadedWeights loaded = *model::load_weights(model, kernels::DType::kF32, *stream);
      loaded.config.dtype = kernels::DType::kBf16;
      loaded.config.source["dtype"] = "bfloat16";
      CHECK_OK(model::save_weights(loaded, start, {}));
    }
    for (const kernels::DType dtype : {kernels::DType::kF32, kernels::DType::kBf16}) {
      for (const bool reset : {false, true}) {
        Bench going(start, {}, dtype);
        for (uint64_t i = 0; i < 3; ++i) train(going, i * 2);
        if (reset) going.trainer->optimizer().reset();
        ASSERT_TRUE(checkpoints().save(state_at(3), *going.weights, going.trainer->optimizer()).ok());

        const std::optional<std::string> found = checkpoints().find();
        ASSERT_EQ(found, root + "/step_00000003");
        const absl::StatusOr<LearnerState> state = Checkpoints::read_state(*found);
        ASSERT_TRUE(state.ok()) << state.status();
        Bench resumed(*found, {}, dtype);
        ASSERT_TRUE(Checkpoints::restore(*found, *state, *resumed.weights, resumed.trainer->optimizer(),
                                         *resumed.stream, *resumed.stream)
                        .ok());
        EXPECT_EQ(testing::master_bytes(*resumed.weights), testing::master_bytes(*going.weights));
        for (uint64_t i = 3; i < 6; ++i) {
          train(going, i * 2);
          train(resumed, i * 2);
        }
        EXPECT_EQ(testing::master_bytes(*resumed.weights), testing::master_bytes(*going.weights))
            << bf16_file << reset;
        EXPECT_EQ(testing::flat(resumed.trainer->optimizer().second()),
                  testing::flat(going.trainer->optimizer().second()));
      }
    }
  }
}

TEST_F(CheckpointTest, StateComesBack) {
  Bench bench(model);
  const LearnerState before = state_at(7);
  ASSERT_TRUE(checkpoints().save(before, *bench.weights, bench.trainer->optimizer()).ok());
  const LearnerState after = *Checkpoints::read_state(*checkpoints().find());
  EXPECT_EQ(after.step, before.step);
  EXPECT_EQ(after.rl_steps, before.rl_steps);
  EXPECT_EQ(after.warmup_steps, before.warmup_steps);
  EXPECT_EQ(after.phase, before.phase);
  EXPECT_EQ(after.policy_version, before.policy_version);
  EXPECT_EQ(after.incarnation, before.incarnation);
  EXPECT_EQ(after.skipped_in_row, before.skipped_in_row);
  EXPECT_EQ(after.wall_seconds, before.wall_seconds);
  EXPECT_EQ(after.demonstration_probabilities, before.demonstration_probabilities);
  EXPECT_EQ(after.commit.SerializeAsString(), before.commit.SerializeAsString());
  EXPECT_EQ(after.log_id, before.log_id);
  EXPECT_EQ(after.groups_end, before.groups_end);
  EXPECT_EQ(to_json_line(after.report), to_json_line(before.report));
}

TEST_F(CheckpointTest, KeepsTheLastOnes) {
  Bench bench(model);
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(checkpoints(2).save(state_at(step), *bench.weights, bench.trainer->optimizer()).ok());
  }
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(root)) names.insert(entry.path().filename().string());
  EXPECT_EQ(names, (std::set<std::string>{"latest", "step_00000003", "step_00000004"}));
}

// The process ends, without a destructor run, before each change in turn.
TEST_F(CheckpointTest, CrashAtEveryPointLeavesOneOfTheTwo) {
  Bench bench(model);
  ASSERT_TRUE(checkpoints().save(state_at(1), *bench.weights, bench.trainer->optimizer()).ok());
  std::vector<std::string> points;
  {
    testing::TemporaryDirectory other;
    const Checkpoints dry(other.path(), 2, model, quiet_logger(),
                          [&](std::string_view point) { points.emplace_back(point); });
    ASSERT_TRUE(dry.save(state_at(2), *bench.weights, bench.trainer->optimizer()).ok());
  }
  ASSERT_EQ(points, (std::vector<std::string>{"write step_00000002", "rename step_00000002", "replace latest",
                                              "remove old"}));
  for (const std::string& point : points) {
    const pid_t child = ::fork();
    if (child == 0) {
      checkpoints(2,
                  [&](std::string_view now) {
                    if (now == point) ::_exit(9);
                  })
          .save(state_at(2), *bench.weights, bench.trainer->optimizer())
          .IgnoreError();
      ::_exit(0);
    }
    int result = 0;
    ASSERT_EQ(::waitpid(child, &result, 0), child);
    ASSERT_EQ(WEXITSTATUS(result), 9) << point;
    const std::optional<std::string> found = checkpoints().find();
    ASSERT_TRUE(found.has_value()) << point;
    const absl::StatusOr<LearnerState> state = Checkpoints::read_state(*found);
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_EQ(state->step, point == "remove old" ? 2 : 1) << point;
    Bench resumed(*found);
    EXPECT_TRUE(
        Checkpoints::restore(*found, *state, *resumed.weights, resumed.trainer->optimizer(), *resumed.stream, *resumed.stream)
            .ok())
        << point;
  }
  // And what the dead left behind is in nobody's way.
  ASSERT_TRUE(checkpoints().save(state_at(2), *bench.weights, bench.trainer->optimizer()).ok());
  EXPECT_EQ(Checkpoints::read_state(*checkpoints().find())->step, 2);
}

TEST_F(CheckpointTest, MissingLatestFallsBackDamageDoesNot) {
  Bench bench(model);
  EXPECT_FALSE(checkpoints().find().has_value());
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(checkpoints().save(state_at(step), *bench.weights, bench.trainer->optimizer()).ok());
  }
  fs::remove(root + "/latest");
  EXPECT_EQ(checkpoints().find(), root + "/step_00000002");
  fs::create_symlink("step_00000077", root + "/latest");
  EXPECT_EQ(checkpoints().find(), root + "/step_00000002");
  fs::remove(root + "/latest");
  fs::create_symlink("step_00000001", root + "/latest");
  EXPECT_EQ(checkpoints().find(), root + "/step_00000001");

  const std::string one = root + "/step_00000001";
  { std::ofstream(one + "/learner.json", std::ios::trunc) << "{\"format\": 2, \"step\": "; }
  EXPECT_EQ(Checkpoints::read_state(one).status(),
            absl::DataLossError(one + "/learner.json: 22 bytes, expected a whole JSON object"));
  { std::ofstream(one + "/learner.json", std::ios::trunc) << "{\"format\": 9}"; }
  EXPECT_EQ(Checkpoints::read_state(one).status().message(),
            one + "/learner.json: format: 9, expected an integer in [2, 2]");
  fs::resize_file(one + "/model.safetensors", 1000);
  const absl::Status cut = PolicyWeights::load(one, kernels::DType::kF32, *bench.stream, *bench.stream).status();
  EXPECT_FALSE(cut.ok());
  EXPECT_NE(cut.message().find("model.safetensors"), absl::string_view::npos) << cut;
}

// One bit of any file, the manifest's too, and the checkpoint is refused with the file's name and what to do
// instead.
TEST_F(CheckpointTest, EveryFlippedBitIsFound) {
  Bench bench(model);
  train(bench, 0);
  for (int64_t step = 1; step <= 2; ++step) {
    ASSERT_TRUE(checkpoints().save(state_at(step), *bench.weights, bench.trainer->optimizer()).ok());
  }
  const std::string newest = root + "/step_00000002", older = root + "/step_00000001";
  ASSERT_TRUE(checkpoints().read(newest).ok()) << checkpoints().read(newest).status();
  std::vector<std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(newest)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  ASSERT_EQ(files.size(), 5u);  // config.json, model and optimizer tensors, learner.json, manifest.json
  for (const std::string& file : files) {
    const auto size = static_cast<int64_t>(fs::file_size(file));
    for (const int64_t at : {int64_t{0}, size / 2, size - 1}) {
      const auto flip = [&] {
        std::fstream io(file, std::ios::in | std::ios::out | std::ios::binary);
        io.seekg(at);
        const char byte = static_cast<char>(io.get() ^ 4);
        io.seekp(at);
        io.put(byte);
      };
      flip();
      const absl::Status damaged = checkpoints().read(newest).status();
      // A bit of the manifest may make any file differ from what it says.
      const std::string named = fs::path(file).filename() == "manifest.json" ? newest : file;
      EXPECT_TRUE(absl::StartsWith(damaged.message(), named)) << file << " at " << at << ": " << damaged;
      EXPECT_NE(damaged.message().find(older + ", which is intact"), absl::string_view::npos) << damaged;
      flip();
    }
    ASSERT_TRUE(checkpoints().read(newest).ok());
  }
  fs::resize_file(newest + "/model.safetensors", 1000);
  EXPECT_TRUE(absl::StartsWith(checkpoints().read(newest).status().message(),
                               newest + "/model.safetensors: 1000 bytes, expected "));
  fs::remove(older + "/optimizer/model.safetensors");
  EXPECT_TRUE(absl::EndsWith(checkpoints().read(newest).status().message(),
                             "no older checkpoint in " + root + " is intact"));
}

// Each field of learner.json in turn is taken away, and is of another kind.
TEST_F(CheckpointTest, EveryFieldOfTheStateIsWanted) {
  Bench bench(model);
  ASSERT_TRUE(checkpoints().save(state_at(3), *bench.weights, bench.trainer->optimizer()).ok());
  const std::string path = *checkpoints().find() + "/learner.json";
  std::ifstream in(path);
  const nlohmann::json whole = nlohmann::json::parse(in);
  const auto expect_named = [&](const nlohmann::json& json, const std::string& label,
                                const std::string& key) {
    { std::ofstream(path, std::ios::trunc) << json; }
    const absl::Status refused = Checkpoints::read_state(*checkpoints().find()).status();
    EXPECT_TRUE(absl::StartsWith(refused.message(), path + ": " + label + key)) << key << ": " << refused;
    EXPECT_NE(refused.message().find(", expected "), absl::string_view::npos) << refused;
  };
  for (const char* part : {"", "commit", "report"}) {
    const std::string label = *part == 0 ? "" : std::string(part) + ": ";
    const nlohmann::json& object = *part == 0 ? whole : whole[part];
    for (const auto& [key, value] : object.items()) {
      for (const bool removed : {true, false}) {
        nlohmann::json broken = whole;
        nlohmann::json& at = *part == 0 ? broken : broken[part];
        if (removed) at.erase(key);
        if (!removed) at[key] = value.is_array() ? nlohmann::json("text") : nlohmann::json::array({true});
        expect_named(broken, label, key);
      }
    }
  }
}

TEST_F(CheckpointTest, MissingOptimizerIsNamed) {
  Bench bench(model);
  train(bench, 0);
  LearnerState state = state_at(1);
  ASSERT_TRUE(checkpoints().save(state, *bench.weights, bench.trainer->optimizer()).ok());
  const std::string one = *checkpoints().find();
  state = *Checkpoints::read_state(one);
  EXPECT_EQ(state.optimizer_updates, 1);
  fs::remove_all(one + "/optimizer");
  const absl::Status missing =
      Checkpoints::restore(one, state, *bench.weights, bench.trainer->optimizer(), *bench.stream, *bench.stream);
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.message().find("optimizer"), absl::string_view::npos) << missing;
}

}  // namespace
}  // namespace slipstream::learner
