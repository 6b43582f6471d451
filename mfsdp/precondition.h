/* SPDX-License-Identifier: MIT */
/*
 * precondition.h - what Shampoo and SOAP share: one matrix's job, its state arrays and scratch, and
 * the products with what preconditions its two sides.
 *
 *   mfsdp_precondition_job job = mfsdp_precondition_job_default();   // then shampoo.h or soap.h
 *   job.rows = rows; job.cols = cols;
 *   job.item = mfsdp_precondition_item(rows, cols, master, grad);    // and its states
 *   job.attempted_step = 1;                    // counts on, whether or not a step is skipped
 *   job.scalars = scalars;                                           // DEVICE
 *
 * A side longer than a description's size_limit has no preconditioner: it is left as it is (the
 * identity), and its state arrays have no elements.
 * Does not: know ranks, allocate or wait.
 * Link flags: none.
 */
#ifndef MFSDP_PRECONDITION_H
#define MFSDP_PRECONDITION_H

#include "backend.h"

/* The most a size_limit may be: squares of it are counted in 64 bits, and mean it. */
#define MFSDP_PRECONDITION_MAX_SIDE 1048576

/* One matrix in one step. */
typedef struct mfsdp_precondition_job {
  size_t struct_nbytes;
  int64_t rows, cols;     /* 0 of either is legal: nothing is done */
  mfsdp_fused_item item;  /* by value, pointers into DEVICE; its direction is not used */
  int64_t attempted_step; /* 1, 2, ...: intervals count attempted steps, skipped or not */
  int32_t clipped;        /* 1: clip_scale multiplies the gradient */
  const mfsdp_step_scalars *scalars; /* DEVICE: the group's */
  const uint32_t *present;           /* DEVICE: by item.present_index; NULL: present */
  void *workspace;                   /* DEVICE, aligned to MFSDP_ALIGN_NBYTES */
  size_t workspace_nbytes;
} mfsdp_precondition_job;

/* Nothing set but the first step. */
MFSDP_API mfsdp_precondition_job mfsdp_precondition_job_default(void) {
  mfsdp_precondition_job job;
  memset(&job, 0, sizeof(job));
  job.struct_nbytes = sizeof(job);
  job.attempted_step = 1;
  return job;
}

/* One matrix: master is updated, grad is read, both DEVICE, fp32, row-major, contiguous. The caller
 * sets item.state, by the indices MFSDP_STATE_..., zeros at first; param and param_dtype where a copy
 * is wanted. */
MFSDP_API mfsdp_fused_item mfsdp_precondition_item(int64_t rows, int64_t cols, float *master,
                                                   const float *grad) {
  mfsdp_fused_item item;
  memset(&item, 0, sizeof(item));
  item.master = master;
  item.grad = grad;
  item.rows = rows;
  if (!mfsdp_i64_mul(rows, cols, &item.count)) item.count = -1; /* no step takes such a shape */
  item.scale = 1.0;
  item.param_dtype = MFSDP_F32;
  return item;
}

/* A state array: its name in state tables, and its shape. */
typedef struct mfsdp_precondition_array {
  const char *name;
  int64_t rows, cols;
} mfsdp_precondition_array;

/* The arrays of both: moments and what there is of each side. */
MFSDP_API mfsdp_precondition_array mfsdp__pre_array(const char *const *names, int64_t size_limit,
                                                    int64_t rows, int64_t cols, int32_t index) {
  mfsdp_precondition_array array;
  array.name = names[index];
  array.rows = rows;
  array.cols = cols;
  if (index == MFSDP_STATE_GRAM_LEFT || index == MFSDP_STATE_SIDE_LEFT)
    array.rows = array.cols = rows <= size_limit ? rows : 0;
  if (index == MFSDP_STATE_GRAM_RIGHT || index == MFSDP_STATE_SIDE_RIGHT)
    array.rows = array.cols = cols <= size_limit ? cols : 0;
  if (index == MFSDP_STATE_UPDATES) array.rows = array.cols = 1;
  return array;
}

/* ---- scratch ---- */

/* Where the parts of the workspace lie, in bytes from its start. */
typedef struct mfsdp__pre_layout {
  size_t matrix[6], gram[2], side[2], square, values, library, nbytes, library_nbytes;
} mfsdp__pre_layout;

MFSDP_API int mfsdp__pre_part(mfsdp__pre_layout *layout, int64_t count, size_t *start) {
  size_t nbytes, end;
  *start = layout->nbytes;
  if (!mfsdp_elements_nbytes(count, MFSDP_F32, &nbytes) ||
      !mfsdp_size_add(nbytes, MFSDP_ALIGN_NBYTES - 1, &end))
    return 0;
  return mfsdp_size_add(layout->nbytes, end - end % MFSDP_ALIGN_NBYTES, &layout->nbytes);
}

MFSDP_API int mfsdp__pre_parts(const int64_t *lengths, int64_t count, int64_t longest,
                               mfsdp__pre_layout *out) {
  int32_t i;
  for (i = 0; i < 6; ++i)
    if (!mfsdp__pre_part(out, count, &out->matrix[i])) return 0;
  for (i = 0; i < 2; ++i)
    if (!mfsdp__pre_part(out, lengths[i] * lengths[i], &out->gram[i]) ||
        !mfsdp__pre_part(out, lengths[i] * lengths[i], &out->side[i]))
      return 0;
  return mfsdp__pre_part(out, longest * longest, &out->square) &&
         mfsdp__pre_part(out, 3 * longest, &out->values);
}

/* E_UNSUPPORTED, with what to do about it, unless the backend has all that Shampoo (needs_qr 0) or SOAP
 * (1) calls. */
MFSDP_API mfsdp_status mfsdp_precondition_backend_check(mfsdp_context *context,
                                                        const mfsdp_backend *backend,
                                                        const char *what, int needs_qr) {
  const mfsdp_backend_ops *ops = backend->ops;
  if (MFSDP_HAS(ops, precondition) && MFSDP_HAS(ops, eigh) &&
      MFSDP_HAS(ops, eigh_workspace_nbytes) &&
      (!needs_qr || (MFSDP_HAS(ops, qr) && MFSDP_HAS(ops, qr_workspace_nbytes))))
    return MFSDP_OK;
  return MFSDP_FAIL(
      context, MFSDP_E_UNSUPPORTED,
      "%s: the backend %s has no eigh%s. The host backend has it with LAPACKE: install "
      "it (Debian: liblapacke-dev), set mfsdp_host_backend_desc.lapack to "
      "mfsdp_host_lapacke() of mfsdp/host/math_lapacke.h, link with -llapacke",
      what, ops->name ? ops->name : "(unnamed)", needs_qr ? " and qr" : "");
}

MFSDP_API mfsdp_status mfsdp__pre_layout_of(mfsdp_context *context, const mfsdp_backend *backend,
                                            const char *what, int needs_qr, int64_t size_limit,
                                            int64_t rows, int64_t cols, mfsdp__pre_layout *out) {
  const mfsdp_backend_ops *ops = backend->ops;
  int64_t lengths[2], longest, count = 0;
  size_t nbytes = 0;
  int32_t side;
  memset(out, 0, sizeof(*out));
  MFSDP_TRY(mfsdp_precondition_backend_check(context, backend, what, needs_qr));
  if (rows < 0 || cols < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: rows x cols is %lld x %lld, needs 0 or more",
                      what, (long long)rows, (long long)cols);
  if (rows == 0 || cols == 0) return MFSDP_OK;
  lengths[0] = rows <= size_limit ? rows : 0;
  lengths[1] = cols <= size_limit ? cols : 0;
  longest = lengths[0] > lengths[1] ? lengths[0] : lengths[1];
  for (side = 0; side < 2; ++side) {
    if (lengths[side] > 0)
      MFSDP_TRY(ops->eigh_workspace_nbytes(backend->self, context, lengths[side], &nbytes));
    if (lengths[side] > 0 && nbytes > out->library_nbytes) out->library_nbytes = nbytes;
    if (lengths[side] > 0 && needs_qr)
      MFSDP_TRY(ops->qr_workspace_nbytes(backend->self, context, lengths[side], &nbytes));
    if (nbytes > out->library_nbytes) out->library_nbytes = nbytes;
  }
  if (mfsdp_i64_mul(rows, cols, &count) && mfsdp__pre_parts(lengths, count, longest, out)) {
    out->library = out->nbytes;
    if (mfsdp_size_add(out->nbytes, out->library_nbytes, &out->nbytes)) return MFSDP_OK;
  }
  memset(out, 0, sizeof(*out));
  return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: the workspace of %lld x %lld overflows size_t",
                    what, (long long)rows, (long long)cols);
}

/* ---- one job's calls ---- */

typedef struct mfsdp__pre_run {
  const mfsdp_backend *backend;
  mfsdp_queue *queue;
  mfsdp_precondition_args args;
  void *library;
  size_t library_nbytes;
} mfsdp__pre_run;

/* Memory that a job names. */
typedef struct mfsdp__pre_range {
  const char *name;
  const void *data;
  size_t nbytes;
} mfsdp__pre_range;

#define MFSDP__PRE_RANGES (4 + MFSDP_FUSED_STATE_COUNT)

MFSDP_API void mfsdp__pre_range_add(mfsdp__pre_range *ranges, int32_t *used, const char *name,
                                    const void *data, size_t nbytes) {
  ranges[*used].name = name;
  ranges[*used].data = data;
  ranges[(*used)++].nbytes = nbytes;
}

/* All that is not empty; returns how many. Their sizes fit, as the workspace's does. */
MFSDP_API int32_t mfsdp__pre_ranges(const mfsdp_precondition_job *job, size_t workspace_nbytes,
                                    const mfsdp_precondition_array *arrays, int32_t state_count,
                                    mfsdp__pre_range *out) {
  const mfsdp_fused_item *item = &job->item;
  const size_t count = (size_t)(job->rows * job->cols);
  int32_t used = 0, i;
  mfsdp__pre_range_add(out, &used, "workspace", job->workspace, workspace_nbytes);
  mfsdp__pre_range_add(out, &used, "master", item->master, count * sizeof(float));
  mfsdp__pre_range_add(out, &used, "grad", item->grad, count * sizeof(float));
  for (i = 0; i < state_count; ++i)
    if (arrays[i].rows > 0)
      mfsdp__pre_range_add(out, &used, arrays[i].name, item->state[i],
                           (size_t)(arrays[i].rows * arrays[i].cols) * sizeof(float));
  if (item->param != NULL)
    mfsdp__pre_range_add(out, &used, "param", item->param,
                         count * mfsdp_dtype_nbytes((mfsdp_dtype)item->param_dtype));
  return used;
}

/* E_ARGUMENT: a pointer is missing, or two ranges overlap. */
MFSDP_API mfsdp_status mfsdp__pre_check_ranges(mfsdp_context *context, const char *what,
                                               const mfsdp__pre_range *ranges, int32_t count) {
  int32_t i, k;
  for (i = 0; i < count; ++i) {
    if (ranges[i].data == NULL)
      return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is NULL", what, ranges[i].name);
    for (k = 0; k < i; ++k)
      if (!mfsdp_ranges_apart(ranges[k].data, ranges[k].nbytes, ranges[i].data, ranges[i].nbytes))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s and %s overlap", what, ranges[k].name,
                          ranges[i].name);
  }
  return MFSDP_OK;
}

/* E_ARGUMENT: workspace too small or not aligned, scalars missing, a copy of no type, arrays missing or
 * overlapping. */
MFSDP_API mfsdp_status mfsdp__pre_memory_check(mfsdp_context *context, const char *what,
                                               const mfsdp_precondition_job *job,
                                               size_t workspace_nbytes,
                                               const mfsdp_precondition_array *arrays,
                                               int32_t state_count) {
  const mfsdp_fused_item *item = &job->item;
  mfsdp__pre_range ranges[MFSDP__PRE_RANGES];
  if (job->scalars == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: scalars is NULL", what);
  if (job->workspace == NULL || job->workspace_nbytes < workspace_nbytes)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: workspace has %zu bytes, needs %zu", what,
                      job->workspace != NULL ? job->workspace_nbytes : (size_t)0, workspace_nbytes);
  if ((uintptr_t)job->workspace % MFSDP_ALIGN_NBYTES != 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: workspace is not aligned to %d bytes", what,
                      MFSDP_ALIGN_NBYTES);
  if (item->param != NULL && mfsdp_dtype_nbytes((mfsdp_dtype)item->param_dtype) == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: param_dtype is %d, which is none", what,
                      (int)item->param_dtype);
  return mfsdp__pre_check_ranges(
      context, what, ranges, mfsdp__pre_ranges(job, workspace_nbytes, arrays, state_count, ranges));
}

MFSDP_API mfsdp_status mfsdp__pre_job_check(mfsdp_context *context, const char *what,
                                            const mfsdp_precondition_job *job) {
  if (job == NULL || job->struct_nbytes != sizeof(*job))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "%s: job is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_precondition_job_default)",
                      what, sizeof(*job));
  if (job->attempted_step < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: attempted_step is %lld, counts from 1", what,
                      (long long)job->attempted_step);
  return mfsdp__flag_check(context, what, "clipped", job->clipped);
}

/* Puts scratch in its places. E_ARGUMENT as mfsdp__pre_memory_check. */
MFSDP_API mfsdp_status mfsdp__pre_run_make(mfsdp_context *context, const mfsdp_backend *backend,
                                           mfsdp_queue *queue, const char *what,
                                           const mfsdp_precondition_job *job,
                                           const mfsdp__pre_layout *layout,
                                           const mfsdp_precondition_array *arrays,
                                           int32_t state_count, mfsdp__pre_run *run) {
  unsigned char *workspace = (unsigned char *)job->workspace;
  mfsdp_precondition_args *args = &run->args;
  float **matrices[6];
  int32_t i;
  MFSDP_TRY(mfsdp__pre_memory_check(context, what, job, layout->nbytes, arrays, state_count));
  memset(run, 0, sizeof(*run));
  run->backend = backend;
  run->queue = queue;
  run->library = workspace + layout->library;
  run->library_nbytes = layout->library_nbytes;
  args->struct_nbytes = sizeof(*args);
  args->rows = job->rows;
  args->cols = job->cols;
  args->item = job->item;
  for (i = state_count; i < MFSDP_FUSED_STATE_COUNT; ++i)
    args->item.state[i] = NULL;
  args->clipped = job->clipped;
  args->scalars = job->scalars;
  args->present = job->present;
  matrices[0] = &args->grad;
  matrices[1] = &args->next_exp_avg;
  matrices[2] = &args->next_exp_avg_sq;
  matrices[3] = &args->other;
  matrices[4] = &args->projected;
  matrices[5] = &args->direction;
  for (i = 0; i < 6; ++i)
    *matrices[i] = (float *)(void *)(workspace + layout->matrix[i]);
  for (i = 0; i < 2; ++i) {
    if (arrays[MFSDP_STATE_GRAM_LEFT + i].rows == 0) continue;
    args->next_gram[i] = (float *)(void *)(workspace + layout->gram[i]);
    args->next_side[i] = (float *)(void *)(workspace + layout->side[i]);
  }
  args->square = (float *)(void *)(workspace + layout->square);
  args->values = (float *)(void *)(workspace + layout->values);
  return MFSDP_OK;
}

MFSDP_API int64_t mfsdp__pre_length(const mfsdp__pre_run *run, int32_t side) {
  return side == 0 ? run->args.rows : run->args.cols;
}

MFSDP_API mfsdp_status mfsdp__pre_pass(const mfsdp__pre_run *run, mfsdp_precondition_op op,
                                       int32_t side) {
  mfsdp_precondition_args args = run->args;
  args.op = op;
  args.side = side;
  return run->backend->ops->precondition(run->backend->self, run->queue, &args);
}

MFSDP_API mfsdp_mat mfsdp__pre_mat(const float *data, int64_t rows, int64_t cols) {
  mfsdp_mat mat;
  mat.data = (void *)(uintptr_t)data; /* operands are only read, but a matrix has one type */
  mat.rows = rows;
  mat.cols = cols;
  mat.row_stride = cols;
  mat.batch_stride = 0;
  return mat;
}

/* d = op(a) op(b), one matrix. */
MFSDP_API mfsdp_status mfsdp__pre_multiply(const mfsdp__pre_run *run, mfsdp_mat a, int32_t trans_a,
                                           mfsdp_mat b, int32_t trans_b, mfsdp_mat d) {
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.a = a;
  args.b = b;
  args.d = d;
  args.trans_a = trans_a;
  args.trans_b = trans_b;
  return run->backend->ops->gemm(run->backend->self, run->queue, &args);
}

/* to = op(left) from op(right), where left and right are square or NULL, the identity. `from`, `to` and
 * `other` are three buffers. */
MFSDP_API mfsdp_status mfsdp__pre_sandwich(const mfsdp__pre_run *run, const float *left,
                                           int32_t trans_left, const float *from,
                                           const float *right, int32_t trans_right, float *to,
                                           float *other) {
  const int64_t rows = run->args.rows, cols = run->args.cols;
  if (left != NULL) {
    float *partial = right != NULL ? other : to;
    MFSDP_TRY(mfsdp__pre_multiply(run, mfsdp__pre_mat(left, rows, rows), trans_left,
                                  mfsdp__pre_mat(from, rows, cols), 0,
                                  mfsdp__pre_mat(partial, rows, cols)));
    from = partial;
  }
  if (right != NULL)
    return mfsdp__pre_multiply(run, mfsdp__pre_mat(from, rows, cols), 0,
                               mfsdp__pre_mat(right, cols, cols), trans_right,
                               mfsdp__pre_mat(to, rows, cols));
  if (left != NULL) return MFSDP_OK;
  return run->backend->ops->copy(run->backend->self, run->queue, to, MFSDP_SPACE_DEVICE, from,
                                 MFSDP_SPACE_DEVICE, (size_t)(rows * cols) * sizeof(float));
}

/* next_gram = beta GRAM + weight G G^T, and G^T G, of the sides that have one. */
MFSDP_API mfsdp_status mfsdp__pre_grams(const mfsdp__pre_run *run, double beta, double weight) {
  const mfsdp_mat grad = mfsdp__pre_mat(run->args.grad, run->args.rows, run->args.cols);
  int32_t side;
  for (side = 0; side < 2; ++side) {
    const int64_t n = mfsdp__pre_length(run, side);
    mfsdp_gemm_args args = mfsdp_gemm_args_default();
    if (run->args.next_gram[side] == NULL) continue;
    args.a = args.b = grad;
    args.trans_a = side;
    args.trans_b = !side;
    args.c = mfsdp__pre_mat(run->args.item.state[MFSDP_STATE_GRAM_LEFT + side], n, n);
    args.d = mfsdp__pre_mat(run->args.next_gram[side], n, n);
    args.alpha = (float)weight;
    args.beta = (float)beta;
    args.symmetric = 1;
    MFSDP_TRY(run->backend->ops->gemm(run->backend->self, run->queue, &args));
  }
  return MFSDP_OK;
}

/* square = eigenvectors of next_gram, values = its eigenvalues. */
MFSDP_API mfsdp_status mfsdp__pre_eigh(const mfsdp__pre_run *run, int32_t side, mfsdp_when when) {
  const int64_t n = mfsdp__pre_length(run, side);
  mfsdp_eigh_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.a = mfsdp__pre_mat(run->args.next_gram[side], n, n);
  args.vectors = mfsdp__pre_mat(run->args.square, n, n);
  args.values = run->args.values;
  args.when = when;
  args.workspace = run->library;
  args.workspace_nbytes = run->library_nbytes;
  return run->backend->ops->eigh(run->backend->self, run->queue, &args);
}

#endif /* MFSDP_PRECONDITION_H */
