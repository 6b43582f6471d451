/* SPDX-License-Identifier: MIT */
/*
 * train_gpt.c - trains a small GPT on a text file with owner-sharded Muon. Ranks are threads, or the
 * processes of an mpirun.
 *
 *   build/examples/train_gpt --data bible.txt --ranks 4 --steps 300 --loss-svg loss.svg
 *   mpirun -n 4 build/examples/train_gpt --transport mpi --data bible.txt
 *   build/examples/train_gpt_cuda --device cuda --data bible.txt       // make examples-cuda
 *
 * This file is the training loop; gpt/rank.c sets a rank up, gpt/model.c computes the model.
 * Progress and the audit of the plan go to standard error, one JSON line to standard output.
 * Exit status: 0; 2 if the call is wrong (an option, or a file that cannot be read or written) and
 * nothing was trained; 1 if the run failed or its results could not be written.
 */
#include "gpt/checkpoint.h"
#include "gpt/curve.h"
#include "gpt/file.h"
#include "gpt/loss_chart.h"
#include "gpt/progress.h"
#include "gpt/rank.h"
#include "gpt/result.h"

#if MFSDP_EXAMPLE_CUDA
#include "gpt/cuda/platform_cuda.h"
#endif

#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif
#if MFSDP_EXAMPLE_LAPACKE
#include "mfsdp/host/math_lapacke.h"
#endif

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

static int interrupted; /* set by a handler on any thread, read by all ranks: atomics only */

static void on_signal(int number) {
  (void)number;
  __atomic_store_n(&interrupted, 1, __ATOMIC_RELAXED);
}

/* What ranks tell each other at the end: plain data, the same size everywhere. */
typedef struct rank_figures {
  mfsdp_counters counters;
  int64_t resident_nbytes, slot_nbytes, optimizer_us, steps;
} rank_figures;

/* One rank of this process, and what it reports back to main. */
typedef struct rank_thread {
  const gpt_job *job;
  int32_t index;
  mfsdp_thread thread;
  mfsdp_status status;
  mfsdp_error error;
  rank_figures *figures; /* job.options.ranks: of all ranks */
  /* rank 0 only */
  gpt_progress progress;
  gpt_curve_writer curve;
  gpt_curve_log log;
  double train_loss, val_loss;
  int64_t steps, skipped_steps;
  uint64_t params_hash;
} rank_thread;

static double now_seconds(void *user) {
  (void)user;
  return (double)mfsdp_clock_us() * 1e-6;
}

static void report_step(rank_thread *self, const mfsdp_verdict *verdict, double val_loss) {
  if (self->index != 0) return;
  if (verdict->skipped)
    gpt_progress_note(&self->progress,
                      "step %lld: the gradient is not finite; skipped on all ranks",
                      (long long)verdict->step + 1);
  gpt_progress_step(&self->progress, verdict->step, verdict->value_mean);
  gpt_curve_row(&self->curve, verdict->step + 1, verdict->value_mean,
                gpt_progress_seconds(&self->progress), val_loss);
  gpt_curve_log_add(&self->log, verdict->step + 1, verdict->value_mean,
                    gpt_progress_seconds(&self->progress), val_loss);
  self->train_loss = verdict->value_mean;
}

/* All steps; a validation about ten times and at the end. */
static mfsdp_status train(rank_thread *self, gpt_rank *rank) {
  const int64_t steps = self->job->options.steps, interval = steps / 10 > 0 ? steps / 10 : 1;
  mfsdp_verdict verdict = mfsdp_verdict_default();
  int64_t step;
  self->steps = rank->start_step;
  for (step = rank->start_step; step < steps && !verdict.stop; ++step) {
    double val_loss = (double)NAN;
    MFSDP_TRY(gpt_rank_step(rank, step, &interrupted, &verdict));
    if ((step + 1) % interval == 0 || step + 1 == steps || verdict.stop) {
      MFSDP_TRY(gpt_rank_validate(rank, &val_loss));
      self->val_loss = val_loss;
    }
    report_step(self, &verdict, val_loss);
    self->steps = step + 1;
    MFSDP_TRY(gpt_checkpoint_step(rank, step + 1, step + 1 == steps || verdict.stop));
  }
  return MFSDP_OK;
}

/* ---- ranks ---- */

static void start_progress(rank_thread *self, int64_t start_step) {
  const gpt_options *o = &self->job->options;
  const double tokens =
      (double)(o->ranks * o->micro_batches) * (double)gpt_config_tokens(&self->job->config);
  if (self->index != 0) return;
  gpt_progress_begin(&self->progress, stderr, isatty(STDERR_FILENO), o->steps, tokens, now_seconds,
                     NULL);
  self->progress.start = start_step;
}

static mfsdp_status share_figures(rank_thread *self, gpt_rank *rank) {
  const mfsdp_context *context = &rank->context;
  const mfsdp_control *control = &rank->control;
  rank_figures own;
  memset(&own, 0, sizeof(own));
  own.counters = context->counters;
  own.resident_nbytes = (int64_t)(context->current_nbytes[MFSDP_MEMORY_SHARD] +
                                  context->current_nbytes[MFSDP_MEMORY_STATE] +
                                  context->current_nbytes[MFSDP_MEMORY_GRAD]);
  own.slot_nbytes = (int64_t)context->current_nbytes[MFSDP_MEMORY_SLOT];
  own.optimizer_us = rank->optimizer.us + rank->refresh.us;
  own.steps = self->steps - rank->start_step;
  self->skipped_steps = mfsdp_runtime_skipped_steps(rank->runtime);
  return control->ops->allgather(control->self, &rank->context, &own, sizeof(own), self->figures,
                                 control->deadline_us);
}

static void run_rank(void *argument) {
  rank_thread *self = (rank_thread *)argument;
  gpt_rank rank;
  mfsdp_status status = gpt_rank_create(&rank, self->job, self->index), last;
  if (status == MFSDP_OK) {
    start_progress(self, rank.start_step);
    status = train(self, &rank);
    if (self->index == 0) gpt_progress_end(&self->progress);
  }
  if (status == MFSDP_OK) status = share_figures(self, &rank);
  if (status == MFSDP_OK) status = gpt_rank_params_hash(&rank, &self->params_hash);
  self->error = *mfsdp_context_error(&rank.context);
  if (status != MFSDP_OK) self->job->links->poison(self->job, &self->error);
  last = gpt_rank_destroy(&rank);
  if (status == MFSDP_OK && last != MFSDP_OK) {
    status = last;
    self->error = *mfsdp_context_error(&rank.context);
  }
  self->status = status;
}

/* Starts all ranks of this process and waits for them. Returns the rank to blame, NULL if all went well. */
static const rank_thread *run_ranks(rank_thread *ranks, int32_t count) {
  const rank_thread *blamed = NULL;
  int32_t started, r;
  if (ranks[0].job->processes) { /* one, on the thread that MPI and CUDA know */
    run_rank(&ranks[0]);
    return ranks[0].status == MFSDP_OK ? NULL : &ranks[0];
  }
  for (started = 0; started < count; ++started) {
    const mfsdp_status status =
        mfsdp_thread_start(&ranks[started].thread, run_rank, &ranks[started]);
    if (status == MFSDP_OK) continue; /* ranks[started] is the thread's now */
    ranks[started].status = status;
    (void)MFSDP_ERROR_SET(&ranks[started].error, ranks[started].status, -1,
                          "the system refused thread %d of %d; use fewer --ranks", (int)started + 1,
                          (int)count);
    ranks[started].job->links->poison(ranks[started].job, &ranks[started].error);
    blamed = &ranks[started];
    break;
  }
  for (r = 0; r < started; ++r)
    mfsdp_thread_join(&ranks[r].thread);
  for (r = 0; r < started && blamed == NULL; ++r) /* the one that saw it first, not its victims */
    if (ranks[r].status != MFSDP_OK && ranks[r].status != MFSDP_E_POISONED) blamed = &ranks[r];
  for (r = 0; r < started && blamed == NULL; ++r)
    if (ranks[r].status != MFSDP_OK) blamed = &ranks[r];
  return blamed;
}

/* ---- before and after ---- */

/* Both callbacks of the audit get the job. */
static void audit_line(void *user, const char *line) {
  (void)user;
  fprintf(stderr, "  %s\n", line);
}

static const char *audit_algorithm(void *user, int32_t param) {
  const gpt_job *job = (const gpt_job *)user;
  return mfsdp_algorithm_kind_name(
      gpt_hyper_group(&job->options, job->table.params[param].hyper_group).algorithm);
}

/* What was asked for and does nothing here. */
static void print_notes(const gpt_options *o) {
  const gpt_strategy *strategy = gpt_strategy_at(o->strategy);
  if (!o->step_in_backward) return;
  if (o->optimizer != GPT_OPTIMIZER_MUON)
    fprintf(stderr, "note: --step-in-backward works ahead for muon only\n");
  else if (strategy->matrices == MFSDP_PLACEMENT_BANDED)
    fprintf(
        stderr,
        "note: --step-in-backward has nothing to work ahead on: with --strategy %s no rank has a "
        "whole matrix before the step\n",
        strategy->name);
}

/* Every tensor with the optimizer it will really get and its owners. */
static mfsdp_status print_audit(mfsdp_context *context, gpt_job *job) {
  mfsdp_plan *plan = NULL;
  mfsdp_status status;
  MFSDP_TRY(gpt_plan_create(context, job, &plan));
  fprintf(stderr, "plan for %d ranks (%s math, strategy %s):\n", (int)job->options.ranks,
          job->platform->math_name(job), gpt_strategy_at(job->options.strategy)->name);
  print_notes(&job->options);
  status = mfsdp_plan_audit(context, plan, audit_algorithm, audit_line, job);
  mfsdp_plan_destroy(context, plan);
  return status;
}

static void sum_traffic(const rank_figures *ranks, int32_t count, gpt_result *result) {
  int32_t r;
  for (r = 0; r < count; ++r) {
    const mfsdp_traffic_count *sent = ranks[r].counters.sent;
    const double step_ms = (double)ranks[r].optimizer_us * 1e-3 / (double)ranks[r].steps;
    result->bytes.materialize += (int64_t)sent[MFSDP_TRAFFIC_MATERIALIZE].payload_nbytes;
    result->bytes.reduce += (int64_t)sent[MFSDP_TRAFFIC_REDUCE].payload_nbytes;
    result->bytes.optimizer_matrix += (int64_t)sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].payload_nbytes;
    result->bytes.scalar += (int64_t)sent[MFSDP_TRAFFIC_SCALAR].payload_nbytes;
    result->ns_calls += (int64_t)ranks[r].counters.newton_schulz_count;
    result->resident_bytes[r] = ranks[r].resident_nbytes;
    if (step_ms > result->opt_step_ms) result->opt_step_ms = step_ms; /* the slowest rank's mean */
  }
}

/* gpt_fail for what is not the caller's mistake. */
static int run_failed(gpt_error *error, const char *text) {
  (void)gpt_fail(error, "%s", text);
  return 1;
}

static int print_result(const rank_thread *first, int32_t count, gpt_error *error) {
  gpt_result *result = (gpt_result *)calloc(1, sizeof(*result));
  int status;
  if (result == NULL) return gpt_fail(error, "out of memory for the result");
  result->steps = first->steps;
  result->ranks = count;
  result->train_loss = first->train_loss;
  result->val_loss = first->val_loss;
  (void)snprintf(result->params_hash, sizeof(result->params_hash), "%016llx",
                 (unsigned long long)first->params_hash);
  (void)snprintf(result->strategy, sizeof(result->strategy), "%s",
                 gpt_strategy_at(first->job->options.strategy)->name);
  result->tokens_per_s = gpt_progress_tokens_per_s(&first->progress);
  result->slot_bytes = first->figures[0].slot_nbytes;
  result->skipped_steps = first->skipped_steps;
  sum_traffic(first->figures, count, result);
  status = gpt_result_write(stdout, result, error);
  free(result);
  return status;
}

static int draw_curve(gpt_curve_log *log, const char *svg, gpt_error *error) {
  gpt_loss_run run;
  gpt_curve_log_finish(log);
  run.name = "train_gpt";
  run.curve = &log->curve;
  return gpt_loss_chart_write(svg, "train_gpt", &run, 1, error);
}

/* How many ranks are threads of this process. */
static int32_t local_count(const gpt_job *job) {
  return job->processes ? 1 : (int32_t)job->options.ranks;
}

/* Trains, and prints the result of a run that went well. Returns 0 or 1. */
static int train_and_report(rank_thread *ranks, gpt_error *error) {
  const gpt_job *job = ranks[0].job;
  const rank_thread *blamed = run_ranks(ranks, local_count(job));
  int status;
  if (blamed != NULL) {
    (void)gpt_fail(error, "rank %d: %s: %s", (int)blamed->index, mfsdp_status_name(blamed->status),
                   blamed->error.message);
    return 1;
  }
  if (ranks[0].index != 0) return 0;
  status = print_result(&ranks[0], (int32_t)job->options.ranks, error);
  if (status == GPT_OK && job->options.loss_svg != NULL)
    status = draw_curve(&ranks[0].log, job->options.loss_svg, error);
  return status == GPT_OK ? 0 : 1;
}

/* Also after a failed run: the trace shows what the ranks were at. Returns `status`, or 1 if only
 * the file failed. */
static int finish_trace(gpt_trace *trace, int status, gpt_error *error) {
  const int64_t left_out = gpt_trace_left_out(trace);
  gpt_error ignored;
  if (left_out > 0)
    fprintf(stderr, "train_gpt: %s holds the first steps; %lld later phases did not fit\n",
            trace->path, (long long)left_out);
  if (gpt_trace_finish(trace, status == GPT_OK ? error : &ignored) != GPT_OK && status == GPT_OK)
    return 1;
  return status;
}

/* The tables of run_job; NULL if there is no memory. */
static rank_thread *create_ranks(gpt_job *job) {
  const int32_t count = local_count(job);
  rank_thread *ranks = (rank_thread *)calloc((size_t)count, sizeof(*ranks));
  rank_figures *figures;
  int32_t r;
  if (ranks == NULL) return NULL;
  figures = (rank_figures *)calloc((size_t)count * (size_t)job->options.ranks, sizeof(*figures));
  for (r = 0; r < count; ++r) {
    ranks[r].job = job;
    ranks[r].index = job->processes ? job->process_rank : r;
    ranks[r].train_loss = ranks[r].val_loss = (double)NAN;
    ranks[r].error = mfsdp_error_none();
    ranks[r].figures = figures + (size_t)r * (size_t)job->options.ranks;
  }
  if (figures != NULL) return ranks;
  free(ranks);
  return NULL;
}

static void destroy_ranks(rank_thread *ranks) {
  free(ranks[0].figures);
  free(ranks);
}

/* The files that rank 0 writes; other processes open none. */
static int open_outputs(gpt_job *job, rank_thread *first, gpt_trace *trace, gpt_error *error) {
  int status;
  if (first->index != 0) return GPT_OK;
  status = gpt_curve_open(job->options.loss_csv, &first->curve, error);
  if (status == GPT_OK) status = gpt_file_begin(job->options.loss_svg, error);
  if (status == GPT_OK)
    status = gpt_trace_create(job->options.trace, (int32_t)job->options.ranks, trace, error);
  if (status == GPT_OK && trace->ranks != NULL) job->trace = trace;
  return status;
}

/* Returns the program's exit status: 1 for a failed run, 2 for a bad call. */
static int run_job(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  rank_thread *ranks = create_ranks(job);
  gpt_error ignored;
  gpt_trace trace;
  int status;
  if (ranks == NULL) return run_failed(error, "out of memory for the ranks; use fewer --ranks");
  memset(&trace, 0, sizeof(trace));
  status = gpt_curve_log_create(&ranks[0].log, error);
  if (status != GPT_OK) {
    destroy_ranks(ranks);
    return status;
  }
  status = open_outputs(job, &ranks[0], &trace, error);
  if (status == GPT_OK && ranks[0].index == 0 && print_audit(context, job) != MFSDP_OK)
    status = gpt_fail(error, "%s", mfsdp_context_error(context)->message);
  if (status == GPT_OK) status = train_and_report(ranks, error);
  status = finish_trace(&trace, status, error);
  job->trace = NULL;
  if (gpt_curve_close(&ranks[0].curve, status == GPT_OK ? error : &ignored) != GPT_OK &&
      status == GPT_OK)
    status = 1;
  gpt_curve_log_destroy(&ranks[0].log);
  destroy_ranks(ranks);
  return status;
}

/* Where ranks compute, and what they meet in. */
static void choose_tables(gpt_job *job) {
  job->platform = gpt_platform_host();
  job->links = job->options.transport == GPT_TRANSPORT_MPI ? gpt_links_mpi() : gpt_links_threads();
#if MFSDP_EXAMPLE_CUDA
  if (job->options.device != GPT_DEVICE_CUDA) return;
  job->platform = gpt_platform_cuda();
  job->links = gpt_links_device();
#endif
#if MFSDP_EXAMPLE_NCCL
  if (job->options.transport == GPT_TRANSPORT_NCCL) job->links = gpt_links_nccl();
#endif
}

static int open_job(gpt_job *job, mfsdp_context *context, gpt_error *error) {
  int status;
  choose_tables(job);
  status = job->links->open(job, context, error);
  if (status != GPT_OK) return status;
  gpt_options_config(&job->options, &job->config);
  status = gpt_checkpoint_check(&job->options, error);
  if (status != GPT_OK) return status;
  status =
      gpt_data_open(job->options.data, job->config.context, job->config.batch, &job->data, error);
  if (status != GPT_OK) return status;
  status = gpt_param_table_create(&job->config, &job->table, error);
  if (status != GPT_OK) {
    gpt_data_destroy(&job->data);
    return status;
  }
#if MFSDP_EXAMPLE_CBLAS
  job->math = mfsdp_host_math_cblas();
#else
  job->math = mfsdp_host_math_loops();
#endif
#if MFSDP_EXAMPLE_LAPACKE
  job->lapack = mfsdp_host_lapacke();
#endif
  gpt_job_set_dtype(job);
  gpt_job_set_strategy(job);
  return GPT_OK;
}

/* Status 1 if standard output does not take it. */
static int print_help(void) {
  gpt_options_help(stdout, "train_gpt");
  if (fflush(stdout) == 0 && !ferror(stdout)) return 0;
  fprintf(stderr, "train_gpt: cannot write the help\n");
  return 1;
}

int main(int argc, char **argv) {
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  struct sigaction action;
  mfsdp_context context;
  gpt_error error = {""};
  gpt_job job;
  int status;
  gpt_file_keep_standard();
  memset(&job, 0, sizeof(job));
  status = gpt_options_parse(argc, (const char *const *)argv, &job.options, &error);
  if (status == GPT_OPTIONS_HELP) return print_help();
  memset(&action, 0, sizeof(action));
  action.sa_handler = on_signal;
  action.sa_flags = (int)SA_RESETHAND; /* a second Ctrl-C ends the program at once */
  (void)sigaction(SIGINT, &action, NULL);
  (void)sigaction(SIGTERM, &action, NULL);
  /* At a limit of the file size (ulimit -f) a write fails with its message instead of ending us. */
  action.sa_handler = SIG_IGN;
  (void)sigaction(SIGXFSZ, &action, NULL);
  if (status == GPT_OK && mfsdp_context_init(&context, &desc) != MFSDP_OK)
    status = run_failed(&error, mfsdp_context_error(&context)->message);
  if (status == GPT_OK) status = open_job(&job, &context, &error);
  if (status == GPT_OK) {
    status = run_job(&job, &context, &error);
    gpt_param_table_destroy(&job.table);
    gpt_data_destroy(&job.data);
  }
  if (status != GPT_OK) fprintf(stderr, "train_gpt: %s\n", error.text);
  if (job.links != NULL) job.links->close(&job, &context, status);
  return status;
}
