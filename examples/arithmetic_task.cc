#include "examples/arithmetic_task.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

namespace slipstream::examples {
namespace {

struct Problem {
  std::string question;
  std::string answer;
};

// Instance i of a + b with both below `range`.
Problem addition(uint64_t instance, uint64_t range) {
  const uint64_t a = instance / range, b = instance % range;
  return {absl::StrCat(a, "+", b, "="), absl::StrCat(a + b)};
}

// Instances count the pairs b <= a: (0,0), (1,0), (1,1), (2,0), ...
Problem subtraction(uint64_t instance) {
  uint64_t a = 0;
  while (instance > a) instance -= ++a;
  return {absl::StrCat(a, "-", instance, "="), absl::StrCat(a - instance)};
}

class ArithmeticTask final : public EpisodicTask {
 public:
  using Make = Problem (*)(uint64_t instance);
  explicit ArithmeticTask(Make make) : make_(make) {}

  v1::ResetResponse reset(uint64_t instance) override {
    problem_ = make_(instance);
    v1::ResetResponse out;
    *out.add_messages() = text_message(v1::ROLE_USER, problem_.question);
    return out;
  }

  v1::StepResponse step(const v1::Message& message, v1::FinishReason finish_reason) override {
    // A reply cut off at the length limit is no answer, even if its beginning is one.
    const bool right = finish_reason != v1::FINISH_REASON_LENGTH && message.tool_calls_size() == 0 &&
                       absl::StripAsciiWhitespace(message.content()) == problem_.answer;
    v1::StepResponse out;
    out.set_done(true);
    out.set_reward(right ? 1.0 : 0.0);
    (*out.mutable_reward_parts())["correct"] = out.reward();
    return out;
  }

  v1::Message solution() const override { return text_message(v1::ROLE_ASSISTANT, problem_.answer); }

 private:
  Make make_;
  Problem problem_;
};

TaskEntry entry(const char* name, const char* description, uint64_t num_instances,
                ArithmeticTask::Make make) {
  return {describe_task(name, description, num_instances, /*max_turns=*/1),
          [make] { return std::make_unique<ArithmeticTask>(make); }};
}

}  // namespace

std::vector<TaskEntry> arithmetic_tasks() {
  return {
      entry("add", "The sum of two numbers from 0 to 19", 400, [](uint64_t i) { return addition(i, 20); }),
      entry("add_small", "The sum of two digits", 100, [](uint64_t i) { return addition(i, 10); }),
      entry("sub", "A number from 0 to 19 less one that is no larger", 210, &subtraction)};
}

}  // namespace slipstream::examples
