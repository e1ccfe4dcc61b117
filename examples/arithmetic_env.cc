// arithmetic_env [--address host:port]: the tasks of arithmetic_task.h over gRPC.
#include "examples/arithmetic_task.h"
#include "examples/environment_service.h"

int main(int argc, char** argv) {
  return slipstream::examples::environment_main(argc, argv,
                                                {.name = "arithmetic",
                                                 .tasks = slipstream::examples::arithmetic_tasks(),
                                                 .faults = {},
                                                 .episodes = {}});
}
