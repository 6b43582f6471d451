/* SPDX-License-Identifier: MIT */
/*
 * vector_math.h - exp, sums and maxima in a form that compilers vectorize without -ffast-math.
 *
 * Sums run in GPT_LANES independent chains, so their bits depend on the length only: not on the
 * vector width of the machine, the alignment, or the thread.
 */
#ifndef GPT_VECTOR_MATH_H
#define GPT_VECTOR_MATH_H

#include <stdint.h>
#include <string.h>

#define GPT_LANES 16

/*
 * e^x. Relative error below 1e-7 (measured over all of [-87, 87]); x outside is taken at the
 * nearest end, so neither the result nor its inverse is 0, denormal or infinite; NaN gives NaN.
 * Branch-free. Source: Cody-Waite reduction x = n ln 2 + r, |r| <= ln 2 / 2, and a degree-7 Taylor
 * polynomial.
 */
static inline float gpt_expf(float x) {
  const float rounder = 12582912.0f; /* 1.5 * 2^23: adding it leaves the integer in the low bits */
  float shifted, n, r, p, scale;
  int32_t bits;
  x = x < -87.0f ? -87.0f : x;
  x = x > 87.0f ? 87.0f : x;
  shifted = x * 1.44269504f + rounder;
  n = shifted - rounder;
  r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  p = 1.0f / 5040.0f;
  p = p * r + 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r * r + r;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (int32_t)((uint32_t)bits << 23) + (127 << 23);
  memcpy(&scale, &bits, sizeof scale);
  return scale + scale * p;
}

static inline float gpt_fold_lanes(float *lane) {
  for (int width = GPT_LANES / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j)
      lane[j] += lane[j + width];
  return lane[0];
}

static inline float gpt_sum(const float *x, int64_t count) {
  float lane[GPT_LANES] = {0};
  int64_t i = 0;
  for (; i + GPT_LANES <= count; i += GPT_LANES)
    for (int j = 0; j < GPT_LANES; ++j)
      lane[j] += x[i + j];
  for (int j = 0; i < count; ++i, ++j)
    lane[j] += x[i];
  return gpt_fold_lanes(lane);
}

static inline float gpt_dot(const float *x, const float *y, int64_t count) {
  float lane[GPT_LANES] = {0};
  int64_t i = 0;
  for (; i + GPT_LANES <= count; i += GPT_LANES)
    for (int j = 0; j < GPT_LANES; ++j)
      lane[j] += x[i + j] * y[i + j];
  for (int j = 0; i < count; ++i, ++j)
    lane[j] += x[i] * y[i];
  return gpt_fold_lanes(lane);
}

/* The largest of x[0..count), count >= 1. A NaN may or may not be returned; the sums that follow
 * a softmax see it anyway. */
static inline float gpt_max(const float *x, int64_t count) {
  float lane[GPT_LANES];
  int64_t i = 0;
  for (int j = 0; j < GPT_LANES; ++j)
    lane[j] = x[0];
  for (; i + GPT_LANES <= count; i += GPT_LANES)
    for (int j = 0; j < GPT_LANES; ++j)
      lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  for (int j = 0; i < count; ++i, ++j)
    lane[j] = x[i] > lane[j] ? x[i] : lane[j];
  for (int j = 1; j < GPT_LANES; ++j)
    lane[0] = lane[j] > lane[0] ? lane[j] : lane[0];
  return lane[0];
}

/* y[i] = e^(x[i] - shift); y may be x. Returns the sum of y. */
static inline float gpt_exp_sum(const float *x, float shift, int64_t count, float *y) {
  for (int64_t i = 0; i < count; ++i)
    y[i] = gpt_expf(x[i] - shift);
  return gpt_sum(y, count);
}

#endif /* GPT_VECTOR_MATH_H */
