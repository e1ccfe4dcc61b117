// guess_env [--address host:port]: the tasks of guess_task.h over gRPC.
#include "examples/environment_service.h"
#include "examples/guess_task.h"

int main(int argc, char** argv) {
  return slipstream::examples::environment_main(
      argc, argv,
      {.name = "guess", .tasks = slipstream::examples::guess_tasks(), .faults = {}, .episodes = {}});
}
