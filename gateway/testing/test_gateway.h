// For tests: a ledger in a directory of its own, with one environment "arithmetic" of one task "add", and a learner's words.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/testing/temporary_directory.h"
#include "gateway/ledger.h"
#include "google/protobuf/io/coded_stream.h"
#include "google/protobuf/io/zero_copy_stream_impl_lite.h"
#include "gtest/gtest.h"

namespace slipstream::gateway::testing {

constexpr std::chrono::seconds kPatience{60};  // for what must come; a hang ends as a failure

struct GatewayOptions {
  int group_size = 2;
  int groups_per_batch = 1;
  int max_staleness = 0;
  int publish_every = 1;
  Repair repair = Repair::kRepeat;
  int refills_max = 3;
  Overlong overlong = Overlong::kKeep;
  bool environments = true;
  int64_t session_idle_ms = 3'600'000;
  int64_t log_segment_bytes = 1 << 20;
  Logger logger = quiet_logger();
};

// The answer, which must come; dies (in the test) of a refusal.
inline v1::Batch get(std::future<absl::StatusOr<v1::Batch>>& batch) {
  if (batch.wait_for(kPatience) != std::future_status::ready) {
    ADD_FAILURE() << "no batch came";
    return {};
  }
  absl::StatusOr<v1::Batch> got = batch.get();
  EXPECT_TRUE(got.ok()) << got.status();
  return got.ok() ? *std::move(got) : v1::Batch();
}
// Of the groups, incarnation and step.
inline std::string bytes(v1::Batch batch) {
  batch.clear_counts();
  std::string out;
  google::protobuf::io::StringOutputStream stream(&out);
  google::protobuf::io::CodedOutputStream coded(&stream);
  coded.SetSerializationDeterministic(true);
  batch.SerializeToCodedStream(&coded);
  coded.Trim();
  return out;
}
inline v1::Batch parse(const std::string& text) {
  v1::Batch out;
  EXPECT_TRUE(out.ParseFromString(text));
  return out;
}
inline std::string bytes_but_life(v1::Batch batch) {
  batch.clear_incarnation();
  return bytes(std::move(batch));
}
inline std::vector<std::string> ids(const v1::Batch& batch) {
  std::vector<std::string> out;
  for (const v1::Group& group : batch.groups()) {
    for (const v1::Trajectory& trajectory : group.trajectories()) out.push_back(trajectory.rollout_id());
  }
  return out;
}

inline v1::Trajectory make_trajectory(double reward, v1::FinishReason finish, int version) {
  v1::Trajectory out;
  out.set_reward(reward);
  (*out.mutable_reward_parts())["a"] = reward;
  (*out.mutable_reward_parts())["b"] = -reward;
  out.set_finish_reason(finish);
  out.set_min_policy_version(version);
  v1::Sample* sample = out.add_samples();
  for (const int id : {1, 2, 3}) sample->add_ids(id);
  v1::Span* span = sample->add_spans();
  span->set_kind(v1::SPAN_KIND_PROMPT);
  span->set_length(1);
  span = sample->add_spans();
  span->set_kind(v1::SPAN_KIND_ACTION);
  span->set_length(2);
  for (int i = 0; i < 2; ++i) {
    sample->add_action_logprobs(-0.5f);
    sample->add_action_policy_versions(version);
    sample->add_action_context_versions(version);
  }
  return out;
}

class Gateway {
 public:
  explicit Gateway(const GatewayOptions& options) {
    config_.job.run_parent = directory_.path();
    config_.job.group_size = options.group_size;
    config_.job.groups_per_batch = options.groups_per_batch;
    config_.job.max_staleness = options.max_staleness;
    config_.job.publish_every = options.publish_every;
    config_.repair = options.repair;
    config_.refills_max = options.refills_max;
    config_.overlong = options.overlong;
    config_.session_idle_ms = options.session_idle_ms;
    config_.log_segment_bytes = options.log_segment_bytes;
    logger_ = options.logger;
    if (options.environments) config_.environments.resize(1);
    if (options.environments) config_.environments[0].name = "arithmetic";
    reopen();
  }
  ~Gateway() { ledger_.reset(); }

  // Ends the ledger and begins another on the same directory.
  void reopen() {
    if (const absl::Status status = try_reopen("tokenizer"); !status.ok()) {
      ADD_FAILURE() << status;
      abort();
    }
  }
  // The log is deleted between two lives.
  void lose_log() {
    ledger_.reset();
    std::filesystem::remove_all(log_directory());
    reopen();
  }
  absl::Status try_reopen(const std::string& tokenizer) {
    ledger_.reset();
    metrics_ = std::make_unique<Metrics>();
    ASSIGN_OR_RETURN(ledger_, Ledger::open(config_, tokenizer, *metrics_, logger_));
    describe();
    return absl::OkStatus();
  }
  void describe() {
    if (config_.environments.empty()) return;
    v1::TaskDescription task;
    task.set_name("add");
    task.set_has_solutions(true);
    const absl::Status status = ledger_->set_tasks("arithmetic", {task});
    EXPECT_TRUE(status.ok()) << status;
  }
  Ledger& ledger() { return *ledger_; }
  Metrics& metrics() { return *metrics_; }
  GatewayConfig& config() { return config_; }  // for the next reopen()
  std::string log_directory() const { return config_.job.run_directory() + "/trajectories"; }

  std::vector<EpisodePlan> take_all() {
    std::vector<EpisodePlan> out;
    while (std::optional<EpisodePlan> plan = ledger_->try_next()) out.push_back(*plan);
    return out;
  }
  std::future<absl::StatusOr<uint64_t>> finish_later(const EpisodePlan& plan, double reward,
                                                     v1::FinishReason finish = v1::FINISH_REASON_STOP, int version = 0) {
    auto done = std::make_shared<std::promise<absl::StatusOr<uint64_t>>>();
    ledger_->finish(plan, make_trajectory(reward, finish, version), [done](auto offset) { done->set_value(offset); });
    return done->get_future();
  }
  absl::StatusOr<uint64_t> finish(const EpisodePlan& plan, double reward,
                                  v1::FinishReason finish = v1::FINISH_REASON_STOP, int version = 0) {
    return finish_later(plan, reward, finish, version).get();
  }

  std::future<absl::StatusOr<v1::Batch>> request(int64_t incarnation, int64_t step, int version,
                                                 v1::TrajectoryKind kind = v1::TRAJECTORY_KIND_ROLLOUT, int num_groups = 0) {
    v1::BatchRequest request;
    request.set_incarnation(incarnation);
    request.set_step(step);
    request.set_policy_version(version);
    request.set_kind(kind);
    request.set_num_groups(num_groups > 0 ? num_groups : config_.job.groups_per_batch);
    return ask(request);
  }
  std::future<absl::StatusOr<v1::Batch>> ask(const v1::BatchRequest& request) {
    auto done = std::make_shared<std::promise<absl::StatusOr<v1::Batch>>>();
    ledger_->request_batch(request, [done](auto batch) { done->set_value(std::move(batch)); });
    return done->get_future();
  }
  // Each of these waits for the answer and returns its status.
  absl::Status say(const v1::BatchRequest& request) { return ask(request).get().status(); }
  absl::StatusOr<v1::HelloReply> hello(const v1::Hello& hello) {
    std::promise<absl::StatusOr<v1::HelloReply>> done;
    ledger_->hello(hello, [&](auto reply) { done.set_value(std::move(reply)); });
    return done.get_future().get();
  }
  absl::Status say(const v1::Hello& message) { return hello(message).status(); }
  absl::StatusOr<v1::CommitReply> commit(const v1::Commit& commit) {
    std::promise<absl::StatusOr<v1::CommitReply>> done;
    ledger_->commit(commit, [&](auto reply) { done.set_value(std::move(reply)); });
    return done.get_future().get();
  }
  absl::Status say(const v1::Commit& message) { return commit(message).status(); }

  absl::Status try_request(int64_t incarnation, int64_t step, int version) {
    return request(incarnation, step, version).get().status();
  }
  absl::Status try_hello(int64_t incarnation, int64_t committed_step = 0, const std::vector<std::string>& trained = {}) {
    v1::Hello hello;
    hello.set_run_id("run");
    hello.set_incarnation(incarnation);
    hello.set_committed_step(committed_step);
    hello.mutable_last_commit()->set_step(committed_step);
    for (const std::string& id : trained) hello.mutable_last_commit()->add_trained_rollout_ids(id);
    return say(hello);
  }
  void hello(int64_t incarnation, int64_t committed_step = 0, const std::vector<std::string>& trained = {}) {
    const absl::Status status = try_hello(incarnation, committed_step, trained);
    ASSERT_TRUE(status.ok()) << status;
  }
  absl::Status try_commit(int64_t incarnation, int64_t step) {
    v1::Commit message;
    message.set_incarnation(incarnation);
    message.set_step(step);
    return say(message);
  }
  v1::CommitReply commit(int64_t incarnation, int64_t step, const std::vector<std::string>& trained) {
    v1::Commit message;
    message.set_incarnation(incarnation);
    message.set_step(step);
    for (const std::string& id : trained) message.add_trained_rollout_ids(id);
    absl::StatusOr<v1::CommitReply> reply = commit(message);
    EXPECT_TRUE(reply.ok()) << reply.status();
    return reply.ok() ? *std::move(reply) : v1::CommitReply();
  }

 private:
  const slipstream::testing::TemporaryDirectory directory_;
  GatewayConfig config_;
  std::unique_ptr<Metrics> metrics_;
  Logger logger_;
  std::unique_ptr<Ledger> ledger_;
};

}  // namespace slipstream::gateway::testing
