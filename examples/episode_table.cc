#include "examples/episode_table.h"

#include "absl/strings/escaping.h"

namespace slipstream::examples {
namespace {

constexpr size_t kMaxIdBytes = 256;

// Names in messages come from the peer: any bytes, any length.
std::string quoted(const std::string& text) {
  constexpr size_t kShown = 64;
  return absl::StrCat("\"", absl::CHexEscape(text.substr(0, kShown)), text.size() > kShown ? "..." : "",
                      "\"");
}

absl::Status valid_id(const std::string& id) {
  if (id.empty()) return absl::InvalidArgumentError("episode_id: empty, expected a unique id");
  if (id.size() > kMaxIdBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("episode_id: ", id.size(), " bytes, expected at most ", kMaxIdBytes));
  }
  return absl::OkStatus();
}

}  // namespace

EpisodeTable::EpisodeTable(const std::string& environment, std::vector<TaskEntry> tasks, Config config)
    : tasks_(std::move(tasks)), config_(config) {
  description_.set_environment(environment);
  for (const TaskEntry& entry : tasks_) *description_.add_tasks() = entry.description;
}

void EpisodeTable::expire(absl::Time now) {
  while (!episodes_.empty() && now - episodes_.front().used > config_.idle_max) {
    by_id_.erase(episodes_.front().id);
    episodes_.pop_front();
  }
}

EpisodeTable::Episode* EpisodeTable::find(const std::string& id, absl::Time now) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  episodes_.splice(episodes_.end(), episodes_, found->second);
  found->second->used = now;
  return &*found->second;
}

absl::StatusOr<v1::ResetResponse> EpisodeTable::reset(const v1::ResetRequest& request, absl::Time now) {
  RETURN_IF_ERROR(valid_id(request.episode_id()));
  const TaskEntry* entry = nullptr;
  for (const TaskEntry& candidate : tasks_) {
    if (candidate.description.name() == request.task()) entry = &candidate;
  }
  if (entry == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("task: ", quoted(request.task()), ", expected one that Describe lists"));
  }
  const uint64_t num_instances = entry->description.num_instances();
  if (num_instances > 0 && request.instance() >= num_instances) {
    return absl::InvalidArgumentError(absl::StrCat("instance: ", request.instance(), ", expected 0 .. ",
                                                   num_instances - 1, " for task ", quoted(request.task())));
  }
  const absl::MutexLock lock(&mutex_);
  expire(now);
  if (const Episode* episode = find(request.episode_id(), now)) {
    if (episode->entry == entry && episode->instance == request.instance()) return episode->opening;
    return absl::InvalidArgumentError(
        absl::StrCat("episode_id: ", quoted(request.episode_id()),
                     " is open with another task or instance, expected a new id"));
  }
  if (episodes_.size() >= static_cast<size_t>(config_.episodes_max)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "episodes: ", episodes_.size(), " are open, expected fewer than ", config_.episodes_max));
  }
  Episode& episode = episodes_.emplace_back();
  episode.id = request.episode_id();
  episode.entry = entry;
  episode.instance = request.instance();
  episode.task = entry->make();
  episode.used = now;
  episode.opening = episode.task->reset(request.instance());
  if (request.want_solution() && entry->description.has_solutions()) {
    *episode.opening.mutable_solution() = episode.task->solution();
  }
  by_id_[episode.id] = std::prev(episodes_.end());
  return episode.opening;
}

absl::StatusOr<v1::StepResponse> EpisodeTable::step(const v1::StepRequest& request, absl::Time now) {
  RETURN_IF_ERROR(valid_id(request.episode_id()));
  const absl::MutexLock lock(&mutex_);
  expire(now);
  Episode* episode = find(request.episode_id(), now);
  if (episode == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("episode_id: ", quoted(request.episode_id()), ", no such episode is open"));
  }
  const int next = static_cast<int>(episode->answers.size());
  const bool done = next > 0 && episode->answers.back().done();
  if (request.turn() < 0 || request.turn() > next || (done && request.turn() == next)) {
    return absl::InvalidArgumentError(
        done ? absl::StrCat("turn: ", request.turn(), ", the episode ended with turn ", next - 1)
             : absl::StrCat("turn: ", request.turn(), ", expected ", next));
  }
  if (request.turn() < next) return episode->answers[static_cast<size_t>(request.turn())];
  v1::StepResponse answer = episode->task->step(request.message(), request.finish_reason());
  if (next + 1 >= episode->entry->description.max_turns()) answer.set_done(true);
  if (request.want_solution() && episode->entry->description.has_solutions() && !answer.done()) {
    *answer.mutable_solution() = episode->task->solution();
  }
  return episode->answers.emplace_back(std::move(answer));
}

absl::Status EpisodeTable::close(const v1::CloseRequest& request, absl::Time now) {
  RETURN_IF_ERROR(valid_id(request.episode_id()));
  const absl::MutexLock lock(&mutex_);
  expire(now);
  const auto found = by_id_.find(request.episode_id());
  if (found == by_id_.end()) return absl::OkStatus();
  episodes_.erase(found->second);
  by_id_.erase(found);
  return absl::OkStatus();
}

size_t EpisodeTable::num_open() const {
  const absl::MutexLock lock(&mutex_);
  return episodes_.size();
}

}  // namespace slipstream::examples
