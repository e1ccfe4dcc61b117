// write_events DIR: two starts of a run, the second from step 5 on, for read_events.py to read.
#include <cstdio>

#include "learner/tensorboard.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  for (const int64_t start : {0, 5}) {
    auto writer = slipstream::learner::TensorBoardWriter::open(argv[1], start);
    if (!writer.ok()) {
      std::fprintf(stderr, "%s\n", std::string(writer.status().message()).c_str());
      return 1;
    }
    for (int64_t step = start; step < start + 8; ++step) {
      writer->scalar("reward/mean", step, static_cast<double>(step) + (start > 0 ? 0.5 : 0.25));
      writer->scalar("loss/policy", step, -1e-3 * static_cast<double>(step));
    }
    if (!writer->flush().ok()) return 1;
  }
  return 0;
}
