#include "examples/calculator_task.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace slipstream::examples {
namespace {

constexpr int64_t kMaxOperand = 1'000'000'000;  // products fit 64 bits
constexpr int kMaxCalls = 8;                    // of one assistant message
constexpr char kParameters[] =
    R"({"type":"object","properties":{"a":{"type":"integer"},"op":{"type":"string","enum":["+","-","*"]},)"
    R"("b":{"type":"integer"}},"required":["a","op","b"]})";

int64_t apply(int64_t a, char op, int64_t b) { return op == '+' ? a + b : op == '-' ? a - b : a * b; }

struct Operation {
  int64_t a;
  char op;
  int64_t b;
  int64_t result() const { return apply(a, op, b); }
};

// The same problem for the same instance, on every machine: splitmix64 (Steele et al. 2014) spreads it.
uint64_t spread(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class CalculatorTask final : public EpisodicTask {
 public:
  explicit CalculatorTask(int num_operations) : num_operations_(num_operations) {}

  v1::ResetResponse reset(uint64_t instance) override {
    const uint64_t bits = spread(instance);
    operations_.push_back({static_cast<int64_t>(bits % 1000), "+-*"[(bits >> 20) % 3],
                           static_cast<int64_t>((bits >> 24) % 1000)});
    std::string question =
        absl::StrCat(operations_[0].a, std::string(1, operations_[0].op), operations_[0].b);
    if (num_operations_ == 2) {
      operations_.push_back(
          {operations_[0].result(), "+-"[(bits >> 40) % 2], static_cast<int64_t>((bits >> 44) % 1000)});
      absl::StrAppend(&question, std::string(1, operations_[1].op), operations_[1].b);
    }
    v1::ResetResponse out;
    *out.add_messages() = text_message(v1::ROLE_USER, question + "=");
    v1::Tool& tool = *out.add_tools();
    tool.set_name("calc");
    tool.set_description("One operation on two integers");
    tool.set_parameters(kParameters);
    return out;
  }

  v1::StepResponse step(const v1::Message& message, v1::FinishReason finish_reason) override {
    v1::StepResponse out;
    if (message.tool_calls_size() == 0) {
      const bool right =
          finish_reason != v1::FINISH_REASON_LENGTH &&
          absl::StripAsciiWhitespace(message.content()) == absl::StrCat(operations_.back().result());
      out.set_done(true);
      out.set_reward(right ? 1.0 : 0.0);
      (*out.mutable_reward_parts())["correct"] = out.reward();
      return out;
    }
    for (int i = 0; i < message.tool_calls_size(); ++i) {
      const v1::ToolCall& call = message.tool_calls(i);
      std::string result;
      if (i >= kMaxCalls) {
        result = absl::StrCat("error: at most ", kMaxCalls, " calls in one message");
      } else if (call.name() != "calc") {
        result = "error: no such tool, expected calc";
      } else {
        result = calculate(call.arguments());
        if (result == absl::StrCat(operations_[std::min(num_right_, operations_.size() - 1)].result()))
          ++num_right_;
      }
      v1::Message& reply = *out.add_messages();
      reply = text_message(v1::ROLE_TOOL, std::move(result));
      reply.set_tool_call_id(call.id());
    }
    return out;
  }

  v1::Message solution() const override {
    if (num_right_ >= operations_.size()) {
      return text_message(v1::ROLE_ASSISTANT, absl::StrCat(operations_.back().result()));
    }
    const Operation& next = operations_[num_right_];
    v1::Message out;
    out.set_role(v1::ROLE_ASSISTANT);
    v1::ToolCall& call = *out.add_tool_calls();
    call.set_name("calc");
    call.set_arguments(
        absl::StrCat("{\"a\":", next.a, ",\"op\":\"", std::string(1, next.op), "\",\"b\":", next.b, "}"));
    return out;
  }

 private:
  const int num_operations_;
  std::vector<Operation> operations_;
  size_t num_right_ = 0;  // operations whose result a call has returned
};

TaskEntry entry(const char* name, const char* description, int num_operations) {
  // A turn for each operation and the answer, and two for mistakes.
  return {describe_task(name, description, /*num_instances=*/0, num_operations + 3),
          [num_operations] { return std::make_unique<CalculatorTask>(num_operations); }};
}

}  // namespace

std::string calculate(const std::string& arguments) {
  const nlohmann::json json = nlohmann::json::parse(arguments, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return "error: arguments: expected a JSON object";
  int64_t operands[2];
  for (int i = 0; i < 2; ++i) {
    const char* key = i == 0 ? "a" : "b";
    const auto value = json.find(key);
    if (value == json.end() || !value->is_number_integer())
      return absl::StrCat("error: ", key, ": expected an integer");
    // An unsigned value that does not fit int64_t reads as negative, so both forms are compared.
    const bool fits = value->is_number_unsigned()
                          ? value->get<uint64_t>() <= uint64_t{kMaxOperand}
                          : value->get<int64_t>() >= -kMaxOperand && value->get<int64_t>() <= kMaxOperand;
    if (!fits) return absl::StrCat("error: ", key, ": expected at most ", kMaxOperand);
    operands[i] = value->get<int64_t>();
  }
  const auto op = json.find("op");
  if (op == json.end() || (*op != "+" && *op != "-" && *op != "*")) return "error: op: expected + - or *";
  return absl::StrCat(apply(operands[0], op->get_ref<const std::string&>()[0], operands[1]));
}

std::vector<TaskEntry> calculator_tasks() {
  return {entry("calculate", "One operation on numbers below 1000, with the tool calc", 1),
          entry("calculate_two", "Two operations, one after the other, with the tool calc", 2)};
}

}  // namespace slipstream::examples
