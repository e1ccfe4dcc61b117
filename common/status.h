// The world fails -> absl::Status. RETURN_IF_ERROR and ASSIGN_OR_RETURN are ours: Debian's Abseil lacks them.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define RETURN_IF_ERROR(expression)                       \
  do {                                                    \
    if (absl::Status status_ = (expression); !status_.ok()) return status_; \
  } while (false)

#define SLIPSTREAM_CONCAT_INNER(a, b) a##b
#define SLIPSTREAM_CONCAT(a, b) SLIPSTREAM_CONCAT_INNER(a, b)
#define ASSIGN_OR_RETURN(target, expression) \
  SLIPSTREAM_ASSIGN_OR_RETURN(SLIPSTREAM_CONCAT(status_or_, __LINE__), target, expression)
#define SLIPSTREAM_ASSIGN_OR_RETURN(temporary, target, expression) \
  auto temporary = (expression);                                   \
  if (!temporary.ok()) return temporary.status();                  \
  target = *std::move(temporary)
