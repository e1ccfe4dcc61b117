// CHECK: a broken invariant of ours ends the process with file, line and operands. Never for input:
// no request, file or peer may be able to reach one (those get an absl::Status).
#pragma once

#include <sstream>
#include <string>

namespace slipstream {

// Prints "file:line: message" to stderr and aborts.
[[noreturn]] void check_failed(const char* file, int line, const std::string& message);

template <class A, class B>
std::string check_operands(const char* text, const A& a, const B& b) {
  std::ostringstream out;
  out << text << " (" << a << " against " << b << ")";
  return out.str();
}

}  // namespace slipstream

#define CHECK(condition)                                                       \
  do {                                                                         \
    if (!(condition)) ::slipstream::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)

#define SLIPSTREAM_CHECK_OP(op, a, b)                                                              \
  do {                                                                                             \
    const auto& check_a_ = (a);                                                                    \
    const auto& check_b_ = (b);                                                                    \
    if (!(check_a_ op check_b_))                                                                   \
      ::slipstream::check_failed(__FILE__, __LINE__,                                               \
                                 ::slipstream::check_operands(#a " " #op " " #b, check_a_, check_b_)); \
  } while (false)

#define CHECK_EQ(a, b) SLIPSTREAM_CHECK_OP(==, a, b)
#define CHECK_NE(a, b) SLIPSTREAM_CHECK_OP(!=, a, b)
#define CHECK_LT(a, b) SLIPSTREAM_CHECK_OP(<, a, b)
#define CHECK_LE(a, b) SLIPSTREAM_CHECK_OP(<=, a, b)
#define CHECK_GT(a, b) SLIPSTREAM_CHECK_OP(>, a, b)
#define CHECK_GE(a, b) SLIPSTREAM_CHECK_OP(>=, a, b)

// Dies with the status's message: for calls whose arguments we made ourselves.
#define CHECK_OK(expression)                                                                       \
  do {                                                                                             \
    const auto check_status_ = (expression);                                                       \
    if (!check_status_.ok())                                                                       \
      ::slipstream::check_failed(__FILE__, __LINE__, std::string(check_status_.ToString()));       \
  } while (false)
