/* SPDX-License-Identifier: MIT */
/*
 * mpi.h - ranks that are processes: MPI's start and end, and a rank's links over it. In a build
 * without MPI, gpt_mpi_start says so and nothing else is called.
 */
#ifndef GPT_MPI_H
#define GPT_MPI_H

#include "matrixfsdp.h"

#include "error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gpt_mpi gpt_mpi;

/* Initializes MPI and makes a world of all its processes, with this deadline and so many batches
 * that may be queued at a time. Collective. */
int gpt_mpi_start(int64_t deadline_us, int32_t batch_count, gpt_mpi **out, gpt_error *error);
int32_t gpt_mpi_rank(const gpt_mpi *mpi);
int32_t gpt_mpi_size(const gpt_mpi *mpi);
/* NULL if queues may have threads of their own, else why not. */
const char *gpt_mpi_no_threads(const gpt_mpi *mpi);
/* Control plane and transport of this process; each to be ended with its ops->destroy. */
mfsdp_status gpt_mpi_control(gpt_mpi *mpi, mfsdp_context *context, mfsdp_control *control);
mfsdp_status gpt_mpi_transport(gpt_mpi *mpi, mfsdp_context *context, const mfsdp_backend *backend,
                               mfsdp_transport *transport);
/* Tells the peers of a failure that is not the transport's own. */
void gpt_mpi_poison(gpt_mpi *mpi, const mfsdp_error *why);
/* Ends MPI, after the links. A failed run leaves by MPI_Abort, since peers may be gone, a second
 * later, so that they have said what they know; the call then does not come back. */
void gpt_mpi_stop(gpt_mpi *mpi, int status);

#ifdef __cplusplus
}
#endif

#endif /* GPT_MPI_H */
