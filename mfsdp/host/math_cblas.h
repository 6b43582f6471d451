/* SPDX-License-Identifier: MIT */
/*
 * math_cblas.h - the host backend's dense routines on any CBLAS.
 *
 *   #include "mfsdp/host/math_cblas.h"
 *   mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
 *   desc.math = mfsdp_host_math_cblas();
 *
 * Products with a dimension beyond INT_MAX go to the plain loops of host_math.h.
 *
 * Threads: CBLAS has no call for them. set_threads uses that of OpenBLAS, MKL or BLIS if the
 * program is linked with one, through weak references, and otherwise does nothing: then set the
 * library's environment variable. The bits of a product depend on the thread count, and thread
 * ranks want one BLAS thread each, which is what mfsdp_host_backend_desc asks for by default.
 *
 * Does not: choose the BLAS; the include path and the link line do.
 * Link flags: -lopenblas, or -lcblas -lblas, or -lblis, or -lcblas -latlas, or another CBLAS.
 */
#ifndef MFSDP_HOST_MATH_CBLAS_H
#define MFSDP_HOST_MATH_CBLAS_H

#include "blas_threads.h"
#include "host_math.h"

#include <limits.h>

#if defined(__cplusplus)
extern "C" { /* also around the vendor's header: ATLAS's says nothing of C++ */
#endif
#include <cblas.h>
#if defined(__cplusplus)
}
#endif

MFSDP_API int mfsdp__cblas_fits(int64_t value) {
  return value <= INT_MAX;
}

MFSDP_API int mfsdp__cblas_stride(int64_t stride) {
  return stride < 1 ? 1 : (int)stride;
}

MFSDP_API void mfsdp__cblas_sgemm(int trans_a, int trans_b, int64_t m, int64_t n, int64_t k,
                                  float alpha, const float *a, int64_t lda, const float *b,
                                  int64_t ldb, float beta, float *c, int64_t ldc) {
  /* What CBLAS leaves to its implementers (empty sums) or cannot take is the loops' work. */
  if (m <= 0 || n <= 0 || k <= 0 || alpha == 0.0f || !mfsdp__cblas_fits(m) ||
      !mfsdp__cblas_fits(n) || !mfsdp__cblas_fits(k) || !mfsdp__cblas_fits(lda) ||
      !mfsdp__cblas_fits(ldb) || !mfsdp__cblas_fits(ldc)) {
    mfsdp_host_math_loops()->sgemm(trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans,
              trans_b ? CblasTrans : CblasNoTrans, (int)m, (int)n, (int)k, alpha, a,
              mfsdp__cblas_stride(lda), b, mfsdp__cblas_stride(ldb), beta, c,
              mfsdp__cblas_stride(ldc));
}

MFSDP_API void mfsdp__cblas_ssyrk(int upper, int trans, int64_t n, int64_t k, float alpha,
                                  const float *a, int64_t lda, float beta, float *c, int64_t ldc) {
  if (n <= 0 || k <= 0 || alpha == 0.0f || !mfsdp__cblas_fits(n) || !mfsdp__cblas_fits(k) ||
      !mfsdp__cblas_fits(lda) || !mfsdp__cblas_fits(ldc)) {
    mfsdp_host_math_loops()->ssyrk(upper, trans, n, k, alpha, a, lda, beta, c, ldc);
    return;
  }
  cblas_ssyrk(CblasRowMajor, upper ? CblasUpper : CblasLower, trans ? CblasTrans : CblasNoTrans,
              (int)n, (int)k, alpha, a, mfsdp__cblas_stride(lda), beta, c,
              mfsdp__cblas_stride(ldc));
}

/* The CBLAS that the program is linked with; never NULL. */
MFSDP_API const mfsdp_host_math *mfsdp_host_math_cblas(void) {
  static const mfsdp_host_math cblas = {sizeof(mfsdp_host_math), "cblas", mfsdp__cblas_sgemm,
                                        mfsdp__cblas_ssyrk, mfsdp__blas_set_threads};
  return &cblas;
}

#endif /* MFSDP_HOST_MATH_CBLAS_H */
