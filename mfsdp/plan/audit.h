/* SPDX-License-Identifier: MIT */
/*
 * plan/audit.h - judges a plan in numbers, and lists what every tensor will really get.
 *
 *   static void print(void *user, const char *line) { fprintf((FILE *)user, "%s\n", line); }
 *   mfsdp_plan_audit(&context, plan, algorithm_of, print, stderr);
 *
 *   mfsdp_plan_summary s = mfsdp_plan_summary_default();
 *   mfsdp_plan_report(&context, plan, &s, NULL, 0);
 *   // s.cost_ratio: how far the largest optimizer cost is above what any plan must have
 *
 * Does not: change a plan, or predict seconds.
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_AUDIT_H
#define MFSDP_PLAN_AUDIT_H

#include "bound.h"
#include "create.h"

/* ---- report ---- */

/* Scratch of a report, by rank and by matrix. */
typedef struct mfsdp__report {
  mfsdp_context *context;
  const mfsdp_plan *plan;
  mfsdp_plan_summary *out;
  int64_t *cost, *resident, *nbytes, *sent; /* world */
  int64_t *exchanged, *bands;               /* world; bands: resident bytes of bands */
  mfsdp__keyed *bases;                      /* world */
  mfsdp__keyed *sorted;                     /* matrices */
  int64_t *prefix;                          /* matrices + 1 */
  int32_t *mark;                            /* world, by node: last unit it was seen in, + 1 */
  int32_t matrix_count;
} mfsdp__report;

/* The first piece of a matrix stands for it: a band may be any of many. */
MFSDP_API int mfsdp__piece_leads(const mfsdp_piece *piece) {
  return piece->matrix >= 0 && piece->first == piece->matrix_first;
}

/* Does it stand for a matrix that the planner put into bands? */
MFSDP_API int mfsdp__piece_chosen(const mfsdp_plan *plan, const mfsdp_piece *piece) {
  return mfsdp__piece_leads(piece) && piece->placement == MFSDP_PLACEMENT_BANDED &&
         plan->params[piece->param].placement != MFSDP_PLACEMENT_BANDED;
}

/* Costs of all matrices on top of base loads: at home, or where all is replicated at every rank. */
MFSDP_API void mfsdp__plan_costs(const mfsdp_plan *plan, int64_t *out) {
  int64_t everywhere = 0;
  int32_t i;
  memset(out, 0, (size_t)plan->world * sizeof(*out));
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    if (piece->placement == MFSDP_PLACEMENT_REPLICATED)
      everywhere += plan->costs[i];
    else
      out[piece->home] += plan->costs[i];
  }
  for (i = 0; i < plan->world; ++i)
    out[i] += everywhere + (plan->base_load ? plan->base_load[i] : 0);
}

MFSDP_API mfsdp_plan_spread mfsdp__spread(const int64_t *values, int32_t world) {
  mfsdp_plan_spread spread;
  int32_t r;
  spread.max = values[0];
  spread.sum = values[0];
  spread.max_rank = 0;
  for (r = 1; r < world; ++r) {
    spread.sum += values[r];
    if (values[r] <= spread.max) continue;
    spread.max = values[r];
    spread.max_rank = r;
  }
  return spread;
}

MFSDP_API void mfsdp__report_unit(const mfsdp_plan *plan, int32_t unit, mfsdp_unit_report *out) {
  const mfsdp__plan_unit *table = &plan->units[unit];
  int32_t i;
  memset(out, 0, sizeof(*out));
  out->unit = unit;
  out->owner_count = table->segment_count;
  out->payload = table->payload[0];
  for (i = 0; i < table->segment_count; ++i) {
    const int64_t owned = plan->segments[table->segment_first + i].payload[0];
    if (owned > out->max_segment) out->max_segment = owned;
  }
  if (out->payload > 0)
    out->gamma = (double)out->max_segment * (double)plan->world / (double)out->payload;
}

MFSDP_API void mfsdp__report_units(const mfsdp_plan *plan, mfsdp_plan_summary *out,
                                   mfsdp_unit_report *units, int32_t capacity) {
  double sum = 0.0;
  int32_t u;
  for (u = 0; u < plan->unit_count; ++u) {
    mfsdp_unit_report report;
    mfsdp__report_unit(plan, u, &report);
    if (u < capacity) units[u] = report;
    if (report.payload == 0) continue;
    ++out->unit_count;
    sum += report.gamma;
    if (report.gamma > out->gamma_max) out->gamma_max = report.gamma;
  }
  if (out->unit_count > 0) out->gamma_mean = sum / out->unit_count;
}

/* Nodes that own, or are home to, a matrix of `unit`; *matrices receives how many it has. */
MFSDP_API int32_t mfsdp__report_nodes_of(mfsdp__report *report, int32_t unit, int32_t *matrices) {
  const mfsdp_plan *plan = report->plan;
  const int32_t first = plan->units[unit].piece_first;
  int32_t nodes = 0, i;
  *matrices = 0;
  for (i = first; i < first + plan->units[unit].piece_count; ++i) {
    const int32_t home = plan->pieces[i].home;
    const int32_t node = plan->node_of_rank ? plan->node_of_rank[home] : 0;
    if (!mfsdp__piece_leads(&plan->pieces[i])) continue;
    ++*matrices;
    nodes += report->mark[node] != unit + 1;
    report->mark[node] = unit + 1;
  }
  return nodes;
}

/* How widely the matrices of units are spread over nodes. */
MFSDP_API void mfsdp__report_nodes(mfsdp__report *report, mfsdp_unit_report *units,
                                   int32_t capacity) {
  const mfsdp_plan *plan = report->plan;
  mfsdp_plan_summary *out = report->out;
  double sum = 0.0;
  int32_t all = plan->node_of_rank ? 0 : 1, with_matrices = 0, u, r;
  for (r = 0; plan->node_of_rank && r < plan->world; ++r) {
    all += report->mark[plan->node_of_rank[r]] == 0;
    report->mark[plan->node_of_rank[r]] = -1;
  }
  out->node_spread_min = out->node_spread_mean = 1.0;
  for (u = 0; u < plan->unit_count; ++u) {
    int32_t matrices;
    const int32_t nodes = mfsdp__report_nodes_of(report, u, &matrices);
    const double spread = matrices > 0 ? (double)nodes / (matrices < all ? matrices : all) : 1.0;
    if (u < capacity) units[u].node_count = nodes;
    if (matrices == 0) continue;
    ++with_matrices;
    sum += spread;
    if (spread < out->node_spread_min) out->node_spread_min = spread;
  }
  if (with_matrices > 0) out->node_spread_mean = sum / with_matrices;
}

/* The spread of `what`, whose sum may not fit: where every rank carries everything it is world
 * times as much as the plan's. */
MFSDP_API mfsdp_status mfsdp__report_spread(mfsdp__report *report, const char *what,
                                            const int64_t *values, mfsdp_plan_spread *out) {
  int64_t sum = 0;
  int32_t r;
  for (r = 0; r < report->plan->world; ++r)
    if (!mfsdp_i64_add(sum, values[r], &sum))
      return MFSDP_FAIL(report->context, MFSDP_E_OVERFLOW,
                        "plan report: %s of all ranks pass 64 bits at rank %d", what, (int)r);
  *out = mfsdp__spread(values, report->plan->world);
  return MFSDP_OK;
}

/* What each rank holds and computes. */
MFSDP_API mfsdp_status mfsdp__report_ranks(mfsdp__report *report) {
  const mfsdp_plan *plan = report->plan;
  int64_t elements = 0, bytes = 0; /* what every rank holds */
  int32_t i;
  mfsdp__plan_costs(plan, report->cost);
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    const int64_t padded = mfsdp__aligned(piece->count);
    const int64_t nbytes = padded * mfsdp_param_resident_nbytes(&plan->params[piece->param]);
    if (piece->placement == MFSDP_PLACEMENT_REPLICATED) {
      elements += padded;
      bytes += nbytes;
      continue;
    }
    report->resident[piece->owner] += padded;
    report->nbytes[piece->owner] += nbytes;
    if (piece->placement != MFSDP_PLACEMENT_BANDED) continue;
    report->bands[piece->owner] += nbytes;
    report->out->banded_count += mfsdp__piece_leads(piece);
    report->out->chosen_count += mfsdp__piece_chosen(plan, piece);
    if (piece->owner == piece->home) continue;
    report->exchanged[piece->owner] += piece->count;
    report->exchanged[piece->home] += piece->count;
  }
  for (i = 0; i < plan->world; ++i) {
    report->resident[i] += elements;
    report->nbytes[i] += bytes;
  }
  report->out->exchanged =
      mfsdp__spread(report->exchanged, plan->world); /* each element twice at most */
  MFSDP_TRY(mfsdp__report_spread(report, "costs", report->cost, &report->out->cost));
  MFSDP_TRY(mfsdp__report_spread(report, "elements", report->resident, &report->out->resident));
  return mfsdp__report_spread(report, "bytes", report->nbytes, &report->out->resident_nbytes);
}

/*
 * Elements each rank sends in one DIRECT gather and one DIRECT reduce of every unit: its own
 * segment to world - 1 peers, and its contribution to every segment that is not its own. Where all is
 * REPLICATED, sums are gathered instead of parameters, so nothing of FROZEN tensors.
 */
MFSDP_API mfsdp_status mfsdp__report_sent(mfsdp__report *report) {
  const mfsdp_plan *plan = report->plan;
  int64_t reduced = 0, sent;
  int32_t u, r, i;
  for (u = 0; u < plan->unit_count; ++u)
    reduced += plan->units[u].payload[1];
  for (r = 0; r < plan->world; ++r)
    report->sent[r] = reduced;
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    if (piece->placement == MFSDP_PLACEMENT_REPLICATED && piece->grad_unit_offset < 0) continue;
    if (!mfsdp_i64_mul(piece->count, plan->world - 1, &sent) ||
        !mfsdp_i64_add(report->sent[piece->owner], sent, &report->sent[piece->owner]))
      return MFSDP_FAIL(report->context, MFSDP_E_OVERFLOW,
                        "plan report: elements sent by rank %d pass 64 bits", (int)piece->owner);
    if (piece->grad_unit_offset >= 0) report->sent[piece->owner] -= piece->count;
  }
  return mfsdp__report_spread(report, "elements sent", report->sent, &report->out->sent);
}

/* Sorts the matrices of the plan by falling cost or bytes and proves a bound on the largest sum of
 * it on a rank: the arguments of plan/bound.h. Bands lie where they must: their bytes are loads that
 * ranks start from. */
MFSDP_API mfsdp__bound mfsdp__report_prove(mfsdp__report *report, int by_nbytes) {
  const mfsdp_plan *plan = report->plan;
  int32_t i, n = 0;
  for (i = 0; i < plan->piece_count; ++i) {
    const mfsdp_piece *piece = &plan->pieces[i];
    if (!mfsdp__piece_leads(piece)) continue;
    if (by_nbytes && piece->placement == MFSDP_PLACEMENT_BANDED) continue;
    report->sorted[n].key =
        -(by_nbytes ? mfsdp__padded_nbytes(&plan->params[piece->param], piece->count)
                    : plan->costs[i]);
    report->sorted[n++].id = i;
  }
  return mfsdp__bound_prove(report->sorted, report->prefix, n,
                            by_nbytes ? report->bands : plan->base_load, report->bases,
                            plan->world);
}

/* Cost: matrices alone. Bytes: matrices whole, and the tails fill what is left. Where all is
 * REPLICATED, nothing is placed: what each rank carries is the least. */
MFSDP_API void mfsdp__report_bounds(mfsdp__report *report) {
  mfsdp_plan_summary *out = report->out;
  const mfsdp_plan *plan = report->plan;
  const int64_t world = plan->world, sum = out->resident_nbytes.sum;
  mfsdp__bound bound;
  if (plan->piece_count > 0 && plan->pieces[0].placement == MFSDP_PLACEMENT_REPLICATED) {
    out->cost_bound = out->cost.max;
    out->resident_nbytes_bound = out->resident_nbytes.max;
    out->bound = out->resident_bound = MFSDP_BOUND_VOLUME;
    return;
  }
  bound = mfsdp__report_prove(report, 0);
  out->cost_bound = bound.value;
  out->bound = bound.kind;
  bound = mfsdp__report_prove(report, 1);
  out->resident_nbytes_bound = sum / world + (sum % world > 0);
  out->resident_bound = MFSDP_BOUND_VOLUME;
  if (bound.value <= out->resident_nbytes_bound) return;
  out->resident_nbytes_bound = bound.value;
  out->resident_bound = bound.kind;
}

MFSDP_API mfsdp_status mfsdp__report_run(mfsdp__report *report, mfsdp_unit_report *units,
                                         int32_t capacity) {
  mfsdp_context *context = report->context;
  const int32_t world = report->plan->world;
  mfsdp_plan_summary *out = report->out;
  MFSDP__PLAN_ALLOC(context, report->cost, world, "plan report: costs");
  MFSDP__PLAN_ALLOC(context, report->resident, world, "plan report: elements");
  MFSDP__PLAN_ALLOC(context, report->nbytes, world, "plan report: bytes");
  MFSDP__PLAN_ALLOC(context, report->sent, world, "plan report: traffic");
  MFSDP__PLAN_ALLOC(context, report->exchanged, world, "plan report: exchange of bands");
  MFSDP__PLAN_ALLOC(context, report->bands, world, "plan report: bytes of bands");
  MFSDP__PLAN_ALLOC(context, report->bases, world, "plan report: base loads");
  MFSDP__PLAN_ALLOC(context, report->sorted, report->matrix_count, "plan report: order");
  MFSDP__PLAN_ALLOC(context, report->prefix, (int64_t)report->matrix_count + 1,
                    "plan report: sums");
  MFSDP__PLAN_ALLOC(context, report->mark, world, "plan report: nodes");
  mfsdp__report_nodes(report, units, capacity);
  MFSDP_TRY(mfsdp__report_ranks(report));
  MFSDP_TRY(mfsdp__report_sent(report));
  mfsdp__report_bounds(report);
  out->cost_ratio = out->cost_bound > 0 ? (double)out->cost.max / (double)out->cost_bound : 1.0;
  return MFSDP_OK;
}

/*
 * Judges a plan. `units` (unit_capacity entries; NULL if 0) receives the first units, indexed by
 * unit number. E_ARGUMENT for a NULL or a struct of another size; E_OVERFLOW if a sum over all ranks
 * passes 64 bits; E_MEMORY. Scratch of O(world + matrices) is given back.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_report(mfsdp_context *context,
                                                       const mfsdp_plan *plan,
                                                       mfsdp_plan_summary *summary,
                                                       mfsdp_unit_report *units,
                                                       int32_t unit_capacity) {
  mfsdp__report report;
  mfsdp_status status;
  int32_t i;
  if (plan == NULL || summary == NULL || unit_capacity < 0 || (units == NULL && unit_capacity > 0))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan report: plan, summary and room for unit_capacity %d are needed",
                      (int)unit_capacity);
  if (summary->struct_nbytes != sizeof(*summary))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "plan report: summary.struct_nbytes is %zu, needs %zu (use "
                      "mfsdp_plan_summary_default)",
                      summary->struct_nbytes, sizeof(*summary));
  memset(&report, 0, sizeof(report));
  report.context = context;
  report.plan = plan;
  report.out = summary;
  *summary = mfsdp_plan_summary_default();
  for (i = 0; i < plan->piece_count; ++i)
    report.matrix_count += mfsdp__piece_leads(&plan->pieces[i]);
  summary->world = plan->world;
  summary->predicted_owned = plan->predicted_owned;
  summary->predicted = plan->predicted;
  summary->matrix_count = report.matrix_count;
  summary->piece_count = plan->piece_count;
  mfsdp__report_units(plan, summary, units, unit_capacity);
  status = mfsdp__report_run(&report, units, unit_capacity);
  MFSDP__PLAN_FREE(context, report.cost, plan->world);
  MFSDP__PLAN_FREE(context, report.resident, plan->world);
  MFSDP__PLAN_FREE(context, report.nbytes, plan->world);
  MFSDP__PLAN_FREE(context, report.sent, plan->world);
  MFSDP__PLAN_FREE(context, report.exchanged, plan->world);
  MFSDP__PLAN_FREE(context, report.bands, plan->world);
  MFSDP__PLAN_FREE(context, report.bases, plan->world);
  MFSDP__PLAN_FREE(context, report.sorted, report.matrix_count);
  MFSDP__PLAN_FREE(context, report.prefix, (int64_t)report.matrix_count + 1);
  MFSDP__PLAN_FREE(context, report.mark, plan->world);
  return status;
}

/*
 * The cost each rank carries under this plan, its base_load included: what the plan of the next
 * group takes as base_load. `out` has world entries. E_ARGUMENT for a NULL or another world.
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_loads(mfsdp_context *context,
                                                      const mfsdp_plan *plan, int64_t *out,
                                                      int32_t world) {
  if (plan == NULL || out == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan loads: %s is NULL",
                      plan == NULL ? "plan" : "out");
  if (world != plan->world)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan loads: world is %d, needs %d", (int)world,
                      (int)plan->world);
  mfsdp__plan_costs(plan, out);
  return MFSDP_OK;
}

/* ---- audit ---- */

/* Both callbacks get the audit's `user`. */
typedef void (*mfsdp_plan_line)(void *user, const char *line);
typedef const char *(*mfsdp_plan_algorithm)(void *user, int32_t param);

/* Text that grows to the right and is cut at the end of its buffer. */
typedef struct mfsdp__text {
  char *data;
  size_t capacity, used;
} mfsdp__text;

MFSDP_API MFSDP_FORMAT(2, 3) void mfsdp__text_add(mfsdp__text *text, const char *format, ...) {
  va_list arguments;
  int length;
  va_start(arguments, format);
  length = vsnprintf(text->data + text->used, text->capacity - text->used, format, arguments);
  va_end(arguments);
  if (length < 0) return;
  text->used += (size_t)length;
  if (text->used >= text->capacity) text->used = text->capacity - 1;
}

/* Owners or homes in the order of the pieces; a list longer than this ends in "...". */
#define MFSDP__AUDIT_OWNERS 16

/* Whether a piece stands in the list: bands, or what is not; of a matrix in bands the first. */
MFSDP_API int mfsdp__audit_lists(const mfsdp_piece *piece, int banded) {
  if (piece->placement != MFSDP_PLACEMENT_BANDED) return !banded;
  return banded && mfsdp__piece_leads(piece);
}

MFSDP_API void mfsdp__audit_list(mfsdp__text *text, const mfsdp_piece *pieces, int32_t count,
                                 int banded, const char *what) {
  int32_t i, listed = 0;
  for (i = 0; i < count; ++i) {
    if (!mfsdp__audit_lists(&pieces[i], banded)) continue;
    if (listed++ == 0) mfsdp__text_add(text, "  %s", what);
    if (listed <= MFSDP__AUDIT_OWNERS) mfsdp__text_add(text, " %d", (int)pieces[i].home);
  }
  if (listed > MFSDP__AUDIT_OWNERS)
    mfsdp__text_add(text, " ... (%d %s)", (int)listed, banded ? "matrices" : "pieces");
}

MFSDP_API void mfsdp__audit_owners(mfsdp__text *text, const mfsdp_plan *plan, int32_t param) {
  int32_t i, count, owned = 0, banded = 0;
  const mfsdp_piece *pieces = mfsdp_plan_param_pieces(plan, param, &count);
  for (i = 0; i < count; ++i) {
    owned += mfsdp__audit_lists(&pieces[i], 0);
    banded += mfsdp__audit_lists(&pieces[i], 1);
  }
  if (count == 0)
    mfsdp__text_add(text, "  owner none (empty)");
  else if (pieces[0].placement == MFSDP_PLACEMENT_REPLICATED)
    mfsdp__audit_list(text, pieces, count, 0, "replicated, sums at");
  else
    mfsdp__audit_list(text, pieces, count, 0, owned == 1 ? "owner" : "owners");
  if (banded > 0)
    mfsdp__text_add(text, plan->params[param].placement == MFSDP_PLACEMENT_BANDED
                              ? "  banded"
                              : "  banded by choice");
  mfsdp__audit_list(text, pieces, count, 1, banded == 1 ? "home" : "homes");
}

/* What allow_banded has come to. */
MFSDP_API void mfsdp__audit_choice(mfsdp__text *text, const mfsdp_plan *plan) {
  int32_t i, matrices = 0, chosen = 0;
  for (i = 0; i < plan->piece_count; ++i) {
    matrices += mfsdp__piece_leads(&plan->pieces[i]);
    chosen += mfsdp__piece_chosen(plan, &plan->pieces[i]);
  }
  mfsdp__text_add(text,
                  "allow_banded: %d of %d matrices banded by choice, predicted step %lld units "
                  "of cost instead of %lld",
                  (int)chosen, (int)matrices, (long long)plan->predicted,
                  (long long)plan->predicted_owned);
}

MFSDP_API void mfsdp__audit_line(mfsdp__text *text, const mfsdp_plan *plan, int32_t index,
                                 mfsdp_plan_algorithm algorithm, void *user) {
  const mfsdp_param *param = &plan->params[index];
  const int32_t matrices = plan->infos[index].matrix_count;
  const char *optimizer = "?";
  int32_t d;
  mfsdp__text_add(text, "%s  [", param->name);
  for (d = 0; d < param->ndim; ++d)
    mfsdp__text_add(text, d ? ",%lld" : "%lld", (long long)param->shape[d]);
  mfsdp__text_add(text, "]  unit %d  %s", (int)param->unit, mfsdp_role_name(param->role));
  if (param->alias_of != NULL) {
    mfsdp__text_add(text, "  alias of %s", param->alias_of);
    return;
  }
  if (param->role == MFSDP_ROLE_MATRIX)
    mfsdp__text_add(text, " %s -> %d %s", mfsdp_view_name(param->view), (int)matrices,
                    matrices == 1 ? "matrix" : "matrices");
  mfsdp__text_add(text, "  group %d", (int)param->hyper_group);
  mfsdp__audit_owners(text, plan, index);
  if (param->role == MFSDP_ROLE_FROZEN)
    optimizer = "none";
  else if (algorithm != NULL)
    optimizer = algorithm(user, index);
  mfsdp__text_add(text, "  %s", optimizer ? optimizer : "?");
}

/*
 * Calls `line` once per parameter in declared order, without a newline; the text is valid during
 * the call: NAME  [SHAPE]  unit U  ROLE [VIEW -> N matrices]  group G  owners R R ...  ALGORITHM
 *   NAME  [SHAPE]  unit U  ROLE  alias of NAME
 * REPLICATED tensors have "replicated, sums at R R ..." in place of owners; BANDED matrices "banded
 * homes R R ..." ("banded by choice" where allow_banded did it), behind the owners of other matrices of
 * the tensor where there are such. With allow_banded a last line says how many matrices it moved, and
 * the predicted step with and without.
 * `algorithm` names the optimizer a parameter will really get ("muon", "adamw"); it is not asked
 * for FROZEN parameters ("none") and aliases. NULL, or a NULL from it, prints "?", so that nobody
 * takes a guess for a fact. E_ARGUMENT for a NULL plan or line; E_MEMORY (one line of scratch,
 * given back).
 */
MFSDP_API MFSDP_CHECKED mfsdp_status mfsdp_plan_audit(mfsdp_context *context,
                                                      const mfsdp_plan *plan,
                                                      mfsdp_plan_algorithm algorithm,
                                                      mfsdp_plan_line line, void *user) {
  mfsdp__text text;
  size_t longest = 0;
  int32_t i;
  if (plan == NULL || line == NULL)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "plan audit: %s is NULL",
                      plan == NULL ? "plan" : "line");
  for (i = 0; i < plan->param_count; ++i) {
    const size_t length = strlen(plan->params[i].name);
    if (length > longest) longest = length;
  }
  text.capacity = 2 * longest + 896; /* two names, 8 dimensions, 2 * 16 ranks, numbers and words */
  MFSDP__PLAN_ALLOC(context, text.data, text.capacity, "plan audit: line");
  for (i = 0; i < plan->param_count; ++i) {
    text.used = 0;
    mfsdp__audit_line(&text, plan, i, algorithm, user);
    line(user, text.data);
  }
  if (plan->allow_banded) {
    text.used = 0;
    mfsdp__audit_choice(&text, plan);
    line(user, text.data);
  }
  MFSDP__PLAN_FREE(context, text.data, text.capacity);
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_AUDIT_H */
