/* SPDX-License-Identifier: MIT */
/*
 * The host double itself: what is wrong on purpose must be seen. What a sanitizer sees ends the
 * program, so those tests run it again, for one test that is disabled otherwise.
 */
#include "tests/cudasim/cudasim.h"

#include "tests/cudasim/include/cuda_runtime.h"

#include <cublas_v2.h>
#include <cusolverDn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <vector>

#if CUDASIM_TSAN
static int tsan_reports = 0;
extern "C" void __tsan_on_report(void *report);
extern "C" void __tsan_on_report(void *report) {
  (void)report;
  ++tsan_reports;
}
#endif

namespace {

struct Memory {
  cudaStream_t stream = nullptr;
  cudaMemPool_t pool = nullptr;
  Memory() {
    cudaMemPoolProps properties;
    std::memset(&properties, 0, sizeof(properties));
    properties.allocType = cudaMemAllocationTypePinned;
    properties.location.type = cudaMemLocationTypeDevice;
    EXPECT_EQ(cudaMemPoolCreate(&pool, &properties), cudaSuccess);
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  }
  ~Memory() {
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
    EXPECT_EQ(cudaMemPoolDestroy(pool), cudaSuccess);
  }
  template <class T> T *make(std::size_t count) {
    void *data = nullptr;
    EXPECT_EQ(cudaMallocFromPoolAsync(&data, count * sizeof(T), pool, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    return static_cast<T *>(data);
  }
  void free(void *data) { EXPECT_EQ(cudaFreeAsync(data, stream), cudaSuccess); }
  void sync() { EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess); }
  template <class T> std::vector<T> read(const T *data, std::size_t count) {
    std::vector<T> out(count);
    EXPECT_EQ(cudaMemcpyAsync(out.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
              cudaSuccess);
    sync();
    return out;
  }
  template <class... P, class... A>
  cudaError_t launch(unsigned blocks, unsigned threads, void (*kernel)(P...), A... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(threads);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, arguments...);
  }
};

/* Runs one disabled test of this program again; its output and whether it ended well. */
std::string run_again(const std::string &test, const std::string &environment, int *status) {
  char self[1024];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof(self) - 1);
  if (length <= 0) return "";
  const std::string command =
      environment + " '" + std::string(self, static_cast<std::size_t>(length)) +
      "' --gtest_also_run_disabled_tests --gtest_filter='" + test + "' 2>&1";
  FILE *pipe = popen(command.c_str(), "r");
  std::string out;
  char part[4096];
  for (std::size_t n; (n = fread(part, 1, sizeof(part), pipe)) > 0;)
    out.append(part, n);
  *status = pclose(pipe);
  return out;
}

/* ---- streams and events ---- */

const int kRuns = 20;
#if CUDASIM_TSAN
const char *const kCount = "TSAN_OPTIONS='exitcode=0 suppress_equal_stacks=0 "
                           "suppress_equal_addresses=0'";

/* Streams hand a buffer over, with or without an event between them. */
int runs_with_reports(bool event_between) {
  Memory a, b;
  cudaEvent_t event;
  int seen = 0;
  EXPECT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  for (int run = 0; run < kRuns; ++run) {
    char *from = a.make<char>(64), *to = a.make<char>(64);
    const int before = tsan_reports;
    EXPECT_EQ(cudaMemsetAsync(from, run, 64, a.stream), cudaSuccess);
    EXPECT_EQ(cudaEventRecord(event, a.stream), cudaSuccess);
    if (event_between) {
      EXPECT_EQ(cudaStreamWaitEvent(b.stream, event, 0), cudaSuccess);
    }
    EXPECT_EQ(cudaMemcpyAsync(to, from, 64, cudaMemcpyDeviceToDevice, b.stream), cudaSuccess);
    a.sync();
    b.sync();
    seen += tsan_reports > before;
    a.free(from);
    a.free(to);
  }
  a.sync();
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  return seen;
}

TEST(Cudasim, DISABLED_MissingEvent) {
  std::printf("missing: %d of %d\n", runs_with_reports(false), kRuns);
}
TEST(Cudasim, DISABLED_PresentEvent) {
  std::printf("present: %d of %d\n", runs_with_reports(true), kRuns);
}
#endif

TEST(Cudasim, AMissingEventIsADataRaceEveryTime) {
#if CUDASIM_TSAN
  int status = 0;
  const std::string out = run_again("*DISABLED_MissingEvent", kCount, &status);
  EXPECT_NE(out.find("missing: 20 of 20"), std::string::npos) << out;
  const std::string good = run_again("*DISABLED_PresentEvent", kCount, &status);
  EXPECT_NE(good.find("present: 0 of 20"), std::string::npos) << good;
#else
  GTEST_SKIP() << "needs the thread sanitizer (" << kRuns << " runs)";
#endif
}

TEST(Cudasim, WorkOfAStreamIsInOrderAndEventsOrderStreams) {
  Memory a, b;
  cudaEvent_t event;
  ASSERT_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
  EXPECT_EQ(cudaEventQuery(event), cudaSuccess) << "never recorded";
  int *x = a.make<int>(1), *y = a.make<int>(1);
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(cudaMemsetAsync(x, i, 4, a.stream), cudaSuccess);
    ASSERT_EQ(cudaEventRecord(event, a.stream), cudaSuccess);
    ASSERT_EQ(cudaStreamWaitEvent(b.stream, event, 0), cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(y, x, 4, cudaMemcpyDeviceToDevice, b.stream), cudaSuccess);
    ASSERT_EQ(b.read(y, 1)[0], i * 0x01010101);
  }
  a.free(x);
  a.free(y);
  a.sync();
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  EXPECT_EQ(cudasim::complaints(), "");
}

/* ---- memory ---- */

void write_at(char *data, std::size_t index) {
  data[index] = 1;
}

void overrun() {
  Memory m;
  char *data = m.make<char>(100);
  ASSERT_EQ(m.launch(1, 1, write_at, data, std::size_t(100)), cudaSuccess);
  m.sync();
  m.free(data);
  m.sync();
}

TEST(Cudasim, DISABLED_Overrun) {
  overrun();
}

TEST(Cudasim, AnOverrunIsSeen) {
#if CUDASIM_ASAN
  int status = 0;
  const std::string out = run_again("*DISABLED_Overrun", "", &status);
  EXPECT_NE(status, 0);
  EXPECT_NE(out.find("AddressSanitizer"), std::string::npos) << out;
#else
  for (int run = 0; run < kRuns; ++run) {
    overrun();
    EXPECT_NE(cudasim::complaints().find("was written 0 bytes behind its end"), std::string::npos);
  }
#endif
}

TEST(Cudasim, CopiesMustFitTheirMemory) {
  Memory m;
  char *device = m.make<char>(100), host[200] = {0};
  void *pinned = nullptr;
  ASSERT_EQ(cudaHostAlloc(&pinned, 100, cudaHostAllocPortable), cudaSuccess);
  const struct {
    void *dst;
    const void *src;
    std::size_t nbytes;
    cudaMemcpyKind kind;
    bool good;
  } cases[] = {{device, host, 100, cudaMemcpyHostToDevice, true},
               {device, host, 101, cudaMemcpyHostToDevice, false},
               {device, host, 100, cudaMemcpyDeviceToHost, false},
               {host, device, 100, cudaMemcpyHostToDevice, false},
               {host, pinned, 100, cudaMemcpyDeviceToDevice, false},
               {pinned, device, 100, cudaMemcpyDeviceToHost, true},
               {static_cast<char *>(pinned) + 1, device, 100, cudaMemcpyDeviceToHost, false}};
  for (const auto &c : cases) {
    EXPECT_EQ(cudaMemcpyAsync(c.dst, c.src, c.nbytes, c.kind, m.stream),
              c.good ? cudaSuccess : cudaErrorInvalidValue);
    EXPECT_EQ(cudasim::complaints().empty(), c.good);
  }
  m.sync();
  m.free(device);
  EXPECT_EQ(cudaFreeAsync(device, m.stream), cudaErrorInvalidValue) << "twice";
  EXPECT_NE(cudasim::complaints(), "");
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaMemsetAsync(host, 0, 1, m.stream), cudaErrorInvalidValue);
  EXPECT_NE(cudasim::complaints(), "");
  (void)cudaGetLastError();
}

TEST(Cudasim, DISABLED_HostTouchesDeviceMemory) {
  Memory m;
  *m.make<char>(1) = 1;
}

TEST(Cudasim, TheHostCannotTouchDeviceMemory) {
  if (!cudasim::device_memory_protected()) GTEST_SKIP() << "no protection keys here";
  int status = 0;
  (void)run_again("*DISABLED_HostTouchesDeviceMemory", "", &status);
  EXPECT_NE(status, 0);
}

/* ---- kernels ---- */

/* Each thread's sum of its block's numbers, by way of shared memory; a barrier may be missing. */
void sum_of_block(int *out, bool barrier) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x + 100 * blockIdx.x);
  if (barrier) __syncthreads();
  int sum = 0;
  for (unsigned i = 0; i < blockDim.x; ++i)
    sum += numbers[i];
  if (barrier) __syncthreads();
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

/* Numbers move on by one thread; all must have read before any writes. */
void moved_on(int *out, bool barrier) {
  __shared__ int numbers[64];
  numbers[threadIdx.x] = static_cast<int>(threadIdx.x);
  __syncthreads();
  const int next = numbers[(threadIdx.x + 1) % blockDim.x];
  if (barrier) __syncthreads();
  numbers[threadIdx.x] = next;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

void partner(int *out) {
  int value = static_cast<int>(threadIdx.x);
  for (int lanes = 16; lanes > 0; lanes /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  out[threadIdx.x] = value;
}

TEST(Cudasim, ThreadsOfABlockWaitForEachOther) {
  Memory m;
  int *out = m.make<int>(192);
  ASSERT_EQ(m.launch(3, 64, sum_of_block, out, true), cudaSuccess);
  const std::vector<int> sums = m.read(out, 192);
  for (int i = 0; i < 192; ++i)
    EXPECT_EQ(sums[static_cast<std::size_t>(i)], 64 * 63 / 2 + 6400 * (i / 64));
  ASSERT_EQ(m.launch(1, 64, partner, out), cudaSuccess);
  const std::vector<int> warps = m.read(out, 64);
  for (int i = 0; i < 64; ++i) /* a warp sums its own numbers alone */
    EXPECT_EQ(warps[static_cast<std::size_t>(i)], i < 32 ? 496 : 496 + 32 * 32);
  m.free(out);
  m.sync();
  EXPECT_EQ(m.launch(0, 64, partner, out), cudaErrorInvalidConfiguration);
  EXPECT_EQ(m.launch(1, 1025, partner, out), cudaErrorInvalidConfiguration);
  (void)cudaGetLastError();
  EXPECT_EQ(cudasim::complaints(), "");
}

#if CUDASIM_TSAN
void run_block(void (*kernel)(int *, bool), bool barrier) {
  Memory m;
  int *out = m.make<int>(64);
  cudasim::thread_races(true);
  EXPECT_EQ(m.launch(1, 64, kernel, out, barrier), cudaSuccess);
  m.sync();
  cudasim::thread_races(false);
  m.free(out);
  m.sync();
}
TEST(Cudasim, DISABLED_MissingBarrier) {
  run_block(sum_of_block, false);
}
TEST(Cudasim, DISABLED_MissingSecondBarrier) {
  run_block(moved_on, false);
}
TEST(Cudasim, DISABLED_PresentBarriers) {
  run_block(sum_of_block, true);
  run_block(moved_on, true);
}
#endif

TEST(Cudasim, AMissingBarrierIsADataRace) {
#if CUDASIM_TSAN
  int status = 0;
  const char *const halt = "TSAN_OPTIONS=halt_on_error=1";
  const std::string out = run_again("*DISABLED_MissingBarrier", halt, &status);
  EXPECT_NE(status, 0);
  EXPECT_NE(out.find("in sum_of_block"), std::string::npos) << out;
  const std::string second = run_again("*DISABLED_MissingSecondBarrier", halt, &status);
  EXPECT_NE(status, 0);
  EXPECT_NE(second.find("in moved_on"), std::string::npos) << second;
  const std::string good = run_again("*DISABLED_PresentBarriers", halt, &status);
  EXPECT_EQ(status, 0) << good;
  EXPECT_EQ(good.find("data race"), std::string::npos) << good;
#else
  GTEST_SKIP() << "needs the thread sanitizer";
#endif
}

/* ---- host functions ---- */

TEST(Cudasim, HostFunctionsMayNotCallCuda) {
  Memory m;
  cudaError_t inside = cudaSuccess;
  ASSERT_EQ(cudaLaunchHostFunc(
                m.stream,
                [](void *argument) {
                  int device;
                  *static_cast<cudaError_t *>(argument) = cudaGetDevice(&device);
                },
                &inside),
            cudaSuccess);
  m.sync();
  EXPECT_EQ(inside, cudaErrorNotPermitted);
  EXPECT_EQ(cudasim::complaints(), "a host function called CUDA\n");
}

/* ---- cuBLAS ---- */

TEST(Cudasim, CublasIsStrictAboutLeadingDimensionsAndPlaces) {
  Memory m;
  cublasHandle_t handle;
  ASSERT_EQ(cublasCreate(&handle), CUBLAS_STATUS_SUCCESS);
  float *a = m.make<float>(6), *b = m.make<float>(12), *c = m.make<float>(8);
  void *workspace = m.make<char>(256);
  ASSERT_EQ(cublasSetStream(handle, m.stream), CUBLAS_STATUS_SUCCESS);
  ASSERT_EQ(cublasSetWorkspace(handle, workspace, 256), CUBLAS_STATUS_SUCCESS);
  const std::vector<float> a_host = {1, 2, 3, 4, 5, 6}, b_host(12, 1.0f); /* 2 x 3, 3 x 4 */
  ASSERT_EQ(cudaMemcpyAsync(a, a_host.data(), 24, cudaMemcpyHostToDevice, m.stream), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(b, b_host.data(), 48, cudaMemcpyHostToDevice, m.stream), cudaSuccess);
  const float one = 1.0f, zero = 0.0f;
  const auto multiply = [&](cublasOperation_t op, int64_t lda, int64_t ldb, int64_t ldc) {
    return cublasGemmStridedBatchedEx_64(handle, op, CUBLAS_OP_N, 2, 4, 3, &one, a, CUDA_R_32F, lda,
                                         0, b, CUDA_R_32F, ldb, 0, &zero, c, CUDA_R_32F, ldc, 0, 1,
                                         CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
  };
  ASSERT_EQ(multiply(CUBLAS_OP_N, 2, 3, 2), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(m.read(c, 8), (std::vector<float>{9, 12, 9, 12, 9, 12, 9, 12})) << "by columns";
  ASSERT_EQ(multiply(CUBLAS_OP_T, 3, 3, 2), CUBLAS_STATUS_SUCCESS);
  EXPECT_EQ(m.read(c, 8), (std::vector<float>{6, 15, 6, 15, 6, 15, 6, 15}));
  EXPECT_EQ(cudasim::complaints(), "");
  EXPECT_EQ(multiply(CUBLAS_OP_N, 1, 3, 2), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(CUBLAS_OP_T, 2, 3, 2), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(CUBLAS_OP_N, 2, 2, 2), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(multiply(CUBLAS_OP_N, 2, 3, 1), CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cudasim::complaints(), "");
  /* Legal for cuBLAS, but beyond the memory. */
  EXPECT_EQ(multiply(CUBLAS_OP_N, 3, 3, 2), CUBLAS_STATUS_EXECUTION_FAILED);
  EXPECT_NE(cudasim::complaints().find("cuBLAS, A"), std::string::npos);
  for (void *data :
       {static_cast<void *>(a), static_cast<void *>(b), static_cast<void *>(c), workspace})
    m.free(data);
  m.sync();
  EXPECT_EQ(cublasDestroy(handle), CUBLAS_STATUS_SUCCESS);
}

/* ---- cuSOLVER ---- */

class Cusolver : public ::testing::Test {
protected:
  Cusolver() {
    EXPECT_EQ(cusolverDnCreate(&handle_), CUSOLVER_STATUS_SUCCESS);
    EXPECT_EQ(cusolverDnSetStream(handle_, m_.stream), CUSOLVER_STATUS_SUCCESS);
    a_ = m_.make<float>(12);
    values_ = m_.make<float>(3);
    info_ = m_.make<int>(1);
  }
  ~Cusolver() override {
    for (void *data : {static_cast<void *>(a_), static_cast<void *>(values_),
                       static_cast<void *>(info_), static_cast<void *>(work_)})
      if (data != nullptr) m_.free(data);
    m_.sync();
    EXPECT_EQ(cusolverDnDestroy(handle_), CUSOLVER_STATUS_SUCCESS);
  }
  void write(const std::vector<float> &x) {
    ASSERT_EQ(cudaMemcpyAsync(a_, x.data(), x.size() * 4, cudaMemcpyHostToDevice, m_.stream),
              cudaSuccess);
    m_.sync();
  }
  cusolverStatus_t eigen(int n, int lda, int lwork) {
    return cusolverDnSsyevd(handle_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER, n, a_, lda,
                            values_, work_, lwork, info_);
  }
  Memory m_;
  cusolverDnHandle_t handle_ = nullptr;
  float *a_ = nullptr, *values_ = nullptr, *work_ = nullptr;
  int *info_ = nullptr;
};

TEST_F(Cusolver, EigenvectorsInColumnsFromTheLowerTriangle) {
  int lwork = 0;
  ASSERT_EQ(cusolverDnSsyevd_bufferSize(handle_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER,
                                        2, a_, 3, values_, &lwork),
            CUSOLVER_STATUS_SUCCESS);
  work_ = m_.make<float>(static_cast<std::size_t>(lwork));
  write({2, 1, 9, -7, 2, 9}); /* [2 1; 1 2] with a leading dimension of 3; -7 is not read */
  ASSERT_EQ(eigen(2, 3, lwork), CUSOLVER_STATUS_SUCCESS);
  const std::vector<float> values = m_.read(values_, 2), v = m_.read(a_, 6);
  EXPECT_NEAR(values[0], 1.0f, 1e-6f);
  EXPECT_NEAR(values[1], 3.0f, 1e-6f);
  EXPECT_NEAR(v[0], -v[1], 1e-6f) << "the first column belongs to 1";
  EXPECT_NEAR(v[3], v[4], 1e-6f);
  EXPECT_NEAR(v[3] * v[3], 0.5f, 1e-6f);
  EXPECT_EQ(v[2], 9.0f) << "beside the columns";
  EXPECT_EQ(m_.read(info_, 1)[0], 0);
  EXPECT_EQ(cudasim::complaints(), "");
}

TEST_F(Cusolver, IsStrictAboutLeadingDimensionsWorkspacesAndPlaces) {
  int lwork = 0;
  ASSERT_EQ(cusolverDnSsyevd_bufferSize(handle_, CUSOLVER_EIG_MODE_VECTOR, CUBLAS_FILL_MODE_LOWER,
                                        3, a_, 3, values_, &lwork),
            CUSOLVER_STATUS_SUCCESS);
  work_ = m_.make<float>(static_cast<std::size_t>(lwork));
  write(std::vector<float>(12, 0.0f));
  EXPECT_EQ(eigen(3, 2, lwork), CUSOLVER_STATUS_INVALID_VALUE) << "leading dimension";
  EXPECT_EQ(eigen(3, 3, lwork - 1), CUSOLVER_STATUS_INVALID_VALUE) << "workspace";
  EXPECT_EQ(eigen(-1, 3, lwork), CUSOLVER_STATUS_INVALID_VALUE);
  EXPECT_EQ(cusolverDnSgeqrf(handle_, 3, 3, a_, 2, values_, work_, lwork, info_),
            CUSOLVER_STATUS_INVALID_VALUE);
  EXPECT_EQ(cusolverDnSgeqrf(handle_, 3, 3, a_, 3, values_, work_, 1, info_),
            CUSOLVER_STATUS_INVALID_VALUE);
  EXPECT_EQ(cusolverDnSorgqr(handle_, 3, 3, 3, a_, 2, values_, work_, lwork, info_),
            CUSOLVER_STATUS_INVALID_VALUE);
  EXPECT_EQ(cusolverDnSorgqr(handle_, 3, 3, 3, a_, 3, values_, work_, 1, info_),
            CUSOLVER_STATUS_INVALID_VALUE);
  EXPECT_EQ(cudasim::complaints(), "");
  /* Legal for cuSOLVER, but beyond the memory. */
  EXPECT_EQ(eigen(3, 5, lwork), CUSOLVER_STATUS_EXECUTION_FAILED);
  EXPECT_NE(cudasim::complaints().find("cusolverDnSsyevd"), std::string::npos);
  EXPECT_EQ(eigen(3, 3, lwork + 1000), CUSOLVER_STATUS_EXECUTION_FAILED);
  EXPECT_NE(cudasim::complaints().find("cusolverDnSsyevd"), std::string::npos);
  write({1, NAN, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0});
  ASSERT_EQ(eigen(3, 3, lwork), CUSOLVER_STATUS_SUCCESS);
  EXPECT_EQ(m_.read(info_, 1)[0], 3);
  EXPECT_NE(cudasim::complaints().find("not finite"), std::string::npos);
}

TEST_F(Cusolver, ReflectionsMakeTheColumnsOrthonormal) {
  const std::vector<float> x = {3, 4, 0, 1, 2, 2, 5, 5, 1};
  work_ = m_.make<float>(200);
  write(x);
  ASSERT_EQ(cusolverDnSgeqrf(handle_, 3, 3, a_, 3, values_, work_, 200, info_),
            CUSOLVER_STATUS_SUCCESS);
  const std::vector<float> r = m_.read(a_, 9);
  ASSERT_EQ(cusolverDnSorgqr(handle_, 3, 3, 3, a_, 3, values_, work_, 200, info_),
            CUSOLVER_STATUS_SUCCESS);
  const std::vector<float> q = m_.read(a_, 9);
  EXPECT_NEAR(std::fabs(r[0]), 5.0f, 1e-6f);
  for (std::size_t i = 0; i < 3; ++i)
    for (std::size_t j = 0; j < 3; ++j) {
      float product = 0.0f, dot = 0.0f;
      for (std::size_t k = 0; k < 3; ++k) {
        product += k <= j ? q[k * 3 + i] * r[j * 3 + k] : 0.0f;
        dot += q[i * 3 + k] * q[j * 3 + k];
      }
      EXPECT_NEAR(product, x[j * 3 + i], 3e-6f);
      EXPECT_NEAR(dot, i == j ? 1.0f : 0.0f, 1e-6f);
    }
  EXPECT_EQ(cudasim::complaints(), "");
}

} // namespace
