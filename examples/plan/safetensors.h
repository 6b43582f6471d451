/* SPDX-License-Identifier: MIT */
/*
 * safetensors.h - opens a file on disk for the reader of mfsdp/safetensors.h, which is given a
 * callback that reads; tensor data is never read.
 *
 *   plan_safetensors st;
 *   if (plan_safetensors_read(path, &st, &error) != PLAN_OK) ...
 *   ... mfsdp_safetensors_at(st.file, i)->name, dtype, shape ...
 *   plan_safetensors_free(&st);
 */
#ifndef PLAN_SAFETENSORS_H
#define PLAN_SAFETENSORS_H

#include "error.h"
#include "mfsdp/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct plan_safetensors {
  mfsdp_context context;   /* what `file` was made with */
  mfsdp_safetensors *file; /* its header, checked; NULL: none */
} plan_safetensors;

/* Reads the header of a file. On failure *out is empty. The caller frees *out. */
int plan_safetensors_read(const char *path, plan_safetensors *out, plan_error *error);
void plan_safetensors_free(plan_safetensors *st);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_SAFETENSORS_H */
