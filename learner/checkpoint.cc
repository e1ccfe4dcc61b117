#include "learner/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <sstream>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "learner/journal.h"
#include "learner/manifest.h"
#include "model/checkpoint.h"
#include "model/checkpoint_writer.h"
#include "model/json_reader.h"
#include "model/output_file.h"
#include "model/tensor_rows.h"
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
constexpr int kFormat = 2;
constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
constexpr int64_t kInt64Max = std::numeric_limits<int64_t>::max();

std::string directory_name(int64_t step) { return absl::StrFormat("%s%08d", kPrefix, step); }

ordered_json ids_to_json(const google::protobuf::RepeatedPtrField<std::string>& ids) {
  ordered_json out = ordered_json::array();
  for (const std::string& id : ids) out.push_back(absl::BytesToHexString(id));  // ids are bytes, JSON is text
  return out;
}

void read_ids(model::JsonReader& json, const char* key,
              google::protobuf::RepeatedPtrField<std::string>* ids) {
  if (!json.has(key)) return json.fail(key, "a list of ids in hexadecimal");
  for (const std::string& id : json.get_strings(key)) *ids->Add() = absl::HexStringToBytes(id);
}

std::vector<double> read_numbers(model::JsonReader& json, const char* key) {
  const ordered_json* list = json.find(key);
  bool good = list != nullptr && list->is_array();
  std::vector<double> out;
  for (size_t i = 0; good && i < list->size(); ++i) {
    good = (*list)[i].is_number();
    if (good) out.push_back((*list)[i].get<double>());
  }
  if (!good) json.fail(key, "a list of numbers");
  return out;
}

absl::Status read_commit(model::JsonReader json, v1::Commit* out) {
  out->set_step(json.require_int("step", 0));
  out->set_policy_version(static_cast<int32_t>(json.require_int("policy_version", 0, kInt32Max)));
  if (!json.has("final")) json.fail("final", "true or false");
  out->set_final(json.get_bool("final", false));
  read_ids(json, "trained", out->mutable_trained_rollout_ids());
  if (!json.has("dropped")) json.fail("dropped", "an object of ids by reason");
  model::JsonReader dropped = json.object("dropped");
  RETURN_IF_ERROR(json.status());
  for (const auto& [reason, ids] : json.find("dropped")->items()) {
    read_ids(dropped, reason.c_str(), (*out->mutable_dropped())[reason].mutable_rollout_ids());
  }
  return dropped.status();
}

absl::StatusOr<LearnerState> read_state_fields(model::JsonReader json) {
  LearnerState state;
  json.require_int("format", kFormat, kFormat);
  RETURN_IF_ERROR(json.status());
  state.step = json.require_int("step", 0);
  state.warmup_steps = json.require_int("warmup_steps", 0);
  state.rl_steps = json.require_int("rl_steps", 0);
  state.phase = read_phase(json, "phase");
  state.policy_version = static_cast<int32_t>(json.require_int("policy_version", 0, kInt32Max));
  state.incarnation = json.require_int("incarnation", 0, kInt64Max);
  state.skipped_in_row = static_cast<int>(json.require_int("skipped_in_row", 0, kInt32Max));
  state.optimizer_updates = json.require_int("optimizer_updates", 0);
  state.wall_seconds = json.require_number("wall_seconds", 0.0);
  state.wait_data_seconds = json.require_number("wait_data_seconds", 0.0);
  state.demonstration_probabilities = read_numbers(json, "demonstration_probabilities");
  state.weights_id = json.require_string("weights_id");
  state.log_id = json.require_string("log_id");
  state.groups_end = static_cast<uint64_t>(json.require_int("groups_end", 0, kInt64Max));
  for (const char* part : {"commit", "report"}) {
    if (!json.has(part)) json.fail(part, "an object");
  }
  model::JsonReader commit = json.object("commit"), report = json.object("report");
  RETURN_IF_ERROR(json.status());
  RETURN_IF_ERROR(read_commit(std::move(commit), &state.commit));
  state.report = read_report(report);
  if (state.report.step != state.step) report.fail("step", absl::StrCat(state.step));
  RETURN_IF_ERROR(report.status());
  return state;
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
      {"weights_id", state.weights_id},
      {"log_id", state.log_id},
      {"groups_end", state.groups_end},
      {"commit",
       {{"step", state.commit.step()},
        {"policy_version", state.commit.policy_version()},
        {"final", state.commit.final()},
        {"trained", ids_to_json(state.commit.trained_rollout_ids())},
        {"dropped", dropped}}},
      {"report", to_json(state.report)},
  };
  return json.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

absl::StatusOr<LearnerState> parse_state(std::string_view json, const std::string& path) {
  const ordered_json parsed = ordered_json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) {
    return absl::DataLossError(absl::StrCat(path, ": ", json.size(), " bytes, expected a whole JSON object"));
  }
  return read_state_fields(model::JsonReader(parsed, path));
}

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
    if (absl::StartsWith(name, kPrefix) && fs::exists(at->path() / kManifestFile, ignored))
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
  model::CheckpointWriter writer({.before_step = {}, .stream = &optimizer.stream()});
  const std::vector<NamedTensor> tensors = optimizer_tensors(weights, optimizer, optimizer.updates() > 0);
  for (const NamedTensor& entry : tensors)
    RETURN_IF_ERROR(writer.add(entry.name, entry.tensor, kernels::DType::kF32));
  if (!tensors.empty()) RETURN_IF_ERROR(writer.save(dir + "/" + kOptimizer));
  LearnerState written = state;
  written.optimizer_updates = optimizer.updates();
  RETURN_IF_ERROR(model::write_file(dir + "/" + kStateFile, to_json(written)));
  RETURN_IF_ERROR(write_manifest(dir));
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
  for (size_t i = 0; i < names.size(); ++i) {
    const std::string dir = root_ + "/" + names[i];
    std::error_code ignored;
    if (i + static_cast<size_t>(keep_) - 1 < names.size()) {
      fs::remove_all(dir, ignored);
    } else {
      remove_journal(dir);  // nobody goes on from there
    }
  }
}

std::string Checkpoints::directory(int64_t step) const { return root_ + "/" + directory_name(step); }

absl::Status Checkpoints::save(const LearnerState& state, const PolicyWeights& weights,
                               const AdamW& optimizer) const {
  const std::string name = directory_name(state.step), dir = directory(state.step);
  const std::string temporary = root_ + "/" + kTemporary + name;
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
  return parse_state(text.str(), path);
}

// Going on from an older checkpoint would not be exact: what was trained since is gone from the gateway's
// log, and workers have sampled with versions that would be made a second time. So it starts a run of its
// own.
absl::Status Checkpoints::damaged(const std::string& dir, const absl::Status& why) const {
  std::vector<std::string> names = complete_directories();
  std::reverse(names.begin(), names.end());
  for (const std::string& name : names) {
    const std::string older = root_ + "/" + name;
    if (name >= fs::path(dir).filename().string() || !verify_manifest(older).ok()) continue;
    return absl::Status(why.code(),
                        absl::StrCat(why.message(), "; this run cannot go on, but a new one can start from ",
                                     older, ", which is intact: set model.path to it and run.id to another"));
  }
  return absl::Status(why.code(),
                      absl::StrCat(why.message(), "; no older checkpoint in ", root_, " is intact"));
}

absl::StatusOr<LearnerState> Checkpoints::read(const std::string& dir) const {
  if (const absl::Status intact = verify_manifest(dir); !intact.ok()) return damaged(dir, intact);
  return read_state(dir);
}

absl::Status Checkpoints::restore(const std::string& dir, const LearnerState& state, PolicyWeights& weights,
                                  AdamW& optimizer, kernels::Stream& host, kernels::Stream& compute) {
  optimizer.reset();
  const std::vector<NamedTensor> tensors = optimizer_tensors(weights, optimizer, state.optimizer_updates > 0);
  if (!tensors.empty()) {
    ASSIGN_OR_RETURN(model::Checkpoint file, model::Checkpoint::open(dir + "/" + kOptimizer, {}));
    for (const NamedTensor& entry : tensors) {
      if (entry.tensor.device() == host.device()) {
        RETURN_IF_ERROR(file.read_into(entry.name, entry.tensor));
        continue;
      }
      std::vector<float> values(static_cast<size_t>(entry.tensor.numel()));
      const std::vector<int64_t> shape = model::shape_of(entry.tensor);
      RETURN_IF_ERROR(file.read_into(
          entry.name, kernels::Tensor(values.data(), kernels::DType::kF32, shape.data(), entry.tensor.rank())));
      compute.upload(values.data(), entry.tensor);
    }
  }
  optimizer.set_updates(state.optimizer_updates);
  weights.round(host, compute);
  return absl::OkStatus();
}

}  // namespace slipstream::learner
