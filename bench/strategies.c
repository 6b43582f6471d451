/* SPDX-License-Identifier: MIT */
/*
 * strategies.c - one runtime, six settings: who holds what and who updates the matrices, on thread
 * ranks or on MPI processes, beside each other and beside what simulate.h predicts.
 *
 * For every model, world and strategy (support/strat_rank.h says how times are taken):
 *   optimizer step     from the last reduction to the end of the update, exchanges and broadcasts
 *                      included, less the verdict's message, which is a row of its own
 *   reduce             all units, one after the other
 *   materialize        one gather of all units (models that train)
 *   whole step         forward, backward and update, queues in place (models that train)
 *   overlapped step    the same with worker queues, one unit ahead and behind
 *   exposed optimizer  of the overlapped step: from the end of the last reduction to the end; also
 *                      with step_in_backward
 *   bytes              of one step by class, all ranks together (payload)
 *   resident, held     of the fullest rank: between steps (predicted: the bound of plans of whole
 *                      matrices); all that the runtime holds (predicted: mfsdp_runtime_memory), also
 *                      with worker queues, and with the step in backward
 *   peak RSS           of processes: over what the process had before the runtime was made
 * The peer is strategy `matrix` of the same model, links, world and run; the limit column is the
 * prediction of simulate.h with constants measured by the same ranks just before. `wrong`: 0 if all
 * parameters have the bits that `matrix` gives after the same two steps, else all of them.
 * --collective: another algorithm than DIRECT moves units; rows are called matrix-ring, or
 * with other chunks than the library's choice (--chunk-kib) matrix-ring-64k, and `wrong`
 * is known of owners alone, beside `matrix` by the same algorithm: sums in another order have other
 * bits.
 * --tradeoffs: one table of step time against memory (support/strat_tradeoffs.h).
 */
#include "support/strat_links.h"
#include "support/strat_predict.h"
#include "support/strat_rank.h"
#include "support/strat_rows.h"
#include "support/strat_tradeoffs.h"

#include <malloc.h>
#include <math.h>
#include <stdlib.h>

enum { MOST_WORLDS = 16, MOST_NAMES = 16 };

typedef struct settings {
  bench_options bench;
  int use_mpi, run, missing, tradeoffs, alone, no_whole;
  int32_t worlds[MOST_WORLDS], world_count, matched, mpi_rank, collective, chunk_kib;
  const strat_model *models[MOST_NAMES];
  int32_t strategies[MOST_NAMES];
  int model_count, strategy_count;
  double seconds, link_mbytes;
  const char *links, *append;
} settings;

/* ---- names of rows ---- */

static const char *const collectives[] = {"direct", "ring", "hierarchical", "native", "auto"};
enum { COLLECTIVES = sizeof collectives / sizeof collectives[0], ROW_NAME_NBYTES = 48 };

/* What rows call a strategy with this call's collectives: "matrix", "matrix-ring", or with
 * chunks that are not the library's choice "matrix-ring-64k". */
static const char *row_name(const settings *set, const char *strategy, char name[ROW_NAME_NBYTES]) {
  const int plain = set->collective == GPT_COLLECTIVE_DIRECT;
  int used = snprintf(name, ROW_NAME_NBYTES, "%s%s%s", strategy, plain ? "" : "-",
                      plain ? "" : collectives[set->collective]);
  if (set->chunk_kib > 0)
    (void)snprintf(name + used, (size_t)(ROW_NAME_NBYTES - used), "-%dk", (int)set->chunk_kib);
  return name;
}

static strat_key key_of(const settings *set, const strat_model *model, int32_t world,
                        const char *strategy) {
  strat_key key;
  key.model = model->name;
  key.links = set->links;
  key.strategy = strategy;
  key.world = world;
  key.run = set->run;
  return key;
}

/* ---- one strategy ---- */

static void add(strat_rows *rows, const strat_key *key, const char *metric, const char *unit,
                double value, double predicted) {
  strat_row row;
  if (isnan(value)) return;
  memset(&row, 0, sizeof row);
  row.metric = metric;
  row.unit = unit;
  row.stats.min = row.stats.median = row.stats.p99 = value;
  row.repeats = 1;
  row.predicted = predicted;
  row.wrong = -1;
  strat_rows_add(rows, key, &row);
}

/* Of the repeats of one time; nothing if it was not measured. */
static void add_time(strat_rows *rows, const strat_key *key, const char *metric,
                     strat_result *result, int time, double predicted_s, int64_t wrong,
                     uint64_t checksum) {
  strat_row row;
  const int count = result->count[time];
  if (count == 0) return;
  for (int i = 0; i < count; ++i)
    result->seconds[time][i] *= 1e3;
  memset(&row, 0, sizeof row);
  row.metric = metric;
  row.unit = "ms";
  row.stats = bench_summarize(result->seconds[time], count);
  row.repeats = count;
  row.predicted = predicted_s * 1e3;
  row.wrong = wrong;
  row.checksum = checksum;
  strat_rows_add(rows, key, &row);
  printf("    %d times: min %.3f, median %.3f, p99 %.3f ms\n", count, row.stats.min,
         row.stats.median, row.stats.p99);
}

/* Elements whose bits are not those of `matrix` by the same collectives: none, all, or -1, not
 * known. A ring begins its sums at another rank for each segment, so there only owners are alike. */
static int64_t count_wrong(const settings *set, const strat_load *load, const strat_rows *rows,
                           const strat_key *key, uint64_t checksum) {
  const gpt_strategy *strategy = gpt_strategy_at(load->job.options.strategy);
  char name[ROW_NAME_NBYTES];
  strat_key matrix = *key;
  uint64_t theirs;
  matrix.strategy = row_name(set, "matrix", name);
  if (strcmp(key->strategy, matrix.strategy) == 0) return 0;
  if (set->collective != GPT_COLLECTIVE_DIRECT &&
      (strategy->matrices != MFSDP_PLACEMENT_OWNED || strategy->allow_banded))
    return -1;
  theirs = strat_rows_checksum(rows, &matrix);
  return theirs == 0 ? -1 : theirs == checksum ? 0 : load->elements;
}

static void add_alone(const settings *set, const strat_load *load, strat_rows *rows,
                      const strat_key *key, strat_result *r, const strat_prediction *p) {
  const int64_t wrong = count_wrong(set, load, rows, key, r->checksum);
  const double none = (double)NAN;
  add_time(rows, key, "optimizer step", r, STRAT_OPTIMIZER, p->optimizer_s, wrong, r->checksum);
  add_time(rows, key, "verdict", r, STRAT_VERDICT, p->verdict_s, -1, r->checksum);
  add_time(rows, key, "reduce", r, STRAT_REDUCE, p->reduce_s, -1, r->checksum);
  add_time(rows, key, "materialize", r, STRAT_MATERIALIZE, p->materialize_s, -1, r->checksum);
  add(rows, key, "reduce bytes", "B", r->sent[MFSDP_TRAFFIC_REDUCE], p->reduce_nbytes);
  add(rows, key, "optimizer bytes", "B", r->sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX],
      p->optimizer_nbytes);
  add(rows, key, "verdict bytes", "B", r->sent[MFSDP_TRAFFIC_SCALAR], none);
  add(rows, key, "resident", "B", r->resident, r->resident_bound);
  add(rows, key, "held", "B", r->held, r->predicted_held);
  add(rows, key, "peak RSS", "B", r->rss, r->predicted_held);
}

/* Returns 0 where the library refuses; rank 0 says why. */
static int run_variant(const settings *set, strat_load *load, const strat_key *key,
                       strat_variant variant, strat_result *result) {
  strat_measure(load, variant, set->seconds, result);
  if (!result->refused) return 1;
  if (set->mpi_rank == 0)
    printf("SKIP %s, %s, %d ranks, %s%s: %s\n", key->model, key->links, (int)key->world,
           key->strategy, variant == STRAT_IN_BACKWARD ? ", step in backward" : "", result->why);
  return 0;
}

static void run_strategy(const settings *set, strat_load *load, const strat_key *key,
                         const strat_prediction *p, strat_rows *rows) {
  const int writes = set->mpi_rank == 0, whole = load->whole;
  const double none = (double)NAN;
  strat_result r;
  if (!run_variant(set, load, key, STRAT_STEP_ALONE, &r)) return;
  if (writes) add_alone(set, load, rows, key, &r, p);
  if (whole && run_variant(set, load, key, STRAT_WHOLE, &r) && writes) {
    add_time(rows, key, "whole step", &r, STRAT_STEP, p->step_s, -1, 0);
    add(rows, key, "materialize bytes", "B", r.sent[MFSDP_TRAFFIC_MATERIALIZE], none);
  }
  if (set->alone) {
    if (writes) printf("    --alone: nothing with worker queues\n");
  } else if (set->use_mpi && strat_mpi_no_threads() != NULL) {
    if (writes) printf("SKIP worker queues: %s\n", strat_mpi_no_threads());
  } else {
    if (run_variant(set, load, key, STRAT_QUEUES, &r) && writes) {
      if (whole) add_time(rows, key, "overlapped step", &r, STRAT_STEP, p->overlapped_s, -1, 0);
      add_time(rows, key, "exposed optimizer", &r, STRAT_EXPOSED, none, -1, 0);
      add(rows, key, "held, overlapped", "B", r.held, r.predicted_held);
    }
    if (run_variant(set, load, key, STRAT_IN_BACKWARD, &r) && writes) {
      if (whole) add_time(rows, key, "overlapped step, in backward", &r, STRAT_STEP, none, -1, 0);
      add_time(rows, key, "exposed optimizer, in backward", &r, STRAT_EXPOSED, none, -1, 0);
      add(rows, key, "held, in backward", "B", r.held, r.predicted_held);
    }
  }
  if (!writes) return;
  strat_rows_finish(rows, key, set->alone, whole, set->seconds);
  strat_rows_commit(rows);
}

/* ---- all of a model on a world ---- */

static int has_missing(const settings *set, const strat_rows *rows, const strat_model *model,
                       int32_t world) {
  char name[ROW_NAME_NBYTES];
  for (int i = 0; i < set->strategy_count; ++i) {
    const gpt_strategy *strategy = gpt_strategy_at(set->strategies[i]);
    const strat_key key = key_of(set, model, world, row_name(set, strategy->name, name));
    if (!strat_rows_finished(rows, &key, set->alone, model->trains && !set->no_whole)) return 1;
  }
  return 0;
}

/* What the predictions of this model, world and run are made with; in rows, once. */
static void show_machine(const settings *set, const strat_load *load, int32_t world,
                         const plan_calibration *machine, strat_rows *rows) {
  const mfsdp_cluster *c = &machine->cluster;
  const strat_key key = key_of(set, load->model, world, "machine");
  const double none = (double)NAN;
  printf("\n%s (%s, %.4g million parameters), %s, %d ranks:\n", load->model->name,
         load->model->what, (double)load->elements * 1e-6, set->links, (int)world);
  if (strat_rows_have(rows, &key)) return;
  add(rows, &key, "sgemm of a rank", "GFLOP/s", c->flops_per_s * 1e-9, none);
  add(rows, &key, "Newton-Schulz of a rank", "GFLOP/s", c->newton_schulz_flops_per_s * 1e-9, none);
  add(rows, &key, "memory of a rank", "GB/s", c->memory_nbytes_per_s * 1e-9, none);
  add(rows, &key, "message", "us", c->net_latency_us, none);
  add(rows, &key, "links of a rank", "MB/s", c->net_nbytes_per_s * 1e-6, none);
}

static void run_model(const settings *set, const strat_model *model, int32_t world,
                      strat_rows *rows) {
  plan_calibration machine;
  strat_load load;
  char name[ROW_NAME_NBYTES];
  if (!has_missing(set, rows, model, world)) return;
  strat_load_create(&load, model, world);
  load.whole = model->trains && !set->no_whole;
  load.job.processes = set->use_mpi;
  load.job.process_rank = set->mpi_rank;
  load.job.options.collective = set->collective;
  load.job.options.chunk_kib = set->chunk_kib;
  strat_calibrate(&load, &machine);
  if (set->mpi_rank == 0) show_machine(set, &load, world, &machine, rows);
  for (int i = 0; i < set->strategy_count; ++i) {
    const gpt_strategy *strategy = gpt_strategy_at(set->strategies[i]);
    const strat_key key = key_of(set, model, world, row_name(set, strategy->name, name));
    strat_prediction prediction;
    if (strat_rows_finished(rows, &key, set->alone, load.whole)) continue;
    strat_predict(&load, &machine, set->strategies[i], &prediction);
    load.job.options.strategy = set->strategies[i];
    run_strategy(set, &load, &key, &prediction, rows);
  }
  strat_load_destroy(&load);
}

static int run_all(settings *set) {
  bench_report report;
  strat_rows rows;
  int status = 0;
  memset(&report, 0, sizeof report);
  if (set->mpi_rank == 0) status = bench_open(&report, "strategies", &set->bench);
  if (status != 0) return status;
  strat_rows_open(&rows, set->append, &report);
  if (set->tradeoffs) {
    strat_tradeoffs(set->models[0], set->links, set->worlds[0], set->use_mpi ? set->mpi_rank : -1,
                    set->seconds, &rows);
  } else {
    for (int m = 0; m < set->model_count; ++m)
      for (int w = 0; w < set->world_count; ++w)
        run_model(set, set->models[m], set->worlds[w], &rows);
  }
  strat_rows_close(&rows);
  return set->mpi_rank == 0 ? bench_close(&report) : 0;
}

/* Exit status 0 if a row that the call asks for is missing, 3 if all are there. */
static int ask_missing(const settings *set) {
  strat_rows rows;
  int found = 0;
  strat_rows_open(&rows, set->append, NULL);
  for (int m = 0; m < set->model_count; ++m)
    for (int w = 0; w < set->world_count; ++w)
      found |= has_missing(set, &rows, set->models[m], set->worlds[w]);
  strat_rows_close(&rows);
  return found ? 0 : 3;
}

/* For scripts: the last word is a whole number of Mbit/s. */
static int print_matched(int32_t world) {
  plan_calibration machine;
  plan_error error;
  double mbit;
  if (plan_calibrate_threads(world, &machine, &error) != PLAN_OK) {
    fprintf(stderr, "bench strategies: %s\n", error.text);
    return 1;
  }
  mbit = plan_matched_mbit(machine.cluster.flops_per_s);
  printf(
      "sgemm of a rank while %d run: %.4g GFLOP/s; over 12480 that is %.4g MB/s; Mbit/s, rounded: "
      "%.0f\n",
      (int)world, machine.cluster.flops_per_s * 1e-9, mbit / 8.0, mbit < 1.0 ? 1.0 : mbit);
  return 0;
}

/* ---- options ---- */

static int take_number(const char *text, double low, double high, double *out) {
  char *end;
  *out = strtod(text, &end);
  return end != text && *end == '\0' && *out >= low && *out <= high;
}

static int take_integer(const char *text, int32_t low, int32_t high, int32_t *out) {
  double value;
  const int good = take_number(text, low, high, &value);
  if (good) *out = (int32_t)value;
  return good && (double)*out == value;
}

/* The next name of a list a,b,c; 0 at its end. */
static int next_name(const char **list, char name[32]) {
  const size_t length = strcspn(*list, ",");
  if (length == 0 || length > 31) return 0;
  memcpy(name, *list, length);
  name[length] = '\0';
  *list += length + ((*list)[length] == ',');
  return 1;
}

static int take_worlds(settings *set, const char *list) {
  char name[32];
  set->world_count = 0;
  while (set->world_count < MOST_WORLDS && next_name(&list, name))
    if (!take_integer(name, 1, 64, &set->worlds[set->world_count++])) return -1;
  return *list == '\0' && set->world_count > 0 ? 1 : -1;
}

static int take_models(settings *set, const char *list) {
  char name[32];
  set->model_count = 0;
  while (set->model_count < MOST_NAMES && next_name(&list, name))
    if ((set->models[set->model_count++] = strat_model_find(name)) == NULL) return -1;
  return *list == '\0' && set->model_count > 0 ? 1 : -1;
}

static int take_strategies(settings *set, const char *list) {
  char name[32];
  set->strategy_count = 0;
  while (set->strategy_count < MOST_NAMES && next_name(&list, name)) {
    int32_t i = 0;
    while (i < GPT_STRATEGY_COUNT && strcmp(gpt_strategy_at(i)->name, name) != 0)
      ++i;
    if (i == GPT_STRATEGY_COUNT) return -1;
    set->strategies[set->strategy_count++] = i;
  }
  return *list == '\0' && set->strategy_count > 0 ? 1 : -1;
}

static int take_collective(settings *set, const char *name) {
  for (int32_t i = 0; i < COLLECTIVES; ++i)
    if (strcmp(name, collectives[i]) == 0) {
      set->collective = i;
      return 1;
    }
  return -1;
}

/* 1 if the option is ours and its value is good; 0 if it is not ours; -1 if the value is bad. */
static int take_option(settings *set, const char *name, const char *value) {
  if (strcmp(name, "--transport") == 0) {
    set->use_mpi = strcmp(value, "mpi") == 0;
    return set->use_mpi || strcmp(value, "threads") == 0 ? 1 : -1;
  }
  if (strcmp(name, "--world") == 0) return take_worlds(set, value);
  if (strcmp(name, "--model") == 0) return take_models(set, value);
  if (strcmp(name, "--strategy") == 0) return take_strategies(set, value);
  if (strcmp(name, "--collective") == 0) return take_collective(set, value);
  if (strcmp(name, "--chunk-kib") == 0)
    return take_integer(value, 0, 1 << 20, &set->chunk_kib) ? 1 : -1;
  if (strcmp(name, "--run") == 0) return take_integer(value, 1, 99, &set->run) ? 1 : -1;
  if (strcmp(name, "--matched") == 0) return take_integer(value, 1, 64, &set->matched) ? 1 : -1;
  if (strcmp(name, "--seconds") == 0) return take_number(value, 0, 1e4, &set->seconds) ? 1 : -1;
  if (strcmp(name, "--link-mbytes") == 0)
    return take_number(value, 1e-3, 1e6, &set->link_mbytes) ? 1 : -1;
  if (strcmp(name, "--links") == 0) {
    set->links = value;
    return strlen(value) < 32 && strpbrk(value, ",\"\\") == NULL ? 1 : -1;
  }
  if (strcmp(name, "--append") == 0) {
    set->append = value;
    return 1;
  }
  return 0;
}

static const char about[] =
    "strategies: who holds what and who updates the matrices, beside each other\n\n"
    "  --model A,B       gpt-64, gpt-256, gpt-512, gpt-1024, gpt2-124m, gpt2-1.5b, llama3-8b\n"
    "                    (default gpt-256,gpt2-124m; --quick: gpt-64)\n"
    "  --strategy A,B    matrix, gather, alltoall, zero1, replicated, hybrid (default all)\n"
    "  --collective A    direct (default), ring, hierarchical, native or auto: moves units\n"
    "  --chunk-kib N     of its messages (default 0: as the library chooses)\n"
    "  --transport T     threads (default), or mpi under mpirun\n"
    "  --world N,N       threads, or what mpirun starts (default 2,4,8; --quick: 4)\n"
    "  --links NAME      what rows call the links (default: the transport)\n"
    "  --link-mbytes N   artificial links between threads, of N MB/s and 100 us\n"
    "  --seconds S       repeats of each figure for this long, one at least (default 5; --quick: "
    "0.2)\n"
    "  --run N           rows of different runs stand beside each other (default 1)\n"
    "  --append FILE     rows, one JSON object a line; what is there already is not measured "
    "again\n"
    "  --missing         only ask: status 0 if FILE lacks a row of this call, 3 if it has all\n"
    "  --matched N       only print the link rate at which N ranks here have the FLOP/s per byte/s "
    "of\n"
    "                    an A100 at 25 GB/s\n"
    "  --alone           no steps with worker queues: nothing exposed or overlapped\n"
    "  --no-whole        no steps with forward and backward, and no materialize\n"
    "  --tradeoffs       one table: prefetch, keeping, algorithm, step_in_backward";

/* Of an option without a value; NULL for others. */
static int *flag_of(settings *set, const char *name) {
  if (strcmp(name, "--missing") == 0) return &set->missing;
  if (strcmp(name, "--tradeoffs") == 0) return &set->tradeoffs;
  if (strcmp(name, "--alone") == 0) return &set->alone;
  return strcmp(name, "--no-whole") == 0 ? &set->no_whole : NULL;
}

/* Takes this program's options out of argv. 0, or 2 after a message. */
static int take_options(settings *set, int *argc, char **argv) {
  int kept = 1;
  for (int i = 1; i < *argc; ++i) {
    int *flag = flag_of(set, argv[i]);
    if (flag != NULL) {
      *flag = 1;
      continue;
    }
    const int taken = i + 1 < *argc ? take_option(set, argv[i], argv[i + 1]) : 0;
    if (taken < 0) {
      fprintf(stderr, "%s: %s %s is not known or out of range (see --help)\n", argv[0], argv[i],
              argv[i + 1]);
      return 2;
    }
    if (taken)
      ++i;
    else
      argv[kept++] = argv[i];
  }
  *argc = kept;
  return 0;
}

static void set_defaults(settings *set) {
  const int quick = set->bench.quick;
  if (set->world_count == 0) (void)take_worlds(set, quick || set->tradeoffs ? "4" : "2,4,8");
  if (set->model_count == 0)
    (void)take_models(set, quick ? "gpt-64" : set->tradeoffs ? "gpt-256" : "gpt-256,gpt2-124m");
  if (set->strategy_count == 0)
    for (int32_t i = 0; i < GPT_STRATEGY_COUNT; ++i)
      set->strategies[set->strategy_count++] = i;
  if (set->seconds < 0.0) set->seconds = quick ? 0.2 : 5.0;
  if (set->links == NULL) set->links = set->use_mpi ? "mpi" : "threads";
}

int main(int argc, char **argv) {
  settings set;
  int status;
  memset(&set, 0, sizeof set);
  set.run = 1;
  set.seconds = -1.0;
  status = take_options(&set, &argc, argv);
  if (status == 0) status = bench_parse(argc, argv, about, &set.bench);
  if (status != 0) return status == 1 ? 0 : status;
  set_defaults(&set);
  if (set.matched > 0) return print_matched(set.matched);
  if (set.missing) return ask_missing(&set);
  if (set.link_mbytes > 0.0) strat_threads_links(set.link_mbytes, 100);
#ifdef __GLIBC__
  /* Memory that is given back shows in the resident set: large blocks are mapped one by one. */
  (void)mallopt(M_MMAP_THRESHOLD, 1 << 17);
#endif
  if (set.use_mpi) {
    status = strat_mpi_start(&set.mpi_rank, &set.worlds[0]);
    if (status != 0) return status;
    set.world_count = 1;
  }
  status = run_all(&set);
  if (set.use_mpi) strat_mpi_stop();
  return status;
}
