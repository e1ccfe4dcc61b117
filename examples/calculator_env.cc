// calculator_env [--address host:port]: the tasks of calculator_task.h over gRPC.
#include "examples/calculator_task.h"
#include "examples/environment_service.h"

int main(int argc, char** argv) {
  return slipstream::examples::environment_main(argc, argv,
                                                {.name = "calculator",
                                                 .tasks = slipstream::examples::calculator_tasks(),
                                                 .faults = {},
                                                 .episodes = {}});
}
