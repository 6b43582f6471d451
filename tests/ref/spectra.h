/* SPDX-License-Identifier: MIT */
/*
 * spectra.h: deterministic test matrices, random or with prescribed singular values.
 *
 *   auto sigma = ref::spectrum_log_uniform(32, 1e-7);                   // 1 ... 1e-7
 *   auto x = ref::matrix_with_singular_values(32, 96, sigma, 42);       // seed 42
 *   auto g = ref::random_matrix(8, 8, 7);                               // entries near N(0, 1)
 *
 * Apart from the pow() of the spectra only +, -, * and / are used on the way to an entry, so a seed
 * gives the same bits with every C library if nothing is fused (-ffp-contract=off). The prescribed
 * values hold to about 1e-15 of the largest in float64. After ref::round_to_float each is off by up
 * to about 6e-8 of the largest, so judge a float32 result on the values of the rounded matrix.
 */
#ifndef MFSDP_TESTS_REF_SPECTRA_H
#define MFSDP_TESTS_REF_SPECTRA_H

#include "dense_ref.h"

namespace ref {

/* SplitMix64 (Steele, Lea, Flood 2014): a counter through a mixing function. */
class Random {
public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    state_ += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * (1.0 / 9007199254740992.0); }
  /* Twelve uniforms: variance 1, nearly normal, and no logarithm that differs between libraries. */
  double normal() {
    double sum = -6.0;
    for (int i = 0; i < 12; ++i)
      sum += uniform();
    return sum;
  }

private:
  uint64_t state_;
};

inline std::vector<double> random_matrix(int64_t rows, int64_t cols, uint64_t seed,
                                         double scale = 1.0) {
  Random random(seed);
  std::vector<double> out(static_cast<std::size_t>(rows * cols));
  for (double &value : out)
    value = scale * random.normal();
  return out;
}

/* 1 down to `smallest`, evenly spaced on a logarithmic axis, both ends included. */
inline std::vector<double> spectrum_log_uniform(int64_t count, double smallest) {
  std::vector<double> out;
  for (int64_t i = 0; i < count; ++i) {
    const double t = count > 1 ? static_cast<double>(i) / static_cast<double>(count - 1) : 0.0;
    out.push_back(std::pow(smallest, t));
  }
  return out;
}

inline std::vector<double> spectrum_flat(int64_t count, double value = 1.0) {
  return std::vector<double>(static_cast<std::size_t>(count), value);
}

/* `rank` values from 1 down to 0.1, then exact zeros. rank = 1 gives a rank-one matrix. */
inline std::vector<double> spectrum_deficient(int64_t count, int64_t rank) {
  std::vector<double> out = spectrum_log_uniform(std::min(rank, count), 0.1);
  out.resize(static_cast<std::size_t>(count), 0.0);
  return out;
}

/* x = H x (from_left) or x H with the reflection H = I - 2 v v^T / |v|^2, v random. */
inline void reflect(std::vector<double> *x, int64_t rows, int64_t cols, bool from_left,
                    Random *random) {
  std::vector<double> v(static_cast<std::size_t>(from_left ? rows : cols));
  double square = 0.0;
  for (double &value : v) {
    value = random->normal();
    square += value * value;
  }
  if (square == 0.0) return;
  const int64_t others = from_left ? cols : rows;
  std::vector<double> dot(static_cast<std::size_t>(others), 0.0);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const auto along = static_cast<std::size_t>(from_left ? i : j);
      const auto across = static_cast<std::size_t>(from_left ? j : i);
      dot[across] += v[along] * (*x)[index(i, j, cols)];
    }
  }
  for (double &value : dot)
    value *= 2.0 / square;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      const auto along = static_cast<std::size_t>(from_left ? i : j);
      const auto across = static_cast<std::size_t>(from_left ? j : i);
      (*x)[index(i, j, cols)] -= v[along] * dot[across];
    }
  }
}

/*
 * sigma on the diagonal, then random reflections from both sides. `reflections` per side, 0 for as
 * many as the side is long, at most 32: enough to fill every entry, cheap enough for a sanitizer.
 */
inline std::vector<double> matrix_with_singular_values(int64_t rows, int64_t cols,
                                                       const std::vector<double> &sigma,
                                                       uint64_t seed, int64_t reflections = 0) {
  require(sigma.size() == static_cast<std::size_t>(std::min(rows, cols)),
          "ref::matrix_with_singular_values: sigma needs min(rows, cols) values");
  Random random(seed);
  std::vector<double> x(static_cast<std::size_t>(rows * cols), 0.0);
  for (std::size_t i = 0; i < sigma.size(); ++i) {
    x[index(static_cast<int64_t>(i), static_cast<int64_t>(i), cols)] = sigma[i];
  }
  const int64_t left = reflections > 0 ? reflections : std::min<int64_t>(rows, 32);
  const int64_t right = reflections > 0 ? reflections : std::min<int64_t>(cols, 32);
  for (int64_t i = 0; i < left; ++i)
    reflect(&x, rows, cols, true, &random);
  for (int64_t i = 0; i < right; ++i)
    reflect(&x, rows, cols, false, &random);
  return x;
}

} // namespace ref

#endif
