#include "gateway/session.h"

#include "gtest/gtest.h"

namespace slipstream::gateway {
namespace {
using model::ChatMessage;
using model::ChatRole;
TEST(SessionTest, Smoke) {
  auto tok = model::open_tokenizer("bytes").value();
  auto fmt = model::ChatFormat::create({}, *tok).value();
  Session session(*fmt, {});
  auto p = session.extend(std::vector<ChatMessage>{{.role = ChatRole::kUser, .content = "hi"}});
  ASSERT_TRUE(p.ok());
  Reply r{.ids = {97, 98, 257}, .logprobs = {-1, -2, -3}, .policy_versions = {0, 0, 0}, .context_versions = {0, 0, 0}};
  auto m = session.commit(*p, r);
  ASSERT_TRUE(m.ok()) << m.status();
  EXPECT_EQ(m->content, "ab");
  auto q = session.extend(std::vector<ChatMessage>{{.role = ChatRole::kUser, .content = "yo"}});
  ASSERT_TRUE(q.ok());
  EXPECT_EQ(tok->decode(q->prompt_ids), "[gMASK]<sop><|user|>hi<|assistant|></think>ab<|user|>yo<|assistant|></think>");
  ASSERT_TRUE(session.commit(*q, r).ok());
  ASSERT_EQ(session.samples().size(), 1u);
  EXPECT_EQ(tok->decode(session.samples()[0].ids()), "[gMASK]<sop><|user|>hi<|assistant|></think>ab<|user|>yo<|assistant|></think>ab<|user|>");
}
}  // namespace
}  // namespace slipstream::gateway
