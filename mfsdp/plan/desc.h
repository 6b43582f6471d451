/* SPDX-License-Identifier: MIT */
/*
 * plan/desc.h - the types of plan.h: descriptions, limits and results, and their rules.
 *
 *   mfsdp_param param = mfsdp_param_default();
 *   param.name = "blocks.0.attn.qkv"; param.unit = 1;
 *   param.ndim = 2; param.shape[0] = 2304; param.shape[1] = 768;
 *   param.role = MFSDP_ROLE_MATRIX; param.view = MFSDP_VIEW_HEADS; param.head_count = 3;
 *
 * Conventions of this folder. `unit` and `param` are the caller's numbers: a unit number as given
 * in mfsdp_param.unit, a parameter's index in mfsdp_plan_desc.params. Counts and offsets are in
 * elements unless a name says _nbytes. All tables are host memory. Functions that return a status
 * fill the context's error; plain accessors accept any index and answer one out of range as stated.
 * Nothing communicates; everything is complete on return and deterministic.
 *
 * Does not: check anything (plan/param.h does).
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_DESC_H
#define MFSDP_PLAN_DESC_H

#include "../context.h"

/* ---- limits, checked by the validator ---- */

#define MFSDP_PLAN_MAX_WORLD (1 << 20)
#define MFSDP_PLAN_MAX_UNIT ((1 << 20) - 1)        /* largest unit number */
#define MFSDP_PLAN_MAX_ELEMENTS (INT64_C(1) << 46) /* of all tensors together, padding included */
#define MFSDP_PLAN_MAX_PIECES (INT64_C(1) << 30)   /* of matrices, of element runs, of blocks */
#define MFSDP_PLAN_BANDS 64 /* most row bands that a BANDED matrix is cut into */
#define MFSDP_PLAN_MAX_MESSAGE_NBYTES (INT64_C(1) << 40) /* of banded_message_nbytes */

/* ---- descriptions ---- */

/* How a MATRIX tensor is cut into matrices. Views cut rows only, so each matrix is contiguous. */
typedef enum mfsdp_view {
  MFSDP_VIEW_WHOLE = 1, /* (rows, cols): one matrix */
  MFSDP_VIEW_CONV,      /* (out, in, k...), 3 to 5 dimensions: one matrix (out, in*k...) */
  MFSDP_VIEW_BATCH,     /* (e, rows, cols), exactly 3 dimensions: e matrices (experts), or, with
                         * part_rows, each of them cut as by ROWS (experts with fused gate and up) */
  MFSDP_VIEW_ROWS,      /* (rows, cols): part_rows lists the rows of each matrix, in order */
  MFSDP_VIEW_HEADS      /* (rows, cols): head_count matrices of rows/head_count rows */
} mfsdp_view;

/*
 * Where the matrices of a tensor lie between steps. A property of the description; a plan with
 * allow_banded may turn OWNED matrices into BANDED ones, so ask each piece for its own.
 *   OWNED       whole on its owner, empty elsewhere. ELEMENTWISE and FROZEN tensors: runs of blocks.
 *   BANDED      MATRIX only. Each matrix of the view lies in row bands on the ranks (mfsdp_plan_band)
 *               and is assembled for the step; the planner chooses a home rank that updates it.
 *   REPLICATED  Every rank holds and updates it; its pieces say where the sums of its gradients go. All
 *               tensors of a plan or none, and with residency RESIDENT.
 */
typedef enum mfsdp_placement {
  MFSDP_PLACEMENT_OWNED = 1,
  MFSDP_PLACEMENT_BANDED,
  MFSDP_PLACEMENT_REPLICATED
} mfsdp_placement;

typedef enum mfsdp_residency {
  MFSDP_RESIDENCY_SHARDED = 1, /* full parameters exist only while a unit is acquired (ZeRO-3) */
  MFSDP_RESIDENCY_RESIDENT     /* full parameters stay (ZeRO-1), beside what is owned */
} mfsdp_residency;

/*
 * Who owns which matrix. cost = mfsdp_plan_desc.cost, by default the number of elements; "order" is
 * unit number, then declared order, then matrix of the tensor; load starts as base_load (or 0).
 *   ROUND_ROBIN   the k-th non-empty matrix in order goes to rank k mod world.
 *   ROLE_GREEDY   unit by unit: the unit's matrices by (larger cost, then order), each to the rank
 *                 with the smallest (load, rank); loads carry over to the next unit.
 *   SCOPE_GREEDY  the same over the matrices of all units pooled.
 *   COST_AWARE    SCOPE_GREEDY if its largest load is lower than ROLE_GREEDY's and the gathered
 *                 workspace stays under the cap: in every unit, no rank owns more elements of its
 *                 matrices than max_gamma_permille allows. Otherwise ROLE_GREEDY.
 *   BALANCED      the smallest largest load that a search finds, under the caps of the description;
 *                 then, at that load, the fewest bytes on the fullest rank: see plan/balance.h. By
 *                 default cost is Newton-Schulz work (mfsdp_cost_newton_schulz) here.
 * In all of them the ELEMENTWISE and FROZEN tensors of a unit form one tail, which is spread after
 * the matrices: see plan/place.h.
 * Source: the rules of the paper arXiv 2607.05895, as restated in this project's design; there the
 * tail has one owner, here it is cut at canonical blocks. BALANCED is ours.
 */
typedef enum mfsdp_planner {
  MFSDP_PLANNER_ROUND_ROBIN = 1,
  MFSDP_PLANNER_ROLE_GREEDY,
  MFSDP_PLANNER_SCOPE_GREEDY,
  MFSDP_PLANNER_COST_AWARE,
  MFSDP_PLANNER_BALANCED
} mfsdp_planner;

/* One tensor. Start from mfsdp_param_default(). The plan copies all that pointers show. */
typedef struct mfsdp_param {
  size_t struct_nbytes; /* sizeof(mfsdp_param): the stride of the array */
  const char *name;     /* not empty, unique in the plan (and over all plans of a job) */
  const char *alias_of; /* NULL, or the name of the tensor this one is tied to: see below */
  int32_t ndim;         /* 1 to MFSDP_MAX_NDIM */
  int32_t unit;         /* what is gathered together; units are numbered in forward order */
  int32_t hyper_group;  /* index of its hyperparameter group, >= 0 */
  int64_t shape[MFSDP_MAX_NDIM]; /* row-major; 0 is legal; entries from ndim on are ignored */
  mfsdp_role role;               /* always stated: the default is invalid */
  mfsdp_view view;               /* MATRIX only; otherwise it must be valid and is not used */
  const int64_t *part_rows;      /* ROWS: part_count sizes >= 0 that sum to shape[0]; BATCH: to
                                  * shape[1], or NULL; else NULL */
  int32_t part_count;
  int32_t head_count;  /* HEADS: >= 1, divides shape[0] */
  mfsdp_dtype compute; /* forward and backward; equal over a unit */
  mfsdp_dtype master;  /* what the optimizer updates; equal over a unit without its FROZEN */
  mfsdp_dtype grad;    /* what backward writes; equal over a unit without its FROZEN */
  mfsdp_dtype wire;    /* gradients on the wire; equal over a unit without its FROZEN */
  mfsdp_placement placement;
  int32_t is_slice;        /* 1: a tensor-parallel slice of a larger matrix */
  int32_t local_matrix_ok; /* 1: as a MATRIX the slice alone is what the optimizer shall see */
} mfsdp_param;
/*
 * Aliases (tied weights). The owner is the tensor named by alias_of; it stands in an earlier unit,
 * or earlier in the same unit, and is no alias itself. The alias repeats shape, role, view, dtypes,
 * hyper_group and placement of the owner, has no pieces and no room in its unit's buffer: acquiring its unit
 * also acquires the owner's unit.
 *
 * Empty tensors, (0,8) or (8,0), are legal: they keep their place in the audit, the hash and the
 * order, but neither they nor empty matrices of a view have pieces, blocks or owners.
 */

/* Invalid name, shape, unit and role; f32 everywhere, view WHOLE, placement OWNED. */
MFSDP_API mfsdp_param mfsdp_param_default(void) {
  mfsdp_param param;
  memset(&param, 0, sizeof(param));
  param.struct_nbytes = sizeof(param);
  param.unit = -1;
  param.view = MFSDP_VIEW_WHOLE;
  param.compute = MFSDP_F32;
  param.master = MFSDP_F32;
  param.grad = MFSDP_F32;
  param.wire = MFSDP_F32;
  param.placement = MFSDP_PLACEMENT_OWNED;
  return param;
}

/* The default with what each parameter states: a rows x cols tensor of a unit. */
MFSDP_API mfsdp_param mfsdp_param_2d(const char *name, int32_t unit, mfsdp_role role, int64_t rows,
                                     int64_t cols) {
  mfsdp_param param = mfsdp_param_default();
  param.name = name;
  param.unit = unit;
  param.role = role;
  param.ndim = 2;
  param.shape[0] = rows;
  param.shape[1] = cols;
  return param;
}

/*
 * What BALANCED keeps; MFSDP_PLAN_NO_CAP: no such cap. COST_AWARE uses max_gamma_permille as said
 * above; the other planners keep none and refuse any. Caps that no plan can keep, or for which none
 * is found, are E_ARGUMENT, and the message says by how much. BANDED matrices, or that some may become
 * so, go with max_resident_nbytes alone, REPLICATED tensors with the other two: E_UNSUPPORTED else.
 */
typedef struct mfsdp_plan_caps {
  /* Bytes that one rank owns, as mfsdp_param_resident_nbytes counts them, padding included; >= 0 */
  int64_t max_resident_nbytes;
  /* Largest gamma of any unit in thousandths: no rank owns more elements of a unit than
   * payload * max_gamma_permille / (1000 * world). >= 1000 */
  int64_t max_gamma_permille;
  /* Ranks that own something of a unit: fewer, larger messages; >= 1 */
  int64_t max_owners;
} mfsdp_plan_caps;
#define MFSDP_PLAN_NO_CAP INT64_MAX

typedef struct mfsdp_plan_desc {
  size_t struct_nbytes;
  const mfsdp_param *params; /* param_count entries; NULL if 0 */
  int32_t param_count;
  int32_t world; /* ranks of this plan's group, 1 to MFSDP_PLAN_MAX_WORLD */
  mfsdp_planner planner;
  mfsdp_residency residency;
  const int64_t *base_load; /* world costs >= 0 that the ranks carry from other plans; NULL: none */
  /* Node of each rank, world numbers from 0 to world - 1; NULL: one node. BALANCED prefers owners
   * of a unit on many nodes; the other planners do not look. */
  const int32_t *node_of_rank;
  mfsdp_plan_caps caps;
  /* Cost of updating a matrix, >= 0, called once per non-empty matrix in order on every rank, which
   * must all get the same answer. NULL: rows * cols, but Newton-Schulz work for BALANCED, as
   * mfsdp_cost_newton_schulz counts it: full products, so that the plan depends on shapes alone.
   * To train with Muon: mfsdp_newton_schulz_cost (newton_schulz/cost.h) with `user` the description of
   * the iteration, which counts what runs. With Shampoo and SOAP: mfsdp_cost_shampoo and _soap; with
   * element-wise optimizers: mfsdp_plan_cost_elements. */
  int64_t (*cost)(void *user, int32_t param, int64_t rows, int64_t cols);
  void *user; /* handed to cost */
  /* 1: OWNED matrices may become BANDED where that makes the predicted step shorter, or where
   * caps.max_resident_nbytes cannot be kept otherwise: see plan/hybrid.h. The four fields below are
   * read only then. The canonical blocks of all MATRIX tensors are then those of BANDED ones, so that the
   * choice does not show in norms. */
  int32_t allow_banded;
  int32_t materialize_count, reduce_count; /* gathers and reduces of a unit in a step, >= 0 */
  /* Units of cost that a byte on a rank's link takes, >= 1. A unit of mfsdp_cost_newton_schulz is 2 FLOPs
   * in each of its steps, so with 5 steps: FLOP/s over 10 times the link's bytes/s; one of
   * mfsdp_newton_schulz_cost is 2 FLOPs. It scales what is predicted; what becomes BANDED follows from
   * bytes and messages alone, since homes keep their costs. */
  int64_t banded_wire_cost;
  /* What a message takes beside its bytes, as the bytes that the link carries in that time: latency times
   * rate (mfsdp_cluster_message_nbytes). 0 to MFSDP_PLAN_MAX_MESSAGE_NBYTES; 0: bytes alone decide. */
  int64_t banded_message_nbytes;
} mfsdp_plan_desc;

/* No parameters, world 0 (invalid), BALANCED, SHARDED, one node, no caps, default cost, no matrix
 * becomes BANDED; units are gathered twice and reduced once a step; messages take nothing. */
MFSDP_API mfsdp_plan_desc mfsdp_plan_desc_default(void) {
  mfsdp_plan_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.planner = MFSDP_PLANNER_BALANCED;
  desc.residency = MFSDP_RESIDENCY_SHARDED;
  desc.caps.max_resident_nbytes = MFSDP_PLAN_NO_CAP;
  desc.caps.max_gamma_permille = MFSDP_PLAN_NO_CAP;
  desc.caps.max_owners = MFSDP_PLAN_NO_CAP;
  desc.materialize_count = 2;
  desc.reduce_count = 1;
  return desc;
}

/* mfsdp_plan_desc.cost by elements, which is what the time of an element-wise optimizer follows. -1
 * where it does not fit. `user` and `param` are not used. */
MFSDP_API int64_t mfsdp_plan_cost_elements(void *user, int32_t param, int64_t rows, int64_t cols) {
  int64_t elements;
  (void)user;
  (void)param;
  return rows >= 0 && mfsdp_i64_mul(rows, cols, &elements) ? elements : -1;
}

/* ---- results ---- */

/* A unit has two buffers with layouts of their own. */
typedef enum mfsdp_layout_kind {
  MFSDP_LAYOUT_GATHER = 1, /* full parameters, compute dtype, every tensor */
  MFSDP_LAYOUT_REDUCE      /* full gradients (grad dtype; wire dtype in transit), without FROZEN */
} mfsdp_layout_kind;

/*
 * What one rank owns in one stretch: a whole matrix, the band of a BANDED one, or a run of canonical
 * blocks of an ELEMENTWISE or FROZEN tensor (at most one run per tensor and rank). count >= 1 always.
 * In a unit's full buffer every tensor is contiguous in row-major order and starts on a multiple of
 * MFSDP_ALIGN_ELEMENTS; tensors stand in declared order. The owner packs its pieces of a unit in
 * the same order into its segment, each on a multiple of MFSDP_ALIGN_ELEMENTS. Gaps are zero.
 */
typedef struct mfsdp_piece {
  int32_t param, matrix; /* matrix: number within the tensor's view; -1 for element runs */
  int32_t unit, owner;
  int64_t first, count;     /* elements of the tensor: first .. first + count - 1 */
  int64_t rows, cols;       /* of the matrix or the band; 1 x count for element runs */
  int64_t unit_offset;      /* of the piece in the unit's GATHER buffer */
  int64_t shard_offset;     /* in the owner's GATHER segment of this unit */
  int64_t grad_unit_offset; /* the same two in the REDUCE layout; -1 for FROZEN */
  int64_t grad_shard_offset;
  int64_t matrix_first, matrix_rows; /* first and rows of the whole matrix; else its own */
  mfsdp_placement placement;         /* of this matrix or run */
  int32_t home;                      /* the rank that updates the matrix; owner unless BANDED */
} mfsdp_piece;

/*
 * Canonical blocks: what norms are summed over and tensors are cut at, so that results do not
 * depend on the world. A whole matrix of a MATRIX tensor, but mfsdp_plan_band_rows(rows) rows of it
 * where it is BANDED or the plan was made with allow_banded; or mfsdp_plan_block_elements(numel)
 * elements of an ELEMENTWISE one. (The last of a matrix or tensor may be shorter.) FROZEN tensors,
 * aliases and empty matrices have none.
 */
typedef struct mfsdp_norm_block {
  int64_t first, count; /* elements of the tensor */
  int32_t param;
  int32_t piece; /* index into mfsdp_plan_pieces(plan, -1): the piece it lies in, wholly */
} mfsdp_norm_block;

typedef struct mfsdp_plan mfsdp_plan; /* opaque: see plan/table.h for what may be asked */

/* ---- what a report says ---- */

/* A quantity over ranks. max / (sum / world) is its imbalance: mfsdp_plan_spread_ratio. */
typedef struct mfsdp_plan_spread {
  int64_t max, sum;
  int32_t max_rank; /* the lowest rank that has max */
} mfsdp_plan_spread;

typedef struct mfsdp_unit_report {
  int32_t unit, owner_count; /* ranks with a non-empty segment */
  int32_t node_count;        /* nodes that own, or are home to, a matrix of it */
  int64_t payload;           /* elements of the unit, without padding */
  int64_t max_segment;       /* the largest payload that one rank owns */
  double gamma;              /* max_segment / (payload / world); 0 for an empty unit */
} mfsdp_unit_report;

/* Which argument proves the bound on the largest cost: see plan/bound.h. */
typedef enum mfsdp_plan_bound {
  MFSDP_BOUND_VOLUME = 1,  /* total cost over all ranks, poured over base_load */
  MFSDP_BOUND_LARGEST,     /* the costliest matrix on the least loaded rank */
  MFSDP_BOUND_PIGEONHOLE,  /* of k*world + 1 matrices some rank has k + 1 */
  MFSDP_BOUND_DIVISIBILITY /* whole matrices do not fill the ranks to any lower level */
} mfsdp_plan_bound;

typedef struct mfsdp_plan_summary {
  size_t struct_nbytes;
  int32_t world, unit_count, matrix_count, piece_count; /* non-empty units and matrices */
  int32_t banded_count;                                 /* of the matrices */
  double gamma_max, gamma_mean;                         /* over non-empty units; mean unweighted */
  /* node_count of a unit over the most that it could be, the smaller of its matrices and the nodes:
   * 1 is the widest spread. Over units with matrices, mean unweighted; 1 without any. */
  double node_spread_min, node_spread_mean;
  mfsdp_plan_spread cost;            /* base_load included; of BANDED matrices at their homes */
  mfsdp_plan_spread resident;        /* owned elements, padding included; all where REPLICATED */
  mfsdp_plan_spread resident_nbytes; /* the same by mfsdp_param_resident_nbytes */
  mfsdp_plan_spread sent;            /* payload elements of one DIRECT gather and reduce per unit */
  mfsdp_plan_spread exchanged;       /* elements of bands sent in a step: to homes and back */
  int64_t cost_bound;                /* no plan of these matrices has a smaller cost.max */
  mfsdp_plan_bound bound;            /* the argument that binds */
  double cost_ratio;                 /* cost.max / cost_bound; 1 if both are 0 */
  int64_t resident_nbytes_bound;   /* no plan with these bands has a smaller resident_nbytes.max */
  mfsdp_plan_bound resident_bound; /* the argument that binds */
  /* With allow_banded: the predicted step in units of cost, before and with what was chosen for it;
   * chosen_count: matrices that are BANDED though their tensors are described as OWNED. Else 0. */
  int64_t predicted_owned, predicted;
  int32_t chosen_count;
} mfsdp_plan_summary;

/* Zeros, with its size: what mfsdp_plan_report fills. */
MFSDP_API mfsdp_plan_summary mfsdp_plan_summary_default(void) {
  mfsdp_plan_summary summary;
  memset(&summary, 0, sizeof(summary));
  summary.struct_nbytes = sizeof(summary);
  return summary;
}

/* max * world / sum: 1 is level. 1 if sum is 0. */
MFSDP_API double mfsdp_plan_spread_ratio(mfsdp_plan_spread spread, int32_t world) {
  if (spread.sum == 0) return 1.0;
  return (double)spread.max * (double)world / (double)spread.sum;
}

/* ---- rules that other parts need by name ---- */

/* Elements of a canonical block of an ELEMENTWISE or FROZEN tensor of numel >= 0 elements:
 * max(4096, smallest power of two >= numel / 1024). Independent of the world; at most 1024 blocks.
 */
MFSDP_API int64_t mfsdp_plan_block_elements(int64_t numel) {
  int64_t block = 4096;
  while (block < numel / 1024 + (numel % 1024 != 0))
    block *= 2;
  return block;
}

/* Rows of a band block of a matrix of rows >= 0 rows: ceil(rows / MFSDP_PLAN_BANDS). Independent of
 * the world. */
MFSDP_API int64_t mfsdp_plan_band_rows(int64_t rows) {
  return rows / MFSDP_PLAN_BANDS + (rows % MFSDP_PLAN_BANDS != 0);
}

/*
 * The rows that `rank` of `world` holds of a BANDED matrix: *first .. *first + *count - 1. Of its n
 * band blocks, those from n * rank / world to n * (rank + 1) / world: none where n is too small.
 */
MFSDP_API void mfsdp_plan_band(int64_t rows, int32_t world, int32_t rank, int64_t *first,
                               int64_t *count) {
  const int64_t block = mfsdp_plan_band_rows(rows);
  const int64_t blocks = block > 0 ? rows / block + (rows % block != 0) : 0;
  int64_t end = blocks * (rank + 1) / world * block;
  *first = blocks * rank / world * block;
  if (end > rows) end = rows; /* the last block may be shorter */
  *count = end - *first;
}

/* Bytes that an owned element keeps resident before optimizer state: master, the compute copy if
 * its dtype differs, and an fp32 accumulator; FROZEN: the compute copy alone. */
MFSDP_API int64_t mfsdp_param_resident_nbytes(const mfsdp_param *param) {
  size_t nbytes = mfsdp_dtype_nbytes(param->compute);
  if (param->role == MFSDP_ROLE_FROZEN) return (int64_t)nbytes;
  if (param->master == param->compute) nbytes = 0;
  return (int64_t)(nbytes + mfsdp_dtype_nbytes(param->master) + mfsdp_dtype_nbytes(MFSDP_F32));
}

/* The view in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_view_name(mfsdp_view view) {
  switch (view) {
  case MFSDP_VIEW_WHOLE: return "whole";
  case MFSDP_VIEW_CONV: return "conv";
  case MFSDP_VIEW_BATCH: return "batch";
  case MFSDP_VIEW_ROWS: return "rows";
  case MFSDP_VIEW_HEADS: return "heads";
  }
  return "invalid";
}

/* The placement in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_placement_name(mfsdp_placement placement) {
  switch (placement) {
  case MFSDP_PLACEMENT_OWNED: return "owned";
  case MFSDP_PLACEMENT_BANDED: return "banded";
  case MFSDP_PLACEMENT_REPLICATED: return "replicated";
  }
  return "invalid";
}

/* The residency in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_residency_name(mfsdp_residency residency) {
  switch (residency) {
  case MFSDP_RESIDENCY_SHARDED: return "sharded";
  case MFSDP_RESIDENCY_RESIDENT: return "resident";
  }
  return "invalid";
}

/* The argument in lower case; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_plan_bound_name(mfsdp_plan_bound bound) {
  switch (bound) {
  case MFSDP_BOUND_VOLUME: return "volume";
  case MFSDP_BOUND_LARGEST: return "largest";
  case MFSDP_BOUND_PIGEONHOLE: return "pigeonhole";
  case MFSDP_BOUND_DIVISIBILITY: return "divisibility";
  }
  return "invalid";
}

/* The planner as the command line spells it; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_planner_name(mfsdp_planner planner) {
  switch (planner) {
  case MFSDP_PLANNER_ROUND_ROBIN: return "round-robin";
  case MFSDP_PLANNER_ROLE_GREEDY: return "role-greedy";
  case MFSDP_PLANNER_SCOPE_GREEDY: return "scope-greedy";
  case MFSDP_PLANNER_COST_AWARE: return "cost-aware";
  case MFSDP_PLANNER_BALANCED: return "balanced";
  }
  return "invalid";
}

#endif /* MFSDP_PLAN_DESC_H */
