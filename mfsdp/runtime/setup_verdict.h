/* SPDX-License-Identifier: MIT */
/*
 * runtime/setup_verdict.h - the tables of the step's message: where each rank's words and each
 * block's sum lie, in an order that every rank agrees on. Part of runtime.h.
 *
 * All ranks together are group 0's ranks, replica after replica. A group other than 0 has instances
 * that hold different parameters; an instance is named by its lowest rank. Blocks are folded in the
 * order: group 0 in tensor order, then group after group, instance after instance, in tensor order;
 * of replicas the first counts. Presence bits are shared by the ranks of an instance and its
 * replicas.
 * Link flags: none.
 */
#ifndef MFSDP_RUNTIME_SETUP_VERDICT_H
#define MFSDP_RUNTIME_SETUP_VERDICT_H

#include "setup_agree.h"
#include "setup_units.h"

/* What a rank says of a group: four words on the control plane. */
typedef struct mfsdp__rank_group {
  int64_t instance, param_count, block_count, replica;
} mfsdp__rank_group;

/* Host copies of the verdict's tables while they are built. */
typedef struct mfsdp__verdict_build {
  int32_t ranks;
  mfsdp__rank_group *members;                 /* group_count x ranks */
  int64_t *rank_word;                         /* ranks + 1 */
  int64_t *block_word, block_count, *scratch; /* scratch: ranks x MFSDP__ENTRY_WORDS */
  mfsdp_block *own;
  mfsdp_norm_block *blocks; /* of one plan at a time */
  int64_t own_capacity, block_capacity;
} mfsdp__verdict_build;

/* Block numbers exchanged in one control message. */
#define MFSDP__ENTRY_WORDS 16

/* The rank's number over all ranks. */
MFSDP_API int32_t mfsdp__global_rank(const mfsdp_runtime *rt) {
  return rt->groups[0].replica_rank * rt->groups[0].world + rt->groups[0].rank;
}

/* Control messages are kept this short where many ranks' words go in one. */
#define MFSDP__GATHER_NBYTES 4096

/* From the ranks of this copy (`inside`) to those of all copies, a few ranks' words at a time. */
MFSDP_API mfsdp_status mfsdp__all_copies_gather(mfsdp_runtime *rt, const unsigned char *inside,
                                                size_t nbytes, unsigned char *out) {
  const mfsdp__group_entry *g = &rt->groups[0];
  const size_t world = (size_t)g->world, copies = (size_t)g->replica_world;
  const size_t most = nbytes >= MFSDP__GATHER_NBYTES ? 1 : MFSDP__GATHER_NBYTES / nbytes;
  const size_t batch = most < world ? most : world;
  mfsdp_status status;
  size_t first, k;
  void *all;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, copies * batch, nbytes, "control messages", &all));
  status = MFSDP_OK;
  for (first = 0; first < world && status == MFSDP_OK; first += batch) {
    const size_t count = world - first < batch ? world - first : batch;
    status = mfsdp__control_allgather(rt->context, g->replica_control, inside + first * nbytes,
                                      count * nbytes, all);
    for (k = 0; k < copies && status == MFSDP_OK; ++k)
      memcpy(out + (k * world + first) * nbytes, (unsigned char *)all + k * count * nbytes,
             count * nbytes);
  }
  mfsdp_table_free(rt->context, all, copies * batch, nbytes);
  return status;
}

/* nbytes from every rank to every rank: inside group 0, then over its replicas. out: ranks x
 * nbytes. */
MFSDP_API mfsdp_status mfsdp__all_ranks_gather(mfsdp_runtime *rt, const void *in, size_t nbytes,
                                               void *out) {
  const mfsdp__group_entry *g = &rt->groups[0];
  mfsdp_status status;
  void *inside;
  if (g->replica == NULL) return mfsdp__control_allgather(rt->context, g->control, in, nbytes, out);
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)g->world, nbytes, "control message", &inside));
  status = mfsdp__control_allgather(rt->context, g->control, in, nbytes, inside);
  if (status == MFSDP_OK)
    status =
        mfsdp__all_copies_gather(rt, (const unsigned char *)inside, nbytes, (unsigned char *)out);
  mfsdp_table_free(rt->context, inside, (size_t)g->world, nbytes);
  return status;
}

/* The lowest global rank over this control plane. `scratch`: world words. */
MFSDP_API mfsdp_status mfsdp__lowest_over(mfsdp_runtime *rt, const mfsdp_control *control,
                                          int64_t *lowest) {
  mfsdp_status status;
  int64_t *all;
  void *memory;
  int32_t r;
  MFSDP_TRY(
      mfsdp_table_alloc(rt->context, (size_t)control->world, sizeof(*all), "instance", &memory));
  all = (int64_t *)memory;
  status = mfsdp__control_allgather(rt->context, control, lowest, sizeof(*lowest), all);
  for (r = 0; r < control->world && status == MFSDP_OK; ++r)
    if (all[r] < *lowest) *lowest = all[r];
  mfsdp_table_free(rt->context, memory, (size_t)control->world, sizeof(*all));
  return status;
}

/* Blocks that `rank` owns of a plan. `blocks` holds the plan's blocks. */
MFSDP_API int64_t mfsdp__count_own_blocks(const mfsdp_plan *plan, const mfsdp_norm_block *blocks,
                                          int32_t rank) {
  const int32_t count = mfsdp_plan_block_count(plan);
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &piece_count);
  int64_t own = 0;
  for (i = 0; i < count; ++i)
    own += pieces[blocks[i].piece].owner == rank;
  return own;
}

MFSDP_API mfsdp_status mfsdp__load_blocks(mfsdp_runtime *rt, mfsdp__verdict_build *b, int32_t g) {
  int32_t count = 0;
  return mfsdp_plan_blocks(rt->context, rt->groups[g].plan, b->blocks, (int32_t)b->block_capacity,
                           &count);
}

/* Fills members: of group 0 from the plan, of the others by asking. Collective with several
 * groups. */
MFSDP_API mfsdp_status mfsdp__verdict_members(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  int32_t g, k;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    mfsdp__rank_group own;
    MFSDP_TRY(mfsdp__load_blocks(rt, b, g));
    own.param_count = mfsdp_plan_param_count(group->plan);
    own.replica = group->replica_rank;
    own.instance = g == 0 ? 0 : mfsdp__global_rank(rt);
    if (g == 0) {
      for (k = 0; k < b->ranks; ++k) {
        own.replica = k / group->world;
        own.block_count = mfsdp__count_own_blocks(group->plan, b->blocks, k % group->world);
        b->members[k] = own;
      }
      continue;
    }
    own.block_count = mfsdp__count_own_blocks(group->plan, b->blocks, group->rank);
    MFSDP_TRY(mfsdp__lowest_over(rt, group->control, &own.instance));
    if (group->replica != NULL)
      MFSDP_TRY(mfsdp__lowest_over(rt, group->replica_control, &own.instance));
    MFSDP_TRY(mfsdp__all_ranks_gather(rt, &own, sizeof(own), b->members + (int64_t)g * b->ranks));
  }
  return MFSDP_OK;
}

/* Numbers the presence bits and sets the header's length. */
MFSDP_API void mfsdp__verdict_presence(mfsdp_runtime *rt, const mfsdp__verdict_build *b) {
  int32_t count = 0, g, k, p;
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__rank_group *members = b->members + (int64_t)g * b->ranks;
    for (k = 0; k < b->ranks; ++k) {
      if (members[k].instance != k) continue; /* its lowest rank speaks for the instance */
      if (members[mfsdp__global_rank(rt)].instance == k) rt->groups[g].presence_first = count;
      count += (int32_t)members[k].param_count;
    }
  }
  for (p = 0; p < rt->param_count; ++p)
    if (rt->params[p].presence >= 0)
      rt->params[p].presence += rt->groups[rt->params[p].group].presence_first;
  rt->verdict.presence_count = count;
  rt->verdict.value_capacity = rt->desc->max_micro_batches;
  rt->verdict.weight_word = rt->desc->weighted ? 1 + rt->verdict.value_capacity : 0;
  rt->verdict.presence_word =
      1 + (int64_t)rt->verdict.value_capacity * (rt->desc->weighted ? 2 : 1);
  rt->verdict.header_words = rt->verdict.presence_word + (count + 63) / 64;
}

/* Where each rank's message begins, how many blocks there are, and this rank's own blocks. */
MFSDP_API mfsdp_status mfsdp__verdict_ranks(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  mfsdp__verdict_tables *t = &rt->verdict;
  int32_t g, k, i, piece_count = 0;
  for (k = 0; k < b->ranks; ++k) {
    int64_t words = t->header_words;
    for (g = 0; g < rt->group_count; ++g) {
      const mfsdp__rank_group *m = &b->members[(int64_t)g * b->ranks + k];
      words += m->block_count;
      if (m->replica == 0) b->block_count += m->block_count;
    }
    b->rank_word[k + 1] = b->rank_word[k] + words;
  }
  t->own_word = b->rank_word[mfsdp__global_rank(rt)];
  t->replica_word = b->rank_word[(int64_t)rt->groups[0].replica_rank * rt->groups[0].world];
  for (g = 0; g < rt->group_count; ++g) {
    const mfsdp__group_entry *group = &rt->groups[g];
    const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &piece_count);
    MFSDP_TRY(mfsdp__load_blocks(rt, b, g));
    for (i = 0; i < mfsdp_plan_block_count(group->plan); ++i) {
      const mfsdp_norm_block *block = &b->blocks[i];
      const mfsdp_piece *piece = &pieces[block->piece];
      mfsdp_block *own = &b->own[t->own_block_count];
      if (piece->owner != group->rank) continue;
      own->first = rt->units[piece->unit].accumulator_first + piece->grad_shard_offset +
                   block->first - piece->first;
      own->count = block->count;
      own->slot = t->own_block_count++;
      own->param = group->param_first + block->param;
    }
  }
  return MFSDP_OK;
}

/* Words of group 0's blocks, from the plan: of replica 0, whose sums are those of all. */
MFSDP_API mfsdp_status mfsdp__verdict_words_of_plan(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  const mfsdp__group_entry *group = &rt->groups[0];
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &piece_count);
  int64_t *placed = b->scratch; /* per rank; there are at least as many words */
  memset(placed, 0, (size_t)group->world * sizeof(*placed));
  MFSDP_TRY(mfsdp__load_blocks(rt, b, 0));
  for (i = 0; i < mfsdp_plan_block_count(group->plan); ++i) {
    const int32_t owner = pieces[b->blocks[i].piece].owner;
    b->block_word[i] = b->rank_word[owner] + rt->verdict.header_words + placed[owner]++;
  }
  return MFSDP_OK;
}

/* Where rank k's blocks of group g begin in its message. */
MFSDP_API int64_t mfsdp__verdict_first_word(const mfsdp_runtime *rt, const mfsdp__verdict_build *b,
                                            int32_t g, int32_t k) {
  int64_t word = b->rank_word[k] + rt->verdict.header_words;
  int32_t h;
  for (h = 0; h < g; ++h)
    word += b->members[(int64_t)h * b->ranks + k].block_count;
  return word;
}

/* Blocks of the instances of group g before `instance`. */
MFSDP_API int64_t mfsdp__verdict_blocks_before(const mfsdp__verdict_build *b, int32_t g,
                                               int64_t instance) {
  const mfsdp__rank_group *members = b->members + (int64_t)g * b->ranks;
  int64_t count = 0;
  int32_t k;
  for (k = 0; k < b->ranks; ++k)
    if (members[k].instance < instance && members[k].replica == 0) count += members[k].block_count;
  return count;
}

/* The tensor-order numbers of this rank's blocks of group g, from the j-th on; -1 past the end. */
MFSDP_API void mfsdp__verdict_own_numbers(const mfsdp_runtime *rt, const mfsdp__verdict_build *b,
                                          int32_t g, int64_t first, int64_t *out) {
  const mfsdp__group_entry *group = &rt->groups[g];
  int32_t piece_count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(group->plan, -1, &piece_count);
  int64_t own = 0;
  for (i = 0; i < MFSDP__ENTRY_WORDS; ++i)
    out[i] = -1;
  for (i = 0; i < mfsdp_plan_block_count(group->plan); ++i) {
    if (pieces[b->blocks[i].piece].owner != group->rank) continue;
    if (own >= first && own < first + MFSDP__ENTRY_WORDS) out[own - first] = i;
    ++own;
  }
}

/* Words of another group's blocks: each rank tells which blocks of its instance it owns.
 * Collective. */
MFSDP_API mfsdp_status mfsdp__verdict_words_of_group(mfsdp_runtime *rt, mfsdp__verdict_build *b,
                                                     int32_t g, int64_t base) {
  const mfsdp__rank_group *members = b->members + (int64_t)g * b->ranks;
  int64_t numbers[MFSDP__ENTRY_WORDS], first, most = 0;
  int32_t k, j;
  MFSDP_TRY(mfsdp__load_blocks(rt, b, g));
  for (k = 0; k < b->ranks; ++k)
    if (members[k].block_count > most) most = members[k].block_count;
  for (first = 0; first < most; first += MFSDP__ENTRY_WORDS) {
    mfsdp__verdict_own_numbers(rt, b, g, first, numbers);
    MFSDP_TRY(mfsdp__all_ranks_gather(rt, numbers, sizeof(numbers), b->scratch));
    for (k = 0; k < b->ranks; ++k) {
      const int64_t start = base + mfsdp__verdict_blocks_before(b, g, members[k].instance);
      for (j = 0; j < MFSDP__ENTRY_WORDS && members[k].replica == 0; ++j) {
        const int64_t number = b->scratch[(int64_t)k * MFSDP__ENTRY_WORDS + j];
        if (number < 0 || start + number >= b->block_count) continue;
        b->block_word[start + number] = mfsdp__verdict_first_word(rt, b, g, k) + first + j;
      }
    }
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__verdict_words(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  int64_t base = mfsdp_plan_block_count(rt->groups[0].plan);
  int32_t g;
  MFSDP_TRY(mfsdp__verdict_words_of_plan(rt, b));
  for (g = 1; g < rt->group_count; ++g) {
    MFSDP_TRY(mfsdp__verdict_words_of_group(rt, b, g, base));
    base += mfsdp__verdict_blocks_before(b, g, INT64_MAX);
  }
  return MFSDP_OK;
}

/* ---- memory of the build ---- */

MFSDP_API void mfsdp__verdict_build_free(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  const size_t ranks = (size_t)b->ranks;
  mfsdp_table_free(rt->context, b->block_word, (size_t)b->block_count, sizeof(*b->block_word));
  mfsdp_table_free(rt->context, b->blocks, (size_t)b->block_capacity, sizeof(*b->blocks));
  mfsdp_table_free(rt->context, b->own, (size_t)b->own_capacity, sizeof(*b->own));
  mfsdp_table_free(rt->context, b->scratch, ranks * MFSDP__ENTRY_WORDS, sizeof(*b->scratch));
  mfsdp_table_free(rt->context, b->rank_word, ranks + 1, sizeof(*b->rank_word));
  mfsdp_table_free(rt->context, b->members, ranks * (size_t)rt->group_count, sizeof(*b->members));
}

MFSDP_API mfsdp_status mfsdp__verdict_build_alloc(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  void *memory;
  int32_t g;
  b->ranks = rt->groups[0].world * rt->groups[0].replica_world;
  for (g = 0; g < rt->group_count; ++g) {
    const int64_t count = mfsdp_plan_block_count(rt->groups[g].plan);
    b->own_capacity += count; /* at most all blocks are this rank's */
    if (count > b->block_capacity) b->block_capacity = count;
  }
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->ranks * (size_t)rt->group_count,
                              sizeof(*b->members), "message members", &memory));
  b->members = (mfsdp__rank_group *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->ranks + 1, sizeof(*b->rank_word),
                              "message offsets", &memory));
  b->rank_word = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->ranks * MFSDP__ENTRY_WORDS,
                              sizeof(*b->scratch), "block numbers", &memory));
  b->scratch = (int64_t *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->own_capacity, sizeof(*b->own),
                              "own norm blocks", &memory));
  b->own = (mfsdp_block *)memory;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->block_capacity, sizeof(*b->blocks),
                              "norm blocks", &memory));
  b->blocks = (mfsdp_norm_block *)memory;
  return MFSDP_OK;
}

/* ---- the step's tables ---- */

MFSDP_API mfsdp_status mfsdp__setup_device_table(mfsdp_runtime *rt, const void *host, size_t nbytes,
                                                 mfsdp_buffer *out) {
  mfsdp_status status;
  MFSDP_TRY(mfsdp__setup_buffer(rt, nbytes, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_TABLE, out));
  if (host == NULL) return MFSDP_OK;
  MFSDP_TRY(rt->backend->ops->copy(rt->backend->self, rt->compute, out->data, MFSDP_SPACE_DEVICE,
                                   host, MFSDP_SPACE_HOST, nbytes));
  /* The host table is freed by the caller next. */
  status = rt->backend->ops->event_record(rt->backend->self, rt->compute, rt->compute_done);
  if (status == MFSDP_OK)
    status = rt->backend->ops->event_wait(rt->backend->self, rt->context, rt->compute_done,
                                          rt->deadline_us);
  if (status != MFSDP_OK) mfsdp__runtime_drain(rt);
  return status;
}

MFSDP_API mfsdp_status mfsdp__verdict_upload(mfsdp_runtime *rt, const mfsdp__verdict_build *b) {
  mfsdp__verdict_tables *t = &rt->verdict;
  MFSDP_TRY(mfsdp__setup_device_table(rt, NULL, (size_t)b->rank_word[b->ranks] * 8, &t->messages));
  MFSDP_TRY(mfsdp__setup_device_table(rt, b->rank_word, (size_t)b->ranks * 8, &t->rank_word));
  MFSDP_TRY(
      mfsdp__setup_device_table(rt, b->block_word, (size_t)b->block_count * 8, &t->block_word));
  MFSDP_TRY(mfsdp__setup_device_table(rt, b->own, (size_t)t->own_block_count * sizeof(*b->own),
                                      &t->blocks));
  MFSDP_TRY(mfsdp__setup_device_table(rt, NULL, (size_t)t->presence_count * sizeof(uint32_t),
                                      &t->present));
  MFSDP_TRY(mfsdp__setup_device_table(
      rt, NULL, (size_t)rt->hyper_count * sizeof(mfsdp_step_scalars), &t->scalars));
  MFSDP_TRY(mfsdp__setup_buffer(rt, (size_t)t->header_words * 8, MFSDP_SPACE_PINNED,
                                MFSDP_MEMORY_TABLE, &t->header));
  return mfsdp__setup_buffer(rt, sizeof(mfsdp_verdict_record), MFSDP_SPACE_PINNED,
                             MFSDP_MEMORY_TABLE, &t->record);
}

/* A gather of 8-byte words: extent i is [rank_word[i * stride], rank_word[(i + 1) * stride)) -
 * first. */
MFSDP_API mfsdp_status mfsdp__verdict_gather_create(mfsdp_runtime *rt, const int64_t *rank_word,
                                                    int32_t stride,
                                                    const mfsdp_transport *transport,
                                                    const char *label, mfsdp_coll **out) {
  mfsdp_coll_desc desc = mfsdp_coll_desc_default();
  const size_t world = (size_t)transport->world;
  mfsdp_extent *extents;
  mfsdp_layout layout;
  mfsdp_status status;
  void *memory;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, world, sizeof(*extents), "message extents", &memory));
  extents = (mfsdp_extent *)memory;
  for (i = 0; i < transport->world; ++i) {
    extents[i].owner = i;
    extents[i].unit_offset = rank_word[(int64_t)i * stride] - rank_word[0];
    extents[i].count = rank_word[(int64_t)(i + 1) * stride] - rank_word[(int64_t)i * stride];
    extents[i].payload_count = extents[i].count;
  }
  memset(&layout, 0, sizeof(layout));
  layout.struct_nbytes = sizeof(layout);
  layout.extents = extents;
  layout.extent_count = layout.world = transport->world;
  layout.dtype = MFSDP_F64;
  layout.full_count = rank_word[(int64_t)transport->world * stride] - rank_word[0];
  desc.kind = MFSDP_COLL_GATHER;
  desc.traffic = MFSDP_TRAFFIC_SCALAR;
  desc.layout = &layout;
  desc.transport = transport;
  desc.label = label;
  status = mfsdp_coll_create(rt->context, &desc, out);
  mfsdp_table_free(rt->context, memory, world, sizeof(*extents));
  return status;
}

MFSDP_API mfsdp_status mfsdp__verdict_gathers(mfsdp_runtime *rt, const mfsdp__verdict_build *b) {
  const mfsdp__group_entry *g = &rt->groups[0];
  MFSDP_TRY(mfsdp__verdict_gather_create(rt, b->rank_word + (int64_t)g->replica_rank * g->world, 1,
                                         g->transport, "gather verdict", &rt->verdict.gather));
  if (g->replica == NULL) return MFSDP_OK;
  return mfsdp__verdict_gather_create(rt, b->rank_word, g->world, g->replica,
                                      "gather verdict of replicas", &rt->verdict.replica_gather);
}

MFSDP_API mfsdp_status mfsdp__setup_rates(mfsdp_runtime *rt) {
  const size_t nbytes = (size_t)rt->hyper_count * sizeof(mfsdp_group_rates);
  mfsdp_status status;
  mfsdp_group_rates *rates;
  void *memory;
  int32_t i;
  MFSDP_TRY(mfsdp_table_alloc(rt->context, 1, nbytes, "group rates", &memory));
  rates = (mfsdp_group_rates *)memory;
  for (i = 0; i < rt->hyper_count; ++i) {
    rates[i].lr = rt->desc->optimizer->groups[i].lr;
    rates[i].weight_decay = rt->desc->optimizer->groups[i].weight_decay;
  }
  status = mfsdp__setup_device_table(rt, rates, nbytes, &rt->verdict.rates);
  mfsdp_table_free(rt->context, memory, 1, nbytes);
  return status;
}

/* All arguments of the verdict's fold but the few that a step is told. */
MFSDP_API void mfsdp__setup_fold(mfsdp_runtime *rt) {
  const mfsdp__verdict_tables *t = &rt->verdict;
  mfsdp_verdict_args *fold = &rt->verdict.fold;
  memset(fold, 0, sizeof(*fold));
  fold->struct_nbytes = sizeof(*fold);
  fold->messages = (const uint64_t *)t->messages.data;
  fold->rank_word = (const int64_t *)t->rank_word.data;
  fold->block_word = (const int64_t *)t->block_word.data;
  fold->block_count = t->block_count;
  fold->world = t->ranks;
  fold->value_capacity = t->value_capacity;
  fold->weighted = rt->desc->weighted;
  fold->param_count = t->presence_count;
  fold->group_count = rt->hyper_count;
  fold->rates = (const mfsdp_group_rates *)t->rates.data;
  fold->clip_norm = rt->desc->clip_norm;
  fold->missing_is_zero = rt->desc->missing == MFSDP_MISSING_ZEROS;
  fold->present = (uint32_t *)t->present.data;
  fold->scalars = (mfsdp_step_scalars *)t->scalars.data;
  fold->record = (mfsdp_verdict_record *)t->record.data;
}

MFSDP_API mfsdp_status mfsdp__verdict_make(mfsdp_runtime *rt, mfsdp__verdict_build *b) {
  void *memory;
  MFSDP_TRY(mfsdp__verdict_members(rt, b));
  mfsdp__verdict_presence(rt, b);
  MFSDP_TRY(mfsdp__verdict_ranks(rt, b));
  MFSDP_TRY(mfsdp_table_alloc(rt->context, (size_t)b->block_count, sizeof(*b->block_word),
                              "block words", &memory));
  b->block_word = (int64_t *)memory;
  MFSDP_TRY(mfsdp__verdict_words(rt, b));
  rt->verdict.block_count = b->block_count;
  rt->verdict.ranks = b->ranks;
  MFSDP_TRY(mfsdp__verdict_upload(rt, b));
  MFSDP_TRY(mfsdp__verdict_gathers(rt, b));
  MFSDP_TRY(mfsdp__setup_rates(rt));
  mfsdp__setup_fold(rt);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__setup_verdict(mfsdp_runtime *rt) {
  mfsdp__verdict_build build;
  mfsdp_status status;
  memset(&build, 0, sizeof(build));
  status = mfsdp__verdict_build_alloc(rt, &build);
  if (status == MFSDP_OK) status = mfsdp__verdict_make(rt, &build);
  mfsdp__verdict_build_free(rt, &build);
  return status;
}

#endif /* MFSDP_RUNTIME_SETUP_VERDICT_H */
