/* SPDX-License-Identifier: MIT */
/*
 * collective.h with roots: gathers that bring each extent to one rank alone, and scatters back;
 * byte by byte on rank threads, over a transport without buffering, with exact counters; its rules.
 *
 * Counts allocations: MFSDP_TEST_WRAP_MALLOC.
 */
#include "mfsdp/collective.h"

#include "mfsdp/dtype.h"
#include "mfsdp/random.h"
#include "tests/support/malloc_count.h"
#include "tests/support/mock_transport.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

namespace {

using test::Rank;
using test::RecordingTransport;

/* ---- layouts ---- */

struct Rooted {
  std::string name;
  int32_t world = 1;
  int64_t full_count = 0; /* of the root that has most */
  std::vector<mfsdp_extent> extents;
  std::vector<int32_t> roots;
  std::vector<int64_t> segment, full; /* ends so far, of each owner, of each root */

  explicit Rooted(const char *layout_name, int32_t size)
      : name(layout_name), world(size), segment(static_cast<std::size_t>(size), 0),
        full(static_cast<std::size_t>(size), 0) {}
  mfsdp_layout table(mfsdp_dtype dtype, bool rooted = true) const {
    mfsdp_layout t;
    std::memset(&t, 0, sizeof(t));
    t.struct_nbytes = sizeof(t);
    t.extents = extents.empty() ? nullptr : extents.data();
    t.extent_count = static_cast<int32_t>(extents.size());
    t.world = world;
    t.dtype = dtype;
    t.full_count = full_count;
    t.roots = rooted ? roots.data() : nullptr;
    return t;
  }
  /* At the end of the owner's segment and of the root's full buffer, after gaps. */
  void add(int32_t owner, int32_t root, int64_t count, int64_t payload, int64_t shard_gap = 0,
           int64_t unit_gap = 0) {
    int64_t &owned = segment[static_cast<std::size_t>(owner)];
    int64_t &at_root = full[static_cast<std::size_t>(root)];
    mfsdp_extent e;
    e.owner = owner;
    e.count = count;
    e.payload_count = payload;
    e.shard_offset = owned + shard_gap;
    e.unit_offset = at_root + unit_gap;
    owned = e.shard_offset + count;
    at_root = e.unit_offset + count;
    full_count = std::max(full_count, at_root);
    extents.push_back(e);
    roots.push_back(root);
  }
};

/* What one round of an exchange of bands looks like: each root gets `matrices` from all ranks,
 * packed rank after rank. */
Rooted bands(int32_t world, int32_t matrices) {
  Rooted all("bands", world);
  for (int32_t root = 0; root < world; ++root)
    for (int32_t owner = 0; owner < world; ++owner)
      for (int32_t m = 0; m < matrices; ++m) {
        const int64_t count = 64 * owner + 8 * m; /* rank 0 has none of the first */
        all.add(owner, root, count, count);
      }
  return all;
}

Rooted random_layout(int32_t world, uint64_t seed) {
  Rooted all("random", world);
  uint64_t drawn = 0;
  const auto draw = [&](uint64_t below) {
    return static_cast<int64_t>(mfsdp_random_u64(seed, 1, drawn++) % below);
  };
  const int64_t extents = draw(40);
  for (int64_t i = 0; i < extents; ++i) {
    const auto owner = static_cast<int32_t>(draw(static_cast<uint64_t>(world)));
    const auto root = static_cast<int32_t>(draw(static_cast<uint64_t>(world)));
    const int64_t count = draw(5) == 0 ? 0 : draw(300);
    all.add(owner, root, count, draw(static_cast<uint64_t>(count) + 1), draw(3) == 0 ? draw(20) : 0,
            draw(3) == 0 ? draw(20) : 0);
  }
  all.full_count += draw(10);
  for (std::size_t i = all.extents.size(); i > 1; --i) { /* any order */
    const auto k = static_cast<std::size_t>(draw(i));
    std::swap(all.extents[i - 1], all.extents[k]);
    std::swap(all.roots[i - 1], all.roots[k]);
  }
  return all;
}

std::vector<Rooted> layouts(int32_t world) {
  std::vector<Rooted> all;
  all.push_back(bands(world, 1));
  all.push_back(bands(world, 3));
  for (int32_t root = 0; root < world; ++root) {
    all.emplace_back("all to one root", world);
    for (int32_t owner = 0; owner < world; ++owner)
      all.back().add(owner, root, 100 + owner, 90, owner % 2, 3);
  }
  all.emplace_back("no extents", world);
  all.emplace_back("extents of zero elements", world);
  all.back().add(0, world - 1, 0, 0);
  all.back().add(world - 1, 0, 40, 40);
  all.back().add(world - 1, 0, 0, 0);
  for (uint64_t seed = 1; seed <= (MFSDP_TEST_SANITIZER ? 4u : 12u); ++seed)
    all.push_back(random_layout(world, seed));
  return all;
}

std::size_t nbytes_of(int64_t count, mfsdp_dtype dtype) {
  return static_cast<std::size_t>(count) * mfsdp_dtype_nbytes(dtype);
}

/* What a rank sends in a gather (as owner) or a scatter (as root): one message for each stretch of
 * table neighbours of a pair that is contiguous on both sides. */
mfsdp_traffic_count traffic_of(const Rooted &layout, mfsdp_dtype dtype, int32_t rank, bool gather) {
  mfsdp_traffic_count want = {0, 0, 0};
  for (int32_t peer = 0; peer < layout.world; ++peer) {
    const mfsdp_extent *before = nullptr;
    for (std::size_t i = 0; i < layout.extents.size(); ++i) {
      const mfsdp_extent &e = layout.extents[i];
      const bool ours = gather ? e.owner == rank && layout.roots[i] == peer
                               : e.owner == peer && layout.roots[i] == rank;
      if (!ours || peer == rank || e.count == 0) continue;
      want.payload_nbytes += nbytes_of(e.payload_count, dtype);
      want.wire_nbytes += nbytes_of(e.count, dtype);
      want.transfer_count += before == nullptr ||
                             before->unit_offset + before->count != e.unit_offset ||
                             before->shard_offset + before->count != e.shard_offset;
      before = &e;
    }
  }
  return want;
}

/* ---- one rank's buffers ---- */

#define REQUIRE(condition, ...)                                                     \
  do {                                                                              \
    if (!(condition)) return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, __VA_ARGS__); \
  } while (0)

class Memory {
public:
  Memory(Rank *rank, std::size_t nbytes) : rank_(rank) {
    status = mfsdp_buffer_alloc(&rank->context, rank->backend, nbytes, MFSDP_SPACE_DEVICE,
                                MFSDP_MEMORY_STAGING, &buffer_);
    if (status == MFSDP_OK && nbytes > 0) std::memset(buffer_.data, 0xff, nbytes);
  }
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  ~Memory() { mfsdp_buffer_free(&rank_->context, rank_->backend, &buffer_); }
  unsigned char *bytes() { return static_cast<unsigned char *>(buffer_.data); }
  mfsdp_status status;

private:
  Rank *rank_;
  mfsdp_buffer buffer_;
};

class Coll {
public:
  explicit Coll(mfsdp_context *context) : context_(context) {}
  Coll(const Coll &) = delete;
  Coll &operator=(const Coll &) = delete;
  ~Coll() { mfsdp_coll_destroy(context_, coll); }
  mfsdp_status create(mfsdp_coll_kind kind, const mfsdp_layout &table,
                      const mfsdp_transport *transport, const char *label,
                      mfsdp_algorithm algorithm = MFSDP_DIRECT) {
    mfsdp_coll_desc desc = mfsdp_coll_desc_default();
    desc.kind = kind;
    desc.algorithm = algorithm;
    desc.layout = &table;
    desc.transport = transport;
    desc.traffic = MFSDP_TRAFFIC_OPTIMIZER_MATRIX;
    desc.wire = {1000, 1000, 1000, 1000};
    desc.label = label;
    return mfsdp_coll_create(context_, &desc, &coll);
  }
  mfsdp_coll *coll = nullptr;

private:
  mfsdp_context *context_;
};

unsigned char byte_of(int32_t round, int32_t owner, int64_t at) {
  return static_cast<unsigned char>(mfsdp_random_u64(static_cast<uint64_t>(round),
                                                     static_cast<uint64_t>(owner),
                                                     static_cast<uint64_t>(at)) %
                                    255); /* never 0xff, what nobody writes */
}

/* What the layout says about every byte of this rank's buffers: where it comes from. */
struct Expected {
  std::vector<int> full, shard; /* -1: left alone */
};

Expected expected_of(const Rooted &layout, mfsdp_dtype dtype, int32_t rank, int32_t round) {
  const auto width = static_cast<int64_t>(mfsdp_dtype_nbytes(dtype));
  Expected want;
  want.full.assign(nbytes_of(layout.full_count, dtype), -1);
  want.shard.assign(nbytes_of(layout.segment[static_cast<std::size_t>(rank)], dtype), -1);
  for (std::size_t i = 0; i < layout.extents.size(); ++i) {
    const mfsdp_extent &e = layout.extents[i];
    for (int64_t b = 0; b < e.count * width; ++b) {
      const int value = byte_of(round, e.owner, e.shard_offset * width + b);
      if (layout.roots[i] == rank)
        want.full[static_cast<std::size_t>(e.unit_offset * width + b)] = value;
      if (e.owner == rank) want.shard[static_cast<std::size_t>(e.shard_offset * width + b)] = value;
    }
  }
  return want;
}

mfsdp_status check_counters(Rank &rank, const mfsdp_traffic_count &gathered,
                            const mfsdp_traffic_count &scattered) {
  const mfsdp_traffic_count &got = rank.context.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX];
  REQUIRE(got.payload_nbytes == gathered.payload_nbytes + scattered.payload_nbytes,
          "%llu bytes of payload", static_cast<unsigned long long>(got.payload_nbytes));
  REQUIRE(got.wire_nbytes == gathered.wire_nbytes + scattered.wire_nbytes, "%llu bytes on the wire",
          static_cast<unsigned long long>(got.wire_nbytes));
  REQUIRE(got.transfer_count == gathered.transfer_count + scattered.transfer_count,
          "%llu transfers, expected %llu", static_cast<unsigned long long>(got.transfer_count),
          static_cast<unsigned long long>(gathered.transfer_count + scattered.transfer_count));
  std::memset(&rank.context.counters, 0, sizeof(rank.context.counters));
  return MFSDP_OK;
}

/* There, and back into a cleared segment, all in one queue with a gather for everybody between. */
mfsdp_status there_and_back(Rank &rank, const Rooted &layout, mfsdp_dtype dtype,
                            mfsdp_algorithm algorithm = MFSDP_DIRECT) {
  Coll gather(&rank.context), scatter(&rank.context), plain(&rank.context);
  Rooted everybody("everybody", rank.world);
  for (int32_t r = 0; r < rank.world; ++r)
    everybody.add(r, 0, 7 + r, 7);
  MFSDP_TRY(
      gather.create(MFSDP_COLL_GATHER, layout.table(dtype), &rank.transport, "there", algorithm));
  MFSDP_TRY(
      scatter.create(MFSDP_COLL_SCATTER, layout.table(dtype), &rank.transport, "back", algorithm));
  MFSDP_TRY(
      plain.create(MFSDP_COLL_GATHER, everybody.table(dtype, false), &rank.transport, "everybody"));
  REQUIRE(mfsdp_coll_workspace_nbytes(gather.coll) == 0 &&
              mfsdp_coll_workspace_nbytes(scatter.coll) == 0,
          "a workspace");
  const bool is_root = gather.coll->full_count > 0;
  for (int32_t round = 0; round < 2; ++round) { /* replayed */
    const Expected want = expected_of(layout, dtype, rank.rank, round);
    Memory full(&rank, is_root ? want.full.size() : 0), source(&rank, want.shard.size());
    Memory back(&rank, want.shard.size());
    Memory all(&rank, nbytes_of(everybody.full_count, dtype));
    Memory part(&rank, nbytes_of(7 + rank.rank, dtype));
    MFSDP_TRY(full.status);
    MFSDP_TRY(source.status);
    MFSDP_TRY(back.status);
    for (std::size_t i = 0; i < want.shard.size(); ++i)
      if (want.shard[i] >= 0) source.bytes()[i] = static_cast<unsigned char>(want.shard[i]);
    std::memset(part.bytes(), rank.rank, nbytes_of(7 + rank.rank, dtype));
    MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, source.bytes(), full.bytes()));
    MFSDP_TRY(mfsdp_gather(&rank.context, plain.coll, rank.queue, part.bytes(), all.bytes()));
    std::memset(&rank.context.counters, 0, sizeof(rank.context.counters));
    MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, source.bytes(), full.bytes()));
    MFSDP_TRY(mfsdp_scatter(&rank.context, scatter.coll, rank.queue, full.bytes(), back.bytes()));
    MFSDP_TRY(check_counters(rank, traffic_of(layout, dtype, rank.rank, true),
                             traffic_of(layout, dtype, rank.rank, false)));
    MFSDP_TRY(mfsdp_gather(&rank.context, plain.coll, rank.queue, part.bytes(), all.bytes()));
    MFSDP_TRY(rank.finish());
    for (std::size_t i = 0; i < want.full.size() && is_root; ++i)
      REQUIRE(full.bytes()[i] == (want.full[i] < 0 ? 0xff : want.full[i]),
              "%s: byte %zu of the full buffer is wrong%s", layout.name.c_str(), i,
              want.full[i] < 0 ? ": nothing was to come here" : "");
    for (std::size_t i = 0; i < want.shard.size(); ++i)
      REQUIRE(back.bytes()[i] == (want.shard[i] < 0 ? 0xff : want.shard[i]),
              "%s: byte %zu of the segment is wrong%s", layout.name.c_str(), i,
              want.shard[i] < 0 ? ": nothing was to come back here" : "");
    for (int32_t r = 0; r < rank.world; ++r)
      REQUIRE(all.bytes()[nbytes_of(everybody.extents[static_cast<std::size_t>(r)].unit_offset,
                                    dtype)] == r,
              "the gather between is wrong");
  }
  return MFSDP_OK;
}

/* ---- on rank threads ---- */

struct World {
  int32_t world;
  mfsdp_host_queue_kind queue_kind;
};

class Roots : public ::testing::TestWithParam<World> {
protected:
  void run(const test::RankFunction &function, int32_t debug_check = 0) {
    test::RanksOptions options(GetParam().world);
    options.host.queue_kind = GetParam().queue_kind;
    options.context.debug_check = debug_check;
    const test::RanksResult result = test::run_ranks(options, function);
    EXPECT_TRUE(result.ok()) << result.text();
  }
};

TEST_P(Roots, EveryByteThereAndBack) {
  run([](Rank &rank) {
    for (const Rooted &layout : layouts(rank.world))
      for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_F64, MFSDP_BF16})
        MFSDP_TRY(there_and_back(rank, layout, dtype));
    return MFSDP_OK;
  });
}

TEST_P(Roots, CheckWordsAgree) {
  run(
      [](Rank &rank) {
        for (const Rooted &layout : layouts(rank.world))
          MFSDP_TRY(there_and_back(rank, layout, MFSDP_F16));
        return MFSDP_OK;
      },
      1);
}

TEST_P(Roots, AutoIsDirect) {
  run([](Rank &rank) {
    return there_and_back(rank, bands(rank.world, 2), MFSDP_F32, MFSDP_ALGORITHM_AUTO);
  });
}

/* Packed bands: whatever their number, one message to each root, and one back to each owner. */
TEST_P(Roots, OneMessageForAPair) {
  const int32_t world = GetParam().world;
  for (int32_t r = 0; r < world; ++r) {
    const auto peers = static_cast<uint64_t>(world - 1);
    EXPECT_EQ(traffic_of(bands(world, 3), MFSDP_F32, r, true).transfer_count, peers);
    EXPECT_EQ(traffic_of(bands(world, 3), MFSDP_F32, r, false).transfer_count, peers);
  }
}

TEST_P(Roots, RunsAllocateNothing) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  uint64_t counted = 1;
  run([&](Rank &rank) {
    const Rooted layout = bands(rank.world, 2);
    const mfsdp_layout table = layout.table(MFSDP_F32);
    Coll gather(&rank.context), scatter(&rank.context);
    MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, table, &rank.transport, "there"));
    MFSDP_TRY(scatter.create(MFSDP_COLL_SCATTER, table, &rank.transport, "back"));
    Memory full(&rank, nbytes_of(layout.full_count, MFSDP_F32));
    Memory shard(&rank, nbytes_of(layout.segment[static_cast<std::size_t>(rank.rank)], MFSDP_F32));
    for (int round = 0; round < 6; ++round) {
      if (round == 1) {
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) test::malloc_count_begin();
        MFSDP_TRY(rank.barrier());
      }
      MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, shard.bytes(), full.bytes()));
      MFSDP_TRY(
          mfsdp_scatter(&rank.context, scatter.coll, rank.queue, full.bytes(), shard.bytes()));
      MFSDP_TRY(rank.finish());
    }
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) counted = test::malloc_count_end();
    return rank.barrier();
  });
  EXPECT_EQ(counted, 0u);
}

/* Fail the Nth allocation of create until none fails. */
TEST_P(Roots, AllocationFaultsOfCreateLeaveNothing) {
  run([](Rank &rank) {
    const Rooted layout = bands(rank.world, 2);
    for (int64_t n = 0;; ++n) {
      const std::size_t live = rank.memory->live_count();
      Coll coll(&rank.context);
      rank.memory->fail_at(n);
      const mfsdp_status status =
          coll.create(MFSDP_COLL_SCATTER, layout.table(MFSDP_F32), &rank.transport, "faulty");
      const bool failed = rank.memory->failed();
      rank.memory->fail_at(-1);
      REQUIRE(n < 50, "no end of allocations");
      if (!failed) {
        MFSDP_TRY(status);
        REQUIRE(n >= 3, "only %d allocations", static_cast<int>(n));
        break;
      }
      REQUIRE(status == MFSDP_E_MEMORY && coll.coll == nullptr, "allocation %d: status %s",
              static_cast<int>(n), mfsdp_status_name(status));
      REQUIRE(rank.memory->live_count() == live, "allocation %d: blocks are left",
              static_cast<int>(n));
    }
    MFSDP_TRY(rank.barrier());
    return there_and_back(rank, layout, MFSDP_F32);
  });
}

std::vector<World> worlds() {
  std::vector<World> all = {
      {2, MFSDP_HOST_QUEUE_INLINE}, {3, MFSDP_HOST_QUEUE_WORKER}, {8, MFSDP_HOST_QUEUE_WORKER}};
  if (!MFSDP_TEST_TSAN)
    for (int32_t world : {1, 4, 7})
      all.push_back({world, MFSDP_HOST_QUEUE_INLINE});
  return all;
}

std::string world_name(const ::testing::TestParamInfo<World> &info) {
  return std::to_string(info.param.world) +
         (info.param.queue_kind == MFSDP_HOST_QUEUE_INLINE ? "inline" : "worker");
}

INSTANTIATE_TEST_SUITE_P(Worlds, Roots, ::testing::ValuesIn(worlds()), world_name);

/* A rank that has another root in mind is told apart before anything goes astray. */
TEST(RootsDebugCheck, CatchesOtherRoots) {
  test::RanksOptions options(3);
  options.world.deadline_us = 3 * 1000000;
  options.context.debug_check = 1;
  const test::RanksResult result = test::run_ranks(options, [](Rank &rank) {
    Rooted layout("roots", rank.world);
    for (int32_t r = 0; r < rank.world; ++r) /* each sends to the next: the same sizes, always */
      layout.add(r, (r + 1) % rank.world, 64, 64);
    layout.add(0, 0, 64, 64);
    if (rank.rank == 2) layout.roots.back() = 2;
    Coll gather(&rank.context);
    MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, layout.table(MFSDP_F32), &rank.transport, "roots"));
    Memory full(&rank, 4096), shard(&rank, 4096);
    MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, shard.bytes(), full.bytes()));
    return rank.finish();
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (const test::RankOutcome &r : result.ranks)
    EXPECT_TRUE(r.status == MFSDP_E_MISMATCH || r.status == MFSDP_E_POISONED) << result.text();
}

/* ---- lists, and the rules, on a recorded rank ---- */

class RootsRules : public ::testing::Test {
protected:
  void SetUp() override {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    ASSERT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
    const mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
    ASSERT_EQ(mfsdp_host_backend_create(&context_, &host_desc, &host_), MFSDP_OK);
    backend_ = mfsdp_host_backend_get(host_);
    ASSERT_EQ(backend_->ops->queue_create(backend_->self, &context_, "test", &queue_), MFSDP_OK);
    mock_.reset(new RecordingTransport(1, 4, backend_));
    shape_.add(0, 1, 128, 128);
    shape_.add(1, 1, 64, 64);
    shape_.add(1, 2, 256, 200);
    shape_.add(1, 2, 128, 128);
    shape_.add(3, 1, 128, 128);
    table_ = shape_.table(MFSDP_F32);
    desc_.kind = MFSDP_COLL_GATHER;
    desc_.traffic = MFSDP_TRAFFIC_OPTIMIZER_MATRIX;
    desc_.layout = &table_;
    desc_.transport = mock_->table();
    desc_.label = "round 3";
  }
  void TearDown() override {
    mfsdp_coll_destroy(&context_, coll_);
    backend_->ops->queue_destroy(backend_->self, &context_, queue_);
    EXPECT_EQ(mfsdp_host_backend_destroy(&context_, host_), MFSDP_OK);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(memory_.complaints(), "");
  }
  mfsdp_status create() { return mfsdp_coll_create(&context_, &desc_, &coll_); }
  void expect_message(const std::string &part) {
    const std::string message = mfsdp_context_error(&context_)->message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  void refused(const std::string &part, mfsdp_status want = MFSDP_E_ARGUMENT) {
    const int64_t allocations = memory_.alloc_count();
    coll_ = reinterpret_cast<mfsdp_coll *>(this);
    EXPECT_EQ(create(), want);
    EXPECT_EQ(coll_, nullptr);
    EXPECT_EQ(memory_.alloc_count(), allocations) << "checked before any allocation";
    expect_message(part);
  }

  test::FaultAllocator memory_;
  mfsdp_context context_;
  mfsdp_host_backend *host_ = nullptr;
  const mfsdp_backend *backend_ = nullptr;
  mfsdp_queue *queue_ = nullptr;
  std::unique_ptr<RecordingTransport> mock_;
  Rooted shape_{"rules", 4};
  mfsdp_layout table_;
  mfsdp_coll_desc desc_ = mfsdp_coll_desc_default();
  mfsdp_coll *coll_ = nullptr;
};

/* Every rank's gather, scatter and gather, replayed over a wire that buffers nothing. */
TEST_F(RootsRules, CompletesWithoutAnyBuffering) {
  for (int32_t world : {1, 2, 3, 4, 7, 8, 16})
    for (const Rooted &layout : layouts(world)) {
      std::vector<std::unique_ptr<RecordingTransport>> mocks;
      std::vector<std::vector<float>> fulls, shards;
      for (int32_t r = 0; r < world; ++r) {
        mocks.emplace_back(new RecordingTransport(r, world, backend_));
        Coll gather(&context_), scatter(&context_);
        const mfsdp_layout table = layout.table(MFSDP_F32);
        ASSERT_EQ(gather.create(MFSDP_COLL_GATHER, table, mocks.back()->table(), "there"),
                  MFSDP_OK);
        ASSERT_EQ(scatter.create(MFSDP_COLL_SCATTER, table, mocks.back()->table(), "back"),
                  MFSDP_OK);
        fulls.emplace_back(static_cast<std::size_t>(layout.full_count) + 1);
        shards.emplace_back(static_cast<std::size_t>(layout.segment[static_cast<std::size_t>(r)]) +
                            1);
        float *full = fulls.back().data(), *shard = shards.back().data();
        EXPECT_EQ(mfsdp_gather(&context_, gather.coll, queue_, shard, full), MFSDP_OK);
        EXPECT_EQ(mfsdp_scatter(&context_, scatter.coll, queue_, full, shard), MFSDP_OK);
        EXPECT_EQ(mfsdp_gather(&context_, gather.coll, queue_, shard, full), MFSDP_OK);
        EXPECT_LE(mocks.back()->record().size(), 3u) << "one batch each";
      }
      EXPECT_EQ(test::replay_rendezvous(test::records_of(mocks)), "")
          << layout.name << ", world " << world;
    }
}

TEST_F(RootsRules, NeighboursTravelTogether) {
  ASSERT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
  EXPECT_EQ(coll_->max_batch_count, 3) << "one send of both to rank 2, receives from 0 and 3";
  mfsdp_coll_destroy(&context_, coll_);
  shape_.extents[3].unit_offset += 1; /* a hole at the root */
  table_.full_count += 1;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(coll_->max_batch_count, 4);
  mfsdp_coll_destroy(&context_, coll_);
  shape_.extents[3].unit_offset -= 1;
  shape_.extents[3].shard_offset += 1; /* or at the owner */
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(coll_->max_batch_count, 4);
}
TEST_F(RootsRules, RootOutOfRange) {
  shape_.roots[2] = 4;
  refused("round 3: the root of extent 2 is 4, needs 0 to 3");
  shape_.roots[2] = -1;
  refused("the root of extent 2 is -1");
}
TEST_F(RootsRules, ScatterNeedsRoots) {
  desc_.kind = MFSDP_COLL_SCATTER;
  table_.roots = nullptr;
  refused("round 3: a scatter needs layout.roots");
}
TEST_F(RootsRules, ReduceHasNone) {
  desc_.kind = MFSDP_COLL_REDUCE;
  refused("round 3: layout.roots are for gathers and scatters");
}
TEST_F(RootsRules, DirectAlone) {
  desc_.algorithm = MFSDP_RING;
  refused("round 3: ring has no roots", MFSDP_E_UNSUPPORTED);
  desc_.algorithm = MFSDP_HIERARCHICAL;
  refused("round 3: hierarchical has no roots", MFSDP_E_UNSUPPORTED);
  desc_.kind = MFSDP_COLL_SCATTER;
  refused("round 3: hierarchical has no roots", MFSDP_E_UNSUPPORTED);
}
TEST_F(RootsRules, OverlapAtARoot) {
  shape_.extents[1].unit_offset = 127; /* rank 1 is the root of extents 0 and 1 */
  refused("extents 0 and 1 overlap in the full buffer");
  shape_.extents[1].unit_offset = 128;
  shape_.extents[2].unit_offset = 0; /* the same places at another root are other memory */
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
}
/* In the owner's segment too, whoever the roots are: what would come back there? */
TEST_F(RootsRules, OverlapInTheSegment) {
  shape_.extents[2].shard_offset = 63;
  refused("extents 1 and 2 overlap in the segment of rank 1");
}
TEST_F(RootsRules, TheIdentityHoldsRootsAndKind) {
  uint64_t identity[3];
  for (int which = 0; which < 3; ++which) {
    desc_.kind = which == 2 ? MFSDP_COLL_SCATTER : MFSDP_COLL_GATHER;
    shape_.roots[0] = which == 1 ? 0 : 1;
    ASSERT_EQ(create(), MFSDP_OK);
    identity[which] = coll_->identity;
    mfsdp_coll_destroy(&context_, coll_);
    coll_ = nullptr;
  }
  EXPECT_NE(identity[0], identity[1]);
  EXPECT_NE(identity[0], identity[2]);
}
TEST_F(RootsRules, RunsOfNoneOrOfAnotherKind) {
  float data[1024] = {0.0f};
  EXPECT_EQ(mfsdp_scatter(&context_, nullptr, queue_, data, data), MFSDP_E_ARGUMENT);
  expect_message("scatter: coll is NULL");
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_scatter(&context_, coll_, queue_, data, data + 512), MFSDP_E_ARGUMENT);
  expect_message("round 3: is a gather, not a scatter");
  mfsdp_coll_destroy(&context_, coll_);
  desc_.kind = MFSDP_COLL_SCATTER;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data + 512, data), MFSDP_E_ARGUMENT);
  expect_message("round 3: is a scatter, not a gather");
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data, data + 512, 1, nullptr), MFSDP_E_ARGUMENT);
  expect_message("round 3: is a scatter, not a reduce");
}
TEST_F(RootsRules, BuffersThatAreMissing) {
  float data[1024] = {0.0f};
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, nullptr, data), MFSDP_E_ARGUMENT);
  expect_message("shard is NULL");
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data, nullptr), MFSDP_E_ARGUMENT);
  expect_message("full is NULL");
  EXPECT_TRUE(mock_->record().empty());
}
/* Only roots have a full buffer, and only owners a segment. */
TEST_F(RootsRules, RanksWithoutPassNull) {
  std::vector<float> data(1024);
  RecordingTransport rank0(0, 4, backend_), rank2(2, 4, backend_);
  desc_.transport = rank0.table(); /* an owner */
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data.data(), nullptr), MFSDP_OK);
  EXPECT_EQ(rank0.record().size(), 1u);
  mfsdp_coll_destroy(&context_, coll_);
  desc_.transport = rank2.table(); /* a root */
  desc_.kind = MFSDP_COLL_SCATTER;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_scatter(&context_, coll_, queue_, data.data(), nullptr), MFSDP_OK);
  EXPECT_EQ(rank2.record().size(), 1u);
}
TEST_F(RootsRules, BuffersThatOverlap) {
  std::vector<float> data(2048);
  ASSERT_EQ(create(), MFSDP_OK);
  for (int64_t wrong : {int64_t(0), int64_t(128), int64_t(319)}) {
    EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data.data() + wrong, data.data()),
              MFSDP_E_ARGUMENT);
    expect_message("shard overlaps the full buffer");
  }
  /* Rank 1's full buffer ends with its last extent, however long those of others are. */
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data.data() + 320, data.data()), MFSDP_OK);
}
/* A rank that keeps all it has may keep it in place. */
TEST_F(RootsRules, InPlace) {
  Rooted own("own", 1);
  own.add(0, 0, 64, 64, 0, 32);
  std::vector<float> data(128);
  for (std::size_t i = 0; i < data.size(); ++i)
    data[i] = static_cast<float>(i);
  const std::vector<float> before = data;
  RecordingTransport alone(0, 1, backend_);
  table_ = own.table(MFSDP_F32);
  desc_.transport = alone.table();
  for (mfsdp_coll_kind kind : {MFSDP_COLL_GATHER, MFSDP_COLL_SCATTER}) {
    desc_.kind = kind;
    ASSERT_EQ(create(), MFSDP_OK);
    EXPECT_EQ(kind == MFSDP_COLL_GATHER
                  ? mfsdp_gather(&context_, coll_, queue_, data.data() + 32, data.data())
                  : mfsdp_scatter(&context_, coll_, queue_, data.data(), data.data() + 32),
              MFSDP_OK);
    mfsdp_coll_destroy(&context_, coll_);
    coll_ = nullptr;
  }
  EXPECT_EQ(data, before);
}
TEST_F(RootsRules, FailedSubmissionsAreNotCounted) {
  std::vector<float> data(2048);
  ASSERT_EQ(create(), MFSDP_OK);
  mock_->fail_submit_at(0);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data.data() + 1024, data.data()), MFSDP_E_PEER);
  EXPECT_EQ(context_.counters.sent[MFSDP_TRAFFIC_OPTIMIZER_MATRIX].wire_nbytes, 0u);
}

} // namespace
