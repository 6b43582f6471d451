/* SPDX-License-Identifier: MIT */
/*
 * checkpoint/share.h - all ranks learn of the tensors of all groups. Private to checkpoint.h.
 *
 * Every rank knows group 0. Of each instance of another group, its first rank tells: in rounds, the
 * lowest rank that still has something to say is heard by all. Control messages are small, and all of
 * this happens once.
 * Link flags: none.
 */
#ifndef MFSDP_CHECKPOINT_SHARE_H
#define MFSDP_CHECKPOINT_SHARE_H

#include "agree.h"

#define MFSDP__CK_PARCEL_NBYTES 4000

typedef struct mfsdp__ck_parcel {
  int32_t from; /* which of all ranks */
  uint32_t nbytes;
  unsigned char data[MFSDP__CK_PARCEL_NBYTES];
} mfsdp__ck_parcel;

/* What this rank has to tell. */
MFSDP_API void mfsdp__ck_put_told(mfsdp__ck_writer *writer, const mfsdp_checkpoint *ck) {
  int32_t g;
  for (g = 1; g < ck->rt->group_count; ++g)
    if (ck->rt->groups[g].rank == 0 && ck->rt->groups[g].replica_rank == 0)
      mfsdp__ck_put_records(writer, ck, g);
}

/* A parcel becomes the first of one control plane's that is not empty. */
MFSDP_API mfsdp_status mfsdp__ck_hear(mfsdp_checkpoint *ck, const mfsdp_control *control,
                                      mfsdp__ck_parcel *parcel, mfsdp__ck_parcel *all) {
  int32_t r = 0;
  MFSDP_TRY(control->ops->allgather(control->self, ck->context, parcel, sizeof(*parcel), all,
                                    control->deadline_us));
  while (r < control->world - 1 && all[r].nbytes == 0)
    ++r;
  *parcel = all[r];
  return MFSDP_OK;
}

/* Fills ck->records up to their capacity. `told`: this rank's; `all`: room for parcels. */
MFSDP_API mfsdp_status mfsdp__ck_exchange(mfsdp_checkpoint *ck, const mfsdp__ck_writer *told,
                                          mfsdp__ck_parcel *all) {
  const mfsdp__group_entry *group = &ck->rt->groups[0];
  mfsdp__ck_parcel parcel;
  size_t done = 0;
  memset(&parcel, 0, sizeof(parcel));
  while (ck->records_nbytes < ck->records_capacity) {
    const size_t left = told->nbytes - done;
    parcel.from = ck->rank;
    parcel.nbytes = (uint32_t)(left < sizeof(parcel.data) ? left : sizeof(parcel.data));
    if (parcel.nbytes > 0) memcpy(parcel.data, told->data + done, parcel.nbytes);
    MFSDP_TRY(mfsdp__ck_hear(ck, group->control, &parcel, all));
    if (group->replica != NULL) MFSDP_TRY(mfsdp__ck_hear(ck, group->replica_control, &parcel, all));
    if (parcel.nbytes == 0 || parcel.nbytes > ck->records_capacity - ck->records_nbytes)
      return MFSDP_FAIL(ck->context, MFSDP_E_MISMATCH,
                        "checkpoint: ranks told %zu bytes of their groups, announced %zu",
                        ck->records_nbytes + parcel.nbytes, ck->records_capacity);
    if (parcel.from == ck->rank) done += parcel.nbytes;
    memcpy(ck->records + ck->records_nbytes, parcel.data, parcel.nbytes);
    ck->records_nbytes += parcel.nbytes;
  }
  return MFSDP_OK;
}

/* Room for the records of all groups, with those of group 0 in it. */
MFSDP_API mfsdp_status mfsdp__ck_alloc_records(mfsdp_checkpoint *ck, size_t others_nbytes) {
  mfsdp__ck_writer writer;
  void *memory;
  memset(&writer, 0, sizeof(writer));
  mfsdp__ck_put_records(&writer, ck, 0);
  MFSDP_TRY(mfsdp_table_alloc(ck->context, writer.nbytes + others_nbytes, 1,
                              "tensors of a checkpoint", &memory));
  ck->records = writer.data = (unsigned char *)memory;
  ck->records_capacity = writer.nbytes + others_nbytes;
  writer.nbytes = 0;
  if (memory != NULL) mfsdp__ck_put_records(&writer, ck, 0);
  ck->records_nbytes = writer.nbytes;
  return MFSDP_OK;
}

/* The rest of share, with tables of its own. */
MFSDP_API mfsdp_status mfsdp__ck_share_rest(mfsdp_checkpoint *ck, mfsdp__ck_writer *told,
                                            size_t others_nbytes) {
  const int64_t deadline_us = ck->rt->groups[0].control->deadline_us;
  const size_t told_nbytes = told->nbytes, parcels = (size_t)ck->message_count;
  mfsdp__ck_message own = mfsdp__ck_message_default();
  void *data = NULL, *all = NULL;
  mfsdp_status status = mfsdp__ck_alloc_records(ck, others_nbytes);
  if (status == MFSDP_OK)
    status = mfsdp_table_alloc(ck->context, told_nbytes, 1, "what a rank tells", &data);
  if (status == MFSDP_OK)
    status = mfsdp_table_alloc(ck->context, parcels, sizeof(mfsdp__ck_parcel), "parcels", &all);
  status = mfsdp__ck_agree_within(ck, status, &own, deadline_us);
  if (status == MFSDP_OK) {
    told->data = (unsigned char *)data;
    told->nbytes = 0;
    if (data != NULL) mfsdp__ck_put_told(told, ck);
    status = mfsdp__ck_exchange(ck, told, (mfsdp__ck_parcel *)all);
  }
  mfsdp_table_free(ck->context, all, parcels, sizeof(mfsdp__ck_parcel));
  mfsdp_table_free(ck->context, data, told_nbytes, 1);
  return status;
}

/*
 * Fills ck->records. `status`: how this rank did so far; with several groups, one that failed is
 * known to all afterwards.
 */
MFSDP_API mfsdp_status mfsdp__ck_share(mfsdp_checkpoint *ck, mfsdp_status status) {
  mfsdp__ck_message own = mfsdp__ck_message_default();
  mfsdp__ck_writer told;
  if (ck->rt->group_count == 1) return status != MFSDP_OK ? status : mfsdp__ck_alloc_records(ck, 0);
  memset(&told, 0, sizeof(told));
  mfsdp__ck_put_told(&told, ck);
  own.value = (int64_t)told.nbytes;
  MFSDP_TRY(mfsdp__ck_agree_within(ck, status, &own, ck->rt->groups[0].control->deadline_us));
  return mfsdp__ck_share_rest(ck, &told, (size_t)ck->told.value);
}

#endif /* MFSDP_CHECKPOINT_SHARE_H */
