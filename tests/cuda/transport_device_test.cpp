/* SPDX-License-Identifier: MIT */
/* transport_device.h on the host double, or on hardware; transport_cases.h has what is not its own.
 * */
#include "mfsdp/cuda/transport_device.h"

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
const int64_t kSlackUs = 2000000;

RanksOptions cuda_ranks(int32_t world, int64_t deadline_us = 20 * 1000000) {
  RanksOptions options(world);
  options.cuda = true;
  options.world.deadline_us = deadline_us;
  return options;
}

/* ---- what arrives ---- */

TEST(TransportDevice, OneCopyBetweenTwoRanks) {
  const RanksResult result = run_ranks(cuda_ranks(2), test::one_copy);
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, AllToAllInEveryWorldAndSize) {
  const std::size_t large = MFSDP_TEST_SANITIZER ? std::size_t(1) << 16 : std::size_t(1) << 20;
  for (int32_t world : {1, 2, 3, 4, 7, 8})
    for (std::size_t nbytes : {std::size_t(0), std::size_t(1), std::size_t(999), large}) {
      if (MFSDP_TEST_SANITIZER && world % 2 == 1 && world > 3) continue;
      const RanksResult result = run_ranks(cuda_ranks(world), [nbytes](Rank &rank) {
        for (int round = 0; round < 4; ++round)
          MFSDP_TRY(exchange_all(rank, nbytes, round, round % 2 == 0));
        return MFSDP_OK;
      });
      EXPECT_TRUE(result.ok()) << "world " << world << ", " << nbytes << " bytes\n"
                               << result.text();
    }
}

TEST(TransportDevice, TheTransportIsComplete) {
  const RanksResult result = run_ranks(cuda_ranks(3), [](Rank &rank) {
    MFSDP_TRY(mfsdp_transport_check(&rank.context, &rank.transport));
    EXPECT_EQ(rank.transport.rank, rank.rank);
    EXPECT_EQ(rank.transport.world, 3);
    EXPECT_EQ(rank.transport.deadline_us, 20 * 1000000);
    EXPECT_EQ(rank.transport.backend, rank.backend);
    EXPECT_EQ(rank.transport.node_of_rank, nullptr);
    EXPECT_FALSE(MFSDP_HAS(rank.transport.ops, native));
    EXPECT_FALSE(MFSDP_HAS(rank.transport.ops, split));
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, FirstInFirstOutBetweenTwoRanks) {
  const RanksResult result = run_ranks(cuda_ranks(3), test::first_in_first_out);
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, BatchesNeedNotLineUp) {
  const RanksResult result = run_ranks(cuda_ranks(2), test::batches_need_not_line_up);
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, TransfersOfABatchProgressTogether) {
  const RanksResult result = run_ranks(cuda_ranks(3), test::transfers_progress_together);
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, ManyUnevenBatches) {
  for (int32_t world : {2, 4, 7}) {
    if (MFSDP_TEST_SANITIZER && world == 7) continue;
    const RanksResult result = run_ranks(cuda_ranks(world), test::many_uneven_batches);
    EXPECT_TRUE(result.ok()) << "world " << world << "\n" << result.text();
  }
}

/* The default batch of 64 transfers is too small for as many ranks: reserve. */
TEST(TransportDevice, FortyRanks) {
  const RanksResult result = run_ranks(cuda_ranks(40), [](Rank &rank) {
    MFSDP_TRY(rank.transport.ops->reserve(rank.transport.self, &rank.context, 2 * 39));
    return exchange_all(rank, 100, 1, true);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- collectives ---- */

TEST(TransportDevice, CollectivesRunOverIt) {
  for (mfsdp_algorithm algorithm : {MFSDP_DIRECT, MFSDP_RING, MFSDP_HIERARCHICAL})
    for (int32_t world : {1, 2, 3, 5, 8}) {
      if (MFSDP_TEST_SANITIZER && world == 8) continue;
      const RanksResult result = run_ranks(cuda_ranks(world), [algorithm](Rank &rank) {
        return reduce_and_gather(rank, algorithm);
      });
      EXPECT_TRUE(result.ok()) << "world " << world << ", algorithm " << algorithm << "\n"
                               << result.text();
    }
}

/* ---- memory ---- */

std::size_t cuda_allocations() {
#if defined(MFSDP_TEST_HARDWARE)
  return 0; /* nobody counts them */
#else
  return cudasim::allocation_count();
#endif
}

TEST(TransportDevice, SubmitAllocatesNothing) {
  const RanksResult result = run_ranks(cuda_ranks(4), [](Rank &rank) {
    Block out(&rank, 64), in(&rank, 4 * 64);
    std::vector<mfsdp_xfer> xfers;
    for (int32_t p = 0; p < 4; ++p)
      if (p != rank.rank) {
        xfers.push_back(send_to(p, out.data(), 64));
        xfers.push_back(receive_from(p, static_cast<char *>(in.data()) + 64 * p, 64));
      }
    MFSDP_TRY(rank.barrier());
    const int64_t before = rank.memory->alloc_count();
    const std::size_t device_before = cuda_allocations();
    for (int round = 0; round < 50; ++round)
      MFSDP_TRY(rank.submit(xfers, "counted"));
    EXPECT_EQ(rank.memory->alloc_count(), before);
    EXPECT_EQ(cuda_allocations(), device_before);
    MFSDP_TRY(rank.barrier());
    return rank.finish();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The nth allocation of rank 1's set-up fails: rank 1 says so, rank 0 is told, nothing leaks. */
TEST(TransportDevice, EveryAllocationOfSetUpMayFail) {
  int64_t n = 0;
  for (;; ++n) {
    RanksOptions options = cuda_ranks(2, 20000);
    options.before = [n](int32_t rank, test::FaultAllocator *memory) {
      if (rank == 1) memory->fail_at(n);
    };
    const RanksResult result = run_ranks(options, [](Rank &rank) {
      Block block(&rank, 16);
      MFSDP_TRY(rank.transport.ops->reserve(rank.transport.self, &rank.context, 1000));
      MFSDP_TRY(rank.submit(
          {rank.rank == 0 ? send_to(1, block.data(), 16) : receive_from(0, block.data(), 16)},
          "after"));
      MFSDP_TRY(rank.barrier());
      return rank.finish();
    });
    EXPECT_TRUE(result.clean()) << "allocation " << n << ": " << result.text();
    if (result[1].status == MFSDP_OK) break;
    ASSERT_EQ(result[1].status, MFSDP_E_MEMORY) << result.text();
    expect_part(result[1].error.message, "the allocator refused");
    EXPECT_NE(result[0].status, MFSDP_OK);
  }
  EXPECT_GE(n, 14) << "the backend's, the transport's and reserve's tables";
}

#if !defined(MFSDP_TEST_HARDWARE)
/* One call of CUDA fails somewhere in an exchange: all ranks learn of it, and nothing is left. */
TEST(TransportDevice, EveryCallOfCudaMayFail) {
  for (int64_t n = 0;; ++n) {
    std::atomic<bool> delivered{false};
    const RanksResult result = run_ranks(cuda_ranks(2), [n, &delivered](Rank &rank) {
      Block out(&rank, 64), in(&rank, 64);
      const int32_t peer = 1 - rank.rank;
      MFSDP_TRY(rank.finish());
      MFSDP_TRY(rank.barrier());
      if (rank.rank == 0) cudasim::fail_at(n);
      MFSDP_TRY(rank.barrier());
      mfsdp_status status = MFSDP_OK;
      for (int round = 0; round < 2 && status == MFSDP_OK; ++round)
        status = rank.submit({send_to(peer, out.data(), 64), receive_from(peer, in.data(), 64)},
                             "exchange");
      if (status != MFSDP_OK) /* what a program does; peers that still wait are told */
        rank.transport.ops->poison(rank.transport.self, mfsdp_context_error(&rank.context));
      (void)rank.control.ops->allgather(rank.control.self, &rank.context, nullptr, 0, nullptr,
                                        rank.control.deadline_us);
      if (rank.rank == 0) {
        delivered = cudasim::failed();
        cudasim::fail_at(-1);
      }
      (void)rank.control.ops->allgather(rank.control.self, &rank.context, nullptr, 0, nullptr,
                                        rank.control.deadline_us);
      const mfsdp_status first = rank.transport.ops->poll(rank.transport.self, &rank.context);
      return status == MFSDP_OK ? first : status;
    });
    EXPECT_TRUE(result.clean()) << "call " << n << ": " << result.text();
    if (!delivered) {
      EXPECT_TRUE(result.ok()) << result.text();
      EXPECT_GE(n, 20);
      break;
    }
    for (std::size_t r = 0; r < 2; ++r)
      EXPECT_TRUE(result[r].status == MFSDP_E_BACKEND || result[r].status == MFSDP_E_POISONED)
          << "call " << n << ": " << result.text();
  }
}

#endif

/* A failed creation leaves the rank free to try again, and a failed reserve the old capacity. */
TEST(TransportDevice, SetUpMayBeTriedAgain) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
    mfsdp_device_world *world = nullptr;
    mfsdp_cuda_backend *cuda = static_cast<mfsdp_cuda_backend *>(rank.cuda);
    mfsdp_context *c = &rank.context;
    mfsdp_transport t;
    MFSDP_TRY(mfsdp_device_world_create(c, &desc, &world));
    rank.memory->fail_at(2);
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, cuda, &t), MFSDP_E_MEMORY);
    EXPECT_EQ(t.self, nullptr);
    rank.memory->fail_at(-1);
    MFSDP_TRY(mfsdp_device_transport_create(c, world, 0, cuda, &t));
    EXPECT_EQ(mfsdp_device_world_destroy(c, world), MFSDP_E_STATE);
    expect_part(c->error.message, "the transport of rank 0 is still there");
    rank.memory->fail_at(0);
    EXPECT_EQ(t.ops->reserve(t.self, c, 65), MFSDP_E_MEMORY);
    rank.memory->fail_at(-1);
    std::vector<mfsdp_xfer> none(65);
    mfsdp_batch batch = mfsdp_batch_default();
    batch.xfers = none.data();
    batch.xfer_count = 65;
    EXPECT_EQ(t.ops->submit(t.self, c, rank.queue, &batch), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "65 transfers, needs 0 to 64");
    MFSDP_TRY(t.ops->destroy(t.self, c));
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, cuda, &t), MFSDP_E_STATE);
    expect_part(c->error.message, "rank 0 has left already");
    return mfsdp_device_world_destroy(c, world);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- arguments ---- */

TEST(TransportDevice, WorldRejects) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  const struct {
    void (*edit)(mfsdp_device_world_desc *);
    const char *text;
  } cases[] = {
      {[](mfsdp_device_world_desc *d) { d->struct_nbytes -= 8; }, "desc.struct_nbytes is"},
      {[](mfsdp_device_world_desc *d) { d->world = 0; }, "desc.world is 0, needs at least 1"},
      {[](mfsdp_device_world_desc *d) { d->device = -1; }, "desc.device is -1"},
      {[](mfsdp_device_world_desc *d) { d->deadline_us = 0; }, "desc.deadline_us is 0"},
      {[](mfsdp_device_world_desc *d) { d->batch_xfer_count = 0; }, "desc.batch_xfer_count is 0"}};
  for (const auto &c : cases) {
    mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
    mfsdp_device_world *world = nullptr;
    c.edit(&desc);
    EXPECT_EQ(mfsdp_device_world_create(&context, &desc, &world), MFSDP_E_ARGUMENT) << c.text;
    EXPECT_EQ(world, nullptr);
    expect_part(context.error.message, c.text);
  }
  EXPECT_EQ(mfsdp_device_world_create(&context, nullptr, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_device_world_destroy(&context, nullptr), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

TEST(TransportDevice, CreateRejects) {
  const RanksResult result = run_ranks(cuda_ranks(2), [](Rank &rank) {
    mfsdp_context *c = &rank.context;
    mfsdp_device_world *world = static_cast<mfsdp_device_world *>(rank.device_world);
    mfsdp_cuda_backend *cuda = static_cast<mfsdp_cuda_backend *>(rank.cuda);
    mfsdp_transport t;
    EXPECT_EQ(mfsdp_device_transport_create(c, nullptr, 0, cuda, &t), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "world is NULL");
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, nullptr, &t), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "cuda is NULL");
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, cuda, nullptr), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "out is NULL");
    for (int32_t bad : {-1, 2}) {
      EXPECT_EQ(mfsdp_device_transport_create(c, world, bad, cuda, &t), MFSDP_E_ARGUMENT);
      expect_part(c->error.message, "rank is " + std::to_string(bad) + ", needs 0 to 1");
    }
    EXPECT_EQ(mfsdp_device_transport_create(c, world, rank.rank, cuda, &t), MFSDP_E_STATE);
    expect_part(c->error.message, "rank " + std::to_string(rank.rank) + " has joined already");
    return rank.barrier();
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, RanksOnOtherDevicesAreRefused) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    mfsdp_context *c = &rank.context;
    mfsdp_cuda_backend *cuda = static_cast<mfsdp_cuda_backend *>(rank.cuda);
    mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
    mfsdp_device_world *world = nullptr;
    mfsdp_transport t;
    desc.device = 1;
    MFSDP_TRY(mfsdp_device_world_create(c, &desc, &world));
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, cuda, &t), MFSDP_E_ARGUMENT);
    expect_part(c->error.message,
                "rank 0 has device 0, this world is for ranks that share device 1");
    MFSDP_TRY(mfsdp_device_world_destroy(c, world));
#if !defined(MFSDP_TEST_HARDWARE)
    desc.device = 0;
    MFSDP_TRY(mfsdp_device_world_create(c, &desc, &world));
    cudasim::set_device_count(2);
    EXPECT_EQ(cudaSetDevice(1), cudaSuccess);
    EXPECT_EQ(mfsdp_device_transport_create(c, world, 0, cuda, &t), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "the calling thread's device is 1");
    EXPECT_EQ(rank.submit({}, "elsewhere"), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "elsewhere: the calling thread's device is 1");
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    cudasim::reset_machine();
    MFSDP_TRY(mfsdp_device_world_destroy(c, world));
#endif
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Transports whose batches are tasks say so instead of hanging. */
TEST(TransportDevice, TheThreadsTransportRefusesThisBackend) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    mfsdp_transport t;
    EXPECT_EQ(mfsdp_threads_transport_create(&rank.context, rank.shared, 0, rank.backend, &t),
              MFSDP_E_UNSUPPORTED);
    expect_part(rank.context.error.message, "threads transport: backend cuda has memory that");
    expect_part(rank.context.error.message, "mfsdp_device_transport_create");
    EXPECT_EQ(t.self, nullptr);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, SubmitAndReserveReject) {
  const RanksResult result = run_ranks(cuda_ranks(2), [](Rank &rank) {
    const mfsdp_transport *t = &rank.transport;
    mfsdp_context *c = &rank.context;
    const int32_t peer = 1 - rank.rank;
    Block block(&rank, 8);
    char byte = 0;
    EXPECT_EQ(rank.submit({send_to(rank.rank, block.data(), 1)}, "to myself"), MFSDP_E_ARGUMENT);
    EXPECT_EQ(rank.submit({send_to(peer, nullptr, 1)}, "nothing"), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "nothing: transfer 0 of 1 bytes needs src");
    EXPECT_EQ(rank.submit({send_to(peer, &byte, 1)}, "of the host"), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "of the host: src is host memory, needs device memory");
    EXPECT_EQ(rank.submit({receive_from(peer, &byte, 1)}, "to the host"), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "to the host: dst is host memory");
    EXPECT_EQ(rank.submit(std::vector<mfsdp_xfer>(65, send_to(peer, nullptr, 0)), "long"),
              MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "long: the batch has 65 transfers, needs 0 to 64");
    EXPECT_EQ(t->ops->reserve(t->self, c, -1), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "reserve of -1");
    const mfsdp_batch empty = mfsdp_batch_default();
    EXPECT_EQ(mfsdp_transport_submit(c, t, nullptr, &empty), MFSDP_E_ARGUMENT);
    expect_part(c->error.message, "batch: the queue is NULL");
    MFSDP_TRY(t->ops->reserve(t->self, c, 10)); /* less than it has: kept */
    MFSDP_TRY(rank.submit(std::vector<mfsdp_xfer>(64, rank.rank == 0 ? send_to(1, nullptr, 0)
                                                                     : receive_from(0, nullptr, 0)),
                          "sixty-four"));
    return exchange_all(rank, 100, 0, true); /* nothing of the above hurt the transport */
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, AQueueOfAnotherBackendIsRefused) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    void *other = nullptr;
    const mfsdp_backend *b = nullptr;
    mfsdp_queue *queue = nullptr;
    const mfsdp_batch empty = mfsdp_batch_default();
    MFSDP_TRY(test::cuda_rig_create(&rank.context, &other, &b));
    MFSDP_TRY(b->ops->queue_create(b->self, &rank.context, "other", &queue));
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, &rank.transport, queue, &empty),
              MFSDP_E_ARGUMENT);
    expect_part(rank.context.error.message, "the queue is another backend's");
    b->ops->queue_destroy(b->self, &rank.context, queue);
    return test::cuda_rig_destroy(&rank.context, other);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, ACapturedStreamIsRefused) {
  const RanksResult result = run_ranks(cuda_ranks(2), [](Rank &rank) {
    Block block(&rank, 8);
    const int32_t peer = 1 - rank.rank;
    cudaStream_t stream = mfsdp_cuda_queue_stream(rank.queue);
    cudaGraph_t graph;
    MFSDP_TRY(rank.finish());
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(rank.submit({send_to(peer, block.data(), 8)}, "reduce"), MFSDP_E_UNSUPPORTED);
    expect_part(rank.context.error.message, "reduce: queue test is captured into a graph");
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return exchange_all(rank, 10, 0, true);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, TheBackendGoesLast) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    rank.backend->ops->queue_destroy(rank.backend->self, &rank.context, rank.queue);
    rank.backend->ops->event_destroy(rank.backend->self, &rank.context, rank.event);
    rank.queue = nullptr;
    rank.event = nullptr;
    EXPECT_EQ(test::cuda_rig_destroy(&rank.context, rank.cuda), MFSDP_E_STATE);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Fault b4: a second thread, the transport's end and its growth are refused while a batch waits. */
TEST(TransportDevice, TwoThreadsAtOnceAreRefused) {
  const RanksResult result = run_ranks(cuda_ranks(2), [](Rank &rank) {
    const mfsdp_transport &t = rank.transport;
    mfsdp_context *c = &rank.context;
    Block block(&rank, 8);
    if (rank.rank == 1) {
      MFSDP_TRY(rank.barrier());
      return rank.submit({send_to(0, block.data(), 8)}, "at last");
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
      waited = mfsdp_transport_submit(&other, &t, rank.queue, &batch);
    });
    while (!mfsdp__device_busy(static_cast<mfsdp__device_transport *>(t.self)))
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
    EXPECT_EQ(rank.submit({}, "second"), MFSDP_E_STATE);
    expect_part(c->error.message, "second: rank 0 is in another batch at the same time");
    EXPECT_EQ(t.ops->reserve(t.self, c, 1000), MFSDP_E_STATE);
    EXPECT_EQ(t.ops->destroy(t.self, c), MFSDP_E_STATE);
    expect_part(c->error.message, "rank 0 is in a batch");
    const mfsdp_status met = rank.barrier();
    first.join();
    EXPECT_EQ(waited, MFSDP_OK) << other.error.message;
    return met;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- disagreement (fault b3) ---- */

TEST(TransportDevice, SizesThatDifferAreAnErrorOnBothSides) {
  const std::size_t kPairs[][2] = {{8, 7}, {7, 8}, {0, 1}, {1, 0}};
  const uint64_t none[2] = {0, 0};
  for (int attempt = 0; attempt < (MFSDP_TEST_SANITIZER ? 20 : 100); ++attempt) {
    const auto &pair = kPairs[attempt % 4]; /* the sender must not slip away before the error */
    const RanksResult result = run_ranks(cuda_ranks(2), [&pair, &none](Rank &rank) {
      return one_message(rank, pair, kLabels, none);
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

TEST(TransportDevice, CheckWordsThatDifferAreAnErrorOnBothSides) {
  const std::size_t eight[2] = {8, 8};
  const uint64_t checks[2] = {0x11, 0x12};
  const RanksResult result = run_ranks(
      cuda_ranks(2), [&](Rank &rank) { return one_message(rank, eight, kLabels, checks); });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_MISMATCH) << result.text();
    expect_part(result[r].error.message,
                "rank 0 sends in \"reduce blocks.7\" (check 0000000000000011), rank 1 receives in "
                "\"reduce blocks.8\" (check 0000000000000012)");
  }
  const uint64_t one_sided[2] = {5, 0};
  const RanksResult fine = run_ranks(
      cuda_ranks(2), [&](Rank &rank) { return one_message(rank, eight, kLabels, one_sided); });
  EXPECT_TRUE(fine.ok()) << fine.text();
}

/* ---- failure ---- */

/* Rank 2 keeps away; 0 waits for 1, 1 waits for 2, 3 sends to 2. All return in time, and the
 * culprit is 2 although rank 0 has nothing to do with it. */
TEST(TransportDevice, TimeOutNamesTheCulpritBehindTheNeighbour) {
  const RanksResult result = run_ranks(cuda_ranks(4, kShortUs), [](Rank &rank) {
    const int64_t start_us = mfsdp_clock_us();
    mfsdp_status status = MFSDP_OK;
    if (rank.rank < 2) status = one_byte(rank, rank.rank + 1, false, "gather blocks.3");
    if (rank.rank == 3) status = one_byte(rank, 2, true, "gather blocks.3");
    if (rank.rank == 2) mfsdp_clock_sleep_until(start_us + 3 * kShortUs);
    EXPECT_GE(mfsdp_clock_us() - start_us, kShortUs - 20000);
    EXPECT_LE(mfsdp_clock_us() - start_us, 3 * kShortUs + kSlackUs);
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
    expect_part(result[r].error.message, "rank 2 does not answer: it is in no transfer");
  }
}

/* Rank 0's clock starts well before rank 1's, so it is rank 0 that must look through rank 1. */
TEST(TransportDevice, TimeOutLooksThroughAWaitingNeighbour) {
  const RanksResult result = run_ranks(cuda_ranks(3, kShortUs), [](Rank &rank) {
    if (rank.rank == 1) mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 2);
    if (rank.rank < 2) return one_byte(rank, rank.rank + 1, false, "ring");
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 2 * kShortUs);
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    expect_part(result[r].error.message, "ring: rank 0 waited ");
    expect_part(result[r].error.message, " ms for rank 1 to send; rank 2 does not answer");
    EXPECT_EQ(result[r].error.culprit, 2);
    EXPECT_EQ(result[r].error.rank, 0);
  }
}

TEST(TransportDevice, TimeOutKnowsAPeerThatNeverJoined) {
  const RanksResult result = run_ranks(cuda_ranks(1), [](Rank &rank) {
    mfsdp_device_world_desc desc = mfsdp_device_world_desc_default();
    mfsdp_device_world *world = nullptr;
    mfsdp_transport t;
    Block block(&rank, 1);
    const mfsdp_xfer xfer = receive_from(1, block.data(), 1);
    mfsdp_batch batch = mfsdp_batch_default();
    desc.world = 2;
    desc.deadline_us = 50000;
    MFSDP_TRY(mfsdp_device_world_create(&rank.context, &desc, &world));
    MFSDP_TRY(mfsdp_device_transport_create(&rank.context, world, 0,
                                            static_cast<mfsdp_cuda_backend *>(rank.cuda), &t));
    batch.xfers = &xfer;
    batch.xfer_count = 1;
    EXPECT_EQ(mfsdp_transport_submit(&rank.context, &t, rank.queue, &batch), MFSDP_E_TIMEOUT);
    expect_part(rank.context.error.message, "rank 1 never joined");
    EXPECT_EQ(rank.context.error.culprit, 1);
    MFSDP_TRY(t.ops->destroy(t.self, &rank.context));
    return mfsdp_device_world_destroy(&rank.context, world);
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Each waits for the other to send: nobody is the culprit, and the message says it. */
TEST(TransportDevice, TimeOutOfRanksThatDisagreeAboutTheOrder) {
  const RanksResult result = run_ranks(cuda_ranks(2, kShortUs), [](Rank &rank) {
    return one_byte(rank, 1 - rank.rank, false, "crossed");
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result.text();
    EXPECT_EQ(result[r].error.culprit, -1);
    expect_part(result[r].error.message, "the ranks disagree about the order of transfers");
  }
}

/* The deadline counts from the last progress: 8 messages, each later than a third of it. */
TEST(TransportDevice, ProgressProlongsTheWait) {
  const RanksResult result = run_ranks(cuda_ranks(2, kShortUs), [](Rank &rank) {
    Block block(&rank, 8);
    std::vector<mfsdp_xfer> all;
    for (int i = 0; i < 8; ++i) {
      char *at = static_cast<char *>(block.data()) + i;
      all.push_back(rank.rank == 0 ? receive_from(1, at, 1) : send_to(0, at, 1));
    }
    if (rank.rank == 0) return rank.submit(all, "slow");
    for (const mfsdp_xfer &x : all) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 3);
      MFSDP_TRY(rank.submit({x}, "slow"));
    }
    return MFSDP_OK;
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* Fault b5 in small: a rank leaves early, before or while the others wait for it. */
TEST(TransportDevice, ALeavingRankIsNoticedAtOnce) {
  for (bool before : {false, true})
    for (bool sending : {false, true}) {
      const RanksResult result = run_ranks(cuda_ranks(3), [before, sending](Rank &rank) {
        const int64_t start_us = mfsdp_clock_us();
        if ((rank.rank == 1) != before) mfsdp_clock_sleep_until(start_us + 50000);
        if (rank.rank == 1) return MFSDP_OK; /* the helper destroys its transport */
        const mfsdp_status status = one_byte(rank, 1, sending, "step 9");
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

/* Ranks end at different times: that alone is no error, and copies from a rank that has left run.
 * */
TEST(TransportDevice, LeavingAfterTheLastTransferHurtsNobody) {
  const RanksResult result = run_ranks(cuda_ranks(4), [](Rank &rank) {
    MFSDP_TRY(exchange_all(rank, 10, 0, true));
    if (rank.rank >= 2) return MFSDP_OK;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 30000);
    return one_byte(rank, 1 - rank.rank, rank.rank == 0, "two");
  });
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(TransportDevice, PoisonWakesEveryoneAndStaysTheFirst) {
  std::atomic<int> awake{0};
  const RanksResult result = run_ranks(cuda_ranks(3), [&awake](Rank &rank) {
    const int64_t start_us = mfsdp_clock_us();
    if (rank.rank == 2) {
      mfsdp_error why = mfsdp_error_none(), later = mfsdp_error_none();
      mfsdp_clock_sleep_until(start_us + 50000);
      (void)MFSDP_ERROR_SET(&why, MFSDP_E_BACKEND, 2, "the compute queue of rank 2 failed");
      (void)MFSDP_ERROR_SET(&later, MFSDP_E_IO, 0, "another reason");
      rank.transport.ops->poison(rank.transport.self, &why);
      rank.transport.ops->poison(rank.transport.self, &later);
      rank.transport.ops->poison(rank.transport.self, nullptr);
      while (awake < 2 && mfsdp_clock_us() - start_us < kSlackUs) /* it is not its leaving */
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 1000);
    } else {
      EXPECT_EQ(one_byte(rank, 2, false, "waiting"), MFSDP_E_BACKEND);
      ++awake;
    }
    EXPECT_LT(mfsdp_clock_us() - start_us, kSlackUs);
    EXPECT_EQ(rank.submit({}, "late"), MFSDP_E_POISONED); /* from now on everything fails at once */
    expect_part(rank.context.error.message,
                "late: refused after the first error (MFSDP_E_BACKEND, noticed by rank 2): the "
                "compute queue of rank 2 failed");
    EXPECT_EQ(rank.context.error.culprit, 2);
    return rank.transport.ops->poll(rank.transport.self, &rank.context);
  });
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_BACKEND) << result.text();
    EXPECT_EQ(result[r].error.culprit, 2);
  }
}

/* Rank 0 sends to 1, which takes it, and to 2, which poisons: what rank 0 puts into its queue after
 * the failed batch comes behind the copy of rank 1. */
TEST(TransportDevice, AFailedBatchIsOverInStreamOrderToo) {
  const std::size_t nbytes = std::size_t(1) << 18;
  for (int attempt = 0; attempt < 5; ++attempt) {
    std::atomic<bool> copied{false}; /* rank 1 has enqueued its copy */
    const RanksResult result = run_ranks(cuda_ranks(3), [nbytes, &copied](Rank &rank) {
      Block block(&rank, nbytes, 1);
      MFSDP_TRY(block.upload());
      if (rank.rank == 0) {
        EXPECT_EQ(rank.submit({send_to(1, block.data(), nbytes), send_to(2, block.data(), nbytes)},
                              "large"),
                  MFSDP_E_POISONED);
        MFSDP_TRY(block.fill(2));
        return rank.finish();
      }
      if (rank.rank == 2) {
        while (!copied)
          mfsdp_clock_sleep_until(mfsdp_clock_us() + 100);
        rank.transport.ops->poison(rank.transport.self, nullptr);
        return MFSDP_OK;
      }
      MFSDP_TRY(block.fill(0));
      MFSDP_TRY(rank.submit({receive_from(0, block.data(), nbytes)}, "large"));
      copied = true;
      MFSDP_TRY(block.download());
      MFSDP_TRY(rank.finish());
      EXPECT_EQ(block.host, Bytes(nbytes, 1));
      return MFSDP_OK;
    });
    EXPECT_TRUE(result.clean()) << result.text();
  }
}

} // namespace
