/* SPDX-License-Identifier: MIT */
/*
 * desc.h - what a Newton-Schulz iteration is told, its validator, and the fixed table by which AUTO
 * chooses the form.
 *
 *   mfsdp_newton_schulz_desc ns = mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_POLAR_EXPRESS);
 *   ns.step_count = 6;
 *   mfsdp_newton_schulz_form form = mfsdp_newton_schulz_form_of(&ns, 256, 1024);   // GRAM
 *
 * Part of newton_schulz.h. Link flags: none.
 */
#ifndef MFSDP_NEWTON_SCHULZ_DESC_H
#define MFSDP_NEWTON_SCHULZ_DESC_H

#include "../backend.h"
#include "coefficients.h"

/* How the polynomial is evaluated. All forms compute the same polynomial; bits differ. */
typedef enum mfsdp_newton_schulz_form {
  MFSDP_NS_AUTO = 1,  /* by mfsdp_newton_schulz_form_of, a fixed table over shapes */
  MFSDP_NS_PLAIN,     /* three general products a step */
  MFSDP_NS_SYMMETRIC, /* A and P by symmetric products: about half their work */
  MFSDP_NS_GRAM /* the whole iteration on the s x s Gram matrix; X is read twice. Loses about a
                       * digit: restarts bound what it loses over many steps */
} mfsdp_newton_schulz_form;

/* Steps after which GRAM goes back to X: bit k is "after step k + 1". */
#define MFSDP_NS_RESTARTS_NONE UINT64_C(0)
/* By mfsdp_newton_schulz_restarts_of, from dtype and step count. */
#define MFSDP_NS_RESTARTS_AUTO (UINT64_C(1) << 63)

typedef struct mfsdp_newton_schulz_desc {
  size_t struct_nbytes;
  /* coefficient_count rows of (a, b, c), row k for step k; the last row repeats. Read in every
   * call: the table must outlive the description. */
  const double (*coefficients)[3];
  int32_t coefficient_count;
  int32_t step_count; /* 0 is legal: the normalized input */
  mfsdp_newton_schulz_form form;
  mfsdp_dtype dtype; /* F32, BF16 or F16: how iterates are stored; sums are fp32. Input and output
                      * stay fp32, and the norm is taken before rounding */
  uint64_t restarts; /* read by GRAM */
  mfsdp_norm_rule norm_rule;
  double eps;         /* of the MAX_EPS and ADD_EPS rules; SCALE_SAFE does not read it */
  double norm_factor; /* multiplies the norm, and so divides the input; 1 or a little more */
} mfsdp_newton_schulz_desc;

/* A set with its authors' step count; form AUTO, fp32, scale-safe norm. An unknown set gives a
 * description that mfsdp_newton_schulz_check refuses. */
MFSDP_API mfsdp_newton_schulz_desc mfsdp_newton_schulz_desc_of(mfsdp_ns_set set) {
  mfsdp_newton_schulz_desc desc;
  memset(&desc, 0, sizeof(desc));
  desc.struct_nbytes = sizeof(desc);
  desc.coefficients = mfsdp_ns_set_rows(set, &desc.coefficient_count);
  desc.step_count = mfsdp_ns_set_steps(set);
  desc.form = MFSDP_NS_AUTO;
  desc.dtype = MFSDP_F32;
  desc.restarts = MFSDP_NS_RESTARTS_AUTO;
  desc.norm_rule = MFSDP_NORM_SCALE_SAFE;
  desc.eps = 1e-7;
  desc.norm_factor = 1.0;
  return desc;
}

/* Five jordan steps, form AUTO, fp32, scale-safe norm. */
MFSDP_API mfsdp_newton_schulz_desc mfsdp_newton_schulz_desc_default(void) {
  return mfsdp_newton_schulz_desc_of(MFSDP_NS_SET_JORDAN5);
}

/* The most steps a description may ask for; far above what any coefficient set needs. */
#define MFSDP_NS_MAX_STEPS 64

MFSDP_API mfsdp_status mfsdp__ns_check_table(mfsdp_context *context,
                                             const mfsdp_newton_schulz_desc *desc) {
  int32_t row, k;
  if (desc->coefficients == NULL || desc->coefficient_count < 1)
    return MFSDP_FAIL(
        context, MFSDP_E_ARGUMENT,
        "newton_schulz: needs at least one row of coefficients, has %d (an unknown set has none)",
        (int)desc->coefficient_count);
  for (row = 0; row < desc->coefficient_count; ++row)
    for (k = 0; k < 3; ++k)
      if (!(desc->coefficients[row][k] >= -1e30 && desc->coefficients[row][k] <= 1e30))
        return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                          "newton_schulz: coefficients[%d][%d] is %g, needs a finite number",
                          (int)row, (int)k, desc->coefficients[row][k]);
  return MFSDP_OK;
}

/* E_ARGUMENT with the field, its value and what it needs. */
MFSDP_API mfsdp_status mfsdp_newton_schulz_check(mfsdp_context *context,
                                                 const mfsdp_newton_schulz_desc *desc) {
  if (desc == NULL || desc->struct_nbytes != sizeof(*desc))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: desc is NULL or its struct_nbytes is not %zu (use "
                      "mfsdp_newton_schulz_desc_default)",
                      sizeof(*desc));
  MFSDP_TRY(mfsdp__ns_check_table(context, desc));
  if (desc->step_count < 0 || desc->step_count > MFSDP_NS_MAX_STEPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: step_count is %d, needs 0 to %d",
                      (int)desc->step_count, MFSDP_NS_MAX_STEPS);
  if (desc->form < MFSDP_NS_AUTO || desc->form > MFSDP_NS_GRAM)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: form is %d, needs 1 to %d",
                      (int)desc->form, (int)MFSDP_NS_GRAM);
  if (desc->dtype != MFSDP_F32 && desc->dtype != MFSDP_BF16 && desc->dtype != MFSDP_F16)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: dtype is %s, needs f32, bf16 or f16",
                      mfsdp_dtype_name(desc->dtype));
  if (desc->norm_rule < MFSDP_NORM_SCALE_SAFE || desc->norm_rule > MFSDP_NORM_ADD_EPS)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT, "newton_schulz: norm_rule is %d, needs 1 to %d",
                      (int)desc->norm_rule, (int)MFSDP_NORM_ADD_EPS);
  if (!(desc->eps > 0.0 && desc->eps <= 1e30) && desc->norm_rule != MFSDP_NORM_SCALE_SAFE)
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: eps is %g, needs to be positive and at most 1e30", desc->eps);
  if (!(desc->norm_factor >= 1e-6 && desc->norm_factor <= 1e6))
    return MFSDP_FAIL(context, MFSDP_E_ARGUMENT,
                      "newton_schulz: norm_factor is %g, needs to be 1e-6 to 1e6",
                      desc->norm_factor);
  return MFSDP_OK;
}

/* From here a symmetric product saves more than its calls and its mirror cost. */
#define MFSDP_NS_SYMMETRIC_FROM 64
/* From here GRAM's rounding noise, which hardly grows with s, is small beside the result's norm. */
#define MFSDP_NS_LARGE_FROM 256

/*
 * The form AUTO picks, s x l with s <= l:
 *   s >= 256   GRAM from l >= 1.5 s, otherwise SYMMETRIC
 *   s >= 64    GRAM from l >= 2 s, otherwise SYMMETRIC
 *   s < 64     GRAM from l >= 4 s, otherwise PLAIN
 * A function of the shape alone, so that results do not depend on placement or on the batch.
 */
MFSDP_API mfsdp_newton_schulz_form mfsdp_newton_schulz_form_of(const mfsdp_newton_schulz_desc *desc,
                                                               int64_t rows, int64_t cols) {
  const int64_t s = rows < cols ? rows : cols, l = rows < cols ? cols : rows;
  const int64_t more = s >= MFSDP_NS_LARGE_FROM ? s / 2 + s % 2 : s;
  if (desc->form != MFSDP_NS_AUTO) return desc->form;
  if (s < MFSDP_NS_SYMMETRIC_FROM) return l / 4 >= s ? MFSDP_NS_GRAM : MFSDP_NS_PLAIN;
  return l - s >= more ? MFSDP_NS_GRAM : MFSDP_NS_SYMMETRIC;
}

/* The row (a, b, c) of a step. */
MFSDP_API const double *mfsdp__ns_row(const mfsdp_newton_schulz_desc *desc, int32_t step) {
  return desc->coefficients[step < desc->coefficient_count ? step : desc->coefficient_count - 1];
}

/* Whether the steps bring back a singular value that is a tenth too large, with its sign. polar_express
 * and cans5, which turn upwards where their interval ends, and cubic5, which goes below zero there, do
 * not: they have a percent or a few. */
MFSDP_API int mfsdp__ns_forgives(const mfsdp_newton_schulz_desc *desc) {
  double x = 1.1;
  int32_t step;
  for (step = 0; step < desc->step_count; ++step) {
    const double *row = mfsdp__ns_row(desc, step);
    x *= row[0] + x * x * (row[1] + x * x * row[2]);
    if (!(x > 0.0 && x <= 4.0)) return 0; /* inner values reach 2 */
  }
  return 1;
}

/*
 * Restart points of GRAM for a rows x cols matrix. Steps raise small singular values by up to the
 * product of a, and the rounding noise of the Gram matrix with them; and Q, which holds them beside
 * large ones that stay near 1, is rounded to u times that product. AUTO:
 *   fp32      before that product, since the last restart, passes 500 (five steps of jordan or you5:
 *             no restart), or 50 where the short side is below 256
 *   16 bits   after step 2 and every two from there, while two or more remain: no step follows that
 *             amplifies what the last ones lose. With a table that does not forgive a tenth
 *             (polar_express, cans5, cubic5): before that product passes 24 in fp16, which makes
 *             24 / 2048 = 1.2%, what its safety factor stands; or 12 in bf16, hardly ever two steps
 *             (5%, measured to do)
 * A restart after the last step does nothing.
 */
MFSDP_API uint64_t mfsdp_newton_schulz_restarts_of(const mfsdp_newton_schulz_desc *desc,
                                                   int64_t rows, int64_t cols) {
  const int steep = desc->dtype != MFSDP_F32 && !mfsdp__ns_forgives(desc);
  const int counted = desc->dtype != MFSDP_F32 && !steep;
  double most = (rows < cols ? rows : cols) < MFSDP_NS_LARGE_FROM ? 50.0 : 500.0;
  uint64_t restarts = 0;
  double gain = 1.0;
  int32_t step;
  if (steep) most = desc->dtype == MFSDP_BF16 ? 12.0 : 24.0;
  if (desc->step_count == 0) return 0;
  if (desc->restarts != MFSDP_NS_RESTARTS_AUTO)
    return desc->restarts & ((UINT64_C(1) << (desc->step_count - 1)) - 1);
  for (step = 1; step < desc->step_count; ++step) {
    const double before = mfsdp__ns_row(desc, step - 1)[0], next = mfsdp__ns_row(desc, step)[0];
    gain *= before > 0.0 ? before : -before;
    if (counted ? step != 2 && (step % 2 != 0 || desc->step_count - step < 2)
                : gain * (next > 0.0 ? next : -next) <= most)
      continue;
    restarts |= UINT64_C(1) << (step - 1);
    gain = 1.0;
  }
  return restarts;
}

#endif /* MFSDP_NEWTON_SCHULZ_DESC_H */
