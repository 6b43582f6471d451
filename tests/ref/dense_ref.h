/* SPDX-License-Identifier: MIT */
/*
 * dense_ref.h: small dense linear algebra in float64, written for clarity, and the metrics that the
 * tests judge by. Test code only; independent of the library.
 *
 *   std::vector<double> y = ref::matmul(a, b, m, k, n);            // [m,k] x [k,n]
 *   double err = ref::relative_error(ref::widen(got_f32), want);   // |got - want|_F / |want|_F
 *   std::vector<double> s = ref::singular_values(y, m, n);         // descending
 *   double orth = ref::orthogonality_error(y, m, n);               // |Y Y^T - I|_F / sqrt(s)
 *
 * Every matrix is a row-major std::vector<double> of rows * cols entries.
 */
#ifndef MFSDP_TESTS_REF_DENSE_REF_H
#define MFSDP_TESTS_REF_DENSE_REF_H

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <vector>

namespace ref {

inline std::size_t index(int64_t row, int64_t col, int64_t cols) {
  return static_cast<std::size_t>(row * cols + col);
}

inline void require(bool condition, const char *message) {
  if (!condition) throw std::invalid_argument(message);
}

inline void require_shape(const std::vector<double> &x, int64_t rows, int64_t cols) {
  require(rows >= 0 && cols >= 0, "ref: negative dimension");
  require(x.size() == static_cast<std::size_t>(rows * cols), "ref: the size is not rows * cols");
}

inline std::vector<double> widen(const std::vector<float> &x) {
  return std::vector<double>(x.begin(), x.end());
}

inline std::vector<double> widen(const float *x, int64_t count) {
  return std::vector<double>(x, x + count);
}

/* Rounds once, to nearest: how a float64 test input becomes the library's float32 input. */
inline std::vector<float> narrow(const std::vector<double> &x) {
  std::vector<float> out(x.size());
  for (std::size_t i = 0; i < x.size(); ++i)
    out[i] = static_cast<float>(x[i]);
  return out;
}

/* The float64 values of the float32 input: what the reference must be run on. */
inline std::vector<double> round_to_float(const std::vector<double> &x) {
  return widen(narrow(x));
}

inline std::vector<double> transpose(const std::vector<double> &x, int64_t rows, int64_t cols) {
  require_shape(x, rows, cols);
  std::vector<double> out(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j)
      out[index(j, i, rows)] = x[index(i, j, cols)];
  }
  return out;
}

inline std::vector<double> matmul(const std::vector<double> &a, const std::vector<double> &b,
                                  int64_t m, int64_t k, int64_t n) {
  require_shape(a, m, k);
  require_shape(b, k, n);
  std::vector<double> out(static_cast<std::size_t>(m * n), 0.0);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t p = 0; p < k; ++p) {
      const double factor = a[index(i, p, k)];
      for (int64_t j = 0; j < n; ++j)
        out[index(i, j, n)] += factor * b[index(p, j, n)];
    }
  }
  return out;
}

inline double max_abs(const std::vector<double> &x) {
  double largest = 0.0;
  for (double value : x)
    largest = std::max(largest, std::fabs(value));
  return largest;
}

/* Scaled by the largest entry, so that no square leaves the range of a double. NaN propagates. */
inline double frobenius_norm(const std::vector<double> &x) {
  const double scale = max_abs(x);
  if (scale == 0.0) {
    double sum = 0.0;
    for (double value : x)
      sum += value; /* 0, or NaN where max_abs looked past one */
    return sum;
  }
  double sum = 0.0;
  for (double value : x)
    sum += (value / scale) * (value / scale);
  return scale * std::sqrt(sum);
}

/*
 * |got - want|_F / |want|_F. With want = 0 it is 0 for got = 0 and infinity otherwise: a zero
 * reference is met exactly or not at all. A NaN on either side gives infinity, never NaN, so that
 * EXPECT_LT and EXPECT_LE both fail.
 */
inline double relative_error(const std::vector<double> &got, const std::vector<double> &want) {
  require(got.size() == want.size(), "ref::relative_error: sizes differ");
  std::vector<double> difference(got.size());
  for (std::size_t i = 0; i < got.size(); ++i)
    difference[i] = got[i] - want[i];
  const double norm = frobenius_norm(want), error = frobenius_norm(difference);
  if (std::isnan(norm) || std::isnan(error)) return std::numeric_limits<double>::infinity();
  if (norm == 0.0) return error == 0.0 ? 0.0 : std::numeric_limits<double>::infinity();
  return error / norm;
}

inline double relative_error(const std::vector<float> &got, const std::vector<double> &want) {
  return relative_error(widen(got), want);
}

/* Largest |got - want|: for values whose own scale is known, such as singular values near 1. */
inline double max_difference(const std::vector<double> &got, const std::vector<double> &want) {
  require(got.size() == want.size(), "ref::max_difference: sizes differ");
  double largest = 0.0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double difference = std::fabs(got[i] - want[i]);
    if (std::isnan(difference)) return std::numeric_limits<double>::infinity();
    largest = std::max(largest, difference);
  }
  return largest;
}

/* |Y Y^T - I|_F / sqrt(s), with the short side s first (a tall Y is judged by Y^T Y). */
inline double orthogonality_error(const std::vector<double> &y, int64_t rows, int64_t cols) {
  require_shape(y, rows, cols);
  if (rows > cols) return orthogonality_error(transpose(y, rows, cols), cols, rows);
  std::vector<double> gram = matmul(y, transpose(y, rows, cols), rows, cols, rows);
  for (int64_t i = 0; i < rows; ++i)
    gram[index(i, i, rows)] -= 1.0;
  return rows == 0 ? 0.0 : frobenius_norm(gram) / std::sqrt(static_cast<double>(rows));
}

/*
 * Singular values in descending order, min(rows, cols) of them, by one-sided Jacobi (Hestenes): the
 * rows of the short side are rotated pairwise until they are orthogonal; their norms are the
 * values. Working on X and not on X X^T keeps values down to 1e-16 of the largest.
 */
inline std::vector<double> singular_values(const std::vector<double> &x, int64_t rows,
                                           int64_t cols) {
  require_shape(x, rows, cols);
  if (rows > cols) return singular_values(transpose(x, rows, cols), cols, rows);
  std::vector<double> a = x;
  const double scale = max_abs(x);
  if (scale > 0.0) {
    for (double &value : a)
      value /= scale;
  }
  bool rotated = true;
  for (int sweep = 0; rotated && sweep < 60; ++sweep) {
    rotated = false;
    for (int64_t p = 0; p < rows; ++p) {
      for (int64_t q = p + 1; q < rows; ++q) {
        double *u = &a[index(p, 0, cols)], *v = &a[index(q, 0, cols)];
        double uu = 0.0, vv = 0.0, uv = 0.0;
        for (int64_t j = 0; j < cols; ++j) {
          uu += u[j] * u[j];
          vv += v[j] * v[j];
          uv += u[j] * v[j];
        }
        if (std::fabs(uv) <= 1e-16 * std::sqrt(uu * vv) || uv == 0.0) continue;
        rotated = true;
        const double zeta = (vv - uu) / (2.0 * uv);
        const double t = (zeta >= 0.0 ? 1.0 : -1.0) / (std::fabs(zeta) + std::hypot(1.0, zeta));
        const double c = 1.0 / std::hypot(1.0, t), s = c * t;
        for (int64_t j = 0; j < cols; ++j) {
          const double left = u[j], right = v[j];
          u[j] = c * left - s * right;
          v[j] = s * left + c * right;
        }
      }
    }
  }
  std::vector<double> values(static_cast<std::size_t>(rows));
  for (int64_t p = 0; p < rows; ++p) {
    const auto begin = a.begin() + p * cols;
    values[static_cast<std::size_t>(p)] =
        scale * frobenius_norm(std::vector<double>(begin, begin + cols));
  }
  std::sort(values.begin(), values.end(), std::greater<double>());
  return values;
}

} // namespace ref

#endif
