/* SPDX-License-Identifier: MIT */
/*
 * coefficients.h - the published coefficient sets of Newton-Schulz, by name.
 *
 *   int32_t count;
 *   const double (*rows)[3] = mfsdp_ns_set_rows(MFSDP_NS_SET_YOU5, &count);      // (a, b, c) each
 *   mfsdp_ns_set set = mfsdp_ns_set_by_name("polar_express");                    // 0: no such name
 *
 * What they make of singular values in [.01, 1] after normalization, in exact arithmetic, with the
 * steps of mfsdp_ns_set_steps: jordan5 .682 to 1.134; you5 .978 to 1.032; polar_express .870 to 1.124
 * (six steps .997 to 1.001); polar_express_16 .846 to 1.124; cans5 .855 to 1.113; cubic5 .816 to 1.300;
 * deepseek_v4 1.000 to 1.001.
 *
 * Does not: contain the older "Turbo-Muon" (AOL) set, which flips the sign of singular values when
 * the largest exceeds 0.884 after normalization.
 * Part of newton_schulz.h. Link flags: none.
 */
#ifndef MFSDP_NEWTON_SCHULZ_COEFFICIENTS_H
#define MFSDP_NEWTON_SCHULZ_COEFFICIENTS_H

#include "../config.h"

#include <stdint.h>
#include <string.h>

/* X(NAME, "name", rows function, steps of its authors) */
#define MFSDP_NS_SETS(X)                              \
  X(JORDAN5, "jordan5", jordan5, 5)                   \
  X(YOU5, "you5", you5, 5)                            \
  X(POLAR_EXPRESS, "polar_express", polar, 5)         \
  X(POLAR_EXPRESS_16, "polar_express_16", polar16, 5) \
  X(CANS5, "cans5", cans5, 5)                         \
  X(CUBIC5, "cubic5", cubic5, 5)                      \
  X(DEEPSEEK_V4, "deepseek_v4", deepseek_v4, 10)

typedef enum mfsdp_ns_set {
  MFSDP_NS_SET_NONE = 0,
#define MFSDP__NS_SET_ENUM(NAME, name, rows, steps) MFSDP_NS_SET_##NAME,
  MFSDP_NS_SETS(MFSDP__NS_SET_ENUM)
#undef MFSDP__NS_SET_ENUM
      MFSDP_NS_SET_END
} mfsdp_ns_set;

/* Keller Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024. */
MFSDP_API const double (*mfsdp__ns_jordan5(int32_t *count))[3] {
  static const double rows[1][3] = {{3.4445, -4.7750, 2.0315}};
  *count = 1;
  return rows;
}

/* Jiacheng You's set, as in the modded-nanogpt speedruns. */
MFSDP_API const double (*mfsdp__ns_you5(int32_t *count))[3] {
  static const double rows[5][3] = {{4.0848, -6.8946, 2.9270},
                                    {3.9505, -6.3029, 2.6377},
                                    {3.7418, -5.5913, 2.3037},
                                    {2.8769, -3.1427, 1.2046},
                                    {2.8366, -3.0525, 1.2012}};
  *count = 5;
  return rows;
}

/* p(x / f) for a safety factor f: (a / f, b / f^3, c / f^5). */
#define MFSDP__NS_SAFE(f, a, b, c) \
  { (a) / (f), (b) / ((f) * (f) * (f)), (c) / ((f) * (f) * (f) * (f) * (f)) }
/* Amsel, Persson, Musco, Gower, "The Polar Express", 2025; the last row repeats for ever. */
#define MFSDP__NS_POLAR(f, last)                                                        \
  {                                                                                     \
    MFSDP__NS_SAFE(f, 8.28721201814563, -23.595886519098837, 17.300387312530933),       \
        MFSDP__NS_SAFE(f, 4.107059111542203, -2.9478499167379106, 0.5448431082926601),  \
        MFSDP__NS_SAFE(f, 3.9486908534822946, -2.908902115962949, 0.5518191394370137),  \
        MFSDP__NS_SAFE(f, 3.3184196573706015, -2.488488024314874, 0.51004894012372),    \
        MFSDP__NS_SAFE(f, 2.300652019954817, -1.6689039845749493, 0.4188073119525673),  \
        MFSDP__NS_SAFE(f, 1.891301407787398, -1.2679958271945868, 0.37680408948524835), \
        MFSDP__NS_SAFE(f, 1.8750014808534479, -1.2500016453999487, 0.3750001645474248), \
        MFSDP__NS_SAFE(last, 1.875, -1.25, 0.375)                                       \
  }

/* Safety factor 1.01 on all rows but the last. */
MFSDP_API const double (*mfsdp__ns_polar(int32_t *count))[3] {
  static const double rows[8][3] = MFSDP__NS_POLAR(1.01, 1.0);
  *count = 8;
  return rows;
}

/* Safety factor 1.05 on all rows: room for the rounding of a Gram matrix stored in 16 bits. */
MFSDP_API const double (*mfsdp__ns_polar16(int32_t *count))[3] {
  static const double rows[8][3] = MFSDP__NS_POLAR(1.05, 1.05);
  *count = 8;
  return rows;
}

/*
 * Safety factor on all rows of cans5 and cubic5, whose published rows stand no rounding. A matrix of
 * rank 1 starts at 1, where both begin to go wrong, and rounding lifts it:
 *   cans5   turns upwards where its interval ends, and diverges from 1.00001 on. Measured: not finite in
 *           bf16 and fp16; in fp32 off by 5% on a constant 384 x 384 and by 2000 on a constant row of
 *           3,000,000.
 *   cubic5  comes down to .024 there, and has the other sign from 1.0036 on. Measured: bf16 turned the
 *           sign of constant rows.
 * How large: let A, c A^2 (twice as much), P and the new X each be off by the unit roundoff u in
 * the worst direction, which a row of equal entries can meet. At the end of its interval a step of
 * cans5 is then off by 10 u, but the factor keeps the first value away from there; at the maxima inside
 * it is off by 2 u. Followed through all steps for bf16's u = 2^-8, cans5 stays below 1.123 from 1.011
 * on and cubic5 keeps the sign from 1.008 on (fp16: 1.0015 and 1). fp32 could do with less, but a set
 * has one polynomial. What it costs: cans5 as published makes .884 to 1.120 of [.01, 1]; cubic5
 * .774 to 1.300, and there it costs nothing.
 */
#define MFSDP__NS_SAFETY 1.0125

/* Grishina, Smirnov, Rakhuba, "Accelerating Newton-Schulz iteration ... Chebyshev-type
 * polynomials" (CANS), 2025. */
MFSDP_API const double (*mfsdp__ns_cans5(int32_t *count))[3] {
  static const double rows[5][3] = {MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 8.4703, -25.1081, 18.6293),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 4.1828, -3.1087, .5806),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 3.9619, -2.9541, .5630),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 3.2866, -2.4647, .5074),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 2.2737, -1.6447, .4162)};
  *count = 5;
  return rows;
}

/* Third degree: two products a step instead of three. */
MFSDP_API const double (*mfsdp__ns_cubic5(int32_t *count))[3] {
  static const double rows[5][3] = {MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 3.3656576, -3.3420992, 0.0),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 2.5744352, -1.4957376, 0.0),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 2.5368962, -1.4312570, 0.0),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 2.4418906, -1.2764040, 0.0),
                                    MFSDP__NS_SAFE(MFSDP__NS_SAFETY, 2.2230472, -.9630650, 0.0)};
  *count = 5;
  return rows;
}

/* Eight jordan steps, then two that pull everything to 1; the last repeats. */
MFSDP_API const double (*mfsdp__ns_deepseek_v4(int32_t *count))[3] {
#define MFSDP__NS_J \
  { 3.4445, -4.7750, 2.0315 }
  static const double rows[9][3] = {MFSDP__NS_J, MFSDP__NS_J, MFSDP__NS_J,
                                    MFSDP__NS_J, MFSDP__NS_J, MFSDP__NS_J,
                                    MFSDP__NS_J, MFSDP__NS_J, {2.0, -1.5, .5}};
#undef MFSDP__NS_J
  *count = 9;
  return rows;
}

/* The rows (a, b, c) of a set, row k for step k, the last repeating; NULL and 0 for none. */
MFSDP_API const double (*mfsdp_ns_set_rows(mfsdp_ns_set set, int32_t *count))[3] {
  *count = 0;
  switch (set) {
#define MFSDP__NS_SET_CASE(NAME, name, rows, steps) \
  case MFSDP_NS_SET_##NAME: return mfsdp__ns_##rows(count);
    MFSDP_NS_SETS(MFSDP__NS_SET_CASE)
#undef MFSDP__NS_SET_CASE
  case MFSDP_NS_SET_NONE:
  case MFSDP_NS_SET_END: break;
  }
  return NULL;
}

/* How many steps its authors use: 5, or 10 for deepseek_v4; 0 for none. */
MFSDP_API int32_t mfsdp_ns_set_steps(mfsdp_ns_set set) {
  switch (set) {
#define MFSDP__NS_SET_CASE(NAME, name, rows, steps) \
  case MFSDP_NS_SET_##NAME: return steps;
    MFSDP_NS_SETS(MFSDP__NS_SET_CASE)
#undef MFSDP__NS_SET_CASE
  case MFSDP_NS_SET_NONE:
  case MFSDP_NS_SET_END: break;
  }
  return 0;
}

/* In lower case, as "jordan5"; "invalid" for none; never NULL. */
MFSDP_API const char *mfsdp_ns_set_name(mfsdp_ns_set set) {
  switch (set) {
#define MFSDP__NS_SET_CASE(NAME, name, rows, steps) \
  case MFSDP_NS_SET_##NAME: return name;
    MFSDP_NS_SETS(MFSDP__NS_SET_CASE)
#undef MFSDP__NS_SET_CASE
  case MFSDP_NS_SET_NONE:
  case MFSDP_NS_SET_END: break;
  }
  return "invalid";
}

/* The set of that name, or MFSDP_NS_SET_NONE. NULL is allowed. */
MFSDP_API mfsdp_ns_set mfsdp_ns_set_by_name(const char *text) {
#define MFSDP__NS_SET_CASE(NAME, name, rows, steps) \
  if (text != NULL && strcmp(text, name) == 0) return MFSDP_NS_SET_##NAME;
  MFSDP_NS_SETS(MFSDP__NS_SET_CASE)
#undef MFSDP__NS_SET_CASE
  return MFSDP_NS_SET_NONE;
}

#endif /* MFSDP_NEWTON_SCHULZ_COEFFICIENTS_H */
