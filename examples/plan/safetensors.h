/* SPDX-License-Identifier: MIT */
/*
 * safetensors.h - the names, dtypes and shapes of a safetensors file; tensor data is never read.
 *
 * Format: 8 bytes little-endian header length, then a JSON object {"name": {"dtype": "BF16",
 * "shape": [4096, 4096], "data_offsets": [0, 33554432]}, ..., "__metadata__": {"key": "text"}},
 * then the data, without holes (https://github.com/huggingface/safetensors, "Format"). The parser
 * takes just that and is bounded: no recursion, a header of at most 100 MB, sizes that fit 63 bits.
 */
#ifndef PLAN_SAFETENSORS_H
#define PLAN_SAFETENSORS_H

#include "params.h"

#ifdef __cplusplus
extern "C" {
#endif

#define PLAN_SAFETENSORS_MOST_NBYTES 100000000

typedef struct plan_tensor {
  const char *name;  /* UTF-8 without control characters */
  const char *dtype; /* as in the file, one of the format's: a string literal */
  int32_t ndim;      /* 0 for a scalar */
  int64_t shape[MFSDP_MAX_NDIM];
  int64_t begin, end; /* bytes in the data section */
} plan_tensor;

typedef struct plan_tensors {
  plan_tensor *list; /* in file order */
  int32_t count, capacity;
  char *names; /* what name points into */
} plan_tensors;

/* Parses a header of `nbytes` (without its length) for `data_nbytes` of data. `path` is for
 * messages. On failure *out is empty. The caller frees *out. */
int plan_safetensors_parse(const char *path, const char *header, size_t nbytes, int64_t data_nbytes,
                           plan_tensors *out, plan_error *error);
/* Reads and parses the header of a file. */
int plan_safetensors_read(const char *path, plan_tensors *out, plan_error *error);
void plan_tensors_free(plan_tensors *tensors);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_SAFETENSORS_H */
