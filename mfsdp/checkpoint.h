/* SPDX-License-Identifier: MIT */
/*
 * checkpoint.h - saves a runtime as safetensors files that any tool reads and any number of ranks
 * loads.
 *
 *   mfsdp_io io = mfsdp_io_posix();                          // posix/io_posix.h
 *   mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
 *   desc.io = &io;  desc.folder = "run1";  desc.keep_last = 3;
 *   MFSDP_TRY(mfsdp_checkpoint_create(rt, &desc, &ck));
 *   ...
 *   MFSDP_TRY(mfsdp_checkpoint_save(ck, strings, count));            // run1/step-1200/
 *
 * and in a new process, with another world, planner or transport
 *
 *   mfsdp_checkpoint_load_desc load = mfsdp_checkpoint_load_desc_default();
 *   mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
 *   MFSDP_TRY(mfsdp_checkpoint_load(ck, &load, &loaded));            // goes on with the same bits
 *
 * A checkpoint is a folder: model.safetensors with whole tensors under the parameters' names (their
 * compute dtype), one set of files for each kind of optimizer state
 * (optimizer.exp_avg.safetensors, key "<parameter>.exp_avg"), fp32 masters where the compute dtype
 * is another (optimizer.master.safetensors), an index beside each, and state.safetensors, whose
 * metadata has the step counts and hyperparameters. Large sets are cut into several files. The bytes
 * depend on none of ranks, planner, transport, groups and replicas.
 *
 * A save is all or nothing, also under kill -9 and loss of power: files and folders are synced, the
 * folder gets its name last, and then `latest` names it. With desc.background a save can be written
 * by another thread while training goes on (api.h, background.h).
 *
 *   api.h   saves                      background.h  while training goes on
 *   save.h  the phases of a save       load.h, open.h  of a load      folder.h  names, latest
 *   desc.h  descriptions               tables.h        files, runs    state.h   step counts
 *   share.h the tensors of all groups  agree.h         one verdict    records.h, object.h
 * With several groups a checkpoint is the union of their parameters; of replicas one writes, all
 * read.
 * Does not: write to memory that is not a file system (io.h is the place for that).
 * Link flags: -lm.
 */
#ifndef MFSDP_CHECKPOINT_H
#define MFSDP_CHECKPOINT_H

#include "checkpoint/agree.h"
#include "checkpoint/api.h"
#include "checkpoint/background.h"
#include "checkpoint/create.h"
#include "checkpoint/desc.h"
#include "checkpoint/folder.h"
#include "checkpoint/job.h"
#include "checkpoint/load.h"
#include "checkpoint/object.h"
#include "checkpoint/open.h"
#include "checkpoint/records.h"
#include "checkpoint/save.h"
#include "checkpoint/share.h"
#include "checkpoint/state.h"
#include "checkpoint/tables.h"

#endif /* MFSDP_CHECKPOINT_H */
