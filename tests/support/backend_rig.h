/* SPDX-License-Identifier: MIT */
/*
 * backend_rig.h: a backend of each kind that this build has, ready for tests: context, queue,
 * event, and typed buffers in the backend's memory.
 *
 *   class Sums : public ::testing::TestWithParam<test::RigKind> {};
 *   TEST_P(Sums, Add) {
 *     test::Rig rig(GetParam());
 *     test::Buffer<float> x(&rig, values), y(&rig, 100);
 *     ASSERT_EQ(rig.ops->copy(rig.self, rig.queue, ...), MFSDP_OK);
 *     ASSERT_EQ(rig.sync(), MFSDP_OK) << rig.message();
 *     EXPECT_EQ(y.read(), values);
 *   }
 *   INSTANTIATE_TEST_SUITE_P(Kinds, Sums, ::testing::ValuesIn(test::rig_kinds()), test::rig_name);
 *
 * A Buffer may start at any element offset of its allocation, so that tests see every alignment;
 * the allocator's red zones show writes beyond either end. The rig fails its test if anything
 * leaks.
 */
#ifndef MFSDP_TESTS_SUPPORT_BACKEND_RIG_H
#define MFSDP_TESTS_SUPPORT_BACKEND_RIG_H

#include "fault_allocator.h"

#include "tests/cudasim/rig.h"

#include "mfsdp/host/backend_host.h"
#if defined(MFSDP_EXAMPLE_CBLAS)
#if MFSDP_EXAMPLE_CBLAS
#include "mfsdp/host/math_cblas.h"
#endif
#endif
#if defined(MFSDP_EXAMPLE_LAPACKE)
#if MFSDP_EXAMPLE_LAPACKE
#include "mfsdp/host/math_lapacke.h"
#endif
#endif

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace test {

struct RigKind {
  const char *name;
  const mfsdp_host_math *math;
  mfsdp_host_queue_kind queue_kind;
  bool cuda; /* the CUDA backend on the host double; math and queue_kind play no part */
};

/* The host backend in its kinds. */
inline std::vector<RigKind> rig_kinds() {
  std::vector<RigKind> kinds;
  kinds.push_back({"loops", mfsdp_host_math_loops(), MFSDP_HOST_QUEUE_INLINE, false});
  kinds.push_back({"worker", mfsdp_host_math_loops(), MFSDP_HOST_QUEUE_WORKER, false});
#if defined(MFSDP_EXAMPLE_CBLAS)
#if MFSDP_EXAMPLE_CBLAS
  kinds.push_back({"cblas", mfsdp_host_math_cblas(), MFSDP_HOST_QUEUE_INLINE, false});
#endif
#endif
  return kinds;
}

/* Every backend. */
inline std::vector<RigKind> backend_kinds() {
  std::vector<RigKind> kinds = rig_kinds();
  kinds.push_back({"cuda", nullptr, MFSDP_HOST_QUEUE_WORKER, true});
  return kinds;
}

inline std::string rig_name(const ::testing::TestParamInfo<RigKind> &info) {
  return info.param.name;
}

/* NULL: this build has none, and tests that need one are skipped. */
inline const mfsdp_host_lapack *rig_lapack() {
#if defined(MFSDP_EXAMPLE_LAPACKE)
#if MFSDP_EXAMPLE_LAPACKE
  return mfsdp_host_lapacke();
#endif
#endif
  return nullptr;
}

class Rig {
public:
  explicit Rig(const RigKind &kind) {
    mfsdp_context_desc context_desc = mfsdp_context_desc_default();
    context_desc.allocator = memory.allocator();
    EXPECT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
    if (kind.cuda) {
      EXPECT_EQ(cuda_rig_create(&context, &cuda, &backend), MFSDP_OK) << message();
    } else {
      mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
      desc.math = kind.math;
      desc.lapack = rig_lapack();
      desc.queue_kind = kind.queue_kind;
      EXPECT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_OK) << message();
      backend = mfsdp_host_backend_get(host);
    }
    ops = backend->ops;
    self = backend->self;
    EXPECT_EQ(ops->queue_create(self, &context, "test", &queue), MFSDP_OK) << message();
    EXPECT_EQ(ops->event_create(self, &context, &event), MFSDP_OK) << message();
  }
  Rig(const Rig &) = delete;
  Rig &operator=(const Rig &) = delete;
  ~Rig() {
    ops->queue_destroy(self, &context, queue);
    ops->event_destroy(self, &context, event);
    EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK) << message();
    if (cuda != nullptr) {
      EXPECT_EQ(cuda_rig_destroy(&context, cuda), MFSDP_OK) << message();
      EXPECT_EQ(cuda_rig_complaints(), "");
    }
    EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK) << message();
    EXPECT_EQ(memory.live_count(), 0u);
    EXPECT_EQ(memory.complaints(), "");
  }

  /* Waits for all work of the queue; its error, if it failed. */
  mfsdp_status sync() {
    EXPECT_EQ(ops->event_record(self, queue, event), MFSDP_OK);
    return ops->event_wait(self, &context, event, 20000000);
  }
  /* Of DEVICE memory, which is no host's to touch, or another space. */
  template <class T>
  std::vector<T> read(const T *data, std::size_t count, mfsdp_space space = MFSDP_SPACE_DEVICE) {
    std::vector<T> values(count);
    EXPECT_EQ(
        ops->copy(self, queue, values.data(), MFSDP_SPACE_HOST, data, space, count * sizeof(T)),
        MFSDP_OK)
        << message();
    EXPECT_EQ(sync(), MFSDP_OK) << message();
    return values;
  }
  const char *message() const { return mfsdp_context_error(&context)->message; }
  /* A failed queue stays failed: tests go on with a new one. */
  void renew_queue() {
    ops->queue_destroy(self, &context, queue);
    EXPECT_EQ(ops->queue_create(self, &context, "test", &queue), MFSDP_OK) << message();
  }

  FaultAllocator memory;
  mfsdp_context context;
  mfsdp_host_backend *host = nullptr; /* or cuda */
  void *cuda = nullptr;
  const mfsdp_backend *backend = nullptr;
  const mfsdp_backend_ops *ops = nullptr;
  void *self = nullptr;
  mfsdp_queue *queue = nullptr;
  mfsdp_event *event = nullptr;
};

/* `count` elements in DEVICE memory (or where else they belong), starting `offset` elements into an
 * aligned allocation. */
template <class T> class Buffer {
public:
  Buffer(Rig *rig, std::size_t count, std::size_t offset = 0,
         mfsdp_space space = MFSDP_SPACE_DEVICE)
      : rig_(rig), count_(count), space_(space) {
    allocate(offset);
  }
  Buffer(Rig *rig, const std::vector<T> &values, std::size_t offset = 0)
      : rig_(rig), count_(values.size()), space_(MFSDP_SPACE_DEVICE) {
    allocate(offset);
    write(values);
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  ~Buffer() { mfsdp_buffer_free(&rig_->context, rig_->backend, &buffer_); }

  T *data() { return data_; }
  std::size_t count() const { return count_; }
  void write(const std::vector<T> &values) {
    copy(data_, space_, values.data(), MFSDP_SPACE_HOST, values.size());
  }
  /* Every byte of it, as the device sees it. */
  void fill(int byte) {
    EXPECT_EQ(rig_->ops->fill_bytes(rig_->self, rig_->queue, data_, byte, count_ * sizeof(T)),
              MFSDP_OK)
        << rig_->message();
  }
  std::vector<T> read() {
    std::vector<T> values(count_);
    copy(values.data(), MFSDP_SPACE_HOST, data_, space_, count_);
    return values;
  }

private:
  void allocate(std::size_t offset) {
    EXPECT_EQ(mfsdp_buffer_alloc(&rig_->context, rig_->backend, (count_ + offset) * sizeof(T),
                                 space_, MFSDP_MEMORY_STAGING, &buffer_),
              MFSDP_OK)
        << rig_->message();
    data_ = buffer_.data == nullptr ? nullptr : static_cast<T *>(buffer_.data) + offset;
  }
  void copy(T *dst, mfsdp_space dst_space, const T *src, mfsdp_space src_space, std::size_t count) {
    EXPECT_EQ(
        rig_->ops->copy(rig_->self, rig_->queue, dst, dst_space, src, src_space, count * sizeof(T)),
        MFSDP_OK)
        << rig_->message();
    EXPECT_EQ(rig_->sync(), MFSDP_OK) << rig_->message();
  }

  Rig *rig_;
  std::size_t count_;
  mfsdp_space space_;
  mfsdp_buffer buffer_;
  T *data_ = nullptr;
};

/* Equality of every bit: NaN equals itself, and -0 is not 0. */
template <class T> bool same_bits(const std::vector<T> &a, const std::vector<T> &b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

/* A small generator, so that inputs are the same everywhere. */
class Numbers {
public:
  explicit Numbers(uint64_t seed) : state_(seed * UINT64_C(0x9e3779b97f4a7c15) + 1) {}
  uint64_t bits() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ * UINT64_C(0x2545f4914f6cdd1d);
  }
  /* Uniform in [-1, 1). */
  double uniform() { return static_cast<double>(bits() >> 11) * std::ldexp(1.0, -52) - 1.0; }
  float real() { return static_cast<float>(uniform()); }
  /* An integer in [-limit, limit]. */
  float integer(int limit) {
    return static_cast<float>(static_cast<int>(bits() >> 33) % (2 * limit + 1) - limit);
  }
  std::vector<float> reals(std::size_t count) {
    std::vector<float> out(count);
    for (float &x : out)
      x = real();
    return out;
  }
  std::vector<float> integers(std::size_t count, int limit) {
    std::vector<float> out(count);
    for (float &x : out)
      x = integer(limit);
    return out;
  }

private:
  uint64_t state_;
};

} // namespace test

#endif // MFSDP_TESTS_SUPPORT_BACKEND_RIG_H
