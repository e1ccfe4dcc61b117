#include "examples/guess_task.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace slipstream::examples {
namespace {

class GuessTask final : public EpisodicTask {
 public:
  GuessTask(int most, int turns) : most_(most), turns_(turns), high_(most) {}

  v1::ResetResponse reset(uint64_t instance) override {
    secret_ = 1 + static_cast<int>(instance);
    v1::ResetResponse out;
    *out.add_messages() = text_message(v1::ROLE_USER, absl::StrCat("guess 1-", most_));
    return out;
  }

  v1::StepResponse step(const v1::Message& message, v1::FinishReason finish_reason) override {
    --turns_;
    int guess = 0;
    const bool number = finish_reason != v1::FINISH_REASON_LENGTH &&
                        absl::SimpleAtoi(absl::StripAsciiWhitespace(message.content()), &guess) &&
                        guess >= 1 && guess <= most_;
    const bool found = number && guess == secret_;
    v1::StepResponse out;
    out.set_done(found || turns_ == 0);
    out.set_reward(found ? 1.0 : 0.0);
    if (found) (*out.mutable_reward_parts())["turns_left"] = turns_;
    if (out.done()) return out;
    if (!number) {
      *out.add_messages() = text_message(v1::ROLE_USER, absl::StrCat("say 1-", most_));
      return out;
    }
    if (guess < secret_) low_ = std::max(low_, guess + 1);
    if (guess > secret_) high_ = std::min(high_, guess - 1);
    *out.add_messages() = text_message(v1::ROLE_USER, guess < secret_ ? "higher" : "lower");
    return out;
  }

  v1::Message solution() const override {
    return text_message(v1::ROLE_ASSISTANT, absl::StrCat((low_ + high_) / 2));
  }

 private:
  const int most_;
  int turns_;
  int secret_ = 0;
  int low_ = 1;  // what the answers so far leave possible
  int high_;
};

TaskEntry entry(const char* name, int most, int turns) {
  return {describe_task(name, absl::StrCat("Find a number from 1 to ", most, " in ", turns, " guesses"),
                        static_cast<uint64_t>(most), turns),
          [most, turns] { return std::make_unique<GuessTask>(most, turns); }};
}

}  // namespace

std::vector<TaskEntry> guess_tasks() { return {entry("guess", 20, 5), entry("guess_small", 7, 3)}; }

}  // namespace slipstream::examples
