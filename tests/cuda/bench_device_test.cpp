/* SPDX-License-Identifier: MIT */
/*
 * bench/cuda/device.c on the host double: it runs, asks for less than the plain form, and writes every
 * row. Its figures mean nothing here.
 */
#define main bench_device_main
#include "bench/cuda/device.c"
#undef main

#include "bench/support/bench.c"

#include "tests/cudasim/cudasim.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

namespace {

int run(std::vector<const char *> words) {
  std::vector<char *> argv;
  words.insert(words.begin(), "device");
  for (const char *word : words)
    argv.push_back(const_cast<char *>(word));
  return bench_device_main(static_cast<int>(argv.size()), argv.data());
}

std::size_t count_of(const std::string &text, const std::string &part) {
  std::size_t count = 0;
  for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1))
    ++count;
  return count;
}

TEST(BenchDevice, WritesEveryRow) {
  const std::string path = ::testing::TempDir() + "bench_device_test.json";
  ASSERT_EQ(run({"--tiny", "--json", path.c_str()}), 0);
  std::size_t rows = 0; /* of the table: f32 alone, or three dtypes */
  for (int kind = 0; kind < OPS_COUNT; ++kind)
    rows += ops_of(static_cast<ops_kind>(kind))->dtypes == OPS_ALL ? 3u : 1u;
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(std::remove(path.c_str()), 0);
  EXPECT_EQ(count_of(text.str(), "\"metric\""), 4u + rows) << text.str();
  for (const char *name : {"bf16 product", "\"copy\"", "64 x 64", "2 of 16 x 64", "adamw",
                           "muon prepare", "muon commit"})
    EXPECT_GE(count_of(text.str(), name), 1u) << name;
  EXPECT_EQ(count_of(text.str(), "nan"), 0u);
  EXPECT_EQ(cudasim::complaints(), "");
}

TEST(BenchDevice, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_EQ(run({"--slow"}), 2);
}

/* Half of the tiles beside the diagonal, all of them without symmetry. */
TEST(BenchDevice, CountsWhatIsComputed) {
  mfsdp_cuda_backend cuda;
  mfsdp_gemm_args args;
  std::memset(&cuda, 0, sizeof(cuda));
  std::memset(&args, 0, sizeof(args));
  cuda.symmetric_from = 1024;
  args.d.rows = args.d.cols = 4096;
  EXPECT_EQ(computed_share(&cuda, &args), 1.0);
  args.symmetric = 1;
  int32_t tiles = 0;
  ASSERT_GT(mfsdp__cuda_tile_side(&cuda, 4096, &tiles), 0);
  EXPECT_DOUBLE_EQ(computed_share(&cuda, &args), (tiles + 1.0) / (2.0 * tiles));
  args.d.rows = args.d.cols = 512;
  EXPECT_EQ(computed_share(&cuda, &args), 1.0);
}

} // namespace
