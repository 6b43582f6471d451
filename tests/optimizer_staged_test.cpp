/* SPDX-License-Identifier: MIT */
/*
 * Staged tensors of optimizer.h: prepare, whole matrices, commit. Split by stages and by bands of rows,
 * on one queue or two, the update has the bits of the ordinary step.
 */
#include "mfsdp/optimizer.h"

#include "tests/ref/spectra.h"
#include "tests/support/backend_rig.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

namespace {

using test::Buffer;
using test::Rig;
using test::same_bits;

struct Matrix {
  int64_t rows, cols;
  std::vector<int64_t> bands; /* rows of each; empty: whole */
};

const std::vector<Matrix> &matrices() {
  static const std::vector<Matrix> all = {{40, 12, {}},      {16, 16, {5, 4, 7}},
                                          {40, 12, {1, 39}}, {5, 70, {2, 0, 3}},
                                          {16, 16, {8, 8}},  {9, 33, {}}};
  return all;
}

std::vector<float> values(int64_t count, uint64_t seed) {
  return ref::narrow(ref::random_matrix(1, count, seed));
}

/* One optimizer over all matrices, staged or not; bands of a matrix lie one behind the other. */
class Fixture {
public:
  Fixture(Rig *rig, bool staged, bool by_bands) : rig_(rig), staged_(staged) {
    for (std::size_t m = 0; m < matrices().size(); ++m) {
      const Matrix &x = matrices()[m];
      masters.emplace_back(rig, values(x.rows * x.cols, m + 1));
      grads.emplace_back(rig, values(x.rows * x.cols, m + 100));
      directions.emplace_back(rig, static_cast<std::size_t>(x.rows * x.cols));
      if (!staged || !by_bands || x.bands.empty()) {
        add(m, 0, x.rows, false);
        continue;
      }
      int64_t first = 0;
      for (const int64_t rows : x.bands) {
        add(m, first, rows, true);
        first += rows;
      }
    }
    group_ = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
    mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
    desc.groups = &group_;
    desc.group_count = 1;
    EXPECT_EQ(mfsdp_optimizer_create(&rig->context, rig->backend, &desc, list.data(),
                                     static_cast<int32_t>(list.size()), &optimizer),
              MFSDP_OK)
        << rig->message();
  }
  ~Fixture() { mfsdp_optimizer_destroy(&rig_->context, optimizer); }

  void step(uint64_t seed, double grad_scale) {
    mfsdp_step_scalars scalars = mfsdp_step_scalars_default(0.02, 0.1);
    scalars.grad_scale = grad_scale;
    Buffer<mfsdp_step_scalars> device(rig_, std::vector<mfsdp_step_scalars>(1, scalars));
    for (std::size_t m = 0; m < matrices().size(); ++m)
      grads[m].write(values(matrices()[m].rows * matrices()[m].cols, 1000 * seed + m));
    for (int32_t stage = 2; staged_ && stage >= 0; --stage) /* in any order */
      EXPECT_EQ(mfsdp_optimizer_prepare(&rig_->context, optimizer, rig_->queue, stage,
                                        device.data(), nullptr),
                MFSDP_OK)
          << rig_->message();
    for (std::size_t m = 0; staged_ && m < matrices().size(); ++m)
      orthogonalize(m);
    EXPECT_EQ(mfsdp_optimizer_step(&rig_->context, optimizer, rig_->queue, device.data(), nullptr),
              MFSDP_OK)
        << rig_->message();
    EXPECT_EQ(rig_->sync(), MFSDP_OK) << rig_->message();
  }

  std::vector<mfsdp_optimizer_tensor> list;
  std::deque<Buffer<float>> masters, grads, directions;
  mfsdp_optimizer *optimizer = nullptr;

private:
  void add(std::size_t m, int64_t first_row, int64_t rows, bool band) {
    const int64_t cols = matrices()[m].cols;
    mfsdp_optimizer_tensor t;
    std::memset(&t, 0, sizeof(t));
    t.name = "matrix";
    t.role = MFSDP_ROLE_MATRIX;
    t.rows = rows;
    t.cols = cols;
    t.count = rows * cols;
    t.master = masters[m].data() + first_row * cols;
    t.grad = grads[m].data() + first_row * cols;
    if (staged_) {
      t.staged = 1;
      t.stage = static_cast<int32_t>(m % 3);
      t.direction = directions[m].data() + first_row * cols;
      t.whole_rows = band ? matrices()[m].rows : 0;
    }
    list.push_back(t);
  }
  void orthogonalize(std::size_t m) {
    const Matrix &x = matrices()[m];
    std::size_t nbytes = 0;
    EXPECT_EQ(
        mfsdp_optimizer_orthogonalize_nbytes(&rig_->context, &group_, x.rows, x.cols, 1, &nbytes),
        MFSDP_OK);
    Buffer<unsigned char> workspace(rig_, nbytes);
    EXPECT_EQ(mfsdp_optimizer_orthogonalize(&rig_->context, optimizer, rig_->queue, 0, x.rows,
                                            x.cols, 1, directions[m].data(), x.rows * x.cols,
                                            workspace.data(), nbytes),
              MFSDP_OK)
        << rig_->message();
    EXPECT_EQ(rig_->sync(), MFSDP_OK) << rig_->message();
  }
  Rig *rig_;
  bool staged_;
  mfsdp_hyper_group group_;
};

class Staged : public ::testing::TestWithParam<test::RigKind> {};

TEST_P(Staged, HasTheBitsOfTheOrdinaryStep) {
  for (const bool by_bands : {false, true}) {
    Rig rig(GetParam());
    Fixture ordinary(&rig, false, false), staged(&rig, true, by_bands);
    for (uint64_t s = 1; s <= 3; ++s) {
      ordinary.step(s, 0.25);
      staged.step(s, 0.25);
    }
    for (std::size_t m = 0; m < matrices().size(); ++m) {
      EXPECT_TRUE(same_bits(ordinary.masters[m].read(), staged.masters[m].read()))
          << "matrix " << m << (by_bands ? ", bands" : "");
      EXPECT_FALSE(same_bits(ordinary.masters[m].read(),
                             values(matrices()[m].rows * matrices()[m].cols, m + 1)));
    }
  }
}

TEST_P(Staged, OnePassCommitsAll) {
  Rig rig(GetParam());
  Fixture staged(&rig, true, true);
  EXPECT_EQ(staged.optimizer->job_count, 1);
  EXPECT_EQ(staged.optimizer->stage_count, 3);
  EXPECT_EQ(staged.optimizer->workspace.nbytes, 0u) << "directions and scratch are the caller's";
}

TEST_P(Staged, UnknownStagesAreEmpty) {
  Rig rig(GetParam());
  Fixture staged(&rig, true, false);
  Buffer<mfsdp_step_scalars> device(
      &rig, std::vector<mfsdp_step_scalars>(1, mfsdp_step_scalars_default(0.02, 0.1)));
  EXPECT_EQ(
      mfsdp_optimizer_prepare(&rig.context, staged.optimizer, rig.queue, 7, device.data(), nullptr),
      MFSDP_OK);
  EXPECT_EQ(mfsdp_optimizer_prepare(&rig.context, staged.optimizer, rig.queue, 0, nullptr, nullptr),
            MFSDP_E_ARGUMENT);
  EXPECT_EQ(rig.sync(), MFSDP_OK);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Staged, ::testing::ValuesIn(test::backend_kinds()), test::rig_name);

/* ---- rules ---- */

class StagedRules : public ::testing::Test {
protected:
  StagedRules()
      : rig_(test::rig_kinds()[0]), master_(&rig_, values(60, 1)), grad_(&rig_, values(60, 2)),
        direction_(&rig_, 60) {
    std::memset(&tensor_, 0, sizeof(tensor_));
    tensor_.name = "w";
    tensor_.role = MFSDP_ROLE_MATRIX;
    tensor_.rows = 6;
    tensor_.cols = 10;
    tensor_.count = 60;
    tensor_.master = master_.data();
    tensor_.grad = grad_.data();
    tensor_.staged = 1;
    tensor_.direction = direction_.data();
    group_ = mfsdp_hyper_group_muon(MFSDP_MUON_TORCH);
  }
  void refused(mfsdp_status status, const std::string &text) {
    mfsdp_optimizer_desc desc = mfsdp_optimizer_desc_default();
    mfsdp_optimizer *optimizer = nullptr;
    desc.groups = &group_;
    desc.group_count = 1;
    desc.state_space = space_;
    EXPECT_EQ(mfsdp_optimizer_create(&rig_.context, rig_.backend, &desc, &tensor_, 1, &optimizer),
              status);
    EXPECT_EQ(optimizer == nullptr, status != MFSDP_OK);
    EXPECT_NE(std::string(rig_.message()).find(text), std::string::npos) << rig_.message();
    mfsdp_optimizer_destroy(&rig_.context, optimizer);
  }
  Rig rig_;
  Buffer<float> master_, grad_, direction_;
  mfsdp_optimizer_tensor tensor_;
  mfsdp_hyper_group group_;
  mfsdp_space space_ = MFSDP_SPACE_DEVICE;
};

TEST_F(StagedRules, TheTensorIsLegal) {
  refused(MFSDP_OK, "");
}
TEST_F(StagedRules, NoDirection) {
  tensor_.direction = nullptr;
  refused(MFSDP_E_ARGUMENT, "w: staged, but direction is NULL");
}
TEST_F(StagedRules, DirectionOverlapsTheGradient) {
  tensor_.direction = grad_.data() + 30;
  refused(MFSDP_E_ARGUMENT, "overlap");
}
TEST_F(StagedRules, StagedIsZeroOrOne) {
  for (const int32_t value : {2, -1}) {
    tensor_.staged = value;
    refused(MFSDP_E_ARGUMENT, "w: staged is " + std::to_string(value) + ", needs 0 or 1");
  }
}
TEST_F(StagedRules, NegativeStage) {
  tensor_.stage = -1;
  refused(MFSDP_E_ARGUMENT, "w: stage is -1");
}
TEST_F(StagedRules, WholeIsSmallerThanTheBand) {
  tensor_.whole_rows = 5;
  refused(MFSDP_E_ARGUMENT, "whole_rows 5");
}
TEST_F(StagedRules, AdamwHasNoStages) {
  group_ = mfsdp_hyper_group_adamw(0.1, 0.0);
  refused(MFSDP_E_UNSUPPORTED, "adamw cannot be split");
}
TEST_F(StagedRules, Offload) {
  space_ = MFSDP_SPACE_HOST;
  tensor_.param_data = master_.data();
  tensor_.param_dtype = MFSDP_F32;
  refused(MFSDP_E_UNSUPPORTED, "no offload");
}
TEST_F(StagedRules, RowsOfABandHaveNoNormOfTheWhole) {
  group_.muon.normalize_rows = 1;
  refused(MFSDP_OK, "");
  tensor_.whole_rows = 12;
  refused(MFSDP_E_UNSUPPORTED, "normalize_rows");
}

TEST_F(StagedRules, BytesOfWholeMatrices) {
  std::size_t nbytes = 7;
  EXPECT_EQ(mfsdp_optimizer_orthogonalize_nbytes(&rig_.context, nullptr, 6, 10, 1, &nbytes),
            MFSDP_E_ARGUMENT);
  EXPECT_NE(std::string(rig_.message()).find("group is NULL"), std::string::npos);
  group_ = mfsdp_hyper_group_adamw(0.1, 0.0);
  EXPECT_EQ(mfsdp_optimizer_orthogonalize_nbytes(&rig_.context, &group_, 6, 10, 1, &nbytes),
            MFSDP_E_UNSUPPORTED);
  EXPECT_NE(std::string(rig_.message()).find("adamw has no part for whole matrices"),
            std::string::npos);
}

} // namespace
