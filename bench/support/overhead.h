/* SPDX-License-Identifier: MIT */
/*
 * overhead.h - what the runtime itself costs: a step of one rank through all runtime calls, with
 * nothing on a wire, against the same model, kernels and optimizer on parameters in place. The
 * runtime copies parameters into slots, clears and adds up gradients, takes the norm and the
 * verdict; the peer does none of it (it clears its gradients). And how many bytes a rank keeps from
 * step to step.
 */
#ifndef MFSDP_BENCH_OVERHEAD_H
#define MFSDP_BENCH_OVERHEAD_H

#include "bench.h"
#include "gpt_job.h"

#ifdef __cplusplus
extern "C" {
#endif

void bench_overhead(bench_report *report, int quick);

/* Masters, optimizer state and gradient accumulators of a rank, as its context has booked them. */
int64_t bench_resident_nbytes(const gpt_rank *rank);
/* No plan keeps less on its fullest rank: an equal share of all bytes, without padding, or the
 * largest matrix, which is not cut. */
int64_t bench_resident_bound(const gpt_rank *rank);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_OVERHEAD_H */
