// One question, one answer: "7+15=" wants "22" and pays 1 for exactly that, 0 for anything else.
#pragma once

#include <vector>

#include "examples/episodic_task.h"

namespace slipstream::examples {

// add: 0..19 + 0..19, add_small: 0..9 + 0..9, sub: 0..19 less something no larger.
std::vector<TaskEntry> arithmetic_tasks();

}  // namespace slipstream::examples
