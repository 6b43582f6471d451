/* SPDX-License-Identifier: MIT */
/*
 * Bytes by class against numbers worked out here from pieces alone, per rank; no matrix bytes at
 * the optimizer step, with a positive control; memory by class against the same kind of numbers.
 */
#include "runtime_rig.h"

namespace {

using test::Job;
using test::Rank;
using test::Trainer;

struct Bytes {
  uint64_t payload = 0, wire = 0;
  bool operator==(const Bytes &o) const { return payload == o.payload && wire == o.wire; }
  void add(const Bytes &o, uint64_t times) {
    payload += times * o.payload;
    wire += times * o.wire;
  }
};

std::ostream &operator<<(std::ostream &out, const Bytes &b) {
  return out << b.payload << " payload, " << b.wire << " wire";
}

int64_t aligned(int64_t count) {
  return (count + 127) / 128 * 128;
}

/*
 * What one copy of `owner`'s part of a unit costs. Padding travels only inside a stretch: between
 * neighbouring pieces of one owner that lie equally far apart in the unit and in the segment.
 */
Bytes part_of(const mfsdp_plan *plan, int32_t unit, int32_t owner, bool grads) {
  Bytes out;
  int32_t count = 0;
  const mfsdp_piece *pieces = mfsdp_plan_pieces(plan, unit, &count);
  const mfsdp_piece *last = nullptr; /* of the layout at hand, whoever owns it */
  for (int32_t i = 0; i < count; ++i) {
    const mfsdp_piece *p = &pieces[i];
    if (grads && p->grad_unit_offset < 0) continue;
    if (p->owner == owner) {
      out.payload += static_cast<uint64_t>(p->count) * 4;
      out.wire += static_cast<uint64_t>(p->count) * 4;
      if (last != nullptr && last->owner == owner) {
        const int64_t apart = grads ? p->grad_unit_offset - last->grad_unit_offset
                                    : p->unit_offset - last->unit_offset;
        if (apart == aligned(last->count))
          out.wire += static_cast<uint64_t>(apart - last->count) * 4;
      }
    }
    last = p;
  }
  return out;
}

struct Seen {
  Bytes by_class[MFSDP_TRAFFIC_CLASS_COUNT];
};

Bytes seen(const Rank &rank, mfsdp_traffic traffic) {
  Bytes out;
  out.payload = rank.context.counters.sent[traffic].payload_nbytes;
  out.wire = rank.context.counters.sent[traffic].wire_nbytes;
  return out;
}

/* The whole model's numbers: what all ranks together must have sent in one micro-batch. */
struct Totals {
  uint64_t gathered = 0, reduced = 0;
};

Totals totals_of(const ref::Model &model) {
  Totals t;
  for (int32_t u = 0; u < model.unit_count(); ++u) {
    std::vector<int32_t> units(1, u); /* acquiring a unit acquires the owners of its tied tensors */
    for (int32_t i : model.unit_tensors(u)) {
      const int32_t owner_unit = model.at(model.owner(i)).unit;
      if (std::find(units.begin(), units.end(), owner_unit) == units.end())
        units.push_back(owner_unit);
    }
    for (int32_t unit : units)
      for (int32_t i : model.unit_tensors(unit))
        if (model.owner(i) == i) t.gathered += 2 * static_cast<uint64_t>(model.at(i).numel()) * 4;
    for (int32_t i : model.unit_tensors(u))
      if (model.owner(i) == i && model.at(i).role != ref::Role::kFrozen)
        t.reduced += static_cast<uint64_t>(model.at(i).numel()) * 4;
  }
  return t;
}

void expect_traffic(const Job &job, int32_t world, int32_t micro_batches, int64_t steps) {
  const uint64_t others = static_cast<uint64_t>(world - 1);
  std::vector<Seen> sent(static_cast<std::size_t>(world)), want(sent.size());
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, micro_batches);
    const std::size_t me = static_cast<std::size_t>(rank.rank);
    MFSDP_TRY(t.create());
    for (int64_t s = 0; s < steps; ++s)
      MFSDP_TRY(t.step(s));
    for (int c = 0; c < MFSDP_TRAFFIC_CLASS_COUNT; ++c)
      sent[me].by_class[c] = seen(rank, static_cast<mfsdp_traffic>(c));
    const uint64_t rounds = static_cast<uint64_t>(steps * micro_batches);
    for (int32_t u = 0; u < job.model.unit_count(); ++u) {
      uint64_t gathers = 2; /* forward and backward; once more for each unit with a tied tensor */
      for (int32_t v = 0; v < job.model.unit_count(); ++v)
        for (int32_t i : job.model.unit_tensors(v))
          if (v != u && job.model.at(job.model.owner(i)).unit == u) {
            gathers += 2;
            break;
          }
      want[me].by_class[MFSDP_TRAFFIC_MATERIALIZE].add(part_of(t.plan, u, rank.rank, false),
                                                       gathers * rounds * others);
      for (int32_t owner = 0; owner < world; ++owner)
        if (owner != rank.rank)
          want[me].by_class[MFSDP_TRAFFIC_REDUCE].add(part_of(t.plan, u, owner, true), rounds);
    }
    Bytes words; /* flags, values, presence, one double per own canonical block */
    const uint64_t params = static_cast<uint64_t>(job.model.count());
    words.payload = 8 * (1 + static_cast<uint64_t>(job.max_micro_batches) + (params + 63) / 64);
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, -1, &count);
    for (int32_t i = 0; i < count; ++i) {
      const ref::Tensor &tensor = job.model.at(pieces[i].param);
      int64_t block = 4096;
      while (block * 1024 < tensor.numel())
        block *= 2;
      if (pieces[i].owner != rank.rank || tensor.role == ref::Role::kFrozen) continue;
      words.payload += 8 * static_cast<uint64_t>(tensor.role == ref::Role::kMatrix
                                                     ? 1
                                                     : (pieces[i].count + block - 1) / block);
    }
    words.wire = words.payload;
    want[me].by_class[MFSDP_TRAFFIC_SCALAR].add(words, static_cast<uint64_t>(steps) * others);
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  Bytes sum[MFSDP_TRAFFIC_CLASS_COUNT];
  for (std::size_t r = 0; r < sent.size(); ++r)
    for (int c = 0; c < MFSDP_TRAFFIC_CLASS_COUNT; ++c) {
      EXPECT_EQ(sent[r].by_class[c], want[r].by_class[c])
          << mfsdp_traffic_name(static_cast<mfsdp_traffic>(c)) << " of rank " << r << " of "
          << world;
      sum[c].add(sent[r].by_class[c], 1);
    }
  /* The same without a plan: every element goes to, or comes from, world - 1 others. */
  const Totals totals = totals_of(job.model);
  const uint64_t rounds = static_cast<uint64_t>(steps * micro_batches);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_MATERIALIZE].payload, totals.gathered * rounds * others);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_REDUCE].payload, totals.reduced * rounds * others);
  EXPECT_EQ(sum[MFSDP_TRAFFIC_OPTIMIZER_MATRIX], Bytes());
}

TEST(Traffic, EqualsTheAnalyticBytes) {
  for (const mfsdp_planner planner :
       {MFSDP_PLANNER_ROUND_ROBIN, MFSDP_PLANNER_ROLE_GREEDY, MFSDP_PLANNER_SCOPE_GREEDY}) {
    Job job = test::mixed_job();
    job.planner = planner;
    for (const int32_t world : {1, 2, 3, 4, 8})
      expect_traffic(job, world, 2, 2);
    job.chunk_nbytes = 1024; /* how a reduce is chunked must not change what is counted */
    expect_traffic(job, 4, 1, 1);
  }
}

/* ---- the positive control: what other strategies would do at the step ---- */

/* Every matrix from its owner to all, in the class of optimizer matrices, with the library's own
 * collective. It must show in the counter that reads zero above. */
TEST(Traffic, AGatherOfMatricesShowsInTheCounter) {
  const Job job = test::mixed_job();
  const int32_t world = 4;
  std::vector<Bytes> before(4), after(4);
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    Trainer t(&rank, &job, 1);
    MFSDP_TRY(t.create());
    MFSDP_TRY(t.step(0));
    before[static_cast<std::size_t>(rank.rank)] = seen(rank, MFSDP_TRAFFIC_OPTIMIZER_MATRIX);
    std::vector<mfsdp_extent> extents;
    std::vector<float> own, full;
    std::vector<int64_t> used(4, 0);
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, -1, &count);
    for (int32_t i = 0; i < count; ++i) {
      mfsdp_extent e;
      if (pieces[i].matrix < 0) continue;
      e.owner = pieces[i].owner;
      e.unit_offset = static_cast<int64_t>(full.size());
      e.shard_offset = used[static_cast<std::size_t>(e.owner)];
      e.count = e.payload_count = pieces[i].count;
      full.resize(full.size() + static_cast<std::size_t>(e.count), 0.0f);
      used[static_cast<std::size_t>(e.owner)] += e.count;
      if (e.owner == rank.rank)
        for (int64_t k = 0; k < e.count; ++k)
          own.push_back(static_cast<float>(e.unit_offset + k));
      extents.push_back(e);
    }
    mfsdp_layout layout;
    mfsdp_coll_desc desc = mfsdp_coll_desc_default();
    mfsdp_coll *gather = nullptr;
    std::memset(&layout, 0, sizeof(layout));
    layout.struct_nbytes = sizeof(layout);
    layout.extents = extents.data();
    layout.extent_count = static_cast<int32_t>(extents.size());
    layout.world = world;
    layout.dtype = MFSDP_F32;
    layout.full_count = static_cast<int64_t>(full.size());
    desc.kind = MFSDP_COLL_GATHER;
    desc.traffic = MFSDP_TRAFFIC_OPTIMIZER_MATRIX;
    desc.layout = &layout;
    desc.transport = &t.transport;
    desc.label = "gather matrices";
    MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &gather));
    MFSDP_TRY(mfsdp_gather(&rank.context, gather, rank.queue, own.data(), full.data()));
    MFSDP_TRY(rank.finish());
    mfsdp_coll_destroy(&rank.context, gather);
    for (std::size_t k = 0; k < full.size(); ++k)
      test::require(full[k] == static_cast<float>(k), "the gather itself");
    after[static_cast<std::size_t>(rank.rank)] = seen(rank, MFSDP_TRAFFIC_OPTIMIZER_MATRIX);
    return t.destroy();
  });
  ASSERT_TRUE(result.ok()) << result.text();
  uint64_t elements = 0;
  for (const ref::Tensor &t : job.model.tensors)
    if (t.tied_to.empty() && t.role == ref::Role::kMatrix)
      elements += static_cast<uint64_t>(t.numel());
  Bytes sum;
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(before[r], Bytes());
    sum.add(after[r], 1);
  }
  EXPECT_EQ(sum.payload, elements * 4 * 3);
  EXPECT_EQ(sum.wire, elements * 4 * 3);
}

/* ---- memory ---- */

TEST(Memory, ByClassEqualsThePlanAndTheAllocator) {
  Job job = test::mixed_job();
  job.active_units = 2;
  job.active_grads = 2;
  const int32_t world = 4;
  const test::RanksResult result = test::run_ranks(test::ranks_of(job, world), [&](Rank &rank) {
    const std::size_t before = rank.memory->live_nbytes(), booked = rank.context.total_nbytes;
    Trainer t(&rank, &job, 1);
    std::size_t shard = 0, grad = 0, state = 0, longest = 0, longest_grad = 0;
    bool reduces = false;
    MFSDP_TRY(t.make_plan());
    MFSDP_TRY(t.make_runtime());
    int32_t count = 0;
    const mfsdp_piece *pieces = mfsdp_plan_pieces(t.plan, -1, &count);
    for (int32_t i = 0; i < count; ++i) {
      const std::size_t nbytes = static_cast<std::size_t>(aligned(pieces[i].count)) * 4;
      const ref::Tensor &tensor = job.model.at(pieces[i].param);
      if (pieces[i].owner != rank.rank) continue;
      shard += nbytes;
      if (tensor.role == ref::Role::kFrozen) continue;
      reduces = true;
      grad += nbytes;
      state += nbytes * (tensor.group == 0 ? 1 : 2);
    }
    for (int32_t u = 0; u < job.model.unit_count(); ++u) {
      std::size_t full = 0, full_grad = 0;
      for (int32_t i : job.model.unit_tensors(u)) {
        if (job.model.owner(i) != i) continue;
        full += static_cast<std::size_t>(aligned(job.model.at(i).numel())) * 4;
        if (job.model.at(i).role != ref::Role::kFrozen)
          full_grad += static_cast<std::size_t>(aligned(job.model.at(i).numel())) * 4;
      }
      longest = std::max(longest, full);
      longest_grad = std::max(longest_grad, full_grad);
    }
    const std::size_t *now = rank.context.current_nbytes;
    test::require(now[MFSDP_MEMORY_SHARD] == shard, "shards");
    test::require(now[MFSDP_MEMORY_GRAD] == grad, "accumulators");
    test::require(now[MFSDP_MEMORY_STATE] == state, "optimizer state");
    /* Two units at once, and the one that owns a tied tensor. */
    test::require(now[MFSDP_MEMORY_SLOT] == 3 * longest + 3 * longest_grad, "slots");
    test::require(now[MFSDP_MEMORY_STAGING] == (reduces ? 3 * job.chunk_nbytes : 0), "staging");
    test::require(rank.context.total_nbytes - booked == rank.memory->live_nbytes() - before,
                  "the context's books are not the allocator's");
    std::size_t sum = 0;
    for (int c = 0; c < MFSDP_MEMORY_CLASS_COUNT; ++c)
      sum += now[c];
    test::require(sum == rank.context.total_nbytes, "the classes do not add up");
    MFSDP_TRY(mfsdp_runtime_init(t.runtime, Trainer::init, const_cast<ref::Model *>(&job.model)));
    /* init's staging was given back, and shows in the peak. */
    test::require(now[MFSDP_MEMORY_STAGING] == (reduces ? 3 * job.chunk_nbytes : 0), "staging");
    test::require(rank.context.peak_nbytes[MFSDP_MEMORY_STAGING] ==
                      now[MFSDP_MEMORY_STAGING] + 65536 * 4,
                  "the peak of staging");
    test::require(rank.context.total_peak_nbytes == rank.memory->peak_nbytes(), "the total peak");
    const std::size_t total = rank.context.total_nbytes;
    for (int64_t s = 0; s < 2; ++s)
      MFSDP_TRY(t.step(s));
    test::require(rank.context.total_nbytes == total, "a step keeps memory");
    MFSDP_TRY(t.destroy());
    mfsdp_plan_destroy(&rank.context, t.plan);
    t.plan = nullptr;
    /* The transport keeps the room it reserved for larger batches. */
    for (int c = 0; c < MFSDP_MEMORY_CLASS_COUNT; ++c)
      if (c != MFSDP_MEMORY_TABLE) test::require(now[c] == 0, "left after destroy");
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text(); /* which also says that nothing leaked in the end */
}

} // namespace
