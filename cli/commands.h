// The subcommands of `slipstream`. Each adds its flags to the app and returns what runs it; only cli/ reads flags.
#pragma once

#include <functional>
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

// "5,9,17" -> {5, 9, 17}. InvalidArgument: `flag: ...`, not numbers, or empty.
absl::StatusOr<std::vector<int32_t>> parse_ids(const std::string& flag, const std::string& text);
// "fp32" or "bf16".
absl::StatusOr<kernels::DType> parse_dtype(const std::string& text);

}  // namespace slipstream::cli
