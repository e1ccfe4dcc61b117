#include "cli/console.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace slipstream::cli {
namespace {

std::string clock(double seconds) {
  const auto whole = static_cast<int64_t>(seconds);
  if (whole >= 3600) return absl::StrFormat("%d:%02d:%02d", whole / 3600, whole / 60 % 60, whole % 60);
  return absl::StrFormat("%d:%02d", whole / 60, whole % 60);
}

std::string bar(const learner::StepReport& report) {
  constexpr int64_t kCells = 30;
  const int64_t steps = std::max<int64_t>(report.phase_steps, 1);
  const int64_t full = std::min(kCells, report.phase_step * kCells / steps);
  return absl::StrFormat("%s [%s%s] %d/%d", learner::name_of(report.phase), std::string(static_cast<size_t>(full), '#'),
                         std::string(static_cast<size_t>(kCells - full), '.'), report.phase_step, steps);
}

}  // namespace

std::string describe(const learner::StepReport& report) {
  std::string out = absl::StrFormat("step %4d  v%-4d ", report.step, report.policy_version);
  if (report.phase == learner::Phase::kWarmup) {
    absl::StrAppendFormat(&out, "warm-up  loss %.3f  solutions' probability %.2f", report.loss,
                          report.demonstration_probability.value_or(0.0));
  } else {
    const auto number = [](const std::optional<double>& value, const char* format) {
      return value.has_value() ? absl::StrFormat(*absl::ParsedFormat<'f'>::New(format), *value) : std::string("-");
    };
    absl::StrAppend(&out, "reward ", number(report.reward_mean, "%.3f"), "  stale ", number(report.staleness_mean, "%.2f"),
                    "  mismatch ", report.mismatch_abs_max.has_value() ? absl::StrFormat("%g", *report.mismatch_abs_max) : "-");
    const double masked = 100.0 * (report.masked_low_fraction.value_or(0.0) + report.masked_high_fraction.value_or(0.0));
    absl::StrAppendFormat(&out, "  masked %.1f%%  grad %.2f", masked, report.grad_norm);
    const double total = report.wait_data_seconds + report.train_seconds + report.checkpoint_seconds + report.publish_seconds;
    absl::StrAppendFormat(&out, "  waited %2.0f%%", total > 0.0 ? 100.0 * report.wait_data_seconds / total : 0.0);
  }
  if (report.skipped) absl::StrAppend(&out, "  skipped: a gradient was not finite");
  return absl::StrCat(out, "  ", clock(report.wall_seconds));
}

// mpirun gives its ranks a terminal and prints what they write there wherever it likes.
Console::Console(std::FILE* out)
    : out_(out), terminal_(isatty(fileno(out)) != 0 && std::getenv("OMPI_COMM_WORLD_SIZE") == nullptr) {}

void Console::step(const learner::StepReport& report) {
  std::fprintf(out_, "%s%s\n", terminal_ ? "\r\033[K" : "", describe(report).c_str());
  if (terminal_) std::fprintf(out_, "%s", bar(report).c_str());
  std::fflush(out_);
}

void Console::finish() {
  if (terminal_) std::fprintf(out_, "\r\033[K");
  std::fflush(out_);
}

}  // namespace slipstream::cli
