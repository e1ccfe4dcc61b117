// An environment service for tests: one task whose episodes last `turns` turns, and hooks for everything that can go wrong.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "slipstream/v1/environment.pb.h"

namespace slipstream::gateway::testing {

class FakeEnvironment {
 public:
  struct Options {
    std::string address = "127.0.0.1:0";
    int turns = 1;
    int max_turns = 8;
    // Called with the answer that would be given; may change it, block, or fail the call.
    std::function<absl::Status(v1::DescribeResponse&)> on_describe = nullptr;
    std::function<absl::Status(const v1::ResetRequest&, v1::ResetResponse&)> on_reset = nullptr;
    std::function<absl::Status(const v1::StepRequest&, v1::StepResponse&)> on_step = nullptr;
  };
  // The first message is "problem <instance>", then "turn <n>"; each step's reward is 1 / turns; solutions are "answer <turn>".
  explicit FakeEnvironment(Options options);
  ~FakeEnvironment();
  void kill();  // breaks its connections; nobody listens any more

  const std::string& address() const;
  std::vector<v1::ResetRequest> resets() const;
  std::vector<v1::StepRequest> steps() const;
  std::vector<std::string> closed() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace slipstream::gateway::testing
