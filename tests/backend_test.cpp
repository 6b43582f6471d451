/* SPDX-License-Identifier: MIT */
#include "mfsdp/backend.h"

#include "tests/support/backend_rig.h"

#include <cstddef>

namespace {

using test::Rig;

test::RigKind loops() {
  return test::rig_kinds()[0];
}

/* The table with one entry taken out, by its offset: the table is a struct of pointers. */
mfsdp_backend_ops without(const mfsdp_backend_ops *ops, std::size_t offset) {
  mfsdp_backend_ops copy = *ops;
  std::memset(reinterpret_cast<char *>(&copy) + offset, 0, sizeof(void (*)()));
  return copy;
}

TEST(Backend, CheckNamesTheRequiredEntryThatIsMissing) {
  Rig rig(loops());
#define ENTRY(name) \
  { #name, offsetof(mfsdp_backend_ops, name) }
  const struct {
    const char *name;
    std::size_t offset;
  } required[] = {
      ENTRY(mem_alloc),    ENTRY(mem_free),      ENTRY(queue_create), ENTRY(queue_destroy),
      ENTRY(event_create), ENTRY(event_destroy), ENTRY(event_record), ENTRY(queue_wait),
      ENTRY(event_query),  ENTRY(event_wait),    ENTRY(queue_call),   ENTRY(copy),
      ENTRY(fill_bytes),   ENTRY(cast),          ENTRY(sum_terms),    ENTRY(sumsq),
      ENTRY(verdict_fold), ENTRY(gemm),          ENTRY(normalize),    ENTRY(fused)};
  for (const auto &entry : required) {
    const mfsdp_backend_ops ops = without(rig.ops, entry.offset);
    mfsdp_backend backend = *rig.backend;
    backend.ops = &ops;
    EXPECT_EQ(mfsdp_backend_check(&rig.context, &backend), MFSDP_E_ARGUMENT) << entry.name;
    EXPECT_NE(
        std::string(rig.message()).find(std::string("operation ") + entry.name + " is missing"),
        std::string::npos)
        << rig.message();
  }
#undef ENTRY
  /* A table from before an entry was added: the entry lies beyond its size. */
  mfsdp_backend_ops old = *rig.ops;
  old.struct_nbytes = offsetof(mfsdp_backend_ops, fused);
  mfsdp_backend backend = *rig.backend;
  backend.ops = &old;
  EXPECT_EQ(mfsdp_backend_check(&rig.context, &backend), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig.message()).find("fused is missing"), std::string::npos);
  backend.ops = nullptr;
  EXPECT_EQ(mfsdp_backend_check(&rig.context, &backend), MFSDP_E_ARGUMENT);
  EXPECT_EQ(mfsdp_backend_check(&rig.context, nullptr), MFSDP_E_ARGUMENT);
  backend = *rig.backend;
  backend.struct_nbytes = 0;
  EXPECT_EQ(mfsdp_backend_check(&rig.context, &backend), MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig.message()).find("backend: struct_nbytes is 0, needs"),
            std::string::npos);
  EXPECT_EQ(mfsdp_backend_check(&rig.context, rig.backend), MFSDP_OK);
}

TEST(Backend, OptionalEntriesMayBeMissing) {
  Rig rig(loops());
  mfsdp_backend_ops ops = without(rig.ops, offsetof(mfsdp_backend_ops, eigh));
  ops = without(&ops, offsetof(mfsdp_backend_ops, qr));
  mfsdp_backend backend = *rig.backend;
  backend.ops = &ops;
  EXPECT_EQ(mfsdp_backend_check(&rig.context, &backend), MFSDP_OK);
}

TEST(Backend, BuffersAreBookedByClassAndGivenBack) {
  Rig rig(loops());
  const std::size_t before = rig.context.total_nbytes;
  mfsdp_buffer grad, state, empty;
  ASSERT_EQ(mfsdp_buffer_alloc(&rig.context, rig.backend, 1000, MFSDP_SPACE_DEVICE,
                               MFSDP_MEMORY_GRAD, &grad),
            MFSDP_OK);
  ASSERT_EQ(mfsdp_buffer_alloc(&rig.context, rig.backend, 500, MFSDP_SPACE_PINNED,
                               MFSDP_MEMORY_STATE, &state),
            MFSDP_OK);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(grad.data) % MFSDP_ALIGN_NBYTES, 0u);
  EXPECT_EQ(rig.context.current_nbytes[MFSDP_MEMORY_GRAD], 1000u);
  EXPECT_EQ(rig.context.current_nbytes[MFSDP_MEMORY_STATE], 500u);
  EXPECT_EQ(rig.context.total_nbytes, before + 1500);
  ASSERT_EQ(mfsdp_buffer_alloc(&rig.context, rig.backend, 0, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_GRAD,
                               &empty),
            MFSDP_OK);
  EXPECT_EQ(empty.data, nullptr);
  mfsdp_buffer_free(&rig.context, rig.backend, &empty);
  mfsdp_buffer_free(&rig.context, rig.backend, &grad);
  mfsdp_buffer_free(&rig.context, rig.backend, &grad); /* twice: nothing is left to free */
  mfsdp_buffer_free(&rig.context, rig.backend, &state);
  EXPECT_EQ(rig.context.total_nbytes, before);
  EXPECT_EQ(rig.context.peak_nbytes[MFSDP_MEMORY_GRAD], 1000u);
  EXPECT_EQ(rig.context.total_peak_nbytes, before + 1500);

  rig.memory.fail_at(0);
  EXPECT_EQ(mfsdp_buffer_alloc(&rig.context, rig.backend, 64, MFSDP_SPACE_DEVICE, MFSDP_MEMORY_GRAD,
                               &grad),
            MFSDP_E_MEMORY);
  EXPECT_EQ(grad.data, nullptr);
  EXPECT_EQ(grad.nbytes, 0u);
  EXPECT_EQ(rig.context.total_nbytes, before);
}

TEST(Backend, GemmDefaultsNameEveryFieldThatMustNotBeZero) {
  const mfsdp_gemm_args args = mfsdp_gemm_args_default();
  EXPECT_EQ(args.struct_nbytes, sizeof(args));
  EXPECT_EQ(args.batch_count, 1);
  EXPECT_EQ(args.alpha, 1.0f);
  EXPECT_EQ(args.beta, 0.0f);
  EXPECT_EQ(args.dtype, MFSDP_F32);
  EXPECT_EQ(args.symmetric, 0);
}

} // namespace
