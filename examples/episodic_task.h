// What an environment of ours is below the wire: the logic of its tasks, without ids, retries or gRPC.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "slipstream/v1/environment.pb.h"

namespace slipstream::examples {

// One episode. Everything follows from the instance and the messages. Used by one thread at a time.
class EpisodicTask {
 public:
  virtual ~EpisodicTask() = default;
  // Called once, first: messages and tools. The solution is filled in by the caller.
  virtual v1::ResetResponse reset(uint64_t instance) = 0;
  // An assistant message, which may hold anything at all. Not called again after done.
  virtual v1::StepResponse step(const v1::Message& message, v1::FinishReason finish_reason) = 0;
  // The right assistant message at this point. Only called when the task has solutions and is not done.
  virtual v1::Message solution() const = 0;
};

struct TaskEntry {
  v1::TaskDescription description;
  std::function<std::unique_ptr<EpisodicTask>()> make;
};

inline v1::Message text_message(v1::Role role, std::string content) {
  v1::Message message;
  message.set_role(role);
  message.set_content(std::move(content));
  return message;
}

inline v1::TaskDescription describe_task(std::string name, std::string description, uint64_t num_instances,
                                         int max_turns) {
  v1::TaskDescription out;
  out.set_name(std::move(name));
  out.set_description(std::move(description));
  out.set_num_instances(num_instances);
  out.set_max_turns(max_turns);
  out.set_has_solutions(true);
  return out;
}

}  // namespace slipstream::examples
