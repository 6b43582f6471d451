/* SPDX-License-Identifier: MIT */
/* gpt_test.h - what the tests of the GPT example share: a plain-loop product, files, numbers. */
#ifndef TESTS_GPT_TEST_H
#define TESTS_GPT_TEST_H

#include "examples/gpt/error.h"
#include "examples/gpt/gemm.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <unistd.h>
#include <vector>

namespace gpt_test {

/* C = alpha op(A) op(B) + beta C with loops in a fixed order: deterministic on every machine. */
inline void LoopSgemm(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k, float alpha,
                      const float *a, int64_t lda, const float *b, int64_t ldb, float beta,
                      float *c, int64_t ldc) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j) {
      float sum = 0.0f;
      for (int64_t l = 0; l < k; ++l)
        sum += (trans_a ? a[l * lda + i] : a[i * lda + l]) *
               (trans_b ? b[j * ldb + l] : b[l * ldb + j]);
      float *out = &c[i * ldc + j];
      *out = alpha * sum + (beta == 0.0f ? 0.0f : beta * *out);
    }
}

/* A file that disappears with the object. */
class TempFile {
public:
  explicit TempFile(const std::string &text = "") {
    std::string pattern = testing::TempDir() + "gpt_test_XXXXXX";
    std::vector<char> name(pattern.begin(), pattern.end());
    name.push_back('\0');
    const int fd = mkstemp(name.data());
    EXPECT_GE(fd, 0);
    path_ = name.data();
    FILE *f = fdopen(fd, "wb");
    EXPECT_EQ(fwrite(text.data(), 1, text.size(), f), text.size());
    fclose(f);
  }
  ~TempFile() { unlink(path_.c_str()); }
  TempFile(const TempFile &) = delete;
  TempFile &operator=(const TempFile &) = delete;
  const char *path() const { return path_.c_str(); }
  std::string text() const {
    std::string all;
    FILE *f = fopen(path_.c_str(), "rb");
    for (int c; (c = fgetc(f)) != EOF;)
      all += static_cast<char>(c);
    fclose(f);
    return all;
  }

private:
  std::string path_;
};

/* Catches what a function writes to a FILE*. */
class TextOutput {
public:
  TextOutput() : file_(tmpfile()) { EXPECT_NE(file_, nullptr); }
  ~TextOutput() { fclose(file_); }
  TextOutput(const TextOutput &) = delete;
  TextOutput &operator=(const TextOutput &) = delete;
  FILE *file() { return file_; }
  std::string text() {
    std::string all;
    fflush(file_);
    rewind(file_);
    for (int c; (c = fgetc(file_)) != EOF;)
      all += static_cast<char>(c);
    return all;
  }

private:
  FILE *file_;
};

inline std::vector<float> Normals(int64_t count, unsigned seed, float deviation,
                                  float mean = 0.0f) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> values(static_cast<size_t>(count));
  for (float &v : values)
    v = normal(generator);
  return values;
}

inline std::vector<uint8_t> Tokens(int64_t count, unsigned seed, int vocab) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> uniform(0, vocab - 1);
  std::vector<uint8_t> tokens(static_cast<size_t>(count));
  for (uint8_t &t : tokens)
    t = static_cast<uint8_t>(uniform(generator));
  return tokens;
}

} // namespace gpt_test

#endif /* TESTS_GPT_TEST_H */
