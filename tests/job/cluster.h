// The roles of a small job in processes of their own.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/job/small_job.h"

namespace slipstream::testing {

// A small job whose roles find each other at ports of the loopback interface that its config names.
struct ClusterJob : SmallJob {
  std::string environment_address;
};
ClusterJob make_cluster_job(const std::string& directory, std::vector<std::pair<std::string, std::string>> more);

// One gateway, two rollout workers, one environment, and a learner: one process, or `learner_ranks` under mpirun. The job
// outlives it; whatever still runs is killed at the end.
class Cluster {
 public:
  Cluster(const ClusterJob& job, int learner_ranks);
  // Kills a role with SIGKILL, and starts it again with the same command.
  void restart(const std::string& role);
  Process& operator[](const std::string& role) { return processes_.at(role); }
  std::vector<std::string> roles() const;
  std::string outputs() const;  // the ends of what they printed, for messages

 private:
  void start(const std::string& role);

  const ClusterJob& job_;
  std::map<std::string, std::vector<std::string>> commands_;
  std::map<std::string, Process> processes_;
};

}  // namespace slipstream::testing
