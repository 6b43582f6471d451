/* SPDX-License-Identifier: MIT */
/*
 * plan/serialize.h - the canonical bytes of a plan and their hash, by which ranks agree.
 *
 *   size_t nbytes;
 *   mfsdp_plan_serialize(&context, plan, NULL, 0, &nbytes);          // query, then fill
 *   mfsdp_plan_serialize(&context, plan, buffer, nbytes, &nbytes);
 *
 * Format, version 4. Integers are little-endian two's complement, nothing is padded. A string is a
 * u32 length and its bytes.
 *   "MFSDPPLN" u32 version  u32 world  u32 planner  u32 residency  u32 param_count  u32 unit_count
 *   i64 max_resident_nbytes max_gamma_permille max_owners  (2^63 - 1: no cap)
 *   u32 allow_banded materialize_count reduce_count  i64 banded_wire_cost banded_message_nbytes
 *   u32 node_count  i32 node_of_rank[node_count]  (node_count: 0 or world)
 *   per parameter in declared order:
 *     string name  string alias_of ("" if none)  u32 ndim unit hyper_group  i64 shape[ndim]
 *     u32 role view placement compute master grad wire is_slice local_matrix_ok head_count
 *     u32 part_count  i64 part_rows[part_count]
 *     u32 piece_count, per piece: i32 matrix  u32 owner  i64 first count rows cols unit_offset
 *     shard_offset grad_unit_offset grad_shard_offset matrix_first matrix_rows  u32 placement home
 *   u64 FNV-1a hash of all bytes before it
 * Does not: read plans back.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_SERIALIZE_H
#define MFSDP_PLAN_SERIALIZE_H

#include "table.h"

/* Hashes what it is given, counts it, and keeps it where there is room. */
typedef struct mfsdp__sink {
  unsigned char *dst; /* NULL: hash and count only */
  size_t nbytes;
  uint64_t hash;
} mfsdp__sink;

MFSDP_API void mfsdp__sink_bytes(mfsdp__sink *sink, const void *data, size_t nbytes) {
  if (nbytes == 0) return;
  if (sink->dst != NULL) memcpy(sink->dst + sink->nbytes, data, nbytes);
  sink->nbytes += nbytes;
  sink->hash = mfsdp_hash_bytes(sink->hash, data, nbytes);
}

MFSDP_API void mfsdp__sink_integer(mfsdp__sink *sink, int64_t value, int nbytes) {
  unsigned char bytes[8];
  int i;
  for (i = 0; i < nbytes; ++i)
    bytes[i] = (unsigned char)((uint64_t)value >> (8 * i) & 0xffu);
  mfsdp__sink_bytes(sink, bytes, (size_t)nbytes);
}

MFSDP_API void mfsdp__sink_string(mfsdp__sink *sink, const char *text) {
  const size_t nbytes = text == NULL ? 0 : strlen(text);
  mfsdp__sink_integer(sink, (int64_t)nbytes, 4);
  mfsdp__sink_bytes(sink, text, nbytes);
}

/* What the caller said of a parameter. */
MFSDP_API void mfsdp__sink_description(mfsdp__sink *sink, const mfsdp_param *param) {
  const int32_t fields[10] = {(int32_t)param->role,      (int32_t)param->view,
                              (int32_t)param->placement, (int32_t)param->compute,
                              (int32_t)param->master,    (int32_t)param->grad,
                              (int32_t)param->wire,      param->is_slice,
                              param->local_matrix_ok,    param->head_count};
  int32_t i;
  mfsdp__sink_string(sink, param->name);
  mfsdp__sink_string(sink, param->alias_of);
  mfsdp__sink_integer(sink, param->ndim, 4);
  mfsdp__sink_integer(sink, param->unit, 4);
  mfsdp__sink_integer(sink, param->hyper_group, 4);
  for (i = 0; i < param->ndim; ++i)
    mfsdp__sink_integer(sink, param->shape[i], 8);
  for (i = 0; i < 10; ++i)
    mfsdp__sink_integer(sink, fields[i], 4);
  mfsdp__sink_integer(sink, param->part_count, 4);
  for (i = 0; i < param->part_count; ++i)
    mfsdp__sink_integer(sink, param->part_rows[i], 8);
}

/* The description, and what the planner made of it. */
MFSDP_API void mfsdp__sink_param(mfsdp__sink *sink, const mfsdp_plan *plan, int32_t index) {
  int32_t i, count;
  const mfsdp_piece *pieces = mfsdp_plan_param_pieces(plan, index, &count);
  mfsdp__sink_description(sink, &plan->params[index]);
  mfsdp__sink_integer(sink, count, 4);
  for (i = 0; i < count; ++i) {
    mfsdp__sink_integer(sink, pieces[i].matrix, 4);
    mfsdp__sink_integer(sink, pieces[i].owner, 4);
    mfsdp__sink_integer(sink, pieces[i].first, 8);
    mfsdp__sink_integer(sink, pieces[i].count, 8);
    mfsdp__sink_integer(sink, pieces[i].rows, 8);
    mfsdp__sink_integer(sink, pieces[i].cols, 8);
    mfsdp__sink_integer(sink, pieces[i].unit_offset, 8);
    mfsdp__sink_integer(sink, pieces[i].shard_offset, 8);
    mfsdp__sink_integer(sink, pieces[i].grad_unit_offset, 8);
    mfsdp__sink_integer(sink, pieces[i].grad_shard_offset, 8);
    mfsdp__sink_integer(sink, pieces[i].matrix_first, 8);
    mfsdp__sink_integer(sink, pieces[i].matrix_rows, 8);
    mfsdp__sink_integer(sink, (int64_t)pieces[i].placement, 4);
    mfsdp__sink_integer(sink, pieces[i].home, 4);
  }
}

/* All but the closing hash. */
MFSDP_API void mfsdp__sink_plan(mfsdp__sink *sink, const mfsdp_plan *plan) {
  int32_t i;
  sink->nbytes = 0;
  sink->hash = MFSDP_HASH_SEED;
  mfsdp__sink_bytes(sink, "MFSDPPLN", 8);
  mfsdp__sink_integer(sink, 4, 4);
  mfsdp__sink_integer(sink, plan->world, 4);
  mfsdp__sink_integer(sink, (int64_t)plan->planner, 4);
  mfsdp__sink_integer(sink, (int64_t)plan->residency, 4);
  mfsdp__sink_integer(sink, plan->param_count, 4);
  mfsdp__sink_integer(sink, plan->unit_count, 4);
  mfsdp__sink_integer(sink, plan->caps.max_resident_nbytes, 8);
  mfsdp__sink_integer(sink, plan->caps.max_gamma_permille, 8);
  mfsdp__sink_integer(sink, plan->caps.max_owners, 8);
  mfsdp__sink_integer(sink, plan->allow_banded, 4);
  mfsdp__sink_integer(sink, plan->materialize_count, 4);
  mfsdp__sink_integer(sink, plan->reduce_count, 4);
  mfsdp__sink_integer(sink, plan->banded_wire_cost, 8);
  mfsdp__sink_integer(sink, plan->banded_message_nbytes, 8);
  mfsdp__sink_integer(sink, (int64_t)plan->node_count, 4);
  for (i = 0; i < (int32_t)plan->node_count; ++i)
    mfsdp__sink_integer(sink, plan->node_of_rank[i], 4);
  for (i = 0; i < plan->param_count; ++i)
    mfsdp__sink_param(sink, plan, i);
}

/*
 * What a plan is made with beside its parameters. "planner", "residency", the caps, "node_of_rank"
 * and what allow_banded needs: NULL behind the last.
 */
MFSDP_API const char *mfsdp_plan_setting_name(int32_t setting) {
  static const char *const names[11] = {"planner",
                                        "residency",
                                        "caps.max_resident_nbytes",
                                        "caps.max_gamma_permille",
                                        "caps.max_owners",
                                        "node_of_rank",
                                        "allow_banded",
                                        "materialize_count",
                                        "reduce_count",
                                        "banded_wire_cost",
                                        "banded_message_nbytes"};
  return setting >= 0 && setting < 11 ? names[setting] : NULL;
}

/* Hash of one of them: the first that differs between ranks is the one to name. 0 out of range. */
MFSDP_API uint64_t mfsdp_plan_setting_hash(const mfsdp_plan *plan, int32_t setting) {
  const int64_t values[11] = {(int64_t)plan->planner,
                              (int64_t)plan->residency,
                              plan->caps.max_resident_nbytes,
                              plan->caps.max_gamma_permille,
                              plan->caps.max_owners,
                              0,
                              plan->allow_banded,
                              plan->materialize_count,
                              plan->reduce_count,
                              plan->banded_wire_cost,
                              plan->banded_message_nbytes};
  uint64_t hash = MFSDP_HASH_SEED;
  size_t i;
  if (mfsdp_plan_setting_name(setting) == NULL) return 0;
  if (setting != 5) return mfsdp_hash_u64(hash, (uint64_t)values[setting]);
  for (i = 0; i < plan->node_count; ++i)
    hash = mfsdp_hash_u64(hash, (uint64_t)plan->node_of_rank[i]);
  return hash;
}

/* Hash of one parameter, its description and its pieces: the first parameter whose hash differs
 * between ranks is the one to name. 0 out of range. */
MFSDP_API uint64_t mfsdp_plan_param_hash(const mfsdp_plan *plan, int32_t param) {
  mfsdp__sink sink;
  if (!mfsdp__plan_has_param(plan, param)) return 0;
  memset(&sink, 0, sizeof(sink));
  sink.hash = MFSDP_HASH_SEED;
  mfsdp__sink_param(&sink, plan, param);
  return sink.hash;
}

/* Hash of a parameter's description alone: a tensor that is missing or described otherwise on one
 * rank moves the pieces of all, so descriptions are what to compare first. 0 out of range. */
MFSDP_API uint64_t mfsdp_plan_description_hash(const mfsdp_plan *plan, int32_t param) {
  mfsdp__sink sink;
  if (!mfsdp__plan_has_param(plan, param)) return 0;
  memset(&sink, 0, sizeof(sink));
  sink.hash = MFSDP_HASH_SEED;
  mfsdp__sink_description(&sink, &plan->params[param]);
  return sink.hash;
}

/*
 * Writes the canonical form, the hash (as mfsdp_plan_hash gives it) in the last 8 bytes.
 * *needed_nbytes receives its length in any case but a NULL argument. dst: capacity_nbytes bytes,
 * or NULL with capacity 0 to query. E_ARGUMENT if a capacity above 0 is not enough; then nothing is
 * written to dst.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_serialize(mfsdp_context *context,
                                                          const mfsdp_plan *plan, void *dst,
                                                          size_t capacity_nbytes,
                                                          size_t *needed_nbytes) {
  mfsdp__sink sink;
  if (plan == NULL || needed_nbytes == NULL || (dst == NULL && capacity_nbytes > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan serialize: plan, needed_nbytes and room for capacity %zu are needed",
                      capacity_nbytes);
  memset(&sink, 0, sizeof(sink));
  mfsdp__sink_plan(&sink, plan);
  *needed_nbytes = sink.nbytes + 8;
  if (capacity_nbytes == 0) return MFSDP_OK;
  if (capacity_nbytes < *needed_nbytes)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan serialize: capacity is %zu bytes, needs %zu",
                      capacity_nbytes, *needed_nbytes);
  sink.dst = (unsigned char *)dst;
  mfsdp__sink_plan(&sink, plan);
  mfsdp__sink_integer(&sink, (int64_t)plan->hash, 8);
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_SERIALIZE_H */
