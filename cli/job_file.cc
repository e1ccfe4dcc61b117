#include "cli/job_file.h"

#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "absl/strings/match.h"
#include "cli/presets.h"
#include "model/load.h"
#include "model/tokenizer.h"
#include "yaml-cpp/yaml.h"

namespace slipstream::cli {
namespace {

namespace fs = std::filesystem;

void fix_port(std::string& address, int port) {
  if (absl::EndsWith(address, ":0")) address = absl::StrCat(address.substr(0, address.size() - 1), port);
}

// Several roles may start at once on a fresh directory: each writes its own copy (all alike), the first rename wins.
absl::Status create_model(const Job& job) {
  const fs::path path = job.learner.model.path;
  ASSIGN_OR_RETURN(const model::ModelConfig config, read_config_or_preset(job.init_config));
  ASSIGN_OR_RETURN(const std::unique_ptr<kernels::Stream> stream, kernels::Stream::create_cpu(1));
  ASSIGN_OR_RETURN(const model::LoadedWeights weights,
                   model::random_weights(config, config.dtype, job.init_seed, *stream));
  const fs::path mine = absl::StrCat(path.string(), ".new-", getpid());
  std::error_code error;
  fs::remove_all(mine, error);
  RETURN_IF_ERROR(model::save_weights(weights, mine, {}));
  fs::rename(mine, path, error);
  if (error) fs::remove_all(mine, error);
  if (!fs::exists(path / "config.json", error)) {
    return absl::PermissionDeniedError(absl::StrCat("model.path: ", path.string(), ": the new model cannot be put there"));
  }
  return absl::OkStatus();
}

// A prompt with an id that the model does not have would abort every episode.
absl::Status check_vocabulary(const Job& job) {
  ASSIGN_OR_RETURN(const std::unique_ptr<model::Tokenizer> tokenizer, model::open_tokenizer(job.shared.tokenizer));
  ASSIGN_OR_RETURN(const model::ModelConfig config, model::read_model_config(job.learner.model.path));
  if (tokenizer->vocab_size() <= config.vocab) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("model.path: ", job.learner.model.path, ": vocab_size ", config.vocab,
                                                 ", expected at least the ", tokenizer->vocab_size(), " ids of chat.tokenizer ",
                                                 job.shared.tokenizer));
}

absl::Status make_directory(const fs::path& path) {
  std::error_code error;
  fs::create_directories(path, error);
  if (!error) return absl::OkStatus();
  return absl::PermissionDeniedError(absl::StrCat("run.dir: ", path.string(), " cannot be made: ", error.message()));
}

}  // namespace

void add_job_flags(CLI::App& app, const std::shared_ptr<JobFlags>& flags) {
  app.add_option("-c,--config", flags->config, "The job's YAML file")->required();
  app.add_option("--set", flags->sets, "Overrides one value: --set rl.max_staleness=0")->take_all()->expected(1);
}

absl::StatusOr<Job> read_job(const JobFlags& flags) {
  ASSIGN_OR_RETURN(ConfigNode root, ConfigNode::load(flags.config));
  for (const std::string& set : flags.sets) RETURN_IF_ERROR(root.override_value(set));
  Job job;
  job.shared = JobConfig::from(root);
  job.gateway = gateway::GatewayConfig::from(root);
  job.rollout = rollout::Worker::Config::from(root);
  job.learner = learner::LearnerConfig::from(root);
  ConfigNode init = root.child("model").child("init");
  init.read("config", &job.init_config);
  init.read("seed", &job.init_seed);
  ConfigNode metrics = root.child("metrics");
  metrics.read_address("run", &job.metrics_address, 0);
  metrics.read_address("gateway", &job.gateway_metrics_address, 0);
  metrics.read_address("learner", &job.learner_metrics_address, 0);
  metrics.read_address("rollout", &job.rollout_metrics_address, 0);
  if (const auto tokenizer = model::open_tokenizer(job.shared.tokenizer); !tokenizer.ok()) {
    root.child("chat").fail("tokenizer", std::string(tokenizer.status().message()));
  }
  if (job.gateway.environments.empty()) root.fail("environments", "missing, expected at least one environment");
  RETURN_IF_ERROR(root.finish());
  job.resolved = root.resolved();
  return job;
}

void fix_addresses(Job& job) {
  fix_port(job.gateway.address, 7400);
  fix_port(job.gateway.job.learner_address, 7401);
  fix_port(job.learner.address, 7402);
  job.learner.gateway_address = job.gateway.job.learner_address;
  if (job.rollout.gateway_address.empty()) job.rollout.gateway_address = job.gateway.address;
  if (job.rollout.learner_address.empty()) job.rollout.learner_address = job.learner.address;
}

namespace {
absl::Status expect_device(const char* field, kernels::Device device) {
  const absl::Status status = kernels::Stream::create(device, 1).status();
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrCat(field, ": ", kernels::device_word(device), ": ", status.message()));
}
}  // namespace

absl::Status expect_rollout_device(const Job& job) { return expect_device("rollout.device", job.rollout.engine.device); }
absl::Status expect_learner_device(const Job& job) { return expect_device("learner.device", job.learner.model.device); }

absl::Status prepare_run(const Job& job) {
  const fs::path run = job.shared.run_directory();
  for (const char* folder : {"logs", "rollouts", "checkpoints", "trajectories"}) RETURN_IF_ERROR(make_directory(run / folder));
  const fs::path model = job.learner.model.path;
  std::error_code error;
  if (fs::exists(model / "config.json", error)) return check_vocabulary(job);
  if (job.init_config.empty()) {
    return absl::NotFoundError(absl::StrCat("model.path: ", model.string(),
                                            ": no checkpoint there (config.json), and no model.init to create one from"));
  }
  if (model.has_parent_path()) RETURN_IF_ERROR(make_directory(model.parent_path()));
  RETURN_IF_ERROR(create_model(job));
  return check_vocabulary(job);
}

namespace {

void flatten(const YAML::Node& node, const std::string& path, std::map<std::string, std::string>* out) {
  const auto below = [&](const std::string& key) { return path.empty() ? key : absl::StrCat(path, ".", key); };
  if (node.IsMap()) {
    for (const auto& item : node) flatten(item.second, below(item.first.as<std::string>()), out);
  } else if (node.IsSequence()) {
    for (size_t i = 0; i < node.size(); ++i) flatten(node[i], below(absl::StrCat(i)), out);
  } else {
    (*out)[path] = node.IsNull() ? "" : node.as<std::string>();
  }
}

}  // namespace

std::vector<std::string> config_changes(const std::string& before, const std::string& after) {
  std::map<std::string, std::string> was, is;
  try {
    flatten(YAML::Load(before), "", &was);
    flatten(YAML::Load(after), "", &is);
  } catch (const YAML::Exception&) {
    return {};
  }
  for (const auto& [key, value] : was) is.try_emplace(key, "(nothing)");
  std::vector<std::string> out;
  for (const auto& [key, value] : is) {
    const auto old = was.find(key);
    const std::string& then = old == was.end() ? "(nothing)" : old->second;
    if (then != value) out.push_back(absl::StrCat(key, ": ", then, " -> ", value));
  }
  return out;
}

absl::Status write_resolved_config(const Job& job) {
  const std::string path = job.shared.run_directory() + "/config.yaml";
  if (std::ifstream previous(path); previous.good()) {
    const std::string before{std::istreambuf_iterator<char>(previous), {}};
    for (const std::string& change : config_changes(before, job.resolved)) {
      std::fprintf(stderr, "%s: changed since this run was last started: %s\n", path.c_str(), change.c_str());
    }
  }
  std::ofstream file(path);
  file << job.resolved;
  file.close();
  if (!file.good()) return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be written"));
  return absl::OkStatus();
}

absl::StatusOr<Logger> open_log(const Job& job, const std::string& role) {
  return make_logger(role, job.shared.run_directory() + "/logs");
}

absl::Status serve_metrics(Metrics& metrics, const std::string& address, const Logger& log) {
  ASSIGN_OR_RETURN(const int port, metrics.serve(address));
  log->info("metrics at http://{}:{}/metrics", address.substr(0, address.rfind(':')), port);
  return absl::OkStatus();
}

}  // namespace slipstream::cli
