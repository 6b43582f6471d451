/* SPDX-License-Identifier: MIT */
/*
 * context.h - the per-rank context: allocator, log and trace callbacks, debug options, counters and
 * the last error.
 *
 *   mfsdp_context_desc desc = mfsdp_context_desc_default();
 *   mfsdp_context context;
 *   desc.rank = rank;
 *   if (mfsdp_context_init(&context, &desc) != MFSDP_OK) ...
 *   if (mfsdp_plan_create(&context, &plan_desc, &plan) != MFSDP_OK)
 *     fprintf(stderr, "rank %d: %s\n", rank, mfsdp_context_error(&context)->message);
 *   mfsdp_context_destroy(&context);          // asks that everything was given back
 *
 * The caller owns the context (it may live on the stack) and it must outlive what was made with it.
 * One per rank, touched by that rank's own thread only.
 * Does not: lock, print, or own a thread.
 * Link flags: none.
 */
#ifndef MFSDP_CONTEXT_H
#define MFSDP_CONTEXT_H

#include "memory.h"

typedef enum mfsdp_log_level {
  MFSDP_LOG_ERROR = 1,
  MFSDP_LOG_WARNING,
  MFSDP_LOG_INFO
} mfsdp_log_level;

typedef struct mfsdp_context_desc {
  size_t struct_nbytes;
  mfsdp_allocator allocator;
  int32_t rank; /* for messages; -1 where ranks play no part */
  /* NULL: no log. The message is valid during the call only. */
  void (*log)(void *user, mfsdp_log_level level, const char *message);
  /* NULL: no trace. NVTX style: begin != 0 opens the phase `label` on the lane `lane` (a queue's
   * name), 0 closes the innermost one of that lane. May be called from any thread of the rank. */
  void (*trace)(void *user, int begin, const char *lane, const char *label);
  void *user;           /* handed to log and trace */
  int32_t debug_poison; /* 1: released buffers are filled with NaN, so that late readers show */
  int32_t debug_check;  /* 1: batches carry a check word that receivers compare */
} mfsdp_context_desc;

/* Bytes sent by this rank, by class. Payload is what the caller's tensors hold; wire adds
 * padding. */
typedef struct mfsdp_traffic_count {
  uint64_t payload_nbytes, wire_nbytes, transfer_count;
} mfsdp_traffic_count;

typedef struct mfsdp_counters {
  mfsdp_traffic_count sent[MFSDP_TRAFFIC_CLASS_COUNT];
  uint64_t newton_schulz_count; /* matrices orthogonalized */
} mfsdp_counters;

typedef struct mfsdp_context {
  mfsdp_context_desc desc;
  mfsdp_error error; /* the last failure; status MFSDP_OK if there was none */
  mfsdp_counters counters;
  size_t current_nbytes[MFSDP_MEMORY_CLASS_COUNT], peak_nbytes[MFSDP_MEMORY_CLASS_COUNT];
  size_t total_nbytes, total_peak_nbytes;
} mfsdp_context;

/* Default allocator, rank -1, no callbacks, debug options off. */
MFSDP_API mfsdp_context_desc mfsdp_context_desc_default(void) {
  mfsdp_context_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.allocator = mfsdp_allocator_default();
  desc.rank = -1;
  return desc;
}

MFSDP_API MFSDP_FORMAT(6, 7) mfsdp_status
    mfsdp__fail(mfsdp_context *context, mfsdp_status status, int32_t culprit, const char *file,
                int32_t line, const char *format, ...) {
  va_list arguments;
  if (context == NULL) return status;
  va_start(arguments, format);
  mfsdp__error_vset(&context->error, status, culprit, file, line, format, arguments);
  va_end(arguments);
  context->error.rank = context->desc.rank;
  if (context->desc.log)
    context->desc.log(context->desc.user, MFSDP_LOG_ERROR, context->error.message);
  return status;
}

/* MFSDP_FAIL(context, status, format, ...): records the error with file and line, logs it, and is
 * the status, so that a check reads `if (bad) return MFSDP_FAIL(...)`. */
#define MFSDP_FAIL(context, status, ...) \
  mfsdp__fail((context), (status), -1, __FILE__, __LINE__, __VA_ARGS__)
#define MFSDP_FAIL_PEER(context, status, culprit, ...) \
  mfsdp__fail((context), (status), (culprit), __FILE__, __LINE__, __VA_ARGS__)

/* Copies an error that another thread recorded into the context; returns its status. */
MFSDP_API mfsdp_status mfsdp_context_take_error(mfsdp_context *context, const mfsdp_error *error) {
  if (context == NULL || error->status == MFSDP_OK) return error->status;
  context->error = *error;
  if (context->error.rank < 0) context->error.rank = context->desc.rank;
  if (context->desc.log)
    context->desc.log(context->desc.user, MFSDP_LOG_ERROR, context->error.message);
  return error->status;
}

/*
 * Starts a context. E_ARGUMENT for a NULL pointer, a description of another size, or an allocator
 * without alloc and free; the context then holds the message all the same (if it is not NULL).
 */
MFSDP_API mfsdp_status mfsdp_context_init(mfsdp_context *context, const mfsdp_context_desc *desc) {
  if (context == NULL) return MFSDP_E_ARGUMENT;
  memset(context, 0, sizeof(*context));
  context->error = mfsdp_error_none();
  context->desc = mfsdp_context_desc_default();
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "context: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "context: desc.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_context_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->allocator.alloc == NULL || desc->allocator.free == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "context: desc.allocator needs alloc and free");
  context->desc = *desc;
  return MFSDP_OK;
}

/* The last error; never NULL. Its status is MFSDP_OK if nothing failed. */
MFSDP_API const mfsdp_error *mfsdp_context_error(const mfsdp_context *context) {
  return &context->error;
}

/* Opens phase `label` on `lane` in the trace; nothing without a callback. */
MFSDP_API void mfsdp_trace_begin(mfsdp_context *context, const char *lane, const char *label) {
  if (context->desc.trace) context->desc.trace(context->desc.user, 1, lane, label);
}

/* Closes the innermost phase of `lane`. */
MFSDP_API void mfsdp_trace_end(mfsdp_context *context, const char *lane, const char *label) {
  if (context->desc.trace) context->desc.trace(context->desc.user, 0, lane, label);
}

/* ---- accounted memory ---- */

/* Books nbytes under a class; for backends whose memory does not come from the allocator. */
MFSDP_API void mfsdp_memory_book(mfsdp_context *context, mfsdp_memory_class memory_class,
                                 size_t nbytes) {
  size_t *current = &context->current_nbytes[memory_class];
  *current += nbytes;
  context->total_nbytes += nbytes;
  if (*current > context->peak_nbytes[memory_class]) context->peak_nbytes[memory_class] = *current;
  if (context->total_nbytes > context->total_peak_nbytes)
    context->total_peak_nbytes = context->total_nbytes;
}

/* Takes back what mfsdp_memory_book booked, with the same class and size. */
MFSDP_API void mfsdp_memory_unbook(mfsdp_context *context, mfsdp_memory_class memory_class,
                                   size_t nbytes) {
  context->current_nbytes[memory_class] -= nbytes;
  context->total_nbytes -= nbytes;
}

/* A flag of a description: another value than 0 and 1 is a mistake (a count, a size, an enum in the
 * wrong field, memory that nobody set). E_ARGUMENT, "<what>: <field> is ...". */
MFSDP_API mfsdp_status mfsdp__flag_check(mfsdp_context *context, const char *what,
                                         const char *field, int32_t value) {
  if (value == 0 || value == 1) return MFSDP_OK;
  return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "%s: %s is %d, needs 0 or 1", what, field,
                    (int)value);
}

/*
 * Host memory for the library's own tables, zeroed, aligned to MFSDP_ALIGN_NBYTES, booked under
 * MFSDP_MEMORY_TABLE. count elements of element_nbytes; *out becomes NULL for count 0.
 * E_OVERFLOW, E_MEMORY.
 */
MFSDP_API mfsdp_status mfsdp_table_alloc(mfsdp_context *context, size_t count,
                                         size_t element_nbytes, const char *what, void **out) {
  size_t nbytes;
  *out = NULL;
  if (!mfsdp_size_mul(count, element_nbytes, &nbytes))
    return MFSDP_FAIL(context, MFSDP_E_OVERFLOW, "%s: %zu elements of %zu bytes overflow size_t",
                      what, count, element_nbytes);
  if (nbytes == 0) return MFSDP_OK;
  *out = context->desc.allocator.alloc(nbytes, MFSDP_ALIGN_NBYTES, MFSDP_SPACE_HOST,
                                       context->desc.allocator.user);
  if (*out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_MEMORY, "%s: the allocator refused %zu bytes", what, nbytes);
  memset(*out, 0, nbytes);
  mfsdp_memory_book(context, MFSDP_MEMORY_TABLE, nbytes);
  return MFSDP_OK;
}

/* Gives back what mfsdp_table_alloc gave, with the same count and size. NULL is allowed. */
MFSDP_API void mfsdp_table_free(mfsdp_context *context, void *ptr, size_t count,
                                size_t element_nbytes) {
  if (ptr == NULL) return;
  mfsdp_memory_unbook(context, MFSDP_MEMORY_TABLE, count * element_nbytes);
  context->desc.allocator.free(ptr, count * element_nbytes, MFSDP_SPACE_HOST,
                               context->desc.allocator.user);
}

/*
 * Ends a context. E_STATE if memory booked through it was not given back: the message says how much
 * and the context stays usable.
 */
MFSDP_API mfsdp_status mfsdp_context_destroy(mfsdp_context *context) {
  if (context == NULL) return MFSDP_OK;
  if (context->total_nbytes != 0)
    return MFSDP_FAIL(context, MFSDP_E_STATE,
                      "context: %zu bytes are still held by objects made with it",
                      context->total_nbytes);
  memset(context, 0, sizeof(*context));
  return MFSDP_OK;
}

#endif /* MFSDP_CONTEXT_H */
