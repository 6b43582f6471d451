/* SPDX-License-Identifier: MIT */
/*
 * math_lapacke.h - eigenvectors and orthonormal bases for the host backend, from any LAPACKE: what
 * Shampoo and SOAP need.
 *
 *   #include "mfsdp/host/math_lapacke.h"
 *   mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
 *   desc.lapack = mfsdp_host_lapacke();
 *
 * Column-major `_work` calls: ssyevd, sgeqrf and sorgqr allocate nothing and look for no NaN. Their bits
 * depend on the BLAS below and on its threads, of which mfsdp_host_backend_desc asks for one
 * (blas_threads.h).
 *
 * Does not: choose the LAPACK. The vendor's header includes <complex.h>, in C with its macros I and
 * complex: define LAPACK_COMPLEX_STRUCTURE first where they are in the way.
 * Link flags: -llapacke (Debian: liblapacke-dev), before the BLAS.
 */
#ifndef MFSDP_HOST_MATH_LAPACKE_H
#define MFSDP_HOST_MATH_LAPACKE_H

#include "blas_threads.h"
#include "host_decompose.h"

#include <lapacke.h>

/* Above it 1 + 6 n + 2 n^2 leaves 32 bits, which a LAPACKE may count in. */
#define MFSDP__LAPACKE_MAX 30000

/* Floats, then integers. */
MFSDP_API int64_t mfsdp__lapacke_syevd_floats(int64_t n) {
  return 1 + 6 * n + 2 * n * n;
}

MFSDP_API int mfsdp__lapacke_syevd_nbytes(int64_t n, size_t *out) {
  if (n > MFSDP__LAPACKE_MAX) return 0;
  *out = ((size_t)mfsdp__lapacke_syevd_floats(n) + 1) / 2 * 2 * sizeof(float) +
         (size_t)(3 + 5 * n) * sizeof(lapack_int);
  return 1;
}

MFSDP_API int64_t mfsdp__lapacke_syevd(int64_t n, float *a, int64_t lda, float *values,
                                       void *workspace, size_t nbytes) {
  const int64_t floats = (mfsdp__lapacke_syevd_floats(n) + 1) / 2 * 2;
  lapack_int *integers = (lapack_int *)(void *)((float *)workspace + floats);
  (void)nbytes;
  return (int64_t)LAPACKE_ssyevd_work(LAPACK_COL_MAJOR, 'V', 'L', (lapack_int)n, a, (lapack_int)lda,
                                      values, (float *)workspace, (lapack_int)floats, integers,
                                      (lapack_int)(3 + 5 * n));
}

/* n reflection factors, then what the blocked algorithms like best. Asked anew each time: it is a
 * handful of comparisons. */
MFSDP_API int mfsdp__lapacke_orthonormalize_nbytes(int64_t n, size_t *out) {
  float most = 0.0f, other = 0.0f, none = 0.0f;
  if (n > MFSDP__LAPACKE_MAX) return 0;
  if (LAPACKE_sgeqrf_work(LAPACK_COL_MAJOR, (lapack_int)n, (lapack_int)n, &none, (lapack_int)n,
                          &none, &most, -1) != 0 ||
      LAPACKE_sorgqr_work(LAPACK_COL_MAJOR, (lapack_int)n, (lapack_int)n, (lapack_int)n, &none,
                          (lapack_int)n, &none, &other, -1) != 0)
    return 0;
  if (other > most) most = other;
  if (!(most >= (float)n)) most = (float)n;
  *out = ((size_t)n + (size_t)most) * sizeof(float);
  return 1;
}

MFSDP_API int64_t mfsdp__lapacke_orthonormalize(int64_t n, float *a, int64_t lda, void *workspace,
                                                size_t nbytes) {
  float *factors = (float *)workspace, *work = factors + n;
  const size_t rest = nbytes / sizeof(float) - (size_t)n; /* at least what they like best */
  const lapack_int length = rest < (size_t)INT32_MAX ? (lapack_int)rest : (lapack_int)INT32_MAX;
  const lapack_int code = LAPACKE_sgeqrf_work(LAPACK_COL_MAJOR, (lapack_int)n, (lapack_int)n, a,
                                              (lapack_int)lda, factors, work, length);
  if (code != 0) return (int64_t)code;
  return (int64_t)LAPACKE_sorgqr_work(LAPACK_COL_MAJOR, (lapack_int)n, (lapack_int)n, (lapack_int)n,
                                      a, (lapack_int)lda, factors, work, length);
}

/* The LAPACKE that the program is linked with; never NULL. */
MFSDP_API const mfsdp_host_lapack *mfsdp_host_lapacke(void) {
  static const mfsdp_host_lapack lapacke = {
      sizeof(mfsdp_host_lapack),   "lapacke",
      mfsdp__lapacke_syevd_nbytes, mfsdp__lapacke_orthonormalize_nbytes,
      mfsdp__lapacke_syevd,        mfsdp__lapacke_orthonormalize,
      mfsdp__blas_set_threads};
  return &lapacke;
}

#endif /* MFSDP_HOST_MATH_LAPACKE_H */
