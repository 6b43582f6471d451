/* SPDX-License-Identifier: MIT */
#include "strat_rank.h"

#include "bench.h"
#include "overhead.h"
#include "strat_links.h"

#include <math.h>
#include <stdlib.h>

/* One rank of this process. The trace callback may come from the thread of a queue. */
typedef struct lane {
  gpt_rank rank;
  void (*body)(struct lane *l, int32_t index);
  const strat_load *load;
  strat_variant variant;
  double budget;
  strat_result *result; /* of rank 0; others write to one of their own */
  strat_result own;
  int64_t verdict_us, last_reduce_us;     /* atomic */
  double baseline;                        /* resident bytes of the process */
  double booked_before;                   /* of the context: by the backend and the links */
  double sent[MFSDP_TRAFFIC_CLASS_COUNT]; /* by this rank in the step behind */
  plan_calibration *calibration;
  int64_t step;
  mfsdp_thread thread;
} lane;

/* What one step showed, on this rank; seconds, starts and ends on the common clock. */
typedef struct sample {
  double reduce, update_start, end, step_start;
} sample;

static void need(lane *l, mfsdp_status status) {
  bench_need(&l->rank, status);
}

static void meet(lane *l) {
  (void)strat_largest(&l->rank, 0.0);
}

/* From the first rank's start to the last one's end; the same on all ranks. */
static double span(lane *l, double start, double end) {
  end = strat_largest(&l->rank, end);
  return end + strat_largest(&l->rank, -start);
}

static void keep(lane *l, int time, double seconds) {
  if (l->result->count[time] < STRAT_MOST_REPEATS)
    l->result->seconds[time][l->result->count[time]++] = seconds;
}

static void trace(void *user, int begin, const char *lane_name, const char *label) {
  lane *l = (lane *)user;
  const int64_t now = mfsdp_clock_us();
  (void)lane_name;
  if (strcmp(label, "gather verdict") == 0)
    (void)__atomic_add_fetch(&l->verdict_us, begin ? -now : now, __ATOMIC_RELAXED);
  if (!begin &&
      (strncmp(label, "reduce unit ", 12) == 0 || strncmp(label, "gather sums ", 12) == 0))
    __atomic_store_n(&l->last_reduce_us, now, __ATOMIC_RELAXED);
}

/* ---- one step ---- */

/* Waits for the update, and, where parameters stay, for what brings them everywhere. */
static void settle(lane *l) {
  mfsdp_runtime *rt = l->rank.runtime;
  mfsdp_progress progress = mfsdp_progress_default();
  need(l, mfsdp_runtime_progress(rt, &progress));
  if (mfsdp_plan_residency(l->rank.plan) != MFSDP_RESIDENCY_RESIDENT) return;
  for (int32_t u = 0; u < mfsdp_plan_unit_count(l->rank.plan); ++u) {
    need(l, mfsdp_unit_acquire(rt, u, MFSDP_USE_EVALUATE));
    need(l, mfsdp_unit_release(rt, u));
  }
}

static void fill_gradients(lane *l, int32_t unit) {
  const gpt_param_table *table = &l->load->job.table;
  const int64_t block = l->step * l->load->job.options.ranks + l->rank.index;
  for (int32_t i = 0; i < table->count; ++i) {
    const int64_t numel = mfsdp_plan_param_numel(l->rank.plan, i);
    if (table->params[i].unit != unit || table->params[i].alias_of != NULL) continue;
    strat_load_gradient(i, block, numel, (float *)mfsdp_unit_grad(l->rank.runtime, i));
  }
}

/* Made-up gradients of all units, reduced. meeting: 1: ranks meet before every reduction. */
static void reduce_all(lane *l, int meeting, sample *s) {
  mfsdp_runtime *rt = l->rank.runtime;
  for (int32_t u = mfsdp_plan_unit_count(l->rank.plan); u-- > 0;) {
    double start;
    need(l, mfsdp_unit_grads(rt, u));
    fill_gradients(l, u);
    if (meeting) meet(l);
    start = bench_now();
    need(l, mfsdp_unit_reduce(rt, u));
    s->reduce += bench_now() - start;
  }
}

static void forward_and_backward(lane *l) {
  gpt_rank *rank = &l->rank;
  double loss;
  for (int32_t u = 0; u < rank->model.unit_count; ++u)
    need(l, gpt_rank_forward(rank, u, MFSDP_USE_FORWARD));
  for (int32_t u = rank->model.unit_count; u-- > 0;)
    need(l, gpt_rank_backward(rank, u));
  need(l, gpt_rank_loss(rank, &loss));
}

static sample take_step(lane *l, int trains, int meeting) {
  const gpt_job *job = &l->load->job;
  mfsdp_step_desc desc = mfsdp_step_desc_default();
  mfsdp_verdict verdict = mfsdp_verdict_default();
  sample s;
  memset(&s, 0, sizeof s);
  desc.grad_weight = 1.0 / (double)job->options.ranks;
  if (trains)
    gpt_data_batch(&job->data, 1, l->step * job->options.ranks + l->rank.index,
                   l->rank.model.inputs, l->rank.model.targets);
  __atomic_store_n(&l->verdict_us, 0, __ATOMIC_RELAXED);
  meet(l);
  s.step_start = bench_now();
  need(l, mfsdp_step_begin(l->rank.runtime, &desc));
  if (trains)
    forward_and_backward(l);
  else
    reduce_all(l, meeting, &s);
  if (meeting) meet(l);
  s.update_start = bench_now();
  need(l, mfsdp_step_end(l->rank.runtime, 0));
  need(l, mfsdp_step_verdict(l->rank.runtime, &verdict));
  settle(l);
  s.end = bench_now();
  ++l->step;
  return s;
}

/* ---- figures ---- */

/* The last one to come waits least for the message. */
static double verdict_s(lane *l) {
  return -strat_largest(&l->rank,
                        -1e-6 * (double)__atomic_load_n(&l->verdict_us, __ATOMIC_RELAXED));
}

static double keep_alone(lane *l, const sample *s) {
  const double update = span(l, s->update_start, s->end), verdict = verdict_s(l);
  keep(l, STRAT_REDUCE, strat_largest(&l->rank, s->reduce));
  keep(l, STRAT_VERDICT, verdict);
  keep(l, STRAT_OPTIMIZER, update - verdict);
  return span(l, s->step_start, s->end);
}

/* With what this rank sent in it. */
static sample counted_step(lane *l, int trains, int meeting) {
  const mfsdp_traffic_count *sent = l->rank.context.counters.sent;
  sample s;
  for (int i = 0; i < MFSDP_TRAFFIC_CLASS_COUNT; ++i)
    l->sent[i] = -(double)sent[i].payload_nbytes;
  s = take_step(l, trains, meeting);
  for (int i = 0; i < MFSDP_TRAFFIC_CLASS_COUNT; ++i)
    l->sent[i] += (double)sent[i].payload_nbytes;
  return s;
}

static double step_alone(lane *l) {
  const sample s = counted_step(l, 0, 1);
  return keep_alone(l, &s);
}

static double free_step(lane *l) {
  const sample s = counted_step(l, l->load->whole, 0);
  const double reduced = 1e-6 * (double)__atomic_load_n(&l->last_reduce_us, __ATOMIC_RELAXED);
  const double seconds = span(l, s.step_start, s.end);
  keep(l, STRAT_STEP, seconds);
  if (l->variant != STRAT_WHOLE)
    keep(l, STRAT_EXPOSED, strat_largest(&l->rank, s.end) - strat_largest(&l->rank, reduced));
  return seconds;
}

static double materialize(lane *l) {
  double start, seconds;
  meet(l);
  start = bench_now();
  for (int32_t u = 0; u < mfsdp_plan_unit_count(l->rank.plan); ++u) {
    need(l, mfsdp_unit_acquire(l->rank.runtime, u, MFSDP_USE_EVALUATE));
    need(l, mfsdp_unit_release(l->rank.runtime, u));
  }
  seconds = span(l, start, bench_now());
  keep(l, STRAT_MATERIALIZE, seconds);
  return seconds;
}

/* Once to warm up, then as often as the budget allows, at least once. A first time that is longer
 * than the whole budget counts itself, unless `second`, called after the second, asks for another:
 * what warming up saves is nothing beside it. All ranks see the same times, and so stop together. */
static void repeat(lane *l, double (*figure)(lane *), const int *times, int time_count,
                   void (*second)(lane *)) {
  double spent = figure(l);
  if (spent > l->budget && second == NULL) return;
  for (int i = 0; i < time_count; ++i)
    l->result->count[times[i]] = 0;
  spent = 0.0;
  for (int i = 0; i < STRAT_MOST_REPEATS && (i == 0 || spent < l->budget); ++i) {
    spent += figure(l);
    if (i == 0 && second != NULL) second(l);
  }
}

/* ---- what is held, and what came out ---- */

/* A line `key N kB` of a file in bytes; NAN where there is none. */
static double file_nbytes(const char *path, const char *key) {
  char line[256];
  double kbytes = (double)NAN;
  FILE *file = fopen(path, "r");
  while (file != NULL && fgets(line, sizeof line, file) != NULL)
    if (strncmp(line, key, strlen(key)) == 0) kbytes = strtod(line + strlen(key), NULL);
  if (file != NULL) (void)fclose(file);
  return kbytes * 1024.0;
}

/* The peak counts from here. */
static double begin_rss(const lane *l) {
  FILE *file;
  if (!l->load->job.processes) return (double)NAN; /* threads share one process */
  file = fopen("/proc/self/clear_refs", "w");
  if (file == NULL) return (double)NAN;
  (void)fputs("5", file);
  (void)fclose(file);
  return file_nbytes("/proc/self/status", "VmRSS:");
}

static double booked(const size_t *nbytes, int all) {
  const double resident =
      (double)(nbytes[MFSDP_MEMORY_SHARD] + nbytes[MFSDP_MEMORY_STATE] + nbytes[MFSDP_MEMORY_GRAD]);
  return !all ? resident
              : resident + (double)(nbytes[MFSDP_MEMORY_SLOT] + nbytes[MFSDP_MEMORY_STAGING] +
                                    nbytes[MFSDP_MEMORY_WORKSPACE]);
}

static void note_memory(lane *l) {
  const double rss = file_nbytes("/proc/self/status", "VmHWM:") - l->baseline;
  l->result->resident = strat_largest(&l->rank, booked(l->rank.context.current_nbytes, 0));
  l->result->held =
      strat_largest(&l->rank, booked(l->rank.context.current_nbytes, 1) - l->booked_before);
  l->result->resident_bound = (double)NAN;
  if (mfsdp_plan_residency(l->rank.plan) == MFSDP_RESIDENCY_SHARDED)
    l->result->resident_bound = (double)bench_resident_bound(&l->rank);
  l->result->rss = isnan(rss) ? rss : strat_largest(&l->rank, rss);
}

static void note_traffic(lane *l) {
  for (int i = 0; i < MFSDP_TRAFFIC_CLASS_COUNT; ++i)
    l->result->sent[i] = strat_sum(&l->rank, l->sent[i]);
}

static uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= UINT64_C(0xbf58476d1ce4e5b9);
  x ^= x >> 27;
  x *= UINT64_C(0x94d049bb133111eb);
  return x ^ x >> 31;
}

static int is_replicated(const lane *l) {
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(l->rank.plan, -1, &count);
  return count > 0 && pieces[0].placement == MFSDP_PLACEMENT_REPLICATED;
}

/* A sum over the elements that this rank has masters of: the same whoever has them. */
static uint64_t own_checksum(lane *l) {
  mfsdp_owned owned = mfsdp_owned_default();
  uint64_t sum = 0;
  while (mfsdp_owned_next(l->rank.runtime, &owned)) {
    const uint64_t place = (uint64_t)owned.param << 40;
    const float *values = (const float *)owned.data;
    for (int64_t i = 0; i < owned.count; ++i) {
      uint32_t bits;
      memcpy(&bits, &values[i], sizeof bits);
      sum += mix((place + (uint64_t)(owned.first + i)) ^ mix(bits));
    }
  }
  return sum;
}

/* Of all parameters. Where every rank has all of them, rank 0's, spoiled if another's differs. */
static void note_checksum(lane *l) {
  const uint64_t own = own_checksum(l);
  /* In two halves: a double holds each exactly, and their sums over 1024 ranks. */
  const double low = (double)(own & UINT32_MAX), high = (double)(own >> 32);
  if (is_replicated(l)) {
    const int alike = strat_largest(&l->rank, low) == -strat_largest(&l->rank, -low) &&
                      strat_largest(&l->rank, high) == -strat_largest(&l->rank, -high);
    l->result->checksum = alike ? own : ~own;
    return;
  }
  l->result->checksum = (uint64_t)strat_sum(&l->rank, low);
  l->result->checksum += (uint64_t)strat_sum(&l->rank, high) << 32;
}

/* ---- a rank ---- */

static void measure(lane *l) {
  static const int alone[] = {STRAT_REDUCE, STRAT_VERDICT, STRAT_OPTIMIZER};
  static const int gathers[] = {STRAT_MATERIALIZE}, steps[] = {STRAT_STEP, STRAT_EXPOSED};
  l->rank.context.desc.trace = trace;
  l->rank.context.desc.user = l;
  if (l->variant != STRAT_STEP_ALONE) {
    settle(l); /* parameters that stay are gathered once, which is no part of a step */
    repeat(l, free_step, steps, 2, NULL);
    note_traffic(l);
    note_memory(l);
    return;
  }
  repeat(l, step_alone, alone, 3, note_checksum);
  note_traffic(l);
  if (l->load->whole) repeat(l, materialize, gathers, 1, NULL);
  note_memory(l);
}

/* Before anything large is held, so that the machine does not run out of memory: all or none. */
static mfsdp_status check_memory(lane *l) {
  mfsdp_memory m;
  double own, sum, available;
  MFSDP_TRY(gpt_rank_memory(&l->rank, &m));
  own = (double)(m.shard_nbytes + m.state_nbytes + m.grad_nbytes + m.slot_nbytes +
                 m.staging_nbytes + m.workspace_nbytes);
  sum = strat_sum(&l->rank, own);
  available = -strat_largest(&l->rank, -file_nbytes("/proc/meminfo", "MemAvailable:"));
  l->result->predicted_held = strat_largest(&l->rank, own);
  if (!(sum > 0.8 * available)) return MFSDP_OK;
  return MFSDP_FAIL(&l->rank.context, MFSDP_E_UNSUPPORTED,
                    "%d ranks hold %.1f GB together, and %.1f GB are free",
                    (int)l->load->job.options.ranks, sum * 1e-9, available * 1e-9);
}

static mfsdp_status create(lane *l, int32_t index) {
  const gpt_job *job = &l->load->job;
  if (l->variant != STRAT_STEP_ALONE && l->load->whole) {
    MFSDP_TRY(gpt_rank_create(&l->rank, job, index));
    return check_memory(l); /* for what it notes: these models are small */
  }
  MFSDP_TRY(gpt_rank_open(&l->rank, job, index));
  MFSDP_TRY(check_memory(l));
  l->booked_before = booked(l->rank.context.current_nbytes, 1);
  l->baseline = begin_rss(l);
  return gpt_rank_start(&l->rank, strat_load_init, NULL);
}

static void measure_rank(lane *l, int32_t index) {
  const mfsdp_status status = create(l, index);
  if (status == MFSDP_E_UNSUPPORTED || status == MFSDP_E_ARGUMENT) {
    l->result->refused = 1;
    (void)snprintf(l->result->why, sizeof l->result->why, "%s",
                   mfsdp_context_error(&l->rank.context)->message);
    (void)gpt_rank_destroy(&l->rank);
    return;
  }
  need(l, status);
  measure(l);
  meet(l);
  need(l, gpt_rank_destroy(&l->rank));
}

static void calibrate_rank(lane *l, int32_t index) {
  plan_calibration ignored;
  plan_probe probe;
  need(l, gpt_rank_open(&l->rank, &l->load->job, index));
  probe.context = &l->rank.context;
  probe.backend = l->rank.backend;
  probe.math = l->load->job.math;
  probe.transport = &l->rank.transport;
  probe.control = &l->rank.control;
  probe.seconds = l->budget;
  need(l, plan_calibrate(&probe, l->calibration != NULL ? l->calibration : &ignored));
  meet(l);
  need(l, gpt_rank_destroy(&l->rank));
}

static void thread_main(void *argument) {
  lane *l = (lane *)argument;
  l->body(l, l->rank.index);
}

/* Runs all ranks of this process; `first` is what the lowest of them gets, others a copy. */
static void run_lanes(const lane *first) {
  gpt_job *job = &((strat_load *)(uintptr_t)first->load)->job;
  const int32_t count = job->processes ? 1 : (int32_t)job->options.ranks;
  lane *lanes = (lane *)calloc((size_t)count, sizeof *lanes);
  if (lanes == NULL) exit(1);
  strat_world_open(job);
  for (int32_t r = 0; r < count; ++r) {
    lanes[r] = *first;
    if (r > 0) lanes[r].result = &lanes[r].own;
    if (r > 0) lanes[r].calibration = NULL;
    lanes[r].rank.index = r;
    if (job->processes)
      first->body(&lanes[r], job->process_rank);
    else if (mfsdp_thread_start(&lanes[r].thread, thread_main, &lanes[r]) != MFSDP_OK)
      exit(1);
  }
  for (int32_t r = 0; r < count && !job->processes; ++r)
    mfsdp_thread_join(&lanes[r].thread);
  strat_world_close(job);
  free(lanes);
}

void strat_measure(strat_load *load, strat_variant variant, double seconds, strat_result *result) {
  static lane first; /* large */
  gpt_options *o = &load->job.options;
  memset(&first, 0, sizeof first);
  memset(result, 0, sizeof *result);
  if (variant != STRAT_AS_GIVEN) {
    o->prefetch = variant >= STRAT_QUEUES;
    o->step_in_backward = variant == STRAT_IN_BACKWARD;
  }
  gpt_job_set_strategy(&load->job);
  first.body = measure_rank;
  first.load = load;
  first.variant = variant;
  first.budget = seconds;
  first.result = result;
  run_lanes(&first);
}

void strat_calibrate(strat_load *load, plan_calibration *out) {
  static lane first;
  memset(&first, 0, sizeof first);
  load->job.options.prefetch = 0;
  first.body = calibrate_rank;
  first.load = load;
  first.budget = 0.3;
  first.calibration = out;
  run_lanes(&first);
}
