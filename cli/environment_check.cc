#include "cli/environment_check.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <map>
#include <optional>
#include <set>
#include <thread>

#include "absl/strings/match.h"
#include "google/protobuf/util/message_differencer.h"
#include "nlohmann/json.hpp"

namespace slipstream::cli {
namespace {

using google::protobuf::util::MessageDifferencer;
using Outcome = absl::StatusOr<std::string>;  // what was seen; an error: what is wrong

constexpr uint64_t kInstancesMax = 8;  // tried of each task
constexpr int kConcurrent = 16;

template <class... Parts>
absl::Status wrong(const Parts&... parts) {
  return absl::FailedPreconditionError(absl::StrCat(parts...));
}

std::string in_words(const absl::Status& status) {
  return absl::StrCat(absl::StatusCodeToString(status.code()), " \"",
                      std::string(status.message()).substr(0, 300), "\"");
}

// A call failed that had to succeed.
absl::Status failed(const std::string& call, const absl::Status& status) {
  return wrong(call, ": ", in_words(status));
}

// A call must be refused with this code and, when not empty, a message that has this word.
absl::Status expect_refusal(const std::string& call, const absl::Status& status, absl::StatusCode code,
                            const std::string& word) {
  if (status.code() == code && absl::StrContains(status.message(), word)) return absl::OkStatus();
  return wrong(call, ": ", status.ok() ? "accepted" : in_words(status), ", expected ",
               absl::StatusCodeToString(code),
               word.empty() ? "" : absl::StrCat(" with a message that names \"", word, "\""));
}

v1::Message say(const std::string& text) {
  v1::Message message;
  message.set_role(v1::ROLE_ASSISTANT);
  message.set_content(text);
  return message;
}

absl::Status valid_message(const std::string& what, const v1::Message& message) {
  if (message.role() != v1::ROLE_SYSTEM && message.role() != v1::ROLE_USER &&
      message.role() != v1::ROLE_TOOL) {
    return wrong(what, ".role: ", v1::Role_Name(message.role()), ", expected system, user or tool");
  }
  return absl::OkStatus();
}

absl::Status valid_solution(const std::string& what, const v1::Message& message) {
  if (message.role() != v1::ROLE_ASSISTANT) return wrong(what, ".role: expected assistant");
  if (message.content().empty() && message.tool_calls_size() == 0)
    return wrong(what, ": neither content nor tool calls");
  for (const v1::ToolCall& call : message.tool_calls()) {
    if (!nlohmann::json::parse(call.arguments(), nullptr, false).is_object()) {
      return wrong(what, ".tool_calls.arguments: expected a JSON object");
    }
  }
  return absl::OkStatus();
}

absl::Status valid_opening(const v1::ResetResponse& opening, bool want_solution) {
  if (opening.messages_size() == 0) return wrong("Reset: messages: empty, expected at least one");
  for (const v1::Message& message : opening.messages())
    RETURN_IF_ERROR(valid_message("Reset: messages", message));
  for (const v1::Tool& tool : opening.tools()) {
    if (tool.name().empty()) return wrong("Reset: tools.name: empty");
    if (!nlohmann::json::parse(tool.parameters(), nullptr, false).is_object()) {
      return wrong("Reset: tools.parameters: expected a JSON Schema object");
    }
  }
  if (!want_solution) return absl::OkStatus();
  if (!opening.has_solution())
    return wrong("Reset: solution: missing, though wanted and promised by has_solutions");
  return valid_solution("Reset: solution", opening.solution());
}

absl::Status valid_step(const v1::StepResponse& step, bool want_solution) {
  if (!std::isfinite(step.reward()))
    return wrong("Step: reward: ", step.reward(), ", expected a finite number");
  for (const auto& [part, value] : step.reward_parts()) {
    if (!std::isfinite(value)) return wrong("Step: reward_parts: ", value, ", expected finite numbers");
  }
  if (!step.done() && step.messages_size() == 0)
    return wrong("Step: messages: empty, but the episode is not done");
  for (const v1::Message& message : step.messages())
    RETURN_IF_ERROR(valid_message("Step: messages", message));
  if (!want_solution || step.done()) return absl::OkStatus();
  if (!step.has_solution())
    return wrong("Step: solution: missing, though wanted and promised by has_solutions");
  return valid_solution("Step: solution", step.solution());
}

struct Played {
  std::string id;
  v1::ResetResponse opening;
  std::vector<v1::StepResponse> steps;
  double reward = 0;
};

class Checker {
 public:
  Checker(EnvironmentClient& client, const CheckOptions& options)
      : client_(client), timeout_(options.timeout) {}

  absl::StatusOr<v1::DescribeResponse> describe() { return client_.describe(timeout_); }
  std::string new_id() { return absl::StrCat("check-", getpid(), "-", start_, "-", ++count_); }
  absl::StatusOr<v1::ResetResponse> reset(const std::string& id, const std::string& task, uint64_t instance,
                                          bool want_solution = false) {
    v1::ResetRequest request = reset_request(id, task, instance, want_solution);
    return client_.reset(request, timeout_);
  }
  absl::StatusOr<v1::StepResponse> step(const std::string& id, int turn, const v1::Message& message,
                                        bool want_solution = false) {
    return client_.step(step_request(id, turn, message, want_solution), timeout_);
  }
  absl::Status close(const std::string& id) {
    v1::CloseRequest request;
    request.set_episode_id(id);
    return client_.close(request, timeout_).status();
  }
  // Plays one episode to its end with the solutions, or with `reply` every turn; begin and finish are its two
  // halves.
  absl::StatusOr<Played> play(const v1::TaskDescription& task, uint64_t instance, const v1::Message* reply);
  absl::StatusOr<Played> begin(const v1::TaskDescription& task, uint64_t instance, bool solve);
  absl::Status finish(const v1::TaskDescription& task, const v1::Message* reply, Played* episode);

  Outcome describe_is_sane();
  Outcome wrong_names_are_refused(const v1::TaskDescription& task);
  Outcome missed_deadlines_do_no_harm(const v1::TaskDescription& task);
  Outcome reset_is_well_formed(const v1::TaskDescription& task);
  Outcome reset_repeats(const v1::TaskDescription& task);
  Outcome instances_repeat(const v1::TaskDescription& task);
  Outcome unknown_instance_is_refused(const v1::TaskDescription& task);
  Outcome step_repeats(const v1::TaskDescription& task);
  Outcome wrong_turns_are_refused(const v1::TaskDescription& task);
  Outcome episodes_end(const v1::TaskDescription& task);
  Outcome solutions_win(const v1::TaskDescription& task);
  Outcome garbage_does_no_harm(const v1::TaskDescription& task);
  Outcome closed_is_unknown(const v1::TaskDescription& task);
  Outcome episodes_are_independent(const v1::TaskDescription& task);
  Outcome stream_equals_calls(const v1::TaskDescription& task);

 private:
  static v1::ResetRequest reset_request(const std::string& id, const std::string& task, uint64_t instance,
                                        bool want_solution) {
    v1::ResetRequest request;
    request.set_episode_id(id);
    request.set_task(task);
    request.set_instance(instance);
    request.set_want_solution(want_solution);
    return request;
  }
  static v1::StepRequest step_request(const std::string& id, int turn, const v1::Message& message,
                                      bool want_solution) {
    v1::StepRequest request;
    request.set_episode_id(id);
    request.set_turn(turn);
    *request.mutable_message() = message;
    request.set_raw_text(message.content());
    request.set_finish_reason(v1::FINISH_REASON_STOP);
    request.set_want_solution(want_solution);
    return request;
  }
  // Up to kInstancesMax instances, spread over all there are.
  static std::vector<uint64_t> some_instances(const v1::TaskDescription& task) {
    const uint64_t all = task.num_instances() > 0 ? task.num_instances() : 1'000'000;
    std::vector<uint64_t> out;
    for (uint64_t i = 0; i < std::min(all, kInstancesMax); ++i)
      out.push_back(i * (all / std::min(all, kInstancesMax)));
    return out;
  }
  static uint64_t last_instance(const v1::TaskDescription& task) {
    return task.num_instances() > 0 ? task.num_instances() - 1 : 123'456'789;
  }

  EnvironmentClient& client_;
  const absl::Duration timeout_;
  const int64_t start_ = absl::ToUnixMicros(absl::Now());
  std::atomic<int> count_ = 0;
};

absl::StatusOr<Played> Checker::begin(const v1::TaskDescription& task, uint64_t instance, bool solve) {
  Played out;
  out.id = new_id();
  auto opening = reset(out.id, task.name(), instance, solve);
  if (!opening.ok()) return failed("Reset", opening.status());
  RETURN_IF_ERROR(valid_opening(*opening, solve));
  out.opening = *std::move(opening);
  return out;
}

absl::Status Checker::finish(const v1::TaskDescription& task, const v1::Message* reply, Played* episode) {
  const bool solve = reply == nullptr;
  v1::Message next = solve ? episode->opening.solution() : *reply;
  for (int turn = 0; episode->steps.empty() || !episode->steps.back().done(); ++turn) {
    if (turn >= task.max_turns())
      return wrong("not done after ", turn, " turns, which is the task's max_turns");
    auto answer = step(episode->id, turn, next, solve);
    if (!answer.ok()) return failed(absl::StrCat("Step of turn ", turn), answer.status());
    RETURN_IF_ERROR(valid_step(*answer, solve));
    episode->reward += answer->reward();
    if (solve && !answer->done()) next = answer->solution();
    episode->steps.push_back(*std::move(answer));
  }
  if (const absl::Status closed = close(episode->id); !closed.ok()) return failed("Close", closed);
  return absl::OkStatus();
}

absl::StatusOr<Played> Checker::play(const v1::TaskDescription& task, uint64_t instance,
                                     const v1::Message* reply) {
  ASSIGN_OR_RETURN(Played episode, begin(task, instance, reply == nullptr));
  RETURN_IF_ERROR(finish(task, reply, &episode));
  return episode;
}

Outcome Checker::describe_is_sane() {
  const auto first = describe();
  if (!first.ok()) return failed("Describe", first.status());
  if (first->environment().empty()) return wrong("environment: empty, expected a name");
  if (first->tasks_size() == 0) return wrong("tasks: empty, expected at least one");
  std::set<std::string> names;
  for (const v1::TaskDescription& task : first->tasks()) {
    if (task.name().empty()) return wrong("tasks.name: empty");
    if (!names.insert(task.name()).second) return wrong("tasks.name: \"", task.name(), "\" twice");
    if (task.max_turns() <= 0) return wrong("tasks.max_turns: ", task.max_turns(), ", expected at least 1");
  }
  const auto second = describe();
  if (!second.ok()) return failed("Describe", second.status());
  if (!MessageDifferencer::Equals(*first, *second)) return wrong("two calls got different answers");
  return absl::StrCat(first->tasks_size(), " tasks");
}

Outcome Checker::wrong_names_are_refused(const v1::TaskDescription& task) {
  RETURN_IF_ERROR(expect_refusal("Reset of task \"no such task\"",
                                 reset(new_id(), "no such task", 0).status(),
                                 absl::StatusCode::kInvalidArgument, "task"));
  RETURN_IF_ERROR(expect_refusal("Reset without an episode_id", reset("", task.name(), 0).status(),
                                 absl::StatusCode::kInvalidArgument, "episode_id"));
  RETURN_IF_ERROR(expect_refusal("Step of an episode nobody reset", step(new_id(), 0, say("hello")).status(),
                                 absl::StatusCode::kNotFound, ""));
  return "";
}

Outcome Checker::missed_deadlines_do_no_harm(const v1::TaskDescription& task) {
  int missed = 0;
  for (int i = 0; i < 32; ++i) {
    const std::string id = new_id();
    const absl::Status status =
        client_.reset(reset_request(id, task.name(), 0, false), absl::Microseconds(i * 100)).status();
    if (status.code() == absl::StatusCode::kDeadlineExceeded) {
      ++missed;
    } else if (!status.ok()) {
      return failed("Reset with a short deadline", status);
    }
    // The call may or may not have reached the server: asked again, it has to answer.
    if (const auto again = reset(id, task.name(), 0); !again.ok()) {
      return failed("Reset repeated after a missed deadline", again.status());
    }
    if (const absl::Status closed = close(id); !closed.ok()) return failed("Close", closed);
  }
  return absl::StrCat(missed, " of 32 calls missed theirs");
}

Outcome Checker::reset_is_well_formed(const v1::TaskDescription& task) {
  for (const uint64_t instance : some_instances(task)) {
    const std::string id = new_id();
    const auto opening = reset(id, task.name(), instance, task.has_solutions());
    if (!opening.ok()) return failed(absl::StrCat("Reset of instance ", instance), opening.status());
    RETURN_IF_ERROR(valid_opening(*opening, task.has_solutions()));
    static_cast<void>(close(id));
  }
  return "";
}

Outcome Checker::reset_repeats(const v1::TaskDescription& task) {
  const std::string id = new_id();
  const auto first = reset(id, task.name(), 0);
  if (!first.ok()) return failed("Reset", first.status());
  const auto second = reset(id, task.name(), 0);
  if (!second.ok()) return failed("Reset again", second.status());
  static_cast<void>(close(id));
  if (!MessageDifferencer::Equals(*first, *second)) return wrong("the second answer differs from the first");
  return "";
}

Outcome Checker::instances_repeat(const v1::TaskDescription& task) {
  for (const uint64_t instance : {uint64_t{0}, last_instance(task)}) {
    const std::string one = new_id(), other = new_id();
    const auto first = reset(one, task.name(), instance);
    if (!first.ok()) return failed(absl::StrCat("Reset of instance ", instance), first.status());
    const auto second = reset(other, task.name(), instance);
    if (!second.ok()) return failed(absl::StrCat("Reset of instance ", instance), second.status());
    static_cast<void>(close(one));
    static_cast<void>(close(other));
    if (!MessageDifferencer::Equals(*first, *second)) {
      return wrong("two episodes of instance ", instance, " began with different messages or tools");
    }
  }
  return "";
}

Outcome Checker::unknown_instance_is_refused(const v1::TaskDescription& task) {
  if (task.num_instances() == 0) return "every instance exists";
  RETURN_IF_ERROR(expect_refusal(absl::StrCat("Reset of instance ", task.num_instances()),
                                 reset(new_id(), task.name(), task.num_instances()).status(),
                                 absl::StatusCode::kInvalidArgument, "instance"));
  return "";
}

Outcome Checker::step_repeats(const v1::TaskDescription& task) {
  const std::string id = new_id();
  if (const auto opening = reset(id, task.name(), 0); !opening.ok()) return failed("Reset", opening.status());
  for (int turn = 0; turn < std::min(task.max_turns(), 2); ++turn) {
    const auto first = step(id, turn, say("hello"));
    if (!first.ok()) return failed(absl::StrCat("Step of turn ", turn), first.status());
    const auto second = step(id, turn, say("hello"));
    if (!second.ok()) return failed(absl::StrCat("Step of turn ", turn, " again"), second.status());
    if (!MessageDifferencer::Equals(*first, *second))
      return wrong("turn ", turn, ": the second answer differs from the first");
    if (first->done()) break;
  }
  static_cast<void>(close(id));
  return "";
}

Outcome Checker::wrong_turns_are_refused(const v1::TaskDescription& task) {
  const std::string id = new_id();
  if (const auto opening = reset(id, task.name(), 0); !opening.ok()) return failed("Reset", opening.status());
  for (const int turn : {7, -1}) {
    RETURN_IF_ERROR(expect_refusal(absl::StrCat("Step of turn ", turn, " where 0 is due"),
                                   step(id, turn, say("hello")).status(), absl::StatusCode::kInvalidArgument,
                                   "turn"));
  }
  const auto first = step(id, 0, say("hello"));
  static_cast<void>(close(id));
  if (!first.ok()) return failed("Step of turn 0 after refused ones", first.status());
  return "";
}

Outcome Checker::episodes_end(const v1::TaskDescription& task) {
  const v1::Message nonsense = say("hello");
  size_t turns = 0;
  for (const uint64_t instance : some_instances(task)) {
    const auto played = play(task, instance, &nonsense);
    if (!played.ok()) return wrong("instance ", instance, ": ", std::string(played.status().message()));
    turns = std::max(turns, played->steps.size());
  }
  return absl::StrCat("at most ", turns, " of ", task.max_turns(), " turns");
}

Outcome Checker::solutions_win(const v1::TaskDescription& task) {
  if (!task.has_solutions()) return "has none";
  const v1::Message nonsense = say("\x01 no answer at all");
  double least = std::numeric_limits<double>::infinity();
  for (const uint64_t instance : some_instances(task)) {
    const auto solved = play(task, instance, nullptr);
    if (!solved.ok()) return wrong("instance ", instance, ": ", std::string(solved.status().message()));
    const auto other = play(task, instance, &nonsense);
    if (!other.ok()) return wrong("instance ", instance, ": ", std::string(other.status().message()));
    if (solved->reward <= other->reward) {
      return wrong("instance ", instance, ": the solution earns ", solved->reward, ", nonsense ",
                   other->reward);
    }
    least = std::min(least, solved->reward);
  }
  return absl::StrCat("rewards of at least ", least);
}

Outcome Checker::garbage_does_no_harm(const v1::TaskDescription& task) {
  v1::Message calls = say("");
  for (const char* arguments : {"", "[", "{\"a\":\"b\"}", "\xff\xfe"}) {
    v1::ToolCall& call = *calls.add_tool_calls();
    call.set_id("1");
    call.set_name(std::string("no\x00such\xff tool", 13));
    call.set_arguments(arguments);
  }
  const std::pair<const char*, v1::Message> messages[] = {
      {"an empty message", say("")},
      {"binary content", say(std::string("\x00\xff\xfe\x80 \xc3\x28 </script>\n", 20))},
      {"1 MiB of content", say(std::string(1 << 20, '7'))},
      {"tool calls that do not exist", calls},
      {"a message without a role", v1::Message()}};
  for (const auto& [what, message] : messages) {
    const std::string id = new_id();
    if (const auto opening = reset(id, task.name(), 0); !opening.ok())
      return failed("Reset", opening.status());
    const auto answer = step(id, 0, message);
    if (answer.ok()) {
      if (const absl::Status valid = valid_step(*answer, false); !valid.ok()) {
        return wrong("after ", what, ": ", std::string(valid.message()));
      }
    } else if (answer.status().code() != absl::StatusCode::kInvalidArgument) {
      return failed(absl::StrCat("Step with ", what), answer.status());
    }
    if (const auto alive = describe(); !alive.ok())
      return failed(absl::StrCat("Describe after ", what), alive.status());
    static_cast<void>(close(id));
  }
  return "";
}

Outcome Checker::closed_is_unknown(const v1::TaskDescription& task) {
  const std::string id = new_id();
  if (const auto opening = reset(id, task.name(), 0); !opening.ok()) return failed("Reset", opening.status());
  if (const absl::Status closed = close(id); !closed.ok()) return failed("Close", closed);
  RETURN_IF_ERROR(expect_refusal("Step after Close", step(id, 0, say("hello")).status(),
                                 absl::StatusCode::kNotFound, ""));
  // Either is an answer to a retry: the caller is done with the episode.
  if (const absl::Status again = close(id); !again.ok() && again.code() != absl::StatusCode::kNotFound) {
    return failed("Close again", again);
  }
  return "";
}

Outcome Checker::episodes_are_independent(const v1::TaskDescription& task) {
  const v1::Message nonsense = say("hello");
  const v1::Message* reply = task.has_solutions() ? nullptr : &nonsense;
  const std::vector<uint64_t> instances = some_instances(task);
  std::vector<Played> alone;
  for (const uint64_t instance : instances) {
    auto played = play(task, instance, reply);
    if (!played.ok()) return wrong("alone: ", std::string(played.status().message()));
    alone.push_back(*std::move(played));
  }
  // All are open before the first step, so that they meet whatever the scheduling.
  std::vector<absl::StatusOr<Played>> open(kConcurrent);
  std::vector<absl::Status> found(kConcurrent);
  const auto at_once = [](const std::function<void(size_t)>& body) {
    std::vector<std::jthread> threads;
    for (size_t i = 0; i < kConcurrent; ++i) threads.emplace_back([&body, i]() noexcept { body(i); });
  };
  at_once([&](size_t i) { open[i] = begin(task, instances[i % instances.size()], reply == nullptr); });
  at_once([&](size_t i) { found[i] = open[i].ok() ? finish(task, reply, &*open[i]) : open[i].status(); });
  for (size_t i = 0; i < kConcurrent; ++i) {
    const Played& other = alone[i % instances.size()];
    if (!found[i].ok()) return wrong("with others: ", std::string(found[i].message()));
    if (!MessageDifferencer::Equals(open[i]->opening, other.opening)) {
      return wrong("with others: instance ", instances[i % instances.size()], " began differently");
    }
    if (reply == nullptr && open[i]->reward != other.reward) {
      return wrong("with others: the solution earns ", open[i]->reward, ", alone ", other.reward);
    }
  }
  return absl::StrCat(kConcurrent, " at once");
}

Outcome Checker::stream_equals_calls(const v1::TaskDescription& task) {
  const v1::Message message = say("hello");
  const std::string called = new_id();
  const auto opening = reset(called, task.name(), 0);
  if (!opening.ok()) return failed("Reset", opening.status());
  const auto answer = step(called, 0, message);
  if (!answer.ok()) return failed("Step", answer.status());
  static_cast<void>(close(called));

  const std::string ids[] = {new_id(), new_id()};
  const std::string unknown = new_id();
  std::vector<v1::EpisodeRequest> resets(3), steps(2), closes(2);
  for (size_t i = 0; i < 2; ++i) {
    *resets[i].mutable_reset() = reset_request(ids[i], task.name(), 0, false);
    *steps[i].mutable_step() = step_request(ids[i], 0, message, false);
    closes[i].mutable_close()->set_episode_id(ids[i]);
  }
  *resets[2].mutable_step() = step_request(unknown, 0, message, false);
  const auto stream = client_.stream(timeout_);
  int round = 0;
  for (const auto& requests : {resets, steps, closes}) {
    const auto responses = stream->exchange(requests);
    if (round == 0 && responses.status().code() == absl::StatusCode::kUnimplemented) return "not offered";
    if (!responses.ok()) return failed("Episodes", responses.status());
    std::map<std::string, v1::EpisodeResponse> by_id;
    for (const v1::EpisodeResponse& response : *responses) by_id[response.episode_id()] = response;
    for (const std::string& id : ids) {
      const v1::EpisodeResponse& response = by_id[id];
      if (response.has_error()) return wrong("Episodes: error \"", response.error().message(), "\"");
      if (round == 0 && !MessageDifferencer::Equals(response.reset(), *opening))
        return wrong("Episodes: reset differs from Reset's answer");
      if (round == 1 && !MessageDifferencer::Equals(response.step(), *answer))
        return wrong("Episodes: step differs from Step's answer");
      if (round == 2 && !response.has_close()) return wrong("Episodes: close: no answer");
    }
    if (round == 0 && by_id[unknown].error().code() != static_cast<int>(absl::StatusCode::kNotFound)) {
      return wrong("Episodes: step of an unknown episode: expected an error of code 5 (NOT_FOUND)");
    }
    ++round;
  }
  if (const absl::Status ended = stream->finish(); !ended.ok())
    return failed("Episodes: after the last request", ended);
  return "two episodes at once";
}

}  // namespace

std::vector<CheckResult> check_environment(EnvironmentClient& client, const CheckOptions& options,
                                           const std::function<void(const CheckResult&)>& report) {
  Checker checker(client, options);
  std::vector<CheckResult> results;
  const auto record = [&](const std::string& task, const char* name, const Outcome& outcome) {
    results.push_back(
        {task, name, outcome.ok(), outcome.ok() ? *outcome : std::string(outcome.status().message())});
    report(results.back());
  };
  record("", "Describe answers, names tasks and repeats itself", checker.describe_is_sane());
  const auto description = checker.describe();
  if (!description.ok() || description->tasks_size() == 0) return results;
  std::vector<v1::TaskDescription> tasks;
  for (const v1::TaskDescription& task : description->tasks()) {
    if (options.task.empty() || options.task == task.name()) tasks.push_back(task);
  }
  if (tasks.empty()) {
    record(options.task, "Describe lists the task", wrong("it does not"));
    return results;
  }
  record("", "unknown names are refused with the right code", checker.wrong_names_are_refused(tasks[0]));
  record("", "missed deadlines do no harm", checker.missed_deadlines_do_no_harm(tasks[0]));
  struct Check {
    const char* name;
    Outcome (Checker::*run)(const v1::TaskDescription&);
  };
  const Check checks[] = {
      {"Reset answers with messages, tools and solution as promised", &Checker::reset_is_well_formed},
      {"Reset repeated gets the first answer", &Checker::reset_repeats},
      {"an instance is the same problem, word for word", &Checker::instances_repeat},
      {"an instance that does not exist is refused", &Checker::unknown_instance_is_refused},
      {"Step repeated gets the first answer", &Checker::step_repeats},
      {"a turn that is not due is refused", &Checker::wrong_turns_are_refused},
      {"episodes end within max_turns, rewards are finite", &Checker::episodes_end},
      {"solutions earn more than nonsense", &Checker::solutions_win},
      {"garbage from the model does no harm", &Checker::garbage_does_no_harm},
      {"a closed episode is unknown", &Checker::closed_is_unknown},
      {"episodes are concurrent and independent", &Checker::episodes_are_independent},
      {"the Episodes stream equals the calls, or is UNIMPLEMENTED", &Checker::stream_equals_calls}};
  for (const v1::TaskDescription& task : tasks) {
    for (const Check& check : checks) record(task.name(), check.name, (checker.*check.run)(task));
  }
  return results;
}

}  // namespace slipstream::cli
