/* SPDX-License-Identifier: MIT */
/*
 * platform.h - where ranks compute and what they meet in: two tables, chosen by --device and
 * --transport. What rank.c and the program do is the same for all of them.
 *
 *   job.platform = gpt_platform_host();
 *   job.links = gpt_links_threads();
 *   if (job.links->open(&job, &context, &error) == GPT_OK) ... ranks: gpt_rank_create ...
 *   job.links->close(&job, &context, status);
 */
#ifndef GPT_PLATFORM_H
#define GPT_PLATFORM_H

#include "mfsdp/context.h"

#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

struct gpt_job;
struct gpt_rank;

/* What one rank computes on. */
typedef struct gpt_platform {
  /* Of the products, for the first line of the audit. */
  const char *(*math_name)(const struct gpt_job *job);
  /* Makes rank->backend, rank->device and, where the model computes on one, rank->queue. */
  mfsdp_status (*create)(struct gpt_rank *rank);
  /* The same way back, also after a create that failed. */
  mfsdp_status (*destroy)(struct gpt_rank *rank);
} gpt_platform;

/* What the ranks of a job meet in. */
typedef struct gpt_links {
  /* Once in a process, before its ranks. Sets options.ranks where a launcher decides it, and
   * job->processes. Returns GPT_OK, GPT_USAGE_ERROR, or 1 where the caller did nothing wrong. */
  int (*open)(struct gpt_job *job, mfsdp_context *context, gpt_error *error);
  /* Also after an open that failed. `status`: of the run; processes may not come back if it
   * failed. */
  void (*close)(struct gpt_job *job, mfsdp_context *context, int status);
  /* Tells the peers of a failure that is not the transport's own. Any thread. */
  void (*poison)(const struct gpt_job *job, const mfsdp_error *why);
  /* Makes rank->control and chooses rank->gpu, before there is a backend. Collective. */
  mfsdp_status (*meet)(struct gpt_rank *rank);
  /* Makes rank->transport, on rank->backend. Collective. */
  mfsdp_status (*create)(struct gpt_rank *rank);
} gpt_links;

const gpt_platform *gpt_platform_host(void);
const gpt_links *gpt_links_threads(void); /* on the host */
const gpt_links *gpt_links_mpi(void);     /* on the host */

/* What the threads do, for others that use their world. open: a usage error where a launcher
 * started several processes, which would each train alone; the message advises transport
 * `instead`. */
int gpt_links_threads_open(struct gpt_job *job, mfsdp_context *context, const char *instead,
                           gpt_error *error);
mfsdp_status gpt_links_threads_meet(struct gpt_rank *rank);

#ifdef __cplusplus
}
#endif

#endif /* GPT_PLATFORM_H */
