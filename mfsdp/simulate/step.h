/* SPDX-License-Identifier: MIT */
/*
 * simulate/step.h - predicts a whole training step by each strategy.
 *
 *   MFSDP_TRY(mfsdp_simulate(&context, &desc, &result, ranks, world));   // ranks: bytes of each
 *
 * W ranks, M matrices of m elements, s x l with s <= l; F, F_ns, b_memory: the cluster's rates of
 * products, of Newton-Schulz (mfsdp_cluster_newton_schulz_rate) and of memory.
 * Collectives are those of simulate/wire.h. "Slices": every rank has ceil(elements / W) of each
 * unit, or of each matrix where matrices travel, padded to equal length; they move by NATIVE.
 *
 * OWNER (MatrixFSDP): the plan as it is. Materialize and reduce: the plan's segments, unit by unit,
 *   by `algorithm` (RING and HIERARCHICAL reductions carry fp32 partial sums, the others the wire
 *   dtype).
 * Optimizer: no bytes of OWNED matrices; max over ranks of the sum over its matrices of 2 steps
 * s^2 (2 l + s) / F_ns + matrix_us + m matrix_update_nbytes / b_memory, and over its ELEMENTWISE
 * elements of element_update_nbytes / b_memory. Of a BANDED matrix the products count for its home
 * (banded_everywhere: for every rank), the elements of bands for the ranks that hold them, and the
 * bands travel as simulate/banded.h says.
 * GATHER (Muon over FSDP2 slices, every rank redundantly). Units move as slices. Optimizer: one
 * all-gather of each matrix's gradient slices; then all M matrices on every rank; element-wise
 * work is 1/W of the total. SHARDED (Muon on sharded tensors, each
 * product run by the tensor library). As GATHER, but every Newton-Schulz step gathers the second
 * operand of its three products, X, A and X, that is 2 s l + s^2 elements in three all-gathers, and
 * does 1/W of the FLOPs. EXCHANGE. As GATHER, but the slices of each matrix go to its owner, which
 * updates it and sends the slices of the result back: two all-to-alls, each costed as a DIRECT
 * gather of what the owners hold of one slice of each matrix, one message to a peer. ZERO1. No
 * materialization; reduce as OWNER; after the update one gather of every unit by `algorithm`,
 * counted as optimizer bytes. REPLICATED. No materialization; reduce as OWNER, then one gather of
 * every unit's fp32 sums by `algorithm`, counted with the reductions; every rank updates everything.
 *
 * All: the verdict's all-gather costs ceil(log2(W R)) latencies (Bruck's algorithm). Replicas
 * (HSDP, R of them): each owner all-reduces its fp32 gradients over a ring of its replicas once a
 * step, 2 (R - 1) (a_net + own / R / b_net), at least 2 (R - 1) node's own / R / b_node.
 * Forward and backward arithmetic is model_flops / F.
 *
 * Does not: gather a tied tensor again for its alias.
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_STEP_H
#define MFSDP_SIMULATE_STEP_H

#include "banded.h"

/* A prediction in the making; tables have `world` entries. */
typedef struct mfsdp__sim {
  mfsdp_context *context;
  mfsdp_sim_desc ask;
  mfsdp_sim_result *out;
  int32_t world;
  int64_t sliced[3]; /* what every rank sends alike: materialize, reduce, optimizer */
  mfsdp_sim_segment *segments;
  int64_t *materialize, *reduce, *optimizer, *resident, *own; /* own: fp32 bytes of gradients */
  double *busy;                                               /* microseconds of the update */
} mfsdp__sim;

/* Do gradients go to the plan's owners? */
MFSDP_API int mfsdp__sim_owned(const mfsdp__sim *sim) {
  return sim->ask.strategy == MFSDP_SIM_OWNER || sim->ask.strategy == MFSDP_SIM_ZERO1 ||
         sim->ask.strategy == MFSDP_SIM_REPLICATED;
}

/* Do full parameters stay on every rank? */
MFSDP_API int mfsdp__sim_full(const mfsdp__sim *sim) {
  return sim->ask.strategy == MFSDP_SIM_ZERO1 || sim->ask.strategy == MFSDP_SIM_REPLICATED;
}

MFSDP_API mfsdp_status mfsdp__sim_overflow(const mfsdp__sim *sim, const char *what) {
  return MFSDP_FAIL(sim->context, MFSDP_E_OVERFLOW, "simulate: %s pass 64 bits at world %d", what,
                    (int)sim->world);
}

/* *sum += a * b. */
MFSDP_API int mfsdp__sim_accumulate(int64_t *sum, int64_t a, int64_t b) {
  int64_t product;
  return mfsdp_i64_mul(a, b, &product) && mfsdp_i64_add(*sum, product, sum);
}

/* ---- units on the wire ---- */

/* The segments of a unit as the collectives see them: merged extents, inner padding included. */
MFSDP_API void mfsdp__sim_unit_segments(mfsdp__sim *sim, int32_t unit, mfsdp_layout_kind kind,
                                        int64_t element_nbytes) {
  const int gather = kind == MFSDP_LAYOUT_GATHER;
  int32_t piece_count, i, count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(sim->ask.plan, unit, &piece_count);
  mfsdp_extent last;
  memset(&last, 0, sizeof(last));
  memset(sim->segments, 0, (size_t)sim->world * sizeof(*sim->segments));
  for (i = 0; i < piece_count; ++i) {
    const int32_t before = count;
    const int64_t length = last.count;
    mfsdp_sim_segment *segment = &sim->segments[pieces[i].owner];
    mfsdp_extent next;
    if (!gather && pieces[i].grad_unit_offset < 0) continue; /* FROZEN */
    next.owner = pieces[i].owner;
    next.unit_offset = gather ? pieces[i].unit_offset : pieces[i].grad_unit_offset;
    next.shard_offset = gather ? pieces[i].shard_offset : pieces[i].grad_shard_offset;
    next.count = next.payload_count = pieces[i].count;
    mfsdp__extent_add(&last, NULL, 0, &count, &next);
    segment->nbytes += (last.count - (count == before ? length : 0)) * element_nbytes;
    segment->message_count += count - before;
  }
}

MFSDP_API int64_t mfsdp__sim_unit_element_nbytes(const mfsdp__sim *sim, int32_t unit,
                                                 mfsdp_layout_kind kind) {
  const int partial_sums =
      sim->ask.algorithm == MFSDP_SIM_RING || sim->ask.algorithm == MFSDP_SIM_HIERARCHICAL;
  if (kind == MFSDP_LAYOUT_GATHER)
    return (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_dtype(sim->ask.plan, unit, kind));
  if (mfsdp__sim_owned(sim) && partial_sums) return (int64_t)mfsdp_dtype_nbytes(MFSDP_F32);
  return (int64_t)mfsdp_dtype_nbytes(mfsdp_plan_unit_wire(sim->ask.plan, unit));
}

/* An all-gather or reduce-scatter of equal slices: adds its time and what every rank sends. */
MFSDP_API mfsdp_status mfsdp__sim_slices(mfsdp__sim *sim, int64_t elements, int64_t element_nbytes,
                                         int32_t is_reduce, double *us, int64_t *sent) {
  const mfsdp_cluster *c = sim->ask.cluster;
  const int64_t slice = elements / sim->world + (elements % sim->world != 0);
  const int64_t peers = sim->world - 1;
  int64_t nbytes;
  if (peers == 0 || elements == 0) return MFSDP_OK;
  if (!mfsdp_i64_mul(slice, element_nbytes, &nbytes) || !mfsdp__sim_accumulate(sent, nbytes, peers))
    return mfsdp__sim_overflow(sim, "sent bytes");
  *us += mfsdp__sim_native_us(c, sim->world, (double)nbytes * (double)peers);
  if (is_reduce) *us += mfsdp__sim_us(3.0 * (double)nbytes * sim->world, c->memory_nbytes_per_s);
  return MFSDP_OK;
}

/* One collective of a unit by the plan's segments, in the chunks that the runtime takes: adds its time
 * to *us and its bytes to `sent`. */
MFSDP_API mfsdp_status mfsdp__sim_unit(mfsdp__sim *sim, int32_t unit, mfsdp_layout_kind kind,
                                       int32_t is_reduce, int64_t element_nbytes, double *us,
                                       int64_t *sent) {
  const mfsdp_plan *plan = sim->ask.plan;
  int64_t longest = 0;
  double one = 0.0;
  size_t chunk;
  int32_t r;
  for (r = 0; r < sim->world; ++r) {
    const int64_t count = mfsdp_plan_segment_count(plan, unit, r, kind);
    if (count > longest) longest = count;
  }
  chunk = mfsdp__sim_chunk_nbytes(sim->ask.cluster, sim->ask.algorithm, &sim->ask.wire, sim->world,
                                  mfsdp_plan_unit_count_elements(plan, unit, kind) * element_nbytes,
                                  longest * element_nbytes, sim->ask.chunk_nbytes);
  mfsdp__sim_unit_segments(sim, unit, kind, element_nbytes);
  MFSDP_TRY(mfsdp_sim_collective(sim->context, sim->ask.cluster, sim->ask.algorithm, is_reduce,
                                 sim->segments, sim->world, chunk, &one, sent));
  *us += one;
  return MFSDP_OK;
}

/* Gathers the owners' fp32 sums of every unit to all ranks: adds its time to *us and its bytes to
 * `sent`. */
MFSDP_API mfsdp_status mfsdp__sim_sums(mfsdp__sim *sim, double *us, int64_t *sent) {
  const mfsdp_plan *plan = sim->ask.plan;
  int32_t unit;
  for (unit = 0; unit < mfsdp_plan_unit_count(plan); ++unit) {
    if (mfsdp_plan_unit_payload(plan, unit, MFSDP_LAYOUT_REDUCE) == 0) continue;
    MFSDP_TRY(mfsdp__sim_unit(sim, unit, MFSDP_LAYOUT_REDUCE, 0,
                              (int64_t)mfsdp_dtype_nbytes(MFSDP_F32), us, sent));
  }
  return MFSDP_OK;
}

/* One collective over every unit: adds its time to *us and its bytes to `sent`, or to *sliced. */
MFSDP_API mfsdp_status mfsdp__sim_units(mfsdp__sim *sim, mfsdp_layout_kind kind, double *us,
                                        int64_t *sent, int64_t *sliced) {
  const mfsdp_plan *plan = sim->ask.plan;
  const int32_t is_reduce = kind == MFSDP_LAYOUT_REDUCE;
  int32_t unit;
  for (unit = 0; unit < mfsdp_plan_unit_count(plan); ++unit) {
    const int64_t element_nbytes = mfsdp__sim_unit_element_nbytes(sim, unit, kind);
    if (mfsdp_plan_unit_payload(plan, unit, kind) == 0) continue; /* numbers may have gaps */
    if (mfsdp__sim_owned(sim))
      MFSDP_TRY(mfsdp__sim_unit(sim, unit, kind, is_reduce, element_nbytes, us, sent));
    else
      MFSDP_TRY(mfsdp__sim_slices(sim, mfsdp_plan_unit_payload(plan, unit, kind), element_nbytes,
                                  is_reduce, us, sliced));
  }
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__sim_repeat(mfsdp__sim *sim, int32_t times, double *us, int64_t *sent,
                                         int64_t *sliced) {
  int32_t r;
  *us *= times;
  if (!mfsdp_i64_mul(*sliced, times, sliced)) return mfsdp__sim_overflow(sim, "sent bytes");
  for (r = 0; r < sim->world; ++r)
    if (!mfsdp_i64_mul(sent[r], times, &sent[r])) return mfsdp__sim_overflow(sim, "sent bytes");
  return MFSDP_OK;
}

/* ---- replicas ---- */

/* Owners of the same pieces all-reduce before the step. */
MFSDP_API mfsdp_status mfsdp__sim_replicas(mfsdp__sim *sim) {
  const mfsdp_cluster *c = sim->ask.cluster;
  const double rounds = 2.0 * (sim->ask.replica_count - 1);
  double us = 0.0, node = 0.0;
  int32_t r;
  if (sim->ask.replica_count == 1) return MFSDP_OK;
  for (r = 0; r < sim->world; ++r) {
    const int64_t part =
        sim->own[r] / sim->ask.replica_count + (sim->own[r] % sim->ask.replica_count != 0);
    if (!mfsdp__sim_accumulate(&sim->reduce[r], part, 2 * ((int64_t)sim->ask.replica_count - 1)))
      return mfsdp__sim_overflow(sim, "sent bytes");
    us = mfsdp__sim_max(
        us, rounds * (c->net_latency_us + mfsdp__sim_us((double)part, c->net_nbytes_per_s)));
    if (r % c->ranks_per_node == 0) node = 0.0;
    node += (double)part;
    us = mfsdp__sim_max(us, rounds * mfsdp__sim_us(node, c->net_node_nbytes_per_s));
  }
  sim->out->reduce_us += us;
  return MFSDP_OK;
}

/* ---- the update ---- */

MFSDP_API mfsdp_status mfsdp__sim_matrix_us(const mfsdp__sim *sim, const mfsdp_piece *piece,
                                            double *product_us) {
  int64_t units;
  if (!mfsdp_cost_newton_schulz_units(piece->matrix_rows, piece->cols, &units))
    return mfsdp__sim_overflow(sim, "the operations of a matrix");
  *product_us = mfsdp__sim_us(2.0 * sim->ask.newton_schulz_steps * (double)units,
                              mfsdp_cluster_newton_schulz_rate(sim->ask.cluster));
  return MFSDP_OK;
}

/* Each product of a Newton-Schulz step gathers an operand. One step is asked and multiplied: the
 * number of steps is the caller's and may be anything. */
MFSDP_API mfsdp_status mfsdp__sim_sharded(mfsdp__sim *sim, const mfsdp_piece *piece,
                                          int64_t element_nbytes) {
  const int64_t side = piece->rows < piece->cols ? piece->rows : piece->cols;
  double us = 0.0;
  int64_t sent = 0;
  MFSDP_TRY(mfsdp__sim_slices(sim, piece->count, element_nbytes, 0, &us, &sent));
  MFSDP_TRY(mfsdp__sim_slices(sim, side * side, element_nbytes, 0, &us, &sent));
  MFSDP_TRY(mfsdp__sim_slices(sim, piece->count, element_nbytes, 0, &us, &sent));
  sim->out->optimizer_wire_us += us * sim->ask.newton_schulz_steps;
  return mfsdp__sim_accumulate(&sim->sliced[2], sent, sim->ask.newton_schulz_steps)
             ? MFSDP_OK
             : mfsdp__sim_overflow(sim, "sent bytes");
}

/* Wire time and bytes of one matrix for the strategies that move matrices to update them. */
MFSDP_API mfsdp_status mfsdp__sim_matrix_wire(mfsdp__sim *sim, const mfsdp_piece *piece) {
  const mfsdp_param *param = mfsdp_plan_param(sim->ask.plan, piece->param);
  const int64_t element_nbytes = (int64_t)mfsdp_dtype_nbytes(param->grad);
  if (sim->ask.strategy == MFSDP_SIM_GATHER)
    return mfsdp__sim_slices(sim, piece->count, element_nbytes, 0, &sim->out->optimizer_wire_us,
                             &sim->sliced[2]);
  if (sim->ask.strategy == MFSDP_SIM_SHARDED) return mfsdp__sim_sharded(sim, piece, element_nbytes);
  if (sim->ask.strategy == MFSDP_SIM_EXCHANGE) {
    const int64_t slice = piece->count / sim->world + (piece->count % sim->world != 0);
    if (!mfsdp__sim_accumulate(&sim->segments[piece->owner].nbytes, slice, element_nbytes))
      return mfsdp__sim_overflow(sim, "sent bytes");
    sim->segments[piece->owner].message_count = 1;
  }
  return MFSDP_OK;
}

/* Both ways of the all-to-all whose segments the walk over the matrices has filled. */
MFSDP_API mfsdp_status mfsdp__sim_exchange(mfsdp__sim *sim) {
  int32_t is_back;
  for (is_back = 0; is_back < 2; ++is_back) {
    double us = 0.0;
    /* To the owner and back: the pattern of a reduce and of a gather, without the sums. */
    MFSDP_TRY(mfsdp_sim_collective(sim->context, sim->ask.cluster, MFSDP_SIM_DIRECT, 0,
                                   sim->segments, sim->world, sim->ask.chunk_nbytes, &us,
                                   is_back ? sim->optimizer : NULL));
    sim->out->optimizer_wire_us += us;
  }
  {
    int64_t total = 0;
    int32_t r;
    for (r = 0; r < sim->world; ++r)
      total += sim->segments[r].nbytes;
    for (r = 0; r < sim->world; ++r)
      sim->optimizer[r] += total - sim->segments[r].nbytes;
  }
  return MFSDP_OK;
}

/* Whether a piece's matrix is updated alike on all ranks. */
MFSDP_API int mfsdp__sim_alike(const mfsdp__sim *sim, const mfsdp_piece *piece) {
  if (piece->placement == MFSDP_PLACEMENT_BANDED) return sim->ask.banded_everywhere != 0;
  return sim->ask.strategy == MFSDP_SIM_REPLICATED || sim->ask.strategy == MFSDP_SIM_GATHER ||
         sim->ask.strategy == MFSDP_SIM_SHARDED;
}

/* The products of one matrix: to *shared, or to the rank that does them. */
MFSDP_API mfsdp_status mfsdp__sim_products(mfsdp__sim *sim, const mfsdp_piece *piece,
                                           double *shared) {
  double us = 0.0;
  MFSDP_TRY(mfsdp__sim_matrix_us(sim, piece, &us));
  MFSDP_TRY(mfsdp__sim_matrix_wire(sim, piece));
  if (sim->ask.strategy == MFSDP_SIM_SHARDED) us /= sim->world;
  us += sim->ask.cluster->matrix_us;
  *(mfsdp__sim_alike(sim, piece) ? shared : &sim->busy[piece->home]) += us;
  return MFSDP_OK;
}

/* Arithmetic of the update, by rank; `shared` is what every rank does alike. */
MFSDP_API mfsdp_status mfsdp__sim_update(mfsdp__sim *sim) {
  const int alike = sim->ask.strategy == MFSDP_SIM_REPLICATED; /* every rank does everything */
  const double sliced = alike ? 1.0 : 1.0 / sim->world;        /* of the element-wise work */
  double shared = 0.0;
  int32_t count, i, r;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(sim->ask.plan, -1, &count);
  memset(sim->segments, 0, (size_t)sim->world * sizeof(*sim->segments));
  for (i = 0; i < count; ++i) {
    const int is_matrix = pieces[i].matrix >= 0;
    double element_us;
    if (pieces[i].grad_unit_offset < 0) continue; /* FROZEN */
    element_us =
        mfsdp__sim_us((double)pieces[i].count * (is_matrix ? sim->ask.matrix_update_nbytes
                                                           : sim->ask.element_update_nbytes),
                      sim->ask.cluster->memory_nbytes_per_s);
    if (is_matrix && pieces[i].first == pieces[i].matrix_first) /* else a band, but the first */
      MFSDP_TRY(mfsdp__sim_products(sim, &pieces[i], &shared));
    if (mfsdp__sim_owned(sim) && !alike)
      sim->busy[pieces[i].owner] += element_us;
    else
      shared += element_us * sliced;
  }
  for (r = 0; r < sim->world; ++r) {
    sim->busy[r] += shared;
    sim->out->optimizer_compute_us = mfsdp__sim_max(sim->out->optimizer_compute_us, sim->busy[r]);
  }
  return sim->ask.strategy == MFSDP_SIM_EXCHANGE ? mfsdp__sim_exchange(sim) : MFSDP_OK;
}

/* ---- what stays in memory ---- */

MFSDP_API int64_t mfsdp__sim_state_nbytes(const mfsdp_param *param) {
  if (param->role == MFSDP_ROLE_FROZEN) return 0;
  return param->role == MFSDP_ROLE_MATRIX ? 4 : 8;
}

/* Resident bytes, and the gradients that a rank's replicas would share. */
MFSDP_API void mfsdp__sim_residents(mfsdp__sim *sim) {
  const int32_t world = sim->world;
  int64_t total = 0, own = 0, copies = 0;
  int32_t count, i, r;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(sim->ask.plan, -1, &count);
  for (i = 0; i < count; ++i) {
    const mfsdp_param *param = mfsdp_plan_param(sim->ask.plan, pieces[i].param);
    const int64_t copy = pieces[i].count * (int64_t)mfsdp_dtype_nbytes(param->compute);
    const int64_t kept =
        pieces[i].count * (mfsdp_param_resident_nbytes(param) + mfsdp__sim_state_nbytes(param));
    const int64_t gradient = pieces[i].grad_unit_offset < 0 ? 0 : pieces[i].count * 4;
    total += kept;
    own += gradient;
    copies += copy;
    if (!mfsdp__sim_owned(sim)) continue;
    sim->resident[pieces[i].owner] += sim->ask.strategy == MFSDP_SIM_REPLICATED ? gradient : kept;
    sim->own[pieces[i].owner] += gradient;
    if (sim->ask.strategy == MFSDP_SIM_ZERO1) sim->resident[pieces[i].owner] -= copy;
  }
  for (r = 0; r < world; ++r) {
    if (sim->ask.strategy == MFSDP_SIM_ZERO1) sim->resident[r] += copies;
    if (sim->ask.strategy == MFSDP_SIM_REPLICATED) sim->resident[r] += total;
    if (mfsdp__sim_owned(sim)) continue;
    sim->resident[r] = total / world + (total % world != 0);
    sim->own[r] = own / world + (own % world != 0);
  }
}

/* ---- the whole ---- */

MFSDP_API mfsdp_status mfsdp__sim_alloc(mfsdp__sim *sim) {
  mfsdp_context *context = sim->context;
  const int32_t world = sim->world;
  MFSDP__PLAN_ALLOC(context, sim->segments, world, "simulate: segments");
  MFSDP__PLAN_ALLOC(context, sim->materialize, world, "simulate: bytes");
  MFSDP__PLAN_ALLOC(context, sim->reduce, world, "simulate: bytes");
  MFSDP__PLAN_ALLOC(context, sim->optimizer, world, "simulate: bytes");
  MFSDP__PLAN_ALLOC(context, sim->resident, world, "simulate: bytes");
  MFSDP__PLAN_ALLOC(context, sim->own, world, "simulate: bytes");
  MFSDP__PLAN_ALLOC(context, sim->busy, world, "simulate: times");
  return MFSDP_OK;
}

MFSDP_API void mfsdp__sim_free(mfsdp__sim *sim) {
  mfsdp_context *context = sim->context;
  const int32_t world = sim->world;
  MFSDP__PLAN_FREE(context, sim->busy, world);
  MFSDP__PLAN_FREE(context, sim->own, world);
  MFSDP__PLAN_FREE(context, sim->resident, world);
  MFSDP__PLAN_FREE(context, sim->optimizer, world);
  MFSDP__PLAN_FREE(context, sim->reduce, world);
  MFSDP__PLAN_FREE(context, sim->materialize, world);
  MFSDP__PLAN_FREE(context, sim->segments, world);
}

/* Adds what all ranks send alike, and sums up. */
MFSDP_API mfsdp_status mfsdp__sim_spread(mfsdp__sim *sim, int64_t *bytes, int64_t alike,
                                         mfsdp_plan_spread *out) {
  int64_t sum = 0;
  int32_t r;
  for (r = 0; r < sim->world; ++r)
    if (!mfsdp_i64_add(bytes[r], alike, &bytes[r]) || !mfsdp_i64_add(sum, bytes[r], &sum))
      return mfsdp__sim_overflow(sim, "bytes of all ranks");
  *out = mfsdp__spread(bytes, sim->world);
  return MFSDP_OK;
}

MFSDP_API mfsdp_status mfsdp__sim_traffic(mfsdp__sim *sim) {
  mfsdp_sim_result *out = sim->out;
  if (!mfsdp__sim_full(sim)) {
    MFSDP_TRY(mfsdp__sim_units(sim, MFSDP_LAYOUT_GATHER, &out->materialize_us, sim->materialize,
                               &sim->sliced[0]));
    MFSDP_TRY(mfsdp__sim_repeat(sim, sim->ask.materialize_count, &out->materialize_us,
                                sim->materialize, &sim->sliced[0]));
  }
  MFSDP_TRY(
      mfsdp__sim_units(sim, MFSDP_LAYOUT_REDUCE, &out->reduce_us, sim->reduce, &sim->sliced[1]));
  MFSDP_TRY(
      mfsdp__sim_repeat(sim, sim->ask.reduce_count, &out->reduce_us, sim->reduce, &sim->sliced[1]));
  if (sim->ask.strategy == MFSDP_SIM_ZERO1)
    MFSDP_TRY(mfsdp__sim_units(sim, MFSDP_LAYOUT_GATHER, &out->optimizer_wire_us, sim->optimizer,
                               &sim->sliced[2]));
  if (sim->ask.strategy == MFSDP_SIM_REPLICATED)
    MFSDP_TRY(mfsdp__sim_sums(sim, &out->reduce_us, sim->reduce));
  return MFSDP_OK;
}

/* What BANDED matrices of the plan send to be updated. */
MFSDP_API mfsdp_status mfsdp__sim_bands(mfsdp__sim *sim) {
  int32_t count, i, banded = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(sim->ask.plan, -1, &count);
  for (i = 0; i < count && !banded; ++i)
    banded = pieces[i].placement == MFSDP_PLACEMENT_BANDED;
  if (!banded) return MFSDP_OK;
  if (sim->ask.banded_everywhere)
    return mfsdp__sim_bands_gather(sim->context, &sim->ask, sim->segments,
                                   &sim->out->optimizer_wire_us, sim->optimizer);
  return mfsdp__sim_homes_exchange(sim->context, sim->ask.plan, sim->ask.cluster,
                                   &sim->out->optimizer_wire_us, sim->optimizer);
}

MFSDP_API double mfsdp__sim_verdict_us(const mfsdp__sim *sim) {
  const mfsdp_cluster *c = sim->ask.cluster;
  const int64_t ranks = (int64_t)sim->world * sim->ask.replica_count;
  const double a = ranks > c->ranks_per_node ? c->net_latency_us : c->node_latency_us;
  int64_t reached;
  double us = 0.0;
  for (reached = 1; reached < ranks; reached *= 2)
    us += a;
  return us;
}

MFSDP_API mfsdp_status mfsdp__sim_run(mfsdp__sim *sim) {
  mfsdp_sim_result *out = sim->out;
  MFSDP_TRY(mfsdp__sim_alloc(sim));
  mfsdp__sim_residents(sim);
  MFSDP_TRY(mfsdp__sim_traffic(sim));
  MFSDP_TRY(mfsdp__sim_replicas(sim));
  MFSDP_TRY(mfsdp__sim_update(sim));
  MFSDP_TRY(mfsdp__sim_bands(sim));
  MFSDP_TRY(mfsdp__sim_spread(sim, sim->materialize, sim->sliced[0], &out->materialize_nbytes));
  MFSDP_TRY(mfsdp__sim_spread(sim, sim->reduce, sim->sliced[1], &out->reduce_nbytes));
  MFSDP_TRY(mfsdp__sim_spread(sim, sim->optimizer, sim->sliced[2], &out->optimizer_nbytes));
  MFSDP_TRY(mfsdp__sim_spread(sim, sim->resident, 0, &out->resident_nbytes));
  out->optimizer_us =
      out->optimizer_compute_us + out->optimizer_wire_us + mfsdp__sim_verdict_us(sim);
  out->model_us = mfsdp__sim_us(sim->ask.model_flops, sim->ask.cluster->flops_per_s);
  out->step_us = out->materialize_us + out->reduce_us + out->model_us + out->optimizer_us;
  out->overlapped_us =
      mfsdp__sim_max(out->model_us, out->materialize_us + out->reduce_us) + out->optimizer_us;
  return MFSDP_OK;
}

/* OWNER is the plan as it is. The others are asked of a plan whose matrices lie whole on owners: what
 * else a matrix may do is a strategy of its own there. */
MFSDP_API mfsdp_status mfsdp__sim_check_plan(mfsdp_context *context, const mfsdp_sim_desc *desc) {
  int32_t count, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(desc->plan, -1, &count);
  for (i = 0; i < count; ++i)
    if (pieces[i].placement == MFSDP_PLACEMENT_REPLICATED ||
        (pieces[i].placement == MFSDP_PLACEMENT_BANDED && desc->strategy != MFSDP_SIM_OWNER))
      return MFSDP_FAIL(
          context, MFSDP_E_UNSUPPORTED,
          "simulate: params[%d] '%.100s' is %s in the plan, strategy %s needs owned%s",
          (int)pieces[i].param, mfsdp_plan_param(desc->plan, pieces[i].param)->name,
          mfsdp_placement_name(pieces[i].placement), mfsdp_sim_strategy_name(desc->strategy),
          desc->strategy == MFSDP_SIM_OWNER ? " or banded" : "");
  return MFSDP_OK;
}

/*
 * Predicts one step. *result must come from mfsdp_sim_result_default. ranks: receives the first
 * min(capacity, world) ranks; NULL if capacity is 0. A pure function of its arguments; complete on
 * return. E_ARGUMENT names what is wrong, E_UNSUPPORTED a parameter whose placement in the plan the
 * strategy cannot have: OWNED always may be, BANDED by OWNER alone, REPLICATED never.
 * E_OVERFLOW if bytes or operations pass 64 bits; E_MEMORY.
 * Scratch of O(world) is given back, with bands O(world + pieces). O(pieces + units * world) time;
 * banded_everywhere adds O(matrices * world).
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_simulate(mfsdp_context *context,
                                                    const mfsdp_sim_desc *desc,
                                                    mfsdp_sim_result *result, mfsdp_sim_rank *ranks,
                                                    int32_t capacity) {
  mfsdp__sim sim;
  mfsdp_status status;
  int32_t r;
  MFSDP_TRY(mfsdp_sim_desc_validate(context, desc));
  MFSDP_TRY(mfsdp__sim_check_plan(context, desc));
  if (result == NULL || capacity < 0 || (ranks == NULL && capacity > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: result and room for capacity %d are needed", (int)capacity);
  if (result->struct_nbytes != sizeof(*result))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: result.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_sim_result_default)",
                      result->struct_nbytes, sizeof(*result));
  memset(&sim, 0, sizeof(sim));
  sim.context = context;
  sim.ask = *desc;
  sim.out = result;
  sim.world = mfsdp_plan_world(desc->plan);
  *result = mfsdp_sim_result_default();
  status = mfsdp__sim_run(&sim);
  for (r = 0; status == MFSDP_OK && r < sim.world && r < capacity; ++r) {
    ranks[r].materialize_nbytes = sim.materialize[r];
    ranks[r].reduce_nbytes = sim.reduce[r];
    ranks[r].optimizer_nbytes = sim.optimizer[r];
    ranks[r].resident_nbytes = sim.resident[r];
    ranks[r].optimizer_us = sim.busy[r];
  }
  mfsdp__sim_free(&sim);
  return status;
}

#endif /* MFSDP_SIMULATE_STEP_H */
