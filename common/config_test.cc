#include "common/config.h"

#include "gtest/gtest.h"

namespace slipstream {
namespace {

enum class Update { kKeep, kRecompute };

struct Example {
  int count = 3;
  double rate = 0.5;
  bool on = false;
  std::string name = "x";
  std::vector<std::string> words;
  Update update = Update::kKeep;
  std::vector<int> items;
};

absl::Status read(const std::string& text, Example* out, std::string* resolved = nullptr) {
  ASSIGN_OR_RETURN(ConfigNode root, ConfigNode::parse(text, "a.yaml"));
  ConfigNode section = root.child("section");
  section.read("count", &out->count, 1);
  section.read("rate", &out->rate, 0.0, 1.0);
  section.read("on", &out->on);
  section.read("name", &out->name);
  section.read("words", &out->words);
  section.read_choice("update", &out->update, {{"keep", Update::kKeep}, {"recompute", Update::kRecompute}});
  for (ConfigNode& item : root.list("items")) {
    out->items.push_back(0);
    item.read("n", &out->items.back());
  }
  if (resolved != nullptr) *resolved = root.resolved();
  return root.finish();
}

TEST(Config, ReadsValuesAndKeepsDefaults) {
  Example example;
  ASSERT_TRUE(read("section: {count: 7, words: [a, b], update: recompute}\nitems: [{n: 1}, {n: 2}]", &example).ok());
  EXPECT_EQ(example.count, 7);
  EXPECT_EQ(example.rate, 0.5);
  EXPECT_EQ(example.words, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(example.update, Update::kRecompute);
  EXPECT_EQ(example.items, (std::vector<int>{1, 2}));
}

TEST(Config, EmptyFileIsAllDefaults) {
  Example example;
  EXPECT_TRUE(read("", &example).ok());
  EXPECT_EQ(example.count, 3);
}

TEST(Config, ErrorsNameFileLineFieldAndExpectation) {
  const std::pair<const char*, const char*> cases[] = {
      {"section:\n  count: many", "a.yaml:2: section.count: \"many\", expected an integer >= 1"},
      {"section:\n  count: 0", "a.yaml:2: section.count: \"0\", expected an integer >= 1"},
      {"section:\n  count: 99999999999", "a.yaml:2: section.count: \"99999999999\", expected an integer >= 1"},
      {"section:\n  rate: 2", "a.yaml:2: section.rate: \"2\", expected a number from 0 to 1"},
      {"section:\n  rate: .nan", "a.yaml:2: section.rate: \".nan\", expected a number from 0 to 1"},
      {"section:\n  on: yes", "a.yaml:2: section.on: \"yes\", expected true or false"},
      {"section:\n  update: drop", "a.yaml:2: section.update: \"drop\", expected keep | recompute"},
      {"section:\n  words: a", "a.yaml:2: section.words: \"a\", expected a list of texts"},
      {"section: 3", "a.yaml:1: section: \"3\", expected a mapping"},
      {"items: {n: 1}", "a.yaml:1: items: a mapping, expected a list of mappings"},
      {"section:\n  coumt: 3",
       "a.yaml:2: section.coumt: unknown key, expected one of: count, name, on, rate, update, words"},
      {"items:\n- n: 1\n- m: 1", "a.yaml:3: items[1].m: unknown key, expected one of: n"},
      {"section:\n  count: 1\n  count: 2", "a.yaml:3: section.count: given twice"},
      {"[1, 2]", "a.yaml: a list, expected a mapping of sections"},
  };
  for (const auto& [text, message] : cases) {
    Example example;
    EXPECT_EQ(std::string(read(text, &example).message()), message) << text;
  }
  Example example;
  EXPECT_EQ(read("section: [", &example).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ConfigNode::load("/nonexistent.yaml").status().code(), absl::StatusCode::kNotFound);
}

TEST(Config, OverridesWinOverTheFile) {
  absl::StatusOr<ConfigNode> root = ConfigNode::parse("a: {b: 1}", "a.yaml");
  ASSERT_TRUE(root->override_value("a.b=2").ok());
  ASSERT_TRUE(root->override_value("c.d=[x, y]").ok());
  EXPECT_FALSE(root->override_value("a.b").ok());
  EXPECT_FALSE(root->override_value("=1").ok());
  EXPECT_FALSE(root->override_value("a..b=1").ok());
  EXPECT_FALSE(root->override_value("a.b.c=1").ok());
  int b = 0;
  std::vector<std::string> d;
  root->child("a").read("b", &b);
  root->child("c").read("d", &d);
  EXPECT_TRUE(root->finish().ok()) << root->finish();
  EXPECT_EQ(b, 2);
  EXPECT_EQ(d, (std::vector<std::string>{"x", "y"}));
}

TEST(Config, ErrorsOfOverridesNameTheAssignment) {
  const auto error = [](const std::string& set, const std::string& text = "section:\n  count: 4\n  name: y") {
    absl::StatusOr<ConfigNode> root = ConfigNode::parse(text, "a.yaml");
    EXPECT_TRUE(root->override_value("section.name=z").ok());
    EXPECT_TRUE(root->override_value(set).ok());
    ConfigNode section = root->child("section");
    int count = 1;
    std::string name;
    section.read("count", &count, 1);
    section.read("name", &name);
    for (ConfigNode& item : root->list("items")) item.read("n", &count, 1);
    return std::string(root->finish().message());
  };
  EXPECT_EQ(error("section.count=0"), "--set section.count=0: section.count: \"0\", expected an integer >= 1");
  EXPECT_EQ(error("section={count: 0}"), "--set section={count: 0}: section.count: \"0\", expected an integer >= 1");
  EXPECT_EQ(error("items=[{n: 0}]"), "--set items=[{n: 0}]: items[0].n: \"0\", expected an integer >= 1");
  EXPECT_EQ(error("section.coumt=3"), "--set section.coumt=3: section.coumt: unknown key, expected one of: count, name");
  EXPECT_EQ(error("sektion.count=3"), "--set sektion.count=3: sektion: unknown key, expected one of: items, section");
  EXPECT_EQ(error("section.name=w", "section:\n  count: 0"), "a.yaml:2: section.count: \"0\", expected an integer >= 1");
}

TEST(Config, OneDocumentAFile) {
  EXPECT_EQ(ConfigNode::parse("a: 1\n---\nb: 2\n", "a.yaml").status().message(), "a.yaml:3: a second YAML document, expected one");
  EXPECT_TRUE(ConfigNode::parse("---\na: 1\n...\n---\n", "a.yaml").ok());
}

TEST(Config, AddressesAndNames) {
  const auto error = [](const std::string& text) {
    ConfigNode root = *ConfigNode::parse(text, "a.yaml");
    std::string call = "localhost:1", listen = "localhost:0", none, name = "x";
    root.read_address("call", &call, 1);
    root.read_address("listen", &listen, 0);
    root.read_address("none", &none, 1);
    root.read_name("name", &name);
    return std::string(root.finish().message());
  };
  EXPECT_EQ(error("none: \"\""), "");
  EXPECT_EQ(error("call: localhost:0"), "a.yaml:1: call: \"localhost:0\", expected host:port, port from 1 to 65535");
  EXPECT_EQ(error("listen: localhost:99999999"), "a.yaml:1: listen: \"localhost:99999999\", expected host:port, port from 0 to 65535");
  EXPECT_EQ(error("none: nowhere"), "a.yaml:1: none: \"nowhere\", expected host:port, port from 1 to 65535");
  EXPECT_EQ(error("call: \"\""), "a.yaml:1: call: \"\", expected host:port, port from 1 to 65535");
  EXPECT_EQ(error("name: \"\""), "a.yaml:1: name: 0 bytes, expected 1 to 128");
}

TEST(Config, ResolvedFileReadsBackTheSame) {
  Example first, second;
  std::string resolved, again;
  ASSERT_TRUE(read("section: {rate: 0.1, name: \"true story: yes\"}\nitems: [{n: 1}, {}]", &first, &resolved).ok());
  ASSERT_TRUE(read(resolved, &second, &again).ok()) << resolved;
  EXPECT_EQ(resolved, again);
  EXPECT_EQ(second.rate, 0.1);
  EXPECT_EQ(second.name, "true story: yes");
  EXPECT_NE(resolved.find("count: 3"), std::string::npos) << resolved;
}

}  // namespace
}  // namespace slipstream
