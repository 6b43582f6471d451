/* SPDX-License-Identifier: MIT */
#include "overhead.h"

#include <stdlib.h>
#include <time.h>

enum { MAX_STEPS = 128 };

int64_t bench_resident_nbytes(const gpt_rank *rank) {
  const size_t *current = rank->context.current_nbytes;
  return (int64_t)(current[MFSDP_MEMORY_SHARD] + current[MFSDP_MEMORY_STATE] +
                   current[MFSDP_MEMORY_GRAD]);
}

int64_t bench_resident_bound(const gpt_rank *rank) {
  const int32_t world = mfsdp_plan_world(rank->plan);
  int64_t sum = 0, largest = 0, share;
  int32_t count = 0, i;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(rank->plan, -1, &count);
  for (i = 0; i < count; ++i) {
    const mfsdp_param *param = mfsdp_plan_param(rank->plan, pieces[i].param);
    const mfsdp_hyper_group hyper = gpt_hyper_group(&rank->job->options, param->hyper_group);
    const int64_t state =
        hyper.algorithm == MFSDP_ALGORITHM_MUON ? 4 : 8; /* one fp32 array, or two */
    const int64_t nbytes = pieces[i].count * (mfsdp_param_resident_nbytes(param) + state);
    sum += nbytes;
    if (pieces[i].matrix >= 0 && nbytes > largest) largest = nbytes;
  }
  share = (sum + world - 1) / world;
  return share > largest ? share : largest;
}

/* Seconds of a step: on the clock, and of this thread on a processor, which other programs disturb
 * less. With queues in place and one rank there is no other thread and no waiting. */
typedef struct spent {
  double wall, cpu;
} spent;

static spent read_clocks(void) {
  struct timespec cpu = {0, 0};
  spent now;
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &cpu);
  now.wall = bench_now();
  now.cpu = (double)cpu.tv_sec + 1e-9 * (double)cpu.tv_nsec;
  return now;
}

static spent since(spent start) {
  spent now = read_clocks();
  now.wall -= start.wall;
  now.cpu -= start.cpu;
  return now;
}

static spent our_step(gpt_rank *rank) {
  mfsdp_verdict verdict = mfsdp_verdict_default();
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  const spent start = read_clocks();
  int32_t u;
  bench_need(rank, mfsdp_step_begin(rank->runtime, &desc));
  for (u = 0; u < rank->model.unit_count; ++u)
    bench_need(rank, gpt_rank_forward(rank, u, MFSDP_USE_FORWARD));
  bench_need(rank, mfsdp_step_value(rank->runtime, rank->model.loss));
  for (u = rank->model.unit_count; u-- > 0;)
    bench_need(rank, gpt_rank_backward(rank, u));
  bench_need(rank, mfsdp_step_end(rank->runtime, 0));
  bench_need(rank, mfsdp_step_verdict(rank->runtime, &verdict));
  return since(start);
}

static spent peer_step(gpt_rank *rank, bench_replica *replica) {
  const spent start = read_clocks();
  bench_replica_gradients(rank, replica);
  bench_replica_update(rank, replica);
  return since(start);
}

static void run_case(bench_report *report, const bench_shape *shape, int steps) {
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_threads_world_desc desc;
  mfsdp_context context;
  bench_replica replica;
  gpt_rank rank;
  gpt_job job;
  double ours[MAX_STEPS], peer[MAX_STEPS], our_cpu[MAX_STEPS], peer_cpu[MAX_STEPS];
  bench_stats o, p, oc, pc;
  bench_row row = bench_row_default();
  int i;
  bench_job_create(&job, shape, 1);
  desc = gpt_job_world_desc(&job);
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &job.world) != MFSDP_OK)
    exit(1);
  bench_need(&rank, gpt_rank_create(&rank, &job, 0));
  bench_replica_create(&rank, &replica, 1);
  for (i = -2; i < steps; ++i) {
    spent taken[2];
    gpt_data_batch(&job.data, (uint64_t)job.options.seed, i + 2, rank.model.inputs,
                   rank.model.targets);
    /* Each first in turn: what the second finds in the caches does not favour one. */
    taken[i & 1] = i & 1 ? our_step(&rank) : peer_step(&rank, &replica);
    taken[!(i & 1)] = i & 1 ? peer_step(&rank, &replica) : our_step(&rank);
    if (i < 0) continue;
    ours[i] = taken[1].wall;
    peer[i] = taken[0].wall;
    our_cpu[i] = taken[1].cpu;
    peer_cpu[i] = taken[0].cpu;
  }
  row.wrong = bench_replica_wrong(&rank, &replica);
  bench_replica_destroy(&rank, &replica);
  bench_need(&rank, gpt_rank_destroy(&rank));
  (void)mfsdp_threads_world_destroy(&context, job.world);
  bench_job_destroy(&job);
  o = bench_summarize(ours, steps);
  p = bench_summarize(peer, steps);
  oc = bench_summarize(our_cpu, steps);
  pc = bench_summarize(peer_cpu, steps);
  row.name = shape->name;
  row.metric = "step, world of one";
  row.unit = "ms";
  row.value = o.median * 1e3;
  row.peer = "without the runtime";
  row.ratio_to_peer = p.median / o.median;
  bench_add(report, &row);
  row.metric = "the same, cpu time";
  row.value = oc.median * 1e3;
  row.ratio_to_peer = pc.median / oc.median;
  bench_add(report, &row);
  printf("    ours min %.2f median %.2f p99 %.2f ms, peer min %.2f median %.2f p99 %.2f ms; cpu: "
         "ours min %.2f "
         "median %.2f, peer min %.2f median %.2f ms\n"
         "    overhead %.2f%% (median), %.2f%% (min); cpu %.2f%% (median), %.2f%% (min)\n",
         o.min * 1e3, o.median * 1e3, o.p99 * 1e3, p.min * 1e3, p.median * 1e3, p.p99 * 1e3,
         oc.min * 1e3, oc.median * 1e3, pc.min * 1e3, pc.median * 1e3,
         100.0 * (o.median / p.median - 1.0), 100.0 * (o.min / p.min - 1.0),
         100.0 * (oc.median / pc.median - 1.0), 100.0 * (oc.min / pc.min - 1.0));
}

void bench_overhead(bench_report *report, int quick) {
  static const bench_shape shapes[] = {{"gpt d=256 L=4 T=128 B=4, 1 rank", 256, 4, 128, 4},
                                       {"gpt d=256 L=4 T=128 B=16, 1 rank", 256, 4, 128, 16}};
  size_t i;
  printf("\n  what the runtime itself costs:\n");
  for (i = 0; i < (quick ? 1 : sizeof(shapes) / sizeof(shapes[0])); ++i)
    run_case(report, &shapes[i], quick ? 6 : 40);
}
