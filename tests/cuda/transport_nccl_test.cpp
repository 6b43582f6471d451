/* SPDX-License-Identifier: MIT */
/*
 * transport_nccl.h on the host double, or on hardware with as many devices as a test has ranks;
 * transport_cases.h has what is not its own.
 */
#include "mfsdp/cuda/transport_nccl.h"

#if !defined(MFSDP_TEST_HARDWARE) /* scripts/gpu_check.sh links the real libraries */
#include "tests/cudasim/cudasim.h"
#endif
#include "tests/cuda/transport_cases.h"

#include <atomic>
#include <thread>

namespace {

using test::Block;
using test::Bytes;
using test::exchange_all;
using test::expect_part;
using test::kLabels;
using test::one_byte;
using test::one_message;
using test::Rank;
using test::RanksOptions;
using test::RanksResult;
using test::receive_from;
using test::reduce_and_gather;
using test::run_ranks;
using test::send_to;

/* Deadlines of tests that wait for one; slack covers a loaded machine and sanitizers. */
const int64_t kShortUs = 300000;
const int64_t kSlackUs = 5000000;

#define NEEDS_DEVICES(count) \
  if (test::nccl_rig_devices() < (count)) GTEST_SKIP() << "needs devices: " << (count)

RanksOptions nccl_ranks(int32_t world, bool nonblocking = true,
                        int64_t deadline_us = 20 * 1000000) {
  RanksOptions options(world);
  options.cuda = true;
  options.nccl.on = true;
  options.nccl.nonblocking = nonblocking;
  options.world.deadline_us = deadline_us;
  return options;
}

/* Both kinds of communicators, or with a sanitizer the kind that may be aborted. */
std::vector<bool> kinds() {
  return MFSDP_TEST_SANITIZER ? std::vector<bool>{true} : std::vector<bool>{true, false};
}

mfsdp__nccl_transport *state_of(const Rank &rank) {
  return static_cast<mfsdp__nccl_transport *>(rank.transport.self);
}

mfsdp_nccl_transport_desc desc_of(const Rank &rank) {
  mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
  desc.nonblocking = state_of(rank)->desc.nonblocking;
  desc.deadline_us = kShortUs;
  return desc;
}

/* All ranks; beyond the short deadline of the world. */
mfsdp_status meet(Rank &rank) {
  return rank.control.ops->allgather(rank.control.self, &rank.context, nullptr, 0, nullptr,
                                     20 * 1000000);
}

/* ---- what arrives ---- */

TEST(TransportNccl, OneCopyBetweenTwoRanks) {
  NEEDS_DEVICES(2);
  for (bool nonblocking : {true, false}) {
    const RanksResult result = run_ranks(nccl_ranks(2, nonblocking), test::one_copy);
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, AllToAllInEveryWorldAndSize) {
  NEEDS_DEVICES(8);
  for (int32_t world : {1, 2, 3, 4, 8}) {
    if (MFSDP_TEST_SANITIZER && world > 4) continue;
    RanksOptions options = nccl_ranks(world, world != 3);
    options.nccl.chunk_nbytes = 256;
    const RanksResult result = run_ranks(options, [](Rank &rank) {
      const int round = 1;
      for (std::size_t nbytes : {0u, 1u, 255u, 256u, 257u, 999u}) /* around a round's end */
        MFSDP_TRY(exchange_all(rank, nbytes, round, nbytes % 2 == 0));
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << "world " << world << "\n" << result.text();
  }
}

/* Fault b2: messages of nothing among others, with and without check words. */
TEST(TransportNccl, MessagesOfNothingAmongOthers) {
  NEEDS_DEVICES(2);
  for (uint64_t check : {0u, 5u}) {
    const RanksResult result = run_ranks(nccl_ranks(2), [check](Rank &rank) {
      const int32_t peer = 1 - rank.rank;
      Block out(&rank, 8), in(&rank, 8);
      MFSDP_TRY(out.fill(rank.rank + 1));
      for (int round = 0; round < 3; ++round)
        MFSDP_TRY(rank.submit({send_to(peer, nullptr, 0), receive_from(peer, nullptr, 0),
                               send_to(peer, out.data(), 8), receive_from(peer, in.data(), 8),
                               receive_from(peer, in.data(), 0), send_to(peer, out.data(), 0)},
                              "nothing", check));
      MFSDP_TRY(in.download());
      MFSDP_TRY(rank.finish());
      EXPECT_EQ(in.host, Bytes(8, static_cast<unsigned char>(peer + 1)));
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, LargeMessages) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    return exchange_all(rank, (std::size_t(1) << 20) * 5 / 2, 1, true);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, TheTransportIsComplete) {
  NEEDS_DEVICES(3);
  const RanksResult result = run_ranks(nccl_ranks(3), [](Rank &rank) {
    MFSDP_TRY(mfsdp_transport_check(&rank.context, &rank.transport));
    EXPECT_EQ(rank.transport.rank, rank.rank);
    EXPECT_EQ(rank.transport.world, 3);
    EXPECT_EQ(rank.transport.deadline_us, 20 * 1000000);
    EXPECT_EQ(rank.transport.backend, rank.backend);
    EXPECT_EQ(rank.transport.node_of_rank, nullptr);
    EXPECT_TRUE(MFSDP_HAS(rank.transport.ops, native));
    EXPECT_TRUE(MFSDP_HAS(rank.transport.ops, split));
    EXPECT_TRUE(MFSDP_HAS(rank.transport.ops, buffer_register));
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, FirstInFirstOutBetweenTwoRanks) {
  NEEDS_DEVICES(3);
  for (bool nonblocking : kinds()) {
    const RanksResult result = run_ranks(nccl_ranks(3, nonblocking), test::first_in_first_out);
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, BatchesNeedNotLineUp) {
  NEEDS_DEVICES(2);
  for (bool nonblocking : kinds()) {
    const RanksResult result =
        run_ranks(nccl_ranks(2, nonblocking), test::batches_need_not_line_up);
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, TransfersOfABatchProgressTogether) {
  NEEDS_DEVICES(3);
  for (bool nonblocking : kinds()) {
    const RanksResult result =
        run_ranks(nccl_ranks(3, nonblocking), test::transfers_progress_together);
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, ManyUnevenBatches) {
  NEEDS_DEVICES(7);
  for (int32_t world : {2, 4, 7}) {
    if (MFSDP_TEST_SANITIZER && world != 4) continue;
    const RanksResult result = run_ranks(nccl_ranks(world, world != 2), test::many_uneven_batches);
    EXPECT_TRUE(result.ok()) << "world " << world << "\n" << result.text();
  }
}

/* More groups than the transport keeps the time of, behind one that a late rank holds up. */
TEST(TransportNccl, ManyGroupsInFlight) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const int kBatches = 3 * MFSDP__NCCL_TRACKED;
    Block block(&rank, static_cast<std::size_t>(kBatches));
    char *at = static_cast<char *>(block.data());
    if (rank.rank == 0) MFSDP_TRY(block.fill(7));
    if (rank.rank == 1) mfsdp_clock_sleep_until(mfsdp_clock_us() + 50000);
    for (int i = 0; i < kBatches; ++i)
      MFSDP_TRY(rank.submit({rank.rank == 0 ? send_to(1, at + i, 1) : receive_from(0, at + i, 1)},
                            "one of many"));
    MFSDP_TRY(block.download());
    MFSDP_TRY(rank.finish());
    EXPECT_EQ(block.host, Bytes(static_cast<std::size_t>(kBatches), 7));
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The default batch of 64 transfers is too small for as many ranks: reserve. */
TEST(TransportNccl, FortyRanks) {
  NEEDS_DEVICES(40);
  if (MFSDP_TEST_SANITIZER) GTEST_SKIP() << "many threads";
  const RanksResult result = run_ranks(nccl_ranks(40), [](Rank &rank) {
    MFSDP_TRY(rank.transport.ops->reserve(rank.transport.self, &rank.context, 2 * 39));
    return exchange_all(rank, 100, 1, true);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

#if !defined(MFSDP_TEST_HARDWARE)
TEST(TransportNccl, ADelayedRankChangesNothing) {
  const RanksResult result = run_ranks(nccl_ranks(3), [](Rank &rank) {
    if (rank.rank == 1) cudasim::nccl_fault(1, cudasim::NcclFault::kDelay, 1, 2000);
    MFSDP_TRY(rank.barrier());
    for (int round = 0; round < 4; ++round)
      MFSDP_TRY(exchange_all(rank, 300, round, round % 2 == 0));
    return MFSDP_OK;
  });
  cudasim::nccl_reset();
  EXPECT_TRUE(result.ok()) << result.text();
}
#endif

/* ---- collectives ---- */

TEST(TransportNccl, CollectivesRunOverIt) {
  NEEDS_DEVICES(8);
  static const int32_t nodes[] = {0, 1, 0, 1, 1, 0, 2, 2};
  for (mfsdp_algorithm algorithm :
       {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL, MFSDP_NATIVE, MFSDP_ALGORITHM_AUTO})
    for (int32_t world : {1, 2, 3, 5, 8})
      for (int32_t debug : {0, 1}) {
        if (MFSDP_TEST_SANITIZER && world != 3) continue;
        if (debug && world != 3) continue;
        RanksOptions options = nccl_ranks(world, world != 5);
        options.nccl.node_of_rank = algorithm == MFSDP_HIERARCHICAL ? nodes : nullptr;
        options.context.debug_check = debug;
        const RanksResult result = run_ranks(
            options, [algorithm](Rank &rank) { return reduce_and_gather(rank, algorithm); });
        EXPECT_TRUE(result.ok()) << "world " << world << ", " << mfsdp_algorithm_name(algorithm)
                                 << "\n"
                                 << result.text();
      }
}

/* A native collective in every dtype; F32 sums of whole numbers are exact, 16-bit ones of small
 * ones too. */
mfsdp_status native_in(Rank &rank, mfsdp_dtype dtype) {
  const std::size_t element = mfsdp_dtype_nbytes(dtype);
  const int32_t world = rank.world;
  std::vector<mfsdp_native_part> parts;
  for (int32_t r = 0; r < world; ++r) {
    mfsdp_native_part part;
    part.owner = r;
    part.count = 5 + r;
    part.unit_offset = 10 * (world - 1 - r); /* not in rank order, with gaps */
    part.shard_offset = 3;
    parts.push_back(part);
  }
  Block full(&rank, static_cast<std::size_t>(10 * world) * element, 0);
  Block own(&rank, static_cast<std::size_t>(8 + world) * element, 0);
  mfsdp_native_args args;
  std::memset(&args, 0, sizeof(args));
  args.struct_nbytes = sizeof(args);
  args.kind = MFSDP_NATIVE_REDUCE;
  args.dtype = dtype;
  args.parts = parts.data();
  args.part_count = world;
  args.src = full.data();
  args.dst = own.data();
  args.traffic = MFSDP_TRAFFIC_REDUCE;
  args.label = "native";
  const auto put = [&](Bytes *bytes, std::size_t at, double value) {
    const float f = static_cast<float>(value);
    const uint16_t half = dtype == MFSDP_BF16 ? mfsdp_bf16_from_f32(f) : mfsdp_f16_from_f32(f);
    const void *from = dtype == MFSDP_F64   ? static_cast<const void *>(&value)
                       : dtype == MFSDP_F32 ? static_cast<const void *>(&f)
                                            : static_cast<const void *>(&half);
    std::memcpy(bytes->data() + at * element, from, element);
  };
  for (std::size_t i = 0; i < static_cast<std::size_t>(10 * world); ++i)
    put(&full.host, i, static_cast<double>(i % 7) + rank.rank);
  MFSDP_TRY(
      rank.transport.ops->native_prepare(rank.transport.self, &rank.context, &args, &args.form));
  MFSDP_TRY(full.upload());
  MFSDP_TRY(own.fill(0));
  MFSDP_TRY(mfsdp_transport_native(&rank.context, &rank.transport, rank.queue, &args));
  MFSDP_TRY(own.download());
  MFSDP_TRY(rank.finish());
  Bytes want(own.host.size(), 0);
  const mfsdp_native_part &mine = parts[static_cast<std::size_t>(rank.rank)];
  for (int64_t i = 0; i < mine.count; ++i)
    put(&want, static_cast<std::size_t>(mine.shard_offset + i),
        static_cast<double>((mine.unit_offset + i) % 7 * world + world * (world - 1) / 2));
  EXPECT_EQ(own.host, want) << mfsdp_dtype_name(dtype);
  return MFSDP_OK;
}

TEST(TransportNccl, NativeSumsOfEveryType) {
  NEEDS_DEVICES(3);
  for (mfsdp_dtype dtype : {MFSDP_F32, MFSDP_F64, MFSDP_BF16, MFSDP_F16}) {
    const RanksResult result =
        run_ranks(nccl_ranks(3), [dtype](Rank &rank) { return native_in(rank, dtype); });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* ---- memory ---- */

TEST(TransportNccl, SubmitAllocatesNothing) {
  NEEDS_DEVICES(3);
  const RanksResult result = run_ranks(nccl_ranks(3), [](Rank &rank) {
    Block out(&rank, 64), in(&rank, 3 * 64);
    std::vector<mfsdp_xfer> xfers;
    for (int32_t p = 0; p < 3; ++p)
      if (p != rank.rank) {
        xfers.push_back(send_to(p, out.data(), 64));
        xfers.push_back(receive_from(p, static_cast<char *>(in.data()) + 64 * p, 64));
      }
    MFSDP_TRY(rank.barrier());
    const int64_t before = rank.memory->alloc_count();
    for (uint64_t round = 0; round < 40; ++round) /* half of them with check words */
      MFSDP_TRY(rank.submit(xfers, "counted", round % 2));
    EXPECT_EQ(rank.memory->alloc_count(), before);
    MFSDP_TRY(rank.barrier());
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The nth allocation of rank 1's set-up fails: rank 1 says so, rank 0 is told, nothing leaks. */
TEST(TransportNccl, EveryAllocationOfSetUpMayFail) {
  NEEDS_DEVICES(2);
  int64_t n = MFSDP_TEST_SANITIZER ? 8 : 0; /* the first ones are the backend's */
  for (;; ++n) {
    RanksOptions options = nccl_ranks(2, true, 100000);
    options.before = [n](int32_t rank, test::FaultAllocator *memory) {
      if (rank == 1) memory->fail_at(n);
    };
    const RanksResult result = run_ranks(options, [](Rank &rank) {
      Block block(&rank, 16);
      MFSDP_TRY(rank.transport.ops->reserve(rank.transport.self, &rank.context, 1000));
      return rank.submit(
          {rank.rank == 0 ? send_to(1, block.data(), 16) : receive_from(0, block.data(), 16)},
          "after");
    });
    EXPECT_TRUE(result.clean()) << "allocation " << n << ": " << result.text();
    if (result[1].status == MFSDP_OK) break;
    ASSERT_EQ(result[1].status, MFSDP_E_MEMORY) << result.text();
    EXPECT_NE(result[0].status, MFSDP_OK);
  }
  EXPECT_GE(n, 12) << "the backend's and the transport's tables";
}

#if !defined(MFSDP_TEST_HARDWARE)
/* One call of CUDA or NCCL fails somewhere in an exchange: the rank says so, or all is well;
 * nothing is left. Its peer, which might wait until its deadline, is told. */
TEST(TransportNccl, EveryCallMayFail) {
  int64_t n = 0, errors = 0;
  for (bool delivered = true; delivered; n += MFSDP_TEST_SANITIZER ? 5 : 1) {
    const mfsdp_transport *transports[2] = {nullptr, nullptr};
    RanksOptions options = nccl_ranks(2);
    options.nccl.watchdog_us = 0; /* else its calls are counted, too */
    const RanksResult result = run_ranks(options, [n, &transports, &delivered](Rank &rank) {
      Block out(&rank, 64), in(&rank, 64);
      const int32_t peer = 1 - rank.rank;
      MFSDP_TRY(out.fill(rank.rank + 1));
      MFSDP_TRY(rank.finish());
      transports[rank.rank] = &rank.transport;
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 0) cudasim::fail_at(n);
      MFSDP_TRY(rank.barrier());
      mfsdp_status status = MFSDP_OK;
      for (uint64_t round = 0; round < 2 && status == MFSDP_OK; ++round)
        status = rank.submit({send_to(peer, out.data(), 64), receive_from(peer, in.data(), 64)},
                             "exchange", round);
      if (status == MFSDP_OK) status = rank.finish();
      const mfsdp_error why = *mfsdp_context_error(&rank.context);
      for (const mfsdp_transport *t : transports)
        if (status != MFSDP_OK) t->ops->poison(t->self, &why);
      (void)rank.barrier();
      if (rank.rank == 0) {
        delivered = cudasim::failed();
        cudasim::fail_at(-1);
      }
      MFSDP_TRY(rank.barrier());
      if (status != MFSDP_OK) return mfsdp_context_take_error(&rank.context, &why);
      MFSDP_TRY(in.download());
      MFSDP_TRY(rank.finish());
      EXPECT_EQ(in.host, Bytes(64, static_cast<unsigned char>(peer + 1)));
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.clean()) << "call " << n << ": " << result.text();
    errors += !result.ok();
    EXPECT_TRUE(delivered || result.ok()) << result.text();
  }
  EXPECT_GE(n, 30);
  EXPECT_GE(errors, MFSDP_TEST_SANITIZER ? 4 : 20);
}
#endif

/* ---- registration (fault b6) ---- */

TEST(TransportNccl, RegistersWhatItIsGiven) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    mfsdp_context *c = &rank.context;
    Block block(&rank, 64);
    void *handle = nullptr;
    char byte = 0;
    EXPECT_EQ(t.ops->buffer_register(t.self, c, &byte, 1, &handle), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "buffer_register: ptr is host memory");
    EXPECT_EQ(t.ops->buffer_register(t.self, c, nullptr, 1, &handle), MFSDP_E_ARGUMENT);
    EXPECT_EQ(t.ops->buffer_register(t.self, c, block.data(), 64, nullptr), MFSDP_E_ARGUMENT);
    MFSDP_TRY(t.ops->buffer_register(t.self, c, block.data(), 64, &handle));
    EXPECT_NE(handle, nullptr);
    EXPECT_EQ(t.ops->destroy(t.self, c), MFSDP_E_STATE);
    expect_part(c->error.message, "1 buffers are still registered; deregister them first");
    MFSDP_TRY(exchange_all(rank, 10, 0, true)); /* nothing was destroyed */
    MFSDP_TRY(t.ops->buffer_deregister(t.self, c, handle));
    return t.ops->buffer_deregister(t.self, c, nullptr);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* After an abort the handles are gone with the communicator. */
TEST(TransportNccl, RegistrationsEndWithAnAbortedCommunicator) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    Block block(&rank, 64);
    void *handle = nullptr;
    MFSDP_TRY(t.ops->buffer_register(t.self, &rank.context, block.data(), 64, &handle));
    t.ops->poison(t.self, nullptr);
    while (!mfsdp__nccl_poisoned(state_of(rank)))
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
    return t.ops->buffer_deregister(t.self, &rank.context, handle);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

#if !defined(MFSDP_TEST_HARDWARE)
/* An abort that does not return, since something of the caller's stands before the kernels: the
 * handle cannot be given back yet, which is said by the deadline. */
TEST(TransportNccl, DeregisterDoesNotWaitForAnAbortForEver) {
  const RanksResult result = run_ranks(nccl_ranks(2, true, kShortUs), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    Block block(&rank, 64);
    void *handle = nullptr;
    std::atomic<bool> open{false};
    if (rank.rank == 1) return meet(rank);
    MFSDP_TRY(t.ops->buffer_register(t.self, &rank.context, block.data(), 64, &handle));
    const auto gate = [](void *argument) {
      const int64_t give_up_us = mfsdp_clock_us() + 2 * kSlackUs;
      while (!*static_cast<std::atomic<bool> *>(argument) && mfsdp_clock_us() < give_up_us)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    };
    EXPECT_EQ(cudaLaunchHostFunc(mfsdp_cuda_queue_stream(rank.queue), gate, &open), cudaSuccess);
    MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "never"));
    t.ops->poison(t.self, nullptr);
    while (!state_of(rank)->note->failed_at)
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000); /* the abort has begun */
    const int64_t start_us = mfsdp_clock_us();
    EXPECT_EQ(t.ops->buffer_deregister(t.self, &rank.context, handle), MFSDP_E_STATE);
    expect_part(rank.context.error.message, "buffer_deregister: rank 0: another call of NCCL has");
    EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
    open = true;
    EXPECT_EQ(rank.finish(), MFSDP_E_POISONED);
    while (t.ops->buffer_deregister(t.self, &rank.context, handle) != MFSDP_OK)
      continue;
    return meet(rank);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}
#endif

/* ---- wrap ---- */

TEST(TransportNccl, WrapRejectsDescriptions) {
  const RanksResult result = run_ranks(nccl_ranks(1), [](Rank &rank) {
    const struct {
      void (*edit)(mfsdp_nccl_transport_desc *);
      const char *text;
    } cases[] = {
        {[](mfsdp_nccl_transport_desc *d) { d->struct_nbytes -= 8; }, "desc.struct_nbytes is"},
        {[](mfsdp_nccl_transport_desc *d) { d->deadline_us = 0; }, "desc.deadline_us is 0"},
        {[](mfsdp_nccl_transport_desc *d) { d->watchdog_us = -1; }, "desc.watchdog_us is -1"},
        {[](mfsdp_nccl_transport_desc *d) { d->chunk_nbytes = 255; }, "desc.chunk_nbytes is 255"},
        {[](mfsdp_nccl_transport_desc *d) { d->batch_xfer_count = 0; },
         "desc.batch_xfer_count is 0"},
        {[](mfsdp_nccl_transport_desc *d) {
           d->nonblocking = 0;
           d->may_abort = 1;
         },
         "desc.may_abort needs desc.nonblocking"}};
    mfsdp_context *c = &rank.context;
    mfsdp_cuda_backend *cuda = static_cast<mfsdp_cuda_backend *>(rank.cuda);
    ncclComm_t comm = state_of(rank)->comm;
    mfsdp_transport t;
    for (const auto &one : cases) {
      mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
      one.edit(&desc);
      EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, &desc, &t), MFSDP_E_ARGUMENT) << one.text;
      EXPECT_EQ(t.self, nullptr);
      expect_part(c->error.message, one.text);
    }
    const mfsdp_nccl_transport_desc desc = mfsdp_nccl_transport_desc_default();
    EXPECT_EQ(mfsdp_nccl_transport_wrap(c, nullptr, comm, &desc, &t), MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, nullptr, &desc, &t), MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, nullptr, &t), MFSDP_E_ARGUMENT);
    EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, &desc, nullptr), MFSDP_E_ARGUMENT);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, ACommunicatorThatIsAnotherOne) {
  NEEDS_DEVICES(2);
  for (bool nonblocking : {true, false}) {
    const RanksResult result = run_ranks(nccl_ranks(2, nonblocking), [](Rank &rank) {
      mfsdp_context *c = &rank.context;
      mfsdp_cuda_backend *cuda = static_cast<mfsdp_cuda_backend *>(rank.cuda);
      ncclComm_t comm = state_of(rank)->comm;
      mfsdp_nccl_transport_desc desc = desc_of(rank);
      mfsdp_transport t;
      desc.world = 3;
      desc.rank = rank.rank;
      EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, &desc, &t), MFSDP_E_MISMATCH);
      expect_part(c->error.message, "the communicator is rank " + std::to_string(rank.rank) +
                                        " of 2, desc says rank " + std::to_string(rank.rank) +
                                        " of 3");
      desc.world = 2;
      desc.rank = 1 - rank.rank;
      EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, &desc, &t), MFSDP_E_MISMATCH);
      expect_part(c->error.message, "ranks that were numbered otherwise");
      desc.rank = -1;
      mfsdp_control control = rank.control;
      control.world = 3;
      desc.control = &control;
      EXPECT_EQ(mfsdp_nccl_transport_wrap(c, cuda, comm, &desc, &t), MFSDP_E_ARGUMENT);
      expect_part(c->error.message, "desc.control is of rank");
      EXPECT_EQ(t.self, nullptr);
      return exchange_all(rank, 10, 0, true); /* nothing of this hurt the communicator */
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(TransportNccl, ABackendOnAnotherDevice) {
  NEEDS_DEVICES(3);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    void *other = nullptr;
    const mfsdp_backend *backend = nullptr;
    const mfsdp_nccl_transport_desc desc = desc_of(rank);
    mfsdp_transport t;
    MFSDP_TRY(test::cuda_rig_create_on(&rank.context, 2, &other, &backend));
    EXPECT_EQ(mfsdp_nccl_transport_wrap(&rank.context, static_cast<mfsdp_cuda_backend *>(other),
                                        state_of(rank)->comm, &desc, &t),
              MFSDP_E_MISMATCH);
    expect_part(rank.context.error.message, "the communicator is on device " +
                                                std::to_string(rank.rank) + ", the backend on 2");
    MFSDP_TRY(test::cuda_rig_destroy(&rank.context, other));
    EXPECT_EQ(cudaSetDevice(rank.rank), cudaSuccess);
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, ChunksThatDiffer) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    mfsdp_nccl_transport_desc desc = desc_of(rank);
    mfsdp_transport t;
    desc.deadline_us = 20 * 1000000;
    desc.chunk_nbytes = rank.rank == 0 ? 1024 : 2048;
    EXPECT_EQ(mfsdp_nccl_transport_wrap(&rank.context, static_cast<mfsdp_cuda_backend *>(rank.cuda),
                                        state_of(rank)->comm, &desc, &t),
              MFSDP_E_MISMATCH);
    expect_part(rank.context.error.message,
                rank.rank == 0 ? "desc.chunk_nbytes is 1024 on rank 0 and 2048 on rank 1"
                               : "desc.chunk_nbytes is 2048 on rank 1 and 1024 on rank 0");
    EXPECT_EQ(rank.context.error.culprit, 1 - rank.rank);
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- arguments ---- */

TEST(TransportNccl, SubmitAndReserveReject) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport *t = &rank.transport;
    mfsdp_context *c = &rank.context;
    const int32_t peer = 1 - rank.rank;
    Block block(&rank, 8);
    char byte = 0;
    EXPECT_EQ(rank.submit({send_to(rank.rank, block.data(), 1)}, "to myself"), MFSDP_E_ARGUMENT);
    EXPECT_EQ(rank.submit({send_to(peer, &byte, 1)}, "of the host"), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "of the host: src is host memory, needs device memory");
    EXPECT_EQ(rank.submit(std::vector<mfsdp_xfer>(65, send_to(peer, nullptr, 0)), "long"),
              MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "long: the batch has 65 transfers, needs 0 to 64");
    EXPECT_EQ(t->ops->reserve(t->self, c, -1), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "reserve of -1");
    const mfsdp_batch empty = mfsdp_batch_default();
    EXPECT_EQ(mfsdp_transport_submit(c, t, nullptr, &empty), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "batch: the queue is NULL");
    EXPECT_EQ(t->ops->split(t->self, c, -1, 0, nullptr), MFSDP_E_ARGUMENT);
    MFSDP_TRY(t->ops->reserve(t->self, c, 10)); /* less than it has: kept */
    MFSDP_TRY(rank.submit(std::vector<mfsdp_xfer>(64, rank.rank == 0 ? send_to(1, nullptr, 0)
                                                                     : receive_from(0, nullptr, 0)),
                          "sixty-four"));
    return exchange_all(rank, 100, 0, true); /* nothing of the above hurt the transport */
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, ACapturedStreamIsRefused) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    Block block(&rank, 8);
    cudaStream_t stream = mfsdp_cuda_queue_stream(rank.queue);
    cudaGraph_t graph;
    MFSDP_TRY(rank.finish());
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(rank.submit({send_to(1 - rank.rank, block.data(), 8)}, "reduce"),
              MFSDP_E_UNSUPPORTED);
    expect_part(rank.context.error.message, "reduce: queue test is captured into a graph");
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return exchange_all(rank, 10, 0, true);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The watching thread looks at a group's events while the caller captures what has nothing to do
 * with it. */
TEST(TransportNccl, TheWatchingThreadBreaksNoCapture) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    cudaStream_t stream;
    cudaGraph_t graph = nullptr;
    Block block(&rank, 8);
    if (rank.rank == 0) {
      MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "waiting"));
      EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
      EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100000); /* five looks */
      EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
      EXPECT_EQ(cudaGetLastError(), cudaSuccess);
      if (graph != nullptr) {
        EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
      }
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    }
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 1) MFSDP_TRY(rank.submit({send_to(0, block.data(), 8)}, "waiting"));
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportNccl, TheBackendGoesLast) {
  const RanksResult result = run_ranks(nccl_ranks(1), [](Rank &rank) {
    rank.backend->ops->queue_destroy(rank.backend->self, &rank.context, rank.queue);
    rank.backend->ops->event_destroy(rank.backend->self, &rank.context, rank.event);
    rank.queue = nullptr;
    rank.event = nullptr;
    EXPECT_EQ(test::cuda_rig_destroy(&rank.context, rank.cuda), MFSDP_E_STATE);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- two at once (fault b4) ---- */

/* Rank 1 enters its batch late: rank 0's check words wait for it. */
TEST(TransportNccl, TwoThreadsAtOnceAreRefused) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    mfsdp_context *c = &rank.context;
    Block block(&rank, 8);
    if (rank.rank == 1) {
      MFSDP_TRY(rank.barrier());
      return rank.submit({send_to(0, block.data(), 8)}, "at last", 5);
    }
    mfsdp_context other;
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    mfsdp_status waited = MFSDP_E_STATE;
    MFSDP_TRY(mfsdp_context_init(&other, &desc));
    std::thread first([&] {
      const mfsdp_xfer xfer = receive_from(1, block.data(), 8);
      mfsdp_batch batch = mfsdp_batch_default();
      batch.xfers = &xfer;
      batch.xfer_count = 1;
      batch.check = 5;
      waited = mfsdp_transport_submit(&other, &t, rank.queue, &batch);
    });
    for (bool inside = false; !inside;) {
      mfsdp_mutex_lock(&state_of(rank)->mutex);
      inside = state_of(rank)->turn == MFSDP__NCCL_A_BATCH;
      mfsdp_mutex_unlock(&state_of(rank)->mutex);
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
    }
    EXPECT_EQ(rank.submit({}, "second"), MFSDP_E_STATE);
    expect_part(c->error.message, "second: rank 0 is in another batch at the same time");
    EXPECT_EQ(t.ops->reserve(t.self, c, 1000), MFSDP_E_STATE);
    EXPECT_EQ(t.ops->destroy(t.self, c), MFSDP_E_STATE);
    expect_part(c->error.message, "rank 0 is in a batch");
    EXPECT_EQ(t.ops->poll(t.self, c), MFSDP_OK) << "never waits";
    const mfsdp_status met = rank.barrier();
    first.join();
    EXPECT_EQ(waited, MFSDP_OK) << other.error.message;
    return met;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Two communicators of each device on two streams: the double complains if two kernels meet. */
TEST(TransportNccl, TwoCommunicatorsOnTwoStreamsAreInOrder) {
  NEEDS_DEVICES(2);
  const int kRounds = MFSDP_TEST_SANITIZER ? 10 : 40;
  const RanksResult result = run_ranks(nccl_ranks(2), [kRounds](Rank &rank) {
    const mfsdp_backend *b = rank.backend;
    const int32_t peer = 1 - rank.rank;
    mfsdp_transport second;
    mfsdp_queue *queue = nullptr;
    Block out(&rank, 64), in(&rank, 64), more(&rank, 64);
    MFSDP_TRY(rank.transport.ops->split(rank.transport.self, &rank.context, 0, rank.rank, &second));
    MFSDP_TRY(b->ops->queue_create(b->self, &rank.context, "second", &queue));
    MFSDP_TRY(out.fill(3));
    for (int round = 0; round < kRounds; ++round) {
      const std::vector<mfsdp_xfer> xfers = {send_to(peer, out.data(), 64),
                                             receive_from(peer, in.data(), 64)};
      mfsdp_batch batch = mfsdp_batch_default();
      const mfsdp_xfer others[2] = {send_to(peer, out.data(), 64),
                                    receive_from(peer, more.data(), 64)};
      batch.xfers = others;
      batch.xfer_count = 2;
      MFSDP_TRY(rank.submit(xfers, "first"));
      MFSDP_TRY(mfsdp_transport_submit(&rank.context, &second, queue, &batch));
    }
    MFSDP_TRY(rank.finish());
    MFSDP_TRY(b->ops->event_record(b->self, queue, rank.event));
    MFSDP_TRY(b->ops->event_wait(b->self, &rank.context, rank.event, rank.timeout_us));
    b->ops->queue_destroy(b->self, &rank.context, queue);
    return second.ops->destroy(second.self, &rank.context);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- split ---- */

TEST(TransportNccl, SplitByColorInTheOrderOfKeys) {
  NEEDS_DEVICES(5);
  static const int32_t nodes[] = {7, 7, 8, 8, 9};
  for (bool nonblocking : {true, false}) {
    RanksOptions options = nccl_ranks(5, nonblocking);
    options.nccl.node_of_rank = nodes;
    const RanksResult result = run_ranks(options, [](Rank &rank) {
      const int32_t color = rank.rank % 2; /* 0 2 4, 1 3 */
      mfsdp_transport part;
      MFSDP_TRY(
          rank.transport.ops->split(rank.transport.self, &rank.context, color, -rank.rank, &part));
      MFSDP_TRY(mfsdp_transport_check(&rank.context, &part));
      EXPECT_EQ(part.world, color == 0 ? 3 : 2);
      EXPECT_EQ(part.rank, (4 - rank.rank) / 2);
      for (int32_t r = 0; r < part.world; ++r)
        EXPECT_EQ(part.node_of_rank[r], nodes[4 - 2 * r - color]) << r;
      const mfsdp_transport whole = rank.transport;
      const int32_t number = rank.rank, world = rank.world;
      rank.transport = part;
      rank.rank = part.rank;
      rank.world = part.world;
      const mfsdp_status status = exchange_all(rank, 100, 3, true);
      rank.transport = whole;
      rank.rank = number;
      rank.world = world;
      MFSDP_TRY(status);
      MFSDP_TRY(exchange_all(rank, 100, 4, true)); /* the whole goes on */
      return part.ops->destroy(part.self, &rank.context);
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

#if !defined(MFSDP_TEST_HARDWARE)
/* The communicator is ours before there is a transport. */
TEST(TransportNccl, ASplitThatFailsLeavesNoCommunicator) {
  for (bool nonblocking : {true, false}) {
    RanksOptions options = nccl_ranks(1, nonblocking);
    test::FaultAllocator *memory = nullptr;
    options.before = [&memory](int32_t, test::FaultAllocator *allocator) { memory = allocator; };
    const RanksResult result = run_ranks(options, [&memory](Rank &rank) {
      const mfsdp_transport &t = rank.transport;
      mfsdp_transport part;
      const int64_t communicators = cudasim::nccl_communicators();
      memory->fail_at(0);
      EXPECT_EQ(t.ops->split(t.self, &rank.context, 0, 0, &part), MFSDP_E_MEMORY);
      memory->fail_at(-1);
      EXPECT_EQ(cudasim::nccl_communicators(), communicators);
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}
#endif

/* ---- disagreement (fault b3) ---- */

TEST(TransportNccl, WithCheckWordsSizesThatDifferAreAnErrorOnBothSides) {
  NEEDS_DEVICES(2);
  const std::size_t kPairs[][2] = {{8, 7}, {7, 8}, {0, 1}, {1, 0}};
  const uint64_t same[2] = {9, 9};
  for (const auto &pair : kPairs) {
    const RanksResult result = run_ranks(nccl_ranks(2), [&pair, &same](Rank &rank) {
      return one_message(rank, pair, kLabels, same);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 2; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
      expect_part(result[r].error.message,
                  "rank 0 sends " + std::to_string(pair[0]) + " bytes in \"reduce blocks.7\"");
      expect_part(result[r].error.message,
                  "rank 1 receives " + std::to_string(pair[1]) + " bytes in \"reduce blocks.8\"");
    }
  }
}

TEST(TransportNccl, CheckWordsThatDifferAreAnErrorOnBothSides) {
  NEEDS_DEVICES(2);
  const std::size_t eight[2] = {8, 8};
  const uint64_t checks[2] = {0x11, 0x12};
  const RanksResult result = run_ranks(
      nccl_ranks(2), [&](Rank &rank) { return one_message(rank, eight, kLabels, checks); });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
    expect_part(result[r].error.message, "\"reduce blocks.7\" (check 0000000000000011)");
    expect_part(result[r].error.message, "\"reduce blocks.8\" (check 0000000000000012)");
  }
}

TEST(TransportNccl, NativeCollectivesThatDifferAreAnErrorOnAllRanks) {
  NEEDS_DEVICES(3);
  for (bool parts_differ : {false, true}) {
    const RanksResult result = run_ranks(nccl_ranks(3), [parts_differ](Rank &rank) {
      Block block(&rank, 64);
      mfsdp_native_part part = {0, 0, 4, 0};
      mfsdp_native_args args;
      if (parts_differ && rank.rank == 2) part.count = 5;
      std::memset(&args, 0, sizeof(args));
      args.struct_nbytes = sizeof(args);
      args.kind = MFSDP_NATIVE_GATHER;
      args.dtype = MFSDP_F32;
      args.parts = &part;
      args.part_count = 1;
      args.dst = block.data();
      args.label = rank.rank == 2 ? "gather blocks.8" : "gather blocks.7";
      args.check = !parts_differ && rank.rank == 2 ? 6 : 5;
      MFSDP_TRY(rank.transport.ops->native_prepare(rank.transport.self, &rank.context, &args,
                                                   &args.form));
      return mfsdp_transport_native(&rank.context, &rank.transport, rank.queue, &args);
    });
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 3; ++r) {
      EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
      expect_part(result[r].error.message, "gather blocks.7");
      expect_part(result[r].error.message, "not the same operation");
    }
  }
}

#if !defined(MFSDP_TEST_HARDWARE)
/* Without check words hardware hangs or overwrites; the double says what it was, and the ranks
 * return. */
TEST(TransportNccl, SizesThatDifferAreSeenByTheDouble) {
  const std::size_t sizes[2] = {8, 7};
  const uint64_t none[2] = {0, 0};
  const RanksResult result = run_ranks(nccl_ranks(2, true, kShortUs), [&](Rank &rank) {
    MFSDP_TRY(one_message(rank, sizes, kLabels, none));
    return rank.finish();
  });
  expect_part(result.text(), "rank 0 sends 8 of type 1, rank 1 receives 7 of type 1");
  EXPECT_NE(result[0].status, MFSDP_OK);
  EXPECT_NE(result[1].status, MFSDP_OK);
}

TEST(TransportNccl, ADeadlockNamesBothSides) {
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    Block block(&rank, 8);
    MFSDP_TRY(rank.submit({receive_from(1 - rank.rank, block.data(), 8)}, "crossed"));
    return rank.finish();
  });
  expect_part(result.text(), "nccl: deadlock on communicator");
  expect_part(result.text(), "rank 0 waits to receive 8 of type 1 from rank 1");
  expect_part(result.text(), "rank 1 waits to receive 8 of type 1 from rank 0");
  for (std::size_t r = 0; r < 2; ++r)
    EXPECT_EQ(result[r].status, MFSDP_E_BACKEND) << result.text();
}
#endif

/* ---- failure ---- */

/* All ranks, and what went wrong before it. */
mfsdp_status meet_with(Rank &rank, const mfsdp_error &why) {
  MFSDP_TRY(meet(rank));
  return mfsdp_context_take_error(&rank.context, &why);
}

/* What the queue says of a batch that rank 1 never comes to. */
mfsdp_status wait_for_nobody(Rank &rank, std::size_t nbytes = 8) {
  Block block(&rank, nbytes);
  MFSDP_TRY(rank.submit({receive_from(1, block.data(), nbytes)}, "gather blocks.3"));
  return rank.finish();
}

TEST(TransportNccl, TheWatchingThreadEndsAGroupThatIsLate) {
  NEEDS_DEVICES(3);
  const RanksResult result = run_ranks(nccl_ranks(3, true, kShortUs), [](Rank &rank) {
    if (rank.rank == 1) return meet(rank);
    const int64_t start_us = mfsdp_clock_us();
    EXPECT_EQ(wait_for_nobody(rank), MFSDP_E_TIMEOUT);
    EXPECT_GE(mfsdp_clock_us() - start_us, kShortUs - 20000);
    EXPECT_LE(mfsdp_clock_us() - start_us, 3 * kShortUs + kSlackUs);
    const mfsdp_error first = rank.context.error;
    EXPECT_EQ(rank.submit({}, "late"), MFSDP_E_POISONED);
    expect_part(rank.context.error.message, "late: refused after the first error (MFSDP_E_TIMEOUT");
    EXPECT_EQ(rank.transport.ops->poll(rank.transport.self, &rank.context), MFSDP_E_TIMEOUT);
    return meet_with(rank, first);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 3; r += 2) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[r].error.culprit, 1);
    EXPECT_EQ(result[r].error.rank, static_cast<int32_t>(r));
    expect_part(result[r].error.message, "gather blocks.3: rank " + std::to_string(r) + " waited ");
    expect_part(result[r].error.message, " ms for rank 1 to send");
    EXPECT_GE(test::waited_ms(result[r].error.message), kShortUs / 1000);
  }
}

/* Nobody watches: poll finds it. */
TEST(TransportNccl, PollFindsAGroupThatIsLate) {
  NEEDS_DEVICES(2);
  RanksOptions options = nccl_ranks(2, true, kShortUs);
  options.nccl.watchdog_us = 0;
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    Block block(&rank, 8);
    if (rank.rank == 1) return meet(rank);
    MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "gather blocks.3"));
    const int64_t start_us = mfsdp_clock_us();
    mfsdp_status status = MFSDP_OK;
    while (status == MFSDP_OK && mfsdp_clock_us() - start_us < kShortUs + kSlackUs) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
      status = t.ops->poll(t.self, &rank.context);
    }
    const mfsdp_error why = rank.context.error;
    return status == MFSDP_OK ? meet(rank) : meet_with(rank, why);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_TIMEOUT) << result.text();
}

/* A second's question: nobody answers. */
mfsdp_status slow_probe(void *, mfsdp_context *, uint8_t *, int64_t timeout_us) {
  mfsdp_clock_sleep_until(mfsdp_clock_us() + timeout_us);
  return MFSDP_OK;
}

/* Who is there is asked by the watching thread alone. */
TEST(TransportNccl, PollNeverWaits) {
  NEEDS_DEVICES(2);
  for (int64_t watchdog_us : {0, 20000}) {
    RanksOptions options = nccl_ranks(2, true, kShortUs);
    std::atomic<bool> over{false};
    options.nccl.watchdog_us = watchdog_us;
    const RanksResult result = run_ranks(options, [&over](Rank &rank) {
      const mfsdp_transport &t = rank.transport;
      Block block(&rank, 8);
      if (rank.rank == 1) {
        while (!over)
          mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
        return MFSDP_OK;
      }
      mfsdp_control_ops ops = *rank.control.ops;
      mfsdp_control slow = rank.control;
      ops.probe = slow_probe;
      slow.ops = &ops;
      state_of(rank)->desc.control = &slow;
      MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "gather blocks.3"));
      const int64_t give_up_us = mfsdp_clock_us() + kShortUs + 2 * kSlackUs;
      int64_t longest_us = 0;
      mfsdp_status status = MFSDP_OK;
      while (status == MFSDP_OK && mfsdp_clock_us() < give_up_us) {
        const int64_t start_us = mfsdp_clock_us();
        status = t.ops->poll(t.self, &rank.context);
        longest_us = std::max(longest_us, mfsdp_clock_us() - start_us);
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
      }
      over = true;
      EXPECT_LT(longest_us, 900000);
      (void)rank.finish(); /* the thread is through with it */
      state_of(rank)->desc.control = &rank.control;
      return status;
    });
    EXPECT_TRUE(result.clean()) << result.text();
    EXPECT_EQ(result[0].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[0].error.culprit, 1);
    if (watchdog_us > 0) expect_part(result[0].error.message, "; rank 1 does not answer");
  }
}

/* The batch has other peers too; the control plane knows who has left. */
TEST(TransportNccl, TheControlPlaneKnowsWhoDoesNotAnswer) {
  NEEDS_DEVICES(3);
  std::atomic<bool> over{false};
  const RanksResult result = run_ranks(nccl_ranks(3, true, kShortUs), [&over](Rank &rank) {
    Block block(&rank, 2);
    char *at = static_cast<char *>(block.data());
    if (rank.rank == 2) return MFSDP_OK; /* leaves, and says so to the control plane alone */
    if (rank.rank == 1) {
      while (!over)
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
      return MFSDP_OK;
    }
    MFSDP_TRY(rank.submit({receive_from(1, at, 1), receive_from(2, at + 1, 1)}, "both"));
    const mfsdp_status status = rank.finish();
    over = true;
    return status;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_TIMEOUT) << result.text();
  expect_part(result[0].error.message,
              "for rank 1 to send or rank 2 to send; rank 2 does not answer");
  EXPECT_EQ(result[0].error.culprit, 2);
}

/* Behind the aborted group nothing happens any more: the copy does, the kernel does not. */
TEST(TransportNccl, WhatStandsBehindAnAbortedGroupDoesNothing) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2, true, kShortUs), [](Rank &rank) {
    const mfsdp_backend *b = rank.backend;
    mfsdp_queue *compute = nullptr;
    mfsdp_event *event = nullptr;
    Block in(&rank, 8), floats(&rank, 8), sums(&rank, 8);
    if (rank.rank == 1) return meet(rank);
    const float ones[2] = {1.0f, 1.0f};
    std::memcpy(floats.host.data(), ones, 8);
    MFSDP_TRY(floats.upload());
    MFSDP_TRY(sums.fill(0));
    MFSDP_TRY(rank.finish());
    MFSDP_TRY(b->ops->queue_create(b->self, &rank.context, "compute", &compute));
    MFSDP_TRY(b->ops->event_create(b->self, &rank.context, &event));
    MFSDP_TRY(rank.submit({receive_from(1, in.data(), 8)}, "gather"));
    MFSDP_TRY(b->ops->event_record(b->self, rank.queue, event));
    MFSDP_TRY(b->ops->queue_wait(b->self, compute, event));
    const void *term = floats.data();
    MFSDP_TRY(b->ops->sum_terms(b->self, compute, static_cast<float *>(sums.data()), 1, &term,
                                MFSDP_F32, 1, 2));
    MFSDP_TRY(b->ops->event_record(b->self, compute, event));
    const mfsdp_status status =
        b->ops->event_wait(b->self, &rank.context, event, kShortUs + kSlackUs);
    const mfsdp_error first = rank.context.error;
    EXPECT_EQ(status, MFSDP_E_TIMEOUT);
    expect_part(first.message, "gather: rank 0 waited");
    (void)sums.download();
    (void)rank.finish();
    EXPECT_EQ(sums.host, Bytes(8, 0)) << "a kernel ran on what has not arrived";
    b->ops->queue_destroy(b->self, &rank.context, compute);
    b->ops->event_destroy(b->self, &rank.context, event);
    return meet_with(rank, first);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_TIMEOUT) << result.text();
}

TEST(TransportNccl, PoisonEndsAWaitAndStaysTheFirst) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    Block block(&rank, 8);
    if (rank.rank == 1) return rank.barrier();
    mfsdp_error why = mfsdp_error_none(), later = mfsdp_error_none();
    (void)MFSDP_ERROR_SET(&why, MFSDP_E_IO, 0, "the disk of rank 0 is full");
    (void)MFSDP_ERROR_SET(&later, MFSDP_E_BACKEND, 0, "another reason");
    MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "waiting"));
    std::thread other([&] {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 20000);
      t.ops->poison(t.self, &why);
      t.ops->poison(t.self, &later);
      t.ops->poison(t.self, nullptr);
    });
    const int64_t start_us = mfsdp_clock_us();
    const mfsdp_status status = rank.finish();
    const mfsdp_error first = rank.context.error;
    other.join();
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs) << "the deadline is 20 s";
    EXPECT_EQ(status, MFSDP_E_IO);
    EXPECT_EQ(t.ops->poll(t.self, &rank.context), MFSDP_E_IO);
    expect_part(rank.context.error.message, "the disk of rank 0 is full");
    (void)rank.barrier();
    return mfsdp_context_take_error(&rank.context, &first);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_IO) << result.text();
}

/* The same while submit itself waits: for check words. */
TEST(TransportNccl, PoisonEndsASubmitThatWaits) {
  NEEDS_DEVICES(2);
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    Block block(&rank, 8);
    if (rank.rank == 1) return rank.barrier();
    std::thread other([&] {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 20000);
      t.ops->poison(t.self, nullptr);
    });
    const int64_t start_us = mfsdp_clock_us();
    EXPECT_EQ(rank.submit({receive_from(1, block.data(), 8)}, "waiting", 3), MFSDP_E_POISONED);
    expect_part(rank.context.error.message, "poisoned from outside");
    other.join();
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs) << "the deadline is 20 s";
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

#if !defined(MFSDP_TEST_HARDWARE)
/* Two communicators, one stream, a rank that is killed; the first one's abort cannot end before the
 * second one's has (fault b5). Survivors are gone by the deadline. */
TEST(TransportNccl, AbortsOfTwoCommunicatorsDoNotWaitForEachOther) {
  for (bool first_fails : {true, false}) {
    if (MFSDP_TEST_TSAN && !first_fails) continue;
    const RanksResult result = run_ranks(nccl_ranks(3, true, kShortUs), [first_fails](Rank &rank) {
      mfsdp_transport second;
      Block block(&rank, 8);
      MFSDP_TRY(
          rank.transport.ops->split(rank.transport.self, &rank.context, 0, rank.rank, &second));
      MFSDP_TRY(rank.barrier());
      const int64_t start_us = mfsdp_clock_us();
      if (rank.rank == 1) cudasim::nccl_fault(1, cudasim::NcclFault::kKill);
      MFSDP_TRY(rank.barrier());
      const mfsdp_xfer xfer =
          rank.rank == 1 ? send_to(2, block.data(), 8) : receive_from(1, block.data(), 8);
      mfsdp_batch batch = mfsdp_batch_default();
      batch.xfers = &xfer;
      batch.xfer_count = rank.rank == 1 ? 0 : 1;
      batch.label = "both";
      const mfsdp_transport *order[2] = {&rank.transport, &second};
      for (const mfsdp_transport *t : order)
        MFSDP_TRY(mfsdp_transport_submit(&rank.context, t, rank.queue, &batch));
      mfsdp_status status = rank.finish();
      const mfsdp_error why = rank.context.error;
      if (rank.rank != 1) { /* as the runtime does */
        order[first_fails ? 0 : 1]->ops->poison(order[first_fails ? 0 : 1]->self, &why);
        order[first_fails ? 1 : 0]->ops->poison(order[first_fails ? 1 : 0]->self, &why);
      }
      EXPECT_EQ(second.ops->destroy(second.self, &rank.context), MFSDP_OK)
          << rank.context.error.message;
      EXPECT_LT(mfsdp_clock_us() - start_us, 4 * kShortUs + kSlackUs);
      if (status != MFSDP_OK) status = mfsdp_context_take_error(&rank.context, &why);
      return status;
    });
    cudasim::nccl_reset();
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 3; r += 2)
      EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
  }
}

TEST(TransportNccl, AKilledRankIsNoticed) {
  for (bool seen : {false, true}) {
    const RanksResult result =
        run_ranks(nccl_ranks(3, true, seen ? 20 * 1000000 : kShortUs), [seen](Rank &rank) {
          if (rank.rank == 1)
            cudasim::nccl_fault(1, seen ? cudasim::NcclFault::kKillSeen : cudasim::NcclFault::kKill,
                                0);
          MFSDP_TRY(rank.barrier());
          const int64_t start_us = mfsdp_clock_us();
          Block block(&rank, 8);
          const int32_t next = (rank.rank + 1) % 3, last = (rank.rank + 2) % 3;
          MFSDP_TRY(rank.submit({send_to(next, block.data(), 4),
                                 receive_from(last, static_cast<char *>(block.data()) + 4, 4)},
                                "round"));
          const mfsdp_status status = rank.finish();
          EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
          return status;
        });
    cudasim::nccl_reset();
    EXPECT_TRUE(result.clean()) << result.text();
    for (std::size_t r = 0; r < 3; r += 2) {
      const mfsdp_status first = seen ? MFSDP_E_PEER : MFSDP_E_TIMEOUT;
      const std::string &message = result[r].error.message;
      /* The watching thread may find it before the rank submits: then it is told as the first error. */
      const bool told = result[r].status == MFSDP_E_POISONED &&
                        message.find(mfsdp_status_name(first)) != std::string::npos;
      EXPECT_TRUE(result[r].status == first || told) << result.text();
      expect_part(message, seen ? "remote process exited" : "round: rank");
    }
  }
}

TEST(TransportNccl, AnAsynchronousErrorIsNoticed) {
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    if (rank.rank == 0) cudasim::nccl_fault(0, cudasim::NcclFault::kFail);
    MFSDP_TRY(rank.barrier());
    Block block(&rank, 8);
    if (rank.rank == 1) return rank.barrier();
    MFSDP_TRY(rank.submit({send_to(1, block.data(), 8)}, "round"));
    const mfsdp_status status = rank.finish();
    const mfsdp_error why = rank.context.error;
    (void)rank.barrier();
    return mfsdp_context_take_error(&rank.context, status == MFSDP_OK ? &rank.context.error : &why);
  });
  cudasim::nccl_reset();
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(result[0].status, MFSDP_E_BACKEND) << result.text();
  expect_part(result[0].error.message, "unhandled system error: the network failed");
}

/* Without may_abort the message says what is left to do; the caller aborts. */
TEST(TransportNccl, WithoutMayAbortNothingIsAborted) {
  for (bool nonblocking : {true, false}) {
    if (MFSDP_TEST_TSAN && nonblocking) continue;
    RanksOptions options = nccl_ranks(2, nonblocking, kShortUs);
    options.nccl.may_abort = false;
    std::atomic<bool> over{false};
    const RanksResult result = run_ranks(options, [nonblocking, &over](Rank &rank) {
      const mfsdp_transport &t = rank.transport;
      Block block(&rank, 8);
      if (rank.rank == 1) {
        while (!over)
          mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
        return rank.submit({send_to(0, block.data(), 8)}, "very late"); /* lets the kernel end */
      }
      MFSDP_TRY(rank.submit({receive_from(1, block.data(), 8)}, "gather"));
      mfsdp_status status = MFSDP_OK;
      while (status == MFSDP_OK)
        status = t.ops->poll(t.self, &rank.context);
      EXPECT_EQ(status, MFSDP_E_TIMEOUT);
      expect_part(rank.context.error.message,
                  nonblocking ? "may_abort is 0: call ncclCommAbort"
                              : "the communicator blocks and cannot be aborted safely");
      EXPECT_EQ(t.ops->destroy(t.self, &rank.context), MFSDP_E_STATE);
      expect_part(rank.context.error.message, "work of its communicator is in flight");
      over = true;
      return rank.finish();
    });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

/* A peer that never comes to the communicator. */
TEST(TransportNccl, APeerThatNeverComes) {
  const RanksResult result = run_ranks(nccl_ranks(1), [](Rank &rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    mfsdp_nccl_transport_desc desc = desc_of(rank);
    mfsdp_transport t;
    config.blocking = 0;
    EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, 0, &config), ncclInProgress);
    EXPECT_EQ(mfsdp_nccl_transport_wrap(&rank.context, static_cast<mfsdp_cuda_backend *>(rank.cuda),
                                        comm, &desc, &t),
              MFSDP_E_TIMEOUT);
    expect_part(rank.context.error.message, "not all of its ranks have called");
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* It made the communicator, but does not come to wrap. */
TEST(TransportNccl, APeerThatNeverWraps) {
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    static ncclUniqueId id;
    ncclComm_t comm = nullptr;
    mfsdp_nccl_transport_desc desc = desc_of(rank);
    mfsdp_transport t;
    int32_t aborted = 0;
    config.blocking = 0;
    desc.may_abort = 1;
    desc.aborted = &aborted;
    if (rank.rank == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    MFSDP_TRY(rank.barrier());
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank.rank, &config), ncclInProgress);
    if (rank.rank == 0) {
      EXPECT_EQ(mfsdp_nccl_transport_wrap(
                    &rank.context, static_cast<mfsdp_cuda_backend *>(rank.cuda), comm, &desc, &t),
                MFSDP_E_TIMEOUT);
      expect_part(rank.context.error.message, "nccl transport: wrap: rank 0 waited ");
      EXPECT_EQ(aborted, 1);
    }
    MFSDP_TRY(rank.barrier());
    if (rank.rank == 1) {
      EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Fault f5 where it is met last: NCCL's own refusal comes through. */
TEST(TransportNccl, TwoRanksOnOneDevice) {
  const RanksResult result = run_ranks(nccl_ranks(2), [](Rank &rank) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    static ncclUniqueId id;
    ncclComm_t comm = nullptr;
    const mfsdp_nccl_transport_desc desc = desc_of(rank);
    mfsdp_transport t;
    config.blocking = 0;
    if (rank.rank == 0) {
      EXPECT_EQ(ncclGetUniqueId(&id), ncclSuccess);
    }
    MFSDP_TRY(rank.barrier());
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(ncclCommInitRankConfig(&comm, 2, id, rank.rank, &config), ncclInProgress);
    EXPECT_EQ(cudaSetDevice(rank.rank), cudaSuccess);
    EXPECT_EQ(mfsdp_nccl_transport_wrap(&rank.context, static_cast<mfsdp_cuda_backend *>(rank.cuda),
                                        comm, &desc, &t),
              MFSDP_E_BACKEND);
    expect_part(rank.context.error.message, "rank 0 and rank 1 both on device 0");
    MFSDP_TRY(rank.barrier());
    EXPECT_EQ(ncclCommAbort(comm), ncclSuccess);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}
#endif

} // namespace
