/* SPDX-License-Identifier: MIT */
/*
 * simulate/desc.h - the types of simulate.h: a cluster, a question, an answer, and their rules.
 *
 *   mfsdp_cluster cluster = mfsdp_cluster_default();
 *   cluster.ranks_per_node = 4;
 *   MFSDP_TRY(mfsdp_cluster_validate(&context, &cluster));
 *
 * Does not: predict anything.
 * Link flags: none.
 */
#ifndef MFSDP_SIMULATE_DESC_H
#define MFSDP_SIMULATE_DESC_H

#include "../plan.h"
#include "../shard.h"

/* ---- cluster ---- */

/*
 * X(field, unit of the text form, data sheet value, smallest, largest). Doubles; one table for the
 * struct, its defaults and its rules, and for programs that read it from a file.
 */
#define MFSDP_CLUSTER_TABLE(X)                                                                   \
  X(node_latency_us, "us", 3.4, 0.0, 1e9)           /* a message inside a node */                \
  X(net_latency_us, "us", 14.0, 0.0, 1e9)           /* a message between nodes */                \
  X(node_nbytes_per_s, "B/s", 300e9, 1.0, 1e18)     /* one rank inside its node, each way */     \
  X(net_nbytes_per_s, "B/s", 25e9, 1.0, 1e18)       /* one rank into the network, each way */    \
  X(net_node_nbytes_per_s, "B/s", 200e9, 1.0, 1e18) /* all ranks of a node together, each way */ \
  X(flops_per_s, "FLOP/s", 312e12, 1.0, 1e21)       /* matrix products of one rank */            \
  X(memory_nbytes_per_s, "B/s", 2039e9, 1.0, 1e18)  /* one rank's memory, element-wise work */   \
  X(memory_nbytes, "B", 80e9, 1.0, 1e18)            /* one rank's memory */                      \
  X(matrix_us, "us", 0.0, 0.0, 1e9)                 /* fixed cost of one matrix's update */      \
  /* Newton-Schulz of one rank, as cost.h counts it; 0: flops_per_s */                           \
  X(newton_schulz_flops_per_s, "FLOP/s", 0.0, 0.0, 1e21)

typedef struct mfsdp_cluster {
  size_t struct_nbytes;
  int32_t ranks_per_node; /* >= 1; the last node may have fewer */
#define MFSDP__CLUSTER_FIELD(field, unit, value, low, high) double field;
  MFSDP_CLUSTER_TABLE(MFSDP__CLUSTER_FIELD)
#undef MFSDP__CLUSTER_FIELD
} mfsdp_cluster;

/*
 * A node of eight A100-SXM4-80GB with one 200 Gb/s InfiniBand port each. Rates are NVIDIA's data
 * sheet (NVLink 600 GB/s both ways together, 312 TFLOP/s dense bf16, 2,039 GB/s, 80 GB), latencies
 * NCCL's tuning table (tuning.cc: a hop of a ring, Simple protocol, NVLink 3.4 us, network 14 us).
 * Peaks, so predictions are lower bounds; put in sustained rates.
 */
MFSDP_API mfsdp_cluster mfsdp_cluster_default(void) {
  mfsdp_cluster cluster;
  memset(&cluster, 0, sizeof(cluster));
  cluster.struct_nbytes = sizeof(cluster);
  cluster.ranks_per_node = 8;
#define MFSDP__CLUSTER_SET(field, unit, value, low, high) cluster.field = (value);
  MFSDP_CLUSTER_TABLE(MFSDP__CLUSTER_SET)
#undef MFSDP__CLUSTER_SET
  return cluster;
}

/* E_ARGUMENT names the field, its value (a NaN is none) and its range. */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_cluster_validate(mfsdp_context *context,
                                                            const mfsdp_cluster *cluster) {
  if (cluster == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cluster: is NULL");
  if (cluster->struct_nbytes != sizeof(*cluster))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "cluster: struct_nbytes is %zu, needs %zu (use mfsdp_cluster_default)",
                      cluster->struct_nbytes, sizeof(*cluster));
  if (cluster->ranks_per_node < 1 || cluster->ranks_per_node > MFSDP_PLAN_MAX_WORLD)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "cluster: ranks_per_node is %d, needs 1 to %d",
                      (int)cluster->ranks_per_node, MFSDP_PLAN_MAX_WORLD);
#define MFSDP__CLUSTER_CHECK(field, unit, value, low, high)                              \
  if (!(cluster->field >= (low) && cluster->field <= (high)))                            \
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,                                         \
                      "cluster: " #field " is %g, needs %g to %g " unit, cluster->field, \
                      (double)(low), (double)(high));
  MFSDP_CLUSTER_TABLE(MFSDP__CLUSTER_CHECK)
#undef MFSDP__CLUSTER_CHECK
  return MFSDP_OK;
}

/* The rate of Newton-Schulz's arithmetic in the FLOPs of mfsdp_cost_newton_schulz_flops, which are those of
 * full products: more than flops_per_s where other forms run. */
MFSDP_API double mfsdp_cluster_newton_schulz_rate(const mfsdp_cluster *cluster) {
  return cluster->newton_schulz_flops_per_s > 0.0 ? cluster->newton_schulz_flops_per_s
                                                  : cluster->flops_per_s;
}

/*
 * A message's latency as bytes that its link carries in that time, rounded: what a planner of `world`
 * ranks is told as mfsdp_plan_desc.banded_message_nbytes. The network's where the ranks are on several
 * nodes, a node's otherwise; at most MFSDP_PLAN_MAX_MESSAGE_NBYTES. cluster: valid.
 */
MFSDP_API int64_t mfsdp_cluster_message_nbytes(const mfsdp_cluster *cluster, int32_t world) {
  const double nbytes = world > cluster->ranks_per_node
                            ? cluster->net_latency_us * 1e-6 * cluster->net_nbytes_per_s
                            : cluster->node_latency_us * 1e-6 * cluster->node_nbytes_per_s;
  if (!(nbytes < (double)MFSDP_PLAN_MAX_MESSAGE_NBYTES)) return MFSDP_PLAN_MAX_MESSAGE_NBYTES;
  return (int64_t)(nbytes + 0.5);
}

/* ---- what is asked ---- */

/* The algorithms of collective.h, which stands above this header; the values are the same. */
typedef enum mfsdp_sim_algorithm {
  MFSDP_SIM_DIRECT = 1,
  MFSDP_SIM_RING,
  MFSDP_SIM_HIERARCHICAL,
  MFSDP_SIM_NATIVE
} mfsdp_sim_algorithm;

/* Who holds what between steps and who computes the update; formulas in simulate/step.h. */
typedef enum mfsdp_sim_strategy {
  MFSDP_SIM_OWNER =
      1,              /* MatrixFSDP: the plan as it is; only BANDED matrices travel to be updated */
  MFSDP_SIM_GATHER,   /* FSDP2 slices; each matrix is gathered, every rank updates all of it */
  MFSDP_SIM_SHARDED,  /* FSDP2 slices; each matrix product gathers an operand, work is shared */
  MFSDP_SIM_EXCHANGE, /* FSDP2 slices; all-to-all to the owner, update there, and back */
  MFSDP_SIM_ZERO1,    /* full parameters everywhere; owners update and broadcast */
  MFSDP_SIM_REPLICATED /* everything everywhere; sums of gradients go to all, who update alike */
} mfsdp_sim_strategy;
#define MFSDP_SIM_STRATEGY_COUNT 7 /* entry 0 stays empty, so that a strategy is an index */

typedef struct mfsdp_sim_desc {
  size_t struct_nbytes;
  const mfsdp_plan *plan;
  const mfsdp_cluster *cluster;
  mfsdp_sim_strategy strategy;
  mfsdp_sim_algorithm algorithm; /* of OWNER, ZERO1, REPLICATED; slices always move by NATIVE */
  int32_t materialize_count;     /* gathers of each unit in a step: 2 forward and backward; >= 0 */
  int32_t reduce_count;          /* reductions of each unit: one per micro-batch; >= 0 */
  int32_t newton_schulz_steps;   /* >= 0 */
  int32_t replica_count;         /* HSDP: copies of the plan's ranks; >= 1 */
  double model_flops;            /* forward and backward of one rank; 0: not asked */
  double matrix_update_nbytes;   /* memory traffic of a matrix element's update, products apart */
  double element_update_nbytes;  /* the same of an ELEMENTWISE element */
  size_t chunk_nbytes;           /* as in mfsdp_runtime_desc, 0 too: what the library chooses */
  int32_t banded_everywhere; /* BANDED matrices of the plan: 0: homes update them, 1: all ranks */
  mfsdp_wire_cost wire; /* as in mfsdp_runtime_desc: of it depends what a chunk_nbytes of 0 is */
} mfsdp_sim_desc;

/*
 * OWNER by DIRECT, two gathers and one reduction, five Newton-Schulz steps, chunks as the runtime
 * chooses them when it knows nothing of the wire, bands updated at home. The update's memory traffic
 * assumes f32 masters and momenta and a bf16 copy.
 * Muon 28: gradient read, momentum and master read and written, direction written and read in bf16,
 * copy written, rounded up; AdamW 30: gradient read, two moments and master read and written, copy
 * written.
 */
MFSDP_API mfsdp_sim_desc mfsdp_sim_desc_default(void) {
  mfsdp_sim_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.strategy = MFSDP_SIM_OWNER;
  desc.algorithm = MFSDP_SIM_DIRECT;
  desc.materialize_count = 2;
  desc.reduce_count = 1;
  desc.newton_schulz_steps = 5;
  desc.replica_count = 1;
  desc.matrix_update_nbytes = 28.0;
  desc.element_update_nbytes = 30.0;
  return desc;
}

MFSDP_API const char *mfsdp_sim_algorithm_name(mfsdp_sim_algorithm algorithm) {
  switch (algorithm) {
  case MFSDP_SIM_DIRECT: return "direct";
  case MFSDP_SIM_RING: return "ring";
  case MFSDP_SIM_HIERARCHICAL: return "hierarchical";
  case MFSDP_SIM_NATIVE: return "native";
  }
  return "invalid";
}

MFSDP_API const char *mfsdp_sim_strategy_name(mfsdp_sim_strategy strategy) {
  switch (strategy) {
  case MFSDP_SIM_OWNER: return "matrixfsdp";
  case MFSDP_SIM_GATHER: return "gather";
  case MFSDP_SIM_SHARDED: return "sharded-products";
  case MFSDP_SIM_EXCHANGE: return "all-to-all";
  case MFSDP_SIM_ZERO1: return "zero1-owner";
  case MFSDP_SIM_REPLICATED: return "replicated";
  }
  return "invalid";
}

/* ---- the answer ---- */

/* One rank's bytes. Sent bytes are wire bytes of one step; resident ones are what it keeps between
 * steps: masters, compute copies, fp32 accumulators and optimizer state (Muon 4, AdamW 8 bytes an
 * element), without the slots of materialized units and without activations. */
typedef struct mfsdp_sim_rank {
  int64_t materialize_nbytes, reduce_nbytes, optimizer_nbytes, resident_nbytes;
  double optimizer_us; /* its own arithmetic of the optimizer step */
} mfsdp_sim_rank;

typedef struct mfsdp_sim_result {
  size_t struct_nbytes;
  double materialize_us;       /* all gathers of a step, one after the other */
  double reduce_us;            /* all reductions, replicas included */
  double optimizer_compute_us; /* the slowest rank */
  double optimizer_wire_us;
  double optimizer_us;  /* the two above and the verdict's small all-gather */
  double model_us;      /* forward and backward arithmetic */
  double step_us;       /* the sum: nothing overlaps */
  double overlapped_us; /* gathers and reductions wholly beside the arithmetic */
  mfsdp_plan_spread materialize_nbytes, reduce_nbytes, optimizer_nbytes, resident_nbytes;
} mfsdp_sim_result;

MFSDP_API mfsdp_sim_result mfsdp_sim_result_default(void) {
  mfsdp_sim_result result;
  memset(&result, 0, sizeof(result));
  result.struct_nbytes = sizeof(result);
  return result;
}

/* ---- rules ---- */

MFSDP_API mfsdp_status mfsdp__sim_check_counts(mfsdp_context *context, const mfsdp_sim_desc *desc) {
  if (desc->materialize_count < 0 || desc->reduce_count < 0 || desc->newton_schulz_steps < 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: materialize_count %d, reduce_count %d and newton_schulz_steps %d "
                      "need to be at least 0",
                      (int)desc->materialize_count, (int)desc->reduce_count,
                      (int)desc->newton_schulz_steps);
  if (desc->replica_count < 1)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "simulate: replica_count is %d, needs at least 1",
                      (int)desc->replica_count);
  if (!(desc->model_flops >= 0.0) || !(desc->matrix_update_nbytes >= 0.0) ||
      !(desc->element_update_nbytes >= 0.0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: model_flops %g, matrix_update_nbytes %g and element_update_nbytes "
                      "%g need to be at least 0",
                      desc->model_flops, desc->matrix_update_nbytes, desc->element_update_nbytes);
  return MFSDP_OK;
}

/* E_ARGUMENT names the field, the value and what is needed. */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_sim_desc_validate(mfsdp_context *context,
                                                             const mfsdp_sim_desc *desc) {
  if (desc == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "simulate: desc is NULL");
  if (desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: desc.struct_nbytes is %zu, needs %zu (use mfsdp_sim_desc_default)",
                      desc->struct_nbytes, sizeof(*desc));
  if (desc->plan == NULL) return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "simulate: plan is NULL");
  if (strcmp(mfsdp_sim_strategy_name(desc->strategy), "invalid") == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: strategy is %d, needs an mfsdp_sim_strategy", (int)desc->strategy);
  if (strcmp(mfsdp_sim_algorithm_name(desc->algorithm), "invalid") == 0)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "simulate: algorithm is %d, needs an mfsdp_sim_algorithm",
                      (int)desc->algorithm);
  MFSDP_TRY(mfsdp__sim_check_counts(context, desc));
  MFSDP_TRY(mfsdp__flag_check(context, "simulate", "banded_everywhere", desc->banded_everywhere));
  return mfsdp_cluster_validate(context, desc->cluster);
}

#endif /* MFSDP_SIMULATE_DESC_H */
