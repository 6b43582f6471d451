/* SPDX-License-Identifier: MIT */
/*
 * choose.h - AUTO: which algorithm moves a unit fastest, decided in integers, so that every rank of
 * every machine decides alike; and what a chunk_nbytes of 0 is for one. Part of collective.h.
 *
 * With W ranks in N nodes, the largest of n and the smallest of m ranks; P bytes of the unit, S of
 * the longest segment; the chunks c that each would have, K = ceil(S / c); L and b the latency and the
 * time for a byte inside a node, L', b' between nodes (those inside, when N = 1):
 *   DIRECT        L' x (gather: 1, reduce: K) + max(max(S (n - 1), P) b, max(S (W - n), P) b')
 *   RING          (K + W - 2) L' + (P + (W - 2) min(c, S)) max(b, b')
 *   HIERARCHICAL  (K + 1) (L + L') + max(S (N - 1), P / m) b' + max((n - 1) (S + P / m), P) b
 * The least time wins, the earlier of this list where two are equal; HIERARCHICAL only where there
 * are several nodes, and sums on a wire narrower than fp32 always go by DIRECT. NATIVE is
 * never chosen: nothing is known of how a transport moves its own. These are coarse
 * forms of simulate/wire.h, whose times are floating point and for people.
 */
#ifndef MFSDP_COLLECTIVE_CHOOSE_H
#define MFSDP_COLLECTIVE_CHOOSE_H

#include "desc.h"

/* What is to be moved, in bytes. */
typedef struct mfsdp__coll_amount {
  int64_t unit, longest, chunk;
} mfsdp__coll_amount;

typedef struct mfsdp__coll_nodes {
  int64_t world, count, largest, smallest;
} mfsdp__coll_nodes;

MFSDP_API int64_t mfsdp__larger(int64_t a, int64_t b) {
  return a > b ? a : b;
}

MFSDP_API mfsdp__coll_nodes mfsdp__coll_count_nodes(const mfsdp_transport *transport) {
  const int32_t *node_of = transport->node_of_rank, world = transport->world;
  mfsdp__coll_nodes nodes;
  int32_t r, s;
  nodes.world = nodes.largest = nodes.smallest = world;
  nodes.count = 1;
  if (node_of == NULL) return nodes;
  nodes.count = nodes.largest = 0;
  for (r = 0; r < world; ++r) {
    int64_t size = 0, seen = 0;
    for (s = 0; s < world; ++s) {
      size += node_of[s] == node_of[r];
      seen += s < r && node_of[s] == node_of[r];
    }
    nodes.count += seen == 0;
    if (size > nodes.largest) nodes.largest = size;
    if (size < nodes.smallest) nodes.smallest = size;
  }
  return nodes;
}

MFSDP_API int64_t mfsdp__direct_ns(const mfsdp_wire_cost *wire, mfsdp_coll_kind kind,
                                   const mfsdp__coll_amount *a, const mfsdp__coll_nodes *n) {
  const int64_t rounds = kind == MFSDP_COLL_GATHER ? 1 : (a->longest + a->chunk - 1) / a->chunk;
  const int64_t inside = mfsdp__larger(mfsdp__sat_mul(a->longest, n->largest - 1), a->unit);
  const int64_t between = mfsdp__larger(mfsdp__sat_mul(a->longest, n->world - n->largest), a->unit);
  int64_t ns = mfsdp__wire_ns(inside, wire->ns_per_mib);
  if (n->count > 1) ns = mfsdp__larger(ns, mfsdp__wire_ns(between, wire->between_ns_per_mib));
  return mfsdp__sat_add(
      ns, mfsdp__sat_mul(rounds, n->count > 1 ? wire->between_latency_ns : wire->latency_ns));
}

MFSDP_API int64_t mfsdp__ring_ns(const mfsdp_wire_cost *wire, const mfsdp__coll_amount *a,
                                 const mfsdp__coll_nodes *n) {
  const int64_t rounds = (a->longest + a->chunk - 1) / a->chunk;
  const int64_t chunk = a->chunk < a->longest ? a->chunk : a->longest;
  const int64_t rate =
      n->count > 1 ? mfsdp__larger(wire->ns_per_mib, wire->between_ns_per_mib) : wire->ns_per_mib;
  const int64_t latency = n->count > 1 ? wire->between_latency_ns : wire->latency_ns;
  return mfsdp__sat_add(
      mfsdp__sat_mul(rounds + n->world - 2, latency),
      mfsdp__wire_ns(mfsdp__sat_add(a->unit, mfsdp__sat_mul(n->world - 2, chunk)), rate));
}

MFSDP_API int64_t mfsdp__hierarchical_ns(const mfsdp_wire_cost *wire, const mfsdp__coll_amount *a,
                                         const mfsdp__coll_nodes *n) {
  const int64_t rounds = (a->longest + a->chunk - 1) / a->chunk;
  const int64_t share = a->unit / n->smallest;
  const int64_t between = mfsdp__larger(mfsdp__sat_mul(a->longest, n->count - 1), share);
  const int64_t inside =
      mfsdp__larger(mfsdp__sat_mul(n->largest - 1, mfsdp__sat_add(a->longest, share)), a->unit);
  const int64_t ns = mfsdp__sat_add(mfsdp__wire_ns(between, wire->between_ns_per_mib),
                                    mfsdp__wire_ns(inside, wire->ns_per_mib));
  return mfsdp__sat_add(
      ns, mfsdp__sat_mul(rounds + 1, mfsdp__sat_add(wire->latency_ns, wire->between_latency_ns)));
}

/* Bytes of `count` elements, or half of all there are: room for rounding up. */
MFSDP_API int64_t mfsdp__coll_bounded_nbytes(int64_t count, mfsdp_dtype dtype) {
  const int64_t nbytes = mfsdp__sat_mul(count, (int64_t)mfsdp_dtype_nbytes(dtype));
  return nbytes > INT64_MAX / 2 ? INT64_MAX / 2 : nbytes;
}

/* A chunk as given, or what a given 0 is for the algorithm. */
MFSDP_API int64_t mfsdp__coll_chunk_of(mfsdp_algorithm algorithm, const mfsdp_wire_cost *wire,
                                       const mfsdp__coll_amount *a, const mfsdp__coll_nodes *n,
                                       size_t chunk_nbytes) {
  mfsdp__chunk_ask ask;
  if (chunk_nbytes > 0)
    return chunk_nbytes < (size_t)INT64_MAX / 2 ? (int64_t)chunk_nbytes : INT64_MAX / 2;
  if (algorithm != MFSDP_RING && algorithm != MFSDP_HIERARCHICAL) return MFSDP_CHUNK_NBYTES;
  ask.unit_nbytes = a->unit;
  ask.longest_nbytes = a->longest;
  ask.world = n->world;
  ask.node_count = n->count;
  ask.by_nodes = algorithm == MFSDP_HIERARCHICAL;
  ask.wire = wire;
  return (int64_t)mfsdp__chunk_choose(&ask);
}

/*
 * What a chunk_nbytes of 0 means for a unit of full_count elements whose longest segment has `longest`
 * (whole alignment units, as plans count segments), by an algorithm that is not AUTO; any other chunk
 * means itself. The same on every rank, in a gather and in a reduce.
 */
MFSDP_API size_t mfsdp_coll_chunk_nbytes(const mfsdp_transport *transport,
                                         mfsdp_algorithm algorithm, const mfsdp_wire_cost *wire,
                                         mfsdp_dtype dtype, int64_t full_count, int64_t longest,
                                         size_t chunk_nbytes) {
  mfsdp__coll_amount amount;
  mfsdp__coll_nodes nodes;
  if (chunk_nbytes > 0) return chunk_nbytes;
  if (algorithm != MFSDP_RING && algorithm != MFSDP_HIERARCHICAL) return MFSDP_CHUNK_NBYTES;
  nodes = mfsdp__coll_count_nodes(transport); /* W^2 steps */
  amount.unit = mfsdp__coll_bounded_nbytes(full_count, dtype);
  amount.longest = mfsdp__coll_bounded_nbytes(longest, dtype);
  amount.chunk = 0;
  return (size_t)mfsdp__coll_chunk_of(algorithm, wire, &amount, &nodes, 0);
}

/*
 * What AUTO means for a unit of full_count elements whose longest segment has `longest`; any other
 * algorithm means itself. chunk_nbytes: as in mfsdp_coll_desc, 0 too. The same on every rank.
 */
MFSDP_API mfsdp_algorithm mfsdp_coll_choose(const mfsdp_transport *transport,
                                            mfsdp_algorithm algorithm, const mfsdp_wire_cost *wire,
                                            mfsdp_coll_kind kind, mfsdp_dtype dtype,
                                            int64_t full_count, int64_t longest,
                                            size_t chunk_nbytes) {
  mfsdp__coll_amount amount;
  mfsdp__coll_nodes nodes;
  int64_t best, ns;
  if (algorithm != MFSDP_ALGORITHM_AUTO) return algorithm;
  if (transport->world == 1 || longest == 0 || (kind == MFSDP_COLL_REDUCE && dtype != MFSDP_F32))
    return MFSDP_DIRECT;
  amount.unit = mfsdp__coll_bounded_nbytes(full_count, dtype);
  amount.longest = mfsdp__coll_bounded_nbytes(longest, dtype);
  nodes = mfsdp__coll_count_nodes(transport);
  amount.chunk = mfsdp__coll_chunk_of(MFSDP_DIRECT, wire, &amount, &nodes, chunk_nbytes);
  best = mfsdp__direct_ns(wire, kind, &amount, &nodes);
  algorithm = MFSDP_DIRECT;
  amount.chunk = mfsdp__coll_chunk_of(MFSDP_RING, wire, &amount, &nodes, chunk_nbytes);
  ns = mfsdp__ring_ns(wire, &amount, &nodes);
  if (ns < best) {
    best = ns;
    algorithm = MFSDP_RING;
  }
  amount.chunk = mfsdp__coll_chunk_of(MFSDP_HIERARCHICAL, wire, &amount, &nodes, chunk_nbytes);
  if (nodes.count > 1 && mfsdp__hierarchical_ns(wire, &amount, &nodes) < best)
    algorithm = MFSDP_HIERARCHICAL;
  return algorithm;
}

#endif /* MFSDP_COLLECTIVE_CHOOSE_H */
