/* SPDX-License-Identifier: MIT */
/*
 * dtype.h - exact conversions between f32, f64, bf16 and f16.
 *
 *   uint16_t h = mfsdp_bf16_from_f32(x);      // round to nearest even
 *   float y = mfsdp_f32_from_bf16(h);         // exact
 *
 * bf16 and f16 values are carried as uint16_t bit patterns. Narrowing rounds once, to nearest even,
 * also from f64; overflow becomes infinity; subnormal results are kept; a NaN stays a NaN of the
 * same sign and becomes quiet. Widening is exact. The functions have no branches, so that loops
 * over them vectorize, and use no instruction or type beyond C99.
 *
 * Does not: follow another rounding mode than the default one.
 * Formulas: IEEE 754-2019; the f16 arithmetic tricks are F. Giesen's (public domain).
 * Link flags: none.
 */
#ifndef MFSDP_DTYPE_H
#define MFSDP_DTYPE_H

#include "types.h"

/* The bit pattern of a value. */
MFSDP_DEVICE_API uint32_t mfsdp_bits_from_f32(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/* The value of a bit pattern. */
MFSDP_DEVICE_API float mfsdp_f32_from_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* The bit pattern of a value. */
MFSDP_DEVICE_API uint64_t mfsdp_bits_from_f64(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

/* The value of a bit pattern. */
MFSDP_DEVICE_API double mfsdp_f64_from_bits(uint64_t bits) {
  double value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

/* 1 if the value is neither infinite nor NaN; looks at bits, so no compiler flag can remove it. */
MFSDP_DEVICE_API int mfsdp_f32_is_finite(float value) {
  return (mfsdp_bits_from_f32(value) & 0x7f800000u) != 0x7f800000u;
}

/* 1 if x, rounded to f32, is positive, normal and finite. */
MFSDP_API int mfsdp_f32_is_positive(double x) {
  return x >= 1.1754944e-38 && x <= 3.4e38;
}

/* The same as mfsdp_f32_is_finite for f64. */
MFSDP_DEVICE_API int mfsdp_f64_is_finite(double value) {
  return (mfsdp_bits_from_f64(value) & UINT64_C(0x7ff0000000000000)) !=
         UINT64_C(0x7ff0000000000000);
}

/* ---- bf16: the upper half of an f32 ---- */

/* Exact. */
MFSDP_DEVICE_API float mfsdp_f32_from_bf16(uint16_t narrow16) {
  return mfsdp_f32_from_bits((uint32_t)narrow16 << 16);
}

/* One rounding, to nearest even. */
MFSDP_DEVICE_API uint16_t mfsdp_bf16_from_f32(float value) {
  const uint32_t bits = mfsdp_bits_from_f32(value);
  /* Adding just under half a unit, and one more when the kept part is odd, carries where it must.
   */
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet_nan = (bits >> 16) | 0x40u;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : rounded);
}

/* ---- f16: 5 exponent bits, 10 mantissa bits ---- */

/* Exact. */
MFSDP_DEVICE_API float mfsdp_f32_from_f16(uint16_t narrow16) {
  const uint32_t sign = ((uint32_t)narrow16 & 0x8000u) << 16;
  const uint32_t shifted = ((uint32_t)narrow16 & 0x7fffu) << 13;
  const uint32_t exponent = shifted & 0x0f800000u;
  const uint32_t normal = shifted + (112u << 23);
  const uint32_t special = shifted + (224u << 23);
  /* A subnormal is mantissa * 2^-24: with exponent bits for 2^-14 put in front, the subtraction of
   * 2^-14 leaves exactly that, without touching a subnormal f32. */
  const float small = mfsdp_f32_from_bits(shifted + (113u << 23)) - mfsdp_f32_from_bits(113u << 23);
  const uint32_t finite = exponent == 0u ? mfsdp_bits_from_f32(small) : normal;
  return mfsdp_f32_from_bits((exponent == 0x0f800000u ? special : finite) | sign);
}

/* One rounding, to nearest even. */
MFSDP_DEVICE_API uint16_t mfsdp_f16_from_f32(float value) {
  const uint32_t bits = mfsdp_bits_from_f32(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  /* At 65520 the rounding carry turns the largest exponent into infinity by itself; past it, clamp.
   */
  const uint32_t normal = (magnitude + 0xc8000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  /* Below 2^-14: in x + 0.5 the f32 unit is 2^-24, which is f16's smallest step: the FPU rounds. */
  const float shifted = mfsdp_f32_from_bits(magnitude) + 0.5f;
  const uint32_t subnormal = mfsdp_bits_from_f32(shifted) - 0x3f000000u;
  const uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t bounded = magnitude >= 0x47800000u ? 0x7c00u : finite;
  return (uint16_t)(sign | (magnitude > 0x7f800000u ? quiet_nan : bounded));
}

/* ---- from f64 in one rounding ---- */

/* Rounds toward zero and sets the last bit if anything was lost ("round to odd"): rounding the
 * result again to a format with at least two bits less equals one rounding of the original. */
MFSDP_DEVICE_API float mfsdp__f32_odd_from_f64(double value) {
  const float nearest = (float)value;
  const uint32_t bits = mfsdp_bits_from_f32(nearest);
  const double magnitude = value < 0.0 ? -value : value;
  const double rounded = nearest < 0.0f ? -(double)nearest : (double)nearest;
  const uint32_t toward_zero = rounded > magnitude ? bits - 1u : bits;
  return mfsdp_f32_from_bits(rounded < magnitude || rounded > magnitude ? toward_zero | 1u : bits);
}

/* One rounding, to nearest even. */
MFSDP_DEVICE_API uint16_t mfsdp_bf16_from_f64(double value) {
  return mfsdp_bf16_from_f32(mfsdp__f32_odd_from_f64(value));
}

/* One rounding, to nearest even. */
MFSDP_DEVICE_API uint16_t mfsdp_f16_from_f64(double value) {
  return mfsdp_f16_from_f32(mfsdp__f32_odd_from_f64(value));
}

/* ---- one element of an array of any dtype ---- */

/* Element `index` of `data`, exactly; `data` need not be aligned. NaN for an invalid dtype. */
MFSDP_API double mfsdp_element_get(const void *data, mfsdp_dtype dtype, int64_t index) {
  const unsigned char *at = (const unsigned char *)data + (size_t)index * mfsdp_dtype_nbytes(dtype);
  float narrow;
  double wide;
  uint16_t narrow16;
  switch (dtype) {
  case MFSDP_F32: memcpy(&narrow, at, sizeof(narrow)); return (double)narrow;
  case MFSDP_F64: memcpy(&wide, at, sizeof(wide)); return wide;
  case MFSDP_BF16:
    memcpy(&narrow16, at, sizeof(narrow16));
    return (double)mfsdp_f32_from_bf16(narrow16);
  case MFSDP_F16:
    memcpy(&narrow16, at, sizeof(narrow16));
    return (double)mfsdp_f32_from_f16(narrow16);
  }
  return mfsdp_f64_from_bits(UINT64_C(0x7ff8000000000000));
}

/* Element `index` of `data` becomes `value`, rounded once. Does nothing for an invalid dtype. */
MFSDP_API void mfsdp_element_set(void *data, mfsdp_dtype dtype, int64_t index, double value) {
  unsigned char *at = (unsigned char *)data + (size_t)index * mfsdp_dtype_nbytes(dtype);
  const float narrow = (float)value;
  const uint16_t narrow16 =
      dtype == MFSDP_BF16 ? mfsdp_bf16_from_f64(value) : mfsdp_f16_from_f64(value);
  switch (dtype) {
  case MFSDP_F32: memcpy(at, &narrow, sizeof(narrow)); break;
  case MFSDP_F64: memcpy(at, &value, sizeof(value)); break;
  case MFSDP_BF16:
  case MFSDP_F16: memcpy(at, &narrow16, sizeof(narrow16)); break;
  }
}

#endif /* MFSDP_DTYPE_H */
