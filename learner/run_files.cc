#include "learner/run_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "model/json_reader.h"
#include "model/output_file.h"
#include "nlohmann/json.hpp"
#include "proto/words.h"

namespace slipstream::learner {
namespace {

namespace fs = std::filesystem;
using nlohmann::ordered_json;

std::string dump(const ordered_json& json) {
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);  // text need not be UTF-8
}

// The step of a line of metrics.jsonl; -1 for one that is no such line (cut short by a kill).
int64_t step_of(const std::string& line) {
  const ordered_json json = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("step") || !json["step"].is_number_integer()) return -1;
  return json["step"].get<int64_t>();
}

// The report in a line; nothing if another program's version wrote it.
std::optional<StepReport> report_of(const std::string& line) {
  const ordered_json json = ordered_json::parse(line, nullptr, /*allow_exceptions=*/false);
  model::JsonReader reader(json, "metrics.jsonl");
  StepReport report = read_report(reader);
  return reader.status().ok() ? std::optional(std::move(report)) : std::nullopt;
}

// Removes the lines after step `last`, and what is no whole line. Returns the last line that stays, or "".
absl::StatusOr<std::string> cut_after(const std::string& path, int64_t last) {
  std::ifstream in(path);
  std::string newest, kept;
  bool cut = false;
  for (std::string line; std::getline(in, line);) {
    const int64_t step = in.eof() ? -1 : step_of(line);  // eof: the line has no end
    if (step < 0 || step > last) {
      cut = true;
      continue;
    }
    kept += line + "\n";
    newest = std::move(line);
  }
  if (!cut) return newest;
  const std::string temporary = path + ".tmp";
  RETURN_IF_ERROR(model::write_file(temporary, kept));
  RETURN_IF_ERROR(model::rename_file(temporary, path));
  return newest;
}

std::string step_file(const std::string& folder, int64_t step, const char* ending) {
  return absl::StrFormat("%s/step_%06d.%s", folder, step, ending);
}

// The files step_file() names, of steps after `last`.
absl::Status remove_after(const std::string& folder, int64_t last) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().stem().string();
    int64_t step = 0;
    if (!absl::StartsWith(name, "step_") || !absl::SimpleAtoi(name.substr(5), &step) || step <= last)
      continue;
    RETURN_IF_ERROR(model::remove_file(at->path().string()));
  }
  return !error || error == std::errc::no_such_file_or_directory ? absl::OkStatus()
                                                                 : absl::ErrnoToStatus(error.value(), folder);
}

ordered_json numbers(const std::vector<float>& values) {
  ordered_json out = ordered_json::array();
  for (const float value : values) {
    if (std::isfinite(value)) {
      out.push_back(value);
    } else {
      out.push_back(nullptr);
    }
  }
  return out;
}

ordered_json spans_of(const v1::Sample& sample, const model::Tokenizer* tokenizer) {
  ordered_json out = ordered_json::array();
  int at = 0;
  for (const v1::Span& span : sample.spans()) {
    ordered_json json = {{"kind", rpc::word_of(span.kind())}, {"length", span.length()}};
    if (tokenizer != nullptr)
      json["text"] = tokenizer->decode(
          absl::MakeConstSpan(sample.ids().data() + at, static_cast<size_t>(span.length())));
    out.push_back(std::move(json));
    at += span.length();
  }
  return out;
}

ordered_json sample_json(const v1::Sample& message, const TrainingSample& sample,
                         const std::vector<float>& learner_logprob, const std::vector<TokenLoss>& tokens,
                         const model::Tokenizer* tokenizer) {
  ordered_json trained = ordered_json::array(), ratios = ordered_json::array();
  for (const TokenLoss& token : tokens) {
    trained.push_back(token.fate == TokenFate::kTrained ? 1 : 0);
    ratios.push_back(token.ratio);
  }
  ordered_json json = {{"ids", sample.ids},
                       {"spans", spans_of(message, tokenizer)},
                       {"action_logprobs", numbers(sample.rollout_logprob)},
                       {"learner_logprobs", numbers(learner_logprob)},
                       {"action_policy_versions", sample.policy_version},
                       {"action_context_versions", sample.context_version},
                       {"importance_ratios", ratios},
                       {"trained", trained}};
  if (tokenizer != nullptr) {  // a piece per action token, for strips of tokens
    ordered_json texts = ordered_json::array();
    for (const int32_t position : sample.positions) {
      texts.push_back(tokenizer->decode(absl::MakeConstSpan(&sample.ids[static_cast<size_t>(position)], 1)));
    }
    json["action_texts"] = std::move(texts);
  }
  return json;
}

}  // namespace

RunLock::~RunLock() {
  if (fd_ >= 0) close(fd_);
}

absl::Status RunLock::take(const std::string& run_directory) {
  std::error_code error;
  fs::create_directories(run_directory, error);
  const std::string path = run_directory + "/learner.lock";
  fd_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd_ < 0) return absl::PermissionDeniedError(absl::StrCat(path, ": ", std::strerror(errno)));
  if (flock(fd_, LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(run_directory, ": another learner has this run; expected it to end first"));
}

absl::StatusOr<std::unique_ptr<RunFiles>> RunFiles::open(const std::string& run_directory,
                                                         const StepReport& restored, int rollouts_max) {
  std::error_code error;
  fs::create_directories(run_directory + "/rollouts", error);
  if (error) return absl::ErrnoToStatus(error.value(), run_directory + "/rollouts");
  for (const char* folder : {"/rollouts", "/batches"}) {
    RETURN_IF_ERROR(remove_after(run_directory + folder, restored.step));
  }
  auto files = std::unique_ptr<RunFiles>(new RunFiles(run_directory, rollouts_max));
  const std::string path = run_directory + "/metrics.jsonl";
  ASSIGN_OR_RETURN(const std::string last, cut_after(path, restored.step));
  files->metrics_.open(path, std::ios::app);
  if (!files->metrics_) return absl::PermissionDeniedError(absl::StrCat(path, ": cannot be written"));
  if (restored.step > 0 && step_of(last) < restored.step) {
    files->restored_ = restored;
    RETURN_IF_ERROR(files->append(restored));
  } else {
    files->restored_ = report_of(last).value_or(restored);
  }
  return files;
}

absl::Status RunFiles::sync() const { return model::sync_file(directory_ + "/metrics.jsonl"); }

absl::Status RunFiles::append(const StepReport& report) {
  metrics_ << to_json_line(report) << std::endl;
  if (metrics_) return absl::OkStatus();
  metrics_.clear();
  return absl::UnavailableError(
      absl::StrCat(directory_, "/metrics.jsonl: cannot be written; is the disk full?"));
}

absl::Status RunFiles::write_rollouts(int64_t step, int32_t policy_version, const TrainingBatch& batch,
                                      const GradientResult& result, const model::Tokenizer* tokenizer) {
  if (rollouts_max_ == 0) return absl::OkStatus();
  const std::string path = step_file(directory_ + "/rollouts", step, "jsonl");
  std::ofstream out(path, std::ios::trunc);
  const size_t count = std::min(batch.trajectories.size(), static_cast<size_t>(rollouts_max_));
  for (size_t t = 0; t < count; ++t) {
    const TrainingTrajectory& trajectory = batch.trajectories[t];
    const v1::Trajectory& message = *trajectory.message;
    ordered_json json = {{"step", step},
                         {"policy_version", policy_version},
                         {"rollout_id", message.rollout_id()},
                         {"group_id", message.group_id()},
                         {"group_index", message.group_index()},
                         {"environment", message.environment()},
                         {"task", message.task()},
                         {"instance", message.instance()},
                         {"reward", message.reward()},
                         {"advantage", trajectory.advantage},
                         {"weight", trajectory.weight},
                         {"finish_reason", rpc::word_of(message.finish_reason())},
                         {"staleness", policy_version - message.min_policy_version()},
                         {"num_turns", message.num_turns()}};
    ordered_json samples = ordered_json::array();
    for (size_t i = 0; i < trajectory.samples.size(); ++i) {
      const size_t s = static_cast<size_t>(trajectory.samples[i]);
      samples.push_back(sample_json(message.samples(static_cast<int>(i)), batch.samples[s],
                                    result.learner_logprob[s], result.tokens[s], tokenizer));
    }
    // Most trajectories are one sample: its columns stand beside the rest. Further ones follow in
    // `more_samples`.
    json.update(samples[0]);
    if (samples.size() > 1) json["more_samples"] = ordered_json(samples.begin() + 1, samples.end());
    out << dump(json) << "\n";
  }
  out.flush();
  if (!out) return absl::UnavailableError(absl::StrCat(path, ": cannot be written; is the disk full?"));
  return absl::OkStatus();
}

absl::Status RunFiles::write_batch(int64_t step, const v1::Batch& batch) {
  std::error_code error;
  fs::create_directories(directory_ + "/batches", error);
  const std::string path = step_file(directory_ + "/batches", step, "pb");
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  if (batch.SerializeToOstream(&out) && out.flush()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(path, ": cannot be written; is the disk full?"));
}

}  // namespace slipstream::learner
