/* SPDX-License-Identifier: MIT */
/*
 * backend_cuda.h on the host double: what is its own. What any backend must do, the tests of
 * tests/host and of the optimizers ask of it too.
 */
#include "mfsdp/cuda/backend_cuda.h"
#include "mfsdp/optimizer.h"

#include "tests/cudasim/cudasim.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace {

using test::Buffer;
using test::Numbers;
using test::Rig;

test::RigKind cuda_kind() {
  return test::backend_kinds().back();
}

mfsdp_cuda_backend_desc small_desc() {
  mfsdp_cuda_backend_desc desc = mfsdp_cuda_backend_desc_default();
  desc.workspace_nbytes = 256;
  return desc;
}

class CudaBackend : public ::testing::Test {
protected:
  CudaBackend() {
    mfsdp_context_desc desc = mfsdp_context_desc_default();
    desc.allocator = memory_.allocator();
    EXPECT_EQ(mfsdp_context_init(&context_, &desc), MFSDP_OK);
  }
  ~CudaBackend() override {
    cudasim::reset_machine();
    cudasim::fail_at(-1);
    EXPECT_EQ(cudaSetDevice(0), cudaSuccess);
    EXPECT_EQ(mfsdp_context_destroy(&context_), MFSDP_OK) << message();
    EXPECT_EQ(memory_.live_count(), 0u);
    EXPECT_EQ(cudasim::complaints(), "");
    EXPECT_EQ(cudasim::allocation_count(), 0u);
  }
  std::string message() const { return mfsdp_context_error(&context_)->message; }
  void refused(const mfsdp_cuda_backend_desc &desc, mfsdp_status status, const std::string &text) {
    mfsdp_cuda_backend *cuda = nullptr;
    EXPECT_EQ(mfsdp_cuda_backend_create(&context_, &desc, &cuda), status) << text;
    EXPECT_EQ(cuda, nullptr);
    EXPECT_NE(message().find(text), std::string::npos) << message();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << "an error stayed behind for the caller";
  }

  test::FaultAllocator memory_;
  mfsdp_context context_;
};

/* ---- bad machines and arguments ---- */

TEST_F(CudaBackend, SaysWhatTheMachineLacks) {
  cudasim::set_driver(false);
  refused(small_desc(), MFSDP_E_UNSUPPORTED, "cudaErrorInsufficientDriver");
  cudasim::reset_machine();
  cudasim::set_device_count(0);
  refused(small_desc(), MFSDP_E_UNSUPPORTED, "no GPU is visible");
  cudasim::reset_machine();
  cudasim::set_kernel_image(false);
  refused(small_desc(), MFSDP_E_UNSUPPORTED, "compile mfsdp/cuda/kernels.cu for this device");
}

TEST_F(CudaBackend, SaysWhatIsWrongWithItsDescription) {
  const struct {
    void (*edit)(mfsdp_cuda_backend_desc *);
    const char *text;
  } cases[] = {
      {[](mfsdp_cuda_backend_desc *d) { d->struct_nbytes -= 8; }, "desc.struct_nbytes is"},
      {[](mfsdp_cuda_backend_desc *d) { d->device = 1; }, "desc.device is 1 of 1 devices"},
      {[](mfsdp_cuda_backend_desc *d) { d->device = -1; }, "desc.device is -1 of 1 devices"},
      {[](mfsdp_cuda_backend_desc *d) { d->task_capacity = 0; }, "desc.task_capacity is 0"},
      {[](mfsdp_cuda_backend_desc *d) { d->submit_timeout_us = 0; }, "submit_timeout_us is 0"},
      {[](mfsdp_cuda_backend_desc *d) { d->workspace_nbytes = 100; }, "workspace_nbytes is 100"},
      {[](mfsdp_cuda_backend_desc *d) { d->symmetric_from = 0; }, "desc.symmetric_from is 0"}};
  for (const auto &c : cases) {
    mfsdp_cuda_backend_desc desc = small_desc();
    c.edit(&desc);
    refused(desc, MFSDP_E_ARGUMENT, c.text);
  }
  EXPECT_EQ(mfsdp_cuda_backend_create(&context_, nullptr, nullptr), MFSDP_E_ARGUMENT);
}

TEST_F(CudaBackend, DevicesAreNotMixed) {
  cudasim::set_device_count(2);
  mfsdp_cuda_backend_desc desc = small_desc();
  desc.device = 1;
  refused(desc, MFSDP_E_ARGUMENT, "the calling thread's device is 0, this backend's is 1");
  desc.device = 0;
  mfsdp_cuda_backend *cuda = nullptr;
  ASSERT_EQ(mfsdp_cuda_backend_create(&context_, &desc, &cuda), MFSDP_OK) << message();
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  mfsdp_queue *queue = nullptr, *other = nullptr;
  ASSERT_EQ(b->ops->queue_create(b->self, &context_, "q", &queue), MFSDP_OK);
  ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
  char x[4], y[4];
  EXPECT_EQ(b->ops->copy(b->self, queue, x, MFSDP_SPACE_HOST, y, MFSDP_SPACE_HOST, sizeof(x)),
            MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("copy: the calling thread's device is 1"), std::string::npos);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  EXPECT_EQ(mfsdp_cuda_queue_wrap(&context_, cuda, stream, "w", &other), MFSDP_E_ARGUMENT);
  EXPECT_NE(message().find("the stream is of device 1"), std::string::npos);
  EXPECT_EQ(mfsdp_cuda_queue_wrap(&context_, cuda, nullptr, "w", &other), MFSDP_E_ARGUMENT);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_E_STATE);
  b->ops->queue_destroy(b->self, &context_, queue);
  EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_OK);
}

TEST_F(CudaBackend, MemoryThatRunsOutIsAStatus) {
  mfsdp_cuda_backend_desc desc = small_desc();
  mfsdp_cuda_backend *cuda = nullptr;
  ASSERT_EQ(mfsdp_cuda_backend_create(&context_, &desc, &cuda), MFSDP_OK);
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  cudasim::set_memory_limit(100000);
  void *data = nullptr;
  EXPECT_EQ(b->ops->mem_alloc(b->self, &context_, 100001, 256, MFSDP_SPACE_DEVICE, &data),
            MFSDP_E_MEMORY);
  EXPECT_NE(message().find("the device has no 100001 bytes left"), std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  mfsdp_queue *queue = nullptr; /* its scratch alone is larger */
  EXPECT_EQ(b->ops->queue_create(b->self, &context_, "q", &queue), MFSDP_E_MEMORY);
  EXPECT_EQ(queue, nullptr);
  EXPECT_EQ(b->ops->mem_alloc(b->self, &context_, 100000, 256, MFSDP_SPACE_DEVICE, &data),
            MFSDP_OK);
  b->ops->mem_free(b->self, &context_, data, 100000, MFSDP_SPACE_DEVICE);
  EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_OK);
}

TEST_F(CudaBackend, HostPointersAreNamedWhenAsked) {
  Rig rig(cuda_kind());
  std::vector<float> host(8);
  Buffer<float> device(&rig, 8);
  EXPECT_EQ(rig.ops->cast(rig.self, rig.queue, host.data(), MFSDP_F32, device.data(), MFSDP_F32, 8),
            MFSDP_E_ARGUMENT);
  EXPECT_STREQ(rig.message(), "cast: dst is host memory, needs device memory");
  EXPECT_EQ(rig.ops->copy(rig.self, rig.queue, host.data(), MFSDP_SPACE_DEVICE, device.data(),
                          MFSDP_SPACE_DEVICE, 32),
            MFSDP_E_ARGUMENT);
  EXPECT_STREQ(rig.message(), "copy: dst is host memory, needs device memory");
}

/* ---- every call fails once ---- */

mfsdp_status small_job(mfsdp_context *context, mfsdp_cuda_backend *cuda) {
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  mfsdp_queue *queue = nullptr, *second = nullptr;
  mfsdp_event *event = nullptr;
  void *data = nullptr;
  const std::size_t nbytes = 3 * 64 * sizeof(float);
  mfsdp_status status = b->ops->queue_create(b->self, context, "q", &queue);
  if (status == MFSDP_OK) status = b->ops->queue_create(b->self, context, "r", &second);
  if (status == MFSDP_OK) status = b->ops->event_create(b->self, context, &event);
  if (status == MFSDP_OK)
    status = b->ops->mem_alloc(b->self, context, nbytes, 256, MFSDP_SPACE_DEVICE, &data);
  if (status == MFSDP_OK) status = b->ops->fill_bytes(b->self, queue, data, 0, nbytes);
  if (status == MFSDP_OK) status = b->ops->event_record(b->self, queue, event);
  if (status == MFSDP_OK) status = b->ops->queue_wait(b->self, second, event);
  if (status == MFSDP_OK) {
    float *x = static_cast<float *>(data);
    mfsdp_gemm_args args = mfsdp_gemm_args_default();
    args.a = mfsdp_mat{x, 8, 8, 8, 0};
    args.b = args.a;
    args.c = mfsdp_mat{x + 64, 8, 8, 8, 0};
    args.d = mfsdp_mat{x + 128, 8, 8, 8, 0};
    args.beta = 1.0f;
    status = b->ops->gemm(b->self, second, &args);
    args.symmetric = 1;
    if (status == MFSDP_OK) status = b->ops->gemm(b->self, second, &args);
  }
  if (status == MFSDP_OK) status = b->ops->event_record(b->self, second, event);
  if (status == MFSDP_OK) status = b->ops->event_wait(b->self, context, event, 10000000);
  const int64_t delivered = cudasim::failed();
  cudasim::fail_at(-1); /* what is freed is freed */
  b->ops->queue_destroy(b->self, context, queue);
  b->ops->queue_destroy(b->self, context, second);
  b->ops->event_destroy(b->self, context, event);
  b->ops->mem_free(b->self, context, data, nbytes, MFSDP_SPACE_DEVICE);
  if (delivered && status == MFSDP_OK) return MFSDP_E_STATE; /* a failure was lost */
  return status;
}

TEST_F(CudaBackend, EveryCallMayFail) {
  mfsdp_cuda_backend_desc desc = small_desc();
  desc.symmetric_from = 1;
  for (int64_t n = 0;; ++n) {
    mfsdp_cuda_backend *cuda = nullptr;
    cudasim::fail_at(n);
    mfsdp_status status = mfsdp_cuda_backend_create(&context_, &desc, &cuda);
    const bool in_create = cudasim::failed();
    if (status == MFSDP_OK) status = small_job(&context_, cuda);
    cudasim::fail_at(-1);
    EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_OK) << message();
    EXPECT_EQ(cudaGetLastError(), cudaSuccess) << n;
    EXPECT_EQ(cudasim::complaints(), "") << n;
    ASSERT_EQ(cudasim::allocation_count(), 0u) << n << " " << message();
    if (status == MFSDP_OK && !in_create) {
      EXPECT_GT(n, 40); /* calls of the whole job */
      break;
    }
    EXPECT_TRUE(status == MFSDP_E_BACKEND || status == MFSDP_E_MEMORY ||
                status == MFSDP_E_UNSUPPORTED)
        << n << " " << mfsdp_status_name(status) << " " << message();
  }
}

/* ---- the caller's own stream and handle ---- */

TEST_F(CudaBackend, WrapsTheCallersStreamAndHandle) {
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  mfsdp_cuda_backend_desc desc = small_desc();
  ASSERT_EQ(cublasCreate(&desc.blas), CUBLAS_STATUS_SUCCESS);
  mfsdp_cuda_backend *cuda = nullptr;
  ASSERT_EQ(mfsdp_cuda_backend_create(&context_, &desc, &cuda), MFSDP_OK) << message();
  mfsdp_queue *queue = nullptr;
  ASSERT_EQ(mfsdp_cuda_queue_wrap(&context_, cuda, stream, "mine", &queue), MFSDP_OK) << message();
  EXPECT_EQ(mfsdp_cuda_queue_stream(queue), stream);
  const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
  void *data = nullptr;
  ASSERT_EQ(b->ops->mem_alloc(b->self, &context_, 64, 256, MFSDP_SPACE_DEVICE, &data), MFSDP_OK);
  float host[16] = {0};
  ASSERT_EQ(cudaMemsetAsync(data, 0, 64, stream), cudaSuccess); /* the caller's work, in order */
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  float *x = static_cast<float *>(data);
  args.a = mfsdp_mat{x, 2, 2, 2, 0};
  args.b = mfsdp_mat{x + 4, 2, 2, 2, 0};
  args.d = mfsdp_mat{x + 8, 2, 2, 2, 0};
  args.diagonal = 3.0f;
  ASSERT_EQ(cublasSetStream(desc.blas, nullptr), CUBLAS_STATUS_SUCCESS); /* turned elsewhere */
  ASSERT_EQ(b->ops->gemm(b->self, queue, &args), MFSDP_OK) << message();
  ASSERT_EQ(b->ops->copy(b->self, queue, host, MFSDP_SPACE_HOST, data, MFSDP_SPACE_DEVICE, 64),
            MFSDP_OK);
  ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_EQ(host[8], 3.0f);
  EXPECT_EQ(host[9], 0.0f);
  EXPECT_EQ(host[11], 3.0f);
  b->ops->queue_destroy(b->self, &context_, queue);
  b->ops->mem_free(b->self, &context_, data, 64, MFSDP_SPACE_DEVICE);
  EXPECT_EQ(mfsdp_cuda_backend_destroy(&context_, cuda), MFSDP_OK);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess) << "still the caller's";
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(cublasDestroy(desc.blas), CUBLAS_STATUS_SUCCESS);
}

/* ---- queues ---- */

TEST(CudaQueue, KernelsBehindAFailureDoNothing) {
  Rig rig(cuda_kind());
  Buffer<float> x(&rig, std::vector<float>(4, 1.0f)), y(&rig, std::vector<float>(4, 2.0f));
  Buffer<double> slots(&rig, std::vector<double>(1, 5.0));
  Buffer<mfsdp_block> blocks(&rig, std::vector<mfsdp_block>{{-1, 4, 0, 0}});
  mfsdp_queue *second = nullptr;
  ASSERT_EQ(rig.ops->queue_create(rig.self, &rig.context, "second", &second), MFSDP_OK);
  ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), x.data(), blocks.data(), 1),
            MFSDP_OK);
  ASSERT_EQ(rig.ops->cast(rig.self, rig.queue, y.data(), MFSDP_F32, x.data(), MFSDP_F32, 4),
            MFSDP_OK);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->queue_wait(rig.self, second, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->cast(rig.self, second, y.data(), MFSDP_F32, x.data(), MFSDP_F32, 4), MFSDP_OK);
  EXPECT_EQ(rig.sync(), MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.ops->event_record(rig.self, second, rig.event), MFSDP_OK);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 10000000), MFSDP_E_ARGUMENT);
  EXPECT_STREQ(rig.message(), "sumsq: block 0 has first -1, count 4, slot 0");
  rig.ops->queue_destroy(rig.self, &rig.context, second);
  rig.renew_queue();
  EXPECT_EQ(y.read(), std::vector<float>(4, 2.0f));
  EXPECT_EQ(slots.read()[0], 5.0);
}

/* Work that is not done is no error, and none that the caller's own checks find; an error of the
 * caller's stays. */
TEST(CudaQueue, LooksAtEventsLeaveNoErrorBehind) {
  Rig rig(cuda_kind());
  std::atomic<bool> open{false};
  std::atomic<bool> *gate = &open;
  int32_t done = 1;
  const auto wait = [](void *argument) {
    while (!static_cast<std::atomic<bool> *>(argument)->load())
      std::this_thread::yield();
  };
  ASSERT_EQ(cudaLaunchHostFunc(mfsdp_cuda_queue_stream(rig.queue), wait, gate), cudaSuccess);
  ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_query(rig.self, rig.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 0);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(rig.ops->event_wait(rig.self, &rig.context, rig.event, 1000), MFSDP_E_TIMEOUT);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  open = true;
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_EQ(cudaSetDevice(99), cudaErrorInvalidDevice);
  EXPECT_EQ(rig.ops->event_query(rig.self, rig.event, &done), MFSDP_OK);
  EXPECT_EQ(done, 1);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidDevice) << "the caller's own";
}

/* Queues hand buffers to and fro, ordered by events alone: for the thread sanitizer. */
TEST(CudaQueue, EventsOrderQueues) {
  Rig rig(cuda_kind());
  mfsdp_queue *second = nullptr;
  mfsdp_event *back = nullptr;
  ASSERT_EQ(rig.ops->queue_create(rig.self, &rig.context, "second", &second), MFSDP_OK);
  ASSERT_EQ(rig.ops->event_create(rig.self, &rig.context, &back), MFSDP_OK);
  Buffer<float> x(&rig, std::vector<float>(300, 1.0f)), y(&rig, 300);
  for (int i = 0; i < 20; ++i) {
    const void *from_x[] = {x.data(), x.data()}, *from_y[] = {y.data()};
    ASSERT_EQ(
        rig.ops->sum_terms(rig.self, rig.queue, y.data(), 1, from_x, MFSDP_F32, i % 2 + 1, 300),
        MFSDP_OK);
    ASSERT_EQ(rig.ops->event_record(rig.self, rig.queue, rig.event), MFSDP_OK);
    ASSERT_EQ(rig.ops->queue_wait(rig.self, second, rig.event), MFSDP_OK);
    ASSERT_EQ(rig.ops->sum_terms(rig.self, second, x.data(), 1, from_y, MFSDP_F32, 1, 300),
              MFSDP_OK);
    ASSERT_EQ(rig.ops->event_record(rig.self, second, back), MFSDP_OK);
    ASSERT_EQ(rig.ops->queue_wait(rig.self, rig.queue, back), MFSDP_OK);
  }
  EXPECT_EQ(x.read(), std::vector<float>(300, 1024.0f));
  rig.ops->queue_destroy(rig.self, &rig.context, second);
  rig.ops->event_destroy(rig.self, &rig.context, back);
}

TEST(CudaQueue, WorkIsCapturedIntoAGraphOrRefused) {
  Rig rig(cuda_kind());
  const std::vector<float> start = {1.0f, 2.0f, 3.0f, 4.0f};
  Buffer<float> x(&rig, start), y(&rig, std::vector<float>(4, 0.0f)), z(&rig, 4);
  const void *terms[] = {x.data()};
  cudaStream_t stream = mfsdp_cuda_queue_stream(rig.queue);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.a = args.b = mfsdp_mat{y.data(), 2, 2, 2, 0};
  args.d = mfsdp_mat{z.data(), 2, 2, 2, 0};
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_EQ(rig.ops->sum_terms(rig.self, rig.queue, y.data(), 0, terms, MFSDP_F32, 1, 4), MFSDP_OK);
  EXPECT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
  EXPECT_EQ(rig.ops->queue_call(
                rig.self, rig.queue, [](void *, mfsdp_error *) { return MFSDP_OK; }, nullptr),
            MFSDP_E_UNSUPPORTED);
  EXPECT_NE(std::string(rig.message()).find("captured into a graph"), std::string::npos);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(y.read(), std::vector<float>(4, 0.0f)) << "captured, not run";
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (int run = 1; run <= 2; ++run) {
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    const float r = static_cast<float>(run), s = r * r;
    EXPECT_EQ(y.read(), (std::vector<float>{r, 2 * r, 3 * r, 4 * r}));
    EXPECT_EQ(z.read(), (std::vector<float>{7 * s, 10 * s, 15 * s, 22 * s}));
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

/* Three steps of Muon, rows normalized, and of AdamW: each enqueued, or one that was captured, replayed. */
std::vector<float> three_steps(bool captured) {
  Rig rig(cuda_kind());
  Buffer<float> masters(&rig, Numbers(1).reals(144)), grads(&rig, Numbers(2).reals(144));
  mfsdp_hyper_group groups[2] = {mfsdp_hyper_group_muon(MFSDP_MUON_TORCH),
                                 mfsdp_hyper_group_adamw(0.01, 0.1)};
  groups[0].muon.normalize_rows = 1;
  mfsdp_optimizer_tensor tensors[3]; /* two of one shape, and a run of elements */
  std::memset(tensors, 0, sizeof(tensors));
  for (int i = 0; i < 3; ++i) {
    tensors[i].name = "w";
    tensors[i].role = i < 2 ? MFSDP_ROLE_MATRIX : MFSDP_ROLE_ELEMENTWISE;
    tensors[i].hyper_group = i < 2 ? 0 : 1;
    tensors[i].param = i;
    tensors[i].rows = 6;
    tensors[i].cols = 8;
    tensors[i].count = 48;
    tensors[i].master = masters.data() + 48 * i;
    tensors[i].grad = grads.data() + 48 * i;
  }
  mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
  desc.groups = groups;
  desc.group_count = 2;
  mfsdp_optimizer *optimizer = nullptr;
  EXPECT_EQ(mfsdp_optimizer_create(&rig.context, rig.backend, &desc, tensors, 3, &optimizer),
            MFSDP_OK)
      << rig.message();
  mfsdp_step_scalars now = mfsdp_step_scalars_default(0.02, 0.1);
  now.applied_steps = 1;
  Buffer<mfsdp_step_scalars> scalars(&rig, std::vector<mfsdp_step_scalars>{now, now});
  cudaStream_t stream = mfsdp_cuda_queue_stream(rig.queue);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  const auto step = [&] {
    EXPECT_EQ(mfsdp_optimizer_step(&rig.context, optimizer, rig.queue, scalars.data(), nullptr),
              MFSDP_OK)
        << rig.message();
  };
  if (captured) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    step();
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  }
  for (int i = 0; i < 3; ++i) {
    if (captured)
      EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    else
      step();
  }
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  if (captured) {
    EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  }
  mfsdp_optimizer_destroy(&rig.context, optimizer);
  return masters.read();
}

TEST(CudaQueue, AnOptimizerStepIsCapturedIntoAGraph) {
  const std::vector<float> enqueued = three_steps(false);
  EXPECT_FALSE(test::same_bits(enqueued, Numbers(1).reals(144)));
  EXPECT_TRUE(test::same_bits(three_steps(true), enqueued));
}

/* ---- symmetric products by tiles ---- */

/* Integers, so that every order gives the same sums, and so does every route: by tiles where the memory
 * is aligned, else whole; with c elsewhere than d without a copy, or from one. */
TEST(CudaDense, TilesOfTheLowerTriangleEqualTheWholeProduct) {
  Rig rig(cuda_kind()); /* by tiles from 64 rows on */
  Numbers numbers(3);
  for (int64_t n : {64, 67, 96, 131})
    for (int apart = 0; apart < 2; ++apart)
      for (int route = 0; route < 4; ++route) {
        const int trans = route % 2;
        const std::size_t offset = route / 2 ? 1 : 0; /* of all arrays */
        const int64_t k = 8, batch = 2, stride = (n + 6) / 4 * 4;
        const int64_t a_step = n * k + 4, d_step = n * stride;
        const std::size_t square = static_cast<std::size_t>(d_step * batch);
        const std::vector<float> values =
            numbers.integers(static_cast<std::size_t>(a_step * batch), 9);
        std::vector<float> old(square, 55.0f);
        for (int64_t x = 0; x < batch; ++x)
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < stride; ++j)
              old[static_cast<std::size_t>(x * d_step + i * stride + j)] =
                  j < n ? static_cast<float>((i + j) % 7) : 55.0f; /* symmetric, then a gap */
        Buffer<float> a(&rig, values, offset), c(&rig, old, offset),
            d(&rig, apart ? std::vector<float>(square, 55.0f) : old, offset);
        std::vector<float> want = old;
        for (int64_t x = 0; x < batch; ++x)
          for (int64_t i = 0; i < n; ++i)
            for (int64_t j = 0; j < n; ++j) {
              float sum = 0.0f;
              for (int64_t l = 0; l < k; ++l)
                sum +=
                    values[static_cast<std::size_t>(x * a_step + (trans ? l * n + i : i * k + l))] *
                    values[static_cast<std::size_t>(x * a_step + (trans ? l * n + j : j * k + l))];
              float &to = want[static_cast<std::size_t>(x * d_step + i * stride + j)];
              to = 2.0f * sum + 3.0f * to + (i == j ? 4.0f : 0.0f);
            }
        mfsdp_gemm_args args = mfsdp_gemm_args_default();
        args.a = args.b =
            trans ? mfsdp_mat{a.data(), k, n, n, a_step} : mfsdp_mat{a.data(), n, k, k, a_step};
        args.d = mfsdp_mat{d.data(), n, n, stride, d_step};
        args.c = args.d;
        if (apart) args.c.data = c.data();
        args.trans_a = trans;
        args.trans_b = !trans;
        args.batch_count = batch;
        args.alpha = 2.0f;
        args.beta = 3.0f;
        args.diagonal = 4.0f;
        args.symmetric = 1;
        ASSERT_EQ(rig.ops->gemm(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
        ASSERT_EQ(d.read(), want) << n << " apart " << apart << " route " << route;
      }
}

/* What decides is where a packed batch would put its matrices, for one matrix too; and that they lie
 * where they may. */
TEST(CudaDense, AMatrixInABatchGoesTheSameWayAsAlone) {
  alignas(256) static char memory[512];
  mfsdp_gemm_args args = mfsdp_gemm_args_default();
  args.dtype = MFSDP_BF16;
  args.a = args.b = mfsdp_mat{memory, 72, 24, 24, 72 * 24};
  args.c = args.d = mfsdp_mat{memory, 72, 72, 72, 72 * 72};
  for (const int64_t batch : {1, 3}) {
    args.batch_count = batch;
    EXPECT_TRUE(mfsdp__cuda_mats_aligned(&args, 16, 1)) << batch;
    mfsdp_gemm_args other = args;
    other.a.rows = 71, other.a.cols = other.a.row_stride = 25, other.a.batch_stride = 71 * 25;
    EXPECT_FALSE(mfsdp__cuda_mats_aligned(&other, 16, 1)) << batch;
    EXPECT_TRUE(mfsdp__cuda_mats_aligned(&other, 16, 0)) << batch;
    other = args, other.d.rows = 71, other.d.row_stride = 73, other.d.batch_stride = 71 * 73;
    EXPECT_FALSE(mfsdp__cuda_mats_aligned(&other, 16, 1)) << batch;
    other = args, other.b.data = memory + 8;
    EXPECT_FALSE(mfsdp__cuda_mats_aligned(&other, 16, 1)) << batch;
    other = args, other.c.data = memory + 128;
    EXPECT_TRUE(mfsdp__cuda_mats_aligned(&other, 256, 0)) << batch << ": c is not read";
    other.beta = 1.0f;
    EXPECT_FALSE(mfsdp__cuda_mats_aligned(&other, 256, 0)) << batch;
  }
  args.a.batch_stride += 4;
  EXPECT_FALSE(mfsdp__cuda_mats_aligned(&args, 16, 1));
}

/* 1 + 2^-11, which TF32 has no bit for, times 1: by each of the three routes of a product, with TF32 and
 * without, in floats and in bf16, of which cuBLAS knows no TF32. */
TEST(CudaDense, RoundsToTf32OnlyFloatsAndOnlyOnRequest) {
  const float value = 1.0f + std::ldexp(1.0f, -11);
  const int64_t n = 8;
  for (const int32_t allowed : {0, 1})
    for (const mfsdp_dtype dtype : {MFSDP_F32, MFSDP_BF16})
      for (int route = 0; route < 3; ++route) {
        Rig rig(cuda_kind());
        mfsdp_cuda_backend_desc desc = small_desc();
        desc.allow_tf32 = allowed;
        desc.symmetric_from = route == 2 ? 1 : 1024;
        mfsdp_cuda_backend *cuda = nullptr;
        ASSERT_EQ(mfsdp_cuda_backend_create(&rig.context, &desc, &cuda), MFSDP_OK);
        const mfsdp_backend *b = mfsdp_cuda_backend_get(cuda);
        mfsdp_queue *queue = nullptr;
        ASSERT_EQ(b->ops->queue_create(b->self, &rig.context, "q", &queue), MFSDP_OK);
        std::vector<float> diagonal(64, 0.0f);
        for (std::size_t i = 0; i < 8; ++i)
          diagonal[i * 9] = value;
        Buffer<float> wide(&rig, diagonal), zeros(&rig, std::vector<float>(64, 0.0f)), d(&rig, 64);
        Buffer<float> narrow(&rig, 64);
        ASSERT_EQ(b->ops->cast(b->self, queue, narrow.data(), dtype, wide.data(), MFSDP_F32, 64),
                  MFSDP_OK);
        mfsdp_gemm_args args = mfsdp_gemm_args_default();
        args.dtype = dtype;
        args.a = args.b = mfsdp_mat{narrow.data(), n, n, n, 0};
        args.d = mfsdp_mat{d.data(), n, n, n, 0};
        args.c = args.d;
        if (route == 1) {
          args.c.data = zeros.data();
          args.beta = 1.0f;
        }
        args.symmetric = route == 2;
        args.trans_b = route == 2;
        EXPECT_EQ(b->ops->gemm(b->self, queue, &args), MFSDP_OK) << rig.message();
        b->ops->queue_destroy(b->self, &rig.context, queue);
        EXPECT_EQ(mfsdp_cuda_backend_destroy(&rig.context, cuda), MFSDP_OK);
        const std::vector<float> got = d.read();
        if (dtype == MFSDP_F32) {
          EXPECT_EQ(got[9], allowed ? 1.0f : value * value) << allowed << " " << route;
        } else {
          EXPECT_EQ(mfsdp_element_get(got.data(), dtype, 9), 1.0) << allowed << " " << route;
        }
      }
}

/* ---- a kernel that no entry needs yet ---- */

TEST(CudaKernels, Transpose) {
  Rig rig(cuda_kind());
  Numbers numbers(4);
  mfsdp__cuda_queue *queue = reinterpret_cast<mfsdp__cuda_queue *>(rig.queue);
  for (const auto &shape : {std::make_pair(1, 1), std::make_pair(33, 70), std::make_pair(64, 31)}) {
    const auto rows = static_cast<std::size_t>(shape.first),
               cols = static_cast<std::size_t>(shape.second);
    const std::vector<float> values = numbers.reals(rows * (cols + 2));
    Buffer<float> from(&rig, values), to(&rig, std::vector<float>(cols * rows, 0.0f));
    ASSERT_EQ(mfsdp_cuda_kernels_v1()->transpose(mfsdp__cuda_lane(queue), to.data(), shape.first,
                                                 from.data(), shape.second + 2, shape.first,
                                                 shape.second, 4),
              0);
    const std::vector<float> got = to.read();
    for (std::size_t i = 0; i < rows; ++i)
      for (std::size_t j = 0; j < cols; ++j)
        ASSERT_EQ(got[j * rows + i], values[i * (cols + 2) + j]);
  }
}

/* Long enough for several parts, which are one fixed order too. */
TEST(CudaKernels, LongSumsOfSquaresDoNotDependOnTheirPlace) {
  Rig rig(cuda_kind());
  Numbers numbers(5);
  const std::vector<float> x = numbers.reals(70001);
  double reference = 0.0, first = 0.0;
  for (float v : x)
    reference += static_cast<double>(v) * static_cast<double>(v);
  for (std::size_t offset = 0; offset < 3; ++offset) {
    std::vector<float> all(offset, 5.0f);
    all.insert(all.end(), x.begin(), x.end());
    Buffer<float> acc(&rig, all);
    Buffer<double> slots(&rig, 1);
    Buffer<mfsdp_block> blocks(
        &rig, std::vector<mfsdp_block>{{static_cast<int64_t>(offset), 70001, 0, 0}});
    ASSERT_EQ(rig.ops->sumsq(rig.self, rig.queue, slots.data(), acc.data(), blocks.data(), 1),
              MFSDP_OK);
    const double got = slots.read()[0];
    if (offset == 0) first = got;
    EXPECT_EQ(got, first);
    /* Two orders of 70001 additions of positive numbers: 2 x 70001 x 2^-53. */
    EXPECT_NEAR(got, reference, 1.6e-11 * reference);
  }
}

/* ---- rows (NorMuon) of more matrices, and of one with more rows, than one launch has room for ---- */

struct RowsCase {
  int64_t rows, cols;
  std::size_t at; /* of its direction; its moments lie behind it */
};

std::vector<RowsCase> rows_cases(std::vector<RowsCase> cases) {
  std::size_t at = 0;
  for (RowsCase &c : cases) {
    c.at = at;
    at += static_cast<std::size_t>(c.rows * c.cols + c.rows) + 1; /* every alignment */
  }
  return cases;
}

std::vector<float> rows_start(const std::vector<RowsCase> &cases) {
  const RowsCase &last = cases.back();
  std::vector<float> start =
      Numbers(6).reals(last.at + static_cast<std::size_t>((last.cols + 1) * last.rows + 1));
  for (const RowsCase &c : cases) /* moments are not negative */
    for (std::size_t i = 0; i < static_cast<std::size_t>(c.rows); ++i) {
      float &moment = start[c.at + static_cast<std::size_t>(c.rows * c.cols) + i];
      moment = std::fabs(moment);
    }
  return start;
}

/* All directions and moments after one pass over all items, the fourth of which is absent. */
std::vector<float> rows_on(const test::RigKind &kind, const std::vector<RowsCase> &cases,
                           const std::vector<float> &start) {
  Rig rig(kind);
  Buffer<float> data(&rig, start);
  std::vector<mfsdp_fused_item> list;
  mfsdp_fused_args args;
  std::memset(&args, 0, sizeof(args));
  for (const RowsCase &c : cases) {
    mfsdp_fused_item item;
    std::memset(&item, 0, sizeof(item));
    item.direction = data.data() + c.at;
    item.state[1] = item.direction + c.rows * c.cols;
    item.count = c.rows * c.cols;
    item.rows = c.rows;
    item.present_index = list.size() == 3 ? 1 : 0;
    args.total_count += item.count;
    args.max_count = std::max(args.max_count, item.count);
    list.push_back(item);
  }
  Buffer<mfsdp_fused_item> items(&rig, list);
  Buffer<uint32_t> present(&rig, std::vector<uint32_t>{1, 0});
  Buffer<mfsdp_step_scalars> scalars(
      &rig, std::vector<mfsdp_step_scalars>{mfsdp_step_scalars_default(0.1, 0.0)});
  args.struct_nbytes = sizeof(args);
  args.op = MFSDP_FUSED_MUON_ROWS;
  args.items = items.data();
  args.item_count = static_cast<int32_t>(list.size());
  args.scalars = scalars.data();
  args.present = present.data();
  args.beta2 = 0.95;
  args.eps = 1e-10;
  EXPECT_EQ(rig.ops->fused(rig.self, rig.queue, &args), MFSDP_OK) << rig.message();
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  return data.read();
}

TEST(CudaKernels, RowsOfManyMatrices) {
  std::vector<RowsCase> cases = {{2501, 5, 0}, {1, 1, 0}, {0, 0, 0}, {3, 2050, 0}, {1025, 4, 0}};
  for (int64_t i = 0; i < 60; ++i)
    cases.push_back({1 + i * 7 % 40, 1 + i * 13 % 70, 0});
  cases = rows_cases(cases);
  const std::vector<float> start = rows_start(cases);
  const std::vector<float> host = rows_on(test::rig_kinds()[0], cases, start);
  const std::vector<float> cuda = rows_on(cuda_kind(), cases, start);
  ASSERT_EQ(cuda.size(), host.size());
  /* Four roundings to a neighbour: see expect_neighbours in ops_test.cpp. */
  for (std::size_t i = 0; i < host.size(); ++i)
    ASSERT_LE(std::fabs(cuda[i] - host[i]), std::ldexp(std::fabs(host[i]), -21)) << i;
  const std::size_t absent = cases[3].at;
  for (std::size_t i = absent; i < absent + 3 * 2050 + 3; ++i)
    ASSERT_EQ(cuda[i], start[i]) << i;
  EXPECT_EQ(rows_on(cuda_kind(), cases, start), cuda) << "another run, other bits";
}

/* As CudaDecompose.ThreadsOfTheKernelsDoNotRace. */
TEST(CudaKernels, ThreadsOfRowsDoNotRace) {
  if (!MFSDP_TEST_TSAN) GTEST_SKIP() << "needs the thread sanitizer";
  const std::vector<RowsCase> cases = rows_cases({{3, 9, 0}, {2, 4, 0}});
  cudasim::thread_races(true);
  (void)rows_on(cuda_kind(), cases, rows_start(cases));
  cudasim::thread_races(false);
}

} // namespace
