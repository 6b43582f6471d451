/* SPDX-License-Identifier: MIT */
/*
 * overlap.h - how much of a step's transfer time is hidden behind computation.
 *
 * Thread ranks train the example's GPT over artificial links (threads_world.h), with queues in
 * place and no prefetch (everything exposed), and with worker queues, reduce_depth 1 and
 * prefetch_depth 1 or 2. Each of the three runs with the links and without, and all six take steps
 * in turn, so that noise hits all alike. A step is measured up to its optimizer, on the slowest
 * rank; medians over the steps: T with links, T_off without. The same runtime is on both sides of
 * the difference, because prefetch also lets ranks drift apart that would otherwise wait for each
 * other: that gain is not counted here.
 *
 * Transfers take what the link says, on the wire alone: a gather latency + longest segment / rate,
 * a reduction rounds x latency + longest segment / rate, the verdict a latency. With g_u, r_u the
 * gather and reduction of unit u, f_u, b_u its forward and backward as measured in place without
 * links, and U units:
 *   transfer = sum of g_u (forward) + sum of g_u for u < U-1 (backward; the last unit stays) + sum of r_u
 *              + verdict
 *   hideable = sum over u < U-1 of min(g_(u+1), f_u) + sum over u of min(r_(u+1) + g_(u-1), b_u)
 * that is, beside each computation what can run there one unit ahead and one behind: never g_0, r_0
 * and the verdict, and little beside the embedding, which computes next to nothing.
 *   exposed  = (T - T_off) - (transfer - hideable)
 *   share hidden = 1 - exposed / hideable
 */
#ifndef MFSDP_BENCH_OVERLAP_H
#define MFSDP_BENCH_OVERLAP_H

#include "bench.h"

#ifdef __cplusplus
extern "C" {
#endif

void bench_overlap(bench_report *report, int quick);

#ifdef __cplusplus
}
#endif

#endif /* MFSDP_BENCH_OVERLAP_H */
