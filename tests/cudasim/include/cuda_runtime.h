/* SPDX-License-Identifier: MIT */
/*
 * cuda_runtime.h: stands in for the toolkit's when a .cu file is compiled for the host double. What
 * device code needs: coordinates, barriers, shuffles, atomics, intrinsics of one rounding, launches.
 */
#ifndef MFSDP_TESTS_CUDASIM_CUDA_RUNTIME_H
#define MFSDP_TESTS_CUDASIM_CUDA_RUNTIME_H

#include "../detail.h"

#include <cmath>
#include <cstring>
#include <functional>

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __launch_bounds__
#define __global__
#define __device__
#define __host__
/* Blocks of a stream run one after another on its thread, and so do all threads of a block. */
#define __shared__ static thread_local
#define __launch_bounds__(...)

namespace cudasim {

struct Coordinates {
  uint3 thread, block;
  dim3 block_dim, grid_dim;
};
/* Of the thread that runs now. */
const Coordinates &self();

void sync_threads();
/* The value that lane `from` of the caller's warp brings; all lanes of the warp call it. */
uint64_t exchange(uint64_t value, unsigned from);

template <class T> T shuffle(T value, unsigned from) {
  uint64_t bits = 0;
  static_assert(sizeof(T) <= sizeof(bits), "shuffles carry 8 bytes");
  std::memcpy(&bits, &value, sizeof(T));
  bits = exchange(bits, from);
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}
inline unsigned lane() {
  const Coordinates &c = self();
  return (c.thread.x + c.block_dim.x * (c.thread.y + c.block_dim.y * c.thread.z)) % 32;
}

/* Every thread gets its own copy of the arguments, as on a device. */
template <class... Parameters>
void call_thread(void (*kernel)(Parameters...), Parameters... arguments) {
  kernel(arguments...);
}

} // namespace cudasim

/* Objects and no macros: launch descriptions have members of these names. */
#define CUDASIM_COORDINATE(name, member)                               \
  struct name##_of_thread {                                            \
    struct X {                                                         \
      operator unsigned() const { return ::cudasim::self().member.x; } \
    } x;                                                               \
    struct Y {                                                         \
      operator unsigned() const { return ::cudasim::self().member.y; } \
    } y;                                                               \
  };                                                                   \
  static const name##_of_thread name = {}
CUDASIM_COORDINATE(threadIdx, thread);
CUDASIM_COORDINATE(blockIdx, block);
CUDASIM_COORDINATE(blockDim, block_dim);
CUDASIM_COORDINATE(gridDim, grid_dim);
#undef CUDASIM_COORDINATE

inline void __syncthreads() {
  cudasim::sync_threads();
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int lanes) {
  if (mask != 0xffffffffu) cudasim::complain("__shfl_xor_sync: a part of a warp");
  return cudasim::shuffle(value, cudasim::lane() ^ static_cast<unsigned>(lanes));
}
inline void __threadfence_system() {}

inline unsigned long long atomicCAS(unsigned long long *address, unsigned long long expected,
                                    unsigned long long value) {
  __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return expected;
}

/* The project's flags keep these from being fused. */
inline float __fadd_rn(float a, float b) {
  return a + b;
}
inline float __fsub_rn(float a, float b) {
  return a - b;
}
inline float __fmul_rn(float a, float b) {
  return a * b;
}
inline float __fdiv_rn(float a, float b) {
  return a / b;
}
inline float __fsqrt_rn(float a) {
  return std::sqrt(a);
}
inline double __dadd_rn(double a, double b) {
  return a + b;
}
inline double __dsub_rn(double a, double b) {
  return a - b;
}
inline double __dmul_rn(double a, double b) {
  return a * b;
}
inline double __ddiv_rn(double a, double b) {
  return a / b;
}
inline double __dsqrt_rn(double a) {
  return std::sqrt(a);
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments &&...arguments) {
  const cudaError_t error = cudasim::check_launch(config);
  if (error != cudaSuccess) return cudasim::note(error);
  const dim3 grid = config->gridDim, block = config->blockDim;
  const std::function<void()> thread =
      std::bind(cudasim::call_thread<Parameters...>, kernel,
                static_cast<Parameters>(std::forward<Arguments>(arguments))...);
  return cudasim::note(cudasim::enqueue(
      config->stream, [grid, block, thread] { cudasim::run_grid(grid, block, thread); }));
}

template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, Kernel *kernel) {
  (void)kernel;
  if (cudasim::delivers_fault() || !cudasim::kernel_image())
    return cudasim::note(cudaErrorNoKernelImageForDevice);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->maxThreadsPerBlock = 1024;
  return cudasim::note(cudaSuccess);
}

#endif // MFSDP_TESTS_CUDASIM_CUDA_RUNTIME_H
