/* SPDX-License-Identifier: MIT */
/*
 * newton_schulz.h - orthogonalization of a matrix by Newton-Schulz iteration, on a backend.
 *
 *   mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();      // jordan, five steps
 *   size_t nbytes = 0;
 *   MFSDP_TRY(mfsdp_newton_schulz_workspace_nbytes(context, &ns, rows, cols, &nbytes));
 *   void *workspace = my_device_alloc(nbytes);
 *   MFSDP_TRY(mfsdp_newton_schulz(context, backend, queue, &ns, rows, cols, g, update,
 *                                 workspace, nbytes));                      // ENQUEUED
 *
 * With X (s x l, s <= l) the input divided by its Frobenius norm, each step is
 *   A = X X^T;  P = b A + c A A;  X = a X + P X,
 * which applies the odd polynomial a x + b x^3 + c x^5 to every singular value and leaves the
 * singular vectors. A matrix with more rows than columns is iterated from the other side
 * (A = X^T X, X = a X + X P), which is the same as transposing it first, without the copies.
 * Source of the iteration and of the `jordan` coefficients: Keller Jordan et al., "Muon: An
 * optimizer for hidden layers in neural networks", 2024.
 *
 * Does not: know ranks, allocate, or wait. It runs on the whole matrix: orthogonalizing a slice is
 * another computation, and plan.h refuses to plan it by accident.
 * Link flags: -lm.
 */
#ifndef MFSDP_NEWTON_SCHULZ_H
#define MFSDP_NEWTON_SCHULZ_H

#include "backend.h"
#include "cost.h"

/* How the polynomial is evaluated. All forms compute the same polynomial; bits differ. */
typedef enum mfsdp_newton_schulz_form {
  MFSDP_NS_AUTO = 1, /* by mfsdp_newton_schulz_form_of, a fixed table over shapes */
  MFSDP_NS_PLAIN,    /* three general products a step */
  MFSDP_NS_SYMMETRIC /* A and P by symmetric products: about half their work */
} mfsdp_newton_schulz_form;

typedef struct mfsdp_newton_schulz_desc {
  size_t struct_nbytes;
  /* coefficient_count rows of (a, b, c), row k for step k; the last row repeats. Read in every
   * call: the table must outlive the description. */
  const double (*coefficients)[3];
  int32_t coefficient_count;
  int32_t step_count; /* 0 is legal: the normalized input */
  mfsdp_newton_schulz_form form;
  mfsdp_norm_rule norm_rule;
  double eps; /* of the MAX_EPS and ADD_EPS rules; SCALE_SAFE does not read it */
} mfsdp_newton_schulz_desc;

/* (a, b, c) of KellerJordan/Muon, used in every step; *count becomes 1. */
MFSDP_API const double (*mfsdp_newton_schulz_jordan(int32_t *count))[3] {
  static const double table[1][3] = {{3.4445, -4.7750, 2.0315}};
  *count = 1;
  return table;
}

/* Five jordan steps, form AUTO, scale-safe norm. */
MFSDP_API mfsdp_newton_schulz_desc mfsdp_newton_schulz_desc_default(void) {
  mfsdp_newton_schulz_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.coefficients = mfsdp_newton_schulz_jordan(&desc.coefficient_count);
  desc.step_count = 5;
  desc.form = MFSDP_NS_AUTO;
  desc.norm_rule = MFSDP_NORM_SCALE_SAFE;
  desc.eps = 1e-7;
  return desc;
}

/* The most steps a description may ask for; far above what any coefficient set needs. */
#define MFSDP_NS_MAX_STEPS 64

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_newton_schulz_check(mfsdp_context *context,
                                                 const mfsdp_newton_schulz_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_newton_schulz_desc_default)",
                      sizeof(*desc));
  if (desc->coefficients == NULL || desc->coefficient_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: needs at least one row of coefficients, has %d",
                      (int)desc->coefficient_count);
  if (desc->step_count < 0 || desc->step_count > MFSDP_NS_MAX_STEPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: step_count is %d, needs 0 to %d",
                      (int)desc->step_count, MFSDP_NS_MAX_STEPS);
  if (desc->form < MFSDP_NS_AUTO || desc->form > MFSDP_NS_SYMMETRIC)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: form is %d, needs 1 to %d",
                      (int)desc->form, (int)MFSDP_NS_SYMMETRIC);
  if (desc->norm_rule < MFSDP_NORM_SCALE_SAFE || desc->norm_rule > MFSDP_NORM_ADD_EPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: norm_rule is %d, needs 1 to %d",
                      (int)desc->norm_rule, (int)MFSDP_NORM_ADD_EPS);
  if (!(desc->eps > 0.0) && desc->norm_rule != MFSDP_NORM_SCALE_SAFE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: eps is %g, needs to be positive",
                      desc->eps);
  return MFSDP_OK;
}

/* About where a symmetric product saves what its mirror costs (measured with OpenBLAS: 0.90 of the
 * plain speed at 64 x 64, 1.04 at 64 x 256, 1.19 at 128 x 128; docs/performance.md). */
#define MFSDP_NS_SYMMETRIC_FROM 64

/* The form AUTO picks: a function of the shape alone, so that results do not depend on
 * placement. */
MFSDP_API mfsdp_newton_schulz_form mfsdp_newton_schulz_form_of(const mfsdp_newton_schulz_desc *desc,
                                                               int64_t rows, int64_t cols) {
  const int64_t short_side = rows < cols ? rows : cols;
  if (desc->form != MFSDP_NS_AUTO) return desc->form;
  return short_side >= MFSDP_NS_SYMMETRIC_FROM ? MFSDP_NS_SYMMETRIC : MFSDP_NS_PLAIN;
}

/* Where the parts of the workspace lie, in bytes from its start. */
typedef struct mfsdp__ns_layout {
  size_t scratch, other, gram, poly, nbytes;
} mfsdp__ns_layout;

MFSDP_API int mfsdp__ns_part(size_t *total, size_t nbytes, size_t *start) {
  size_t end;
  *start = *total;
  if (!mfsdp_size_add(nbytes, MFSDP_ALIGN_NBYTES - 1, &end)) return 0;
  return mfsdp_size_add(*total, end - end % MFSDP_ALIGN_NBYTES, total);
}

MFSDP_API mfsdp_status mfsdp__ns_layout_of(mfsdp_context *context, int64_t rows, int64_t cols,
                                           mfsdp__ns_layout *out) {
  const int64_t short_side = rows < cols ? rows : cols;
  int64_t count, gram_count;
  size_t nbytes, gram_nbytes;
  memset(out, 0, sizeof(*out));
  if (rows < 0 || cols < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: rows x cols is %lld x %lld, needs 0 or more of each",
                      (long long)rows, (long long)cols);
  if (!mfsdp_i64_mul(rows, cols, &count) || !mfsdp_i64_mul(short_side, short_side, &gram_count) ||
      !mfsdp_elements_nbytes(count, MFSDP_F32, &nbytes) ||
      !mfsdp_elements_nbytes(gram_count, MFSDP_F32, &gram_nbytes) ||
      !mfsdp__ns_part(&out->nbytes, MFSDP_NORMALIZE_SCRATCH_COUNT * sizeof(double),
                      &out->scratch) ||
      !mfsdp__ns_part(&out->nbytes, nbytes, &out->other) ||
      !mfsdp__ns_part(&out->nbytes, gram_nbytes, &out->gram) ||
      !mfsdp__ns_part(&out->nbytes, gram_nbytes, &out->poly))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "newton_schulz: %lld x %lld overflows size_t",
                      (long long)rows, (long long)cols);
  return MFSDP_OK;
}

/* Bytes of DEVICE workspace for one rows x cols matrix, aligned to MFSDP_ALIGN_NBYTES. */
MFSDP_API mfsdp_status mfsdp_newton_schulz_workspace_nbytes(mfsdp_context *context,
                                                            const mfsdp_newton_schulz_desc *desc,
                                                            int64_t rows, int64_t cols,
                                                            size_t *out) {
  mfsdp__ns_layout layout;
  *out = 0;
  MFSDP_TRY(mfsdp_newton_schulz_check(context, desc));
  MFSDP_TRY(mfsdp__ns_layout_of(context, rows, cols, &layout));
  *out = layout.nbytes;
  return MFSDP_OK;
}

MFSDP_API mfsdp_mat mfsdp__ns_mat(void *data, int64_t rows, int64_t cols) {
  mfsdp_mat mat;
  mat.data = data;
  mat.rows = rows;
  mat.cols = cols;
  mat.row_stride = cols;
  mat.batch_stride = 0;
  return mat;
}

/* One step: next = polynomial(x). `gram` and `poly` are scratch of short x short. */
MFSDP_API mfsdp_status mfsdp__ns_step(const mfsdp_backend *backend, mfsdp_queue *queue,
                                      const double coefficient[3], int symmetric, mfsdp_mat x,
                                      mfsdp_mat next, mfsdp_mat gram, mfsdp_mat poly) {
  const int tall = x.rows > x.cols;
  mfsdp_gemm_args g = mfsdp_gemm_args_default();
  g.a = g.b = x;
  g.c = g.d = gram;
  g.trans_a = tall;
  g.trans_b = !tall;
  g.symmetric = symmetric;
  MFSDP_TRY(backend->ops->gemm(backend->self, queue, &g));

  g.a = g.b = g.c = gram;
  g.d = poly;
  g.alpha = (float)coefficient[2];
  g.beta = (float)coefficient[1];
  g.trans_a = 0;
  g.trans_b = symmetric; /* A is symmetric: A A^T is a rank-k update and costs half */
  MFSDP_TRY(backend->ops->gemm(backend->self, queue, &g));

  g.a = tall ? x : poly;
  g.b = tall ? poly : x;
  g.c = x;
  g.d = next;
  g.alpha = 1.0f;
  g.beta = (float)coefficient[0];
  g.trans_b = 0;
  g.symmetric = 0;
  return backend->ops->gemm(backend->self, queue, &g);
}

MFSDP_API mfsdp_status mfsdp__ns_arguments(mfsdp_context *context, int64_t count, const float *in,
                                           const float *out, const void *workspace, size_t given,
                                           size_t needed) {
  if (in == NULL || out == NULL || workspace == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: %s is NULL",
                      in == NULL    ? "in"
                      : out == NULL ? "out"
                                    : "workspace");
  if (given < needed)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: the workspace has %zu bytes, needs %zu", given, needed);
  if (in != out && in < out + count && out < in + count)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: in and out overlap; they must be equal or apart");
  return MFSDP_OK;
}

/*
 * out = the polynomial of in, both rows x cols, row-major, contiguous, fp32, DEVICE. out == in is
 * allowed, any other overlap is E_ARGUMENT. `workspace`: DEVICE, at least what
 * mfsdp_newton_schulz_workspace_nbytes says, not shared with a call in flight. ENQUEUED.
 * A matrix without elements is legal and does nothing. A zero matrix gives zeros. Non-finite input
 * gives non-finite output: callers check gradients before (runtime.h's verdict does).
 * Counts one orthogonalization in the context.
 */
MFSDP_API mfsdp_status mfsdp_newton_schulz(mfsdp_context *context, const mfsdp_backend *backend,
                                           mfsdp_queue *queue, const mfsdp_newton_schulz_desc *desc,
                                           int64_t rows, int64_t cols, const float *in, float *out,
                                           void *workspace, size_t workspace_nbytes) {
  mfsdp__ns_layout layout;
  mfsdp_normalize_args normalize;
  mfsdp_mat x, next, gram, poly;
  const int64_t short_side = rows < cols ? rows : cols;
  unsigned char *base = (unsigned char *)workspace;
  int symmetric;
  int32_t step;
  MFSDP_TRY(mfsdp_newton_schulz_check(context, desc));
  MFSDP_TRY(mfsdp__ns_layout_of(context, rows, cols, &layout));
  if (rows == 0 || cols == 0) return MFSDP_OK;
  MFSDP_TRY(mfsdp__ns_arguments(context, rows * cols, in, out, workspace, workspace_nbytes,
                                layout.nbytes));
  symmetric = mfsdp_newton_schulz_form_of(desc, rows, cols) == MFSDP_NS_SYMMETRIC;
  /* The iterate alternates between two buffers; start where the last step lands in `out`. */
  x = mfsdp__ns_mat(out, rows, cols);
  next = mfsdp__ns_mat(base + layout.other, rows, cols);
  if (desc->step_count % 2 != 0) {
    const mfsdp_mat swap = x;
    x = next;
    next = swap;
  }
  gram = mfsdp__ns_mat(base + layout.gram, short_side, short_side);
  poly = mfsdp__ns_mat(base + layout.poly, short_side, short_side);

  memset(&normalize, 0, sizeof(normalize));
  normalize.struct_nbytes = sizeof(normalize);
  normalize.dst = x.data;
  normalize.src = in;
  normalize.scratch = (double *)(void *)(base + layout.scratch);
  normalize.count = normalize.dst_stride = normalize.src_stride = rows * cols;
  normalize.batch_count = 1;
  normalize.dst_dtype = MFSDP_F32;
  normalize.rule = desc->norm_rule;
  /* SCALE_SAFE does not read it, so whatever the caller left there must not be refused. */
  normalize.eps = desc->norm_rule == MFSDP_NORM_SCALE_SAFE ? 0.0 : desc->eps;
  normalize.gain = 1.0;
  MFSDP_TRY(backend->ops->normalize(backend->self, queue, &normalize));
  for (step = 0; step < desc->step_count; ++step) {
    const int32_t row = step < desc->coefficient_count ? step : desc->coefficient_count - 1;
    const mfsdp_mat swap = x;
    MFSDP_TRY(
        mfsdp__ns_step(backend, queue, desc->coefficients[row], symmetric, x, next, gram, poly));
    x = next;
    next = swap;
  }
  context->counters.newton_schulz_count += 1;
  return MFSDP_OK;
}

#endif /* MFSDP_NEWTON_SCHULZ_H */
