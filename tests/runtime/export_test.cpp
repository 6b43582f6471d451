/* SPDX-License-Identifier: MIT */
/*
 * Export of whole parameters: every kind of tensor to one rank and to all, through slots that are
 * too small or in use, at any time, with the bytes worked out here and without allocating.
 * MFSDP_TEST_WRAP_MALLOC
 */
#include "runtime_rig.h"

#include "../support/malloc_count.h"

namespace {

using test::Job;
using test::must_fail;
using test::Rank;
using test::require;
using test::Trainer;

const mfsdp_host_queue_kind kKinds[] = {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER};

/* All slots are as large as "embed" in bf16 (12000, padded to 12032 elements): half of it in fp32.
 * "big" and "ice" do not fit either. */
Job bf16_job() {
  Job job;
  job.model.tensors.push_back(ref::elementwise("embed", 0, {300, 40}));
  job.model.tensors.push_back(ref::matrix("big", 1, 90, 80)); /* 7200 > 6016 */
  job.model.tensors.push_back(ref::elementwise("bias", 1, {10}));
  job.model.tensors.push_back(ref::frozen("ice", 2, {10000}));
  job.model.tensors.push_back(ref::split_heads("qkv", 3, 36, 20, 3));
  job.model.tensors.push_back(ref::matrix("nil", 3, 0, 8));
  job.model.tensors.push_back(ref::tied("head", 3, job.model.tensors[0]));
  test::set_dtypes(&job.model, -1, MFSDP_BF16, MFSDP_F32, MFSDP_BF16);
  return job;
}

std::size_t numel(const Job &job, int32_t i) {
  return static_cast<std::size_t>(job.model.at(i).numel());
}

/* Any bits at all: NaNs with payloads, infinities, subnormals, both zeros. */
void fill_bits(void *user, int32_t param, int64_t first, int64_t count, float *dst) {
  (void)user;
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t key =
        ref::mix(static_cast<uint64_t>(param) * 1000003u + static_cast<uint64_t>(first + i));
    uint32_t bits = static_cast<uint32_t>(key);
    if (key >> 60 == 0) bits &= 0x807fffffu; /* subnormals and zeros */
    if (key >> 60 == 1) bits |= 0x7f800000u; /* NaNs and infinities */
    std::memcpy(dst + i, &bits, sizeof(bits));
  }
}

/* `before` and `after` the tensor nothing is written. */
class Destination {
public:
  explicit Destination(std::size_t count) : count_(count), data_(count + 64, kCanary) {}
  float *data() { return data_.data() + 32; }
  bool untouched() const { return intact(0, data_.size()); }
  bool margins_intact() const { return intact(0, 32) && intact(32 + count_, data_.size()); }

private:
  static constexpr float kCanary = -12345.678f;
  bool intact(std::size_t first, std::size_t end) const {
    for (std::size_t i = first; i < end; ++i)
      if (data_[i] != kCanary) return false;
    return true;
  }
  std::size_t count_;
  std::vector<float> data_;
};

constexpr float Destination::kCanary;

/* Exports tensor `i` to `root` and compares the bits where they arrive. */
mfsdp_status check_export(Rank &rank, Trainer &t, const Job &job, int32_t i, int32_t root,
                          const std::vector<float> &want) {
  Destination dst(numel(job, i));
  const bool receives = root < 0 || root == rank.rank;
  MFSDP_TRY(mfsdp_param_export(t.runtime, i, root, receives ? dst.data() : nullptr));
  require(dst.margins_intact(), "written outside the tensor");
  if (!receives) return MFSDP_OK;
  const std::string wrong =
      test::difference(job.model.at(i).name, dst.data(), want.data(), job.model.at(i).numel());
  require(wrong.empty(), wrong);
  return MFSDP_OK;
}

mfsdp_status check_all(Rank &rank, Trainer &t, const Job &job, int32_t root,
                       const std::vector<std::vector<float>> &want) {
  for (int32_t i = 0; i < job.model.count(); ++i)
    MFSDP_TRY(check_export(rank, t, job, i, root, want[static_cast<std::size_t>(i)]));
  return MFSDP_OK;
}

std::vector<std::vector<float>> initial(const Job &job) {
  std::vector<std::vector<float>> out;
  for (int32_t i = 0; i < job.model.count(); ++i) {
    out.emplace_back(numel(job, i));
    ref::synthetic_init(job.model.seed, job.model.owner(i), 0, job.model.at(i).numel(),
                        out.back().data());
    if (job.model.at(i).role == ref::Role::kFrozen)
      ref::round_all(job.model.at(i).compute, &out.back());
  }
  return out;
}

std::vector<Job> jobs() {
  std::vector<Job> out(5, test::mixed_job());
  out[1] = bf16_job();
  out[2].tune = [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_HOST; };
  out[3] = bf16_job();
  out[3].tune = [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_PINNED; };
  test::set_dtypes(&out[4].model, -1, MFSDP_F16, MFSDP_F16, MFSDP_F16);
  return out;
}

/* ---- values ---- */

TEST(Export, EveryTensorToEveryRootAndToAll) {
  for (Job &job : jobs())
    for (const mfsdp_host_queue_kind kind : kKinds)
      for (const int32_t world : {1, 2, 4, 7}) {
        if (MFSDP_TEST_TSAN && world != 4) continue;
        job.queue_kind = kind;
        const std::vector<std::vector<float>> want = initial(job);
        const test::Expected expected(job, world, 1);
        const test::RanksResult result =
            test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
              Trainer t(&rank, &job, 1);
              MFSDP_TRY(t.create());
              for (int32_t root = -1; root < world; ++root)
                MFSDP_TRY(check_all(rank, t, job, root, want));
              MFSDP_TRY(t.step(0));
              for (int32_t root = world - 1; root >= -1; root -= 3)
                MFSDP_TRY(check_all(rank, t, job, root, expected.after(0).weights));
              return t.destroy();
            });
        EXPECT_TRUE(result.ok()) << "world " << world << ": " << result.text();
      }
}

/* Masters are moved, never computed with: any bits come out as they went in. */
TEST(Export, KeepsEveryBit) {
  for (Job job : jobs()) {
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.make_plan());
      MFSDP_TRY(t.make_runtime());
      MFSDP_TRY(mfsdp_runtime_init(t.runtime, fill_bits, nullptr));
      for (int32_t i = 0; i < job.model.count(); ++i) {
        if (job.model.at(i).role == ref::Role::kFrozen) continue; /* may be rounded */
        std::vector<float> want(numel(job, i));
        fill_bits(nullptr, job.model.owner(i), 0, job.model.at(i).numel(), want.data());
        MFSDP_TRY(check_export(rank, t, job, i, i % 4 - 1, want));
      }
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(Export, AnEmptyTensorNeedsNoDestination) {
  const Job job = bf16_job();
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    for (const int32_t root : {-1, 0, 1})
      MFSDP_TRY(mfsdp_param_export(t.runtime, 5, root, nullptr));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- bytes ---- */

/* What this rank must send of tensor `i`: its pieces, cut at the slot's end, to each receiver. */
mfsdp_traffic_count analytic(const Rank &rank, const Trainer &t, const Job &job, int32_t i,
                             int32_t root, int64_t slot_floats) {
  mfsdp_traffic_count out;
  int32_t count = 0;
  const int32_t owner = job.model.owner(i);
  const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, -1, &count);
  std::memset(&out, 0, sizeof(out));
  for (int32_t p = 0; p < count; ++p) {
    if (pieces[p].param != owner || pieces[p].owner != rank.rank || root == rank.rank) continue;
    const uint64_t receivers = root < 0 ? static_cast<uint64_t>(rank.world - 1) : 1;
    const int64_t last = pieces[p].first + pieces[p].count - 1;
    const uint64_t parts =
        static_cast<uint64_t>(last / slot_floats - pieces[p].first / slot_floats + 1);
    out.payload_nbytes += receivers * static_cast<uint64_t>(pieces[p].count) * sizeof(float);
    out.transfer_count += receivers * parts;
  }
  out.wire_nbytes = out.payload_nbytes;
  return out;
}

void expect_bytes(const Job &job, int32_t world, int64_t slot_floats, bool chunked) {
  uint64_t transfers = 0, pieces = 0, payload = 0, elements = 0;
  std::mutex mutex;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    for (int32_t root = -1; root < world; ++root)
      for (int32_t i = 0; i < job.model.count(); ++i) {
        std::vector<float> dst(numel(job, i));
        const mfsdp_counters before = rank.context.counters;
        mfsdp_counters want = before;
        const mfsdp_traffic_count add = analytic(rank, t, job, i, root, slot_floats);
        want.sent[MFSDP_TRAFFIC_EXPORT].payload_nbytes += add.payload_nbytes;
        want.sent[MFSDP_TRAFFIC_EXPORT].wire_nbytes += add.wire_nbytes;
        want.sent[MFSDP_TRAFFIC_EXPORT].transfer_count += add.transfer_count;
        MFSDP_TRY(mfsdp_param_export(t.runtime, i, root, dst.data()));
        require(std::memcmp(&rank.context.counters, &want, sizeof(want)) == 0,
                "the counters after " + job.model.at(i).name + " to " + std::to_string(root));
        if (root >= 0) continue;
        const mfsdp_traffic_count whole = analytic(rank, t, job, i, root, INT64_MAX);
        std::lock_guard<std::mutex> lock(mutex);
        transfers += add.transfer_count;
        pieces += whole.transfer_count;
        payload += add.payload_nbytes;
        elements += rank.rank == 0 ? numel(job, i) : 0;
      }
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(payload, elements * sizeof(float) * static_cast<uint64_t>(world - 1));
  EXPECT_EQ(transfers > pieces, chunked && world > 1);
}

TEST(Export, CountsTheAnalyticBytes) {
  for (const int32_t world : {1, 2, 4, 8}) {
    /* The largest unit of the mixed model, 1 or 4, is more than twice its largest tensor or holds
     * it. */
    expect_bytes(test::mixed_job(), world, INT64_MAX, false);
    expect_bytes(bf16_job(), world, 12032 / 2, true);
    Job offloaded = bf16_job();
    offloaded.tune = [](mfsdp_runtime_desc *d) { d->state_space = MFSDP_SPACE_HOST; };
    expect_bytes(offloaded, world, 12032 / 2, true);
  }
}

/* ---- slots in use ---- */

/* Units that were gathered ahead give up their slots, the acquired one keeps its address and
 * values; what was dropped is gathered again when it is used. */
TEST(Export, TakesSlotsOfUnitsGatheredAhead) {
  for (const mfsdp_host_queue_kind kind : kKinds) {
    Job job = bf16_job();
    job.queue_kind = kind;
    job.debug_poison = 1;
    job.tune = [](mfsdp_runtime_desc *d) { d->prefetch_depth = 2; };
    job.model.tensors.pop_back(); /* "head": without it there are 3 slots */
    const std::vector<std::vector<float>> want = initial(job);
    const test::RanksResult result = test::run_ranks(test::ranks_of(job, 3), [&](Rank &rank) {
      Trainer t(&rank, &job, 1);
      MFSDP_TRY(t.create());
      const mfsdp_traffic_count *sent = &rank.context.counters.sent[MFSDP_TRAFFIC_MATERIALIZE];
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 0, MFSDP_USE_FORWARD)); /* and 1 and 2 */
      const void *address = mfsdp_unit_param(t.runtime, 0);
      const std::vector<uint16_t> values(static_cast<const uint16_t *>(address),
                                         static_cast<const uint16_t *>(address) + 12000);
      const uint64_t before = sent->payload_nbytes;
      MFSDP_TRY(check_all(rank, t, job, -1, want));
      require(sent->payload_nbytes == before, "an export gathers nothing");
      require(mfsdp_unit_param(t.runtime, 0) == address, "the acquired unit moved");
      require(std::memcmp(values.data(), address, values.size() * 2) == 0, "or was overwritten");
      MFSDP_TRY(mfsdp_unit_release(t.runtime, 0));
      for (int32_t u = 1; u < 4; ++u) {
        MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_FORWARD));
        for (int32_t i : job.model.unit_tensors(u))
          for (std::size_t k = 0; k < numel(job, i); ++k)
            require(mfsdp_element_get(mfsdp_unit_param(t.runtime, i), MFSDP_BF16,
                                      static_cast<int64_t>(k)) ==
                        static_cast<double>(
                            ref::round_to(MFSDP_BF16, want[static_cast<std::size_t>(i)][k])),
                    "a unit gathered again is wrong");
        MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
      }
      return t.destroy();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Everything is acquired: a status that says so, and nothing is sent. */
TEST(Export, WithoutAFreeSlot) {
  Job job = bf16_job();
  job.active_units = 4;
  const std::vector<std::vector<float>> want = initial(job);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    std::vector<float> dst(12000);
    MFSDP_TRY(t.create());
    for (int32_t u = 0; u < 4; ++u)
      MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_EVALUATE));
    must_fail(rank, mfsdp_param_export(t.runtime, 1, -1, dst.data()), MFSDP_E_STATE,
              "export: all 4 parameter slots are held; release a unit first");
    require(rank.context.counters.sent[MFSDP_TRAFFIC_EXPORT].wire_nbytes == 0,
            "something was sent");
    MFSDP_TRY(mfsdp_unit_release(t.runtime, 2));
    MFSDP_TRY(check_all(rank, t, job, 1, want));
    for (const int32_t u : {0, 1, 3})
      MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
    return t.destroy();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- times ---- */

/* Between forward and backward with kept units, between micro-batches, with gradients open, and
 * right after a step's end, when the update may still run: the masters as they are then, and the
 * training goes on as if nothing had been exported. */
TEST(Export, AtAnyTime) {
  for (const bool keep : {false, true})
    for (const mfsdp_host_queue_kind kind : kKinds)
      for (const bool on_queue : {false, true}) {
        Job job = bf16_job();
        job.queue_kind = kind;
        job.on_queue = on_queue;
        job.debug_poison = job.debug_check = 1;
        job.active_units = 2;
        job.tune = [keep](mfsdp_runtime_desc *d) {
          d->reshard_after_forward = !keep;
          d->prefetch_depth = 1;
          d->reduce_depth = 1;
        };
        const std::vector<std::vector<float>> start = initial(job);
        const test::Expected expected(job, 4, 3);
        const test::RanksResult result = test::run_ranks(test::ranks_of(job, 2), [&](Rank &rank) {
          Trainer t(&rank, &job, 2);
          MFSDP_TRY(t.create());
          for (int64_t s = 0; s < 3; ++s) {
            const auto &now = s == 0 ? start : expected.after(s - 1).weights;
            MFSDP_TRY(t.begin(s));
            MFSDP_TRY(check_all(rank, t, job, static_cast<int32_t>(s) - 1, now));
            for (int32_t u = 0; u < 4; ++u) { /* a forward pass, kept or not */
              MFSDP_TRY(mfsdp_unit_acquire(t.runtime, u, MFSDP_USE_FORWARD));
              MFSDP_TRY(check_export(rank, t, job, u, -1, now[static_cast<std::size_t>(u)]));
              MFSDP_TRY(mfsdp_unit_release(t.runtime, u));
            }
            MFSDP_TRY(check_all(rank, t, job, 1, now));
            MFSDP_TRY(t.micro_batch(s, 0));
            MFSDP_TRY(mfsdp_unit_grads(t.runtime, 1)); /* open: it is reduced with the next */
            MFSDP_TRY(check_all(rank, t, job, -1, now));
            /* Unit 1 is open already, so its part of the second micro-batch comes first, by hand.
             */
            MFSDP_TRY(mfsdp_unit_acquire(t.runtime, 1, MFSDP_USE_BACKWARD));
            MFSDP_TRY(rank.finish());
            for (int32_t i : job.model.unit_tensors(1))
              MFSDP_TRY(t.compute(s, 1, 2 + rank.rank, i));
            MFSDP_TRY(check_export(rank, t, job, 3, 0, now[3]));
            MFSDP_TRY(mfsdp_unit_reduce(t.runtime, 1));
            MFSDP_TRY(mfsdp_unit_release(t.runtime, 1));
            MFSDP_TRY(mfsdp_step_value(t.runtime,
                                       ref::synthetic_value(job.model.seed, s, 2 + rank.rank)));
            for (const int32_t u : {3, 2, 0})
              MFSDP_TRY(t.backward(s, 1, 2 + rank.rank, u));
            MFSDP_TRY(mfsdp_step_end(t.runtime, 0));
            MFSDP_TRY(check_all(rank, t, job, 0, expected.after(s).weights));
            t.verdict = mfsdp_verdict_default();
            MFSDP_TRY(mfsdp_step_verdict(t.runtime, &t.verdict));
            t.compare(expected, s);
          }
          return t.destroy();
        });
        EXPECT_TRUE(result.ok()) << "keep " << keep << ", on a queue " << on_queue << ": "
                                 << result.text();
      }
}

/* ---- bounded memory ---- */

TEST(Export, AllocatesNothing) {
  for (Job &job : jobs())
    for (const mfsdp_host_queue_kind kind : kKinds) {
      uint64_t count = 0;
      job.queue_kind = kind;
      const test::RanksResult result = test::run_ranks(test::ranks_of(job, 4), [&](Rank &rank) {
        Trainer t(&rank, &job, 1);
        std::vector<float> dst(12000);
        MFSDP_TRY(t.create());
        const std::size_t total = rank.context.total_peak_nbytes;
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) test::malloc_count_begin();
        rank.memory->fail_from(0);
        MFSDP_TRY(rank.barrier());
        for (int32_t i = 0; i < job.model.count(); ++i)
          for (int32_t root = -1; root < 4; ++root)
            MFSDP_TRY(mfsdp_param_export(t.runtime, i, root, dst.data()));
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) count = test::malloc_count_end();
        require(rank.memory->alloc_count() == 0, "the context's allocator was asked");
        require(rank.context.total_peak_nbytes == total, "the peak rose");
        rank.memory->fail_at(-1);
        MFSDP_TRY(rank.barrier());
        return t.destroy();
      });
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_EQ(count, 0u);
    }
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
}

} // namespace
