/* SPDX-License-Identifier: MIT */
/*
 * checkpoint.h - --checkpoint, --save-every, --keep-last, --async-save and --resume of the training
 * program: what a rank saves beside the library's own state, and where it goes on.
 */
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

#include "rank.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Makes the folder of --checkpoint, and checks that it can be written to: said now, not after the
 * training that was to be saved. Once in a process, before its ranks. */
int gpt_checkpoint_check(const gpt_options *options, gpt_error *error);

/* Makes rank->checkpoint where --checkpoint is given, and with --resume loads the latest one: then
 * rank->start_step and rank->start_block say where to go on. Collective. */
mfsdp_status gpt_checkpoint_open(gpt_rank *rank);
void gpt_checkpoint_close(gpt_rank *rank);

/* After `step` steps in all: saves if it is time to, or if it is the last one; with --async-save all
 * but the last are written meanwhile. Collective. */
mfsdp_status gpt_checkpoint_step(gpt_rank *rank, int64_t step, int is_last);

/* The sample block of a micro-batch of this rank. */
int64_t gpt_checkpoint_block(const gpt_rank *rank, int64_t step, int64_t micro_batch);

#ifdef __cplusplus
}
#endif

#endif /* GPT_CHECKPOINT_H */
