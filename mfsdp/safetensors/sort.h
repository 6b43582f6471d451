/* SPDX-License-Identifier: MIT */
/*
 * safetensors/sort.h - sorted views of tables: n log n at worst, whatever a file holds.
 *
 *   mfsdp__st_sort(order, scratch, count, mfsdp__st_less_by_name, tensors);
 *
 * Private to safetensors.h. No qsort: libc's may allocate, and may be quadratic.
 * Does not: move what is sorted, or allocate.
 * Link flags: none.
 */
#ifndef MFSDP_SAFETENSORS_SORT_H
#define MFSDP_SAFETENSORS_SORT_H

#include "fault.h"

/* 1 if entry a of `table` stands before entry b. */
typedef int (*mfsdp__st_less)(const void *table, uint32_t a, uint32_t b);

/* Merges the neighbours [first, middle) and [middle, last), both sorted, by way of scratch. */
MFSDP_API void mfsdp__st_merge(uint32_t *order, uint32_t *scratch, size_t first, size_t middle,
                               size_t last, mfsdp__st_less less, const void *table) {
  size_t left = first, right = middle, at = first;
  if (!less(table, order[middle], order[middle - 1])) return; /* most files are sorted already */
  while (left < middle && right < last)
    scratch[at++] = less(table, order[right], order[left]) ? order[right++] : order[left++];
  while (left < middle)
    scratch[at++] = order[left++];
  while (right < last)
    scratch[at++] = order[right++];
  memcpy(order + first, scratch + first, (last - first) * sizeof(*order));
}

/* Fills order with 0 .. count - 1 in the order of `less`; equal entries keep theirs. scratch has
 * room for count. */
MFSDP_API void mfsdp__st_sort(uint32_t *order, uint32_t *scratch, size_t count, mfsdp__st_less less,
                              const void *table) {
  size_t width, first;
  for (first = 0; first < count; ++first)
    order[first] = (uint32_t)first;
  for (width = 1; width < count; width *= 2)
    for (first = 0; count - first > width; first += 2 * width) {
      const size_t last = count - first > 2 * width ? first + 2 * width : count;
      mfsdp__st_merge(order, scratch, first, first + width, last, less, table);
      if (last == count) break;
    }
}

#endif /* MFSDP_SAFETENSORS_SORT_H */
