// Goal: the tasks pay for what they say they pay for, their solutions are right for every instance, and no
// message, however strange, does more than cost a turn.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "examples/arithmetic_task.h"
#include "examples/calculator_task.h"
#include "examples/faults.h"
#include "examples/guess_task.h"
#include "gtest/gtest.h"

namespace slipstream::examples {
namespace {

const TaskEntry& find(const std::vector<TaskEntry>& tasks, const std::string& name) {
  const auto found = std::find_if(tasks.begin(), tasks.end(),
                                  [&](const TaskEntry& entry) { return entry.description.name() == name; });
  CHECK(found != tasks.end());
  return *found;
}

std::vector<TaskEntry> all_tasks() {
  std::vector<TaskEntry> all;
  for (const auto& tasks : {arithmetic_tasks(), guess_tasks(), calculator_tasks()}) {
    all.insert(all.end(), tasks.begin(), tasks.end());
  }
  return all;
}

v1::Message say(const std::string& text) { return text_message(v1::ROLE_ASSISTANT, text); }

v1::Message call(const std::string& name, const std::string& arguments) {
  v1::Message message;
  message.set_role(v1::ROLE_ASSISTANT);
  v1::ToolCall& tool_call = *message.add_tool_calls();
  tool_call.set_id("call-7");
  tool_call.set_name(name);
  tool_call.set_arguments(arguments);
  return message;
}

TEST(Tasks, SolutionsEarnTheRewardInTimeForEveryInstance) {
  for (const TaskEntry& entry : all_tasks()) {
    const uint64_t listed = entry.description.num_instances();
    for (uint64_t instance = 0; instance < (listed > 0 ? listed : 1000); ++instance) {
      const auto task = entry.make();
      task->reset(instance);
      double reward = 0;
      int turns = 0;
      bool done = false;
      while (!done) {
        ASSERT_LT(turns, entry.description.max_turns()) << entry.description.name() << " " << instance;
        const v1::StepResponse response = task->step(task->solution(), v1::FINISH_REASON_STOP);
        reward += response.reward();
        done = response.done();
        ++turns;
        ASSERT_TRUE(done || response.messages_size() > 0);
      }
      EXPECT_EQ(reward, 1.0) << entry.description.name() << " " << instance;
    }
  }
}

TEST(Tasks, InstancesOfArithmeticAreAllDifferentAndRight) {
  for (const TaskEntry& entry : arithmetic_tasks()) {
    std::set<std::string> questions;
    for (uint64_t i = 0; i < entry.description.num_instances(); ++i) {
      const auto task = entry.make();
      const std::string question = task->reset(i).messages(0).content();
      questions.insert(question);
      int a = 0, b = 0;
      char op = 0;
      ASSERT_EQ(std::sscanf(question.c_str(), "%d%c%d=", &a, &op, &b), 3) << question;
      EXPECT_EQ(task->solution().content(), absl::StrCat(op == '+' ? a + b : a - b)) << question;
      EXPECT_GE(op == '+' ? a + b : a - b, 0) << question;
    }
    EXPECT_EQ(questions.size(), entry.description.num_instances());
  }
}

TEST(Arithmetic, PaysForTheExactAnswerOnly) {
  const auto reward = [](const v1::Message& message, v1::FinishReason reason = v1::FINISH_REASON_STOP) {
    const auto tasks = arithmetic_tasks();
    const auto task = find(tasks, "add").make();
    EXPECT_EQ(task->reset(7 * 20 + 15).messages(0).content(), "7+15=");
    return task->step(message, reason).reward();
  };
  EXPECT_EQ(reward(say("22")), 1.0);
  EXPECT_EQ(reward(say(" 22\n")), 1.0);
  EXPECT_EQ(reward(say("22"), v1::FINISH_REASON_LENGTH), 0.0);
  for (const char* wrong : {"", "2", "222", "022", "22.0", "22 22", "+22", "twenty-two"})
    EXPECT_EQ(reward(say(wrong)), 0.0) << wrong;
  EXPECT_EQ(reward(call("calc", "{}")), 0.0);
}

TEST(Guess, AnswersTowardsTheSecretAndEndsWithTheTurns) {
  const auto tasks = guess_tasks();
  const auto task = find(tasks, "guess").make();
  EXPECT_EQ(task->reset(6).messages(0).content(), "guess 1-20");  // the secret is 7
  EXPECT_EQ(task->step(say("3"), v1::FINISH_REASON_STOP).messages(0).content(), "higher");
  EXPECT_EQ(task->step(say("12"), v1::FINISH_REASON_STOP).messages(0).content(), "lower");
  EXPECT_EQ(task->solution().content(), "7");  // the middle of 4..11
  EXPECT_EQ(task->step(say("banana"), v1::FINISH_REASON_STOP).messages(0).content(), "say 1-20");
  EXPECT_EQ(task->step(say("21"), v1::FINISH_REASON_STOP).messages(0).content(), "say 1-20");
  const v1::StepResponse last = task->step(say("8"), v1::FINISH_REASON_STOP);
  EXPECT_TRUE(last.done());
  EXPECT_EQ(last.reward(), 0.0);
}

TEST(Calculator, RunsTheToolAndAnswersEachCall) {
  EXPECT_EQ(calculate(R"({"a":37,"op":"*","b":12})"), "444");
  EXPECT_EQ(calculate(R"({"a":-3,"op":"-","b":4})"), "-7");
  EXPECT_EQ(calculate(R"({"a":1000000000,"op":"*","b":-1000000000})"), "-1000000000000000000");
  EXPECT_EQ(calculate(R"({"a":1000000001,"op":"+","b":1})"), "error: a: expected at most 1000000000");
  EXPECT_EQ(calculate(R"({"a":18446744073709551615,"op":"+","b":1})"),
            "error: a: expected at most 1000000000");
  EXPECT_EQ(calculate(R"({"a":1.5,"op":"+","b":1})"), "error: a: expected an integer");
  EXPECT_EQ(calculate(R"({"a":1,"op":"+"})"), "error: b: expected an integer");
  EXPECT_EQ(calculate(R"({"a":1,"op":"/","b":1})"), "error: op: expected + - or *");
  EXPECT_EQ(calculate(R"({"a":1,"op":3,"b":1})"), "error: op: expected + - or *");
  for (const char* broken : {"", "[1]", "{\"a\":", "\xff\xfe", "null"}) {
    EXPECT_EQ(calculate(broken), "error: arguments: expected a JSON object") << broken;
  }
  EXPECT_EQ(calculate(std::string(1 << 20, '[')), "error: arguments: expected a JSON object");

  const auto tasks = calculator_tasks();
  const auto task = find(tasks, "calculate").make();
  const v1::ResetResponse opening = task->reset(3);
  ASSERT_EQ(opening.tools_size(), 1);
  v1::Message two = call("calc", R"({"a":2,"op":"+","b":2})");
  *two.add_tool_calls() = call("rm", "{}").tool_calls(0);
  const v1::StepResponse response = task->step(two, v1::FINISH_REASON_STOP);
  ASSERT_EQ(response.messages_size(), 2);
  EXPECT_EQ(response.messages(0).role(), v1::ROLE_TOOL);
  EXPECT_EQ(response.messages(0).content(), "4");
  EXPECT_EQ(response.messages(0).tool_call_id(), "call-7");
  EXPECT_EQ(response.messages(1).content(), "error: no such tool, expected calc");
  EXPECT_FALSE(response.done());
}

TEST(Tasks, StrangeMessagesCostATurnAndNothingElse) {
  const std::vector<v1::Message> strange = {say(""),
                                            say(std::string("\x00\xff\xfe\n\r", 5)),
                                            say(std::string(1 << 20, '9')),
                                            say("99999999999999999999999"),
                                            call("", ""),
                                            call("calc", std::string(1 << 20, '{')),
                                            v1::Message()};
  for (const TaskEntry& entry : all_tasks()) {
    for (const v1::Message& message : strange) {
      const auto task = entry.make();
      task->reset(0);
      for (int turn = 0; turn < entry.description.max_turns(); ++turn) {
        const v1::StepResponse response = task->step(message, v1::FINISH_REASON_STOP);
        EXPECT_EQ(response.reward(), 0.0);
        if (response.done()) break;
        EXPECT_GT(response.messages_size(), 0);
      }
    }
  }
}

TEST(Faults, LatencyHasTheQuantilesAskedFor) {
  RandomFaults faults({.latency_p50_ms = 50, .latency_p99_ms = 2000, .seed = 5});
  std::vector<double> ms;
  for (int i = 0; i < 20000; ++i) ms.push_back(absl::ToDoubleMilliseconds(faults.draw().delay));
  std::sort(ms.begin(), ms.end());
  EXPECT_NEAR(ms[10000], 50, 3);
  EXPECT_NEAR(ms[19800], 2000, 250);
}

TEST(Faults, ComeAsOftenAsAskedForAndRepeatWithTheSeed) {
  const RandomFaults::Config config = {.abort_probability = 0.1,
                                       .stall_probability = 0.2,
                                       .garbage_probability = 0.3,
                                       .exit_probability = 0.05,
                                       .seed = 9};
  RandomFaults one(config), same(config);
  std::map<FaultKind, int> counts;
  for (int i = 0; i < 10000; ++i) {
    const Fault fault = one.draw();
    EXPECT_EQ(fault.kind, same.draw().kind);
    ++counts[fault.kind];
  }
  EXPECT_NEAR(counts[FaultKind::kAbort], 1000, 150);
  EXPECT_NEAR(counts[FaultKind::kStall], 2000, 200);
  EXPECT_NEAR(counts[FaultKind::kGarbage], 3000, 200);
  EXPECT_NEAR(counts[FaultKind::kExit], 500, 100);
}

TEST(Faults, GarbageBreaksTheRules) {
  for (uint64_t kind = 0; kind < 12; ++kind) {
    v1::StepResponse step;
    step.set_done(true);
    step.set_reward(1);
    make_garbage(kind, &step);
    bool bad = !std::isfinite(step.reward()) || (!step.done() && step.messages_size() == 0);
    for (const v1::Message& message : step.messages()) bad |= !v1::Role_IsValid(message.role());
    EXPECT_TRUE(bad) << kind;
    v1::ResetResponse reset;
    *reset.add_messages() = text_message(v1::ROLE_USER, "1+1=");
    make_garbage(kind, &reset);
    EXPECT_TRUE(reset.messages_size() == 0 || reset.messages(0).role() == v1::ROLE_UNSPECIFIED ||
                reset.tools_size() == 1);
  }
}

}  // namespace
}  // namespace slipstream::examples
