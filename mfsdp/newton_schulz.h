/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz.h - orthogonalization of matrices by Newton-Schulz iteration, on a backend.
 *
 *   mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();      // jordan, five steps
 *   size_t nbytes = 0;
 *   MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &ns, rows, cols, &nbytes));
 *   void *workspace = my_device_alloc(nbytes);              // aligned to MFSDP_ALIGN_NBYTES
 *   MFSDP_TRY(mfsdp_newton_schulz(context, backend, queue, &ns, rows, cols, g, update,
 *                                 workspace, nbytes));                      // ENQUEUED
 *
 * With X (s x l, s <= l) the input divided by its Frobenius norm, each step is
 *   A = X X^T;  P = b A + c A A;  X = a X + P X,
 * which applies the odd polynomial a x + b x^3 + c x^5 to every singular value and leaves the
 * singular vectors. Source of the iteration: Keller Jordan et al., "Muon: An optimizer for hidden
 * layers in neural networks", 2024; of the coefficient sets: newton_schulz/coefficients.h; of the
 * Gram form: newton_schulz/iterate.h.
 *
 *   newton_schulz/coefficients.h   sets of (a, b, c) by name; ns.coefficients may be your own table
 *   newton_schulz/desc.h           the description: steps, form, storage dtype, restarts, norm
 *   newton_schulz/workspace.h      how many bytes
 *   newton_schulz/iterate.h        the forms
 *   newton_schulz/cost.h           what a form takes, and mfsdp_plan_desc.cost by it
 *   mfsdp_newton_schulz, mfsdp_newton_schulz_batch     below
 *
 * Does not: know ranks, allocate, or wait (on the host host/newton_schulz_host.h does the last two for
 * whoever has no backend). It runs on the whole matrix: orthogonalizing a slice is
 * another computation, and plan.h refuses to plan it by accident.
 * Link flags: -lm.
 */
#ifndef MFSDP_NEWTON_SCHULZ_H
#define MFSDP_NEWTON_SCHULZ_H

#include "backend.h"
#include "cost.h"
#include "newton_schulz/coefficients.h"
#include "newton_schulz/cost.h"
#include "newton_schulz/desc.h"
#include "newton_schulz/iterate.h"
#include "newton_schulz/workspace.h"

/* Bytes from the start of the first matrix to the end of the last. */
MFSDP_API int mfsdp__ns_extent(int64_t count, int64_t stride, int64_t batch_count, size_t *out) {
  int64_t elements;
  return mfsdp_i64_mul(batch_count - 1, stride, &elements) &&
         mfsdp_i64_add(elements, count, &elements) &&
         mfsdp_elements_nbytes(elements, MFSDP_F32, out);
}

/* E_ARGUMENT, E_OVERFLOW; nbytes: what in and out span. */
MFSDP_API mfsdp_status mfsdp__ns_check_matrices(mfsdp_context *context, int64_t count,
                                                int64_t batch_count, const float *in,
                                                int64_t in_stride, const float *out,
                                                int64_t out_stride, size_t nbytes[2]) {
  nbytes[0] = nbytes[1] = 0;
  if (in == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: %s is NULL",
                      in == NULL ? "in" : "out");
  if ((uintptr_t)in % sizeof(float) != 0 || (uintptr_t)out % sizeof(float) != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: %s is not aligned to its floats",
                      (uintptr_t)in % sizeof(float) != 0 ? "in" : "out");
  if (batch_count > 1 && (in_stride < count || out_stride < count))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: the strides are %lld and %lld, need at least a matrix's %lld "
                      "elements",
                      (long long)in_stride, (long long)out_stride, (long long)count);
  if (!mfsdp__ns_extent(count, in_stride, batch_count, &nbytes[0]) ||
      !mfsdp__ns_extent(count, out_stride, batch_count, &nbytes[1]))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                      "newton_schulz: %lld matrices with strides of %lld and %lld overflow size_t",
                      (long long)batch_count, (long long)in_stride, (long long)out_stride);
  if (!(in == out && (batch_count == 1 || in_stride == out_stride)) &&
      !mfsdp_ranges_apart(in, nbytes[0], out, nbytes[1]))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: in and out overlap; they must be equal or apart");
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__ns_arguments(mfsdp_context *context, int64_t count,
                                           int64_t batch_count, const float *in, int64_t in_stride,
                                           const float *out, int64_t out_stride,
                                           const void *workspace, size_t given, size_t needed) {
  size_t nbytes[2];
  MFSDP_TRY(mfsdp__ns_check_matrices(context, count, batch_count, in, in_stride, out, out_stride,
                                     nbytes));
  if (workspace == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: workspace is NULL");
  if (given < needed)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: the workspace has %zu bytes, needs %zu", given, needed);
  if ((uintptr_t)workspace % MFSDP_ALIGN_NBYTES != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: the workspace is not aligned to %d bytes",
                      MFSDP_ALIGN_NBYTES);
  if (!mfsdp_ranges_apart(in, nbytes[0], workspace, needed) ||
      !mfsdp_ranges_apart(out, nbytes[1], workspace, needed))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: the workspace overlaps in or out");
  return MFSDP_OK;
}

/* Its inverse, times the gain of the least norm_factor, 1e6, is a double. */
#define MFSDP__NS_LEAST_EPS 1e-300

MFSDP_API mfsdp_status mfsdp__ns_normalize(const mfsdp__ns_run *run,
                                           const mfsdp_newton_schulz_desc *desc, int64_t count,
                                           const float *in, int64_t in_stride, void *scratch) {
  mfsdp_normalize_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.dst = run->x.data;
  args.src = in;
  args.scratch = (double *)scratch;
  args.count = count;
  args.batch_count = run->batch_count;
  args.dst_stride = run->x.batch_stride;
  args.src_stride = in_stride;
  args.dst_dtype = desc->dtype;
  args.rule = desc->norm_rule;
  /* x / max(f n, eps) = x / f / max(n, eps / f), and so with the sum. SCALE_SAFE does not read eps:
   * whatever the caller left there must not be refused. */
  args.eps = desc->norm_rule == MFSDP_NORM_SCALE_SAFE ? 0.0 : desc->eps / desc->norm_factor;
  /* The norm of floats is 0 or at least 1e-45: what is smaller by far than that is felt by a zero matrix
   * alone, which would be 0 times the infinite inverse of a denormal eps. */
  if (args.eps > 0.0 && args.eps < MFSDP__NS_LEAST_EPS) args.eps = MFSDP__NS_LEAST_EPS;
  args.gain = 1.0 / desc->norm_factor;
  return run->backend->ops->normalize(run->backend->self, run->queue, &args);
}

/* out = the last iterate, where that is not there already. */
MFSDP_API mfsdp_status mfsdp__ns_finish(const mfsdp__ns_run *run, int64_t count, float *out,
                                        int64_t out_stride) {
  const mfsdp_backend *b = run->backend;
  const size_t nbytes = mfsdp_dtype_nbytes(run->dtype);
  int64_t i;
  if (run->dtype == MFSDP_F32) return MFSDP_OK;
  if (out_stride == count)
    return b->ops->cast(b->self, run->queue, out, MFSDP_F32, run->x.data, run->dtype,
                        count * run->batch_count);
  for (i = 0; i < run->batch_count; ++i)
    MFSDP_TRY(b->ops->cast(b->self, run->queue, out + i * out_stride, MFSDP_F32,
                           (const unsigned char *)run->x.data + (size_t)(i * count) * nbytes,
                           run->dtype, count));
  return MFSDP_OK;
}

/* Places the matrices so that the last fp32 iterate is written to `out`. */
MFSDP_API void mfsdp__ns_place(mfsdp__ns_run *run, const mfsdp_newton_schulz_desc *desc,
                               const mfsdp__ns_layout *layout, int64_t rows, int64_t cols,
                               mfsdp_newton_schulz_form form, float *out, int64_t out_stride,
                               unsigned char *base) {
  const int64_t s = rows < cols ? rows : cols;
  int32_t i;
  run->x = mfsdp__ns_mat(base + layout->x[0], rows, cols, rows * cols);
  run->next = layout->x_count > 1 ? mfsdp__ns_mat(base + layout->x[1], rows, cols, rows * cols)
                                  : mfsdp__ns_mat(out, rows, cols, out_stride);
  if (mfsdp__ns_x_writes(desc, form, rows, cols) % 2 == 0) mfsdp__ns_swap(&run->x, &run->next);
  for (i = 0; i < layout->square_count; ++i)
    run->square[i] = mfsdp__ns_mat(base + layout->square[i], s, s, s * s);
}

/*
 * out[i] = the polynomial of in[i] for batch_count matrices of one shape, rows x cols, row-major,
 * contiguous, fp32, DEVICE; matrix i starts i * stride elements behind the first, and a stride is at
 * least rows * cols. Each result has the bits that its matrix has alone. in == out with equal strides
 * is allowed, any other overlap is E_ARGUMENT. `workspace`: DEVICE, at least what
 * mfsdp_newton_schulz_batch_workspace_nbytes says, aligned to MFSDP_ALIGN_NBYTES, not shared with a call
 * in flight. ENQUEUED. E_ARGUMENT and E_OVERFLOW before anything is enqueued.
 * No matrices, or matrices without elements, are legal and do nothing. A zero matrix gives zeros.
 * Non-finite input gives non-finite output: callers check gradients before (runtime.h's verdict
 * does). Counts one orthogonalization per matrix in the context.
 */
MFSDP_API mfsdp_status mfsdp_newton_schulz_batch(mfsdp_context *context,
                                                 const mfsdp_backend *backend, mfsdp_queue *queue,
                                                 const mfsdp_newton_schulz_desc *desc, int64_t rows,
                                                 int64_t cols, int64_t batch_count, const float *in,
                                                 int64_t in_stride, float *out, int64_t out_stride,
                                                 void *workspace, size_t workspace_nbytes) {
  unsigned char *base = (unsigned char *)workspace;
  mfsdp_newton_schulz_form form;
  mfsdp__ns_layout layout;
  mfsdp__ns_run run;
  if (backend == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: backend is NULL");
  MFSDP_TRY(mfsdp_newton_schulz_check(context, desc));
  MFSDP_TRY(mfsdp__ns_layout_of(context, desc, rows, cols, batch_count, &layout));
  if (rows == 0 || cols == 0 || batch_count == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ns_arguments(context, rows * cols, batch_count, in, in_stride, out, out_stride,
                                workspace, workspace_nbytes, layout.nbytes));
  form = mfsdp_newton_schulz_form_of(desc, rows, cols);
  memset(&run, 0, sizeof(run));
  run.backend = backend;
  run.queue = queue;
  run.dtype = desc->dtype;
  run.batch_count = batch_count;
  run.tall = rows > cols;
  run.symmetric = form != MFSDP_NS_PLAIN;
  mfsdp__ns_place(&run, desc, &layout, rows, cols, form, out, out_stride, base);
  MFSDP_TRY(mfsdp__ns_normalize(&run, desc, rows * cols, in, in_stride, base + layout.scratch));
  MFSDP_TRY(form == MFSDP_NS_GRAM ? mfsdp__ns_by_gram(&run, desc) : mfsdp__ns_by_steps(&run, desc));
  MFSDP_TRY(mfsdp__ns_finish(&run, rows * cols, out, out_stride));
  context->counters.newton_schulz_count += (uint64_t)batch_count;
  return MFSDP_OK;
}

/* One matrix: mfsdp_newton_schulz_batch with a batch of one. */
MFSDP_API mfsdp_status mfsdp_newton_schulz(mfsdp_context *context, const mfsdp_backend *backend,
                                           mfsdp_queue *queue, const mfsdp_newton_schulz_desc *desc,
                                           int64_t rows, int64_t cols, const float *in, float *out,
                                           void *workspace, size_t workspace_nbytes) {
  return mfsdp_newton_schulz_batch(context, backend, queue, desc, rows, cols, 1, in, 0, out, 0,
                                   workspace, workspace_nbytes);
}

#endif /* MFSDP_NEWTON_SCHULZ_H */
