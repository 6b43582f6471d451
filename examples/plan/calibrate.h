/* SPDX-License-Identifier: MIT */
/*
 * calibrate.h - measures the figures of mfsdp_cluster on the machine at hand, by all ranks at once,
 * as a training step uses it: ranks that share cores or a link get their share of both.
 *
 *   plan_probe probe = {&context, backend, math, &transport, &control, 0.3};
 *   plan_calibration measured;
 *   MFSDP_TRY(plan_calibrate(&probe, &measured));        // on every rank
 *   plan_cluster_write(&measured.cluster, stdout);       // what --cluster reads
 *
 * flops_per_s          matrix products of 512 x 512, one BLAS thread a rank
 * memory_nbytes_per_s  y = a x + y over 32 MB a rank: read and written bytes
 * node_, net_...       every rank sends to its next one and receives from the one before, inside
 *                      its node and between nodes: 8 bytes for the latency, then as many as take
 *                      some time for the rate. Where ranks of one kind have no pair, the figure is
 *                      that of the other kind
 * newton_schulz_flops_per_s
 *                      whole Newton-Schulz iterations as cost.h counts them, on two squares of 512
 *                      and one matrix of 2048 x 512, as a transformer's block has them: more than
 *                      flops_per_s, since symmetric products and the form for long matrices do a part
 *                      of the counted work
 * matrix_us            a Newton-Schulz of 16 x 16, whose arithmetic takes nothing
 * memory_nbytes        this machine's memory over its ranks
 *
 * Does not: look for GPUs.
 */
#ifndef PLAN_CALIBRATE_H
#define PLAN_CALIBRATE_H

#include "error.h"

#include "mfsdp/host/backend_host.h"
#include "mfsdp/simulate.h"
#include "mfsdp/transport.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct plan_probe {
  mfsdp_context *context;
  const mfsdp_backend *backend; /* of the host, queues in place */
  const mfsdp_host_math *math;
  const mfsdp_transport *transport;
  const mfsdp_control *control;
  double seconds; /* about what each figure may take */
} plan_probe;

typedef struct plan_calibration {
  mfsdp_cluster cluster;
} plan_calibration;

/* Collective; the same on every rank. COMPLETE. E_MEMORY, and what the transport says. */
mfsdp_status plan_calibrate(const plan_probe *probe, plan_calibration *out);

/* The link rate, in Mbit/s, at which this machine has the FLOP/s per byte/s of the published
 * cluster: an A100's 312 TFLOP/s (bf16) over a rank's 25 GB/s, so 12,480. */
double plan_matched_mbit(double flops_per_s);

/* plan_calibrate on `world` threads of this process, or, where `use_mpi`, on the processes of an
 * mpirun (world is then found there; *rank 0 alone has output to write). */
int plan_calibrate_threads(int32_t world, plan_calibration *out, plan_error *error);
int plan_calibrate_mpi(int32_t *world, int32_t *rank, plan_calibration *out, plan_error *error);

#ifdef __cplusplus
}
#endif

#endif /* PLAN_CALIBRATE_H */
