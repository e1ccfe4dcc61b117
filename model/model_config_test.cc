// Goal: config.json is read as published configs mean it: aliases, patterns and defaults; what is wrong is refused by file and
// key. Case C11 of the field cases (rope_theta nested, indexer schedule).
#include "model/config.h"

#include <fstream>

#include "common/testing/temporary_directory.h"
#include "gtest/gtest.h"

namespace slipstream::model {
namespace {

using nlohmann::ordered_json;

ordered_json dsa_json() {
  return ordered_json::parse(R"({
    "model_type": "glm_moe_dsa", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48,
    "moe_intermediate_size": 16, "num_hidden_layers": 8, "num_attention_heads": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_topk": 16, "index_head_dim": 16, "index_n_heads": 2,
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"}, "eos_token_id": [1, 2]
  })");
}

ordered_json flash_json() {
  ordered_json text = dsa_json();
  text["model_type"] = "glm5_next_text";
  text["qk_rope_head_dim"] = 0;
  text["index_kpool"] = 4;
  text.erase("rope_parameters");
  return {{"model_type", "glm5_next"}, {"text_config", text}};
}

std::string error_of(const ordered_json& json) {
  const absl::StatusOr<ModelConfig> config = parse_model_config(json, "DIR/config.json");
  return config.ok() ? "" : std::string(config.status().message());
}

std::vector<int> full_layers(const ModelConfig& config) {
  std::vector<int> out;
  for (size_t l = 0; l < config.layers.size(); ++l) {
    if (config.layers[l].indexer == IndexerMode::kFull) out.push_back(static_cast<int>(l));
  }
  return out;
}

TEST(ConfigTest, NestedRopeTheta) {
  EXPECT_EQ(parse_model_config(dsa_json(), "x")->rope_theta, 8e6);
  ordered_json flat = dsa_json();
  flat.erase("rope_parameters");
  flat["rope_theta"] = 1e6;
  EXPECT_EQ(parse_model_config(flat, "x")->rope_theta, 1e6);
}

TEST(ConfigTest, IndexerSchedule) {
  ordered_json json = dsa_json();
  EXPECT_EQ(full_layers(*parse_model_config(json, "x")).size(), 8u);  // frequency 1
  json["index_topk_freq"] = 4;
  json["index_skip_topk_offset"] = 3;
  EXPECT_EQ(full_layers(*parse_model_config(json, "x")), (std::vector<int>{0, 1, 2, 6}));
  json["index_topk_pattern"] = "FSFSFSFS";
  EXPECT_EQ(full_layers(*parse_model_config(json, "x")), (std::vector<int>{0, 2, 4, 6}));
  json["indexer_types"] = {"full", "full", "shared", "shared", "shared", "shared", "shared", "shared"};
  EXPECT_EQ(full_layers(*parse_model_config(json, "x")), (std::vector<int>{0, 1}));
}

TEST(ConfigTest, PublishedIndexShareSchedule) {
  ordered_json json = dsa_json();
  json["num_hidden_layers"] = 78;
  json["index_topk_freq"] = 4;
  json["index_skip_topk_offset"] = 3;
  const std::vector<int> full = full_layers(*parse_model_config(json, "x"));
  EXPECT_EQ(full.size(), 21u);
  EXPECT_EQ(full.back(), 74);
}

TEST(ConfigTest, FlashNestedAndFlat) {
  const ModelConfig nested = *parse_model_config(flash_json(), "x");
  EXPECT_EQ(nested.layers[3].attention, AttentionKind::kMla);
  EXPECT_EQ(nested.layers[4].attention, AttentionKind::kKda);
  EXPECT_EQ(nested.mla->indexer->pool, 4);
  EXPECT_EQ(nested.prefix, "model.language_model.");
  ordered_json flat = flash_json()["text_config"];
  EXPECT_EQ(parse_model_config(flat, "x")->hyper->streams, 4);
  flat["model_type"] = "glm5_next";
  EXPECT_EQ(parse_model_config(flat, "x")->eos, (std::vector<int32_t>{1, 2}));
}

TEST(ConfigTest, FlashLinearAttentionKeys) {
  ordered_json json = flash_json();
  json["text_config"]["linear_num_heads"] = 3;
  json["text_config"]["linear_attn_config"] = {{"num_heads", 5}, {"head_dim", 24}, {"gate_lower_bound", -4.0}};
  const ModelConfig config = *parse_model_config(json, "x");
  EXPECT_EQ(config.kda->heads, 5);  // the nested keys win
  EXPECT_EQ(config.kda->head_dim, 24);
  EXPECT_EQ(config.kda->lower_bound, -4.0f);
  json["text_config"].erase("linear_attn_config");
  EXPECT_EQ(parse_model_config(json, "x")->kda->heads, 3);
  json["text_config"]["linear_lower_bound"] = nullptr;
  EXPECT_EQ(parse_model_config(json, "x")->kda->lower_bound, 0.0f);  // no bound
}

TEST(ConfigTest, RefusesByFileAndKey) {
  ordered_json json = dsa_json();
  json["model_type"] = "llama";
  EXPECT_EQ(error_of(json), "DIR/config.json: model_type: \"llama\", expected one of glm4_moe, glm4_moe_lite, glm5_next, "
                            "glm_moe_dsa");
  json = dsa_json();
  json.erase("kv_lora_rank");
  EXPECT_EQ(error_of(json), "DIR/config.json: kv_lora_rank: missing, expected an integer in [1, 65536]");
  json = dsa_json();
  json["hidden_size"] = "big";
  EXPECT_NE(error_of(json).find("hidden_size: \"big\", expected an integer"), std::string::npos);
  json = dsa_json();
  json["num_hidden_layers"] = 18446744073709551615u;
  EXPECT_NE(error_of(json).find("num_hidden_layers"), std::string::npos);
  json = dsa_json();
  json["indexer_types"] = {"shared", "full"};
  EXPECT_NE(error_of(json).find("indexer_types"), std::string::npos);
  json = dsa_json();
  json["rope_parameters"]["rope_type"] = "yarn";
  EXPECT_NE(error_of(json).find("rope_parameters: rope_type: \"yarn\""), std::string::npos);
  json = flash_json();
  json["text_config"]["index_topk"] = 30;
  EXPECT_NE(error_of(json).find("text_config: index_topk: 30, expected a multiple of index_kpool 4"), std::string::npos);
  json = flash_json();
  json["text_config"].erase("index_kpool");
  EXPECT_NE(error_of(json).find("index_kpool: missing"), std::string::npos);
  json = dsa_json();
  json["tie_word_embeddings"] = true;
  EXPECT_NE(error_of(json).find("tie_word_embeddings"), std::string::npos);
  json = dsa_json();
  json["eos_token_id"] = 1000;
  EXPECT_NE(error_of(json).find("eos_token_id"), std::string::npos);
  EXPECT_NE(error_of(ordered_json::array()).find("expected a JSON object"), std::string::npos);
}

TEST(ConfigTest, RefusesWhatOperatorsCannotRun) {
  ordered_json json = flash_json();
  json["text_config"]["hc_eps"] = 0.0;
  EXPECT_NE(error_of(json).find("hc_eps: 0.0"), std::string::npos);
  json = dsa_json();
  json["model_type"] = "glm4_moe";
  json["num_attention_heads"] = 64;
  json["num_key_value_heads"] = 64;
  EXPECT_NE(error_of(json).find("head_dim: missing"), std::string::npos);
  json = dsa_json();
  json["num_hidden_layers"] = 1000;
  json["n_routed_experts"] = 65536;
  EXPECT_NE(error_of(json).find("experts over all layers"), std::string::npos);
}

TEST(ConfigTest, RefusesNumbersThatFloatsAndPositionsCannotHold) {
  ordered_json json = dsa_json();
  json["max_position_embeddings"] = int64_t{1} << 31;
  EXPECT_NE(error_of(json).find("max_position_embeddings: 2147483648"), std::string::npos);
  json = dsa_json();
  json["rope_parameters"]["rope_theta"] = 1e300;
  EXPECT_NE(error_of(json).find("rope_theta: 1e+300"), std::string::npos);
  json = flash_json();
  json["text_config"]["swiglu_limit"] = 1e300;
  EXPECT_NE(error_of(json).find("swiglu_limit: 1e+300"), std::string::npos);
}

// What reading a config.json of this text says.
std::string error_of_text(const std::string& text) {
  const slipstream::testing::TemporaryDirectory directory;
  std::ofstream(directory.path() + "/config.json", std::ios::binary) << text;
  return std::string(read_model_config(directory.path()).status().message());
}

TEST(ConfigTest, RefusesDeepNesting) {
  const std::string deep = std::string(100000, '[') + std::string(100000, ']');
  EXPECT_NE(error_of_text("{\"model_type\": \"glm4_moe\", \"x\": " + deep + "}").find("levels of nesting"),
            std::string::npos);
}

TEST(ConfigTest, RefusesTextThatReadersTakeDifferently) {
  const std::string text = dsa_json().dump();
  EXPECT_EQ(error_of_text(text), "");
  const std::string twice = error_of_text("{\"hidden_size\": 64, " + text.substr(1));
  EXPECT_NE(twice.find("\"hidden_size\": stands twice in one object"), std::string::npos);
  for (const std::string& hidden : {text + std::string(1, '\0') + "{", "\xef\xbb\xbf" + text, text + "{}"}) {
    EXPECT_NE(error_of_text(hidden).find("is not valid JSON"), std::string::npos);
  }
}

TEST(ConfigTest, FilesThatAreNoConfig) {
  EXPECT_EQ(read_model_config("/nonexistent").status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(error_of_text("{\"model_type\": ").find("is not valid JSON"), std::string::npos);
}

}  // namespace
}  // namespace slipstream::model
