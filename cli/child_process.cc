#include "cli/child_process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>

#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/pause.h"
#include "proto/rpc.h"

namespace slipstream::cli {
namespace {

using std::chrono::milliseconds;

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return access(name.c_str(), X_OK) == 0 ? name : "";
  const char* path = std::getenv("PATH");
  for (const absl::string_view folder : absl::StrSplit(path == nullptr ? "" : path, ':')) {
    const std::string candidate = absl::StrCat(folder, "/", name);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return "";
}

// A process group of its own: ctrl-C at the terminal is ours to pass on, and what the command starts ends with it. Between
// fork and exec only calls that are safe in a process with threads.
pid_t spawn(const std::string& program, const std::vector<std::string>& command, int output) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid > 0) setpgid(pid, pid);  // here too: whoever signals the group next must find it
  if (pid != 0) return pid;
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  if (output >= 0) {
    dup2(output, STDOUT_FILENO);
    dup2(output, STDERR_FILENO);
  }
  execv(program.c_str(), argv.data());
  _exit(127);
}

// The last lines of a file from `begin` on, as one: "a | b | c"; empty: there are none.
std::string last_lines(const std::string& path, std::streamoff begin) {
  constexpr std::streamoff kBytesMax = 400;
  constexpr size_t kLinesMax = 3;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return "";
  const std::streamoff end = file.tellg();
  file.seekg(std::max(begin, end - kBytesMax));
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    if (line = rpc::printable(line); !line.empty()) lines.push_back(line);
  }
  if (lines.size() > kLinesMax) lines.erase(lines.begin(), lines.end() - kLinesMax);
  return absl::StrJoin(lines, " | ");
}

std::streamoff size_of(const std::string& path) {
  std::error_code error;
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  return error ? 0 : static_cast<std::streamoff>(size);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ChildProcess>> ChildProcess::start(Options options, Logger log) {
  if (options.command.empty() || find_program(options.command[0]).empty()) {
    return absl::NotFoundError(absl::StrCat(options.name, ": command: \"",
                                            options.command.empty() ? "" : options.command[0],
                                            "\": no such program"));
  }
  std::unique_ptr<ChildProcess> child(new ChildProcess(std::move(options), std::move(log)));
  child->thread_ = std::jthread([self = child.get()](std::stop_token stop) { self->supervise(stop); });
  return child;
}

// PR_SET_PDEATHSIG watches the thread that forked: this one, which lives as long as the child may.
void ChildProcess::supervise(std::stop_token stop) noexcept {
  const std::string program = find_program(options_.command[0]);
  const int output = open(options_.output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  Backoff backoff(absl::Milliseconds(100), absl::Seconds(10));
  bool lasted = false;
  for (int starts = 1; !stop.stop_requested(); ++starts) {
    const auto began = std::chrono::steady_clock::now();
    const std::streamoff output_begin = size_of(options_.output);
    const pid_t pid = spawn(program, options_.command, output);
    if (pid < 0) {
      log_->error("{}: cannot start: {}", options_.name, std::strerror(errno));
    } else {
      log_->info("{}: started as process {}", options_.name, pid);
      int status = 0;
      const std::stop_callback end(stop, [pid] { kill(-pid, SIGTERM); });
      auto deadline = std::chrono::steady_clock::time_point::max();
      while (waitpid(pid, &status, WNOHANG) == 0) {
        if (stop.stop_requested() && deadline == std::chrono::steady_clock::time_point::max()) {
          deadline = std::chrono::steady_clock::now() + milliseconds(2000);
        }
        if (std::chrono::steady_clock::now() > deadline) kill(-pid, SIGKILL);
        std::this_thread::sleep_for(milliseconds(20));
      }
      kill(-pid, SIGKILL);  // what it started and left behind
      if (stop.stop_requested()) break;
      const std::string words = last_lines(options_.output, output_begin);
      const std::string how = absl::StrCat(
          options_.name, ": process ", pid, " ended with ", WIFSIGNALED(status) ? "signal " : "code ",
          WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status), words.empty() ? "" : ": ", words);
      lasted = lasted || std::chrono::steady_clock::now() - began > std::chrono::seconds(10);
      if (!lasted && starts == kStartsMax && options_.on_failure) {
        options_.on_failure(absl::UnavailableError(absl::StrCat(how, " (its command was started ", starts, " times; ",
                                                                options_.output, ")")));
        break;
      }
      log_->warn("{}; starting it again", how);
    }
    if (std::chrono::steady_clock::now() - began > std::chrono::seconds(30)) backoff.reset();
    pause(backoff.next(), stop);
  }
  if (output >= 0) close(output);
}

absl::StatusOr<int> unused_port() {
  std::random_device random;
  for (int attempt = 0; attempt < 200; ++attempt) {
    const int port = 20'000 + static_cast<int>(random() % 12'000);
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool unused = bind(s, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(s);
    if (unused) return port;
  }
  return absl::UnavailableError("no unused port between 20000 and 31999");
}

}  // namespace slipstream::cli
