// Goal: what could only ever abort every episode, or wait for ever, is refused with file, line, field and expectation.
#include "gateway/config.h"

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {

std::string error_of(const std::string& text) {
  ConfigNode root = *ConfigNode::parse(text, "a.yaml");
  static_cast<void>(GatewayConfig::from(root));
  return std::string(root.finish().message());
}

TEST(GatewayConfig, RefusesWhatCannotWork) {
  const std::pair<const char*, const char*> cases[] = {
      {"sampling:\n  min_p: 1", "a.yaml:2: sampling.min_p: \"1\", expected a number from 0 to 0.999999"},
      {"sampling:\n  temperature: 1e-4", "a.yaml:2: sampling.temperature: 0.0001, expected 0 or a number from 0.001 to 100"},
      {"gateway:\n  max_seq_len: 1", "a.yaml:2: gateway.max_seq_len: 1, expected 0 (no limit) or an integer >= 16"},
      {"gateway:\n  address: localhost:99999999",
       "a.yaml:2: gateway.address: \"localhost:99999999\", expected host:port, port from 0 to 65535"},
      {"gateway:\n  learner_address: tcp://localhost",
       "a.yaml:2: gateway.learner_address: \"localhost\", expected host:port, port from 0 to 65535"},
      {"rl:\n  max_staleness: 1000000", "a.yaml:2: rl.max_staleness: \"1000000\", expected an integer from 0 to 10000"},
      {"chat:\n  format: glm99", "a.yaml:2: chat.format: \"glm99\", expected glm47 | glm53"},
      {"chat:\n  reasoning_effort: some", "a.yaml:2: chat.reasoning_effort: \"some\", expected low | high | max"},
      {"environments:\n- name: e\n  address: localhost:99999999",
       "a.yaml:3: environments[0].address: \"localhost:99999999\", expected host:port, port from 1 to 65535"},
      {"environments:\n- name: e\n  command: [env, --port, 1]",
       "a.yaml:3: environments[0].command: expected {address} in one of its words, or an address beside it"},
      {"environments:\n- name: a/b\n  address: localhost:1",
       "a.yaml:2: environments[0].name: \"a/b\", expected letters, digits, '-', '_' and '.', not first"},
      {"environments:\n- name: e\n  address: localhost:1\n  tasks: [{name: t}, {name: t, weight: 2}]",
       "a.yaml:4: environments[0].tasks[1].name: t: named twice"},
      {"environments:\n- name: e\n  address: localhost:1\n  tasks: [{name: t, weight: 0}, {name: u, weight: 0}]",
       "a.yaml:2: environments: the weights of all tasks are 0, expected one above"},
      {"environments:\n- name: e\n  address: localhost:1\n  tasks: [{name: t, groups_per_second: 1e-300}]",
       "a.yaml:4: environments[0].tasks[0].groups_per_second: 1e-300, expected 0 (no limit) or a number >= 1e-6"},
  };
  for (const auto& [text, message] : cases) EXPECT_EQ(error_of(text), message) << text;
  const char* good[] = {
      "sampling: {min_p: 0.5, temperature: 0}\ngateway: {max_seq_len: 16, learner_address: \"*:7401\"}",
      "environments: [{name: e, command: [env, \"--address={address}\"]}]",
      "environments: [{name: e, address: \"localhost:1\", command: [env, --port, 1]}]",
      "environments: [{name: e, address: \"localhost:1\", tasks: [{name: t, weight: 0}]}, {name: f, address: \"localhost:2\"}]",
  };
  for (const char* text : good) EXPECT_EQ(error_of(text), "") << text;
}

}  // namespace
}  // namespace slipstream::gateway
