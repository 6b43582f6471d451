/* SPDX-License-Identifier: MIT */
/*
 * step.c - a training step of MatrixFSDP beside plain data parallel, on the same thread ranks,
 * model, samples and kernels, in alternation in one run.
 *
 * Plain data parallel (the peer): every rank keeps full parameters and full gradients; one
 * in-process all-reduce (each rank sums its slice straight from all peers' gradients in rank order,
 * then copies the others' slices); every rank updates everything. Both sum in the same order and
 * update with the same kernels, so their parameters agree bit for bit: `wrong` counts elements that
 * do not. Barriers separate the parts, so a part's time is that of the slowest rank.
 * Then: how much of the transfer time prefetch hides (support/overlap.h), what the runtime itself
 * costs and how much it keeps resident (support/overhead.h).
 */
#include "support/bench.h"
#include "support/gpt_job.h"
#include "support/overhead.h"
#include "support/overlap.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#define RANKS 4
#define MAX_STEPS 256

typedef struct bench_case {
  bench_shape shape;
  int warmup, steps, quick_steps;
} bench_case;

/* Seconds of one step's parts. */
typedef struct parts {
  double gradients[MAX_STEPS], optimizer[MAX_STEPS];
} parts;

typedef struct shared {
  gpt_job job;
  const bench_case *bench;
  int steps;
  pthread_barrier_t barrier;
  bench_replica replicas[RANKS];
  parts ours, peer;
  int64_t wrong, resident[RANKS], resident_bound;
  double imbalance; /* largest over mean Newton-Schulz cost of the plan */
  int failed;
} shared;

typedef struct worker {
  shared *all;
  int32_t index;
  gpt_rank rank;
  double optimizer_begin, optimizer_end; /* between barriers */
  mfsdp_thread thread;
} worker;

static void meet(worker *w) {
  (void)pthread_barrier_wait(&w->all->barrier);
}

static void need(worker *w, mfsdp_status status) {
  bench_need(&w->rank, status);
}

static void trace_optimizer(void *user, int begin, const char *lane, const char *label) {
  worker *w = (worker *)user;
  (void)lane;
  if (strcmp(label, "optimizer") != 0) return;
  meet(w);
  if (begin)
    w->optimizer_begin = bench_now();
  else
    w->optimizer_end = bench_now();
}

/* ---- the peer ---- */

/* Sums this rank's slice from all ranks in rank order, then copies the other slices. */
static void all_reduce(worker *w) {
  const mfsdp_backend *backend = mfsdp_host_backend_get(w->rank.host);
  bench_replica *own = &w->all->replicas[w->index];
  const int64_t count = own->grad_count, slice = (count / RANKS + 127) / 128 * 128;
  const void *terms[RANKS];
  int32_t r;
  meet(w);
  for (r = 0; r < RANKS; ++r)
    terms[r] = w->all->replicas[r].grads + w->index * slice;
  need(w, backend->ops->sum_terms(
              backend->self, own->queue, own->reduced + w->index * slice, 1, terms, MFSDP_F32,
              RANKS, count - w->index * slice < slice ? count - w->index * slice : slice));
  meet(w);
  for (r = 0; r < RANKS; ++r) {
    const int64_t first = r * slice, length = count - first < slice ? count - first : slice;
    if (r != w->index)
      memcpy(own->reduced + first, w->all->replicas[r].reduced + first,
             (size_t)length * sizeof(float));
  }
  meet(w);
}

static void peer_step(worker *w, int64_t step, parts *out, int slot) {
  shared *all = w->all;
  bench_replica *p = &all->replicas[w->index];
  double start, middle;
  meet(w);
  start = bench_now();
  gpt_data_batch(&all->job.data, (uint64_t)all->job.options.seed, step * RANKS + w->index,
                 w->rank.model.inputs, w->rank.model.targets);
  bench_replica_gradients(&w->rank, p);
  all_reduce(w);
  middle = bench_now();
  bench_replica_update(&w->rank, p);
  meet(w);
  if (w->index != 0 || slot < 0) return;
  out->gradients[slot] = middle - start;
  out->optimizer[slot] = bench_now() - middle;
}

/* ---- ours ---- */

static void our_step(worker *w, int64_t step, parts *out, int slot) {
  shared *all = w->all;
  gpt_rank *rank = &w->rank;
  mfsdp_verdict verdict = mfsdp_verdict_default();
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  double start;
  int32_t u;
  desc.grad_weight = 1.0 / RANKS;
  meet(w);
  start = bench_now();
  gpt_data_batch(&all->job.data, (uint64_t)all->job.options.seed, step * RANKS + w->index,
                 rank->model.inputs, rank->model.targets);
  need(w, mfsdp_step_begin(rank->runtime, &desc));
  for (u = 0; u < rank->model.unit_count; ++u)
    need(w, gpt_rank_forward(rank, u, MFSDP_USE_FORWARD));
  for (u = rank->model.unit_count; u-- > 0;)
    need(w, gpt_rank_backward(rank, u));
  need(w,
       mfsdp_step_end(rank->runtime, 0)); /* the trace callback holds barriers around the update */
  need(w, mfsdp_step_verdict(rank->runtime, &verdict));
  if (w->index != 0 || slot < 0) return;
  out->gradients[slot] = w->optimizer_begin - start;
  out->optimizer[slot] = w->optimizer_end - w->optimizer_begin;
}

/* ---- a case ---- */

static int64_t newton_schulz_cost(mfsdp_hyper_group *hidden, const mfsdp_piece *piece) {
  return piece->matrix < 0 ? 0
                           : mfsdp_newton_schulz_cost(&hidden->muon.newton_schulz, piece->param,
                                                      piece->rows, piece->cols);
}

static void find_imbalance(worker *w) {
  mfsdp_hyper_group hidden = gpt_hyper_group(&w->all->job.options, GPT_GROUP_HIDDEN);
  int64_t load[RANKS] = {0, 0, 0, 0}, sum = 0, most = 0;
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(w->rank.plan, -1, &count);
  for (i = 0; i < count; ++i)
    load[pieces[i].owner] += newton_schulz_cost(&hidden, &pieces[i]);
  for (i = 0; i < RANKS; ++i) {
    sum += load[i];
    if (load[i] > most) most = load[i];
  }
  w->all->imbalance = (double)most * RANKS / (double)sum;
}

static void run_worker(void *argument) {
  worker *w = (worker *)argument;
  shared *all = w->all;
  int64_t wrong;
  int i;
  need(w, gpt_rank_create(&w->rank, &all->job, w->index));
  all->resident[w->index] = bench_resident_nbytes(&w->rank);
  bench_replica_create(&w->rank, &all->replicas[w->index], 0);
  if (w->index == 0) find_imbalance(w);
  if (w->index == 0) all->resident_bound = bench_resident_bound(&w->rank);
  w->rank.context.desc.trace = trace_optimizer;
  w->rank.context.desc.user = w;
  for (i = -all->bench->warmup; i < all->steps; ++i) {
    our_step(w, i + all->bench->warmup, &all->ours, i);
    peer_step(w, i + all->bench->warmup, &all->peer, i);
  }
  wrong = bench_replica_wrong(&w->rank, &all->replicas[w->index]);
  if (w->index == 0) all->wrong = wrong;
  bench_replica_destroy(&w->rank, &all->replicas[w->index]);
  need(w, gpt_rank_destroy(&w->rank));
}

static void report_part(bench_report *report, const shared *all, const char *metric, double *ours,
                        double *peer, const char *limit, double limit_seconds) {
  const bench_stats o = bench_summarize(ours, all->steps), p = bench_summarize(peer, all->steps);
  bench_row row = bench_row_default();
  row.name = all->bench->shape.name;
  row.unit = "ms";
  row.metric = metric;
  row.value = o.median * 1e3;
  row.peer = "plain data parallel";
  row.ratio_to_peer = p.median / o.median;
  row.limit = limit;
  if (limit != NULL) row.ratio_to_limit = limit_seconds / o.median;
  row.wrong = all->wrong;
  bench_add(report, &row);
  printf("    ours min %.2f median %.2f p99 %.2f ms, peer min %.2f median %.2f p99 %.2f ms: %.3f "
         "of the "
         "peer's time\n",
         o.min * 1e3, o.median * 1e3, o.p99 * 1e3, p.min * 1e3, p.median * 1e3, p.p99 * 1e3,
         o.median / p.median);
}

static void report_resident(bench_report *report, const shared *all) {
  bench_row row = bench_row_default();
  int64_t most = 0;
  int r;
  for (r = 0; r < RANKS; ++r)
    if (all->resident[r] > most) most = all->resident[r];
  row.name = all->bench->shape.name;
  row.metric = "resident, fullest rank";
  row.unit = "MB";
  row.value = (double)most * 1e-6;
  row.limit = "proven bound";
  row.ratio_to_limit = (double)all->resident_bound / (double)most;
  row.wrong = 0;
  bench_add(report, &row);
  printf("    resident bytes of the fullest rank: %.4f of the bound\n",
         (double)most / (double)all->resident_bound);
}

static void run_case(bench_report *report, const bench_case *bench, int quick) {
  static shared all; /* parts are large */
  static worker workers[RANKS];
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  double total_ours[MAX_STEPS], total_peer[MAX_STEPS];
  int i;
  memset(&all, 0, sizeof(all));
  memset(workers, 0, sizeof(workers));
  all.bench = bench;
  all.steps = quick ? bench->quick_steps : bench->steps;
  bench_job_create(&all.job, &bench->shape, RANKS);
  desc.world = RANKS;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &all.job.world) != MFSDP_OK ||
      pthread_barrier_init(&all.barrier, NULL, RANKS) != 0) {
    fprintf(stderr, "bench step: set-up failed\n");
    exit(1);
  }
  for (i = 0; i < RANKS; ++i) {
    workers[i].all = &all;
    workers[i].index = i;
    if (mfsdp_thread_start(&workers[i].thread, run_worker, &workers[i]) != MFSDP_OK) exit(1);
  }
  for (i = 0; i < RANKS; ++i)
    mfsdp_thread_join(&workers[i].thread);
  for (i = 0; i < all.steps; ++i) {
    total_ours[i] = all.ours.gradients[i] + all.ours.optimizer[i];
    total_peer[i] = all.peer.gradients[i] + all.peer.optimizer[i];
  }
  /* The update cannot take less than the peer's, spread evenly, stretched by the plan's
   * imbalance. */
  {
    double sorted[MAX_STEPS];
    memcpy(sorted, all.peer.optimizer, sizeof(sorted));
    report_part(report, &all, "step without optimizer", all.ours.gradients, all.peer.gradients,
                NULL, 0);
    report_part(report, &all, "optimizer step", all.ours.optimizer, all.peer.optimizer,
                "peer / ranks", bench_summarize(sorted, all.steps).median / RANKS);
  }
  report_part(report, &all, "whole step", total_ours, total_peer, NULL, 0);
  printf(
      "    plan: largest Newton-Schulz cost %.3f of the mean; bound of the optimizer ratio %.3f\n",
      all.imbalance, all.imbalance / RANKS);
  report_resident(report, &all);
  (void)pthread_barrier_destroy(&all.barrier);
  (void)mfsdp_threads_world_destroy(&context, all.job.world);
  bench_job_destroy(&all.job);
}

int main(int argc, char **argv) {
  static const bench_case cases[] = {
      {{"gpt d=128 L=4 T=128 B=4", 128, 4, 128, 4}, 3, 40, 12},
      {{"gpt d=256 L=4 T=128 B=4", 256, 4, 128, 4}, 2, 20, 6},
      {{"gpt d=512 L=4 T=128 B=4", 512, 4, 128, 4}, 1, 8, 2},
  };
  bench_options options;
  bench_report report;
  size_t i;
  int status = bench_parse(
      argc, argv, "step: MatrixFSDP against plain data parallel, 4 thread ranks, Muon", &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "step", &options);
  if (status != 0) return status;
  for (i = 0; i < sizeof(cases) / sizeof(cases[0]); ++i)
    run_case(&report, &cases[i], options.quick);
  bench_overlap(&report, options.quick);
  bench_overhead(&report, options.quick);
  return bench_close(&report);
}
