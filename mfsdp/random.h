/* SPDX-License-Identifier: MIT */
/*
 * random.h - a counter-based random generator: a value is a pure function of (seed, stream, index).
 *
 * Purpose: initial values and sample order that do not depend on how a tensor is cut, on the world
 * size, or on the order of calls.
 *
 *   for (int64_t i = 0; i < count; ++i)           // any rank, any range, any order
 *     shard[i] = 0.02f * mfsdp_random_normal(seed, tensor_id, (uint64_t)(first + i));
 *
 * Does not: serve cryptography.
 * Link flags: -lm.
 * Source: the SplitMix64 finalizer (Steele, Lea, Flood, "Fast splittable pseudorandom number
 * generators", OOPSLA 2014), applied to the three words one after the other.
 */
#ifndef MFSDP_RANDOM_H
#define MFSDP_RANDOM_H

#include "types.h"

#include <math.h>

MFSDP_API uint64_t mfsdp__random_mix(uint64_t z) {
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return z ^ (z >> 31);
}

/* 64 uniform bits for (seed, stream, index). */
MFSDP_API uint64_t mfsdp_random_u64(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t golden = UINT64_C(0x9e3779b97f4a7c15);
  uint64_t z = mfsdp__random_mix(seed + golden);
  z = mfsdp__random_mix(z + golden * (stream + 1));
  return mfsdp__random_mix(z + golden * (index + 1));
}

/* Uniform in [0, 1) with 53 bits. */
MFSDP_API double mfsdp_random_uniform(uint64_t seed, uint64_t stream, uint64_t index) {
  return (double)(mfsdp_random_u64(seed, stream, index) >> 11) / 9007199254740992.0 /* 2^53 */;
}

/* Uniform in [0, bound) without modulo bias that matters (bound far below 2^53); 0 for bound 0. */
MFSDP_API uint64_t mfsdp_random_below(uint64_t seed, uint64_t stream, uint64_t index,
                                      uint64_t bound) {
  return (uint64_t)(mfsdp_random_uniform(seed, stream, index) * (double)bound);
}

/* Standard normal by Box-Muller from the two 32-bit halves of one draw; |value| < 6.8. */
MFSDP_API float mfsdp_random_normal(uint64_t seed, uint64_t stream, uint64_t index) {
  const uint64_t bits = mfsdp_random_u64(seed, stream, index);
  const double u = ((double)(bits >> 32) + 0.5) / 4294967296.0 /* 2^32 */;
  const double v = (double)(bits & UINT64_C(0xffffffff)) / 4294967296.0;
  return (float)(sqrt(-2.0 * log(u)) * cos(6.283185307179586 * v));
}

#endif /* MFSDP_RANDOM_H */
