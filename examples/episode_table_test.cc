// Goal: repeated calls get the first answer again, wrong ones an error that names the field and change
// nothing, and what nobody asks for is forgotten.
#include "examples/episode_table.h"

#include "absl/strings/match.h"
#include "examples/guess_task.h"
#include "gtest/gtest.h"

namespace slipstream::examples {
namespace {

const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

v1::ResetRequest reset_request(const std::string& id, uint64_t instance = 6,
                               const std::string& task = "guess") {
  v1::ResetRequest request;
  request.set_episode_id(id);
  request.set_task(task);
  request.set_instance(instance);
  return request;
}

v1::StepRequest step_request(const std::string& id, int turn, const std::string& text) {
  v1::StepRequest request;
  request.set_episode_id(id);
  request.set_turn(turn);
  *request.mutable_message() = text_message(v1::ROLE_ASSISTANT, text);
  request.set_finish_reason(v1::FINISH_REASON_STOP);
  return request;
}

v1::CloseRequest close_request(const std::string& id) {
  v1::CloseRequest request;
  request.set_episode_id(id);
  return request;
}

void expect_error(const absl::Status& status, absl::StatusCode code, const std::string& part) {
  EXPECT_EQ(status.code(), code) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), part)) << status;
}

TEST(EpisodeTable, RepeatedCallsGetTheFirstAnswer) {
  EpisodeTable table("guess", guess_tasks(), {});
  const auto opening = table.reset(reset_request("a"), kStart);
  ASSERT_TRUE(opening.ok()) << opening.status();
  v1::ResetRequest again = reset_request("a");
  EXPECT_EQ(table.reset(again, kStart)->SerializeAsString(), opening->SerializeAsString());

  const auto first = table.step(step_request("a", 0, "3"), kStart);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->messages(0).content(), "higher");
  const auto second = table.step(step_request("a", 1, "12"), kStart);
  EXPECT_EQ(second->messages(0).content(), "lower");
  // The retry's message is not looked at: the turn is over.
  EXPECT_EQ(table.step(step_request("a", 0, "19"), kStart)->messages(0).content(), "higher");
  EXPECT_EQ(table.step(step_request("a", 1, "7"), kStart)->messages(0).content(), "lower");
  EXPECT_TRUE(table.step(step_request("a", 2, "7"), kStart)->done());
  EXPECT_EQ(table.step(step_request("a", 2, "9"), kStart)->reward(), 1.0);
}

TEST(EpisodeTable, ErrorsNameTheFieldAndChangeNothing) {
  EpisodeTable table("guess", guess_tasks(), {});
  expect_error(table.reset(reset_request(""), kStart).status(), absl::StatusCode::kInvalidArgument,
               "episode_id: empty");
  expect_error(table.reset(reset_request(std::string(257, 'x')), kStart).status(),
               absl::StatusCode::kInvalidArgument, "episode_id: 257 bytes");
  expect_error(table.reset(reset_request("a", 0, std::string("\xff\n", 2)), kStart).status(),
               absl::StatusCode::kInvalidArgument, "task: \"\\xff\\n\"");
  expect_error(table.reset(reset_request("a", 20), kStart).status(), absl::StatusCode::kInvalidArgument,
               "instance: 20, expected 0 .. 19");
  EXPECT_LT(table.reset(reset_request("a", 0, std::string(1 << 20, 'x')), kStart).status().message().size(),
            200u);
  EXPECT_EQ(table.num_open(), 0u);

  ASSERT_TRUE(table.reset(reset_request("a"), kStart).ok());
  expect_error(table.reset(reset_request("a", 5), kStart).status(), absl::StatusCode::kInvalidArgument,
               "another task or instance");
  expect_error(table.step(step_request("b", 0, "3"), kStart).status(), absl::StatusCode::kNotFound,
               "episode_id: \"b\"");
  expect_error(table.step(step_request("a", 1, "3"), kStart).status(), absl::StatusCode::kInvalidArgument,
               "turn: 1, expected 0");
  expect_error(table.step(step_request("a", -1, "3"), kStart).status(), absl::StatusCode::kInvalidArgument,
               "turn: -1");
  ASSERT_TRUE(table.step(step_request("a", 0, "7"), kStart)->done());
  expect_error(table.step(step_request("a", 1, "7"), kStart).status(), absl::StatusCode::kInvalidArgument,
               "turn: 1, the episode ended with turn 0");
}

TEST(EpisodeTable, SolutionsComeWhenWanted) {
  EpisodeTable table("guess", guess_tasks(), {});
  v1::ResetRequest reset = reset_request("a");
  reset.set_want_solution(true);
  EXPECT_EQ(table.reset(reset, kStart)->solution().content(), "10");
  v1::StepRequest step = step_request("a", 0, "10");
  step.set_want_solution(true);
  EXPECT_EQ(table.step(step, kStart)->solution().content(), "5");
  EXPECT_FALSE(table.step(step_request("a", 1, "5"), kStart)->has_solution());
  EXPECT_FALSE(table.reset(reset_request("b"), kStart)->has_solution());
}

TEST(EpisodeTable, EveryEpisodeEndsWithItsTurns) {
  EpisodeTable table("guess", guess_tasks(), {});
  ASSERT_TRUE(table.reset(reset_request("a"), kStart).ok());
  for (int turn = 0; turn < 5; ++turn) {
    EXPECT_EQ(table.step(step_request("a", turn, "?"), kStart)->done(), turn == 4) << turn;
  }
}

TEST(EpisodeTable, ClosedEpisodesAreUnknown) {
  EpisodeTable table("guess", guess_tasks(), {});
  ASSERT_TRUE(table.reset(reset_request("a"), kStart).ok());
  EXPECT_TRUE(table.close(close_request("a"), kStart).ok());
  EXPECT_TRUE(table.close(close_request("a"), kStart).ok());
  expect_error(table.step(step_request("a", 0, "3"), kStart).status(), absl::StatusCode::kNotFound,
               "episode_id");
  expect_error(table.close(close_request(""), kStart), absl::StatusCode::kInvalidArgument, "episode_id");
}

TEST(EpisodeTable, IsBoundedAndForgetsWhatNobodyCalls) {
  EpisodeTable table("guess", guess_tasks(), {.episodes_max = 2, .idle_max = absl::Minutes(1)});
  ASSERT_TRUE(table.reset(reset_request("a"), kStart).ok());
  ASSERT_TRUE(table.reset(reset_request("b"), kStart).ok());
  expect_error(table.reset(reset_request("c"), kStart).status(), absl::StatusCode::kResourceExhausted,
               "episodes: 2 are open, expected fewer than 2");
  EXPECT_TRUE(
      table.reset(reset_request("a"), kStart + absl::Seconds(50)).ok());  // a repeat is no new episode
  EXPECT_TRUE(table.reset(reset_request("c"), kStart + absl::Seconds(61)).ok());  // b was idle for too long
  EXPECT_EQ(table.step(step_request("b", 0, "3"), kStart + absl::Seconds(61)).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(table.step(step_request("a", 0, "3"), kStart + absl::Seconds(61)).ok());
  EXPECT_EQ(table.num_open(), 2u);
}

}  // namespace
}  // namespace slipstream::examples
