/* SPDX-License-Identifier: MIT */
/*
 * The threads transport. MFSDP_TEST_WRAP_MALLOC: submit must not allocate.
 */
#include "mfsdp/host/transport_threads.h"

#include "tests/support/malloc_count.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

namespace {

using test::Rank;
using test::RanksOptions;
using test::RanksResult;
using test::receive_from;
using test::run_ranks;
using test::send_to;

const int32_t kWorlds[] = {1, 2, 3, 4, 7, 8};
const std::size_t kSizes[] = {0, 1, 999, std::size_t(1) << (MFSDP_TEST_TSAN ? 17 : 20)};

using Bytes = std::vector<unsigned char>;

/* What rank `from` sends to rank `to` in round `round`: the first kPeriod bytes tell where they
 * come from, and the rest repeats them, so that sanitizers spend their time in memcpy and memcmp.
 */
const std::size_t kPeriod = 251;

unsigned char pattern(int32_t from, int32_t to, int round, std::size_t i) {
  const auto place = static_cast<uint32_t>(from * 131 + to * 31 + round * 7);
  return static_cast<unsigned char>((place + static_cast<uint32_t>(i)) & 0xffu);
}

void fill(Bytes *bytes, int32_t from, int32_t to, int round) {
  const std::size_t nbytes = bytes->size();
  for (std::size_t i = 0; i < nbytes && i < kPeriod; ++i)
    (*bytes)[i] = pattern(from, to, round, i);
  for (std::size_t done = kPeriod; done < nbytes; done *= 2)
    std::memcpy(bytes->data() + done, bytes->data(), std::min(done, nbytes - done));
}

bool holds(const unsigned char *bytes, std::size_t nbytes, int32_t from, int32_t to, int round) {
  for (std::size_t i = 0; i < nbytes && i < kPeriod; ++i)
    if (bytes[i] != pattern(from, to, round, i)) return false;
  return nbytes <= kPeriod || std::memcmp(bytes, bytes + kPeriod, nbytes - kPeriod) == 0;
}

/* Deadlines of tests that wait for one; slack covers a loaded machine and sanitizers. */
const int64_t kShortUs = 300000;
const int64_t kSlackUs = 2000000;

RanksOptions short_deadline(int32_t world) {
  RanksOptions options(world);
  options.world.deadline_us = kShortUs;
  return options;
}

void expect_part(const std::string &text, const std::string &part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

/* Submits and waits. A batch that comes after another rank's error is refused; then that error. */
mfsdp_status run_batch(Rank &rank, const std::vector<mfsdp_xfer> &xfers, const char *label,
                       uint64_t check = 0) {
  const mfsdp_status status = rank.submit(xfers, label, check);
  if (status == MFSDP_E_POISONED)
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  return status == MFSDP_OK ? rank.finish() : status;
}

/* ---- what arrives ---- */

/* Every rank sends to every other and receives from every other, in one batch. */
mfsdp_status exchange_all(Rank &rank, std::size_t nbytes, int round, bool sends_first) {
  const auto world = static_cast<std::size_t>(rank.world);
  std::vector<Bytes> out(world, Bytes(nbytes)), in(world, Bytes(nbytes, 0xee));
  std::vector<mfsdp_xfer> sends, receives, all;
  for (int32_t p = 0; p < rank.world; ++p) {
    if (p == rank.rank) continue;
    const auto i = static_cast<std::size_t>(p);
    fill(&out[i], rank.rank, p, round);
    sends.push_back(send_to(p, nbytes ? out[i].data() : nullptr, nbytes));
    receives.push_back(receive_from(p, nbytes ? in[i].data() : nullptr, nbytes));
  }
  all = sends_first ? sends : receives;
  const auto &rest = sends_first ? receives : sends;
  all.insert(all.end(), rest.begin(), rest.end());
  MFSDP_TRY(rank.submit(all, "all to all"));
  MFSDP_TRY(rank.finish());
  for (int32_t p = 0; p < rank.world; ++p)
    if (p != rank.rank &&
        !holds(in[static_cast<std::size_t>(p)].data(), nbytes, p, rank.rank, round))
      return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "wrong bytes from rank %d",
                        static_cast<int>(p));
  return MFSDP_OK;
}

TEST(TransportThreadsTest, AllToAllInEveryWorldAndSize) {
  for (int32_t world : kWorlds)
    for (std::size_t nbytes : kSizes) {
      if (MFSDP_TEST_TSAN && world % 2 == 1) continue;
      const RanksResult result = run_ranks(RanksOptions(world), [nbytes](Rank &rank) {
        for (int round = 0; round < 4; ++round)
          MFSDP_TRY(exchange_all(rank, nbytes, round, round % 2 == 0));
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << "world " << world << ", " << nbytes << " bytes\n"
                               << result.text();
    }
}

TEST(TransportThreadsTest, TheTransportIsComplete) {
  const int32_t nodes[] = {0, 0, 1};
  RanksOptions options(3);
  options.world.node_of_rank = nodes;
  const RanksResult result = run_ranks(options, [&nodes](Rank &rank) {
    MFSDP_TRY(mfsdp_transport_check(&rank.context, &rank.transport));
    MFSDP_TRY(mfsdp_control_check(&rank.context, &rank.control));
    EXPECT_EQ(rank.transport.rank, rank.rank);
    EXPECT_EQ(rank.transport.world, 3);
    EXPECT_EQ(rank.transport.deadline_us, 20 * 1000000);
    EXPECT_EQ(rank.transport.backend, rank.backend);
    EXPECT_NE(rank.transport.node_of_rank, nodes) << "the caller's array must not be kept";
    EXPECT_EQ(std::memcmp(rank.transport.node_of_rank, nodes, sizeof(nodes)), 0);
    EXPECT_TRUE(MFSDP_HAS(rank.transport.ops, native));
    EXPECT_FALSE(MFSDP_HAS(rank.transport.ops, split));
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Between two ranks: the order of batches and, inside a batch, of its table. */
TEST(TransportThreadsTest, FirstInFirstOutBetweenTwoRanks) {
  const int kRounds = 300;
  const RanksResult result = run_ranks(RanksOptions(3), [](Rank &rank) {
    int values[6], got[6];
    for (int round = 0; round < kRounds; ++round) {
      const int32_t next = (rank.rank + 1) % 3, last = (rank.rank + 2) % 3;
      std::vector<mfsdp_xfer> xfers;
      for (int i = 0; i < 6; ++i) {
        values[i] = rank.rank * 1000000 + round * 10 + i;
        got[i] = -1;
        xfers.push_back(send_to(next, &values[i], sizeof(int)));
        xfers.push_back(receive_from(last, &got[i], sizeof(int)));
      }
      MFSDP_TRY(rank.submit(xfers, "six"));
      for (int i = 0; i < 6; ++i)
        if (got[i] != last * 1000000 + round * 10 + i)
          return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "round %d: got %d at %d", round, got[i],
                            i);
    }
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The batches of two ranks need not line up: one sends in one batch what the other takes in three.
 */
TEST(TransportThreadsTest, BatchesNeedNotLineUp) {
  const RanksResult result = run_ranks(RanksOptions(2), [](Rank &rank) {
    char a = 'a', b = 'b', c = 'c', x = 0, y = 0, z = 0;
    if (rank.rank == 0) {
      MFSDP_TRY(rank.submit({send_to(1, &a, 1), send_to(1, &b, 1), send_to(1, &c, 1)}, "three"));
    } else {
      MFSDP_TRY(rank.submit({receive_from(0, &x, 1)}, "first"));
      MFSDP_TRY(rank.submit({}, "nothing"));
      MFSDP_TRY(rank.submit({receive_from(0, &y, 1)}, "second"));
      MFSDP_TRY(rank.submit({receive_from(0, &z, 1)}, "third"));
      EXPECT_EQ(std::string({x, y, z}), "abc");
    }
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Rounds differ in who speaks to whom and how much, so ranks drift apart and meet again. */
TEST(TransportThreadsTest, ManyUnevenBatches) {
  const int kRounds = 400;
  for (int32_t world : {2, 4, 7}) {
    const RanksResult result = run_ranks(RanksOptions(world), [](Rank &rank) {
      std::vector<Bytes> out, in;
      for (int round = 0; round < kRounds; ++round) {
        std::vector<mfsdp_xfer> xfers;
        std::vector<int32_t> senders;
        out.clear();
        in.clear();
        for (int32_t from = 0; from < rank.world; ++from)
          for (int32_t to = 0; to < rank.world; ++to) {
            if (from == to || (from * 5 + to * 3 + round) % 3 == 0) continue;
            const auto nbytes = static_cast<std::size_t>((from * 37 + to * 11 + round * 13) % 200);
            if (from == rank.rank) {
              out.emplace_back(nbytes);
              fill(&out.back(), from, to, round);
              xfers.push_back(send_to(to, out.back().data(), nbytes));
            } else if (to == rank.rank) {
              in.emplace_back(nbytes, static_cast<unsigned char>(0));
              senders.push_back(from);
              xfers.push_back(receive_from(from, in.back().data(), nbytes));
            }
          }
        MFSDP_TRY(rank.submit(xfers, "uneven"));
        for (std::size_t i = 0; i < in.size(); ++i)
          if (!holds(in[i].data(), in[i].size(), senders[i], rank.rank, round))
            return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "round %d: wrong bytes from rank %d",
                              round, static_cast<int>(senders[i]));
      }
      return rank.finish();
    });
    EXPECT_TRUE(result.ok()) << "world " << world << "\n" << result.text();
  }
}

/* A worker queue has several batches in flight; the ring of 2 makes submit wait. Buffers may be
 * reused only after the event (fault b9), so every round has its own. */
TEST(TransportThreadsTest, WorkerQueuesAndAFullRing) {
  const int kRounds = 50;
  RanksOptions options(4);
  options.host.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  options.world.batch_count = 2;
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    const auto world = static_cast<std::size_t>(rank.world);
    std::vector<int> out(world * kRounds), in(world * kRounds, -1);
    for (int round = 0; round < kRounds; ++round) {
      std::vector<mfsdp_xfer> xfers;
      for (int32_t p = 0; p < rank.world; ++p) {
        const std::size_t i = static_cast<std::size_t>(round) * world + static_cast<std::size_t>(p);
        if (p == rank.rank) continue;
        out[i] = round * 100 + rank.rank * 10 + p;
        xfers.push_back(send_to(p, &out[i], sizeof(int)));
        xfers.push_back(receive_from(p, &in[i], sizeof(int)));
      }
      MFSDP_TRY(rank.submit(xfers, "worker"));
    } /* xfers is gone: the transport has a copy */
    MFSDP_TRY(rank.finish());
    for (int round = 0; round < kRounds; ++round)
      for (int32_t p = 0; p < rank.world; ++p) {
        const std::size_t i = static_cast<std::size_t>(round) * world + static_cast<std::size_t>(p);
        if (p != rank.rank && in[i] != round * 100 + p * 10 + rank.rank)
          return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "round %d: %d", round, in[i]);
      }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Fault a9 asks for 64 ranks; the default batch of 64 transfers is too small: reserve. */
TEST(TransportThreadsTest, SixtyFourRanks) {
  const RanksResult result = run_ranks(RanksOptions(64), [](Rank &rank) {
    MFSDP_TRY(rank.transport.ops->reserve(rank.transport.self, &rank.context, 2 * 63));
    for (int round = 0; round < 3; ++round)
      MFSDP_TRY(exchange_all(rank, 100, round, true));
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- memory ---- */

TEST(TransportThreadsTest, SubmitAllocatesNothing) {
  std::atomic<uint64_t> allocations{0};
  if (!test::malloc_count_supported()) GTEST_SKIP() << test::malloc_count_why_not();
  const RanksResult result = run_ranks(RanksOptions(4), [&allocations](Rank &rank) {
    char out[4][64] = {{0}}, in[4][64];
    std::vector<mfsdp_xfer> xfers;
    const int64_t before = rank.memory->alloc_count();
    for (int32_t p = 0; p < 4; ++p)
      if (p != rank.rank) {
        xfers.push_back(send_to(p, out[p], 64));
        xfers.push_back(receive_from(p, in[p], 64));
      }
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) test::malloc_count_begin();
    MFSDP_TRY(rank.barrier());
    for (int round = 0; round < 100; ++round)
      MFSDP_TRY(rank.submit(xfers, "counted"));
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) allocations = test::malloc_count_end();
    EXPECT_EQ(rank.memory->alloc_count(), before);
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(allocations.load(), 0u);
  test::malloc_count_begin(); /* the counter can count */
  void *volatile block = std::malloc(1);
  EXPECT_EQ(test::malloc_count_end(), 1u);
  std::free(block);
}

/* The nth allocation of rank 1's set-up fails: rank 1 says so, the others end by the deadline,
 * nothing leaks. */
TEST(TransportThreadsTest, EveryAllocationOfSetUpMayFail) {
  int64_t n = 0;
  for (;; ++n) {
    std::atomic<bool> failed{false};
    RanksOptions options = short_deadline(2);
    options.world.deadline_us = 20000;
    options.before = [n](int32_t rank, test::FaultAllocator *memory) {
      if (rank == 1) memory->fail_at(n);
    };
    const RanksResult result = run_ranks(options, [&failed](Rank &rank) {
      if (rank.memory->failed()) failed = true;
      const mfsdp_status reserved =
          rank.transport.ops->reserve(rank.transport.self, &rank.context, 1000);
      if (rank.memory->failed()) failed = true;
      MFSDP_TRY(reserved);
      MFSDP_TRY(exchange_all(rank, 16, 0, true));
      return rank.barrier();
    });
    EXPECT_TRUE(result.clean()) << "allocation " << n << ": " << result.text();
    if (result[1].status == MFSDP_OK) {
      EXPECT_TRUE(result.ok()) << result.text();
      break;
    }
    ASSERT_EQ(result[1].status, MFSDP_E_MEMORY) << result.text();
    expect_part(result[1].error.message, "the allocator refused");
    EXPECT_NE(result[0].status, MFSDP_OK);
  }
  EXPECT_GE(n, 9)
      << "the backend's, the transport's and reserve's tables should have had their turn";
}

/* A failed creation leaves the rank free to try again, and a failed reserve the old capacity. */
TEST(TransportThreadsTest, SetUpMayBeTriedAgain) {
  const RanksResult result = run_ranks(RanksOptions(1), [](Rank &rank) {
    const mfsdp_transport_ops *ops = rank.transport.ops;
    mfsdp_context context;
    mfsdp_context_desc context_desc = rank.context.desc;
    mfsdp_threads_world *world = nullptr;
    mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
    mfsdp_transport t;
    MFSDP_TRY(mfsdp_context_init(&context, &context_desc));
    MFSDP_TRY(mfsdp_threads_world_create(&context, &desc, &world));
    rank.memory->fail_at(2);
    EXPECT_EQ(mfsdp_threads_transport_create(&context, world, 0, rank.backend, &t), MFSDP_E_MEMORY);
    EXPECT_EQ(t.self, nullptr);
    rank.memory->fail_at(-1);
    MFSDP_TRY(mfsdp_threads_transport_create(&context, world, 0, rank.backend, &t));
    rank.memory->fail_at(0);
    EXPECT_EQ(ops->reserve(t.self, &context, 65), MFSDP_E_MEMORY);
    rank.memory->fail_at(-1);
    std::vector<mfsdp_xfer> none(65);
    mfsdp_batch batch = mfsdp_batch_default();
    batch.xfers = none.data();
    batch.xfer_count = 65;
    EXPECT_EQ(ops->submit(t.self, &context, rank.queue, &batch), MFSDP_E_ARGUMENT);
    expect_part(context.error.message, "65 transfers, needs 0 to 64");
    MFSDP_TRY(ops->destroy(t.self, &context));
    MFSDP_TRY(mfsdp_threads_world_destroy(&context, world));
    return mfsdp_context_destroy(&context);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- arguments ---- */

TEST(TransportThreadsTest, CreateRejects) {
  const RanksResult result = run_ranks(RanksOptions(2), [](Rank &rank) {
    mfsdp_transport t;
    mfsdp_context *c = &rank.context;
    EXPECT_EQ(mfsdp_threads_transport_create(c, nullptr, 0, rank.backend, &t), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "world is NULL");
    EXPECT_EQ(mfsdp_threads_transport_create(c, rank.shared, 0, rank.backend, nullptr),
              MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "out is NULL");
    EXPECT_EQ(mfsdp_threads_transport_create(c, rank.shared, 2, rank.backend, &t),
              MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "rank is 2, needs 0 to 1");
    EXPECT_EQ(mfsdp_threads_transport_create(c, rank.shared, -1, rank.backend, &t),
              MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_threads_transport_create(c, rank.shared, rank.rank, nullptr, &t),
              MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "backend: NULL");
    EXPECT_EQ(mfsdp_threads_transport_create(c, rank.shared, rank.rank, rank.backend, &t),
              MFSDP_E_STATE);
    expect_part(c->error.message, "rank " + std::to_string(rank.rank) + " has joined already");
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportThreadsTest, SubmitAndReserveReject) {
  const RanksResult result = run_ranks(RanksOptions(2), [](Rank &rank) {
    const mfsdp_transport *t = &rank.transport;
    char byte = 0;
    EXPECT_EQ(rank.submit({send_to(rank.rank, &byte, 1)}, "to myself"), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "to myself: transfer 0 names peer");
    EXPECT_EQ(rank.submit({send_to(2, &byte, 1)}, "too far"), MFSDP_E_ARGUMENT);
    EXPECT_EQ(rank.submit(std::vector<mfsdp_xfer>(65, send_to(1 - rank.rank, nullptr, 0)), "long"),
              MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "long: the batch has 65 transfers, needs 0 to 64");
    mfsdp_batch bad = mfsdp_batch_default();
    bad.xfer_count = -1;
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, t, rank.queue, &bad), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "the batch has -1 transfers");
    bad = mfsdp_batch_default();
    bad.struct_nbytes = 1;
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, t, rank.queue, &bad), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "batch.struct_nbytes is 1");
    EXPECT_EQ(t->ops->reserve(t->self, &rank.context, -1), MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "reserve of -1");
    MFSDP_TRY(t->ops->reserve(t->self, &rank.context, 10)); /* less than it has: kept */
    MFSDP_TRY(rank.submit(std::vector<mfsdp_xfer>(64, rank.rank == 0 ? send_to(1, nullptr, 0)
                                                                     : receive_from(0, nullptr, 0)),
                          "sixty-four"));
    return rank.finish(); /* nothing of the above hurt the transport */
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- disagreement (fault b3) ---- */

TEST(TransportThreadsTest, SizesThatDifferAreAnErrorOnBothSides) {
  const std::size_t kPairs[][2] = {{8, 7}, {7, 8}, {0, 1}, {1, 0}};
  for (int attempt = 0; attempt < 200;
       ++attempt) { /* the sender must not slip away before the error */
    const auto &pair = kPairs[attempt % 4];
    const RanksResult result = run_ranks(RanksOptions(2), [&pair](Rank &rank) {
      char bytes[8] = {0};
      if (rank.rank == 0) return run_batch(rank, {send_to(1, bytes, pair[0])}, "reduce blocks.7");
      return run_batch(rank, {receive_from(0, bytes, pair[1])}, "reduce blocks.8");
    });
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
      expect_part(result[r].error.message, "rank 0 sends " + std::to_string(pair[0]) +
                                               " bytes in \"reduce blocks.7\", rank 1 receives " +
                                               std::to_string(pair[1]) +
                                               " bytes in \"reduce blocks.8\"");
      EXPECT_EQ(result[r].error.rank, 1) << "the receiver notices";
    }
  }
}

TEST(TransportThreadsTest, CheckWordsThatDifferAreAnErrorOnBothSides) {
  const RanksResult result = run_ranks(RanksOptions(2), [](Rank &rank) {
    char bytes[8] = {0};
    if (rank.rank == 0) return run_batch(rank, {send_to(1, bytes, 8)}, "gather", 0x11);
    return run_batch(rank, {receive_from(0, bytes, 8)}, "reduce", 0x12);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
    expect_part(result[r].error.message,
                "rank 0 sends in \"gather\" (check 0000000000000011), rank 1 "
                "receives in \"reduce\" (check 0000000000000012)");
  }
}

TEST(TransportThreadsTest, CheckWordsAreComparedOnlyWhereBothAreSet) {
  const RanksResult result = run_ranks(RanksOptions(2), [](Rank &rank) {
    char bytes[8] = {0};
    for (int side = 0; side < 2; ++side) {
      const uint64_t check = rank.rank == side ? 5 : 0;
      MFSDP_TRY(rank.submit({rank.rank == 0 ? send_to(1, bytes, 8) : receive_from(0, bytes, 8)},
                            "one-sided", check));
    }
    MFSDP_TRY(rank.submit({rank.rank == 0 ? send_to(1, bytes, 8) : receive_from(0, bytes, 8)},
                          "both", 7));
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- failure ---- */

/* Rank 2 keeps away; 0 waits for 1, 1 waits for 2, 3 sends to 2. All return in time, and the
 * culprit is 2 although nobody but 1 and 3 has to do with it. */
TEST(TransportThreadsTest, TimeOutNamesTheCulpritBehindTheNeighbour) {
  const RanksResult result = run_ranks(short_deadline(4), [](Rank &rank) {
    char byte = 0;
    const int64_t start_us = mfsdp_clock_us();
    mfsdp_status status = MFSDP_OK;
    if (rank.rank == 0) status = run_batch(rank, {receive_from(1, &byte, 1)}, "gather blocks.3");
    if (rank.rank == 1) status = run_batch(rank, {receive_from(2, &byte, 1)}, "gather blocks.3");
    if (rank.rank == 3) status = run_batch(rank, {send_to(2, &byte, 1)}, "gather blocks.3");
    if (rank.rank == 2) mfsdp_clock_sleep_until(start_us + 3 * kShortUs);
    const int64_t took_us = mfsdp_clock_us() - start_us;
    EXPECT_GE(took_us, kShortUs - 20000);
    EXPECT_LE(took_us, 3 * kShortUs + kSlackUs);
    return rank.rank == 2 ? rank.transport.ops->poll(rank.transport.self, &rank.context) : status;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << r << "\n" << result.text();
    EXPECT_EQ(result[r].error.culprit, 2) << result.text();
    EXPECT_STREQ(result[r].error.message, result[0].error.message)
        << "the first error is everyone's";
    expect_part(result[r].error.message, "gather blocks.3: rank ");
    EXPECT_GE(test::waited_ms(result[r].error.message), kShortUs / 1000);
    expect_part(result[r].error.message,
                "rank 2 does not answer: it is in no transfer and in no control call");
  }
}

/* A chain: 0 waits for 1 only, and 1 for 2. Rank 0's clock starts well before rank 1's, so it is
 * rank 0 that notices, and it must look through rank 1. */
TEST(TransportThreadsTest, TimeOutLooksThroughAWaitingNeighbour) {
  const RanksResult result = run_ranks(short_deadline(3), [](Rank &rank) {
    char byte = 0;
    if (rank.rank == 0) return run_batch(rank, {receive_from(1, &byte, 1)}, "ring");
    if (rank.rank == 1) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 2);
      return run_batch(rank, {receive_from(2, &byte, 1)}, "ring");
    }
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 2 * kShortUs);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    expect_part(result[r].error.message, "ring: rank 0 waited ");
    EXPECT_GE(test::waited_ms(result[r].error.message), kShortUs / 1000);
    expect_part(result[r].error.message, " ms for rank 1 to send; rank 2 does not answer");
    EXPECT_EQ(result[r].error.culprit, 2);
    EXPECT_EQ(result[r].error.rank, 0);
  }
}

TEST(TransportThreadsTest, TimeOutKnowsAPeerThatNeverJoinedOrTalksElsewhere) {
  const RanksResult elsewhere = run_ranks(short_deadline(2), [](Rank &rank) {
    char byte = 0;
    if (rank.rank == 1) return rank.barrier();
    return run_batch(rank, {send_to(1, &byte, 1)}, "export");
  });
  EXPECT_EQ(elsewhere[0].status, MFSDP_E_TIMEOUT);
  for (std::size_t r = 0; r < 2; ++r) {
    const std::string message = elsewhere[r].error.message;
    EXPECT_TRUE(message.find("rank 1 to receive; rank 1 is in a control call") !=
                    std::string::npos ||
                message.find("rank 0 has not come and is in a transfer") != std::string::npos)
        << message;
  }

  mfsdp_context context;
  mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
  mfsdp_threads_world *world = nullptr;
  desc.world = 2;
  desc.deadline_us = 50000;
  ASSERT_EQ(mfsdp_threads_world_create(&context, &desc, &world), MFSDP_OK);
  const RanksResult alone = run_ranks(RanksOptions(1), [world](Rank &rank) {
    mfsdp_transport t;
    mfsdp_batch batch = mfsdp_batch_default();
    char byte = 0;
    const mfsdp_xfer xfer = receive_from(1, &byte, 1);
    MFSDP_TRY(mfsdp_threads_transport_create(&rank.context, world, 0, rank.backend, &t));
    batch.xfers = &xfer;
    batch.xfer_count = 1;
    (void)mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch);
    const mfsdp_status status = rank.finish();
    const mfsdp_error error = rank.context.error;
    MFSDP_TRY(t.ops->destroy(t.self, &rank.context));
    return mfsdp_context_take_error(&rank.context, &error) == status ? status : MFSDP_E_STATE;
  });
  EXPECT_EQ(alone[0].status, MFSDP_E_TIMEOUT);
  expect_part(alone[0].error.message, "rank 1 never joined");
  EXPECT_EQ(alone[0].error.culprit, 1);
  EXPECT_EQ(mfsdp_threads_world_destroy(&context, world), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

/* Each waits for the other to send: both are there, so nobody is the culprit, and the message says
 * it. */
TEST(TransportThreadsTest, TimeOutOfRanksThatDisagreeAboutTheOrder) {
  const RanksResult result = run_ranks(short_deadline(2), [](Rank &rank) {
    char byte = 0;
    return run_batch(rank, {receive_from(1 - rank.rank, &byte, 1)}, "crossed");
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[r].error.culprit, -1);
    expect_part(result[r].error.message, "the ranks disagree about the order of transfers");
  }
}

/* The deadline counts from the last progress: 8 messages, each later than half a deadline. */
TEST(TransportThreadsTest, ProgressProlongsTheWait) {
  const RanksResult result = run_ranks(short_deadline(2), [](Rank &rank) {
    char bytes[8] = {0};
    if (rank.rank == 0) {
      std::vector<mfsdp_xfer> all;
      for (char &byte : bytes)
        all.push_back(receive_from(1, &byte, 1));
      MFSDP_TRY(rank.submit(all, "slow"));
    } else {
      for (char &byte : bytes) {
        mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 3);
        MFSDP_TRY(rank.submit({send_to(0, &byte, 1)}, "slow"));
      }
    }
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Rank 0 has more batches than its ring holds, so that its submit waits behind the first, which gets on
 * slowly: rank 1 sends a byte every third of a deadline, and then rank 2 is to send. */
RanksResult behind_a_slow_batch(bool rank_2_sends) {
  RanksOptions options = short_deadline(3);
  options.host.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  options.world.batch_count = 1;
  return run_ranks(options, [=](Rank &rank) {
    char bytes[6] = {0};
    if (rank.rank == 0) {
      std::vector<mfsdp_xfer> all;
      for (char &byte : bytes)
        all.push_back(receive_from(&byte == &bytes[5] ? 2 : 1, &byte, 1));
      (void)rank.submit(all, "slow");
      return run_batch(rank, {}, "behind it");
    }
    for (int i = 0; i < 5; ++i) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 3);
      if (rank.rank == 1) MFSDP_TRY(rank.submit({send_to(0, &bytes[i], 1)}, "slow"));
    }
    if (rank.rank == 2 && !rank_2_sends) /* and is in no call of ours */
      while (rank.transport.ops->poll(rank.transport.self, &rank.context) == MFSDP_OK)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    if (rank.rank == 2) return run_batch(rank, {send_to(0, &bytes[5], 1)}, "slow");
    return rank.finish();
  });
}

TEST(TransportThreadsTest, ASubmitWaitsAsLongAsTheBatchBeforeItGetsOn) {
  const RanksResult result = behind_a_slow_batch(true);
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Not rank 0, whose submit has waited longest. */
TEST(TransportThreadsTest, ASubmitLeavesTheTimeOutToTheBatchBeforeIt) {
  const RanksResult result = behind_a_slow_batch(false);
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_TIMEOUT) << result.text();
  EXPECT_EQ(result[0].error.culprit, 2) << result.text();
  expect_part(result[0].error.message, "for rank 2 to send; rank 2 does not answer");
}

/* Fault b5 in small: a rank leaves early. Those who wait for it do not wait for the deadline. */
TEST(TransportThreadsTest, ALeavingRankIsNoticedAtOnce) {
  for (int before = 0; before < 2; ++before) /* it leaves before or while the others wait */
    for (int sending = 0; sending < 2; ++sending) {
      const RanksResult result = run_ranks(RanksOptions(3), [before, sending](Rank &rank) {
        char byte = 0;
        const int64_t start_us = mfsdp_clock_us();
        if (rank.rank == 1) {
          if (!before) mfsdp_clock_sleep_until(start_us + 50000);
          return MFSDP_OK; /* the helper destroys its transport */
        }
        if (before) mfsdp_clock_sleep_until(start_us + 50000);
        const mfsdp_status status =
            run_batch(rank, {sending ? send_to(1, &byte, 1) : receive_from(1, &byte, 1)}, "step 9");
        EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs) << "the deadline is 20 s";
        return status;
      });
      EXPECT_TRUE(result.clean()) << result.text();
      EXPECT_EQ(result[1].status, MFSDP_OK);
      for (std::size_t r = 0; r < 3; r += 2) {
        EXPECT_EQ(result[r].status, MFSDP_E_PEER) << result.text();
        EXPECT_EQ(result[r].error.culprit, 1);
        expect_part(result[r].error.message,
                    sending ? "waits for rank 1 to receive, but rank 1 has left"
                            : "waits for rank 1 to send, but rank 1 has left");
        expect_part(result[r].error.message, "step 9: rank ");
      }
    }
}

/* Ranks end at different times: that alone is no error. */
TEST(TransportThreadsTest, LeavingAfterTheLastTransferHurtsNobody) {
  const RanksResult result = run_ranks(RanksOptions(4), [](Rank &rank) {
    char byte = 0;
    MFSDP_TRY(exchange_all(rank, 10, 0, true));
    if (rank.rank >= 2) return MFSDP_OK;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 30000);
    MFSDP_TRY(
        rank.submit({rank.rank == 0 ? send_to(1, &byte, 1) : receive_from(0, &byte, 1)}, "two"));
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportThreadsTest, PoisonWakesEveryoneAndStaysTheFirst) {
  const RanksResult result = run_ranks(RanksOptions(4), [](Rank &rank) {
    char byte = 0;
    const int64_t start_us = mfsdp_clock_us();
    if (rank.rank == 3) {
      mfsdp_error why = mfsdp_error_none(), later = mfsdp_error_none();
      mfsdp_clock_sleep_until(start_us + 50000);
      (void)MFSDP_ERROR_SET(&why, MFSDP_E_BACKEND, 3, "the compute queue of rank 3 failed");
      (void)MFSDP_ERROR_SET(&later, MFSDP_E_IO, 0, "another reason");
      rank.transport.ops->poison(rank.transport.self, &why);
      rank.transport.ops->poison(rank.transport.self, &later);
      rank.transport.ops->poison(rank.transport.self, nullptr);
    } else if (rank.rank == 2) {
      (void)rank.barrier(); /* the control plane wakes as well */
      EXPECT_EQ(rank.context.error.status, MFSDP_E_BACKEND);
    } else {
      EXPECT_EQ(run_batch(rank, {receive_from(3, &byte, 1)}, "waiting"), MFSDP_E_BACKEND);
    }
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs);
    /* from now on everything fails at once */
    EXPECT_EQ(rank.submit({send_to((rank.rank + 1) % 4, &byte, 1)}, "late"), MFSDP_E_POISONED);
    expect_part(rank.context.error.message,
                "late: refused after the first error (MFSDP_E_BACKEND, "
                "noticed by rank 3): the compute queue of rank 3 failed");
    EXPECT_EQ(rank.context.error.culprit, 3);
    EXPECT_EQ(rank.barrier(), MFSDP_E_POISONED);
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_BACKEND) << result.text();
    EXPECT_EQ(result[r].error.culprit, 3);
  }
}

/* A failed batch returns only after nobody reads its buffers: the poison comes while rank 1 copies,
 * rank 0 overwrites its buffer as soon as its batch has returned, and rank 1 must not have seen
 * that. */
TEST(TransportThreadsTest, NobodyReadsABufferOfAFailedBatch) {
  const std::size_t nbytes = std::size_t(48) << 20; /* copied in some 10 ms */
  for (int attempt = 0; attempt < 6; ++attempt) {
    Bytes out(nbytes, 1), in(nbytes, 0);
    const RanksResult result = run_ranks(RanksOptions(3), [attempt, &out, &in](Rank &rank) {
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 2) {
        mfsdp_clock_sleep_until(mfsdp_clock_us() + attempt * 1500);
        rank.transport.ops->poison(rank.transport.self, nullptr);
        return MFSDP_OK;
      }
      if (rank.rank == 1) return run_batch(rank, {receive_from(0, in.data(), in.size())}, "large");
      const mfsdp_status status = run_batch(rank, {send_to(1, out.data(), out.size())}, "large");
      std::memset(out.data(), 2, out.size());
      return status;
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_TRUE(in[0] == 0 || in[0] == 1);
    EXPECT_EQ(std::memcmp(in.data(), in.data() + 1, in.size() - 1), 0)
        << "attempt " << attempt << ": the copy has seen what came after the batch";
  }
}

/* ---- native collectives: what tests/collective_test.cpp does not see, their failures ---- */

/* One of `kind` with a part of `each` floats for every rank; buffers have room for all of them. */
mfsdp_status run_native(Rank &rank, mfsdp_native_kind kind, std::vector<float> *full,
                        std::vector<float> *sum, int64_t each) {
  std::vector<mfsdp_native_part> parts(static_cast<std::size_t>(rank.world));
  mfsdp_native_args args;
  std::memset(&args, 0, sizeof(args));
  for (int32_t r = 0; r < rank.world; ++r)
    parts[static_cast<std::size_t>(r)] = {r * each, 0, each, r};
  args.struct_nbytes = sizeof(args);
  args.kind = kind;
  args.dtype = MFSDP_F32;
  args.parts = parts.data();
  args.part_count = rank.world;
  args.src = full->data();
  args.dst = kind == MFSDP_NATIVE_GATHER ? full->data() : sum->data();
  args.label = "step 9";
  MFSDP_TRY(
      rank.transport.ops->native_prepare(rank.transport.self, &rank.context, &args, &args.form));
  const mfsdp_status status =
      mfsdp_transport_native(&rank.context, &rank.transport, rank.queue, &args);
  if (status == MFSDP_E_POISONED) /* another has noticed already: what it said */
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  return status == MFSDP_OK ? rank.finish() : status;
}

const mfsdp_native_kind kNativeKinds[] = {MFSDP_NATIVE_GATHER, MFSDP_NATIVE_REDUCE};

/* Rank 1 leaves (or stalls) before the second of two; before that all is well. */
RanksResult native_without_rank_1(mfsdp_native_kind kind, bool leaves, int64_t deadline_us) {
  RanksOptions options(4);
  options.world.deadline_us = deadline_us;
  return run_ranks(options, [=](Rank &rank) {
    std::vector<float> full(400, 1.0f), sum(100);
    MFSDP_TRY(run_native(rank, kind, &full, &sum, 100));
    const int64_t start_us = mfsdp_clock_us();
    if (rank.rank == 1) {
      if (leaves) return MFSDP_OK;
      mfsdp_clock_sleep_until(start_us + 3 * kShortUs);
      return rank.transport.ops->poll(rank.transport.self, &rank.context);
    }
    const mfsdp_status status = run_native(rank, kind, &full, &sum, 100);
    EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
    return status;
  });
}

TEST(TransportThreadsTest, ARankThatLeavesANativeCollectiveIsNoticedAtOnce) {
  for (mfsdp_native_kind kind : kNativeKinds) {
    const RanksResult result = native_without_rank_1(kind, true, 20 * 1000000);
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_EQ(result[1].status, MFSDP_OK);
    for (std::size_t r = 0; r < 4; r += r == 0 ? 2 : 1) {
      EXPECT_EQ(result[r].status, MFSDP_E_PEER) << result.text();
      EXPECT_EQ(result[r].error.culprit, 1);
      expect_part(result[r].error.message, "waits for rank 1 to take part, but rank 1 has left");
    }
  }
}

TEST(TransportThreadsTest, ARankThatStallsANativeCollectiveIsNamedAtTheDeadline) {
  for (mfsdp_native_kind kind : kNativeKinds) {
    const RanksResult result = native_without_rank_1(kind, false, kShortUs);
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
      EXPECT_EQ(result[r].error.culprit, 1);
      expect_part(result[r].error.message, "step 9: rank ");
      expect_part(result[r].error.message, " ms for rank 1 to take part; rank 1 does not answer");
    }
  }
}

/* Transfers that wait for a rank which waits in a native collective name who is missing there. */
TEST(TransportThreadsTest, TimeOutLooksThroughANativeCollective) {
  const RanksResult result = run_ranks(short_deadline(3), [](Rank &rank) {
    std::vector<float> full(300), sum(100);
    char byte = 0;
    if (rank.rank == 0) return run_batch(rank, {receive_from(1, &byte, 1)}, "behind");
    if (rank.rank == 1) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100000); /* so that rank 0's time is up first */
      return run_native(rank, MFSDP_NATIVE_GATHER, &full, &sum, 100);
    }
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 3 * kShortUs);
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[r].error.culprit, 2) << result.text();
    expect_part(result[r].error.message, "rank 2 does not answer");
  }
}

/* As NobodyReadsABufferOfAFailedBatch: poison comes while peers read, and what this rank writes into
 * its buffer after its call has returned they must not see. */
TEST(TransportThreadsTest, NobodyReadsABufferOfAFailedNativeCollective) {
  const int64_t each = MFSDP_TEST_SANITIZER ? 1 << 17 : 1 << 20; /* 4 MiB a part: some ms */
  for (int attempt = 0; attempt < 4; ++attempt) {
    const mfsdp_native_kind kind = kNativeKinds[attempt % 2];
    std::vector<std::vector<float>> fulls(3), sums(3);
    const RanksResult result = run_ranks(RanksOptions(3), [&](Rank &rank) {
      const auto own = static_cast<std::size_t>(rank.rank);
      fulls[own].assign(static_cast<std::size_t>(3 * each), 1.0f);
      sums[own].assign(static_cast<std::size_t>(each), 0.0f);
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 2) {
        std::thread late([&rank, attempt] {
          mfsdp_clock_sleep_until(mfsdp_clock_us() + 300 + attempt * 700);
          rank.transport.ops->poison(rank.transport.self, nullptr);
        });
        const mfsdp_status status = run_native(rank, kind, &fulls[own], &sums[own], each);
        fulls[own].assign(fulls[own].size(), 2.0f);
        late.join();
        return status;
      }
      return run_native(rank, kind, &fulls[own], &sums[own], each);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 2; ++r) {
      for (float value : fulls[r])
        ASSERT_EQ(value, 1.0f);
      for (float value : sums[r])
        ASSERT_TRUE(value == 0.0f || value == 1.0f || value == 2.0f || value == 3.0f) << value;
    }
  }
}

/* A world's links are what is tried there, and native collectives would not go over them. */
TEST(TransportThreadsTest, NativeCollectivesDoNotPassBySlowLinks) {
  RanksOptions options(2);
  options.world.latency_us = 10;
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    std::vector<float> full(200), sum(100);
    EXPECT_EQ(run_native(rank, MFSDP_NATIVE_GATHER, &full, &sum, 100), MFSDP_E_UNSUPPORTED);
    expect_part(rank.context.error.message, "copy past this world's artificial links");
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- one queue, life cycle ---- */

/* Fault b4: two queues used at once are refused, not mixed. */
TEST(TransportThreadsTest, TwoQueuesAtOnceAreRefused) {
  RanksOptions options(2);
  options.host.queue_kind = MFSDP_HOST_QUEUE_WORKER;
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    static char bytes[2] = {0, 0};
    mfsdp_queue *second = nullptr;
    if (rank.rank == 1) {
      while (rank.transport.ops->poll(rank.transport.self, &rank.context) == MFSDP_OK)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
      return rank.transport.ops->poll(rank.transport.self, &rank.context);
    }
    MFSDP_TRY(
        rank.backend->ops->queue_create(rank.backend->self, &rank.context, "second", &second));
    MFSDP_TRY(rank.submit({receive_from(1, &bytes[0], 1)}, "first"));
    std::swap(rank.queue, second);
    MFSDP_TRY(rank.submit({receive_from(1, &bytes[1], 1)}, "second"));
    const mfsdp_status on_second = rank.finish();
    std::swap(rank.queue, second);
    EXPECT_EQ(on_second, MFSDP_E_STATE);
    const mfsdp_status on_first = rank.finish();
    rank.backend->ops->queue_destroy(rank.backend->self, &rank.context, second);
    return on_first;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_STATE) << result.text();
    EXPECT_EQ(result[r].error.culprit, 0);
    expect_part(result[r].error.message, "a transport serves one communication queue");
  }
}

/* A queue that nothing runs: calls are kept, and run or dropped when the test says so. */
struct HeldQueue {
  const mfsdp_backend *real;
  mfsdp_backend table;
  mfsdp_backend_ops ops;
  std::vector<std::pair<mfsdp_task, void *>> calls;
  std::vector<mfsdp_event *> recorded; /* none of them ever passes */
  mfsdp_status refuse = MFSDP_OK;

  explicit HeldQueue(const mfsdp_backend *backend) : real(backend), table(*backend) {
    ops = *backend->ops;
    ops.queue_call = &HeldQueue::queue_call;
    ops.event_create = &HeldQueue::event_create;
    ops.event_destroy = &HeldQueue::event_destroy;
    ops.event_record = &HeldQueue::event_record;
    ops.event_wait = &HeldQueue::event_wait;
    table.ops = &ops;
    table.self = this;
  }
  static mfsdp_status queue_call(void *self, mfsdp_queue *, mfsdp_task task, void *argument) {
    auto *held = static_cast<HeldQueue *>(self);
    if (held->refuse != MFSDP_OK) return held->refuse;
    held->calls.emplace_back(task, argument);
    return MFSDP_OK;
  }
  static mfsdp_status event_create(void *self, mfsdp_context *context, mfsdp_event **out) {
    const mfsdp_backend *b = static_cast<HeldQueue *>(self)->real;
    return b->ops->event_create(b->self, context, out);
  }
  static void event_destroy(void *self, mfsdp_context *context, mfsdp_event *event) {
    const mfsdp_backend *b = static_cast<HeldQueue *>(self)->real;
    b->ops->event_destroy(b->self, context, event);
  }
  static mfsdp_status event_record(void *self, mfsdp_queue *, mfsdp_event *event) {
    static_cast<HeldQueue *>(self)->recorded.push_back(event);
    return MFSDP_OK;
  }
  static mfsdp_status event_wait(void *self, mfsdp_context *context, mfsdp_event *event,
                                 int64_t timeout_us) {
    for (mfsdp_event *held : static_cast<HeldQueue *>(self)->recorded)
      if (held == event) {
        std::this_thread::sleep_for(std::chrono::microseconds(timeout_us));
        return MFSDP_FAIL(context, MFSDP_E_TIMEOUT, "held");
      }
    return MFSDP_OK;
  }
};

class HeldQueueTest : public ::testing::Test {
protected:
  /* Runs `body` with rank 0 of a world of 1 on a held queue. */
  void with_transport(
      const std::function<mfsdp_status(Rank &, HeldQueue &, const mfsdp_transport &)> &body) {
    const RanksResult result = run_ranks(RanksOptions(1), [&body](Rank &rank) {
      HeldQueue held(rank.backend);
      mfsdp_threads_world *world = nullptr;
      mfsdp_threads_world_desc desc = mfsdp_threads_world_desc_default();
      mfsdp_transport t;
      desc.deadline_us = 50000;
      desc.batch_count = 2;
      MFSDP_TRY(mfsdp_threads_world_create(&rank.context, &desc, &world));
      MFSDP_TRY(mfsdp_threads_transport_create(&rank.context, world, 0, &held.table, &t));
      MFSDP_TRY(body(rank, held, t));
      MFSDP_TRY(t.ops->destroy(t.self, &rank.context));
      return mfsdp_threads_world_destroy(&rank.context, world);
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
};

TEST_F(HeldQueueTest, DestroyAndReserveWaitForQueuedBatches) {
  with_transport([](Rank &rank, HeldQueue &held, const mfsdp_transport &t) {
    const mfsdp_batch batch = mfsdp_batch_default();
    mfsdp_error error = mfsdp_error_none();
    MFSDP_TRY(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch));
    EXPECT_EQ(t.ops->destroy(t.self, &rank.context), MFSDP_E_STATE);
    expect_part(rank.context.error.message, "a batch of rank 0 is queued and has not run");
    EXPECT_EQ(t.ops->reserve(t.self, &rank.context, 1000), MFSDP_E_STATE);
    EXPECT_EQ(held.calls.size(), 1u);
    return held.calls[0].first(held.calls[0].second, &error);
  });
}

/* A failed queue skips its work; peers still wait for it, so the owner poisons and may then leave.
 */
TEST_F(HeldQueueTest, PoisonFreesBatchesThatNeverRan) {
  with_transport([](Rank &rank, HeldQueue &, const mfsdp_transport &t) {
    const mfsdp_batch batch = mfsdp_batch_default();
    MFSDP_TRY(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch));
    t.ops->poison(t.self, nullptr);
    return MFSDP_OK;
  });
}

/* A batch that was queued before the poison and runs after it does nothing but fail. */
TEST_F(HeldQueueTest, ABatchThatRunsAfterThePoisonFails) {
  with_transport([](Rank &rank, HeldQueue &held, const mfsdp_transport &t) {
    const mfsdp_batch batch = mfsdp_batch_default();
    mfsdp_error why = mfsdp_error_none(), error = mfsdp_error_none();
    MFSDP_TRY(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch));
    (void)MFSDP_ERROR_SET(&why, MFSDP_E_PEER, 0, "gone");
    t.ops->poison(t.self, &why);
    EXPECT_EQ(held.calls[0].first(held.calls[0].second, &error), MFSDP_E_PEER);
    EXPECT_STREQ(error.message, "gone");
    return MFSDP_OK;
  });
}

TEST_F(HeldQueueTest, AFullRingWaitsForTheDeadlineOnly) {
  with_transport([](Rank &rank, HeldQueue &, const mfsdp_transport &t) {
    const mfsdp_batch batch = mfsdp_batch_default();
    const int64_t start_us = mfsdp_clock_us();
    MFSDP_TRY(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch));
    MFSDP_TRY(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch));
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch), MFSDP_E_TIMEOUT);
    expect_part(rank.context.error.message,
                "the queue of rank 0 has run none of 2 submitted batches for 50 ms");
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs);
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch), MFSDP_E_POISONED);
    return MFSDP_OK;
  });
}

TEST_F(HeldQueueTest, ARefusedBatchIsForgotten) {
  with_transport([](Rank &rank, HeldQueue &held, const mfsdp_transport &t) {
    const mfsdp_batch batch = mfsdp_batch_default();
    held.refuse = MFSDP_E_BACKEND;
    for (int i = 0; i < 5; ++i) /* more than the ring holds */
      EXPECT_EQ(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch), MFSDP_E_BACKEND);
    expect_part(rank.context.error.message, "batch: the queue of rank 0 refused the batch");
    return MFSDP_OK;
  });
}

/* A queue that failed skips its batches: what it failed of comes out with the batch that finds the
 * ring full, at once, and reaches the peers. */
TEST(TransportThreadsTest, AFailedQueueTellsWhyAtOnce) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER}) {
    RanksOptions options(2);
    options.host.queue_kind = kind;
    const int64_t start_us = mfsdp_clock_us();
    const RanksResult result = run_ranks(options, [](Rank &rank) {
      char byte = 0;
      mfsdp_status status = MFSDP_OK;
      if (rank.rank == 0) return run_batch(rank, {receive_from(1, &byte, 1)}, "receive");
      MFSDP_TRY(rank.backend->ops->queue_call(
          rank.backend->self, rank.queue,
          [](void *, mfsdp_error *error) {
            return MFSDP_ERROR_SET(error, MFSDP_E_BACKEND, -1, "out of order");
          },
          nullptr));
      for (int i = 0; i < 5 && status == MFSDP_OK; ++i) /* the ring holds four */
        status = rank.submit({send_to(0, &byte, 1)}, "send");
      return status;
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs);
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_BACKEND) << result.text();
      expect_part(result[r].error.message, "out of order");
    }
  }
}

/* ---- artificial links ---- */

/* When rank 0 began to send to rank 1, and when each of them was done. */
struct LinkTimes {
  std::atomic<int64_t> start_us{0}, sender_us{0}, receiver_us{0};
};

mfsdp_status send_one_way(Rank &rank, std::size_t nbytes, int per_batch, LinkTimes *times) {
  std::vector<Bytes> data(static_cast<std::size_t>(per_batch), Bytes(nbytes, 0xee));
  std::vector<mfsdp_xfer> xfers;
  for (Bytes &d : data) {
    if (rank.rank == 0) fill(&d, 0, 1, 0);
    xfers.push_back(rank.rank == 0 ? send_to(1, d.data(), nbytes)
                                   : receive_from(0, d.data(), nbytes));
  }
  MFSDP_TRY(rank.barrier());
  if (rank.rank == 0) times->start_us = mfsdp_clock_us();
  MFSDP_TRY(rank.submit(xfers, "one way"));
  MFSDP_TRY(rank.finish());
  (rank.rank == 0 ? times->sender_us : times->receiver_us) = mfsdp_clock_us();
  for (const Bytes &d : data)
    if (!holds(d.data(), nbytes, 0, 1, 0))
      return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "wrong bytes");
  return MFSDP_OK;
}

/* Never earlier than latency + messages x bytes / bandwidth, on both sides: that is exact. Later by
 * what a loaded machine and a sanitizer may add to the best of four: 100 ms. */
TEST(TransportThreadsTest, LinksTakeLatencyAndBandwidth) {
  const struct {
    int64_t latency_us;
    double bytes_per_us;
    std::size_t nbytes;
    int per_batch;
    int64_t expected_us;
  } cases[] = {{30000, 0.0, 1000, 1, 30000}, /* latency alone */
               {30000, 0.0, 0, 1, 30000},    /* also of an empty message */
               {0, 10.0, 400000, 1, 40000},  /* bandwidth alone */
               {20000, 10.0, 200000, 1, 40000},
               {20000, 10.0, 100000, 4, 60000}}; /* one at a time, behind one latency */
  for (const auto &c : cases) {
    RanksOptions options(2);
    LinkTimes times;
    int64_t sender_us = INT64_MAX, receiver_us = INT64_MAX;
    options.world.latency_us = c.latency_us;
    options.world.bytes_per_us = c.bytes_per_us;
    const RanksResult result = run_ranks(options, [&](Rank &rank) {
      for (int i = 0; i < 4; ++i) {
        MFSDP_TRY(send_one_way(rank, c.nbytes, c.per_batch, &times));
        MFSDP_TRY(rank.barrier());
        if (rank.rank == 0) {
          sender_us = std::min<int64_t>(sender_us, times.sender_us - times.start_us);
          receiver_us = std::min<int64_t>(receiver_us, times.receiver_us - times.start_us);
        }
        MFSDP_TRY(rank.barrier());
      }
      return MFSDP_OK;
    });
    ASSERT_TRUE(result.ok()) << result.text();
    EXPECT_GE(sender_us, c.expected_us);
    EXPECT_GE(receiver_us, c.expected_us);
    EXPECT_LE(sender_us, c.expected_us + 100000);
    EXPECT_LE(receiver_us, c.expected_us + 100000);
  }
}

/* The clock starts with the post: a receiver that comes later than the message finds it there. And
 * wires are independent: a rank's two messages to two peers travel at the same time, as do the two
 * directions between two ranks. */
TEST(TransportThreadsTest, LinksCarryFromThePostOnAndIndependently) {
  RanksOptions options(3);
  std::atomic<int64_t> late_us{0};
  std::vector<int64_t> took_us(3);
  options.world.latency_us = 100000;
  const RanksResult result = run_ranks(options, [&](Rank &rank) {
    char out = 1, in = 0;
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 0) {
      MFSDP_TRY(rank.submit({send_to(1, &out, 1)}, "early"));
      MFSDP_TRY(rank.finish());
    } else if (rank.rank == 1) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 200000);
      const int64_t start_us = mfsdp_clock_us();
      MFSDP_TRY(rank.submit({receive_from(0, &in, 1)}, "late"));
      MFSDP_TRY(rank.finish());
      late_us = mfsdp_clock_us() - start_us;
    }
    MFSDP_TRY(rank.barrier());
    const int64_t start_us = mfsdp_clock_us();
    MFSDP_TRY(exchange_all(rank, 1000, 0, true));
    took_us[static_cast<std::size_t>(rank.rank)] = mfsdp_clock_us() - start_us;
    return MFSDP_OK;
  });
  ASSERT_TRUE(result.ok()) << result.text();
  EXPECT_LT(late_us, 80000) << "less than a latency: it was on the way already";
  for (const int64_t us : took_us) {
    EXPECT_GE(us, 98000);
    EXPECT_LT(us, 190000) << "less than two latencies: side by side";
  }
}

/* Waiting for a link is sleeping: it takes next to no processor time. */
TEST(TransportThreadsTest, WaitingForALinkIsSleeping) {
  RanksOptions options(4);
  options.world.latency_us = 50000;
  timespec before, after;
  const int64_t start_us = mfsdp_clock_us();
  ASSERT_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before), 0);
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    for (int round = 0; round < 10; ++round)
      MFSDP_TRY(exchange_all(rank, 100, round, true));
    return MFSDP_OK;
  });
  ASSERT_EQ(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after), 0);
  ASSERT_TRUE(result.ok()) << result.text();
  const double cpu_us = 1e6 * static_cast<double>(after.tv_sec - before.tv_sec) +
                        1e-3 * static_cast<double>(after.tv_nsec - before.tv_nsec);
  EXPECT_GE(mfsdp_clock_us() - start_us, 10 * 50000);
  EXPECT_LT(cpu_us, 4 * 10 * 50000 * 0.25) << "a quarter of what spinning would take";
}

/* Links change times, not bytes, order or queues. */
TEST(TransportThreadsTest, LinksChangeNoResult) {
  for (const mfsdp_host_queue_kind kind : {MFSDP_HOST_QUEUE_INLINE, MFSDP_HOST_QUEUE_WORKER})
    for (int32_t world : kWorlds) {
      RanksOptions options(world);
      options.host.queue_kind = kind;
      options.world.latency_us = 300;
      options.world.bytes_per_us = 500.0;
      const RanksResult result = run_ranks(options, [](Rank &rank) {
        for (int round = 0; round < 4; ++round)
          for (const std::size_t nbytes : {std::size_t(0), std::size_t(1), std::size_t(70000)})
            MFSDP_TRY(exchange_all(rank, nbytes, round, round % 2 == 0));
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << result.text();
    }
}

/* A message that needs longer than the deadline is an error within the deadline, on both sides. */
TEST(TransportThreadsTest, DeadlinesHoldOnSlowLinks) {
  RanksOptions options = short_deadline(2);
  LinkTimes times;
  options.world.latency_us = 1000000000;
  const int64_t start_us = mfsdp_clock_us();
  const RanksResult result =
      run_ranks(options, [&](Rank &rank) { return send_one_way(rank, 10, 1, &times); });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    expect_part(result[r].error.message, "artificial links carry a message for longer than the");
  }
}

/* Poison from a rank that waits for nothing wakes those who wait for their links. */
TEST(TransportThreadsTest, PoisonWakesRanksThatWaitForALink) {
  RanksOptions options(3);
  LinkTimes times;
  options.world.latency_us = 1000000000;
  const int64_t start_us = mfsdp_clock_us();
  const RanksResult result = run_ranks(options, [&](Rank &rank) {
    if (rank.rank < 2) return send_one_way(rank, 10, 1, &times);
    MFSDP_TRY(rank.barrier());
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 50000);
    return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "enough");
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs);
  for (std::size_t r = 0; r < 2; ++r)
    EXPECT_EQ(result[r].status, MFSDP_E_STATE) << result.text();
}

} // namespace
