/* SPDX-License-Identifier: MIT */
/*
 * host_decompose.h - eigh and qr of the host backend, as two routines in a table that a LAPACK fills.
 *
 *   desc.lapack = mfsdp_host_lapacke();   // mfsdp/host/math_lapacke.h; NULL: the backend has neither
 *
 * The routines work in place on what a column-major library sees, so nothing is transposed and nothing
 * but a copy of the input is needed (backend.h, mfsdp_eigh_args). They are called with inputs that are
 * finite.
 *
 * Internal to backend_host.h. Link flags: those of the table.
 */
#ifndef MFSDP_HOST_HOST_DECOMPOSE_H
#define MFSDP_HOST_HOST_DECOMPOSE_H

#include "../dtype.h"
#include "host_queue.h"

/* All arrays fp32; a leading dimension is the distance of rows in elements. No allocation. */
typedef struct mfsdp_host_lapack {
  size_t struct_nbytes;
  const char *name;
  /* R. Bytes of workspace of the next two for n x n; 0 and *out untouched: n is too large. */
  int (*syevd_nbytes)(int64_t n, size_t *out);
  int (*orthonormalize_nbytes)(int64_t n, size_t *out);
  /* R. a[n][n], symmetric, becomes its eigenvectors, one a row, values ascending. Returns 0, or the
   * library's code where it did not converge. */
  int64_t (*syevd)(int64_t n, float *a, int64_t lda, float *values, void *workspace, size_t nbytes);
  /* R. The rows of a[n][n] become orthonormal, first to last, by Householder reflections. */
  int64_t (*orthonormalize)(int64_t n, float *a, int64_t lda, void *workspace, size_t nbytes);
  /* O. Threads that the routines above may use from now on, in the whole process. */
  void (*set_threads)(int count);
} mfsdp_host_lapack;

MFSDP_API int mfsdp__host_wanted(const mfsdp_when *when) {
  return when->word == NULL || (*when->word == 0.0f) == (when->when_zero != 0);
}

/* Copies n rows; 0 where one of them is not finite. */
MFSDP_API int mfsdp__host_copy_finite(const mfsdp_mat *from, const mfsdp_mat *to) {
  int64_t i, j;
  int finite = 1;
  for (i = 0; i < from->rows; ++i) {
    const float *x = (const float *)from->data + i * from->row_stride;
    float *y = (float *)to->data + i * to->row_stride;
    for (j = 0; j < from->cols; ++j) {
      finite &= mfsdp_f32_is_finite(x[j]);
      y[j] = x[j];
    }
  }
  return finite;
}

MFSDP_API void mfsdp__host_fill_nan(float *x, int64_t stride, int64_t rows, int64_t cols) {
  const float nan = mfsdp_f32_from_bits(UINT32_C(0x7fc00000));
  int64_t i, j;
  for (i = 0; i < rows; ++i)
    for (j = 0; j < cols; ++j)
      x[i * stride + j] = nan;
}

MFSDP_API mfsdp_status mfsdp__host_run_eigh(mfsdp_host_backend *host, const void *arguments,
                                            mfsdp_error *error) {
  const mfsdp_eigh_args *args = (const mfsdp_eigh_args *)arguments;
  const int64_t n = args->a.rows;
  int64_t code;
  if (!mfsdp__host_wanted(&args->when)) return MFSDP_OK;
  if (!mfsdp__host_copy_finite(&args->a, &args->vectors)) {
    mfsdp__host_fill_nan((float *)args->vectors.data, args->vectors.row_stride, n, n);
    mfsdp__host_fill_nan(args->values, n, 1, n);
    return MFSDP_OK;
  }
  code = host->lapack->syevd(n, (float *)args->vectors.data, args->vectors.row_stride, args->values,
                             args->workspace, args->workspace_nbytes);
  if (code == 0) return MFSDP_OK;
  return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1,
                         "eigh: %s returned %lld for a matrix of %lld x %lld: no convergence",
                         host->lapack->name, (long long)code, (long long)n, (long long)n);
}

MFSDP_API mfsdp_status mfsdp__host_run_qr(mfsdp_host_backend *host, const void *arguments,
                                          mfsdp_error *error) {
  const mfsdp_qr_args *args = (const mfsdp_qr_args *)arguments;
  const int64_t n = args->a.rows;
  int64_t code;
  if (!mfsdp__host_wanted(&args->when)) return MFSDP_OK;
  if (!mfsdp__host_copy_finite(&args->a, &args->q)) {
    mfsdp__host_fill_nan((float *)args->q.data, args->q.row_stride, n, n);
    return MFSDP_OK;
  }
  code = host->lapack->orthonormalize(n, (float *)args->q.data, args->q.row_stride, args->workspace,
                                      args->workspace_nbytes);
  if (code == 0) return MFSDP_OK;
  return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "qr: %s returned %lld for %lld x %lld",
                         host->lapack->name, (long long)code, (long long)n, (long long)n);
}

/* ---- entries ---- */

MFSDP_API mfsdp_status mfsdp__host_decompose_nbytes(mfsdp_host_backend *host,
                                                    mfsdp_context *context, const char *entry,
                                                    int (*query)(int64_t n, size_t *out), int64_t n,
                                                    size_t *out) {
  (void)host;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: out is NULL", entry);
  *out = 0;
  if (n < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: n is %lld, needs at least 0", entry,
                      (long long)n);
  if (n == 0 || query(n, out)) return MFSDP_OK;
  *out = 0;
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: %lld x %lld is too large for the library",
                    entry, (long long)n, (long long)n);
}

MFSDP_API mfsdp_status mfsdp__host_eigh_nbytes(void *self, mfsdp_context *context, int64_t n,
                                               size_t *out) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  return mfsdp__host_decompose_nbytes(host, context, "eigh", host->lapack->syevd_nbytes, n, out);
}

MFSDP_API mfsdp_status mfsdp__host_qr_nbytes(void *self, mfsdp_context *context, int64_t n,
                                             size_t *out) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  return mfsdp__host_decompose_nbytes(host, context, "qr", host->lapack->orthonormalize_nbytes, n,
                                      out);
}

MFSDP_API mfsdp_status mfsdp__host_check_square(mfsdp_host_backend *host, const char *entry,
                                                const char *what, const mfsdp_mat *mat, int64_t n) {
  if (mat->rows != n || mat->cols != n || n < 0)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "%s: %s is %lld x %lld, needs %lld x %lld",
                      entry, what, (long long)mat->rows, (long long)mat->cols, (long long)n,
                      (long long)n);
  if (n > 0 && (mat->data == NULL || mat->row_stride < n))
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "%s: %s is NULL, or its row_stride %lld is less than %lld", entry, what,
                      (long long)mat->row_stride, (long long)n);
  return MFSDP_OK;
}

/* Both: two squares of one size, and the workspace that they need. */
MFSDP_API mfsdp_status mfsdp__host_check_decompose(mfsdp_host_backend *host, const char *entry,
                                                   const mfsdp_mat *a, const mfsdp_mat *out,
                                                   int (*query)(int64_t n, size_t *out),
                                                   const void *workspace, size_t given) {
  size_t needed = 0;
  MFSDP_TRY(mfsdp__host_check_square(host, entry, "a", a, a->rows));
  MFSDP_TRY(mfsdp__host_check_square(host, entry, "the result", out, a->rows));
  if (a->rows == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__host_decompose_nbytes(host, host->context, entry, query, a->rows, &needed));
  if (workspace == NULL || given < needed || (uintptr_t)workspace % sizeof(double) != 0)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "%s: workspace has %zu bytes, needs %zu, aligned", entry,
                      workspace != NULL ? given : (size_t)0, needed);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_eigh_entry(void *self, mfsdp_queue *queue,
                                              const mfsdp_eigh_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  if (queue == NULL || args == NULL || args->struct_nbytes != sizeof(*args))
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "eigh: queue or args is NULL, or struct_nbytes is not %zu", sizeof(*args));
  MFSDP_TRY(mfsdp__host_check_decompose(host, "eigh", &args->a, &args->vectors,
                                        host->lapack->syevd_nbytes, args->workspace,
                                        args->workspace_nbytes));
  if (args->a.rows == 0) return MFSDP_OK;
  if (args->values == NULL || args->a.data == args->vectors.data)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "eigh: %s",
                      args->values == NULL ? "values is NULL" : "vectors is a");
  return mfsdp__host_submit((mfsdp__host_queue *)(void *)queue, mfsdp__host_run_eigh, args,
                            sizeof(*args));
}

MFSDP_API mfsdp_status mfsdp__host_qr_entry(void *self, mfsdp_queue *queue,
                                            const mfsdp_qr_args *args) {
  mfsdp_host_backend *host = (mfsdp_host_backend *)self;
  if (queue == NULL || args == NULL || args->struct_nbytes != sizeof(*args))
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT,
                      "qr: queue or args is NULL, or struct_nbytes is not %zu", sizeof(*args));
  MFSDP_TRY(mfsdp__host_check_decompose(host, "qr", &args->a, &args->q,
                                        host->lapack->orthonormalize_nbytes, args->workspace,
                                        args->workspace_nbytes));
  if (args->a.rows == 0) return MFSDP_OK;
  if (args->a.data == args->q.data && args->a.row_stride != args->q.row_stride)
    return MFSDP_FAIL(host->context, MFSDP_E_ARGUMENT, "qr: q is a, but with another row_stride");
  return mfsdp__host_submit((mfsdp__host_queue *)(void *)queue, mfsdp__host_run_qr, args,
                            sizeof(*args));
}

MFSDP_STATIC_ASSERT(sizeof(mfsdp_eigh_args) <= MFSDP__HOST_RECORD_NBYTES &&
                        sizeof(mfsdp_qr_args) <= MFSDP__HOST_RECORD_NBYTES,
                    "an argument block does not fit into a record of the host queue");

#endif /* MFSDP_HOST_HOST_DECOMPOSE_H */
