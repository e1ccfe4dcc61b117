// A task with a real tool: the model calls `calc`, reads the result in a tool message, and answers.
#pragma once

#include <string>
#include <vector>

#include "examples/episodic_task.h"

namespace slipstream::examples {

// calculate: one operation on numbers up to 999; calculate_two: two, the second with the first's result. An
// assistant message without tool calls is the answer: reward 1 if it is right, else 0.
std::vector<TaskEntry> calculator_tasks();

// What `calc` returns for the arguments of a call, a JSON object {"a": integer, "op": "+" | "-" | "*", "b":
// integer}: the number, or "error: ..." that names the field.
std::string calculate(const std::string& arguments);

}  // namespace slipstream::examples
