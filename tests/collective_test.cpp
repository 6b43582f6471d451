/* SPDX-License-Identifier: MIT */
/*
 * collective.h: on rank threads, bit by bit against the chain that it promises; its lists over a
 * transport without buffering; its counters against analytic numbers; its rules.
 *
 * Counts allocations: MFSDP_TEST_WRAP_MALLOC.
 */
#include "mfsdp/collective.h"

#include "mfsdp/cost.h"
#include "mfsdp/dtype.h"
#include "mfsdp/random.h"
#include "tests/support/malloc_count.h"
#include "tests/support/mock_transport.h"
#include "tests/support/plan_cases.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace {

using test::Rank;
using test::RecordingTransport;

/* ---- layouts ---- */

struct Layout {
  std::string name;
  int32_t world = 1;
  int64_t full_count = 0;
  std::vector<mfsdp_extent> extents;

  mfsdp_layout table(mfsdp_dtype dtype) const {
    mfsdp_layout t;
    std::memset(&t, 0, sizeof(t));
    t.struct_nbytes = sizeof(t);
    t.extents = extents.empty() ? nullptr : extents.data();
    t.extent_count = static_cast<int32_t>(extents.size());
    t.world = world;
    t.dtype = dtype;
    t.full_count = full_count;
    return t;
  }
  int64_t segment(int32_t rank) const {
    int64_t end = 0;
    for (const mfsdp_extent &e : extents)
      if (e.owner == rank) end = std::max(end, e.shard_offset + e.count);
    return end;
  }
  /* Adds an extent at the end of the full buffer and of its owner's segment, after gaps. */
  void add(int32_t owner, int64_t count, int64_t payload, int64_t gap = 0) {
    mfsdp_extent e;
    e.owner = owner;
    e.count = count;
    e.payload_count = payload;
    e.unit_offset = full_count + gap;
    e.shard_offset = segment(owner);
    full_count += gap + count;
    extents.push_back(e);
  }
};

std::vector<Layout> layouts(int32_t world) {
  std::vector<Layout> all;
  const auto start = [&](const char *name) -> Layout & {
    all.emplace_back();
    all.back().name = name;
    all.back().world = world;
    return all.back();
  };
  Layout &even = start("even");
  for (int32_t r = 0; r < world; ++r)
    even.add(r, 384, 384);
  start("one owner of everything").add(world - 1, 1000, 1000);
  Layout &empty_owners = start("empty owners");
  for (int32_t r = 0; r < world; r += 2)
    empty_owners.add(r, 128 * (r + 1), 128 * (r + 1) - 5);
  Layout &few = start("more ranks than extents, padding inside");
  few.add(world / 2, 640, 500);
  few.add(0, 128, 1);
  Layout &many = start("several extents per owner, odd sizes, gaps, shuffled");
  for (int32_t i = 0; i < 3 * world + 1; ++i)
    many.add((i * 5 + 1) % world, 37 * (i % 4) + 1, 37 * (i % 4), i % 3 == 0 ? 9 : 0);
  many.full_count += 50;
  std::reverse(many.extents.begin(), many.extents.end());
  Layout &long_one = start("chunks that cut extents");
  for (int32_t i = 0; i < 2 * world; ++i)
    long_one.add(i % world, 700 + 31 * i, 650);
  start("no elements");
  Layout &zero = start("extents of zero elements");
  zero.add(0, 0, 0);
  zero.add(world - 1, 200, 200);
  zero.add(world - 1, 0, 0);
  return all;
}

/* ---- values ---- */

/* Floats whose sum depends on the order: exponents from 2^-20 to 2^20, both signs. Every 97th
 * element is -0 on every rank, which stays -0 only if nothing but the terms is added. */
float uneven(int32_t rank, int32_t round, int64_t index) {
  if (index % 97 == 3) return -0.0f;
  const uint64_t bits = mfsdp_random_u64(static_cast<uint64_t>(rank), static_cast<uint64_t>(round),
                                         static_cast<uint64_t>(index));
  const float magnitude = std::ldexp(1.0f + static_cast<float>(bits & 0xffff) / 65536.0f,
                                     static_cast<int>((bits >> 20) % 41) - 20);
  return (bits >> 63) != 0 ? -magnitude : magnitude;
}

/* Integers of at most 8 bits: exact in every dtype, and so is every sum of them in fp32, while
 * eight of them need more than the 8 bits of bf16. */
float whole(int32_t rank, int32_t round, int64_t index) {
  return static_cast<float>(static_cast<int64_t>((rank + 3) * 131 + round * 17 + index * 29) % 511 -
                            255);
}

/* Integers of at most 4 bits and a sign: eight of them fit in the 8 bits of bf16. */
float small(int32_t rank, int32_t round, int64_t index) {
  return static_cast<float>(static_cast<int64_t>((rank + 3) * 131 + round * 17 + index * 29) % 31 -
                            15);
}

using Value = float (*)(int32_t rank, int32_t round, int64_t index);

bool same_float(float a, float b) {
  return mfsdp_bits_from_f32(a) == mfsdp_bits_from_f32(b);
}

/* ---- one rank's buffers ---- */

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
  void *data() { return buffer_.data; }
  float *floats() { return static_cast<float *>(buffer_.data); }
  unsigned char *bytes() { return static_cast<unsigned char *>(buffer_.data); }
  mfsdp_status status;

private:
  Rank *rank_;
  mfsdp_buffer buffer_;
};

class Coll {
public:
  explicit Coll(Rank *rank) : rank_(rank) {}
  Coll(const Coll &) = delete;
  Coll &operator=(const Coll &) = delete;
  ~Coll() { mfsdp_coll_destroy(&rank_->context, coll); }
  mfsdp_status create(mfsdp_coll_kind kind, const Layout &layout, mfsdp_dtype dtype,
                      std::size_t chunk_nbytes = 4096, const char *label = "collective",
                      mfsdp_algorithm algorithm = MFSDP_DIRECT, bool narrow_sums = false) {
    const mfsdp_layout table = layout.table(dtype);
    mfsdp_coll_desc desc = mfsdp_coll_desc_default();
    desc.kind = kind;
    desc.algorithm = algorithm;
    desc.layout = &table;
    desc.transport = &rank_->transport;
    desc.traffic = kind == MFSDP_COLL_GATHER ? MFSDP_TRAFFIC_MATERIALIZE : MFSDP_TRAFFIC_REDUCE;
    desc.chunk_nbytes = chunk_nbytes;
    desc.narrow_sums = narrow_sums;
    desc.label = label;
    return mfsdp_coll_create(&rank_->context, &desc, &coll);
  }
  mfsdp_coll *coll = nullptr;

private:
  Rank *rank_;
};

/* What the test found wrong on a rank becomes the rank's error, with words. */
#define REQUIRE(condition, ...)                                                     \
  do {                                                                              \
    if (!(condition)) return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, __VA_ARGS__); \
  } while (0)

std::size_t nbytes_of(int64_t count, mfsdp_dtype dtype) {
  return static_cast<std::size_t>(count) * mfsdp_dtype_nbytes(dtype);
}

/* ---- gather ---- */

/* The counters of one rank must be exactly these, and nothing in any other class. */
mfsdp_status check_counters(Rank &rank, mfsdp_traffic traffic, const mfsdp_traffic_count &want) {
  for (int c = 0; c < MFSDP_TRAFFIC_CLASS_COUNT; ++c) {
    const mfsdp_traffic_count &got = rank.context.counters.sent[c];
    const bool used = c == static_cast<int>(traffic);
    REQUIRE(got.payload_nbytes == (used ? want.payload_nbytes : 0) &&
                got.wire_nbytes == (used ? want.wire_nbytes : 0) &&
                got.transfer_count == (used ? want.transfer_count : 0),
            "class %d: %llu payload, %llu wire, %llu transfers; expected %llu, %llu, %llu", c,
            static_cast<unsigned long long>(got.payload_nbytes),
            static_cast<unsigned long long>(got.wire_nbytes),
            static_cast<unsigned long long>(got.transfer_count),
            static_cast<unsigned long long>(used ? want.payload_nbytes : 0),
            static_cast<unsigned long long>(used ? want.wire_nbytes : 0),
            static_cast<unsigned long long>(used ? want.transfer_count : 0));
  }
  std::memset(&rank.context.counters, 0, sizeof(rank.context.counters));
  return MFSDP_OK;
}

mfsdp_traffic_count gather_traffic(const Layout &layout, mfsdp_dtype dtype, int32_t rank) {
  mfsdp_traffic_count want = {0, 0, 0};
  const auto peers = static_cast<uint64_t>(layout.world - 1);
  for (const mfsdp_extent &e : layout.extents) {
    if (e.owner != rank || e.count == 0) continue;
    want.payload_nbytes += peers * nbytes_of(e.payload_count, dtype);
    want.wire_nbytes += peers * nbytes_of(e.count, dtype);
    want.transfer_count += peers;
  }
  return want;
}

/* Byte b of element i of the unit in round r: any bits at all must come through. */
unsigned char byte_of(int32_t round, int64_t element, std::size_t b) {
  return static_cast<unsigned char>(
      mfsdp_random_u64(7, static_cast<uint64_t>(round), static_cast<uint64_t>(element) * 8 + b));
}

/* Whether this rank's segment lies in the full buffer as it does in the segment, shifted. */
bool in_place_shift(const Layout &layout, int32_t rank, int64_t *shift) {
  bool any = false;
  for (const mfsdp_extent &e : layout.extents) {
    if (e.owner != rank || e.count == 0) continue;
    if (any && e.unit_offset - e.shard_offset != *shift) return false;
    *shift = e.unit_offset - e.shard_offset;
    any = true;
  }
  return any;
}

mfsdp_status gather_once(Rank &rank, const Layout &layout, mfsdp_dtype dtype, mfsdp_coll *coll,
                         int32_t round, bool in_place) {
  const std::size_t width = mfsdp_dtype_nbytes(dtype);
  Memory full(&rank, nbytes_of(layout.full_count, dtype));
  Memory apart(&rank, in_place ? 0 : nbytes_of(layout.segment(rank.rank), dtype));
  MFSDP_TRY(full.status);
  MFSDP_TRY(apart.status);
  int64_t shift = 0;
  unsigned char *shard = apart.bytes();
  if (in_place && in_place_shift(layout, rank.rank, &shift))
    shard = full.bytes() + shift * static_cast<int64_t>(width);
  for (const mfsdp_extent &e : layout.extents)
    if (e.owner == rank.rank)
      for (int64_t i = 0; i < e.count; ++i)
        for (std::size_t b = 0; b < width; ++b)
          shard[static_cast<std::size_t>(e.shard_offset + i) * width + b] =
              byte_of(round, e.unit_offset + i, b);
  MFSDP_TRY(mfsdp_gather(&rank.context, coll, rank.queue, shard, full.data()));
  MFSDP_TRY(rank.finish());
  std::vector<bool> owned(static_cast<std::size_t>(layout.full_count), false);
  for (const mfsdp_extent &e : layout.extents)
    for (int64_t i = 0; i < e.count; ++i)
      owned[static_cast<std::size_t>(e.unit_offset + i)] = true;
  for (int64_t i = 0; i < layout.full_count; ++i)
    for (std::size_t b = 0; b < width; ++b) {
      const unsigned char got = full.bytes()[static_cast<std::size_t>(i) * width + b];
      const bool mine = owned[static_cast<std::size_t>(i)];
      REQUIRE(got == (mine ? byte_of(round, i, b) : 0xff),
              "%s, %s: element %lld of %lld is wrong%s", layout.name.c_str(),
              mfsdp_dtype_name(dtype), static_cast<long long>(i),
              static_cast<long long>(layout.full_count), mine ? "" : ": it belongs to nobody");
    }
  return MFSDP_OK;
}

mfsdp_status gather_layout(Rank &rank, const Layout &layout, mfsdp_dtype dtype,
                           mfsdp_algorithm algorithm = MFSDP_DIRECT) {
  Coll gather(&rank);
  MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, layout, dtype, algorithm == MFSDP_DIRECT ? 4096 : 1024,
                          "gather", algorithm));
  REQUIRE(mfsdp_coll_workspace_nbytes(gather.coll) == 0, "a gather needs no workspace");
  for (int32_t round = 0; round < 3; ++round) { /* replayed; the last time in place where it fits */
    int64_t shift = 0;
    const bool fits = in_place_shift(layout, rank.rank, &shift) || layout.segment(rank.rank) == 0;
    MFSDP_TRY(gather_once(rank, layout, dtype, gather.coll, round, round == 2 && fits));
    if (algorithm == MFSDP_RING || algorithm == MFSDP_HIERARCHICAL)
      continue; /* who sends what is the algorithm's own affair */
    MFSDP_TRY(
        check_counters(rank, MFSDP_TRAFFIC_MATERIALIZE, gather_traffic(layout, dtype, rank.rank)));
  }
  return MFSDP_OK;
}

/* ---- reduce ---- */

int64_t chunk_elements(const Layout &layout, mfsdp_dtype dtype, std::size_t chunk_nbytes) {
  int64_t longest = 0;
  for (int32_t r = 0; r < layout.world; ++r)
    longest = std::max(longest, layout.segment(r));
  const int64_t whole_segment = std::max<int64_t>(128, (longest + 127) / 128 * 128);
  const auto asked = static_cast<int64_t>(chunk_nbytes / mfsdp_dtype_nbytes(dtype)) / 128 * 128;
  return std::min(asked, whole_segment);
}

mfsdp_traffic_count reduce_traffic(const Layout &layout, mfsdp_dtype dtype, int32_t rank,
                                   std::size_t chunk_nbytes) {
  const int64_t chunk = chunk_elements(layout, dtype, chunk_nbytes);
  mfsdp_traffic_count want = {0, 0, 0};
  for (const mfsdp_extent &e : layout.extents) {
    if (e.owner == rank || e.count == 0) continue;
    want.payload_nbytes += nbytes_of(e.payload_count, dtype);
    want.wire_nbytes += nbytes_of(e.count, dtype);
    want.transfer_count +=
        static_cast<uint64_t>((e.shard_offset + e.count - 1) / chunk - e.shard_offset / chunk + 1);
  }
  return want;
}

/* acc = what one process has after adding the ranks' terms in rank order. */
float chain(Value value, float start, bool first, int32_t world, int32_t round, int64_t index,
            mfsdp_dtype wire) {
  float acc = start;
  for (int32_t r = 0; r < world; ++r) {
    float term = value(r, round, index);
    if (wire == MFSDP_BF16) term = mfsdp_f32_from_bf16(mfsdp_bf16_from_f32(term));
    if (wire == MFSDP_F16) term = mfsdp_f32_from_f16(mfsdp_f16_from_f32(term));
    acc = r == 0 && first ? term : acc + term;
  }
  return acc;
}

/* Three rounds: the first starts the chain, the others go on with it. */
mfsdp_status reduce_layout(Rank &rank, const Layout &layout, mfsdp_dtype wire, Value value,
                           std::size_t chunk_nbytes, mfsdp_algorithm algorithm = MFSDP_DIRECT) {
  Coll reduce(&rank);
  MFSDP_TRY(
      reduce.create(MFSDP_COLL_REDUCE, layout, wire, chunk_nbytes, "reduce", algorithm, true));
  const std::size_t needed = mfsdp_coll_workspace_nbytes(reduce.coll);
  REQUIRE(algorithm != MFSDP_DIRECT ||
              needed == (layout.segment(rank.rank) == 0
                             ? 0
                             : static_cast<std::size_t>(layout.world - 1) *
                                   nbytes_of(chunk_elements(layout, wire, chunk_nbytes), wire)),
          "%s: workspace of %zu bytes", layout.name.c_str(), needed);
  Memory full(&rank, nbytes_of(layout.full_count, wire));
  Memory accumulator(&rank, nbytes_of(layout.segment(rank.rank), MFSDP_F32));
  Memory workspace(&rank, needed);
  MFSDP_TRY(full.status);
  MFSDP_TRY(accumulator.status);
  MFSDP_TRY(workspace.status);
  for (int32_t round = 0; round < 3; ++round) {
    std::vector<float> start(accumulator.floats(),
                             accumulator.floats() + layout.segment(rank.rank));
    for (int64_t i = 0; i < layout.full_count; ++i)
      mfsdp_element_set(full.data(), wire, i, static_cast<double>(value(rank.rank, round, i)));
    MFSDP_TRY(mfsdp_reduce(&rank.context, reduce.coll, rank.queue, full.data(),
                           accumulator.floats(), round == 0, workspace.data()));
    MFSDP_TRY(rank.finish());
    if (algorithm == MFSDP_DIRECT || algorithm == MFSDP_NATIVE)
      MFSDP_TRY(check_counters(
          rank, MFSDP_TRAFFIC_REDUCE,
          reduce_traffic(layout, wire, rank.rank,
                         algorithm == MFSDP_NATIVE ? std::size_t{1} << 30 : chunk_nbytes)));
    for (const mfsdp_extent &e : layout.extents)
      for (int64_t i = 0; i < e.count && e.owner == rank.rank; ++i) {
        const auto at = static_cast<std::size_t>(e.shard_offset + i);
        const float want =
            chain(value, start[at], round == 0, layout.world, round, e.unit_offset + i, wire);
        REQUIRE(same_float(accumulator.floats()[at], want),
                "%s, %s, chunk %zu, round %d: element %lld is %a, expected %a", layout.name.c_str(),
                mfsdp_dtype_name(wire), chunk_nbytes, static_cast<int>(round),
                static_cast<long long>(e.unit_offset + i),
                static_cast<double>(accumulator.floats()[at]), static_cast<double>(want));
      }
    for (int64_t i = 0; i < layout.full_count; ++i)
      REQUIRE(wire != MFSDP_F32 || same_float(full.floats()[i], value(rank.rank, round, i)),
              "%s: the contribution was changed", layout.name.c_str());
  }
  return MFSDP_OK;
}

/* ---- on rank threads ---- */

struct World {
  int32_t world;
  mfsdp_host_queue_kind queue_kind;
};

class Collective : public ::testing::TestWithParam<World> {
protected:
  void run(const test::RankFunction &function) {
    test::RanksOptions options(GetParam().world);
    options.host.queue_kind = GetParam().queue_kind;
    const test::RanksResult result = test::run_ranks(options, function);
    EXPECT_TRUE(result.ok()) << result.text();
  }
};

TEST_P(Collective, Gather) {
  run([](Rank &rank) {
    for (const Layout &layout : layouts(rank.world))
      for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16})
        MFSDP_TRY(gather_layout(rank, layout, dtype));
    return MFSDP_OK;
  });
}

TEST_P(Collective, ReduceIsTheChainInRankOrder) {
  run([](Rank &rank) {
    for (const Layout &layout : layouts(rank.world))
      for (std::size_t chunk_nbytes : {std::size_t{1024}, std::size_t{2000}, std::size_t{1} << 18})
        MFSDP_TRY(reduce_layout(rank, layout, MFSDP_F32, uneven, chunk_nbytes));
    return MFSDP_OK;
  });
}

/* Narrow wire, fp32 sums: integers whose sums bf16 could not hold. */
TEST_P(Collective, ReduceOfExactIntegersOnAnyWire) {
  run([](Rank &rank) {
    for (const Layout &layout : layouts(rank.world))
      for (mfsdp_dtype wire : {MFSDP_F32, MFSDP_BF16, MFSDP_F16})
        MFSDP_TRY(reduce_layout(rank, layout, wire, whole, 1024));
    return MFSDP_OK;
  });
}

TEST_P(Collective, ReduceOnANarrowWireRoundsEachTermOnce) {
  run([](Rank &rank) {
    for (const Layout &layout : layouts(rank.world))
      MFSDP_TRY(reduce_layout(rank, layout, MFSDP_BF16, uneven, 2048));
    return MFSDP_OK;
  });
}

/* ---- RING, HIERARCHICAL and NATIVE: sums that are exact in any order, so the chain is still the oracle ---- */

/* Node maps for a world: one node, two by two, uneven and interleaved, each rank alone. */
std::vector<std::vector<int32_t>> node_maps(int32_t world) {
  std::vector<std::vector<int32_t>> maps(4);
  for (int32_t r = 0; r < world; ++r) {
    maps[0].push_back(5);
    maps[1].push_back(r / 2);
    maps[2].push_back(r % 5 == 0 ? 7 : r % 2);
    maps[3].push_back(world - r);
  }
  return maps;
}

mfsdp_status move_exactly(Rank &rank, mfsdp_algorithm algorithm) {
  for (const Layout &layout : layouts(rank.world)) {
    for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_F64, MFSDP_BF16})
      MFSDP_TRY(gather_layout(rank, layout, dtype, algorithm));
    for (std::size_t chunk_nbytes : {std::size_t{1024}, std::size_t{1} << 18})
      MFSDP_TRY(reduce_layout(rank, layout, MFSDP_F32, whole, chunk_nbytes, algorithm));
  }
  return MFSDP_OK;
}

TEST_P(Collective, RingMovesEverythingExactly) {
  run([](Rank &rank) { return move_exactly(rank, MFSDP_RING); });
}

/* Sums in a narrow dtype, where the caller allows them, are rounded once here: not the chain of the
 * whole numbers, but that of numbers whose sums 8 bits hold. */
TEST_P(Collective, NativeMovesEverythingExactly) {
  run([](Rank &rank) {
    MFSDP_TRY(move_exactly(rank, MFSDP_NATIVE));
    for (const Layout &layout : layouts(rank.world))
      for (mfsdp_dtype wire : {MFSDP_BF16, MFSDP_F16})
        MFSDP_TRY(reduce_layout(rank, layout, wire, small, 1024, MFSDP_NATIVE));
    return MFSDP_OK;
  });
}

TEST_P(Collective, HierarchicalMovesEverythingExactly) {
  std::vector<std::vector<int32_t>> maps = node_maps(GetParam().world);
  if (MFSDP_TEST_SANITIZER) maps = {maps[1], maps[2]}; /* several nodes, even and uneven */
  for (const std::vector<int32_t> &nodes : maps) {
    test::RanksOptions options(GetParam().world);
    options.host.queue_kind = GetParam().queue_kind;
    options.world.node_of_rank = nodes.data();
    const test::RanksResult result =
        test::run_ranks(options, [](Rank &rank) { return move_exactly(rank, MFSDP_HIERARCHICAL); });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* Whatever the way, each element reaches each other rank once, and each contribution its owner. */
TEST_P(Collective, AllAlgorithmsMoveTheSamePayload) {
  const int32_t world = GetParam().world;
  const std::vector<int32_t> nodes = node_maps(world)[1];
  for (const Layout &layout : layouts(world)) {
    uint64_t elements = 0;
    for (const mfsdp_extent &e : layout.extents)
      elements += static_cast<uint64_t>(e.count);
    for (mfsdp_algorithm algorithm : {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE}) {
      std::mutex mutex;
      uint64_t gathered = 0, reduced = 0;
      test::RanksOptions options(world);
      options.world.node_of_rank = nodes.data();
      const test::RanksResult result = test::run_ranks(options, [&](Rank &rank) {
        Coll gather(&rank), reduce(&rank);
        MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, layout, MFSDP_F32, 1024, "gather", algorithm));
        MFSDP_TRY(reduce.create(MFSDP_COLL_REDUCE, layout, MFSDP_F32, 1024, "reduce", algorithm));
        Memory full(&rank, nbytes_of(layout.full_count, MFSDP_F32));
        Memory shard(&rank, nbytes_of(layout.segment(rank.rank), MFSDP_F32));
        Memory workspace(&rank, mfsdp_coll_workspace_nbytes(reduce.coll));
        MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, shard.data(), full.data()));
        MFSDP_TRY(mfsdp_reduce(&rank.context, reduce.coll, rank.queue, full.data(), shard.floats(),
                               1, workspace.data()));
        MFSDP_TRY(rank.finish());
        const std::lock_guard<std::mutex> lock(mutex);
        gathered += rank.context.counters.sent[MFSDP_TRAFFIC_MATERIALIZE].wire_nbytes;
        reduced += rank.context.counters.sent[MFSDP_TRAFFIC_REDUCE].wire_nbytes;
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_EQ(gathered, elements * 4 * static_cast<uint64_t>(world - 1))
          << layout.name << ", " << mfsdp_algorithm_name(algorithm);
      EXPECT_EQ(reduced, elements * 4 * static_cast<uint64_t>(world - 1))
          << layout.name << ", " << mfsdp_algorithm_name(algorithm);
    }
  }
}

/* ---- AUTO ---- */

/* Rank 0 of `world` ranks, `each` of them on a node (0: one node). */
mfsdp_algorithm chosen(int32_t world, int32_t each, const mfsdp_wire_cost &wire,
                       mfsdp_coll_kind kind, mfsdp_dtype dtype, int64_t full_count,
                       int64_t longest) {
  std::vector<int32_t> nodes;
  for (int32_t r = 0; each > 0 && r < world; ++r)
    nodes.push_back(r / each);
  RecordingTransport transport(0, world, nullptr, nodes.empty() ? nullptr : nodes.data());
  return mfsdp_coll_choose(transport.table(), MFSDP_ALGORITHM_AUTO, &wire, kind, dtype, full_count,
                           longest, std::size_t{256} << 10);
}

/* 1 GB/s inside, 0.1 GB/s between, latencies of 5 and 50 us; chunks of 256 KiB. */
const mfsdp_wire_cost kCosts = {5000, 1048576, 50000, 10485760};

TEST(CollectiveAuto, OneOwnerOfMuchGoesRound) {
  const int64_t count = 16 << 20;
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count), MFSDP_RING);
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_REDUCE, MFSDP_F32, count, count), MFSDP_RING);
}

TEST(CollectiveAuto, EvenAndSmallUnitsGoDirect) {
  const int64_t count = 16 << 20;
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count / 8), MFSDP_DIRECT);
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, 1000, 1000), MFSDP_DIRECT);
  EXPECT_EQ(chosen(2, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count), MFSDP_DIRECT);
}

TEST(CollectiveAuto, NodesGetOneCopy) {
  const int64_t count = 16 << 20;
  EXPECT_EQ(chosen(16, 8, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count / 16),
            MFSDP_HIERARCHICAL);
  EXPECT_EQ(chosen(16, 16, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count / 16), MFSDP_DIRECT);
}

TEST(CollectiveAuto, NarrowSumsAndNothingGoDirect) {
  const int64_t count = 16 << 20;
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_REDUCE, MFSDP_BF16, count, count), MFSDP_DIRECT);
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_BF16, count, count), MFSDP_RING);
  EXPECT_EQ(chosen(1, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, count, count), MFSDP_DIRECT);
  EXPECT_EQ(chosen(8, 0, kCosts, MFSDP_COLL_GATHER, MFSDP_F32, 0, 0), MFSDP_DIRECT);
}

/* Numbers as large as they get saturate and overflow nowhere (the sanitizers look on). */
TEST(CollectiveAuto, HugeNumbersStillGiveAnAnswer) {
  const int64_t most = 1000000000000;
  const mfsdp_wire_cost dear = {most, most, most, most};
  for (int32_t each : {0, 1, 3})
    for (mfsdp_coll_kind kind : {MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE})
      EXPECT_GE(chosen(64, each, dear, kind, MFSDP_F32, INT64_MAX / 4, INT64_MAX / 4),
                MFSDP_DIRECT);
}

/* And what it chooses is what runs: the list is that of the algorithm by name. */
TEST_P(Collective, AutoIsTheAlgorithmItChooses) {
  run([](Rank &rank) {
    const Layout layout = layouts(rank.world)[1];
    const mfsdp_layout table = layout.table(MFSDP_F32);
    for (mfsdp_coll_kind kind : {MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE}) {
      mfsdp_coll *colls[2] = {nullptr, nullptr};
      mfsdp_coll_desc desc = mfsdp_coll_desc_default();
      desc.kind = kind;
      desc.layout = &table;
      desc.transport = &rank.transport;
      desc.traffic = MFSDP_TRAFFIC_MATERIALIZE;
      desc.chunk_nbytes = 1024;
      desc.wire = {0, 1048576000, 0, 1048576000}; /* bytes are dear, messages are free */
      desc.algorithm = MFSDP_ALGORITHM_AUTO;
      MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &colls[0]));
      desc.algorithm = mfsdp_coll_choose(&rank.transport, MFSDP_ALGORITHM_AUTO, &desc.wire, kind,
                                         MFSDP_F32, 1000, 1000, 1024);
      REQUIRE(rank.world < 4 || desc.algorithm == MFSDP_RING, "not a ring for one owner");
      MFSDP_TRY(mfsdp_coll_create(&rank.context, &desc, &colls[1]));
      REQUIRE(colls[0]->identity == colls[1]->identity &&
                  colls[0]->op_count == colls[1]->op_count &&
                  colls[0]->xfer_count == colls[1]->xfer_count &&
                  colls[0]->workspace_nbytes == colls[1]->workspace_nbytes,
              "the lists differ");
      mfsdp_coll_destroy(&rank.context, colls[0]);
      mfsdp_coll_destroy(&rank.context, colls[1]);
    }
    return MFSDP_OK;
  });
}

Layout plan_layout(mfsdp_context *context, const mfsdp_plan *plan, int32_t unit,
                   mfsdp_layout_kind kind) {
  Layout layout;
  layout.name = "plan, unit " + std::to_string(unit);
  layout.world = mfsdp_plan_world(plan);
  layout.full_count = mfsdp_plan_unit_count_elements(plan, unit, kind);
  int32_t count = 0;
  EXPECT_EQ(mfsdp_plan_extents(context, plan, unit, kind, nullptr, 0, &count), MFSDP_OK);
  layout.extents.resize(static_cast<std::size_t>(count));
  EXPECT_EQ(mfsdp_plan_extents(context, plan, unit, kind, layout.extents.data(), count, &count),
            MFSDP_OK);
  return layout;
}

/* Real plans: matrices, heads, experts, cut tensors, frozen ones, empty ones. */
TEST_P(Collective, RandomPlans) {
  const uint64_t seeds = MFSDP_TEST_SANITIZER ? 2 : 5;
  std::vector<Layout> gathers, reduces;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    test::Params list;
    test::fill_random(&list, seed);
    test::PlanRig rig;
    ASSERT_EQ(rig.create(list.desc(GetParam().world)), MFSDP_OK) << rig.message();
    for (int32_t unit = 0; unit < mfsdp_plan_unit_count(rig.plan); ++unit) {
      gathers.push_back(plan_layout(&rig.context, rig.plan, unit, MFSDP_LAYOUT_GATHER));
      reduces.push_back(plan_layout(&rig.context, rig.plan, unit, MFSDP_LAYOUT_REDUCE));
      for (int32_t r = 0; r < GetParam().world; ++r)
        EXPECT_EQ((gathers.back().segment(r) + 127) / 128 * 128,
                  mfsdp_plan_segment_count(rig.plan, unit, r, MFSDP_LAYOUT_GATHER));
    }
  }
  run([&](Rank &rank) {
    for (std::size_t u = 0; u < gathers.size(); ++u) {
      MFSDP_TRY(gather_layout(rank, gathers[u], MFSDP_F32));
      MFSDP_TRY(reduce_layout(rank, reduces[u], MFSDP_F32, uneven, u % 2 ? 1024 : 8192));
    }
    return MFSDP_OK;
  });
}

/* All ranks together send what cost.h says, whoever owns what. */
TEST_P(Collective, TotalsAreTheAnalyticNumbers) {
  const int32_t world = GetParam().world;
  for (const Layout &layout : layouts(world)) {
    uint64_t gathered = 0, reduced = 0, gathered_wire = 0;
    int64_t payload = 0, padded = 0;
    for (const mfsdp_extent &e : layout.extents) {
      payload += e.payload_count;
      padded += e.count;
    }
    for (int32_t r = 0; r < world; ++r) {
      gathered += gather_traffic(layout, MFSDP_BF16, r).payload_nbytes;
      gathered_wire += gather_traffic(layout, MFSDP_BF16, r).wire_nbytes;
      reduced += reduce_traffic(layout, MFSDP_F32, r, 1024).payload_nbytes;
    }
    std::size_t want = 0;
    ASSERT_TRUE(mfsdp_cost_gather_nbytes(payload, world, MFSDP_BF16, &want));
    EXPECT_EQ(gathered, want);
    ASSERT_TRUE(mfsdp_cost_gather_nbytes(padded, world, MFSDP_BF16, &want));
    EXPECT_EQ(gathered_wire, want);
    ASSERT_TRUE(mfsdp_cost_reduce_nbytes(payload, world, MFSDP_F32, &want));
    EXPECT_EQ(reduced, want);
  }
}

TEST_P(Collective, RunsAllocateNothing) {
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  for (mfsdp_algorithm algorithm : {MFSDP_DIRECT, MFSDP_NATIVE}) {
    uint64_t counted = 1;
    run([&](Rank &rank) {
      const Layout layout = layouts(rank.world)[4];
      Coll gather(&rank), reduce(&rank);
      MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, layout, MFSDP_F32, 4096, "gather", algorithm));
      MFSDP_TRY(reduce.create(MFSDP_COLL_REDUCE, layout, MFSDP_F32, 1024, "reduce", algorithm));
      Memory full(&rank, nbytes_of(layout.full_count, MFSDP_F32));
      Memory shard(&rank, nbytes_of(layout.segment(rank.rank), MFSDP_F32));
      Memory workspace(&rank, mfsdp_coll_workspace_nbytes(reduce.coll));
      for (int round = 0; round < 6; ++round) {
        if (round == 1) {
          MFSDP_TRY(rank.barrier());
          if (rank.rank == 0) test::malloc_count_begin();
          MFSDP_TRY(rank.barrier());
        }
        MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, shard.data(), full.data()));
        MFSDP_TRY(mfsdp_reduce(&rank.context, reduce.coll, rank.queue, full.data(), shard.floats(),
                               round == 0, workspace.data()));
        MFSDP_TRY(rank.finish());
      }
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 0) counted = test::malloc_count_end();
      return rank.barrier();
    });
    EXPECT_EQ(counted, 0u) << mfsdp_algorithm_name(algorithm);
  }
}

/* Fail the Nth allocation of create, the transport's own included, until none fails. */
TEST_P(Collective, AllocationFaultsOfCreateLeaveNothing) {
  run([](Rank &rank) {
    const Layout layout = layouts(rank.world)[5];
    for (int which = 0; which < 4; ++which)
      for (int64_t n = 0;; ++n) {
        const std::size_t live = rank.memory->live_count();
        Coll coll(&rank);
        rank.memory->fail_at(n);
        const mfsdp_status status =
            coll.create(which % 2 ? MFSDP_COLL_REDUCE : MFSDP_COLL_GATHER, layout, MFSDP_F32, 1024,
                        "faulty", which < 2 ? MFSDP_DIRECT : MFSDP_NATIVE);
        const bool failed = rank.memory->failed();
        rank.memory->fail_at(-1);
        REQUIRE(n < 50, "no end of allocations");
        if (!failed) {
          MFSDP_TRY(status);
          REQUIRE(n >= (rank.world == 1 ? 2 : 4), "only %d allocations", static_cast<int>(n));
          break;
        }
        REQUIRE(status == MFSDP_E_MEMORY, "allocation %d: status %s", static_cast<int>(n),
                mfsdp_status_name(status));
        REQUIRE(coll.coll == nullptr, "a failed create gave a collective");
        REQUIRE(rank.memory->live_count() == live, "allocation %d: %zu blocks are left",
                static_cast<int>(n), rank.memory->live_count() - live);
      }
    MFSDP_TRY(rank.barrier()); /* everything still works */
    return gather_layout(rank, layout, MFSDP_F32);
  });
}

std::string world_name(const ::testing::TestParamInfo<World> &info) {
  return std::to_string(info.param.world) +
         (info.param.queue_kind == MFSDP_HOST_QUEUE_INLINE ? "inline" : "worker");
}

/* Under the thread sanitizer no second world of the same kind: there it finds what it found before. */
std::vector<World> worlds() {
  std::vector<World> all = {{2, MFSDP_HOST_QUEUE_INLINE},
                            {3, MFSDP_HOST_QUEUE_INLINE},
                            {4, MFSDP_HOST_QUEUE_WORKER},
                            {8, MFSDP_HOST_QUEUE_WORKER}};
  if (!MFSDP_TEST_TSAN)
    for (int32_t world : {1, 7, 8})
      all.push_back({world, MFSDP_HOST_QUEUE_INLINE});
  return all;
}

INSTANTIATE_TEST_SUITE_P(Worlds, Collective, ::testing::ValuesIn(worlds()), world_name);

/* ---- b3: a rank that runs something else ---- */

test::RanksResult diverge(int32_t debug_check,
                          const std::function<mfsdp_status(Rank &, mfsdp_coll *a, mfsdp_coll *b,
                                                           float *shard, float *full)> &body,
                          mfsdp_algorithm algorithm = MFSDP_DIRECT) {
  test::RanksOptions options(3);
  options.world.deadline_us = 3 * 1000000;
  options.context.debug_check = debug_check;
  return test::run_ranks(options, [&](Rank &rank) {
    const Layout layout = layouts(rank.world)[0];
    Coll a(&rank), b(&rank);
    MFSDP_TRY(a.create(MFSDP_COLL_GATHER, layout, MFSDP_F32, 4096, "gather layer 1", algorithm));
    MFSDP_TRY(b.create(MFSDP_COLL_GATHER, layout, MFSDP_F32, 4096, "gather layer 2", algorithm));
    Memory shard(&rank, nbytes_of(layout.segment(rank.rank), MFSDP_F32));
    Memory full(&rank, nbytes_of(layout.full_count, MFSDP_F32));
    MFSDP_TRY(body(rank, a.coll, b.coll, shard.floats(), full.floats()));
    return rank.finish();
  });
}

mfsdp_status swapped(Rank &rank, mfsdp_coll *a, mfsdp_coll *b, float *shard, float *full) {
  const bool odd = rank.rank == 1;
  MFSDP_TRY(mfsdp_gather(&rank.context, odd ? b : a, rank.queue, shard, full));
  return mfsdp_gather(&rank.context, odd ? a : b, rank.queue, shard, full);
}

/* Rank 1 runs the first collective twice before the second: same sizes, another sequence. */
mfsdp_status repeated(Rank &rank, mfsdp_coll *a, mfsdp_coll *b, float *shard, float *full) {
  MFSDP_TRY(mfsdp_gather(&rank.context, a, rank.queue, shard, full));
  return mfsdp_gather(&rank.context, rank.rank == 1 ? a : b, rank.queue, shard, full);
}

/* Whoever noticed first has the mismatch, or had it in its queue when the transport refused its
 * next batch; all others are told why. */
void expect_all_caught(const test::RanksResult &result) {
  EXPECT_TRUE(result.clean()) << result.text();
  for (const test::RankOutcome &r : result.ranks) {
    EXPECT_TRUE(r.status == MFSDP_E_MISMATCH || r.status == MFSDP_E_POISONED) << result.text();
    EXPECT_NE(std::string(r.error.message).find("not the same operation"), std::string::npos)
        << result.text();
  }
}

TEST(CollectiveDebugCheck, CatchesAnotherOrder) {
  expect_all_caught(diverge(1, swapped));
  expect_all_caught(diverge(1, swapped, MFSDP_NATIVE));
}
TEST(CollectiveDebugCheck, CatchesARepetition) {
  expect_all_caught(diverge(1, repeated));
  expect_all_caught(diverge(1, repeated, MFSDP_NATIVE));
}
/* The control: without the option equal sizes pass, which is why the option exists. */
TEST(CollectiveDebugCheck, OffItSeesNothing) {
  for (mfsdp_algorithm algorithm : {MFSDP_DIRECT, MFSDP_NATIVE}) {
    const test::RanksResult result = diverge(0, swapped, algorithm);
    EXPECT_TRUE(result.ok()) << result.text();
  }
}
/* But ranks whose layouts differ are told apart by NATIVE with or without it: threads would read
 * beyond each other's buffers. */
TEST(CollectiveDebugCheck, NativeNeedsTheSameLayout) {
  test::RanksOptions options(3);
  options.world.deadline_us = 3 * 1000000;
  expect_all_caught(test::run_ranks(options, [](Rank &rank) {
    const Layout layout = layouts(rank.world)[rank.rank == 1 ? 1 : 0];
    Coll gather(&rank);
    MFSDP_TRY(gather.create(MFSDP_COLL_GATHER, layout, MFSDP_F32, 4096, "gather", MFSDP_NATIVE));
    Memory shard(&rank, nbytes_of(layout.segment(rank.rank), MFSDP_F32));
    Memory full(&rank, nbytes_of(layout.full_count, MFSDP_F32));
    MFSDP_TRY(mfsdp_gather(&rank.context, gather.coll, rank.queue, shard.data(), full.data()));
    return rank.finish();
  }));
}
TEST(CollectiveDebugCheck, OnItLetsCorrectRunsPass) {
  test::RanksOptions options(4);
  options.context.debug_check = 1;
  const test::RanksResult result = test::run_ranks(options, [](Rank &rank) {
    for (const Layout &layout : layouts(rank.world)) {
      MFSDP_TRY(gather_layout(rank, layout, MFSDP_F32));
      MFSDP_TRY(reduce_layout(rank, layout, MFSDP_F32, uneven, 1024));
      MFSDP_TRY(gather_layout(rank, layout, MFSDP_F32, MFSDP_NATIVE));
      MFSDP_TRY(reduce_layout(rank, layout, MFSDP_F32, whole, 1024, MFSDP_NATIVE));
    }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- b1, b2: the lists over a wire that buffers nothing ---- */

class Schedule : public ::testing::Test {
protected:
  void SetUp() override {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    ASSERT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
    const mfsdp_host_backend_desc host_desc = mfsdp_host_backend_desc_default();
    ASSERT_EQ(mfsdp_host_backend_create(&context_, &host_desc, &host_), MFSDP_OK);
    backend_ = mfsdp_host_backend_get(host_);
    ASSERT_EQ(backend_->ops->queue_create(backend_->self, &context_, "test", &queue_), MFSDP_OK);
  }
  void TearDown() override {
    backend_->ops->queue_destroy(backend_->self, &context_, queue_);
    EXPECT_EQ(mfsdp_host_backend_destroy(&context_, host_), MFSDP_OK);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK)
        << mfsdp_context_error(&context_)->message;
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(memory_.complaints(), "");
  }
  void expect_message(const std::string &part) {
    const std::string message = mfsdp_context_error(&context_)->message;
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }

  /* Runs gather, reduce, gather on every rank, one after the other, and replays the records. */
  std::string replay(const Layout &layout, const std::function<std::size_t(int32_t)> &chunk_nbytes,
                     mfsdp_algorithm algorithm = MFSDP_DIRECT, const int32_t *nodes = nullptr) {
    std::vector<std::unique_ptr<RecordingTransport>> mocks;
    const auto full_size = static_cast<std::size_t>(layout.full_count) + 1;
    std::vector<std::vector<float>> fulls, shards, workspaces;
    for (int32_t r = 0; r < layout.world; ++r) {
      mocks.emplace_back(new RecordingTransport(r, layout.world, backend_, nodes));
      mfsdp_layout table = layout.table(MFSDP_F32);
      mfsdp_coll_desc desc = mfsdp_coll_desc_default();
      mfsdp_coll *colls[2] = {nullptr, nullptr};
      desc.layout = &table;
      desc.algorithm = algorithm;
      desc.transport = mocks.back()->table();
      desc.traffic = MFSDP_TRAFFIC_EXPORT;
      desc.chunk_nbytes = chunk_nbytes(r);
      for (int k = 0; k < 2; ++k) {
        desc.kind = k == 0 ? MFSDP_COLL_GATHER : MFSDP_COLL_REDUCE;
        EXPECT_EQ(mfsdp_coll_create(&context_, &desc, &colls[k]), MFSDP_OK)
            << mfsdp_context_error(&context_)->message;
        EXPECT_GE(mocks.back()->reserved(), colls[k]->max_batch_count);
      }
      fulls.emplace_back(full_size, 1.0f);
      shards.emplace_back(static_cast<std::size_t>(layout.segment(r)) + 1, 1.0f);
      workspaces.emplace_back(mfsdp_coll_workspace_nbytes(colls[1]) / sizeof(float) + 1, 1.0f);
      for (int k : {0, 1, 0})
        EXPECT_EQ(k == 0 ? mfsdp_gather(&context_, colls[0], queue_, shards.back().data(),
                                        fulls.back().data())
                         : mfsdp_reduce(&context_, colls[1], queue_, fulls.back().data(),
                                        shards.back().data(), 1, workspaces.back().data()),
                  MFSDP_OK)
            << mfsdp_context_error(&context_)->message;
      mfsdp_coll_destroy(&context_, colls[0]);
      mfsdp_coll_destroy(&context_, colls[1]);
    }
    return test::replay_rendezvous(test::records_of(mocks));
  }

  test::FaultAllocator memory_;
  mfsdp_context context_;
  mfsdp_host_backend *host_ = nullptr;
  const mfsdp_backend *backend_ = nullptr;
  mfsdp_queue *queue_ = nullptr;
};

TEST_F(Schedule, CompletesWithoutAnyBuffering) {
  for (int32_t world : {1, 2, 3, 4, 7, 8, 16})
    for (const Layout &layout : layouts(world))
      for (std::size_t chunk_nbytes : {std::size_t{1024}, std::size_t{1} << 18})
        EXPECT_EQ(replay(layout, [=](int32_t) { return chunk_nbytes; }), "")
            << layout.name << ", world " << world;
}

TEST_F(Schedule, OtherAlgorithmsCompleteWithoutAnyBuffering) {
  for (int32_t world : {1, 2, 3, 4, 7, 8, 16})
    for (const Layout &layout : layouts(world)) {
      EXPECT_EQ(replay(
                    layout, [](int32_t) { return std::size_t{1024}; }, MFSDP_RING),
                "")
          << layout.name << ", world " << world;
      for (const std::vector<int32_t> &nodes : node_maps(world))
        EXPECT_EQ(replay(
                      layout, [](int32_t) { return std::size_t{1024}; }, MFSDP_HIERARCHICAL,
                      nodes.data()),
                  "")
            << layout.name << ", world " << world;
    }
}

TEST_F(Schedule, RandomPlansComplete) {
  for (uint64_t seed = 1; seed <= (MFSDP_TEST_SANITIZER ? 3u : 12u); ++seed)
    for (int32_t world : {2, 5, 8}) {
      test::Params list;
      test::fill_random(&list, seed);
      test::PlanRig rig;
      ASSERT_EQ(rig.create(list.desc(world)), MFSDP_OK) << rig.message();
      for (int32_t unit = 0; unit < mfsdp_plan_unit_count(rig.plan); ++unit)
        for (mfsdp_layout_kind kind : {MFSDP_LAYOUT_GATHER, MFSDP_LAYOUT_REDUCE})
          EXPECT_EQ(replay(plan_layout(&rig.context, rig.plan, unit, kind),
                           [](int32_t) { return std::size_t{2048}; }),
                    "")
              << "seed " << seed << ", world " << world << ", unit " << unit;
    }
}

/* The control: ranks that disagree do show. */
TEST_F(Schedule, UnequalChunksShow) {
  EXPECT_NE(replay(layouts(3)[5], [](int32_t r) { return std::size_t{1024} * (r == 1 ? 2u : 1u); }),
            "");
}

/* ---- the rules, one negative test each ---- */

/* A number that C++ would not let an enum hold, as a C caller could. */
template <class Enum> void put(Enum *where, unsigned value) {
  static_assert(sizeof(*where) == sizeof(value), "enums are ints here");
  std::memcpy(where, &value, sizeof(value));
}

/* Rank 1 of a recorded world of 4; rank 1 owns extents 1 and 2. */
class CollectiveRules : public Schedule {
protected:
  void SetUp() override {
    Schedule::SetUp();
    mock_.reset(new RecordingTransport(1, 4, backend_));
    shape_.world = 4;
    shape_.add(0, 128, 128);
    shape_.add(1, 256, 200);
    shape_.add(1, 128, 128);
    shape_.add(3, 128, 128);
    table_ = shape_.table(MFSDP_F32);
    desc_.kind = MFSDP_COLL_REDUCE;
    desc_.traffic = MFSDP_TRAFFIC_REDUCE;
    desc_.layout = &table_;
    desc_.transport = mock_->table();
    desc_.label = "layer 3";
  }
  mfsdp_status create() { return mfsdp_coll_create(&context_, &desc_, &coll_); }
  void TearDown() override {
    mfsdp_coll_destroy(&context_, coll_);
    Schedule::TearDown();
  }
  void refused(const std::string &part, mfsdp_status want = MFSDP_E_ARGUMENT) {
    const int64_t allocations = memory_.alloc_count();
    coll_ = reinterpret_cast<mfsdp_coll *>(this); /* anything but NULL */
    EXPECT_EQ(create(), want);
    EXPECT_EQ(coll_, nullptr);
    EXPECT_EQ(memory_.alloc_count(), allocations) << "checked before any allocation";
    EXPECT_EQ(mock_->reserved(), -1);
    expect_message(part);
  }
  mfsdp_extent &extent(std::size_t i) { return shape_.extents[i]; }

  std::unique_ptr<RecordingTransport> mock_;
  Layout shape_;
  mfsdp_layout table_;
  mfsdp_coll_desc desc_ = mfsdp_coll_desc_default();
  mfsdp_coll *coll_ = nullptr;
};

TEST_F(CollectiveRules, TheDescriptionIsLegal) {
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
}
TEST_F(CollectiveRules, NullDesc) {
  EXPECT_EQ(mfsdp_coll_create(&context_, nullptr, &coll_), MFSDP_E_ARGUMENT);
  expect_message("desc is NULL");
}
TEST_F(CollectiveRules, NullOut) {
  EXPECT_EQ(mfsdp_coll_create(&context_, &desc_, nullptr), MFSDP_E_ARGUMENT);
  expect_message("out is NULL");
}
TEST_F(CollectiveRules, RunsOfNone) {
  float value = 0.0f;
  EXPECT_EQ(mfsdp_gather(&context_, nullptr, nullptr, &value, &value), MFSDP_E_ARGUMENT);
  expect_message("gather: coll is NULL");
  EXPECT_EQ(mfsdp_reduce(&context_, nullptr, nullptr, &value, &value, 1, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("reduce: coll is NULL");
}
TEST_F(CollectiveRules, OtherSize) {
  desc_.struct_nbytes = 9;
  refused("struct_nbytes is not");
}
TEST_F(CollectiveRules, NoLabel) {
  desc_.label = nullptr;
  refused("has no label");
}
TEST_F(CollectiveRules, UnknownKind) {
  put(&desc_.kind, 0);
  refused("layer 3: kind is 0, needs MFSDP_COLL_GATHER, MFSDP_COLL_REDUCE or MFSDP_COLL_SCATTER");
  /* 4 and more: C++ has no such value of an enum of 1 to 3, and the sanitizer says so. */
}
TEST_F(CollectiveRules, UnknownAlgorithm) {
  put(&desc_.algorithm, 0);
  refused("algorithm is 0, needs an mfsdp_algorithm, 1 to 5");
  put(&desc_.algorithm, 6);
  refused("algorithm is 6");
}
/* A transport with native collectives of its own: it takes parts of one extent for each rank alone,
 * and keeps what it is asked to run. */
struct NativeTransport {
  explicit NativeTransport(mfsdp_transport *transport) : ops(*transport->ops) {
    ops.native = [](void *self, mfsdp_context *, mfsdp_queue *, const mfsdp_native_args *args) {
      of(self)->runs.push_back(*args);
      return MFSDP_OK;
    };
    ops.native_prepare = [](void *, mfsdp_context *context, const mfsdp_native_args *args,
                            int32_t *form) {
      for (int32_t i = 1; i < args->part_count; ++i)
        if (args->parts[i].owner == args->parts[i - 1].owner)
          return MFSDP_FAIL(context, MFSDP_E_UNSUPPORTED, "%s: rank %d owns several parts",
                            args->label, static_cast<int>(args->parts[i].owner));
      *form = 42;
      return MFSDP_OK;
    };
    inner = transport->self;
    transport->ops = &ops;
    current() = this;
  }
  static NativeTransport *&current() {
    static NativeTransport *one = nullptr;
    return one;
  }
  static NativeTransport *of(void *) { return current(); }
  mfsdp_transport_ops ops;
  void *inner;
  std::vector<mfsdp_native_args> runs;
};

TEST_F(CollectiveRules, NoNativeCollectives) {
  desc_.algorithm = MFSDP_NATIVE;
  refused("layer 3: transport recording has no native collectives; use direct, ring",
          MFSDP_E_UNSUPPORTED);
}
TEST_F(CollectiveRules, NativeSumsInANarrowDtype) {
  NativeTransport native(mock_->table());
  shape_.extents.erase(shape_.extents.begin() + 2);
  table_ = shape_.table(MFSDP_BF16);
  desc_.algorithm = MFSDP_NATIVE;
  refused("native adds in the layout's dtype, which is bf16", MFSDP_E_UNSUPPORTED);
  desc_.narrow_sums = 1;
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
}
/* What a transport cannot express it refuses at set-up, and nothing is left. */
TEST_F(CollectiveRules, ALayoutThatTheTransportCannotExpress) {
  NativeTransport native(mock_->table());
  desc_.algorithm = MFSDP_NATIVE;
  const std::size_t live = memory_.live_count();
  EXPECT_EQ(create(), MFSDP_E_UNSUPPORTED);
  expect_message("layer 3: rank 1 owns several parts");
  EXPECT_EQ(coll_, nullptr);
  EXPECT_EQ(memory_.live_count(), live);
}
/* Empty extents are no parts; the form comes back in every run; buffers are those of the call. */
TEST_F(CollectiveRules, NativeRunsAreWhatWasPrepared) {
  NativeTransport native(mock_->table());
  std::vector<float> full(1024), segment(1024), workspace(1024);
  shape_.extents[2].count = shape_.extents[2].payload_count = 0;
  desc_.algorithm = MFSDP_NATIVE;
  context_.desc.debug_check = 1;
  ASSERT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
  EXPECT_EQ(mfsdp_coll_workspace_nbytes(coll_), 256 * sizeof(float)) << "this rank's segment";
  for (int round = 0; round < 2; ++round)
    ASSERT_EQ(
        mfsdp_reduce(&context_, coll_, queue_, full.data(), segment.data(), 1, workspace.data()),
        MFSDP_OK);
  ASSERT_EQ(native.runs.size(), 2u);
  EXPECT_EQ(native.runs[0].kind, MFSDP_NATIVE_REDUCE);
  EXPECT_EQ(native.runs[0].part_count, 3);
  EXPECT_EQ(native.runs[0].form, 42);
  EXPECT_EQ(native.runs[0].src, full.data());
  EXPECT_EQ(native.runs[0].dst, workspace.data());
  EXPECT_NE(native.runs[0].check, 0u);
  EXPECT_NE(native.runs[0].check, native.runs[1].check) << "the sequence is part of it";
  mfsdp_coll_destroy(&context_, coll_);
  desc_.kind = MFSDP_COLL_GATHER;
  ASSERT_EQ(create(), MFSDP_OK);
  ASSERT_EQ(mfsdp_gather(&context_, coll_, queue_, segment.data(), full.data()), MFSDP_OK);
  EXPECT_EQ(native.runs[2].kind, MFSDP_NATIVE_GATHER);
  EXPECT_EQ(native.runs[2].dst, full.data());
}
/* Many rounds of chunks would not fit in a list, but NATIVE has none. */
TEST_F(CollectiveRules, NativeListsAreShort) {
  NativeTransport native(mock_->table());
  const int64_t elements = INT64_C(256) << 30;
  shape_.extents.resize(1);
  shape_.extents[0].owner = 1;
  shape_.extents[0].count = shape_.extents[0].payload_count = elements;
  table_ = shape_.table(MFSDP_F32);
  table_.full_count = elements;
  desc_.chunk_nbytes = 1024;
  desc_.algorithm = MFSDP_NATIVE;
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
  EXPECT_EQ(mfsdp_coll_workspace_nbytes(coll_), static_cast<std::size_t>(elements) * 4);
}
TEST_F(CollectiveRules, AutoNeedsCosts) {
  desc_.algorithm = MFSDP_ALGORITHM_AUTO;
  refused("algorithm auto needs desc.wire");
  for (int64_t mfsdp_wire_cost::*field :
       {&mfsdp_wire_cost::latency_ns, &mfsdp_wire_cost::ns_per_mib,
        &mfsdp_wire_cost::between_latency_ns, &mfsdp_wire_cost::between_ns_per_mib})
    for (int64_t value : {int64_t{-1}, int64_t{1000000000001}}) {
      desc_.wire = {1, 1, 1, 1};
      desc_.wire.*field = value;
      refused("algorithm auto needs desc.wire");
    }
}
/* Partial sums on a narrow wire would be rounded at every rank. */
TEST_F(CollectiveRules, NarrowSumsOnTheWay) {
  desc_.kind = MFSDP_COLL_REDUCE;
  table_.dtype = MFSDP_BF16;
  for (mfsdp_algorithm a : {MFSDP_RING, MFSDP_HIERARCHICAL}) {
    desc_.algorithm = a;
    refused(std::string(mfsdp_algorithm_name(a)) + " sends sums on, which need fp32",
            MFSDP_E_UNSUPPORTED);
  }
}
TEST_F(CollectiveRules, TrafficClassNotStated) {
  desc_.traffic = mfsdp_coll_desc_default().traffic;
  refused("traffic is 0, needs an mfsdp_traffic, 1 to 5");
  put(&desc_.traffic, 6);
  refused("traffic is 6");
}
TEST_F(CollectiveRules, ChunkTooSmall) {
  desc_.chunk_nbytes = 1023;
  refused("chunk_nbytes is 1023, needs at least 1024");
}
TEST_F(CollectiveRules, NoTransport) {
  desc_.transport = nullptr;
  refused("transport: NULL");
}
TEST_F(CollectiveRules, NoLayout) {
  desc_.layout = nullptr;
  refused("the layout is NULL or its struct_nbytes is not");
}
TEST_F(CollectiveRules, LayoutOfAnotherSize) {
  table_.struct_nbytes = 0;
  refused("the layout is NULL or its struct_nbytes is not");
}
TEST_F(CollectiveRules, NegativeExtentCount) {
  table_.extent_count = -1;
  refused("the layout has -1 extents");
}
TEST_F(CollectiveRules, NoExtents) {
  table_.extents = nullptr;
  refused("extents at NULL, needs 0 or a table");
}
TEST_F(CollectiveRules, NegativeLength) {
  table_.full_count = -1;
  refused("full_count is -1, needs 0 or more");
}
TEST_F(CollectiveRules, AnotherWorld) {
  table_.world = 5;
  refused("the layout is for world 5, the transport for 4");
}
TEST_F(CollectiveRules, NoDtype) {
  put(&table_.dtype, 0);
  refused("the layout's dtype is 0");
}
TEST_F(CollectiveRules, LengthOverflows) {
  table_.full_count = INT64_MAX;
  refused("elements of f32 overflow", MFSDP_E_OVERFLOW);
}
TEST_F(CollectiveRules, SumsInDouble) {
  table_.dtype = MFSDP_F64;
  refused("the wire is f64", MFSDP_E_UNSUPPORTED);
}
TEST_F(CollectiveRules, OwnerOutOfRange) {
  extent(2).owner = 4;
  refused("extent 2 is owned by 4, needs 0 to 3");
  extent(2).owner = -1;
  refused("extent 2 is owned by -1");
}
TEST_F(CollectiveRules, NegativeCount) {
  extent(1).count = -1;
  refused("extent 1 [128, +-1)");
}
TEST_F(CollectiveRules, MorePayloadThanElements) {
  extent(1).payload_count = 257;
  refused("extent 1 [128, +256) with payload 257");
}
TEST_F(CollectiveRules, NegativePayload) {
  extent(1).payload_count = -1;
  refused("with payload -1");
}
TEST_F(CollectiveRules, BeforeTheBuffer) {
  extent(0).unit_offset = -1;
  refused("extent 0 [-1, +128)");
}
TEST_F(CollectiveRules, BeyondTheBuffer) {
  table_.full_count -= 1;
  refused("extent 3 [512, +128) with payload 128 does not lie in a buffer of 639 elements");
}
TEST_F(CollectiveRules, OffsetOverflows) {
  extent(3).unit_offset = INT64_MAX - 5;
  refused("extent 3");
}
TEST_F(CollectiveRules, BeforeTheSegment) {
  extent(3).shard_offset = -128;
  refused("extent 3 cannot stand at -128 of a segment");
}
TEST_F(CollectiveRules, SegmentOverflows) {
  for (int64_t offset : {INT64_MAX - 5, INT64_MAX / 8}) {
    extent(3).shard_offset = offset;
    refused("extent 3 cannot stand at");
  }
}
TEST_F(CollectiveRules, OverlapInTheFullBuffer) {
  extent(3).unit_offset = 511;
  refused("extents 2 and 3 overlap in the full buffer");
  std::swap(extent(3), extent(0)); /* whatever the order of the table */
  refused("overlap in the full buffer");
}
TEST_F(CollectiveRules, OverlapInTheOwnSegment) {
  extent(2).shard_offset = 255;
  refused("extents 1 and 2 overlap in the segment of rank 1");
  std::swap(extent(1), extent(2));
  refused("extents 1 and 2 overlap in the segment of rank 1");
}
TEST_F(CollectiveRules, DescendingTablesAreLegal) {
  std::reverse(shape_.extents.begin(), shape_.extents.end());
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
}
/* A generous chunk is no more than the longest segment, so nothing overflows or is wasted. */
TEST_F(CollectiveRules, HugeChunks) {
  desc_.chunk_nbytes = SIZE_MAX;
  ASSERT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
  EXPECT_EQ(mfsdp_coll_workspace_nbytes(coll_), 3u * 384u * 4u);
}
/* One count of the list more than 32 bits hold; a gather of the same layout is one transfer. */
TEST_F(CollectiveRules, ListOverflows) {
  const int64_t elements = INT64_C(256) << 30; /* 2^30 chunks of 1024 bytes, to each of 4 ranks */
  shape_.extents.resize(1);
  shape_.extents[0].owner = 1;
  shape_.extents[0].count = shape_.extents[0].payload_count = elements;
  table_ = shape_.table(MFSDP_F32);
  table_.full_count = elements;
  desc_.chunk_nbytes = 1024;
  desc_.kind = MFSDP_COLL_REDUCE;
  refused("1073741825 rounds of chunks and 1 extents on 4 ranks make more than", MFSDP_E_OVERFLOW);
  desc_.kind = MFSDP_COLL_GATHER;
  EXPECT_EQ(create(), MFSDP_OK) << mfsdp_context_error(&context_)->message;
}
TEST_F(CollectiveRules, WorkspaceOverflows) {
  shape_.extents.resize(1);
  shape_.extents[0].owner = 1;
  shape_.extents[0].count = shape_.extents[0].payload_count = INT64_MAX / 16;
  table_ = shape_.table(MFSDP_F32);
  table_.full_count = INT64_MAX / 16;
  std::vector<int32_t> nodes(100, 0);
  RecordingTransport many(1, 100, backend_, nodes.data());
  table_.world = 100;
  desc_.transport = many.table();
  desc_.chunk_nbytes = SIZE_MAX;
  refused("from 100 ranks overflow", MFSDP_E_OVERFLOW);
}

TEST_F(CollectiveRules, GatherOfAReduce) {
  float data[1024] = {0.0f};
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data, data), MFSDP_E_ARGUMENT);
  expect_message("layer 3: is a reduce, not a gather");
}
TEST_F(CollectiveRules, ReduceOfAGather) {
  float data[1024] = {0.0f};
  desc_.kind = MFSDP_COLL_GATHER;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data, data, 1, data), MFSDP_E_ARGUMENT);
  expect_message("layer 3: is a gather, not a reduce");
}
TEST_F(CollectiveRules, GatherBuffers) {
  float data[1024] = {0.0f};
  desc_.kind = MFSDP_COLL_GATHER;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, nullptr, data), MFSDP_E_ARGUMENT);
  expect_message("shard is NULL");
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, data, nullptr), MFSDP_E_ARGUMENT);
  expect_message("full is NULL");
  EXPECT_TRUE(mock_->record().empty());
}
TEST_F(CollectiveRules, ReduceBuffers) {
  std::vector<float> data(4096, 0.0f);
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, nullptr, data.data(), 1, data.data()),
            MFSDP_E_ARGUMENT);
  expect_message("full is NULL");
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data.data(), nullptr, 1, data.data()),
            MFSDP_E_ARGUMENT);
  expect_message("accumulator is NULL");
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data.data(), data.data(), 1, nullptr),
            MFSDP_E_ARGUMENT);
  expect_message("workspace is NULL");
  EXPECT_TRUE(mock_->record().empty());
}
TEST_F(CollectiveRules, BuffersThatOverlap) {
  std::vector<float> full(640 + 384), sums(384), workspace(1 << 16);
  const int64_t place = 128; /* of both extents, 384 elements */
  desc_.kind = MFSDP_COLL_GATHER;
  ASSERT_EQ(create(), MFSDP_OK);
  for (int64_t wrong : {int64_t(0), place - 1, place + 1, int64_t(639)}) {
    EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, full.data() + wrong, full.data()),
              MFSDP_E_ARGUMENT);
    expect_message("shard overlaps the full buffer, and not at its place");
  }
  EXPECT_TRUE(mock_->record().empty());
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, full.data() + place, full.data()), MFSDP_OK);
  EXPECT_EQ(mfsdp_gather(&context_, coll_, queue_, full.data() + 640, full.data()), MFSDP_OK);
  mfsdp_coll_destroy(&context_, coll_);
  desc_.kind = MFSDP_COLL_REDUCE;
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(
      mfsdp_reduce(&context_, coll_, queue_, full.data(), full.data() + place, 1, workspace.data()),
      MFSDP_E_ARGUMENT);
  expect_message("accumulator overlaps the full buffer");
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, full.data(), sums.data(), 1, full.data() + 1),
            MFSDP_E_ARGUMENT);
  expect_message("workspace overlaps the full buffer");
  EXPECT_EQ(
      mfsdp_reduce(&context_, coll_, queue_, full.data(), workspace.data(), 1, workspace.data()),
      MFSDP_E_ARGUMENT);
  expect_message("accumulator overlaps the workspace");
}
/* A rank that owns nothing passes no shard and no workspace. */
TEST_F(CollectiveRules, EmptyRanksPassNull) {
  float data[1024] = {0.0f};
  RecordingTransport rank2(2, 4, backend_);
  desc_.transport = rank2.table();
  ASSERT_EQ(create(), MFSDP_OK);
  EXPECT_EQ(mfsdp_coll_workspace_nbytes(coll_), 0u);
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data, nullptr, 1, nullptr), MFSDP_OK);
  EXPECT_FALSE(rank2.record().empty());
}

/* A failed submission is reported at once, and what was not sent is not counted. */
TEST_F(CollectiveRules, FailedSubmissionsAreReportedAndNotCounted) {
  std::vector<float> data(4096, 0.0f);
  ASSERT_EQ(create(), MFSDP_OK);
  mock_->fail_submit_at(0);
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data.data(), data.data() + 3000, 1,
                         data.data() + 1000),
            MFSDP_E_PEER);
  expect_message("injected failure of layer 3");
  EXPECT_EQ(context_.counters.sent[MFSDP_TRAFFIC_REDUCE].wire_nbytes, 0u);
  EXPECT_EQ(mfsdp_reduce(&context_, coll_, queue_, data.data(), data.data() + 3000, 1,
                         data.data() + 1000),
            MFSDP_E_POISONED);
}
TEST_F(CollectiveRules, DestroyNull) {
  mfsdp_coll_destroy(&context_, nullptr);
}

} // namespace
