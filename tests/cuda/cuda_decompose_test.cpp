/* SPDX-License-Identifier: MIT */
/*
 * cuda_decompose.h on the host double: what is its own. What eigh, qr, Shampoo and SOAP must do on any
 * backend, precondition_test asks of it too.
 */
#include "mfsdp/cuda/backend_cuda.h"
#include "mfsdp/optimizer.h"

#include "tests/cudasim/cudasim.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <memory>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;
using test::same_bits;

test::RigKind cuda_kind() {
  return test::backend_kinds().back();
}

std::size_t square(int64_t n) {
  return static_cast<std::size_t>(n * n);
}

mfsdp_mat mat(float *data, int64_t n) {
  return mfsdp_mat{data, n, n, n, 0};
}

/* Symmetric, by integers. */
std::vector<float> symmetric(int64_t n, uint64_t seed) {
  Numbers numbers(seed);
  std::vector<float> a = numbers.integers(square(n), 9);
  for (int64_t i = 0; i < n; ++i)
    for (int64_t j = 0; j < i; ++j)
      a[static_cast<std::size_t>(i * n + j)] = a[static_cast<std::size_t>(j * n + i)];
  return a;
}

/* The eigenvectors of one matrix, and the orthonormal rows of what they are, with all that it needs. */
struct Work {
  Work(Rig *on, const std::vector<float> &values_of_a, int64_t side)
      : rig(on), n(side), a(on, values_of_a), vectors(on, square(side)),
        values(on, static_cast<std::size_t>(side)), q(on, square(side)) {
    std::size_t eigh_nbytes = 0, qr_nbytes = 0;
    EXPECT_EQ(rig->ops->eigh_workspace_nbytes(rig->self, &rig->context, n, &eigh_nbytes), MFSDP_OK);
    EXPECT_EQ(rig->ops->qr_workspace_nbytes(rig->self, &rig->context, n, &qr_nbytes), MFSDP_OK);
    workspace.reset(new Buffer<unsigned char>(rig, std::max(eigh_nbytes, qr_nbytes)));
    std::memset(&eigh, 0, sizeof(eigh));
    eigh.struct_nbytes = sizeof(eigh);
    eigh.a = mat(a.data(), n);
    eigh.vectors = mat(vectors.data(), n);
    eigh.values = values.data();
    std::memset(&qr, 0, sizeof(qr));
    qr.struct_nbytes = sizeof(qr);
    qr.a = mat(a.data(), n);
    qr.q = mat(q.data(), n);
    eigh.workspace = qr.workspace = workspace->data();
    eigh.workspace_nbytes = eigh_nbytes;
    qr.workspace_nbytes = qr_nbytes;
  }
  mfsdp_status run(mfsdp_queue *queue) {
    MFSDP_TRY(rig->ops->eigh(rig->self, queue, &eigh));
    return rig->ops->qr(rig->self, queue, &qr);
  }
  std::vector<float> all() {
    std::vector<float> out = vectors.read();
    for (const std::vector<float> &more : {values.read(), q.read()})
      out.insert(out.end(), more.begin(), more.end());
    return out;
  }
  Rig *rig;
  int64_t n;
  Buffer<float> a, vectors, values, q;
  std::unique_ptr<Buffer<unsigned char>> workspace;
  mfsdp_eigh_args eigh;
  mfsdp_qr_args qr;
};

/* Each queue has its own handle, so that nothing but the caller's buffers can be shared; the result then
 * goes from one to the other by an event. For the thread sanitizer. */
TEST(CudaDecompose, QueuesDecomposeSideBySide) {
  Rig rig(cuda_kind());
  const int64_t n = 12;
  mfsdp_queue *second = nullptr;
  ASSERT_EQ(rig.ops->queue_create(rig.self, &rig.context, "second", &second), MFSDP_OK);
  Work alone(&rig, symmetric(n, 1), n), here(&rig, symmetric(n, 1), n);
  Work there(&rig, symmetric(n, 2), n), after(&rig, symmetric(n, 3), n);
  ASSERT_EQ(alone.run(rig.queue), MFSDP_OK) << rig.message();
  const std::vector<float> want = alone.all();
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(here.run(rig.queue), MFSDP_OK) << rig.message();
    ASSERT_EQ(there.run(second), MFSDP_OK) << rig.message();
  }
  ASSERT_EQ(rig.ops->event_record(rig.self, second, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, rig.queue, rig.event), MFSDP_OK);
  after.qr.a = mat(there.vectors.data(), n);
  after.qr.workspace = there.qr.workspace; /* which the other queue has used */
  ASSERT_EQ(rig.ops->qr(rig.self, rig.queue, &after.qr), MFSDP_OK) << rig.message();
  EXPECT_TRUE(same_bits(here.all(), want));
  EXPECT_EQ(cudasim::solver_handles(), 3) << "one for sizes, one for each queue";
  rig.ops->queue_destroy(rig.self, &rig.context, second);
  EXPECT_EQ(cudasim::solver_handles(), 2);
}

/* One queue at a time works with the caller's handle, wherever the caller has turned it meanwhile; the
 * others make their own. It stays the caller's. */
TEST(CudaDecompose, TheCallersHandleServesOneQueue) {
  const int64_t n = 12;
  std::vector<float> want;
  {
    Rig rig(cuda_kind());
    Work work(&rig, symmetric(n, 1), n);
    ASSERT_EQ(work.run(rig.queue), MFSDP_OK) << rig.message();
    want = work.all();
  }
  Rig rig(cuda_kind());
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  desc.workspace_nbytes = 256;
  ASSERT_EQ(cusolverDnCreate(&desc.solver), CUSOLVER_STATUS_SUCCESS);
  ASSERT_EQ(cudasim::solver_handles(), 1);
  mfsdp_cuda_backend *cuda = nullptr;
  ASSERT_EQ(mfsdp_cuda_backend_create(&rig.context, &desc, &cuda), MFSDP_OK) << rig.message();
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  mfsdp_queue *queues[3] = {nullptr, nullptr, nullptr};
  mfsdp_event *event = nullptr;
  ASSERT_EQ(b->ops->event_create(b->self, &rig.context, &event), MFSDP_OK);
  const int64_t handles[3] = {1, 2, 2};
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(b->ops->queue_create(b->self, &rig.context, "q", &queues[i]), MFSDP_OK);
    Work work(&rig, symmetric(n, 1), n);
    ASSERT_EQ(cusolverDnSetStream(desc.solver, nullptr), CUSOLVER_STATUS_SUCCESS);
    ASSERT_EQ(b->ops->eigh(b->self, queues[i], &work.eigh), MFSDP_OK) << rig.message();
    ASSERT_EQ(cusolverDnSetStream(desc.solver, nullptr), CUSOLVER_STATUS_SUCCESS);
    ASSERT_EQ(b->ops->qr(b->self, queues[i], &work.qr), MFSDP_OK) << rig.message();
    ASSERT_EQ(b->ops->event_record(b->self, queues[i], event), MFSDP_OK);
    ASSERT_EQ(b->ops->event_wait(b->self, &rig.context, event, 20000000), MFSDP_OK);
    EXPECT_TRUE(same_bits(work.all(), want)) << i;
    EXPECT_EQ(cudasim::solver_handles(), 1 + handles[i]) << i << ": one is the rig's";
    if (i == 1) b->ops->queue_destroy(b->self, &rig.context, queues[0]);
  }
  b->ops->event_destroy(b->self, &rig.context, event);
  b->ops->queue_destroy(b->self, &rig.context, queues[1]);
  b->ops->queue_destroy(b->self, &rig.context, queues[2]);
  EXPECT_EQ(mfsdp_cuda_backend_destroy(&rig.context, cuda), MFSDP_OK) << rig.message();
  EXPECT_EQ(cudasim::solver_handles(), 2);
  EXPECT_EQ(cusolverDnDestroy(desc.solver), CUSOLVER_STATUS_SUCCESS);
}

/* What the device finds wrong fails the queue, with the library's code, and nothing else does. */
TEST(CudaDecompose, AnInfoThatIsNotZeroFailsTheQueue) {
  const struct {
    int64_t routine;
    const char *message;
  } cases[] = {{0, "eigh: cusolverDnSsyevd returned 3 for a matrix of 4 x 4: no convergence"},
               {1, "qr: cusolverDnSgeqrf returned -4 for 4 x 4"},
               {2, "qr: cusolverDnSorgqr returned -5 for 4 x 4"}};
  Rig rig(cuda_kind());
  for (const auto &c : cases) {
    Work work(&rig, symmetric(4, 1), 4);
    Buffer<float> behind(&rig, std::vector<float>(4, 1.0f));
    cudasim::fail_solver_at(c.routine);
    ASSERT_EQ(work.run(rig.queue), MFSDP_OK) << rig.message();
    ASSERT_EQ(
        rig.ops->cast(rig.self, rig.queue, behind.data(), MFSDP_F32, work.a.data(), MFSDP_F32, 4),
        MFSDP_OK);
    EXPECT_EQ(rig.sync(), MFSDP_E_BACKEND);
    EXPECT_STREQ(rig.message(), c.message);
    rig.renew_queue();
    EXPECT_EQ(behind.read(), std::vector<float>(4, 1.0f));
  }
  cudasim::fail_solver_at(-1);
}

/* The library may fail on what nobody wants. */
TEST(CudaDecompose, AnInfoOfWhatIsNotWantedIsNoFailure) {
  Rig rig(cuda_kind());
  Work work(&rig, symmetric(4, 1), 4);
  Buffer<float> word(&rig, std::vector<float>(1, 0.0f));
  work.eigh.when.word = word.data();
  cudasim::fail_solver_at(0);
  ASSERT_EQ(work.run(rig.queue), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  work.a.write(std::vector<float>(16, NAN));
  cudasim::fail_solver_at(0);
  work.eigh.when.word = nullptr;
  ASSERT_EQ(work.run(rig.queue), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  EXPECT_TRUE(std::isnan(work.values.read()[0]));
}

/* Wherever it lies: in a piece of 16 bytes, or behind the last one. */
TEST(CudaDecompose, FindsEveryNumberThatIsNotFinite) {
  Rig rig(cuda_kind());
  for (const int64_t n : {5, 8}) {
    Work work(&rig, symmetric(n, 1), n);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t j = 0; j <= i; ++j) {
        std::vector<float> a = symmetric(n, 1);
        a[static_cast<std::size_t>(i * n + j)] = a[static_cast<std::size_t>(j * n + i)] = INFINITY;
        work.a.write(a);
        ASSERT_EQ(rig.ops->eigh(rig.self, rig.queue, &work.eigh), MFSDP_OK);
        ASSERT_EQ(rig.sync(), MFSDP_OK) << rig.message();
        for (const float value : work.values.read())
          ASSERT_TRUE(std::isnan(value)) << n << ": " << i << ", " << j;
        for (const float value : work.vectors.read())
          ASSERT_TRUE(std::isnan(value)) << n << ": " << i << ", " << j;
      }
  }
}

/* Behind a failure memory may hold anything, and no routine can be held back: it gets zeros to work on
 * (the double complains of numbers that are not finite). */
TEST(CudaDecompose, BehindAFailureTheLibraryGetsZeros) {
  Rig rig(cuda_kind());
  Work work(&rig, std::vector<float>(16, NAN), 4);
  cudasim::fail_solver_at(0);
  Work failing(&rig, symmetric(4, 1), 4);
  ASSERT_EQ(failing.run(rig.queue), MFSDP_OK);
  ASSERT_EQ(work.run(rig.queue), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_E_BACKEND);
  rig.renew_queue();
}

TEST(CudaDecompose, RefusesAGraph) {
  Rig rig(cuda_kind());
  Work work(&rig, symmetric(4, 1), 4);
  cudaStream_t stream = mfsdp_cuda_queue_stream(rig.queue);
  cudaGraph_t graph;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(rig.ops->eigh(rig.self, rig.queue, &work.eigh), MFSDP_E_UNSUPPORTED);
  EXPECT_NE(std::string(rig.message()).find("eigh: queue test is captured into a graph"),
            std::string::npos)
      << rig.message();
  EXPECT_EQ(rig.ops->qr(rig.self, rig.queue, &work.qr), MFSDP_E_UNSUPPORTED);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST(CudaDecompose, HostPointersAreNamedWhenAsked) {
  Rig rig(cuda_kind());
  std::vector<float> host(16);
  const Work good(&rig, symmetric(4, 1), 4);
  const auto refused = [&](const mfsdp_eigh_args &args, const std::string &what) {
    EXPECT_EQ(rig.ops->eigh(rig.self, rig.queue, &args), MFSDP_E_ARGUMENT) << what;
    EXPECT_EQ(std::string(rig.message()), "eigh: " + what + " is host memory, needs device memory");
  };
  mfsdp_eigh_args args = good.eigh;
  args.a.data = host.data(), refused(args, "a"), args = good.eigh;
  args.vectors.data = host.data(), refused(args, "the result"), args = good.eigh;
  args.values = host.data(), refused(args, "values"), args = good.eigh;
  args.when.word = host.data(), refused(args, "when.word"), args = good.eigh;
  args.workspace = good.workspace->data() + 8;
  EXPECT_EQ(rig.ops->eigh(rig.self, rig.queue, &args), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig.message()).find(", aligned"), std::string::npos) << rig.message();
}

/* Some steps of Shampoo on one matrix, and of SOAP on a second one, by an optimizer; `after` sees each. Masters, gradients and
 * parameters start `offset` elements behind an aligned address. */
template <class After>
void run_steps(Rig *rig, int32_t matrices, int64_t steps, const After &after,
               std::size_t offset = 0, std::vector<float> *results = nullptr) {
  mfsdp_hyper_group groups[2] = {mfsdp_hyper_group_shampoo(), mfsdp_hyper_group_soap()};
  groups[0].shampoo.update_every = groups[1].soap.update_every = 1;
  Buffer<float> masters(rig, Numbers(1).reals(64), offset),
      grads(rig, Numbers(2).reals(64), offset);
  Buffer<uint16_t> params(rig, std::vector<uint16_t>(64, 0), offset);
  mfsdp_optimizer_tensor tensors[2];
  std::memset(tensors, 0, sizeof(tensors));
  for (int i = 0; i < 2; ++i) {
    tensors[i].name = "w";
    tensors[i].role = MFSDP_ROLE_MATRIX;
    tensors[i].hyper_group = tensors[i].param = i;
    tensors[i].rows = 5;
    tensors[i].cols = 6;
    tensors[i].count = 30;
    tensors[i].master = masters.data() + 32 * i;
    tensors[i].grad = grads.data() + 32 * i;
    tensors[i].param_data = params.data() + 32 * i;
    tensors[i].param_dtype = MFSDP_BF16;
  }
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  desc.groups = groups;
  desc.group_count = 2;
  mfsdp_optimizer *optimizer = nullptr;
  ASSERT_EQ(
      mfsdp_optimizer_create(&rig->context, rig->backend, &desc, tensors, matrices, &optimizer),
      MFSDP_OK)
      << rig->message();
  Buffer<mfsdp_step_scalars> scalars(rig, 2);
  for (int64_t t = 1; t <= steps; ++t) {
    mfsdp_step_scalars now = mfsdp_step_scalars_default(0.02, 0.1);
    now.applied_steps = t;
    scalars.write({now, now});
    ASSERT_EQ(mfsdp_optimizer_step(&rig->context, optimizer, rig->queue, scalars.data(), nullptr),
              MFSDP_OK)
        << rig->message();
    ASSERT_EQ(rig->sync(), MFSDP_OK) << rig->message();
    after(t);
  }
  mfsdp_optimizer_destroy(&rig->context, optimizer);
  if (results == nullptr) return;
  *results = masters.read();
  for (const uint16_t bits : params.read())
    results->push_back(mfsdp_f32_from_bf16(bits));
}

/* Accesses of 16 bytes, of fewer, and the tail behind them: the same bits. */
TEST(CudaDecompose, StepsDoNotDependOnAlignment) {
  std::vector<float> aligned;
  for (std::size_t offset = 0; offset < 4; ++offset) {
    Rig rig(cuda_kind());
    std::vector<float> results;
    run_steps(
        &rig, 2, 3, [](int64_t) {}, offset, &results);
    ASSERT_EQ(results.size(), 128u);
    if (offset == 0) aligned = results;
    EXPECT_TRUE(same_bits(results, aligned)) << offset;
    for (std::size_t i = 0; i < 64; ++i) /* the copies follow, and nothing beside them is written */
      EXPECT_EQ(results[64 + i],
                i % 32 < 30 ? mfsdp_f32_from_bf16(mfsdp_bf16_from_f32(results[i])) : 0.0f);
  }
  EXPECT_FALSE(
      same_bits(std::vector<float>(aligned.begin(), aligned.begin() + 64), Numbers(1).reals(64)));
}

/* Handles, workspaces and all else come with the first step. */
TEST(CudaDecompose, StepsOfShampooAndSoapAllocateNothing) {
  Rig rig(cuda_kind());
  std::size_t allocations = 0, nbytes = 0;
  run_steps(&rig, 2, 4, [&](int64_t t) {
    if (t == 1) {
      allocations = cudasim::allocation_count();
      nbytes = cudasim::device_nbytes();
    }
    EXPECT_EQ(cudasim::allocation_count(), allocations);
    EXPECT_EQ(cudasim::device_nbytes(), nbytes);
    EXPECT_EQ(cudasim::solver_handles(), 2);
  });
}

/* The thread sanitizer sees each thread of a kernel: a barrier that is missing is a race. One step, since
 * it takes long: with all the sums that run across a block. */
TEST(CudaDecompose, ThreadsOfTheKernelsDoNotRace) {
  if (!MFSDP_TEST_TSAN) GTEST_SKIP() << "needs the thread sanitizer";
  cudasim::thread_races(true);
  {
    Rig rig(cuda_kind());
    run_steps(&rig, 1, 1, [](int64_t) {});
  }
  cudasim::thread_races(false);
}

/* ---- every call fails once ---- */

class CudaDecomposeFaults : public ::testing::Test {
protected:
  CudaDecomposeFaults() {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    EXPECT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  ~CudaDecomposeFaults() override {
    cudasim::fail_at(-1);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK);
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(cudasim::complaints(), "");
  }
  /* Sizes, one eigh, one qr. */
  mfsdp_status job(const mfsdp_backend *b) {
    mfsdp_queue *queue = nullptr;
    mfsdp_event *event = nullptr;
    void *data = nullptr;
    std::size_t eigh_nbytes = 0, qr_nbytes = 0;
    const std::size_t matrices = 1024;
    mfsdp_status status = b->ops->queue_create(b->self, &context_, "q", &queue);
    if (status == MFSDP_OK) status = b->ops->event_create(b->self, &context_, &event);
    if (status == MFSDP_OK)
      status = b->ops->eigh_workspace_nbytes(b->self, &context_, 3, &eigh_nbytes);
    if (status == MFSDP_OK) status = b->ops->qr_workspace_nbytes(b->self, &context_, 3, &qr_nbytes);
    const std::size_t nbytes = matrices + eigh_nbytes + qr_nbytes;
    if (status == MFSDP_OK)
      status = b->ops->mem_alloc(b->self, &context_, nbytes, 256, MFSDP_SPACE_DEVICE, &data);
    if (status == MFSDP_OK) status = b->ops->fill_bytes(b->self, queue, data, 0, nbytes);
    if (status == MFSDP_OK) status = decompose(b, queue, data, matrices, eigh_nbytes, qr_nbytes);
    if (status == MFSDP_OK) status = b->ops->event_record(b->self, queue, event);
    if (status == MFSDP_OK) status = b->ops->event_wait(b->self, &context_, event, 10000000);
    const bool delivered = cudasim::failed();
    cudasim::fail_at(-1); /* what is freed is freed */
    b->ops->queue_destroy(b->self, &context_, queue);
    b->ops->event_destroy(b->self, &context_, event);
    b->ops->mem_free(b->self, &context_, data, nbytes, MFSDP_SPACE_DEVICE);
    return delivered && status == MFSDP_OK ? MFSDP_E_STATE : status; /* a failure was lost */
  }
  static mfsdp_status decompose(const mfsdp_backend *b, mfsdp_queue *queue, void *data,
                                std::size_t matrices, std::size_t eigh_nbytes,
                                std::size_t qr_nbytes) {
    float *x = static_cast<float *>(data);
    mfsdp_eigh_args eigh;
    mfsdp_qr_args qr;
    std::memset(&eigh, 0, sizeof(eigh));
    eigh.struct_nbytes = sizeof(eigh);
    eigh.a = mat(x, 3);
    eigh.vectors = mat(x + 16, 3);
    eigh.values = x + 32;
    eigh.workspace = static_cast<char *>(data) + matrices;
    eigh.workspace_nbytes = eigh_nbytes;
    MFSDP_TRY(b->ops->eigh(b->self, queue, &eigh));
    std::memset(&qr, 0, sizeof(qr));
    qr.struct_nbytes = sizeof(qr);
    qr.a = qr.q = mat(x + 16, 3);
    qr.workspace = eigh.workspace;
    qr.workspace_nbytes = eigh_nbytes + qr_nbytes;
    return b->ops->qr(b->self, queue, &qr);
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }
  void every_call_fails(cusolverDnHandle_t solver) {
    const int64_t handles = cudasim::solver_handles();
    mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
    desc.workspace_nbytes = 256;
    desc.solver = solver;
    for (int64_t n = 0;; ++n) {
      mfsdp_cuda_backend *cuda = nullptr;
      ASSERT_EQ(mfsdp_cuda_backend_create(&context_, &desc, &cuda), MFSDP_OK) << message();
      cudasim::fail_at(n);
      const mfsdp_status status = job(mfsdp_cuda_backend_get(cuda));
      EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_OK) << message();
      EXPECT_EQ(cudaGetLastError(), cudaSuccess) << n;
      EXPECT_EQ(cudasim::complaints(), "") << n;
      ASSERT_EQ(cudasim::allocation_count(), 0u) << n << " " << message();
      ASSERT_EQ(cudasim::solver_handles(), handles) << n << " " << message();
      if (status == MFSDP_OK) {
        EXPECT_GT(n, 30); /* calls of the whole job */
        break;
      }
      EXPECT_TRUE(status == MFSDP_E_BACKEND || status == MFSDP_E_MEMORY ||
                  status == MFSDP_E_UNSUPPORTED)
          << n << " " << mfsdp_status_name(status) << " " << message();
    }
  }

  test::FaultAllocator memory_;
  mfsdp_context context_;
};

TEST_F(CudaDecomposeFaults, EveryCallMayFail) {
  every_call_fails(nullptr);
}

TEST_F(CudaDecomposeFaults, EveryCallMayFailOnTheCallersHandle) {
  cusolverDnHandle_t solver = nullptr;
  ASSERT_EQ(cusolverDnCreate(&solver), CUSOLVER_STATUS_SUCCESS);
  every_call_fails(solver);
  EXPECT_EQ(cusolverDnDestroy(solver), CUSOLVER_STATUS_SUCCESS);
}

} // namespace
