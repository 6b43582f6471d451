/* SPDX-License-Identifier: MIT */
/*
 * control_tcp.h over loopback: ranks are threads, or processes where one is killed. Strangers,
 * hostile bytes and faults f1, f2, f3 of start-up.
 */
#include "mfsdp/posix/control_tcp.h"

#include "tests/support/fault_allocator.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <arpa/inet.h>
#include <csignal>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <vector>

namespace {

const int64_t kShortUs = 200000;
const int64_t kLongUs = 20000000;
const int64_t kSlackUs = 3000000; /* sanitizers, other work on the machine */

void expect_part(const std::string &text, const std::string &part) {
  EXPECT_NE(text.find(part), std::string::npos) << "\"" << text << "\" lacks \"" << part << "\"";
}

/* ---- raw sockets, blocking ---- */

struct Listener {
  int fd = -1;
  int32_t port = 0;
};

Listener make_listener(const char *address = "127.0.0.1") {
  Listener listener;
  const bool six = std::string(address).find(':') != std::string::npos;
  struct sockaddr_storage at;
  socklen_t nbytes = six ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in);
  std::memset(&at, 0, sizeof(at));
  at.ss_family = six ? AF_INET6 : AF_INET;
  if (six)
    inet_pton(AF_INET6, address, &reinterpret_cast<struct sockaddr_in6 *>(&at)->sin6_addr);
  else
    inet_pton(AF_INET, address, &reinterpret_cast<struct sockaddr_in *>(&at)->sin_addr);
  listener.fd = socket(at.ss_family, SOCK_STREAM, 0);
  if (listener.fd < 0) return listener;
  if (bind(listener.fd, reinterpret_cast<struct sockaddr *>(&at), nbytes) != 0 ||
      listen(listener.fd, 64) != 0 ||
      getsockname(listener.fd, reinterpret_cast<struct sockaddr *>(&at), &nbytes) != 0) {
    close(listener.fd);
    listener.fd = -1;
    return listener;
  }
  listener.port = ntohs(six ? reinterpret_cast<struct sockaddr_in6 *>(&at)->sin6_port
                            : reinterpret_cast<struct sockaddr_in *>(&at)->sin_port);
  return listener;
}

/* A port that nobody has at the moment. */
int32_t free_port() {
  const Listener listener = make_listener();
  close(listener.fd);
  return listener.port;
}

int raw_connect(int32_t port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in to;
  std::memset(&to, 0, sizeof(to));
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<uint16_t>(port));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  struct timeval limit = {5, 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
  for (int attempt = 0; attempt < 500; ++attempt) {
    if (connect(fd, reinterpret_cast<struct sockaddr *>(&to), sizeof(to)) == 0) return fd;
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 10000);
  }
  close(fd);
  return -1;
}

void raw_send(int fd, const std::string &bytes) {
  (void)!send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
}

std::string raw_receive(int fd, std::size_t nbytes) {
  std::string bytes(nbytes, '\0');
  std::size_t have = 0;
  while (have < nbytes) {
    const ssize_t count = recv(fd, &bytes[have], nbytes - have, 0);
    if (count <= 0) break;
    have += static_cast<std::size_t>(count);
  }
  bytes.resize(have);
  return bytes;
}

std::string hello(int32_t rank, int32_t world, const std::string &job = "",
                  std::size_t limit = 16384, int32_t version = MFSDP_VERSION) {
  mfsdp__hello h;
  unsigned char bytes[MFSDP__HELLO_NBYTES];
  std::memset(&h, 0, sizeof(h));
  h.version = version;
  h.world = world;
  h.rank = rank;
  h.limit = limit;
  std::memcpy(h.job, job.data(), job.size());
  mfsdp__hello_write(&h, bytes);
  return std::string(reinterpret_cast<char *>(bytes), sizeof(bytes));
}

std::string frame(int kind, uint64_t number, const std::string &payload = "") {
  unsigned char head[MFSDP__TCP_HEAD_NBYTES];
  mfsdp__tcp_head(head, kind, number, payload.size());
  return std::string(reinterpret_cast<char *>(head), sizeof(head)) + payload;
}

/* ---- ranks ---- */

struct Rank {
  test::FaultAllocator memory;
  mfsdp_context context;
  mfsdp_control control;
  mfsdp_tcp_control_desc desc;
  mfsdp_status status = MFSDP_OK;
  mfsdp_error error;
  int64_t waited_us = 0;

  Rank(int32_t rank, int32_t world, int32_t port) {
    mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    context_desc.rank = rank;
    context_desc.allocator = memory.allocator();
    EXPECT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
    std::memset(&control, 0, sizeof(control));
    desc = mfsdp_tcp_control_desc_default();
    desc.rank = rank;
    desc.world = world;
    desc.address = "127.0.0.1";
    desc.port = port;
    desc.deadline_us = kLongUs;
  }
  ~Rank() {
    destroy();
    EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
    EXPECT_EQ(memory.complaints(), "");
  }
  void destroy() {
    if (control.self != nullptr) {
      EXPECT_EQ(control.ops->destroy(control.self, &context), MFSDP_OK);
    }
    std::memset(&control, 0, sizeof(control));
  }
  mfsdp_status gather(const void *in, std::size_t nbytes, void *out, int64_t timeout_us = kLongUs) {
    return control.ops->allgather(control.self, &context, in, nbytes, out, timeout_us);
  }
  mfsdp_status barrier(int64_t timeout_us = kLongUs) {
    return gather(nullptr, 0, nullptr, timeout_us);
  }
  std::string message() const { return error.message; }
};

using Ranks = std::vector<std::unique_ptr<Rank>>;
using Body = std::function<mfsdp_status(Rank &)>;

/* Meets, runs `body`, keeps status and error. */
void run_rank(Rank &rank, const Body &body, bool leave = true) {
  const int64_t start_us = mfsdp_clock_us();
  rank.status = mfsdp_tcp_control_create(&rank.context, &rank.desc, &rank.control);
  if (rank.status == MFSDP_OK && body) rank.status = body(rank);
  rank.error = *mfsdp_context_error(&rank.context);
  rank.waited_us = mfsdp_clock_us() - start_us;
  if (leave) rank.destroy();
}

Ranks make_ranks(const std::vector<int32_t> &numbers, int32_t world, int32_t port) {
  Ranks ranks;
  for (int32_t number : numbers)
    ranks.emplace_back(new Rank(number, world, port));
  return ranks;
}

void run_all(Ranks &ranks, const Body &body) {
  std::vector<std::thread> threads;
  for (auto &rank : ranks)
    threads.emplace_back([&rank, &body] { run_rank(*rank, body); });
  for (auto &thread : threads)
    thread.join();
}

std::vector<int32_t> all_of(int32_t world) {
  std::vector<int32_t> numbers;
  for (int32_t r = 0; r < world; ++r)
    numbers.push_back(r);
  return numbers;
}

/* `world` ranks that meet at a port that the kernel chose. */
Ranks run_world(int32_t world, const Body &body,
                const std::function<void(Rank &)> &prepare = nullptr) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks(all_of(world), world, listener.port);
  ranks[0]->desc.listener = listener.fd;
  for (auto &rank : ranks)
    if (prepare) prepare(*rank);
  run_all(ranks, body);
  return ranks;
}

void expect_ok(const Ranks &ranks) {
  for (const auto &rank : ranks)
    EXPECT_EQ(rank->status, MFSDP_OK) << "rank " << rank->desc.rank << ": " << rank->message();
}

/* Sizes change from round to round, 0 among them. */
mfsdp_status gather_rounds(Rank &rank, int rounds) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<int64_t> in(static_cast<std::size_t>(round % 5), rank.desc.rank * 1000 + round);
    std::vector<int64_t> out(in.size() * static_cast<std::size_t>(rank.desc.world), -1);
    MFSDP_TRY(rank.gather(in.data(), in.size() * 8, out.data()));
    for (std::size_t i = 0; i < out.size(); ++i)
      if (out[i] != static_cast<int64_t>(i / in.size()) * 1000 + round)
        return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "round %d: wrong message", round);
  }
  return MFSDP_OK;
}

/* ---- what goes well ---- */

TEST(TcpControl, AllgatherInRankOrderManyTimes) {
  for (int32_t world : {1, 2, 3, 8})
    expect_ok(run_world(world, [](Rank &rank) { return gather_rounds(rank, 100); }));
}

TEST(TcpControl, LargeMessagesGoInParts) {
  const std::size_t nbytes = 600000; /* more than a socket holds */
  expect_ok(run_world(
      4,
      [nbytes](Rank &rank) {
        std::vector<unsigned char> in(nbytes), out(4 * nbytes);
        for (std::size_t i = 0; i < nbytes; ++i)
          in[i] = static_cast<unsigned char>(i * 7 + static_cast<std::size_t>(rank.desc.rank));
        for (int round = 0; round < 3; ++round) {
          MFSDP_TRY(rank.gather(in.data(), nbytes, out.data()));
          for (std::size_t i = 0; i < out.size(); ++i)
            if (out[i] != static_cast<unsigned char>(i % nbytes * 7 + i / nbytes))
              return MFSDP_FAIL(&rank.context, MFSDP_E_STATE, "wrong byte %zu", i);
        }
        return MFSDP_OK;
      },
      [nbytes](Rank &rank) { rank.desc.control_nbytes = nbytes; }));
}

/* Rank 0 listens itself: by number, by name, and at an IPv6 address. */
TEST(TcpControl, AddressesOfAllKinds) {
  for (const char *address : {"127.0.0.1", "localhost", "::1"}) {
    const Listener probe = make_listener(std::strcmp(address, "::1") == 0 ? "::1" : "127.0.0.1");
    if (probe.fd < 0) {
      std::printf("no IPv6 on this machine: ::1 was not tried\n");
      continue;
    }
    close(probe.fd);
    Ranks ranks = make_ranks(all_of(3), 3, probe.port);
    for (auto &rank : ranks)
      rank->desc.address = address;
    run_all(ranks, [](Rank &rank) { return gather_rounds(rank, 3); });
    expect_ok(ranks);
  }
}

TEST(TcpControl, OneRankNeedsNoSocket) {
  Rank rank(0, 1, 0);
  rank.desc.address = nullptr;
  run_rank(rank, [](Rank &r) {
    uint8_t alive = 9;
    MFSDP_TRY(gather_rounds(r, 20));
    MFSDP_TRY(r.control.ops->probe(r.control.self, &r.context, &alive, 1000));
    EXPECT_EQ(alive, 1);
    EXPECT_GT(r.control.ops->now_us(r.control.self), 0);
    return mfsdp_control_check(&r.context, &r.control);
  });
  EXPECT_EQ(rank.status, MFSDP_OK) << rank.message();
}

/* ---- arguments ---- */

TEST(TcpControl, RejectsDescriptions) {
  const auto refuse = [](const std::function<void(mfsdp_tcp_control_desc &)> &spoil,
                         const std::string &part) {
    Rank rank(1, 2, 29500);
    spoil(rank.desc);
    run_rank(rank, nullptr);
    EXPECT_EQ(rank.status, MFSDP_E_ARGUMENT);
    expect_part(rank.message(), part);
    EXPECT_EQ(rank.memory.alloc_count(), 0) << part;
  };
  using Desc = mfsdp_tcp_control_desc;
  refuse([](Desc &d) { d.struct_nbytes = 8; }, "mfsdp_tcp_control_desc_default");
  refuse([](Desc &d) { d.rank = 2; }, "rank is 2 of world 2");
  refuse([](Desc &d) { d.rank = -1; }, "rank is -1 of world 2");
  refuse([](Desc &d) { d.world = 0; }, "of world 0");
  refuse([](Desc &d) { d.deadline_us = 0; }, "deadline_us is 0");
  refuse([](Desc &d) { d.control_nbytes = 0; }, "control_nbytes is 0");
  refuse([](Desc &d) { d.address = nullptr; }, "address is NULL and there are 2 ranks");
  refuse([](Desc &d) { d.address = ""; }, "address is empty and there are 2 ranks");
  refuse([](Desc &d) { d.port = 0; }, "port is 0");
  refuse([](Desc &d) { d.port = 65536; }, "port is 65536");
  refuse([](Desc &d) { d.listener = 0; }, "rank 0 alone listens");
  refuse([](Desc &d) { std::memset(d.job, 'x', sizeof(d.job)); }, "job has no end");
  Rank rank(0, 1, 0);
  EXPECT_EQ(mfsdp_tcp_control_create(&rank.context, nullptr, &rank.control), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_tcp_control_create(&rank.context, &rank.desc, nullptr), MFSDP_E_ARGUMENT);
}

TEST(TcpControl, RejectsCalls) {
  const Ranks ranks = run_world(
      2,
      [](Rank &rank) {
        char in[101] = {0}, out[202];
        EXPECT_EQ(rank.gather(in, 101, out), MFSDP_E_ARGUMENT);
        expect_part(rank.context.error.message,
                    "nbytes is 101, this world was made for at most 100");
        EXPECT_EQ(rank.gather(nullptr, 1, out), MFSDP_E_ARGUMENT);
        EXPECT_EQ(rank.gather(in, 1, nullptr), MFSDP_E_ARGUMENT);
        EXPECT_EQ(rank.gather(in, 1, out, 0), MFSDP_E_ARGUMENT);
        EXPECT_EQ(rank.control.ops->probe(rank.control.self, &rank.context, nullptr, 1),
                  MFSDP_E_ARGUMENT);
        return rank.gather(in, 100, out); /* none of this has hurt the control plane */
      },
      [](Rank &rank) { rank.desc.control_nbytes = 100; });
  expect_ok(ranks);
}

TEST(TcpControl, AllocationsMayFail) {
  for (int64_t n = 0; n < 20; ++n) {
    Rank rank(1, 2, free_port());
    rank.desc.deadline_us = 20000;
    rank.memory.fail_at(n);
    run_rank(rank, nullptr);
    if (!rank.memory.failed()) {
      EXPECT_GT(n, 5);
      EXPECT_EQ(rank.status, MFSDP_E_TIMEOUT);
      return;
    }
    EXPECT_EQ(rank.status, MFSDP_E_MEMORY);
  }
  FAIL() << "still failing";
}

/* ---- start-up: the launcher's variables ---- */

using Environment = std::map<std::string, std::string>;

const char *look_up(void *user, const char *name) {
  const Environment &environment = *static_cast<const Environment *>(user);
  const auto at = environment.find(name);
  return at == environment.end() ? nullptr : at->second.c_str();
}

/* The description that the variables give; "" or what is wrong. */
std::string describe(Environment environment, mfsdp_tcp_control_desc *desc) {
  Rank rank(0, 1, 0);
  mfsdp_launch launch;
  mfsdp_status status = mfsdp_launch_read(&rank.context, look_up, &environment, &launch);
  if (status == MFSDP_OK)
    status = mfsdp_tcp_control_desc_launch(&rank.context, &launch, look_up, &environment, desc);
  desc->address = nullptr; /* it lay in the environment */
  EXPECT_TRUE(status == MFSDP_OK || status == MFSDP_E_ARGUMENT);
  return status == MFSDP_OK ? "" : mfsdp_context_error(&rank.context)->message;
}

/* Faults f1, f3. */
TEST(TcpControl, DescriptionsOfLaunchers) {
  mfsdp_tcp_control_desc desc;
  Environment torchrun = {
      {"RANK", "1"}, {"WORLD_SIZE", "2"}, {"TORCHELASTIC_RUN_ID", "run7"}, {"SLURM_JOB_ID", "5"}};
  expect_part(describe(torchrun, &desc), "MASTER_ADDR is not set and there are 2 ranks");
  torchrun["MASTER_ADDR"] = "node3";
  torchrun["MASTER_PORT"] = "29500";
  EXPECT_EQ(describe(torchrun, &desc), "");
  EXPECT_EQ(desc.rank, 1);
  EXPECT_EQ(desc.world, 2);
  EXPECT_EQ(desc.port, 29500);
  EXPECT_STREQ(desc.job, "run7");
  torchrun["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_EQ(describe(torchrun, &desc), "");
  EXPECT_EQ(desc.port, 29501) << "the agent has MASTER_PORT itself";
  Environment srun = {{"SLURM_PROCID", "1"},    {"SLURM_NTASKS", "4"}, {"SLURM_STEP_ID", "0"},
                      {"MASTER_ADDR", "node3"}, {"MASTER_PORT", "1"},  {"SLURM_JOB_ID", "77"}};
  EXPECT_EQ(describe(srun, &desc), "");
  EXPECT_EQ(desc.world, 4);
  EXPECT_STREQ(desc.job, "77.0");
  srun.erase("SLURM_STEP_ID"); /* the batch script: one process, which meets nobody */
  EXPECT_EQ(describe(srun, &desc), "");
  EXPECT_EQ(desc.world, 1);
  Rank rank(0, 1, 0);
  EXPECT_EQ(mfsdp_tcp_control_desc_launch(&rank.context, nullptr, nullptr, nullptr, &desc),
            MFSDP_E_ARGUMENT);
}

/* ---- start-up: ranks that do not fit ---- */

TEST(TcpControl, ADuplicateRankIsNamedOnAllRanks) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 1, 1}, 3, listener.port);
  ranks[0]->desc.listener = listener.fd;
  run_all(ranks, nullptr);
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_STATE) << rank->message();
    EXPECT_EQ(rank->error.culprit, 1);
    expect_part(rank->message(), "rank 1 has joined already, from 127.0.0.1:");
    EXPECT_LT(rank->waited_us, kSlackUs) << "the deadline is 20 s";
  }
}

TEST(TcpControl, AnotherWorldIsNamedOnAllRanks) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 1, 2}, 3, listener.port);
  ranks[0]->desc.listener = listener.fd;
  ranks[2]->desc.world = 5;
  run_all(ranks, nullptr);
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_MISMATCH) << rank->message();
    expect_part(rank->message(), "one world size (WORLD_SIZE, srun -n)");
  }
  expect_part(ranks[0]->message(), "rank 2 at 127.0.0.1:");
  expect_part(ranks[0]->message(), "was started for 5 ranks, rank 0 for 3");
  expect_part(ranks[2]->message(),
              "rank 0 at 127.0.0.1:" + std::to_string(listener.port) + " was started for 3 ranks");
}

TEST(TcpControl, AnotherLimitIsNamedOnAllRanks) {
  const Ranks ranks = run_world(2, nullptr, [](Rank &rank) {
    rank.desc.control_nbytes = 100u + static_cast<unsigned>(rank.desc.rank);
  });
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_MISMATCH) << rank->message();
    expect_part(rank->message(), "has control_nbytes 10");
  }
}

/* A hello that this library would not send, to rank 0 of two. */
void expect_refused_at_0(const std::string &bytes, mfsdp_status status, const std::string &part) {
  const Listener listener = make_listener();
  Rank rank(0, 2, listener.port);
  rank.desc.listener = listener.fd;
  rank.desc.deadline_us = 4 * kShortUs;
  std::thread thread([&rank] { run_rank(rank, nullptr); });
  const int fd = raw_connect(listener.port);
  raw_send(fd, bytes);
  (void)raw_receive(fd, MFSDP__HELLO_NBYTES);
  thread.join();
  close(fd);
  EXPECT_EQ(rank.status, status) << rank.message();
  expect_part(rank.message(), part);
  EXPECT_LT(rank.waited_us, kSlackUs);
}

TEST(TcpControl, AnotherVersionOrNumberEndsTheRendezvous) {
  expect_refused_at_0(hello(1, 2, "", 16384, 9008007), MFSDP_E_UNSUPPORTED,
                      "has MatrixFSDP 9.8.7, rank 0 has 0.1.0");
  expect_refused_at_0(hello(0, 2), MFSDP_E_MISMATCH, "says that it is rank 0, needs 1 to 1");
  expect_refused_at_0(hello(2, 2), MFSDP_E_MISMATCH, "says that it is rank 2, needs 1 to 1");
  expect_refused_at_0(hello(-1, 2), MFSDP_E_MISMATCH, "says that it is rank -1");
}

/* What rank 1 says when `bytes` are what it hears at the port. */
void expect_refused_at_1(const std::string &bytes, mfsdp_status status, const std::string &part,
                         int64_t deadline_us = kLongUs) {
  const Listener listener = make_listener();
  Rank rank(1, 2, listener.port);
  rank.desc.deadline_us = deadline_us;
  std::thread thread([&rank] { run_rank(rank, nullptr); });
  const int fd = accept(listener.fd, nullptr, nullptr);
  raw_send(fd, bytes);
  thread.join();
  close(fd);
  close(listener.fd);
  EXPECT_EQ(rank.status, status) << rank.message();
  expect_part(rank.message(), part);
  expect_part(rank.message(), "127.0.0.1:" + std::to_string(listener.port));
  EXPECT_LT(rank.waited_us, kSlackUs);
}

/* Whatever a process says of itself, who looks the culprit up in a table of ranks finds an entry. */
TEST(TcpControl, TheCulpritIsARankOfThisWorldOrNobody) {
  const std::vector<std::string> hellos = {hello(1000000, 3), hello(-7, 2, "", 8),
                                           hello(2, 2, "", 16384, 5)};
  for (const std::string &bytes : hellos) {
    const Listener listener = make_listener();
    Rank rank(0, 2, listener.port);
    rank.desc.listener = listener.fd;
    std::thread thread([&rank] { run_rank(rank, [](Rank &) { return MFSDP_OK; }); });
    const int fd = raw_connect(listener.port);
    raw_send(fd, bytes);
    thread.join();
    close(fd);
    EXPECT_TRUE(rank.status == MFSDP_E_MISMATCH || rank.status == MFSDP_E_UNSUPPORTED)
        << rank.message();
    EXPECT_EQ(rank.error.culprit, -1) << rank.message();
  }
}

TEST(TcpControl, WhatARankMayFindAtThePort) {
  expect_refused_at_1("HTTP/1.1 400 Bad\x1b[2J\r\n", MFSDP_E_FORMAT, "it says \"HTTP/1.1 400 Bad?");
  std::string other = hello(0, 2);
  other[8] = 7;
  expect_refused_at_1(other, MFSDP_E_UNSUPPORTED, "speaks protocol 7, this one 1");
  other = hello(0, 2);
  std::reverse(other.begin() + 12, other.begin() + 16);
  expect_refused_at_1(other, MFSDP_E_UNSUPPORTED, "stores its bytes in another order");
  expect_refused_at_1(hello(0, 2, "", 16384, 1002003), MFSDP_E_UNSUPPORTED, "has MatrixFSDP 1.2.3");
  expect_refused_at_1(hello(0, 2, "old"), MFSDP_E_PEER, "is of another job (\"old\")");
  expect_refused_at_1(hello(1, 2), MFSDP_E_MISMATCH, "rank 1 listens at");
  expect_refused_at_1("", MFSDP_E_TIMEOUT, "nobody there said hello", kShortUs);
  expect_refused_at_1(hello(0, 2).substr(0, 100), MFSDP_E_TIMEOUT, "nobody there said hello",
                      kShortUs);
  expect_refused_at_1(hello(0, 2) + frame(MFSDP__TCP_RESULT, 1, "x"), MFSDP_E_FORMAT,
                      "sent what is no message of ours");
  expect_refused_at_1(hello(0, 2) + std::string(64, 'x'), MFSDP_E_FORMAT,
                      "sent what is no message of ours");
  expect_refused_at_1(hello(0, 2), MFSDP_E_TIMEOUT, "does not answer any more", kShortUs);
}

/* Strangers come first; then the ranks meet all the same. */
TEST(TcpControl, StrangersAreTurnedAwayAndRanksMeet) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 1, 2}, 3, listener.port);
  ranks[0]->desc.listener = listener.fd;
  std::thread zero([&ranks] { run_rank(*ranks[0], [](Rank &r) { return gather_rounds(r, 3); }); });
  for (const std::string &bytes :
       {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(), std::string("MFSDPTCP"),
        hello(1, 3, "old"), hello(1, 9, "old")}) {
    const int fd = raw_connect(listener.port);
    raw_send(fd, bytes);
    EXPECT_EQ(raw_receive(fd, MFSDP__HELLO_NBYTES).size(), std::size_t(MFSDP__HELLO_NBYTES));
    close(fd);
  }
  Rank stale(1, 3, listener.port);
  std::snprintf(stale.desc.job, sizeof(stale.desc.job), "yesterday's");
  run_rank(stale, nullptr);
  EXPECT_EQ(stale.status, MFSDP_E_PEER);
  expect_part(stale.message(), "rank 0 at 127.0.0.1:" + std::to_string(listener.port) +
                                   " is of another job (\"\"), this is rank 1 of \"yesterday's\"");
  std::thread one([&ranks] { run_rank(*ranks[1], [](Rank &r) { return gather_rounds(r, 3); }); });
  run_rank(*ranks[2], [](Rank &r) { return gather_rounds(r, 3); });
  one.join();
  zero.join();
  expect_ok(ranks);
}

TEST(TcpControl, RanksThatNeverComeAreNamedOnAllRanks) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 2}, 4, listener.port);
  ranks[0]->desc.listener = listener.fd;
  ranks[0]->desc.deadline_us = kShortUs;
  ranks[1]->desc.deadline_us = 4 * kShortUs;
  std::thread stranger([&listener] {
    const int fd = raw_connect(listener.port);
    raw_send(fd, hello(1, 4, "old"));
    (void)raw_receive(fd, 4096);
    close(fd);
  });
  run_all(ranks, nullptr);
  stranger.join();
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_TIMEOUT) << rank->message();
    EXPECT_EQ(rank->error.culprit, 1);
    expect_part(rank->message(), "come: 1, 3");
    expect_part(rank->message(), "127.0.0.1:" + std::to_string(listener.port));
    EXPECT_GE(rank->waited_us, kShortUs / 2);
    EXPECT_LT(rank->waited_us, kShortUs + kSlackUs);
  }
  expect_part(ranks[1]->message(), "rank 0 waited ");
  expect_part(ranks[0]->message(), "(this address is of use on this host alone)");
  expect_part(ranks[0]->message(),
              "1 connections were turned away, the last: rank 1 at 127.0.0.1:");
}

TEST(TcpControl, ARankThatWaitsAtRank0NamesTheMissingItself) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 2}, 4, listener.port);
  ranks[0]->desc.listener = listener.fd;
  ranks[1]->desc.deadline_us = kShortUs; /* before rank 0's */
  run_all(ranks, nullptr);
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_TIMEOUT) << rank->message();
    expect_part(rank->message(), "rank 2 waited ");
    expect_part(rank->message(), "did not come: 1, 3;");
    EXPECT_EQ(rank->error.culprit, 1);
    EXPECT_EQ(rank->error.rank, 2);
  }
}

TEST(TcpControl, NobodyAtTheAddress) {
  Rank rank(1, 2, free_port());
  rank.desc.deadline_us = kShortUs;
  run_rank(rank, nullptr);
  EXPECT_EQ(rank.status, MFSDP_E_TIMEOUT);
  EXPECT_EQ(rank.error.culprit, 0);
  expect_part(rank.message(),
              "to reach rank 0 at 127.0.0.1 (127.0.0.1:" + std::to_string(rank.desc.port) +
                  ", which is this very host): nobody listens there");
  EXPECT_LT(rank.waited_us, kShortUs + kSlackUs);
}

TEST(TcpControl, APortInUse) {
  const Listener listener = make_listener();
  Rank rank(0, 2, listener.port);
  rank.desc.deadline_us = kShortUs; /* of which a quarter is for the port */
  run_rank(rank, nullptr);
  EXPECT_EQ(rank.status, MFSDP_E_IO);
  expect_part(rank.message(), "rank 0 cannot listen at 127.0.0.1:" + std::to_string(listener.port) +
                                  ": the port is in use");
  EXPECT_LT(rank.waited_us, kSlackUs);
  close(listener.fd);
}

TEST(TcpControl, AddressesThatAreNone) {
  const auto refuse = [](int32_t number, const char *address, const std::string &part) {
    Rank rank(number, 2, 29500);
    rank.desc.address = address;
    rank.desc.deadline_us = kShortUs;
    run_rank(rank, nullptr);
    EXPECT_EQ(rank.status, MFSDP_E_ARGUMENT) << rank.message();
    expect_part(rank.message(), part);
  };
  refuse(0, "192.0.2.1", "192.0.2.1:29500: it is no address of this host"); /* RFC 5737 */
  refuse(1, "no such host", "rank 1 finds no host \"no such host\"");
  refuse(0, "300.1.1.1", "rank 0 finds no host \"300.1.1.1\"");
  refuse(1, "0.0.0.0", "rank 1 cannot go to \"0.0.0.0\"");
  refuse(1, "::", "rank 1 cannot go to \"::\"");
}

/* Every address of the host, where the user says so; and not otherwise. */
TEST(TcpControl, ListensWhereItIsToldAndNowhereElse) {
  for (const char *address : {"0.0.0.0", "127.0.0.2"}) {
    const int32_t port = free_port();
    Ranks ranks = make_ranks(all_of(2), 2, port);
    ranks[0]->desc.address = address;
    ranks[1]->desc.address = "127.0.0.1";
    for (auto &rank : ranks)
      rank->desc.deadline_us = address[0] == '0' ? kLongUs : kShortUs;
    run_all(ranks, nullptr);
    for (auto &rank : ranks)
      EXPECT_EQ(rank->status, address[0] == '0' ? MFSDP_OK : MFSDP_E_TIMEOUT) << rank->message();
  }
}

TEST(TcpControl, APeerThatLeavesDuringTheRendezvous) {
  const Listener listener = make_listener();
  Rank zero(0, 4, listener.port), two(2, 4, listener.port);
  zero.desc.listener = listener.fd;
  zero.desc.deadline_us = kSlackUs;
  std::thread thread([&zero] { run_rank(zero, nullptr); });
  std::thread other([&two] { run_rank(two, nullptr); });
  const int fd = raw_connect(listener.port);
  raw_send(fd, hello(1, 4) + frame(MFSDP__TCP_PROBE, 1).substr(0, 10));
  (void)raw_receive(fd, MFSDP__HELLO_NBYTES);
  mfsdp_clock_sleep_until(mfsdp_clock_us() + 50000);
  close(fd);
  thread.join();
  other.join();
  EXPECT_EQ(zero.status, MFSDP_E_PEER) << zero.message();
  EXPECT_EQ(zero.error.culprit, 1);
  expect_part(zero.message(), "rank 1 (127.0.0.1:");
  expect_part(zero.message(), "in the middle of a message");
  EXPECT_LT(zero.waited_us, kSlackUs);
  /* Rank 2 may have come just after: then rank 0 is no more. */
  EXPECT_TRUE(two.status == MFSDP_E_PEER || two.status == MFSDP_E_TIMEOUT) << two.message();
}

TEST(TcpControl, Rank0ThatLeavesDuringTheRendezvous) {
  const Listener listener = make_listener();
  Rank rank(1, 2, listener.port);
  std::thread thread([&rank] { run_rank(rank, nullptr); });
  const int fd = accept(listener.fd, nullptr, nullptr);
  raw_send(fd, hello(0, 2));
  (void)raw_receive(fd, MFSDP__HELLO_NBYTES);
  close(fd);
  thread.join();
  close(listener.fd);
  EXPECT_EQ(rank.status, MFSDP_E_PEER) << rank.message();
  EXPECT_EQ(rank.error.culprit, 0);
  expect_part(rank.message(), "rank 1 had joined rank 0 (127.0.0.1:");
}

/* ---- hostile peers ---- */

/* More of them than rank 0 has places for; each says a byte now and then. */
TEST(TcpControl, SlowStrangersStopNobody) {
  const Listener listener = make_listener();
  Ranks ranks = make_ranks({0, 1}, 2, listener.port);
  ranks[0]->desc.listener = listener.fd;
  ranks[0]->desc.deadline_us = 2000000; /* half a second for a hello */
  std::thread zero([&ranks] { run_rank(*ranks[0], [](Rank &r) { return gather_rounds(r, 3); }); });
  std::vector<int> fds;
  for (int i = 0; i < MFSDP__LOBBY_GUESTS + 8; ++i) {
    fds.push_back(raw_connect(listener.port));
    raw_send(fds.back(), "M");
  }
  std::thread one([&ranks] { run_rank(*ranks[1], [](Rank &r) { return gather_rounds(r, 3); }); });
  for (int i = 1; i < 6; ++i) {
    mfsdp_clock_sleep_until(mfsdp_clock_us() + 100000);
    for (int fd : fds)
      raw_send(fd, hello(1, 2).substr(static_cast<std::size_t>(i), 1));
  }
  one.join();
  zero.join();
  for (int fd : fds)
    close(fd);
  expect_ok(ranks);
}

/* Bytes from a fixed seed: wrong in every way, or right up to some point. */
std::string fuzzed(std::mt19937 &random, std::size_t limit) {
  const auto number = [&random](std::size_t n) { return static_cast<std::size_t>(random() % n); };
  std::string bytes;
  for (std::size_t parts = number(4); parts < 5; ++parts) {
    std::string part;
    switch (number(4)) {
    case 0:
      for (std::size_t n = number(200); n > 0; --n)
        part += static_cast<char>(random());
      break;
    case 1: part = frame(static_cast<int>(number(12)), number(3)); break;
    case 2: part = frame(MFSDP__TCP_GATHER, 1, std::string(number(limit + 9), 'g')); break;
    default:
      part = frame(MFSDP__TCP_NOTICE, 0, std::string(MFSDP__TCP_NOTICE_NBYTES, char(random())));
    }
    for (std::size_t n = number(3); n > 0 && !part.empty(); --n)
      part[number(part.size())] = static_cast<char>(random());
    if (number(6) == 0 && part.size() >= 24)
      part.replace(16, 8, std::string(8, '\xff')); /* a length */
    bytes += part;
  }
  return bytes;
}

TEST(TcpControl, NoBytesOfAPeerHurtRank0) {
  std::mt19937 random(20260707);
  for (int attempt = 0; attempt < 60; ++attempt) {
    const Listener listener = make_listener();
    Rank rank(0, 2, listener.port);
    rank.desc.listener = listener.fd;
    rank.desc.control_nbytes = 64;
    rank.desc.deadline_us = 30000;
    std::thread thread([&rank] {
      run_rank(rank, [](Rank &r) {
        char in[64] = {0}, out[128];
        uint8_t alive[2];
        mfsdp_status status = MFSDP_OK;
        for (int call = 0; call < 3 && status == MFSDP_OK; ++call)
          status = r.gather(in, 64, out, 30000);
        EXPECT_EQ(r.control.ops->probe(r.control.self, &r.context, alive, 1000), MFSDP_OK);
        return status;
      });
    });
    const int fd = raw_connect(listener.port);
    raw_send(fd, (attempt % 3 ? hello(1, 2, "", 64) : "") + fuzzed(random, 64));
    if (attempt % 2) shutdown(fd, SHUT_WR);
    thread.join();
    close(fd);
    EXPECT_NE(rank.status, MFSDP_OK) << attempt;
    EXPECT_NE(rank.message(), "");
    EXPECT_LT(rank.waited_us, kSlackUs);
  }
}

TEST(TcpControl, NoBytesOfRank0HurtOthers) {
  std::mt19937 random(7);
  for (int attempt = 0; attempt < 60; ++attempt) {
    const Listener listener = make_listener();
    Rank rank(1, 2, listener.port);
    rank.desc.control_nbytes = 64;
    rank.desc.deadline_us = 30000;
    std::thread thread([&rank] {
      run_rank(rank, [](Rank &r) {
        char in[64] = {0}, out[128];
        mfsdp_status status = MFSDP_OK;
        for (int call = 0; call < 3 && status == MFSDP_OK; ++call)
          status = r.gather(in, 64, out, 30000);
        return status;
      });
    });
    const int fd = accept(listener.fd, nullptr, nullptr);
    raw_send(fd, (attempt % 4 ? hello(0, 2, "", 64) : "") +
                     (attempt % 4 > 1 ? frame(MFSDP__TCP_WELCOME, 0) : "") + fuzzed(random, 64));
    thread.join();
    close(fd);
    close(listener.fd);
    EXPECT_NE(rank.status, MFSDP_OK) << attempt;
    EXPECT_NE(rank.message(), "");
    EXPECT_LT(rank.waited_us, kSlackUs);
  }
}

/* ---- errors after the start ---- */

TEST(TcpControl, DifferentSizesAreAnErrorOnAllRanks) {
  const Ranks ranks = run_world(3, [](Rank &rank) {
    char in[16] = {0}, out[48];
    MFSDP_TRY(rank.barrier());
    const mfsdp_status status = rank.gather(in, rank.desc.rank == 2 ? 16 : 8, out);
    rank.error = *mfsdp_context_error(&rank.context);
    EXPECT_EQ(rank.gather(in, 8, out), MFSDP_E_POISONED) << "nothing of it reaches the next call";
    expect_part(rank.context.error.message, "refused after the first error (MFSDP_E_MISMATCH");
    return status;
  });
  for (auto &rank : ranks) {
    EXPECT_EQ(rank->status, MFSDP_E_MISMATCH);
    expect_part(rank->message(), "rank 0 brings 8 bytes in call 2, rank 2 brings 16 in call 2");
  }
}

/* Both in one go: the call that was answered is well, the next one tells, later ones are
 * refused. */
TEST(TcpControl, AnErrorBehindTheResultIsTheNextCalls) {
  const Listener listener = make_listener();
  Rank rank(1, 2, listener.port);
  std::thread thread([&rank] {
    run_rank(rank, [](Rank &r) {
      MFSDP_TRY(r.barrier());
      EXPECT_EQ(r.barrier(), MFSDP_E_BACKEND);
      expect_part(r.context.error.message, "the GPU is on fire");
      return r.barrier();
    });
  });
  const int fd = accept(listener.fd, nullptr, nullptr);
  mfsdp_error why = mfsdp_error_none();
  unsigned char notice[MFSDP__TCP_NOTICE_NBYTES];
  (void)MFSDP_ERROR_SET(&why, MFSDP_E_BACKEND, -1, "the GPU is on fire");
  mfsdp__tcp_notice(&why, notice);
  raw_send(fd, hello(0, 2) + frame(MFSDP__TCP_WELCOME, 0));
  EXPECT_EQ(raw_receive(fd, MFSDP__HELLO_NBYTES + MFSDP__TCP_HEAD_NBYTES),
            hello(1, 2) + frame(MFSDP__TCP_GATHER, 1));
  raw_send(fd, frame(MFSDP__TCP_RESULT, 1) +
                   frame(MFSDP__TCP_NOTICE, 0,
                         std::string(reinterpret_cast<char *>(notice), sizeof(notice))));
  thread.join();
  close(fd);
  close(listener.fd);
  EXPECT_EQ(rank.status, MFSDP_E_POISONED);
  expect_part(rank.message(), "refused after the first error (MFSDP_E_BACKEND, noticed by rank 0)");
}

/* What is not this call's result is none, whatever its length. */
TEST(TcpControl, TheResultOfAnotherCallIsNone) {
  const Listener listener = make_listener();
  Rank rank(1, 2, listener.port);
  std::thread thread([&rank] { run_rank(rank, [](Rank &r) { return r.barrier(); }); });
  const int fd = accept(listener.fd, nullptr, nullptr);
  raw_send(fd, hello(0, 2) + frame(MFSDP__TCP_WELCOME, 0));
  (void)raw_receive(fd, MFSDP__HELLO_NBYTES + MFSDP__TCP_HEAD_NBYTES);
  raw_send(fd, frame(MFSDP__TCP_RESULT, 7));
  thread.join();
  close(fd);
  close(listener.fd);
  EXPECT_EQ(rank.status, MFSDP_E_FORMAT);
  expect_part(rank.message(), "sent the result of another call (kind 2, number 7, 0 bytes)");
}

TEST(TcpControl, TimeOutNamesAllWhoDidNotCome) {
  for (int32_t late : {1, 0}) { /* a rank, rank 0 */
    const Ranks ranks = run_world(4, [late](Rank &rank) {
      MFSDP_TRY(rank.barrier());
      const int64_t start_us = mfsdp_clock_us();
      if (rank.desc.rank == late || rank.desc.rank == 3)
        mfsdp_clock_sleep_until(start_us + 2 * kShortUs);
      const mfsdp_status status = rank.barrier(kShortUs);
      if (rank.desc.rank == 2) {
        EXPECT_GE(mfsdp_clock_us() - start_us, kShortUs / 2);
        EXPECT_LT(mfsdp_clock_us() - start_us, kShortUs + kSlackUs);
      }
      return status;
    });
    for (auto &rank : ranks) {
      EXPECT_EQ(rank->status, MFSDP_E_TIMEOUT) << rank->message();
      EXPECT_EQ(rank->error.culprit, late);
      expect_part(rank->message(),
                  late == 0 ? "; rank 0 (127.0.0.1:" : "; rank 1 has not come and does not answer");
      if (late == 1) expect_part(rank->message(), "; rank 3 has not come and does not answer");
    }
  }
}

/* Rank 1's time is over long before rank 0's: it hears from rank 0 who is missing, and tells
 * all. */
TEST(TcpControl, OthersLearnFromRank0WhoIsMissing) {
  const Ranks ranks = run_world(4, [](Rank &rank) {
    MFSDP_TRY(rank.barrier());
    if (rank.desc.rank == 3) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 2 * kShortUs);
      return MFSDP_OK;
    }
    return rank.barrier(rank.desc.rank == 1 ? kShortUs : kLongUs);
  });
  for (std::size_t r = 0; r < 3; ++r) {
    EXPECT_EQ(ranks[r]->status, MFSDP_E_TIMEOUT) << ranks[r]->message();
    EXPECT_EQ(ranks[r]->error.culprit, 3);
    EXPECT_EQ(ranks[r]->error.rank, 1);
    expect_part(ranks[r]->message(), "rank 1 waited ");
    expect_part(ranks[r]->message(), "; rank 3 has not come and does not answer");
    EXPECT_LT(ranks[r]->waited_us, kShortUs + kSlackUs);
  }
}

TEST(TcpControl, ALeavingRankIsNoticedAtOnce) {
  for (int32_t leaver : {0, 1}) {
    const Ranks ranks = run_world(3, [leaver](Rank &rank) {
      MFSDP_TRY(rank.barrier());
      if (rank.desc.rank == leaver) {
        mfsdp_clock_sleep_until(mfsdp_clock_us() + 50000);
        rank.destroy();
        return MFSDP_OK;
      }
      return rank.barrier();
    });
    for (auto &rank : ranks) {
      if (rank->desc.rank == leaver) continue;
      EXPECT_EQ(rank->status, MFSDP_E_PEER) << rank->message();
      EXPECT_EQ(rank->error.culprit, leaver);
      expect_part(rank->message(), "waits for rank " + std::to_string(leaver) + " (127.0.0.1:");
      expect_part(rank->message(), "which has left");
      EXPECT_LT(rank->waited_us, kSlackUs);
    }
  }
}

/* Leaving after an all-gather is not leaving during it. */
TEST(TcpControl, LeavingAfterTheLastMeetingHurtsNobody) {
  for (int attempt = 0; attempt < 20; ++attempt)
    expect_ok(run_world(4, [](Rank &rank) {
      int64_t in[8] = {0}, out[32];
      return rank.gather(in, sizeof(in), out);
    }));
}

TEST(TcpControl, ProbeKnowsWhoAnswers) {
  const Ranks ranks = run_world(4, [](Rank &rank) {
    uint8_t alive[4] = {9, 9, 9, 9};
    const auto probe = [&rank, &alive](int64_t timeout_us) {
      return rank.control.ops->probe(rank.control.self, &rank.context, alive, timeout_us);
    };
    MFSDP_TRY(rank.barrier());
    if (rank.desc.rank == 2) { /* computes */
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 3 * kShortUs);
      return rank.barrier();
    }
    if (rank.desc.rank == 3) return rank.barrier();           /* waits for the others */
    mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 4); /* the first call is over */
    MFSDP_TRY(probe(kShortUs));
    EXPECT_EQ(alive[0], 1) << rank.desc.rank;
    EXPECT_EQ(alive[1], 1) << rank.desc.rank;
    EXPECT_EQ(alive[2], 0) << rank.desc.rank;
    EXPECT_EQ(alive[3], 1) << rank.desc.rank;
    return rank.barrier();
  });
  expect_ok(ranks);
}

TEST(TcpControl, ProbeWorksAfterAnError) {
  const Ranks ranks = run_world(3, [](Rank &rank) {
    uint8_t alive[3] = {9, 9, 9};
    MFSDP_TRY(rank.barrier());
    if (rank.desc.rank == 2) return MFSDP_OK; /* and leaves */
    EXPECT_EQ(rank.barrier(), MFSDP_E_PEER);
    MFSDP_TRY(rank.control.ops->probe(rank.control.self, &rank.context, alive, kShortUs));
    EXPECT_EQ(alive[0], 1) << rank.desc.rank;
    EXPECT_EQ(alive[1], 1) << rank.desc.rank;
    EXPECT_EQ(alive[2], 0) << rank.desc.rank;
    return MFSDP_OK;
  });
  expect_ok(ranks);
}

/* A watchdog probes while the rank's own thread waits in an all-gather. */
TEST(TcpControl, ASecondThreadMayProbeAndNotGather) {
  const Ranks ranks = run_world(3, [](Rank &rank) {
    MFSDP_TRY(rank.barrier());
    if (rank.desc.rank == 2) {
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 3 * kShortUs);
      return rank.barrier();
    }
    mfsdp_status status = MFSDP_OK;
    std::thread waits([&] { status = rank.barrier(); });
    mfsdp_clock_sleep_until(mfsdp_clock_us() + kShortUs / 2);
    mfsdp_context context;
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    uint8_t alive[3];
    EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
    EXPECT_EQ(rank.control.ops->allgather(rank.control.self, &context, nullptr, 0, nullptr, 1),
              MFSDP_E_STATE);
    expect_part(context.error.message, "another thread of rank");
    EXPECT_EQ(rank.control.ops->probe(rank.control.self, &context, alive, kShortUs), MFSDP_OK);
    EXPECT_EQ(alive[0] + alive[1], 2);
    EXPECT_EQ(alive[2], 0);
    waits.join();
    return status;
  });
  expect_ok(ranks);
}

/* ---- processes ---- */

struct Report {
  int32_t status, culprit;
  char message[384];
};

/* Rank `number` of 3 in a process of its own, which reports on `to`; SIGPIPE would kill it. */
pid_t start_process(int32_t number, int32_t port, int to) {
  const pid_t pid = fork();
  if (pid != 0) return pid;
  Report report;
  mfsdp_status status;
  signal(SIGPIPE, SIG_DFL);
  alarm(30);
  {
    Rank rank(number, 3, port);
    std::snprintf(rank.desc.job, sizeof(rank.desc.job), "same");
    status = mfsdp_tcp_control_create(&rank.context, &rank.desc, &rank.control);
    if (status == MFSDP_OK) status = rank.barrier();
    report.status = -1;
    if (status == MFSDP_OK) (void)!write(to, &report, sizeof(report)); /* the first call is over */
    for (int call = 0; call < 1000 && status == MFSDP_OK; ++call) {
      status = rank.barrier(700000);
      mfsdp_clock_sleep_until(mfsdp_clock_us() + 2000);
    }
    report.status = status;
    report.culprit = rank.context.error.culprit;
    std::memcpy(report.message, rank.context.error.message, sizeof(report.message));
    (void)!write(to, &report, sizeof(report));
    rank.destroy();
  }
  _exit(0);
}

/* Starts 3 processes at `port`, sends `signal_number` to rank `victim` once all have met, and
 * checks what the others say. victim -1: kills all. */
void run_processes(int32_t port, int32_t victim, int signal_number, mfsdp_status expected) {
  int pipes[3][2];
  pid_t pids[3];
  Report report;
  for (int32_t r = 0; r < 3; ++r) {
    ASSERT_EQ(pipe(pipes[r]), 0);
    pids[r] = start_process(r, port, pipes[r][1]);
    close(pipes[r][1]);
  }
  for (int32_t r = 0; r < 3; ++r) {
    ASSERT_EQ(read(pipes[r][0], &report, sizeof(report)), static_cast<ssize_t>(sizeof(report)));
    ASSERT_EQ(report.status, -1) << report.message;
  }
  for (int32_t r = 0; r < 3; ++r)
    if (victim < 0 || r == victim) kill(pids[r], signal_number);
  for (int32_t r = 0; r < 3 && victim >= 0; ++r) {
    if (r == victim) continue;
    ASSERT_EQ(read(pipes[r][0], &report, sizeof(report)), static_cast<ssize_t>(sizeof(report)));
    EXPECT_EQ(report.status, expected) << report.message;
    EXPECT_EQ(report.culprit, victim) << report.message;
    expect_part(report.message, "rank " + std::to_string(victim) + " ");
  }
  for (int32_t r = 0; r < 3; ++r) {
    int status = 0;
    if (r == victim) kill(pids[r], SIGKILL);
    waitpid(pids[r], &status, 0);
    if (r != victim && victim >= 0) {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << r << ": " << status;
    }
    close(pipes[r][0]);
  }
}

/* Fault f2: killed, and started again with the same settings, again and again. */
TEST(TcpControl, KilledAndStartedAgainAtTheSamePort) {
  const int32_t port = free_port();
  run_processes(port, -1, SIGKILL, MFSDP_OK);
  run_processes(port, 1, SIGKILL, MFSDP_E_PEER);
  run_processes(port, 0, SIGKILL, MFSDP_E_PEER);
  run_processes(port, -1, SIGKILL, MFSDP_OK);
}

TEST(TcpControl, AStoppedProcessIsNamedAtTheDeadline) {
  run_processes(free_port(), 2, SIGSTOP, MFSDP_E_TIMEOUT);
}

} // namespace
