/* SPDX-License-Identifier: MIT */
/*
 * plan/api.h - everything public of plan.h: descriptions, results, prototypes and their rules. The
 * bodies are in the other headers of this folder. Include plan.h, not this.
 *
 * Conventions of this file. `unit` and `param` are the caller's numbers: a unit number as given in
 * mfsdp_param.unit, a parameter's index in mfsdp_plan_desc.params. Counts and offsets are in elements
 * unless a name says _nbytes. All tables are host memory. Functions that return a status fill the
 * context's error; plain accessors accept any index and answer an index out of range with NULL, 0 or
 * -1 as stated. Nothing here communicates; everything is complete on return and deterministic.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_API_H
#define MFSDP_PLAN_API_H

#include "../context.h"
#include "../cost.h"

/* ---- limits, checked by the validator ---- */

#define MFSDP_PLAN_MAX_WORLD (1 << 20)
#define MFSDP_PLAN_MAX_UNIT ((1 << 20) - 1)               /* largest unit number */
#define MFSDP_PLAN_MAX_ELEMENTS (INT64_C(1) << 46)        /* of all tensors together, padding included */
#define MFSDP_PLAN_MAX_PIECES (INT64_C(1) << 30)          /* matrices plus element runs, and blocks */

/* ---- descriptions ---- */

/* How a MATRIX tensor is cut into matrices. Views cut rows only, so each matrix is contiguous. */
typedef enum mfsdp_view {
  MFSDP_VIEW_WHOLE = 1, /* (rows, cols): one matrix */
  MFSDP_VIEW_CONV,      /* (out, in, k...), 3 to 5 dimensions: one matrix (out, in*k...) */
  MFSDP_VIEW_BATCH,     /* (e, rows, cols), exactly 3 dimensions: e matrices (experts) */
  MFSDP_VIEW_ROWS,      /* (rows, cols): part_rows lists the rows of each matrix, in order */
  MFSDP_VIEW_HEADS      /* (rows, cols): head_count matrices of rows/head_count rows */
} mfsdp_view;

/* Where a matrix lies between steps. Only OWNED is built so far; the others are E_UNSUPPORTED. */
typedef enum mfsdp_placement {
  MFSDP_PLACEMENT_OWNED = 1, /* whole on its owner, empty elsewhere */
  MFSDP_PLACEMENT_BANDED,    /* row bands on all ranks, assembled for the step */
  MFSDP_PLACEMENT_REPLICATED /* on every rank */
} mfsdp_placement;

typedef enum mfsdp_residency {
  MFSDP_RESIDENCY_SHARDED = 1, /* full parameters exist only while a unit is acquired (ZeRO-3) */
  MFSDP_RESIDENCY_RESIDENT     /* full parameters stay (ZeRO-1); E_UNSUPPORTED so far */
} mfsdp_residency;

/*
 * Who owns which matrix. cost = mfsdp_plan_desc.cost, by default the number of elements; "order" is
 * unit number, then declared order, then matrix of the tensor; load starts as base_load (or 0).
 *   ROUND_ROBIN   the k-th non-empty matrix in order goes to rank k mod world.
 *   ROLE_GREEDY   unit by unit: the unit's matrices by (larger cost, then order), each to the rank
 *                 with the smallest (load, rank); loads carry over to the next unit.
 *   SCOPE_GREEDY  the same over the matrices of all units pooled.
 *   COST_AWARE, BALANCED   E_UNSUPPORTED so far.
 * In all of them the ELEMENTWISE and FROZEN tensors of a unit form one tail, which is spread after
 * the matrices: see plan/place.h.
 * Source: the rules of the paper arXiv 2607.05895, as restated in this project's design; there the
 * tail has one owner, here it is cut at canonical blocks.
 */
typedef enum mfsdp_planner {
  MFSDP_PLANNER_ROUND_ROBIN = 1,
  MFSDP_PLANNER_ROLE_GREEDY,
  MFSDP_PLANNER_SCOPE_GREEDY,
  MFSDP_PLANNER_COST_AWARE,
  MFSDP_PLANNER_BALANCED
} mfsdp_planner;

/* One tensor. Start from mfsdp_param_default(). Everything a pointer shows is copied by the plan. */
typedef struct mfsdp_param {
  size_t struct_nbytes;     /* sizeof(mfsdp_param): the stride of the array */
  const char *name;         /* not empty, unique in the plan (and over all plans of a job) */
  const char *alias_of;     /* NULL, or the name of the tensor this one is tied to: see below */
  int32_t ndim;             /* 1 to MFSDP_MAX_NDIM */
  int32_t unit;             /* what is gathered together; units are numbered in forward order */
  int32_t hyper_group;      /* index of its hyperparameter group, >= 0 */
  int64_t shape[MFSDP_MAX_NDIM]; /* row-major; 0 is legal; entries from ndim on are ignored */
  mfsdp_role role;          /* always stated: the default is invalid */
  mfsdp_view view;          /* MATRIX only; otherwise it must be valid and is not used */
  const int64_t *part_rows; /* ROWS: part_count sizes >= 0 that sum to shape[0]; else NULL */
  int32_t part_count;
  int32_t head_count;       /* HEADS: >= 1, divides shape[0] */
  mfsdp_dtype compute;      /* forward and backward; equal over a unit */
  mfsdp_dtype master;       /* what the optimizer updates; equal over a unit without its FROZEN */
  mfsdp_dtype grad;         /* what backward writes; equal over a unit without its FROZEN */
  mfsdp_dtype wire;         /* gradients on the wire; equal over a unit without its FROZEN */
  mfsdp_placement placement;
  int32_t is_slice;         /* 1: a tensor-parallel slice of a larger matrix */
  int32_t local_matrix_ok;  /* 1: as a MATRIX the slice alone is what the optimizer shall see */
} mfsdp_param;
/*
 * Aliases (tied weights). The owner is the tensor named by alias_of; it stands in an earlier unit, or
 * earlier in the same unit, and is no alias itself. The alias repeats shape, role, view, dtypes and
 * hyper_group of the owner, has no pieces and no room in its unit's buffer: acquiring its unit also
 * acquires the owner's unit.
 *
 * Empty tensors, (0,8) or (8,0), are legal: they keep their place in the audit, the hash and the
 * order, but neither they nor empty matrices of a view have pieces, blocks or owners.
 */

/* Invalid name, shape, unit and role; f32 everywhere, view WHOLE, placement OWNED. */
MFSDP_API mfsdp_param mfsdp_param_default(void)
{
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

typedef struct mfsdp_plan_desc {
  size_t struct_nbytes;
  const mfsdp_param *params; /* param_count entries; NULL if 0 */
  int32_t param_count;
  int32_t world;             /* ranks of this plan's group, 1 to MFSDP_PLAN_MAX_WORLD */
  mfsdp_planner planner;
  mfsdp_residency residency;
  const int64_t *base_load;  /* world costs >= 0 that the ranks carry from other plans; NULL: none */
  /* Cost of updating a matrix, >= 0, called once per non-empty matrix in order on every rank, which
   * must all get the same answer. NULL: rows * cols. mfsdp_cost_newton_schulz fits here. */
  int64_t (*cost)(void *user, int32_t param, int64_t rows, int64_t cols);
  void *user;                /* handed to cost */
} mfsdp_plan_desc;

/* No parameters, world 0 (invalid), SCOPE_GREEDY, SHARDED, cost by elements. */
MFSDP_API mfsdp_plan_desc mfsdp_plan_desc_default(void)
{
  mfsdp_plan_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.planner = MFSDP_PLANNER_SCOPE_GREEDY;
  desc.residency = MFSDP_RESIDENCY_SHARDED;
  return desc;
}

/* ---- results ---- */

/* A unit has two buffers with layouts of their own. */
typedef enum mfsdp_layout_kind {
  MFSDP_LAYOUT_GATHER = 1, /* full parameters, compute dtype, every tensor */
  MFSDP_LAYOUT_REDUCE      /* full gradients (grad dtype; wire dtype in transit), without FROZEN */
} mfsdp_layout_kind;

/*
 * What one rank owns in one stretch: a whole matrix, or a run of canonical blocks of an ELEMENTWISE
 * or FROZEN tensor (at most one run per tensor and rank). count >= 1 always.
 * In a unit's full buffer every tensor is contiguous in row-major order and starts on a multiple of
 * MFSDP_ALIGN_ELEMENTS; tensors stand in declared order. The owner packs its pieces of a unit in the
 * same order into its segment, each on a multiple of MFSDP_ALIGN_ELEMENTS. Gaps are zero.
 */
typedef struct mfsdp_piece {
  int32_t param, matrix;    /* matrix: number within the tensor's view; -1 for element runs */
  int32_t unit, owner;
  int64_t first, count;     /* elements of the tensor: first .. first + count - 1 */
  int64_t rows, cols;       /* of the matrix; 1 x count for element runs */
  int64_t unit_offset;      /* of the piece in the unit's GATHER buffer */
  int64_t shard_offset;     /* in the owner's GATHER segment of this unit */
  int64_t grad_unit_offset; /* the same two in the REDUCE layout; -1 for FROZEN */
  int64_t grad_shard_offset;
} mfsdp_piece;

/*
 * Canonical blocks: what norms are summed over and tensors are cut at, so that results do not depend
 * on the world. A whole matrix of a MATRIX tensor, or mfsdp_plan_block_elements(numel) elements of an
 * ELEMENTWISE one (the last may be shorter). FROZEN tensors, aliases and empty matrices have none.
 */
typedef struct mfsdp_norm_block {
  int64_t first, count; /* elements of the tensor */
  int32_t param;
  int32_t piece;        /* index into mfsdp_plan_pieces(plan, -1): the piece it lies in, wholly */
} mfsdp_norm_block;

typedef struct mfsdp_plan mfsdp_plan;

/* ---- create, destroy ---- */

/*
 * Makes a plan. Validates first: E_ARGUMENT or E_UNSUPPORTED names the parameter, the value it has
 * and what is needed; E_OVERFLOW for tensors beyond the limits above. E_MEMORY. On failure *out is
 * NULL and nothing is held. The plan copies all it needs from desc; it must be destroyed with the
 * same context. O(n log n + world log world) for n matrices; no table of params x world.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_create(mfsdp_context *context,
                                                       const mfsdp_plan_desc *desc,
                                                       mfsdp_plan **out);
/* NULL is allowed. */
MFSDP_API void mfsdp_plan_destroy(mfsdp_context *context, mfsdp_plan *plan);

/* ---- what is in it ---- */

MFSDP_API int32_t mfsdp_plan_world(const mfsdp_plan *plan);
MFSDP_API int32_t mfsdp_plan_param_count(const mfsdp_plan *plan);
MFSDP_API mfsdp_planner mfsdp_plan_planner(const mfsdp_plan *plan);
/* 1 + the largest unit number; 0 without parameters. Numbers that no parameter uses are legal (unit
 * numbers are unique over all plans of a job): such units have no pieces and length 0. */
MFSDP_API int32_t mfsdp_plan_unit_count(const mfsdp_plan *plan);
/* The plan's own copy of a description; lives as long as the plan. NULL out of range. */
MFSDP_API const mfsdp_param *mfsdp_plan_param(const mfsdp_plan *plan, int32_t param);
/* Index of the tensor `name`, -1 if there is none. O(1). */
MFSDP_API int32_t mfsdp_plan_param_find(const mfsdp_plan *plan, const char *name);
/* The parameter that holds the storage: the owner of an alias, else `param`. -1 out of range. */
MFSDP_API int32_t mfsdp_plan_param_owner(const mfsdp_plan *plan, int32_t param);
/* Elements of the tensor (of the owner for an alias). -1 out of range. */
MFSDP_API int64_t mfsdp_plan_param_numel(const mfsdp_plan *plan, int32_t param);
/* Matrices of the view, empty ones counted; 0 for other roles, for aliases and out of range. */
MFSDP_API int32_t mfsdp_plan_param_matrices(const mfsdp_plan *plan, int32_t param);
/* Where the tensor starts in the buffer of its owner's unit; -1 for FROZEN in REDUCE, and out of
 * range. Valid for empty tensors (then it may equal the length) and for aliases. */
MFSDP_API int64_t mfsdp_plan_param_offset(const mfsdp_plan *plan, int32_t param,
                                          mfsdp_layout_kind kind);

/* Pieces of a unit, or of all units (unit < 0), ordered by unit, then tensor, then first. *count is
 * set. Piece indices elsewhere count from the first piece of all. NULL if there are none. */
MFSDP_API const mfsdp_piece *mfsdp_plan_pieces(const mfsdp_plan *plan, int32_t unit, int32_t *count);
/* Pieces of one tensor by rising `first`; they are adjacent in the list above. NULL if none. */
MFSDP_API const mfsdp_piece *mfsdp_plan_param_pieces(const mfsdp_plan *plan, int32_t param,
                                                     int32_t *count);
/* Cost that the planner gave to a piece: matrices as described, 0 for element runs. */
MFSDP_API int64_t mfsdp_plan_piece_cost(const mfsdp_plan *plan, int32_t piece);
/* Indices of a unit's parameters in declared order, aliases included. NULL if there are none. */
MFSDP_API const int32_t *mfsdp_plan_unit_params(const mfsdp_plan *plan, int32_t unit,
                                                int32_t *count);

/* Length of a unit's full buffer, a multiple of MFSDP_ALIGN_ELEMENTS; 0 out of range. */
MFSDP_API int64_t mfsdp_plan_unit_count_elements(const mfsdp_plan *plan, int32_t unit,
                                                 mfsdp_layout_kind kind);
/* The same without padding. */
MFSDP_API int64_t mfsdp_plan_unit_payload(const mfsdp_plan *plan, int32_t unit,
                                          mfsdp_layout_kind kind);
/* Dtype of a unit's full buffer: compute for GATHER, grad for REDUCE (`wire` has its own function).
 * F32 for a unit without tensors of that layout. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_dtype(const mfsdp_plan *plan, int32_t unit,
                                            mfsdp_layout_kind kind);
/* Dtype of a unit's gradients on the wire; F32 for a unit without gradients. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_wire(const mfsdp_plan *plan, int32_t unit);
/* Dtype of a unit's masters; F32 for a unit without tensors that are updated. */
MFSDP_API mfsdp_dtype mfsdp_plan_unit_master(const mfsdp_plan *plan, int32_t unit);
/* Length of a rank's segment of a unit, a multiple of MFSDP_ALIGN_ELEMENTS; 0 if it owns nothing. */
MFSDP_API int64_t mfsdp_plan_segment_count(const mfsdp_plan *plan, int32_t unit, int32_t rank,
                                           mfsdp_layout_kind kind);
/* The same without padding. */
MFSDP_API int64_t mfsdp_plan_segment_payload(const mfsdp_plan *plan, int32_t unit, int32_t rank,
                                             mfsdp_layout_kind kind);

/* Elements of a canonical block of an ELEMENTWISE or FROZEN tensor of numel >= 0 elements:
 * max(4096, smallest power of two >= numel / 1024). Independent of the world. */
MFSDP_API int64_t mfsdp_plan_block_elements(int64_t numel);
/* Canonical blocks of the whole plan. */
MFSDP_API int32_t mfsdp_plan_block_count(const mfsdp_plan *plan);
/*
 * Query, then fill. The blocks in tensor order (declared order, then first): the same list, but for
 * `piece`, at every world. Writes the first min(capacity, all) blocks to `out` (NULL if capacity is
 * 0) and the number of all to *count. E_ARGUMENT for NULL or a negative capacity.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_blocks(mfsdp_context *context,
                                                       const mfsdp_plan *plan,
                                                       mfsdp_norm_block *out, int32_t capacity,
                                                       int32_t *count);

/* ---- agreement between ranks ---- */

/* 64-bit hash of the canonical serialization: equal iff (in practice) the plans are equal. */
MFSDP_API uint64_t mfsdp_plan_hash(const mfsdp_plan *plan);
/* The same for one parameter: its description and its pieces. The first parameter whose hash differs
 * between ranks is the one to name. 0 out of range. */
MFSDP_API uint64_t mfsdp_plan_param_hash(const mfsdp_plan *plan, int32_t param);
/*
 * Writes the canonical form: little-endian, no padding, the hash in the last 8 bytes. *needed is
 * always set. Fills `dst` (capacity_nbytes bytes; NULL if 0) only if all of it fits; E_ARGUMENT if
 * capacity_nbytes is neither 0 nor enough.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_serialize(mfsdp_context *context,
                                                          const mfsdp_plan *plan, void *dst,
                                                          size_t capacity_nbytes, size_t *needed);

/* ---- report and audit ---- */

/* A quantity over ranks. max / (sum / world) is its imbalance: mfsdp_plan_spread_ratio. */
typedef struct mfsdp_plan_spread {
  int64_t max, sum;
  int32_t max_rank; /* the lowest rank that has max */
} mfsdp_plan_spread;

typedef struct mfsdp_unit_report {
  int32_t unit, owner_count; /* ranks with a non-empty segment */
  int64_t payload;           /* elements of the unit, without padding */
  int64_t max_segment;       /* the largest payload that one rank owns */
  double gamma;              /* max_segment / (payload / world); 0 for an empty unit */
} mfsdp_unit_report;

/* Which argument proves the bound on the largest cost. */
typedef enum mfsdp_plan_bound {
  MFSDP_BOUND_VOLUME = 1, /* total cost over all ranks, poured over base_load */
  MFSDP_BOUND_LARGEST,    /* the costliest matrix on the least loaded rank */
  MFSDP_BOUND_PIGEONHOLE  /* of k*world + 1 matrices some rank has k + 1 */
} mfsdp_plan_bound;

typedef struct mfsdp_plan_summary {
  size_t struct_nbytes;
  int32_t world, unit_count, matrix_count, piece_count; /* non-empty units and matrices */
  double gamma_max, gamma_mean;      /* over non-empty units; mean unweighted */
  mfsdp_plan_spread cost;            /* base_load included */
  mfsdp_plan_spread resident;        /* owned elements, padding included */
  mfsdp_plan_spread resident_nbytes; /* of masters, compute copies and accumulators: mfsdp_param_resident_nbytes */
  mfsdp_plan_spread sent;            /* elements sent by one DIRECT gather and reduce of each unit, with padding */
  int64_t cost_bound;                /* no plan of these matrices has a smaller cost.max */
  mfsdp_plan_bound bound;            /* the argument that binds */
  double cost_ratio;                 /* cost.max / cost_bound; 1 if both are 0 */
} mfsdp_plan_summary;

/* max * world / sum; 1 if sum is 0. */
MFSDP_API double mfsdp_plan_spread_ratio(mfsdp_plan_spread spread, int32_t world);
/* Bytes that an owned element keeps resident before optimizer state: master, the compute copy if its
 * dtype differs, and an fp32 accumulator; FROZEN: the compute copy alone. */
MFSDP_API int64_t mfsdp_param_resident_nbytes(const mfsdp_param *param);
/*
 * Judges a plan. `units` (unit_capacity entries; NULL if 0) receives the first units, indexed by unit
 * number. E_ARGUMENT for NULL or a struct of another size; E_MEMORY (scratch of O(world + matrices),
 * given back).
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_report(mfsdp_context *context,
                                                       const mfsdp_plan *plan,
                                                       mfsdp_plan_summary *summary,
                                                       mfsdp_unit_report *units,
                                                       int32_t unit_capacity);
MFSDP_API mfsdp_plan_summary mfsdp_plan_summary_default(void);

/* Both callbacks of the audit get `user`. `algorithm` names the optimizer a parameter will really
 * get ("muon", "adamw", ...); it is not asked for FROZEN parameters and aliases. */
typedef void (*mfsdp_plan_line)(void *user, const char *line);
typedef const char *(*mfsdp_plan_algorithm)(void *user, int32_t param);
/*
 * One line per parameter in declared order, without newline, valid during the call:
 *   name [shape] unit U role matrices group G owners algorithm
 * algorithm NULL: "?" stands there, so that nobody takes a guess for a fact. E_ARGUMENT, E_MEMORY.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_audit(mfsdp_context *context,
                                                      const mfsdp_plan *plan,
                                                      mfsdp_plan_algorithm algorithm,
                                                      mfsdp_plan_line line, void *user);

#endif /* MFSDP_PLAN_API_H */
