/* SPDX-License-Identifier: MIT */
/*
 * types.h - the vocabulary of the library: dtypes, memory spaces, roles, traffic classes, checked
 * size arithmetic, a canonical hash.
 *
 *   size_t nbytes;
 *   if (!mfsdp_size_mul((size_t)rows, (size_t)cols, &nbytes) ||
 *       !mfsdp_size_mul(nbytes, mfsdp_dtype_nbytes(MFSDP_BF16), &nbytes))
 *     return MFSDP_E_OVERFLOW;
 *
 * Does not: allocate or convert values (dtype.h converts).
 * Link flags: none.
 */
#ifndef MFSDP_TYPES_H
#define MFSDP_TYPES_H

#include "status.h"

/* Zero is never a valid dtype, role, space or class: a forgotten field is caught, not guessed. */
typedef enum mfsdp_dtype { MFSDP_F32 = 1, MFSDP_F64, MFSDP_BF16, MFSDP_F16 } mfsdp_dtype;

/* Bytes of one element; 0 for an invalid dtype. */
MFSDP_API size_t mfsdp_dtype_nbytes(mfsdp_dtype dtype) {
  switch (dtype) {
  case MFSDP_F32: return 4;
  case MFSDP_F64: return 8;
  case MFSDP_BF16:
  case MFSDP_F16: return 2;
  }
  return 0;
}

/* The dtype in lower case, as "bf16"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_dtype_name(mfsdp_dtype dtype) {
  switch (dtype) {
  case MFSDP_F32: return "f32";
  case MFSDP_F64: return "f64";
  case MFSDP_BF16: return "bf16";
  case MFSDP_F16: return "f16";
  }
  return "invalid";
}

/* Where memory lies. On the host backend all three are ordinary memory. */
typedef enum mfsdp_space {
  MFSDP_SPACE_DEVICE = 1, /* what the backend computes on */
  MFSDP_SPACE_PINNED,     /* host memory that the device and the network copy without staging */
  MFSDP_SPACE_HOST        /* ordinary host memory */
} mfsdp_space;

/* How a tensor is updated. Stated by the caller, never guessed from its shape or name. */
typedef enum mfsdp_role {
  MFSDP_ROLE_MATRIX = 1,  /* the optimizer needs whole matrices: never cut */
  MFSDP_ROLE_ELEMENTWISE, /* updated element by element: may be cut at canonical blocks */
  MFSDP_ROLE_FROZEN       /* materialized, never updated, no gradient */
} mfsdp_role;

/* The role in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_role_name(mfsdp_role role) {
  switch (role) {
  case MFSDP_ROLE_MATRIX: return "matrix";
  case MFSDP_ROLE_ELEMENTWISE: return "elementwise";
  case MFSDP_ROLE_FROZEN: return "frozen";
  }
  return "invalid";
}

/* What bytes on the wire are for. Counters are kept by class. */
typedef enum mfsdp_traffic {
  MFSDP_TRAFFIC_MATERIALIZE = 1,  /* gathers of full parameters */
  MFSDP_TRAFFIC_REDUCE,           /* gradients to their owners */
  MFSDP_TRAFFIC_OPTIMIZER_MATRIX, /* matrices moved for the sake of the optimizer step */
  MFSDP_TRAFFIC_SCALAR,           /* norms, flags, losses */
  MFSDP_TRAFFIC_EXPORT            /* full parameters for saving or evaluation elsewhere */
} mfsdp_traffic;
#define MFSDP_TRAFFIC_CLASS_COUNT 6 /* class 0 stays empty, so that a class is an index */

/* The class in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_traffic_name(mfsdp_traffic traffic) {
  switch (traffic) {
  case MFSDP_TRAFFIC_MATERIALIZE: return "materialize";
  case MFSDP_TRAFFIC_REDUCE: return "reduce";
  case MFSDP_TRAFFIC_OPTIMIZER_MATRIX: return "optimizer_matrix";
  case MFSDP_TRAFFIC_SCALAR: return "scalar";
  case MFSDP_TRAFFIC_EXPORT: return "export";
  }
  return "invalid";
}

/* Tensors and pieces start on multiples of this many elements, so that vectors and DMA engines of
 * any dtype find aligned starts. */
#define MFSDP_ALIGN_ELEMENTS 128
/* Alignment of every buffer the library allocates. */
#define MFSDP_ALIGN_NBYTES 256
#define MFSDP_MAX_NDIM 8

/* ---- checked size arithmetic: 1 on success, 0 on overflow (then *out is not to be used) ---- */

/* *out = a + b. */
MFSDP_API int mfsdp_size_add(size_t a, size_t b, size_t *out) {
  return !__builtin_add_overflow(a, b, out);
}

/* *out = a * b. */
MFSDP_API int mfsdp_size_mul(size_t a, size_t b, size_t *out) {
  return !__builtin_mul_overflow(a, b, out);
}

/* *out = a + b. */
MFSDP_API int mfsdp_i64_add(int64_t a, int64_t b, int64_t *out) {
  return !__builtin_add_overflow(a, b, out);
}

/* *out = a * b. */
MFSDP_API int mfsdp_i64_mul(int64_t a, int64_t b, int64_t *out) {
  return !__builtin_mul_overflow(a, b, out);
}

/* Smallest multiple of MFSDP_ALIGN_ELEMENTS that is >= count; count >= 0. 0 on overflow. */
MFSDP_API int mfsdp_i64_align(int64_t count, int64_t *out) {
  int64_t padded;
  if (!mfsdp_i64_add(count, MFSDP_ALIGN_ELEMENTS - 1, &padded)) return 0;
  *out = padded - padded % MFSDP_ALIGN_ELEMENTS;
  return 1;
}

/* count elements of `dtype` in bytes; 0 on overflow, a negative count or an invalid dtype. */
MFSDP_API int mfsdp_elements_nbytes(int64_t count, mfsdp_dtype dtype, size_t *out) {
  const size_t element_nbytes = mfsdp_dtype_nbytes(dtype);
  if (count < 0 || element_nbytes == 0 || (uint64_t)count > SIZE_MAX) return 0;
  return mfsdp_size_mul((size_t)count, element_nbytes, out);
}

/* 1 if two ranges of memory share no byte; an empty one may lie anywhere but inside the other. */
MFSDP_API int mfsdp_ranges_apart(const void *a, size_t a_nbytes, const void *b, size_t b_nbytes) {
  const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
  return x < y ? y - x >= a_nbytes : x - y >= b_nbytes;
}

/* ---- 64-bit FNV-1a over little-endian bytes: the same on every machine; not cryptographic ---- */

#define MFSDP_HASH_SEED UINT64_C(14695981039346656037)

/* `hash` goes on over nbytes bytes of data (NULL if 0); start with MFSDP_HASH_SEED. */
MFSDP_API uint64_t mfsdp_hash_bytes(uint64_t hash, const void *data, size_t nbytes) {
  const unsigned char *bytes = (const unsigned char *)data;
  size_t i;
  for (i = 0; i < nbytes; ++i)
    hash = (hash ^ bytes[i]) * UINT64_C(1099511628211);
  return hash;
}

/* The same over the eight bytes of an integer, low byte first. */
MFSDP_API uint64_t mfsdp_hash_u64(uint64_t hash, uint64_t value) {
  int shift;
  for (shift = 0; shift < 64; shift += 8)
    hash = (hash ^ ((value >> shift) & 0xffu)) * UINT64_C(1099511628211);
  return hash;
}

/* ---- step scalars: what the verdict decides and the optimizer kernels obey ---- */

/*
 * One per hyperparameter group, in the backend's DEVICE space. Written only by the verdict; every
 * kernel that writes state or parameters reads it and does nothing when `skip` is set, so no
 * verdict forces the host to wait for the device.
 */
typedef struct mfsdp_step_scalars {
  double lr; /* step size of this step, schedule included */
  double weight_decay;
  double grad_scale; /* the gradient is accumulator * grad_scale (mean over samples, loss scale) */
  double clip_scale; /* at most 1; multiplies the gradient of clipped parameters */
  int64_t applied_steps; /* t of the bias corrections, this step included; skips do not count */
  uint32_t skip;         /* 1: touch no state and no parameter */
  uint32_t stop;         /* 1: some rank asked to stop; every rank sees the same value */
} mfsdp_step_scalars;

/* Whether a step writes anything: it is not skipped, and its factors are numbers. */
MFSDP_DEVICE_API int mfsdp_step_scalars_write(const mfsdp_step_scalars *s) {
  return !s->skip && s->lr - s->lr == 0.0 && s->weight_decay - s->weight_decay == 0.0 &&
         s->grad_scale - s->grad_scale == 0.0 && s->clip_scale - s->clip_scale == 0.0;
}

/* lr and decay given, unscaled and unclipped gradients, first step, nothing skipped. */
MFSDP_API mfsdp_step_scalars mfsdp_step_scalars_default(double lr, double weight_decay) {
  mfsdp_step_scalars scalars;
  memset(&scalars, 0, sizeof(scalars));
  scalars.lr = lr;
  scalars.weight_decay = weight_decay;
  scalars.grad_scale = 1.0;
  scalars.clip_scale = 1.0;
  scalars.applied_steps = 1;
  return scalars;
}

#endif /* MFSDP_TYPES_H */
