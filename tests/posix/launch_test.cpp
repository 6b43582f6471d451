/* SPDX-License-Identifier: MIT */
/*
 * launch.h: a table of environments, with the precedence of launchers (fault f3) and one error a
 * rule.
 */
#include "mfsdp/posix/launch.h"

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <string>

namespace {

using Environment = std::map<std::string, std::string>;

const char *look_up(void *user, const char *name) {
  const Environment &environment = *static_cast<const Environment *>(user);
  const auto at = environment.find(name);
  return at == environment.end() ? nullptr : at->second.c_str();
}

struct Outcome {
  mfsdp_status status;
  mfsdp_launch launch;
  std::string message;
};

Outcome read(Environment environment) {
  Outcome outcome;
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  std::memset(&outcome.launch, 0x7f, sizeof(outcome.launch));
  outcome.status = mfsdp_launch_read(&context, look_up, &environment, &outcome.launch);
  outcome.message = mfsdp_context_error(&context)->message;
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
  return outcome;
}

void expect(Environment environment, const std::string &launcher, int32_t rank, int32_t world,
            int32_t local_rank, int32_t local_world) {
  const Outcome o = read(environment);
  EXPECT_EQ(o.status, MFSDP_OK) << o.message;
  EXPECT_EQ(o.launch.launcher, launcher);
  EXPECT_EQ(o.launch.rank, rank);
  EXPECT_EQ(o.launch.world, world);
  EXPECT_EQ(o.launch.local_rank, local_rank);
  EXPECT_EQ(o.launch.local_world, local_world);
}

void expect_error(Environment environment, const std::string &part) {
  const Outcome o = read(environment);
  EXPECT_EQ(o.status, MFSDP_E_ARGUMENT);
  EXPECT_NE(o.message.find(part), std::string::npos) << o.message;
  EXPECT_EQ(o.launch.rank, 0);
  EXPECT_EQ(o.launch.world, 1);
}

const Environment kTorchrun = {
    {"RANK", "5"}, {"WORLD_SIZE", "16"}, {"LOCAL_RANK", "1"}, {"LOCAL_WORLD_SIZE", "4"}};
const Environment kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                              {"OMPI_COMM_WORLD_SIZE", "3"},
                              {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
                              {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"}};
const Environment kMpich = {
    {"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}};
const Environment kSrun = {
    {"SLURM_PROCID", "7"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "3"}, {"SLURM_STEP_ID", "0"}};

Environment with(Environment a, const Environment &b) {
  for (const auto &entry : b)
    a[entry.first] = entry.second;
  return a;
}

TEST(Launch, EachLauncherAlone) {
  expect({}, "none", 0, 1, 0, 1);
  expect(kTorchrun, "torchrun", 5, 16, 1, 4);
  expect(kOpenMpi, "Open MPI", 2, 3, 0, 1);
  expect(kMpich, "MPICH", 1, 2, 1, 2);
  expect(kSrun, "SLURM", 7, 8, 3, -1);
}

TEST(Launch, LocalRanksMayBeUnknown) {
  expect({{"RANK", "0"}, {"WORLD_SIZE", "2"}}, "torchrun", 0, 2, -1, -1);
}

TEST(Launch, Precedence) {
  expect(with(kSrun, kTorchrun), "torchrun", 5, 16, 1, 4);
  expect(with(kSrun, kOpenMpi), "Open MPI", 2, 3, 0, 1);
  expect(with(kSrun, kMpich), "MPICH", 1, 2, 1, 2);
}

/* Fault f3: in a batch script the variables are there, and one process runs. */
TEST(Launch, SlurmCountsOnlyInsideAStep) {
  Environment batch = kSrun;
  batch.erase("SLURM_STEP_ID");
  expect(batch, "none", 0, 1, 0, 1);
}

TEST(Launch, TorchrunsNamesMustAgreeWithTheMpirun) {
  expect(with(kOpenMpi, {{"RANK", "2"}, {"WORLD_SIZE", "3"}}), "torchrun", 2, 3, -1, -1);
  expect_error(with(kOpenMpi, {{"RANK", "1"}, {"WORLD_SIZE", "3"}}),
               "RANK is 1 of WORLD_SIZE 3, but OMPI_COMM_WORLD_RANK is 2");
  expect_error(with(kMpich, {{"RANK", "1"}, {"WORLD_SIZE", "4"}}), "PMI_SIZE 2");
}

TEST(Launch, ErrorsNameTheVariable) {
  expect_error({{"RANK", "0"}}, "RANK is set and WORLD_SIZE is not");
  expect_error({{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set and RANK is not");
  expect_error({{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not");
  for (const char *text : {"", "x", "-1", "1x", " 1", "+1", "1048577", "99999999999999999999"})
    expect_error({{"RANK", text}, {"WORLD_SIZE", "2"}},
                 std::string("RANK is \"") + text + "\", needs a whole number");
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is 0, needs at least 1");
  expect_error({{"RANK", "2"}, {"WORLD_SIZE", "2"}}, "RANK is 2 and WORLD_SIZE is 2");
  expect_error(with(kTorchrun, {{"LOCAL_RANK", "4"}}), "LOCAL_RANK is 4 and LOCAL_WORLD_SIZE is 4");
  expect_error(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "0"}}), "LOCAL_WORLD_SIZE is 0");
  expect_error(with(kTorchrun, {{"LOCAL_WORLD_SIZE", "17"}}), "LOCAL_WORLD_SIZE is 17");
  expect_error(with(kSrun, {{"SLURM_LOCALID", "8"}}), "SLURM_LOCALID is 8 and SLURM_NTASKS is 8");
  expect_error(with(kSrun, {{"SLURM_LOCALID", "?"}}), "SLURM_LOCALID is \"?\"");
}

/* Calls with a context; "" or what is wrong. */
template <typename Function> std::string message_of(const Function &function) {
  mfsdp_context context;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  const mfsdp_status status = function(&context);
  const std::string message = status == MFSDP_OK ? "" : mfsdp_context_error(&context)->message;
  EXPECT_TRUE(status == MFSDP_OK || status == MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
  return message;
}

/* Fault f1: without MASTER_ADDR every host took itself for the meeting point. */
TEST(Launch, RanksMeetWhereTheyWereToldAndNowhereElse) {
  const char *address;
  int32_t port;
  const auto ask = [&](Environment environment) {
    return message_of([&](mfsdp_context *context) {
      mfsdp_launch launch;
      MFSDP_TRY(mfsdp_launch_read(context, look_up, &environment, &launch));
      MFSDP_TRY(
          mfsdp_launch_meeting_point(context, &launch, look_up, &environment, &address, &port));
      EXPECT_EQ(address == nullptr ? "" : std::string(address), environment["MASTER_ADDR"]);
      return MFSDP_OK;
    });
  };
  const Environment two = {{"RANK", "0"}, {"WORLD_SIZE", "2"}};
  EXPECT_EQ(ask(with(two, {{"MASTER_ADDR", "node3"}, {"MASTER_PORT", "29500"}})), "");
  EXPECT_EQ(port, 29500);
  EXPECT_NE(ask(two).find("MASTER_ADDR is not set and there are 2 ranks"), std::string::npos);
  EXPECT_EQ(address, nullptr);
  EXPECT_NE(ask(with(two, {{"MASTER_ADDR", ""}, {"MASTER_PORT", "1"}})).find("MASTER_ADDR"),
            std::string::npos);
  EXPECT_NE(ask(with(two, {{"MASTER_ADDR", "node3"}})).find("MASTER_PORT is not set"),
            std::string::npos);
  for (const char *text : {"0", "65536", "x", "-1", ""})
    EXPECT_NE(ask(with(two, {{"MASTER_ADDR", "node3"}, {"MASTER_PORT", text}})).find("MASTER_PORT"),
              std::string::npos)
        << text;
  EXPECT_EQ(ask({}), ""); /* one rank meets nobody */
}

/* torchrun's agent has a store at MASTER_PORT. */
TEST(Launch, NextToTheStoreOfTorchrunsAgent) {
  const auto port_of = [](const char *number, const char *store) {
    Environment environment = {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node3"}};
    environment["MASTER_PORT"] = number;
    environment["TORCHELASTIC_USE_AGENT_STORE"] = store;
    int32_t port = 0;
    EXPECT_EQ(message_of([&](mfsdp_context *context) {
                mfsdp_launch launch;
                const char *address;
                MFSDP_TRY(mfsdp_launch_read(context, look_up, &environment, &launch));
                return mfsdp_launch_meeting_point(context, &launch, look_up, &environment, &address,
                                                  &port);
              }),
              "");
    return port;
  };
  EXPECT_EQ(port_of("29500", "False"), 29500);
  EXPECT_EQ(port_of("29500", "True"), 29501);
  EXPECT_EQ(port_of("65535", "True"), 65534);
}

TEST(Launch, TheJobIsWhatItsLauncherCallsIt) {
  const auto job_of = [](Environment environment, std::size_t nbytes = 80) {
    std::string job(nbytes, 'x');
    EXPECT_EQ(message_of([&](mfsdp_context *context) {
                mfsdp_launch launch;
                MFSDP_TRY(mfsdp_launch_read(context, look_up, &environment, &launch));
                return mfsdp_launch_job(context, &launch, look_up, &environment, &job[0], nbytes);
              }),
              "");
    return std::string(job.c_str());
  };
  const Environment ids = {{"TORCHELASTIC_RUN_ID", "run7"},
                           {"TORCHELASTIC_RESTART_COUNT", "3"},
                           {"SLURM_JOB_ID", "77"},
                           {"SLURM_STEP_ID", "2"},
                           {"PMIX_NAMESPACE", "prte@1"}};
  EXPECT_EQ(job_of({}), "");
  EXPECT_EQ(job_of(ids), "") << "no launcher is in charge";
  EXPECT_EQ(job_of(with(ids, kTorchrun)), "run7") << "each agent counts its own restarts";
  EXPECT_EQ(job_of(with(ids, kOpenMpi)), "prte@1");
  EXPECT_EQ(job_of(with(ids, with(kSrun, {{"SLURM_STEP_ID", "2"}}))), "77.2");
  EXPECT_EQ(job_of(with(ids, with(kSrun, {{"SLURM_RESTART_COUNT", "1"}}))), "77.0.1");
  EXPECT_EQ(job_of(kMpich), "");
  EXPECT_EQ(job_of(with(with(ids, kTorchrun), {{"MFSDP_JOB", "mine"}})), "mine");
  /* Long names that end differently differ. */
  const std::string name(100, 'n');
  const std::string a = job_of({{"MFSDP_JOB", name + "a"}}),
                    b = job_of({{"MFSDP_JOB", name + "b"}});
  EXPECT_EQ(a.size(), 79u);
  EXPECT_EQ(a.substr(0, 62), name.substr(0, 62));
  EXPECT_NE(a, b);
  EXPECT_EQ(job_of({{"MFSDP_JOB", name.substr(0, 79)}}), name.substr(0, 79));
  EXPECT_EQ(job_of({{"MFSDP_JOB", name.substr(0, 80)}}).substr(62, 1), "#");
  char small[39];
  EXPECT_NE(message_of([&](mfsdp_context *context) {
              mfsdp_launch launch;
              MFSDP_TRY(
                  mfsdp_launch_read(context, look_up, const_cast<Environment *>(&ids), &launch));
              return mfsdp_launch_job(context, &launch, nullptr, nullptr, small, sizeof(small));
            }).find("job_nbytes is 39"),
            std::string::npos);
}

/* A program that was started in a way of its own fills in the struct itself. */
TEST(Launch, AStructMadeByHand) {
  const Environment ids = {{"TORCHELASTIC_RUN_ID", "run7"}, {"MFSDP_JOB", "mine"}};
  mfsdp_launch launch;
  char job[40] = "";
  const auto ask = [&](const Environment &environment) {
    return message_of([&](mfsdp_context *context) {
      return mfsdp_launch_job(context, &launch, look_up, const_cast<Environment *>(&environment),
                              job, sizeof(job));
    });
  };
  std::memset(&launch, 0, sizeof(launch));
  launch.world = 2;
  const std::string part = "launch: launch is NULL or its struct_nbytes is not";
  EXPECT_NE(ask(ids).find(part), std::string::npos);
  EXPECT_NE(message_of([&](mfsdp_context *context) {
              const char *address;
              int32_t port;
              return mfsdp_launch_meeting_point(context, &launch, nullptr, nullptr, &address,
                                                &port);
            }).find(part),
            std::string::npos);
  launch.struct_nbytes = sizeof(launch); /* and no launcher */
  EXPECT_EQ(ask(ids), "");
  EXPECT_STREQ(job, "mine");
  EXPECT_EQ(ask({{"TORCHELASTIC_RUN_ID", "run7"}}), "");
  EXPECT_STREQ(job, "");
}

TEST(Launch, TheEnvironmentItself) {
  mfsdp_context context;
  mfsdp_launch launch;
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
  ASSERT_EQ(setenv("RANK", "3", 1), 0);
  ASSERT_EQ(setenv("WORLD_SIZE", "4", 1), 0);
  EXPECT_EQ(mfsdp_launch_read(&context, nullptr, nullptr, &launch), MFSDP_OK);
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(mfsdp_launch_read(&context, nullptr, nullptr, nullptr), MFSDP_E_ARGUMENT);
  ASSERT_EQ(unsetenv("RANK"), 0);
  ASSERT_EQ(unsetenv("WORLD_SIZE"), 0);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

} // namespace
