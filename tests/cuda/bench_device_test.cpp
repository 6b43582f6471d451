/* SPDX-License-Identifier: MIT */
/*
 * bench/cuda/device.c on the host double: it runs, asks for less than the plain form, and writes every
 * row; and its model is the one that its peer in Python has. Its figures mean nothing here.
 */
#define main bench_device_main
#include "bench/cuda/device.c"
#undef main

#include "bench/support/bench.c"

#include "examples/plan/models.h"

#include "tests/cudasim/cudasim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
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

/* Of the table: f32 alone, or three dtypes. */
std::size_t table_rows() {
  std::size_t rows = 0;
  for (int kind = 0; kind < OPS_COUNT; ++kind)
    rows += ops_of(static_cast<ops_kind>(kind))->dtypes == OPS_ALL ? 3u : 1u;
  return rows;
}

std::string rows_of_tiny() {
  const std::string path = ::testing::TempDir() + "bench_device_test.json";
  EXPECT_EQ(run({"--tiny", "--json", path.c_str()}), 0);
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_EQ(std::remove(path.c_str()), 0);
  return text.str();
}

TEST(BenchDevice, WritesEveryRow) {
  const std::string text = rows_of_tiny();
  EXPECT_EQ(count_of(text, "\"metric\""), 5u + table_rows()) << text;
  for (const char *name : {"bf16 product", "\"copy\"", "64 x 64", "2 of 16 x 64", "gpt2-tiny",
                           "optimizer step", "adamw", "muon prepare", "muon commit", "muon rows"})
    EXPECT_GE(count_of(text, name), 1u) << name;
  EXPECT_EQ(count_of(text, "nan"), 0u);
  EXPECT_EQ(cudasim::complaints(), "");
}

/* A device too small for the model: the other rows come all the same, and all memory goes back. */
TEST(BenchDevice, LeavesOutAModelThatDoesNotFit) {
  cudasim::set_memory_limit((std::size_t{33} << 20) + (std::size_t{100} << 10));
  ::testing::internal::CaptureStdout();
  const std::string text = rows_of_tiny();
  const std::string printed = ::testing::internal::GetCapturedStdout();
  cudasim::reset_machine();
  EXPECT_EQ(count_of(printed, "skip gpt2-tiny, optimizer step: mem_alloc: the device has no"), 1u)
      << printed;
  EXPECT_EQ(count_of(text, "\"metric\""), 4u + table_rows()) << text;
  EXPECT_EQ(cudasim::allocation_count(), 0u);
  EXPECT_EQ(cudasim::complaints(), "");
}

TEST(BenchDevice, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(run({"--help"}), 0);
  EXPECT_EQ(run({"--slow"}), 2);
}

/* ---- its model ---- */

/* rows, cols, matrix; of gpt2-1.5b as the planner knows it, heads and aliases aside. */
std::vector<std::array<int64_t, 3>> planned_tensors() {
  std::vector<std::array<int64_t, 3>> out;
  plan_params params;
  plan_error error;
  plan_params_init(&params);
  EXPECT_EQ(plan_model_fill("gpt2-1.5b", PLAN_VIEWS_WHOLE, &params, &error), PLAN_OK);
  for (int32_t i = 0; i < params.count; ++i) {
    const mfsdp_param &p = params.list[i];
    if (p.alias_of != nullptr) continue;
    const int64_t parts = p.view == MFSDP_VIEW_HEADS ? p.head_count : 1;
    const int64_t rows = p.ndim == 1 ? 1 : p.shape[0] / parts;
    for (int64_t part = 0; part < parts; ++part)
      out.push_back({rows, p.shape[p.ndim == 1 ? 0 : 1], p.role == MFSDP_ROLE_MATRIX ? 1 : 0});
  }
  plan_params_free(&params);
  std::sort(out.begin(), out.end());
  return out;
}

TEST(BenchDevice, TheModelIsThePlanners) {
  const model gpt2 = MODEL_GPT2;
  std::vector<std::array<int64_t, 3>> ours;
  for (int32_t i = 0; i < model_tensor_count(&gpt2); ++i) {
    const model_tensor t = model_tensor_at(&gpt2, i);
    ours.push_back({t.rows, t.cols, t.matrix});
  }
  std::sort(ours.begin(), ours.end());
  EXPECT_EQ(ours, planned_tensors());
}

/* What a command prints; "" if there is no such command. */
std::string output_of(const std::string &command) {
  std::string out;
  char line[256];
  FILE *pipe = popen((command + " 2>/dev/null").c_str(), "r");
  if (pipe == nullptr) return "";
  while (std::fgets(line, sizeof(line), pipe) != nullptr)
    out += line;
  return pclose(pipe) == 0 ? out : "";
}

/* The peer measures what we do: the same cases by name, and as many matrices and elements. */
TEST(BenchDevice, ThePeersCasesAreOurs) {
  if (output_of("python3 --version").empty()) GTEST_SKIP() << "needs python3";
  for (const bool tiny : {false, true}) {
    const model models[] = {MODEL_GPT2, MODEL_TINY}, &m = models[tiny ? 1 : 0];
    int64_t matrices = 0, elements = 0, others = 0, other_elements = 0;
    for (int32_t i = 0; i < model_tensor_count(&m); ++i) {
      const model_tensor t = model_tensor_at(&m, i);
      (t.matrix ? matrices : others) += 1;
      (t.matrix ? elements : other_elements) += t.rows * t.cols;
    }
    std::string want;
    for (int i = 0; i < (tiny ? TINY_CASE_COUNT : CASE_COUNT); ++i)
      want += std::string("newton-schulz: ") + (tiny ? tiny_cases : cases)[i].name + "\n";
    want += std::string("optimizer step: ") + m.name + ", " + std::to_string(matrices) +
            " matrices of " + std::to_string(elements) + " elements, " + std::to_string(others) +
            " other tensors of " + std::to_string(other_elements) + "\n";
    EXPECT_EQ(
        output_of(std::string("python3 bench/peers/torch_gpu.py --list") + (tiny ? " --tiny" : "")),
        want);
  }
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
