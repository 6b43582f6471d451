/* SPDX-License-Identifier: MIT */
/*
 * plan/nodes.h - spreads the owners of each unit over nodes without changing what any rank holds:
 * equal matrices of two units change places.
 *
 *   mfsdp__nodes_run(&search, items);   // behind the search: its lists are scratch here
 *
 * Where a node has two or more matrices of unit u, one of them, x, changes places with a matrix y of
 * the same cost and bytes of another unit v, whose node has nothing of u, if x's node has nothing of
 * v. So u gains a node, v loses none, and no rank gets a second matrix of either: loads stay, and no
 * gamma rises. Layers are alike, so that there is nearly always such a y.
 * Private to the plan.
 * Does not: allocate, or look at ranks inside a node.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_NODES_H
#define MFSDP_PLAN_NODES_H

#include "search.h"

#define MFSDP__NODES_PASSES 4
#define MFSDP__NODES_TRIES 1024 /* partners looked at for a matrix */

typedef struct mfsdp__nodes {
  mfsdp__search *search;     /* work: matrices that may still be looked at */
  const mfsdp__keyed *order; /* matrices by falling cost: equal ones stand together */
  int32_t *position;         /* by matrix: where it stands there */
  int32_t *count;            /* by node: matrices of the unit at hand */
} mfsdp__nodes;

MFSDP_API int32_t mfsdp__nodes_node(const mfsdp__nodes *nodes, int32_t matrix) {
  const mfsdp__build *build = nodes->search->build;
  return build->desc->node_of_rank[build->owner[matrix]];
}

/* Has `node` a matrix of `unit`? */
MFSDP_API int mfsdp__nodes_has(mfsdp__nodes *nodes, int32_t unit, int32_t node) {
  const mfsdp__build *build = nodes->search->build;
  int32_t i;
  for (i = build->unit_first[unit]; i < build->unit_first[unit + 1]; ++i) {
    --nodes->search->work;
    if (mfsdp__nodes_node(nodes, i) == node) return 1;
  }
  return 0;
}

/* May x, of the unit at hand, change places with y? */
MFSDP_API int mfsdp__nodes_fits(mfsdp__nodes *nodes, int32_t x, int32_t y) {
  const mfsdp__search *search = nodes->search;
  return search->unit[y] != search->unit[x] &&
         search->key[MFSDP__BY_NBYTES][y] == search->key[MFSDP__BY_NBYTES][x] &&
         nodes->count[mfsdp__nodes_node(nodes, y)] == 0 &&
         !mfsdp__nodes_has(nodes, search->unit[y], mfsdp__nodes_node(nodes, x));
}

/* Looks for a partner of x from its neighbour on, in one direction; 1 if they changed places. */
MFSDP_API int mfsdp__nodes_exchange(mfsdp__nodes *nodes, int32_t x, int32_t direction) {
  mfsdp__build *build = nodes->search->build;
  const int64_t key = nodes->order[nodes->position[x]].key;
  int32_t at = nodes->position[x] + direction, tries;
  for (tries = 0; tries < MFSDP__NODES_TRIES; ++tries, at += direction) {
    int32_t y, owner;
    if (at < 0 || at >= build->matrix_count || nodes->order[at].key != key) return 0;
    y = nodes->order[at].id;
    --nodes->search->work;
    if (!mfsdp__nodes_fits(nodes, x, y)) continue;
    --nodes->count[mfsdp__nodes_node(nodes, x)];
    ++nodes->count[mfsdp__nodes_node(nodes, y)];
    owner = build->owner[x];
    build->owner[x] = build->owner[y];
    build->owner[y] = owner;
    return 1;
  }
  return 0;
}

/* 1 if the unit has gained a node. */
MFSDP_API int mfsdp__nodes_unit(mfsdp__nodes *nodes, int32_t unit) {
  const mfsdp__build *build = nodes->search->build;
  const int32_t first = build->unit_first[unit], end = build->unit_first[unit + 1];
  int32_t x, gained = 0;
  for (x = first; x < end; ++x)
    ++nodes->count[mfsdp__nodes_node(nodes, x)];
  for (x = first; x < end && nodes->search->work > 0; ++x)
    if (nodes->count[mfsdp__nodes_node(nodes, x)] > 1 &&
        (mfsdp__nodes_exchange(nodes, x, 1) || mfsdp__nodes_exchange(nodes, x, -1)))
      gained = 1;
  for (x = first; x < end; ++x)
    nodes->count[mfsdp__nodes_node(nodes, x)] = 0;
  return gained;
}

/* search->work is set; items: room for all matrices. Nothing to do without a node map, and not under
 * a cap on owners, which more nodes would pass. */
MFSDP_API void mfsdp__nodes_run(mfsdp__search *search, mfsdp__keyed *items) {
  const mfsdp__build *build = search->build;
  mfsdp__nodes nodes;
  int32_t i, pass, gained = 1;
  if (build->desc->node_of_rank == NULL || build->desc->caps.max_owners != MFSDP_PLAN_NO_CAP)
    return;
  nodes.search = search;
  nodes.order = items;
  nodes.position = search->next;
  nodes.count = search->place;
  for (i = 0; i < build->matrix_count; ++i) {
    items[i].key = -search->key[MFSDP__BY_COST][i];
    items[i].id = i;
  }
  mfsdp__keyed_sort(items, build->matrix_count);
  for (i = 0; i < build->matrix_count; ++i)
    nodes.position[items[i].id] = i;
  for (i = 0; i < build->plan->world; ++i)
    nodes.count[i] = 0;
  for (pass = 0; pass < MFSDP__NODES_PASSES && gained; ++pass) {
    gained = 0;
    for (i = 0; i < build->unit_count && search->work > 0; ++i)
      gained |= mfsdp__nodes_unit(&nodes, i);
  }
}

#endif /* MFSDP_PLAN_NODES_H */
