/* SPDX-License-Identifier: MIT */
/*
 * coll_peers.h - the MPI's own ways to gather and to reduce uneven segments, for comparison.
 *
 * The default; a broadcast or reduction for each owner; and each algorithm that the MPI lets itself
 * be forced to (Open MPI: its control variables coll_tuned_..._algorithm, each on a communicator of
 * its own; that of Allgatherv can only be set for a whole run, with mpirun --mca). Only in builds with
 * MPI.
 */
#ifndef MFSDP_BENCH_COLL_PEERS_H
#define MFSDP_BENCH_COLL_PEERS_H

#include "coll_rank.h"

#include <mpi.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { COLL_MOST_PEERS = 10 };

typedef struct coll_peer {
  char name[40];
  mfsdp_coll_kind kind;
  int by_owner; /* a loop over the owners */
  MPI_Comm comm;
} coll_peer;

/* Before MPI_Init: lets Open MPI be forced. */
void coll_peers_prepare(void);
/* Collective. How many there are, at most COLL_MOST_PEERS; the first is the default. */
int coll_peers_make(mfsdp_coll_kind kind, coll_peer *peers);
void coll_peers_free(coll_peer *peers, int count);
void coll_peer_run(const coll_peer *peer, coll_rank *r, const coll_split *split);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_COLL_PEERS_H */
