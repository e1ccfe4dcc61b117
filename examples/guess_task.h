// Several turns: the model names a number, the environment says "higher" or "lower", until it is found or the
// turns run out.
#pragma once

#include <vector>

#include "examples/episodic_task.h"

namespace slipstream::examples {

// guess: 1..20 in 5 turns, guess_small: 1..7 in 3. Reward 1 when found, else 0. The solution is binary
// search, which finds every number in time.
std::vector<TaskEntry> guess_tasks();

}  // namespace slipstream::examples
