/* SPDX-License-Identifier: MIT */
/*
 * kernels.cu - the library's kernels, behind the table of kernels.h.
 *
 *   nvcc -std=c++17 -O3 -arch=sm_90 -Xcompiler -fvisibility=hidden -c mfsdp/cuda/kernels.cu
 *
 * Every operation whose bits are promised is an intrinsic of one rounding, so that no compiler flag
 * fuses it. Grid-stride loops with 64-bit indices; 16-byte accesses where the pointers allow it.
 * All sums run in an order that depends on lengths alone.
 */
#include "kernels.h"

#include "../dtype.h"

#include <cuda_runtime.h>

#include <math.h>

#if defined(__USE_FAST_MATH__) || defined(__FAST_MATH__)
#error \
    "matrixfsdp: -use_fast_math flushes small numbers to zero; the results would differ between devices"
#endif

/* Two dtypes that are both 16 bits. */
struct mfsdp__bf16 {
  uint16_t bits;
};
struct mfsdp__f16 {
  uint16_t bits;
};

static __device__ inline float mfsdp__widen(float x) {
  return x;
}
static __device__ inline float mfsdp__widen(mfsdp__bf16 x) {
  return mfsdp_f32_from_bf16(x.bits);
}
static __device__ inline float mfsdp__widen(mfsdp__f16 x) {
  return mfsdp_f32_from_f16(x.bits);
}
static __device__ inline double mfsdp__widen(double x) {
  return x;
}

static __device__ inline void mfsdp__narrow(float x, float *out) {
  *out = x;
}
static __device__ inline void mfsdp__narrow(float x, double *out) {
  *out = (double)x;
}
static __device__ inline void mfsdp__narrow(float x, mfsdp__bf16 *out) {
  out->bits = mfsdp_bf16_from_f32(x);
}
static __device__ inline void mfsdp__narrow(float x, mfsdp__f16 *out) {
  out->bits = mfsdp_f16_from_f32(x);
}
static __device__ inline void mfsdp__narrow(double x, float *out) {
  *out = (float)x;
}
static __device__ inline void mfsdp__narrow(double x, double *out) {
  *out = x;
}
static __device__ inline void mfsdp__narrow(double x, mfsdp__bf16 *out) {
  out->bits = mfsdp_bf16_from_f64(x);
}
static __device__ inline void mfsdp__narrow(double x, mfsdp__f16 *out) {
  out->bits = mfsdp_f16_from_f64(x);
}

/* Loaded and stored in pieces of 16 bytes, or as wide as they are. */
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) mfsdp__pack {
  T at[(size_t)N];
};

static __host__ __device__ inline bool mfsdp__aligned(const void *pointer, size_t nbytes) {
  return (uintptr_t)pointer % nbytes == 0;
}

/* Whether floats at all of these can be had in pieces of 16 bytes. NULL is aligned. */
template <class... Pointers>
static __device__ inline bool mfsdp__all_aligned(Pointers... pointers) {
  const uintptr_t list[] = {(uintptr_t)pointers...};
  uintptr_t bits = 0;
  for (const uintptr_t address : list)
    bits |= address;
  return bits % 16 == 0;
}

template <int N> static __device__ inline mfsdp__pack<float, N> mfsdp__load(const float *from) {
  return *(const mfsdp__pack<float, N> *)(const void *)from;
}
template <int N>
static __device__ inline void mfsdp__store(float *to, const mfsdp__pack<float, N> &x) {
  *(mfsdp__pack<float, N> *)(void *)to = x;
}

/* 1 if nothing in the queue has failed. The same for all threads: work that fails a queue is a
 * launch of its own. */
static __device__ inline bool mfsdp__live(const int64_t *failed) {
  return *failed == 0;
}

static __device__ inline int64_t mfsdp__first(void) {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
static __device__ inline int64_t mfsdp__stride(void) {
  return (int64_t)gridDim.x * blockDim.x;
}

#define MFSDP__THREADS 256

/* ---- launches ---- */

template <class... Parameters, class... Arguments>
static int mfsdp__launch(const mfsdp_cuda_lane *lane, dim3 grid, void (*kernel)(Parameters...),
                         Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(MFSDP__THREADS);
  config.stream = lane->stream;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* Blocks for `work` pieces of one thread each: what there is, or what fills the device. */
static dim3 mfsdp__grid(const mfsdp_cuda_lane *lane, int64_t work) {
  const int64_t blocks = (work + MFSDP__THREADS - 1) / MFSDP__THREADS;
  return dim3((unsigned)(blocks < 1 ? 1 : blocks > lane->block_limit ? lane->block_limit : blocks));
}

/* The same, for each matrix of a batch. */
static dim3 mfsdp__batch_grid(const mfsdp_cuda_lane *lane, int64_t work, int64_t batch_count) {
  dim3 grid = mfsdp__grid(lane, work);
  grid.y = (unsigned)(batch_count > 65535 ? 65535 : batch_count);
  return grid;
}

/* ---- failure ---- */

static __device__ void mfsdp__fail_lane(int64_t *failed, mfsdp_cuda_note *note, int64_t number,
                                        int32_t fault, int32_t index, int64_t a, int64_t b,
                                        int64_t c) {
  note->fault = fault;
  note->index = index;
  note->detail[0] = a;
  note->detail[1] = b;
  note->detail[2] = c;
  note->origin = NULL;
  note->failed_at = number;
  *failed = number;
  __threadfence_system();
}

static __global__ void mfsdp__pull_kernel(int64_t *failed, mfsdp_cuda_note *note,
                                          const mfsdp_cuda_note *from, int64_t upto,
                                          int64_t number) {
  if (blockIdx.x != 0 || threadIdx.x != 0 || *failed != 0) return;
  if (from->failed_at == 0 || from->failed_at > upto) return;
  if (from != note) {
    note->fault = from->fault;
    note->origin = from->origin != NULL ? from->origin : from;
    note->failed_at = number;
  }
  *failed = note->failed_at;
  __threadfence_system();
}

static int mfsdp__pull(const mfsdp_cuda_lane *lane, const mfsdp_cuda_note *from, int64_t upto) {
  return mfsdp__launch(lane, dim3(1), mfsdp__pull_kernel, lane->failed, lane->note, from, upto,
                       lane->number);
}

/* ---- sums over a block of threads ---- */

/* The sum of all threads' values, in a fixed order, for every thread. */
static __device__ double mfsdp__block_sum(double value) {
  __shared__ double warps[MFSDP__THREADS / 32];
  double sum = 0.0;
  int lanes, warp;
  for (lanes = 16; lanes > 0; lanes /= 2)
    value = __dadd_rn(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  __syncthreads(); /* the last sum was read */
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (warp = 0; warp < MFSDP__THREADS / 32; ++warp)
    sum = __dadd_rn(sum, warps[warp]);
  return sum;
}

static __device__ inline double mfsdp__add_square(double sum, float x) {
  return __dadd_rn(sum, __dmul_rn((double)x, (double)x));
}

/* A thread's share of the sum of squares of x[begin..end): groups of four, by their index. `begin`
 * is a multiple of 4, so that whether x is aligned changes no order. */
static __device__ double mfsdp__share_of_squares(const float *x, int64_t begin, int64_t end) {
  const bool aligned = mfsdp__aligned(x, 16);
  double sum = 0.0;
  int64_t i;
  int k;
  for (i = begin + 4 * (int64_t)threadIdx.x; i < end; i += 4 * MFSDP__THREADS) {
    if (aligned && end - i >= 4) {
      const mfsdp__pack<float, 4> four = *(const mfsdp__pack<float, 4> *)(const void *)(x + i);
      for (k = 0; k < 4; ++k)
        sum = mfsdp__add_square(sum, four.at[k]);
    } else {
      for (k = 0; k < 4 && i + k < end; ++k)
        sum = mfsdp__add_square(sum, x[i + k]);
    }
  }
  return sum;
}

/* The smallest of all threads' values, for every thread. */
static __device__ int64_t mfsdp__block_min(int64_t value) {
  __shared__ int64_t warps[MFSDP__THREADS / 32];
  int lanes, warp;
  for (lanes = 16; lanes > 0; lanes /= 2) {
    const int64_t other = __shfl_xor_sync(0xffffffffu, value, lanes);
    value = other < value ? other : value;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
  __syncthreads();
  for (warp = 0; warp < MFSDP__THREADS / 32; ++warp)
    value = warps[warp] < value ? warps[warp] : value;
  return value;
}

/* ---- casts ---- */

template <class D, class S>
static __global__ void mfsdp__cast_kernel(const int64_t *failed, D *dst, const S *src,
                                          int64_t count) {
  const bool aligned = mfsdp__aligned(dst, 16) && mfsdp__aligned(src, 16);
  const int64_t packs = aligned ? count / 8 : 0;
  int64_t i;
  if (!mfsdp__live(failed)) return;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride()) {
    const mfsdp__pack<S, 8> in = ((const mfsdp__pack<S, 8> *)(const void *)src)[i];
    mfsdp__pack<D, 8> out;
    int k;
    for (k = 0; k < 8; ++k)
      mfsdp__narrow(mfsdp__widen(in.at[k]), &out.at[k]);
    ((mfsdp__pack<D, 8> *)(void *)dst)[i] = out;
  }
  for (i = packs * 8 + mfsdp__first(); i < count; i += mfsdp__stride())
    mfsdp__narrow(mfsdp__widen(src[i]), &dst[i]);
}

template <class D, class S>
static int mfsdp__cast_pair(const mfsdp_cuda_lane *lane, void *dst, const void *src,
                            int64_t count) {
  return mfsdp__launch(lane, mfsdp__grid(lane, count / 4), mfsdp__cast_kernel<D, S>,
                       (const int64_t *)lane->failed, (D *)dst, (const S *)src, count);
}

template <class S>
static int mfsdp__cast_from(const mfsdp_cuda_lane *lane, void *dst, mfsdp_dtype dst_dtype,
                            const void *src, int64_t count) {
  switch (dst_dtype) {
  case MFSDP_F32: return mfsdp__cast_pair<float, S>(lane, dst, src, count);
  case MFSDP_F64: return mfsdp__cast_pair<double, S>(lane, dst, src, count);
  case MFSDP_BF16: return mfsdp__cast_pair<mfsdp__bf16, S>(lane, dst, src, count);
  case MFSDP_F16: return mfsdp__cast_pair<mfsdp__f16, S>(lane, dst, src, count);
  }
  return (int)cudaErrorInvalidValue;
}

static int mfsdp__cast(const mfsdp_cuda_lane *lane, void *dst, mfsdp_dtype dst_dtype,
                       const void *src, mfsdp_dtype src_dtype, int64_t count) {
  switch (src_dtype) {
  case MFSDP_F32: return mfsdp__cast_from<float>(lane, dst, dst_dtype, src, count);
  case MFSDP_F64: return mfsdp__cast_from<double>(lane, dst, dst_dtype, src, count);
  case MFSDP_BF16: return mfsdp__cast_from<mfsdp__bf16>(lane, dst, dst_dtype, src, count);
  case MFSDP_F16: return mfsdp__cast_from<mfsdp__f16>(lane, dst, dst_dtype, src, count);
  }
  return (int)cudaErrorInvalidValue;
}

/* ---- sums of terms, in their order ---- */

struct mfsdp__terms {
  const void *at[MFSDP_CUDA_TERMS];
  int32_t count;
  int32_t first; /* the chain starts from term 0 itself */
};

template <class T, int N>
static __device__ inline void mfsdp__sum_at(float *acc, const mfsdp__terms *terms, int64_t i) {
  typedef mfsdp__pack<float, N> sums;
  typedef mfsdp__pack<T, N> values;
  sums sum;
  int32_t t = 0;
  int k;
  if (terms->first) {
    const values x = ((const values *)terms->at[t++])[i];
    for (k = 0; k < N; ++k)
      sum.at[k] = mfsdp__widen(x.at[k]);
  } else {
    sum = ((const sums *)(const void *)acc)[i];
  }
  for (; t < terms->count; ++t) {
    const values x = ((const values *)terms->at[t])[i];
    for (k = 0; k < N; ++k)
      sum.at[k] = __fadd_rn(sum.at[k], mfsdp__widen(x.at[k]));
  }
  ((sums *)(void *)acc)[i] = sum;
}

template <class T>
static __global__ void mfsdp__sum_kernel(const int64_t *failed, float *acc,
                                         const mfsdp__terms terms, int64_t count, int32_t aligned) {
  const int64_t packs = aligned ? count / 8 : 0;
  int64_t i;
  if (!mfsdp__live(failed)) return;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride())
    mfsdp__sum_at<T, 8>(acc, &terms, i);
  for (i = packs * 8 + mfsdp__first(); i < count; i += mfsdp__stride())
    mfsdp__sum_at<T, 1>(acc, &terms, i);
}

static int mfsdp__sum_terms(const mfsdp_cuda_lane *lane, float *acc, int32_t first,
                            const void *const *terms, mfsdp_dtype dtype, int32_t term_count,
                            int64_t count) {
  mfsdp__terms list;
  int32_t t, aligned = mfsdp__aligned(acc, 16);
  const dim3 grid = mfsdp__grid(lane, count / 4);
  const int64_t *failed = lane->failed;
  memset(&list, 0, sizeof(list));
  list.count = term_count;
  list.first = first;
  for (t = 0; t < term_count; ++t) {
    list.at[t] = terms[t];
    if (!mfsdp__aligned(terms[t], 16)) aligned = 0;
  }
  switch (dtype) {
  case MFSDP_F32:
    return mfsdp__launch(lane, grid, mfsdp__sum_kernel<float>, failed, acc, list, count, aligned);
  case MFSDP_BF16:
    return mfsdp__launch(lane, grid, mfsdp__sum_kernel<mfsdp__bf16>, failed, acc, list, count,
                         aligned);
  case MFSDP_F16:
    return mfsdp__launch(lane, grid, mfsdp__sum_kernel<mfsdp__f16>, failed, acc, list, count,
                         aligned);
  case MFSDP_F64: break;
  }
  return (int)cudaErrorInvalidValue;
}

/* ---- sums of squares ---- */

/* A canonical block is summed in parts, side by side: at most so many, and of at least that many
 * elements. Both are part of the order, and with it of the bits. */
#define MFSDP__PARTS 64
#define MFSDP__PART_COUNT 16384
/* Canonical blocks in one launch: their parts fill the scratch. */
#define MFSDP__SUMSQ_BLOCKS (MFSDP_CUDA_SCRATCH_COUNT / MFSDP__PARTS)

static __host__ __device__ inline int64_t mfsdp__parts_of(int64_t count, int64_t most) {
  const int64_t parts = (count + MFSDP__PART_COUNT - 1) / MFSDP__PART_COUNT;
  return parts < 1 ? 1 : parts > most ? most : parts;
}

/* Elements in each part but the last: a multiple of 4. */
static __host__ __device__ inline int64_t mfsdp__part_count(int64_t count, int64_t parts) {
  return ((count + parts - 1) / parts + 3) / 4 * 4;
}

/* The sum of squares of one part, for every thread. */
static __device__ double mfsdp__part_of_squares(const float *x, int64_t count, int64_t parts,
                                                int64_t part) {
  const int64_t length = mfsdp__part_count(count, parts);
  const int64_t begin = part * length < count ? part * length : count;
  const int64_t end = count - begin < length ? count : begin + length;
  return mfsdp__block_sum(mfsdp__share_of_squares(x, begin, end));
}

static __global__ void mfsdp__sumsq_check_kernel(int64_t *failed, mfsdp_cuda_note *note,
                                                 int64_t number, const float *acc,
                                                 const mfsdp_block *blocks, int32_t block_count,
                                                 int32_t first) {
  int64_t bad = INT64_MAX;
  int32_t i;
  if (!mfsdp__live(failed)) return;
  for (i = (int32_t)threadIdx.x; i < block_count; i += MFSDP__THREADS)
    if ((blocks[i].count < 0 || blocks[i].first < 0 || blocks[i].slot < 0 ||
         (blocks[i].count > 0 && acc == NULL)) &&
        i < bad)
      bad = i;
  bad = mfsdp__block_min(bad);
  if (threadIdx.x == 0 && bad != INT64_MAX)
    mfsdp__fail_lane(failed, note, number, MFSDP_CUDA_FAULT_BLOCK, first + (int32_t)bad,
                     blocks[bad].first, blocks[bad].count, blocks[bad].slot);
}

/* Each block of threads walks the table for the parts that are its own. */
static __global__ void mfsdp__sumsq_kernel(const int64_t *failed, double *parts, const float *acc,
                                           const mfsdp_block *blocks, int32_t block_count) {
  int64_t mine = blockIdx.x, base = 0;
  int32_t i;
  if (!mfsdp__live(failed)) return;
  for (i = 0; i < block_count; ++i) {
    const int64_t count = blocks[i].count, part_count = mfsdp__parts_of(count, MFSDP__PARTS);
    for (; mine < base + part_count; mine += gridDim.x) {
      const double sum =
          mfsdp__part_of_squares(acc + blocks[i].first, count, part_count, mine - base);
      if (threadIdx.x == 0) parts[(int64_t)i * MFSDP__PARTS + (mine - base)] = sum;
    }
    base += part_count;
  }
}

static __global__ void mfsdp__sumsq_fold_kernel(const int64_t *failed, double *slots,
                                                const double *parts, const mfsdp_block *blocks,
                                                int32_t block_count) {
  int64_t i, p;
  if (!mfsdp__live(failed)) return;
  for (i = mfsdp__first(); i < block_count; i += mfsdp__stride()) {
    const int64_t part_count = mfsdp__parts_of(blocks[i].count, MFSDP__PARTS);
    double sum = 0.0;
    for (p = 0; p < part_count; ++p)
      sum = __dadd_rn(sum, parts[i * MFSDP__PARTS + p]);
    slots[blocks[i].slot] = sum;
  }
}

static int mfsdp__sumsq(const mfsdp_cuda_lane *lane, double *slots, const float *acc,
                        const mfsdp_block *blocks, int32_t block_count) {
  int32_t first;
  for (first = 0; first < block_count; first += MFSDP__SUMSQ_BLOCKS) {
    const int32_t count =
        block_count - first < MFSDP__SUMSQ_BLOCKS ? block_count - first : MFSDP__SUMSQ_BLOCKS;
    const mfsdp_block *some = blocks + first;
    int error = mfsdp__launch(lane, dim3(1), mfsdp__sumsq_check_kernel, lane->failed, lane->note,
                              lane->number, acc, some, count, first);
    if (error == 0)
      error = mfsdp__launch(lane, dim3((unsigned)lane->block_limit), mfsdp__sumsq_kernel,
                            (const int64_t *)lane->failed, lane->scratch, acc, some, count);
    if (error == 0)
      error = mfsdp__launch(lane, mfsdp__grid(lane, count), mfsdp__sumsq_fold_kernel,
                            (const int64_t *)lane->failed, slots, (const double *)lane->scratch,
                            some, count);
    if (error != 0) return error;
  }
  return 0;
}

/* ---- normalization: the formulas stand at mfsdp_normalize_args ---- */

static __global__ void mfsdp__norm_parts_kernel(const int64_t *failed,
                                                const mfsdp_normalize_args args, int64_t parts) {
  int64_t b, p;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (p = blockIdx.x; p < parts; p += gridDim.x) {
      const double sum =
          mfsdp__part_of_squares(args.src + b * args.src_stride, args.count, parts, p);
      if (threadIdx.x == 0) args.scratch[b * MFSDP_NORMALIZE_SCRATCH_COUNT + p] = sum;
    }
}

static __device__ double mfsdp__norm_scale(double sum, const mfsdp_normalize_args *args) {
  const double norm = __dsqrt_rn(sum);
  double divisor = norm;
  if (!mfsdp_f64_is_finite(sum)) return mfsdp_f64_from_bits(UINT64_C(0x7ff8000000000000));
  if (args->rule == MFSDP_NORM_MAX_EPS) divisor = norm > args->eps ? norm : args->eps;
  if (args->rule == MFSDP_NORM_ADD_EPS) divisor = __dadd_rn(norm, args->eps);
  return divisor > 0.0 ? __ddiv_rn(args->gain, divisor) : 0.0;
}

template <class D>
static __global__ void mfsdp__norm_scale_kernel(const int64_t *failed,
                                                const mfsdp_normalize_args args, int64_t parts) {
  int64_t b, i, p;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y) {
    const float *src = args.src + b * args.src_stride;
    D *dst = (D *)args.dst + b * args.dst_stride;
    const bool aligned = mfsdp__aligned(src, 16) && mfsdp__aligned(dst, 16);
    const int64_t packs = aligned ? args.count / 4 : 0;
    double sum = 0.0, scale;
    for (p = threadIdx.x; p < parts; p += MFSDP__THREADS)
      sum = __dadd_rn(sum, args.scratch[b * MFSDP_NORMALIZE_SCRATCH_COUNT + p]);
    scale = mfsdp__norm_scale(mfsdp__block_sum(sum), &args);
    for (i = mfsdp__first(); i < packs; i += mfsdp__stride()) {
      const mfsdp__pack<float, 4> in = ((const mfsdp__pack<float, 4> *)(const void *)src)[i];
      mfsdp__pack<D, 4> out;
      int k;
      for (k = 0; k < 4; ++k)
        mfsdp__narrow((float)__dmul_rn((double)in.at[k], scale), &out.at[k]);
      ((mfsdp__pack<D, 4> *)(void *)dst)[i] = out;
    }
    for (i = packs * 4 + mfsdp__first(); i < args.count; i += mfsdp__stride())
      mfsdp__narrow((float)__dmul_rn((double)src[i], scale), &dst[i]);
  }
}

static int mfsdp__normalize(const mfsdp_cuda_lane *lane, const mfsdp_normalize_args *args) {
  const int64_t parts = mfsdp__parts_of(args->count, MFSDP_NORMALIZE_SCRATCH_COUNT);
  const int64_t *failed = lane->failed;
  const dim3 grid = mfsdp__batch_grid(lane, args->count / 4, args->batch_count);
  const int error =
      mfsdp__launch(lane, mfsdp__batch_grid(lane, parts * MFSDP__THREADS, args->batch_count),
                    mfsdp__norm_parts_kernel, failed, *args, parts);
  if (error != 0) return error;
  switch (args->dst_dtype) {
  case MFSDP_F32:
    return mfsdp__launch(lane, grid, mfsdp__norm_scale_kernel<float>, failed, *args, parts);
  case MFSDP_F64:
    return mfsdp__launch(lane, grid, mfsdp__norm_scale_kernel<double>, failed, *args, parts);
  case MFSDP_BF16:
    return mfsdp__launch(lane, grid, mfsdp__norm_scale_kernel<mfsdp__bf16>, failed, *args, parts);
  case MFSDP_F16:
    return mfsdp__launch(lane, grid, mfsdp__norm_scale_kernel<mfsdp__f16>, failed, *args, parts);
  }
  return (int)cudaErrorInvalidValue;
}

/* ---- fused optimizer passes: the formulas stand at mfsdp_fused_args ---- */

struct mfsdp__constants {
  float grad, decay, step; /* step: AdamW's; Muon's depends on the item */
  float beta1, beta1_rest, beta2, beta2_rest, root_correction, eps;
  float momentum, grad_weight, nesterov_weight;
};

static __device__ int32_t mfsdp__item_fault(const mfsdp_fused_args *args,
                                            const mfsdp_fused_item *item) {
  if (item->count < 0) return MFSDP_CUDA_ITEM_COUNT;
  if (args->present != NULL && item->present_index < 0) return MFSDP_CUDA_ITEM_PRESENT;
  if (item->count == 0) return MFSDP_CUDA_ITEM_FINE;
  if (args->op == MFSDP_FUSED_MUON_ROWS) {
    if (item->direction == NULL) return MFSDP_CUDA_ITEM_DIRECTION;
    if (item->state[1] == NULL) return MFSDP_CUDA_ITEM_STATE1;
    return item->rows > 0 && item->count % item->rows == 0 ? MFSDP_CUDA_ITEM_FINE
                                                           : MFSDP_CUDA_ITEM_ROWS;
  }
  if (item->grad == NULL) return MFSDP_CUDA_ITEM_GRAD;
  if (item->state[0] == NULL) return MFSDP_CUDA_ITEM_STATE0;
  if (args->op == MFSDP_FUSED_ADAMW && item->state[1] == NULL) return MFSDP_CUDA_ITEM_STATE1;
  if (args->op != MFSDP_FUSED_ADAMW && item->direction == NULL) return MFSDP_CUDA_ITEM_DIRECTION;
  if (args->op == MFSDP_FUSED_MUON_PREPARE) return MFSDP_CUDA_ITEM_FINE;
  if (item->master == NULL) return MFSDP_CUDA_ITEM_MASTER;
  if (item->param != NULL && (item->param_dtype < MFSDP_F32 || item->param_dtype > MFSDP_F16))
    return MFSDP_CUDA_ITEM_PARAM;
  return MFSDP_CUDA_ITEM_FINE;
}

static __device__ mfsdp__constants mfsdp__constants_of(const mfsdp_fused_args *args) {
  const mfsdp_step_scalars *s = args->scalars;
  const double t = (double)s->applied_steps;
  mfsdp__constants k;
  k.grad = (float)__dmul_rn(s->grad_scale, args->clipped ? s->clip_scale : 1.0);
  k.decay = (float)__dsub_rn(1.0, __dmul_rn(s->lr, s->weight_decay));
  k.step = args->op == MFSDP_FUSED_ADAMW
               ? (float)__ddiv_rn(s->lr, __dsub_rn(1.0, pow(args->beta1, t)))
               : 0.0f;
  k.beta1 = (float)args->beta1;
  k.beta1_rest = (float)__dsub_rn(1.0, args->beta1);
  k.beta2 = (float)args->beta2;
  k.beta2_rest = (float)__dsub_rn(1.0, args->beta2);
  k.root_correction = (float)__dsqrt_rn(__dsub_rn(1.0, pow(args->beta2, t)));
  k.eps = (float)args->eps;
  k.momentum = (float)args->momentum;
  k.grad_weight = (float)args->grad_weight;
  k.nesterov_weight = (float)args->nesterov_weight;
  return k;
}

/* Looks at the table before anything is written, and rounds the constants once. */
static __global__ void mfsdp__fused_check_kernel(int64_t *failed, mfsdp_cuda_note *note,
                                                 int64_t number, const mfsdp_fused_args args,
                                                 mfsdp__constants *constants) {
  int64_t bad = INT64_MAX;
  int32_t i;
  if (!mfsdp__live(failed)) return;
  for (i = (int32_t)threadIdx.x; i < args.item_count; i += MFSDP__THREADS)
    if (mfsdp__item_fault(&args, &args.items[i]) != MFSDP_CUDA_ITEM_FINE && i < bad) bad = i;
  bad = mfsdp__block_min(bad);
  if (threadIdx.x != 0) return;
  if (bad != INT64_MAX)
    mfsdp__fail_lane(failed, note, number, MFSDP_CUDA_FAULT_ITEM, (int32_t)bad,
                     mfsdp__item_fault(&args, &args.items[bad]), 0, 0);
  else if (args.op == MFSDP_FUSED_ADAMW && mfsdp_step_scalars_write(args.scalars) &&
           args.scalars->applied_steps < 1)
    mfsdp__fail_lane(failed, note, number, MFSDP_CUDA_FAULT_STEPS, 0, args.scalars->applied_steps,
                     0, 0);
  else
    *constants = mfsdp__constants_of(&args);
}

static __device__ inline bool mfsdp__item_runs(const mfsdp_fused_args *args,
                                               const mfsdp_fused_item *item) {
  return item->count > 0 && (args->present == NULL || args->present[item->present_index] != 0);
}

template <class T, int N>
static __device__ inline void mfsdp__store_narrow(void *to, int64_t i,
                                                  const mfsdp__pack<float, N> &x) {
  mfsdp__pack<T, N> out;
  int k;
  for (k = 0; k < N; ++k)
    mfsdp__narrow(x.at[k], &out.at[k]);
  *(mfsdp__pack<T, N> *)(void *)((T *)to + i) = out;
}

/* The compute copy of N elements of the master, from element i on. */
template <int N>
static __device__ inline void mfsdp__store_param(const mfsdp_fused_item *item, int64_t i,
                                                 const mfsdp__pack<float, N> &master) {
  if (item->param == NULL) return;
  switch (item->param_dtype) {
  case MFSDP_F32: mfsdp__store_narrow<float, N>(item->param, i, master); break;
  case MFSDP_F64: mfsdp__store_narrow<double, N>(item->param, i, master); break;
  case MFSDP_BF16: mfsdp__store_narrow<mfsdp__bf16, N>(item->param, i, master); break;
  case MFSDP_F16: mfsdp__store_narrow<mfsdp__f16, N>(item->param, i, master); break;
  }
}

/* N elements of one item, from element i on. */
template <int OP, int N>
static __device__ inline void mfsdp__fused_at(const mfsdp_fused_args *args,
                                              const mfsdp_fused_item *item,
                                              const mfsdp__constants &c, float step, int64_t i) {
  typedef mfsdp__pack<float, N> floats;
  const floats grad = *(const floats *)(const void *)(item->grad + i);
  floats first = *(const floats *)(const void *)(item->state[0] + i), second, master, direction;
  int k;
  if (OP == MFSDP_FUSED_MUON_PREPARE) {
    for (k = 0; k < N; ++k) {
      const float g = __fmul_rn(grad.at[k], c.grad);
      const float b = __fadd_rn(__fmul_rn(c.momentum, first.at[k]), __fmul_rn(c.grad_weight, g));
      direction.at[k] =
          args->nesterov ? __fadd_rn(__fmul_rn(c.nesterov_weight, g), __fmul_rn(c.momentum, b)) : b;
    }
    *(floats *)(void *)(item->direction + i) = direction;
    return;
  }
  master = *(const floats *)(const void *)(item->master + i);
  if (OP == MFSDP_FUSED_ADAMW) {
    second = *(const floats *)(const void *)(item->state[1] + i);
    for (k = 0; k < N; ++k) {
      const float g = __fmul_rn(grad.at[k], c.grad);
      const float m = __fadd_rn(__fmul_rn(c.beta1, first.at[k]), __fmul_rn(c.beta1_rest, g));
      const float v =
          __fadd_rn(__fmul_rn(c.beta2, second.at[k]), __fmul_rn(__fmul_rn(c.beta2_rest, g), g));
      const float root = __fadd_rn(__fdiv_rn(__fsqrt_rn(v), c.root_correction), c.eps);
      first.at[k] = m;
      second.at[k] = v;
      master.at[k] =
          __fsub_rn(__fmul_rn(master.at[k], c.decay), __fmul_rn(c.step, __fdiv_rn(m, root)));
    }
    *(floats *)(void *)(item->state[1] + i) = second;
  } else {
    direction = *(const floats *)(const void *)(item->direction + i);
    for (k = 0; k < N; ++k) {
      const float g = __fmul_rn(grad.at[k], c.grad);
      first.at[k] = __fadd_rn(__fmul_rn(c.momentum, first.at[k]), __fmul_rn(c.grad_weight, g));
      master.at[k] = __fsub_rn(__fmul_rn(master.at[k], c.decay), __fmul_rn(step, direction.at[k]));
    }
  }
  *(floats *)(void *)(item->state[0] + i) = first;
  *(floats *)(void *)(item->master + i) = master;
  mfsdp__store_param<N>(item, i, master);
}

static __device__ bool mfsdp__item_aligned(const mfsdp_fused_item *item) {
  return mfsdp__all_aligned(item->master, item->param, item->grad, item->state[0], item->state[1],
                            item->direction);
}

/* Elements of an item that a block of threads takes at a time. */
#define MFSDP__ITEM_CHUNK 4096

template <int OP>
static __device__ void mfsdp__fused_chunk(const mfsdp_fused_args *args,
                                          const mfsdp_fused_item *item, const mfsdp__constants &c,
                                          int64_t begin) {
  const int64_t rest = item->count - begin;
  const int64_t count = rest < MFSDP__ITEM_CHUNK ? rest : MFSDP__ITEM_CHUNK;
  const int64_t packs = mfsdp__item_aligned(item) ? count / 4 : 0;
  const float step = (float)__dmul_rn(args->scalars->lr, item->scale);
  int64_t i;
  for (i = threadIdx.x; i < packs; i += MFSDP__THREADS)
    mfsdp__fused_at<OP, 4>(args, item, c, step, begin + 4 * i);
  for (i = packs * 4 + threadIdx.x; i < count; i += MFSDP__THREADS)
    mfsdp__fused_at<OP, 1>(args, item, c, step, begin + i);
}

/* Each block of threads walks the table for the chunks that are its own. */
template <int OP>
static __global__ void mfsdp__fused_kernel(const int64_t *failed, const mfsdp_fused_args args,
                                           const mfsdp__constants *constants) {
  int64_t mine = blockIdx.x, base = 0;
  int32_t n;
  if (!mfsdp__live(failed) || !mfsdp_step_scalars_write(args.scalars)) return;
  const mfsdp__constants c = *constants;
  for (n = 0; n < args.item_count; ++n) {
    const mfsdp_fused_item *item = &args.items[n];
    const int64_t chunks = (item->count + MFSDP__ITEM_CHUNK - 1) / MFSDP__ITEM_CHUNK;
    const bool runs = mine < base + chunks && mfsdp__item_runs(&args, item);
    for (; mine < base + chunks; mine += gridDim.x)
      if (runs) mfsdp__fused_chunk<OP>(&args, item, c, (mine - base) * MFSDP__ITEM_CHUNK);
    base += chunks;
  }
}

/* ---- rows (NorMuon): each is scaled, then all together back to the old norm ---- */

/* Parts of a matrix's rows, at most, and matrices in one launch: their sums fill the scratch. The first
 * is part of the order, and with it of the bits. */
#define MFSDP__ROW_PARTS 1024
#define MFSDP__ROW_ITEMS 31

/* Of the scratch: the constants come first, as for every fused pass. */
struct mfsdp__rows_scratch {
  mfsdp__constants constants;
  double back[MFSDP__ROW_ITEMS];
  double before[MFSDP__ROW_ITEMS][MFSDP__ROW_PARTS], after[MFSDP__ROW_ITEMS][MFSDP__ROW_PARTS];
};
static_assert(sizeof(mfsdp__rows_scratch) <= MFSDP_CUDA_SCRATCH_COUNT * sizeof(double),
              "the scratch of a lane is too small");

static __device__ inline double mfsdp__row_factor(float second, double eps) {
  return __ddiv_rn(1.0, __dadd_rn(__dsqrt_rn((double)second), eps));
}

/* Rows in each part but the last, and parts. Items were checked: rows are at least 1 where there are
 * elements. */
static __device__ inline int64_t mfsdp__rows_length(const mfsdp_fused_item *item) {
  return (item->rows + MFSDP__ROW_PARTS - 1) / MFSDP__ROW_PARTS;
}
static __device__ inline int64_t mfsdp__rows_parts(const mfsdp_fused_item *item) {
  const int64_t length = mfsdp__rows_length(item);
  return item->count > 0 ? (item->rows + length - 1) / length : 0;
}

/* The moments of one part's rows, and the sums of squares before and after. */
static __device__ void mfsdp__rows_part(const mfsdp_fused_args *args, const mfsdp_fused_item *item,
                                        const mfsdp__constants &c, int64_t part, double *before_out,
                                        double *after_out) {
  const int64_t cols = item->count / item->rows, length = mfsdp__rows_length(item);
  const int64_t begin = part * length;
  const int64_t end = item->rows - begin < length ? item->rows : begin + length;
  double before = 0.0, after = 0.0;
  int64_t i;
  for (i = begin; i < end; ++i) {
    const double square =
        mfsdp__block_sum(mfsdp__share_of_squares(item->direction + i * cols, 0, cols));
    if (threadIdx.x == 0) {
      const float moment =
          __fadd_rn(__fmul_rn(c.beta2, item->state[1][i]),
                    __fmul_rn(c.beta2_rest, (float)__ddiv_rn(square, (double)cols)));
      const double factor = mfsdp__row_factor(moment, args->eps);
      item->state[1][i] = moment;
      before = __dadd_rn(before, square);
      after = __dadd_rn(after, __dmul_rn(__dmul_rn(square, factor), factor));
    }
  }
  if (threadIdx.x != 0) return;
  *before_out = before;
  *after_out = after;
}

/* Each block of threads walks the table, from item `first` on, for the parts that are its own. */
static __global__ void mfsdp__rows_sum_kernel(const int64_t *failed, const mfsdp_fused_args args,
                                              mfsdp__rows_scratch *scratch, int32_t first,
                                              int32_t item_count) {
  int64_t mine = blockIdx.x, base = 0;
  int32_t n;
  if (!mfsdp__live(failed) || !mfsdp_step_scalars_write(args.scalars)) return;
  for (n = 0; n < item_count; ++n) {
    const mfsdp_fused_item *item = &args.items[first + n];
    const int64_t parts = mfsdp__rows_parts(item);
    const bool runs = mine < base + parts && mfsdp__item_runs(&args, item);
    for (; mine < base + parts; mine += gridDim.x)
      if (runs)
        mfsdp__rows_part(&args, item, scratch->constants, mine - base,
                         &scratch->before[n][mine - base], &scratch->after[n][mine - base]);
    base += parts;
  }
}

/* One block of threads for each matrix. */
static __global__ void mfsdp__rows_fold_kernel(const int64_t *failed, const mfsdp_fused_args args,
                                               mfsdp__rows_scratch *scratch, int32_t first) {
  const int32_t n = (int32_t)blockIdx.x;
  const mfsdp_fused_item *item = &args.items[first + n];
  double before = 0.0, after = 0.0;
  int64_t p, parts;
  if (!mfsdp__live(failed) || !mfsdp_step_scalars_write(args.scalars)) return;
  if (!mfsdp__item_runs(&args, item)) return;
  parts = mfsdp__rows_parts(item);
  for (p = threadIdx.x; p < parts; p += MFSDP__THREADS) {
    before = __dadd_rn(before, scratch->before[n][p]);
    after = __dadd_rn(after, scratch->after[n][p]);
  }
  before = mfsdp__block_sum(before);
  after = mfsdp__block_sum(after);
  if (threadIdx.x == 0) scratch->back[n] = after > 0.0 ? __dsqrt_rn(__ddiv_rn(before, after)) : 0.0;
}

/* Multiplies one row by the block of threads: up to an address that is a multiple of 16, in pieces of
 * 16 bytes, and what is left. */
static __device__ void mfsdp__scale_row(float *row, int64_t cols, float factor) {
  const int64_t before = (int64_t)((16 - (uintptr_t)row % 16) % 16 / sizeof(float));
  const int64_t head = before < cols ? before : cols, packs = (cols - head) / 4;
  mfsdp__pack<float, 4> *body = (mfsdp__pack<float, 4> *)(void *)(row + head);
  int64_t j;
  int k;
  for (j = threadIdx.x; j < packs; j += MFSDP__THREADS) {
    mfsdp__pack<float, 4> x = body[j];
    for (k = 0; k < 4; ++k)
      x.at[k] = __fmul_rn(x.at[k], factor);
    body[j] = x;
  }
  for (j = threadIdx.x; j < head; j += MFSDP__THREADS)
    row[j] = __fmul_rn(row[j], factor);
  for (j = head + packs * 4 + threadIdx.x; j < cols; j += MFSDP__THREADS)
    row[j] = __fmul_rn(row[j], factor);
}

static __global__ void mfsdp__rows_scale_kernel(const int64_t *failed, const mfsdp_fused_args args,
                                                const mfsdp__rows_scratch *scratch, int32_t first,
                                                int32_t item_count) {
  int64_t mine = blockIdx.x, base = 0;
  int32_t n;
  if (!mfsdp__live(failed) || !mfsdp_step_scalars_write(args.scalars)) return;
  for (n = 0; n < item_count; ++n) {
    const mfsdp_fused_item *item = &args.items[first + n];
    const int64_t rows = item->count > 0 ? item->rows : 0;
    const bool runs = mine < base + rows && mfsdp__item_runs(&args, item);
    for (; mine < base + rows; mine += gridDim.x) {
      const int64_t i = mine - base, cols = item->count / item->rows;
      if (!runs) continue;
      mfsdp__scale_row(
          item->direction + i * cols, cols,
          (float)__dmul_rn(mfsdp__row_factor(item->state[1][i], args.eps), scratch->back[n]));
    }
    base += rows;
  }
}

static int mfsdp__rows(const mfsdp_cuda_lane *lane, const mfsdp_fused_args *args) {
  mfsdp__rows_scratch *scratch = (mfsdp__rows_scratch *)(void *)lane->scratch;
  const mfsdp__rows_scratch *read = scratch;
  const int64_t *failed = lane->failed;
  const dim3 grid((unsigned)lane->block_limit); /* how many rows there are the device knows */
  int32_t first;
  for (first = 0; first < args->item_count; first += MFSDP__ROW_ITEMS) {
    const int32_t count =
        args->item_count - first < MFSDP__ROW_ITEMS ? args->item_count - first : MFSDP__ROW_ITEMS;
    int error =
        mfsdp__launch(lane, grid, mfsdp__rows_sum_kernel, failed, *args, scratch, first, count);
    if (error == 0)
      error = mfsdp__launch(lane, dim3((unsigned)count), mfsdp__rows_fold_kernel, failed, *args,
                            scratch, first);
    if (error == 0)
      error =
          mfsdp__launch(lane, grid, mfsdp__rows_scale_kernel, failed, *args, read, first, count);
    if (error != 0) return error;
  }
  return 0;
}

/* ---- the entry of all fused passes ---- */

static int mfsdp__fused(const mfsdp_cuda_lane *lane, const mfsdp_fused_args *args) {
  mfsdp__constants *constants = (mfsdp__constants *)(void *)lane->scratch;
  const mfsdp__constants *read = constants;
  const int64_t *failed = lane->failed;
  const int64_t chunks = args->total_count / MFSDP__ITEM_CHUNK + args->item_count;
  const dim3 grid((unsigned)(chunks < lane->block_limit ? chunks : lane->block_limit));
  const int error = mfsdp__launch(lane, dim3(1), mfsdp__fused_check_kernel, lane->failed,
                                  lane->note, lane->number, *args, constants);
  if (error != 0) return error;
  switch (args->op) {
  case MFSDP_FUSED_ADAMW:
    return mfsdp__launch(lane, grid, mfsdp__fused_kernel<MFSDP_FUSED_ADAMW>, failed, *args, read);
  case MFSDP_FUSED_MUON_PREPARE:
    return mfsdp__launch(lane, grid, mfsdp__fused_kernel<MFSDP_FUSED_MUON_PREPARE>, failed, *args,
                         read);
  case MFSDP_FUSED_MUON_COMMIT:
    return mfsdp__launch(lane, grid, mfsdp__fused_kernel<MFSDP_FUSED_MUON_COMMIT>, failed, *args,
                         read);
  case MFSDP_FUSED_MUON_ROWS: return mfsdp__rows(lane, args);
  }
  return (int)cudaErrorInvalidValue;
}

/* ---- verdict: the rules stand at mfsdp_verdict_args ---- */

/* values[0..count) are added in order; the block of threads brings them. For every thread. */
template <class Load> static __device__ double mfsdp__ordered_sum(int64_t count, const Load &load) {
  __shared__ double tile[MFSDP__THREADS];
  __shared__ double sum;
  int64_t first, i;
  if (threadIdx.x == 0) sum = 0.0;
  for (first = 0; first < count; first += MFSDP__THREADS) {
    __syncthreads();
    if (first + threadIdx.x < count) tile[threadIdx.x] = load(first + threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0)
      for (i = 0; i < MFSDP__THREADS && first + i < count; ++i)
        sum = __dadd_rn(sum, tile[i]);
  }
  __syncthreads();
  return sum;
}

struct mfsdp__load_block {
  const mfsdp_verdict_args *args;
  __device__ double operator()(int64_t b) const {
    return mfsdp_f64_from_bits(args->messages[args->block_word[b]]);
  }
};

static __device__ inline const uint64_t *mfsdp__value_entry(const mfsdp_verdict_args *args,
                                                            int64_t j) {
  return args->messages + args->rank_word[j % args->world] + 1 + j / args->world;
}

struct mfsdp__load_weight {
  const mfsdp_verdict_args *args;
  __device__ double operator()(int64_t j) const {
    return args->weighted ? mfsdp_f64_from_bits(mfsdp__value_entry(args, j)[args->value_capacity])
                          : 1.0;
  }
};

/* What the host adds, or -0 where it adds nothing: x + -0 is x, whatever x is. */
struct mfsdp__load_value {
  const mfsdp_verdict_args *args;
  __device__ double operator()(int64_t j) const {
    const mfsdp__load_weight weight_of = {args};
    const double value = mfsdp_f64_from_bits(mfsdp__value_entry(args, j)[0]);
    const double weight = weight_of(j);
    if (!(weight > 0.0)) return -0.0;
    return args->weighted ? __dmul_rn(weight, value) : value;
  }
};

static __device__ void mfsdp__verdict_presence(const mfsdp_verdict_args *args) {
  const int64_t first = 1 + (int64_t)args->value_capacity * (args->weighted ? 2 : 1);
  int32_t p, rank;
  for (p = (int32_t)threadIdx.x; p < args->param_count; p += MFSDP__THREADS) {
    uint64_t any = args->missing_is_zero ? 1u : 0u;
    for (rank = 0; rank < args->world; ++rank) {
      const uint64_t *message = args->messages + args->rank_word[rank];
      any |= (message[first + p / 64] >> (p % 64)) & 1u;
    }
    args->present[p] = (uint32_t)any;
  }
}

static __device__ int64_t mfsdp__differing_rank(const mfsdp_verdict_args *args) {
  const uint64_t first = args->messages[args->rank_word[0]] | MFSDP_MESSAGE_STOP;
  int32_t rank;
  for (rank = 1; rank < args->world; ++rank)
    if ((args->messages[args->rank_word[rank]] | MFSDP_MESSAGE_STOP) != first) return rank;
  return -1;
}

static __device__ void mfsdp__verdict_write(const mfsdp_verdict_args *args,
                                            mfsdp_verdict_record record, double scale) {
  int32_t group;
  for (group = 0; group < args->group_count; ++group) {
    mfsdp_step_scalars *scalars = &args->scalars[group];
    scalars->lr = __dmul_rn(args->rates[group].lr, args->lr_factor);
    scalars->weight_decay = args->rates[group].weight_decay;
    scalars->grad_scale = scale;
    scalars->clip_scale = record.clip_scale;
    if (!record.skip) ++scalars->applied_steps;
    scalars->skip = record.skip;
    scalars->stop = record.stop;
  }
  record.applied_steps = args->scalars[0].applied_steps;
  *args->record = record;
  __threadfence_system();
}

/* 2^127: half of the largest float, so that no rounding goes beyond it. */
#define MFSDP__LARGEST_GRAD 1.70141183460469231732e+38

static __device__ void mfsdp__verdict_decide(const mfsdp_verdict_args *args, double sum,
                                             double value_sum, double weight_sum) {
  const double plain = __ddiv_rn(args->grad_scale, args->loss_scale);
  const double scale = args->weighted ? __ddiv_rn(plain, weight_sum) : plain;
  mfsdp_verdict_record record;
  double ratio;
  int32_t rank;
  memset(&record, 0, sizeof(record));
  for (rank = 0; rank < args->world; ++rank)
    if (args->messages[args->rank_word[rank]] & MFSDP_MESSAGE_STOP) record.stop = 1;
  record.differs = mfsdp__differing_rank(args);
  record.grad_norm = __dmul_rn(__dsqrt_rn(sum), fabs(scale));
  record.skip = mfsdp_f64_is_finite(sum) && record.differs < 0 ? 0u : 1u;
  if (!(record.grad_norm <= MFSDP__LARGEST_GRAD && fabs(scale) <= MFSDP__LARGEST_GRAD))
    record.skip = 1u;
  if (args->weighted && !(weight_sum > 0.0 && mfsdp_f64_is_finite(scale))) record.skip = 1u;
  ratio =
      args->clip_norm > 0.0 ? __ddiv_rn(args->clip_norm, __dadd_rn(record.grad_norm, 1e-6)) : 1.0;
  record.clip_scale = ratio < 1.0 ? ratio : 1.0; /* 1 too where the norm is not a number */
  record.value_mean =
      args->value_count == 0
          ? mfsdp_f64_from_bits(UINT64_C(0x7ff8000000000000))
          : __ddiv_rn(value_sum, args->weighted ? weight_sum : (double)args->value_count);
  record.weight_sum = args->weighted ? weight_sum : 0.0;
  mfsdp__verdict_write(args, record, scale);
}

static __global__ void mfsdp__verdict_kernel(const int64_t *failed, const mfsdp_verdict_args args) {
  const mfsdp__load_block block = {&args};
  const mfsdp__load_value value = {&args};
  const mfsdp__load_weight weight = {&args};
  double sum, value_sum, weight_sum;
  if (!mfsdp__live(failed)) return;
  sum = mfsdp__ordered_sum(args.block_count, block);
  value_sum = mfsdp__ordered_sum(args.value_count, value);
  weight_sum = mfsdp__ordered_sum(args.value_count, weight);
  mfsdp__verdict_presence(&args);
  if (threadIdx.x == 0) mfsdp__verdict_decide(&args, sum, value_sum, weight_sum);
}

static int mfsdp__verdict(const mfsdp_cuda_lane *lane, const mfsdp_verdict_args *args) {
  return mfsdp__launch(lane, dim3(1), mfsdp__verdict_kernel, (const int64_t *)lane->failed, *args);
}

/* ---- what matrix products need beside cuBLAS ---- */

template <class T>
static __global__ void mfsdp__scale_kernel(const int64_t *failed, const mfsdp_gemm_args args) {
  const int64_t cols = args.d.cols, count = args.d.rows * cols;
  int64_t b, i;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (i = mfsdp__first(); i < count; i += mfsdp__stride()) {
      const int64_t row = i / cols, col = i % cols;
      T *d = (T *)args.d.data + b * args.d.batch_stride + row * args.d.row_stride + col;
      float value = 0.0f;
      if (args.beta != 0.0f)
        value = __fmul_rn(
            args.beta,
            mfsdp__widen(
                ((const T *)args.c.data)[b * args.c.batch_stride + row * args.c.row_stride + col]));
      mfsdp__narrow(row == col && args.diagonal != 0.0f ? __fadd_rn(value, args.diagonal) : value,
                    d);
    }
}

static int mfsdp__scale(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args) {
  const dim3 grid = mfsdp__batch_grid(lane, args->d.rows * args->d.cols, args->batch_count);
  const int64_t *failed = lane->failed;
  switch (args->dtype) {
  case MFSDP_F32: return mfsdp__launch(lane, grid, mfsdp__scale_kernel<float>, failed, *args);
  case MFSDP_BF16:
    return mfsdp__launch(lane, grid, mfsdp__scale_kernel<mfsdp__bf16>, failed, *args);
  case MFSDP_F16: return mfsdp__launch(lane, grid, mfsdp__scale_kernel<mfsdp__f16>, failed, *args);
  case MFSDP_F64: break;
  }
  return (int)cudaErrorInvalidValue;
}

static __global__ void mfsdp__diagonal_kernel(const int64_t *failed, const mfsdp_gemm_args args) {
  int64_t b, i;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (i = mfsdp__first(); i < args.d.rows; i += mfsdp__stride()) {
      float *d = (float *)args.d.data + b * args.d.batch_stride + i * (args.d.row_stride + 1);
      *d = __fadd_rn(*d, args.diagonal);
    }
}

static int mfsdp__add_diagonal(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args) {
  return mfsdp__launch(lane, mfsdp__batch_grid(lane, args->d.rows, args->batch_count),
                       mfsdp__diagonal_kernel, (const int64_t *)lane->failed, *args);
}

template <class T>
static __global__ void mfsdp__diagonal_values_kernel(const int64_t *failed,
                                                     const mfsdp_gemm_args args, float *values) {
  const int64_t n = args.d.rows, depth = args.trans_a ? args.a.rows : args.a.cols;
  const int64_t a_step = args.trans_a ? args.a.row_stride : 1;
  const int64_t b_step = args.trans_b ? 1 : args.b.row_stride;
  int64_t b, i, k;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (i = mfsdp__first(); i < n; i += mfsdp__stride()) {
      const T *left = (const T *)args.a.data + b * args.a.batch_stride +
                      i * (args.trans_a ? 1 : args.a.row_stride);
      const T *right = (const T *)args.b.data + b * args.b.batch_stride +
                       i * (args.trans_b ? args.b.row_stride : 1);
      float sum = 0.0f;
      for (k = 0; k < depth; ++k)
        sum = __fadd_rn(sum,
                        __fmul_rn(mfsdp__widen(left[k * a_step]), mfsdp__widen(right[k * b_step])));
      sum = __fmul_rn(args.alpha, sum);
      if (args.beta != 0.0f)
        sum = __fadd_rn(
            sum,
            __fmul_rn(
                args.beta,
                mfsdp__widen((
                    (const T *)args.c.data)[b * args.c.batch_stride + i * args.c.row_stride + i])));
      values[b * n + i] = __fadd_rn(sum, args.diagonal);
    }
}

static int mfsdp__diagonal_values(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args,
                                  float *values) {
  const dim3 grid = mfsdp__batch_grid(lane, args->d.rows, args->batch_count);
  const int64_t *failed = lane->failed;
  return args->dtype == MFSDP_BF16
             ? mfsdp__launch(lane, grid, mfsdp__diagonal_values_kernel<mfsdp__bf16>, failed, *args,
                             values)
             : mfsdp__launch(lane, grid, mfsdp__diagonal_values_kernel<mfsdp__f16>, failed, *args,
                             values);
}

template <class T>
static __global__ void mfsdp__diagonal_store_kernel(const int64_t *failed,
                                                    const mfsdp_gemm_args args,
                                                    const float *values) {
  int64_t b, i;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (i = mfsdp__first(); i < args.d.rows; i += mfsdp__stride())
      mfsdp__narrow(values[b * args.d.rows + i],
                    (T *)args.d.data + b * args.d.batch_stride + i * (args.d.row_stride + 1));
}

static int mfsdp__diagonal_store(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args,
                                 const float *values) {
  const dim3 grid = mfsdp__batch_grid(lane, args->d.rows, args->batch_count);
  const int64_t *failed = lane->failed;
  return args->dtype == MFSDP_BF16
             ? mfsdp__launch(lane, grid, mfsdp__diagonal_store_kernel<mfsdp__bf16>, failed, *args,
                             values)
             : mfsdp__launch(lane, grid, mfsdp__diagonal_store_kernel<mfsdp__f16>, failed, *args,
                             values);
}

/* Tiles of matrices: 32 x 32 elements by 256 threads, four rows each. */
#define MFSDP__TILE 32

template <class T> static __device__ inline T *mfsdp__tile_row(T *data, int64_t stride, int row) {
  return data + (int64_t)row * stride;
}

/* to[j][i] = from[i][j] for one tile of rows x cols; with `lower`, where j < i only. */
template <class T>
static __device__ void mfsdp__turn_tile(T *to, int64_t to_stride, const T *from,
                                        int64_t from_stride, int64_t rows, int64_t cols,
                                        bool lower) {
  __shared__ T tile[MFSDP__TILE][MFSDP__TILE + 1];
  const int x = (int)threadIdx.x % MFSDP__TILE, y0 = (int)threadIdx.x / MFSDP__TILE;
  int y;
  __syncthreads(); /* the last tile was written */
  for (y = y0; y < MFSDP__TILE; y += MFSDP__THREADS / MFSDP__TILE)
    if (y < rows && x < cols) tile[y][x] = mfsdp__tile_row(from, from_stride, y)[x];
  __syncthreads();
  for (y = y0; y < MFSDP__TILE; y += MFSDP__THREADS / MFSDP__TILE)
    if (y < cols && x < rows && (!lower || y < x))
      mfsdp__tile_row(to, to_stride, y)[x] = tile[x][y];
}

/* Row of tile number t when the tiles of a lower triangle are counted row by row. */
static __device__ inline int64_t mfsdp__triangle_row(int64_t t) {
  int64_t row = (int64_t)((sqrt(8.0 * (double)t + 1.0) - 1.0) / 2.0);
  while (row * (row + 1) / 2 > t)
    --row;
  while ((row + 1) * (row + 2) / 2 <= t)
    ++row;
  return row;
}

template <class T>
static __global__ void mfsdp__mirror_kernel(const int64_t *failed, const mfsdp_gemm_args args) {
  const int64_t n = args.d.rows, edge = (n + MFSDP__TILE - 1) / MFSDP__TILE;
  const int64_t tiles = edge * (edge + 1) / 2, stride = args.d.row_stride;
  int64_t b, t;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (t = blockIdx.x; t < tiles; t += gridDim.x) {
      const int64_t i = mfsdp__triangle_row(t), j = t - i * (i + 1) / 2;
      const int64_t row = i * MFSDP__TILE, col = j * MFSDP__TILE;
      T *d = (T *)args.d.data + b * args.d.batch_stride;
      mfsdp__turn_tile(d + col * stride + row, stride, d + row * stride + col, stride,
                       n - row < MFSDP__TILE ? n - row : MFSDP__TILE,
                       n - col < MFSDP__TILE ? n - col : MFSDP__TILE, i == j);
    }
}

static dim3 mfsdp__triangle_grid(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args) {
  const int64_t edge = (args->d.rows + MFSDP__TILE - 1) / MFSDP__TILE;
  return mfsdp__batch_grid(lane, edge * (edge + 1) / 2 * MFSDP__THREADS, args->batch_count);
}

static int mfsdp__mirror(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args) {
  const dim3 grid = mfsdp__triangle_grid(lane, args);
  const int64_t *failed = lane->failed;
  return args->dtype == MFSDP_F32
             ? mfsdp__launch(lane, grid, mfsdp__mirror_kernel<uint32_t>, failed, *args)
             : mfsdp__launch(lane, grid, mfsdp__mirror_kernel<uint16_t>, failed, *args);
}

template <class T>
static __global__ void mfsdp__copy_lower_kernel(const int64_t *failed, const mfsdp_gemm_args args) {
  const int64_t n = args.d.rows;
  int64_t b, row, col;
  if (!mfsdp__live(failed)) return;
  for (b = blockIdx.y; b < args.batch_count; b += gridDim.y)
    for (row = blockIdx.x; row < n; row += gridDim.x) {
      const T *c = (const T *)args.c.data + b * args.c.batch_stride + row * args.c.row_stride;
      T *d = (T *)args.d.data + b * args.d.batch_stride + row * args.d.row_stride;
      for (col = threadIdx.x; col <= row; col += MFSDP__THREADS)
        d[col] = c[col];
    }
}

static int mfsdp__copy_lower(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args) {
  const dim3 grid = mfsdp__batch_grid(lane, args->d.rows * MFSDP__THREADS, args->batch_count);
  const int64_t *failed = lane->failed;
  return args->dtype == MFSDP_F32
             ? mfsdp__launch(lane, grid, mfsdp__copy_lower_kernel<uint32_t>, failed, *args)
             : mfsdp__launch(lane, grid, mfsdp__copy_lower_kernel<uint16_t>, failed, *args);
}

static __global__ void mfsdp__tile_pointers_kernel(const int64_t *failed,
                                                   const mfsdp_gemm_args args, void **pointers,
                                                   int64_t first, int64_t count, int64_t side,
                                                   int32_t tiles, int32_t element_nbytes) {
  const int64_t per_matrix = (int64_t)tiles * (tiles + 1) / 2, products = count * per_matrix;
  int64_t p;
  (void)failed; /* cuBLAS runs whatever happened: its pointers must be good */
  for (p = mfsdp__first(); p < products; p += mfsdp__stride()) {
    const int64_t b = first + p / per_matrix, t = p % per_matrix;
    const int64_t i = mfsdp__triangle_row(t), j = t - i * (i + 1) / 2;
    const int64_t left = i * side * (args.trans_a ? 1 : args.a.row_stride);
    const int64_t right = j * side * (args.trans_b ? args.b.row_stride : 1);
    char *a = (char *)args.a.data, *bb = (char *)args.b.data, *d = (char *)args.d.data;
    pointers[p] = bb + (b * args.b.batch_stride + right) * element_nbytes;
    pointers[products + p] = a + (b * args.a.batch_stride + left) * element_nbytes;
    pointers[2 * products + p] =
        d + (b * args.d.batch_stride + i * side * args.d.row_stride + j * side) * element_nbytes;
  }
}

static int mfsdp__tile_pointers(const mfsdp_cuda_lane *lane, const mfsdp_gemm_args *args,
                                void **pointers, int64_t first, int64_t count, int64_t side,
                                int32_t tiles) {
  return mfsdp__launch(lane, mfsdp__grid(lane, count * tiles * (tiles + 1) / 2),
                       mfsdp__tile_pointers_kernel, (const int64_t *)lane->failed, *args, pointers,
                       first, count, side, tiles, (int32_t)mfsdp_dtype_nbytes(args->dtype));
}

template <class T>
static __global__ void mfsdp__transpose_kernel(const int64_t *failed, T *to, int64_t to_stride,
                                               const T *from, int64_t from_stride, int64_t rows,
                                               int64_t cols) {
  const int64_t down = (rows + MFSDP__TILE - 1) / MFSDP__TILE;
  const int64_t across = (cols + MFSDP__TILE - 1) / MFSDP__TILE;
  int64_t t;
  if (!mfsdp__live(failed)) return;
  for (t = blockIdx.x; t < down * across; t += gridDim.x) {
    const int64_t row = t / across * MFSDP__TILE, col = t % across * MFSDP__TILE;
    mfsdp__turn_tile(to + col * to_stride + row, to_stride, from + row * from_stride + col,
                     from_stride, rows - row < MFSDP__TILE ? rows - row : MFSDP__TILE,
                     cols - col < MFSDP__TILE ? cols - col : MFSDP__TILE, false);
  }
}

static int mfsdp__transpose(const mfsdp_cuda_lane *lane, void *to, int64_t to_stride,
                            const void *from, int64_t from_stride, int64_t rows, int64_t cols,
                            int32_t element_nbytes) {
  const dim3 grid = mfsdp__grid(lane, rows * cols / 4);
  const int64_t *failed = lane->failed;
  if (element_nbytes == 4)
    return mfsdp__launch(lane, grid, mfsdp__transpose_kernel<uint32_t>, failed, (uint32_t *)to,
                         to_stride, (const uint32_t *)from, from_stride, rows, cols);
  return mfsdp__launch(lane, grid, mfsdp__transpose_kernel<uint16_t>, failed, (uint16_t *)to,
                       to_stride, (const uint16_t *)from, from_stride, rows, cols);
}

/* ---- around cuSOLVER: the rules stand at mfsdp_eigh_args ---- */

/* What blocks of threads found, one word each. */
#define MFSDP__FOUND_COUNT 1024

static dim3 mfsdp__finding_grid(const mfsdp_cuda_lane *lane, int64_t work) {
  dim3 grid = mfsdp__grid(lane, work);
  if (grid.x > MFSDP__FOUND_COUNT) grid.x = MFSDP__FOUND_COUNT;
  return grid;
}

/* The least that the blocks of a launch found; the same for all threads. */
static __device__ int64_t mfsdp__least_found(const int32_t *found, int32_t count) {
  int64_t least = INT64_MAX;
  int32_t i;
  for (i = (int32_t)threadIdx.x; i < count; i += MFSDP__THREADS)
    if (found[i] < least) least = found[i];
  return mfsdp__block_min(least);
}

static __device__ inline bool mfsdp__wanted(const mfsdp_when *when) {
  return when->word == NULL || (*when->word == 0.0f) == (when->when_zero != 0);
}

/* MFSDP_CUDA_SOLVE_STATE */
enum { MFSDP__SOLVE_IDLE = 0, MFSDP__SOLVE_WANTED, MFSDP__SOLVE_NOT_FINITE };

/* Found: 255 less the largest exponent's bits, so that 0 is a number that is not finite. */
#define MFSDP__EXPONENT_END 255

static __device__ inline int32_t mfsdp__exponent_bits(float x) {
  return (int32_t)(mfsdp_bits_from_f32(x) >> 23) & MFSDP__EXPONENT_END;
}

static __device__ inline int32_t mfsdp__larger(int32_t a, int32_t b) {
  return a > b ? a : b;
}

/* Exponent bits of the power of two that brings the largest number close to 1. It and its inverse are
 * normal numbers, so that nothing but what vanishes beside the largest number is rounded. */
static __device__ inline int32_t mfsdp__solve_scale(int64_t found) {
  const int32_t bits = (int32_t)found - 1;
  return bits < 1 ? 1 : bits > MFSDP__EXPONENT_END - 2 ? MFSDP__EXPONENT_END - 2 : bits;
}

static __device__ inline float mfsdp__power_of_two(int32_t exponent_bits) {
  return mfsdp_f32_from_bits((uint32_t)exponent_bits << 23);
}

static __global__ void mfsdp__solve_check_kernel(const int64_t *failed,
                                                 const mfsdp_cuda_solve solve, int32_t *found) {
  const int64_t n = solve.a.rows;
  int64_t least, row, col;
  int32_t most = 0;
  int k;
  if (!mfsdp__live(failed)) return;
  for (row = blockIdx.x; row < n; row += gridDim.x) {
    const float *a = (const float *)solve.a.data + row * solve.a.row_stride;
    const int64_t packs = mfsdp__all_aligned(a) ? n / 4 : 0;
    for (col = threadIdx.x; col < packs; col += MFSDP__THREADS) {
      const mfsdp__pack<float, 4> four = mfsdp__load<4>(a + 4 * col);
      for (k = 0; k < 4; ++k)
        most = mfsdp__larger(most, mfsdp__exponent_bits(four.at[k]));
    }
    for (col = packs * 4 + threadIdx.x; col < n; col += MFSDP__THREADS)
      most = mfsdp__larger(most, mfsdp__exponent_bits(a[col]));
  }
  least = mfsdp__block_min(MFSDP__EXPONENT_END - most);
  if (threadIdx.x == 0) found[blockIdx.x] = (int32_t)least;
}

/* to = from times a power of two, or zeros, by the block of threads. */
static __device__ void mfsdp__solve_copy_row(float *to, const float *from, int64_t cols, bool zeros,
                                             float factor) {
  const int64_t packs = mfsdp__all_aligned(to, from) ? cols / 4 : 0;
  int64_t j;
  int k;
  for (j = threadIdx.x; j < packs; j += MFSDP__THREADS) {
    mfsdp__pack<float, 4> x = mfsdp__load<4>(from + 4 * j);
    for (k = 0; k < 4; ++k)
      x.at[k] = zeros ? 0.0f : __fmul_rn(x.at[k], factor);
    mfsdp__store<4>(to + 4 * j, x);
  }
  for (j = packs * 4 + threadIdx.x; j < cols; j += MFSDP__THREADS)
    to[j] = zeros ? 0.0f : __fmul_rn(from[j], factor);
}

static __global__ void mfsdp__solve_copy_kernel(const int64_t *failed, const mfsdp_cuda_solve solve,
                                                const int32_t *found, int32_t found_count) {
  const int64_t n = solve.a.rows;
  int32_t state = MFSDP__SOLVE_IDLE; /* behind a failure: what is found there was not written */
  int64_t least = 1, row;
  float factor;
  if (mfsdp__live(failed) && mfsdp__wanted(&solve.when)) {
    least = mfsdp__least_found(found, found_count);
    state = least != 0 ? MFSDP__SOLVE_WANTED : MFSDP__SOLVE_NOT_FINITE;
  }
  factor = mfsdp__power_of_two(mfsdp__solve_scale(least));
  for (row = blockIdx.x; row < n; row += gridDim.x)
    mfsdp__solve_copy_row((float *)solve.to.data + row * solve.to.row_stride,
                          (const float *)solve.a.data + row * solve.a.row_stride, n,
                          state != MFSDP__SOLVE_WANTED, factor);
  if (mfsdp__first() == 0) {
    solve.words[MFSDP_CUDA_SOLVE_STATE] = state;
    solve.words[MFSDP_CUDA_SOLVE_SCALE] = mfsdp__solve_scale(least);
    solve.words[MFSDP_CUDA_SOLVE_FIRST_INFO] = solve.words[MFSDP_CUDA_SOLVE_SECOND_INFO] = 0;
  }
}

static int mfsdp__solve_begin(const mfsdp_cuda_lane *lane, const mfsdp_cuda_solve *solve) {
  const dim3 grid = mfsdp__finding_grid(lane, solve->a.rows * MFSDP__THREADS);
  int32_t *found = (int32_t *)(void *)lane->scratch;
  const int error = mfsdp__launch(lane, grid, mfsdp__solve_check_kernel,
                                  (const int64_t *)lane->failed, *solve, found);
  if (error != 0) return error;
  return mfsdp__launch(lane, grid, mfsdp__solve_copy_kernel, (const int64_t *)lane->failed, *solve,
                       (const int32_t *)found, (int32_t)grid.x);
}

static __global__ void mfsdp__solve_finish_kernel(const int64_t *failed,
                                                  const mfsdp_cuda_solve solve) {
  const float nan = mfsdp_f32_from_bits(UINT32_C(0x7fc00000));
  const int32_t state = solve.words[MFSDP_CUDA_SOLVE_STATE];
  const float back =
      mfsdp__power_of_two(MFSDP__EXPONENT_END - 1 - solve.words[MFSDP_CUDA_SOLVE_SCALE]);
  const int64_t n = solve.to.rows;
  int64_t row, col;
  if (!mfsdp__live(failed) || state == MFSDP__SOLVE_IDLE) return;
  for (row = blockIdx.x; row < n; row += gridDim.x) {
    float *to = (float *)solve.to.data + row * solve.to.row_stride;
    for (col = threadIdx.x; col < n && state == MFSDP__SOLVE_NOT_FINITE; col += MFSDP__THREADS)
      to[col] = nan;
    if (solve.values != NULL && threadIdx.x == 0)
      solve.values[row] = state == MFSDP__SOLVE_WANTED ? __fmul_rn(solve.values[row], back) : nan;
  }
}

static __global__ void mfsdp__solve_info_kernel(int64_t *failed, mfsdp_cuda_note *note,
                                                int64_t number, const mfsdp_cuda_solve solve) {
  const int32_t first = solve.words[MFSDP_CUDA_SOLVE_FIRST_INFO];
  const int32_t second = solve.words[MFSDP_CUDA_SOLVE_SECOND_INFO];
  const int32_t qr = solve.values == NULL;
  if (threadIdx.x != 0 || !mfsdp__live(failed) ||
      solve.words[MFSDP_CUDA_SOLVE_STATE] != MFSDP__SOLVE_WANTED || (first == 0 && second == 0))
    return;
  mfsdp__fail_lane(failed, note, number, MFSDP_CUDA_FAULT_SOLVER, qr + (first == 0),
                   first != 0 ? first : second, solve.a.rows, 0);
}

static int mfsdp__solve_end(const mfsdp_cuda_lane *lane, const mfsdp_cuda_solve *solve) {
  const int error =
      mfsdp__launch(lane, mfsdp__grid(lane, solve->to.rows * MFSDP__THREADS),
                    mfsdp__solve_finish_kernel, (const int64_t *)lane->failed, *solve);
  if (error != 0) return error;
  return mfsdp__launch(lane, dim3(1), mfsdp__solve_info_kernel, lane->failed, lane->note,
                       lane->number, *solve);
}

/* ---- passes of Shampoo and SOAP: the formulas stand at mfsdp_precondition_args ---- */

/* What a pass is told; step and commits are decided last. */
struct mfsdp__pre_constants {
  int32_t runs;   /* neither skipped nor absent */
  int32_t first;  /* SOAP: no basis yet */
  int32_t stores; /* the sides become state */
  int32_t commits;
  float grad, beta1, beta1_rest, beta2, beta2_rest, eps;
  float before, step, after;
  double gram, shift;                 /* of eigenvalues */
  double first_moment, second_moment; /* corrections */
};

/* Of the scratch: the constants, what blocks found, and sums of the direction and of what is grafted. */
struct mfsdp__pre_scratch {
  mfsdp__pre_constants constants;
  int32_t found[MFSDP__FOUND_COUNT];
  double direction[MFSDP__PARTS], graft[MFSDP__PARTS];
};

static mfsdp__pre_scratch *mfsdp__pre_scratch_of(const mfsdp_cuda_lane *lane) {
  static_assert(sizeof(mfsdp__pre_scratch) <= MFSDP_CUDA_SCRATCH_COUNT * sizeof(double),
                "the scratch of a lane is too small");
  return (mfsdp__pre_scratch *)(void *)lane->scratch;
}

static __device__ __host__ inline int64_t mfsdp__pre_length(const mfsdp_precondition_args *args,
                                                            int side) {
  return side == 0 ? args->rows : args->cols;
}

static __device__ inline bool mfsdp__pre_soap(const mfsdp_precondition_args *args) {
  return args->op >= MFSDP_SOAP_PREPARE;
}

/* 1 - beta^t */
static __device__ inline double mfsdp__pre_rest(double beta, double t) {
  return __dsub_rn(1.0, pow(beta, t));
}

static __device__ mfsdp__pre_constants
mfsdp__pre_constants_of(const mfsdp_precondition_args *args) {
  const mfsdp_step_scalars *s = args->scalars;
  const bool soap = mfsdp__pre_soap(args);
  const double t =
      soap ? (double)args->item.state[MFSDP_STATE_UPDATES][0] : (double)s->applied_steps;
  const double rest1 = mfsdp__pre_rest(args->beta1, t), rest2 = mfsdp__pre_rest(args->beta2, t);
  const float decay = (float)__dsub_rn(1.0, __dmul_rn(s->lr, s->weight_decay));
  mfsdp__pre_constants c;
  c.runs = !s->skip && (args->present == NULL || args->present[args->item.present_index] != 0);
  c.first = soap && t == 0.0;
  c.stores = c.first ? args->start : args->refresh;
  c.commits = 0;
  c.grad = (float)__dmul_rn(s->grad_scale, args->clipped ? s->clip_scale : 1.0);
  c.beta1 = (float)args->beta1;
  c.beta1_rest = (float)__dsub_rn(1.0, args->beta1);
  c.beta2 = (float)args->beta2;
  c.beta2_rest = (float)__dsub_rn(1.0, args->beta2);
  c.eps = (float)args->eps;
  c.before = soap ? 1.0f : decay;
  c.after = soap ? decay : 1.0f;
  c.step = soap ? (float)__dmul_rn(s->lr, __ddiv_rn(__dsqrt_rn(rest2), rest1)) : 0.0f;
  c.first_moment = __ddiv_rn(1.0, rest1);
  c.second_moment = __ddiv_rn(1.0, rest2);
  c.gram = args->gram_beta < 1.0 ? __ddiv_rn(1.0, mfsdp__pre_rest(args->gram_beta, t)) : 1.0;
  c.shift = args->eps;
  if (args->op == MFSDP_SHAMPOO_SCALE) {
    const double least = __dmul_rn(c.gram, (double)args->values[0]);
    if (least < 0.0) c.shift = __dsub_rn(args->eps, least);
  }
  return c;
}

static __global__ void mfsdp__pre_begin_kernel(int64_t *failed, mfsdp_cuda_note *note,
                                               int64_t number, const mfsdp_precondition_args args,
                                               mfsdp__pre_constants *constants) {
  if (threadIdx.x != 0 || !mfsdp__live(failed)) return;
  if (!mfsdp__pre_soap(&args) && !args.scalars->skip && args.scalars->applied_steps < 1)
    mfsdp__fail_lane(failed, note, number, MFSDP_CUDA_FAULT_PRECONDITION_STEPS, 0,
                     args.scalars->applied_steps, 0, 0);
  else
    *constants = mfsdp__pre_constants_of(&args);
}

/* The gradient as it counts, and the moments' candidates: of it, or of what is projected. N elements,
 * from element i on; second NULL: without it. */
template <int N>
static __device__ inline void mfsdp__pre_moments_at(const mfsdp_precondition_args *args,
                                                    const mfsdp__pre_constants &c,
                                                    const float *second, int64_t i) {
  const bool projected = args->op == MFSDP_SOAP_MOMENTS;
  mfsdp__pack<float, N> g = mfsdp__load<N>((projected ? args->projected : args->item.grad) + i);
  mfsdp__pack<float, N> m, v;
  int k;
  if (!projected) {
    for (k = 0; k < N; ++k)
      g.at[k] = __fmul_rn(g.at[k], c.grad);
    mfsdp__store<N>(args->grad + i, g);
  }
  if (args->op == MFSDP_SOAP_PREPARE) return;
  m = mfsdp__load<N>(args->item.state[MFSDP_STATE_EXP_AVG] + i);
  for (k = 0; k < N; ++k)
    m.at[k] = __fadd_rn(__fmul_rn(c.beta1, m.at[k]), __fmul_rn(c.beta1_rest, g.at[k]));
  mfsdp__store<N>(args->next_exp_avg + i, m);
  if (second == NULL) return;
  v = mfsdp__load<N>(second + i);
  for (k = 0; k < N; ++k)
    v.at[k] = __fadd_rn(__fmul_rn(c.beta2, v.at[k]),
                        __fmul_rn(__fmul_rn(c.beta2_rest, g.at[k]), g.at[k]));
  mfsdp__store<N>(args->next_exp_avg_sq + i, v);
  if (!projected) return;
  for (k = 0; k < N; ++k)
    g.at[k] = __fdiv_rn(m.at[k], __fadd_rn(__fsqrt_rn(v.at[k]), c.eps));
  mfsdp__store<N>(args->projected + i, g);
}

static __global__ void mfsdp__pre_moments_kernel(const int64_t *failed,
                                                 const mfsdp_precondition_args args,
                                                 const mfsdp__pre_constants *constants) {
  const bool projected = args.op == MFSDP_SOAP_MOMENTS;
  const int64_t count = args.item.count;
  const float *second = NULL;
  int64_t packs, i;
  if (!mfsdp__live(failed) || (!projected && !constants->runs)) return;
  const mfsdp__pre_constants c = *constants;
  if (projected || args.graft == MFSDP_GRAFT_ADAMW)
    second = args.item.state[MFSDP_STATE_EXP_AVG_SQ];
  packs = mfsdp__all_aligned(args.item.grad, args.grad, args.projected, args.next_exp_avg,
                             args.next_exp_avg_sq, args.item.state[MFSDP_STATE_EXP_AVG], second)
              ? count / 4
              : 0;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride())
    mfsdp__pre_moments_at<4>(&args, c, second, 4 * i);
  for (i = packs * 4 + mfsdp__first(); i < count; i += mfsdp__stride())
    mfsdp__pre_moments_at<1>(&args, c, second, i);
}

/* The root, or the identity where it was not computed: one that was has a positive diagonal. */
template <int N>
static __device__ inline void mfsdp__pre_roots_at(float *to, const float *root, int64_t n,
                                                  bool identity, int64_t i) {
  mfsdp__pack<float, N> x = mfsdp__load<N>(root + i);
  int k;
  for (k = 0; k < N && identity; ++k)
    if ((i + k) / n == (i + k) % n) x.at[k] = 1.0f;
  mfsdp__store<N>(to + i, x);
}

static __global__ void mfsdp__pre_roots_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args) {
  const float *root = args.item.state[MFSDP_STATE_SIDE_LEFT + args.side];
  const int64_t n = mfsdp__pre_length(&args, args.side);
  float *to = args.next_side[args.side];
  int64_t packs, i;
  if (!mfsdp__live(failed)) return;
  const bool identity = root[0] == 0.0f;
  packs = mfsdp__all_aligned(to, root) ? n * n / 4 : 0;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride())
    mfsdp__pre_roots_at<4>(to, root, n, identity, 4 * i);
  for (i = packs * 4 + mfsdp__first(); i < n * n; i += mfsdp__stride())
    mfsdp__pre_roots_at<1>(to, root, n, identity, i);
}

static __global__ void mfsdp__pre_scale_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args,
                                               const mfsdp__pre_constants *constants) {
  const int64_t n = mfsdp__pre_length(&args, args.side);
  int64_t i;
  if (!mfsdp__live(failed)) return;
  for (i = blockIdx.x; i < n; i += gridDim.x) {
    const double value =
        __dadd_rn(__dmul_rn(constants->gram, (double)args.values[i]), constants->shift);
    mfsdp__scale_row(args.square + i * n, n, (float)pow(value, -0.125));
  }
}

/* ---- SOAP's order ---- */

/* A thread's share of the inner product of two rows, as mfsdp__share_of_squares. */
static __device__ double mfsdp__share_of_product(const float *x, const float *y, int64_t count) {
  const bool aligned = mfsdp__all_aligned(x, y);
  double sum = 0.0;
  int64_t i;
  int k;
  for (i = 4 * (int64_t)threadIdx.x; i < count; i += 4 * MFSDP__THREADS) {
    if (aligned && count - i >= 4) {
      const mfsdp__pack<float, 4> a = mfsdp__load<4>(x + i), b = mfsdp__load<4>(y + i);
      for (k = 0; k < 4; ++k)
        sum = __dadd_rn(sum, __dmul_rn((double)a.at[k], (double)b.at[k]));
    } else {
      for (k = 0; k < 4 && i + k < count; ++k)
        sum = __dadd_rn(sum, __dmul_rn((double)x[i + k], (double)y[i + k]));
    }
  }
  return sum;
}

/* One block of threads for each row; NaN counts as less than anything, so that there is an order. */
static __global__ void mfsdp__pre_estimate_kernel(const int64_t *failed,
                                                  const mfsdp_precondition_args args) {
  const float *basis = args.item.state[MFSDP_STATE_SIDE_LEFT + args.side];
  const int64_t n = mfsdp__pre_length(&args, args.side);
  double *estimate = (double *)(void *)args.values;
  int64_t i;
  if (!mfsdp__live(failed)) return;
  for (i = blockIdx.x; i < n; i += gridDim.x) {
    const double sum =
        mfsdp__block_sum(mfsdp__share_of_product(args.square + i * n, basis + i * n, n));
    if (threadIdx.x == 0)
      estimate[i] = sum == sum ? sum : mfsdp_f64_from_bits(UINT64_C(0xfff0000000000000));
  }
}

/* order[k] = the row that comes k-th: each row counts those before it. */
static __global__ void mfsdp__pre_order_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args) {
  const int64_t n = mfsdp__pre_length(&args, args.side);
  const double *estimate = (const double *)(const void *)args.values;
  int32_t *order = (int32_t *)(void *)((double *)(void *)args.values + n);
  int64_t i, j;
  if (!mfsdp__live(failed)) return;
  for (i = mfsdp__first(); i < n; i += mfsdp__stride()) {
    int64_t before = 0;
    for (j = 0; j < n; ++j)
      before += estimate[j] > estimate[i] || (estimate[j] == estimate[i] && j < i);
    order[before] = (int32_t)i;
  }
}

/* By the block of threads. */
static __device__ void mfsdp__copy_row(float *to, const float *from, int64_t cols) {
  const int64_t packs = mfsdp__all_aligned(to, from) ? cols / 4 : 0;
  int64_t j;
  for (j = threadIdx.x; j < packs; j += MFSDP__THREADS)
    mfsdp__store<4>(to + 4 * j, mfsdp__load<4>(from + 4 * j));
  for (j = packs * 4 + threadIdx.x; j < cols; j += MFSDP__THREADS)
    to[j] = from[j];
}

/* to[j] = from[order[j]]: what is read lies apart, what is written does not. */
static __device__ void mfsdp__gather_row(float *to, const float *from, const int32_t *order,
                                         int64_t cols) {
  const int64_t packs = mfsdp__all_aligned(to) ? cols / 4 : 0;
  int64_t j;
  int k;
  for (j = threadIdx.x; j < packs; j += MFSDP__THREADS) {
    mfsdp__pack<float, 4> x;
    for (k = 0; k < 4; ++k)
      x.at[k] = from[order[4 * j + k]];
    mfsdp__store<4>(to + 4 * j, x);
  }
  for (j = packs * 4 + threadIdx.x; j < cols; j += MFSDP__THREADS)
    to[j] = from[order[j]];
}

/* to[i] = from[order[i]] along one side of a rows x cols matrix. */
static __global__ void mfsdp__pre_permute_kernel(const int64_t *failed, float *to,
                                                 const float *from, const int32_t *order,
                                                 int64_t rows, int64_t cols, int32_t by_rows) {
  int64_t i;
  if (!mfsdp__live(failed)) return;
  for (i = blockIdx.x; i < rows; i += gridDim.x) {
    if (by_rows)
      mfsdp__copy_row(to + i * cols, from + order[i] * cols, cols);
    else
      mfsdp__gather_row(to + i * cols, from + i * cols, order, cols);
  }
}

static int mfsdp__pre_sort(const mfsdp_cuda_lane *lane, const mfsdp_precondition_args *args) {
  const int64_t n = mfsdp__pre_length(args, args->side), rows = args->rows, cols = args->cols;
  const int32_t *order = (const int32_t *)(const void *)((double *)(void *)args->values + n);
  const int64_t *failed = lane->failed;
  const dim3 grid = mfsdp__grid(lane, n * MFSDP__THREADS);
  int error = mfsdp__launch(lane, grid, mfsdp__pre_estimate_kernel, failed, *args);
  if (error == 0)
    error = mfsdp__launch(lane, mfsdp__grid(lane, n), mfsdp__pre_order_kernel, failed, *args);
  if (error == 0)
    error =
        mfsdp__launch(lane, grid, mfsdp__pre_permute_kernel, failed, args->next_side[args->side],
                      (const float *)args->square, order, n, n, (int32_t)1);
  if (error != 0) return error;
  return mfsdp__launch(lane, mfsdp__grid(lane, rows * MFSDP__THREADS), mfsdp__pre_permute_kernel,
                       failed, args->other, (const float *)args->next_exp_avg_sq, order, rows, cols,
                       (int32_t)(args->side == 0));
}

static __global__ void mfsdp__pre_start_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args) {
  const int64_t n = mfsdp__pre_length(&args, args.side);
  float *to = args.next_side[args.side];
  int64_t i;
  if (!mfsdp__live(failed) || args.item.state[MFSDP_STATE_UPDATES][0] != 0.0f) return;
  for (i = blockIdx.x; i < n; i += gridDim.x)
    mfsdp__copy_row(to + i * n, args.square + (n - 1 - i) * n, n);
}

/* ---- commit: look at all candidates, decide, write ---- */

static __device__ bool mfsdp__pre_finite(const float *x, int64_t count) {
  const int64_t packs = mfsdp__all_aligned(x) ? count / 4 : 0;
  bool finite = true;
  int64_t i;
  int k;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride()) {
    const mfsdp__pack<float, 4> four = mfsdp__load<4>(x + 4 * i);
    for (k = 0; k < 4; ++k)
      if (!mfsdp_f32_is_finite(four.at[k])) finite = false;
  }
  for (i = packs * 4 + mfsdp__first(); i < count; i += mfsdp__stride())
    if (!mfsdp_f32_is_finite(x[i])) finite = false;
  return finite;
}

static __global__ void mfsdp__pre_look_kernel(const int64_t *failed,
                                              const mfsdp_precondition_args args,
                                              const mfsdp__pre_constants *constants,
                                              int32_t *found) {
  const int64_t count = args.item.count;
  bool finite;
  int64_t all;
  int side;
  if (!mfsdp__live(failed)) return;
  if (constants->first) {
    /* Without sides no Gram matrix has shown it. */
    finite = mfsdp__pre_finite(args.grad, count);
  } else {
    finite = mfsdp__pre_finite(args.direction, count);
    finite = mfsdp__pre_finite(args.next_exp_avg, count) && finite;
    if (args.item.state[MFSDP_STATE_EXP_AVG_SQ] != NULL)
      finite = mfsdp__pre_finite(args.next_exp_avg_sq, count) && finite;
  }
  for (side = 0; side < 2; ++side) {
    const int64_t n = mfsdp__pre_length(&args, side);
    if (args.next_gram[side] == NULL) continue;
    finite = mfsdp__pre_finite(args.next_gram[side], n * n) && finite;
    if (constants->stores) finite = mfsdp__pre_finite(args.next_side[side], n * n) && finite;
  }
  all = mfsdp__block_min(finite ? 1 : 0);
  if (threadIdx.x == 0) found[blockIdx.x] = (int32_t)all;
}

static __device__ inline double mfsdp__add_adamw(double sum, const mfsdp__pre_constants *c,
                                                 double eps, float first, float second) {
  const double m = __dmul_rn(c->first_moment, (double)first);
  const double v = __dmul_rn(c->second_moment, (double)second);
  const double x = __ddiv_rn(m, __dadd_rn(__dsqrt_rn(v), eps));
  return __dadd_rn(sum, __dmul_rn(x, x));
}

/* A thread's share of the squared norm of AdamW's direction, as mfsdp__share_of_squares. */
static __device__ double mfsdp__share_of_adamw(const mfsdp_precondition_args *args,
                                               const mfsdp__pre_constants *c, int64_t begin,
                                               int64_t end) {
  const float *first = args->next_exp_avg, *second = args->next_exp_avg_sq;
  const bool aligned = mfsdp__all_aligned(first, second);
  const double eps = args->graft_eps;
  double sum = 0.0;
  int64_t i;
  int k;
  for (i = begin + 4 * (int64_t)threadIdx.x; i < end; i += 4 * MFSDP__THREADS) {
    if (aligned && end - i >= 4) {
      const mfsdp__pack<float, 4> m = mfsdp__load<4>(first + i), v = mfsdp__load<4>(second + i);
      for (k = 0; k < 4; ++k)
        sum = mfsdp__add_adamw(sum, c, eps, m.at[k], v.at[k]);
    } else {
      for (k = 0; k < 4 && i + k < end; ++k)
        sum = mfsdp__add_adamw(sum, c, eps, first[i + k], second[i + k]);
    }
  }
  return sum;
}

/* Squared norms of the direction and of what is grafted, in parts. */
static __global__ void mfsdp__pre_norms_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args,
                                               mfsdp__pre_scratch *scratch, int64_t parts) {
  const int64_t count = args.item.count, length = mfsdp__part_count(count, parts);
  int64_t p;
  if (!mfsdp__live(failed)) return;
  for (p = blockIdx.x; p < parts; p += gridDim.x) {
    const int64_t begin = p * length < count ? p * length : count;
    const int64_t end = count - begin < length ? count : begin + length;
    const double direction = mfsdp__part_of_squares(args.direction, count, parts, p);
    const double graft =
        args.graft == MFSDP_GRAFT_SGD
            ? mfsdp__part_of_squares(args.next_exp_avg, count, parts, p)
            : mfsdp__block_sum(mfsdp__share_of_adamw(&args, &scratch->constants, begin, end));
    if (threadIdx.x != 0) continue;
    scratch->direction[p] = direction;
    scratch->graft[p] = graft;
  }
}

/* The factor of Shampoo's direction. */
static __device__ double mfsdp__shampoo_size(const mfsdp_precondition_args *args,
                                             const mfsdp__pre_scratch *scratch, int64_t parts) {
  double direction = 0.0, graft = 0.0;
  int64_t p;
  if (args->graft == MFSDP_GRAFT_NONE) return scratch->constants.first_moment;
  for (p = 0; p < parts; ++p) {
    direction = __dadd_rn(direction, scratch->direction[p]);
    graft = __dadd_rn(graft, scratch->graft[p]);
  }
  direction = __dsqrt_rn(direction);
  graft = __dsqrt_rn(graft);
  if (args->graft == MFSDP_GRAFT_SGD) graft = __dmul_rn(scratch->constants.first_moment, graft);
  return direction > 0.0 ? __ddiv_rn(graft, direction) : 0.0;
}

static __global__ void mfsdp__pre_decide_kernel(const int64_t *failed,
                                                const mfsdp_precondition_args args,
                                                mfsdp__pre_scratch *scratch, int32_t found_count,
                                                int64_t parts) {
  mfsdp__pre_constants *c = &scratch->constants;
  bool finite;
  if (!mfsdp__live(failed)) return;
  finite = mfsdp__least_found(scratch->found, found_count) != 0;
  if (threadIdx.x != 0) return;
  if (!mfsdp__pre_soap(&args))
    c->step = (float)__dmul_rn(args.scalars->lr, mfsdp__shampoo_size(&args, scratch, parts));
  c->commits = c->runs && finite && (c->first || mfsdp_f32_is_finite(c->step));
}

static __device__ void mfsdp__pre_copy(float *to, const float *from, int64_t count) {
  const int64_t packs = mfsdp__all_aligned(to, from) ? count / 4 : 0;
  int64_t i;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride())
    mfsdp__store<4>(to + 4 * i, mfsdp__load<4>(from + 4 * i));
  for (i = packs * 4 + mfsdp__first(); i < count; i += mfsdp__stride())
    to[i] = from[i];
}

/* N elements of master and parameter, from element i on. */
template <int N>
static __device__ inline void mfsdp__pre_master_at(const mfsdp_precondition_args *args,
                                                   const mfsdp__pre_constants &c, int64_t i) {
  const mfsdp__pack<float, N> direction = mfsdp__load<N>(args->direction + i);
  mfsdp__pack<float, N> w = mfsdp__load<N>(args->item.master + i);
  int k;
  for (k = 0; k < N; ++k)
    w.at[k] = __fmul_rn(__fsub_rn(__fmul_rn(w.at[k], c.before), __fmul_rn(c.step, direction.at[k])),
                        c.after);
  mfsdp__store<N>(args->item.master + i, w);
  mfsdp__store_param<N>(&args->item, i, w);
}

static __device__ void mfsdp__pre_masters(const mfsdp_precondition_args *args,
                                          const mfsdp__pre_constants &c) {
  const mfsdp_fused_item *item = &args->item;
  const int64_t packs =
      mfsdp__all_aligned(item->master, item->param, args->direction) ? item->count / 4 : 0;
  int64_t i;
  for (i = mfsdp__first(); i < packs; i += mfsdp__stride())
    mfsdp__pre_master_at<4>(args, c, 4 * i);
  for (i = packs * 4 + mfsdp__first(); i < item->count; i += mfsdp__stride())
    mfsdp__pre_master_at<1>(args, c, i);
}

static __global__ void mfsdp__pre_store_kernel(const int64_t *failed,
                                               const mfsdp_precondition_args args,
                                               const mfsdp__pre_constants *constants) {
  const mfsdp_fused_item *item = &args.item;
  int side;
  if (!mfsdp__live(failed) || !constants->commits) return;
  const mfsdp__pre_constants c = *constants;
  if (!c.first) {
    mfsdp__pre_masters(&args, c);
    mfsdp__pre_copy(item->state[MFSDP_STATE_EXP_AVG], args.next_exp_avg, item->count);
    if (item->state[MFSDP_STATE_EXP_AVG_SQ] != NULL)
      mfsdp__pre_copy(item->state[MFSDP_STATE_EXP_AVG_SQ], args.next_exp_avg_sq, item->count);
  }
  for (side = 0; side < 2; ++side) {
    const int64_t n = mfsdp__pre_length(&args, side);
    if (args.next_gram[side] == NULL) continue;
    mfsdp__pre_copy(item->state[MFSDP_STATE_GRAM_LEFT + side], args.next_gram[side], n * n);
    if (c.stores)
      mfsdp__pre_copy(item->state[MFSDP_STATE_SIDE_LEFT + side], args.next_side[side], n * n);
  }
  /* A float counts to 2^24 and then stays there, where no correction is left. */
  if (mfsdp__pre_soap(&args) && (!c.first || c.stores) && mfsdp__first() == 0)
    *item->state[MFSDP_STATE_UPDATES] = __fadd_rn(*item->state[MFSDP_STATE_UPDATES], 1.0f);
}

static int mfsdp__pre_commit(const mfsdp_cuda_lane *lane, const mfsdp_precondition_args *args,
                             int64_t most) {
  mfsdp__pre_scratch *scratch = mfsdp__pre_scratch_of(lane);
  const mfsdp__pre_constants *constants = &scratch->constants;
  const int64_t parts = mfsdp__parts_of(args->item.count, MFSDP__PARTS);
  const dim3 look = mfsdp__finding_grid(lane, most / 4);
  const int64_t *failed = lane->failed;
  int error =
      mfsdp__launch(lane, look, mfsdp__pre_look_kernel, failed, *args, constants, scratch->found);
  if (error == 0 && args->op == MFSDP_SHAMPOO_COMMIT && args->graft != MFSDP_GRAFT_NONE)
    error = mfsdp__launch(lane, mfsdp__grid(lane, parts * MFSDP__THREADS), mfsdp__pre_norms_kernel,
                          failed, *args, scratch, parts);
  if (error == 0)
    error = mfsdp__launch(lane, dim3(1), mfsdp__pre_decide_kernel, failed, *args, scratch,
                          (int32_t)look.x, parts);
  if (error != 0) return error;
  return mfsdp__launch(lane, mfsdp__grid(lane, most / 4), mfsdp__pre_store_kernel, failed, *args,
                       constants);
}

static int mfsdp__precondition(const mfsdp_cuda_lane *lane, const mfsdp_precondition_args *args) {
  mfsdp__pre_constants *constants = &mfsdp__pre_scratch_of(lane)->constants;
  const mfsdp__pre_constants *read = constants;
  const int64_t n = mfsdp__pre_length(args, args->side), count = args->item.count;
  const int64_t *failed = lane->failed;
  int64_t most = count;
  int side;
  const int error = mfsdp__launch(lane, dim3(1), mfsdp__pre_begin_kernel, lane->failed, lane->note,
                                  lane->number, *args, constants);
  if (error != 0) return error;
  for (side = 0; side < 2; ++side) {
    const int64_t length = mfsdp__pre_length(args, side);
    if (args->next_gram[side] != NULL && length * length > most) most = length * length;
  }
  switch (args->op) {
  case MFSDP_SHAMPOO_PREPARE:
  case MFSDP_SOAP_PREPARE:
  case MFSDP_SOAP_MOMENTS:
    return mfsdp__launch(lane, mfsdp__grid(lane, count / 4), mfsdp__pre_moments_kernel, failed,
                         *args, read);
  case MFSDP_SHAMPOO_ROOTS:
    return mfsdp__launch(lane, mfsdp__grid(lane, n * n / 4), mfsdp__pre_roots_kernel, failed,
                         *args);
  case MFSDP_SHAMPOO_SCALE:
    return mfsdp__launch(lane, mfsdp__grid(lane, n * MFSDP__THREADS), mfsdp__pre_scale_kernel,
                         failed, *args, read);
  case MFSDP_SOAP_SORT: return mfsdp__pre_sort(lane, args);
  case MFSDP_SOAP_START:
    return mfsdp__launch(lane, mfsdp__grid(lane, n * MFSDP__THREADS), mfsdp__pre_start_kernel,
                         failed, *args);
  case MFSDP_SHAMPOO_COMMIT:
  case MFSDP_SOAP_COMMIT: return mfsdp__pre_commit(lane, args, most);
  }
  return (int)cudaErrorInvalidValue;
}

/* ---- the table ---- */

static int mfsdp__probe(void) {
  cudaFuncAttributes attributes;
  return (int)cudaFuncGetAttributes(&attributes, mfsdp__pull_kernel);
}

extern "C" const mfsdp_cuda_kernels *mfsdp_cuda_kernels_v1(void) {
  static const mfsdp_cuda_kernels table = {sizeof(mfsdp_cuda_kernels),
                                           MFSDP_CUDA_KERNELS_VERSION,
                                           mfsdp__probe,
                                           mfsdp__pull,
                                           mfsdp__cast,
                                           mfsdp__sum_terms,
                                           mfsdp__sumsq,
                                           mfsdp__verdict,
                                           mfsdp__normalize,
                                           mfsdp__fused,
                                           mfsdp__scale,
                                           mfsdp__add_diagonal,
                                           mfsdp__diagonal_values,
                                           mfsdp__diagonal_store,
                                           mfsdp__copy_lower,
                                           mfsdp__mirror,
                                           mfsdp__tile_pointers,
                                           mfsdp__transpose,
                                           mfsdp__solve_begin,
                                           mfsdp__solve_end,
                                           mfsdp__precondition};
  return &table;
}
