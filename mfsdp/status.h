/* SPDX-License-Identifier: MIT */
/*
 * status.h - the one status enum of the library, and the error record that explains a status.
 *
 * Purpose: every fallible function returns mfsdp_status; MFSDP_OK is 0.
 *
 *   mfsdp_status s = mfsdp_plan_create(&context, &desc, &plan);
 *   if (s != MFSDP_OK)
 *     fprintf(stderr, "%s: %s\n", mfsdp_status_name(s), mfsdp_context_error(&context)->message);
 *
 * Does not: print, exit or abort. What a failed job does is the program's decision.
 * Link flags: none.
 */
#ifndef MFSDP_STATUS_H
#define MFSDP_STATUS_H

#include "config.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* X(suffix, what it means to the caller) */
#define MFSDP_STATUS_TABLE(X)                                                                \
  X(OK, "success")                                                                           \
  X(E_ARGUMENT, "an argument or a description field is invalid; nothing was done")           \
  X(E_STATE, "the call is not allowed now; the object is unchanged")                         \
  X(E_UNSUPPORTED, "valid, but this build, backend or transport cannot do it")               \
  X(E_MEMORY, "the allocator returned no memory; nothing is leaked")                         \
  X(E_OVERFLOW, "a size does not fit its integer type; nothing was allocated")               \
  X(E_BACKEND, "the compute backend reported an error")                                      \
  X(E_TIMEOUT, "a deadline passed; the transport is poisoned")                               \
  X(E_PEER, "a peer is gone or failed; the transport is poisoned")                           \
  X(E_MISMATCH, "ranks disagree: plan, options, or an operation's size; nothing is trusted") \
  X(E_POISONED, "an earlier error poisoned the transport or runtime; see the first error")   \
  X(E_IO, "the operating system refused an input or output operation")                       \
  X(E_FORMAT, "bytes from outside do not follow their format")

typedef enum mfsdp_status {
#define MFSDP__STATUS_ENUM(suffix, text) MFSDP_##suffix,
  MFSDP_STATUS_TABLE(MFSDP__STATUS_ENUM)
#undef MFSDP__STATUS_ENUM
      MFSDP_STATUS_COUNT
} mfsdp_status;

/* The constant's name, as "MFSDP_E_ARGUMENT"; never NULL. */
MFSDP_API const char *mfsdp_status_name(mfsdp_status status) {
  switch (status) {
#define MFSDP__STATUS_NAME(suffix, text) \
  case MFSDP_##suffix: return "MFSDP_" #suffix;
    MFSDP_STATUS_TABLE(MFSDP__STATUS_NAME)
#undef MFSDP__STATUS_NAME
  case MFSDP_STATUS_COUNT: break;
  }
  return "MFSDP_E_UNKNOWN";
}

/* One English sentence fragment about the status; never NULL. */
MFSDP_API const char *mfsdp_status_text(mfsdp_status status) {
  switch (status) {
#define MFSDP__STATUS_TEXT(suffix, text) \
  case MFSDP_##suffix: return text;
    MFSDP_STATUS_TABLE(MFSDP__STATUS_TEXT)
#undef MFSDP__STATUS_TEXT
  case MFSDP_STATUS_COUNT: break;
  }
  return "unknown status";
}

/*
 * What went wrong, in full. Plain data: it may be copied between threads. Errors of another thread
 * travel in their queue as an mfsdp_error and reach the context at the wait.
 */
typedef struct mfsdp_error {
  mfsdp_status status;
  int32_t rank;      /* the rank that noticed, -1 if ranks play no part */
  int32_t culprit;   /* the rank that caused it, -1 if unknown */
  int32_t line;      /* source line of the check that failed */
  const char *file;  /* source file of that check: a string literal, never freed */
  char message[384]; /* names the argument, the value it got and what it needed */
} mfsdp_error;

/* No error: status MFSDP_OK, no rank, an empty message. */
MFSDP_API mfsdp_error mfsdp_error_none(void) {
  mfsdp_error error;
  memset(&error, 0, sizeof(error));
  error.rank = -1;
  error.culprit = -1;
  error.file = "";
  return error;
}

/* Makes *error say the same without writing its whole message: for what is called often. */
MFSDP_API void mfsdp_error_clear(mfsdp_error *error) {
  error->status = MFSDP_OK;
  error->rank = error->culprit = -1;
  error->line = 0;
  error->file = "";
  error->message[0] = '\0';
}

MFSDP_API MFSDP_FORMAT(6, 0) void mfsdp__error_vset(mfsdp_error *error, mfsdp_status status,
                                                    int32_t culprit, const char *file, int32_t line,
                                                    const char *format, va_list arguments) {
  error->status = status;
  error->culprit = culprit;
  error->file = file;
  error->line = line;
  (void)vsnprintf(error->message, sizeof(error->message), format, arguments);
}

/* Fills *error (NULL: does nothing) and returns `status`, so that a task can `return` it. */
MFSDP_API MFSDP_FORMAT(6, 7) mfsdp_status
    mfsdp__error_set(mfsdp_error *error, mfsdp_status status, int32_t culprit, const char *file,
                     int32_t line, const char *format, ...) {
  va_list arguments;
  if (error == NULL) return status;
  va_start(arguments, format);
  mfsdp__error_vset(error, status, culprit, file, line, format, arguments);
  va_end(arguments);
  return status;
}

/* For code that runs on a queue's thread and has no context: fills the error record it was
 * given. */
#define MFSDP_ERROR_SET(error, status, culprit, ...) \
  mfsdp__error_set((error), (status), (culprit), __FILE__, __LINE__, __VA_ARGS__)

/* Leaves the calling function with the status of `call` unless it is MFSDP_OK. */
#define MFSDP_TRY(call)                                          \
  do {                                                           \
    const mfsdp_status mfsdp__try_status = (call);               \
    if (mfsdp__try_status != MFSDP_OK) return mfsdp__try_status; \
  } while (0)

#endif /* MFSDP_STATUS_H */
