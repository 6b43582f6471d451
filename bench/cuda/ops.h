/* SPDX-License-Identifier: MIT */
/*
 * ops.h - the table of (operation, dtype, shape) by which backends are compared with each other
 * (tests/cuda/ops_test.cpp: small, ragged shapes) and timed (device.c: large ones), and what runs a row
 * of it on any backend. Decompositions have a test of their own (tests/precondition_test.cpp), the
 * verdict too (tests/host/host_verdict_test.cpp).
 */
#ifndef MFSDP_BENCH_OPS_H
#define MFSDP_BENCH_OPS_H

#include "mfsdp/adamw.h"
#include "mfsdp/dtype.h"
#include "mfsdp/muon.h"

/* X(NAME, "name", dtypes, bytes read and written for each element by f32 and by the row's dtype) */
#define OPS_TABLE(X)                                                \
  X(COPY, "copy", OPS_WIDE, 8, 0)                                   \
  X(FILL, "fill_bytes", OPS_WIDE, 4, 0)                             \
  X(CAST_TO, "cast from f32", OPS_ALL, 4, 1)                        \
  X(CAST_FROM, "cast to f32", OPS_ALL, 4, 1)                        \
  X(SUM_TERMS, "sum_terms, 3", OPS_ALL, 4, 3)                       \
  X(SUM_MORE, "sum_terms, 3 more", OPS_ALL, 8, 3)                   \
  X(SUMSQ, "sumsq", OPS_WIDE, 4, 0)                                 \
  X(NORMALIZE, "normalize", OPS_ALL, 8, 1) /* src is read twice */  \
  X(ADAMW, "fused adamw", OPS_ALL, 28, 1)                           \
  X(MUON_PREPARE, "fused muon prepare", OPS_WIDE, 12, 0)            \
  X(MUON_ROWS, "fused muon rows", OPS_WIDE, 12, 0) /* x[3] twice */ \
  X(MUON_COMMIT, "fused muon commit", OPS_ALL, 24, 1)               \
  X(GEMM, "gemm", OPS_ALL, 0, 0)                                    \
  X(GEMM_ADD, "gemm, c elsewhere", OPS_ALL, 0, 0)                   \
  X(GEMM_SYMMETRIC, "gemm, symmetric", OPS_ALL, 0, 0)

enum { OPS_WIDE = 1, OPS_ALL = 3 }; /* f32 alone; and 16-bit dtypes */

typedef enum ops_kind {
#define OPS_ENUM(name, text, dtypes, wide, narrow) OPS_##name,
  OPS_TABLE(OPS_ENUM)
#undef OPS_ENUM
      OPS_COUNT
} ops_kind;

typedef struct ops_row {
  const char *name;
  int dtypes, f32_bytes, dtype_items;
} ops_row;

static inline const ops_row *ops_of(ops_kind kind) {
  static const ops_row rows[] = {
#define OPS_ROW(name, text, dtypes, wide, narrow) {text, dtypes, wide, narrow},
      OPS_TABLE(OPS_ROW)
#undef OPS_ROW
  };
  return &rows[kind];
}

static inline int ops_is_product(ops_kind kind) {
  return kind >= OPS_GEMM;
}

typedef struct ops_case {
  ops_kind kind;
  mfsdp_dtype dtype;
  int64_t rows, cols, batch;
} ops_case;

#define OPS_ARRAYS 4

/* What an operation touches, all in DEVICE memory. */
typedef struct ops_memory {
  float *x[OPS_ARRAYS];     /* count elements each */
  void *narrow[OPS_ARRAYS]; /* the same numbers in the row's dtype */
  void *out;                /* ops_out_nbytes */
  mfsdp_block *blocks;      /* one for each row of the stack */
  mfsdp_step_scalars *scalars;
  mfsdp_fused_item *items; /* one */
  double *scratch;         /* batch x MFSDP_NORMALIZE_SCRATCH_COUNT */
} ops_memory;

static inline int64_t ops_count(const ops_case *c) {
  return c->rows * c->cols * c->batch;
}

/* Elements of the result of a product: a (rows x cols) times b (cols x rows). */
static inline int64_t ops_out_count(const ops_case *c) {
  return ops_is_product(c->kind) ? c->rows * c->rows * c->batch : ops_count(c);
}

static inline size_t ops_out_nbytes(const ops_case *c) {
  const size_t slots = (size_t)(c->rows * c->batch) * sizeof(double);
  const size_t values = (size_t)ops_out_count(c) * sizeof(float);
  return slots > values ? slots : values;
}

/* Bytes that the operation reads and writes at least; 0 for products. */
static inline double ops_bytes(const ops_case *c) {
  const ops_row *row = ops_of(c->kind);
  return (double)ops_count(c) *
         ((double)row->f32_bytes + (double)row->dtype_items * (double)mfsdp_dtype_nbytes(c->dtype));
}

static inline mfsdp_mat ops_mat(void *data, int64_t rows, int64_t cols) {
  mfsdp_mat mat;
  mat.data = data;
  mat.rows = rows;
  mat.cols = mat.row_stride = cols;
  mat.batch_stride = rows * cols;
  return mat;
}

static inline mfsdp_status ops_run_product(const mfsdp_backend *backend, mfsdp_queue *queue,
                                           const ops_case *c, const ops_memory *m) {
  mfsdp_gemm_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.a = ops_mat(m->narrow[0], c->rows, c->cols);
  args.b = ops_mat(m->narrow[1], c->cols, c->rows);
  args.c = args.d = ops_mat(m->out, c->rows, c->rows);
  args.batch_count = c->batch;
  args.alpha = 0.75f;
  args.dtype = c->dtype;
  if (c->kind == OPS_GEMM_SYMMETRIC) {
    args.b = args.a;
    args.trans_b = args.symmetric = 1;
  }
  if (c->kind == OPS_GEMM_ADD) {
    args.c.data = m->narrow[2]; /* at least rows x rows: see ops_fits */
    args.beta = 0.5f;
  }
  return backend->ops->gemm(backend->self, queue, &args);
}

/* c of GEMM_ADD is cut out of an array of rows x cols. */
static inline int ops_fits(const ops_case *c) {
  return (c->kind != OPS_GEMM_ADD || c->rows <= c->cols) &&
         (c->dtype == MFSDP_F32 || ops_of(c->kind)->dtypes == OPS_ALL);
}

static inline mfsdp_status ops_run_normalize(const mfsdp_backend *backend, mfsdp_queue *queue,
                                             const ops_case *c, const ops_memory *m) {
  mfsdp_normalize_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.dst = m->out;
  args.src = m->x[0];
  args.scratch = m->scratch;
  args.count = args.dst_stride = args.src_stride = c->rows * c->cols;
  args.batch_count = c->batch;
  args.dst_dtype = c->dtype;
  args.rule = MFSDP_NORM_SCALE_SAFE;
  args.gain = 1.0;
  return backend->ops->normalize(backend->self, queue, &args);
}

/* The item of a fused pass, to be copied to m->items. The compute copy is `out`. */
static inline mfsdp_fused_item ops_item(const ops_case *c, const ops_memory *m) {
  const mfsdp_muon_desc muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  mfsdp_fused_item item = mfsdp_adamw_item(m->x[0], m->x[1], m->x[2], m->x[3], ops_count(c));
  if (c->kind != OPS_ADAMW)
    item = mfsdp_muon_item(&muon, c->rows * c->batch, c->cols, m->x[0], m->x[1], m->x[2], m->x[3]);
  if (c->kind == OPS_MUON_ROWS) item.state[1] = m->x[2]; /* its first rows * batch elements */
  if (c->kind != OPS_MUON_PREPARE && c->dtype != MFSDP_F32) {
    item.param = m->out;
    item.param_dtype = (int32_t)c->dtype;
  }
  return item;
}

static inline mfsdp_status ops_run_fused(const mfsdp_backend *backend, mfsdp_queue *queue,
                                         const ops_case *c, const ops_memory *m) {
  const mfsdp_muon_desc muon = mfsdp_muon_desc_preset(MFSDP_MUON_TORCH);
  const mfsdp_adamw_desc adamw = mfsdp_adamw_desc_default();
  mfsdp_fused_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.op = c->kind == OPS_ADAMW          ? MFSDP_FUSED_ADAMW
            : c->kind == OPS_MUON_PREPARE ? MFSDP_FUSED_MUON_PREPARE
            : c->kind == OPS_MUON_ROWS    ? MFSDP_FUSED_MUON_ROWS
                                          : MFSDP_FUSED_MUON_COMMIT;
  args.items = m->items;
  args.item_count = 1;
  args.max_count = args.total_count = ops_count(c);
  args.scalars = m->scalars;
  args.nesterov = muon.nesterov;
  args.beta1 = adamw.beta1;
  args.beta2 = c->kind == OPS_MUON_ROWS ? muon.row_beta2 : adamw.beta2;
  args.eps = c->kind == OPS_MUON_ROWS ? muon.row_eps : adamw.eps;
  args.momentum = muon.momentum;
  args.grad_weight = muon.grad_weight;
  args.nesterov_weight = muon.nesterov_weight;
  return backend->ops->fused(backend->self, queue, &args);
}

static inline mfsdp_status ops_run(const mfsdp_backend *backend, mfsdp_queue *queue,
                                   const ops_case *c, const ops_memory *m) {
  const mfsdp_backend_ops *ops = backend->ops;
  const int64_t count = ops_count(c);
  const size_t nbytes = (size_t)count * sizeof(float);
  const void *terms[3];
  terms[0] = m->narrow[0];
  terms[1] = m->narrow[1];
  terms[2] = m->narrow[2];
  switch (c->kind) {
  case OPS_COPY:
    return ops->copy(backend->self, queue, m->out, MFSDP_SPACE_DEVICE, m->x[0], MFSDP_SPACE_DEVICE,
                     nbytes);
  case OPS_FILL: return ops->fill_bytes(backend->self, queue, m->out, 0x3f, nbytes);
  case OPS_CAST_TO:
    return ops->cast(backend->self, queue, m->out, c->dtype, m->x[0], MFSDP_F32, count);
  case OPS_CAST_FROM:
    return ops->cast(backend->self, queue, m->out, MFSDP_F32, m->narrow[0], c->dtype, count);
  case OPS_SUM_TERMS:
  case OPS_SUM_MORE:
    return ops->sum_terms(backend->self, queue, m->x[3], c->kind == OPS_SUM_TERMS, terms, c->dtype,
                          3, count);
  case OPS_SUMSQ:
    return ops->sumsq(backend->self, queue, (double *)m->out, m->x[0], m->blocks,
                      (int32_t)(c->rows * c->batch));
  case OPS_NORMALIZE: return ops_run_normalize(backend, queue, c, m);
  case OPS_ADAMW:
  case OPS_MUON_PREPARE:
  case OPS_MUON_ROWS:
  case OPS_MUON_COMMIT: return ops_run_fused(backend, queue, c, m);
  default: return ops_run_product(backend, queue, c, m);
  }
}

#endif /* MFSDP_BENCH_OPS_H */
