/* SPDX-License-Identifier: MIT */
/*
 * ops_host.h - the table of ops.h for the host: layers.c, attention.c and a product. Everything is
 * complete when the call returns, and nothing fails but `alloc`.
 *
 *   gpt_host host = {sgemm};
 *   gpt_device device = gpt_host_device(&host);     // host must outlive it
 */
#ifndef GPT_OPS_HOST_H
#define GPT_OPS_HOST_H

#include "gemm.h"
#include "ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_host {
  gpt_sgemm_fn sgemm;
} gpt_host;

gpt_device gpt_host_device(gpt_host *host);

#ifdef __cplusplus
}
#endif

#endif /* GPT_OPS_HOST_H */
