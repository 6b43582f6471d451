/* SPDX-License-Identifier: MIT */
/*
 * config.h - version, language portability and the few switches of the library.
 *
 * Purpose: everything that another header needs before it can declare anything. Includes nothing.
 *
 * Switches (always 0 or 1, tested with #if, set before the first include):
 *   MFSDP_ALLOW_FAST_MATH   0   1 accepts -ffast-math. Non-finite gradients may then pass unseen and
 *                               results may differ between ranks; the library is not tested so.
 * And one name, if it is set: MFSDP_PREFIX, for two versions in one program (cuda/kernels.h).
 * Does not: hold state, or change a struct or a function body by a macro.
 * Link flags: none.
 */
#ifndef MFSDP_CONFIG_H
#define MFSDP_CONFIG_H

#define MFSDP_VERSION_MAJOR 0
#define MFSDP_VERSION_MINOR 1
#define MFSDP_VERSION_PATCH 0
/* One integer that orders: major * 1000000 + minor * 1000 + patch. */
#define MFSDP_VERSION \
  (MFSDP_VERSION_MAJOR * 1000000 + MFSDP_VERSION_MINOR * 1000 + MFSDP_VERSION_PATCH)

#ifndef MFSDP_ALLOW_FAST_MATH
#define MFSDP_ALLOW_FAST_MATH 0
#endif
#if defined(__FAST_MATH__)
#if !MFSDP_ALLOW_FAST_MATH
#error \
    "matrixfsdp: -ffast-math breaks non-finite checks; use -fno-math-errno (MFSDP_ALLOW_FAST_MATH=1 overrides)"
#endif
#endif

#if !defined(__GNUC__)
#error "matrixfsdp needs GCC, Clang or nvcc (the __atomic and __attribute__ extensions)"
#endif

/* Every function of the library: one private copy per translation unit, no exported symbol. */
#define MFSDP_API static inline
/* The few of them that device code calls too. */
#if defined(__CUDACC__)
#define MFSDP_DEVICE_API static inline __host__ __device__
#else
#define MFSDP_DEVICE_API MFSDP_API
#endif

#if defined(__cplusplus)
#define MFSDP_RESTRICT __restrict__
#define MFSDP_STATIC_ASSERT(condition, message) static_assert(condition, message)
#else
#define MFSDP_RESTRICT restrict
#define MFSDP_STATIC_ASSERT(condition, message) _Static_assert(condition, message)
#endif

/* The compiler checks the arguments of the library's own message functions. */
#define MFSDP_FORMAT(format_index, first_argument) \
  __attribute__((format(printf, format_index, first_argument)))

/* A caller who drops a status drops an error. */
#define MFSDP_CHECKED __attribute__((warn_unused_result))

/*
 * MFSDP_HAS(ops, entry): 1 if the vtable `ops` (whose first member is struct_nbytes) is new enough
 * to have `entry` and the entry is not NULL. Every optional entry is tested with it before a call.
 */
#define MFSDP_HAS(ops, entry)                                                            \
  ((size_t)((const char *)&(ops)->entry - (const char *)(ops)) + sizeof((ops)->entry) <= \
       (ops)->struct_nbytes &&                                                           \
   (ops)->entry)

#endif /* MFSDP_CONFIG_H */
