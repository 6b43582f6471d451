/* SPDX-License-Identifier: MIT */
#include "outcome.h"

#include <stdlib.h>
#include <string.h>

static const struct {
  mfsdp_sim_strategy strategy;
  mfsdp_sim_algorithm algorithm; /* 0: the question's */
} asked[PLAN_PREDICTIONS + PLAN_BANDED] = {
    {MFSDP_SIM_OWNER, MFSDP_SIM_DIRECT},       {MFSDP_SIM_OWNER, MFSDP_SIM_RING},
    {MFSDP_SIM_OWNER, MFSDP_SIM_HIERARCHICAL}, {MFSDP_SIM_OWNER, MFSDP_SIM_NATIVE},
    {MFSDP_SIM_GATHER, MFSDP_SIM_NATIVE},      {MFSDP_SIM_SHARDED, MFSDP_SIM_NATIVE},
    {MFSDP_SIM_EXCHANGE, MFSDP_SIM_NATIVE},    {MFSDP_SIM_ZERO1, (mfsdp_sim_algorithm)0},
    {MFSDP_SIM_OWNER, MFSDP_SIM_DIRECT},       {MFSDP_SIM_OWNER, MFSDP_SIM_RING},
    {MFSDP_SIM_OWNER, MFSDP_SIM_HIERARCHICAL}, {MFSDP_SIM_OWNER, MFSDP_SIM_NATIVE},
};

/* MatrixFSDP by DIRECT on the question's cluster. */
static mfsdp_sim_desc simulation(const plan_question *q) {
  mfsdp_sim_desc desc = mfsdp_sim_desc_default();
  desc.cluster = &q->cluster;
  desc.newton_schulz_steps = q->newton_schulz_steps;
  desc.replica_count = q->replicas;
  desc.model_flops = q->model_flops;
  desc.chunk_nbytes = q->chunk_nbytes;
  return desc;
}

static int predict(mfsdp_context *context, plan_outcome *out, const mfsdp_plan *plan, int index,
                   plan_error *error) {
  const plan_question *q = out->question;
  mfsdp_sim_desc desc = simulation(q);
  plan_prediction *p = &out->predictions[index];
  p->bands = index >= PLAN_PREDICTIONS;
  p->strategy = asked[index].strategy;
  p->algorithm = asked[index].algorithm ? asked[index].algorithm : q->algorithm;
  p->result = mfsdp_sim_result_default();
  desc.plan = plan;
  desc.strategy = p->strategy;
  desc.algorithm = p->algorithm;
  if (mfsdp_simulate(context, &desc, &p->result, NULL, 0) != MFSDP_OK)
    return plan_fail(error, "%s", mfsdp_context_error(context)->message);
  return PLAN_OK;
}

/* Predictions first .. end - 1. */
static int predict_some(mfsdp_context *context, plan_outcome *out, const mfsdp_plan *plan,
                        int first, int end, plan_error *error) {
  int status = PLAN_OK;
  for (int i = first; i < end && status == PLAN_OK; ++i)
    status = predict(context, out, plan, i, error);
  out->prediction_count = end;
  return status;
}

/* The other strategies are asked of whole matrices on owners, and MatrixFSDP beside them: where some
 * became banded, of the plan without. */
static int predict_all(mfsdp_context *context, plan_outcome *out, mfsdp_plan_desc desc,
                       plan_error *error) {
  mfsdp_plan *plan = NULL;
  int status;
  if (out->summary.banded_count == 0)
    return predict_some(context, out, out->plan, 0, PLAN_PREDICTIONS, error);
  desc.allow_banded = 0;
  if (mfsdp_plan_create(context, &desc, &plan) != MFSDP_OK)
    return plan_fail(error, "without bands, to predict the step: %s",
                     mfsdp_context_error(context)->message);
  status = predict_some(context, out, plan, 0, PLAN_PREDICTIONS, error);
  mfsdp_plan_destroy(context, plan);
  if (status != PLAN_OK) return status;
  return predict_some(context, out, out->plan, PLAN_PREDICTIONS, PLAN_PREDICTIONS + PLAN_BANDED,
                      error);
}

/* Units of cost in a second. One of Newton-Schulz is two operations in each step, one of the form two
 * operations, one of elements is taken for a read and a write of 4 bytes. */
static double cost_rate(const plan_question *q) {
  const mfsdp_cluster *c = &q->cluster;
  if (q->cost == PLAN_COST_ELEMENTS) return c->memory_nbytes_per_s / 8.0;
  if (q->cost == PLAN_COST_FORM) return c->flops_per_s / 2.0;
  return mfsdp_cluster_newton_schulz_rate(c) /
         (2.0 * (q->newton_schulz_steps + !q->newton_schulz_steps));
}

/* Units of cost that a byte takes. */
static int64_t wire_cost(const plan_question *q, int32_t world) {
  const mfsdp_cluster *c = &q->cluster;
  const double wire = world > c->ranks_per_node ? c->net_nbytes_per_s : c->node_nbytes_per_s;
  const double units = cost_rate(q);
  if (q->banded_wire_cost >= 0) return q->banded_wire_cost;
  return units > wire && units / wire < 1e12 ? (int64_t)(units / wire) : 1;
}

/* *ns has to last until the plans are made. */
static void set_cost(const plan_question *q, mfsdp_newton_schulz_desc *ns, mfsdp_plan_desc *desc) {
  *ns = mfsdp_newton_schulz_desc_default();
  ns->step_count = q->newton_schulz_steps;
  desc->user = ns; /* read by the form's */
  desc->cost = q->cost == PLAN_COST_ELEMENTS ? mfsdp_plan_cost_elements
               : q->cost == PLAN_COST_FORM   ? mfsdp_newton_schulz_cost
                                             : mfsdp_cost_newton_schulz;
}

int plan_outcome_make(mfsdp_context *context, const plan_question *question, int32_t world,
                      plan_outcome *out, plan_error *error) {
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  const mfsdp_sim_desc ask = simulation(question);
  mfsdp_newton_schulz_desc ns;
  int32_t *nodes = (int32_t *)malloc((size_t)world * sizeof *nodes);
  int status = PLAN_OK;
  memset(out, 0, sizeof *out);
  if (!nodes) return plan_fail(error, "no memory for %d ranks", (int)world);
  for (int32_t r = 0; r < world; ++r)
    nodes[r] = r / question->cluster.ranks_per_node;
  out->question = question;
  out->summary = mfsdp_plan_summary_default();
  desc.params = question->params->list;
  desc.param_count = question->params->count;
  desc.world = world;
  desc.planner = question->planner;
  desc.caps = question->caps;
  desc.node_of_rank = nodes;
  desc.banded_wire_cost = out->banded_wire_cost = wire_cost(question, world);
  desc.allow_banded = desc.banded_wire_cost > 0;
  set_cost(question, &ns, &desc);
  if (mfsdp_simulate_plan(context, &desc, &ask, &out->plan) != MFSDP_OK ||
      mfsdp_plan_report(context, out->plan, &out->summary, NULL, 0) != MFSDP_OK)
    status = plan_fail(error, "%s", mfsdp_context_error(context)->message);
  if (out->summary.banded_count == 0) out->summary.predicted = out->summary.predicted_owned = 0;
  if (status == PLAN_OK) status = predict_all(context, out, desc, error);
  free(nodes);
  if (status != PLAN_OK) plan_outcome_free(context, out);
  return status;
}

void plan_outcome_free(mfsdp_context *context, plan_outcome *outcome) {
  mfsdp_plan_destroy(context, outcome->plan);
  outcome->plan = NULL;
}

/* ---- words ---- */

static const char *scaled(double value, const char *const *units, int count, char text[24]) {
  int i = 0;
  while (value >= 999.5 && i + 1 < count) {
    value /= 1000.0;
    ++i;
  }
  snprintf(text, 24,
           i == 0          ? "%.0f %s"
           : value < 9.995 ? "%.2f %s"
           : value < 99.95 ? "%.1f %s"
                           : "%.0f %s",
           value, units[i]);
  return text;
}

const char *plan_bytes_text(double nbytes, char text[24]) {
  static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  return scaled(nbytes, units, 7, text);
}

const char *plan_count_text(double count, char text[24]) {
  static const char *const units[] = {"", "k", "M", "G", "T", "P", "E"};
  return scaled(count, units, 7, text);
}

const char *plan_cost_name(plan_cost cost) {
  static const char *const cost_names[] = {"newton-schulz", "form", "elements"};
  return cost_names[cost - PLAN_COST_NEWTON_SCHULZ];
}

/* ---- the table ---- */

void plan_question_print(const plan_question *q, FILE *f) {
  int64_t elements[4] = {0, 0, 0, 0};
  int32_t tensors[4] = {0, 0, 0, 0};
  char text[24];
  const mfsdp_cluster *c = &q->cluster;
  for (int32_t i = 0; i < q->params->count; ++i) {
    const mfsdp_param *p = &q->params->list[i];
    int64_t numel = 1;
    if (p->alias_of) continue;
    for (int32_t d = 0; d < p->ndim; ++d)
      numel *= p->shape[d];
    elements[p->role] += numel;
    ++tensors[p->role];
  }
  fprintf(f, "%s: %s elements\n", q->input,
          plan_count_text((double)(elements[1] + elements[2] + elements[3]), text));
  for (int role = MFSDP_ROLE_MATRIX; role <= MFSDP_ROLE_FROZEN; ++role)
    if (tensors[role])
      fprintf(f, "  %-12s %6d tensors  %20lld elements\n", mfsdp_role_name((mfsdp_role)role),
              (int)tensors[role], (long long)elements[role]);
  fprintf(f,
          "cluster: %d ranks a node, %.0f GB/s in a node, %.1f GB/s a rank and %.1f GB/s a node "
          "between nodes, %.0f TFLOP/s, %.0f GB\n",
          (int)c->ranks_per_node, c->node_nbytes_per_s * 1e-9, c->net_nbytes_per_s * 1e-9,
          c->net_node_nbytes_per_s * 1e-9, c->flops_per_s * 1e-12, c->memory_nbytes * 1e-9);
  fprintf(f,
          "step: %d Newton-Schulz steps, each unit gathered twice and reduced once, %d replica%s, "
          "chunks "
          "of %s; times without overlap\n",
          (int)q->newton_schulz_steps, (int)q->replicas, q->replicas == 1 ? "" : "s",
          plan_bytes_text((double)q->chunk_nbytes, text));
}

static const char *strategy_name(const plan_prediction *p) {
  return p->bands ? "with bands" : mfsdp_sim_strategy_name(p->strategy);
}

static void print_prediction(const plan_outcome *o, const plan_prediction *p, FILE *f) {
  const mfsdp_sim_result *r = &p->result;
  char name[48], gather[24], reduce[24], optimizer[24], resident[24];
  snprintf(name, sizeof name, "%s %s", strategy_name(p), mfsdp_sim_algorithm_name(p->algorithm));
  fprintf(f, "  %-24s %10.2f %11.2f %10.2f %10.2f  %9s %9s %9s  %9s%s\n", name,
          r->optimizer_us * 1e-3, r->materialize_us * 1e-3, r->reduce_us * 1e-3, r->step_us * 1e-3,
          plan_bytes_text((double)r->materialize_nbytes.max, gather),
          plan_bytes_text((double)r->reduce_nbytes.max, reduce),
          plan_bytes_text((double)r->optimizer_nbytes.max, optimizer),
          plan_bytes_text((double)r->resident_nbytes.max, resident),
          (double)r->resident_nbytes.max > o->question->cluster.memory_nbytes ? " too big" : "");
}

static void print_bands(const plan_outcome *o, FILE *f) {
  const mfsdp_plan_summary *s = &o->summary;
  char before[24], now[24];
  if (o->banded_wire_cost == 0) return;
  if (s->banded_count == 0) {
    fputs("  --allow-banded: no matrix in bands, none makes the predicted step shorter\n", f);
    return;
  }
  fprintf(f,
          "  --allow-banded: %d of %d matrices in bands; predicted step %s instead of %s units of "
          "cost, a byte at %lld\n",
          (int)s->banded_count, (int)s->matrix_count, plan_count_text((double)s->predicted, now),
          plan_count_text((double)s->predicted_owned, before), (long long)o->banded_wire_cost);
  fputs("  Below, `with bands` is this plan, all else of the plan without bands.\n", f);
}

void plan_outcome_print(const plan_outcome *o, FILE *f) {
  const mfsdp_plan_summary *s = &o->summary;
  char most[24], least[24], held[24], needed[24];
  fprintf(f, "\nworld %d: %d units, %d matrices, %d pieces; planner %s, cost %s, hash %016llx\n",
          (int)s->world, (int)s->unit_count, (int)s->matrix_count, (int)s->piece_count,
          mfsdp_planner_name(mfsdp_plan_planner(o->plan)), plan_cost_name(o->question->cost),
          (unsigned long long)mfsdp_plan_hash(o->plan));
  fprintf(f, "  gamma, largest owner of a unit over an even share: max %.3f, mean %.3f\n",
          s->gamma_max, s->gamma_mean);
  fprintf(f, "  nodes that own a matrix of a unit, of those that could: mean %.3f, least %.3f\n",
          s->node_spread_mean, s->node_spread_min);
  fprintf(f, "  max over mean of ranks: compute %.3f, resident bytes %.3f, wire (direct) %.3f\n",
          mfsdp_plan_spread_ratio(s->cost, s->world),
          mfsdp_plan_spread_ratio(s->resident_nbytes, s->world),
          mfsdp_plan_spread_ratio(s->sent, s->world));
  fprintf(f,
          "  largest cost %s on rank %d; proven bound %s (%s): ratio %.4f\n"
          "  largest resident bytes before optimizer state %s; proven bound %s (%s): ratio %.4f\n",
          plan_count_text((double)s->cost.max, most), (int)s->cost.max_rank,
          plan_count_text((double)s->cost_bound, least), mfsdp_plan_bound_name(s->bound),
          s->cost_ratio, plan_bytes_text((double)s->resident_nbytes.max, held),
          plan_bytes_text((double)s->resident_nbytes_bound, needed),
          mfsdp_plan_bound_name(s->resident_bound),
          s->resident_nbytes_bound > 0
              ? (double)s->resident_nbytes.max / (double)s->resident_nbytes_bound
              : 1.0);
  print_bands(o, f);
  fprintf(f, "  %-24s %10s %11s %10s %10s  %9s %9s %9s  %9s\n", "strategy, collective", "optimizer",
          "materialize", "reduce", "step", "gather", "reduce", "optimizer", "resident");
  fprintf(f, "  %-24s %10s %11s %10s %10s  %29s  %9s\n", "", "ms", "ms", "ms", "ms",
          "sent by the busiest rank", "max");
  for (int i = 0; i < o->prediction_count; ++i)
    print_prediction(o, &o->predictions[i], f);
  fputs("  Slices of gather, sharded-products and all-to-all move by native, so compare them with\n"
        "  matrixfsdp native; zero1-owner moves by --collective.\n",
        f);
}

/* ---- JSON ---- */

static void json_text(const char *text, FILE *f) {
  fputc('"', f);
  for (; *text; ++text) {
    if (*text == '"' || *text == '\\') fputc('\\', f);
    if ((unsigned char)*text < 0x20)
      fprintf(f, "\\u%04x", (unsigned)(unsigned char)*text);
    else
      fputc(*text, f);
  }
  fputc('"', f);
}

static void json_spread(const char *name, mfsdp_plan_spread spread, FILE *f) {
  fprintf(f, ",\"%s_nbytes_max\":%lld,\"%s_nbytes_sum\":%lld", name, (long long)spread.max, name,
          (long long)spread.sum);
}

void plan_outcome_json(const plan_outcome *o, int first, FILE *f) {
  const mfsdp_plan_summary *s = &o->summary;
  for (int i = 0; i < o->prediction_count; ++i) {
    const plan_prediction *p = &o->predictions[i];
    const mfsdp_sim_result *r = &p->result;
    fputs(first && i == 0 ? "{\"input\":" : ",\n{\"input\":", f);
    json_text(o->question->input, f);
    fprintf(f,
            ",\"world\":%d,\"planner\":\"%s\",\"cost\":\"%s\",\"hash\":\"%016llx\",\"units\":%d,"
            "\"matrices\":%d,\"gamma_max\":%.6g,\"gamma_mean\":%.6g,\"compute_imbalance\":%.6g,"
            "\"resident_imbalance\":%.6g,\"wire_imbalance\":%.6g,\"cost_max\":%lld,"
            "\"cost_bound\":%lld,\"bound\":\"%s\",\"cost_ratio\":%.6g,"
            "\"resident_nbytes\":%lld,\"resident_nbytes_bound\":%lld,\"resident_bound\":\"%s\","
            "\"node_spread_mean\":%.6g,\"node_spread_min\":%.6g,\"banded\":%d,"
            "\"banded_wire_cost\":%lld,\"predicted_cost\":%lld,\"predicted_cost_owned\":%lld",
            (int)s->world, mfsdp_planner_name(mfsdp_plan_planner(o->plan)),
            plan_cost_name(o->question->cost), (unsigned long long)mfsdp_plan_hash(o->plan),
            (int)s->unit_count, (int)s->matrix_count, s->gamma_max, s->gamma_mean,
            mfsdp_plan_spread_ratio(s->cost, s->world),
            mfsdp_plan_spread_ratio(s->resident_nbytes, s->world),
            mfsdp_plan_spread_ratio(s->sent, s->world), (long long)s->cost.max,
            (long long)s->cost_bound, mfsdp_plan_bound_name(s->bound), s->cost_ratio,
            (long long)s->resident_nbytes.max, (long long)s->resident_nbytes_bound,
            mfsdp_plan_bound_name(s->resident_bound), s->node_spread_mean, s->node_spread_min,
            (int)s->banded_count, (long long)o->banded_wire_cost, (long long)s->predicted,
            (long long)s->predicted_owned);
    fprintf(f,
            ",\"strategy\":\"%s\",\"collective\":\"%s\",\"materialize_us\":%.6g,\"reduce_us\":%.6g,"
            "\"optimizer_compute_us\":%.6g,\"optimizer_wire_us\":%.6g,\"optimizer_us\":%.6g,"
            "\"model_us\":%.6g,\"step_us\":%.6g,\"overlapped_us\":%.6g",
            strategy_name(p), mfsdp_sim_algorithm_name(p->algorithm), r->materialize_us,
            r->reduce_us, r->optimizer_compute_us, r->optimizer_wire_us, r->optimizer_us,
            r->model_us, r->step_us, r->overlapped_us);
    json_spread("materialize", r->materialize_nbytes, f);
    json_spread("reduce", r->reduce_nbytes, f);
    json_spread("optimizer", r->optimizer_nbytes, f);
    json_spread("resident", r->resident_nbytes, f);
    fputc('}', f);
  }
}
