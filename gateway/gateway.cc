#include "gateway/gateway.h"

#include <grpcpp/impl/service_type.h>

#include <map>
#include <system_error>
#include <utility>

#include "absl/time/clock.h"
#include "gateway/delivery.h"
#include "gateway/driving_sessions.h"
#include "gateway/engine_client.h"
#include "gateway/environment_client.h"
#include "gateway/gateway_service.h"
#include "gateway/ledger.h"
#include "gateway/orchestrator.h"
#include "gateway/worker_pool.h"
#include "gateway/workers_service.h"
#include "model/chat_format.h"
#include "model/tokenizer.h"
#include "proto/rpc.h"

namespace slipstream::gateway {
namespace {

constexpr absl::Duration kLastCalls = absl::Milliseconds(500);

}  // namespace

// In the order they are made. They are stopped, and the ledger is closed, before any of them dies.
struct Gateway::Parts {
  Parts(GatewayConfig given, Metrics& the_metrics, Logger logger)
      : config(std::move(given)),
        metrics(the_metrics),
        log(std::move(logger)),
        pool({.heartbeat_ms = config.heartbeat_ms, .heartbeat_misses = config.heartbeat_misses}, metrics, log),
        engine(pool, log) {}

  absl::Status open_format();
  absl::Status serve();
  absl::Status start_environments(const GatewayWatch& watch);
  v1::Activity activity() const;
  v1::GetStatusResponse status() const;
  void stop_episodes();
  void stop();

  const GatewayConfig config;
  Metrics& metrics;
  const Logger log;
  std::unique_ptr<model::Tokenizer> tokenizer;
  std::unique_ptr<model::ChatFormat> format;
  std::unique_ptr<Ledger> ledger;
  WorkerPool pool;
  EngineClient engine;
  std::map<std::string, std::unique_ptr<EnvironmentClient>> environments;
  std::unique_ptr<Orchestrator> orchestrator;
  std::unique_ptr<DrivingSessions> sessions;
  std::unique_ptr<grpc::Service> gateway_service, workers_service;
  rpc::Server server;
  std::string learner_endpoint;
  std::unique_ptr<Delivery> delivery;
};

absl::Status Gateway::Parts::open_format() {
  ASSIGN_OR_RETURN(tokenizer, model::open_tokenizer(config.job.tokenizer));
  const model::ChatFormat::Options options{
      .family = config.chat_format, .thinking = config.thinking, .reasoning_effort = config.reasoning_effort};
  ASSIGN_OR_RETURN(format, model::ChatFormat::create(options, *tokenizer));
  return absl::OkStatus();
}

absl::Status Gateway::Parts::serve() {
  sessions = std::make_unique<DrivingSessions>(config, *ledger, engine, *format, metrics, log);
  gateway_service = make_gateway_service(*sessions, [this] { return status(); });
  workers_service = make_workers_service(pool);
  ASSIGN_OR_RETURN(server, rpc::serve("gateway.address", config.address, {gateway_service.get(), workers_service.get()}));
  return absl::OkStatus();
}

// Episodes start once every environment has described itself to the ledger.
absl::Status Gateway::Parts::start_environments(const GatewayWatch& watch) {
  Orchestrator::Environments clients;
  for (const EnvironmentConfig& environment : config.environments) {
    const auto described = [this, name = environment.name](const v1::DescribeResponse& answer) {
      const std::vector<v1::TaskDescription> tasks(answer.tasks().begin(), answer.tasks().end());
      return ledger->set_tasks(name, tasks);
    };
    const absl::Duration start_timeout =
        watch.environments_must_start ? absl::Milliseconds(environment.start_timeout_ms) : absl::InfiniteDuration();
    auto client =
        std::make_unique<EnvironmentClient>(environment, described, metrics, log, watch.on_failure, start_timeout);
    clients[environment.name] = client.get();
    environments[environment.name] = std::move(client);
  }
  try {
    orchestrator = std::make_unique<Orchestrator>(config, *ledger, engine, std::move(clients), *format, metrics, log);
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("gateway.episode_threads: ", config.episode_threads,
                                                     " threads cannot be had here: ", error.what()));
  }
  return absl::OkStatus();
}

v1::Activity Gateway::Parts::activity() const {
  v1::Activity out;
  (*out.mutable_idle_seconds())["rollout"] = pool.idle_seconds();
  out.set_generated_tokens(pool.generated_tokens());
  for (auto& [task, total] : ledger->rewards()) (*out.mutable_rewards())[task] = total;
  out.set_environment_seconds(orchestrator->environment_seconds());
  out.set_engine_seconds(orchestrator->engine_seconds() + sessions->engine_seconds());
  return out;
}

v1::GetStatusResponse Gateway::Parts::status() const {
  v1::GetStatusResponse out;
  *out.mutable_counts() = ledger->counts();
  out.set_policy_version(ledger->learner_policy_version());
  out.set_learner_connected(ledger->learner_connected());
  for (v1::WorkerStatus& worker : pool.status()) *out.add_workers() = std::move(worker);
  for (const EnvironmentConfig& environment : config.environments) {
    // Not there yet while the gateway starts.
    if (const auto client = environments.find(environment.name); client != environments.end()) {
      *out.add_environments() = client->second->status();
    }
  }
  return out;
}

void Gateway::Parts::stop_episodes() {
  if (ledger != nullptr) ledger->stop();
  if (orchestrator != nullptr) orchestrator->stop();
}

void Gateway::Parts::stop() {
  stop_episodes();
  if (sessions != nullptr) sessions->stop();
  delivery.reset();
  if (server.server != nullptr) {
    server.server->Shutdown(absl::ToChronoTime(absl::Now() + kLastCalls));
    server.server.reset();
  }
  environments.clear();
}

Gateway::Gateway(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}

absl::StatusOr<std::unique_ptr<Gateway>> Gateway::start(const GatewayConfig& config, Metrics& metrics, Logger log,
                                                          const GatewayWatch& watch) {
  for (const EnvironmentConfig& environment : config.environments) {
    if (environment.address.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("environments: \"", environment.name, "\" has no address"));
    }
  }
  std::unique_ptr<Gateway> gateway(new Gateway(std::make_unique<Parts>(config, metrics, log)));
  Parts& parts = *gateway->parts_;
  RETURN_IF_ERROR(parts.open_format());
  ASSIGN_OR_RETURN(parts.ledger, Ledger::open(config, parts.tokenizer->fingerprint(), metrics, log));
  RETURN_IF_ERROR(parts.start_environments(watch));
  RETURN_IF_ERROR(parts.serve());
  // Last: its answers tell of everybody.
  ASSIGN_OR_RETURN(parts.delivery, Delivery::start(config.job.learner_address, *parts.ledger, log, [&parts] { return parts.activity(); }));
  parts.learner_endpoint = parts.delivery->endpoint();
  log->info("gateway at {}, learner endpoint {}, {} environments", parts.server.address, parts.learner_endpoint,
            config.environments.size());
  return gateway;
}

Gateway::~Gateway() {
  stop();
  parts_->ledger.reset();  // its threads may still ask for the activity of the others
}

const std::string& Gateway::address() const { return parts_->server.address; }
const std::string& Gateway::learner_endpoint() const { return parts_->learner_endpoint; }
v1::GetStatusResponse Gateway::status() const { return parts_->status(); }
void Gateway::stop_episodes() { parts_->stop_episodes(); }
void Gateway::stop() { parts_->stop(); }

}  // namespace slipstream::gateway
