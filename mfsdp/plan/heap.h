/* SPDX-License-Identifier: MIT */
/*
 * plan/heap.h - sorting and levelling for the planner: total orders, no allocation, no qsort (whose
 * libc version may allocate and is not stable).
 *
 *   mfsdp__keyed ranks[8];                       // {load, rank}
 *   mfsdp__heap_build(ranks, 8);                 // ranks[0] is the smallest (load, rank)
 *   ranks[0].key += cost; mfsdp__heap_sink(ranks, 8, 0);
 *
 * Private to the plan.
 * Does not: allocate.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_HEAP_H
#define MFSDP_PLAN_HEAP_H

#include "../types.h"

/* Ordered by (key, id); ids are distinct, so there are no ties. */
typedef struct mfsdp__keyed {
  int64_t key;
  int32_t id;
} mfsdp__keyed;

MFSDP_API int mfsdp__keyed_less(mfsdp__keyed a, mfsdp__keyed b) {
  return a.key < b.key || (a.key == b.key && a.id < b.id);
}

/* Moves entry i of a min-heap down to its place. */
MFSDP_API void mfsdp__heap_sink(mfsdp__keyed *heap, int64_t count, int64_t i) {
  const mfsdp__keyed moved = heap[i];
  for (;;) {
    int64_t child = 2 * i + 1;
    if (child >= count) break;
    if (child + 1 < count && mfsdp__keyed_less(heap[child + 1], heap[child])) ++child;
    if (!mfsdp__keyed_less(heap[child], moved)) break;
    heap[i] = heap[child];
    i = child;
  }
  heap[i] = moved;
}

MFSDP_API void mfsdp__heap_build(mfsdp__keyed *heap, int64_t count) {
  int64_t i;
  for (i = count / 2; i-- > 0;)
    mfsdp__heap_sink(heap, count, i);
}

/* Takes the smallest entry out of a heap of `count` >= 1 entries. */
MFSDP_API mfsdp__keyed mfsdp__heap_pop(mfsdp__keyed *heap, int64_t count) {
  const mfsdp__keyed top = heap[0];
  heap[0] = heap[count - 1];
  if (count > 1) mfsdp__heap_sink(heap, count - 1, 0);
  return top;
}

/* Adds an entry to a heap of `count` entries; there must be room for one more. */
MFSDP_API void mfsdp__heap_push(mfsdp__keyed *heap, int64_t count, mfsdp__keyed entry) {
  int64_t i = count;
  while (i > 0 && mfsdp__keyed_less(entry, heap[(i - 1) / 2])) {
    heap[i] = heap[(i - 1) / 2];
    i = (i - 1) / 2;
  }
  heap[i] = entry;
}

/* Ascending heap sort: O(n log n) whatever the input. */
MFSDP_API void mfsdp__keyed_sort(mfsdp__keyed *entries, int64_t count) {
  int64_t left, i;
  mfsdp__heap_build(entries, count);
  for (left = count; left > 1; --left) {
    const mfsdp__keyed smallest = mfsdp__heap_pop(entries, left);
    entries[left - 1] = smallest;
  }
  for (i = 0; i < count / 2; ++i) {
    const mfsdp__keyed swapped = entries[i];
    entries[i] = entries[count - 1 - i];
    entries[count - 1 - i] = swapped;
  }
}

/*
 * The level to which `volume` >= 0 fills containers that already hold sorted[0..count-1].key
 * (ascending; count >= 1): the smallest integer T with sum max(0, T - key) >= volume, but at least
 * the lowest key. Sums of keys and volume must fit.
 */
MFSDP_API int64_t mfsdp__water_level(const mfsdp__keyed *sorted, int32_t count, int64_t volume) {
  int64_t total = volume, level = 0;
  int32_t used;
  for (used = 1; used <= count; ++used) {
    total += sorted[used - 1].key;
    level = total / used + (total % used > 0);
    if (used == count || level <= sorted[used].key) break;
  }
  return level;
}

#endif /* MFSDP_PLAN_HEAP_H */
