/* SPDX-License-Identifier: MIT */
#include "mpi.h"

#if MFSDP_EXAMPLE_MPI

#include "mfsdp/mpi/transport_mpi.h"

#include <stdlib.h>

struct gpt_mpi {
  mfsdp_context context; /* of the world's own memory */
  mfsdp_mpi_world *world;
};

int gpt_mpi_start(int64_t deadline_us, int32_t batch_count, gpt_mpi **out, gpt_error *error) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_mpi_world_desc desc = mfsdp_mpi_world_desc_default();
  gpt_mpi *mpi = (gpt_mpi *)calloc(1, sizeof(*mpi));
  int level = 0;
  *out = NULL;
  if (mpi == NULL) return gpt_fail(error, "out of memory for MPI");
  if (MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level) != MPI_SUCCESS) {
    free(mpi);
    return gpt_fail(error, "MPI did not start; run the program with mpirun");
  }
  desc.deadline_us = deadline_us;
  desc.batch_count = batch_count;
  if (mfsdp_context_init(&mpi->context, &context_desc) != MFSDP_OK ||
      mfsdp_mpi_world_wrap(&mpi->context, MPI_COMM_WORLD, &desc, &mpi->world) != MFSDP_OK) {
    (void)gpt_fail(error, "%s", mfsdp_context_error(&mpi->context)->message);
    free(mpi);
    return GPT_USAGE_ERROR;
  }
  *out = mpi;
  return GPT_OK;
}

int32_t gpt_mpi_rank(const gpt_mpi *mpi) {
  return mpi->world->rank;
}

int32_t gpt_mpi_size(const gpt_mpi *mpi) {
  return mpi->world->world;
}

const char *gpt_mpi_no_threads(const gpt_mpi *mpi) {
  const char *reason = NULL;
  (void)mfsdp_mpi_world_threads(mpi->world, &reason);
  return reason;
}

mfsdp_status gpt_mpi_control(gpt_mpi *mpi, mfsdp_context *context, mfsdp_control *control) {
  return mfsdp_mpi_control_create(context, mpi->world, control);
}

mfsdp_status gpt_mpi_transport(gpt_mpi *mpi, mfsdp_context *context, const mfsdp_backend *backend,
                               mfsdp_transport *transport) {
  return mfsdp_mpi_transport_create(context, mpi->world, backend, transport);
}

void gpt_mpi_poison(gpt_mpi *mpi, const mfsdp_error *why) {
  mfsdp_mpi_world_poison(mpi->world, why);
}

void gpt_mpi_stop(gpt_mpi *mpi, int status) {
  if (mpi == NULL) return;
  if (status != GPT_OK) {
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000000);
    (void)MPI_Abort(MPI_COMM_WORLD, status);
  }
  (void)mfsdp_mpi_world_destroy(&mpi->context, mpi->world);
  (void)mfsdp_context_destroy(&mpi->context);
  free(mpi);
  (void)MPI_Finalize();
}

#else

int gpt_mpi_start(int64_t deadline_us, int32_t batch_count, gpt_mpi **out, gpt_error *error) {
  (void)deadline_us, (void)batch_count;
  *out = NULL;
  return gpt_fail(error, "--transport mpi: not in this build");
}

int32_t gpt_mpi_rank(const gpt_mpi *mpi) {
  (void)mpi;
  return 0;
}

int32_t gpt_mpi_size(const gpt_mpi *mpi) {
  (void)mpi;
  return 1;
}

const char *gpt_mpi_no_threads(const gpt_mpi *mpi) {
  (void)mpi;
  return NULL;
}

mfsdp_status gpt_mpi_control(gpt_mpi *mpi, mfsdp_context *context, mfsdp_control *control) {
  (void)mpi, (void)control;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "MPI: not in this build");
}

mfsdp_status gpt_mpi_transport(gpt_mpi *mpi, mfsdp_context *context, const mfsdp_backend *backend,
                               mfsdp_transport *transport) {
  (void)mpi, (void)backend, (void)transport;
  return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "MPI: not in this build");
}

void gpt_mpi_poison(gpt_mpi *mpi, const mfsdp_error *why) {
  (void)mpi, (void)why;
}

void gpt_mpi_stop(gpt_mpi *mpi, int status) {
  (void)mpi, (void)status;
}

#endif
