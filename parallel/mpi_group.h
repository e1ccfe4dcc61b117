// A Group over MPI: the ranks that `mpirun` started.
#pragma once

#include <memory>

#include "parallel/group.h"

namespace slipstream::parallel {

// Owns MPI in this process: initialised by create(), finalised by the destructor. Nothing else touches MPI,
// so a binary that does not create one runs without mpirun as if MPI were not there. All use of the world and
// its group is by the thread that created it.
class MpiWorld {
 public:
  // FailedPrecondition: MPI was initialised before in this process (it cannot be twice), or its threads
  // support is too low.
  static absl::StatusOr<std::unique_ptr<MpiWorld>> create();
  ~MpiWorld();
  MpiWorld(const MpiWorld&) = delete;
  MpiWorld& operator=(const MpiWorld&) = delete;

  // All ranks. Sums add in rank order whatever the size of the tensor, so that repeated runs agree bit for
  // bit. Lives as long as the world.
  Group& group();
  // Ends every rank at once, with this exit code: for an error that only one rank knows of.
  [[noreturn]] void abort(int exit_code);

 private:
  explicit MpiWorld(std::unique_ptr<Group> group);
  std::unique_ptr<Group> group_;
};

}  // namespace slipstream::parallel
