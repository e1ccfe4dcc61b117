// Goal: what is saved is loaded again bit for bit, under either prefix; a checkpoint that does not fit its config is refused
// by tensor; indexers are wanted where a layer runs one and nowhere else (field case C11).
#include "model/load.h"

#include <cstring>
#include <filesystem>
#include <fstream>

#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "tests/property/test_models.h"

namespace slipstream::model {
namespace {

using kernels::DType;

kernels::Stream& stream() {
  static const std::unique_ptr<kernels::Stream> two = *kernels::Stream::create_cpu(2);
  return *two;
}

std::string fresh_directory(const std::string& name) {
  static const slipstream::testing::TemporaryDirectory all;
  const std::string path = all.path() + "/" + name;
  std::filesystem::remove_all(path);
  return path;
}

LoadedWeights small(const std::string& name, int64_t mtp_layers = 0) {
  ModelConfig config = testing::test_config(name);
  config.mtp_layers = mtp_layers;
  config.source["num_nextn_predict_layers"] = mtp_layers;
  return *random_weights(config, DType::kF32, 3, stream());
}

void expect_same_weights(const LoadedWeights& a, const LoadedWeights& b) {
  ASSERT_EQ(a.store.entries().size(), b.store.entries().size());
  for (size_t i = 0; i < a.store.entries().size(); ++i) {
    const Tensor& x = a.store.entries()[i].tensor;
    const Tensor& y = b.store.entries()[i].tensor;
    ASSERT_EQ(x.bytes(), y.bytes());
    EXPECT_EQ(std::memcmp(x.raw(), y.raw(), static_cast<size_t>(x.bytes())), 0) << a.store.entries()[i].parameter.name;
  }
}

// Copies a checkpoint, passing every name through `rename`; an empty result drops the tensor.
template <class Rename>
void copy_checkpoint(const std::string& from, const std::string& to, Rename rename) {
  const Checkpoint source = *Checkpoint::open(from, {});
  CheckpointWriter writer({});
  std::vector<StoredTensor> renamed;
  for (const std::string& name : source.names()) {
    StoredTensor tensor = *source.find(name);
    tensor.name = rename(name);
    if (!tensor.name.empty()) CHECK_OK(writer.add_raw(tensor));
  }
  CHECK_OK(writer.save(to));
  CHECK_OK(copy_side_file(from, to, "config.json"));
}

TEST(LoadTest, RoundTripsEveryFamily) {
  for (const std::string& name : testing::test_model_names()) {
    for (const int64_t mtp : {0, 1}) {
      const LoadedWeights saved = small(name, mtp);
      const std::string dir = fresh_directory("round_trip");
      CHECK_OK(save_weights(saved, dir, {.shard_bytes_max = 60'000, .carry_from = ""}));
      const absl::StatusOr<LoadedWeights> loaded = load_weights(dir, DType::kF32, stream());
      ASSERT_TRUE(loaded.ok()) << name << ": " << loaded.status();
      EXPECT_EQ(loaded->store.with_mtp(), mtp == 1);
      expect_same_weights(*loaded, saved);
    }
  }
}

TEST(LoadTest, AcceptsBothPrefixesWithMtp) {
  const LoadedWeights saved = small("glm5_next", 1);
  const std::string dir = fresh_directory("prefix"), plain = fresh_directory("prefix_plain");
  CHECK_OK(save_weights(saved, dir, {}));
  copy_checkpoint(dir, plain, [](std::string name) {
    const std::string prefix = "model.language_model.";
    return name.rfind(prefix, 0) == 0 ? "model." + name.substr(prefix.size()) : name;
  });
  const absl::StatusOr<LoadedWeights> loaded = load_weights(plain, DType::kF32, stream());
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_TRUE(loaded->store.with_mtp());
  expect_same_weights(*loaded, saved);
}

TEST(LoadTest, WantsAnIndexerWhereALayerRunsOne) {
  const LoadedWeights saved = small("glm_moe_dsa indexshare groups");
  const std::string dir = fresh_directory("indexer"), broken = fresh_directory("indexer_broken");
  CHECK_OK(save_weights(saved, dir, {}));
  ASSERT_EQ(saved.config.layers[2].indexer, IndexerMode::kShared);  // which has no indexer tensors, and loads
  EXPECT_TRUE(load_weights(dir, DType::kF32, stream()).ok());
  const std::string gone = "model.layers.1.self_attn.indexer.wk.weight";
  copy_checkpoint(dir, broken, [&](std::string name) { return name == gone ? "" : name; });
  const absl::Status status = load_weights(broken, DType::kF32, stream()).status();
  EXPECT_NE(status.message().find(gone), absl::string_view::npos) << status;
}

TEST(LoadTest, RefusesUnusedTensorsUnlessKnown) {
  const LoadedWeights saved = small("glm4_moe");
  const std::string dir = fresh_directory("unused"), extra = fresh_directory("unused_extra");
  CHECK_OK(save_weights(saved, dir, {}));
  copy_checkpoint(dir, extra, [](std::string name) {
    return name == "model.layers.1.mlp.shared_experts.gate_proj.weight" ? "model.layers.1.mlp.gate_proj.weight" : name;
  });
  const absl::Status status = load_weights(extra, DType::kF32, stream()).status();
  EXPECT_NE(status.message().find("model.layers.1.mlp.shared_experts.gate_proj.weight"), absl::string_view::npos) << status;

  const Checkpoint source = *Checkpoint::open(dir, {});
  CheckpointWriter writer({});
  for (const std::string& name : source.names()) CHECK_OK(writer.add_raw(*source.find(name)));
  const float value = 1.0f;
  CHECK_OK(writer.add("model.layers.0.self_attn.rotary_emb.inv_freq",
                      Tensor(const_cast<float*>(&value), DType::kF32, {1}), DType::kF32));
  const std::string known = fresh_directory("unused_known");
  CHECK_OK(writer.save(known));
  CHECK_OK(copy_side_file(dir, known, "config.json"));
  EXPECT_TRUE(load_weights(known, DType::kF32, stream()).ok());
  CHECK_OK(writer.add("model.layers.0.surprise", Tensor(const_cast<float*>(&value), DType::kF32, {1}), DType::kF32));
  CHECK_OK(writer.save(known));
  EXPECT_NE(load_weights(known, DType::kF32, stream()).status().message().find("model.layers.0.surprise"),
            absl::string_view::npos);
}

TEST(LoadTest, RefusesAnotherShape) {
  const LoadedWeights saved = small("glm4_moe");
  const std::string dir = fresh_directory("shape");
  CHECK_OK(save_weights(saved, dir, {}));
  nlohmann::ordered_json json = saved.config.source;
  json["intermediate_size"] = 64;
  std::ofstream(dir + "/config.json") << json.dump();
  const absl::Status status = load_weights(dir, DType::kF32, stream()).status();
  EXPECT_NE(status.message().find("shape [56, 40], expected [64, 40]"), absl::string_view::npos) << status;
}

// Field case C11: an indexer is frozen by default, whatever is trained around it and however often it is saved.
TEST(LoadTest, AFrozenIndexerKeepsItsBytes) {
  testing::TestModel m = testing::make_test_model("glm5_next", DType::kF32);
  const auto indexer_bytes = [](const LoadedWeights& weights) {
    std::string bytes;
    for (const WeightStore::Entry& entry : weights.store.entries()) {
      if (entry.parameter.name.find(".indexer.") == std::string::npos) continue;
      bytes.append(static_cast<const char*>(entry.tensor.raw()), static_cast<size_t>(entry.tensor.bytes()));
    }
    return bytes;
  };
  const std::string before = indexer_bytes(m.loaded);
  ASSERT_FALSE(before.empty());
  const std::string dir = fresh_directory("frozen");
  for (int round = 0; round < 2; ++round) {
    const kernels::ArenaScope scope(m.arena);
    const Batch batch{.tokens = testing::test_tokens(m.config(), 40, 9), .lengths = {40}, .cached = {}};
    const PreparedBatch prepared = *prepare_batch(m.config(), batch, nullptr, m.arena, stream());
    Step step{stream(), m.arena, prepared};
    SavedForward saved;
    const Tensor hidden = m.model->forward(m.weights(), step, &saved);
    WeightStore gradients = *WeightStore::create_gradients(m.config(), m.loaded.store.with_mtp());
    m.model->backward(m.weights(), saved, hidden, gradients.tensors(), step);
    int moved = 0;
    for (size_t i = 0; i < gradients.entries().size(); ++i) {
      const Tensor& gradient = gradients.entries()[i].tensor;
      if (gradient.empty()) continue;
      for (int64_t j = 0; j < gradient.numel(); ++j) {
        m.loaded.store.entries()[i].tensor.f32()[j] -= 1e-3f * gradient.f32()[j];
      }
      ++moved;
    }
    EXPECT_GT(moved, 20);
    CHECK_OK(save_weights(m.loaded, dir, {}));
    m.loaded = *load_weights(dir, DType::kF32, stream());
    EXPECT_EQ(indexer_bytes(m.loaded), before);
  }
}

TEST(LoadTest, Bf16IsTheRoundedFp32) {
  const LoadedWeights saved = small("glm5_next");
  const std::string dir = fresh_directory("bf16");
  CHECK_OK(save_weights(saved, dir, {}));
  const LoadedWeights loaded = *load_weights(dir, DType::kBf16, stream());
  const Tensor& full = saved.store.tensors().lm_head;
  const Tensor& half = loaded.store.tensors().lm_head;
  for (int64_t i = 0; i < full.numel(); ++i) ASSERT_EQ(half.bf()[i], kernels::to_bf16(full.f32()[i]));
}

}  // namespace
}  // namespace slipstream::model
