/* SPDX-License-Identifier: MIT */
/*
 * host_ops.h - the element-wise loops of the host backend: casts, ordered sums, sums of squares,
 * normalization, the fused optimizer passes.
 *
 *   double s = mfsdp__host_sumsq(x, count);            // one fixed order for each count
 *   mfsdp__host_cast(dst, MFSDP_BF16, src, MFSDP_F32, count);
 *
 * Plain functions over memory, without queue or checks. Every loop does the same operations on an
 * element whatever its address, so vector width and alignment never change a bit; -ffp-contract=off
 * keeps the compiler from fusing them. The loops vectorize with -O3 -fno-math-errno.
 *
 * Internal to backend_host.h, which documents and checks arguments. Link flags: -lm.
 */
#ifndef MFSDP_HOST_HOST_OPS_H
#define MFSDP_HOST_HOST_OPS_H

#include "../backend.h"
#include "../dtype.h"

#include <math.h>

/* Elements that passes over several arrays handle at a time: they stay in the first-level cache. */
#define MFSDP__HOST_CHUNK 1024

MFSDP_API int64_t mfsdp__host_chunk(int64_t first, int64_t count) {
  return count - first < MFSDP__HOST_CHUNK ? count - first : MFSDP__HOST_CHUNK;
}

/* ---- conversions ---- */

MFSDP_API float mfsdp__host_f32_same(float value) {
  return value;
}
MFSDP_API float mfsdp__host_f32_from_f64(double value) {
  return (float)value;
}
MFSDP_API double mfsdp__host_f64_from_f32(float value) {
  return (double)value;
}
MFSDP_API double mfsdp__host_f64_from_bf16(uint16_t value) {
  return (double)mfsdp_f32_from_bf16(value);
}
MFSDP_API double mfsdp__host_f64_from_f16(uint16_t value) {
  return (double)mfsdp_f32_from_f16(value);
}
MFSDP_API uint16_t mfsdp__host_bf16_from_f16(uint16_t value) {
  return mfsdp_bf16_from_f32(mfsdp_f32_from_f16(value));
}
MFSDP_API uint16_t mfsdp__host_f16_from_bf16(uint16_t value) {
  return mfsdp_f16_from_f32(mfsdp_f32_from_bf16(value));
}

#define MFSDP__HOST_CAST(name, dst_type, src_type, convert)        \
  MFSDP_API void name(void *dst, const void *src, int64_t count) { \
    dst_type *MFSDP_RESTRICT to = (dst_type *)dst;                 \
    const src_type *MFSDP_RESTRICT from = (const src_type *)src;   \
    int64_t i;                                                     \
    for (i = 0; i < count; ++i)                                    \
      to[i] = convert(from[i]);                                    \
  }
MFSDP__HOST_CAST(mfsdp__host_cast_f32_f64, float, double, mfsdp__host_f32_from_f64)
MFSDP__HOST_CAST(mfsdp__host_cast_f32_bf16, float, uint16_t, mfsdp_f32_from_bf16)
MFSDP__HOST_CAST(mfsdp__host_cast_f32_f16, float, uint16_t, mfsdp_f32_from_f16)
MFSDP__HOST_CAST(mfsdp__host_cast_f64_f32, double, float, mfsdp__host_f64_from_f32)
MFSDP__HOST_CAST(mfsdp__host_cast_f64_bf16, double, uint16_t, mfsdp__host_f64_from_bf16)
MFSDP__HOST_CAST(mfsdp__host_cast_f64_f16, double, uint16_t, mfsdp__host_f64_from_f16)
MFSDP__HOST_CAST(mfsdp__host_cast_bf16_f32, uint16_t, float, mfsdp_bf16_from_f32)
MFSDP__HOST_CAST(mfsdp__host_cast_bf16_f64, uint16_t, double, mfsdp_bf16_from_f64)
MFSDP__HOST_CAST(mfsdp__host_cast_bf16_f16, uint16_t, uint16_t, mfsdp__host_bf16_from_f16)
MFSDP__HOST_CAST(mfsdp__host_cast_f16_f32, uint16_t, float, mfsdp_f16_from_f32)
MFSDP__HOST_CAST(mfsdp__host_cast_f16_f64, uint16_t, double, mfsdp_f16_from_f64)
MFSDP__HOST_CAST(mfsdp__host_cast_f16_bf16, uint16_t, uint16_t, mfsdp__host_f16_from_bf16)
#undef MFSDP__HOST_CAST

MFSDP_API void mfsdp__host_cast_from_f32(void *dst, mfsdp_dtype dst_dtype, const float *src,
                                         int64_t count) {
  switch (dst_dtype) {
  case MFSDP_F32:
    if (count > 0) memcpy(dst, src, (size_t)count * sizeof(float));
    return;
  case MFSDP_F64: mfsdp__host_cast_f64_f32(dst, src, count); return;
  case MFSDP_BF16: mfsdp__host_cast_bf16_f32(dst, src, count); return;
  case MFSDP_F16: mfsdp__host_cast_f16_f32(dst, src, count); return;
  }
}

MFSDP_API void mfsdp__host_cast(void *dst, mfsdp_dtype dst_dtype, const void *src,
                                mfsdp_dtype src_dtype, int64_t count) {
  if (dst_dtype == src_dtype) {
    if (count > 0) memcpy(dst, src, (size_t)count * mfsdp_dtype_nbytes(dst_dtype));
    return;
  }
  switch (src_dtype) {
  case MFSDP_F32: mfsdp__host_cast_from_f32(dst, dst_dtype, (const float *)src, count); return;
  case MFSDP_F64:
    if (dst_dtype == MFSDP_F32) mfsdp__host_cast_f32_f64(dst, src, count);
    if (dst_dtype == MFSDP_BF16) mfsdp__host_cast_bf16_f64(dst, src, count);
    if (dst_dtype == MFSDP_F16) mfsdp__host_cast_f16_f64(dst, src, count);
    return;
  case MFSDP_BF16:
    if (dst_dtype == MFSDP_F32) mfsdp__host_cast_f32_bf16(dst, src, count);
    if (dst_dtype == MFSDP_F64) mfsdp__host_cast_f64_bf16(dst, src, count);
    if (dst_dtype == MFSDP_F16) mfsdp__host_cast_f16_bf16(dst, src, count);
    return;
  case MFSDP_F16:
    if (dst_dtype == MFSDP_F32) mfsdp__host_cast_f32_f16(dst, src, count);
    if (dst_dtype == MFSDP_F64) mfsdp__host_cast_f64_f16(dst, src, count);
    if (dst_dtype == MFSDP_BF16) mfsdp__host_cast_bf16_f16(dst, src, count);
    return;
  }
}

/* ---- sums in a fixed order ---- */

/* acc += x, and acc = (acc + x) + y: the same roundings, half the traffic of acc. */
#define MFSDP__HOST_ADD(name, type, convert)                                                  \
  MFSDP_API void name##_one(float *MFSDP_RESTRICT acc, const void *term, int64_t count) {     \
    const type *MFSDP_RESTRICT x = (const type *)term;                                        \
    int64_t i;                                                                                \
    for (i = 0; i < count; ++i)                                                               \
      acc[i] = acc[i] + convert(x[i]);                                                        \
  }                                                                                           \
  MFSDP_API void name##_two(float *MFSDP_RESTRICT acc, const void *first, const void *second, \
                            int64_t count) {                                                  \
    const type *MFSDP_RESTRICT x = (const type *)first;                                       \
    const type *MFSDP_RESTRICT y = (const type *)second;                                      \
    int64_t i;                                                                                \
    for (i = 0; i < count; ++i)                                                               \
      acc[i] = (acc[i] + convert(x[i])) + convert(y[i]);                                      \
  }
MFSDP__HOST_ADD(mfsdp__host_add_f32, float, mfsdp__host_f32_same)
MFSDP__HOST_ADD(mfsdp__host_add_bf16, uint16_t, mfsdp_f32_from_bf16)
MFSDP__HOST_ADD(mfsdp__host_add_f16, uint16_t, mfsdp_f32_from_f16)
#undef MFSDP__HOST_ADD

MFSDP_API void mfsdp__host_add(float *acc, const void *first, const void *second, mfsdp_dtype dtype,
                               int64_t count) {
  if (dtype == MFSDP_F32) {
    if (second != NULL)
      mfsdp__host_add_f32_two(acc, first, second, count);
    else
      mfsdp__host_add_f32_one(acc, first, count);
  } else if (dtype == MFSDP_BF16) {
    if (second != NULL)
      mfsdp__host_add_bf16_two(acc, first, second, count);
    else
      mfsdp__host_add_bf16_one(acc, first, count);
  } else {
    if (second != NULL)
      mfsdp__host_add_f16_two(acc, first, second, count);
    else
      mfsdp__host_add_f16_one(acc, first, count);
  }
}

/* The whole chain over one chunk after another, so that acc crosses the memory bus once. */
MFSDP_API void mfsdp__host_sum_terms(float *acc, int first, const void *const *terms,
                                     mfsdp_dtype dtype, int32_t term_count, int64_t count) {
  const size_t element_nbytes = mfsdp_dtype_nbytes(dtype);
  int64_t start;
  for (start = 0; start < count; start += MFSDP__HOST_CHUNK) {
    const int64_t length = mfsdp__host_chunk(start, count);
    const size_t offset = (size_t)start * element_nbytes;
    int32_t t = 0;
    if (first) {
      mfsdp__host_cast(acc + start, MFSDP_F32, (const unsigned char *)terms[0] + offset, dtype,
                       length);
      t = 1;
    }
    for (; t + 1 < term_count; t += 2)
      mfsdp__host_add(acc + start, (const unsigned char *)terms[t] + offset,
                      (const unsigned char *)terms[t + 1] + offset, dtype, length);
    if (t < term_count)
      mfsdp__host_add(acc + start, (const unsigned char *)terms[t] + offset, NULL, dtype, length);
  }
}

#define MFSDP__HOST_LANES 16

/* Sum of squares in fp64. Element i goes to lane i % 16; the lanes are folded in halves. The square
 * of a float is exact in a double and its range is far from overflow, so only the additions round.
 */
MFSDP_API double mfsdp__host_sumsq(const float *x, int64_t count) {
  double lanes[MFSDP__HOST_LANES];
  int64_t i;
  int lane, width;
  for (lane = 0; lane < MFSDP__HOST_LANES; ++lane)
    lanes[lane] = 0.0;
  for (i = 0; i + MFSDP__HOST_LANES <= count; i += MFSDP__HOST_LANES)
    for (lane = 0; lane < MFSDP__HOST_LANES; ++lane)
      lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
  for (lane = 0; lane < (int)(count - i); ++lane)
    lanes[lane] += (double)x[i + lane] * (double)x[i + lane];
  for (width = MFSDP__HOST_LANES / 2; width > 0; width /= 2)
    for (lane = 0; lane < width; ++lane)
      lanes[lane] += lanes[lane + width];
  return lanes[0];
}

/* ---- normalization ---- */

/* What x is multiplied by: gain / norm by the rule; 0 where that is 0 / 0; NaN for a norm that is
 * not finite, so that no finite element hides it. */
MFSDP_API double mfsdp__host_norm_scale(double sum, mfsdp_norm_rule rule, double eps, double gain) {
  const double norm = sqrt(sum);
  double divisor = norm;
  if (!mfsdp_f64_is_finite(sum)) return mfsdp_f64_from_bits(UINT64_C(0x7ff8000000000000));
  if (rule == MFSDP_NORM_MAX_EPS) divisor = norm > eps ? norm : eps;
  if (rule == MFSDP_NORM_ADD_EPS) divisor = norm + eps;
  return divisor > 0.0 ? gain / divisor : 0.0;
}

/* In double: a norm of 1e-38 has a reciprocal that no float holds, and x * scale is about 1 again.
 */
MFSDP_API void mfsdp__host_scale(float *MFSDP_RESTRICT dst, const float *MFSDP_RESTRICT src,
                                 double scale, int64_t count) {
  int64_t i;
  for (i = 0; i < count; ++i)
    dst[i] = (float)((double)src[i] * scale);
}

/* By way of a small buffer, so that dst may be src and loops still know that nothing overlaps. */
MFSDP_API void mfsdp__host_normalize_one(void *dst, mfsdp_dtype dst_dtype, const float *src,
                                         int64_t count, double scale) {
  float chunk[MFSDP__HOST_CHUNK];
  int64_t start;
  for (start = 0; start < count; start += MFSDP__HOST_CHUNK) {
    const int64_t length = mfsdp__host_chunk(start, count);
    mfsdp__host_scale(chunk, src + start, scale, length);
    mfsdp__host_cast_from_f32((unsigned char *)dst + (size_t)start * mfsdp_dtype_nbytes(dst_dtype),
                              dst_dtype, chunk, length);
  }
}

MFSDP_API void mfsdp__host_normalize(const mfsdp_normalize_args *args) {
  int64_t b;
  for (b = 0; b < args->batch_count; ++b) {
    const float *src = args->src + b * args->src_stride;
    unsigned char *dst = (unsigned char *)args->dst +
                         (size_t)(b * args->dst_stride) * mfsdp_dtype_nbytes(args->dst_dtype);
    const double sum = mfsdp__host_sumsq(src, args->count);
    mfsdp__host_normalize_one(dst, args->dst_dtype, src, args->count,
                              mfsdp__host_norm_scale(sum, args->rule, args->eps, args->gain));
  }
}

/* ---- fused optimizer passes: the formulas stand at mfsdp_fused_args ---- */

typedef struct mfsdp__host_fused_constants {
  float grad, decay, step;
  float beta1, beta1_rest, beta2, beta2_rest, root_correction, eps;
  float momentum, grad_weight, nesterov_weight;
} mfsdp__host_fused_constants;

MFSDP_API void mfsdp__host_adamw(float *MFSDP_RESTRICT master, const float *MFSDP_RESTRICT grad,
                                 float *MFSDP_RESTRICT exp_avg, float *MFSDP_RESTRICT exp_avg_sq,
                                 const mfsdp__host_fused_constants *constants, int64_t count) {
  const mfsdp__host_fused_constants k = *constants;
  int64_t i;
  for (i = 0; i < count; ++i) {
    const float g = grad[i] * k.grad;
    const float m = k.beta1 * exp_avg[i] + k.beta1_rest * g;
    const float v = k.beta2 * exp_avg_sq[i] + (k.beta2_rest * g) * g;
    const float w = master[i] * k.decay;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] = w - k.step * (m / (sqrtf(v) / k.root_correction + k.eps));
  }
}

MFSDP_API void mfsdp__host_muon_prepare(float *MFSDP_RESTRICT direction,
                                        const float *MFSDP_RESTRICT grad,
                                        const float *MFSDP_RESTRICT momentum, int nesterov,
                                        const mfsdp__host_fused_constants *constants,
                                        int64_t count) {
  const mfsdp__host_fused_constants k = *constants;
  int64_t i;
  if (!nesterov) {
    for (i = 0; i < count; ++i)
      direction[i] = k.momentum * momentum[i] + k.grad_weight * (grad[i] * k.grad);
    return;
  }
  for (i = 0; i < count; ++i) {
    const float g = grad[i] * k.grad;
    const float b = k.momentum * momentum[i] + k.grad_weight * g;
    direction[i] = k.nesterov_weight * g + k.momentum * b;
  }
}

MFSDP_API void mfsdp__host_muon_commit(float *MFSDP_RESTRICT master,
                                       const float *MFSDP_RESTRICT grad,
                                       float *MFSDP_RESTRICT momentum,
                                       const float *MFSDP_RESTRICT direction,
                                       const mfsdp__host_fused_constants *constants,
                                       int64_t count) {
  const mfsdp__host_fused_constants k = *constants;
  int64_t i;
  for (i = 0; i < count; ++i) {
    const float w = master[i] * k.decay;
    momentum[i] = k.momentum * momentum[i] + k.grad_weight * (grad[i] * k.grad);
    master[i] = w - k.step * direction[i];
  }
}

MFSDP_API mfsdp__host_fused_constants mfsdp__host_fused_constants_of(const mfsdp_fused_args *args,
                                                                     double item_scale) {
  const mfsdp_step_scalars *s = args->scalars;
  const double t = (double)s->applied_steps;
  mfsdp__host_fused_constants k;
  k.grad = (float)(s->grad_scale * (args->clipped ? s->clip_scale : 1.0));
  k.decay = (float)(1.0 - s->lr * s->weight_decay);
  k.beta1 = (float)args->beta1;
  k.beta1_rest = (float)(1.0 - args->beta1);
  k.beta2 = (float)args->beta2;
  k.beta2_rest = (float)(1.0 - args->beta2);
  k.root_correction = (float)sqrt(1.0 - pow(args->beta2, t));
  k.eps = (float)args->eps;
  k.momentum = (float)args->momentum;
  k.grad_weight = (float)args->grad_weight;
  k.nesterov_weight = (float)args->nesterov_weight;
  k.step = args->op == MFSDP_FUSED_ADAMW ? (float)(s->lr / (1.0 - pow(args->beta1, t)))
                                         : (float)(s->lr * item_scale);
  return k;
}

MFSDP_API double mfsdp__host_row_factor(float second, double eps) {
  return 1.0 / (sqrt((double)second) + eps);
}

/* Rows of one matrix to equal root mean squares by their running second moments, then all together
 * back to the old norm. Twice over the direction, nothing kept but the moments. */
MFSDP_API void mfsdp__host_muon_rows(const mfsdp_fused_args *args, const mfsdp_fused_item *item) {
  const int64_t cols = item->count / item->rows;
  const float beta2 = (float)args->beta2, rest = (float)(1.0 - args->beta2);
  float *second = item->state[1];
  double before = 0.0, after = 0.0, back;
  int64_t i, j;
  for (i = 0; i < item->rows; ++i) {
    const double square = mfsdp__host_sumsq(item->direction + i * cols, cols);
    double factor;
    second[i] = beta2 * second[i] + rest * (float)(square / (double)cols);
    factor = mfsdp__host_row_factor(second[i], args->eps);
    before += square;
    after += square * factor * factor;
  }
  back = after > 0.0 ? sqrt(before / after) : 0.0;
  for (i = 0; i < item->rows; ++i) {
    const float factor = (float)(mfsdp__host_row_factor(second[i], args->eps) * back);
    float *row = item->direction + i * cols;
    for (j = 0; j < cols; ++j)
      row[j] = row[j] * factor;
  }
}

MFSDP_API void mfsdp__host_fused_item(const mfsdp_fused_args *args, const mfsdp_fused_item *item) {
  const mfsdp__host_fused_constants k = mfsdp__host_fused_constants_of(args, item->scale);
  const size_t param_nbytes =
      item->param != NULL ? mfsdp_dtype_nbytes((mfsdp_dtype)item->param_dtype) : 0;
  int64_t start;
  if (args->op == MFSDP_FUSED_MUON_PREPARE) {
    mfsdp__host_muon_prepare(item->direction, item->grad, item->state[0], args->nesterov, &k,
                             item->count);
    return;
  }
  if (args->op == MFSDP_FUSED_MUON_ROWS) {
    mfsdp__host_muon_rows(args, item);
    return;
  }
  /* By chunks, so that the cast reads the masters from the cache. */
  for (start = 0; start < item->count; start += MFSDP__HOST_CHUNK) {
    const int64_t length = mfsdp__host_chunk(start, item->count);
    if (args->op == MFSDP_FUSED_ADAMW)
      mfsdp__host_adamw(item->master + start, item->grad + start, item->state[0] + start,
                        item->state[1] + start, &k, length);
    else
      mfsdp__host_muon_commit(item->master + start, item->grad + start, item->state[0] + start,
                              item->direction + start, &k, length);
    if (item->param != NULL)
      mfsdp__host_cast_from_f32((unsigned char *)item->param + (size_t)start * param_nbytes,
                                (mfsdp_dtype)item->param_dtype, item->master + start, length);
  }
}

#endif /* MFSDP_HOST_HOST_OPS_H */
