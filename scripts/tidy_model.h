/* SPDX-License-Identifier: MIT */
/*
 * tidy_model.h - what clang's analyzer is told before it reads a file (scripts/analyze.sh includes this).
 * It does not look into functions with `...`, into builtins that check for overflow, or behind an allocator's
 * pointer. Unless it knows what these return, every check of the library seems to let all pass.
 */
#include <stdlib.h>

/* Whether it overflows, nobody knows; what comes out otherwise does not change. */
int tidy_unknown(void);
#define __builtin_add_overflow(a, b, out) (*(out) = (a) + (b), tidy_unknown())
#define __builtin_sub_overflow(a, b, out) (*(out) = (a) - (b), tidy_unknown())
#define __builtin_mul_overflow(a, b, out) (*(out) = (a) * (b), tidy_unknown())

#include "mfsdp/context.h"

/* A failure is what it was given. */
static inline mfsdp_status tidy_same(mfsdp_status returned, mfsdp_status given) {
  if (returned != given) __builtin_unreachable();
  return given;
}

#undef MFSDP_FAIL
#undef MFSDP_FAIL_PEER
#undef MFSDP_ERROR_SET
#define MFSDP_FAIL(context, status, ...) \
  tidy_same(mfsdp__fail((context), (status), -1, __FILE__, __LINE__, __VA_ARGS__), (status))
#define MFSDP_FAIL_PEER(context, status, culprit, ...) \
  tidy_same(mfsdp__fail((context), (status), (culprit), __FILE__, __LINE__, __VA_ARGS__), (status))
#define MFSDP_ERROR_SET(error, status, culprit, ...)                                         \
  tidy_same(mfsdp__error_set((error), (status), (culprit), __FILE__, __LINE__, __VA_ARGS__), \
            (status))

/* Tables come from calloc, so that lost and used ones are seen, too. */
static inline mfsdp_status tidy_table_alloc(mfsdp_context *context, size_t count,
                                            size_t element_nbytes, const char *what, void **out) {
  (void)context, (void)what;
  *out = NULL;
  if (count == 0 || element_nbytes == 0) return MFSDP_OK;
  *out = calloc(count, element_nbytes);
  return *out == NULL ? MFSDP_E_MEMORY : MFSDP_OK;
}
static inline void tidy_table_free(mfsdp_context *context, void *ptr, size_t count,
                                   size_t element_nbytes) {
  (void)context, (void)count, (void)element_nbytes;
  free(ptr);
}
#define mfsdp_table_alloc tidy_table_alloc
#define mfsdp_table_free tidy_table_free
