/* SPDX-License-Identifier: MIT */
/*
 * control_check.h - what all control planes check and say alike. Internal to those of posix/, host/
 * and mpi/.
 *
 *   MFSDP_TRY(mfsdp__control_check_gather(context, in, nbytes, out, timeout_us, limit,
 *                                         "mfsdp_mpi_world_desc.control_nbytes"));
 *
 * Does not: hold state. Link flags: none.
 */
#ifndef MFSDP_POSIX_CONTROL_CHECK_H
#define MFSDP_POSIX_CONTROL_CHECK_H

#include "../context.h"

/* The arguments of an allgather. `field` is where the caller set the limit. E_ARGUMENT. */
MFSDP_API mfsdp_status mfsdp__control_check_gather(mfsdp_context *context, const void *in,
                                                   size_t nbytes, const void *out,
                                                   int64_t timeout_us, size_t limit,
                                                   const char *field) {
  if (nbytes > limit)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "control allgather: nbytes is %zu, this world was made for at most %zu (%s)",
                      nbytes, limit, field);
  if (nbytes > 0 && (in == NULL || out == NULL))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "control allgather: %s is NULL and nbytes is %zu",
                      in == NULL ? "in" : "out", nbytes);
  if (timeout_us <= 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "control allgather: timeout_us is %lld, needs to be positive",
                      (long long)timeout_us);
  return MFSDP_OK;
}

/* Rank r and rank 0 are in different calls, or bring different sizes. */
MFSDP_API mfsdp_status mfsdp__control_differ(int32_t r, uint64_t first_nbytes,
                                             uint64_t first_generation, uint64_t nbytes,
                                             uint64_t generation, mfsdp_error *why) {
  return MFSDP_ERROR_SET(
      why, MFSDP_E_MISMATCH, -1,
      "control allgather: rank 0 brings %llu bytes in call %llu, rank %d brings %llu in call %llu",
      (unsigned long long)first_nbytes, (unsigned long long)first_generation, (int)r,
      (unsigned long long)nbytes, (unsigned long long)generation);
}

/* What a call returns after the first error of a rank's world: E_POISONED, with that error. */
MFSDP_API mfsdp_status mfsdp__control_refuse(mfsdp_context *context, const mfsdp_error *first,
                                             const char *label) {
  return MFSDP_FAIL_PEER(context, MFSDP_E_POISONED, first->culprit,
                         "%s: refused after the first error (%s, noticed by rank %d): %s", label,
                         mfsdp_status_name(first->status), (int)first->rank, first->message);
}

/* Goes on writing at the end of `text`. */
MFSDP_API MFSDP_FORMAT(3, 4) void mfsdp__control_append(char *text, size_t text_nbytes,
                                                        const char *format, ...) {
  const size_t used = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(text + used, text_nbytes - used, format, arguments);
  va_end(arguments);
}

#endif /* MFSDP_POSIX_CONTROL_CHECK_H */
