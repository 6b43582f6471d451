/* SPDX-License-Identifier: MIT */
/* io.h: loops that finish what a table cuts short, and end where it never gets on. */
#include "mfsdp/io.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

namespace {

/* A file whose transfers answer what is planned, one after the other; then all they are asked for. */
class Planned {
public:
  Planned() {
    const mfsdp_context_desc desc = mfsdp_context_desc_default();
    EXPECT_EQ(mfsdp_context_init(&context, &desc), MFSDP_OK);
    std::memset(&ops_, 0, sizeof(ops_));
    ops_.struct_nbytes = sizeof(ops_);
    ops_.read_at = [](void *self, mfsdp_io_file *, int64_t offset, std::size_t nbytes, void *dst,
                      int64_t *done, mfsdp_error *) {
      *done = static_cast<Planned *>(self)->next(offset, nbytes);
      if (*done > 0 && *done <= static_cast<int64_t>(nbytes))
        std::memset(dst, 'x', static_cast<std::size_t>(*done));
      return MFSDP_OK;
    };
    ops_.write_at = [](void *self, mfsdp_io_file *, int64_t offset, std::size_t nbytes,
                       const void *, int64_t *done, mfsdp_error *) {
      *done = static_cast<Planned *>(self)->next(offset, nbytes);
      return MFSDP_OK;
    };
    io_.struct_nbytes = sizeof(io_);
    io_.ops = &ops_;
    io_.self = this;
  }
  void plan(int64_t count, int64_t answer) {
    answers_.insert(answers_.end(), static_cast<std::size_t>(count), answer);
  }
  /* Both ways the same; what is left of a plan is forgotten. */
  mfsdp_status read() {
    char dst[10];
    return finish(mfsdp_io_read(&context, &io_, nullptr, "file", 100, sizeof(dst), dst));
  }
  mfsdp_status write() {
    const char src[10] = {0};
    return finish(mfsdp_io_write(&context, &io_, nullptr, "file", 100, sizeof(src), src));
  }
  mfsdp_context context;
  std::vector<int64_t> offsets; /* of the last transfer's calls that moved something */

private:
  int64_t next(int64_t offset, std::size_t nbytes) {
    if (at_ == 0) offsets.clear();
    const int64_t answer = at_ < answers_.size() ? answers_[at_] : static_cast<int64_t>(nbytes);
    ++at_;
    if (answer > 0) offsets.push_back(offset);
    return answer;
  }
  mfsdp_status finish(mfsdp_status status) {
    at_ = 0;
    answers_.clear();
    return status;
  }
  mfsdp_io io_;
  mfsdp_io_ops ops_;
  std::vector<int64_t> answers_;
  std::size_t at_ = 0;
};

using Way = mfsdp_status (Planned::*)();
const Way kWays[] = {&Planned::read, &Planned::write};

TEST(Io, PartsAndInterruptionsAreGoneOnWith) {
  for (const Way way : kWays) {
    Planned file;
    for (const int64_t answer : {3, -1, 1, -1, -1, 2})
      file.plan(1, answer);
    EXPECT_EQ((file.*way)(), MFSDP_OK);
    EXPECT_EQ(file.offsets, (std::vector<int64_t>{100, 103, 104, 106}));
  }
}

/* The count begins anew with each byte, so that a signal now and then never ends a long transfer. */
TEST(Io, OnlyInterruptionsInARowAreCounted) {
  for (const Way way : kWays) {
    Planned file;
    for (int part = 0; part < 5; ++part) {
      file.plan(MFSDP_IO_INTERRUPTS - 1, -1);
      file.plan(1, 2);
    }
    EXPECT_EQ((file.*way)(), MFSDP_OK) << file.context.error.message;
    file.plan(1, 2);
    file.plan(MFSDP_IO_INTERRUPTS, -1);
    EXPECT_EQ((file.*way)(), MFSDP_E_IO);
    EXPECT_NE(std::string(file.context.error.message).find("interrupted 100000 times in a row"),
              std::string::npos)
        << file.context.error.message;
  }
}

TEST(Io, CountsThatNoTransferCanHave) {
  for (const Way way : kWays)
    for (const int64_t answer : {INT64_C(-2), INT64_C(9), INT64_MAX, INT64_MIN}) {
      Planned file;
      file.plan(1, 2); /* 8 are left */
      file.plan(1, answer);
      EXPECT_EQ((file.*way)(), MFSDP_E_IO) << answer;
      EXPECT_NE(std::string(file.context.error.message).find("of 8 bytes"), std::string::npos)
          << file.context.error.message;
    }
}

TEST(Io, NothingMoreIsAnEnd) {
  Planned file;
  file.plan(1, 2);
  file.plan(1, 0);
  EXPECT_EQ(file.read(), MFSDP_E_FORMAT);
  EXPECT_NE(std::string(file.context.error.message).find("ends at byte 102"), std::string::npos);
  file.plan(1, 2);
  file.plan(1, 0);
  EXPECT_EQ(file.write(), MFSDP_E_IO);
}

} // namespace
