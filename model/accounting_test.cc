// Goal: the accounting of the published shapes comes out exactly (model-spec 12), and agrees with real checkpoints.
#include "model/accounting.h"

#include <fstream>

#include "gtest/gtest.h"
#include "model/checkpoint.h"

namespace slipstream::model {
namespace {

const std::string kModels = SLIPSTREAM_SOURCE_DIR "/configs/models/";
const std::string kFixtures = SLIPSTREAM_SOURCE_DIR "/tests/golden/fixtures/";

Accounting of(const std::string& path, int64_t context) { return *account(*read_model_config(path), context); }

TEST(AccountingTest, Glm5) {
  const Accounting a = of(kModels + "glm5.json", 202752);
  EXPECT_EQ(a.parameters.backbone, 742008052992);
  EXPECT_EQ(a.parameters.embedding, 951582720);
  EXPECT_EQ(a.parameters.lm_head, 951582720);
  EXPECT_EQ(a.parameters.mtp, 9952920576);
  EXPECT_EQ(a.parameters.total, 753864139008);
  EXPECT_EQ(a.parameters.fp32, 19456);
  EXPECT_EQ(a.latent_bytes_per_token, 89856);   // 87.75 KiB
  EXPECT_EQ(a.indexer_bytes_per_token, 19968);  // 19.5 KiB
  EXPECT_NEAR(a.decode_fraction, 0.010101, 1e-6);
  EXPECT_EQ(a.prefill_pairs_dense, 20554288128);
  EXPECT_EQ(a.prefill_pairs_sparse, 413139968);
}

TEST(AccountingTest, Glm52AtAMillion) {
  const Accounting a = of(kModels + "glm52.json", 1000000);
  int64_t full = 0;
  for (const LayerCounts& layer : a.layers) full += layer.attention == "dsa" ? 1 : 0;
  EXPECT_EQ(full, 21);
  EXPECT_EQ(a.flops.weights / 1000000000, 80);
  EXPECT_EQ(a.flops.attention / 1000000000, 22);
  EXPECT_EQ(a.flops.indexer / 1000000000, 172);
}

TEST(AccountingTest, Flash) {
  const Accounting a = of(kModels + "flash.json", 1000);
  EXPECT_EQ(a.state_bytes, int64_t{34} * 64 * 128 * 128 * 4);  // 136 MiB
  EXPECT_EQ(a.latent_bytes_per_token, 11 * 512 * 2);
  EXPECT_EQ(a.indexer_bytes_per_token, 11 * 32 * 2);
}

// Every element that a checkpoint stores is counted, the vision tower's too.
TEST(AccountingTest, AgreesWithCheckpoints) {
  for (const char* name : {"glm47", "glm47_flash", "glm5_dsa", "glm52_indexshare", "glm53_flash", "glm53_flash_long"}) {
    const Checkpoint checkpoint = *Checkpoint::open(kFixtures + name, {});
    int64_t stored = 0;
    for (const std::string& tensor : checkpoint.names()) {
      int64_t n = 1;
      for (const int64_t size : checkpoint.find(tensor)->shape) n *= size;
      stored += n;
    }
    const Accounting a = of(kFixtures + name, 100);
    EXPECT_EQ(a.parameters.total - a.parameters.mtp, stored) << name;  // these were saved without an MTP block
  }
}

TEST(AccountingTest, RefusesAnImpossibleContext) {
  EXPECT_FALSE(account(*read_model_config(kModels + "glm5.json"), 0).ok());
}

// A config within its bounds can ask for more operations than a 64-bit count holds.
TEST(AccountingTest, RefusesOperationsThatPassTheCount) {
  ModelConfig config = *read_model_config(kFixtures + "glm47");
  config.layers.resize(1, config.layers.back());
  config.gqa->heads = config.gqa->head_dim = 1 << 12;
  EXPECT_EQ(account(config, 1 << 20)->flops.attention, int64_t{1} << 46);
  config.layers.resize(1024, config.layers.back());
  const absl::Status refused = account(config, 1 << 30).status();
  EXPECT_EQ(refused.message(), "context: 1073741824, expected one whose operations a 64-bit count holds");
}

}  // namespace
}  // namespace slipstream::model
