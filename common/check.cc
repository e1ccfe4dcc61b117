#include "common/check.h"

#include <cstdio>
#include <cstdlib>

namespace slipstream {

void check_failed(const char* file, int line, const std::string& message) {
  std::fprintf(stderr, "%s:%d: CHECK failed: %s\n", file, line, message.c_str());
  std::abort();
}

}  // namespace slipstream
