/* SPDX-License-Identifier: MIT */
/*
 * backend.h - the compute vtable: memory, queues, events, dense and element-wise math.
 *
 * A backend is one device seen by one rank. The library's optimizers and runtime call nothing else,
 * so an implementation of this table is a port of the whole library.
 *
 *   const mfsdp_backend *b = mfsdp_host_backend_get(host);     // mfsdp/host/backend_host.h
 *   MFSDP_TRY(b->ops->queue_create(b->self, context, "compute", &queue));
 *   MFSDP_TRY(b->ops->gemm(b->self, queue, &args));          // ENQUEUED
 *   MFSDP_TRY(b->ops->event_record(b->self, queue, event));
 *   MFSDP_TRY(b->ops->event_wait(b->self, context, event, timeout_us));   // now complete
 *
 * Life cycle: create queues and events at set-up, use them for ever, destroy them when idle.
 * Entries that take a queue are ENQUEUED: host arguments (descriptions, pointer tables) are copied
 * before return, buffers must live until an event recorded later has passed. A queue whose work
 * failed skips the work behind it, passes its events, and event_wait hands its first error to the
 * context.
 *
 * Determinism: for fixed inputs, shapes and binary every entry gives the same bits in every call,
 * on every rank, whatever the alignment of its buffers and whatever other queues do.
 *
 * Does not: know ranks, transports or plans.
 * Link flags: none (the implementation says its own).
 */
#ifndef MFSDP_BACKEND_H
#define MFSDP_BACKEND_H

#include "context.h"

/* Ordered work of one backend; opaque, cast by the backend. */
typedef struct mfsdp_queue mfsdp_queue;
/* A point in a queue; made at set-up, re-recorded for ever. */
typedef struct mfsdp_event mfsdp_event;

/* Host code in queue order. Runs on the queue's thread: it must not touch the context. On failure
 * it fills *error (MFSDP_ERROR_SET) and returns the status. */
typedef mfsdp_status (*mfsdp_task)(void *argument, mfsdp_error *error);

/* A strided stack of row-major matrices. Strides in elements; row_stride >= cols. */
typedef struct mfsdp_mat {
  void *data; /* DEVICE */
  int64_t rows, cols, row_stride, batch_stride;
} mfsdp_mat;

/* d = alpha op(a) op(b) + beta c + diagonal I for each matrix of the batch. All sums are in fp32;
 * 16-bit results are rounded once, at the end. d.data may equal c.data (then with the same strides);
 * d never overlaps a or b. beta 0: c is not read and may be all zeros. A dimension of 0 is legal: an
 * empty sum is 0. */
typedef struct mfsdp_gemm_args {
  size_t struct_nbytes;
  mfsdp_mat a, b, c, d;
  int64_t batch_count;
  float alpha, beta;
  float diagonal;           /* not 0: added to d[i][i] last; needs a square d */
  mfsdp_dtype dtype;        /* of a, b, c and d: F32, BF16 or F16 */
  int32_t trans_a, trans_b; /* 1: op(x) is the transpose */
  int32_t symmetric;        /* 1: the caller knows that d and c are symmetric: one triangle may be
                               * computed, both are written. With a.data == b.data and trans_a !=
                               * trans_b this is a rank-k update; with trans_a == trans_b the
                               * caller says that a is symmetric too, so it is one as well. */
} mfsdp_gemm_args;

/* How an input is divided by its Frobenius norm before Newton-Schulz. */
typedef enum mfsdp_norm_rule {
  MFSDP_NORM_SCALE_SAFE = 1, /* x / norm, and zero stays zero: NS(c x) = NS(x) for every size */
  MFSDP_NORM_MAX_EPS,        /* x / max(norm, eps), as torch.optim.Muon */
  MFSDP_NORM_ADD_EPS         /* x / (norm + eps), as KellerJordan/Muon */
} mfsdp_norm_rule;

/* Doubles of scratch per matrix that `normalize` may use. */
#define MFSDP_NORMALIZE_SCRATCH_COUNT 512

/* dst = src / norm(src) by the rule, then times `gain`; the norm is taken in fp64 over the whole
 * matrix of `count` contiguous elements. dst may equal src if the dtypes agree. */
typedef struct mfsdp_normalize_args {
  size_t struct_nbytes;
  void *dst;        /* DEVICE, batch_count x count, dst_dtype */
  const float *src; /* DEVICE, batch_count x count */
  double *scratch;  /* DEVICE, batch_count * MFSDP_NORMALIZE_SCRATCH_COUNT */
  int64_t count, batch_count, dst_stride, src_stride; /* strides in elements */
  mfsdp_dtype dst_dtype;
  mfsdp_norm_rule rule;
  double eps, gain;
} mfsdp_normalize_args;

/* A canonical block: the unit of norms and of cutting. Tables of blocks lie in DEVICE space. */
typedef struct mfsdp_block {
  int64_t first, count; /* elements of the accumulator passed to sumsq */
  int32_t slot;         /* index into the slots passed to sumsq */
  int32_t param;
} mfsdp_block;

/* ---- fused element-wise optimizer passes: one op code, one table of items, one launch ---- */

typedef enum mfsdp_fused_op {
  /* m, v, master, param <- AdamW. states: exp_avg, exp_avg_sq. */
  MFSDP_FUSED_ADAMW = 1,
  /* direction <- momentum update of (state momentum, grad), nesterov or not. Reads the state
   * only. */
  MFSDP_FUSED_MUON_PREPARE,
  /* momentum <- its update; master <- decay and step along direction; param <- cast. */
  MFSDP_FUSED_MUON_COMMIT,
  /* states: (unread), one second moment per row. direction <- rows scaled to equal size. */
  MFSDP_FUSED_MUON_ROWS
} mfsdp_fused_op;

#define MFSDP_FUSED_STATE_COUNT 7

/* One tensor piece of a fused pass. Tables of items lie in DEVICE space; so do all pointers. */
typedef struct mfsdp_fused_item {
  float *master; /* fp32 master, count elements, updated in place */
  void *param; /* compute-dtype copy written in the same pass; NULL: the master is the parameter */
  const float *grad;                     /* unscaled fp32 accumulator */
  float *state[MFSDP_FUSED_STATE_COUNT]; /* unused ones NULL */
  float *direction; /* Muon: input of Newton-Schulz (prepare writes), its output (commit reads) */
  int64_t count;
  int64_t rows;          /* MUON_ROWS: of the matrix; count is a multiple. Unread elsewhere */
  double scale;          /* Muon: shape-dependent factor of the step */
  int32_t param_dtype;   /* mfsdp_dtype of param; unread when param is NULL */
  int32_t present_index; /* index into `present`: no gradient anywhere, no update */
} mfsdp_fused_item;

/*
 * Constants are rounded to float once, at the start; every operation is one float operation, never
 * fused, in the order written, so that any implementation of this table gives the same bits.
 * With f(x) for the rounding of a double expression x to float:
 *   g = grad * f(grad_scale * (clipped ? clip_scale : 1))
 * ADAMW:  m = f(beta1) * m + f(1 - beta1) * g
 *         v = f(beta2) * v + (f(1 - beta2) * g) * g
 *         w = w * f(1 - lr * weight_decay)
 *         w = w - f(lr / (1 - beta1^t)) * (m / (sqrtf(v) / f(sqrt(1 - beta2^t)) + f(eps)))
 * MUON:   b = f(momentum) * b + f(grad_weight) * g
 *         direction = nesterov ? f(nesterov_weight) * g + f(momentum) * b : b        (prepare)
 *         w = w * f(1 - lr * weight_decay);  w = w - f(lr * scale) * direction       (commit)
 * ROWS:   q_i = sum of squares of row i in double, v_i = f(beta2) * v_i + f(1 - beta2) * f(q_i / cols)
 *         s_i = 1 / (sqrt(v_i) + eps), t = sqrt(sum of q_i / sum of q_i s_i^2), in double
 *         direction_ij = direction_ij * f(s_i t)           (0 where the sum is 0)
 * Nothing is written when scalars->skip is set, one of its factors is no finite number, or
 * present[item.present_index] is 0.
 */
typedef struct mfsdp_fused_args {
  size_t struct_nbytes;
  mfsdp_fused_op op;
  int32_t item_count;
  const mfsdp_fused_item *items;     /* DEVICE */
  int64_t max_count, total_count;    /* largest and summed item.count: they size a launch */
  const mfsdp_step_scalars *scalars; /* DEVICE: the group's */
  const uint32_t *present;           /* DEVICE: one word per parameter; NULL: all are present */
  int32_t clipped;                   /* 1: clip_scale multiplies the gradient */
  int32_t nesterov;
  double beta1, beta2, eps;                      /* AdamW; the last two MUON_ROWS too */
  double momentum, grad_weight, nesterov_weight; /* Muon */
} mfsdp_fused_args;

/* ---- decompositions: what Shampoo and SOAP need beside products ---- */

/* A word in DEVICE memory on which the wish for a result depends, so that the host need not know:
 * NULL: it is wanted. Else it is wanted where *word is 0 (when_zero 1) or is not 0 (when_zero 0);
 * otherwise the outputs are undefined, and a backend may leave the work out. */
typedef struct mfsdp_when {
  const float *word;
  int32_t when_zero;
} mfsdp_when;

/*
 * a = V^T diag(values) V for a symmetric n x n matrix, all F32 and row-major: row i of `vectors` is the
 * unit eigenvector of values[i], values ascending. (For a column-major library that means: eigenvectors
 * as columns, as LAPACK and cuSOLVER write them, without a transposition.) Their signs, and the basis
 * of equal values, are the library's. Where a holds a number that is not finite, all of vectors and
 * values are NaN and the queue goes on. E_BACKEND, from the queue: no convergence.
 */
typedef struct mfsdp_eigh_args {
  size_t struct_nbytes;
  mfsdp_mat a, vectors; /* no overlap; batch_stride is not read */
  float *values;        /* DEVICE, n */
  mfsdp_when when;
  void *workspace; /* DEVICE */
  size_t workspace_nbytes;
} mfsdp_eigh_args;

/*
 * The rows of a n x n matrix, orthonormalized from the first to the last: a = L q with L lower
 * triangular and q orthogonal, all F32 and row-major (for a column-major library: the QR factorization
 * of the columns that it sees). By Householder reflections: q is orthogonal whatever a's rank, and the diagonal of
 * L may be negative. a that is not finite: q is NaN, and the queue goes on.
 */
typedef struct mfsdp_qr_args {
  size_t struct_nbytes;
  mfsdp_mat a, q; /* q may be a; batch_stride is not read */
  mfsdp_when when;
  void *workspace; /* DEVICE */
  size_t workspace_nbytes;
} mfsdp_qr_args;

/* ---- passes of Shampoo and SOAP over one matrix ---- */

/* State arrays of an item, by index. A side that has no preconditioner has arrays of no elements. */
enum {
  MFSDP_STATE_EXP_AVG = 0, /* rows x cols: first moment; SOAP: in the bases */
  MFSDP_STATE_GRAM_LEFT,   /* rows x rows: average of G G^T */
  MFSDP_STATE_GRAM_RIGHT,  /* cols x cols: average of G^T G */
  MFSDP_STATE_SIDE_LEFT, /* Shampoo: inverse 4th root of it. SOAP: its basis, a vector in each row */
  MFSDP_STATE_SIDE_RIGHT,
  MFSDP_STATE_EXP_AVG_SQ, /* rows x cols: second moment; SOAP: in the bases. Shampoo: AdamW grafting */
  MFSDP_STATE_UPDATES     /* SOAP: one number: gradients taken since the bases were made */
};

/* How Shampoo's direction gets its size. */
typedef enum mfsdp_graft {
  MFSDP_GRAFT_ADAMW = 1, /* the norm of AdamW's direction */
  MFSDP_GRAFT_SGD,       /* the norm of the first moment */
  MFSDP_GRAFT_NONE       /* its own */
} mfsdp_graft;

typedef enum mfsdp_precondition_op {
  MFSDP_SHAMPOO_PREPARE = 1,
  MFSDP_SHAMPOO_ROOTS, /* one side: the root in use */
  MFSDP_SHAMPOO_SCALE, /* one side: eigenvectors by the roots of their values */
  MFSDP_SHAMPOO_COMMIT,
  MFSDP_SOAP_PREPARE,
  MFSDP_SOAP_MOMENTS,
  MFSDP_SOAP_SORT,  /* one side: what qr will get */
  MFSDP_SOAP_START, /* one side: the first basis */
  MFSDP_SOAP_COMMIT
} mfsdp_precondition_op;

/*
 * The arrays of one matrix, all DEVICE and fp32. Names with next_ are candidates: they become state in
 * COMMIT, which is predicated. f(x) as at mfsdp_fused_args; moments and steps are single float
 * operations in the order written. t = scalars->applied_steps, or, of SOAP, state UPDATES.
 * SHAMPOO_PREPARE:  g = grad * f(grad_scale * (clipped ? clip_scale : 1))
 *                   next_exp_avg = f(beta1) * exp_avg + f(1 - beta1) * g
 *                   AdamW grafting: next_exp_avg_sq = f(beta2) * exp_avg_sq + (f(1 - beta2) * g) * g
 * SHAMPOO_ROOTS:    next_side = state SIDE, or I while that is all zeros (its first element is)
 * SHAMPOO_SCALE:    row i of square *= f((c values_i - min(0, c values_0) + eps)^(-1/8)),
 *                   c = gram_beta < 1 ? 1 / (1 - gram_beta^t) : 1
 * SHAMPOO_COMMIT:   m = next_exp_avg / (1 - beta1^t), v = next_exp_avg_sq / (1 - beta2^t) (in double,
 *                   for norms alone); s = NONE: 1 / (1 - beta1^t); SGD: |m| / |direction|;
 *                   ADAMW: |m / (sqrt(v) + graft_eps)| / |direction|; 0 where |direction| is 0
 *                   w = w * f(1 - lr * weight_decay);  w = w - f(lr * s) * direction
 *                   all next_ but next_side to the state, that too with `refresh`
 * SOAP_PREPARE:     g as above
 * SOAP_MOMENTS:     projected holds G in the bases: next_exp_avg and next_exp_avg_sq of it as above,
 *                   projected = next_exp_avg / (sqrtf(next_exp_avg_sq) + f(eps))
 * SOAP_SORT:        estimate_i = square_i . SIDE_i (row dots in double, square = SIDE GRAM); rows of
 *                   square in descending order of it to next_side, and next_exp_avg_sq along this
 *                   side in the same order to `other`; equal ones keep their order
 * SOAP_START:       t 0 only: rows of square (eigenvectors, ascending) in reverse to next_side
 * SOAP_COMMIT:      t 0: the Gram matrices to the state; with `start` the sides too, and t = 1
 *                   else: w = w - f(lr * sqrt(1 - beta2^t) / (1 - beta1^t)) * direction
 *                         w = w * f(1 - lr * weight_decay), state as Shampoo's, t = t + 1
 * PREPARE and COMMIT write nothing when scalars->skip is set or the item is not present, and COMMIT
 * nothing where a candidate, the factor of direction or SOAP's first g is not finite (the square of a
 * gradient beyond 1e18 may not be).
 */
typedef struct mfsdp_precondition_args {
  size_t struct_nbytes;
  mfsdp_precondition_op op;
  int32_t side;          /* 0 left, 1 right; of the passes over one side */
  int64_t rows, cols;    /* at least 1 of each */
  mfsdp_fused_item item; /* by value: master, param, grad, states, count, present_index are read */
  float *grad, *next_exp_avg, *next_exp_avg_sq, *other, *projected, *direction; /* rows x cols */
  float *next_gram[2], *next_side[2]; /* NULL: a side without a preconditioner */
  float *square, *values;             /* of the longer side: squared, and three times its length */
  int32_t refresh, start, clipped;
  mfsdp_graft graft;
  double beta1, beta2, gram_beta, eps, graft_eps;
  const mfsdp_step_scalars *scalars; /* DEVICE */
  const uint32_t *present;           /* DEVICE; NULL: present */
} mfsdp_precondition_args;

/* ---- the verdict: from every rank's scalar message to this step's scalars ---- */

/* A rank's message, in 8-byte words:
 * [flags][value_capacity values][if weighted: value_capacity weights][presence words][block sums].
 * Flags: bit 0 = stop requested; the others are a hash of what the rank was told of the step. Values,
 * weights and sums are fp64 bit patterns. Presence: bit p % 64 of word p / 64 is set if this rank
 * had a gradient for parameter p in this step. */
#define MFSDP_MESSAGE_STOP UINT64_C(1)

/* What the host reads of a step. */
typedef struct mfsdp_verdict_record {
  double grad_norm; /* global L2 norm of the scaled gradient, before clipping */
  double clip_scale;
  double value_mean;     /* mean of the reported values over all sample blocks; NaN if none */
  double weight_sum;     /* of all sample blocks' weights; 0 unless weighted */
  int64_t applied_steps; /* of group 0, this step included */
  uint32_t skip;         /* 1: some gradient was not finite, or ranks differ; nothing was updated */
  uint32_t stop;
  int64_t differs; /* the first rank whose flags hash another step than rank 0's; -1: none */
} mfsdp_verdict_record;

/* lr and decay of a hyperparameter group before schedule: the verdict writes them to the
 * scalars. */
typedef struct mfsdp_group_rates {
  double lr, weight_decay;
} mfsdp_group_rates;

/*
 * Folds the messages in tensor order, which does not depend on the world size: sum of squares over
 * blocks in the order of block_word; value and weight j belong to rank j % world's micro-batch
 * j / world and are added in the order of j.
 * scale = weighted ? grad_scale / sum of weights : grad_scale, over loss_scale.
 * skip = the sum of squares is not finite, grad_norm or |scale| is above 2^127 (the update is in
 * fp32), or the weights' sum is not positive and finite.
 * grad_norm = sqrt(sum) * |scale|. clip_scale = clip_norm > 0 ? min(1, clip_norm / (grad_norm +
 * 1e-6)) : 1 (torch.nn.utils.clip_grad_norm_). value_mean = sum of values / value_count, or,
 * weighted, sum of weight * value / sum of weights; values of weight 0 are left out. applied_steps
 * advances in every group unless skip is set.
 */
typedef struct mfsdp_verdict_args {
  size_t struct_nbytes;
  const uint64_t *messages;  /* DEVICE */
  const int64_t *rank_word;  /* DEVICE: world entries: first word of each rank's message */
  const int64_t *block_word; /* DEVICE: block_count entries: word of each block sum, tensor order */
  int64_t block_count;
  int32_t world, param_count, group_count;
  int32_t value_capacity; /* value words in each message */
  int32_t value_count;    /* values of all ranks together: world x micro-batches of the step */
  const mfsdp_group_rates *rates; /* DEVICE: group_count */
  double lr_factor, grad_scale, loss_scale,
      clip_norm;                /* loss_scale: what the gradient was multiplied by */
  int32_t weighted;             /* 1: the mean is over weights (tokens) instead of sample blocks */
  int32_t missing_is_zero;      /* 1: a parameter without gradient anywhere is updated with zeros */
  uint32_t *present;            /* DEVICE: param_count words, written */
  mfsdp_step_scalars *scalars;  /* DEVICE: group_count, updated */
  mfsdp_verdict_record *record; /* PINNED: written */
} mfsdp_verdict_args;

/*
 * The table. R: required. O: optional (NULL, or beyond struct_nbytes: absent; test with MFSDP_HAS).
 * Backends reject what they cannot do with E_UNSUPPORTED, at the call, never by a wrong result.
 */
typedef struct mfsdp_backend_ops {
  size_t struct_nbytes;
  const char *name;

  /* R. COMPLETE. nbytes > 0; contents undefined; booked by the caller (mfsdp_buffer_alloc). */
  mfsdp_status (*mem_alloc)(void *self, mfsdp_context *context, size_t nbytes, size_t alignment,
                            mfsdp_space space, void **out);
  /* R. */
  void (*mem_free)(void *self, mfsdp_context *context, void *ptr, size_t nbytes, mfsdp_space space);
  /* R. `label` is a string literal: the queue's lane in traces. */
  mfsdp_status (*queue_create)(void *self, mfsdp_context *context, const char *label,
                               mfsdp_queue **out);
  /* R. The queue must be idle or failed. NULL is allowed. */
  void (*queue_destroy)(void *self, mfsdp_context *context, mfsdp_queue *queue);
  mfsdp_status (*event_create)(void *self, mfsdp_context *context, mfsdp_event **out); /* R */
  void (*event_destroy)(void *self, mfsdp_context *context, mfsdp_event *event);       /* R */
  /* R. An event never recorded counts as passed. */
  mfsdp_status (*event_record)(void *self, mfsdp_queue *queue, mfsdp_event *event);
  /* R. The queue waits for the event; the host goes on. */
  mfsdp_status (*queue_wait)(void *self, mfsdp_queue *queue, mfsdp_event *event);
  /* R. *done = 1 if the event has passed. Never blocks. */
  mfsdp_status (*event_query)(void *self, mfsdp_event *event, int32_t *done);
  /* R. Blocks the host, without spinning for long; E_TIMEOUT after timeout_us. Returns the queue's
   * first error, if it failed. */
  mfsdp_status (*event_wait)(void *self, mfsdp_context *context, mfsdp_event *event,
                             int64_t timeout_us);
  /* R. Host code in queue order. */
  mfsdp_status (*queue_call)(void *self, mfsdp_queue *queue, mfsdp_task task, void *argument);
  /* R. Between any two spaces; the ranges do not overlap. nbytes 0 is legal with NULL pointers. */
  mfsdp_status (*copy)(void *self, mfsdp_queue *queue, void *dst, mfsdp_space dst_space,
                       const void *src, mfsdp_space src_space, size_t nbytes);
  /* R. Every byte of dst (DEVICE) becomes `byte`: 0 clears, 0xff makes NaN of every float dtype. */
  mfsdp_status (*fill_bytes)(void *self, mfsdp_queue *queue, void *dst, int32_t byte,
                             size_t nbytes);
  /* R. Round to nearest even; NaN stays NaN; overflow becomes infinity. DEVICE, no overlap. */
  mfsdp_status (*cast)(void *self, mfsdp_queue *queue, void *dst, mfsdp_dtype dst_dtype,
                       const void *src, mfsdp_dtype src_dtype, int64_t count);
  /* R. acc = (first ? 0-free start : acc) + terms[0] + terms[1] + ... in this order, each addition
   * one fp32 rounding; with `first` the chain starts from terms[0] itself. `terms`: host array of
   * term_count (>= 1) DEVICE pointers of `dtype`. */
  mfsdp_status (*sum_terms)(void *self, mfsdp_queue *queue, float *acc, int32_t first,
                            const void *const *terms, mfsdp_dtype dtype, int32_t term_count,
                            int64_t count);
  /* R. slots[block.slot] = sum of squares of acc[block.first ...] in fp64, one fixed order for each
   * block length. `blocks` DEVICE. */
  mfsdp_status (*sumsq)(void *self, mfsdp_queue *queue, double *slots, const float *acc,
                        const mfsdp_block *blocks, int32_t block_count);
  mfsdp_status (*verdict_fold)(void *self, mfsdp_queue *queue,
                               const mfsdp_verdict_args *args);                      /* R */
  mfsdp_status (*gemm)(void *self, mfsdp_queue *queue, const mfsdp_gemm_args *args); /* R */
  mfsdp_status (*normalize)(void *self, mfsdp_queue *queue,
                            const mfsdp_normalize_args *args);                         /* R */
  mfsdp_status (*fused)(void *self, mfsdp_queue *queue, const mfsdp_fused_args *args); /* R */
  /* O. Bytes of DEVICE workspace, aligned to MFSDP_ALIGN_NBYTES, that eigh of n x n, or qr of n rows of
   * n, may use. COMPLETE. n at least 0. */
  mfsdp_status (*eigh_workspace_nbytes)(void *self, mfsdp_context *context, int64_t n, size_t *out);
  mfsdp_status (*qr_workspace_nbytes)(void *self, mfsdp_context *context, int64_t n, size_t *out);
  mfsdp_status (*eigh)(void *self, mfsdp_queue *queue, const mfsdp_eigh_args *args); /* O */
  mfsdp_status (*qr)(void *self, mfsdp_queue *queue, const mfsdp_qr_args *args);     /* O */
  /* O. The passes of Shampoo and SOAP that are no products. */
  mfsdp_status (*precondition)(void *self, mfsdp_queue *queue, const mfsdp_precondition_args *args);
} mfsdp_backend_ops;

/* What holds for a backend beyond its table; transports ask for it. A GPU has neither. */
typedef enum mfsdp_backend_trait {
  MFSDP_BACKEND_HOST_MEMORY = 1,   /* tasks may read and write DEVICE memory */
  MFSDP_BACKEND_TASKS_MAY_WAIT = 2 /* for tasks of other queues, and so of other ranks */
} mfsdp_backend_trait;

typedef struct mfsdp_backend {
  size_t struct_nbytes;
  const mfsdp_backend_ops *ops;
  void *self;
  uint32_t traits; /* of mfsdp_backend_trait */
} mfsdp_backend;

/* One f32 product of alpha 1 and beta 0, nothing transposed; the matrices must be set. */
MFSDP_API mfsdp_gemm_args mfsdp_gemm_args_default(void) {
  mfsdp_gemm_args args;
  memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.batch_count = 1;
  args.alpha = 1.0f;
  args.dtype = MFSDP_F32;
  return args;
}

/* E_ARGUMENT unless the backend has every required entry. The message names the first missing
 * one. */
MFSDP_API mfsdp_status mfsdp_backend_check(mfsdp_context *context, const mfsdp_backend *backend) {
  const mfsdp_backend_ops *ops;
  if (backend == NULL || backend->ops == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "backend: NULL, or without a table of operations");
  if (backend->struct_nbytes < sizeof(*backend))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "backend: struct_nbytes is %zu, needs %zu",
                      backend->struct_nbytes, sizeof(*backend));
  ops = backend->ops;
#define MFSDP__NEED(entry)                                                                         \
  if (!MFSDP_HAS(ops, entry))                                                                      \
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "backend %s: the required operation %s is missing", \
                    ops->name ? ops->name : "(unnamed)", #entry)
  MFSDP__NEED(mem_alloc);
  MFSDP__NEED(mem_free);
  MFSDP__NEED(queue_create);
  MFSDP__NEED(queue_destroy);
  MFSDP__NEED(event_create);
  MFSDP__NEED(event_destroy);
  MFSDP__NEED(event_record);
  MFSDP__NEED(queue_wait);
  MFSDP__NEED(event_query);
  MFSDP__NEED(event_wait);
  MFSDP__NEED(queue_call);
  MFSDP__NEED(copy);
  MFSDP__NEED(fill_bytes);
  MFSDP__NEED(cast);
  MFSDP__NEED(sum_terms);
  MFSDP__NEED(sumsq);
  MFSDP__NEED(verdict_fold);
  MFSDP__NEED(gemm);
  MFSDP__NEED(normalize);
  MFSDP__NEED(fused);
#undef MFSDP__NEED
  return MFSDP_OK;
}

/* ---- trace marks in queue order ---- */

/* Begin or end of a phase. It must outlive the queue's work: set-up makes one for each phase. */
typedef struct mfsdp_trace_mark {
  const mfsdp_context
      *context; /* its trace callback and user; the queue's thread reads only these */
  const char *lane, *label;
  int32_t begin;
} mfsdp_trace_mark;

MFSDP_API mfsdp_status mfsdp__trace_task(void *argument, mfsdp_error *error) {
  const mfsdp_trace_mark *mark = (const mfsdp_trace_mark *)argument;
  (void)error;
  mark->context->desc.trace(mark->context->desc.user, mark->begin, mark->lane, mark->label);
  return MFSDP_OK;
}

/* begin 1 opens the phase `label` on `lane`, 0 closes it. The strings must outlive the mark. */
MFSDP_API mfsdp_trace_mark mfsdp_trace_mark_make(const mfsdp_context *context, int32_t begin,
                                                 const char *lane, const char *label) {
  mfsdp_trace_mark mark;
  mark.context = context;
  mark.lane = lane;
  mark.label = label;
  mark.begin = begin;
  return mark;
}

/* The context's trace callback runs when the queue gets there. ENQUEUED; nothing without a
 * callback. */
MFSDP_API mfsdp_status mfsdp_trace_mark_enqueue(const mfsdp_backend *backend, mfsdp_queue *queue,
                                                mfsdp_trace_mark *mark) {
  if (mark->context->desc.trace == NULL) return MFSDP_OK;
  return backend->ops->queue_call(backend->self, queue, mfsdp__trace_task, mark);
}

/* ---- accounted buffers ---- */

/* A buffer in a backend's memory together with what is needed to give it back. */
typedef struct mfsdp_buffer {
  void *data; /* NULL when nbytes is 0 */
  size_t nbytes;
  mfsdp_space space;
  mfsdp_memory_class memory_class;
} mfsdp_buffer;

/*
 * Allocates nbytes (0 is legal: data NULL), aligned to MFSDP_ALIGN_NBYTES, and books them.
 * `what` names the buffer in the message. E_MEMORY, or the backend's error. COMPLETE.
 */
MFSDP_API mfsdp_status mfsdp_buffer_alloc(mfsdp_context *context, const mfsdp_backend *backend,
                                          size_t nbytes, mfsdp_space space,
                                          mfsdp_memory_class memory_class, mfsdp_buffer *out) {
  out->data = NULL;
  out->nbytes = 0;
  out->space = space;
  out->memory_class = memory_class;
  if (nbytes == 0) return MFSDP_OK;
  MFSDP_TRY(backend->ops->mem_alloc(backend->self, context, nbytes, MFSDP_ALIGN_NBYTES, space,
                                    &out->data));
  out->nbytes = nbytes;
  mfsdp_memory_book(context, memory_class, nbytes);
  return MFSDP_OK;
}

/* Gives a buffer back; an empty one is allowed. The caller guarantees that no queue uses it. */
MFSDP_API void mfsdp_buffer_free(mfsdp_context *context, const mfsdp_backend *backend,
                                 mfsdp_buffer *buffer) {
  if (buffer->data == NULL) return;
  mfsdp_memory_unbook(context, buffer->memory_class, buffer->nbytes);
  backend->ops->mem_free(backend->self, context, buffer->data, buffer->nbytes, buffer->space);
  buffer->data = NULL;
  buffer->nbytes = 0;
}

#endif /* MFSDP_BACKEND_H */
