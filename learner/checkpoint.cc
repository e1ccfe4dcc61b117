#include "learner/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "model/output_file.h"
#include "nlohmann/json.hpp"

namespace slipstream::learner {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

constexpr char kPrefix[] = "step_";
constexpr char kTemporary[] = "writing_";
constexpr char kLatest[] = "latest";
constexpr char kStateFile[] = "learner.json";
constexpr char kOptimizer[] = "optimizer";
constexpr int kFormat = 1;

std::string directory_name(int64_t step) { return absl::StrFormat("%s%08d", kPrefix, step); }

ordered_json ids_to_json(const google::protobuf::RepeatedPtrField<std::string>& ids) {
  ordered_json out = ordered_json::array();
  for (const std::string& id : ids) out.push_back(absl::BytesToHexString(id));  // ids are bytes, JSON is text
  return out;
}

void ids_from_json(const ordered_json& json, google::protobuf::RepeatedPtrField<std::string>* ids) {
  for (const ordered_json& id : json) *ids->Add() = absl::HexStringToBytes(id.get<std::string>());
}

std::string to_json(const LearnerState& state) {
  ordered_json dropped = ordered_json::object();
  for (const auto& [reason, ids] : state.commit.dropped()) dropped[reason] = ids_to_json(ids.rollout_ids());
  const ordered_json json = {
      {"format", kFormat},
      {"step", state.step},
      {"warmup_steps", state.warmup_steps},
      {"rl_steps", state.rl_steps},
      {"phase", name_of(state.phase)},
      {"policy_version", state.policy_version},
      {"incarnation", state.incarnation},
      {"skipped_in_row", state.skipped_in_row},
      {"optimizer_updates", state.optimizer_updates},
      {"wall_seconds", state.wall_seconds},
      {"wait_data_seconds", state.wait_data_seconds},
      {"demonstration_probabilities", state.demonstration_probabilities},
      {"commit",
       {{"step", state.commit.step()},
        {"policy_version", state.commit.policy_version()},
        {"final", state.commit.final()},
        {"trained", ids_to_json(state.commit.trained_rollout_ids())},
        {"dropped", dropped}}},
  };
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

LearnerState from_json(const ordered_json& json) {
  LearnerState state;
  json.at("step").get_to(state.step);
  json.at("warmup_steps").get_to(state.warmup_steps);
  json.at("rl_steps").get_to(state.rl_steps);
  state.phase = json.at("phase").get<std::string>() == name_of(Phase::kWarmup) ? Phase::kWarmup : Phase::kRl;
  json.at("policy_version").get_to(state.policy_version);
  json.at("incarnation").get_to(state.incarnation);
  json.at("skipped_in_row").get_to(state.skipped_in_row);
  json.at("optimizer_updates").get_to(state.optimizer_updates);
  json.at("wall_seconds").get_to(state.wall_seconds);
  json.at("wait_data_seconds").get_to(state.wait_data_seconds);
  json.at("demonstration_probabilities").get_to(state.demonstration_probabilities);
  const ordered_json& commit = json.at("commit");
  state.commit.set_step(commit.at("step").get<int64_t>());
  state.commit.set_policy_version(commit.at("policy_version").get<int32_t>());
  state.commit.set_final(commit.at("final").get<bool>());
  ids_from_json(commit.at("trained"), state.commit.mutable_trained_rollout_ids());
  for (const auto& [reason, ids] : commit.at("dropped").items()) {
    ids_from_json(ids, (*state.commit.mutable_dropped())[reason].mutable_rollout_ids());
  }
  return state;
}

absl::Status write_file(const std::string& path, const std::string& text) {
  ASSIGN_OR_RETURN(model::OutputFile file, model::OutputFile::create(path));
  RETURN_IF_ERROR(file.append({reinterpret_cast<const std::byte*>(text.data()), text.size()}));
  return file.finish();
}

absl::Status sync_file(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::ErrnoToStatus(errno, path);
  const int result = ::fsync(fd), error = errno;
  ::close(fd);
  return result == 0 ? absl::OkStatus() : absl::ErrnoToStatus(error, path);
}

// Whether the published file holds the fp32 master as it is.
bool file_is_exact(const model::ModelConfig& config, const model::Parameter& parameter) {
  return parameter.storage == model::Storage::kFp32 || config.dtype == kernels::DType::kF32;
}

struct NamedTensor {
  std::string name;
  kernels::Tensor tensor;
};

// What the optimizer directory holds: the same list for writing and reading.
std::vector<NamedTensor> optimizer_tensors(const PolicyWeights& weights, const AdamW& optimizer,
                                           bool moments) {
  std::vector<NamedTensor> out;
  const auto& masters = weights.master().store.entries();
  for (size_t i = 0; i < masters.size(); ++i) {
    const std::string& name = masters[i].parameter.name;
    if (!file_is_exact(weights.config(), masters[i].parameter))
      out.push_back({"master." + name, masters[i].tensor});
    if (!moments || !is_trained(optimizer.first().entries()[i])) continue;
    out.push_back({"exp_avg." + name, optimizer.first().entries()[i].tensor});
    out.push_back({"exp_avg_sq." + name, optimizer.second().entries()[i].tensor});
  }
  return out;
}

}  // namespace

Checkpoints::Checkpoints(std::string root, int keep, std::string carry_from, Logger log, Hook hook)
    : root_(std::move(root)),
      keep_(keep),
      carry_from_(std::move(carry_from)),
      log_(std::move(log)),
      hook_(std::move(hook)) {}

std::vector<std::string> Checkpoints::complete_directories() const {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(root_, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    std::error_code ignored;
    if (absl::StartsWith(name, kPrefix) && fs::exists(at->path() / kStateFile, ignored))
      names.push_back(name);
  }
  std::sort(names.begin(), names.end());  // steps have leading zeros
  return names;
}

std::optional<std::string> Checkpoints::find() const {
  const std::string link = root_ + "/" + kLatest;
  std::error_code error;
  const fs::path target = fs::read_symlink(link, error);
  if (!error && fs::is_directory(root_ / target, error)) return (root_ / target).string();
  const std::vector<std::string> names = complete_directories();
  if (names.empty()) return std::nullopt;
  log_->warn("{}: missing or naming nothing; starting from {}", link, names.back());
  return root_ + "/" + names.back();
}

absl::Status Checkpoints::write(const std::string& dir, const LearnerState& state,
                                const PolicyWeights& weights, const AdamW& optimizer) const {
  RETURN_IF_ERROR(model::save_weights(weights.master(), dir, {.carry_from = carry_from_}));
  RETURN_IF_ERROR(sync_file(dir + "/config.json"));
  model::CheckpointWriter writer({});
  const std::vector<NamedTensor> tensors = optimizer_tensors(weights, optimizer, optimizer.updates() > 0);
  for (const NamedTensor& entry : tensors)
    RETURN_IF_ERROR(writer.add(entry.name, entry.tensor, kernels::DType::kF32));
  if (!tensors.empty()) RETURN_IF_ERROR(writer.save(dir + "/" + kOptimizer));
  LearnerState written = state;
  written.optimizer_updates = optimizer.updates();
  RETURN_IF_ERROR(write_file(dir + "/" + kStateFile, to_json(written)));
  return model::sync_directory(dir);
}

absl::Status Checkpoints::replace_latest(const std::string& name) const {
  const std::string link = root_ + "/" + kLatest, temporary = root_ + "/" + kTemporary + kLatest;
  RETURN_IF_ERROR(model::remove_file(temporary));
  std::error_code error;
  fs::create_directory_symlink(name, temporary, error);
  if (error) return absl::ErrnoToStatus(error.value(), temporary);
  before("replace latest");
  RETURN_IF_ERROR(model::rename_file(temporary, link));
  return model::sync_directory(root_);
}

// What cannot be removed is in nobody's way: the next save tries again.
void Checkpoints::remove_old(const std::string& newest) const {
  std::vector<std::string> names = complete_directories();
  std::error_code error;
  for (fs::directory_iterator at(root_, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename().string();
    std::error_code ignored;
    if (absl::StartsWith(name, kTemporary)) fs::remove_all(at->path(), ignored);
  }
  // Steps beyond the newest are leftovers of a life whose `latest` never came to name them.
  std::erase_if(names, [&](const std::string& name) {
    std::error_code ignored;
    if (name > newest) fs::remove_all(root_ + "/" + name, ignored);
    return name >= newest;
  });
  for (size_t i = 0; i + static_cast<size_t>(keep_) - 1 < names.size(); ++i) {
    std::error_code ignored;
    fs::remove_all(root_ + "/" + names[i], ignored);
  }
}

absl::Status Checkpoints::save(const LearnerState& state, const PolicyWeights& weights,
                               const AdamW& optimizer) const {
  const std::string name = directory_name(state.step);
  const std::string temporary = root_ + "/" + kTemporary + name, dir = root_ + "/" + name;
  std::error_code error;
  fs::remove_all(temporary, error);
  fs::create_directories(temporary, error);
  if (error) return absl::ErrnoToStatus(error.value(), temporary);
  before("write " + name);
  RETURN_IF_ERROR(write(temporary, state, weights, optimizer));
  if (fs::exists(dir, error)) {
    // Written by a life that ended before `latest` named it; or this very step again, when `latest` stays
    // valid by its absence: find() then takes the newest complete directory.
    before("remove " + name);
    fs::remove_all(dir, error);
    if (error) return absl::ErrnoToStatus(error.value(), dir);
  }
  before("rename " + name);
  RETURN_IF_ERROR(model::rename_file(temporary, dir));
  RETURN_IF_ERROR(model::sync_directory(root_));
  RETURN_IF_ERROR(replace_latest(name));
  before("remove old");
  remove_old(name);
  return absl::OkStatus();
}

absl::StatusOr<LearnerState> Checkpoints::read_state(const std::string& dir) {
  const std::string path = dir + "/" + kStateFile;
  std::ifstream in(path, std::ios::binary);
  if (!in) return absl::NotFoundError(absl::StrCat(path, ": cannot be read"));
  std::stringstream text;
  text << in.rdbuf();
  try {
    const ordered_json json = ordered_json::parse(text.str());
    if (const int format = json.at("format").get<int>(); format != kFormat) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": format: ", format, ", expected ", kFormat));
    }
    return from_json(json);
  } catch (const nlohmann::json::exception& json_error) {
    return absl::DataLossError(absl::StrCat(path, ": ", json_error.what()));
  }
}

absl::Status Checkpoints::restore(const std::string& dir, const LearnerState& state, PolicyWeights& weights,
                                  AdamW& optimizer, kernels::Stream& stream) {
  optimizer.reset();
  const std::vector<NamedTensor> tensors = optimizer_tensors(weights, optimizer, state.optimizer_updates > 0);
  if (!tensors.empty()) {
    ASSIGN_OR_RETURN(model::Checkpoint file, model::Checkpoint::open(dir + "/" + kOptimizer, {}));
    for (const NamedTensor& entry : tensors) RETURN_IF_ERROR(file.read_into(entry.name, entry.tensor));
  }
  optimizer.set_updates(state.optimizer_updates);
  weights.round(stream);
  return absl::OkStatus();
}

}  // namespace slipstream::learner
