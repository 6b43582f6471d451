/* SPDX-License-Identifier: MIT */
/*
 * simulate/banded.h - predicts how the BANDED matrices of a plan meet for their update.
 *
 * HOME. Rank r sends the home h of a matrix its band of it, in f32; all bands for one home, of all
 *   its matrices, are one message. The same comes back, so both ways take the same time T:
 *     T = max over ranks of [ max(latencies of what it sends, of what it receives)
 *                             + max(bytes out, bytes in over the port's bandwidth) ],
 *   and at least what a node sends or receives over b_node: DIRECT's formula (simulate/wire.h) for any
 *   pattern. In bytes this is what the runtime sends; it sends the bands of a home in rounds, each
 *   with its message, where they do not all fit into one (runtime/measure_banded.h).
 * EVERYWHERE. The bands of each matrix, in f32, are gathered to all ranks by the units' algorithm,
 *   matrix after matrix. (The runtime gathers equal ones together.)
 *
 * Does not: know optimizers. Matrices that AdamW updates stay where they are in the runtime.
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_BANDED_H
#define MFSDP_SIMULATE_BANDED_H

#include "wire.h"

/* Whether the piece is the first band of a BANDED matrix; its others follow it, by rising rank. */
MFSDP_API int mfsdp__sim_opens_banded(const mfsdp_piece *piece) {
  return piece->placement == MFSDP_PLACEMENT_BANDED && piece->first == piece->matrix_first;
}

/* Index behind the last band of the matrix that pieces[first] opens. */
MFSDP_API int32_t mfsdp__sim_bands_end(const mfsdp_piece *pieces, int32_t count, int32_t first) {
  int32_t i = first + 1;
  while (i < count && pieces[i].param == pieces[first].param &&
         pieces[i].matrix == pieces[first].matrix)
    ++i;
  return i;
}

/* Wire bytes of a band: directions travel in f32. The plan bounds all elements to 2^46. */
MFSDP_API int64_t mfsdp__sim_band_nbytes(const mfsdp_piece *piece) {
  return piece->count * (int64_t)mfsdp_dtype_nbytes(MFSDP_F32);
}

/* ---- HOME ---- */

typedef struct mfsdp__sim_homes {
  const mfsdp_cluster *cluster;
  const mfsdp_piece *pieces;
  int32_t piece_count, world;
  int32_t *first;          /* by home: its last matrix by opening piece, then `next`; -1: none */
  int32_t *next;           /* by opening piece */
  int32_t *sent_to;        /* by rank: the home that the last message was for */
  mfsdp__sim_ports *ports; /* by rank: bands on their way to the homes */
} mfsdp__sim_homes;

MFSDP_API mfsdp_status mfsdp__sim_homes_alloc(mfsdp_context *context, mfsdp__sim_homes *h) {
  MFSDP__PLAN_ALLOC(context, h->first, h->world, "simulate: homes");
  MFSDP__PLAN_ALLOC(context, h->next, h->piece_count, "simulate: matrices of homes");
  MFSDP__PLAN_ALLOC(context, h->sent_to, h->world, "simulate: messages to homes");
  MFSDP__PLAN_ALLOC(context, h->ports, h->world, "simulate: bands of ranks");
  return MFSDP_OK;
}

MFSDP_API void mfsdp__sim_homes_free(mfsdp_context *context, mfsdp__sim_homes *h) {
  MFSDP__PLAN_FREE(context, h->ports, h->world);
  MFSDP__PLAN_FREE(context, h->sent_to, h->world);
  MFSDP__PLAN_FREE(context, h->next, h->piece_count);
  MFSDP__PLAN_FREE(context, h->first, h->world);
}

MFSDP_API void mfsdp__sim_homes_chain(mfsdp__sim_homes *h) {
  int32_t i;
  for (i = 0; i < h->world; ++i)
    h->first[i] = h->sent_to[i] = -1;
  for (i = 0; i < h->piece_count; ++i) {
    if (!mfsdp__sim_opens_banded(&h->pieces[i])) continue;
    h->next[i] = h->first[h->pieces[i].home];
    h->first[h->pieces[i].home] = i;
  }
}

MFSDP_API void mfsdp__sim_homes_band(mfsdp__sim_homes *h, const mfsdp_piece *band) {
  const int32_t node = h->cluster->ranks_per_node;
  const int near = band->owner / node == band->home / node;
  mfsdp__sim_ports *from = &h->ports[band->owner], *to = &h->ports[band->home];
  mfsdp__sim_port *out = near ? &from->near_out : &from->far_out;
  mfsdp__sim_port *in = near ? &to->near_in : &to->far_in;
  const double nbytes = (double)mfsdp__sim_band_nbytes(band); /* sums stay below 2^53: exact */
  const double messages = h->sent_to[band->owner] == band->home ? 0.0 : 1.0;
  if (band->owner == band->home) return;
  h->sent_to[band->owner] = band->home;
  out->messages += messages;
  out->nbytes += nbytes;
  in->messages += messages;
  in->nbytes += nbytes;
}

/* Home after home, so that a message is counted once. */
MFSDP_API void mfsdp__sim_homes_fill(mfsdp__sim_homes *h) {
  int32_t home, i, j;
  for (home = 0; home < h->world; ++home)
    for (i = h->first[home]; i >= 0; i = h->next[i]) {
      const int32_t end = mfsdp__sim_bands_end(h->pieces, h->piece_count, i);
      for (j = i; j < end; ++j)
        mfsdp__sim_homes_band(h, &h->pieces[j]);
    }
}

/* One way; what a rank sends both ways is what it sends and what it receives. */
MFSDP_API mfsdp_status mfsdp__sim_homes_time(mfsdp_context *context, const mfsdp__sim_homes *h,
                                             double *us, int64_t *sent) {
  mfsdp__sim_slowest slowest = {0.0, 0.0, 0.0};
  int32_t r;
  for (r = 0; r < h->world; ++r) {
    const mfsdp__sim_ports *p = &h->ports[r];
    const double both =
        p->near_out.nbytes + p->near_in.nbytes + p->far_out.nbytes + p->far_in.nbytes;
    mfsdp__sim_slowest_add(h->cluster, r, p, &slowest);
    if (!mfsdp_i64_add(sent[r], (int64_t)both, &sent[r]))
      return MFSDP_FAIL(context, MFSDP_E_OVERFLOW,
                        "simulate: the bytes that rank %d sends pass 64 bits", (int)r);
  }
  *us += 2.0 * slowest.us;
  return MFSDP_OK;
}

/* To the homes and back: adds the time to *us and the bytes of each rank to `sent`. Scratch of
 * O(world + pieces) is given back. */
MFSDP_API mfsdp_status mfsdp__sim_homes_exchange(mfsdp_context *context, const mfsdp_plan *plan,
                                                 const mfsdp_cluster *cluster, double *us,
                                                 int64_t *sent) {
  mfsdp__sim_homes h;
  mfsdp_status status;
  memset(&h, 0, sizeof(h));
  h.cluster = cluster;
  h.world = mfsdp_plan_world(plan);
  h.pieces = mfsdp_plan_pieces(plan, -1, &h.piece_count);
  status = mfsdp__sim_homes_alloc(context, &h);
  if (status == MFSDP_OK) {
    mfsdp__sim_homes_chain(&h);
    mfsdp__sim_homes_fill(&h);
    status = mfsdp__sim_homes_time(context, &h, us, sent);
  }
  mfsdp__sim_homes_free(context, &h);
  return status;
}

/* ---- EVERYWHERE ---- */

/* The gathers of all matrices. segments: world entries of scratch. */
MFSDP_API mfsdp_status mfsdp__sim_bands_gather(mfsdp_context *context, const mfsdp_sim_desc *ask,
                                               mfsdp_sim_segment *segments, double *us,
                                               int64_t *sent) {
  const int32_t world = mfsdp_plan_world(ask->plan);
  int32_t count, i, j, end;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(ask->plan, -1, &count);
  for (i = 0; i < count; i = end) {
    int64_t total = 0, longest = 0;
    double one = 0.0;
    size_t chunk;
    end = i + 1;
    if (!mfsdp__sim_opens_banded(&pieces[i])) continue;
    end = mfsdp__sim_bands_end(pieces, count, i);
    memset(segments, 0, (size_t)world * sizeof(*segments));
    for (j = i; j < end; ++j) {
      const int64_t nbytes = mfsdp__sim_band_nbytes(&pieces[j]);
      segments[pieces[j].owner].nbytes = nbytes;
      segments[pieces[j].owner].message_count = 1;
      total += nbytes;
      if (nbytes > longest) longest = nbytes;
    }
    chunk = mfsdp__sim_chunk_nbytes(ask->cluster, ask->algorithm, &ask->wire, world, total, longest,
                                    ask->chunk_nbytes);
    MFSDP_TRY(mfsdp_sim_collective(context, ask->cluster, ask->algorithm, 0, segments, world, chunk,
                                   &one, sent));
    *us += one;
  }
  return MFSDP_OK;
}

#endif /* MFSDP_SIMULATE_BANDED_H */
