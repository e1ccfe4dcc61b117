// What a person sees while a job runs: one line a step, and on a terminal a bar that says how far it is.
#pragma once

#include <cstdio>
#include <string>

#include "learner/step_report.h"

namespace slipstream::cli {

// One step as a line of text, without colour or bar.
std::string describe(const learner::StepReport& report);

class Console {
 public:
  explicit Console(std::FILE* out);  // a terminal gets the bar
  void step(const learner::StepReport& report);
  void finish();  // the bar goes away

 private:
  std::FILE* out_;
  bool terminal_;
};

}  // namespace slipstream::cli
