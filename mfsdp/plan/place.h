/* SPDX-License-Identifier: MIT */
/*
 * plan/place.h - the planners: which rank owns which matrix, and how the tails level the ranks.
 *
 * Matrices first, by the rules at mfsdp_planner in plan/desc.h: a BANDED one gets its home so, and its
 * bytes lie where its bands do. Then the tails. The ELEMENTWISE and
 * FROZEN tensors of a unit, one after the other, are its tail. With resident bytes as
 * mfsdp_param_resident_nbytes counts them, padding included:
 *   1. T is the level that all tails together would fill the ranks to, over their matrices.
 *   2. The tails are taken by (larger bytes, then unit), so that small ones mend what is left.
 *   3. A tail of n elements goes to the ranks furthest below T (ties: lower rank): at most
 *      w = min(world, ceil(n / 4096)) of them (where the w of all tails sum past
 *      MFSDP__TAIL_PARTS, a part of each in proportion), and no more than it takes to hold it below T in at
 *      least ceil(n / m) parts, m the largest matrix or band of the unit (without one: as many as
 *      possible). Ranks at or above T are left out unless none is below.
 *   4. The line is cut among them in rank order, in proportion to how far each is below T (where
 *      all that is less than the tail, the rest goes on top in equal parts), each cut moved to the
 *      nearest canonical block.
 * So a rank has at most one run of a tensor, no rank ends more than about a block above T, and a
 * big tail is spread over all ranks that have room, which keeps the gamma of its unit low.
 * Private to the plan.
 * Does not: allocate, or look at a tensor's name.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_PLACE_H
#define MFSDP_PLAN_PLACE_H

#include "../cost.h"
#include "balance.h"
#include "hybrid.h"

/* Parts of all tails together, about: a plan of very many tails on very many ranks must stay small,
 * and with so many of them each needs few ranks to level all. */
#define MFSDP__TAIL_PARTS (INT64_C(1) << 19)

/* ---- matrices ---- */

/* The cost of one matrix as the description asks for it; -1 if it has none. */
MFSDP_API int64_t mfsdp__place_cost(const mfsdp_plan_desc *desc, int32_t param, int64_t rows,
                                    int64_t cols) {
  if (desc->cost != NULL) return desc->cost(desc->user, param, rows, cols);
  if (desc->planner == MFSDP_PLANNER_BALANCED)
    return mfsdp_cost_newton_schulz(NULL, param, rows, cols);
  return rows * cols;
}

/* Whether a matrix lies in bands from the start: as described, or since no rank could hold it. */
MFSDP_API unsigned char mfsdp__place_in_bands(const mfsdp_plan_desc *desc, const mfsdp_param *param,
                                              int64_t count) {
  if (param->placement == MFSDP_PLACEMENT_BANDED) return 1;
  return desc->allow_banded && mfsdp__padded_nbytes(param, count) > desc->caps.max_resident_nbytes;
}

/* Every non-empty matrix in order: its cost, and where each unit's matrices start. */
MFSDP_API mfsdp_status mfsdp__place_costs(mfsdp__build *build) {
  const mfsdp_plan_desc *desc = build->desc;
  const mfsdp_plan *plan = build->plan;
  int64_t sum;
  int32_t u, j, matrix = 0;
  MFSDP_TRY(mfsdp__check_base_load(build->context, desc, &sum));
  for (u = 0; u < plan->unit_count; ++u) {
    build->unit_first[u] = matrix;
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      const mfsdp_param *param = &plan->params[i];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (param->alias_of != NULL || param->role != MFSDP_ROLE_MATRIX) continue;
      while (mfsdp__view_next(param, plan->infos[i].numel, &cursor)) {
        const int64_t cost = mfsdp__place_cost(desc, i, cursor.rows, cursor.cols);
        if (cost < 0 && desc->cost == NULL)
          return MFSDP__PARAM_FAIL(build->context, MFSDP_E_OVERFLOW, i, param,
                                   "the Newton-Schulz work of a %lld x %lld matrix passes 64 bits, "
                                   "needs a cost callback with a coarser unit",
                                   (long long)cursor.rows, (long long)cursor.cols);
        if (cost < 0)
          return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, i, param,
                                   "the cost callback gave %lld for a %lld x %lld matrix, needs at "
                                   "least 0",
                                   (long long)cost, (long long)cursor.rows, (long long)cursor.cols);
        if (!mfsdp_i64_add(sum, cost, &sum))
          return MFSDP__PARAM_FAIL(build->context, MFSDP_E_OVERFLOW, i, param,
                                   "with its cost %lld the costs sum past 64 bits, needs a coarser "
                                   "unit of cost",
                                   (long long)cost);
        build->banded[matrix] = mfsdp__place_in_bands(desc, param, cursor.rows * cursor.cols);
        build->cost[matrix++] = cost;
      }
    }
  }
  build->unit_first[plan->unit_count] = matrix;
  return MFSDP_OK;
}

/* What the bands of all BANDED matrices keep resident, by rank. */
MFSDP_API void mfsdp__place_bands(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int32_t u, j, matrix = 0;
  memset(build->band_nbytes, 0, (size_t)plan->world * sizeof(*build->band_nbytes));
  for (u = 0; u < plan->unit_count; ++u)
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      const mfsdp_param *param = &plan->params[i];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (param->alias_of != NULL || param->role != MFSDP_ROLE_MATRIX) continue;
      while (mfsdp__view_next(param, plan->infos[i].numel, &cursor)) {
        mfsdp__band_cursor band = mfsdp__band_begin(cursor.rows, plan->world);
        if (!build->banded[matrix++]) continue;
        while (mfsdp__band_next(&band))
          build->band_nbytes[band.rank] += mfsdp__padded_nbytes(param, band.count * cursor.cols);
      }
    }
}

/* Matrices first .. last - 1, the costliest first, each to the least loaded rank. The heap holds
 * (load, rank) and keeps its loads. */
MFSDP_API void mfsdp__place_greedy(mfsdp__build *build, int32_t first, int32_t last) {
  const int32_t world = build->plan->world;
  int32_t i;
  for (i = first; i < last; ++i) {
    build->items[i - first].key = -build->cost[i];
    build->items[i - first].id = i;
  }
  mfsdp__keyed_sort(build->items, last - first);
  for (i = 0; i < last - first; ++i) {
    const int32_t matrix = build->items[i].id;
    build->owner[matrix] = build->heap[0].id;
    build->heap[0].key += build->cost[matrix];
    mfsdp__heap_sink(build->heap, world, 0);
  }
}

/* SCOPE_GREEDY, or ROLE_GREEDY: unit by unit. Returns the largest load. */
MFSDP_API int64_t mfsdp__place_scope(mfsdp__build *build, int by_unit) {
  const mfsdp_plan *plan = build->plan;
  int64_t most = 0;
  int32_t i;
  for (i = 0; i < plan->world; ++i) {
    build->heap[i].key = plan->base_load ? plan->base_load[i] : 0;
    build->heap[i].id = i;
  }
  mfsdp__heap_build(build->heap, plan->world);
  if (!by_unit) mfsdp__place_greedy(build, 0, build->matrix_count);
  for (i = 0; by_unit && i < plan->unit_count; ++i)
    mfsdp__place_greedy(build, build->unit_first[i], build->unit_first[i + 1]);
  for (i = 0; i < plan->world; ++i)
    if (build->heap[i].key > most) most = build->heap[i].key;
  return most;
}

/* 1 if no rank owns more of a unit's matrices than max_gamma_permille lets it own of the unit. */
MFSDP_API int mfsdp__place_fits(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  const int64_t permille = build->desc->caps.max_gamma_permille;
  int32_t u, j;
  int fits = 1;
  for (u = 0; u < plan->unit_count && fits; ++u) {
    const int64_t limit = mfsdp__gamma_limit(mfsdp__unit_elements(plan, u), permille, plan->world);
    int pass; /* 0: add up what each rank owns; 1: clear */
    for (pass = 0; pass < 2; ++pass) {
      int32_t matrix = build->unit_first[u];
      for (j = 0; j < plan->units[u].param_count; ++j) {
        const int32_t i = plan->unit_params[plan->units[u].param_first + j];
        mfsdp__view_cursor cursor = mfsdp__view_begin();
        if (plan->params[i].alias_of != NULL || plan->params[i].role != MFSDP_ROLE_MATRIX) continue;
        while (mfsdp__view_next(&plan->params[i], plan->infos[i].numel, &cursor)) {
          int64_t *owned = &build->resident[build->owner[matrix++]];
          *owned = pass ? 0 : *owned + cursor.rows * cursor.cols;
          if (*owned > limit) fits = 0;
        }
      }
    }
  }
  return fits;
}

MFSDP_API mfsdp_status mfsdp__place_matrices(mfsdp__build *build) {
  const mfsdp_planner planner = build->plan->planner;
  int64_t most;
  int32_t i;
  if (planner == MFSDP_PLANNER_BALANCED) return mfsdp__place_balanced(build);
  if (planner == MFSDP_PLANNER_ROUND_ROBIN) {
    for (i = 0; i < build->matrix_count; ++i)
      build->owner[i] = i % build->plan->world;
    return MFSDP_OK;
  }
  most = mfsdp__place_scope(build, planner != MFSDP_PLANNER_SCOPE_GREEDY);
  if (planner == MFSDP_PLANNER_COST_AWARE &&
      (mfsdp__place_scope(build, 0) >= most || !mfsdp__place_fits(build)))
    (void)mfsdp__place_scope(build, 1);
  return MFSDP_OK;
}

/* ---- tails ---- */

MFSDP_API int mfsdp__is_tail(const mfsdp_param *param, int64_t numel) {
  return param->alias_of == NULL && param->role != MFSDP_ROLE_MATRIX && numel > 0;
}

/* Elements and padded bytes of a unit's tail. */
MFSDP_API void mfsdp__tail_size(const mfsdp_plan *plan, int32_t unit, int64_t *elements,
                                int64_t *nbytes) {
  int32_t j;
  *elements = *nbytes = 0;
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    if (!mfsdp__is_tail(&plan->params[i], plan->infos[i].numel)) continue;
    *elements += plan->infos[i].numel;
    *nbytes += mfsdp__padded_nbytes(&plan->params[i], plan->infos[i].numel);
  }
}

/* Elements of the largest matrix or band of a unit; 0 if it has none. */
MFSDP_API int64_t mfsdp__unit_largest(const mfsdp__build *build, int32_t unit) {
  const mfsdp_plan *plan = build->plan;
  int64_t largest = 0;
  int32_t j, matrix = build->unit_first[unit];
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    const mfsdp_param *param = &plan->params[i];
    mfsdp__view_cursor cursor = mfsdp__view_begin();
    if (param->alias_of != NULL || param->role != MFSDP_ROLE_MATRIX) continue;
    while (mfsdp__view_next(param, plan->infos[i].numel, &cursor)) {
      mfsdp__band_cursor band = mfsdp__band_begin(cursor.rows, plan->world);
      int64_t rows = build->banded[matrix] ? 0 : cursor.rows;
      while (build->banded[matrix] && mfsdp__band_next(&band))
        if (band.count > rows) rows = band.count;
      if (rows * cursor.cols > largest) largest = rows * cursor.cols;
      ++matrix;
    }
  }
  return largest;
}

/* How many ranks a tail of so many elements would be spread over at most, if it were the only one. */
MFSDP_API int32_t mfsdp__tail_wish(int64_t elements, int32_t world) {
  const int64_t blocks = elements / 4096 + (elements % 4096 != 0);
  return blocks < world ? (int32_t)blocks : world;
}

/* How many it is: its part of MFSDP__TAIL_PARTS where the wishes of all pass that, at least 1. */
MFSDP_API int32_t mfsdp__tail_width(const mfsdp__build *build, int64_t elements) {
  const int64_t wish = mfsdp__tail_wish(elements, build->plan->world);
  const int64_t wishes = build->tail_wishes;
  const int64_t part = wishes > MFSDP__TAIL_PARTS ? wish * MFSDP__TAIL_PARTS / wishes : wish;
  return part > 0 ? (int32_t)part : 1;
}

/* What the matrices keep resident, by rank. */
MFSDP_API void mfsdp__place_resident(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int32_t u, j, r, matrix = 0;
  for (r = 0; r < plan->world; ++r)
    build->resident[r] = build->band_nbytes[r];
  for (u = 0; u < plan->unit_count; ++u)
    for (j = 0; j < plan->units[u].param_count; ++j) {
      const int32_t i = plan->unit_params[plan->units[u].param_first + j];
      const mfsdp_param *param = &plan->params[i];
      mfsdp__view_cursor cursor = mfsdp__view_begin();
      if (param->alias_of != NULL || param->role != MFSDP_ROLE_MATRIX) continue;
      for (; mfsdp__view_next(param, plan->infos[i].numel, &cursor); ++matrix)
        if (!build->banded[matrix])
          build->resident[build->owner[matrix]] +=
              mfsdp__padded_nbytes(param, cursor.rows * cursor.cols);
    }
}

/* floor(total * part / whole) without overflow, for 0 <= part <= whole < 2^32. */
MFSDP_API int64_t mfsdp__proportion(int64_t total, int64_t part, int64_t whole) {
  return total / whole * part + total % whole * part / whole;
}

/* The line of a unit's tail, cut from left to right. */
typedef struct mfsdp__tail {
  int32_t unit, next;    /* next: position in the unit's parameters */
  int32_t param;         /* the tensor at the cut; -1 behind the last */
  int64_t first;         /* its first element behind the cut */
  int64_t start, length; /* bytes of the line before it, and its own */
} mfsdp__tail;

/* Goes to the next tensor of the tail. */
MFSDP_API void mfsdp__tail_advance(const mfsdp_plan *plan, mfsdp__tail *tail) {
  const mfsdp__plan_unit *unit = &plan->units[tail->unit];
  tail->param = -1;
  tail->first = 0;
  tail->start += tail->length;
  tail->length = 0;
  while (tail->next < unit->param_count) {
    const int32_t i = plan->unit_params[unit->param_first + tail->next++];
    if (!mfsdp__is_tail(&plan->params[i], plan->infos[i].numel)) continue;
    tail->param = i;
    tail->length = mfsdp__padded_nbytes(&plan->params[i], plan->infos[i].numel);
    return;
  }
}

/* Gives the elements up to `end` of the tensor at the cut to `rank`. */
MFSDP_API void mfsdp__tail_give(mfsdp__build *build, mfsdp__tail *tail, int32_t rank, int64_t end) {
  mfsdp__run *run;
  if (end <= tail->first) return;
  run = &build->runs[build->run_first[tail->unit] + build->run_count[tail->unit]++];
  run->param = tail->param;
  run->owner = rank;
  run->first = tail->first;
  run->count = end - tail->first;
  build->resident[rank] += mfsdp__padded_nbytes(&build->plan->params[tail->param], run->count);
  tail->first = end;
}

/* Gives all of the line up to about `position` bytes (or to its end) to `rank`. */
MFSDP_API void mfsdp__tail_cut(mfsdp__build *build, mfsdp__tail *tail, int32_t rank,
                               int64_t position) {
  const mfsdp_plan *plan = build->plan;
  while (tail->param >= 0) {
    const int64_t numel = plan->infos[tail->param].numel;
    const int64_t block = mfsdp_plan_block_elements(numel);
    const int64_t block_nbytes = block * mfsdp_param_resident_nbytes(&plan->params[tail->param]);
    int64_t end = numel;
    if (position < tail->start + tail->length) {
      if (position <= tail->start) return;
      end = (position - tail->start + block_nbytes / 2) / block_nbytes * block;
      if (end > numel) end = numel;
    }
    mfsdp__tail_give(build, tail, rank, end);
    if (tail->first < numel) return;
    mfsdp__tail_advance(plan, tail);
  }
}

/*
 * Takes the ranks that a tail is spread over out of the heap: those with most room, at most as many
 * as its width, and no more than needed to hold it in parts as large as the unit's largest matrix,
 * since finer parts make more messages but no lower gamma. Their room becomes their key; *sum
 * receives the sum. Returns how many, at least 1.
 */
MFSDP_API int32_t mfsdp__tail_pick(mfsdp__build *build, int32_t unit, int64_t elements,
                                   int64_t nbytes, int64_t level, int64_t *sum) {
  const int32_t world = build->plan->world;
  const int32_t width = mfsdp__tail_width(build, elements);
  const int64_t largest = mfsdp__unit_largest(build, unit);
  const int64_t parts = largest > 4096 ? (elements + largest - 1) / largest : width;
  int32_t picked = 0, j;
  *sum = 0;
  while (picked < width && (picked == 0 || build->heap[0].key < 0) &&
         (picked < parts || *sum < nbytes)) {
    const mfsdp__keyed top = mfsdp__heap_pop(build->heap, world - picked);
    if (top.key < 0) *sum -= top.key;
    build->picked[picked].key = 0;
    build->picked[picked++].id = top.id;
  }
  mfsdp__keyed_sort(build->picked, picked); /* keys are 0: by rank */
  for (j = 0; j < picked; ++j) {
    const int64_t room = level - build->resident[build->picked[j].id];
    build->picked[j].key = room > 0 ? room : 0;
  }
  return picked;
}

/* Takes build->owned from the matrices of a unit. */
MFSDP_API int64_t mfsdp__tail_owned(mfsdp__build *build, int32_t unit, int clear) {
  const mfsdp_plan *plan = build->plan;
  int64_t owners = 0;
  int32_t j, matrix = build->unit_first[unit];
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    mfsdp__view_cursor cursor = mfsdp__view_begin();
    if (plan->params[i].alias_of != NULL || plan->params[i].role != MFSDP_ROLE_MATRIX) continue;
    while (mfsdp__view_next(&plan->params[i], plan->infos[i].numel, &cursor)) {
      int64_t *owned = &build->owned[build->owner[matrix++]];
      owners += *owned == 0;
      *owned = clear ? 0 : *owned + cursor.rows * cursor.cols;
    }
  }
  return owners;
}

/* What a rank may take of a tail of so many elements and bytes, by the cap on gamma: bytes. A cut
 * may end up to a block late, so a part must stay a block (of bytes per element at least `weight`)
 * below the limit. */
MFSDP_API int64_t mfsdp__tail_limit(const mfsdp__build *build, int32_t unit, int32_t rank,
                                    int64_t elements, int64_t nbytes) {
  const mfsdp_plan *plan = build->plan;
  const int64_t free_elements = build->limit[unit] - build->owned[rank];
  int64_t block = 0, weight = 0;
  int32_t j;
  if (free_elements >= elements) return nbytes;
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    const mfsdp_param *param = &plan->params[i];
    if (!mfsdp__is_tail(param, plan->infos[i].numel)) continue;
    if (mfsdp_plan_block_elements(plan->infos[i].numel) > block)
      block = mfsdp_plan_block_elements(plan->infos[i].numel);
    if (weight == 0 || mfsdp_param_resident_nbytes(param) < weight)
      weight = mfsdp_param_resident_nbytes(param);
  }
  return free_elements > block ? (free_elements - block) * weight : 0;
}

/* Rooms of the picked ranks, below the level plus `extra`, as far as their limits go. */
MFSDP_API int64_t mfsdp__tail_rooms(mfsdp__build *build, int32_t unit, int64_t elements,
                                    int64_t nbytes, int64_t level, int32_t picked) {
  int64_t sum = 0;
  int32_t j;
  for (j = 0; j < picked; ++j) {
    const int32_t rank = build->picked[j].id;
    const int64_t limit = mfsdp__tail_limit(build, unit, rank, elements, nbytes);
    int64_t room = level - build->resident[rank];
    if (room < 0) room = 0;
    build->picked[j].key = room < limit ? room : limit;
    sum += build->picked[j].key;
  }
  return sum;
}

/*
 * The same as mfsdp__tail_pick under caps on the unit: no more owners than allowed, and room only
 * as far as a rank's limit goes. Where the ranks below the level do not hold the tail, the level is
 * raised for them, and at last their limits alone count.
 */
MFSDP_API int32_t mfsdp__tail_pick_capped(mfsdp__build *build, int32_t unit, int64_t elements,
                                          int64_t nbytes, int64_t level, int64_t *sum) {
  const int32_t world = build->plan->world, width = mfsdp__tail_width(build, elements);
  int64_t spare = build->desc->caps.max_owners - mfsdp__tail_owned(build, unit, 0), limits = 0;
  int32_t picked = 0, skipped = 0, j; /* skipped entries gather at the end of build->picked */
  *sum = 0;
  while (picked + skipped < world && picked < width && *sum < nbytes &&
         (build->heap[0].key < 0 || limits < nbytes)) {
    const mfsdp__keyed top = mfsdp__heap_pop(build->heap, world - picked - skipped);
    const int64_t limit = mfsdp__tail_limit(build, unit, top.id, elements, nbytes);
    if (limit == 0 || (build->owned[top.id] == 0 && spare <= 0)) {
      build->picked[world - ++skipped] = top;
      continue;
    }
    spare -= build->owned[top.id] == 0;
    limits += limit;
    if (top.key < 0) *sum += -top.key < limit ? -top.key : limit;
    build->picked[picked++] = top;
  }
  if (picked == 0) { /* no rank keeps the caps: the last check will say so */
    const mfsdp__keyed emptiest = build->picked[world - 1];
    build->picked[world - 1] = build->picked[world - skipped];
    build->picked[picked++] = emptiest;
    --skipped;
  }
  for (j = 0; j < skipped; ++j)
    mfsdp__heap_push(build->heap, world - picked - skipped + j, build->picked[world - 1 - j]);
  for (j = 0; j < picked; ++j)
    build->picked[j].key = 0;
  mfsdp__keyed_sort(build->picked, picked); /* by rank */
  *sum = mfsdp__tail_rooms(build, unit, elements, nbytes, level, picked);
  if (*sum < nbytes) {
    const int64_t extra = (nbytes - *sum) / picked + 1;
    *sum = mfsdp__tail_rooms(build, unit, elements, nbytes, level + extra, picked);
  }
  if (*sum < nbytes) *sum = mfsdp__tail_rooms(build, unit, elements, nbytes, INT64_MAX / 2, picked);
  (void)mfsdp__tail_owned(build, unit, 1);
  return picked;
}

/*
 * From rooms, whose sum is `whole`, to shares: where all room is less than nbytes, the rest goes on
 * top in equal parts. Returns the sum of shares, halved together until it fits 31 bits, so that
 * products of it fit 63.
 */
MFSDP_API int64_t mfsdp__tail_shares(mfsdp__keyed *picked, int32_t count, int64_t nbytes,
                                     int64_t whole) {
  int32_t j;
  if (whole < nbytes) {
    const int64_t extra = (nbytes - whole + count - 1) / count;
    for (j = 0; j < count; ++j)
      picked[j].key += extra;
    whole += extra * count;
  }
  while (whole > INT64_C(0x7fffffff)) {
    whole = 0;
    for (j = 0; j < count; ++j) {
      picked[j].key /= 2;
      whole += picked[j].key;
    }
  }
  return whole;
}

/* Spreads one unit's tail. The heap holds (resident - level, rank) of all ranks and is kept so. */
MFSDP_API void mfsdp__place_tail(mfsdp__build *build, int32_t unit, int64_t elements,
                                 int64_t nbytes, int64_t level) {
  const int32_t world = build->plan->world;
  int64_t whole, part = 0;
  int32_t picked, j;
  mfsdp__tail tail;
  memset(&tail, 0, sizeof(tail));
  tail.unit = unit;
  mfsdp__tail_advance(build->plan, &tail);
  picked = build->limit != NULL
               ? mfsdp__tail_pick_capped(build, unit, elements, nbytes, level, &whole)
               : mfsdp__tail_pick(build, unit, elements, nbytes, level, &whole);
  whole = mfsdp__tail_shares(build->picked, picked, nbytes, whole);
  for (j = 0; j < picked; ++j) {
    part += build->picked[j].key;
    mfsdp__tail_cut(build, &tail, build->picked[j].id,
                    j + 1 == picked ? nbytes : mfsdp__proportion(nbytes, part, whole));
  }
  for (j = 0; j < picked; ++j) {
    mfsdp__keyed entry;
    entry.id = build->picked[j].id;
    entry.key = build->resident[entry.id] - level;
    mfsdp__heap_push(build->heap, world - picked + j, entry);
  }
}

MFSDP_API void mfsdp__place_tails(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int64_t volume = 0, elements, nbytes, level;
  int32_t u, r, tails = 0;
  for (u = 0; u < plan->unit_count; ++u) {
    mfsdp__tail_size(plan, u, &elements, &nbytes);
    if (elements == 0) continue;
    build->items[tails].key = -nbytes;
    build->items[tails++].id = u;
    volume += nbytes;
  }
  mfsdp__keyed_sort(build->items, tails);
  mfsdp__place_resident(build);
  for (r = 0; r < plan->world; ++r) {
    build->heap[r].key = build->resident[r];
    build->heap[r].id = r;
  }
  mfsdp__keyed_sort(build->heap, plan->world);
  level = mfsdp__water_level(build->heap, plan->world, volume);
  for (r = 0; r < plan->world; ++r)
    build->heap[r].key -= level; /* sorted is a heap */
  for (u = 0; u < tails; ++u) {
    mfsdp__tail_size(plan, build->items[u].id, &elements, &nbytes);
    mfsdp__place_tail(build, build->items[u].id, elements, nbytes, level);
  }
}

#endif /* MFSDP_PLAN_PLACE_H */
