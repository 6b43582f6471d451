/* SPDX-License-Identifier: MIT */
/*
 * checkpoint.c - saves and loads of a checkpoint by 4 thread ranks beside dd in the same folder.
 *
 * In each round: dd copies as many bytes of noise from memory to the disk, with fsync; the ranks save;
 * dd reads its file and the ranks load theirs, both after the files have left the page cache; the ranks
 * save in the background (save_begin: how long it holds training up; then until it has its name).
 * Then 3 and 2 ranks load what 4 have saved: `wrong` counts bytes of tensors that were read but not
 * owned, or the other way round. Memory is that of the library's allocator, above what the runtime has.
 * Environment: BENCH_FOLDER, a folder of the disk to measure (build).
 */
#include "support/bench.h"
#include "support/disk.h"
#include "support/gpt_job.h"

#include "mfsdp/checkpoint.h"
#include "mfsdp/posix/background_posix.h"
#include "mfsdp/posix/io_posix.h"

#include <pthread.h>
#include <stdlib.h>

#define RANKS 4
#define MAX_ROUNDS 16

typedef struct figures {
  double dd_write[MAX_ROUNDS], save[MAX_ROUNDS], dd_read[MAX_ROUNDS], load[MAX_ROUNDS];
  double stall[MAX_ROUNDS], background[MAX_ROUNDS];
} figures;

typedef struct shared {
  gpt_job job;
  const bench_disk *disk;
  char folder[BENCH_PATH_NBYTES];
  pthread_barrier_t barrier;
  figures out;
  int rounds;          /* 0: load only */
  int64_t data_nbytes; /* of tensors, saved */
  int64_t read_nbytes[RANKS], header_nbytes[RANKS], owned_nbytes[RANKS], wrong[RANKS];
  double extra_nbytes[RANKS], snapshot_nbytes[RANKS];
} shared;

/* A rank. Its io counts what is read. */
typedef struct worker {
  shared *all;
  int32_t index;
  gpt_rank rank;
  mfsdp_io io, system;
  mfsdp_io_ops ops;
  int64_t read_nbytes;
  mfsdp_checkpoint *checkpoint;
  mfsdp_thread thread;
} worker;

static void meet(worker *w) {
  (void)pthread_barrier_wait(&w->all->barrier);
}

static void need(worker *w, mfsdp_status status) {
  bench_need(&w->rank, status);
}

static mfsdp_status counted_read(void *self, mfsdp_io_file *file, int64_t offset, size_t nbytes,
                                 void *dst, int64_t *done, mfsdp_error *error) {
  worker *w = (worker *)self;
  const mfsdp_status status =
      w->system.ops->read_at(w->system.self, file, offset, nbytes, dst, done, error);
  if (status == MFSDP_OK && *done > 0) w->read_nbytes += *done;
  return status;
}

/* ---- a rank ---- */

static void create_checkpoint(worker *w, const mfsdp_background *background) {
  mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
  w->system = mfsdp_io_posix(); /* holds no state: its calls may be given another `self` */
  w->ops = *w->system.ops;
  w->ops.read_at = counted_read;
  w->io = w->system;
  w->io.ops = &w->ops;
  w->io.self = w;
  desc.io = &w->io;
  desc.folder = w->all->folder;
  desc.background = background;
  need(w, mfsdp_checkpoint_create(w->rank.runtime, &desc, &w->checkpoint));
}

/* States as no step would make them, but as hard to compress. */
static void fill_states(worker *w) {
  const mfsdp_optimizer_state *states;
  int32_t count = 0, i;
  int64_t k;
  states = mfsdp_optimizer_states(mfsdp_runtime_optimizer(w->rank.runtime), &count);
  for (i = 0; i < count; ++i) {
    uint64_t x = (uint64_t)(i + 1) * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)w->index;
    for (k = 0; k < states[i].count; ++k) {
      x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
      ((float *)states[i].data)[k] = (float)(x >> 40);
    }
  }
}

/* All that the rank owns, in the order of its tables. */
static uint64_t hash_own(worker *w) {
  const mfsdp_optimizer_state *states;
  uint64_t hash = MFSDP_HASH_SEED;
  mfsdp_owned owned = mfsdp_owned_default();
  int32_t count = 0, i;
  states = mfsdp_optimizer_states(mfsdp_runtime_optimizer(w->rank.runtime), &count);
  for (i = 0; i < count; ++i)
    hash = mfsdp_hash_bytes(hash, states[i].data, (size_t)states[i].count * sizeof(float));
  while (mfsdp_owned_next(w->rank.runtime, &owned))
    hash = mfsdp_hash_bytes(hash, owned.data, (size_t)owned.count * sizeof(float));
  return hash;
}

static int64_t owned_nbytes(worker *w) {
  const mfsdp_optimizer_state *states;
  mfsdp_owned owned = mfsdp_owned_default();
  int32_t count = 0, i;
  int64_t sum = 0;
  states = mfsdp_optimizer_states(mfsdp_runtime_optimizer(w->rank.runtime), &count);
  for (i = 0; i < count; ++i)
    sum += states[i].count * (int64_t)sizeof(float);
  while (mfsdp_owned_next(w->rank.runtime, &owned))
    sum += owned.count * (int64_t)sizeof(float);
  return sum;
}

static void load(worker *w) {
  mfsdp_checkpoint_load_desc desc = mfsdp_checkpoint_load_desc_default();
  mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
  shared *all = w->all;
  w->read_nbytes = 0;
  need(w, mfsdp_checkpoint_load(w->checkpoint, &desc, &loaded));
  all->owned_nbytes[w->index] = owned_nbytes(w);
  all->read_nbytes[w->index] = loaded.data_nbytes;
  all->header_nbytes[w->index] = w->read_nbytes - loaded.data_nbytes;
  all->wrong[w->index] += llabs(loaded.data_nbytes - all->owned_nbytes[w->index]);
}

static double clocked_save(worker *w) {
  double start;
  meet(w);
  if (w->index == 0) bench_remove_folder(w->all->folder);
  meet(w);
  start = bench_now();
  need(w, mfsdp_checkpoint_save(w->checkpoint, NULL, 0));
  meet(w);
  return bench_now() - start;
}

static double clocked_load(worker *w) {
  double start;
  meet(w);
  if (w->index == 0) bench_evict_folder(w->all->folder);
  meet(w);
  start = bench_now();
  load(w);
  meet(w);
  return bench_now() - start;
}

/* Returns the stall; *whole: until the checkpoint has its name. */
static double clocked_background(worker *w, double *whole) {
  double start, stall;
  meet(w);
  if (w->index == 0) bench_remove_folder(w->all->folder);
  meet(w);
  start = bench_now();
  need(w, mfsdp_checkpoint_save_begin(w->checkpoint, NULL, 0));
  meet(w);
  stall = bench_now() - start;
  need(w, mfsdp_checkpoint_wait(w->checkpoint));
  *whole = bench_now() - start;
  return stall;
}

static void watch_memory(worker *w) {
  w->rank.context.total_peak_nbytes = w->rank.context.total_nbytes;
}

/* Who comes first changes with the round: disks of clouds are fast until their allowance is used up. */
static void run_round(worker *w, int round) {
  figures *out = &w->all->out;
  double dd_write = 0, dd_read = 0, save, read;
  if (w->index == 0 && round % 2 == 0) dd_write = bench_dd_write(w->all->disk);
  save = clocked_save(w);
  if (w->index == 0 && round % 2 == 1) dd_write = bench_dd_write(w->all->disk);
  if (w->index == 0 && round % 2 == 0) dd_read = bench_dd_read(w->all->disk);
  read = clocked_load(w);
  if (w->index != 0) return;
  if (round % 2 == 1) dd_read = bench_dd_read(w->all->disk);
  out->dd_write[round] = dd_write;
  out->dd_read[round] = dd_read;
  out->save[round] = save;
  out->load[round] = read;
}

static void save_and_load(worker *w) {
  const size_t before = w->rank.context.total_nbytes;
  uint64_t hash;
  int i;
  watch_memory(w);
  create_checkpoint(w, NULL);
  fill_states(w);
  hash = hash_own(w);
  for (i = 0; i < w->all->rounds; ++i)
    run_round(w, i);
  w->all->wrong[w->index] += hash_own(w) != hash;
  w->all->extra_nbytes[w->index] = (double)(w->rank.context.total_peak_nbytes - before);
  mfsdp_checkpoint_destroy(w->checkpoint);
}

static void save_in_background(worker *w) {
  mfsdp_posix_background thread;
  const mfsdp_background background = mfsdp_background_posix(&thread);
  double stall, whole = 0;
  int i;
  create_checkpoint(w, &background);
  w->all->snapshot_nbytes[w->index] = (double)mfsdp_checkpoint_snapshot_nbytes(w->checkpoint);
  for (i = 0; i < w->all->rounds; ++i) {
    stall = clocked_background(w, &whole);
    if (w->index != 0) continue;
    w->all->out.stall[i] = stall;
    w->all->out.background[i] = whole;
  }
  mfsdp_checkpoint_destroy(w->checkpoint);
}

static void run_worker(void *argument) {
  worker *w = (worker *)argument;
  need(w, gpt_rank_create(&w->rank, &w->all->job, w->index));
  if (w->all->rounds > 0) {
    save_and_load(w);
    save_in_background(w);
  } else {
    create_checkpoint(w, NULL);
    load(w);
    mfsdp_checkpoint_destroy(w->checkpoint);
  }
  w->checkpoint = NULL;
  meet(w);
  need(w, gpt_rank_destroy(&w->rank));
}

static void run_ranks(shared *all, const bench_shape *shape, int32_t ranks) {
  static worker workers[RANKS];
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_context context;
  int i;
  memset(workers, 0, sizeof(workers));
  bench_job_create(&all->job, shape, ranks);
  all->job.options.optimizer = GPT_OPTIMIZER_ADAMW; /* three arrays for each parameter */
  desc.world = ranks;
  if (mfsdp_context_init(&context, &context_desc) != MFSDP_OK ||
      mfsdp_threads_world_create(&context, &desc, &all->job.world) != MFSDP_OK ||
      pthread_barrier_init(&all->barrier, NULL, (unsigned)ranks) != 0) {
    fprintf(stderr, "bench checkpoint: set-up failed\n");
    exit(1);
  }
  for (i = 0; i < ranks; ++i) {
    workers[i].all = all;
    workers[i].index = i;
    if (mfsdp_thread_start(&workers[i].thread, run_worker, &workers[i]) != MFSDP_OK) exit(1);
  }
  for (i = 0; i < ranks; ++i)
    mfsdp_thread_join(&workers[i].thread);
  (void)pthread_barrier_destroy(&all->barrier);
  (void)mfsdp_threads_world_destroy(&context, all->job.world);
  bench_job_destroy(&all->job);
}

/* ---- rows ---- */

static double most(const double *values, int count) {
  double most_yet = values[0];
  int i;
  for (i = 1; i < count; ++i)
    if (values[i] > most_yet) most_yet = values[i];
  return most_yet;
}

static int64_t sum(const int64_t *values, int count) {
  int64_t total = 0;
  int i;
  for (i = 0; i < count; ++i)
    total += values[i];
  return total;
}

static double total(const double *values, int count) {
  double sum_yet = 0;
  int i;
  for (i = 0; i < count; ++i)
    sum_yet += values[i];
  return sum_yet;
}

/* The ratio is that of all rounds' time: half of them had dd first. */
static void report_rate(bench_report *report, const shared *all, const char *name,
                        const char *metric, const char *peer, double *ours, double *theirs) {
  const bench_stats o = bench_summarize(ours, all->rounds),
                    p = bench_summarize(theirs, all->rounds);
  bench_row row = bench_row_default();
  row.name = name;
  row.metric = metric;
  row.unit = "MB/s";
  row.value = (double)all->data_nbytes * 1e-6 / o.median;
  row.peer = peer;
  row.ratio_to_peer = total(theirs, all->rounds) / total(ours, all->rounds);
  row.wrong = sum(all->wrong, RANKS);
  bench_add(report, &row);
  printf(
      "    ours min %.3f median %.3f p99 %.3f s, dd min %.3f median %.3f p99 %.3f s; ratio of the "
      "medians %.3f\n",
      o.min, o.median, o.p99, p.min, p.median, p.p99, p.median / o.median);
}

static void report_background(bench_report *report, shared *all, const char *name) {
  const bench_stats stall = bench_summarize(all->out.stall, all->rounds);
  const bench_stats whole = bench_summarize(all->out.background, all->rounds);
  bench_row row = bench_row_default();
  row.name = name;
  row.metric = "stall of save_begin";
  row.unit = "ms";
  row.value = stall.median * 1e3;
  row.peer = "save";
  row.ratio_to_peer = bench_summarize(all->out.save, all->rounds).median / stall.median;
  row.limit = "copy";
  row.ratio_to_limit = 2.0 * (double)all->data_nbytes / bench_copy_rate() / stall.median;
  bench_add(report, &row);
  printf("    stall min %.1f median %.1f p99 %.1f ms; named after min %.3f median %.3f p99 %.3f s; "
         "the "
         "limit is one thread's copy of all ranks' bytes\n",
         stall.min * 1e3, stall.median * 1e3, stall.p99 * 1e3, whole.min, whole.median, whole.p99);
  row = bench_row_default();
  row.name = name;
  row.metric = "snapshot, fullest rank";
  row.unit = "MB";
  row.value = most(all->snapshot_nbytes, RANKS) * 1e-6;
  bench_add(report, &row);
}

static void report_memory(bench_report *report, const shared *all, const char *name) {
  bench_row row = bench_row_default();
  row.name = name;
  row.metric = "extra memory, a rank";
  row.unit = "MB";
  row.value = most(all->extra_nbytes, RANKS) * 1e-6;
  row.limit = "64 MB";
  row.ratio_to_limit = 64.0 / row.value;
  bench_add(report, &row);
}

static void report_resharding(bench_report *report, const shared *all, const char *name,
                              int32_t ranks) {
  bench_row row = bench_row_default();
  char text[40];
  (void)snprintf(text, sizeof(text), "read by %d ranks", (int)ranks);
  row.name = name;
  row.metric = text;
  row.unit = "MB";
  row.value = (double)sum(all->read_nbytes, ranks) * 1e-6;
  row.limit = "bytes needed";
  row.ratio_to_limit = (double)sum(all->owned_nbytes, ranks) / (double)sum(all->read_nbytes, ranks);
  row.wrong = sum(all->wrong, ranks);
  bench_add(report, &row);
  printf(
      "    %lld bytes of tensors; beside them %lld bytes of headers, indexes and counts in all\n",
      (long long)sum(all->read_nbytes, ranks), (long long)sum(all->header_nbytes, ranks));
}

static void run(bench_report *report, const bench_shape *shape, int rounds) {
  static shared all; /* the figures are large */
  bench_disk disk;
  int64_t params;
  int32_t ranks;
  memset(&all, 0, sizeof(all));
  all.rounds = rounds;
  params = 2 * 256 * shape->dim + shape->layers * 12 * shape->dim * shape->dim;
  bench_disk_create(&disk, 12 * params); /* as many bytes as the checkpoint, but for biases */
  all.disk = &disk;
  if (snprintf(all.folder, sizeof(all.folder), "%s/run", disk.folder) >= (int)sizeof(all.folder))
    exit(1);
  run_ranks(&all, shape, RANKS);
  all.data_nbytes = sum(all.owned_nbytes, RANKS);
  report_rate(report, &all, shape->name, "save", "dd conv=fsync", all.out.save, all.out.dd_write);
  report_rate(report, &all, shape->name, "load, cold", "dd, cold", all.out.load, all.out.dd_read);
  report_memory(report, &all, shape->name);
  report_background(report, &all, shape->name);
  all.rounds = 0;
  for (ranks = 3; ranks >= 2; --ranks) {
    memset(all.wrong, 0, sizeof(all.wrong));
    run_ranks(&all, shape, ranks);
    report_resharding(report, &all, shape->name, ranks);
  }
  bench_disk_destroy(&disk);
}

int main(int argc, char **argv) {
  static const bench_shape whole = {"gpt d=1024 L=7, AdamW: 1.06 GB", 1024, 7, 16, 1};
  static const bench_shape small = {"gpt d=512 L=4, AdamW: 0.15 GB", 512, 4, 16, 1};
  bench_options options;
  bench_report report;
  int status =
      bench_parse(argc, argv,
                  "checkpoint: saves and loads beside dd, 4 thread ranks; BENCH_FOLDER names a "
                  "folder of the disk (build)",
                  &options);
  if (status != 0) return status == 1 ? 0 : status;
  status = bench_open(&report, "checkpoint", &options);
  if (status != 0) return status;
  run(&report, options.quick ? &small : &whole, options.quick ? 4 : 8);
  return bench_close(&report);
}
