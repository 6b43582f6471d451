/* SPDX-License-Identifier: MIT */
/*
 * plan/caps.h - what caps allow: limits per unit, caps that no plan can keep, and the last check.
 *
 * Private to the plan.
 * Does not: place anything, or decide which planner keeps which cap (plan/check.h does).
 * Link flags: none.
 */
#ifndef MFSDP_PLAN_CAPS_H
#define MFSDP_PLAN_CAPS_H

#include "check.h"

MFSDP_API int mfsdp__caps_on_units(const mfsdp_plan_caps *caps) {
  return caps->max_gamma_permille != MFSDP_PLAN_NO_CAP || caps->max_owners != MFSDP_PLAN_NO_CAP;
}

/* Padded bytes of `count` elements; sums of them fit, since elements are limited to 2^46. */
MFSDP_API int64_t mfsdp__padded_nbytes(const mfsdp_param *param, int64_t count) {
  int64_t padded = 0;
  (void)mfsdp_i64_align(count, &padded);
  return padded * mfsdp_param_resident_nbytes(param);
}

/* Elements of all tensors of a unit. */
MFSDP_API int64_t mfsdp__unit_elements(const mfsdp_plan *plan, int32_t unit) {
  int64_t elements = 0;
  int32_t j;
  for (j = 0; j < plan->units[unit].param_count; ++j) {
    const int32_t i = plan->unit_params[plan->units[unit].param_first + j];
    if (plan->params[i].alias_of == NULL) elements += plan->infos[i].numel;
  }
  return elements;
}

/* floor(elements * permille / (1000 * world)), at most all: 1000 * world is below 2^30. */
MFSDP_API int64_t mfsdp__gamma_limit(int64_t elements, int64_t permille, int64_t world) {
  const int64_t whole = 1000 * world;
  if (permille >= whole) return elements;
  return elements / whole * permille + elements % whole * permille / whole;
}

/* The gamma of a segment in thousandths, rounded up; for messages. */
MFSDP_API int64_t mfsdp__gamma_permille(int64_t segment, int64_t elements, int64_t world) {
  int64_t product;
  if (elements == 0) return 0;
  if (!mfsdp_i64_mul(segment, 1000 * world, &product)) return segment / elements * 1000 * world;
  return product / elements + (product % elements > 0);
}

MFSDP_API void mfsdp__caps_limits(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  int32_t u;
  for (u = 0; u < plan->unit_count; ++u)
    build->limit[u] = mfsdp__gamma_limit(mfsdp__unit_elements(plan, u),
                                         build->desc->caps.max_gamma_permille, plan->world);
}

/* ---- what cannot be ---- */

/* A matrix that passes a cap alone. */
MFSDP_API mfsdp_status mfsdp__caps_check_matrix(mfsdp__build *build, int32_t index, int64_t rows,
                                                int64_t cols) {
  const mfsdp_plan *plan = build->plan;
  const mfsdp_plan_caps *caps = &build->desc->caps;
  const mfsdp_param *param = &plan->params[index];
  const int64_t nbytes = mfsdp__padded_nbytes(param, rows * cols);
  const int32_t unit = param->unit;
  if (nbytes > caps->max_resident_nbytes && !plan->allow_banded &&
      param->placement != MFSDP_PLACEMENT_BANDED)
    return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, index, param,
                             "its %lld x %lld matrix alone takes %lld bytes: "
                             "caps.max_resident_nbytes %lld is %lld too few",
                             (long long)rows, (long long)cols, (long long)nbytes,
                             (long long)caps->max_resident_nbytes,
                             (long long)(nbytes - caps->max_resident_nbytes));
  if (build->limit != NULL && rows * cols > build->limit[unit]) {
    const int64_t needed =
        mfsdp__gamma_permille(rows * cols, mfsdp__unit_elements(plan, unit), plan->world);
    return MFSDP__PARAM_FAIL(build->context, MFSDP_E_ARGUMENT, index, param,
                             "its %lld x %lld matrix alone gives unit %d a gamma of %lld "
                             "thousandths: caps.max_gamma_permille %lld is %lld too low",
                             (long long)rows, (long long)cols, (int)unit, (long long)needed,
                             (long long)caps->max_gamma_permille,
                             (long long)(needed - caps->max_gamma_permille));
  }
  return MFSDP_OK;
}

/* Caps that no plan keeps, by what is largest and by sums. */
MFSDP_API mfsdp_status mfsdp__caps_check_possible(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  const mfsdp_plan_caps *caps = &build->desc->caps;
  const int64_t owners = caps->max_owners < plan->world ? caps->max_owners : plan->world;
  int64_t nbytes = 0, each;
  int32_t u, i;
  for (i = 0; i < plan->param_count; ++i) {
    const mfsdp_param *param = &plan->params[i];
    mfsdp__view_cursor cursor = mfsdp__view_begin();
    if (param->alias_of != NULL) continue;
    if (param->role != MFSDP_ROLE_MATRIX)
      nbytes += mfsdp__padded_nbytes(param, plan->infos[i].numel);
    if (param->role != MFSDP_ROLE_MATRIX) continue;
    while (mfsdp__view_next(param, plan->infos[i].numel, &cursor)) {
      nbytes += mfsdp__padded_nbytes(param, cursor.rows * cursor.cols);
      MFSDP_TRY(mfsdp__caps_check_matrix(build, i, cursor.rows, cursor.cols));
    }
  }
  each = nbytes / plan->world + (nbytes % plan->world > 0);
  if (each > caps->max_resident_nbytes)
    return MFSDP_FAIL(build->context, MFSDP_E_ARGUMENT,
                      "plan: %d ranks share %lld bytes, %lld each: caps.max_resident_nbytes %lld "
                      "is %lld too few",
                      (int)plan->world, (long long)nbytes, (long long)each,
                      (long long)caps->max_resident_nbytes,
                      (long long)(each - caps->max_resident_nbytes));
  for (u = 0; build->limit != NULL && u < plan->unit_count; ++u) {
    const int64_t elements = mfsdp__unit_elements(plan, u);
    const int64_t share = elements / owners + (elements % owners > 0);
    if (share > build->limit[u])
      return MFSDP_FAIL(
          build->context, MFSDP_E_ARGUMENT,
          "plan: %lld owners of unit %d hold %lld elements each, a gamma of %lld thousandths: "
          "caps.max_gamma_permille %lld is %lld too low for caps.max_owners",
          (long long)owners, (int)u, (long long)share,
          (long long)mfsdp__gamma_permille(share, elements, plan->world),
          (long long)caps->max_gamma_permille,
          (long long)(mfsdp__gamma_permille(share, elements, plan->world) -
                      caps->max_gamma_permille));
  }
  return MFSDP_OK;
}

/* ---- what has come out ---- */

MFSDP_API mfsdp_status mfsdp__caps_check_unit(mfsdp__build *build, int32_t unit, int64_t most,
                                              int64_t owners) {
  const mfsdp_plan_caps *caps = &build->desc->caps;
  if (owners > caps->max_owners)
    return MFSDP_FAIL(build->context, MFSDP_E_ARGUMENT,
                      "plan: the best plan found gives unit %d %lld owners: caps.max_owners %lld "
                      "is %lld too few",
                      (int)unit, (long long)owners, (long long)caps->max_owners,
                      (long long)(owners - caps->max_owners));
  if (most > build->limit[unit]) {
    const int64_t gamma =
        mfsdp__gamma_permille(most, mfsdp__unit_elements(build->plan, unit), build->plan->world);
    return MFSDP_FAIL(build->context, MFSDP_E_ARGUMENT,
                      "plan: the best plan found gives unit %d a gamma of %lld thousandths: "
                      "caps.max_gamma_permille %lld is %lld too low",
                      (int)unit, (long long)gamma, (long long)caps->max_gamma_permille,
                      (long long)(gamma - caps->max_gamma_permille));
  }
  return MFSDP_OK;
}

/* All caps against the pieces. `owned` is all zero, and again on return. */
MFSDP_API mfsdp_status mfsdp__caps_check_plan(mfsdp__build *build) {
  const mfsdp_plan *plan = build->plan;
  const mfsdp_plan_caps *caps = &build->desc->caps;
  int32_t u, i, r;
  for (r = 0; r < plan->world; ++r)
    if (build->resident[r] > caps->max_resident_nbytes)
      return MFSDP_FAIL(build->context, MFSDP_E_ARGUMENT,
                        "plan: the best plan found leaves %lld bytes on rank %d: "
                        "caps.max_resident_nbytes %lld is %lld too few",
                        (long long)build->resident[r], (int)r, (long long)caps->max_resident_nbytes,
                        (long long)(build->resident[r] - caps->max_resident_nbytes));
  for (u = 0; build->limit != NULL && u < plan->unit_count; ++u) {
    const int32_t first = plan->units[u].piece_first, end = first + plan->units[u].piece_count;
    int64_t most = 0, owners = 0;
    for (i = first; i < end; ++i) {
      int64_t *owned = &build->owned[plan->pieces[i].owner];
      if (*owned == 0) ++owners;
      *owned += plan->pieces[i].count;
      if (*owned > most) most = *owned;
    }
    for (i = first; i < end; ++i)
      build->owned[plan->pieces[i].owner] = 0;
    MFSDP_TRY(mfsdp__caps_check_unit(build, u, most, owners));
  }
  return MFSDP_OK;
}

#endif /* MFSDP_PLAN_CAPS_H */
