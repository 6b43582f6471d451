/* SPDX-License-Identifier: MIT */
/*
 * simulate.h - predicts time and bytes of a training step on a cluster that need not be at hand.
 *
 *   mfsdp_cluster cluster = mfsdp_cluster_default();         // 8 x A100 a node, data sheet values
 *   mfsdp_sim_desc desc = mfsdp_sim_desc_default();
 *   mfsdp_sim_result result = mfsdp_sim_result_default();
 *   desc.plan = plan; desc.cluster = &cluster;
 *   desc.strategy = MFSDP_SIM_OWNER; desc.algorithm = MFSDP_SIM_DIRECT;
 *   if (mfsdp_simulate(&context, &desc, &result, NULL, 0) != MFSDP_OK) ...
 *   // result.optimizer_us, result.materialize_nbytes.max, ...
 *
 * The model is alpha-beta-gamma: a message costs a latency (alpha) and its bytes over a bandwidth
 * (beta), arithmetic costs FLOPs or bytes of memory over a rate (gamma). Ranks are numbered node by
 * node. Every rank has one port each way inside its node and one each way into the network, ports
 * work at the same time, and the ranks of a node share its network. Nothing else contends: a fat
 * network. So a prediction with data sheet rates is the least time the algorithm could take.
 *
 *   simulate/desc.h   mfsdp_cluster, mfsdp_sim_desc, mfsdp_sim_result and their rules
 *   simulate/wire.h   mfsdp_sim_collective: one gather or reduce by each algorithm, with formulas
 *   simulate/banded.h BANDED matrices on their way to be updated, with formulas
 *   simulate/choose.h mfsdp_simulate_plan: bands where the simulated step is shorter
 *   simulate/step.h   mfsdp_simulate: strategies, with formulas
 * Does not: measure, overlap phases but for one stated bound, count activations, or know kernels.
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_H
#define MFSDP_SIMULATE_H

#include "simulate/banded.h"
#include "simulate/choose.h"
#include "simulate/desc.h"
#include "simulate/step.h"
#include "simulate/wire.h"

#endif /* MFSDP_SIMULATE_H */
