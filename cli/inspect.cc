// slipstream inspect PATH: family, layers, parameters, cache, state and compute of a configuration.
#include <cstdio>
#include <memory>

#include "cli/commands.h"
#include "cli/presets.h"
#include "common/status.h"
#include "model/accounting.h"
#include "model/config.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {
namespace {

struct Flags {
  std::string path;
  bool json = false;
  int64_t context = 0;
};

nlohmann::ordered_json to_json(const model::ModelConfig& config, const model::Accounting& a) {
  nlohmann::ordered_json out;
  out["model_type"] = config.model_type;
  out["parameters"] = {{"total", a.parameters.total},         {"backbone", a.parameters.backbone},
                       {"embedding", a.parameters.embedding}, {"lm_head", a.parameters.lm_head},
                       {"mtp", a.parameters.mtp},             {"vision", a.parameters.vision},
                       {"active", a.parameters.active},       {"fp32", a.parameters.fp32}};
  out["cache_bytes_per_token"] = {{"latent", a.latent_bytes_per_token}, {"indexer", a.indexer_bytes_per_token}};
  out["state_bytes"] = a.state_bytes;
  out["sequence_bytes"] = a.sequence_bytes;
  out["layers"] = nlohmann::ordered_json::array();
  for (size_t l = 0; l < a.layers.size(); ++l) {
    out["layers"].push_back({{"index", l},
                             {"attention", a.layers[l].attention},
                             {"mlp", a.layers[l].mlp},
                             {"parameters", a.layers[l].parameters},
                             {"active", a.layers[l].active}});
  }
  out["flops_per_token"] = {{"context", a.flops.context},     {"weights", a.flops.weights},
                            {"attention", a.flops.attention}, {"indexer", a.flops.indexer},
                            {"state", a.flops.state},         {"total", a.flops.total()}};
  out["selection"] = {{"decode_fraction", a.decode_fraction},
                      {"prefill_pairs_dense", a.prefill_pairs_dense},
                      {"prefill_pairs_sparse", a.prefill_pairs_sparse}};
  return out;
}

// 742008052992 -> "742,008,052,992".
std::string grouped(int64_t n) {
  const std::string digits = std::to_string(n);
  std::string out;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) out += ',';
    out += digits[i];
  }
  return out;
}

void print_row(const char* name, int64_t n) { std::printf("  %-22s %22s\n", name, grouped(n).c_str()); }

void print_text(const model::ModelConfig& config, const model::Accounting& a) {
  std::printf("%s, %zu layers, hidden %s, vocabulary %s\n\nparameters\n", config.model_type.c_str(),
              config.layers.size(), grouped(config.hidden).c_str(), grouped(config.vocab).c_str());
  print_row("backbone", a.parameters.backbone);
  print_row("embedding", a.parameters.embedding);
  print_row("lm_head", a.parameters.lm_head);
  print_row("mtp", a.parameters.mtp);
  print_row("vision", a.parameters.vision);
  print_row("total", a.parameters.total);
  print_row("active per token", a.parameters.active);
  std::printf("\nmemory (bytes)\n");
  print_row("latent, a token", a.latent_bytes_per_token);
  print_row("indexer, a token", a.indexer_bytes_per_token);
  print_row("KDA state, a sequence", a.state_bytes);
  print_row("fixed, a sequence", a.sequence_bytes);
  std::printf("\ncompute for one token at context %s (FLOP)\n", grouped(a.flops.context).c_str());
  print_row("weights", a.flops.weights);
  print_row("attention", a.flops.attention);
  print_row("indexer", a.flops.indexer);
  print_row("KDA state", a.flops.state);
  print_row("total", a.flops.total());
  std::printf("  a query attends to %.4f %% of the context; a prefill has %s pairs of %s\n\n", 100.0 * a.decode_fraction,
              grouped(a.prefill_pairs_sparse).c_str(), grouped(a.prefill_pairs_dense).c_str());
  std::printf("layer  attention   mlp    %22s %22s\n", "parameters", "active");
  for (size_t l = 0; l < a.layers.size(); ++l) {
    std::printf("%5zu  %-10s  %-5s  %22s %22s\n", l, a.layers[l].attention.c_str(), a.layers[l].mlp.c_str(),
                grouped(a.layers[l].parameters).c_str(), grouped(a.layers[l].active).c_str());
  }
}

absl::Status inspect(const Flags& flags) {
  ASSIGN_OR_RETURN(const model::ModelConfig config, read_config_or_preset(flags.path));
  const int64_t context = flags.context > 0 ? flags.context : config.max_positions;
  ASSIGN_OR_RETURN(const model::Accounting accounting, model::account(config, context));
  if (flags.json) {
    std::printf("%s\n", to_json(config, accounting).dump().c_str());
  } else {
    print_text(config, accounting);
  }
  return absl::OkStatus();
}

}  // namespace

Run add_inspect(CLI::App& app) {
  auto flags = std::make_shared<Flags>();
  app.add_option("path", flags->path, "A model directory, a config.json, or a preset: " + preset_names())->required();
  app.add_flag("--json", flags->json, "One JSON object instead of tables");
  app.add_option("--context", flags->context, "Context length for compute; default: max_position_embeddings")
      ->check(integer_in(1));
  return [flags] { return inspect(*flags); };
}

}  // namespace slipstream::cli
