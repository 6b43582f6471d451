/* SPDX-License-Identifier: MIT */
/*
 * hierarchical.h - HIERARCHICAL: one copy of a segment for each node, then fan-out inside it. Part
 * of collective.h.
 *
 * For each owner q a node has one rank that speaks for it: q itself on its own node, elsewhere the
 * rank with q's number inside its node (modulo the node's size), so that the owners of a node use
 * all ranks of another one. With chunks k = 0, 1, ... of every segment, batch t holds
 *   gather: chunk t from its owner to the speakers of the other nodes, and to its own node; chunk
 *           t - 1 from the speakers to the rest of their nodes.
 *   reduce: chunk t from every rank to the speaker of its node; chunk t - 1, summed there in rank
 *           order in fp32, from the speakers to the owner, which adds the nodes' sums in node order.
 * Between nodes a chunk crosses once for each node, whatever the number of ranks in it. The sums are
 * not those of DIRECT bit for bit, unless they are exact.
 * Workspace of a reduction, in chunks, with m ranks on this node and s owners that this rank speaks
 * for (itself among them): s x m for what arrives, s for sums (sent before the next ones are made),
 * and one for each node.
 */
#ifndef MFSDP_COLLECTIVE_HIERARCHICAL_H
#define MFSDP_COLLECTIVE_HIERARCHICAL_H

#include "emit.h"

MFSDP_API int32_t mfsdp__node_size(const mfsdp__coll_emitter *m, int32_t node) {
  return m->node_at[node + 1] - m->node_at[node];
}

/* The place of a rank among the ranks of its node. */
MFSDP_API int32_t mfsdp__node_index(const mfsdp__coll_emitter *m, int32_t rank) {
  const int32_t node = m->node_of[rank];
  int32_t i = 0;
  while (m->by_node[m->node_at[node] + i] != rank)
    ++i;
  return i;
}

/* Who speaks for owner q on a node. */
MFSDP_API int32_t mfsdp__node_speaker(const mfsdp__coll_emitter *m, int32_t q, int32_t node) {
  if (m->node_of[q] == node) return q;
  return m->by_node[m->node_at[node] + mfsdp__node_index(m, q) % mfsdp__node_size(m, node)];
}

MFSDP_API int64_t mfsdp__node_batch_count(const mfsdp__coll_emitter *m) {
  int64_t longest = 0;
  int32_t q;
  for (q = 0; q < m->layout->world; ++q)
    if (m->round_count[q] > longest) longest = m->round_count[q];
  return longest == 0 ? 0 : longest + 1; /* the last chunk's second way */
}

/* Chunk t of owner q on its first way: to the speakers, and through the owner's own node. */
MFSDP_API void mfsdp__node_emit_gather_out(mfsdp__coll_emitter *m, int32_t q, int64_t t) {
  const int32_t own_node = m->node_of[m->rank];
  int32_t r;
  if (q != m->rank) {
    if (mfsdp__node_speaker(m, q, own_node) == m->rank || m->node_of[q] == own_node)
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_FULL, -1, q, t, q, 0);
    return;
  }
  for (r = 0; r < m->layout->world; ++r)
    if (r != q && (m->node_of[r] == own_node || mfsdp__node_speaker(m, q, m->node_of[r]) == r))
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_SHARD, -1, q, t, r, 1);
}

/* Chunk t of owner q on its second way: from the speaker through its node. */
MFSDP_API void mfsdp__node_emit_gather_in(mfsdp__coll_emitter *m, int32_t q, int64_t t) {
  const int32_t node = m->node_of[m->rank];
  const int32_t speaker = mfsdp__node_speaker(m, q, node);
  int32_t i;
  if (m->node_of[q] == node) return; /* it has come on the first way */
  if (speaker != m->rank) {
    mfsdp__coll_emit_chunk(m, MFSDP_COLL_FULL, -1, q, t, speaker, 0);
    return;
  }
  for (i = m->node_at[node]; i < m->node_at[node + 1]; ++i)
    if (m->by_node[i] != m->rank)
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_FULL, -1, q, t, m->by_node[i], 1);
}

MFSDP_API void mfsdp__coll_emit_gather_hierarchical(mfsdp__coll_emitter *m) {
  const int64_t batches = mfsdp__node_batch_count(m);
  int64_t t;
  int32_t q;
  for (t = 0; t < batches; ++t) {
    for (q = 0; q < m->layout->world; ++q)
      mfsdp__node_emit_gather_out(m, q, t);
    for (q = 0; q < m->layout->world; ++q)
      mfsdp__node_emit_gather_in(m, q, t - 1);
    mfsdp__coll_emit_batch(m);
  }
  mfsdp__coll_emit_own_copies(m);
}

/* ---- reduce: places in the workspace, in elements ---- */

/* How many owners below q this rank speaks for; q = world: all. */
MFSDP_API int32_t mfsdp__node_spoken_before(const mfsdp__coll_emitter *m, int32_t q) {
  const int32_t node = m->node_of[m->rank];
  int32_t p, count = 0;
  for (p = 0; p < q; ++p)
    count += mfsdp__node_speaker(m, p, node) == m->rank;
  return count;
}

/* Where the contribution of the node's rank number `index` to owner q's chunk arrives. */
MFSDP_API int64_t mfsdp__node_arrival(const mfsdp__coll_emitter *m, int32_t q, int32_t index) {
  const int32_t size = mfsdp__node_size(m, m->node_of[m->rank]);
  return ((int64_t)mfsdp__node_spoken_before(m, q) * size + index) * m->chunk;
}

/* Where this node's sum of owner q's chunk lies. */
MFSDP_API int64_t mfsdp__node_partial(const mfsdp__coll_emitter *m, int32_t q) {
  const int32_t spoken = mfsdp__node_spoken_before(m, m->layout->world);
  const int32_t size = mfsdp__node_size(m, m->node_of[m->rank]);
  return ((int64_t)spoken * size + mfsdp__node_spoken_before(m, q)) * m->chunk;
}

/* Where the sum of another node arrives at this owner. */
MFSDP_API int64_t mfsdp__node_remote(const mfsdp__coll_emitter *m, int32_t node) {
  const int32_t spoken = mfsdp__node_spoken_before(m, m->layout->world);
  const int32_t size = mfsdp__node_size(m, m->node_of[m->rank]);
  return ((int64_t)spoken * (size + 1) + node) * m->chunk;
}

/*
 * Chunks of all of these on a rank, from the transport's node map alone (NULL: one node): known
 * before a list is.
 */
MFSDP_API int64_t mfsdp__node_workspace_chunks(const int32_t *node_of_rank, int32_t world,
                                               int32_t rank) {
  int64_t size = 0, spoken = 0, nodes = 0;
  int32_t q, r, place = 0;
  for (r = 0; r < world; ++r) {
    const int same = node_of_rank == NULL || node_of_rank[r] == node_of_rank[rank];
    if (r == rank) place = (int32_t)size;
    size += same;
    for (q = 0; node_of_rank != NULL && q < r && node_of_rank[q] != node_of_rank[r]; ++q) {
    }
    nodes += node_of_rank == NULL ? r == 0 : q == r;
  }
  for (q = 0; q < world; ++q) {
    int64_t index = 0;
    const int same = node_of_rank == NULL || node_of_rank[q] == node_of_rank[rank];
    for (r = 0; r < q && !same; ++r)
      index += node_of_rank[r] == node_of_rank[q];
    spoken += same ? q == rank : index % size == place;
  }
  return spoken * (size + 1) + nodes;
}

/* Chunk t of owner q on its first way: from the ranks of this node to the one that speaks for q. */
MFSDP_API void mfsdp__node_emit_reduce_in(mfsdp__coll_emitter *m, int32_t q, int64_t t) {
  const int32_t node = m->node_of[m->rank];
  const int32_t speaker = mfsdp__node_speaker(m, q, node);
  int32_t i;
  if (speaker != m->rank) {
    mfsdp__coll_emit_chunk(m, MFSDP_COLL_FULL, -1, q, t, speaker, 1);
    return;
  }
  for (i = m->node_at[node]; i < m->node_at[node + 1]; ++i)
    if (m->by_node[i] != m->rank)
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_WORKSPACE,
                             mfsdp__node_arrival(m, q, i - m->node_at[node]), q, t, m->by_node[i],
                             0);
}

/* Chunk t of owner q on its second way: from the speakers of the other nodes to q. */
MFSDP_API void mfsdp__node_emit_reduce_out(mfsdp__coll_emitter *m, int32_t q, int64_t t) {
  const int32_t own_node = m->node_of[m->rank];
  int32_t node;
  if (q != m->rank) {
    if (m->node_of[q] != own_node && mfsdp__node_speaker(m, q, own_node) == m->rank)
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_WORKSPACE, mfsdp__node_partial(m, q), q, t, q, 1);
    return;
  }
  for (node = 0; node < m->node_count; ++node)
    if (node != own_node)
      mfsdp__coll_emit_chunk(m, MFSDP_COLL_WORKSPACE, mfsdp__node_remote(m, node), q, t,
                             mfsdp__node_speaker(m, q, node), 0);
}

/* A speaker's sum over its node, in rank order. */
MFSDP_API void mfsdp__node_emit_node_sums(mfsdp__coll_emitter *m, int32_t q, int64_t t) {
  const int32_t node = m->node_of[m->rank];
  mfsdp__coll_cut cut;
  int32_t at = 0, i;
  if (mfsdp__node_speaker(m, q, node) != m->rank || !mfsdp__coll_has_chunk(m, q, t)) return;
  while (mfsdp__coll_next_cut(m, q, t, &at, &cut)) {
    const int32_t first = m->coll->term_count;
    const int64_t inside = cut.shard_offset - t * m->chunk;
    mfsdp_coll_op *op;
    for (i = 0; i < mfsdp__node_size(m, node); ++i) {
      const int own = m->by_node[m->node_at[node] + i] == m->rank;
      mfsdp__coll_emit_term(m, own ? MFSDP_COLL_FULL : MFSDP_COLL_WORKSPACE,
                            own ? cut.unit_offset : mfsdp__node_arrival(m, q, i) + inside);
    }
    op = mfsdp__coll_emit_op(m, MFSDP_COLL_SUM_PARTIAL, first, mfsdp__node_size(m, node));
    if (op == NULL) continue;
    op->dst_offset = mfsdp__node_partial(m, q) + inside;
    op->elements = cut.count;
  }
}

/* The owner's sum over the nodes, in node order. */
MFSDP_API void mfsdp__node_emit_owner_sums(mfsdp__coll_emitter *m, int64_t t) {
  mfsdp__coll_cut cut;
  int32_t at = 0, node;
  if (!mfsdp__coll_has_chunk(m, m->rank, t)) return;
  while (mfsdp__coll_next_cut(m, m->rank, t, &at, &cut)) {
    const int32_t first = m->coll->term_count;
    const int64_t inside = cut.shard_offset - t * m->chunk;
    mfsdp_coll_op *op;
    for (node = 0; node < m->node_count; ++node)
      mfsdp__coll_emit_term(m, MFSDP_COLL_WORKSPACE,
                            inside + (node == m->node_of[m->rank] ? mfsdp__node_partial(m, m->rank)
                                                                  : mfsdp__node_remote(m, node)));
    op = mfsdp__coll_emit_op(m, MFSDP_COLL_SUM, first, m->node_count);
    if (op == NULL) continue;
    op->dst_offset = cut.shard_offset;
    op->elements = cut.count;
  }
}

MFSDP_API void mfsdp__coll_emit_reduce_hierarchical(mfsdp__coll_emitter *m) {
  const int64_t batches = mfsdp__node_batch_count(m);
  int64_t t;
  int32_t q;
  for (t = 0; t < batches; ++t) {
    for (q = 0; q < m->layout->world; ++q)
      mfsdp__node_emit_reduce_in(m, q, t);
    for (q = 0; q < m->layout->world; ++q)
      mfsdp__node_emit_reduce_out(m, q, t - 1);
    mfsdp__coll_emit_batch(m);
    mfsdp__node_emit_owner_sums(m, t - 1);
    for (q = 0; q < m->layout->world; ++q)
      mfsdp__node_emit_node_sums(m, q, t);
  }
}

#endif /* MFSDP_COLLECTIVE_HIERARCHICAL_H */
