/* SPDX-License-Identifier: MIT */
/*
 * kernels.h - the one door to kernels.cu: a table of functions that enqueue the library's kernels.
 *
 *   nvcc -O3 -Xcompiler -fvisibility=hidden -c mfsdp/cuda/kernels.cu     // once in your program
 *   const mfsdp_cuda_kernels *k = mfsdp_cuda_kernels_v1();
 *   int error = k->cast(&lane, dst, MFSDP_BF16, src, MFSDP_F32, count);  // a cudaError_t; ENQUEUED
 *
 * The kernels are static and the table's getter is hidden and carries the version in its name, so
 * that two shared libraries of one process may have vendored two versions of this library.
 * Includes nothing of CUDA. Arguments are checked by backend_cuda.h; pointers are DEVICE memory
 * unless they say otherwise; no kernel needs an alignment beyond that of its elements (16 bytes make
 * it faster) and none gives other bits for another alignment.
 *
 * Failure inside a queue: `failed` of a lane is a word of device memory, 0 or the number of the
 * work that failed. Kernels do nothing where it is set. What was wrong stands in the lane's note, in
 * pinned memory, for the host.
 * Link flags: -lcudart.
 */
#ifndef MFSDP_CUDA_KERNELS_H
#define MFSDP_CUDA_KERNELS_H

#include "../backend.h"

struct CUstream_st;

#define MFSDP_CUDA_KERNELS_VERSION 1

/* What a kernel or a task found wrong. */
typedef enum mfsdp_cuda_fault {
  MFSDP_CUDA_FAULT_NONE = 0,
  MFSDP_CUDA_FAULT_BLOCK,  /* detail: first, count, slot of block `index` */
  MFSDP_CUDA_FAULT_ITEM,   /* detail[0]: mfsdp_cuda_item_fault of item `index` */
  MFSDP_CUDA_FAULT_STEPS,  /* detail[0]: applied_steps */
  MFSDP_CUDA_FAULT_TASK,   /* `error` says it */
  MFSDP_CUDA_FAULT_SOLVER, /* detail: info of routine `index` (0 syevd, 1 geqrf, 2 orgqr), and n */
  MFSDP_CUDA_FAULT_PRECONDITION_STEPS /* detail[0]: applied_steps */
} mfsdp_cuda_fault;

/* X(suffix, what a fused item has) */
#define MFSDP_CUDA_ITEM_FAULTS(X)          \
  X(COUNT, "a negative count")             \
  X(PRESENT, "a negative present_index")   \
  X(DIRECTION, "no direction")             \
  X(STATE0, "no state 0")                  \
  X(STATE1, "no state 1")                  \
  X(ROWS, "rows that do not divide count") \
  X(GRAD, "no grad")                       \
  X(MASTER, "no master")                   \
  X(PARAM, "an invalid param_dtype")

typedef enum mfsdp_cuda_item_fault {
  MFSDP_CUDA_ITEM_FINE = 0,
#define MFSDP__CUDA_ITEM_FAULT(suffix, text) MFSDP_CUDA_ITEM_##suffix,
  MFSDP_CUDA_ITEM_FAULTS(MFSDP__CUDA_ITEM_FAULT)
#undef MFSDP__CUDA_ITEM_FAULT
      MFSDP_CUDA_ITEM_FAULT_COUNT
} mfsdp_cuda_item_fault;

/* The first failure of a queue. PINNED: device and host write it, in stream order. */
typedef struct mfsdp_cuda_note {
  int64_t failed_at; /* number of the work that failed, from 1; 0: none */
  int32_t fault, index;
  int64_t detail[3];
  const struct mfsdp_cuda_note *origin; /* the queue whose failure this one took over; NULL: own */
  mfsdp_error error;                    /* of a task; host only */
} mfsdp_cuda_note;

/* Doubles of scratch that a lane has. */
#define MFSDP_CUDA_SCRATCH_COUNT 65536

/* What every kernel of a queue is given. */
typedef struct mfsdp_cuda_lane {
  struct CUstream_st *stream;
  int64_t *failed;       /* DEVICE: one word */
  mfsdp_cuda_note *note; /* PINNED */
  double *scratch;       /* DEVICE: MFSDP_CUDA_SCRATCH_COUNT; of the work that runs */
  int64_t number;        /* of this work, for the note */
  int32_t block_limit;   /* blocks that fill the device */
} mfsdp_cuda_lane;

/* Words of a decomposition: what is to become of its result, the power of two that its input was scaled
 * by, and the infos of cuSOLVER's routines. */
enum {
  MFSDP_CUDA_SOLVE_STATE = 0,
  MFSDP_CUDA_SOLVE_SCALE,
  MFSDP_CUDA_SOLVE_FIRST_INFO,
  MFSDP_CUDA_SOLVE_SECOND_INFO,
  MFSDP_CUDA_SOLVE_WORDS
};

/* A decomposition around the calls of cuSOLVER, which run whatever the device has found meanwhile. */
typedef struct mfsdp_cuda_solve {
  mfsdp_mat a, to; /* n x n; `to` may be a */
  float *values;   /* n eigenvalues; NULL: qr */
  mfsdp_when when;
  int32_t *words; /* MFSDP_CUDA_SOLVE_WORDS */
} mfsdp_cuda_solve;

/* Terms that one call of sum_terms takes. */
#define MFSDP_CUDA_TERMS 48

/* Functions enqueue and return a cudaError_t as an int. */
typedef struct mfsdp_cuda_kernels {
  size_t struct_nbytes;
  int32_t version;
  /* cudaSuccess if the device can run these kernels. COMPLETE. */
  int (*probe)(void);
  /* The lane fails too if `from` failed at number `upto` or before. */
  int (*pull)(const mfsdp_cuda_lane *lane, const mfsdp_cuda_note *from, int64_t upto);
  int (*cast)(const mfsdp_cuda_lane *lane, void *dst, mfsdp_dtype dst_dtype, const void *src,
              mfsdp_dtype src_dtype, int64_t count);
  /* terms: HOST, copied; at most MFSDP_CUDA_TERMS. */
  int (*sum_terms)(const mfsdp_cuda_lane *lane, float *acc, int32_t first, const void *const *terms,
                   mfsdp_dtype dtype, int32_t term_count, int64_t count);
  int (*sumsq)(const mfsdp_cuda_lane *lane, double *slots, const float *acc,
               const mfsdp_block *blocks, int32_t block_count);
  int (*verdict)(const mfsdp_cuda_lane *lane, const mfsdp_verdict_args *args);
  int (*normalize)(const mfsdp_cuda_lane *lane, const mfsdp_normalize_args *args);
  int (*fused)(const mfsdp_cuda_lane *lane, const mfsdp_fused_args *args);
  /* d = beta c + diagonal I; beta 0: c is not read. d may be c. */
  int (*scale)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args);
  /* d[i][i] += diagonal, F32. */
  int (*add_diagonal)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args);
  /* BF16 and F16, where cuBLAS would round before the diagonal is added: values[matrix][i] becomes
   * d[i][i] in full, before the product; it is rounded and stored behind it. */
  int (*diagonal_values)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args, float *values);
  int (*diagonal_store)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args,
                        const float *values);
  /* The lower triangle of c, diagonal too, to d. */
  int (*copy_lower)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args);
  /* The upper triangle of each square d from its lower one. */
  int (*mirror)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args);
  /* pointers[0..2][product]: where b, a and d of each tile of the lower triangle start, for matrices
   * [first, first + count); tiles of `side` rows and columns, `tiles` of them along an edge. */
  int (*tile_pointers)(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args, void **pointers,
                       int64_t first, int64_t count, int64_t side, int32_t tiles);
  /* to[cols][rows] = from[rows][cols], elements of 2 or 4 bytes; no overlap. */
  int (*transpose)(const mfsdp_cuda_lane *lane, void *to, int64_t to_stride, const void *from,
                   int64_t from_stride, int64_t rows, int64_t cols, int32_t element_nbytes);
  /* to = a times a power of two, close to 1, for a routine may square numbers; zeros, which any routine can work on, where the result is not wanted, a is not finite or the
   * queue has failed. */
  int (*solve_begin)(const mfsdp_cuda_lane *lane, const mfsdp_cuda_solve *solve);
  /* Values scaled back; NaN where a was not finite; the lane fails where a wanted result has an info that is not 0. */
  int (*solve_end)(const mfsdp_cuda_lane *lane, const mfsdp_cuda_solve *solve);
  int (*precondition)(const mfsdp_cuda_lane *lane, const mfsdp_precondition_args *args);
} mfsdp_cuda_kernels;

/* The one name of the library that a linker sees. Two versions in one program, not in two shared
 * libraries, need -DMFSDP_PREFIX=name for one of them, in all its files and kernels.cu. */
#ifdef MFSDP_PREFIX
#define MFSDP__PREFIXED2(prefix, name) prefix##name
#define MFSDP__PREFIXED(prefix, name) MFSDP__PREFIXED2(prefix, name)
#define mfsdp_cuda_kernels_v1 MFSDP__PREFIXED(MFSDP_PREFIX, _cuda_kernels_v1)
#endif

#if defined(__cplusplus)
extern "C" {
#endif
/* The table; never NULL. */
__attribute__((visibility("hidden"))) const mfsdp_cuda_kernels *mfsdp_cuda_kernels_v1(void);
#if defined(__cplusplus)
}
#endif

#endif /* MFSDP_CUDA_KERNELS_H */
