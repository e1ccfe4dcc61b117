// The subcommands of `slipstream`. Each adds its flags to the app and returns what runs it; only cli/ reads flags.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace slipstream::cli {

using Run = std::function<absl::Status()>;

Run add_inspect(CLI::App& app);
Run add_init(CLI::App& app);
Run add_logprobs(CLI::App& app);
Run add_generate(CLI::App& app);
Run add_convert(CLI::App& app);
Run add_run(CLI::App& app);
Run add_gateway(CLI::App& app);
Run add_rollout(CLI::App& app);
Run add_learner(CLI::App& app);
Run add_check_env(CLI::App& app);
Run add_report(CLI::App& app);

// What a flag's text must be, before CLI11 converts it: CLI11 takes "" for 0 and the nearest number for one that does not
// fit. The refusal names the flag.
CLI::Validator integer_in(int64_t low, int64_t high = std::numeric_limits<int64_t>::max());
CLI::Validator seed_number();  // 0 .. 2^64 - 1
CLI::Validator finite_number();
CLI::Validator thread_count();

// AlreadyExists when `directory` holds a model and `force` is not given.
absl::Status check_replaces_nothing(const std::string& directory, bool force);
// "5,9,17" -> {5, 9, 17}. InvalidArgument: `flag: ...`, not numbers, or empty.
absl::StatusOr<std::vector<int32_t>> parse_ids(const std::string& flag, const std::string& text);
// "fp32" or "bf16".
absl::StatusOr<kernels::DType> parse_dtype(const std::string& text);

}  // namespace slipstream::cli
