/* SPDX-License-Identifier: MIT */
/*
 * Memory by class: the prediction, what create holds, what was worked out here, and the peaks.
 * Offload: the same bits with masters and states in memory that no device operation may touch.
 * MFSDP_TEST_WRAP_MALLOC
 */
#include "runtime_rig.h"

#include "../support/malloc_count.h"

#include <sys/mman.h>

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

const mfsdp_memory_class kClasses[] = {MFSDP_MEMORY_SHARD,   MFSDP_MEMORY_STATE,
                                       MFSDP_MEMORY_GRAD,    MFSDP_MEMORY_SLOT,
                                       MFSDP_MEMORY_STAGING, MFSDP_MEMORY_WORKSPACE};

std::size_t of_class(const mfsdp_memory &m, mfsdp_memory_class c) {
  return c == MFSDP_MEMORY_SHARD     ? m.shard_nbytes
         : c == MFSDP_MEMORY_STATE   ? m.state_nbytes
         : c == MFSDP_MEMORY_GRAD    ? m.grad_nbytes
         : c == MFSDP_MEMORY_SLOT    ? m.slot_nbytes
         : c == MFSDP_MEMORY_STAGING ? m.staging_nbytes
                                     : m.workspace_nbytes;
}

std::size_t aligned(int64_t count) {
  return static_cast<std::size_t>((count + 127) / 128 * 128);
}

/* ---- what there should be, from pieces and tensors alone ---- */

struct Wanted {
  mfsdp_memory memory = mfsdp_memory_default();
  std::size_t copy_nbytes = 0, master_nbytes = 0;
};

bool separate(const ref::Tensor &t, const mfsdp_runtime_desc &d) {
  return t.compute != MFSDP_F32 || d.state_space != MFSDP_SPACE_DEVICE;
}

void add_pieces(const Job &job, const Rank &rank, const mfsdp_runtime_desc &d,
                const mfsdp_plan *plan, Wanted *out) {
  int32_t count = 0;
  std::size_t largest_job = 0, direction = 0, scratch = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, -1, &count);
  for (int32_t i = 0; i < count; ++i) {
    const ref::Tensor &t = job.model.at(pieces[i].param);
    const std::size_t n = aligned(pieces[i].count), nbytes = n * 4;
    const bool frozen = t.role == ref::Role::kFrozen;
    if (pieces[i].owner != rank.rank) continue;
    if (separate(t, d)) out->copy_nbytes += n * mfsdp_dtype_nbytes(t.compute);
    if (!separate(t, d) || !frozen) out->master_nbytes += nbytes;
    if (frozen) continue;
    const bool muon = job.options.groups[static_cast<std::size_t>(t.group)].muon;
    const std::size_t states = muon ? 1 : 2;
    out->memory.grad_nbytes += nbytes;
    out->memory.state_nbytes += states * nbytes;
    largest_job = std::max(largest_job, (1 + states) * nbytes);
    if (!muon) continue;
    const mfsdp_hyper_group h =
        test::hyper_group_of(job.options.groups[static_cast<std::size_t>(t.group)]);
    std::size_t needs = 0;
    mfsdp_context context;
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    require(mfsdp_context_init(&context, &desc) == MFSDP_OK &&
                mfsdp_newton_schulz_workspace_nbytes(&context, &h.muon.newton_schulz,
                                                     pieces[i].rows, pieces[i].cols,
                                                     &needs) == MFSDP_OK,
            "the workspace of Newton-Schulz");
    direction = std::max(direction, nbytes);
    scratch = std::max(scratch, needs);
  }
  out->memory.shard_nbytes = out->master_nbytes + out->copy_nbytes;
  out->memory.workspace_nbytes = direction + scratch;
  if (d.state_space != MFSDP_SPACE_DEVICE) out->memory.staging_nbytes += largest_job;
}

/* Padded elements that `owner` has of a unit's gradients. */
std::size_t segment(const Job &job, const mfsdp_plan *plan, int32_t unit, int32_t owner) {
  std::size_t sum = 0;
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, unit, &count);
  for (int32_t i = 0; i < count; ++i)
    if (pieces[i].owner == owner && job.model.at(pieces[i].param).role != ref::Role::kFrozen)
      sum += aligned(pieces[i].count);
  return sum;
}

void add_units(const Job &job, const Rank &rank, const mfsdp_runtime_desc &d,
               const mfsdp_plan *plan, Wanted *out) {
  std::size_t param_slot = 256, grad_slot = 256, wire = 0, chunks = 0;
  int32_t units = 0, tied = 0;
  for (int32_t u = 0; u < job.model.unit_count(); ++u) {
    std::size_t full = 0, grads = 0, longest = 0, grad_size = 4, wire_size = 4, full_size = 4;
    bool shared = false;
    for (int32_t i = 0; i < job.model.count(); ++i)
      shared = shared || (job.model.at(i).unit != u && job.model.at(job.model.owner(i)).unit == u);
    tied += shared;
    units += !job.model.unit_tensors(u).empty();
    for (int32_t i : job.model.unit_tensors(u)) {
      const ref::Tensor &t = job.model.at(i);
      if (job.model.owner(i) != i) continue;
      full_size = mfsdp_dtype_nbytes(t.compute);
      full += aligned(t.numel());
      if (t.role == ref::Role::kFrozen) continue;
      grads += aligned(t.numel());
      grad_size = mfsdp_dtype_nbytes(t.grad);
      wire_size = mfsdp_dtype_nbytes(t.wire);
    }
    param_slot = std::max(param_slot, full * full_size);
    grad_slot = std::max(grad_slot, grads * grad_size);
    if (wire_size != grad_size) wire = std::max(wire, grads * wire_size);
    for (int32_t r = 0; r < rank.world; ++r)
      longest = std::max(longest, segment(job, plan, u, r));
    if (segment(job, plan, u, rank.rank) > 0)
      chunks = std::max(chunks, std::min(job.chunk_nbytes, longest * wire_size));
  }
  const int32_t params = std::min(units, d.active_units + tied + d.prefetch_depth);
  const int32_t grads = std::min(units, d.active_grads + tied + d.reduce_depth);
  out->memory.slot_nbytes =
      static_cast<std::size_t>(d.reshard_after_forward ? params : units) * param_slot +
      static_cast<std::size_t>(d.local_accumulation ? units : grads) * grad_slot;
  out->memory.staging_nbytes += wire + static_cast<std::size_t>(rank.world - 1) * chunks;
}

/* ---- the table of options ---- */

Job bf16_job() {
  Job job = test::mixed_job();
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  return job;
}

Job mixed_dtypes_job() {
  Job job = test::mixed_job();
  test::set_dtypes(&job.model, 0, MFSDP_BF16, MFSDP_BF16, MFSDP_BF16);
  test::set_dtypes(&job.model, 1, MFSDP_F16, MFSDP_F32, MFSDP_BF16);
  test::set_dtypes(&job.model, 2, MFSDP_BF16, MFSDP_F16, MFSDP_F16);
  return job;
}

struct Option {
  std::string name;
  std::function<void(Job *)> change;
};

void tune(Job *job, const std::function<void(mfsdp_runtime_desc *)> &what) {
  job->tune = what;
}

std::vector<Option> options() {
  std::vector<Option> out;
  out.push_back({"as it comes", [](Job *) {}});
  out.push_back(
      {"prefetch", [](Job *j) { tune(j, [](mfsdp_runtime_desc *d) { d->prefetch_depth = 2; }); }});
  out.push_back({"prefetch, more than there is", [](Job *j) {
                   tune(j,
                        [](mfsdp_runtime_desc *d) { d->prefetch_depth = d->reduce_depth = 1000; });
                 }});
  out.push_back({"reduce depth",
                 [](Job *j) { tune(j, [](mfsdp_runtime_desc *d) { d->reduce_depth = 1; }); }});
  out.push_back({"keep", [](Job *j) {
                   tune(j, [](mfsdp_runtime_desc *d) { d->reshard_after_forward = 0; });
                 }});
  out.push_back({"several active", [](Job *j) { j->active_units = j->active_grads = 2; }});
  out.push_back({"local accumulation", [](Job *j) { j->options.local_world = 1; }});
  out.push_back({"small chunks", [](Job *j) { j->chunk_nbytes = 1024; }});
  out.push_back({"chunks larger than any segment", [](Job *j) { j->chunk_nbytes = 1 << 24; }});
  out.push_back({"pinned", [](Job *j) {
                   tune(j, [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_PINNED; });
                 }});
  out.push_back({"host", [](Job *j) {
                   tune(j, [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_HOST; });
                 }});
  out.push_back({"loss scale and weights", [](Job *j) {
                   j->options.loss_scale.initial = 4;
                   j->script.weight = [](int64_t, int64_t) { return 2.0; };
                 }});
  out.push_back({"all at once", [](Job *j) {
                   j->active_units = 2;
                   j->options.local_world = 1;
                   tune(j, [](mfsdp_runtime_desc *d) {
                     d->prefetch_depth = 1;
                     d->reduce_depth = 1;
                     d->state_space = MFSDP_SPACE_HOST;
                   });
                 }});
  return out;
}

/* Predicts inside make_runtime, just before create, under an allocator that refuses everything. */
mfsdp_status predict_and_make(const Job &job, Rank &rank, Trainer *t, mfsdp_memory *predicted,
                              Wanted *want) {
  MFSDP_TRY(t->make_plan());
  return t->make_runtime([&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *,
                             mfsdp_hyper_group *) {
    const mfsdp_counters before = rank.context.counters;
    rank.memory->fail_from(0);
    *predicted = mfsdp_memory_default();
    require(mfsdp_runtime_memory(&rank.context, d, predicted) == MFSDP_OK, "the prediction failed");
    require(rank.memory->alloc_count() == 0, "the prediction allocates");
    require(std::memcmp(&before, &rank.context.counters, sizeof(before)) == 0, "and communicates");
    rank.memory->fail_at(-1);
    add_pieces(job, rank, *d, t->plan, want);
    add_units(job, rank, *d, t->plan, want);
  });
}

/* One option on one world: predicted, worked out, held, and at the peak of two steps. */
mfsdp_status check_rank(const Job &job, Rank &rank) {
  Trainer t(&rank, &job, 2);
  mfsdp_memory predicted;
  Wanted want;
  std::size_t sum = 0;
  const std::size_t live = rank.memory->live_nbytes(), booked = rank.context.total_nbytes;
  MFSDP_TRY(predict_and_make(job, rank, &t, &predicted, &want));
  for (const mfsdp_memory_class c : kClasses) {
    const std::string name = std::string(mfsdp_memory_class_name(c)) + ": predicted " +
                             std::to_string(of_class(predicted, c));
    require(of_class(predicted, c) == of_class(want.memory, c),
            name + ", worked out " + std::to_string(of_class(want.memory, c)));
    require(of_class(predicted, c) == rank.context.current_nbytes[c],
            name + ", held " + std::to_string(rank.context.current_nbytes[c]));
    require(rank.context.peak_nbytes[c] == rank.context.current_nbytes[c],
            name + ", peak of create");
    sum += rank.context.current_nbytes[c];
  }
  require(sum + rank.context.current_nbytes[MFSDP_MEMORY_TABLE] == rank.context.total_nbytes,
          "a class that nobody knows");
  require(rank.memory->live_nbytes() - live == rank.context.total_nbytes - booked,
          "the books are not the allocator's");
  const std::size_t after_create = rank.memory->live_nbytes();
  MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
  for (int64_t s = 0; s < 2; ++s)
    MFSDP_TRY(t.step(s));
  std::vector<float> full(12000);
  MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, full.data()));
  for (const mfsdp_memory_class c : kClasses) { /* init documents 256 KiB, twice with copies */
    const std::size_t init =
        c != MFSDP_MEMORY_STAGING ? 0 : (want.copy_nbytes > 0 ? 2u : 1u) * (std::size_t{256} << 10);
    require(rank.context.current_nbytes[c] == of_class(predicted, c), "steps keep memory");
    require(rank.context.peak_nbytes[c] == of_class(predicted, c) + init,
            std::string("the peak of ") + mfsdp_memory_class_name(c));
  }
  require(rank.memory->live_nbytes() == after_create, "steps keep memory outside the books");
  return t.destroy();
}

#if MFSDP_TEST_SANITIZER
const int32_t kWorlds[] = {1, 3};
#else
const int32_t kWorlds[] = {1, 3, 8};
#endif

TEST(Memory, PredictionIsWhatCreateHolds) {
  const Job jobs[] = {test::mixed_job(), bf16_job(), mixed_dtypes_job(), test::small_job()};
  const std::size_t first_job = MFSDP_TEST_TSAN        ? 3
                                : MFSDP_TEST_SANITIZER ? 2
                                                       : 0; /* the largest */
  for (const Option &option : options())
    for (std::size_t k = first_job; k < 4; ++k)
      for (const int32_t world : kWorlds) {
        Job job = jobs[k];
        option.change(&job);
        if (job.options.local_world > 0) job.options.local_world = world;
        for (ref::Tensor &t : job.model.tensors) /* micro-batches add up in f32 alone */
          if (job.options.local_world > 0) t.grad = MFSDP_F32;
        const test::RanksResult result = test::run_ranks(
            test::ranks_of(job, world), [&](Rank &rank) { return check_rank(job, rank); });
        EXPECT_TRUE(result.ok()) << option.name << ", job " << k << ", world " << world << ": "
                                 << result.text();
      }
}

/*
 * Without a chunk the library chooses one by the unit and the nodes, before create as in it. Five
 * matrices of 192 KiB on four ranks: a ring of hosts takes 32 KiB (960 KiB / (16 x 2) holds no 60), of
 * two hosts 60 (one of the links is between them), one host's 256 KiB.
 */
TEST(Memory, OfTheLibrarysChunks) {
  const int32_t world = 4, alone[] = {0, 1, 2, 3}, pairs[] = {0, 0, 1, 1};
  const std::size_t kib = 1024;
  Job job;
  job.chunk_nbytes = 0;
  for (int i = 0; i < 5; ++i)
    job.model.tensors.push_back(ref::matrix("m" + std::to_string(i), 0, 192, 256));
  for (const mfsdp_algorithm algorithm :
       {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_ALGORITHM_AUTO})
    for (const int32_t *nodes : {static_cast<const int32_t *>(nullptr), pairs, alone}) {
      test::RanksOptions options = test::ranks_of(job, world);
      options.world.node_of_rank = nodes;
      tune(&job, [&](mfsdp_runtime_desc *d) {
        d->gather_algorithm = d->reduce_algorithm = algorithm;
        if (algorithm == MFSDP_ALGORITHM_AUTO) d->wire = {5000, 209715, 50000, 8388608};
      });
      const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        mfsdp_memory predicted;
        Wanted want;
        MFSDP_TRY(predict_and_make(job, rank, &t, &predicted, &want));
        for (const mfsdp_memory_class c : kClasses)
          require(of_class(predicted, c) == rank.context.current_nbytes[c],
                  std::string(mfsdp_memory_class_name(c)) + ": predicted " +
                      std::to_string(of_class(predicted, c)) + ", held " +
                      std::to_string(rank.context.current_nbytes[c]));
        if (algorithm == MFSDP_RING && nodes == alone)
          require(predicted.staging_nbytes == 8 * 32 * kib, "2 x 4 chunks of 32 KiB");
        if (algorithm == MFSDP_RING && nodes == pairs)
          require(predicted.staging_nbytes == 8 * 60 * kib, "2 x 4 chunks of 60 KiB");
        if (algorithm == MFSDP_RING && nodes == nullptr)
          require(predicted.staging_nbytes == 8 * 256 * kib, "2 x 4 chunks of 256 KiB");
        if (algorithm == MFSDP_DIRECT)
          require(predicted.staging_nbytes % (3 * 192 * kib) == 0 ||
                      predicted.staging_nbytes == 3 * 256 * kib,
                  "3 chunks, of 256 KiB or of the longest segment");
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << mfsdp_algorithm_name(algorithm) << ": " << result.text();
    }
}

/* a1: ranks that own nothing hold nothing but slots. */
TEST(Memory, OfRanksThatOwnNothing) {
  Job job;
  job.model.tensors.push_back(ref::elementwise("a", 0, {20}));
  job.model.tensors.push_back(ref::elementwise("b", 0, {3}));
  job.model.tensors.push_back(ref::elementwise("none", 0, {8, 0}));
  job.model.tensors.push_back(ref::matrix("nil", 1, 0, 8));
  int owners = 0;
  std::mutex mutex;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 8), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    mfsdp_memory predicted;
    Wanted want;
    MFSDP_TRY(predict_and_make(job, rank, &t, &predicted, &want));
    for (const mfsdp_memory_class c : kClasses)
      require(of_class(predicted, c) == of_class(want.memory, c) &&
                  of_class(predicted, c) == rank.context.current_nbytes[c],
              mfsdp_memory_class_name(c));
    {
      std::lock_guard<std::mutex> lock(mutex);
      owners += predicted.shard_nbytes > 0;
    }
    require(predicted.shard_nbytes > 0 ||
                predicted.slot_nbytes ==
                    rank.context.total_nbytes - rank.context.current_nbytes[MFSDP_MEMORY_TABLE],
            "nothing but slots");
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_GE(owners, 1);
  EXPECT_LT(owners, 8);
}

/* Not even malloc, which the allocator above does not see. One rank at a time, the others wait. */
TEST(Memory, PredictionNeverCallsMalloc) {
  const Job job = mixed_dtypes_job();
  uint64_t count = 0;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime(
        [&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          for (int32_t turn = 0; turn < rank.world; ++turn) {
            mfsdp_memory memory = mfsdp_memory_default();
            (void)rank.barrier();
            if (turn == rank.rank) {
              test::malloc_count_begin();
              const mfsdp_status status = mfsdp_runtime_memory(&rank.context, d, &memory);
              count += test::malloc_count_end();
              require(status == MFSDP_OK && memory.slot_nbytes > 0, "the prediction");
            }
            (void)rank.barrier();
          }
        }));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(count, 0u);
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
}

TEST(Memory, WrongArguments) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime(
        [&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
          mfsdp_memory memory = mfsdp_memory_default();
          mfsdp_runtime_desc bad = *d;
          must_fail(rank, mfsdp_runtime_memory(&rank.context, d, nullptr), MFSDP_E_ARGUMENT,
                    "runtime memory: out is NULL");
          memory.struct_nbytes -= 8;
          must_fail(rank, mfsdp_runtime_memory(&rank.context, d, &memory), MFSDP_E_ARGUMENT,
                    "use mfsdp_memory_default");
          memory = mfsdp_memory_default();
          must_fail(rank, mfsdp_runtime_memory(&rank.context, nullptr, &memory), MFSDP_E_ARGUMENT,
                    "desc is NULL");
          bad.prefetch_depth = -1; /* as create, rule by rule: check_test has them all */
          must_fail(rank, mfsdp_runtime_memory(&rank.context, &bad, &memory), MFSDP_E_ARGUMENT,
                    "prefetch_depth is -1");
          bad = *d;
          bad.verdict_lag = 1;
          must_fail(rank, mfsdp_runtime_memory(&rank.context, &bad, &memory), MFSDP_E_UNSUPPORTED,
                    "verdict_lag");
        }));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* A unit of 12 x 10 and 10 x 14 and 10 elements: 128 + 256 + 128 floats; embed has 540: 640. */
TEST(Memory, MaxSlotNamesTheNumbers) {
  Job job = test::small_job();
  test::set_dtypes(&job.model, 0, MFSDP_BF16, MFSDP_F32, MFSDP_F32);
  const std::string text = "the largest unit needs slots of 2048 (parameters) and 2560 (gradients) "
                           "bytes, max_slot_nbytes is ";
  for (const std::size_t limit : {std::size_t{1}, std::size_t{2047}, std::size_t{2559}}) {
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      mfsdp_status predicted = MFSDP_OK;
      std::size_t live = 0;
      MFSDP_TRY(t.make_plan());
      const mfsdp_status status = t.make_runtime(
          [&](mfsdp_runtime_desc *d, mfsdp_group *, mfsdp_optimizer_desc *, mfsdp_hyper_group *) {
            mfsdp_memory memory = mfsdp_memory_default();
            d->max_slot_nbytes = limit;
            predicted = mfsdp_runtime_memory(&rank.context, d, &memory);
            must_fail(rank, predicted, MFSDP_E_ARGUMENT, text + std::to_string(limit));
            live = rank.memory->live_nbytes();
          });
      must_fail(rank, status, MFSDP_E_ARGUMENT, text + std::to_string(limit) + "; split the unit");
      require(rank.memory->live_nbytes() == live, "create kept memory when it refused");
      require(t.runtime == nullptr, "a runtime all the same");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
  job.tune = [](mfsdp_runtime_desc *d) { d->max_slot_nbytes = 2560; };
  EXPECT_EQ(test::run_job(job, 2, 1, test::Expected(job, 2, 1)), "");
}

/* ---- a backend whose spaces are apart ---- */

/*
 * Wraps the backend of one rank (all calls come from the rank's thread). Every pointer that an
 * operation computes with must lie in DEVICE memory that was allocated as such; copies must name
 * the spaces of what they copy. With `fenced`, DEVICE memory is made of pages that can be touched
 * inside operations only: code of the library that reads or writes it on the host crashes.
 */
struct Guard {
  struct Block {
    std::size_t nbytes;
    mfsdp_space space;
  };
  const mfsdp_backend_ops *inner = nullptr;
  bool fenced = false;
  int depth = 0;
  std::map<const unsigned char *, Block> blocks;
  std::string complaints;
  uint64_t checks = 0, copies_in = 0, copies_out = 0; /* between DEVICE and the host's spaces */

  void complain(const std::string &what) {
    if (complaints.size() < 2000) complaints += what + "\n";
  }
  /* 0: no block of ours. */
  int space_of(const void *p) const {
    const unsigned char *at = static_cast<const unsigned char *>(p);
    auto after = blocks.upper_bound(at);
    if (after == blocks.begin()) return 0;
    --after;
    return at < after->first + after->second.nbytes ? after->second.space : 0;
  }
  void must_be(const void *p, mfsdp_space space, const char *what) {
    ++checks;
    if (p != nullptr && space_of(p) != space)
      complain(std::string(what) + " is in space " + std::to_string(space_of(p)));
  }
  void device(const void *p, const char *what) { must_be(p, MFSDP_SPACE_DEVICE, what); }
  /* A copy's end: HOST is also what was never allocated here. */
  void end_of_copy(const void *p, mfsdp_space space, std::size_t nbytes, const char *what) {
    const int really = space_of(p);
    ++checks;
    if (nbytes > 0 && really != space && !(space == MFSDP_SPACE_HOST && really == 0))
      complain(std::string("copy: ") + what + " is called space " + std::to_string(space) +
               ", lies in " + std::to_string(really));
  }
  void fence(int protection) {
    for (auto &entry : blocks)
      if (fenced && entry.second.space == MFSDP_SPACE_DEVICE)
        (void)mprotect(const_cast<unsigned char *>(entry.first), entry.second.nbytes, protection);
  }
  void enter() {
    if (depth++ == 0) fence(PROT_READ | PROT_WRITE);
  }
  void leave() {
    if (--depth == 0) fence(PROT_NONE);
  }
  std::size_t held(mfsdp_space space) const {
    std::size_t sum = 0;
    for (const auto &entry : blocks)
      if (entry.second.space == space) sum += entry.second.nbytes;
    return sum;
  }
};

thread_local Guard *guard = nullptr;

struct Open {
  Open() { guard->enter(); }
  ~Open() { guard->leave(); }
};

mfsdp_status guard_mem_alloc(void *self, mfsdp_context *context, std::size_t nbytes,
                             std::size_t alignment, mfsdp_space space, void **out) {
  if (guard->fenced && space == MFSDP_SPACE_DEVICE) {
    *out = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*out == MAP_FAILED) return MFSDP_FAIL(context, MFSDP_E_MEMORY, "mmap");
  } else {
    MFSDP_TRY(guard->inner->mem_alloc(self, context, nbytes, alignment, space, out));
  }
  guard->blocks[static_cast<const unsigned char *>(*out)] = {nbytes, space};
  return MFSDP_OK;
}
void guard_mem_free(void *self, mfsdp_context *context, void *ptr, std::size_t nbytes,
                    mfsdp_space space) {
  const auto found = guard->blocks.find(static_cast<const unsigned char *>(ptr));
  if (found == guard->blocks.end() || found->second.nbytes != nbytes ||
      found->second.space != space)
    return guard->complain("mem_free of something else");
  guard->blocks.erase(found);
  if (guard->fenced && space == MFSDP_SPACE_DEVICE)
    (void)munmap(ptr, nbytes);
  else
    guard->inner->mem_free(self, context, ptr, nbytes, space);
}
mfsdp_status guard_queue_call(void *self, mfsdp_queue *q, mfsdp_task task, void *argument) {
  Open open;
  return guard->inner->queue_call(self, q, task, argument);
}
mfsdp_status guard_copy(void *self, mfsdp_queue *q, void *dst, mfsdp_space dst_space,
                        const void *src, mfsdp_space src_space, std::size_t nbytes) {
  Open open;
  guard->end_of_copy(dst, dst_space, nbytes, "dst");
  guard->end_of_copy(src, src_space, nbytes, "src");
  guard->copies_in += src_space != MFSDP_SPACE_DEVICE && dst_space == MFSDP_SPACE_DEVICE;
  guard->copies_out += src_space == MFSDP_SPACE_DEVICE && dst_space != MFSDP_SPACE_DEVICE;
  return guard->inner->copy(self, q, dst, dst_space, src, src_space, nbytes);
}
mfsdp_status guard_fill_bytes(void *self, mfsdp_queue *q, void *dst, int32_t byte,
                              std::size_t nbytes) {
  Open open;
  if (nbytes > 0) guard->device(dst, "fill_bytes: dst");
  return guard->inner->fill_bytes(self, q, dst, byte, nbytes);
}
mfsdp_status guard_cast(void *self, mfsdp_queue *q, void *dst, mfsdp_dtype dst_dtype,
                        const void *src, mfsdp_dtype src_dtype, int64_t count) {
  Open open;
  guard->device(count > 0 ? dst : nullptr, "cast: dst");
  guard->device(count > 0 ? src : nullptr, "cast: src");
  return guard->inner->cast(self, q, dst, dst_dtype, src, src_dtype, count);
}
mfsdp_status guard_sum_terms(void *self, mfsdp_queue *q, float *acc, int32_t first,
                             const void *const *terms, mfsdp_dtype dtype, int32_t term_count,
                             int64_t count) {
  Open open;
  guard->device(count > 0 ? acc : nullptr, "sum_terms: acc");
  for (int32_t i = 0; i < term_count && count > 0; ++i)
    guard->device(terms[i], "sum_terms: a term");
  return guard->inner->sum_terms(self, q, acc, first, terms, dtype, term_count, count);
}
mfsdp_status guard_sumsq(void *self, mfsdp_queue *q, double *slots, const float *acc,
                         const mfsdp_block *blocks, int32_t block_count) {
  Open open;
  if (block_count > 0) {
    guard->device(slots, "sumsq: slots");
    guard->device(acc, "sumsq: acc");
    guard->device(blocks, "sumsq: blocks");
  }
  return guard->inner->sumsq(self, q, slots, acc, blocks, block_count);
}
mfsdp_status guard_verdict_fold(void *self, mfsdp_queue *q, const mfsdp_verdict_args *a) {
  Open open;
  guard->device(a->messages, "verdict: messages");
  guard->device(a->rank_word, "verdict: rank_word");
  guard->device(a->block_word, "verdict: block_word");
  guard->device(a->rates, "verdict: rates");
  guard->device(a->present, "verdict: present");
  guard->device(a->scalars, "verdict: scalars");
  guard->must_be(a->record, MFSDP_SPACE_PINNED, "verdict: record");
  return guard->inner->verdict_fold(self, q, a);
}
mfsdp_status guard_gemm(void *self, mfsdp_queue *q, const mfsdp_gemm_args *a) {
  Open open;
  for (const mfsdp_mat *m : {&a->a, &a->b, &a->c, &a->d})
    guard->device(m->data, "gemm: a matrix");
  return guard->inner->gemm(self, q, a);
}
mfsdp_status guard_normalize(void *self, mfsdp_queue *q, const mfsdp_normalize_args *a) {
  Open open;
  guard->device(a->dst, "normalize: dst");
  guard->device(a->src, "normalize: src");
  guard->device(a->scratch, "normalize: scratch");
  return guard->inner->normalize(self, q, a);
}
/* The table of items is written at set-up, which waits for it: reading it here is no race. */
mfsdp_status guard_fused(void *self, mfsdp_queue *q, const mfsdp_fused_args *a) {
  Open open;
  guard->device(a->items, "fused: items");
  guard->device(a->scalars, "fused: scalars");
  guard->device(a->present, "fused: present");
  for (int32_t i = 0; i < a->item_count; ++i) {
    guard->device(a->items[i].master, "fused: master");
    guard->device(a->items[i].param, "fused: param");
    guard->device(a->items[i].grad, "fused: grad");
    guard->device(a->items[i].direction, "fused: direction");
    for (const float *state : a->items[i].state)
      guard->device(state, "fused: a state");
  }
  return guard->inner->fused(self, q, a);
}

thread_local const mfsdp_transport_ops *guard_transport = nullptr;

mfsdp_status guard_submit(void *self, mfsdp_context *context, mfsdp_queue *q,
                          const mfsdp_batch *batch) {
  Open open;
  for (int32_t i = 0; i < batch->xfer_count; ++i)
    if (batch->xfers[i].nbytes > 0)
      guard->device(batch->xfers[i].is_send ? batch->xfers[i].src : batch->xfers[i].dst,
                    "a transfer");
  return guard_transport->submit(self, context, q, batch);
}

/* Everything one rank needs to train behind a guard. */
class Guarded {
public:
  Guarded(const Rank &rank, bool fenced)
      : ops_(*rank.backend->ops), transport_ops_(*rank.transport.ops), backend_(*rank.backend) {
    guard_.inner = rank.backend->ops;
    guard_.fenced = fenced;
    guard = &guard_;
    guard_transport = rank.transport.ops;
    ops_.mem_alloc = guard_mem_alloc;
    ops_.mem_free = guard_mem_free;
    ops_.queue_call = guard_queue_call;
    ops_.copy = guard_copy;
    ops_.fill_bytes = guard_fill_bytes;
    ops_.cast = guard_cast;
    ops_.sum_terms = guard_sum_terms;
    ops_.sumsq = guard_sumsq;
    ops_.verdict_fold = guard_verdict_fold;
    ops_.gemm = guard_gemm;
    ops_.normalize = guard_normalize;
    ops_.fused = guard_fused;
    transport_ops_.submit = guard_submit;
    backend_.ops = &ops_;
  }
  ~Guarded() {
    guard = nullptr;
    guard_transport = nullptr;
  }
  Guarded(const Guarded &) = delete;
  Guarded &operator=(const Guarded &) = delete;
  void attach(Trainer *t) {
    t->backend = &backend_;
    t->transport.ops = &transport_ops_;
    t->transport.backend = &backend_;
  }
  Guard *operator->() { return &guard_; }
  const mfsdp_backend *backend() const { return &backend_; }

private:
  Guard guard_;
  mfsdp_backend_ops ops_;
  mfsdp_transport_ops transport_ops_;
  mfsdp_backend backend_;
};

TEST(Guard, SeesTheWrongSpace) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
    Guarded guarded(rank, true);
    const mfsdp_backend *b = guarded.backend();
    mfsdp_buffer device, pinned;
    MFSDP_TRY(mfsdp_buffer_alloc(&rank.context, b, 1000, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STATE,
                                 &device));
    MFSDP_TRY(mfsdp_buffer_alloc(&rank.context, b, 1000, MFSDP_SPACE_PINNED, MFSDP_MEMORY_STATE,
                                 &pinned));
    MFSDP_TRY(b->ops->fill_bytes(b->self, rank.queue, device.data, 1, 1000));
    MFSDP_TRY(b->ops->copy(b->self, rank.queue, pinned.data, MFSDP_SPACE_PINNED, device.data,
                           MFSDP_SPACE_DEVICE, 1000));
    require(guarded->complaints.empty() && static_cast<unsigned char *>(pinned.data)[999] == 1,
            "what is right");
    MFSDP_TRY(b->ops->fill_bytes(b->self, rank.queue, pinned.data, 1, 1000));
    require(guarded->complaints == "fill_bytes: dst is in space 2\n", guarded->complaints);
    guarded->complaints.clear();
    MFSDP_TRY(b->ops->copy(b->self, rank.queue, device.data, MFSDP_SPACE_DEVICE, pinned.data,
                           MFSDP_SPACE_HOST, 1000));
    require(guarded->complaints == "copy: src is called space 3, lies in 2\n", guarded->complaints);
    mfsdp_buffer_free(&rank.context, b, &pinned);
    mfsdp_buffer_free(&rank.context, b, &device);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(GuardDeathTest, FencesDeviceMemoryFromTheHost) {
#if MFSDP_TEST_SANITIZER
  GTEST_SKIP() << "sanitizers take the signal";
#endif
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const Job job = test::small_job();
  EXPECT_DEATH((void)test::run_ranks(test::ranks_of(job, 1),
                                     [&](Rank &rank) {
                                       Guarded guarded(rank, true);
                                       mfsdp_buffer device;
                                       MFSDP_TRY(mfsdp_buffer_alloc(
                                           &rank.context, guarded.backend(), 1000,
                                           MFSDP_SPACE_DEVICE, MFSDP_MEMORY_STATE, &device));
                                       static_cast<volatile unsigned char *>(device.data)[0] = 1;
                                       return MFSDP_OK;
                                     }),
               "");
}

/* ---- offload ---- */

/* Trains behind the guard and compares with the oracle after every step. */
std::string train(const Job &job, mfsdp_space space, int32_t world, int32_t micro_batches,
                  bool fenced, const test::Expected &expected) {
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Guarded guarded(rank, fenced);
    Trainer t(&rank, &job, micro_batches);
    mfsdp_memory predicted;
    Wanted want;
    int32_t count = 0;
    guarded.attach(&t);
    MFSDP_TRY(predict_and_make(job, rank, &t, &predicted, &want));
    /* Masters and states live there; PINNED also has the step's header and record. */
    const std::size_t there = guarded->held(space),
                      expected_there = want.master_nbytes + predicted.state_nbytes;
    if (space == MFSDP_SPACE_HOST) require(there == expected_there, "held in HOST");
    if (space == MFSDP_SPACE_PINNED)
      require(there >= expected_there && there < expected_there + 4096, "held in PINNED");
    if (space == MFSDP_SPACE_DEVICE) require(guarded->held(MFSDP_SPACE_HOST) == 0, "held in HOST");
    const mfsdp_optimizer_state *states =
        mfsdp_optimizer_states(mfsdp_runtime_optimizer(t.runtime), &count);
    for (int32_t i = 0; i < count; ++i) {
      require(states[i].space == space, "the table names another space");
      require(guarded->space_of(states[i].data) == space, "a state lies in another space");
    }
    MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    for (int64_t s = 0; s < expected.count(); ++s) {
      MFSDP_TRY(t.step(s));
      for (int32_t i = 0; i < job.model.count(); ++i) {
        std::vector<float> full(static_cast<std::size_t>(job.model.at(i).numel()));
        MFSDP_TRY(mfsdp_param_export(t.runtime, i, -1, full.data()));
      }
      Open open; /* compare itself reads states, wherever they are */
      t.compare(expected, s);
    }
    require(guarded->complaints.empty(), guarded->complaints);
    require(guarded->checks > 100, "the guard saw nothing");
    const mfsdp_status status = t.destroy();
    require(guarded->complaints.empty() && guarded->blocks.empty(), "after destroy");
    return status;
  });
  return result.ok() ? ""
                     : "space " + std::to_string(space) + ", world " + std::to_string(world) +
                           ": " + result.text();
}

const mfsdp_space kSpaces[] = {MFSDP_SPACE_DEVICE, MFSDP_SPACE_PINNED, MFSDP_SPACE_HOST};

TEST(Offload, EqualsTheOracleInEverySpace) {
  Job jobs[] = {test::mixed_job(), bf16_job(), mixed_dtypes_job()};
  for (Job &job : jobs) {
    if (MFSDP_TEST_TSAN && &job != &jobs[1]) continue; /* they differ in dtypes */
    job.script.sample = [](int64_t step, int64_t block,
                           int32_t use) { /* a skip, and missing ones */
                                          return step == 1 && block == 1 && use == 0
                                                     ? ref::Sample::kInf
                                                 : step == 2 && use == 3 ? ref::Sample::kAbsent
                                                                         : ref::Sample::kPresent;
    };
    const test::Expected expected(job, 4, 3);
    for (const mfsdp_space space : kSpaces)
      for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
        job.queue_kind = kind;
        job.tune = [space](mfsdp_runtime_desc *d) {
          d->state_space = space;
          d->prefetch_depth = 1;
          d->reduce_depth = 1;
        };
        EXPECT_EQ(train(job, space, 4, 1, false, expected), "");
        EXPECT_EQ(train(job, space, 2, 2, false, expected), "");
      }
  }
}

/* On one rank, with inline queues and a trainer that computes on a queue, nothing touches DEVICE
 * memory outside operations. */
TEST(Offload, TheHostNeverTouchesDeviceMemory) {
  Job jobs[] = {test::mixed_job(), bf16_job(), mixed_dtypes_job()};
  for (Job &job : jobs) {
    job.on_queue = true;
    job.debug_poison = 1;
    const test::Expected expected(job, 2, 2);
    for (const mfsdp_space space : kSpaces) {
      job.tune = [space](mfsdp_runtime_desc *d) { d->state_space = space; };
      EXPECT_EQ(train(job, space, 1, 2, true, expected), "");
    }
  }
}

/* The device sees one tensor's master and states at a time: that of the largest, and no more. */
TEST(Offload, StagingIsBoundedByTheLargestTensor) {
  Job job;
  for (int32_t i = 0; i < 6; ++i) {
    job.model.tensors.push_back(ref::matrix("m" + std::to_string(i), i, 32, 16 + 16 * i));
    job.model.tensors.push_back(ref::elementwise("e" + std::to_string(i), i, {100}));
  }
  std::size_t device[2] = {0, 0}, staging[2] = {0, 0}, state = 0;
  for (const int host : {0, 1}) {
    job.tune = [host](mfsdp_runtime_desc *d) {
      d->state_space = host ? MFSDP_SPACE_HOST : MFSDP_SPACE_DEVICE;
    };
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 1), [&](Rank &rank) {
      Guarded guarded(rank, false);
      Trainer t(&rank, &job, 1);
      guarded.attach(&t);
      MFSDP_TRY(t.create());
      device[host] = guarded->held(MFSDP_SPACE_DEVICE);
      staging[host] = rank.context.current_nbytes[MFSDP_MEMORY_STAGING];
      state = rank.context.current_nbytes[MFSDP_MEMORY_STATE];
      const uint64_t in = guarded->copies_in, out = guarded->copies_out;
      MFSDP_TRY(t.step(0));
      MFSDP_TRY(rank.finish());
      /* 6 x (master, momentum) and 6 x (master, exp_avg, exp_avg_sq) each way; the message's
       * header. */
      require(guarded->copies_in - in == (host ? 30u : 0u) + 1u, "copies to the device");
      require(guarded->copies_out - out == (host ? 30u : 0u), "copies from the device");
      return t.destroy();
    });
    ASSERT_TRUE(result.ok()) << result.text();
  }
  const std::size_t largest = 32 * 96 * 4;
  EXPECT_EQ(staging[1] - staging[0], 2 * largest); /* master and momentum */
  /* Masters were exchanged for copies of the same size, states left, the staging area came. */
  EXPECT_EQ(device[0] - device[1], state - 2 * largest);
}

} // namespace
