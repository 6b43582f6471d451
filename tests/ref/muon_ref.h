/* SPDX-License-Identifier: MIT */
/*
 * muon_ref.h: Muon in float64 with the conventions of four public implementations.
 *
 *   ref::MuonOptions options = ref::muon_torch();
 *   options.lr = 0.02;
 *   std::vector<double> momentum(w.size(), 0.0);
 *   ref::muon_step(options, grad, rows, cols, &momentum, &w);
 *
 * W is m x n (rows = outputs). The order in all presets: momentum, Newton-Schulz, then
 * W = (1 - lr wd) W with the unscaled lr, then W = W - lr s X. Every preset starts with the
 * scale-safe norm; ref::with_reference_eps(preset) takes the eps of its source instead.
 * A convolution is passed flattened (out, in*kh*kw), and a missing gradient as zeros or not at all.
 */
#ifndef MFSDP_TESTS_REF_MUON_REF_H
#define MFSDP_TESTS_REF_MUON_REF_H

#include "newton_schulz_ref.h"

namespace ref {

enum class MuonScale {
  kOriginal,      /* sqrt(max(1, m/n)) */
  kMatchRmsAdamw, /* 0.2 sqrt(max(m, n)) */
  kSpectral,      /* sqrt(m/n) */
  kNone           /* 1 */
};

struct MuonOptions {
  double lr, weight_decay, momentum;
  bool nesterov;
  bool ema; /* true: B = mu B + (1-mu) G, nesterov (1-mu) G + mu B; false: B = mu B + G, G + mu B */
  MuonScale scale;
  EpsRule eps_rule;
  EpsRule source_rule; /* what with_reference_eps selects */
  double eps;
  double norm_factor;
  Coefficients coefficients;
  double grad_scale; /* multiplies the gradient before all else */
};

inline MuonOptions muon_torch() {
  MuonOptions o;
  o.lr = 1e-3;
  o.weight_decay = 0.1;
  o.momentum = 0.95;
  o.nesterov = true;
  o.ema = true;
  o.scale = MuonScale::kOriginal;
  o.eps_rule = EpsRule::kScaleSafe;
  o.source_rule = EpsRule::kReferenceMax;
  o.eps = 1e-7;
  o.norm_factor = 1.0;
  o.coefficients = coefficients_jordan();
  o.grad_scale = 1.0;
  return o;
}

inline MuonOptions muon_jordan() {
  MuonOptions o = muon_torch();
  o.lr = 0.02;
  o.weight_decay = 0.0;
  o.source_rule = EpsRule::kReferenceAdd;
  return o;
}

inline MuonOptions muon_moonlight() {
  MuonOptions o = muon_torch();
  o.ema = false;
  o.scale = MuonScale::kMatchRmsAdamw;
  o.source_rule = EpsRule::kReferenceAdd;
  return o;
}

/* The Polar Express table with f = 1.01 and the norm multiplied by the same factor. */
inline MuonOptions muon_dion() {
  MuonOptions o = muon_torch();
  o.nesterov = false;
  o.ema = false;
  o.scale = MuonScale::kSpectral;
  o.source_rule = EpsRule::kReferenceAdd;
  o.norm_factor = 1.01;
  o.coefficients = coefficients_polar_express(5);
  return o;
}

inline MuonOptions with_reference_eps(MuonOptions options) {
  options.eps_rule = options.source_rule;
  return options;
}

inline double muon_scale(MuonScale scale, int64_t rows, int64_t cols) {
  const double m = static_cast<double>(rows), n = static_cast<double>(cols);
  switch (scale) {
  case MuonScale::kOriginal: return std::sqrt(std::max(1.0, m / n));
  case MuonScale::kMatchRmsAdamw: return 0.2 * std::sqrt(std::max(m, n));
  case MuonScale::kSpectral: return std::sqrt(m / n);
  case MuonScale::kNone: break;
  }
  return 1.0;
}

/* New momentum; the return value is the update that Newton-Schulz is fed. */
inline std::vector<double> muon_momentum(const MuonOptions &o, const std::vector<double> &grad,
                                         std::vector<double> *momentum) {
  require(momentum->size() == grad.size(), "ref::muon_momentum: sizes differ");
  const double mu = o.momentum, weight = o.ema ? 1.0 - mu : 1.0;
  std::vector<double> update(grad.size());
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const double g = o.grad_scale * grad[i];
    double &b = (*momentum)[i];
    b = mu * b + weight * g;
    update[i] = o.nesterov ? weight * g + mu * b : b;
  }
  return update;
}

inline void muon_step(const MuonOptions &o, const std::vector<double> &grad, int64_t rows,
                      int64_t cols, std::vector<double> *momentum, std::vector<double> *weight) {
  require_shape(grad, rows, cols);
  require_shape(*weight, rows, cols);
  if (grad.empty()) return;
  const std::vector<double> update = muon_momentum(o, grad, momentum);
  const std::vector<double> x =
      newton_schulz(update, rows, cols, o.coefficients, o.eps_rule, o.eps, o.norm_factor);
  const double decay = 1.0 - o.lr * o.weight_decay;
  const double step = o.lr * muon_scale(o.scale, rows, cols);
  for (std::size_t i = 0; i < weight->size(); ++i) {
    (*weight)[i] = decay * (*weight)[i] - step * x[i];
  }
}

} // namespace ref

#endif
