/* SPDX-License-Identifier: MIT */
/* The CUDA runtime of the double: memory, streams, events, host functions, graphs. */
#include "cudasim.h"
#include "detail.h"

#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#if CUDASIM_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace cudasim {
namespace {

/* ---- the machine ---- */

struct Op {
  std::function<void()> work;
};

struct Graph {
  std::vector<std::shared_ptr<Op>> ops;
  std::thread::id thread; /* that captures it */
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  bool broken = false;
};

struct Stream {
  int device = 0;
  std::deque<std::shared_ptr<Op>> ops;
  int64_t submitted = 0, done = 0;
  bool ending = false;
  std::shared_ptr<Graph> capture;
  bool capture_origin = false;
  std::condition_variable work;
};

/* Shared with the work that refers to it: an event may be destroyed while it is on its way. */
struct EventState {
  uint64_t recorded = 0, passed = 0;
  std::shared_ptr<Graph> capture; /* recorded last in a stream that captures */
  char edge[8] = {0};             /* of the last records, one each */
};

struct Pool {
  int device = 0;
};

struct Allocation {
  std::size_t nbytes = 0, mapped_nbytes = 0;
  void *mapped = nullptr;
  Where kind = Where::kUnknown;
  int device = 0;
  bool freed = false; /* on its way */
};

const std::size_t kGuardNbytes = 4096; /* before and behind; the rest of the last page too */
const unsigned char kGuard = 0xcd, kFresh = 0xa5, kStale = 0x5a;

struct Machine {
  std::mutex mutex;
  std::condition_variable progress;
  std::mutex host_functions; /* one at a time in the whole process */
  std::string complaints;
  std::map<uintptr_t, Allocation> allocations;
  std::set<Stream *> streams;
  int stream_threads = 0;
  std::size_t used_nbytes = 0, limit_nbytes = std::size_t(1) << 30;
  int device_count = 1;
  bool driver = true, image = true, one_bus = false;
  int64_t calls_until_fault = -1;
  bool fault_delivered = false;
  int protection_key = -1;
};

/* Never destroyed: streams may outlive static destructors. */
Machine &machine() {
  static Machine *m = [] {
    Machine *made = new Machine;
#if defined(PKEY_DISABLE_ACCESS)
    made->protection_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
#endif
    return made;
  }();
  return *m;
}

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local bool in_host_function = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

void device_access(bool allowed) {
#if defined(PKEY_DISABLE_ACCESS)
  const int key = machine().protection_key;
  if (key >= 0) (void)pkey_set(key, allowed ? 0 : PKEY_DISABLE_ACCESS);
#else
  (void)allowed;
#endif
}

void complain_locked(const std::string &what) {
  machine().complaints += what + "\n";
}

/* Every fallible call begins with it. */
cudaError_t enter() {
  if (in_host_function) {
    complain("a host function called CUDA");
    return cudaErrorNotPermitted;
  }
  return machine().driver ? cudaSuccess : cudaErrorInsufficientDriver;
}

#define CUDASIM_ENTER(fault)                          \
  do {                                                \
    const cudaError_t entered = enter();              \
    if (entered != cudaSuccess) return note(entered); \
    if (delivers_fault()) return note(fault);         \
  } while (0)

/* ---- streams ---- */

void stream_main(Stream *stream) {
  Machine &m = machine();
  device_access(true);
  for (;;) {
    std::shared_ptr<Op> op;
    {
      Quiet quiet;
      std::unique_lock<std::mutex> lock(m.mutex);
      while (stream->ops.empty() && !stream->ending)
        stream->work.wait(lock);
      if (stream->ops.empty()) break;
      op = stream->ops.front();
      stream->ops.pop_front();
    }
    acquire(op.get());
    op->work();
    release(&stream->done); /* for whoever synchronizes with the stream */
    {
      Quiet quiet;
      std::lock_guard<std::mutex> lock(m.mutex);
      op.reset();
      ++stream->done;
      m.progress.notify_all();
    }
  }
  Quiet quiet;
  std::lock_guard<std::mutex> lock(m.mutex);
  delete stream;
  --m.stream_threads;
  m.progress.notify_all();
}

Stream *stream_of(cudaStream_t handle) {
  return reinterpret_cast<Stream *>(handle);
}

/* The default streams synchronize with others: nobody here may use them. */
cudaError_t check_stream(cudaStream_t handle) {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.streams.count(stream_of(handle)) != 0) return cudaSuccess;
  complain_locked(handle == nullptr ? "the default stream was used"
                                    : "a stream was used that does not exist");
  return cudaErrorInvalidResourceHandle;
}

cudaError_t put(cudaStream_t handle, std::function<void()> work) {
  Machine &m = machine();
  Stream *stream = stream_of(handle);
  std::shared_ptr<Op> op = std::make_shared<Op>();
  op->work = std::move(work);
  release(op.get());
  Quiet quiet;
  std::lock_guard<std::mutex> lock(m.mutex);
  if (stream->capture != nullptr) {
    stream->capture->ops.push_back(std::move(op));
    return cudaSuccess;
  }
  stream->ops.push_back(std::move(op));
  ++stream->submitted;
  stream->work.notify_one();
  return cudaSuccess;
}

/* ---- memory ---- */

std::size_t pages(std::size_t nbytes) {
  return (nbytes + 4095) / 4096 * 4096;
}

void *data_of(const Allocation &a) {
  return static_cast<char *>(a.mapped) + kGuardNbytes;
}

/* Maps memory with its guards; the contents of the middle come later, in stream order. */
cudaError_t map_memory(std::size_t nbytes, Where kind, int device, void **out) {
  Machine &m = machine();
  Allocation a;
  a.nbytes = nbytes;
  a.mapped_nbytes = pages(nbytes) + 2 * kGuardNbytes;
  a.kind = kind;
  a.device = device;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(m.mutex);
    if (kind == Where::kDevice &&
        (nbytes > m.limit_nbytes || m.used_nbytes > m.limit_nbytes - nbytes))
      return cudaErrorMemoryAllocation;
    if (kind == Where::kDevice) m.used_nbytes += nbytes;
  }
  a.mapped =
      mmap(nullptr, a.mapped_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (a.mapped == MAP_FAILED) return cudaErrorMemoryAllocation;
  {
    Quiet quiet;
    std::memset(a.mapped, kGuard, kGuardNbytes);
    std::memset(static_cast<char *>(data_of(a)) + nbytes, kGuard,
                pages(nbytes) - nbytes + kGuardNbytes);
#if defined(PKEY_DISABLE_ACCESS)
    if (kind == Where::kDevice && m.protection_key >= 0)
      (void)pkey_mprotect(a.mapped, a.mapped_nbytes, PROT_READ | PROT_WRITE, m.protection_key);
#endif
    std::lock_guard<std::mutex> lock(m.mutex);
    m.allocations[reinterpret_cast<uintptr_t>(data_of(a))] = a;
  }
#if CUDASIM_ASAN
  ASAN_POISON_MEMORY_REGION(a.mapped, kGuardNbytes);
  ASAN_POISON_MEMORY_REGION(static_cast<char *>(data_of(a)) + nbytes,
                            pages(nbytes) - nbytes + kGuardNbytes);
#endif
  *out = data_of(a);
  return cudaSuccess;
}

/* Where device memory may be touched. */
void unmap_memory(const Allocation &a) {
  Machine &m = machine();
  const unsigned char *begin = static_cast<const unsigned char *>(a.mapped);
  const unsigned char *data = begin + kGuardNbytes, *end = begin + a.mapped_nbytes;
#if CUDASIM_ASAN
  ASAN_UNPOISON_MEMORY_REGION(a.mapped, a.mapped_nbytes);
#endif
  Quiet quiet;
  std::string wrong;
  for (const unsigned char *p = begin; p < data; ++p)
    if (*p != kGuard && wrong.empty())
      wrong = "memory of " + std::to_string(a.nbytes) + " bytes was written " +
              std::to_string(data - p) + " bytes before its beginning";
  for (const unsigned char *p = data + a.nbytes; p < end; ++p)
    if (*p != kGuard && wrong.empty())
      wrong = "memory of " + std::to_string(a.nbytes) + " bytes was written " +
              std::to_string(p - (data + a.nbytes)) + " bytes behind its end";
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    m.allocations.erase(reinterpret_cast<uintptr_t>(data));
    if (a.kind == Where::kDevice) m.used_nbytes -= a.nbytes;
    if (!wrong.empty()) complain_locked(wrong);
  }
  (void)munmap(a.mapped, a.mapped_nbytes); /* last: the addresses may come back at once */
}

/* The allocation that starts there, marked as freed. */
bool take(void *address, Where kind, Allocation *out) {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  auto found = m.allocations.find(reinterpret_cast<uintptr_t>(address));
  if (found == m.allocations.end() || found->second.kind != kind || found->second.freed) {
    complain_locked("memory was freed that is not allocated, or not of that kind");
    return false;
  }
  found->second.freed = true;
  *out = found->second;
  return true;
}

/* 0 unless the whole range is legal for that end of a copy. */
bool end_fits(const void *address, std::size_t nbytes, bool device) {
  std::size_t left = 0;
  const Where at = where(address, &left);
  if (at == Where::kUnknown) return !device;
  return (at == Where::kDevice) == device && left >= nbytes;
}

bool copy_fits(const void *dst, const void *src, std::size_t nbytes, cudaMemcpyKind kind) {
  const bool dst_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
  const bool src_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
  if (kind == cudaMemcpyDefault ||
      (end_fits(dst, nbytes, dst_device) && end_fits(src, nbytes, src_device)))
    return true;
  complain("a copy's direction or size does not fit its memory");
  return false;
}

} // namespace

/* ---- for the other parts ---- */

void complain(const std::string &what) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  complain_locked(what);
}

bool delivers_fault() {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.calls_until_fault < 0 || m.calls_until_fault-- != 0) return false;
  m.fault_delivered = true;
  return true;
}

cudaError_t note(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

bool kernel_image() {
  return machine().image;
}

cudaError_t enqueue(cudaStream_t stream, std::function<void()> work) {
  cudaError_t error = enter();
  if (error == cudaSuccess) error = check_stream(stream);
  return error == cudaSuccess ? put(stream, std::move(work)) : error;
}

bool captures(cudaStream_t handle) {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  return m.streams.count(stream_of(handle)) != 0 && stream_of(handle)->capture != nullptr;
}

bool device_of(cudaStream_t handle, int *device) {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  if (m.streams.count(stream_of(handle)) == 0) return false;
  *device = stream_of(handle)->device;
  return true;
}

int current_device_now() {
  return current_device;
}

bool host_function_runs() {
  return in_host_function;
}

Where where(const void *address, std::size_t *left) {
  Quiet quiet;
  Machine &m = machine();
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(m.mutex);
  auto next = m.allocations.upper_bound(at);
  *left = 0;
  if (next == m.allocations.begin()) return Where::kUnknown;
  const Allocation &a = std::prev(next)->second;
  if (at - std::prev(next)->first > a.nbytes || a.freed) return Where::kUnknown;
  *left = a.nbytes - (at - std::prev(next)->first);
  return a.kind;
}

namespace {
/* Of an address that `where` has found. */
int device_holding(const void *address) {
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  return std::prev(m.allocations.upper_bound(reinterpret_cast<uintptr_t>(address)))->second.device;
}
} // namespace

bool in_device(const char *what, const void *address, std::size_t nbytes) {
  std::size_t left = 0;
  if (nbytes == 0) return true;
  if (where(address, &left) == Where::kDevice && left >= nbytes) return true;
  complain(std::string(what) + ": " + std::to_string(nbytes) +
           " bytes do not lie in one allocation of device memory");
  return false;
}

/* ---- for tests ---- */

std::string complaints() {
  Quiet quiet;
  Machine &m = machine();
  std::unique_lock<std::mutex> lock(m.mutex);
  while (m.stream_threads > static_cast<int>(m.streams.size()))
    m.progress.wait(lock);
  std::string out;
  out.swap(m.complaints);
  return out;
}

void fail_at(int64_t n) {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  machine().calls_until_fault = n;
  machine().fault_delivered = false;
}

bool failed() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  return machine().fault_delivered;
}

void set_driver(bool present) {
  machine().driver = present;
}
void set_device_count(int count) {
  machine().device_count = count;
}
void set_one_bus(bool on) {
  machine().one_bus = on;
}
void set_kernel_image(bool present) {
  machine().image = present;
}
void set_memory_limit(std::size_t nbytes) {
  machine().limit_nbytes = nbytes;
}
void reset_machine() {
  set_driver(true);
  set_device_count(1);
  set_one_bus(false);
  set_kernel_image(true);
  set_memory_limit(std::size_t(1) << 30);
}

std::size_t device_nbytes() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  return machine().used_nbytes;
}
std::size_t allocation_count() {
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  return machine().allocations.size();
}
bool device_memory_protected() {
  return machine().protection_key >= 0;
}

} // namespace cudasim

using namespace cudasim;

struct CUevent_st {
  int device;
  std::shared_ptr<EventState> state;
};

struct CUgraph_st {
  std::shared_ptr<Graph> graph;
};

extern "C" {

/* ---- devices, errors ---- */

cudaError_t cudaGetDeviceCount(int *count) {
  CUDASIM_ENTER(cudaErrorUnknown);
  *count = machine().device_count;
  return note(*count > 0 ? cudaSuccess : cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device) {
  CUDASIM_ENTER(cudaErrorUnknown);
  if (device < 0 || device >= machine().device_count) return note(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int nbytes, int device) {
  CUDASIM_ENTER(cudaErrorUnknown);
  if (device < 0 || device >= machine().device_count) return note(cudaErrorInvalidDevice);
  std::snprintf(out, static_cast<std::size_t>(nbytes), "0000:%02x:00.0",
                machine().one_bus ? 7 : device + 16);
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device) {
  CUDASIM_ENTER(cudaErrorUnknown);
  *device = current_device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
  CUDASIM_ENTER(cudaErrorUnknown);
  if (device < 0 || device >= machine().device_count) return note(cudaErrorInvalidDevice);
  switch (attribute) {
  case cudaDevAttrMultiProcessorCount: *value = 1; return cudaSuccess;
  case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
  case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
  case cudaDevAttrMemoryPoolsSupported: *value = 1; return cudaSuccess;
  default:
    complain("an attribute was asked for that the double does not know");
    return note(cudaErrorInvalidValue);
  }
}

cudaError_t cudaGetLastError(void) {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) {
  return last_error;
}

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "cudaSuccess";
  case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
  case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
  case cudaErrorInsufficientDriver: return "cudaErrorInsufficientDriver";
  case cudaErrorNoDevice: return "cudaErrorNoDevice";
  case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
  case cudaErrorNoKernelImageForDevice: return "cudaErrorNoKernelImageForDevice";
  case cudaErrorInvalidConfiguration: return "cudaErrorInvalidConfiguration";
  case cudaErrorInvalidResourceHandle: return "cudaErrorInvalidResourceHandle";
  case cudaErrorLaunchOutOfResources: return "cudaErrorLaunchOutOfResources";
  case cudaErrorNotPermitted: return "cudaErrorNotPermitted";
  case cudaErrorNotReady: return "cudaErrorNotReady";
  case cudaErrorStreamCaptureInvalidated: return "cudaErrorStreamCaptureInvalidated";
  case cudaErrorStreamCaptureUnsupported: return "cudaErrorStreamCaptureUnsupported";
  default: return "cudaErrorUnknown";
  }
}

const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error of the host double";
}

/* ---- memory ---- */

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  if (properties->allocType != cudaMemAllocationTypePinned ||
      properties->location.type != cudaMemLocationTypeDevice)
    return note(cudaErrorInvalidValue);
  Pool *made = new Pool;
  made->device = properties->location.id;
  *pool = reinterpret_cast<cudaMemPool_t>(made);
  return cudaSuccess;
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, cudaMemPoolAttr attribute, void *value) {
  CUDASIM_ENTER(cudaErrorUnknown);
  (void)value;
  return note(pool != nullptr && attribute == cudaMemPoolAttrReleaseThreshold
                  ? cudaSuccess
                  : cudaErrorInvalidValue);
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool) {
  const cudaError_t entered = enter();
  if (entered != cudaSuccess) return note(entered);
  delete reinterpret_cast<Pool *>(pool);
  return cudaSuccess;
}

cudaError_t cudaMallocFromPoolAsync(void **out, size_t nbytes, cudaMemPool_t pool,
                                    cudaStream_t stream) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  cudaError_t error = pool == nullptr ? cudaErrorInvalidValue : check_stream(stream);
  if (error == cudaSuccess)
    error = map_memory(nbytes, Where::kDevice, reinterpret_cast<Pool *>(pool)->device, out);
  if (error != cudaSuccess) return note(error);
  void *data = *out;
  /* Whoever uses it without the stream's order races with this. */
  return note(put(stream, [data, nbytes] { std::memset(data, kFresh, nbytes); }));
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
  Allocation a;
  cudaError_t error = enter();
  if (error == cudaSuccess) error = check_stream(stream);
  if (error == cudaSuccess && !take(address, Where::kDevice, &a)) error = cudaErrorInvalidValue;
  if (error == cudaSuccess && nccl_holds(address, a.nbytes))
    complain("memory was freed that is still registered with NCCL");
  if (error != cudaSuccess) return note(error);
  return note(put(stream, [a] {
    std::memset(data_of(a), kStale, a.nbytes);
    unmap_memory(a);
  }));
}

cudaError_t cudaHostAlloc(void **out, size_t nbytes, unsigned flags) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  (void)flags;
  const cudaError_t error = map_memory(nbytes, Where::kPinned, current_device, out);
  if (error == cudaSuccess) std::memset(*out, kFresh, nbytes);
  return note(error);
}

cudaError_t cudaFreeHost(void *address) {
  Allocation a;
  const cudaError_t entered = enter();
  if (entered != cudaSuccess) return note(entered);
  if (!take(address, Where::kPinned, &a)) return note(cudaErrorInvalidValue);
  unmap_memory(a);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes,
                                     const void *address) {
  CUDASIM_ENTER(cudaErrorUnknown);
  std::size_t left = 0;
  const Where at = where(address, &left);
  std::memset(attributes, 0, sizeof(*attributes));
  attributes->type = at == Where::kDevice   ? cudaMemoryTypeDevice
                     : at == Where::kPinned ? cudaMemoryTypeHost
                                            : cudaMemoryTypeUnregistered;
  if (at != Where::kUnknown) attributes->device = device_holding(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t nbytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  CUDASIM_ENTER(cudaErrorUnknown);
  if (!copy_fits(dst, src, nbytes, kind)) return note(cudaErrorInvalidValue);
  return note(enqueue(stream, [dst, src, nbytes] { std::memcpy(dst, src, nbytes); }));
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t nbytes, cudaStream_t stream) {
  CUDASIM_ENTER(cudaErrorUnknown);
  if (!in_device("cudaMemsetAsync", dst, nbytes)) return note(cudaErrorInvalidValue);
  return note(enqueue(stream, [dst, value, nbytes] { std::memset(dst, value, nbytes); }));
}

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  if (flags != cudaStreamNonBlocking) complain("a stream that waits for the default stream");
  Quiet quiet;
  Machine &m = machine();
  Stream *stream = new Stream;
  stream->device = current_device;
  {
    std::lock_guard<std::mutex> lock(m.mutex);
    m.streams.insert(stream);
    ++m.stream_threads;
  }
  std::thread(stream_main, stream).detach();
  *out = reinterpret_cast<cudaStream_t>(stream);
  return cudaSuccess;
}

/* As CUDA: returns at once, and the stream ends when its work is done. */
cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  cudaError_t error = enter();
  if (error == cudaSuccess) error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Quiet quiet;
  Machine &m = machine();
  Stream *stream = stream_of(handle);
  std::lock_guard<std::mutex> lock(m.mutex);
  m.streams.erase(stream);
  stream->ending = true;
  stream->work.notify_one();
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Machine &m = machine();
  Stream *stream = stream_of(handle);
  if (stream->capture != nullptr) return note(cudaErrorStreamCaptureUnsupported);
  {
    Quiet quiet;
    std::unique_lock<std::mutex> lock(m.mutex);
    const int64_t target = stream->submitted;
    while (stream->done < target)
      m.progress.wait(lock);
  }
  acquire(&stream->done);
  return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int *device) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error == cudaSuccess) *device = stream_of(handle)->device;
  return note(error);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *argument) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  return note(enqueue(stream, [function, argument] {
    Machine &m = machine();
    {
      Quiet quiet;
      m.host_functions.lock();
    }
    device_access(false);
    in_host_function = true;
    function(argument);
    in_host_function = false;
    device_access(true);
    Quiet quiet;
    m.host_functions.unlock();
  }));
}

/* ---- events ---- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  if ((flags & cudaEventDisableTiming) == 0) complain("an event with timing, which costs");
  CUevent_st *event = new CUevent_st;
  event->device = current_device;
  event->state = std::make_shared<EventState>();
  *out = event;
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const cudaError_t entered = enter();
  if (entered != cudaSuccess) return note(entered);
  Quiet quiet;
  delete event;
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Stream *stream = stream_of(handle);
  if (event->device != stream->device) return note(cudaErrorInvalidResourceHandle);
  std::shared_ptr<EventState> state = event->state;
  uint64_t version = 0;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(machine().mutex);
    state->capture = stream->capture;
    if (stream->capture != nullptr) return cudaSuccess;
    version = ++state->recorded;
  }
  return note(put(handle, [state, version] {
    release(&state->edge[version % 8]);
    Quiet quiet;
    std::lock_guard<std::mutex> lock(machine().mutex);
    if (state->passed < version) state->passed = version;
    machine().progress.notify_all();
  }));
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned flags) {
  CUDASIM_ENTER(cudaErrorUnknown);
  (void)flags;
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Stream *stream = stream_of(handle);
  std::shared_ptr<EventState> state = event->state;
  uint64_t version = 0;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(machine().mutex);
    if (state->capture != nullptr) { /* the stream joins the capture, or belongs to it already */
      if (stream->capture == nullptr) stream->capture = state->capture;
      return cudaSuccess;
    }
    if (stream->capture != nullptr && state->recorded > state->passed)
      return note(cudaErrorStreamCaptureIsolation);
    version = state->recorded;
  }
  return note(put(handle, [state, version] {
    {
      Quiet quiet;
      std::unique_lock<std::mutex> lock(machine().mutex);
      while (state->passed < version)
        machine().progress.wait(lock);
    }
    if (version > 0) acquire(&state->edge[version % 8]);
  }));
}

/* With the lock: a call that captures forbid, their own thread's or any other's, breaks them. */
static bool breaks_captures() {
  bool breaks = false;
  for (Stream *stream : machine().streams) {
    if (stream->capture == nullptr || !stream->capture_origin) continue;
    Graph &graph = *stream->capture;
    const bool own = graph.thread == std::this_thread::get_id();
    if (capture_mode == cudaStreamCaptureModeRelaxed) continue;
    if (own ? graph.mode == cudaStreamCaptureModeRelaxed
            : graph.mode != cudaStreamCaptureModeGlobal ||
                  capture_mode != cudaStreamCaptureModeGlobal)
      continue;
    graph.broken = breaks = true;
  }
  return breaks;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  CUDASIM_ENTER(cudaErrorUnknown);
  std::shared_ptr<EventState> state = event->state;
  uint64_t version = 0;
  {
    Quiet quiet;
    std::lock_guard<std::mutex> lock(machine().mutex);
    if (breaks_captures()) return note(cudaErrorStreamCaptureUnsupported);
    if (state->passed < state->recorded) return note(cudaErrorNotReady); /* and stays, as in CUDA */
    version = state->recorded;
  }
  if (version > 0) acquire(&state->edge[version % 8]);
  return cudaSuccess;
}

/* ---- graphs: work in the order in which it was captured ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Quiet quiet;
  std::lock_guard<std::mutex> lock(machine().mutex);
  stream_of(handle)->capture = std::make_shared<Graph>();
  stream_of(handle)->capture->thread = std::this_thread::get_id();
  stream_of(handle)->capture->mode = mode;
  stream_of(handle)->capture_origin = true;
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
  std::swap(capture_mode, *mode);
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  Quiet quiet;
  Machine &m = machine();
  std::lock_guard<std::mutex> lock(m.mutex);
  Stream *stream = stream_of(handle);
  if (stream->capture == nullptr || !stream->capture_origin) return note(cudaErrorIllegalState);
  const std::shared_ptr<Graph> graph = stream->capture;
  for (Stream *other : m.streams)
    if (other->capture == graph) other->capture.reset();
  stream->capture_origin = false;
  *out = nullptr;
  if (graph->broken) return note(cudaErrorStreamCaptureInvalidated);
  *out = new CUgraph_st{graph};
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus *status) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const cudaError_t error = check_stream(handle);
  if (error != cudaSuccess) return note(error);
  *status = stream_of(handle)->capture != nullptr ? cudaStreamCaptureStatusActive
                                                  : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph,
                                 unsigned long long flags) {
  CUDASIM_ENTER(cudaErrorMemoryAllocation);
  (void)flags;
  *out = reinterpret_cast<cudaGraphExec_t>(new CUgraph_st{graph->graph});
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  CUDASIM_ENTER(cudaErrorUnknown);
  const std::shared_ptr<Graph> graph = reinterpret_cast<CUgraph_st *>(exec)->graph;
  return note(enqueue(stream, [graph] {
    for (const std::shared_ptr<Op> &op : graph->ops) {
      acquire(op.get());
      op->work();
    }
  }));
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  delete reinterpret_cast<CUgraph_st *>(exec);
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

} // extern "C"
