/* SPDX-License-Identifier: MIT */
/*
 * precondition_ref.h: Shampoo and SOAP in float64 from their formulas, with a Jacobi eigensolver and a
 * Gram-Schmidt of their own. Test code only; independent of the library and of LAPACK.
 *
 *   ref::Eigen e = ref::eigen(gram, n);                    // values ascending, vectors in rows
 *   ref::ShampooState s(rows, cols); ref::shampoo_step(options, t, attempted, grad, rows, cols, &s, &w);
 *   ref::SoapState q(rows, cols);    ref::soap_step(options, attempted, grad, rows, cols, &q, &w);
 *
 * A basis holds a vector in each row, so Q of the papers is its transpose.
 */
#ifndef MFSDP_TESTS_REF_PRECONDITION_REF_H
#define MFSDP_TESTS_REF_PRECONDITION_REF_H

#include "dense_ref.h"

#include <numeric>

namespace ref {

using Matrix = std::vector<double>;

inline Matrix identity(int64_t n) {
  Matrix out(static_cast<std::size_t>(n * n), 0.0);
  for (int64_t i = 0; i < n; ++i)
    out[index(i, i, n)] = 1.0;
  return out;
}

struct Eigen {
  std::vector<double> values; /* ascending */
  Matrix vectors;             /* in rows */
};

/* Cyclic Jacobi: rotations until no element beside the diagonal matters. */
inline Eigen eigen(Matrix a, int64_t n) {
  require_shape(a, n, n);
  Matrix v = identity(n);
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0.0, all = 0.0;
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j < n; ++j) {
        all += a[index(i, j, n)] * a[index(i, j, n)];
        if (i != j) off += a[index(i, j, n)] * a[index(i, j, n)];
      }
    if (off <= 1e-32 * all) break;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q) {
        const double apq = a[index(p, q, n)];
        if (apq == 0.0) continue;
        const double theta = (a[index(q, q, n)] - a[index(p, p, n)]) / (2.0 * apq);
        const double t = (theta >= 0 ? 1.0 : -1.0) / (std::fabs(theta) + std::hypot(1.0, theta));
        const double c = 1.0 / std::hypot(1.0, t), s = c * t;
        for (int64_t k = 0; k < n; ++k) {
          const double x = a[index(k, p, n)], y = a[index(k, q, n)];
          a[index(k, p, n)] = c * x - s * y;
          a[index(k, q, n)] = s * x + c * y;
        }
        for (int64_t k = 0; k < n; ++k) {
          const double x = a[index(p, k, n)], y = a[index(q, k, n)];
          a[index(p, k, n)] = c * x - s * y;
          a[index(q, k, n)] = s * x + c * y;
          const double u = v[index(p, k, n)], w = v[index(q, k, n)];
          v[index(p, k, n)] = c * u - s * w;
          v[index(q, k, n)] = s * u + c * w;
        }
      }
  }
  std::vector<int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t x, int64_t y) { return a[index(x, x, n)] < a[index(y, y, n)]; });
  Eigen out;
  out.vectors.resize(v.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t from = order[static_cast<std::size_t>(i)];
    out.values.push_back(a[index(from, from, n)]);
    for (int64_t k = 0; k < n; ++k)
      out.vectors[index(i, k, n)] = v[index(from, k, n)];
  }
  return out;
}

/* Rows orthonormalized in order, twice over for the sake of rounding. Needs full rank. */
inline Matrix orthonormal_rows(Matrix a, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    for (int again = 0; again < 2; ++again)
      for (int64_t k = 0; k < i; ++k) {
        double dot = 0.0;
        for (int64_t j = 0; j < n; ++j)
          dot += a[index(i, j, n)] * a[index(k, j, n)];
        for (int64_t j = 0; j < n; ++j)
          a[index(i, j, n)] -= dot * a[index(k, j, n)];
      }
    double norm = 0.0;
    for (int64_t j = 0; j < n; ++j)
      norm += a[index(i, j, n)] * a[index(i, j, n)];
    for (int64_t j = 0; j < n; ++j)
      a[index(i, j, n)] /= std::sqrt(norm);
  }
  return a;
}

/* left^T x right where wanted; empty: the identity. */
inline Matrix sandwich(const Matrix &left, bool trans_left, Matrix x, const Matrix &right,
                       bool trans_right, int64_t rows, int64_t cols) {
  if (!left.empty())
    x = matmul(trans_left ? transpose(left, rows, rows) : left, x, rows, rows, cols);
  if (!right.empty())
    x = matmul(x, trans_right ? transpose(right, cols, cols) : right, rows, cols, cols);
  return x;
}

/* beta gram + weight G G^T, or G^T G. */
inline void update_gram(Matrix *gram, double beta, double weight, const Matrix &g, int64_t rows,
                        int64_t cols, bool left) {
  const Matrix other = transpose(g, rows, cols);
  const Matrix outer =
      left ? matmul(g, other, rows, cols, rows) : matmul(other, g, cols, rows, cols);
  for (std::size_t i = 0; i < gram->size(); ++i)
    (*gram)[i] = beta * (*gram)[i] + weight * outer[i];
}

inline double norm_of(const Matrix &x) {
  return frobenius_norm(x);
}

/* ---- shampoo ---- */

enum class Graft { kAdamw, kSgd, kNone };

struct ShampooOptions {
  double lr = 1e-3, weight_decay = 0.01, beta1 = 0.9, beta2 = 0.999, eps = 1e-12, graft_eps = 1e-8;
  int64_t every = 10, limit = 10000;
  Graft graft = Graft::kAdamw;
};

struct ShampooState {
  ShampooState(int64_t rows, int64_t cols, int64_t limit = 10000)
      : exp_avg(static_cast<std::size_t>(rows * cols)), exp_avg_sq(exp_avg.size()) {
    if (rows <= limit)
      left.resize(static_cast<std::size_t>(rows * rows)), root_left = identity(rows);
    if (cols <= limit)
      right.resize(static_cast<std::size_t>(cols * cols)), root_right = identity(cols);
  }
  Matrix exp_avg, exp_avg_sq, left, right, root_left, root_right;
};

/* (c a + eps I)^(-1/4), negative eigenvalues shifted to 0 first. */
inline Matrix inverse_fourth_root(Matrix a, int64_t n, double c, double eps) {
  for (double &x : a)
    x *= c;
  const Eigen e = eigen(a, n);
  const double shift = eps - std::min(0.0, e.values[0]);
  Matrix scaled = e.vectors;
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      scaled[index(i, j, n)] *= std::pow(e.values[static_cast<std::size_t>(i)] + shift, -0.25);
  return matmul(transpose(e.vectors, n, n), scaled, n, n, n);
}

inline void shampoo_step(const ShampooOptions &o, int64_t t, int64_t attempted, const Matrix &g,
                         int64_t rows, int64_t cols, ShampooState *s, Matrix *w) {
  const double weight = o.beta2 < 1.0 ? 1.0 - o.beta2 : 1.0, power = static_cast<double>(t);
  const double c = o.beta2 < 1.0 ? 1.0 / (1.0 - std::pow(o.beta2, power)) : 1.0;
  const double first = 1.0 / (1.0 - std::pow(o.beta1, power));
  Matrix grafted = g;
  for (std::size_t i = 0; i < g.size(); ++i) {
    s->exp_avg[i] = o.beta1 * s->exp_avg[i] + (1.0 - o.beta1) * g[i];
    s->exp_avg_sq[i] = o.beta2 * s->exp_avg_sq[i] + (1.0 - o.beta2) * g[i] * g[i];
    grafted[i] = first * s->exp_avg[i];
    if (o.graft == Graft::kAdamw) grafted[i] /= std::sqrt(c * s->exp_avg_sq[i]) + o.graft_eps;
  }
  if (!s->left.empty()) update_gram(&s->left, o.beta2, weight, g, rows, cols, true);
  if (!s->right.empty()) update_gram(&s->right, o.beta2, weight, g, rows, cols, false);
  if (attempted % o.every == 0) {
    if (!s->left.empty()) s->root_left = inverse_fourth_root(s->left, rows, c, o.eps);
    if (!s->right.empty()) s->root_right = inverse_fourth_root(s->right, cols, c, o.eps);
  }
  const Matrix d = sandwich(s->root_left, false, s->exp_avg, s->root_right, false, rows, cols);
  const double size = norm_of(d);
  const double scale = o.graft == Graft::kNone ? first : size > 0 ? norm_of(grafted) / size : 0.0;
  for (std::size_t i = 0; i < w->size(); ++i)
    (*w)[i] = (1.0 - o.lr * o.weight_decay) * (*w)[i] - o.lr * scale * d[i];
}

/* ---- soap ---- */

struct SoapOptions {
  double lr = 3e-3, weight_decay = 0.01, beta1 = 0.95, beta2 = 0.95, shampoo_beta = 0.95,
         eps = 1e-8;
  int64_t every = 10, limit = 10000;
};

struct SoapState {
  SoapState(int64_t rows, int64_t cols, int64_t limit = 10000)
      : exp_avg(static_cast<std::size_t>(rows * cols)), exp_avg_sq(exp_avg.size()) {
    if (rows <= limit) left.resize(static_cast<std::size_t>(rows * rows));
    if (cols <= limit) right.resize(static_cast<std::size_t>(cols * cols));
  }
  Matrix exp_avg, exp_avg_sq, left, right, basis_left, basis_right;
  int64_t updates = 0; /* gradients taken; the first made the bases */
};

/* Descending eigenvectors. */
inline Matrix first_basis(const Matrix &gram, int64_t n) {
  const Matrix v = eigen(gram, n).vectors;
  Matrix out(v.size());
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < n; ++j)
      out[index(i, j, n)] = v[index(n - 1 - i, j, n)];
  return out;
}

/* The order of a basis by diag(B gram B^T), descending. */
inline std::vector<int64_t> basis_order(const Matrix &basis, const Matrix &gram, int64_t n) {
  const Matrix projected = matmul(matmul(basis, gram, n, n, n), transpose(basis, n, n), n, n, n);
  std::vector<int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t x, int64_t y) {
    return projected[index(x, x, n)] > projected[index(y, y, n)];
  });
  return order;
}

inline Matrix permuted(const Matrix &x, const std::vector<int64_t> &order, int64_t rows,
                       int64_t cols, bool by_rows) {
  Matrix out(x.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j)
      out[index(i, j, cols)] = by_rows ? x[index(order[static_cast<std::size_t>(i)], j, cols)]
                                       : x[index(i, order[static_cast<std::size_t>(j)], cols)];
  return out;
}

/* B of qr(gram Q), sorted first: orthonormal rows of the sorted B times gram. */
inline Matrix renewed_basis(const Matrix &basis, const Matrix &gram,
                            const std::vector<int64_t> &order, int64_t n) {
  return orthonormal_rows(matmul(permuted(basis, order, n, n, true), gram, n, n, n), n);
}

/* New bases, where they are not the reference's own to choose: see soap_step. */
struct SoapBases {
  Matrix left, right;
};

/*
 * One step. `given`: what the bases are after this step, if it makes any; where eigenvalues are equal
 * (a Gram matrix that is not of full rank) the formulas leave them open, and the update depends on them.
 */
inline void soap_step(const SoapOptions &o, int64_t attempted, const Matrix &g, int64_t rows,
                      int64_t cols, SoapState *s, Matrix *w, const SoapBases *given = nullptr) {
  const bool first = s->updates == 0;
  const bool refresh = attempted > 1 && (attempted - 1) % o.every == 0;
  const double t = static_cast<double>(s->updates);
  if (!first) {
    const Matrix p = sandwich(s->basis_left, false, g, s->basis_right, true, rows, cols);
    Matrix u = p;
    for (std::size_t i = 0; i < p.size(); ++i) {
      s->exp_avg[i] = o.beta1 * s->exp_avg[i] + (1.0 - o.beta1) * p[i];
      s->exp_avg_sq[i] = o.beta2 * s->exp_avg_sq[i] + (1.0 - o.beta2) * p[i] * p[i];
      u[i] = s->exp_avg[i] / (std::sqrt(s->exp_avg_sq[i]) + o.eps);
    }
    const Matrix n = sandwich(s->basis_left, true, u, s->basis_right, false, rows, cols);
    const double step = o.lr * std::sqrt(1.0 - std::pow(o.beta2, t)) / (1.0 - std::pow(o.beta1, t));
    for (std::size_t i = 0; i < w->size(); ++i) {
      (*w)[i] -= step * n[i];
      (*w)[i] -= o.lr * o.weight_decay * (*w)[i];
    }
  }
  if (!s->left.empty())
    update_gram(&s->left, o.shampoo_beta, 1 - o.shampoo_beta, g, rows, cols, true);
  if (!s->right.empty())
    update_gram(&s->right, o.shampoo_beta, 1 - o.shampoo_beta, g, rows, cols, false);
  if (first && !(refresh || attempted <= o.every)) return;
  ++s->updates;
  if (!first && !refresh) return;
  const Matrix m = sandwich(s->basis_left, true, s->exp_avg, s->basis_right, false, rows, cols);
  if (!s->left.empty()) {
    if (!first) {
      const std::vector<int64_t> order = basis_order(s->basis_left, s->left, rows);
      s->exp_avg_sq = permuted(s->exp_avg_sq, order, rows, cols, true);
      s->basis_left = given ? given->left : renewed_basis(s->basis_left, s->left, order, rows);
    } else {
      s->basis_left = given ? given->left : first_basis(s->left, rows);
    }
  }
  if (!s->right.empty()) {
    if (!first) {
      const std::vector<int64_t> order = basis_order(s->basis_right, s->right, cols);
      s->exp_avg_sq = permuted(s->exp_avg_sq, order, rows, cols, false);
      s->basis_right = given ? given->right : renewed_basis(s->basis_right, s->right, order, cols);
    } else {
      s->basis_right = given ? given->right : first_basis(s->right, cols);
    }
  }
  if (!first) s->exp_avg = sandwich(s->basis_left, false, m, s->basis_right, true, rows, cols);
}

} // namespace ref

#endif
