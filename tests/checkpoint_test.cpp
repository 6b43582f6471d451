/* SPDX-License-Identifier: MIT */
/* Checkpoints on a model of a disk: the same bytes from every world, resumed runs against the oracle,
 * and old or new after a crash at every call. */
#include "mfsdp/checkpoint.h"

#include "runtime/failing.h"
#include "runtime/groups_rig.h"
#include "support/model_disk.h"

#include "mfsdp/posix/background_posix.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "support/failing_posix.h"

namespace {

using test::Crash;
using test::Expected;
using test::Idle;
using test::Job;
using test::ModelDisk;
using test::Rank;
using test::require;
using test::Trainer;

/* A background whose work waits until it is told to go on; from the start it need not. */
class Held {
public:
  mfsdp_background get() {
    static const mfsdp_background_ops ops = {sizeof(ops), "held", start, idle, wait};
    mfsdp_background background;
    std::memset(&background, 0, sizeof(background));
    background.struct_nbytes = sizeof(background);
    background.ops = &ops;
    background.self = this;
    return background;
  }
  void hold(bool on) {
    std::lock_guard<std::mutex> lock(mutex_);
    held_ = on;
    changed_.notify_all();
  }
  bool refuses = false; /* to start */

private:
  static mfsdp_status start(void *user, void (*function)(void *argument), void *argument,
                            mfsdp_error *error) {
    Held *self = static_cast<Held *>(user);
    if (self->refuses) return MFSDP_ERROR_SET(error, MFSDP_E_MEMORY, -1, "no thread today");
    require(!self->thread_.joinable(), "two at once");
    self->done_ = false;
    self->thread_ = std::thread([=] {
      {
        std::unique_lock<std::mutex> lock(self->mutex_);
        self->changed_.wait(lock, [=] { return !self->held_; });
      }
      function(argument);
      self->done_ = true;
    });
    return MFSDP_OK;
  }
  static int32_t idle(void *user) {
    Held *self = static_cast<Held *>(user);
    if (self->thread_.joinable() && !self->done_) return 0;
    wait(user);
    return 1;
  }
  static void wait(void *user) {
    Held *self = static_cast<Held *>(user);
    if (self->thread_.joinable()) self->thread_.join();
  }
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{true};
  bool held_ = false;
};

/* A trainer with its checkpoint. */
struct Saver {
  Saver(Rank *rank, const Job *job, int32_t micro_batches, ModelDisk *disk)
      : Saver(rank, job, micro_batches, disk->io(), "run") {}
  Saver(Rank *rank, const Job *job, int32_t micro_batches, const mfsdp_io &its_io,
        const char *folder)
      : trainer(rank, job, micro_batches), io(its_io), desc(mfsdp_checkpoint_desc_default()),
        out_of_reach(*rank->backend) {
    /* Odd worlds as with a GPU, whose memory the processor cannot reach: everything is staged. */
    out_of_reach.traits &= ~static_cast<uint32_t>(MFSDP_BACKEND_HOST_MEMORY);
    if (rank->world % 2 == 1) trainer.transport.backend = trainer.backend = &out_of_reach;
    desc.io = &io;
    desc.folder = folder;
    desc.stage_nbytes = 1024; /* several parts for most runs */
  }
  ~Saver() { mfsdp_checkpoint_destroy(checkpoint); }
  mfsdp_status create() {
    MFSDP_TRY(trainer.create());
    return mfsdp_checkpoint_create(trainer.runtime, &desc, &checkpoint);
  }
  mfsdp_status save() {
    const mfsdp_safetensors_pair mine = {"mine", "1"};
    return mfsdp_checkpoint_save(checkpoint, &mine, 1);
  }
  mfsdp_status save_begin() {
    const mfsdp_safetensors_pair mine = {"mine", "1"};
    return mfsdp_checkpoint_save_begin(checkpoint, &mine, 1);
  }
  mfsdp_status wait() { return mfsdp_checkpoint_wait(checkpoint); }
  /* Saves may be held up from now on; before create. */
  void use(Held *held) {
    background = held->get();
    desc.background = &background;
  }
  mfsdp_status load() {
    loaded = mfsdp_checkpoint_loaded_default();
    return mfsdp_checkpoint_load(checkpoint, &how, &loaded);
  }
  mfsdp_status destroy() {
    mfsdp_checkpoint_destroy(checkpoint);
    checkpoint = nullptr;
    return trainer.destroy();
  }
  Trainer trainer;
  mfsdp_io io;
  mfsdp_background background;
  mfsdp_checkpoint_desc desc;
  mfsdp_checkpoint *checkpoint = nullptr;
  mfsdp_checkpoint_load_desc how = mfsdp_checkpoint_load_desc_default();
  mfsdp_checkpoint_loaded loaded;
  mfsdp_backend out_of_reach;
};

constexpr int32_t kBlocks = 24;
/* Sanitizers need ten times as long: every eighth call there, with another start in each test. */
constexpr int64_t kStride = MFSDP_TEST_SANITIZER ? 8 : 1;

Job roomy(Job job) {
  job.max_micro_batches = kBlocks;
  return job;
}
Job mixed_job() {
  return roomy(test::mixed_job());
}
Job small_job() {
  return roomy(test::small_job());
}

/* Trains `steps` from nothing and saves. */
std::string train_and_save(const Job &job, int32_t world, int64_t steps, ModelDisk *disk,
                           int64_t max_file_nbytes = 1 << 30) {
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Saver s(&rank, &job, kBlocks / world, disk);
    s.desc.max_file_nbytes = max_file_nbytes;
    MFSDP_TRY(s.create());
    for (int64_t step = 0; step < steps; ++step)
      MFSDP_TRY(s.trainer.step(step));
    MFSDP_TRY(s.save());
    return s.destroy();
  });
  return result.ok() ? "" : result.text();
}

/* Loads in a new runtime, trains on, and compares with a run that was never interrupted. */
std::string load_and_train(const Job &job, int32_t world, int64_t step, const Expected &expected,
                           ModelDisk *disk) {
  std::atomic<int64_t> read(0), owned(0);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Saver s(&rank, &job, kBlocks / world, disk);
    int32_t count = 0;
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.load());
    require(s.loaded.progress.step == step, "loaded another step");
    /* Exactly what it owns: one fp32 (or frozen) value and the states. */
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(s.trainer.runtime), &count);
    for (int32_t i = 0; i < count; ++i)
      owned += states[i].count * 4;
    mfsdp_owned own = mfsdp_owned_default();
    while (mfsdp_owned_next(s.trainer.runtime, &own))
      owned += own.count * static_cast<int64_t>(mfsdp_dtype_nbytes(own.dtype));
    read += s.loaded.data_nbytes;
    for (int64_t i = step; i < expected.count(); ++i) {
      MFSDP_TRY(s.trainer.step(i));
      s.trainer.compare(expected, i);
    }
    return s.destroy();
  });
  if (!result.ok()) return "world " + std::to_string(world) + ": " + result.text();
  return read == owned ? "" : "read " + std::to_string(read) + ", owns " + std::to_string(owned);
}

/* What a new process loads: the step, or -1; the hash of all parameters as one rank sees them. */
struct Found {
  int64_t step = -1;
  uint64_t hash = 0;
  std::string error;
  bool operator<(const Found &other) const {
    return step != other.step ? step < other.step : hash < other.hash;
  }
};

Found look(const Job &job, const mfsdp_io &io, const char *folder, int32_t world = 1) {
  Found found;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    uint64_t hash = 0;
    Saver s(&rank, &job, 2, io, folder);
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.load());
    MFSDP_TRY(s.trainer.hash(&hash));
    if (rank.rank == 0) {
      found.hash = hash;
      found.step = s.loaded.progress.step;
    }
    return s.destroy();
  });
  if (!result.ok()) found.error = result.text();
  return found;
}
Found look(const Job &job, ModelDisk *disk, int32_t world = 1) {
  return look(job, disk->io(), "run", world);
}

/* Loads from one disk and saves to another. */
std::string load_and_save(const Job &job, int32_t world, ModelDisk *from, ModelDisk *to,
                          int64_t max_file_nbytes) {
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Saver s(&rank, &job, 1, from);
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.load());
    mfsdp_checkpoint_destroy(s.checkpoint);
    s.io = to->io();
    s.desc.max_file_nbytes = max_file_nbytes;
    MFSDP_TRY(mfsdp_checkpoint_create(s.trainer.runtime, &s.desc, &s.checkpoint));
    MFSDP_TRY(s.save());
    return s.destroy();
  });
  return result.ok() ? "" : result.text();
}

Job dtype_job(mfsdp_dtype compute, mfsdp_dtype grad) {
  Job job = mixed_job();
  test::set_dtypes(&job.model, -1, compute, grad, compute);
  return job;
}

/* FAULTS c4, c5, c6, d9: every role and view, empty and tied tensors, all state and gradient types. */
TEST(Checkpoint, EveryWorldGoesOnWithTheSameBits) {
  const mfsdp_dtype dtypes[][2] = {
      {MFSDP_F32, MFSDP_F32}, {MFSDP_BF16, MFSDP_BF16}, {MFSDP_F16, MFSDP_F32}};
  for (const auto &d : dtypes) {
    if (MFSDP_TEST_SANITIZER && d[0] == MFSDP_F16) continue; /* as BF16 */
    if (MFSDP_TEST_TSAN && d[0] == MFSDP_F32) continue;      /* the same threads */
    Job job = dtype_job(d[0], d[1]);
    const Expected expected(job, kBlocks, 4);
    ModelDisk first;
    ASSERT_EQ(train_and_save(job, 3, 2, &first, 20000), "");
    for (int32_t world : {1, 2, 4, 8}) {
      if (MFSDP_TEST_TSAN && world % 3 != 2) continue; /* 2 and 8 */
      ModelDisk other;
      job.planner = world == 2 ? MFSDP_PLANNER_ROUND_ROBIN : MFSDP_PLANNER_BALANCED;
      ASSERT_EQ(train_and_save(job, world, 2, &other, 20000), "");
      EXPECT_EQ(first.files(), other.files()) << "saved by " << world;
      EXPECT_EQ(load_and_train(job, world, 2, expected, &first), "");
    }
    /* Worlds that do not divide the blocks: loaded, and saved again. */
    for (int32_t world : {7, 9}) {
      if (MFSDP_TEST_SANITIZER && world == 9) continue;
      ModelDisk other;
      job.planner = world == 7 ? MFSDP_PLANNER_BALANCED : MFSDP_PLANNER_ROUND_ROBIN;
      EXPECT_EQ(look(job, &first, world).hash, look(job, &first).hash) << "loaded by " << world;
      ASSERT_EQ(load_and_save(job, world, &first, &other, 20000), "");
      EXPECT_EQ(first.files(), other.files()) << "saved by " << world;
    }
  }
}

/* OWNED, RESIDENT, REPLICATED: the same bytes, and each goes on with what another saved. */
std::vector<Job> strategies(const Job &job) {
  std::vector<Job> out(3, job);
  out[1].residency = out[2].residency = MFSDP_RESIDENCY_RESIDENT;
  out[2].placement = MFSDP_PLACEMENT_REPLICATED;
  return out;
}

TEST(Checkpoint, EveryStrategyGoesOnWithWhatAnotherSaved) {
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16}) {
    if (MFSDP_TEST_TSAN && dtype == MFSDP_F32) continue;
    const Job job = dtype_job(dtype, dtype);
    const Expected expected(job, kBlocks, 3);
    std::vector<ModelDisk> disks(3);
    for (std::size_t from = 0; from < 3; ++from) {
      const int32_t world = from == 0 ? 3 : static_cast<int32_t>(2 * from);
      ASSERT_EQ(train_and_save(strategies(job)[from], world, 2, &disks[from], 20000), "");
      EXPECT_EQ(disks[0].files(), disks[from].files()) << "saved by strategy " << from;
      for (std::size_t to = 0; to < 3; ++to)
        for (const int32_t loaded_by : {1, 4, 3}) {
          if (MFSDP_TEST_SANITIZER && (loaded_by == 1 || from == to)) continue;
          EXPECT_EQ(load_and_train(strategies(job)[to], loaded_by, 2, expected, &disks[from]), "")
              << "from strategy " << from << " to " << to;
        }
    }
    Job offload = strategies(job)[2]; /* masters in another space than what they are loaded for */
    offload.tune = [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_HOST; };
    EXPECT_EQ(load_and_train(offload, 4, 2, expected, &disks[1]), "");
    offload.placement = MFSDP_PLACEMENT_OWNED;
    EXPECT_EQ(load_and_train(offload, 3, 2, expected, &disks[2]), "");
  }
}

/* Bands of matrices on all ranks: the files do not show them, and whole matrices go on from there, and
 * bands from whole matrices. Without clipping, since the norm is summed by bands. */
TEST(Checkpoint, BandsAndWholeMatricesGoOnWithEachOthersFiles) {
  Job owned = mixed_job(), banded;
  owned.options.clip_norm = 0.0;
  banded = owned;
  banded.placement = MFSDP_PLACEMENT_BANDED;
  banded.options.bands = true;
  for (const mfsdp_banded_update update : {MFSDP_BANDED_HOME, MFSDP_BANDED_EVERYWHERE}) {
    ModelDisk by_owners, by_bands;
    banded.tune = [update](mfsdp_runtime_desc *desc) { desc->banded_update = update; };
    ASSERT_EQ(train_and_save(owned, 4, 2, &by_owners, 20000), "");
    ASSERT_EQ(train_and_save(banded, 2, 2, &by_bands, 20000), "");
    EXPECT_EQ(by_owners.files(), by_bands.files());
    const Expected owned_expected(owned, kBlocks, 4), banded_expected(banded, kBlocks, 4);
    for (const int32_t world : {1, 4, 8}) {
      if (MFSDP_TEST_SANITIZER && world == 1) continue;
      EXPECT_EQ(load_and_train(owned, world, 2, owned_expected, &by_bands), "");
      EXPECT_EQ(load_and_train(banded, world, 2, banded_expected, &by_owners), "");
    }
  }
}

TEST(Checkpoint, FilesAreReadableAndCutAtTheLimit) {
  const Job job = mixed_job();
  ModelDisk whole, cut;
  ASSERT_EQ(train_and_save(job, 2, 1, &whole), "");
  ASSERT_EQ(train_and_save(job, 2, 1, &cut, 20000), "");
  const auto files = whole.files();
  EXPECT_EQ(files.count("run/step-1/model.safetensors"), 1u);
  EXPECT_EQ(files.count("run/step-1/model.safetensors.index.json"), 1u);
  EXPECT_EQ(files.count("run/step-1/optimizer.momentum.safetensors"), 1u);
  EXPECT_EQ(files.count("run/step-1/optimizer.exp_avg.safetensors"), 1u);
  EXPECT_EQ(files.count("run/step-1/optimizer.master.safetensors"), 0u); /* all fp32 */
  EXPECT_EQ(files.at("run/latest"), "step-1\n");
  EXPECT_EQ(files.count("run/step-1/token"), 0u);
  int parts = 0;
  for (const auto &file : cut.files())
    if (file.first.find("model-0000") != std::string::npos) ++parts;
  EXPECT_GT(parts, 2);
  /* A state under its key, with the parameter's shape. */
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  const std::string &bytes = files.at("run/step-1/optimizer.momentum.safetensors");
  const mfsdp_safetensors_source source =
      mfsdp_safetensors_source_memory("momentum", bytes.data(), bytes.size());
  mfsdp_safetensors *file = nullptr;
  ASSERT_EQ(mfsdp_safetensors_create(&context, &source, &file, nullptr), MFSDP_OK);
  const mfsdp_safetensors_tensor *t = mfsdp_safetensors_find(file, "qkv.momentum");
  ASSERT_NE(t, nullptr);
  EXPECT_EQ(t->shape[0] * 1000 + t->shape[1], 36020);
  mfsdp_safetensors_destroy(&context, file);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

/* ---- crashes ---- */

/* Saves step 1, and then with `spoil` armed the step that comes after `more` steps (0: again). */
struct Outcome {
  mfsdp_status status[2];
  std::string message[2];
  int64_t calls;
};

/* How the second save is done. */
enum class Way { kForeground, kBackground, kPolled };

/* A save beside a step of training; what the next call says. */
mfsdp_status save_beside(Saver *s, int64_t step, Way way) {
  int32_t running = 1;
  MFSDP_TRY(s->save_begin());
  MFSDP_TRY(s->trainer.step(step));
  if (way == Way::kBackground) return s->wait();
  while (running)
    MFSDP_TRY(mfsdp_checkpoint_poll(s->checkpoint, &running));
  return MFSDP_OK;
}

Outcome save_twice(const Job &job, ModelDisk *disk, int64_t more, int32_t keep_last,
                   const std::function<void()> &spoil, Way way = Way::kForeground) {
  Outcome outcome;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    mfsdp_posix_background thread;
    Saver s(&rank, &job, 1, disk);
    s.desc.keep_last = keep_last;
    s.background = mfsdp_background_posix(&thread);
    s.desc.background = &s.background;
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.trainer.step(0));
    MFSDP_TRY(s.save());
    for (int64_t i = 0; i < more; ++i)
      MFSDP_TRY(s.trainer.step(1 + i));
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) spoil();
    MFSDP_TRY(rank.barrier());
    outcome.status[rank.rank] = way == Way::kForeground ? s.save() : save_beside(&s, 1 + more, way);
    outcome.message[rank.rank] = mfsdp_context_error(&rank.context)->message;
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  outcome.calls = disk->calls();
  return outcome;
}

/* FAULTS c1, c2, c3, c9. */
void crash_everywhere(int64_t more, int32_t keep_last, Way way = Way::kForeground) {
  const Job job = small_job();
  const int64_t stride = way == Way::kForeground ? kStride : 3 * kStride;
  ModelDisk sound;
  const Outcome whole = save_twice(
      job, &sound, more, keep_last, [&] { sound.fail_at(0); }, way);
  ASSERT_EQ(whole.status[0], MFSDP_OK) << whole.message[0];
  sound.crash(Crash::kLoseUnsynced, 1); /* what is promised is durable */
  const Found after = look(job, &sound);
  ASSERT_EQ(after.step, 1 + more) << after.error;
  std::set<Found> seen;
  for (int64_t n = 1 + more % stride; n <= whole.calls; n += stride)
    for (int kind = 0; kind < 4; ++kind) {
      ModelDisk disk;
      (void)save_twice(
          job, &disk, more, keep_last, [&] { disk.die_at(n); }, way);
      disk.crash(kind == 0   ? Crash::kKeepAll
                 : kind == 1 ? Crash::kLoseUnsynced
                             : Crash::kAnyOfUnsynced,
                 static_cast<uint64_t>(1000 * n + kind));
      const Found found = look(job, &disk);
      ASSERT_EQ(found.error, "") << "call " << n << ", crash " << kind;
      seen.insert(found);
      if (kind != 0) continue;
      /* And the next process saves over what is left. */
      const Outcome again = save_twice(job, &disk, more, keep_last, [] {});
      ASSERT_EQ(again.status[0], MFSDP_OK) << "call " << n << ": " << again.message[0];
      for (const auto &file : disk.files()) {
        ASSERT_EQ(file.first.find(".attempt"), std::string::npos) << file.first;
        ASSERT_EQ(file.first.find(".old"), std::string::npos) << file.first;
      }
    }
  /* Old or new, nothing else. */
  EXPECT_GT(whole.calls, 80);
  EXPECT_EQ(seen.size(), more > 0 ? 2u : 1u);
  EXPECT_EQ(seen.count(after), 1u);
}

TEST(Checkpoint, AfterACrashAtEveryCallTheOldOrTheNewOneLoads) {
  crash_everywhere(1, 1);
}
TEST(Checkpoint, TheSameWhenAStepIsSavedAgain) {
  crash_everywhere(0, 0);
}

/* The folder's own name: a process that was killed made it, and had not synced the one above. */
TEST(Checkpoint, AFolderThatWasThereIsMadeDurable) {
  const Job job = small_job();
  ModelDisk disk;
  mfsdp_io io = disk.io();
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_make_folder(&context, &io, "run", nullptr), MFSDP_OK);
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  disk.crash(Crash::kLoseUnsynced, 1);
  EXPECT_EQ(look(job, &disk).step, 1) << look(job, &disk).error;
}

/* With the other threads' calls between those of the ranks in any order. */
TEST(Checkpoint, TheSameOfASaveInTheBackground) {
  crash_everywhere(1, 1, Way::kPolled);
}

void fail_everywhere(Way way) {
  const Job job = small_job();
  /* A sanitizer has seen the calls themselves in the foreground: here it is after the threads. */
  const int64_t stride = way == Way::kForeground ? 1 : kStride;
  int64_t failed = 0, tried = 0, calls = 1;
  for (int64_t n = 1; n <= calls; n += stride, ++tried) {
    ModelDisk disk;
    const Outcome outcome = save_twice(
        job, &disk, 1, 1, [&] { disk.fail_at(n); }, way);
    EXPECT_EQ(outcome.status[0], outcome.status[1]) << "call " << n;
    if (outcome.status[0] != MFSDP_OK) {
      ++failed;
      EXPECT_EQ(outcome.status[0], MFSDP_E_IO) << "call " << n;
      EXPECT_EQ(outcome.message[0], outcome.message[1]);
      EXPECT_NE(outcome.message[0].find("planned"), std::string::npos) << outcome.message[0];
    }
    if (n == 1) {
      ModelDisk sound;
      calls = save_twice(
                  job, &sound, 1, 1, [&] { sound.fail_at(0); }, way)
                  .calls;
    }
    disk.crash(Crash::kKeepAll, 1);
    EXPECT_EQ(look(job, &disk).error, "") << "call " << n;
  }
  EXPECT_GE(failed, tried - 1); /* the lock's own close has nothing to lose */
  EXPECT_GT(calls, 50);
}

TEST(Checkpoint, EachCallThatFailsIsAnErrorOnEveryRankAndLosesNothing) {
  fail_everywhere(Way::kForeground);
}
TEST(Checkpoint, EachCallThatFailsInTheBackgroundIsSaidByTheNextCall) {
  fail_everywhere(Way::kBackground);
}

TEST(Checkpoint, ShortAndInterruptedTransfersChangeNothing) {
  const Job job = mixed_job();
  const Expected expected(job, kBlocks, 2);
  ModelDisk plain, cut;
  cut.set_short(true);
  ASSERT_EQ(train_and_save(job, 2, 1, &plain), "");
  ASSERT_EQ(train_and_save(job, 2, 1, &cut), "");
  EXPECT_EQ(plain.files(), cut.files());
  EXPECT_EQ(load_and_train(job, 3, 1, expected, &cut), "");
}

/* One interruption below the limit is none; at the limit all ranks are told, and may try again. */
TEST(Checkpoint, ATransferThatIsInterruptedForEverIsAnError) {
  const Job job = small_job();
  ModelDisk disk;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Saver s(&rank, &job, 1, &disk);
    /* Set by rank 0, whose transfers come first in both. */
    const auto interrupt = [&](int64_t count) {
      if (rank.rank == 0) disk.interrupt(count);
    };
    MFSDP_TRY(s.create());
    interrupt(MFSDP_IO_INTERRUPTS);
    test::must_fail(rank, s.save(), MFSDP_E_IO, "interrupted 100000 times in a row");
    interrupt(MFSDP_IO_INTERRUPTS - 1);
    MFSDP_TRY(s.save());
    interrupt(MFSDP_IO_INTERRUPTS);
    test::must_fail(rank, s.load(), MFSDP_E_IO, "interrupted 100000 times in a row");
    interrupt(MFSDP_IO_INTERRUPTS - 1);
    MFSDP_TRY(s.load());
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A save on a disk that says OK and changes nothing must end, with the name that it could not get rid
 * of. One that does not end makes more calls than any save, and the disk fails then. */
void save_on_an_idle_disk(ModelDisk *disk, Idle idle, int32_t keep_last, const std::string &name,
                          const std::function<void(const mfsdp_io &)> &before) {
  const Job job = small_job();
  const Outcome outcome = save_twice(job, disk, 1, keep_last, [&] {
    before(disk->io());
    disk->set_idle(idle);
    disk->die_at(100000);
  });
  disk->set_idle(Idle::kNothing);
  disk->crash(Crash::kKeepAll, 1);
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(outcome.status[rank], name.empty() ? MFSDP_OK : MFSDP_E_IO);
    if (name.empty()) continue;
    EXPECT_NE(outcome.message[rank].find(
                  name + ": the io table removed or renamed it, and still lists it"),
              std::string::npos)
        << outcome.message[rank];
  }
  EXPECT_EQ(look(job, disk).error, "");
}

void make_folder(const mfsdp_io &io, const char *path) {
  int32_t existed = 0;
  EXPECT_EQ(io.ops->make_folder(io.self, path, &existed, nullptr), MFSDP_OK);
}

TEST(Checkpoint, RemovalsThatRemoveNothingAreAnError) {
  const auto nothing = [](const mfsdp_io &) {};
  /* The files of an older one that goes. */
  ModelDisk disk;
  const std::string file = "run/step-1.attempt/model.safetensors";
  save_on_an_idle_disk(&disk, Idle::kRemove, 1, file, nothing);
  EXPECT_EQ(disk.files().at("run/latest"), "step-2\n");
  EXPECT_EQ(disk.files().count(file), 1u);
  /* Its folder, which stays empty; and one that an earlier save left. */
  ModelDisk folders;
  save_on_an_idle_disk(&folders, Idle::kRemoveFolder, 1, "", nothing);
  save_on_an_idle_disk(&folders, Idle::kRemoveFolder, 1, "run/step-1.attempt",
                       [](const mfsdp_io &io) { make_folder(io, "run/step-1.attempt"); });
}

TEST(Checkpoint, RenamesThatRenameNothingAreAnError) {
  /* What step-1 was before: beside a newer one, and alone. */
  ModelDisk replaced, alone, kept;
  save_on_an_idle_disk(&replaced, Idle::kRename, 0, "run/step-1.old",
                       [](const mfsdp_io &io) { make_folder(io, "run/step-1.old"); });
  save_on_an_idle_disk(&alone, Idle::kRename, 0, "run/step-1.old", [](const mfsdp_io &io) {
    EXPECT_EQ(io.ops->rename(io.self, "run/step-1", "run/step-1.old", nullptr), MFSDP_OK);
  });
  /* The older of two, where one shall be left. */
  save_on_an_idle_disk(&kept, Idle::kRename, 1, "run/step-1",
                       [](const mfsdp_io &io) { make_folder(io, "run/step-7"); });
}

/* FAULTS c9 too: what was loaded is saved over itself, byte for byte. */
TEST(Checkpoint, KeepLastNeverRemovesWhatLatestNames) {
  const Job job = small_job();
  ModelDisk disk;
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  const std::string before = disk.files().at("run/step-1/model.safetensors");
  ASSERT_EQ(train_and_save(job, 2, 2, &disk), "");
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Saver s(&rank, &job, 1, &disk);
    s.desc.keep_last = 1;
    s.how.name = "step-1";
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.load());
    MFSDP_TRY(s.save());
    return s.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(disk.files().at("run/step-1/model.safetensors"), before);
  EXPECT_EQ(disk.files().at("run/latest"), "step-1\n");
  EXPECT_EQ(disk.files().count("run/step-2/model.safetensors"), 0u);
  EXPECT_EQ(look(job, &disk).step, 1);
}

/* ---- in the background ---- */

TEST(Checkpoint, TrainingGoesOnAndTheFilesAreThoseOfTheMomentOfTheSave) {
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16}) {
    Job job = MFSDP_TEST_SANITIZER ? small_job() : mixed_job();
    test::set_dtypes(&job.model, -1, dtype, dtype, dtype);
    ModelDisk plain, beside;
    ASSERT_EQ(train_and_save(job, 2, 1, &plain), "");
    ASSERT_EQ(train_and_save(job, 2, 2, &plain), "");
    ASSERT_EQ(train_and_save(job, 2, 3, &plain), "");
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Held held;
      Saver s(&rank, &job, kBlocks / 3, &beside);
      int32_t running = 0;
      s.use(&held);
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.trainer.step(0));
      held.hold(true);
      MFSDP_TRY(s.save_begin());
      MFSDP_TRY(s.trainer.step(1)); /* not a byte is written yet */
      MFSDP_TRY(mfsdp_checkpoint_poll(s.checkpoint, &running));
      require(running == 1, "held, and not running");
      held.hold(false);
      MFSDP_TRY(s.save_begin()); /* the first one ends before */
      MFSDP_TRY(s.trainer.step(2));
      for (running = 1; running;)
        MFSDP_TRY(mfsdp_checkpoint_poll(s.checkpoint, &running));
      MFSDP_TRY(s.save_begin());
      MFSDP_TRY(s.wait());
      return s.destroy();
    });
    ASSERT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(plain.files(), beside.files());
  }
}

TEST(Checkpoint, TheSnapshotCostsWhatItSays) {
  const Job job = MFSDP_TEST_SANITIZER ? small_job() : mixed_job();
  std::atomic<int64_t> sum(0);
  EXPECT_EQ(test::survives(job, 3, 1,
                           [&](Rank &rank, Trainer &trainer) {
                             ModelDisk disk;
                             Held held;
                             const mfsdp_io io = disk.io();
                             const mfsdp_background background = held.get();
                             mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
                             mfsdp_checkpoint *ck = nullptr;
                             std::size_t booked[2], asked = 0;
                             desc.io = &io;
                             desc.folder = "run";
                             for (int i = 0; i < 2; ++i) {
                               if (i == 1) desc.background = &background;
                               MFSDP_TRY(mfsdp_checkpoint_create(trainer.runtime, &desc, &ck));
                               booked[i] = rank.context.current_nbytes[MFSDP_MEMORY_STAGING];
                               asked = mfsdp_checkpoint_snapshot_nbytes(ck);
                               mfsdp_checkpoint_destroy(ck);
                             }
                             require(booked[1] - booked[0] == asked, "booked something else");
                             sum += static_cast<int64_t>(asked);
                             return MFSDP_OK;
                           }),
            "");
  ModelDisk disk; /* all ranks' together: the tensors, once */
  ASSERT_EQ(train_and_save(job, 1, 1, &disk), "");
  int64_t tensors = 0;
  for (const auto &file : disk.files()) {
    uint64_t header = 0;
    if (file.first.find(".safetensors") == std::string::npos) continue;
    if (file.first.find(".json") != std::string::npos) continue;
    std::memcpy(&header, file.second.data(), sizeof(header));
    tensors += static_cast<int64_t>(file.second.size() - 8 - header);
  }
  EXPECT_EQ(sum, tensors);
}

TEST(Checkpoint, ARefusedThreadIsSaidByTheNextCallAndCanBeTriedAgain) {
  const Job job = small_job();
  for (const int32_t culprit : {0, 1}) {
    ModelDisk disk;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Held held;
      Saver s(&rank, &job, 1, &disk);
      mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
      const std::string text =
          "rank " + std::to_string(culprit) + ": save of step 1 in the background: no thread today";
      s.use(&held);
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.trainer.step(0));
      held.refuses = rank.rank == culprit;
      for (int next = 0; next < 3; ++next) {
        MFSDP_TRY(s.save_begin());
        test::must_fail(rank,
                        next == 0   ? s.save()
                        : next == 1 ? s.save_begin()
                                    : mfsdp_checkpoint_load(s.checkpoint, &s.how, &loaded),
                        MFSDP_E_MEMORY, text.c_str());
      }
      held.refuses = false;
      MFSDP_TRY(s.save_begin());
      MFSDP_TRY(mfsdp_checkpoint_load(s.checkpoint, &s.how, &loaded)); /* it waits */
      require(loaded.progress.step == 1, "another step");
      return s.destroy();
    });
    ASSERT_TRUE(result.ok()) << result.text();
    EXPECT_EQ(look(job, &disk).step, 1);
  }
}

TEST(Checkpoint, DestroyWhileASaveRuns) {
  const Job job = small_job();
  for (const bool writing : {true, false}) {
    ModelDisk disk;
    ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
    const auto before = disk.files();
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Held held;
      Saver s(&rank, &job, kBlocks / 2, &disk);
      int32_t running = 1;
      s.use(&held);
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.trainer.step(0));
      MFSDP_TRY(s.trainer.step(1));
      held.hold(writing);
      MFSDP_TRY(s.save_begin());
      if (!writing) { /* up to rank 0's last part */
        mfsdp__ck_phase phase = MFSDP__CK_WRITING;
        while (phase == MFSDP__CK_WRITING) {
          (void)s.checkpoint->job->run.ops->idle(&held); /* the work is done: hold what follows */
          s.checkpoint->job->run.ops->wait(&held);
          held.hold(true);
          MFSDP_TRY(mfsdp_checkpoint_poll(s.checkpoint, &running));
          phase = s.checkpoint->job->phase;
        }
        require(phase == MFSDP__CK_FINISHING && running == 1, "over already");
      }
      held.hold(false);
      return s.destroy();
    });
    ASSERT_TRUE(result.ok()) << result.text();
    if (writing) {
      EXPECT_EQ(disk.files(), before); /* the old one, and nothing beside it */
    }
    EXPECT_EQ(look(job, &disk).step, writing ? 1 : 2);
    ASSERT_EQ(train_and_save(job, 2, 2, &disk), ""); /* the lock is free */
  }
}

/* A poll does not wait for a disk: it gives a lost rank the time of a step, not that of a save. */
TEST(Checkpoint, APollWaitsNoLongerThanAStep) {
  struct Asked {
    const mfsdp_control *real;
    int64_t most_us;
    static mfsdp_status allgather(void *user, mfsdp_context *context, const void *send,
                                  std::size_t nbytes, void *received, int64_t timeout_us) {
      Asked *self = static_cast<Asked *>(user);
      self->most_us = std::max(self->most_us, timeout_us);
      return self->real->ops->allgather(self->real->self, context, send, nbytes, received,
                                        timeout_us);
    }
  };
  const Job job = small_job();
  ModelDisk disk;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Held held;
    Saver s(&rank, &job, 1, &disk);
    int32_t running = 0;
    s.use(&held);
    MFSDP_TRY(s.create());
    held.hold(true);
    MFSDP_TRY(s.save_begin());
    mfsdp__group_entry *group = &s.trainer.runtime->groups[0];
    Asked asked = {group->control, 0};
    mfsdp_control_ops ops = *asked.real->ops;
    mfsdp_control control = *asked.real;
    ops.allgather = Asked::allgather;
    control.ops = &ops;
    control.self = &asked;
    group->control = &control;
    MFSDP_TRY(mfsdp_checkpoint_poll(s.checkpoint, &running));
    group->control = asked.real;
    held.hold(false); /* before anything fails: a held save is never over */
    MFSDP_TRY(s.wait());
    require(running == 1, "held, and not running");
    require(asked.most_us == control.deadline_us, "a poll waits longer than a step");
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A rank that goes on writing after the others gave up harms no later save of the same step. */
TEST(Checkpoint, ARankLeftBehindWritesIntoNothing) {
  const Job job = small_job();
  Job other = job;
  other.options.clip_norm = 0.5; /* other bytes */
  ModelDisk disk, reference;
  ASSERT_EQ(train_and_save(other, 1, 1, &reference), "");
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Held held;
    Saver s(&rank, &job, kBlocks / 2, &disk);
    s.use(&held);
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.trainer.step(0));
    held.hold(rank.rank == 1);
    MFSDP_TRY(s.save_begin());
    if (rank.rank == 0) {
      MFSDP_TRY(s.destroy());
      require(train_and_save(other, 1, 1, &disk).empty(), "the other save failed");
    }
    MFSDP_TRY(rank.barrier());
    held.hold(false);
    return rank.rank == 0 ? MFSDP_OK : s.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(disk.files(), reference.files());
}

/* ---- ranks that do not agree ---- */

TEST(Checkpoint, RanksThatDoNotSeeTheSameFolderAreTold) {
  const Job job = small_job();
  ModelDisk disks[2];
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Saver s(&rank, &job, 1, &disks[rank.rank]);
    MFSDP_TRY(s.create());
    test::must_fail(rank, s.save(), MFSDP_E_IO, "all ranks need one file system");
    test::must_fail(rank, s.save(), MFSDP_E_IO, "rank 1");
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Checkpoint, TwoWritersOneGetsAnErrorAndTouchesNothing) {
  const Job job = small_job();
  ModelDisk disk;
  mfsdp_io io = disk.io();
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_io_file *lock = nullptr;
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  const auto before = disk.files();
  ASSERT_EQ(mfsdp_io_lock(&context, &io, "run/lock", &lock), MFSDP_OK);
  EXPECT_NE(train_and_save(job, 2, 2, &disk).find("someone else has it"), std::string::npos);
  EXPECT_EQ(disk.files(), before);
  EXPECT_EQ(mfsdp_io_close(&context, &io, lock, "run/lock", MFSDP_OK), MFSDP_OK);
  EXPECT_EQ(train_and_save(job, 2, 2, &disk), "");
}

/* ---- what may differ ---- */

/* Saved from `from`, loaded into `into`; what the load says. */
std::string load_other(const Job &from, const Job &into,
                       const std::function<void(Saver &)> &change = nullptr,
                       const std::function<void(Saver &)> &check = nullptr) {
  ModelDisk disk;
  const std::string saved = train_and_save(from, 2, 1, &disk);
  if (!saved.empty()) return saved;
  const test::RanksResult result = test::run_ranks(test::ranks_of(into, 2), [&](Rank &rank) {
    Saver s(&rank, &into, 1, &disk);
    MFSDP_TRY(s.create());
    if (change) change(s);
    MFSDP_TRY(s.load());
    if (check) check(s);
    return s.destroy();
  });
  return result.ok() ? "" : result.text();
}

bool says(const std::string &text, const std::string &part) {
  return text.find(part) != std::string::npos;
}

TEST(Checkpoint, StrictUnlessAsked) {
  Job small = small_job(), more = small, wide = small, half = small;
  more.model.tensors.push_back(ref::matrix("extra", 2, 4, 4));
  wide.model.tensors[1] = ref::matrix("a", 1, 10, 12);
  test::set_dtypes(&half.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
  EXPECT_TRUE(says(load_other(small, more), "'extra' is missing (in all 2 missing"));
  EXPECT_TRUE(says(load_other(more, small), "'extra' is not expected"));
  EXPECT_TRUE(says(load_other(small, wide), "'a' has another shape"));
  EXPECT_TRUE(says(load_other(small, half), "has another dtype"));
  EXPECT_TRUE(says(load_other(half, small), "has another dtype"));
  EXPECT_EQ(load_other(
                small, more, [](Saver &s) { s.how.allow_missing = 1; },
                [](Saver &s) { require(s.loaded.missing_count == 2, "missing_count"); }),
            "");
  EXPECT_EQ(load_other(more, small, [](Saver &s) { s.how.allow_unexpected = 1; }), "");
  EXPECT_EQ(load_other(small, half, [](Saver &s) { s.how.convert = 1; }), "");
  EXPECT_EQ(load_other(half, small, [](Saver &s) { s.how.convert = 1; }), "");
  EXPECT_EQ(load_other(
                small, small, [](Saver &s) { s.how.weights_only = 1; },
                [](Saver &s) { require(s.loaded.progress.step == 0, "step"); }),
            "");
  EXPECT_TRUE(says(load_other(small, small, [](Saver &s) { s.how.name = "step-7"; }), "step-7"));
}

/* What was gathered ahead for a unit that nobody comes to is still read while a load begins. */
TEST(Checkpoint, LoadsAfterGathersAhead) {
  Job job = small_job();
  job.active_units = 3;
  job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  job.tune = [](mfsdp_runtime_desc *desc) { desc->prefetch_depth = 2; };
  ModelDisk disk;
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Saver s(&rank, &job, 1, &disk);
    uint64_t first = 0, again = 0;
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.load());
    MFSDP_TRY(s.trainer.hash(&first));
    for (int32_t round = 0; round < 20; ++round) {
      MFSDP_TRY(mfsdp_unit_acquire(s.trainer.runtime, 0, MFSDP_USE_EVALUATE));
      MFSDP_TRY(mfsdp_unit_release(s.trainer.runtime, 0));
      MFSDP_TRY(s.load());
    }
    MFSDP_TRY(s.trainer.hash(&again));
    require(first == again, "other values");
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Of all tensors as units have them. Collective. */
mfsdp_status unit_hash(const Job &job, Rank *rank, mfsdp_runtime *runtime, uint64_t *hash) {
  *hash = MFSDP_HASH_SEED;
  for (int32_t u = 0; u < job.model.unit_count(); ++u) {
    MFSDP_TRY(mfsdp_unit_acquire(runtime, u, MFSDP_USE_EVALUATE));
    for (int32_t i : job.model.unit_tensors(u)) {
      std::vector<float> got;
      MFSDP_TRY(rank->read(mfsdp_unit_param(runtime, i),
                           static_cast<std::size_t>(job.model.at(i).numel()), &got));
      *hash = mfsdp_hash_bytes(*hash, got.data(), got.size() * sizeof(float));
    }
    MFSDP_TRY(mfsdp_unit_release(runtime, u));
  }
  return MFSDP_OK;
}

/* A step's refresh, or its update of every rank's masters, may be on its way when new values come. */
TEST(Checkpoint, LoadsBehindAStep) {
  for (Job job : strategies(small_job())) {
    job.queue_kind = MFSDP_HOST_QUEUE_WORKER;
    ModelDisk disk;
    ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Saver s(&rank, &job, 1, &disk);
      uint64_t first = 0, between = 0, again = 0;
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.load());
      MFSDP_TRY(unit_hash(job, &rank, s.trainer.runtime, &first));
      for (int32_t round = 0; round < 10; ++round) {
        MFSDP_TRY(s.trainer.step(1));
        if (round % 2 == 0) MFSDP_TRY(unit_hash(job, &rank, s.trainer.runtime, &between));
        require(first != between, "the step changed nothing");
        MFSDP_TRY(s.load());
        MFSDP_TRY(unit_hash(job, &rank, s.trainer.runtime, &again));
        require(first == again, "other values");
      }
      return s.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* The n-th operation of rank 1 in a load fails; with `later` when its queue comes to it. Then all
 * ranks say so, and nobody trains on with half of what was loaded. True: it did fail. */
bool load_with_a_failing_queue(const Job &job, ModelDisk *disk, int64_t n, bool later) {
  std::atomic<bool> failed(false);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    test::FailingBackend backend(&rank, -1, later);
    Saver s(&rank, &job, 1, disk);
    backend.table.traits = s.out_of_reach.traits; /* three ranks: everything is staged */
    s.trainer.transport.backend = s.trainer.backend = &backend.table;
    MFSDP_TRY(s.create());
    if (rank.rank == 1) backend.arm(n, later);
    const mfsdp_status status = s.load();
    if (rank.rank == 1) failed = backend.failed();
    backend.arm(-1, later);
    if (status == MFSDP_OK) {
      MFSDP_TRY(s.trainer.step(1));
      return s.destroy();
    }
    test::must_fail(rank, status, MFSDP_E_BACKEND, "injected: ");
    if (rank.rank == 1) {
      const mfsdp_step_desc step = s.trainer.step_desc(1);
      test::must_fail(rank, mfsdp_step_begin(s.trainer.runtime, &step), MFSDP_E_POISONED,
                      "injected: ");
      test::must_fail(rank, s.load(), MFSDP_E_POISONED, "injected: ");
    } else {
      test::must_fail(rank, s.trainer.step(1), MFSDP_E_BACKEND, "injected: ");
    }
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << "operation " << n << (later ? " later: " : ": ") << result.text();
  return failed;
}

TEST(Checkpoint, AQueueThatFailsInALoadEndsTheRuntime) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER})
    for (const bool later : {false, true}) {
      Job job = small_job();
      job.queue_kind = kind;
      test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
      ModelDisk disk;
      ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
      int64_t n =
          later ? 0 : 1; /* the first call comes before the ranks talk: it waits for a step */
      while (!::testing::Test::HasFailure() && load_with_a_failing_queue(job, &disk, n, later))
        n += kStride;
      EXPECT_GT(n, later ? 15 : 30); /* values were on their way */
    }
}

/* A file that cannot be read leaves the queues sound: another load is as good as the first. */
TEST(Checkpoint, AFileThatCannotBeReadLeavesTheRuntimeSound) {
  const Job job = small_job();
  const Expected expected(job, kBlocks, 2);
  ModelDisk disk;
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  int64_t last = 1 << 20;
  for (int64_t n = 1; n <= last && !HasFailure(); n += kStride) {
    std::atomic<bool> failed(false);
    disk.fail_at(n);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Saver s(&rank, &job, kBlocks / 3, &disk);
      MFSDP_TRY(s.create());
      const mfsdp_status status = s.load();
      if (status != MFSDP_OK) {
        failed = true;
        test::must_fail(rank, status, MFSDP_E_IO, "planned");
        MFSDP_TRY(s.load());
      }
      MFSDP_TRY(s.trainer.step(1));
      s.trainer.compare(expected, 1);
      return s.destroy();
    });
    EXPECT_TRUE(result.ok()) << "call " << n << ": " << result.text();
    if (!failed)
      last = disk.calls(); /* none failed, or one whose failure does not matter (a close) */
  }
}

/* Other choices are taken, and told to whoever asks. */
TEST(Checkpoint, WhatIsTrainedOtherwiseIsTold) {
  using Told = std::vector<std::string>;
  Job small = small_job(), other = small;
  other.options.groups[0].lr = 0.5;
  other.options.groups[0].weight_decay = 0.25;
  const auto told = [](const Job &saved, const Job &now) {
    std::mutex mutex;
    std::vector<Told> of_ranks;
    const auto ask = [&](Saver &s) {
      const auto tell = [](void *user, const char *key, const char *before, const char *after) {
        static_cast<Told *>(user)->push_back(std::string(key) + " " +
                                             (before == nullptr ? "-" : before) + " " + after);
      };
      Told mine;
      require(mfsdp_checkpoint_differences(s.checkpoint, s.loaded.name, tell, &mine) == MFSDP_OK,
              "differences");
      const std::lock_guard<std::mutex> lock(mutex);
      of_ranks.push_back(mine);
    };
    EXPECT_EQ(load_other(saved, now, nullptr, ask), "");
    EXPECT_EQ(of_ranks.at(0), of_ranks.at(1));
    return of_ranks.at(0);
  };
  EXPECT_EQ(told(small, small), Told{});
  EXPECT_EQ(told(other, small), (Told{"group.0.lr 0.5 0.02", "group.0.weight_decay 0.25 0.1"}));
}

/* Every name is reported, on every rank, also of a kind of state that the runtime does not have. */
TEST(Checkpoint, MissingAndUnexpectedAreNamed) {
  struct Seen {
    std::vector<std::string> missing, unexpected;
    static void report(void *user, mfsdp_checkpoint_issue issue, const char *tensor) {
      Seen *seen = static_cast<Seen *>(user);
      (issue == MFSDP_CHECKPOINT_MISSING ? seen->missing : seen->unexpected).push_back(tensor);
    }
  };
  const std::vector<std::string> momenta = {"a.momentum", "b.momentum", "c.momentum"};
  const std::vector<std::string> averages = {"a.exp_avg",    "b.exp_avg",    "c.exp_avg",
                                             "a.exp_avg_sq", "b.exp_avg_sq", "c.exp_avg_sq"};
  const Job muon = small_job();
  Job adamw = muon;
  for (ref::Tensor &t : adamw.model.tensors)
    t.group = 1;
  const std::string to_adamw = load_other(muon, adamw, [](Saver &s) { s.how.allow_missing = 1; });
  EXPECT_TRUE(says(to_adamw, "'a.momentum' is not expected")) << to_adamw;
  EXPECT_TRUE(says(to_adamw, "in all 6 missing, 3 unexpected")) << to_adamw;
  for (const bool forward : {true, false}) {
    Seen seen[2];
    std::atomic<int> next(0);
    EXPECT_EQ(load_other(
                  forward ? muon : adamw, forward ? adamw : muon,
                  [&](Saver &s) {
                    s.how.allow_missing = s.how.allow_unexpected = 1;
                    s.how.report = Seen::report;
                    s.how.user = &seen[next++];
                  },
                  [&](Saver &s) {
                    require(s.loaded.missing_count == (forward ? 6 : 3), "missing_count");
                    require(s.loaded.unexpected_count == (forward ? 3 : 6), "unexpected_count");
                  }),
              "");
    for (const Seen &rank : seen) {
      EXPECT_EQ(rank.missing, forward ? averages : momenta);
      EXPECT_EQ(rank.unexpected, forward ? momenta : averages);
    }
  }
  /* Weights alone: what the optimizer had does not matter. */
  EXPECT_EQ(load_other(muon, adamw, [](Saver &s) { s.how.weights_only = 1; }), "");
}

/* A conversion takes the masters where there are some: nothing is rounded twice. In the other
 * direction they come from the weights. */
TEST(Checkpoint, ConversionKeepsTheMasters) {
  const Job small = small_job();
  Job half = small;
  test::set_dtypes(&half.model, -1, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
  for (const bool widens : {true, false}) {
    const Job &from = widens ? half : small, &into = widens ? small : half;
    ModelDisk disk;
    ASSERT_EQ(train_and_save(from, 2, 1, &disk), "");
    const Found saved = look(from, &disk); /* exports masters */
    const test::RanksResult result = test::run_ranks(test::ranks_of(into, 2), [&](Rank &rank) {
      Saver s(&rank, &into, 1, &disk);
      uint64_t hash = 0;
      s.how.convert = 1;
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.load());
      MFSDP_TRY(s.trainer.hash(&hash));
      require(hash == saved.hash, "other parameters");
      require(s.loaded.dtype_count == small.model.count(), "dtype_count");
      return s.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* What another tool leaves: one file, no index, no state. */
TEST(Checkpoint, WeightsOfAnotherTool) {
  const Job job = small_job();
  ModelDisk ours, theirs;
  mfsdp_io io = theirs.io();
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_io_file *file = nullptr;
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(train_and_save(job, 2, 1, &ours), "");
  const Found saved = look(job, &ours);
  const std::string bytes = ours.files().at("run/step-1/model.safetensors");
  const char *path = "run/pretrained/model.safetensors";
  ASSERT_EQ(mfsdp_io_make_folder(&context, &io, "run", nullptr), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_make_folder(&context, &io, "run/pretrained", nullptr), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_open(&context, &io, path, MFSDP_IO_CREATE, &file), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_write(&context, &io, file, path, 0, bytes.size(), bytes.data()), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_close(&context, &io, file, path, MFSDP_OK), MFSDP_OK);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Saver s(&rank, &job, 1, &theirs);
    uint64_t hash = 0;
    MFSDP_TRY(s.create());
    test::must_fail(rank, s.load(), MFSDP_E_IO, "no whole checkpoint");
    s.how.name = "pretrained";
    test::must_fail(rank, s.load(), MFSDP_E_IO, "state.safetensors");
    s.how.weights_only = 1;
    MFSDP_TRY(s.load());
    MFSDP_TRY(s.trainer.hash(&hash));
    require(hash == saved.hash, "other parameters");
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* FAULTS c7: what is wrong with a file is said, whatever rank finds it. */
TEST(Checkpoint, DamagedFilesAreRefused) {
  const Job job = small_job();
  const char *const names[] = {"model.safetensors", "optimizer.exp_avg.safetensors",
                               "model.safetensors.index.json", "state.safetensors"};
  for (const char *name : names) {
    ModelDisk disk;
    ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
    std::string *bytes = disk.bytes(std::string("run/step-1/") + name);
    ASSERT_NE(bytes, nullptr) << name;
    bytes->resize(bytes->size() - 9);
    EXPECT_NE(look(job, &disk).error, "") << name;
  }
  ModelDisk disk;
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  *disk.bytes("run/latest") = "../../etc\n";
  EXPECT_TRUE(says(look(job, &disk).error, "does not hold a name"));
}

/* Other tools go by the index; which of two we meet first must not decide what is loaded. */
TEST(Checkpoint, ATensorInTwoFilesIsRefused) {
  const Job job = small_job();
  ModelDisk disk;
  mfsdp_io io = disk.io();
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  const char *path = "run/step-1/stale.safetensors";
  mfsdp_io_file *file = nullptr;
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(train_and_save(job, 2, 1, &disk), "");
  const std::string bytes = disk.files().at("run/step-1/model.safetensors");
  ASSERT_EQ(mfsdp_io_open(&context, &io, path, MFSDP_IO_CREATE, &file), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_write(&context, &io, file, path, 0, bytes.size(), bytes.data()), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_close(&context, &io, file, path, MFSDP_OK), MFSDP_OK);
  EXPECT_EQ(look(job, &disk).error, ""); /* nobody names it */
  std::string *index = disk.bytes("run/step-1/model.safetensors.index.json");
  ASSERT_NE(index, nullptr);
  index->replace(index->find("model.safetensors"), 5, "stale");
  const std::string error = look(job, &disk).error;
  EXPECT_TRUE(says(error, "'a' is in two files")) << error;
}

/* A checkpoint says how it was trained: all that one preset has otherwise than another. */
TEST(Checkpoint, EveryChoiceOfTheOptimizerIsSaved) {
  ModelDisk disk;
  ASSERT_EQ(train_and_save(small_job(), 2, 1, &disk), "");
  const std::string state = disk.files().at("run/step-1/state.safetensors");
  for (const char *name : {"algorithm",
                           "lr",
                           "weight_decay",
                           "clipped",
                           "muon.momentum",
                           "muon.grad_weight",
                           "muon.nesterov_weight",
                           "muon.nesterov",
                           "muon.scale",
                           "muon.normalize_rows",
                           "muon.row_beta2",
                           "muon.row_eps",
                           "muon.steps",
                           "muon.coefficients_hash",
                           "muon.form",
                           "muon.dtype",
                           "muon.restarts",
                           "muon.norm_rule",
                           "muon.eps",
                           "muon.norm_factor"})
    EXPECT_TRUE(says(state, std::string("\"group.0.") + name + "\":")) << name;
}

/* Each flag of a load with a value beside both of its own. */
void expect_flags_checked(Rank &rank, mfsdp_checkpoint *ck) {
  const struct {
    const char *name;
    int32_t mfsdp_checkpoint_load_desc::*field;
  } flags[] = {{"weights_only", &mfsdp_checkpoint_load_desc::weights_only},
               {"allow_missing", &mfsdp_checkpoint_load_desc::allow_missing},
               {"allow_unexpected", &mfsdp_checkpoint_load_desc::allow_unexpected},
               {"convert", &mfsdp_checkpoint_load_desc::convert}};
  for (const auto &flag : flags)
    for (const int32_t value : {-1, 2}) {
      mfsdp_checkpoint_load_desc how = mfsdp_checkpoint_load_desc_default();
      mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
      how.*flag.field = value;
      test::must_fail(rank, mfsdp_checkpoint_load(ck, &how, &loaded), MFSDP_E_ARGUMENT,
                      std::string("checkpoint load: ") + flag.name + " is " +
                          std::to_string(value) + ", needs 0 or 1");
    }
}

TEST(Checkpoint, WrongCalls) {
  const Job job = small_job();
  ModelDisk disk;
  EXPECT_EQ(test::survives(
                job, 2, 1,
                [&](Rank &rank, Trainer &trainer) {
                  mfsdp_io io = disk.io();
                  mfsdp_checkpoint_desc desc = mfsdp_checkpoint_desc_default();
                  mfsdp_checkpoint *ck = nullptr;
                  const auto fails = [&](const char *text) {
                    test::must_fail(rank, mfsdp_checkpoint_create(trainer.runtime, &desc, &ck),
                                    MFSDP_E_ARGUMENT, text);
                  };
                  fails("io: NULL");
                  desc.io = &io;
                  fails("folder is NULL");
                  desc.folder = "run";
                  desc.max_file_nbytes = 0;
                  fails("max_file_nbytes is 0");
                  desc.max_file_nbytes = 1;
                  desc.stage_nbytes = 1;
                  fails("stage_nbytes is 1");
                  desc.stage_nbytes = 64;
                  mfsdp_background nothing;
                  std::memset(&nothing, 0, sizeof(nothing));
                  desc.background = &nothing;
                  fails("background: NULL");
                  desc.background = nullptr;
                  MFSDP_TRY(mfsdp_checkpoint_create(trainer.runtime, &desc, &ck));
                  int32_t running = 1;
                  test::must_fail(rank, mfsdp_checkpoint_save_begin(ck, nullptr, 0), MFSDP_E_STATE,
                                  "needs desc.background");
                  MFSDP_TRY(mfsdp_checkpoint_poll(ck, &running));
                  require(running == 0, "nothing runs");
                  MFSDP_TRY(mfsdp_checkpoint_wait(ck));
                  mfsdp_checkpoint_load_desc how = mfsdp_checkpoint_load_desc_default();
                  mfsdp_checkpoint_loaded loaded = mfsdp_checkpoint_loaded_default();
                  how.name = "../step-1";
                  test::must_fail(rank, mfsdp_checkpoint_load(ck, &how, &loaded), MFSDP_E_ARGUMENT,
                                  "needs one like step-12");
                  how.name = "step-1.attempt"; /* has its state, and holes for tensors */
                  test::must_fail(rank, mfsdp_checkpoint_load(ck, &how, &loaded), MFSDP_E_ARGUMENT,
                                  "is not finished");
                  how.name = "..";
                  test::must_fail(rank, mfsdp_checkpoint_load(ck, &how, &loaded), MFSDP_E_ARGUMENT,
                                  "needs one like step-12");
                  expect_flags_checked(rank, ck);
                  const auto visit = [](void *, const char *, const char *) {};
                  const auto compare = [](void *, const char *, const char *, const char *) {};
                  test::must_fail(rank, mfsdp_checkpoint_strings(ck, nullptr, visit, nullptr),
                                  MFSDP_E_ARGUMENT, "strings: name is NULL");
                  test::must_fail(rank, mfsdp_checkpoint_strings(ck, "a/b", visit, nullptr),
                                  MFSDP_E_ARGUMENT, "needs one like step-12");
                  test::must_fail(rank, mfsdp_checkpoint_strings(ck, "step-1", nullptr, nullptr),
                                  MFSDP_E_ARGUMENT, "strings: visit is NULL");
                  test::must_fail(rank, mfsdp_checkpoint_differences(ck, nullptr, compare, nullptr),
                                  MFSDP_E_ARGUMENT, "differences: name is NULL");
                  test::must_fail(rank,
                                  mfsdp_checkpoint_differences(ck, "step-1", nullptr, nullptr),
                                  MFSDP_E_ARGUMENT, "differences: visit is NULL");
                  test::must_fail(rank, mfsdp_checkpoint_save(ck, nullptr, 2), MFSDP_E_ARGUMENT,
                                  "2 strings");
                  const mfsdp_safetensors_pair ours = {"step", "1"};
                  test::must_fail(rank, mfsdp_checkpoint_save(ck, &ours, 1), MFSDP_E_ARGUMENT,
                                  "'step' of the metadata is there twice");
                  MFSDP_TRY(mfsdp_checkpoint_save(ck, nullptr, 0));
                  mfsdp_checkpoint_destroy(ck);
                  return MFSDP_OK;
                }),
            "");
}

/* ---- groups and replicas ---- */

using test::Copies;
using test::GroupsJob;
using test::GroupsTrainer;
using test::Links;

/* A rank's trainer in several worlds, with its checkpoint. */
struct GroupsSaver {
  GroupsSaver(Rank *rank, Links *links, const GroupsJob *job, int32_t micro_batches,
              ModelDisk *disk)
      : trainer(rank, links, job, micro_batches), io(disk->io()),
        desc(mfsdp_checkpoint_desc_default()) {
    desc.io = &io;
    desc.folder = "run";
    desc.stage_nbytes = 1024;
    desc.max_file_nbytes = 20000;
  }
  ~GroupsSaver() { mfsdp_checkpoint_destroy(checkpoint); }
  mfsdp_status create() {
    MFSDP_TRY(trainer.create());
    return mfsdp_checkpoint_create(trainer.runtime, &desc, &checkpoint);
  }
  mfsdp_status save() {
    const mfsdp_safetensors_pair mine = {"mine", "1"};
    return mfsdp_checkpoint_save(checkpoint, &mine, 1);
  }
  mfsdp_status load() {
    loaded = mfsdp_checkpoint_loaded_default();
    return mfsdp_checkpoint_load(checkpoint, &how, &loaded);
  }
  mfsdp_status destroy() {
    mfsdp_checkpoint_destroy(checkpoint);
    checkpoint = nullptr;
    return trainer.destroy();
  }
  GroupsTrainer trainer;
  mfsdp_io io;
  mfsdp_checkpoint_desc desc;
  mfsdp_checkpoint *checkpoint = nullptr;
  mfsdp_checkpoint_load_desc how = mfsdp_checkpoint_load_desc_default();
  mfsdp_checkpoint_loaded loaded;
};

std::vector<ref::Tensor> dense_tensors() { /* units 0, 2 and 4 */
  std::vector<ref::Tensor> out;
  out.push_back(ref::elementwise("embed", 0, {120, 75})); /* three canonical blocks */
  out.push_back(ref::matrix("qkv", 2, 12, 20));
  out.push_back(ref::elementwise("norm", 2, {40}, 2));
  out.push_back(ref::matrix("no_rows", 2, 0, 8));
  out.push_back(ref::frozen("mask", 4, {9, 50}));
  out.push_back(ref::tied("head", 4, out[0]));
  return out;
}
/* Units 1 and 3; enough names for several messages. */
std::vector<ref::Tensor> experts_a() {
  std::vector<ref::Tensor> out;
  out.push_back(ref::experts("a.up", 1, 3, 8, 24));
  out.push_back(ref::elementwise("a.bias", 1, {65}));
  for (int i = 0; i < 30; ++i)
    out.push_back(ref::matrix("a.gate" + std::to_string(i), 3, 4, 3 + i % 5));
  return out;
}
std::vector<ref::Tensor> experts_b() {
  std::vector<ref::Tensor> out;
  out.push_back(ref::elementwise("b.table", 3, {100, 90}));
  out.push_back(ref::frozen("b.code", 3, {3, 70}));
  out.push_back(ref::conv("b.conv", 3, 6, 2, 2));
  return out;
}

/* The same model in every layout: dense, a, b. */
GroupsJob layout(const Copies &dense, const Copies &a, const Copies &b) {
  GroupsJob job;
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  job.add_group(dense, dense_tensors());
  job.add_instance(true, a, experts_a());
  job.add_instance(false, b, experts_b());
  return job;
}
/* One group, with replicas. */
GroupsJob copies_layout(const Copies &copies) {
  GroupsJob job;
  std::vector<ref::Tensor> all = dense_tensors();
  job.options = test::three_groups();
  job.options.clip_norm = 1.5;
  for (const ref::Tensor &t : experts_a())
    all.push_back(t);
  for (const ref::Tensor &t : experts_b())
    all.push_back(t);
  job.add_group(copies, all);
  return job;
}
std::vector<GroupsJob> layouts(mfsdp_dtype dtype) {
  std::vector<GroupsJob> out;
  out.push_back(copies_layout({{0}})); /* one rank, one group, one copy */
  out.push_back(layout({{0, 1, 2, 3}}, {{0, 2}}, {{1, 3}}));
  out.push_back(layout({{2, 0, 3, 1}}, {{3}}, {{1, 0, 2}}));
  out.push_back(layout({{0, 1}, {2, 3}}, {{0}, {2}}, {{3}, {1}}));
  out.push_back(layout({{0, 1}, {2, 3}}, {{1, 0}}, {{2, 3}})); /* each inside one copy */
  out.push_back(copies_layout({{0, 2}, {1, 3}}));
  out.push_back(copies_layout({{0}, {1}, {2}}));
  out.back().planner = MFSDP_PLANNER_ROUND_ROBIN;
  for (GroupsJob &job : out)
    test::set_dtypes(&job.model, -1, dtype, dtype, dtype);
  return out;
}

std::string groups_train_and_save(const GroupsJob &job, int64_t steps, ModelDisk *disk) {
  const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsSaver s(&rank, &links, &job, 2, disk);
    MFSDP_TRY(s.create());
    for (int64_t step = 0; step < steps; ++step)
      MFSDP_TRY(s.trainer.step(step));
    MFSDP_TRY(s.save());
    return s.destroy();
  });
  return result.ok() ? "" : result.text();
}

/* Loads from one disk and saves to another. */
std::string groups_copy(const GroupsJob &job, ModelDisk *from, ModelDisk *to) {
  const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsSaver loads(&rank, &links, &job, 1, from);
    mfsdp_checkpoint *saves = nullptr;
    mfsdp_checkpoint_desc desc = loads.desc;
    mfsdp_io io = to->io();
    const mfsdp_safetensors_pair mine = {"mine", "1"};
    desc.io = &io;
    MFSDP_TRY(loads.create());
    MFSDP_TRY(loads.load());
    MFSDP_TRY(mfsdp_checkpoint_create(loads.trainer.runtime, &desc, &saves));
    const mfsdp_status status = mfsdp_checkpoint_save(saves, &mine, 1);
    mfsdp_checkpoint_destroy(saves);
    MFSDP_TRY(status);
    return loads.destroy();
  });
  return result.ok() ? "" : result.text();
}

/* One checkpoint is the union of the groups' names; its bytes tell nothing of groups or replicas. */
TEST(Groups, TheSameBytesFromEveryLayout) {
  for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16}) {
    if (MFSDP_TEST_SANITIZER && dtype == MFSDP_F32) continue; /* BF16 has masters as well */
    const std::vector<GroupsJob> all = layouts(dtype);
    ModelDisk first;
    ASSERT_EQ(groups_train_and_save(all[0], 2, &first), "");
    ASSERT_EQ(first.files().count("run/step-2/optimizer.momentum.safetensors.index.json"), 1u);
    for (std::size_t i = 1; i < all.size(); ++i) {
      ModelDisk other;
      ASSERT_EQ(groups_copy(all[i], &first, &other), "") << "layout " << i;
      EXPECT_EQ(first.files(), other.files()) << "layout " << i;
    }
  }
}

/* Interrupted and resumed is as uninterrupted, in the same layout (the order of sums depends on it). */
TEST(Groups, GoOnWithTheSameBits) {
  const std::vector<GroupsJob> all = layouts(MFSDP_F32);
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (MFSDP_TEST_SANITIZER && i % 2 == 0) continue;
    const GroupsJob &job = all[i];
    const Expected expected = job.expected(2, 3);
    ModelDisk disk;
    ASSERT_EQ(groups_train_and_save(job, 2, &disk), "");
    const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsSaver s(&rank, &links, &job, 2, &disk);
      MFSDP_TRY(s.create());
      MFSDP_TRY(s.load());
      MFSDP_TRY(s.trainer.step(2));
      s.trainer.compare(expected, 2);
      return s.destroy();
    });
    EXPECT_TRUE(result.ok()) << "layout " << i << "\n" << result.text();
  }
}

/* FAULTS c2 for replicas: what the others would have written is not missing, and not written twice. */
TEST(Groups, OnlyTheFirstReplicaWrites) {
  const GroupsJob job = copies_layout({{0, 2}, {1, 3}});
  ModelDisk disk;
  const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsSaver s(&rank, &links, &job, 1, &disk);
    MFSDP_TRY(s.create());
    const bool first = s.trainer.places[0].copy == 0;
    require((s.checkpoint->write_count > 0) == first, "who writes");
    require(s.checkpoint->run_count > 0, "all read");
    MFSDP_TRY(s.save());
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* In the background, while the next step runs. */
TEST(Groups, TheSameBytesInTheBackground) {
  const GroupsJob job = layout({{0, 1}, {2, 3}}, {{0}, {2}}, {{3}, {1}});
  ModelDisk plain, later;
  ASSERT_EQ(groups_train_and_save(job, 1, &plain), "");
  const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsSaver s(&rank, &links, &job, 2, &later);
    mfsdp_posix_background thread;
    const mfsdp_background background = mfsdp_background_posix(&thread);
    const mfsdp_safetensors_pair mine = {"mine", "1"};
    s.desc.background = &background;
    MFSDP_TRY(s.create());
    MFSDP_TRY(s.trainer.step(0));
    MFSDP_TRY(mfsdp_checkpoint_save_begin(s.checkpoint, &mine, 1));
    MFSDP_TRY(s.trainer.step(1));
    MFSDP_TRY(mfsdp_checkpoint_wait(s.checkpoint));
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(plain.files(), later.files());
}

TEST(Groups, ANameInTwoInstances) {
  GroupsJob job = layout({{0, 1, 2, 3}}, {{0, 2}}, {{1, 3}});
  job.groups[1].pop_back();
  job.add_instance(false, {{1, 3}},
                   {ref::matrix("x", 1, 4, 4), ref::elementwise("a.bias", 1, {9})});
  ModelDisk disk;
  const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
    GroupsSaver s(&rank, &links, &job, 1, &disk);
    MFSDP_TRY(s.trainer.create());
    test::must_fail(rank, mfsdp_checkpoint_create(s.trainer.runtime, &s.desc, &s.checkpoint),
                    MFSDP_E_ARGUMENT, "two groups have a parameter 'a.bias'");
    MFSDP_TRY(s.trainer.step(0)); /* nothing else is wrong */
    return s.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A rank whose description is wrong, or whose memory is: all are told, and may try again. */
TEST(Groups, AFailureOfOneRankReachesAll) {
  const GroupsJob job = layout({{0, 1}, {2, 3}}, {{0}, {2}}, {{3}, {1}});
  ModelDisk disk;
  bool failed = true;
  const int64_t told = 2; /* before, a rank cannot say anything */
  for (int64_t n = -1; failed; n = n < 0 ? told : n + (MFSDP_TEST_SANITIZER ? 5 : 1)) {
    const test::RanksResult result = test::run_groups(job, [&](Rank &rank, Links &links) {
      GroupsSaver s(&rank, &links, &job, 1, &disk);
      const bool bad = rank.rank == 2;
      MFSDP_TRY(s.trainer.create());
      const std::size_t before = rank.memory->live_nbytes();
      if (n >= 0 && bad) rank.memory->fail_at(n);
      if (n < 0 && bad) s.desc.keep_last = -1;
      const mfsdp_status status =
          mfsdp_checkpoint_create(s.trainer.runtime, &s.desc, &s.checkpoint);
      if (bad && n >= 0) failed = rank.memory->failed();
      if (bad) rank.memory->fail_at(-1);
      MFSDP_TRY(rank.barrier());
      if (failed) {
        test::must_fail(rank, status, n < 0 ? MFSDP_E_ARGUMENT : MFSDP_E_MEMORY, "rank 2");
        require(rank.memory->live_nbytes() == before, "something is held");
        s.desc.keep_last = 0;
        MFSDP_TRY(mfsdp_checkpoint_create(s.trainer.runtime, &s.desc, &s.checkpoint));
      }
      return s.destroy();
    });
    ASSERT_TRUE(result.ok()) << "allocation " << n << "\n" << result.text();
    ASSERT_LT(n, 200);
  }
}

/* ---- the system's files ---- */

class PosixCheckpoint : public ::testing::Test {
protected:
  void SetUp() override {
    char name[] = "/tmp/mfsdp_checkpoint_XXXXXX";
    ASSERT_NE(mkdtemp(name), nullptr);
    folder_ = name;
    calls_.reset();
  }
  void TearDown() override {
    calls_.reset();
    test::remove_folder(folder_);
  }
  /* Two ranks train `steps` from nothing and save; the outcome of both. */
  Outcome save(int64_t steps, int32_t keep_last = 1) {
    Outcome outcome;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job_, 2), [&](Rank &rank) {
      Saver s(&rank, &job_, 1, mfsdp_io_posix(), folder_.c_str());
      s.desc.keep_last = keep_last;
      s.desc.stage_nbytes = 64;
      MFSDP_TRY(s.create());
      for (int64_t i = 0; i < steps; ++i)
        MFSDP_TRY(s.trainer.step(i));
      outcome.status[rank.rank] = s.save();
      outcome.message[rank.rank] = mfsdp_context_error(&rank.context)->message;
      return s.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
    outcome.calls = calls_.total;
    return outcome;
  }
  Found found() { return look(job_, mfsdp_io_posix(), folder_.c_str()); }
  /* Saves step 1 and notes it, saves step 2 and notes that, and goes back to step 1. */
  void two_steps() {
    ASSERT_EQ(save(1).status[0], MFSDP_OK);
    old_ = found();
    files_ = test::read_files(folder_);
    ASSERT_EQ(save(2).status[0], MFSDP_OK);
    new_ = found();
    ASSERT_EQ(old_.step + new_.step * 10, 21) << old_.error << new_.error;
    after_ = test::read_files(folder_);
    test::write_files(folder_, files_);
  }
  void expect_old_or_new(const std::string &what) {
    const Found now = found();
    EXPECT_EQ(now.error, "") << what;
    EXPECT_EQ(now.hash, now.step == 1 ? old_.hash : new_.hash) << what << ", step " << now.step;
  }

  const Job job_ = small_job();
  test::SystemCalls &calls_ = test::system_calls();
  std::string folder_;
  Found old_, new_;
  std::map<std::string, std::string> files_, after_;
};

/* FAULTS c3: each write, fsync, open, rename and mkdir in turn. */
TEST_F(PosixCheckpoint, EachSystemCallThatFailsLosesNothing) {
  struct Kind {
    test::SystemCall call;
    int64_t least; /* so many of them are in a save */
  };
  const Kind kinds[] = {
      {test::kOpen, 20},
      {test::kWrite, 100},
      {test::kSync,
       18}, /* each file once for each rank that wrote to it, folders, the index files */
      {test::kRename, 3},
      {test::kMakeFolder, 2}};
  const int errors[] = {EIO, ENOSPC, EDQUOT};
  const char *const reasons[] = {"the device failed", "no space left", "the quota is used up"};
  two_steps();
  for (const Kind &kind : kinds) {
    int64_t n = 1;
    /* Of writes, many of which are alike, every seventh. */
    const int64_t stride = kind.least <= 3 ? 1 : kind.call == test::kWrite ? 7 : kStride;
    for (;; n += stride) {
      bool failed = false;
      for (int e = 0; e < 3; ++e) {
        if (kind.least > 3 && n % 3 != e) continue; /* one error for each of many */
        const std::string what =
            "call " + std::to_string(kind.call) + " number " + std::to_string(n);
        test::write_files(folder_, files_);
        calls_.reset();
        calls_.fail(kind.call, n, errors[e]);
        const Outcome outcome = save(2);
        failed = calls_.failed;
        calls_.reset();
        if (!failed) break;
        EXPECT_EQ(outcome.status[0], MFSDP_E_IO) << what << ": " << outcome.message[0];
        EXPECT_EQ(outcome.status[1], MFSDP_E_IO) << what;
        EXPECT_EQ(outcome.message[0], outcome.message[1]) << what;
        EXPECT_TRUE(says(outcome.message[0], reasons[e])) << what << ": " << outcome.message[0];
        expect_old_or_new(what);
      }
      if (!failed) break;
    }
    EXPECT_GT(n, kind.least) << "call " << kind.call;
  }
  /* And the next save cleans up whatever was left. */
  EXPECT_EQ(save(2).status[0], MFSDP_OK);
  EXPECT_EQ(test::read_files(folder_), after_);
}

TEST_F(PosixCheckpoint, InterruptedAndHalvedCallsChangeNothing) {
  two_steps();
  calls_.interrupted = calls_.halves = true;
  const Outcome outcome = save(2);
  EXPECT_EQ(outcome.status[0], MFSDP_OK) << outcome.message[0];
  EXPECT_EQ(found().hash, new_.hash);
  EXPECT_EQ(test::read_files(folder_), after_);
}

#if !MFSDP_TEST_SANITIZER /* a test of files, not of memory; and it forks */
/* FAULTS c1: a process is killed at each of its calls, writes half done; what it leaves loads. */
TEST_F(PosixCheckpoint, KilledAtEachCallOfASave) {
  two_steps();
  int64_t n = 1, news = 0;
  for (;; ++n) {
    test::write_files(folder_, files_);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) { /* nobody else runs in this process: ranks have been joined */
      calls_.reset();
      calls_.kill_at = n;
      _exit(save(2).status[0] == MFSDP_OK ? 0 : 1);
    }
    int how = 0;
    ASSERT_EQ(waitpid(child, &how, 0), child);
    if (WIFEXITED(how)) {
      EXPECT_EQ(WEXITSTATUS(how), 0);
      break;
    }
    ASSERT_TRUE(WIFSIGNALED(how) && WTERMSIG(how) == SIGKILL) << "call " << n;
    const Found now = found();
    ASSERT_EQ(now.error, "") << "call " << n;
    ASSERT_EQ(now.hash, now.step == 1 ? old_.hash : new_.hash) << "call " << n;
    news += now.step == 2;
    if (n % 10 != 0) continue;
    EXPECT_EQ(save(2).status[0], MFSDP_OK); /* over what is left */
    EXPECT_EQ(test::read_files(folder_), after_) << "call " << n;
  }
  RecordProperty("points", static_cast<int>(n - 1));
  EXPECT_GT(n, 200);
  EXPECT_GT(news, 0);
  EXPECT_LT(news, 40);
}
#endif

/* The real one: what the model promises, in a folder of the system. */
TEST(Checkpoint, PosixFiles) {
  char folder[] = "/tmp/mfsdp_checkpoint_XXXXXX";
  ASSERT_NE(mkdtemp(folder), nullptr);
  const std::string path = std::string(folder) + "/a", other = std::string(folder) + "/b";
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  const mfsdp_io io = mfsdp_io_posix();
  mfsdp_io_file *file = nullptr, *lock = nullptr, *second = nullptr;
  char data[4] = "";
  int64_t nbytes = 0;
  int32_t existed = 0;
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_check(&context, &io), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_open(&context, &io, path.c_str(), MFSDP_IO_READ, &file), MFSDP_E_IO);
  EXPECT_STREQ(mfsdp_context_error(&context)->message,
               ("open " + path + ": no such file or folder").c_str());
  ASSERT_EQ(mfsdp_io_open(&context, &io, path.c_str(), MFSDP_IO_CREATE, &file), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_write(&context, &io, file, path.c_str(), 2, 3, "xyz"), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_sync(&context, &io, file, path.c_str()), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_close(&context, &io, file, path.c_str(), MFSDP_OK), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_rename(&context, &io, path.c_str(), other.c_str()), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_sync_folder(&context, &io, folder), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_open(&context, &io, other.c_str(), MFSDP_IO_READ, &file), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_size(&context, &io, file, other.c_str(), &nbytes), MFSDP_OK);
  EXPECT_EQ(nbytes, 5);
  EXPECT_EQ(mfsdp_io_read(&context, &io, file, other.c_str(), 1, 4, data), MFSDP_OK);
  EXPECT_EQ(std::string(data, 4), std::string("\0xyz", 4));
  EXPECT_EQ(mfsdp_io_read(&context, &io, file, other.c_str(), 3, 4, data), MFSDP_E_FORMAT);
  EXPECT_EQ(mfsdp_io_close(&context, &io, file, other.c_str(), MFSDP_OK), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_make_folder(&context, &io, folder, &existed), MFSDP_OK);
  EXPECT_EQ(existed, 1);
  EXPECT_EQ(mfsdp_io_make_folder(&context, &io, other.c_str(), nullptr), MFSDP_E_IO);
  ASSERT_EQ(mfsdp_io_lock(&context, &io, path.c_str(), &lock), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_lock(&context, &io, path.c_str(), &second), MFSDP_E_STATE);
  EXPECT_EQ(mfsdp_io_close(&context, &io, lock, path.c_str(), MFSDP_OK), MFSDP_OK);
  ASSERT_EQ(mfsdp_io_lock(&context, &io, path.c_str(), &lock), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_close(&context, &io, lock, path.c_str(), MFSDP_OK), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_remove(&context, &io, folder), MFSDP_E_IO); /* not empty */
  EXPECT_EQ(mfsdp_io_remove(&context, &io, path.c_str()), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_remove(&context, &io, other.c_str()), MFSDP_OK);
  EXPECT_EQ(mfsdp_io_remove(&context, &io, folder), MFSDP_OK);
}

} // namespace
