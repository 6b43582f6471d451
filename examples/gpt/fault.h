/* SPDX-License-Identifier: MIT */
/*
 * fault.h - for tests of failure: a process that fails where it is told to.
 *
 *   MFSDP_TEST_FAULT='1 kill reduce unit 2' mpirun -n 4 train_gpt --transport mpi ...
 *
 * Rank 1 is killed (or `stop`: stopped by SIGSTOP; `leave`: ends its links and exits with 0) at the
 * first begin of the phase with this label, as --trace shows it. Nothing in the environment: nothing
 * happens. Meant for ranks that are processes.
 */
#ifndef GPT_FAULT_H
#define GPT_FAULT_H

#include "mfsdp/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

/* At the begin of a phase of `rank`. */
void gpt_fault_at(int32_t rank, const char *label, mfsdp_context *context,
                  const mfsdp_control *control);

#ifdef __cplusplus
}
#endif

#endif /* GPT_FAULT_H */
