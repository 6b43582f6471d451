/* SPDX-License-Identifier: MIT */
/*
 * strat_links.h - what the ranks of the strategies benchmark meet in, made anew for every runtime:
 * a world of threads, or a world on the processes of an mpirun, whose MPI starts once.
 *
 *   strat_mpi_start(&rank, &world);                      // with --transport mpi, first
 *   strat_world_open(&job);  ... ranks ...  strat_world_close(&job);
 *   strat_mpi_stop();
 *
 * A benchmark of a failed run has nothing to say: functions here print and exit.
 */
#ifndef MFSDP_BENCH_STRAT_LINKS_H
#define MFSDP_BENCH_STRAT_LINKS_H

#include "gpt/rank.h"

#ifdef __cplusplus
extern "C" {
#endif

/* 0, or 2 where this build has no MPI (message printed). */
int strat_mpi_start(int32_t *rank, int32_t *world);
/* NULL if queues may have threads of their own beside MPI, else why not. */
const char *strat_mpi_no_threads(void);
void strat_mpi_stop(void);

/* Threads get artificial links from here on (threads_world.h): MB/s and microseconds. */
void strat_threads_links(double mbytes_per_s, int64_t latency_us);
/* 1: they have them. */
int strat_threads_linked(void);

/* job->processes and options.ranks are set; chooses job->links and makes what they meet in. */
void strat_world_open(gpt_job *job);
void strat_world_close(gpt_job *job);

/* Values of all ranks: the largest, or the sum; also where ranks meet. Collective. */
double strat_largest(gpt_rank *rank, double own);
double strat_sum(gpt_rank *rank, double own);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_STRAT_LINKS_H */
