// Goal: over real ranks, sums are added in rank order for sizes around every boundary, bytes and maxima reach
// everybody, and a repeated sum has the same bits. Run by mpirun; every rank checks.
#include "parallel/mpi_group.h"

#include <cmath>
#include <cstdio>
#include <vector>

namespace slipstream::parallel {
namespace {

float value(int rank, int64_t i) {
  return std::sin(static_cast<float>(i) * 0.37f + static_cast<float>(rank)) *
         std::exp2(static_cast<float>((i * 7 + rank * 13) % 40 - 20));
}

int run() {
  auto world = MpiWorld::create();
  CHECK_OK(world.status());
  CHECK(!MpiWorld::create().ok());
  Group& group = (*world)->group();
  auto stream = kernels::Stream::create_cpu(1);
  CHECK_OK(stream.status());
  for (const int64_t n : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}, int64_t{1000},
                          int64_t{(1 << 20) + 1}, int64_t{2'500'001}}) {
    std::vector<float> mine(static_cast<size_t>(n) + 1), again;
    for (int64_t i = 0; i < n; ++i) mine[static_cast<size_t>(i)] = value(group.rank(), i);
    again = mine;
    group.all_reduce_sum(kernels::Tensor(mine.data(), kernels::DType::kF32, {n}), **stream);
    group.all_reduce_sum(kernels::Tensor(again.data(), kernels::DType::kF32, {n}), **stream);
    for (int64_t i = 0; i < n; ++i) {
      float expected = value(0, i);
      for (int r = 1; r < group.size(); ++r) expected += value(r, i);
      CHECK_EQ(mine[static_cast<size_t>(i)], expected);
      CHECK_EQ(again[static_cast<size_t>(i)], expected);
    }
  }
  CHECK_EQ(group.all_reduce_max(int64_t{1} << (40 + group.rank())), int64_t{1} << (40 + group.size() - 1));
  for (int root = 0; root < group.size(); ++root) {
    for (const size_t size : {size_t{0}, size_t{5}, size_t{3'000'000}}) {
      std::string bytes(group.rank() == root ? size : 17, static_cast<char>('a' + group.rank()));
      group.broadcast(bytes, root);
      CHECK_EQ(bytes.size(), size);
      CHECK(bytes == std::string(size, static_cast<char>('a' + root)));
    }
  }
  group.barrier();
  if (group.rank() == 0) std::printf("mpi_group_test: %d ranks ok\n", group.size());
  return 0;
}

}  // namespace
}  // namespace slipstream::parallel

int main() { return slipstream::parallel::run(); }
