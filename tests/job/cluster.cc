#include "tests/job/cluster.h"

#include "absl/strings/str_cat.h"

namespace slipstream::testing {

ClusterJob make_cluster_job(const std::string& directory, std::vector<std::pair<std::string, std::string>> more) {
  const int first_port = unused_ports(4);
  const auto address = [&](int i) { return absl::StrCat("127.0.0.1:", first_port + i); };
  more.insert(more.end(), {{"learner", "reply_timeout_ms: 300"},
                           {"learner", "address: " + address(1)},
                           {"gateway", "address: " + address(2)},
                           {"gateway", "learner_address: tcp://" + address(3)},
                           {"metrics", "gateway: 127.0.0.1:0"},
                           {"metrics", "learner: 127.0.0.1:0"}});
  const ClusterJob job{make_small_job(directory, more), address(0)};
  // The environment is one more process that may die: the gateway is told where it is and does not start it.
  std::string yaml = read_file(job.config);
  const size_t begin = yaml.find("  command: ["), end = yaml.find('\n', begin);
  yaml.replace(begin, end - begin, "  address: " + job.environment_address);
  write_file(job.config, yaml);
  return job;
}

Cluster::Cluster(const ClusterJob& job, int learner_ranks) : job_(job) {
  commands_["environment"] = {environment_binary("arithmetic_env"), "--address", job.environment_address};
  commands_["gateway"] = {slipstream_binary(), "gateway", "-c", job.config};
  commands_["rollout-0"] = {slipstream_binary(), "rollout", "-c", job.config};
  commands_["rollout-1"] = {slipstream_binary(), "rollout", "-c", job.config, "--worker-id", "worker-1"};
  std::vector<std::string>& learner = commands_["learner"];
  if (learner_ranks > 1) {
    learner = {SLIPSTREAM_MPIEXEC, "-np", absl::StrCat(learner_ranks), "--oversubscribe", "--allow-run-as-root", "--mca",
               "btl_vader_single_copy_mechanism", "none", "--mca", "mpi_yield_when_idle", "1", "--mca",
               "orte_tmpdir_base", job.directory};
  }
  learner.insert(learner.end(), {slipstream_binary(), "learner", "-c", job.config});
  for (const std::string& role : roles()) start(role);
}

void Cluster::start(const std::string& role) {
  processes_.insert_or_assign(role, Process(commands_.at(role), absl::StrCat(job_.directory, "/", role, ".out")));
}

void Cluster::restart(const std::string& role) {
  processes_.at(role).kill_now();
  start(role);
}

std::vector<std::string> Cluster::roles() const {
  std::vector<std::string> out;
  for (const auto& [role, command] : commands_) out.push_back(role);
  return out;
}

std::string Cluster::outputs() const {
  std::string out;
  for (const std::string& role : roles()) {
    const std::string text = read_file(absl::StrCat(job_.directory, "/", role, ".out"));
    absl::StrAppend(&out, "== ", role, "\n", text.substr(text.size() > 3000 ? text.size() - 3000 : 0), "\n");
  }
  return out;
}

}  // namespace slipstream::testing
