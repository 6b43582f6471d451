/* SPDX-License-Identifier: MIT */
/*
 * native_threads.h - native collectives of thread ranks. Part of transport_threads.h.
 *
 * Every rank shows its full buffer to the others. A gather copies each owner's parts straight from
 * there as the owner comes; a reduction waits until all have come, and the owner adds its parts in
 * rank order, in fp32, straight from all ranks' buffers. Nobody goes on before all have what they
 * need. Waits, deadlines and errors are those of batches (transport_threads.h).
 * Does not: go over artificial links (then it is refused at set-up).
 */
#ifndef MFSDP_HOST_NATIVE_THREADS_H
#define MFSDP_HOST_NATIVE_THREADS_H

#include "host_ops.h"
#include "threads_world.h"

/* Ranks with other parts would read beyond each other's buffers: the form of a collective is a hash
 * of all that must be equal. */
MFSDP_API int32_t mfsdp__threads_native_form(const mfsdp_native_args *args) {
  uint64_t hash = mfsdp_hash_u64(MFSDP_HASH_SEED, (uint64_t)args->kind);
  int32_t i;
  hash = mfsdp_hash_u64(hash, (uint64_t)args->dtype);
  for (i = 0; i < args->part_count; ++i) {
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].owner);
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].unit_offset);
    hash = mfsdp_hash_u64(hash, (uint64_t)args->parts[i].count);
  }
  return (int32_t)(hash & 0x7fffffffu);
}

/* ---- one rank sees another ---- */

/* Comes to the collective. Returns its number. */
MFSDP_API uint64_t mfsdp__threads_native_begin(mfsdp__threads_slot *slot,
                                               const mfsdp_native_args *args) {
  mfsdp__threads_native *native = &slot->native;
  uint64_t number;
  mfsdp_mutex_lock(&slot->mutex);
  native->full = (const unsigned char *)(args->kind == MFSDP_NATIVE_GATHER ? args->dst : args->src);
  native->check = args->check;
  native->label = args->label;
  native->form = args->form;
  number = ++native->begun;
  mfsdp_mutex_unlock(&slot->mutex);
  return number;
}

MFSDP_API void mfsdp__threads_native_done(mfsdp__threads_slot *slot) {
  mfsdp_mutex_lock(&slot->mutex);
  slot->native.done = slot->native.begun;
  mfsdp_mutex_unlock(&slot->mutex);
}

/* Wakes all others that wait in a native collective. */
MFSDP_API void mfsdp__threads_native_tell(mfsdp__threads_slot *slot) {
  mfsdp_threads_world *world = slot->world;
  int32_t r;
  for (r = 0; r < world->desc.world; ++r) {
    mfsdp__threads_slot *other = &world->slots[r];
    if (other == slot) continue;
    mfsdp_mutex_lock(&other->mutex);
    mfsdp__threads_notify_locked(other, other->waits_for == MFSDP__THREADS_THE_OTHERS);
    mfsdp_mutex_unlock(&other->mutex);
  }
}

/* 1: counted as a reader of a rank that has come to collective `number`, whose buffer then stays.
 * *seen: what it brought. */
MFSDP_API int mfsdp__threads_native_hold(mfsdp__threads_slot *other, uint64_t number,
                                         mfsdp__threads_native *seen) {
  int held;
  mfsdp_mutex_lock(&other->mutex);
  held = other->native.begun >= number && !other->native.withdrawn;
  other->native.readers += held;
  *seen = other->native;
  mfsdp_mutex_unlock(&other->mutex);
  return held;
}

MFSDP_API void mfsdp__threads_native_release(mfsdp__threads_slot *other) {
  mfsdp_mutex_lock(&other->mutex);
  --other->native.readers;
  mfsdp__threads_notify_locked(other, other->waits_for == MFSDP__THREADS_ITS_READERS &&
                                          other->native.readers == 0);
  mfsdp_mutex_unlock(&other->mutex);
}

MFSDP_API int mfsdp__threads_native_is_done(mfsdp__threads_slot *other, uint64_t number) {
  int done;
  mfsdp_mutex_lock(&other->mutex);
  done = other->native.done >= number;
  mfsdp_mutex_unlock(&other->mutex);
  return done;
}

/* After a failure: nobody reads this rank's buffer any more. A copy that has begun ends by itself. */
MFSDP_API void mfsdp__threads_native_withdraw(mfsdp__threads_slot *slot) {
  mfsdp_mutex_lock(&slot->mutex);
  slot->native.withdrawn = 1;
  slot->waits_for = MFSDP__THREADS_ITS_READERS;
  while (slot->native.readers > 0)
    (void)mfsdp_cond_wait_until(&slot->cond, &slot->mutex, MFSDP_DEADLINE_NEVER_US);
  slot->waits_for = MFSDP__THREADS_NOTHING;
  mfsdp_mutex_unlock(&slot->mutex);
}

/* Whether rank a is in a native collective to which rank b has not come. */
MFSDP_API int mfsdp__threads_native_lacks(mfsdp_threads_world *world, int32_t a, int32_t b) {
  uint64_t begun;
  int lacks;
  mfsdp_mutex_lock(&world->slots[a].mutex);
  begun =
      world->slots[a].native.done < world->slots[a].native.begun ? world->slots[a].native.begun : 0;
  mfsdp_mutex_unlock(&world->slots[a].mutex);
  mfsdp_mutex_lock(&world->slots[b].mutex);
  lacks = begun > world->slots[b].native.begun;
  mfsdp_mutex_unlock(&world->slots[b].mutex);
  return lacks;
}

/* ---- moving ---- */

MFSDP_API mfsdp_status mfsdp__threads_native_match(const mfsdp_native_args *args, int32_t rank,
                                                   int32_t peer, const mfsdp__threads_native *seen,
                                                   mfsdp_error *why) {
  if (seen->form == args->form &&
      (seen->check == args->check || seen->check == 0 || args->check == 0))
    return MFSDP_OK;
  return MFSDP_ERROR_SET(why, MFSDP_E_MISMATCH, -1,
                         "rank %d is in native \"%s\" (form %x, check %016llx), rank %d in \"%s\" "
                         "(form %x, check %016llx): not the same operation",
                         (int)peer, seen->label, (unsigned)seen->form,
                         (unsigned long long)seen->check, (int)rank, args->label,
                         (unsigned)args->form, (unsigned long long)args->check);
}

/* GATHER: the parts of one owner, from its buffer to this rank's. */
MFSDP_API void mfsdp__threads_native_copy(const mfsdp_native_args *args, int32_t owner,
                                          const unsigned char *full) {
  const size_t nbytes = mfsdp_dtype_nbytes(args->dtype);
  int32_t i;
  for (i = 0; i < args->part_count; ++i) {
    const mfsdp_native_part *part = &args->parts[i];
    const size_t at = (size_t)part->unit_offset * nbytes;
    if (part->owner == owner)
      memcpy((unsigned char *)args->dst + at, full + at, (size_t)part->count * nbytes);
  }
}

/* The sums of one part, rounded once where the dtype is narrow. terms: where the part stands in the
 * buffers of all ranks; moved on. */
MFSDP_API void mfsdp__threads_native_sum(mfsdp_dtype dtype, const void **terms, int32_t world,
                                         int64_t count, unsigned char *dst) {
  const size_t nbytes = mfsdp_dtype_nbytes(dtype);
  float sums[MFSDP__HOST_CHUNK];
  int64_t done;
  int32_t r;
  if (dtype == MFSDP_F32) {
    mfsdp__host_sum_terms((float *)(void *)dst, 1, terms, dtype, world, count);
    return;
  }
  for (done = 0; done < count; done += MFSDP__HOST_CHUNK) {
    const int64_t chunk = mfsdp__host_chunk(done, count);
    mfsdp__host_sum_terms(sums, 1, terms, dtype, world, chunk);
    mfsdp__host_cast_from_f32(dst + (size_t)done * nbytes, dtype, sums, chunk);
    for (r = 0; r < world; ++r)
      terms[r] = (const unsigned char *)terms[r] + (size_t)chunk * nbytes;
  }
}

/* REDUCE: the parts of `rank`, from the buffers of all ranks. */
MFSDP_API void mfsdp__threads_native_reduce(const mfsdp_native_args *args, int32_t rank,
                                            const unsigned char *const *fulls, const void **terms,
                                            int32_t world) {
  const size_t nbytes = mfsdp_dtype_nbytes(args->dtype);
  int32_t i, r;
  for (i = 0; i < args->part_count; ++i) {
    const mfsdp_native_part *part = &args->parts[i];
    if (part->owner != rank) continue;
    for (r = 0; r < world; ++r)
      terms[r] = fulls[r] + (size_t)part->unit_offset * nbytes;
    mfsdp__threads_native_sum(args->dtype, terms, world, part->count,
                              (unsigned char *)args->dst + (size_t)part->shard_offset * nbytes);
  }
}

#endif /* MFSDP_HOST_NATIVE_THREADS_H */
