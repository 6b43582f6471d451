/* SPDX-License-Identifier: MIT */
#include "headline.h"

#include "plan/chart.h"
#include "plan/models.h"

#include "mfsdp/simulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 4, FIT = 1, HIDDEN = 4096, STEPS = 2, MOST_SCALE = 9 };

static const struct {
  int32_t ranks, layers;
  double stock_ms, owner_ms;
} published[ROWS] = {{8, 16, 367, 87}, {16, 32, 1285, 89}, {32, 64, 3079, 91}, {64, 128, 5064, 93}};
/* The repository's own row. */
static const struct {
  int32_t ranks, layers;
  double stock_ms, owner_ms;
} extra = {8, 32, 747, 175};

static void die(const char *message) {
  fprintf(stderr, "plan: %s\n", message);
  exit(1);
}

/* ---- models and plans ---- */

static void add_matrix(plan_params *params, int32_t layer, const char *name, int64_t rows,
                       int64_t cols, int32_t heads) {
  char full[64];
  plan_error error;
  mfsdp_param *p;
  snprintf(full, sizeof full, "layers.%d.%s", (int)layer, name);
  p = plan_params_add(params, full, &error);
  if (!p) die(error.text);
  p->role = MFSDP_ROLE_MATRIX;
  p->unit = layer;
  p->ndim = 2;
  p->shape[0] = rows;
  p->shape[1] = cols;
  p->compute = p->grad = p->wire = MFSDP_BF16;
  if (heads > 1) {
    p->view = MFSDP_VIEW_HEADS;
    p->head_count = heads;
  }
}

/* Which parts of a tensor may have owners of their own. */
typedef enum cut { CUT_NONE, CUT_HEADS, CUT_ALL } cut;

/* Blocks of 12 hidden^2: query, key, value, output, up and down; no embedding (see the notes). */
static void fill_blocks(plan_params *params, int32_t layers, cut cuts) {
  const int64_t h = HIDDEN;
  const int32_t heads = cuts == CUT_NONE ? 1 : 32, mlp = cuts == CUT_ALL ? 4 : 1;
  plan_params_init(params);
  for (int32_t i = 0; i < layers; ++i) {
    add_matrix(params, i, "q", h, h, heads);
    add_matrix(params, i, "k", h, h, heads);
    add_matrix(params, i, "v", h, h, heads);
    add_matrix(params, i, "o", h, h, 1);
    add_matrix(params, i, "up", 4 * h, h, mlp);
    add_matrix(params, i, "down", h, 4 * h, mlp);
  }
}

static mfsdp_context context;

static mfsdp_plan *plan_of(const plan_params *params, int32_t world) {
  mfsdp_plan_desc desc = mfsdp_plan_desc_default();
  mfsdp_plan *plan = NULL;
  desc.params = params->list;
  desc.param_count = params->count;
  desc.world = world;
  desc.cost = mfsdp_cost_newton_schulz;
  if (mfsdp_plan_create(&context, &desc, &plan) != MFSDP_OK)
    die(mfsdp_context_error(&context)->message);
  return plan;
}

static mfsdp_sim_result simulate(const mfsdp_plan *plan, const mfsdp_cluster *cluster,
                                 mfsdp_sim_strategy strategy, int32_t steps, int32_t replicas) {
  mfsdp_sim_desc desc = mfsdp_sim_desc_default();
  mfsdp_sim_result result = mfsdp_sim_result_default();
  desc.plan = plan;
  desc.cluster = cluster;
  desc.strategy = strategy;
  desc.algorithm = MFSDP_SIM_NATIVE;
  desc.newton_schulz_steps = steps;
  desc.replica_count = replicas;
  if (mfsdp_simulate(&context, &desc, &result, NULL, 0) != MFSDP_OK)
    die(mfsdp_context_error(&context)->message);
  return result;
}

static double step_ms(const mfsdp_plan *plan, const mfsdp_cluster *cluster,
                      mfsdp_sim_strategy strategy) {
  return simulate(plan, cluster, strategy, STEPS, 1).optimizer_us * 1e-3;
}

static mfsdp_plan *blocks_plan(int32_t layers, int32_t world) {
  plan_params params;
  mfsdp_plan *plan;
  fill_blocks(&params, layers, CUT_NONE);
  plan = plan_of(&params, world);
  plan_params_free(&params);
  return plan;
}

/* ---- fits ---- */

/* The rate in *field at which the prediction is `target_ms`, by bisection of its logarithm; 0 if no
 * rate up to 1e18 is fast enough. The prediction falls as the rate grows. */
static double fit(const mfsdp_plan *plan, mfsdp_cluster *cluster, double *field,
                  mfsdp_sim_strategy strategy, double target_ms) {
  double low = 1e6, high = 1e18;
  *field = high;
  if (step_ms(plan, cluster, strategy) > target_ms) return 0.0;
  for (int i = 0; i < 200; ++i) {
    *field = sqrt(low * high);
    if (step_ms(plan, cluster, strategy) > target_ms)
      low = *field;
    else
      high = *field;
  }
  return *field;
}

/* ---- rows ---- */

static void row(bench_report *report, const char *name, const char *metric, double value,
                const char *unit, double theirs) {
  bench_row r = bench_row_default();
  r.bench = report->bench;
  r.name = name;
  r.metric = metric;
  r.unit = unit;
  r.value = value;
  if (theirs > 0.0) {
    r.peer = "published";
    r.ratio_to_peer = theirs / value;
  }
  bench_add(report, &r);
}

typedef struct prediction {
  double owner, sheet, fitted, redundant, exchange; /* ms; see main */
} prediction;

/* The four published rows: everything but row FIT is predicted. */
static void predict_published(bench_report *report, prediction *out, mfsdp_cluster *sheet) {
  mfsdp_plan *fit_plan = blocks_plan(published[FIT].layers, published[FIT].ranks);
  mfsdp_plan *extra_plan = blocks_plan(extra.layers, extra.ranks);
  mfsdp_cluster fitted;
  double rate;
  *sheet = mfsdp_cluster_default();
  rate = fit(fit_plan, sheet, &sheet->flops_per_s, MFSDP_SIM_OWNER, published[FIT].owner_ms);
  row(report, "fit 16 ranks", "products", rate * 1e-12, "TFLOP/s", 0);
  if (step_ms(fit_plan, sheet, MFSDP_SIM_GATHER) > published[FIT].stock_ms) {
    mfsdp_cluster free_wire = *sheet;
    rate = fit(fit_plan, &free_wire, &free_wire.net_node_nbytes_per_s, MFSDP_SIM_GATHER,
               published[FIT].stock_ms);
    printf("  every rank redundantly: %s\n",
           rate > 0.0 ? "fits some network rate" : "no network rate reaches the published time");
  }
  rate = fit(fit_plan, sheet, &sheet->net_node_nbytes_per_s, MFSDP_SIM_SHARDED,
             published[FIT].stock_ms);
  row(report, "fit 16 ranks", "stock, all-gather rate between nodes", rate * 1e-9, "GB/s", 0);
  fitted = *sheet;
  rate = fit(extra_plan, &fitted, &fitted.node_nbytes_per_s, MFSDP_SIM_SHARDED, extra.stock_ms);
  row(report, "fit 8 ranks, 32 layers", "stock, all-gather rate in a node", rate * 1e-9, "GB/s", 0);
  row(report, "8 ranks, 32 layers", "owner step, predicted",
      step_ms(extra_plan, sheet, MFSDP_SIM_OWNER), "ms", extra.owner_ms);
  for (int i = 0; i < ROWS; ++i) {
    mfsdp_plan *plan = blocks_plan(published[i].layers, published[i].ranks);
    char name[64];
    snprintf(name, sizeof name, "%d ranks, %d layers%s", (int)published[i].ranks,
             (int)published[i].layers, i == FIT ? " (fitted)" : "");
    out[i].owner = step_ms(plan, sheet, MFSDP_SIM_OWNER);
    out[i].sheet = step_ms(plan, sheet, MFSDP_SIM_SHARDED);
    out[i].fitted = step_ms(plan, &fitted, MFSDP_SIM_SHARDED);
    out[i].redundant = step_ms(plan, &fitted, MFSDP_SIM_GATHER);
    out[i].exchange = step_ms(plan, &fitted, MFSDP_SIM_EXCHANGE);
    row(report, name, "owner step", out[i].owner, "ms", published[i].owner_ms);
    row(report, name, "stock, sharded products, NVLink by data sheet", out[i].sheet, "ms",
        published[i].stock_ms);
    row(report, name, "stock, sharded products, NVLink rate fitted", out[i].fitted, "ms",
        published[i].stock_ms);
    row(report, name, "stock, every rank redundantly", out[i].redundant, "ms",
        published[i].stock_ms);
    row(report, name, "all-to-all to owners", out[i].exchange, "ms", 0);
    mfsdp_plan_destroy(&context, plan);
  }
  *sheet = fitted;
  mfsdp_plan_destroy(&context, fit_plan);
  mfsdp_plan_destroy(&context, extra_plan);
}

/* ---- far more ranks ---- */

typedef struct scale_model {
  const char *name;
  const char *built_in; /* NULL: 128 of the blocks above */
  cut cuts;
} scale_model;

static const scale_model scale_models[] = {
    {"25.8B, whole matrices", NULL, CUT_NONE},
    {"25.8B, heads", NULL, CUT_HEADS},
    {"25.8B, heads and MLP quarters", NULL, CUT_ALL},
    {"llama3-70b, whole matrices", "llama3-70b", CUT_NONE},
    {"llama3-70b, heads", "llama3-70b", CUT_HEADS},
    {"kimi-k2, experts", "kimi-k2", CUT_NONE},
};
enum { SCALES = sizeof scale_models / sizeof scale_models[0], GROUP = 256 };

typedef struct scale {
  double knee; /* ranks from which on the largest matrix decides */
  double ranks[MOST_SCALE], step[MOST_SCALE], wire[MOST_SCALE], imbalance[MOST_SCALE];
  double hsdp_step[MOST_SCALE], hsdp_wire[MOST_SCALE]; /* groups of GROUP ranks */
  int count;
} scale;

static void fill_scale(const scale_model *model, plan_params *params) {
  plan_error error;
  if (!model->built_in) {
    fill_blocks(params, published[ROWS - 1].layers, model->cuts);
    return;
  }
  plan_params_init(params);
  if (plan_model_fill(model->built_in,
                      model->cuts == CUT_NONE ? PLAN_VIEWS_WHOLE : PLAN_VIEWS_HEADS, params,
                      &error) != PLAN_OK)
    die(error.text);
}

static void scale_point(bench_report *report, const char *name, const plan_params *params,
                        const mfsdp_cluster *cluster, int32_t world, scale *out) {
  const int32_t group = world < GROUP ? world : GROUP;
  mfsdp_plan *plan = plan_of(params, world), *shard = plan_of(params, group);
  const mfsdp_sim_result all = simulate(plan, cluster, MFSDP_SIM_OWNER, 5, 1);
  const mfsdp_sim_result hsdp = simulate(shard, cluster, MFSDP_SIM_OWNER, 5, world / group);
  mfsdp_plan_summary summary = mfsdp_plan_summary_default();
  char label[96];
  if (mfsdp_plan_report(&context, plan, &summary, NULL, 0) != MFSDP_OK)
    die(mfsdp_context_error(&context)->message);
  snprintf(label, sizeof label, "%s, %d ranks", name, (int)world);
  out->ranks[out->count] = world;
  out->step[out->count] = all.optimizer_us * 1e-3;
  out->wire[out->count] = (all.materialize_us + all.reduce_us) * 1e-3;
  out->imbalance[out->count] = mfsdp_plan_spread_ratio(summary.cost, world);
  out->hsdp_step[out->count] = hsdp.optimizer_us * 1e-3;
  out->hsdp_wire[out->count++] = (hsdp.materialize_us + hsdp.reduce_us) * 1e-3;
  row(report, label, "owner step", all.optimizer_us * 1e-3, "ms", 0);
  row(report, label, "compute max/mean", mfsdp_plan_spread_ratio(summary.cost, world), "ratio", 0);
  row(report, label, "materialize and reduce", (all.materialize_us + all.reduce_us) * 1e-3, "ms",
      0);
  if (group < world) {
    row(report, label, "HSDP, groups of 256: owner step", hsdp.optimizer_us * 1e-3, "ms", 0);
    row(report, label, "HSDP, groups of 256: materialize and reduce",
        (hsdp.materialize_us + hsdp.reduce_us) * 1e-3, "ms", 0);
  }
  mfsdp_plan_destroy(&context, plan);
  mfsdp_plan_destroy(&context, shard);
}

/* Past this many ranks the largest matrix alone decides the owner step. */
static double knee(const plan_params *params) {
  mfsdp_plan *plan = plan_of(params, 1);
  int64_t largest = 0;
  int32_t count;
  double total = 0.0;
  (void)mfsdp_plan_pieces(plan, -1, &count);
  for (int32_t i = 0; i < count; ++i) {
    const int64_t cost = mfsdp_plan_piece_cost(plan, i);
    total += (double)cost;
    if (cost > largest) largest = cost;
  }
  mfsdp_plan_destroy(&context, plan);
  return total / (double)largest;
}

static void predict_scale(bench_report *report, int quick, const mfsdp_cluster *cluster,
                          scale *out) {
  for (int m = 0; m < SCALES; ++m) {
    plan_params params;
    fill_scale(&scale_models[m], &params);
    out[m].knee = knee(&params);
    row(report, scale_models[m].name, "ranks where the largest matrix takes over", out[m].knee,
        "ranks", 0);
    for (int32_t world = 64; world <= 16384; world *= quick ? 16 : 2)
      scale_point(report, scale_models[m].name, &params, cluster, world, &out[m]);
    plan_params_free(&params);
  }
}

/* ---- the picture ---- */

static void draw_published(FILE *f, const prediction *p) {
  double x[ROWS], stock[ROWS], owner[ROWS], s[ROWS], sheet[ROWS], redundant[ROWS], o[ROWS];
  for (int i = 0; i < ROWS; ++i) {
    x[i] = published[i].ranks;
    stock[i] = published[i].stock_ms;
    owner[i] = published[i].owner_ms;
    s[i] = p[i].fitted;
    sheet[i] = p[i].sheet;
    redundant[i] = p[i].redundant;
    o[i] = p[i].owner;
  }
  {
    const plan_series series[] = {
        {"published, stock", x, stock, ROWS, 1, 0},
        {"published, MatrixFSDP", x, owner, ROWS, 0, 0},
        {"sharded products", x, s, ROWS, 1, 1},
        {"owners", x, o, ROWS, 0, 1},
        {"same, NVLink by data sheet", x, sheet, ROWS, 4, 1},
        {"every rank redundantly", x, redundant, ROWS, 3, 1},
    };
    const plan_chart chart = {"Optimizer step, published and predicted (dashed)", "ranks",
                              "milliseconds", series, 6};
    plan_chart_put(f, &chart, 0, 0);
  }
}

static void draw(FILE *f, const prediction *p, const scale *scales) {
  static const int colors[SCALES] = {0, 1, 2, 3, 4, 5};
  plan_series series[SCALES];
  const plan_chart chart = {"Owner step on more ranks, 5 Newton-Schulz steps", "ranks",
                            "milliseconds", series, SCALES};
  for (int m = 0; m < SCALES; ++m) {
    const plan_series one = {scale_models[m].name, scales[m].ranks, scales[m].step,
                             scales[m].count,      colors[m],       0};
    series[m] = one;
  }
  fprintf(f,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" viewBox=\"0 0 %d "
          "%d\" font-family=\"Helvetica, Arial, sans-serif\" fill=\"#333\">\n"
          "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n",
          2 * PLAN_CHART_WIDTH, PLAN_CHART_HEIGHT, 2 * PLAN_CHART_WIDTH, PLAN_CHART_HEIGHT,
          2 * PLAN_CHART_WIDTH, PLAN_CHART_HEIGHT);
  draw_published(f, p);
  plan_chart_put(f, &chart, PLAN_CHART_WIDTH, 0);
  fputs("</svg>\n", f);
}

/* ---- the tables ---- */

static void table_published(FILE *f, const prediction *p) {
  fputs(
      "| ranks | blocks | MatrixFSDP published, ms | predicted | stock published, ms | predicted, "
      "NVLink rate fitted | predicted, NVLink by data sheet | every rank redundantly |\n"
      "|---|---|---|---|---|---|---|---|\n",
      f);
  for (int i = 0; i < ROWS; ++i)
    fprintf(f, "| %d%s | %d | %.0f | %.0f | %.0f | %.0f | %.0f | %.0f |\n", (int)published[i].ranks,
            i == FIT ? " (fitted)" : "", (int)published[i].layers, published[i].owner_ms,
            p[i].owner, published[i].stock_ms, p[i].fitted, p[i].sheet, p[i].redundant);
}

/* One figure per model and world from 256 on, and one behind: NULL, or of HSDP at the most ranks. */
static void table_scale(FILE *f, const char *title, const scale *scales, int is_wire) {
  fprintf(f, "\n| %s |", title);
  for (int i = 0; i < scales[0].count; ++i)
    if (scales[0].ranks[i] >= GROUP) fprintf(f, " %.0f |", scales[0].ranks[i]);
  fputs(is_wire ? " HSDP of 256, most ranks | owner step there |\n|---|---|---|"
                : " max/mean, most ranks | largest matrix takes over at |\n|---|---|---|",
        f);
  for (int i = 0; i < scales[0].count; ++i)
    if (scales[0].ranks[i] >= GROUP) fputs("---|", f);
  for (int m = 0; m < SCALES; ++m) {
    const scale *s = &scales[m];
    const int last = s->count - 1;
    fprintf(f, "\n| %s |", scale_models[m].name);
    for (int i = 0; i < s->count; ++i)
      if (s->ranks[i] >= GROUP)
        fprintf(f, is_wire ? " %.0f |" : " %.1f |", is_wire ? s->wire[i] : s->step[i]);
    if (is_wire)
      fprintf(f, " %.0f | %.1f |", s->hsdp_wire[last], s->hsdp_step[last]);
    else
      fprintf(f, " %.1f | %.0f ranks |", s->imbalance[last], s->knee);
  }
  fputc('\n', f);
}

/* ---- all of it ---- */

void headline_run(bench_report *report, int quick, FILE *tables, FILE *svg) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  static scale scales[SCALES];
  prediction predictions[ROWS];
  mfsdp_cluster cluster;
  memset(scales, 0, sizeof scales);
  if (mfsdp_context_init(&context, &desc) != MFSDP_OK) die("no context");
  predict_published(report, predictions, &cluster);
  predict_scale(report, quick, &cluster, scales);
  table_published(tables, predictions);
  table_scale(tables, "owner step, ms", scales, 0);
  table_scale(tables, "materialize and reduce, ms", scales, 1);
  draw(svg, predictions, scales);
  if (mfsdp_context_destroy(&context) != MFSDP_OK) die(mfsdp_context_error(&context)->message);
}
