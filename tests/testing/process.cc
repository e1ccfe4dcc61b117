#include "tests/testing/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>
#include <sstream>
#include <thread>
#include <utility>

#include "common/check.h"

namespace slipstream::testing {

Process::Process(const std::vector<std::string>& command, const std::string& output) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const int file = open(output.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  CHECK(file >= 0);
  pid_ = fork();
  CHECK(pid_ >= 0);
  if (pid_ == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  setpgid(pid_, pid_);
  close(file);
}

Process::Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)), code_(other.code_) {}

Process& Process::operator=(Process&& other) noexcept {
  if (this == &other) return *this;
  release();
  pid_ = std::exchange(other.pid_, -1);
  code_ = other.code_;
  return *this;
}

Process::~Process() { release(); }

void Process::release() {
  if (pid_ > 0) kill_now();
  pid_ = -1;
}

void Process::signal(int number) {
  if (!code_.has_value()) kill(pid_, number);
}

void Process::kill_now() {
  kill(-pid_, SIGKILL);
  wait(std::chrono::seconds(30));
}

std::optional<int> Process::wait(std::chrono::milliseconds timeout) {
  wait_until(
      [&] {
        if (code_.has_value()) return true;
        int status = 0;
        if (waitpid(pid_, &status, WNOHANG) != pid_) return false;
        code_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
        return true;
      },
      timeout);
  return code_;
}

bool Process::running() { return !wait(std::chrono::milliseconds(0)).has_value(); }

int unused_ports(int count) {
  constexpr int kLow = 12'000, kHigh = 20'000;  // cli's own choice begins above
  const auto unused = [](int port) {
    const int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(s >= 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool bound = bind(s, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    close(s);
    return bound;
  };
  std::random_device random;
  for (int attempt = 0; attempt < 200; ++attempt) {
    const int first = kLow + static_cast<int>(random() % static_cast<unsigned>(kHigh - kLow - count));
    int free = 0;
    while (free < count && unused(first + free)) ++free;
    if (free == count) return first;
  }
  check_failed(__FILE__, __LINE__, "no unused ports");
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> read_lines(const std::string& path) {
  const std::string text = read_file(path);
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    lines.push_back(text.substr(begin, end - begin));
  }
  return lines;
}

void write_file(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  CHECK(file.good());
}

void pause_briefly() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

}  // namespace slipstream::testing
