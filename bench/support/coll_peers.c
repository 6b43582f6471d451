/* SPDX-License-Identifier: MIT */
#if MFSDP_EXAMPLE_MPI

#include "coll_peers.h"

#include <stdio.h>
#include <stdlib.h>

void coll_peers_prepare(void) {
  /* "Dynamic" without a rules file and without a forced algorithm decides as the default does. */
  (void)setenv("OMPI_MCA_coll_tuned_use_dynamic_rules", "1", 0);
}

static void add(coll_peer *peers, int *count, mfsdp_coll_kind kind, const char *name,
                const char *algorithm, int by_owner) {
  coll_peer *p = &peers[*count];
  if (*count == COLL_MOST_PEERS) return;
  memset(p, 0, sizeof(*p));
  (void)snprintf(p->name, sizeof(p->name), "%s%s%.12s", name, algorithm[0] ? " " : "", algorithm);
  p->kind = kind;
  p->by_owner = by_owner;
  if (MPI_Comm_dup(MPI_COMM_WORLD, &p->comm) == MPI_SUCCESS) ++*count;
}

/* One peer for each value that the control variable of this name takes. One that cannot be written
 * any more (Allgatherv's) may have been forced from outside: then the default's name says so. */
static void add_forced(coll_peer *peers, int *count, mfsdp_coll_kind kind, const char *name,
                       const char *variable) {
  int index, length = 0, verbosity, bind, scope, values = 0, elements, value, i;
  MPI_Datatype datatype;
  MPI_T_enum choices = MPI_T_ENUM_NULL;
  MPI_T_cvar_handle handle;
  char text[64];
  int current = 0;
  if (MPI_T_cvar_get_index(variable, &index) != MPI_SUCCESS) return;
  if (MPI_T_cvar_get_info(index, NULL, &length, &verbosity, &datatype, &choices, NULL, NULL, &bind,
                          &scope) != MPI_SUCCESS ||
      choices == MPI_T_ENUM_NULL)
    return;
  length = (int)sizeof(text);
  if (MPI_T_enum_get_info(choices, &values, text, &length) != MPI_SUCCESS ||
      MPI_T_cvar_handle_alloc(index, NULL, &handle, &elements) != MPI_SUCCESS)
    return;
  (void)MPI_T_cvar_read(handle, &current);
  for (i = 0; i < values; ++i) {
    length = (int)sizeof(text);
    if (MPI_T_enum_get_item(choices, i, &value, text, &length) != MPI_SUCCESS) continue;
    if (value == 0 || strstr(text, "two_proc") != NULL) continue; /* none; for two processes */
    if (value == current)
      (void)snprintf(peers[0].name, sizeof(peers[0].name), "%s %.12s", name, text);
    else if (MPI_T_cvar_write(handle, &value) == MPI_SUCCESS)
      add(peers, count, kind, name, text, 0);
  }
  (void)MPI_T_cvar_write(handle, &current);
  (void)MPI_T_cvar_handle_free(&handle);
}

int coll_peers_make(mfsdp_coll_kind kind, coll_peer *peers) {
  const int gather = kind == MFSDP_COLL_GATHER;
  const char *name = gather ? "MPI_Allgatherv" : "MPI_Reduce_scatter";
  int count = 0, level;
  add(peers, &count, kind, name, "", 0);
  add(peers, &count, kind, gather ? "MPI_Bcast each" : "MPI_Reduce each", "", 1);
  if (MPI_T_init_thread(MPI_THREAD_SINGLE, &level) != MPI_SUCCESS) return count;
  add_forced(peers, &count, kind, name,
             gather ? "coll_tuned_allgatherv_algorithm" : "coll_tuned_reduce_scatter_algorithm");
  (void)MPI_T_finalize();
  return count;
}

void coll_peers_free(coll_peer *peers, int count) {
  while (count-- > 0)
    (void)MPI_Comm_free(&peers[count].comm);
}

static void gather_by_owner(const coll_peer *peer, coll_rank *r, const coll_split *split) {
  int q;
  memcpy(r->full + split->first[r->rank], r->shard, (size_t)split->count[r->rank] * sizeof(float));
  for (q = 0; q < r->world; ++q)
    if (split->count[q] > 0)
      (void)MPI_Bcast(r->full + split->first[q], (int)split->count[q], MPI_FLOAT, q, peer->comm);
}

static void reduce_by_owner(const coll_peer *peer, coll_rank *r, const coll_split *split) {
  int q;
  for (q = 0; q < r->world; ++q)
    if (split->count[q] > 0)
      (void)MPI_Reduce(r->grad + split->first[q], r->sum, (int)split->count[q], MPI_FLOAT, MPI_SUM,
                       q, peer->comm);
}

void coll_peer_run(const coll_peer *peer, coll_rank *r, const coll_split *split) {
  int counts[COLL_MOST_RANKS], firsts[COLL_MOST_RANKS], q;
  if (peer->by_owner) {
    if (peer->kind == MFSDP_COLL_GATHER)
      gather_by_owner(peer, r, split);
    else
      reduce_by_owner(peer, r, split);
    return;
  }
  for (q = 0; q < r->world; ++q) {
    counts[q] = (int)split->count[q];
    firsts[q] = (int)split->first[q];
  }
  if (peer->kind == MFSDP_COLL_GATHER)
    (void)MPI_Allgatherv(r->shard, counts[r->rank], MPI_FLOAT, r->full, counts, firsts, MPI_FLOAT,
                         peer->comm);
  else
    (void)MPI_Reduce_scatter(r->grad, r->sum, counts, MPI_FLOAT, MPI_SUM, peer->comm);
}

#else
typedef int coll_peers_need_mpi; /* a file of nothing is not C */
#endif
