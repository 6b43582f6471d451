/* SPDX-License-Identifier: MIT */
/*
 * cost/chunk.h - what a chunk_nbytes of 0 stands for: how many bytes of a segment RING and HIERARCHICAL
 * (collective.h) hand on at a time, decided in integers, so that every rank of every machine decides
 * alike. Part of cost.h.
 *
 * A unit of P bytes, S of them in the longest segment. Behind its first link a chunk has h more to
 * go while the last chunks of others have arrived: W - 2 in a ring of W ranks, of which at most N - 1
 * lie between N nodes; P / S by nodes, whose fan-out is one batch more. With a latency L for each
 * message and b for each byte of a link, chunks of c cost
 *   (P / c) L + min(c, S) (sum of b over the h links)
 * beside the P b that they cost anyway. Between nodes messages of 64 KiB on cost 3 L: a transport asks
 * the receiver first, as Open MPI's TCP does from there on (bench/results/2026-12-01-ring-chunks.txt).
 * Choices are 32, 60, 256 and 512 KiB; inside a node the last two, since there a message costs a rank
 * its turn on a core, which no latency says, and bytes next to nothing.
 *   wire known      the one with the least of this, the larger of equals
 *   wire not known  the largest, up to 256 KiB, with (links between nodes) c <= P / 16, but none that
 *                   cuts P into more than 256. A compromise: on fast networks larger ones are better,
 *                   on slow ones smaller ones. Who knows the wire should tell.
 * DIRECT reductions have 256 KiB: their chunks bound memory, and nothing waits for them to pass; with a
 * few ranks the staged terms stay in a core's cache.
 * Does not: know what is measured at run time.
 * Link flags: none.
 */
#ifndef MFSDP_COST_CHUNK_H
#define MFSDP_COST_CHUNK_H

#include "../types.h"

#define MFSDP_CHUNK_NBYTES 262144 /* of DIRECT and NATIVE, and inside a node */
#define MFSDP__CHUNK_ASKS_FROM 65536

/*
 * What moving bytes costs inside a node and between nodes, in integers, so that all ranks decide
 * alike: AUTO and a chunk_nbytes of 0 (collective.h) read it. The latency of a message and the time for
 * 2^20 bytes, both of one rank's port; 0 to 10^12 ns. All zero: not known.
 */
typedef struct mfsdp_wire_cost {
  int64_t latency_ns, ns_per_mib;
  int64_t between_latency_ns, between_ns_per_mib;
} mfsdp_wire_cost;

/* Whether every value is in its range, and bytes cost something where a byte goes. */
MFSDP_API int mfsdp_wire_cost_valid(const mfsdp_wire_cost *cost) {
  const int64_t most = 1000000000000;
  return cost->latency_ns >= 0 && cost->latency_ns <= most && cost->ns_per_mib > 0 &&
         cost->ns_per_mib <= most && cost->between_latency_ns >= 0 &&
         cost->between_latency_ns <= most && cost->between_ns_per_mib > 0 &&
         cost->between_ns_per_mib <= most;
}

/* ---- sums that stop at the largest number ---- */

MFSDP_API int64_t mfsdp__sat_mul(int64_t a, int64_t b) {
  int64_t out;
  return mfsdp_i64_mul(a, b, &out) ? out : INT64_MAX;
}

MFSDP_API int64_t mfsdp__sat_add(int64_t a, int64_t b) {
  return a > INT64_MAX - b ? INT64_MAX : a + b;
}

/* Nanoseconds of `nbytes` at ns_per_mib; whole KiB, rounded up. */
MFSDP_API int64_t mfsdp__wire_ns(int64_t nbytes, int64_t ns_per_mib) {
  const int64_t kib = nbytes / 1024 + (nbytes % 1024 != 0);
  return mfsdp__sat_mul(kib, ns_per_mib) / 1024;
}

/* ---- the choice ---- */

/* Choice `i` of 4, in bytes; from the third on those inside a node. */
MFSDP_API int64_t mfsdp__chunk_at(int32_t i) {
  static const int64_t kib[4] = {32, 60, 256, 512};
  return kib[i] * 1024;
}

/* All of it equal on all ranks. */
typedef struct mfsdp__chunk_ask {
  int64_t unit_nbytes,
      longest_nbytes;          /* of the unit and of its longest segment, padding included */
  int64_t world, node_count;   /* >= 1 */
  int32_t by_nodes;            /* 0: RING, 1: HIERARCHICAL */
  const mfsdp_wire_cost *wire; /* not valid, as all zero is not: not known */
} mfsdp__chunk_ask;

/* h: links that a chunk goes while others' have arrived. */
MFSDP_API int64_t mfsdp__chunk_hops(const mfsdp__chunk_ask *ask) {
  const int64_t s = ask->longest_nbytes;
  if (!ask->by_nodes) return ask->world > 2 ? ask->world - 2 : 0;
  return s > 0 ? ask->unit_nbytes / s + (ask->unit_nbytes % s != 0) : 0;
}

/* Those of them between nodes. */
MFSDP_API int64_t mfsdp__chunk_hops_between(const mfsdp__chunk_ask *ask) {
  const int64_t hops = mfsdp__chunk_hops(ask);
  if (ask->by_nodes) return ask->node_count > 1 ? hops : 0;
  return hops < ask->node_count - 1 ? hops : ask->node_count - 1;
}

/* The last chunks' way. */
MFSDP_API int64_t mfsdp__chunk_fill_ns(const mfsdp__chunk_ask *ask, int64_t chunk) {
  const int64_t piece = chunk < ask->longest_nbytes ? chunk : ask->longest_nbytes;
  const int64_t between = mfsdp__chunk_hops_between(ask);
  const int64_t inside = mfsdp__chunk_hops(ask) - between;
  return mfsdp__sat_add(
      mfsdp__wire_ns(mfsdp__sat_mul(inside, piece), ask->wire->ns_per_mib),
      mfsdp__wire_ns(mfsdp__sat_mul(between, piece), ask->wire->between_ns_per_mib));
}

/* What of a collective's time depends on the chunk. */
MFSDP_API int64_t mfsdp__chunk_ns(const mfsdp__chunk_ask *ask, int64_t chunk) {
  const mfsdp_wire_cost *w = ask->wire;
  const int inside = ask->node_count == 1;
  const int64_t times = !inside && chunk >= MFSDP__CHUNK_ASKS_FROM ? 3 : 1;
  const int64_t latency = times * (inside ? w->latency_ns : w->between_latency_ns);
  const int64_t messages = mfsdp__sat_add(mfsdp__sat_mul(ask->unit_nbytes / chunk, latency),
                                          ask->unit_nbytes % chunk * latency / chunk);
  return mfsdp__sat_add(messages, mfsdp__chunk_fill_ns(ask, chunk));
}

MFSDP_API int64_t mfsdp__chunk_by_wire(const mfsdp__chunk_ask *ask, int32_t least) {
  int64_t best = mfsdp__chunk_at(3), best_ns = mfsdp__chunk_ns(ask, best);
  int32_t i;
  for (i = 2; i >= least; --i) {
    const int64_t ns = mfsdp__chunk_ns(ask, mfsdp__chunk_at(i));
    if (ns >= best_ns) continue;
    best = mfsdp__chunk_at(i);
    best_ns = ns;
  }
  return best;
}

MFSDP_API int64_t mfsdp__chunk_by_size(const mfsdp__chunk_ask *ask, int32_t least) {
  const int64_t hops = mfsdp__chunk_hops_between(ask), unit = ask->unit_nbytes;
  int32_t i = 2;
  while (i > least && mfsdp__sat_mul(hops, mfsdp__chunk_at(i)) > unit / 16 &&
         256 * mfsdp__chunk_at(i - 1) >= unit)
    --i;
  return mfsdp__chunk_at(i);
}

/* In bytes. O(1). */
MFSDP_API size_t mfsdp__chunk_choose(const mfsdp__chunk_ask *ask) {
  const int32_t least = ask->node_count == 1 ? 2 : 0;
  return (size_t)(mfsdp_wire_cost_valid(ask->wire) ? mfsdp__chunk_by_wire(ask, least)
                                                   : mfsdp__chunk_by_size(ask, least));
}

#endif /* MFSDP_COST_CHUNK_H */
