// The ledger's state from its log.
#include <algorithm>

#include "absl/time/clock.h"
#include "common/check.h"
#include "gateway/ledger.h"

namespace slipstream::gateway {
namespace {

template <class Message>
absl::Status parse(std::string_view payload, Message* message) {
  if (message->ParseFromArray(payload.data(), static_cast<int>(payload.size()))) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(message->GetTypeName(), ": cannot be parsed"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Ledger>> Ledger::open(const GatewayConfig& config, const std::string& tokenizer, Metrics& metrics,
                                                     Logger logger) {
  // With these changed a rollout id, or a task number, would not mean the same before and after.
  std::map<std::string, std::string> settings = {{"chat.tokenizer", tokenizer}};
  const std::map<std::string, std::string> job = config.job.settings();
  for (const char* key : {"run.seed", "rl.group_size"}) settings[key] = job.at(key);
  std::unique_ptr<Ledger> ledger(new Ledger(config, metrics, logger));
  Ledger* raw = ledger.get();
  {
    const absl::MutexLock lock(&raw->mutex_);
    // Keeps the writer's callbacks out until finish_replay() is done.
    ASSIGN_OR_RETURN(ledger->log_,
                     TrajectoryLog::open({.directory = raw->log_directory(), .segment_bytes = config.log_segment_bytes,
                                          .settings = settings},
                                         logger, [raw](RecordType type, std::string_view payload, uint64_t position) {
                                           raw->mutex_.AssertHeld();
                                           return raw->replay(type, payload, position);
                                         }));
    RETURN_IF_ERROR(ledger->check_settings(settings));
    RETURN_IF_ERROR(ledger->finish_replay());
  }
  ledger->assembler_ = std::jthread([raw] { raw->run_assembler(); });
  ledger->collector_ = metrics.on_scrape([raw](Metrics& m) { raw->export_metrics(m); });
  return ledger;
}

absl::Status Ledger::check_settings(const std::map<std::string, std::string>& now) const {
  const v1::LogSnapshot state = log_->state();
  for (const auto& [key, value] : state.settings()) {
    const auto found = now.find(key);
    if (found == now.end() || found->second == value) continue;
    return absl::FailedPreconditionError(absl::StrCat(key, ": ", found->second, ", but the run began with ", value, " (",
                                                      log_directory(), "); expected the same, or another run.id"));
  }
  return absl::OkStatus();
}

absl::Status Ledger::replay(RecordType type, std::string_view payload, TrajectoryLog::Position position) {
  switch (type) {
    case RecordType::kSnapshot: return parse(payload, &replay_base_);
    case RecordType::kGroup: {
      v1::LogGroup record;
      RETURN_IF_ERROR(parse(payload, &record));
      return replay_group(std::move(record), TrajectoryLog::segment_of(position));
    }
    case RecordType::kTrajectory: {
      v1::LogTrajectory record;
      RETURN_IF_ERROR(parse(payload, &record));
      return replay_trajectory(record, position);
    }
    case RecordType::kSettled: {
      v1::LogSettled record;
      RETURN_IF_ERROR(parse(payload, &record));
      return replay_settled(record);
    }
    case RecordType::kDelivered: {
      v1::LogDelivered record;
      RETURN_IF_ERROR(parse(payload, &record));
      return replay_delivered(record);
    }
    case RecordType::kLearner: {
      v1::LogLearner record;
      RETURN_IF_ERROR(parse(payload, &record));
      if (record.hello()) requeue_delivered();
      return absl::OkStatus();
    }
  }
  return absl::OkStatus();
}

// The oldest records of a group alive are kept: one that was opened before the oldest segment has ended.
bool Ledger::ended_before_replay(uint64_t group_number) const {
  const auto& unopened = replay_base_.unopened_groups();
  return group_number < replay_base_.next_group_number() &&
         std::find(unopened.begin(), unopened.end(), group_number) == unopened.end();
}

absl::Status Ledger::replay_group(v1::LogGroup info, uint32_t segment) {
  if (info.size() < 1) return absl::DataLossError(absl::StrCat("group ", info.group_number(), ": size ", info.size()));
  // Written again by an episode that ended before the first one was known to be on disk.
  if (groups_.contains(info.group_number()) || ended_before_replay(info.group_number())) return absl::OkStatus();
  Group& group = start_group(std::move(info));
  group.logged = true;
  group.first_segment = segment;
  if (group.info.external()) {
    external_groups_[group.info.group_id()] = group.info.group_number();
    return absl::OkStatus();
  }
  const bool runnable =
      std::any_of(config_.environments.begin(), config_.environments.end(),
                  [&](const EnvironmentConfig& environment) { return environment.name == group.info.environment(); });
  if (runnable) return absl::OkStatus();
  logger_->warn("group {}: environment \"{}\" is not in the config any more", group.info.group_number(),
                group.info.environment());
  for (Member& member : group.members) member.state = Member::State::kAbsent;
  return absl::OkStatus();
}

absl::Status Ledger::replay_trajectory(const v1::LogTrajectory& record, TrajectoryLog::Position position) {
  const v1::Trajectory& trajectory = record.trajectory();
  const auto found = groups_.find(record.group_number());
  if (found == groups_.end() && ended_before_replay(record.group_number())) return absl::OkStatus();
  const int index = trajectory.group_index();
  if (found == groups_.end() || index < 0 || index >= found->second.info.size()) {
    return absl::DataLossError(absl::StrCat("trajectory ", trajectory.rollout_id(), ": no such member of a group ",
                                            record.group_number()));
  }
  Group& group = found->second;
  Member& member = group.members[index];
  if (member.state == Member::State::kQueued || member.state == Member::State::kTrained) {
    return absl::DataLossError(absl::StrCat("trajectory ", trajectory.rollout_id(), ": its member has one already"));
  }
  // The attempt is in the id: attempts that were cancelled left no record.
  for (member.attempt = 0; rollout_id(group, index) != trajectory.rollout_id(); ++member.attempt) {
    if (member.attempt > 10'000) return absl::DataLossError(absl::StrCat("trajectory ", trajectory.rollout_id(), ": no id of ours"));
  }
  member.summary = summarize(trajectory);
  account(group, index, trajectory.rollout_id(), position);
  return absl::OkStatus();
}

absl::Status Ledger::replay_settled(const v1::LogSettled& settled) {
  for (const std::string& id : settled.rollout_ids()) {
    const auto found = queued_ids_.find(id);
    if (found == queued_ids_.end()) continue;  // of a group that ended before; finish_replay() sees whether it all adds up
    const auto [number, index] = found->second;
    settle(groups_.at(number), index, settled.reason());
  }
  return absl::OkStatus();
}

absl::Status Ledger::replay_delivered(const v1::LogDelivered& record) {
  for (const v1::LogDeliveredGroup& delivered : record.groups()) {
    const auto found = groups_.find(delivered.group_number());
    if (found == groups_.end()) {
      if (ended_before_replay(delivered.group_number())) continue;
      return absl::DataLossError(absl::StrCat("step ", record.step(), ": no group ", delivered.group_number()));
    }
    for (const int member : delivered.members()) {
      if (member < 0 || member >= found->second.info.size()) {
        return absl::DataLossError(absl::StrCat("step ", record.step(), ": group ", delivered.group_number(), " has no member ",
                                                member));
      }
    }
    found->second.step = record.step();
  }
  delivered_[record.step()] = {.record = record, .durable = true};
  return absl::OkStatus();
}

absl::Status Ledger::finish_replay() {
  const v1::LogSnapshot state = log_->state();
  log_id_ = state.log_id();
  counts_.Clear();
  counts_.set_produced(state.produced());
  counts_.set_trained(state.trained());
  *counts_.mutable_dropped() = state.dropped();
  next_group_number_ = state.next_group_number();
  incarnation_ = state.incarnation();
  greeted_ = incarnation_ != 0;
  committed_step_ = state.committed_step();
  final_ = state.final();
  rollouts_open_ = state.rollouts_begun();
  step_ = state.step();
  policy_version_ = state.policy_version();
  first_step_at_version_ = state.first_step_at_version();
  for (const auto& [step, size] : state.delivered_at_version()) delivered_sizes_[step] = size;
  uint64_t dropped = 0;
  for (const auto& [reason, count] : counts_.dropped()) dropped += count;
  if (counts_.produced() != counts_.trained() + dropped + queued_ids_.size()) {
    return absl::DataLossError(absl::StrCat("the trajectory log has ", counts_.produced(), " trajectories, ", counts_.trained(),
                                            " trained, ", dropped, " dropped, but ", queued_ids_.size(), " that wait"));
  }
  // Episodes that ran are run again; decisions that were not written down are made again.
  planned_.clear();
  std::vector<uint64_t> numbers;
  Settled settled;
  for (auto& [number, group] : groups_) {
    numbers.push_back(number);
    const bool decided = group.step.has_value() ||
                         std::any_of(group.members.begin(), group.members.end(), [](const Member& member) {
                           return member.state == Member::State::kTrained ||
                                  (member.state == Member::State::kDropped && exclusion(member.summary) != member.drop_reason);
                         });
    for (int i = 0; i < group.info.size(); ++i) {
      Member& member = group.members[i];
      const std::optional<std::string> excluded = exclusion(member.summary);
      if (member.state == Member::State::kQueued && excluded.has_value()) {
        settled[*excluded].add_rollout_ids(rollout_id(group, i));
        settle(group, i, *excluded);
      }
      // A refill that an earlier config did not want.
      if (decided && member.state == Member::State::kPlanned) member.state = Member::State::kAbsent;
      if (member.state == Member::State::kPlanned) planned_.emplace(number, i);
    }
  }
  append_settled(settled);
  for (const uint64_t number : numbers) {
    Group& group = groups_.at(number);
    if (close_if_settled(number)) continue;
    if (!group.step.has_value() && is_complete(group)) complete(group);
  }
  forget_settled_steps();
  forget_segments();
  if (state.produced() > 0) {
    logger_->info("trajectory log: {} trajectories, {} trained, {} wait; {} episodes are run again", counts_.produced(),
                  counts_.trained(), queued_ids_.size(), planned_.size());
  }
  return absl::OkStatus();
}

}  // namespace slipstream::gateway
