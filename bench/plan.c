/* SPDX-License-Identifier: MIT */
/*
 * plan.c - the planner on the shapes of public models and at scale, and what its plans would take.
 *
 * Per model and world, BALANCED with Newton-Schulz costs:
 *   max cost      the largest optimizer cost of a rank over the proven bound; the limit column names
 *                 the argument that binds, the peer is SCOPE_GREEDY by elements
 *   resident max  bytes on the fullest rank over the mean; the limit is what no plan can beat
 *   plan time     from description to plan, this thread alone
 *   plan memory   peak of the allocator while the plan is made
 * `wrong` counts elements that are not owned exactly once. Then the same models planned by the work of
 * the forms that run (newton_schulz/cost.h) against plans by full products, judged by the former; these
 * are integers, the same everywhere. Then 100,000 tensors on 16,384 ranks, and
 * the published step times with more ranks (support/headline.h). Writes the tables as
 * build/bench/plan.md and the charts as build/bench/plan.svg.
 */
#include "support/bench.h"
#include "support/headline.h"

#include "mfsdp/newton_schulz.h"
#include "mfsdp/plan.h"
#include "plan/file.h"
#include "plan/models.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_REPEATS 5

typedef struct measured {
  mfsdp_plan_summary summary;
  double seconds;
  size_t peak_nbytes;
  int64_t matrix_nbytes; /* of the matrices on the rank that has most of them */
  int64_t most_work;     /* Newton-Schulz work of the rank that has most of it */
  int64_t wrong;
} measured;

/* What was seen over all models. */
typedef struct worst {
  double cost, resident, seconds;
  int count, filled, filled_level, bound_met;
} worst;

/* Elements of a tensor that have no owner or more than one. */
static int64_t count_wrong(const mfsdp_plan *plan) {
  int64_t wrong = 0;
  int32_t i, k, count;
  for (i = 0; i < mfsdp_plan_param_count(plan); ++i) {
    const mfsdp_piece *pieces = mfsdp_plan_param_pieces(plan, i, &count);
    int64_t next = 0;
    if (mfsdp_plan_param(plan, i)->alias_of != NULL) continue;
    for (k = 0; k < count; ++k) {
      wrong += llabs((long long)(pieces[k].first - next));
      next = pieces[k].first + pieces[k].count;
    }
    wrong += llabs((long long)(mfsdp_plan_param_numel(plan, i) - next));
  }
  return wrong;
}

/* Bytes and Newton-Schulz work of the matrices on the ranks that have most of them. */
static int count_matrices(const mfsdp_plan *plan, measured *out) {
  const size_t world = (size_t)mfsdp_plan_world(plan);
  int64_t *held = (int64_t *)calloc(2 * world, sizeof(*held));
  int32_t count, k;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  if (held == NULL) return 1;
  out->matrix_nbytes = out->most_work = 0;
  for (k = 0; k < count; ++k) {
    int64_t *nbytes = &held[pieces[k].owner], *work = nbytes + world;
    int64_t padded = 0, units = 0;
    if (pieces[k].matrix < 0 || !mfsdp_i64_align(pieces[k].count, &padded) ||
        !mfsdp_cost_newton_schulz_units(pieces[k].rows, pieces[k].cols, &units))
      continue;
    *nbytes += padded * mfsdp_param_resident_nbytes(mfsdp_plan_param(plan, pieces[k].param));
    *work += units;
    if (*nbytes > out->matrix_nbytes) out->matrix_nbytes = *nbytes;
    if (*work > out->most_work) out->most_work = *work;
  }
  free(held);
  return 0;
}

static int fail(mfsdp_context *context) {
  fprintf(stderr, "plan: %s\n", mfsdp_context_error(context)->message);
  return 1;
}

/* Makes the plan `repeats` times; the median time. */
static int measure(const mfsdp_plan_desc *desc, int repeats, measured *out) {
  double seconds[MOST_REPEATS];
  int i;
  for (i = 0; i < repeats; ++i) {
    const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    mfsdp_context context;
    mfsdp_plan *plan;
    double start;
    if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK) return fail(&context);
    start = bench_now();
    if (mfsdp_plan_create(&context, desc, &plan) != MFSDP_OK) return fail(&context);
    seconds[i] = bench_now() - start;
    out->peak_nbytes = context.total_peak_nbytes;
    out->summary = mfsdp_plan_summary_default();
    if (mfsdp_plan_report(&context, plan, &out->summary, NULL, 0) != MFSDP_OK)
      return fail(&context);
    out->wrong = count_wrong(plan);
    if (count_matrices(plan, out)) return 1;
    mfsdp_plan_destroy(&context, plan);
    if (mfsdp_context_destroy(&context) != MFSDP_OK) return fail(&context);
  }
  out->seconds = bench_summarize(seconds, repeats).median;
  return 0;
}

static void add(bench_report *report, const char *name, const char *metric, double value,
                const char *unit, const char *limit, double ratio, int64_t wrong) {
  bench_row row = bench_row_default();
  row.bench = report->bench;
  row.name = name;
  row.metric = metric;
  row.value = value;
  row.unit = unit;
  row.limit = limit;
  row.ratio_to_limit = ratio;
  row.wrong = wrong;
  bench_add(report, &row);
}

static void note(worst *all, const measured *m, double mean) {
  const double resident = (double)m->summary.resident_nbytes.max / mean;
  const int filled = (double)m->matrix_nbytes <= mean;
  ++all->count;
  if (m->summary.cost_ratio > all->cost) all->cost = m->summary.cost_ratio;
  if (m->seconds > all->seconds) all->seconds = m->seconds;
  all->filled += filled;
  all->filled_level += filled && resident <= 1.05;
  if (filled && resident > all->resident) all->resident = resident;
  all->bound_met += !filled && (double)m->summary.resident_nbytes.max <=
                                   1.05 * (double)m->summary.resident_nbytes_bound;
}

/* A row of the table for docs: cost over its bound, bytes over the mean and over their bound. */
static void put_case(FILE *f, const char *model, int32_t world, const measured *m, double mean) {
  fprintf(f, "| %s | %d | %.4f (%s) | %.4f | %.4f (%s) |\n", model, (int)world,
          m->summary.cost_ratio, mfsdp_plan_bound_name(m->summary.bound),
          (double)m->summary.resident_nbytes.max / mean,
          (double)m->summary.resident_nbytes.max / (double)m->summary.resident_nbytes_bound,
          mfsdp_plan_bound_name(m->summary.resident_bound));
}

static int run_case(bench_report *report, const char *model, const plan_params *params,
                    int32_t world, int repeats, worst *all, FILE *table) {
  measured ours, peer;
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  bench_row row = bench_row_default();
  char name[64];
  double mean;
  desc.params = params->list;
  desc.param_count = params->count;
  desc.world = world;
  if (measure(&desc, repeats, &ours)) return 1;
  desc.planner = MFSDP_PLANNER_SCOPE_GREEDY;
  if (measure(&desc, 1, &peer)) return 1;
  snprintf(name, sizeof name, "%s W=%d", model, (int)world);
  row.bench = report->bench;
  row.name = name;
  row.metric = "max cost";
  row.value = ours.summary.cost_ratio;
  row.unit = "x bound";
  row.peer = "scope-greedy elements";
  row.ratio_to_peer = (double)peer.most_work / (double)ours.most_work;
  row.limit = mfsdp_plan_bound_name(ours.summary.bound);
  row.ratio_to_limit = 1.0 / ours.summary.cost_ratio;
  row.wrong = ours.wrong;
  bench_add(report, &row);
  mean = (double)ours.summary.resident_nbytes.sum / world;
  row.metric = "resident max";
  row.value = (double)ours.summary.resident_nbytes.max / mean;
  row.unit = "x mean";
  row.ratio_to_peer =
      (double)peer.summary.resident_nbytes.max / (double)ours.summary.resident_nbytes.max;
  row.limit = mfsdp_plan_bound_name(ours.summary.resident_bound);
  row.ratio_to_limit =
      (double)ours.summary.resident_nbytes_bound / (double)ours.summary.resident_nbytes.max;
  bench_add(report, &row);
  add(report, name, "plan time", ours.seconds * 1e3, "ms", NULL, (double)NAN, -1);
  add(report, name, "plan memory", (double)ours.peak_nbytes / 1048576.0, "MiB", NULL, (double)NAN,
      -1);
  put_case(table, model, world, &ours, mean);
  note(all, &ours, mean);
  return 0;
}

static int run_models(bench_report *report, const bench_options *options, FILE *table) {
  worst all;
  int i, world;
  memset(&all, 0, sizeof all);
  fputs("\n| model | ranks | largest cost over its bound | resident bytes max/mean | over their "
        "bound |\n|---|---|---|---|---|\n",
        table);
  for (i = 0; plan_model_at(i) != NULL; ++i) {
    const char *model = plan_model_at(i)->name;
    plan_params params;
    plan_error error;
    int failed = 0;
    plan_params_init(&params);
    if (plan_model_fill(model, PLAN_VIEWS_WHOLE, &params, &error) != PLAN_OK) {
      fprintf(stderr, "plan: %s\n", error.text);
      plan_params_free(&params);
      return 1;
    }
    for (world = 8; world <= 1024 && !failed; world *= options->quick ? 8 : 2)
      failed = run_case(report, model, &params, world, options->quick ? 1 : 3, &all, table);
    plan_params_free(&params);
    if (failed) return 1;
  }
  printf(
      "\n%d plans: largest cost at most %.4f x the bound (wanted: 1.02), %.0f ms at most.\n"
      "Resident bytes: the filler suffices in %d, max/mean at most %.4f there (wanted: 1.05 in "
      "all; "
      "kept in %d).\nOf the other %d, where the matrices of one rank alone pass the mean, %d are "
      "within 1.05 of what no plan beats.\n\n",
      all.count, all.cost, all.seconds * 1e3, all.filled, all.resident, all.filled_level,
      all.count - all.filled, all.bound_met);
  return 0;
}

/* ---- the cost of what runs ---- */

/* Multiply-adds of five jordan steps, the forms by AUTO: of the rank that has most, and of all. */
typedef struct work {
  int64_t most, sum;
} work;

static int count_work(const mfsdp_plan *plan, mfsdp_newton_schulz_desc *ns, work *out) {
  int64_t *load = (int64_t *)calloc((size_t)mfsdp_plan_world(plan), sizeof(*load));
  int32_t count, k;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  if (load == NULL) return 1;
  out->most = out->sum = 0;
  for (k = 0; k < count; ++k) {
    const int64_t cost =
        pieces[k].matrix < 0 ? 0 : mfsdp_newton_schulz_cost(ns, 0, pieces[k].rows, pieces[k].cols);
    load[pieces[k].owner] += cost;
    out->sum += cost;
    if (load[pieces[k].owner] > out->most) out->most = load[pieces[k].owner];
  }
  free(load);
  return 0;
}

/* Plans and counts. */
static int plan_work(const mfsdp_plan_desc *desc, mfsdp_newton_schulz_desc *ns, work *out,
                     mfsdp_plan_summary *summary) {
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  mfsdp_plan *plan;
  int failed;
  *summary = mfsdp_plan_summary_default();
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_plan_create(&context, desc, &plan) != MFSDP_OK ||
      mfsdp_plan_report(&context, plan, summary, NULL, 0) != MFSDP_OK)
    return fail(&context);
  failed = count_work(plan, ns, out);
  mfsdp_plan_destroy(&context, plan);
  return failed || mfsdp_context_destroy(&context) != MFSDP_OK;
}

static int run_cost(bench_report *report, const char *model, const plan_params *params,
                    int32_t world, FILE *table) {
  mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_default();
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_plan_summary summary;
  bench_row row = bench_row_default();
  char name[64];
  work by_products, by_form;
  desc.params = params->list;
  desc.param_count = params->count;
  desc.world = world;
  if (plan_work(&desc, &ns, &by_products, &summary)) return 1;
  desc.cost = mfsdp_newton_schulz_cost;
  desc.user = &ns;
  if (plan_work(&desc, &ns, &by_form, &summary)) return 1;
  snprintf(name, sizeof name, "%s W=%d", model, (int)world);
  row.bench = report->bench;
  row.name = name;
  row.metric = "work by form";
  row.value = (double)by_form.most * world / (double)by_form.sum;
  row.unit = "x mean";
  row.peer = "by full products";
  row.ratio_to_peer = (double)by_products.most / (double)by_form.most;
  row.limit = mfsdp_plan_bound_name(summary.bound);
  row.ratio_to_limit = (double)summary.cost_bound / (double)by_form.most;
  bench_add(report, &row);
  fprintf(table, "| %s | %d | %lld | %lld | %lld | %.3f | %.3f | %.3f |\n", model, (int)world,
          (long long)by_form.sum, (long long)by_products.most, (long long)by_form.most,
          (double)by_products.most * world / (double)by_form.sum, row.value,
          (double)summary.cost_bound * world / (double)by_form.sum);
  return 0;
}

static int run_costs(bench_report *report, FILE *table) {
  static const int32_t worlds[3] = {8, 64, 256};
  int i, k, failed = 0;
  fputs(
      "\n| model | ranks | work of all | most, planned by full products | most, planned by form | "
      "over the mean, by full products | by form | no plan beats "
      "|\n|---|---|---|---|---|---|---|---|\n",
      table);
  for (i = 0; plan_model_at(i) != NULL && !failed; ++i) {
    const char *model = plan_model_at(i)->name;
    plan_params params;
    plan_error error;
    plan_params_init(&params);
    if (plan_model_fill(model, PLAN_VIEWS_WHOLE, &params, &error) != PLAN_OK) {
      fprintf(stderr, "plan: %s\n", error.text);
      failed = 1;
    }
    for (k = 0; k < 3 && !failed; ++k)
      failed = run_cost(report, model, &params, worlds[k], table);
    plan_params_free(&params);
  }
  return failed;
}

/* ---- scale ---- */

#define SCALE_TENSORS 100000
#define SCALE_WORLD 16384

/* Seven in eight are matrices, a hundred tensors a unit; shapes from a fixed sequence. */
static mfsdp_param scale_param(int32_t i, char *name) {
  const uint64_t mixed = ((uint64_t)i + 1) * UINT64_C(0x9e3779b97f4a7c15);
  mfsdp_param p = mfsdp_param_default();
  sprintf(name, "layers.%d", (int)i);
  p.name = name;
  p.unit = i / 100;
  p.role = i % 8 ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
  p.ndim = 2;
  p.shape[0] = 16 + (int64_t)(mixed >> 40) % 2000;
  p.shape[1] = 64 * (1 + (int64_t)(mixed >> 20) % 32);
  return p;
}

static int run_scale(bench_report *report, const bench_options *options) {
  static const struct {
    mfsdp_planner planner;
    double seconds;
    const char *limit;
  } cases[2] = {{MFSDP_PLANNER_SCOPE_GREEDY, 1.0, "1 s"}, {MFSDP_PLANNER_BALANCED, 10.0, "10 s"}};
  mfsdp_param *list = (mfsdp_param *)malloc(SCALE_TENSORS * sizeof(*list));
  char(*names)[24] = (char(*)[24])malloc(SCALE_TENSORS * sizeof(*names));
  int32_t i;
  int c, failed = list == NULL || names == NULL;
  for (i = 0; !failed && i < SCALE_TENSORS; ++i)
    list[i] = scale_param(i, names[i]);
  for (c = 0; c < 2 && !failed; ++c) {
    mfsdp_plan_desc desc = mfsdp_plan_desc_default();
    measured m;
    char name[64];
    desc.params = list;
    desc.param_count = SCALE_TENSORS;
    desc.world = SCALE_WORLD;
    desc.planner = cases[c].planner;
    desc.cost = mfsdp_cost_newton_schulz;
    failed = measure(&desc, options->quick ? 1 : MOST_REPEATS, &m);
    if (failed) break;
    snprintf(name, sizeof name, "100k x 16384 %s", mfsdp_planner_name(cases[c].planner));
    add(report, name, "plan time", m.seconds * 1e3, "ms", cases[c].limit,
        cases[c].seconds / m.seconds, m.wrong);
    add(report, name, "plan memory", (double)m.peak_nbytes / 1048576.0, "MiB", "1 GB",
        1e9 / (double)m.peak_nbytes, -1);
    add(report, name, "max cost", m.summary.cost_ratio, "x bound",
        mfsdp_plan_bound_name(m.summary.bound), 1.0 / m.summary.cost_ratio, m.wrong);
    add(report, name, "resident max",
        mfsdp_plan_spread_ratio(m.summary.resident_nbytes, SCALE_WORLD), "x mean",
        mfsdp_plan_bound_name(m.summary.resident_bound),
        (double)m.summary.resident_nbytes_bound / (double)m.summary.resident_nbytes.max, m.wrong);
  }
  free(list);
  free(names);
  return failed;
}

/* ---- what it writes ---- */

static int write_text(const char *path, FILE *f, char **text, size_t *nbytes) {
  plan_error error;
  int status = fclose(f) == 0 ? PLAN_OK : plan_fail(&error, "no memory for %s", path);
  if (status == PLAN_OK) status = plan_file_write(path, *text, *nbytes, &error);
  if (status == PLAN_OK)
    printf("written: %s\n", path);
  else
    fprintf(stderr, "plan: %s\n", error.text);
  free(*text);
  return status == PLAN_OK ? 0 : 1;
}

static int run(bench_report *report, const bench_options *options) {
  char *texts[2] = {NULL, NULL};
  size_t nbytes[2] = {0, 0};
  FILE *table = open_memstream(&texts[0], &nbytes[0]), *svg = open_memstream(&texts[1], &nbytes[1]);
  int status;
  if (!table || !svg) {
    fprintf(stderr, "plan: no memory\n");
    return 1;
  }
  headline_run(report, options->quick, table, svg);
  status = run_models(report, options, table);
  if (status == 0) status = run_costs(report, table);
  if (status == 0) status = run_scale(report, options);
  status |= write_text("build/bench/plan.md", table, &texts[0], &nbytes[0]);
  return status | write_text("build/bench/plan.svg", svg, &texts[1], &nbytes[1]);
}

int main(int argc, char **argv) {
  bench_options options;
  bench_report report;
  int status = bench_parse(argc, argv,
                           "plan: the planner on the shapes of public models, against proven "
                           "bounds; published step times.",
                           &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "plan", &options);
  if (status != 0) return status;
  status = run(&report, &options);
  return bench_close(&report) || status;
}
