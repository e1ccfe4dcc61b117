// Addresses of services and names of things, as config files, flags and peers give them: one rule for all.
#pragma once

#include <string>
#include <string_view>

namespace slipstream {

// What is wrong with `host:port`, to follow the field's name (`"x", expected host:port, ...`); empty: nothing. An IPv6 host
// stands in brackets. least_port: 0 for an address to listen on (any free port), 1 for one to call.
std::string address_problem(std::string_view address, int least_port);

// What is wrong with the name of a task or a group; empty: nothing. Such names end up in logs, ids and metrics' labels: 1 to 128
// bytes of printable ASCII.
constexpr size_t kNameBytesMax = 128;
std::string name_problem(std::string_view name);
// The same for a run, a worker or an environment, after which files are named: letters, digits, '-', '_' and '.', not first.
std::string file_name_problem(std::string_view name);

}  // namespace slipstream
