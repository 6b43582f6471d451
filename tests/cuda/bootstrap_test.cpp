/* SPDX-License-Identifier: MIT */
/*
 * bootstrap.h on the host double, over the control planes of threads and of TCP. Fault f5.
 */
#include "mfsdp/cuda/bootstrap.h"
#include "mfsdp/cuda/transport_nccl.h"
#include "mfsdp/posix/control_tcp.h"

#include "tests/cudasim/cudasim.h"
#include "tests/support/ranks.h"

#include <gtest/gtest.h>

#include <arpa/inet.h>
#include <functional>
#include <string>
#include <vector>

namespace {

using test::Rank;
using test::RanksOptions;
using test::RanksResult;
using test::run_ranks;

void expect_part(const std::string &text, const std::string &part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

/* What a rank does with its description before, and with its communicator after. */
using Prepare = std::function<void(Rank &, mfsdp_nccl_bootstrap_desc &)>;
using Use = std::function<mfsdp_status(Rank &, int32_t device, ncclComm_t comm)>;

mfsdp_status bootstrap(Rank &rank, const mfsdp_control &control, const Prepare &prepare,
                       const Use &use) {
  mfsdp_nccl_bootstrap_desc desc = mfsdp_nccl_bootstrap_desc_default();
  ncclComm_t comm = nullptr;
  int32_t device = -5;
  desc.local_rank = rank.rank;
  desc.deadline_us = 20 * 1000000;
  if (prepare) prepare(rank, desc);
  mfsdp_status status = mfsdp_nccl_bootstrap(&rank.context, &control, &desc, &device, &comm);
  EXPECT_EQ(comm != nullptr, status == MFSDP_OK);
  if (status != MFSDP_OK) return status;
  if (use) status = use(rank, device, comm);
  EXPECT_EQ(ncclCommDestroy(comm), ncclSuccess);
  return status;
}

/* `world` ranks on a machine with `devices`. */
RanksResult run(int32_t world, int devices, const Prepare &prepare, const Use &use = nullptr,
                int64_t control_us = 20 * 1000000) {
  RanksOptions options(world);
  options.world.deadline_us = control_us;
  cudasim::set_device_count(devices);
  const RanksResult result =
      run_ranks(options, [&](Rank &rank) { return bootstrap(rank, rank.control, prepare, use); });
  cudasim::set_device_count(1);
  EXPECT_TRUE(result.clean()) << result.text();
  EXPECT_EQ(cudasim::nccl_communicators(), 0);
  EXPECT_EQ(cudasim::complaints(), "");
  return result;
}

mfsdp_status check_comm(Rank &rank, int32_t device, ncclComm_t comm) {
  int count = -1, number = -1, on = -1, current = -1;
  EXPECT_EQ(ncclCommCount(comm, &count), ncclSuccess);
  EXPECT_EQ(ncclCommUserRank(comm, &number), ncclSuccess);
  EXPECT_EQ(ncclCommCuDevice(comm, &on), ncclSuccess);
  EXPECT_EQ(cudaGetDevice(&current), cudaSuccess);
  EXPECT_EQ(count, rank.world);
  EXPECT_EQ(number, rank.rank);
  EXPECT_EQ(on, device);
  EXPECT_EQ(current, device);
  return MFSDP_OK;
}

TEST(Bootstrap, ACommunicatorOfAllRanks) {
  for (int32_t world : {1, 2, 4}) {
    const RanksResult result =
        run(world, 4, nullptr, [](Rank &rank, int32_t device, ncclComm_t comm) {
          EXPECT_EQ(device, rank.rank);
          return check_comm(rank, device, comm);
        });
    EXPECT_TRUE(result.ok()) << result.text();
  }
}

TEST(Bootstrap, NamedDevicesAndTheCallersConfiguration) {
  static const ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  const RanksResult result = run(
      3, 8,
      [](Rank &rank, mfsdp_nccl_bootstrap_desc &desc) {
        desc.device = 7 - rank.rank;
        desc.local_rank = -1;
        desc.config = &config;
      },
      [](Rank &rank, int32_t device, ncclComm_t comm) {
        EXPECT_EQ(device, 7 - rank.rank);
        return check_comm(rank, device, comm);
      });
  EXPECT_TRUE(result.ok()) << result.text();
}

/* The whole way: rendezvous, communicator, transport. */
TEST(Bootstrap, OverTcpToATransport) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in at;
  socklen_t nbytes = sizeof(at);
  std::memset(&at, 0, sizeof(at));
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(bind(listener, reinterpret_cast<struct sockaddr *>(&at), nbytes), 0);
  ASSERT_EQ(listen(listener, 8), 0);
  ASSERT_EQ(getsockname(listener, reinterpret_cast<struct sockaddr *>(&at), &nbytes), 0);
  cudasim::set_device_count(3);
  const RanksResult result = run_ranks(RanksOptions(3), [&](Rank &rank) {
    mfsdp_tcp_control_desc desc = mfsdp_tcp_control_desc_default();
    mfsdp_control control;
    desc.rank = rank.rank;
    desc.world = 3;
    desc.address = "127.0.0.1";
    desc.port = ntohs(at.sin_port);
    desc.listener = rank.rank == 0 ? listener : -1;
    MFSDP_TRY(mfsdp_tcp_control_create(&rank.context, &desc, &control));
    const mfsdp_status status =
        bootstrap(rank, control, nullptr, [&control](Rank &r, int32_t device, ncclComm_t comm) {
          mfsdp_nccl_transport_desc wrap = mfsdp_nccl_transport_desc_default();
          mfsdp_transport transport;
          const mfsdp_backend *backend = nullptr;
          void *cuda = nullptr;
          wrap.nonblocking = 1;
          wrap.control = &control;
          MFSDP_TRY(test::cuda_rig_create_on(&r.context, device, &cuda, &backend));
          MFSDP_TRY(mfsdp_nccl_transport_wrap(&r.context, static_cast<mfsdp_cuda_backend *>(cuda),
                                              comm, &wrap, &transport));
          MFSDP_TRY(
              control.ops->allgather(control.self, &r.context, nullptr, 0, nullptr, 20000000));
          MFSDP_TRY(transport.ops->destroy(transport.self, &r.context));
          return test::cuda_rig_destroy(&r.context, cuda);
        });
    MFSDP_TRY(control.ops->destroy(control.self, &rank.context));
    return status;
  });
  cudasim::set_device_count(1);
  EXPECT_TRUE(result.ok()) << result.text();
  EXPECT_EQ(cudasim::nccl_communicators(), 0);
  EXPECT_EQ(cudasim::complaints(), "");
}

/* A control plane that says of ranks 2 and 3 that they are on another host. */
mfsdp_status two_hosts(void *self, mfsdp_context *context, const void *in, std::size_t nbytes,
                       void *out, int64_t timeout_us) {
  const mfsdp_control *control = static_cast<const mfsdp_control *>(self);
  MFSDP_TRY(control->ops->allgather(control->self, context, in, nbytes, out, timeout_us));
  if (nbytes != sizeof(mfsdp__boot_place)) return MFSDP_OK;
  for (int32_t r = 2; r < control->world; ++r)
    static_cast<mfsdp__boot_place *>(out)[r].host += 1;
  return MFSDP_OK;
}

TEST(Bootstrap, SaysWhichRanksShareAHost) {
  cudasim::set_device_count(4);
  const RanksResult result = run_ranks(RanksOptions(4), [](Rank &rank) {
    int32_t nodes[4] = {-1, -1, -1, -1};
    mfsdp_control_ops ops = *rank.control.ops;
    mfsdp_control control = rank.control;
    ops.allgather = two_hosts;
    control.ops = &ops;
    control.self = &rank.control;
    const mfsdp_status status = bootstrap(
        rank, control,
        [&nodes](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.node_of_rank = nodes; }, nullptr);
    EXPECT_EQ(std::vector<int32_t>(nodes, nodes + 4), (std::vector<int32_t>{0, 0, 2, 2}));
    return status;
  });
  cudasim::set_device_count(1);
  EXPECT_TRUE(result.ok()) << result.text();
}

/* ---- devices: fault f5 ---- */

void expect_all(const RanksResult &result, mfsdp_status status, const std::string &part) {
  for (const test::RankOutcome &rank : result.ranks) {
    EXPECT_EQ(rank.status, status) << rank.error.message;
    expect_part(rank.error.message, part);
  }
}

TEST(Bootstrap, SeveralRanksOfAHostNeedTheirNumbers) {
  const RanksResult result = run(3, 4, [](Rank &rank, mfsdp_nccl_bootstrap_desc &desc) {
    desc.local_rank = rank.rank == 2 ? -1 : rank.rank;
  });
  expect_all(result, MFSDP_E_ARGUMENT, "nccl bootstrap: ranks 0 and 2 are on host ");
  expect_all(result, MFSDP_E_ARGUMENT, "rank 2 does not know its number there");
  expect_all(run(2, 4, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.local_rank = -1; }),
             MFSDP_E_ARGUMENT, "ranks 0 and 1 are on host ");
  expect_all(run(2, 4,
                 [](Rank &rank, mfsdp_nccl_bootstrap_desc &desc) {
                   desc.local_rank = rank.rank == 0 ? -1 : 3;
                 }),
             MFSDP_E_ARGUMENT, "rank 0 does not know its number there");
}

TEST(Bootstrap, OneRankOfAHostNeedsNoNumber) {
  const RanksResult result = run(
      1, 4, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.local_rank = -1; }, check_comm);
  EXPECT_TRUE(result.ok()) << result.text();
}

TEST(Bootstrap, TwoRanksOnOneDevice) {
  expect_all(run(3, 4, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.device = 2; }),
             MFSDP_E_ARGUMENT, "ranks 0 and 1 are both on the device at 0000:12:00.0 of host ");
  /* Both see one device: their numbers on the host do not say which. */
  expect_all(run(2, 1, nullptr), MFSDP_E_ARGUMENT, "ranks 0 and 1 are both on the device at ");
  expect_all(run(2, 1, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.local_rank = -1; }),
             MFSDP_E_ARGUMENT, "set LOCAL_RANK or CUDA_VISIBLE_DEVICES");
  /* Different numbers, which CUDA_VISIBLE_DEVICES made of one device. */
  cudasim::set_one_bus(true);
  expect_all(run(2, 2, nullptr), MFSDP_E_ARGUMENT, "(number 0 for one, 1 for the other)");
  cudasim::set_one_bus(false);
}

TEST(Bootstrap, ADeviceThatIsNotThere) {
  const RanksResult result = run(3, 2, nullptr);
  EXPECT_EQ(result[2].status, MFSDP_E_ARGUMENT);
  expect_part(result[2].error.message, "rank 2 wants device 2 (local_rank 2), its host ");
  for (std::size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(result[r].status, MFSDP_E_PEER);
    EXPECT_EQ(result[r].error.culprit, 2);
    expect_part(result[r].error.message, "rank 2 could not choose a device (MFSDP_E_ARGUMENT)");
  }
}

/* What ranks on other machines would say. */
TEST(Bootstrap, OtherHostsAndVersions) {
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_control control;
  mfsdp__boot_place places[3];
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  std::memset(&control, 0, sizeof(control));
  std::memset(places, 0, sizeof(places));
  control.world = 3;
  for (int r = 0; r < 3; ++r) {
    places[r].host = static_cast<uint64_t>(r);
    places[r].device_count = 8;
    places[r].guessed = 1;
    std::snprintf(places[r].bus, sizeof(places[r].bus), "0000:01:00.0");
  }
  EXPECT_EQ(mfsdp__boot_compare(&context, &control, places), MFSDP_OK)
      << "one rank on each host: " << context.error.message;
  places[2].nccl_version = 1;
  EXPECT_EQ(mfsdp__boot_compare(&context, &control, places), MFSDP_E_MISMATCH);
  expect_part(context.error.message, "rank 2 has NCCL 1, rank 0 has 0");
  places[2].nccl_version = 0;
  places[2].host = 1;
  EXPECT_EQ(mfsdp__boot_compare(&context, &control, places), MFSDP_E_ARGUMENT);
  expect_part(context.error.message, "ranks 1 and 2 are on host");
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

/* ---- what fails later ---- */

TEST(Bootstrap, NcclThatDoesNotConnectEndsAtTheDeadline) {
  cudasim::nccl_set_polls(1 << 30);
  const RanksResult result =
      run(2, 2, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) { desc.deadline_us = 100000; });
  cudasim::nccl_reset();
  for (const test::RankOutcome &rank : result.ranks) {
    EXPECT_EQ(rank.status, MFSDP_E_TIMEOUT) << rank.error.message;
    expect_part(rank.error.message, "for NCCL to connect 2 ranks");
  }
}

TEST(Bootstrap, ARankThatDoesNotComeIsNamed) {
  RanksOptions options(3);
  options.world.deadline_us = 200000;
  cudasim::set_device_count(3);
  const RanksResult result = run_ranks(options, [](Rank &rank) {
    if (rank.rank != 1) return bootstrap(rank, rank.control, nullptr, nullptr);
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 500000);
    return MFSDP_OK;
  });
  cudasim::set_device_count(1);
  EXPECT_TRUE(result.clean()) << result.text();
  for (std::size_t r : {std::size_t(0), std::size_t(2)}) {
    EXPECT_EQ(result[r].status, MFSDP_E_TIMEOUT) << result[r].error.message;
    EXPECT_EQ(result[r].error.culprit, 1);
  }
}

/* All or nobody, and nothing is left. */
TEST(Bootstrap, EveryCallMayFail) {
  for (int64_t n = 0; n < 100; ++n) {
    cudasim::fail_at(n);
    const RanksResult result = run(2, 2, [](Rank &, mfsdp_nccl_bootstrap_desc &desc) {
      desc.deadline_us = 200000; /* one rank may wait for the other inside NCCL */
    });
    const bool failed = cudasim::failed();
    cudasim::fail_at(-1);
    EXPECT_EQ(result[0].status == MFSDP_OK, result[1].status == MFSDP_OK) << result.text();
    if (result.ok()) {
      EXPECT_GT(n, 2);
      if (!failed) return;
    }
  }
  FAIL() << "still failing";
}

TEST(Bootstrap, Rejects) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  mfsdp_nccl_bootstrap_desc desc = mfsdp_nccl_bootstrap_desc_default();
  mfsdp_control control;
  ncclComm_t comm = nullptr;
  int32_t device;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  std::memset(&control, 0, sizeof(control));
  const auto refuse = [&](const char *part) {
    EXPECT_EQ(mfsdp_nccl_bootstrap(&context, &control, &desc, &device, &comm), MFSDP_E_ARGUMENT);
    expect_part(context.error.message, part);
  };
  refuse("control: needs allgather");
  EXPECT_EQ(mfsdp_nccl_bootstrap(&context, &control, nullptr, &device, &comm), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_nccl_bootstrap(&context, &control, &desc, nullptr, &comm), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_nccl_bootstrap(&context, &control, &desc, &device, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_nccl_bootstrap(&context, nullptr, &desc, &device, &comm), MFSDP_E_ARGUMENT);
  desc.deadline_us = 0;
  refuse("deadline_us is 0");
  desc.device = -2;
  refuse("device is -2");
  desc.struct_nbytes = 1;
  refuse("mfsdp_nccl_bootstrap_desc_default");
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

} // namespace
