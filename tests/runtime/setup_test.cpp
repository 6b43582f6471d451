/* SPDX-License-Identifier: MIT */
/*
 * Set-up under failing allocations, and no allocation after the first complete step.
 * MFSDP_TEST_WRAP_MALLOC
 */
#include "runtime_rig.h"

#include "../support/malloc_count.h"

namespace {

using test::Job;
using test::Rank;
using test::require;
using test::Trainer;

enum class Who { kOneRank, kAllRanks, kOneRankForGood };

/* Fails allocation n of set-up. Returns 0 when n was beyond the last one. */
int fail_allocation(const Job &job, const test::Expected &expected, Who who, int64_t n) {
  bool failed[2] = {false, false}, init_failed[2] = {false, false};
  test::RanksOptions options = test::ranks_of(job, 2);
  options.world.deadline_us = 20 * 1000000; /* nobody may come near it */
  const int64_t start_us = mfsdp_clock_us();
  const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    Trainer t(&rank, &job, 1);
    if (who == Who::kOneRankForGood && me == 1) rank.memory->fail_from(n);
    if (who == Who::kAllRanks || (who == Who::kOneRank && me == 1)) rank.memory->fail_at(n);
    mfsdp_status status = t.create();
    failed[me] = rank.memory->failed();
    rank.memory->fail_at(-1);
    require((status == MFSDP_E_MEMORY) == failed[me] || !failed[me], "E_MEMORY for a refusal");
    if (status != MFSDP_OK && t.runtime == nullptr) return status;
    if (status != MFSDP_OK) { /* init only: nothing is lost, and it may be repeated */
      init_failed[me] = true;
      require(status == MFSDP_E_MEMORY, "init");
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    }
    MFSDP_TRY(t.step(0));
    t.compare(expected, 0);
    return t.destroy();
  });
  EXPECT_TRUE(result.clean()) << "allocation " << n << ": " << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, 10 * 1000000) << "allocation " << n;
  if (!failed[0] && !failed[1]) {
    EXPECT_TRUE(result.ok()) << result.text();
    return 0;
  }
  EXPECT_EQ(failed[0], who == Who::kAllRanks);
  if (init_failed[0] || init_failed[1]) {
    EXPECT_TRUE(result.ok()) << "allocation " << n << ": " << result.text();
    return 1;
  }
  for (std::size_t r = 0; r < 2; ++r) { /* the others know why, too */
    EXPECT_NE(result[r].status, MFSDP_OK) << "allocation " << n << " rank " << r;
    EXPECT_NE(std::string(result[r].error.message).find("the allocator refused"), std::string::npos)
        << "allocation " << n << " rank " << r << ": " << result[r].error.message;
  }
  return 1;
}

void fail_every_allocation(mfsdp_host_queue_kind kind, Who who) {
  Job job = test::small_job();
  job.queue_kind = kind;
  job.model.tensors.push_back(ref::tied("head", 2, job.model.tensors[0]));
  if (kind == MFSDP_HOST_QUEUE_WORKER) { /* tables and buffers of their own */
    test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
    test::set_dtypes(&job.model, 1, MFSDP_F16, MFSDP_F16, MFSDP_F16);
    job.tune = [](mfsdp_runtime_desc *desc) {
      desc->prefetch_depth = 2;
      desc->reduce_depth = 1;
      desc->state_space = MFSDP_SPACE_HOST;
    };
  }
  const test::Expected expected(job, 2, 1);
#if MFSDP_TEST_SANITIZER
  const int64_t stride = 3;
#else
  const int64_t stride = 1;
#endif
  int64_t n = 0;
  while (fail_allocation(job, expected, who, n) != 0 && !::testing::Test::HasFailure())
    n += stride;
  EXPECT_GT(n, 50); /* or the faults went somewhere else */
  EXPECT_LT(n, 1000);
}

TEST(SetUp, EveryAllocationOfOneRankFails) {
  fail_every_allocation(MFSDP_HOST_QUEUE_INLINE, Who::kOneRank);
  fail_every_allocation(MFSDP_HOST_QUEUE_WORKER, Who::kOneRank);
}

TEST(SetUp, EveryAllocationOfAllRanksFails) {
  fail_every_allocation(MFSDP_HOST_QUEUE_INLINE, Who::kAllRanks);
  fail_every_allocation(MFSDP_HOST_QUEUE_WORKER, Who::kAllRanks);
}

TEST(SetUp, MemoryOfOneRankRunsOutForGood) {
  fail_every_allocation(MFSDP_HOST_QUEUE_INLINE, Who::kOneRankForGood);
}

/* ---- nothing is allocated after the first complete step ---- */

/* Allocations of all ranks in the steps after the first, an evaluation and an export; with `init`,
 * an init as well, which allocates: the counter's positive control. */
uint64_t allocations_of_steps(const Job &job, bool init) {
  uint64_t count = 0;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
    Trainer t(&rank, &job, 2);
    std::vector<float> dst(12000);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) test::malloc_count_begin();
    rank.memory->fail_at(-1); /* counts from 0 */
    MFSDP_TRY(rank.barrier());
    for (int64_t s = 1; s < 4; ++s)
      MFSDP_TRY(t.step(s, s == 3));
    for (int32_t u = 0; u < job.model.unit_count(); ++u) {
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
      MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
    }
    MFSDP_TRY(mfsdp_param_export(t.runtime, 0, -1, dst.data()));
    if (init)
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) count = test::malloc_count_end();
    require((rank.memory->alloc_count() == 0) == !init, "the context's allocator was asked");
    MFSDP_TRY(rank.barrier());
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  return count;
}

TEST(SteadyState, NothingIsAllocated) {
  for (const mfsdp_host_math *math : test::maths())
    for (const bool on_queue : {false, true})
      for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
        Job job = test::mixed_job();
        job.math = math;
        job.queue_kind = kind;
        job.on_queue = on_queue;
        job.debug_poison = job.debug_check = 1;
        EXPECT_EQ(allocations_of_steps(job, false), 0u) << math->name;
      }
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
}

TEST(SteadyState, TheCounterSeesAllocations) {
  const uint64_t count = allocations_of_steps(test::mixed_job(), true);
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  EXPECT_GE(count, 4u); /* one staging buffer of each rank */
}

/* A rank that has no place for its runtime is told so, the others why; then all may try again. */
TEST(Setup, NoPlaceForTheRuntime) {
  const Job job = test::small_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime([&](mfsdp_runtime_desc *desc, mfsdp_group *, mfsdp_optimizer_desc *,
                                 mfsdp_hyper_group *) {
      mfsdp_runtime **place = rank.rank == 1 ? nullptr : &t.runtime;
      must_fail(rank, mfsdp_runtime_create(&rank.context, desc, place), MFSDP_E_ARGUMENT,
                rank.rank == 1 ? "runtime: out is NULL" : "rank 1 cannot use its description: ");
    }));
    MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    MFSDP_TRY(t.step(0));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- registration of buffers (fault b6: the wrong pointer was passed, which did nothing) ---- */

/* A rank's transport that wants to know its buffers. Every byte that is sent or received must be of
 * a live registration, and no buffer may be freed while it is registered. */
class RegisteringTransport {
public:
  /* Registration number `fail_at` is refused; < 0: none. */
  RegisteringTransport(Rank *rank, int64_t fail_at) : rank_(rank), fail_at_(fail_at) {
    ops_ = *rank->transport.ops;
    ops_.submit = submit;
    ops_.reserve = reserve;
    ops_.poll = poll;
    ops_.poison = poison;
    ops_.buffer_register = add;
    ops_.buffer_deregister = remove;
    ops_.native = nullptr;
    ops_.native_prepare = nullptr;
    table = rank->transport;
    table.ops = &ops_;
    table.self = this;
  }
  mfsdp_transport table;
  std::vector<std::pair<const unsigned char *, std::size_t>> live; /* the last one first to go */
  int64_t added = 0, removed = 0;
  std::string wrong; /* the first thing that was; the calls come through C and cannot throw */

private:
  static RegisteringTransport *of(void *self) { return static_cast<RegisteringTransport *>(self); }
  static const mfsdp_transport &inner(void *self) { return of(self)->rank_->transport; }
  std::size_t booked() const { /* of all buffers; tables do not count */
    std::size_t sum = 0;
    for (int c = MFSDP_MEMORY_SHARD; c <= MFSDP_MEMORY_STAGING; ++c)
      sum += rank_->context.current_nbytes[c];
    return sum;
  }
  void expect(bool condition, const char *what) {
    if (!condition && wrong.empty()) wrong = what;
  }
  void expect_registered(const mfsdp_xfer &x) {
    const unsigned char *at = static_cast<const unsigned char *>(x.is_send ? x.src : x.dst);
    for (const auto &r : live)
      if (at >= r.first && at + x.nbytes <= r.first + r.second) return;
    expect(x.nbytes == 0, "bytes that are not registered are moved");
  }
  static mfsdp_status submit(void *self, mfsdp_context *context, mfsdp_queue *queue,
                             const mfsdp_batch *batch) {
    for (int32_t i = 0; i < batch->xfer_count; ++i)
      of(self)->expect_registered(batch->xfers[i]);
    return inner(self).ops->submit(inner(self).self, context, queue, batch);
  }
  static mfsdp_status reserve(void *self, mfsdp_context *context, int32_t count) {
    return inner(self).ops->reserve(inner(self).self, context, count);
  }
  static mfsdp_status poll(void *self, mfsdp_context *context) {
    return inner(self).ops->poll(inner(self).self, context);
  }
  static void poison(void *self, const mfsdp_error *why) {
    inner(self).ops->poison(inner(self).self, why);
  }
  static mfsdp_status add(void *self, mfsdp_context *context, void *ptr, std::size_t nbytes,
                          void **handle) {
    RegisteringTransport *t = of(self);
    t->expect(ptr != nullptr && nbytes > 0, "nothing is registered");
    if (t->added == t->fail_at_) return MFSDP_FAIL(context, MFSDP_E_BACKEND, "injected: no room");
    t->live.emplace_back(static_cast<const unsigned char *>(ptr), nbytes);
    *handle = reinterpret_cast<void *>(static_cast<std::uintptr_t>(++t->added));
    t->booked_ = t->booked();
    return MFSDP_OK;
  }
  static mfsdp_status remove(void *self, mfsdp_context *, void *handle) {
    RegisteringTransport *t = of(self);
    t->expect(handle == reinterpret_cast<void *>(static_cast<std::uintptr_t>(t->live.size())),
              "a handle that is not the last one");
    t->expect(t->booked() == t->booked_, "a buffer was freed before");
    t->live.pop_back();
    ++t->removed;
    return MFSDP_OK;
  }
  Rank *rank_;
  mfsdp_transport_ops ops_;
  int64_t fail_at_;
  std::size_t booked_ = 0;
};

Job registering_job(bool narrow) {
  Job job = test::small_job();
  if (!narrow) return job;
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  job.tune = [](mfsdp_runtime_desc *desc) { desc->state_space = MFSDP_SPACE_HOST; };
  return job;
}

TEST(Registration, CoversEveryTransferOfSteps) {
  for (int variant = 0; variant < 6; ++variant) {
    Job job = registering_job(variant % 2 == 1);
    if (variant >= 2) job.residency = MFSDP_RESIDENCY_RESIDENT;
    if (variant >= 4) job.placement = MFSDP_PLACEMENT_REPLICATED;
    const test::Expected expected(job, 3, 2);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      RegisteringTransport transport(&rank, -1);
      Trainer t(&rank, &job, 1);
      t.transport = transport.table;
      MFSDP_TRY(t.create());
      for (int64_t s = 0; s < 2; ++s) {
        MFSDP_TRY(t.step(s));
        t.compare(expected, s);
      }
      MFSDP_TRY(t.destroy());
      require(transport.wrong.empty(), transport.wrong);
      require(transport.live.empty() && transport.removed == transport.added,
              "a registration is left");
      require(transport.added >= 5, "few were made");
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(Registration, EachMayBeRefused) {
  const Job job = registering_job(false);
  for (int64_t n = 0;; ++n) {
    bool refused = false;
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
      RegisteringTransport transport(&rank, rank.rank == 1 ? n : -1);
      Trainer t(&rank, &job, 1);
      t.transport = transport.table;
      const mfsdp_status status = t.create();
      require(transport.wrong.empty(), transport.wrong);
      require(transport.live.empty() == (t.runtime == nullptr), "registrations are left");
      if (rank.rank == 1) refused = t.runtime == nullptr;
      if (t.runtime == nullptr) must_fail(rank, status, status, "injected: no room");
      return t.runtime == nullptr ? MFSDP_OK : t.destroy();
    });
    if (!refused) {
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_GE(n, 5);
      break;
    }
    EXPECT_TRUE(result.clean()) << "registration " << n << ": " << result.text();
    ASSERT_LT(n, 20);
  }
}

} // namespace
