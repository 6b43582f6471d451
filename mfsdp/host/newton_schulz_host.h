/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz_host.h - Newton-Schulz alone: one include, one call, one link flag.
 *
 *   #include "mfsdp/host/newton_schulz_host.h"
 *   ...
 *   const mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();   // jordan, five steps
 *   mfsdp_status status =                             // g, update: float[rows * cols], row-major
 *     mfsdp_host_newton_schulz(NULL, NULL, &ns, rows, cols, g, update, NULL, 0);
 *   if (status != MFSDP_OK) fprintf(stderr, "%s\n", mfsdp_status_text(status));
 *
 *   cc -O3 -march=native -fno-math-errno -ffp-contract=off -I. file.c -lm
 *
 * newton_schulz.h enqueues the iteration on a backend; this is for whoever has none. It computes in
 * the call, by the host backend's own routines: the bits are those that mfsdp_newton_schulz has on a
 * host backend with the same `math`, and the same number of threads in it.
 *
 *   context     NULL: one of the call's own, with malloc and free; the status is all one learns then.
 *               Your own gives the message (mfsdp_context_error), the allocator and the counters.
 *   math        NULL: C loops. mfsdp_host_math_cblas() of host/math_cblas.h: a CBLAS, faster by far for
 *               large matrices
 *   workspace   NULL with 0 bytes: allocated for the call. In a loop hand in your own, of the size that
 *               mfsdp_newton_schulz_workspace_nbytes says, aligned to 256 bytes (aligned_alloc): then
 *               nothing is allocated.
 *
 * Does not: use threads or a queue, set how many threads a CBLAS uses, or take what is not fp32 (ns.dtype
 * is how iterates are stored in between). Muon's momentum and decay are muon.h's, on a backend.
 * Link flags: -lm; with math_cblas.h that CBLAS too, as -lopenblas -lm. C standard library only.
 */
#ifndef MFSDP_HOST_NEWTON_SCHULZ_HOST_H
#define MFSDP_HOST_NEWTON_SCHULZ_HOST_H

#include "../newton_schulz.h"
#include "host_dense.h"
#include "host_math.h"
#include "host_ops.h"

/* ---- what the iteration calls, done in the call ---- */

/* Not backend_host.h's: that one has queues, and with them threads and POSIX. newton_schulz.h checks
 * what it is given, and what it makes of that needs no second check. */
typedef struct mfsdp__host_ns {
  const mfsdp_host_math *math;
} mfsdp__host_ns;

MFSDP_API mfsdp_status mfsdp__host_ns_gemm(void *self, mfsdp_queue *queue,
                                           const mfsdp_gemm_args *args) {
  (void)queue;
  mfsdp__host_gemm(((const mfsdp__host_ns *)self)->math, args);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_ns_normalize(void *self, mfsdp_queue *queue,
                                                const mfsdp_normalize_args *args) {
  (void)self;
  (void)queue;
  mfsdp__host_normalize(args);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__host_ns_cast(void *self, mfsdp_queue *queue, void *dst,
                                           mfsdp_dtype dst_dtype, const void *src,
                                           mfsdp_dtype src_dtype, int64_t count) {
  (void)self;
  (void)queue;
  mfsdp__host_cast(dst, dst_dtype, src, src_dtype, count);
  return MFSDP_OK;
}

/* No other entry is called. */
MFSDP_API mfsdp_backend_ops mfsdp__host_ns_ops(void) {
  mfsdp_backend_ops ops;
  memset(&ops, 0, sizeof(ops));
  ops.struct_nbytes = sizeof(ops);
  ops.name = "host";
  ops.gemm = mfsdp__host_ns_gemm;
  ops.normalize = mfsdp__host_ns_normalize;
  ops.cast = mfsdp__host_ns_cast;
  return ops;
}

/* ---- the workspace of a call ---- */

/* *own: what to give back after the call; NULL where the caller's is used or none is needed. Whatever
 * can be refused is refused before memory is asked for. */
MFSDP_API mfsdp_status mfsdp__host_ns_alloc(mfsdp_context *context,
                                            const mfsdp_newton_schulz_desc *desc, int64_t rows,
                                            int64_t cols, int64_t batch_count, const float *in,
                                            int64_t in_stride, const float *out, int64_t out_stride,
                                            void **own, size_t *own_nbytes) {
  const mfsdp_allocator *allocator = &context->desc.allocator;
  size_t spans[2];
  MFSDP_TRY(mfsdp_newton_schulz_batch_workspace_nbytes(context, desc, rows, cols, batch_count,
                                                       own_nbytes));
  if (rows == 0 || cols == 0 || batch_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ns_check_matrices(context, rows * cols, batch_count, in, in_stride, out,
                                     out_stride, spans));
  *own = allocator->alloc(*own_nbytes, MFSDP_ALIGN_NBYTES, MFSDP_SPACE_HOST, allocator->user);
  if (*own == NULL)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY,
                      "newton_schulz: the allocator refused %zu bytes of workspace", *own_nbytes);
  mfsdp_memory_book(context, MFSDP_MEMORY_WORKSPACE, *own_nbytes);
  return MFSDP_OK;
}

MFSDP_API void mfsdp__host_ns_free(mfsdp_context *context, void *own, size_t own_nbytes) {
  if (own == NULL) return;
  mfsdp_memory_unbook(context, MFSDP_MEMORY_WORKSPACE, own_nbytes);
  context->desc.allocator.free(own, own_nbytes, MFSDP_SPACE_HOST, context->desc.allocator.user);
}

/* ---- the calls ---- */

/*
 * out[i] = the polynomial of in[i] for batch_count matrices of one shape, rows x cols, row-major,
 * contiguous, fp32, ordinary host memory; matrix i starts i * stride elements behind the first, and a
 * stride is at least rows * cols (not read for one matrix). Each result has the bits that its matrix
 * has alone. in == out with equal strides is allowed. COMPLETE on return.
 * context, math, workspace: may be NULL, see above. A workspace has at least the bytes that
 * mfsdp_newton_schulz_batch_workspace_nbytes says and is aligned to MFSDP_ALIGN_NBYTES (256).
 * E_ARGUMENT: a NULL description or matrix, a setting that is out of range or not finite, a negative
 * size, a stride too small, any other overlap, a workspace too small, not aligned or NULL with bytes
 * (a malloc that failed), a math without sgemm and ssyrk. E_OVERFLOW: sizes beyond size_t. E_MEMORY: the
 * allocator refused. `out` is untouched then.
 * No matrices, or matrices without elements, are legal and do nothing. A zero matrix gives zeros; non-finite
 * input gives non-finite output. Counts one orthogonalization per matrix in the context.
 */
MFSDP_API mfsdp_status mfsdp_host_newton_schulz_batch(
    mfsdp_context *context, const mfsdp_host_math *math, const mfsdp_newton_schulz_desc *desc,
    int64_t rows, int64_t cols, int64_t batch_count, const float *in, int64_t in_stride, float *out,
    int64_t out_stride, void *workspace, size_t workspace_nbytes) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_backend_ops ops = mfsdp__host_ns_ops();
  mfsdp_context temporary;
  mfsdp_backend backend;
  mfsdp__host_ns self;
  void *own = NULL;
  mfsdp_status status;
  if (context == NULL) {
    context = &temporary;
    MFSDP_TRY(mfsdp_context_init(context, &context_desc));
  }
  self.math = math != NULL ? math : mfsdp_host_math_loops();
  if (!MFSDP_HAS(self.math, sgemm) || !MFSDP_HAS(self.math, ssyrk))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: math needs sgemm and ssyrk");
  memset(&backend, 0, sizeof(backend));
  backend.struct_nbytes = sizeof(backend);
  backend.ops = &ops;
  backend.self = &self;
  backend.traits = MFSDP_BACKEND_HOST_MEMORY;
  if (workspace == NULL && workspace_nbytes == 0) {
    MFSDP_TRY(mfsdp__host_ns_alloc(context, desc, rows, cols, batch_count, in, in_stride, out,
                                   out_stride, &own, &workspace_nbytes));
    workspace = own;
  }
  status = mfsdp_newton_schulz_batch(context, &backend, NULL, desc, rows, cols, batch_count, in,
                                     in_stride, out, out_stride, workspace, workspace_nbytes);
  mfsdp__host_ns_free(context, own, workspace_nbytes);
  return status;
}

/* One matrix: mfsdp_host_newton_schulz_batch with a batch of one. */
MFSDP_API mfsdp_status mfsdp_host_newton_schulz(mfsdp_context *context, const mfsdp_host_math *math,
                                                const mfsdp_newton_schulz_desc *desc, int64_t rows,
                                                int64_t cols, const float *in, float *out,
                                                void *workspace, size_t workspace_nbytes) {
  return mfsdp_host_newton_schulz_batch(context, math, desc, rows, cols, 1, in, 0, out, 0,
                                        workspace, workspace_nbytes);
}

#endif /* MFSDP_HOST_NEWTON_SCHULZ_HOST_H */
