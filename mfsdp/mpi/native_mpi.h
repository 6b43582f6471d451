/* SPDX-License-Identifier: MIT */
/*
 * native_mpi.h - native collectives by MPI's own non-blocking ones. Part of transport_mpi.h.
 *
 * Where every rank has at most one part, and none is longer than the world's message_nbytes, one
 * MPI_Iallgatherv (parts anywhere) or one MPI_Ireduce_scatter (parts in rank order without gaps)
 * moves them all; otherwise each part has MPI_Ibcasts or MPI_Ireduces of its own, in pieces of
 * message_nbytes, a few of them at a time. Gathers are in place. 16-bit sums are rounded at every
 * addition. With a check word the ranks first compare theirs.
 * Progress shows when a call ends: the deadline must be longer than the time of one. MPI does not
 * tell whom a collective waits for: a time-out names the ranks that do not answer.
 * Does not: cancel a collective (MPI cannot): after a failure what MPI does not give back stays with
 * it, as of batches.
 */
#ifndef MFSDP_MPI_NATIVE_MPI_H
#define MFSDP_MPI_NATIVE_MPI_H

#include "../dtype.h"
#include "mpi_world.h"

/* Calls that may be open at a time. */
#define MFSDP__MPI_NATIVE_WINDOW 4
/* What native_prepare decides. */
enum { MFSDP__MPI_EACH = 1, MFSDP__MPI_TOGETHER };

/* Compared before a collective, or sent ahead of a transfer, when ranks check. */
typedef struct mfsdp__mpi_head {
  uint64_t check, nbytes;
} mfsdp__mpi_head;

/* What a transport needs for its native collectives; they run one after the other. */
typedef struct mfsdp__mpi_native_tables {
  int *counts, *firsts;   /* world */
  mfsdp__mpi_head *heads; /* world + 1: of all ranks, and of this one */
  MPI_Op sums[2];         /* of bf16 and f16, made when they are asked for */
} mfsdp__mpi_native_tables;

typedef struct mfsdp__mpi_native {
  mfsdp_native_args args;
  uint64_t number;                                /* of this world's native collectives, from 1 */
  int32_t compared;                               /* check words are equal, or there are none */
  int32_t part;                                   /* the next call's */
  int64_t done;                                   /* elements of it that earlier calls have */
  MPI_Request requests[MFSDP__MPI_NATIVE_WINDOW]; /* a ring, in the order of the calls */
  int32_t oldest, open_count;
} mfsdp__mpi_native;

/* ---- set-up ---- */

MFSDP_API MPI_Datatype mfsdp__mpi_datatype(mfsdp_dtype dtype) {
  return dtype == MFSDP_F32 ? MPI_FLOAT : dtype == MFSDP_F64 ? MPI_DOUBLE : MPI_UINT16_T;
}

MFSDP_API void mfsdp__mpi_add_bf16(void *in, void *inout, int *count, MPI_Datatype *datatype) {
  const uint16_t *x = (const uint16_t *)in;
  uint16_t *sum = (uint16_t *)inout;
  int i;
  (void)datatype;
  for (i = 0; i < *count; ++i)
    sum[i] = mfsdp_bf16_from_f32(mfsdp_f32_from_bf16(sum[i]) + mfsdp_f32_from_bf16(x[i]));
}

MFSDP_API void mfsdp__mpi_add_f16(void *in, void *inout, int *count, MPI_Datatype *datatype) {
  const uint16_t *x = (const uint16_t *)in;
  uint16_t *sum = (uint16_t *)inout;
  int i;
  (void)datatype;
  for (i = 0; i < *count; ++i)
    sum[i] = mfsdp_f16_from_f32(mfsdp_f32_from_f16(sum[i]) + mfsdp_f32_from_f16(x[i]));
}

MFSDP_API MPI_Op mfsdp__mpi_native_op(const mfsdp__mpi_native_tables *tables, mfsdp_dtype dtype) {
  return dtype == MFSDP_F32 ? MPI_SUM : tables->sums[dtype == MFSDP_F16];
}

/* MPI can add this dtype from now on. */
MFSDP_API int mfsdp__mpi_native_make_op(mfsdp__mpi_native_tables *tables, mfsdp_dtype dtype) {
  const int index = dtype == MFSDP_F16;
  if (dtype == MFSDP_F32 || tables->sums[index] != MPI_OP_NULL) return MPI_SUCCESS;
  return MPI_Op_create(index ? mfsdp__mpi_add_f16 : mfsdp__mpi_add_bf16, 1, &tables->sums[index]);
}

/* At most one part for each rank, no longer than a message, and all within an int's reach. A
 * reduction's stand in rank order without gaps, as MPI_Ireduce_scatter wants them. */
MFSDP_API int32_t mfsdp__mpi_native_form(const mfsdp_native_args *args, size_t message_nbytes) {
  const int64_t most = (int64_t)(message_nbytes / mfsdp_dtype_nbytes(args->dtype));
  int32_t i;
  for (i = 0; i < args->part_count; ++i) {
    const mfsdp_native_part *part = &args->parts[i], *before = part - (i > 0);
    if (part->count > most || part->unit_offset > INT_MAX - part->count) return MFSDP__MPI_EACH;
    if (i == 0) continue;
    if (part->owner == before->owner) return MFSDP__MPI_EACH;
    if (args->kind == MFSDP_NATIVE_REDUCE &&
        part->unit_offset != before->unit_offset + before->count)
      return MFSDP__MPI_EACH;
  }
  return MFSDP__MPI_TOGETHER;
}

MFSDP_API mfsdp_status mfsdp__mpi_native_tables_alloc(mfsdp_context *context,
                                                      mfsdp__mpi_native_tables *tables,
                                                      int32_t world) {
  const size_t count = (size_t)world;
  void *table;
  tables->sums[0] = tables->sums[1] = MPI_OP_NULL;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int), "mpi transport: counts", &table));
  tables->counts = (int *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count, sizeof(int), "mpi transport: offsets", &table));
  tables->firsts = (int *)table;
  MFSDP_TRY(mfsdp_table_alloc(context, count + 1, sizeof(mfsdp__mpi_head), "mpi transport: checks",
                              &table));
  tables->heads = (mfsdp__mpi_head *)table;
  return MFSDP_OK;
}

MFSDP_API void mfsdp__mpi_native_tables_free(mfsdp_context *context,
                                             mfsdp__mpi_native_tables *tables, int32_t world) {
  const size_t count = (size_t)world;
  int ended = 0, i;
  (void)MPI_Finalized(&ended);
  for (i = 0; i < 2 && !ended && tables->heads != NULL; ++i)
    if (tables->sums[i] != MPI_OP_NULL) (void)MPI_Op_free(&tables->sums[i]);
  mfsdp_table_free(context, tables->heads, count + 1, sizeof(mfsdp__mpi_head));
  mfsdp_table_free(context, tables->firsts, count, sizeof(int));
  mfsdp_table_free(context, tables->counts, count, sizeof(int));
}

/* ---- calls ---- */

MFSDP_API int mfsdp__mpi_native_gather_each(const mfsdp__mpi_native *n,
                                            const mfsdp_mpi_world *world,
                                            const mfsdp_native_part *part, int count,
                                            MPI_Request *request) {
  const size_t nbytes = mfsdp_dtype_nbytes(n->args.dtype);
  unsigned char *full = (unsigned char *)n->args.dst;
  return MPI_Ibcast(full + (size_t)(part->unit_offset + n->done) * nbytes, count,
                    mfsdp__mpi_datatype(n->args.dtype), part->owner, world->data, request);
}

MFSDP_API int mfsdp__mpi_native_reduce_each(const mfsdp__mpi_native *n,
                                            const mfsdp_mpi_world *world,
                                            const mfsdp__mpi_native_tables *tables,
                                            const mfsdp_native_part *part, int count,
                                            MPI_Request *request) {
  const size_t nbytes = mfsdp_dtype_nbytes(n->args.dtype);
  const unsigned char *full = (const unsigned char *)n->args.src;
  unsigned char *sum = NULL;
  if (part->owner == world->rank)
    sum = (unsigned char *)n->args.dst + (size_t)(part->shard_offset + n->done) * nbytes;
  return MPI_Ireduce(full + (size_t)(part->unit_offset + n->done) * nbytes, sum, count,
                     mfsdp__mpi_datatype(n->args.dtype),
                     mfsdp__mpi_native_op(tables, n->args.dtype), part->owner, world->data,
                     request);
}

/* The next piece of the next part. */
MFSDP_API int mfsdp__mpi_native_post_each(mfsdp__mpi_native *n, const mfsdp_mpi_world *world,
                                          const mfsdp__mpi_native_tables *tables,
                                          MPI_Request *request) {
  const mfsdp_native_part *part = &n->args.parts[n->part];
  const int64_t most = (int64_t)(world->desc.message_nbytes / mfsdp_dtype_nbytes(n->args.dtype));
  const int64_t left = part->count - n->done, count = left < most ? left : most;
  const int code = n->args.kind == MFSDP_NATIVE_GATHER
                       ? mfsdp__mpi_native_gather_each(n, world, part, (int)count, request)
                       : mfsdp__mpi_native_reduce_each(n, world, tables, part, (int)count, request);
  n->done += count;
  if (n->done == part->count) {
    ++n->part;
    n->done = 0;
  }
  return code;
}

/* All parts in one call. */
MFSDP_API int mfsdp__mpi_native_post_together(mfsdp__mpi_native *n, const mfsdp_mpi_world *world,
                                              const mfsdp__mpi_native_tables *tables,
                                              MPI_Request *request) {
  const MPI_Datatype datatype = mfsdp__mpi_datatype(n->args.dtype);
  const size_t nbytes = mfsdp_dtype_nbytes(n->args.dtype);
  const size_t first = (size_t)n->args.parts[0].unit_offset * nbytes;
  unsigned char *sum = NULL;
  int32_t i;
  memset(tables->counts, 0, (size_t)world->world * sizeof(int));
  memset(tables->firsts, 0, (size_t)world->world * sizeof(int));
  for (i = 0; i < n->args.part_count; ++i) {
    const mfsdp_native_part *part = &n->args.parts[i];
    tables->counts[part->owner] = (int)part->count;
    tables->firsts[part->owner] = (int)part->unit_offset;
    if (part->owner == world->rank && n->args.kind == MFSDP_NATIVE_REDUCE)
      sum = (unsigned char *)n->args.dst + (size_t)part->shard_offset * nbytes;
  }
  n->part = n->args.part_count;
  if (n->args.kind == MFSDP_NATIVE_GATHER)
    return MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, n->args.dst, tables->counts,
                           tables->firsts, datatype, world->data, request);
  return MPI_Ireduce_scatter((const unsigned char *)n->args.src + first, sum, tables->counts,
                             datatype, mfsdp__mpi_native_op(tables, n->args.dtype), world->data,
                             request);
}

/* The next call of the collective. */
MFSDP_API int mfsdp__mpi_native_post(mfsdp__mpi_native *n, const mfsdp_mpi_world *world,
                                     const mfsdp__mpi_native_tables *tables) {
  const int32_t place = (n->oldest + n->open_count) % MFSDP__MPI_NATIVE_WINDOW;
  MPI_Request *request = &n->requests[place];
  mfsdp__mpi_head *own = &tables->heads[world->world];
  *request = MPI_REQUEST_NULL;
  ++n->open_count;
  if (!n->compared) {
    own->check = n->args.check;
    own->nbytes = (uint64_t)n->args.part_count;
    return MPI_Iallgather(own, (int)sizeof(*own), MPI_BYTE, tables->heads, (int)sizeof(*own),
                          MPI_BYTE, world->data, request);
  }
  return n->args.form == MFSDP__MPI_TOGETHER
             ? mfsdp__mpi_native_post_together(n, world, tables, request)
             : mfsdp__mpi_native_post_each(n, world, tables, request);
}

/* Every rank sees the same words, so all find the same first difference. */
MFSDP_API mfsdp_status mfsdp__mpi_native_compare(const mfsdp__mpi_native *n,
                                                 const mfsdp_mpi_world *world,
                                                 const mfsdp__mpi_native_tables *tables,
                                                 mfsdp_error *why) {
  const mfsdp__mpi_head *heads = tables->heads;
  int32_t r;
  for (r = 1; r < world->world; ++r)
    if (heads[r].check != heads[0].check || heads[r].nbytes != heads[0].nbytes)
      return MFSDP_ERROR_SET(
          why, MFSDP_E_MISMATCH, -1,
          "%s: rank 0 is in native operation %016llx, rank %d in %016llx: not the "
          "same operation",
          n->args.label, (unsigned long long)heads[0].check, (int)r,
          (unsigned long long)heads[r].check);
  return MFSDP_OK;
}

/* ---- progress ---- */

MFSDP_API void mfsdp__mpi_native_begin(mfsdp__mpi_native *n, mfsdp_mpi_world *world) {
  n->number = __atomic_load_n(&world->native_count, __ATOMIC_ACQUIRE) + 1;
  n->compared = n->args.check == 0;
  n->part = n->oldest = n->open_count = 0;
  n->done = 0;
}

MFSDP_API int mfsdp__mpi_native_ended(const mfsdp__mpi_native *n) {
  return n->compared && n->open_count == 0 && n->part == n->args.part_count;
}

/* With the lock: posts what there is room for, and counts the calls that have ended. */
MFSDP_API int mfsdp__mpi_native_turn(mfsdp__mpi_native *n, const mfsdp_mpi_world *world,
                                     const mfsdp__mpi_native_tables *tables, int *ended) {
  int code = MPI_SUCCESS, flag = 1;
  while (code == MPI_SUCCESS && n->open_count < MFSDP__MPI_NATIVE_WINDOW &&
         (n->compared ? n->part < n->args.part_count : n->open_count == 0))
    code = mfsdp__mpi_native_post(n, world, tables);
  while (code == MPI_SUCCESS && n->open_count > 0) {
    code = MPI_Test(&n->requests[n->oldest], &flag, MPI_STATUS_IGNORE);
    if (!flag) break;
    n->oldest = (n->oldest + 1) % MFSDP__MPI_NATIVE_WINDOW;
    --n->open_count;
    ++*ended;
  }
  return code;
}

/* One poll. *ended: calls that did. */
MFSDP_API mfsdp_status mfsdp__mpi_native_poll(mfsdp__mpi_native *n, mfsdp_mpi_world *world,
                                              const mfsdp__mpi_native_tables *tables, int *ended,
                                              mfsdp_error *why) {
  int code;
  *ended = 0;
  mfsdp__mpi_lock(world);
  code = mfsdp__mpi_native_turn(n, world, tables, ended);
  mfsdp__mpi_unlock(world);
  if (code != MPI_SUCCESS) return mfsdp__mpi_explain(code, -1, n->args.label, why);
  if (!n->compared && n->open_count == 0) {
    MFSDP_TRY(mfsdp__mpi_native_compare(n, world, tables, why));
    n->compared = 1;
  }
  if (mfsdp__mpi_native_ended(n))
    __atomic_store_n(&world->native_count, n->number, __ATOMIC_RELEASE);
  return MFSDP_OK;
}

/* Whether a peer's part may be missing: it has not left, or left before it had this collective. */
MFSDP_API int mfsdp__mpi_native_waits_for(const mfsdp__mpi_native *n, mfsdp_mpi_world *world,
                                          int32_t peer) {
  if (peer == world->rank || mfsdp__mpi_native_ended(n)) return 0;
  return mfsdp__mpi_left_us(world, peer) == 0 || mfsdp__mpi_left_natives(world, peer) < n->number;
}

/* Tests what is open once more: how many calls still are. With the lock. */
MFSDP_API int mfsdp__mpi_native_still_open(mfsdp__mpi_native *n) {
  int i, open = 0;
  for (i = 0; i < n->open_count; ++i) {
    MPI_Request *request = &n->requests[(n->oldest + i) % MFSDP__MPI_NATIVE_WINDOW];
    int flag = 1;
    if (*request != MPI_REQUEST_NULL) (void)MPI_Test(request, &flag, MPI_STATUS_IGNORE);
    open += !flag;
  }
  return open;
}

#endif /* MFSDP_MPI_NATIVE_MPI_H */
