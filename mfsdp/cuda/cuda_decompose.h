/* SPDX-License-Identifier: MIT */
/*
 * cuda_decompose.h - what Shampoo and SOAP need of the CUDA backend: eigenvectors and orthonormal bases by
 * cuSOLVER, and passes over one matrix by kernels.
 *
 * Ssyevd, Sgeqrf and Sorgqr, of cuSOLVER's older interface and not of its generic one: all their
 * workspace is device memory, while Xsyevd and Xgeqrf want host memory as well, which would have to
 * outlive the work of a queue; and the generic one has no orgqr. They count in an int, which is enough
 * for sides up to 30,000.
 *
 * cuSOLVER counts by columns, and so works in place on what backend.h says by rows. It cannot be told on
 * the device to leave work out: kernels before it put zeros in place of what is not wanted or not finite
 * and scale the rest by a power of two, since it does not promise to; kernels behind it write the NaN and
 * read the info, so that the host need not. Its handles have memory of their own, so each queue that
 * decomposes gets one, with its first decomposition; the caller's, if there is one, goes to the first.
 *
 * So what is not wanted (SOAP asks for eigenvectors and for a basis whenever it renews, and one of them is
 * left out by `when`) costs a call on zeros. That is so on purpose: a conditional node of a CUDA graph
 * could leave the call out, but cuSOLVER does not promise to be captured; the host could, but only if
 * it waited for the queue to read the word; and that a word once set stays set is SOAP's to know and not a
 * backend's. Eigenvalues that nobody reads cost nothing: the vectors come from them.
 *
 * Does not: run in a CUDA graph (E_UNSUPPORTED: cuSOLVER does not promise it); keep cuSOLVER from waiting
 * for its own work inside a call, of which its documentation says nothing.
 *
 * Internal to backend_cuda.h. Link flags: -lcusolver.
 */
#ifndef MFSDP_CUDA_CUDA_DECOMPOSE_H
#define MFSDP_CUDA_CUDA_DECOMPOSE_H

#include "cuda_queue.h"

/* Above it the floats of workspace, 2 n^2 and more, leave an int. */
#define MFSDP__CUDA_SOLVER_MAX 30000

/* ---- handles ---- */

/* Results repeat. It is asked of the caller's handle again and again: the caller may have turned it. */
MFSDP_API mfsdp_status mfsdp__cuda_solver_mode(mfsdp_context *context, cusolverDnHandle_t solver) {
  return mfsdp__cusolver_check(
      context, cusolverDnSetDeterministicMode(solver, CUSOLVER_DETERMINISTIC_RESULTS),
      "cusolverDnSetDeterministicMode");
}

/* COMPLETE; may synchronize with the device, as all that allocates there. */
MFSDP_API mfsdp_status mfsdp__cuda_solver_make(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                               cusolverDnHandle_t *solver) {
  mfsdp_status status;
  if (*solver != NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_check_device(cuda, context, "cusolverDnCreate"));
  MFSDP_TRY(mfsdp__cusolver_check(context, cusolverDnCreate(solver), "cusolverDnCreate"));
  status = mfsdp__cuda_solver_mode(context, *solver);
  if (status == MFSDP_OK) return MFSDP_OK;
  (void)cusolverDnDestroy(*solver);
  *solver = NULL;
  return status;
}

/* A handle of this queue alone, turned to its stream. The caller's goes to the first queue that asks. */
MFSDP_API mfsdp_status mfsdp__cuda_queue_solver(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                                const char *entry) {
  enum cudaStreamCaptureStatus capture;
  mfsdp_status status;
  MFSDP_TRY(mfsdp__cuda_check(cuda->context, cudaStreamIsCapturing(queue->stream, &capture),
                              "cudaStreamIsCapturing"));
  if (capture != cudaStreamCaptureStatusNone)
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_UNSUPPORTED,
        "%s: queue %s is captured into a graph, which cuSOLVER does not promise to bear", entry,
        queue->label);
  if (queue->solver == NULL && !cuda->owns_solver && !cuda->solver_taken) {
    queue->solver = cuda->solver;
    queue->borrows_solver = cuda->solver_taken = 1;
  }
  if (queue->borrows_solver) /* its mode was set when it was asked for sizes */
    return mfsdp__cusolver_check(cuda->context, cusolverDnSetStream(queue->solver, queue->stream),
                                 "cusolverDnSetStream");
  if (queue->solver != NULL) return MFSDP_OK;
  MFSDP_TRY(mfsdp__cuda_solver_make(cuda, cuda->context, &queue->solver));
  status = mfsdp__cusolver_check(cuda->context, cusolverDnSetStream(queue->solver, queue->stream),
                                 "cusolverDnSetStream");
  if (status == MFSDP_OK) return MFSDP_OK;
  (void)cusolverDnDestroy(queue->solver);
  queue->solver = NULL;
  return status;
}

/* ---- workspaces ---- */

/* The words of mfsdp_cuda_solve, the factors of qr's reflections, work; each part aligned. */
typedef struct mfsdp__cuda_solver_space {
  int work_count; /* floats, of the routine that wants most */
  size_t work;    /* where it starts, in bytes; factors: at MFSDP_ALIGN_NBYTES */
  size_t nbytes;
} mfsdp__cuda_solver_space;

MFSDP_API void mfsdp__cuda_solver_parts(int64_t factor_count, int work_count,
                                        mfsdp__cuda_solver_space *out) {
  const size_t factors = (size_t)factor_count * sizeof(float) + MFSDP_ALIGN_NBYTES - 1;
  out->work_count = work_count > 0 ? work_count : 1;
  out->work = MFSDP_ALIGN_NBYTES + factors - factors % MFSDP_ALIGN_NBYTES;
  out->nbytes = out->work + (size_t)out->work_count * sizeof(float);
}

/* COMPLETE. What is asked is n alone: rows that lie next to each other. */
typedef mfsdp_status (*mfsdp__cuda_solver_query)(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                                 int n, mfsdp__cuda_solver_space *out);

MFSDP_API mfsdp_status mfsdp__cuda_eigh_query(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                              int n, mfsdp__cuda_solver_space *out) {
  int count = 0;
  MFSDP_TRY(mfsdp__cusolver_check(
      context,
      cusolverDnSsyevd_bufferSize(cuda->solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n,
                                  NULL, n, NULL, &count),
      "cusolverDnSsyevd_bufferSize"));
  mfsdp__cuda_solver_parts(0, count, out);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_qr_query(mfsdp_cuda_backend *cuda, mfsdp_context *context, int n,
                                            mfsdp__cuda_solver_space *out) {
  int factorize = 0, generate = 0;
  MFSDP_TRY(mfsdp__cusolver_check(
      context, cusolverDnSgeqrf_bufferSize(cuda->solver, n, n, NULL, n, &factorize),
      "cusolverDnSgeqrf_bufferSize"));
  MFSDP_TRY(mfsdp__cusolver_check(
      context, cusolverDnSorgqr_bufferSize(cuda->solver, n, n, n, NULL, n, NULL, &generate),
      "cusolverDnSorgqr_bufferSize"));
  mfsdp__cuda_solver_parts(n, factorize > generate ? factorize : generate, out);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_solver_space_of(mfsdp_cuda_backend *cuda, mfsdp_context *context,
                                                   const char *entry,
                                                   mfsdp__cuda_solver_query query, int64_t n,
                                                   mfsdp__cuda_solver_space *out) {
  memset(out, 0, sizeof(*out));
  if (n < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: n is %lld, needs at least 0", entry,
                      (long long)n);
  if (n > MFSDP__CUDA_SOLVER_MAX)
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: %lld x %lld is too large; at most %d rows",
                      entry, (long long)n, (long long)n, MFSDP__CUDA_SOLVER_MAX);
  if (n == 0) return MFSDP_OK;
  if (cuda->owns_solver)
    MFSDP_TRY(mfsdp__cuda_solver_make(cuda, context, &cuda->solver));
  else
    MFSDP_TRY(mfsdp__cuda_solver_mode(context, cuda->solver));
  return query(cuda, context, (int)n, out);
}

MFSDP_API mfsdp_status mfsdp__cuda_solver_nbytes(void *self, mfsdp_context *context,
                                                 const char *entry, mfsdp__cuda_solver_query query,
                                                 int64_t n, size_t *out) {
  mfsdp__cuda_solver_space space;
  if (out == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: out is NULL", entry);
  *out = 0;
  MFSDP_TRY(
      mfsdp__cuda_solver_space_of((mfsdp_cuda_backend *)self, context, entry, query, n, &space));
  *out = space.nbytes;
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__cuda_eigh_nbytes(void *self, mfsdp_context *context, int64_t n,
                                               size_t *out) {
  return mfsdp__cuda_solver_nbytes(self, context, "eigh", mfsdp__cuda_eigh_query, n, out);
}

MFSDP_API mfsdp_status mfsdp__cuda_qr_nbytes(void *self, mfsdp_context *context, int64_t n,
                                             size_t *out) {
  return mfsdp__cuda_solver_nbytes(self, context, "qr", mfsdp__cuda_qr_query, n, out);
}

/* ---- checks ---- */

MFSDP_API mfsdp_status mfsdp__cuda_check_square(mfsdp_cuda_backend *cuda, const char *entry,
                                                const char *what, const mfsdp_mat *mat, int64_t n) {
  if (mat->rows != n || mat->cols != n || n < 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "%s: %s is %lld x %lld, needs %lld x %lld",
                            entry, what, (long long)mat->rows, (long long)mat->cols, (long long)n,
                            (long long)n);
  if (n == 0) return MFSDP_OK;
  if (mat->data == NULL || mat->row_stride < n)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "%s: %s is NULL, or its row_stride %lld is less than %lld", entry, what,
                            (long long)mat->row_stride, (long long)n);
  if (mat->row_stride > INT32_MAX)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_OVERFLOW, "%s: %s has row_stride %lld; at most %d", entry,
                            what, (long long)mat->row_stride, INT32_MAX);
  return mfsdp__cuda_check_pointer(cuda, entry, what, mat->data, MFSDP_SPACE_DEVICE);
}

/* Two squares of one size, and the workspace that they need. */
MFSDP_API mfsdp_status mfsdp__cuda_check_solve(mfsdp_cuda_backend *cuda, const char *entry,
                                               const mfsdp_cuda_solve *solve,
                                               mfsdp__cuda_solver_query query,
                                               const void *workspace, size_t given,
                                               mfsdp__cuda_solver_space *space) {
  const int64_t n = solve->a.rows;
  MFSDP_TRY(mfsdp__cuda_check_square(cuda, entry, "a", &solve->a, n));
  MFSDP_TRY(mfsdp__cuda_check_square(cuda, entry, "the result", &solve->to, n));
  MFSDP_TRY(mfsdp__cuda_solver_space_of(cuda, cuda->context, entry, query, n, space));
  if (n == 0) return MFSDP_OK;
  if (workspace == NULL || given < space->nbytes || (uintptr_t)workspace % MFSDP_ALIGN_NBYTES != 0)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT,
                            "%s: workspace has %zu bytes, needs %zu, aligned", entry,
                            workspace != NULL ? given : (size_t)0, space->nbytes);
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, entry, "workspace", workspace, MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_check_pointer(cuda, entry, "when.word", solve->when.word, MFSDP_SPACE_DEVICE);
}

/* ---- entries ---- */

MFSDP_API mfsdp_status mfsdp__cuda_eigh(void *self, mfsdp_queue *opaque,
                                        const mfsdp_eigh_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  const mfsdp_cuda_lane *lane;
  mfsdp__cuda_solver_space space;
  mfsdp_cuda_solve solve;
  float *to, *work;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "eigh", opaque));
  MFSDP_TRY(mfsdp__check_struct(cuda->context, "eigh", args, sizeof(*args)));
  solve.a = args->a;
  solve.to = args->vectors;
  solve.values = args->values;
  solve.when = args->when;
  solve.words = (int32_t *)args->workspace;
  MFSDP_TRY(mfsdp__cuda_check_solve(cuda, "eigh", &solve, mfsdp__cuda_eigh_query, args->workspace,
                                    args->workspace_nbytes, &space));
  if (args->a.rows == 0) return MFSDP_OK;
  if (args->values == NULL || args->a.data == args->vectors.data)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "eigh: %s",
                            args->values == NULL ? "values is NULL" : "vectors is a");
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "eigh", "values", args->values, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_queue_solver(cuda, queue, "eigh"));
  lane = mfsdp__cuda_lane(queue);
  to = (float *)solve.to.data;
  work = (float *)(void *)((unsigned char *)args->workspace + space.work);
  MFSDP_TRY(mfsdp__cuda_launched(cuda, cuda->kernels->solve_begin(lane, &solve), "eigh"));
  MFSDP_TRY(mfsdp__cusolver_check(
      cuda->context,
      cusolverDnSsyevd(queue->solver, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER,
                       (int)solve.a.rows, to, (int)solve.to.row_stride, args->values, work,
                       space.work_count, (int *)&solve.words[MFSDP_CUDA_SOLVE_FIRST_INFO]),
      "cusolverDnSsyevd"));
  return mfsdp__cuda_launched(cuda, cuda->kernels->solve_end(lane, &solve), "eigh");
}

/* Columns, as cuSOLVER sees it: a = q r. */
MFSDP_API mfsdp_status mfsdp__cuda_qr_run(mfsdp_cuda_backend *cuda, mfsdp__cuda_queue *queue,
                                          const mfsdp_cuda_solve *solve, void *workspace,
                                          const mfsdp__cuda_solver_space *space) {
  unsigned char *parts = (unsigned char *)workspace;
  float *factors = (float *)(void *)(parts + MFSDP_ALIGN_NBYTES);
  float *work = (float *)(void *)(parts + space->work), *q = (float *)solve->to.data;
  const int n = (int)solve->a.rows, stride = (int)solve->to.row_stride;
  int *infos = (int *)solve->words;
  MFSDP_TRY(mfsdp__cusolver_check(cuda->context,
                                  cusolverDnSgeqrf(queue->solver, n, n, q, stride, factors, work,
                                                   space->work_count,
                                                   &infos[MFSDP_CUDA_SOLVE_FIRST_INFO]),
                                  "cusolverDnSgeqrf"));
  return mfsdp__cusolver_check(cuda->context,
                               cusolverDnSorgqr(queue->solver, n, n, n, q, stride, factors, work,
                                                space->work_count,
                                                &infos[MFSDP_CUDA_SOLVE_SECOND_INFO]),
                               "cusolverDnSorgqr");
}

MFSDP_API mfsdp_status mfsdp__cuda_qr(void *self, mfsdp_queue *opaque, const mfsdp_qr_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  const mfsdp_cuda_lane *lane;
  mfsdp__cuda_solver_space space;
  mfsdp_cuda_solve solve;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "qr", opaque));
  MFSDP_TRY(mfsdp__check_struct(cuda->context, "qr", args, sizeof(*args)));
  solve.a = args->a;
  solve.to = args->q;
  solve.values = NULL;
  solve.when = args->when;
  solve.words = (int32_t *)args->workspace;
  MFSDP_TRY(mfsdp__cuda_check_solve(cuda, "qr", &solve, mfsdp__cuda_qr_query, args->workspace,
                                    args->workspace_nbytes, &space));
  if (args->a.rows == 0) return MFSDP_OK;
  if (args->a.data == args->q.data && args->a.row_stride != args->q.row_stride)
    return MFSDP__CUDA_FAIL(cuda, MFSDP_E_ARGUMENT, "qr: q is a, but with another row_stride");
  MFSDP_TRY(mfsdp__cuda_queue_solver(cuda, queue, "qr"));
  lane = mfsdp__cuda_lane(queue);
  MFSDP_TRY(mfsdp__cuda_launched(cuda, cuda->kernels->solve_begin(lane, &solve), "qr"));
  MFSDP_TRY(mfsdp__cuda_qr_run(cuda, queue, &solve, args->workspace, &space));
  return mfsdp__cuda_launched(cuda, cuda->kernels->solve_end(lane, &solve), "qr");
}

/* ---- passes of Shampoo and SOAP over one matrix ---- */

MFSDP_API mfsdp_status mfsdp__cuda_check_precondition(mfsdp_cuda_backend *cuda,
                                                      const mfsdp_precondition_args *args) {
  const int soap = args->op >= MFSDP_SOAP_PREPARE;
  if (args->op < MFSDP_SHAMPOO_PREPARE || args->op > MFSDP_SOAP_COMMIT)
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_UNSUPPORTED,
        "precondition: op is %d; the CUDA backend has those of Shampoo and SOAP", (int)args->op);
  if (args->side < 0 || args->side > 1 || args->rows < 1 || args->cols < 1 ||
      args->item.count != args->rows * args->cols || args->scalars == NULL ||
      (soap && args->item.state[MFSDP_STATE_UPDATES] == NULL))
    return MFSDP__CUDA_FAIL(
        cuda, MFSDP_E_ARGUMENT,
        "precondition: side %d of %lld x %lld with %lld elements, or scalars or SOAP's updates is "
        "NULL",
        (int)args->side, (long long)args->rows, (long long)args->cols, (long long)args->item.count);
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "precondition", "master", args->item.master,
                                      MFSDP_SPACE_DEVICE));
  MFSDP_TRY(
      mfsdp__cuda_check_pointer(cuda, "precondition", "grad", args->item.grad, MFSDP_SPACE_DEVICE));
  MFSDP_TRY(mfsdp__cuda_check_pointer(cuda, "precondition", "scalars", args->scalars,
                                      MFSDP_SPACE_DEVICE));
  return mfsdp__cuda_check_pointer(cuda, "precondition", "present", args->present,
                                   MFSDP_SPACE_DEVICE);
}

MFSDP_API mfsdp_status mfsdp__cuda_precondition(void *self, mfsdp_queue *opaque,
                                                const mfsdp_precondition_args *args) {
  mfsdp_cuda_backend *cuda = (mfsdp_cuda_backend *)self;
  mfsdp__cuda_queue *queue = (mfsdp__cuda_queue *)(void *)opaque;
  MFSDP_TRY(mfsdp__cuda_check_queue(cuda, "precondition", opaque));
  MFSDP_TRY(mfsdp__check_struct(cuda->context, "precondition", args, sizeof(*args)));
  MFSDP_TRY(mfsdp__cuda_check_precondition(cuda, args));
  return mfsdp__cuda_launched(cuda, cuda->kernels->precondition(mfsdp__cuda_lane(queue), args),
                              "precondition");
}

#endif /* MFSDP_CUDA_CUDA_DECOMPOSE_H */
