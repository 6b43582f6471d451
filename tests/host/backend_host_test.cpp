/* SPDX-License-Identifier: MIT */
/* Making and ending a host backend, and what each entry says about bad arguments. */
#include "mfsdp/host/backend_host.h"

#include "tests/support/backend_rig.h"

namespace {

using test::Buffer;
using test::Rig;
using test::RigKind;

class BackendHost : public ::testing::TestWithParam<RigKind> {};
INSTANTIATE_TEST_SUITE_P(Kinds, BackendHost, ::testing::ValuesIn(test::rig_kinds()),
                         test::rig_name);

mfsdp_space space_of(int value) {
  return static_cast<mfsdp_space>(value);
}
mfsdp_dtype dtype_of(int value) {
  return static_cast<mfsdp_dtype>(value);
}

TEST_P(BackendHost, HasEveryRequiredEntry) {
  Rig rig(GetParam());
  EXPECT_EQ(mfsdp_backend_check(&rig.context, rig.backend), MFSDP_OK) << rig.message();
  EXPECT_STREQ(rig.ops->name, "host");
  const int has = test::rig_lapack() != nullptr;
  EXPECT_EQ(MFSDP_HAS(rig.ops, eigh), has);
  EXPECT_EQ(MFSDP_HAS(rig.ops, eigh_workspace_nbytes), has);
  EXPECT_EQ(MFSDP_HAS(rig.ops, qr), has);
  EXPECT_EQ(MFSDP_HAS(rig.ops, qr_workspace_nbytes), has);
  EXPECT_TRUE(MFSDP_HAS(rig.ops, precondition));
}

TEST(BackendHostCreate, WithoutALapack) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  mfsdp_host_backend *host = nullptr;
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  ASSERT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_OK);
  const mfsdp_backend_ops *ops = mfsdp_host_backend_get(host)->ops;
  EXPECT_FALSE(MFSDP_HAS(ops, eigh) || MFSDP_HAS(ops, qr) ||
               MFSDP_HAS(ops, eigh_workspace_nbytes) || MFSDP_HAS(ops, qr_workspace_nbytes));
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

struct DescFault {
  void (*edit)(mfsdp_host_backend_desc *);
  const char *message;
};

TEST(BackendHostCreate, SaysWhatIsWrongWithADescription) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  static const mfsdp_host_math no_syrk = {sizeof(mfsdp_host_math), "half", mfsdp__math_loops_sgemm,
                                          nullptr, nullptr};
  const DescFault faults[] = {
      {[](mfsdp_host_backend_desc *d) { d->struct_nbytes -= 8; }, "desc.struct_nbytes is"},
      {[](mfsdp_host_backend_desc *d) { d->math = &no_syrk; }, "desc.math needs"},
      {[](mfsdp_host_backend_desc *d) { d->queue_kind = static_cast<mfsdp_host_queue_kind>(0); },
       "desc.queue_kind is 0"},
      {[](mfsdp_host_backend_desc *d) { d->queue_capacity = 0; }, "desc.queue_capacity is 0"},
      {[](mfsdp_host_backend_desc *d) { d->submit_timeout_us = 0; }, "desc.submit_timeout_us is 0"},
      {[](mfsdp_host_backend_desc *d) { d->math_threads = -1; }, "desc.math_threads is -1"},
  };
  mfsdp_host_backend *host = nullptr;
  for (const DescFault &fault : faults) {
    mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
    fault.edit(&desc);
    EXPECT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_E_ARGUMENT);
    EXPECT_EQ(host, nullptr);
    EXPECT_NE(std::string(mfsdp_context_error(&context)->message).find(fault.message),
              std::string::npos)
        << mfsdp_context_error(&context)->message;
  }
  EXPECT_EQ(mfsdp_host_backend_create(&context, nullptr, &host), MFSDP_E_ARGUMENT);
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  EXPECT_EQ(mfsdp_host_backend_create(&context, &desc, nullptr), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

TEST(BackendHostCreate, DestroyRefusesWhileQueuesOrEventsExist) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  const mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  mfsdp_host_backend *host = nullptr;
  ASSERT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_OK);
  const mfsdp_backend *b = mfsdp_host_backend_get(host);
  mfsdp_queue *queue;
  mfsdp_event *first, *second;
  ASSERT_EQ(b->ops->queue_create(b->self, &context, nullptr, &queue), MFSDP_OK);
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_E_STATE);
  EXPECT_NE(std::string(mfsdp_context_error(&context)->message).find("1 queues"),
            std::string::npos);
  ASSERT_EQ(b->ops->event_create(b->self, &context, &first), MFSDP_OK);
  ASSERT_EQ(b->ops->event_create(b->self, &context, &second), MFSDP_OK);
  b->ops->queue_destroy(b->self, &context, queue);
  b->ops->event_destroy(b->self, &context, first);
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_E_STATE);
  b->ops->event_destroy(b->self, &context, second);
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK);
  EXPECT_EQ(mfsdp_host_backend_destroy(&context, nullptr), MFSDP_OK);
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

int threads_seen = -1;
void remember_threads(int count) {
  threads_seen = count;
}

TEST(BackendHostCreate, PassesTheThreadCountToTheMathTable) {
  mfsdp_context context;
  const mfsdp_context_desc context_desc = mfsdp_context_desc_default();
  ASSERT_EQ(mfsdp_context_init(&context, &context_desc), MFSDP_OK);
  mfsdp_host_math math = *mfsdp_host_math_loops();
  math.set_threads = remember_threads;
  mfsdp_host_backend_desc desc = mfsdp_host_backend_desc_default();
  desc.math = &math;
  for (int count : {1, 3, 0}) {
    threads_seen = -1;
    desc.math_threads = count;
    mfsdp_host_backend *host;
    ASSERT_EQ(mfsdp_host_backend_create(&context, &desc, &host), MFSDP_OK);
    EXPECT_EQ(threads_seen, count == 0 ? -1 : count);
    EXPECT_EQ(mfsdp_host_backend_destroy(&context, host), MFSDP_OK);
  }
  EXPECT_EQ(mfsdp_context_destroy(&context), MFSDP_OK);
}

TEST_P(BackendHost, MemoryIsAlignedAndRefusalsAreNamed) {
  Rig rig(GetParam());
  void *block = nullptr;
  for (std::size_t alignment : {std::size_t(1), std::size_t(64), std::size_t(4096)})
    for (int space = 1; space <= 3; ++space) {
      ASSERT_EQ(rig.ops->mem_alloc(rig.self, &rig.context, 100, alignment, space_of(space), &block),
                MFSDP_OK);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(block) % alignment, 0u);
      rig.ops->mem_free(rig.self, &rig.context, block, 100, space_of(space));
    }
  auto expect = [&rig](mfsdp_status got, mfsdp_status status, const char *message) {
    EXPECT_EQ(got, status);
    EXPECT_NE(std::string(rig.message()).find(message), std::string::npos) << rig.message();
  };
  const mfsdp_space device = MFSDP_SPACE_DEVICE;
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 0, 64, device, &block), MFSDP_E_ARGUMENT,
         "mem_alloc: 0 bytes");
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 8, 48, device, &block), MFSDP_E_ARGUMENT,
         "aligned to 48");
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 8, 0, device, &block), MFSDP_E_ARGUMENT,
         "aligned to 0");
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 8, 8, space_of(0), &block), MFSDP_E_ARGUMENT,
         "space is 0");
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 8, 8, device, nullptr), MFSDP_E_ARGUMENT,
         "out is NULL");
  rig.memory.fail_at(0);
  expect(rig.ops->mem_alloc(rig.self, &rig.context, 8, 8, device, &block), MFSDP_E_MEMORY,
         "refused 8 bytes");
  EXPECT_EQ(block, nullptr);
  rig.ops->mem_free(rig.self, &rig.context, nullptr, 8, device);
}

/* Each line breaks one rule. The queue must be none the worse for it. */
TEST_P(BackendHost, ElementwiseEntriesSayWhatIsWrong) {
  Rig rig(GetParam());
  Buffer<float> x(&rig, std::vector<float>(16, 1.0f)), y(&rig, std::vector<float>(16, 2.0f));
  Buffer<double> slots(&rig, 4);
  Buffer<mfsdp_block> blocks(&rig, 1);
  const mfsdp_space device = MFSDP_SPACE_DEVICE;
  void *self = rig.self;
  mfsdp_queue *q = rig.queue;
  const mfsdp_backend_ops *ops = rig.ops;
  auto expect = [&rig](mfsdp_status got, const char *message,
                       mfsdp_status status = MFSDP_E_ARGUMENT) {
    EXPECT_EQ(got, status) << message;
    EXPECT_NE(std::string(rig.message()).find(message), std::string::npos) << rig.message();
  };
  unsigned char *odd = reinterpret_cast<unsigned char *>(x.data()) + 1;

  expect(ops->copy(self, nullptr, x.data(), device, y.data(), device, 4), "copy: queue is NULL");
  expect(ops->copy(self, q, x.data(), space_of(0), y.data(), device, 4), "to space 0");
  expect(ops->copy(self, q, x.data(), device, y.data(), space_of(4), 4), "from space 4");
  expect(ops->copy(self, q, nullptr, device, y.data(), device, 4), "copy: dst is NULL");
  expect(ops->copy(self, q, x.data(), device, nullptr, device, 4), "copy: src is NULL");
  expect(ops->copy(self, q, x.data() + 1, device, x.data(), device, 8), "dst and src overlap");
  expect(ops->copy(self, q, x.data(), device, x.data() + 1, device, 8), "dst and src overlap");

  expect(ops->fill_bytes(self, nullptr, x.data(), 0, 4), "fill_bytes: queue is NULL");
  expect(ops->fill_bytes(self, q, x.data(), 256, 4), "byte is 256");
  expect(ops->fill_bytes(self, q, x.data(), -1, 4), "byte is -1");
  expect(ops->fill_bytes(self, q, nullptr, 0, 4), "fill_bytes: dst is NULL");

  expect(ops->cast(self, nullptr, x.data(), MFSDP_F32, y.data(), MFSDP_F32, 4), "cast: queue is");
  expect(ops->cast(self, q, x.data(), dtype_of(0), y.data(), MFSDP_F32, 4), "dtype of dst is 0");
  expect(ops->cast(self, q, x.data(), MFSDP_F32, y.data(), dtype_of(5), 4), "dtype of src is 5");
  expect(ops->cast(self, q, x.data(), MFSDP_F32, y.data(), MFSDP_F32, -4), "count is -4");
  expect(ops->cast(self, q, x.data(), MFSDP_F64, y.data(), MFSDP_F32, INT64_MAX), "overflow",
         MFSDP_E_OVERFLOW);
  expect(ops->cast(self, q, nullptr, MFSDP_F32, y.data(), MFSDP_F32, 4), "dst is NULL");
  expect(ops->cast(self, q, x.data(), MFSDP_F32, nullptr, MFSDP_F32, 4), "src is NULL");
  expect(ops->cast(self, q, odd, MFSDP_BF16, y.data(), MFSDP_F32, 4), "dst is not aligned");
  expect(ops->cast(self, q, x.data() + 1, MFSDP_BF16, x.data(), MFSDP_F32, 4), "overlap");

  const void *terms[] = {y.data(), x.data()};
  const void *with_null[] = {y.data(), nullptr};
  expect(ops->sum_terms(self, nullptr, x.data(), 1, terms, MFSDP_F32, 1, 4), "sum_terms: queue");
  expect(ops->sum_terms(self, q, nullptr, 1, terms, MFSDP_F32, 1, 4), "acc is NULL");
  expect(ops->sum_terms(self, q, x.data(), 1, terms, MFSDP_F32, 0, 4), "term_count is 0");
  expect(ops->sum_terms(self, q, x.data(), 1, nullptr, MFSDP_F32, 1, 4), "terms is NULL");
  expect(ops->sum_terms(self, q, x.data(), 1, with_null, MFSDP_F32, 2, 4), "a term is NULL");
  expect(ops->sum_terms(self, q, x.data(), 1, terms, MFSDP_F32, 2, 4), "term 1 overlaps acc");
  expect(ops->sum_terms(self, q, x.data(), 1, terms, dtype_of(0), 1, 4), "dtype of a term is 0");
  expect(ops->sum_terms(self, q, x.data(), 1, terms, MFSDP_F32, 1, -1), "count is -1");
  expect(ops->sum_terms(self, q, x.data(), 1, terms, MFSDP_F64, 1, 4), "dtype f64",
         MFSDP_E_UNSUPPORTED);

  expect(ops->sumsq(self, nullptr, slots.data(), x.data(), blocks.data(), 1), "sumsq: queue is");
  expect(ops->sumsq(self, q, slots.data(), x.data(), blocks.data(), -1), "block_count is -1");
  expect(ops->sumsq(self, q, nullptr, x.data(), blocks.data(), 1), "slots is NULL");
  expect(ops->sumsq(self, q, slots.data(), x.data(), nullptr, 1), "blocks is NULL");
  EXPECT_EQ(ops->sumsq(self, q, nullptr, nullptr, nullptr, 0), MFSDP_OK);

  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  EXPECT_EQ(x.read(), std::vector<float>(16, 1.0f));
  EXPECT_EQ(y.read(), std::vector<float>(16, 2.0f));
}

TEST_P(BackendHost, NormalizeAndFusedSayWhatIsWrong) {
  Rig rig(GetParam());
  Buffer<float> x(&rig, std::vector<float>(16, 1.0f)), y(&rig, std::vector<float>(16, 2.0f));
  auto expect = [&rig](mfsdp_status got, const char *message,
                       mfsdp_status status = MFSDP_E_ARGUMENT) {
    EXPECT_EQ(got, status) << message;
    EXPECT_NE(std::string(rig.message()).find(message), std::string::npos) << rig.message();
  };
  mfsdp_normalize_args good;
  std::memset(&good, 0, sizeof(good));
  good.struct_nbytes = sizeof(good);
  good.dst = x.data();
  good.src = y.data();
  good.count = 8;
  good.batch_count = 2;
  good.dst_stride = good.src_stride = 8;
  good.dst_dtype = MFSDP_F32;
  good.rule = MFSDP_NORM_SCALE_SAFE;
  good.gain = 1.0;
  struct Fault {
    void (*edit)(mfsdp_normalize_args *);
    const char *message;
  };
  const Fault faults[] = {
      {[](mfsdp_normalize_args *a) { a->struct_nbytes = 0; }, "struct_nbytes is 0"},
      {[](mfsdp_normalize_args *a) { a->rule = static_cast<mfsdp_norm_rule>(0); }, "rule is 0"},
      {[](mfsdp_normalize_args *a) { a->eps = -1.0; }, "eps is -1"},
      {[](mfsdp_normalize_args *a) { a->eps = std::nan(""); }, "eps is nan"},
      {[](mfsdp_normalize_args *a) { a->batch_count = -1; }, "batch_count is -1"},
      {[](mfsdp_normalize_args *a) { a->count = -8; }, "count is -8"},
      {[](mfsdp_normalize_args *a) { a->dst_dtype = static_cast<mfsdp_dtype>(0); }, "dst is 0"},
      {[](mfsdp_normalize_args *a) { a->dst = nullptr; }, "dst is NULL"},
      {[](mfsdp_normalize_args *a) { a->src = nullptr; }, "src is NULL"},
      {[](mfsdp_normalize_args *a) { a->src_stride = 7; }, "strides 8 and 7"},
      {[](mfsdp_normalize_args *a) { a->dst_stride = 7; }, "strides 7 and 8"},
      {[](mfsdp_normalize_args *a) {
         a->dst = const_cast<float *>(a->src);
         a->dst_dtype = MFSDP_BF16;
       },
       "in place from f32 to bf16"},
  };
  for (const Fault &fault : faults) {
    mfsdp_normalize_args args = good;
    fault.edit(&args);
    expect(rig.ops->normalize(rig.self, rig.queue, &args), fault.message);
  }
  expect(rig.ops->normalize(rig.self, nullptr, &good), "normalize: queue is NULL");
  expect(rig.ops->normalize(rig.self, rig.queue, nullptr), "normalize: args is NULL");

  mfsdp_fused_args fused;
  std::memset(&fused, 0, sizeof(fused));
  expect(rig.ops->fused(rig.self, rig.queue, &fused), "fused: args.struct_nbytes is 0");
  fused.struct_nbytes = sizeof(fused);
  expect(rig.ops->fused(rig.self, rig.queue, &fused), "fused: op is 0", MFSDP_E_UNSUPPORTED);
  fused.op = MFSDP_FUSED_ADAMW;
  expect(rig.ops->fused(rig.self, nullptr, &fused), "fused: queue is NULL");
  expect(rig.ops->fused(rig.self, rig.queue, nullptr), "fused: args is NULL");
  EXPECT_EQ(rig.ops->fused(rig.self, rig.queue, &fused), MFSDP_OK); /* no items */
  fused.item_count = -1;
  expect(rig.ops->fused(rig.self, rig.queue, &fused), "item_count is -1");
  fused.item_count = 1;
  expect(rig.ops->fused(rig.self, rig.queue, &fused), "items is NULL");
  const mfsdp_fused_item item = mfsdp_fused_item();
  fused.items = &item;
  expect(rig.ops->fused(rig.self, rig.queue, &fused), "scalars is NULL");
  EXPECT_EQ(rig.sync(), MFSDP_OK) << rig.message();
  EXPECT_EQ(x.read(), std::vector<float>(16, 1.0f));
}

} // namespace
