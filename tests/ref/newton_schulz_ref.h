/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz_ref.h: the quintic Newton-Schulz iteration in float64, plain form, plain loops.
 *
 *   auto y64 = ref::newton_schulz(x, rows, cols, ref::coefficients_jordan());
 *   EXPECT_LT(ref::relative_error(y_f32, y64), 1e-5);
 *   ref::Range r = ref::polynomial_range(ref::coefficients_you5(), 0.01, 1.0);   // .978 - 1.032
 *
 * Run it on the *rounded* input of the function under test (ref::round_to_float) and compare with
 * the same polynomial, never with U V^T. Per step on X (s x l, s <= l):
 *   A = X X^T;  P = b A + c A^2;  X = a X + P X.
 * It does not know the Gram form or symmetry: those are what it is there to check.
 */
#ifndef MFSDP_TESTS_REF_NEWTON_SCHULZ_REF_H
#define MFSDP_TESTS_REF_NEWTON_SCHULZ_REF_H

#include "dense_ref.h"

#include <array>
#include <string>

namespace ref {

typedef std::vector<std::array<double, 3>> Coefficients; /* one (a, b, c) per step */

/*
 * How X is normalized first, with n = |X|_F. `factor` (the safety factor of the Polar Express
 * authors, 1 elsewhere) multiplies n.
 *   kScaleSafe     X / (factor n) for any n > 0; zero stays zero; eps unused
 *   kReferenceMax  X / max(factor n, eps): torch.optim.Muon
 *   kReferenceAdd  X / (factor n + eps): KellerJordan/Muon, Moonlight, Polar Express
 */
enum class EpsRule { kScaleSafe, kReferenceMax, kReferenceAdd };

inline Coefficients coefficients_jordan(int steps = 5) {
  return Coefficients(static_cast<std::size_t>(steps), {{3.4445, -4.7750, 2.0315}});
}

inline Coefficients coefficients_you5() {
  return {{{4.0848, -6.8946, 2.9270}},
          {{3.9505, -6.3029, 2.6377}},
          {{3.7418, -5.5913, 2.3037}},
          {{2.8769, -3.1427, 1.2046}},
          {{2.8366, -3.0525, 1.2012}}};
}

/*
 * Rows 1 to 7 of the table are divided by the safety factor f as (a/f, b/f^3, c/f^5); the eighth,
 * which repeats for ever, only if `divide_last`.
 */
inline Coefficients coefficients_polar_express(int steps, double f = 1.01,
                                               bool divide_last = false) {
  const Coefficients table = {{{8.28721201814563, -23.595886519098837, 17.300387312530933}},
                              {{4.107059111542203, -2.9478499167379106, 0.5448431082926601}},
                              {{3.9486908534822946, -2.908902115962949, 0.5518191394370137}},
                              {{3.3184196573706015, -2.488488024314874, 0.51004894012372}},
                              {{2.300652019954817, -1.6689039845749493, 0.4188073119525673}},
                              {{1.891301407787398, -1.2679958271945868, 0.37680408948524835}},
                              {{1.8750014808534479, -1.2500016453999487, 0.3750001645474248}},
                              {{1.875, -1.25, 0.375}}};
  Coefficients out;
  for (int step = 0; step < steps; ++step) {
    const bool last = step >= 7;
    std::array<double, 3> row = table[static_cast<std::size_t>(last ? 7 : step)];
    if (!last || divide_last) {
      row[0] /= f;
      row[1] /= f * f * f;
      row[2] /= f * f * f * f * f;
    }
    out.push_back(row);
  }
  return out;
}

inline Coefficients coefficients_cans5() {
  return {{{8.4703, -25.1081, 18.6293}},
          {{4.1828, -3.1087, .5806}},
          {{3.9619, -2.9541, .5630}},
          {{3.2866, -2.4647, .5074}},
          {{2.2737, -1.6447, .4162}}};
}

inline Coefficients coefficients_cubic5() {
  return {{{3.3656576, -3.3420992, 0.0}},
          {{2.5744352, -1.4957376, 0.0}},
          {{2.5368962, -1.4312570, 0.0}},
          {{2.4418906, -1.2764040, 0.0}},
          {{2.2230472, -.9630650, 0.0}}};
}

inline Coefficients coefficients_deepseek_v4() {
  Coefficients out = coefficients_jordan(8);
  out.push_back({{2.0, -1.5, .5}});
  out.push_back({{2.0, -1.5, .5}});
  return out;
}

/* By the names the golden vectors use; polar_express5 to polar_express8 have f = 1.01. */
inline Coefficients coefficients_by_name(const std::string &name) {
  if (name == "jordan5") return coefficients_jordan();
  if (name == "you5") return coefficients_you5();
  if (name == "polar_express5") return coefficients_polar_express(5);
  if (name == "polar_express6") return coefficients_polar_express(6);
  if (name == "polar_express8") return coefficients_polar_express(8);
  if (name == "cans5") return coefficients_cans5();
  if (name == "cubic5") return coefficients_cubic5();
  if (name == "deepseek_v4") return coefficients_deepseek_v4();
  throw std::invalid_argument("ref: unknown coefficient set " + name);
}

/* Empty and zero matrices come back unchanged (all zero). */
inline std::vector<double> normalize(const std::vector<double> &x, EpsRule rule, double eps,
                                     double factor = 1.0) {
  const double norm = factor * frobenius_norm(x);
  double divisor = norm;
  if (rule == EpsRule::kReferenceMax) divisor = std::max(norm, eps);
  if (rule == EpsRule::kReferenceAdd) divisor = norm + eps;
  std::vector<double> out = x;
  if (divisor == 0.0) return out;
  for (double &value : out)
    value /= divisor;
  return out;
}

/* The steps alone, on input that is already normalized. */
inline std::vector<double> newton_schulz_steps(const std::vector<double> &x, int64_t rows,
                                               int64_t cols, const Coefficients &coefficients) {
  require_shape(x, rows, cols);
  if (rows > cols) {
    return transpose(newton_schulz_steps(transpose(x, rows, cols), cols, rows, coefficients), cols,
                     rows);
  }
  std::vector<double> y = x;
  for (const std::array<double, 3> &abc : coefficients) {
    const std::vector<double> gram = matmul(y, transpose(y, rows, cols), rows, cols, rows);
    const std::vector<double> square = matmul(gram, gram, rows, rows, rows);
    std::vector<double> p(gram.size());
    for (std::size_t i = 0; i < p.size(); ++i)
      p[i] = abc[1] * gram[i] + abc[2] * square[i];
    const std::vector<double> py = matmul(p, y, rows, rows, cols);
    for (std::size_t i = 0; i < y.size(); ++i)
      y[i] = abc[0] * y[i] + py[i];
  }
  return y;
}

inline std::vector<double> newton_schulz(const std::vector<double> &x, int64_t rows, int64_t cols,
                                         const Coefficients &coefficients,
                                         EpsRule rule = EpsRule::kScaleSafe, double eps = 1e-7,
                                         double factor = 1.0) {
  return newton_schulz_steps(normalize(x, rule, eps, factor), rows, cols, coefficients);
}

/* What the steps do to one singular value: x (a + b x^2 + c x^4), step after step. */
inline double polynomial(double x, const Coefficients &coefficients) {
  for (const std::array<double, 3> &abc : coefficients) {
    const double square = x * x;
    x *= abc[0] + square * (abc[1] + square * abc[2]);
  }
  return x;
}

inline std::vector<double> polynomial(const std::vector<double> &x,
                                      const Coefficients &coefficients) {
  std::vector<double> out;
  for (double value : x)
    out.push_back(polynomial(value, coefficients));
  return out;
}

struct Range {
  double low, high;
};

/* Smallest and largest image of [first, last], ends included, over `samples` points per grid: one
 * linear and one geometric, because the images of small and of large values oscillate alike. */
inline Range polynomial_range(const Coefficients &coefficients, double first, double last,
                              int samples = 200000) {
  Range range = {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  for (int i = 0; i <= samples; ++i) {
    const double t = static_cast<double>(i) / samples;
    const double points[2] = {first + t * (last - first), first * std::pow(last / first, t)};
    for (double point : points) {
      const double y = polynomial(point, coefficients);
      range.low = std::min(range.low, y);
      range.high = std::max(range.high, y);
    }
  }
  return range;
}

} // namespace ref

#endif
