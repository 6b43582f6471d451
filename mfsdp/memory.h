/* SPDX-License-Identifier: MIT */
/*
 * memory.h - the caller's allocator, and what the library's memory is for.
 *
 *   static void *my_alloc(size_t nbytes, size_t alignment, mfsdp_space space, void *user);
 *   static void my_free(void *ptr, size_t nbytes, mfsdp_space space, void *user);
 *   mfsdp_allocator a = mfsdp_allocator_default();
 *   a.alloc = my_alloc; a.free = my_free; a.user = &my_pool;
 *
 * All memory of a rank comes through its context's allocator, in set-up calls (`_create`), and goes
 * back with the size it was asked with. Nothing is allocated during a step.
 * Does not: allocate device memory by itself; a device backend brings its own and asks the
 * allocator only for MFSDP_SPACE_HOST.
 * Link flags: none.
 */
#ifndef MFSDP_MEMORY_H
#define MFSDP_MEMORY_H

#include "types.h"

#include <stdlib.h>

typedef struct mfsdp_allocator {
  /* Returns nbytes (> 0) of memory aligned to `alignment` (a power of two), or NULL. */
  void *(*alloc)(size_t nbytes, size_t alignment, mfsdp_space space, void *user);
  /* `ptr` came from alloc with the same nbytes and space; never NULL. */
  void (*free)(void *ptr, size_t nbytes, mfsdp_space space, void *user);
  void *user;
} mfsdp_allocator;

/* What a buffer is for. Resident and peak bytes are kept by class. */
typedef enum mfsdp_memory_class {
  MFSDP_MEMORY_SHARD = 1, /* masters and compute-dtype shards this rank owns */
  MFSDP_MEMORY_STATE,     /* optimizer state of owned pieces */
  MFSDP_MEMORY_GRAD,      /* gradient accumulators of owned pieces */
  MFSDP_MEMORY_SLOT,      /* full parameters and full gradients of active units */
  MFSDP_MEMORY_STAGING,   /* receive buffers of collectives */
  MFSDP_MEMORY_WORKSPACE, /* scratch of optimizers */
  MFSDP_MEMORY_TABLE      /* plans, lists, names: host bookkeeping */
} mfsdp_memory_class;
#define MFSDP_MEMORY_CLASS_COUNT 8 /* class 0 stays empty, so that a class is an index */

/* The class in lower case, as "shard"; never NULL. */
MFSDP_API const char *mfsdp_memory_class_name(mfsdp_memory_class memory_class) {
  switch (memory_class) {
  case MFSDP_MEMORY_SHARD: return "shard";
  case MFSDP_MEMORY_STATE: return "state";
  case MFSDP_MEMORY_GRAD: return "grad";
  case MFSDP_MEMORY_SLOT: return "slot";
  case MFSDP_MEMORY_STAGING: return "staging";
  case MFSDP_MEMORY_WORKSPACE: return "workspace";
  case MFSDP_MEMORY_TABLE: return "table";
  }
  return "invalid";
}

/* Over-allocates and keeps malloc's pointer just below the block: works before C11 and on any
 * libc. */
MFSDP_API void *mfsdp__default_alloc(size_t nbytes, size_t alignment, mfsdp_space space,
                                     void *user) {
  size_t total;
  unsigned char *raw, *block;
  uintptr_t address;
  (void)space;
  (void)user;
  if (!mfsdp_size_add(nbytes, alignment, &total) || !mfsdp_size_add(total, sizeof(void *), &total))
    return NULL;
  raw = (unsigned char *)malloc(total);
  if (raw == NULL) return NULL;
  address = (uintptr_t)(raw + sizeof(void *));
  block = raw + sizeof(void *) + (alignment - address % alignment) % alignment;
  memcpy(block - sizeof(void *), &raw, sizeof(raw));
  return block;
}

MFSDP_API void mfsdp__default_free(void *ptr, size_t nbytes, mfsdp_space space, void *user) {
  unsigned char *raw;
  (void)nbytes;
  (void)space;
  (void)user;
  memcpy(&raw, (unsigned char *)ptr - sizeof(void *), sizeof(raw));
  free(raw);
}

/* malloc and free for every space. */
MFSDP_API mfsdp_allocator mfsdp_allocator_default(void) {
  mfsdp_allocator allocator;
  allocator.alloc = mfsdp__default_alloc;
  allocator.free = mfsdp__default_free;
  allocator.user = NULL;
  return allocator;
}

#endif /* MFSDP_MEMORY_H */
