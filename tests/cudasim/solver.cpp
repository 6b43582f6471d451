/* SPDX-License-Identifier: MIT */
/* cuSOLVER of the double: eigenvectors by Jacobi's rotations, QR by Householder's reflections; floats in
 * and out, doubles between. */
#include "cudasim.h"
#include "detail.h"

#include "mfsdp/dtype.h"

#include <cusolverDn.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

/* Work on memory of its own, which nobody need watch; fast, since it does most of the work of a test. */
#if defined(__clang__)
#define CUDASIM_UNWATCHED __attribute__((noinline, no_sanitize("address", "thread", "undefined")))
#else
#define CUDASIM_UNWATCHED \
  __attribute__((noinline, optimize("O3"), no_sanitize("address", "thread", "undefined")))
#endif

namespace cudasim {
namespace {

struct Handle {
  cudaStream_t stream = nullptr;
};

std::atomic<int64_t> handle_count{0};
int64_t calls_until_info = -1; /* of the thread that tests */

Handle *handle_of(cusolverDnHandle_t handle) {
  return reinterpret_cast<Handle *>(handle);
}

/* The info that the next routine reports: `code` if a test asked for it, 0 else. */
int next_info(int code) {
  if (calls_until_info < 0 || calls_until_info-- != 0) return 0;
  return code;
}

/* ---- eigenvectors ---- */

/* Zeroes a[p][q]; rows of v become eigenvectors. */
CUDASIM_UNWATCHED void rotate(double *a, double *v, int64_t n, int64_t p, int64_t q) {
  const double theta = (a[q * n + q] - a[p * n + p]) / (2.0 * a[p * n + q]);
  const double t = (theta < 0.0 ? -1.0 : 1.0) / (std::fabs(theta) + std::hypot(theta, 1.0));
  const double c = 1.0 / std::sqrt(t * t + 1.0), s = t * c;
  for (int64_t i = 0; i < n; ++i) {
    const double x = a[i * n + p], y = a[i * n + q];
    a[i * n + p] = c * x - s * y;
    a[i * n + q] = s * x + c * y;
  }
  for (double *m : {a, v}) {
    double *row_p = m + p * n, *row_q = m + q * n;
    for (int64_t i = 0; i < n; ++i) {
      const double x = row_p[i], y = row_q[i];
      row_p[i] = c * x - s * y;
      row_q[i] = s * x + c * y;
    }
  }
  a[p * n + q] = a[q * n + p] = 0.0;
}

/* Of a symmetric matrix; false: they did not converge. */
CUDASIM_UNWATCHED bool diagonalize(double *a, double *v, int64_t n) {
  double whole = 0.0;
  for (int64_t i = 0; i < n * n; ++i) {
    whole += a[i] * a[i];
    v[i] = i / n == i % n ? 1.0 : 0.0;
  }
  for (int sweep = 0; sweep < 60; ++sweep) {
    double off = 0.0;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = 0; q < p; ++q)
        off += a[p * n + q] * a[p * n + q];
    if (off <= 1e-29 * whole) return true;
    for (int64_t p = 0; p < n; ++p)
      for (int64_t q = p + 1; q < n; ++q)
        if (a[p * n + q] * a[p * n + q] > 1e-40 * whole) rotate(a, v, n, p, q);
  }
  return false;
}

/* No word of the documentation says that numbers are scaled before they are squared, in floats. */
bool bearable(const char *what, const std::vector<double> &x) {
  double most = 0.0;
  for (const double value : x) {
    if (!std::isfinite(value)) {
      complain(std::string(what) + ": numbers that are not finite");
      return false;
    }
    most = std::max(most, std::fabs(value));
  }
  if (most > 1e12 || (most > 0.0 && most < 1e-12))
    complain(std::string(what) + ": numbers whose squares may leave a float");
  return true;
}

/* Reads the lower triangle alone. */
void syevd(int64_t n, float *a, int64_t lda, float *values, int *info) {
  const std::size_t count = static_cast<std::size_t>(n * n);
  std::vector<double> square(count), vectors(count);
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = j; i < n; ++i)
      square[static_cast<std::size_t>(j * n + i)] = square[static_cast<std::size_t>(i * n + j)] =
          static_cast<double>(a[j * lda + i]);
  if (!bearable("cusolverDnSsyevd", square) || !diagonalize(square.data(), vectors.data(), n)) {
    *info = static_cast<int>(n);
    return;
  }
  std::vector<int64_t> order(static_cast<std::size_t>(n));
  std::iota(order.begin(), order.end(), int64_t(0));
  const auto value = [&](int64_t i) { return square[static_cast<std::size_t>(i * n + i)]; };
  std::sort(order.begin(), order.end(), [&](int64_t x, int64_t y) { return value(x) < value(y); });
  for (int64_t j = 0; j < n; ++j) {
    const int64_t from = order[static_cast<std::size_t>(j)];
    values[j] = static_cast<float>(value(from));
    for (int64_t i = 0; i < n; ++i)
      a[j * lda + i] = static_cast<float>(vectors[static_cast<std::size_t>(from * n + i)]);
  }
  *info = 0;
}

/* ---- reflections ---- */

/* A rows x cols matrix as columns of doubles. */
struct Columns {
  Columns(int64_t row_count, int64_t col_count, const float *from, int64_t ld)
      : rows(row_count), cols(col_count), data(static_cast<std::size_t>(rows * cols)) {
    for (int64_t j = 0; j < cols; ++j)
      for (int64_t i = 0; i < rows; ++i)
        at(j)[i] = static_cast<double>(from[j * ld + i]);
  }
  double *at(int64_t j) { return data.data() + j * rows; }
  void store(float *to, int64_t ld) {
    for (int64_t j = 0; j < cols; ++j)
      for (int64_t i = 0; i < rows; ++i)
        to[j * ld + i] = static_cast<float>(at(j)[i]);
  }
  int64_t rows, cols;
  std::vector<double> data;
};

/* x = x - tau v (v . x), where v[0] counts as 1. */
CUDASIM_UNWATCHED void reflect(double *x, const double *v, double tau, int64_t count) {
  double dot = x[0];
  for (int64_t i = 1; i < count; ++i)
    dot += v[i] * x[i];
  x[0] -= tau * dot;
  for (int64_t i = 1; i < count; ++i)
    x[i] -= tau * dot * v[i];
}

/* v (rounded to floats, as it is stored) takes the place of x below x[0]; returns tau, a float too. */
double reflection_of(double *x, int64_t count) {
  double rest = 0.0, square = 1.0;
  for (int64_t i = 1; i < count; ++i)
    rest = std::hypot(rest, x[i]);
  if (rest == 0.0) return 0.0;
  const double norm = std::hypot(x[0], rest), pivot = x[0] < 0.0 ? x[0] - norm : x[0] + norm;
  for (int64_t i = 1; i < count; ++i) {
    x[i] = static_cast<double>(static_cast<float>(x[i] / pivot));
    square += x[i] * x[i];
  }
  x[0] = x[0] < 0.0 ? norm : -norm;
  return static_cast<double>(static_cast<float>(2.0 / square));
}

void geqrf(int64_t m, int64_t n, float *a, int64_t lda, float *factors, int *info) {
  Columns x(m, n, a, lda);
  *info = 0;
  if (!bearable("cusolverDnSgeqrf", x.data)) return;
  for (int64_t k = 0; k < std::min(m, n); ++k) {
    const double tau = reflection_of(x.at(k) + k, m - k);
    for (int64_t j = k + 1; j < n; ++j)
      reflect(x.at(j) + k, x.at(k) + k, tau, m - k);
    factors[k] = static_cast<float>(tau);
  }
  x.store(a, lda);
}

/* The first n columns of the product of k reflections. */
void orgqr(int64_t m, int64_t n, int64_t k, float *a, int64_t lda, const float *factors,
           int *info) {
  Columns v(m, k, a, lda), q(m, n, a, lda);
  *info = 0;
  for (int64_t j = 0; j < n; ++j)
    for (int64_t i = 0; i < m; ++i)
      q.at(j)[i] = i == j ? 1.0 : 0.0;
  for (int64_t l = k - 1; l >= 0; --l)
    for (int64_t j = 0; j < n; ++j)
      reflect(q.at(j) + l, v.at(l) + l, static_cast<double>(factors[l]), m - l);
  q.store(a, lda);
}

/* ---- what all routines check ---- */

std::size_t floats_nbytes(int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(float);
}

int syevd_floats(int n) {
  return n > 30000 ? 0 : 2 * n * n + 6 * n + 32;
}
int geqrf_floats(int m, int n) {
  return 3 * m + 5 * n + 16;
}
int orgqr_floats(int m, int n) { /* more than geqrf wants */
  return 4 * m + 7 * n + 16;
}

struct Call {
  const char *name;
  int64_t rows, cols;
  const float *a;
  int64_t lda;
  float *work;
  int lwork, needed;
  int *info;
};

/* CUSOLVER_STATUS_SUCCESS if a routine may run. */
cusolverStatus_t check(cusolverDnHandle_t handle, const Call &call) {
  if (handle == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
  if (delivers_fault()) return CUSOLVER_STATUS_EXECUTION_FAILED;
  if (call.rows < 0 || call.cols < 0 || call.lda < std::max<int64_t>(call.rows, 1) ||
      call.lwork < call.needed)
    return CUSOLVER_STATUS_INVALID_VALUE;
  if (captures(handle_of(handle)->stream)) {
    complain(std::string(call.name) + ": its stream is captured into a graph");
    return CUSOLVER_STATUS_INTERNAL_ERROR;
  }
  bool good = in_device(call.name, call.info, sizeof(int));
  good = in_device(call.name, call.work, floats_nbytes(call.lwork)) && good;
  if (call.rows > 0 && call.cols > 0)
    good =
        in_device(call.name, call.a, floats_nbytes((call.cols - 1) * call.lda + call.rows)) && good;
  return good ? CUSOLVER_STATUS_SUCCESS : CUSOLVER_STATUS_EXECUTION_FAILED;
}

/* In stream order: the workspace is written, so that two routines that share one are a data race. */
template <class Work>
cusolverStatus_t submit(cusolverDnHandle_t handle, const Call &call, int info, const Work &work) {
  const cudaError_t error = enqueue(handle_of(handle)->stream, [=] {
    std::memset(call.work, 0xff, floats_nbytes(call.lwork));
    if (info == 0)
      work();
    else
      *call.info = info; /* and the matrix is whatever it is */
  });
  return error == cudaSuccess ? CUSOLVER_STATUS_SUCCESS : CUSOLVER_STATUS_EXECUTION_FAILED;
}

cusolverStatus_t size(cusolverDnHandle_t handle, bool fits, int floats, int *out) {
  if (handle == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
  if (delivers_fault()) return CUSOLVER_STATUS_INTERNAL_ERROR;
  if (!fits) return CUSOLVER_STATUS_INVALID_VALUE;
  *out = floats;
  return CUSOLVER_STATUS_SUCCESS;
}

} // namespace

void fail_solver_at(int64_t n) {
  calls_until_info = n;
}

int64_t solver_handles() {
  return handle_count.load();
}

} // namespace cudasim

using namespace cudasim;

extern "C" {

cusolverStatus_t cusolverDnCreate(cusolverDnHandle_t *handle) {
  if (delivers_fault()) return CUSOLVER_STATUS_ALLOC_FAILED;
  *handle = reinterpret_cast<cusolverDnHandle_t>(new Handle);
  ++handle_count;
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnDestroy(cusolverDnHandle_t handle) {
  if (handle == nullptr) return CUSOLVER_STATUS_NOT_INITIALIZED;
  delete handle_of(handle);
  --handle_count;
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnSetStream(cusolverDnHandle_t handle, cudaStream_t stream) {
  if (delivers_fault()) return CUSOLVER_STATUS_NOT_INITIALIZED;
  handle_of(handle)->stream = stream;
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnSetDeterministicMode(cusolverDnHandle_t handle,
                                                cusolverDeterministicMode_t mode) {
  (void)handle;
  if (delivers_fault()) return CUSOLVER_STATUS_INTERNAL_ERROR;
  if (mode != CUSOLVER_DETERMINISTIC_RESULTS) complain("cuSOLVER: results that may not repeat");
  return CUSOLVER_STATUS_SUCCESS;
}

cusolverStatus_t cusolverDnSsyevd_bufferSize(cusolverDnHandle_t handle, cusolverEigMode_t jobz,
                                             cublasFillMode_t uplo, int n, const float *a, int lda,
                                             const float *values, int *lwork) {
  (void)a, (void)values;
  return size(handle,
              jobz == CUSOLVER_EIG_MODE_VECTOR && uplo == CUBLAS_FILL_MODE_LOWER && n >= 0 &&
                  n <= 30000 && lda >= std::max(n, 1),
              syevd_floats(n), lwork);
}

cusolverStatus_t cusolverDnSsyevd(cusolverDnHandle_t handle, cusolverEigMode_t jobz,
                                  cublasFillMode_t uplo, int n, float *a, int lda, float *values,
                                  float *work, int lwork, int *info) {
  const Call call = {"cusolverDnSsyevd", n, n, a, lda, work, lwork, syevd_floats(n), info};
  const cusolverStatus_t status = check(handle, call);
  if (status != CUSOLVER_STATUS_SUCCESS) return status;
  if (jobz != CUSOLVER_EIG_MODE_VECTOR || uplo != CUBLAS_FILL_MODE_LOWER)
    return CUSOLVER_STATUS_NOT_SUPPORTED; /* nobody needs them here */
  if (!in_device(call.name, values, floats_nbytes(n))) return CUSOLVER_STATUS_EXECUTION_FAILED;
  return submit(handle, call, next_info(3), [=] { syevd(n, a, lda, values, info); });
}

cusolverStatus_t cusolverDnSgeqrf_bufferSize(cusolverDnHandle_t handle, int m, int n, float *a,
                                             int lda, int *lwork) {
  (void)a;
  return size(handle, m >= 0 && n >= 0 && lda >= std::max(m, 1), geqrf_floats(m, n), lwork);
}

cusolverStatus_t cusolverDnSgeqrf(cusolverDnHandle_t handle, int m, int n, float *a, int lda,
                                  float *tau, float *work, int lwork, int *info) {
  const Call call = {"cusolverDnSgeqrf", m, n, a, lda, work, lwork, geqrf_floats(m, n), info};
  const cusolverStatus_t status = check(handle, call);
  if (status != CUSOLVER_STATUS_SUCCESS) return status;
  if (!in_device(call.name, tau, floats_nbytes(std::min(m, n))))
    return CUSOLVER_STATUS_EXECUTION_FAILED;
  return submit(handle, call, next_info(-4), [=] { geqrf(m, n, a, lda, tau, info); });
}

cusolverStatus_t cusolverDnSorgqr_bufferSize(cusolverDnHandle_t handle, int m, int n, int k,
                                             const float *a, int lda, const float *tau,
                                             int *lwork) {
  (void)a, (void)tau;
  return size(handle, k >= 0 && n >= k && m >= n && lda >= std::max(m, 1), orgqr_floats(m, n),
              lwork);
}

cusolverStatus_t cusolverDnSorgqr(cusolverDnHandle_t handle, int m, int n, int k, float *a, int lda,
                                  const float *tau, float *work, int lwork, int *info) {
  const Call call = {"cusolverDnSorgqr", m, n, a, lda, work, lwork, orgqr_floats(m, n), info};
  const cusolverStatus_t status = check(handle, call);
  if (status != CUSOLVER_STATUS_SUCCESS) return status;
  if (k < 0 || n < k || m < n) return CUSOLVER_STATUS_INVALID_VALUE;
  if (!in_device(call.name, tau, floats_nbytes(k))) return CUSOLVER_STATUS_EXECUTION_FAILED;
  return submit(handle, call, next_info(-5), [=] { orgqr(m, n, k, a, lda, tau, info); });
}

} // extern "C"
