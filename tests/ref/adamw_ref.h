/* SPDX-License-Identifier: MIT */
/*
 * adamw_ref.h: AdamW (torch's formula) in float64, and in float32 with a stated order of operations
 * so that a float32 implementation with the same order can be compared bit by bit.
 *
 *   ref::AdamwOptions options;                       // torch's defaults
 *   for (int64_t t = 1; t <= 5; ++t) ref::adamw_step(options, t, grad[t], &m, &v, &w);
 *
 * t counts applied steps from 1.
 */
#ifndef MFSDP_TESTS_REF_ADAMW_REF_H
#define MFSDP_TESTS_REF_ADAMW_REF_H

#include "dense_ref.h"

namespace ref {

struct AdamwOptions {
  double lr, beta1, beta2, eps, weight_decay;
  double grad_scale; /* all gradient factors (accumulation, clipping) multiplied together */
  AdamwOptions()
      : lr(1e-3), beta1(0.9), beta2(0.999), eps(1e-8), weight_decay(1e-2), grad_scale(1.0) {}
};

/*
 * W = (1 - lr wd) W;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
 * W = W - lr/(1-b1^t) m / (sqrt(v)/sqrt(1-b2^t) + eps)
 */
inline void adamw_step(const AdamwOptions &o, int64_t t, const std::vector<double> &grad,
                       std::vector<double> *m, std::vector<double> *v, std::vector<double> *w) {
  require(m->size() == grad.size() && v->size() == grad.size() && w->size() == grad.size(),
          "ref::adamw_step: sizes differ");
  require(t >= 1, "ref::adamw_step: t counts from 1");
  const double correction1 = 1.0 - std::pow(o.beta1, static_cast<double>(t));
  const double correction2 = 1.0 - std::pow(o.beta2, static_cast<double>(t));
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const double g = o.grad_scale * grad[i];
    (*m)[i] = o.beta1 * (*m)[i] + (1.0 - o.beta1) * g;
    (*v)[i] = o.beta2 * (*v)[i] + (1.0 - o.beta2) * g * g;
    const double denominator = std::sqrt((*v)[i]) / std::sqrt(correction2) + o.eps;
    (*w)[i] = (1.0 - o.lr * o.weight_decay) * (*w)[i] - o.lr / correction1 * (*m)[i] / denominator;
  }
}

/*
 * The float32 twin. Every constant is computed in double and rounded to float once:
 *   scale = grad_scale, b1, 1 - b1, b2, 1 - b2, decay = 1 - lr wd, sqrt_bc2 = sqrt(1 - b2^t),
 *   step_size = lr / (1 - b1^t), eps
 * and every line below is a sequence of single float operations, each rounded, none fused:
 *   g = G * scale
 *   m = (b1 * m) + ((1-b1) * g)
 *   v = (b2 * v) + (((1-b2) * g) * g)
 *   w = w * decay
 *   denom = (sqrtf(v) / sqrt_bc2) + eps
 *   w = w - (step_size * (m / denom))
 * The bits are promised only with -ffp-contract=off, as everything in this project is built.
 */
inline void adamw_step_f32(const AdamwOptions &o, int64_t t, const std::vector<float> &grad,
                           std::vector<float> *m, std::vector<float> *v, std::vector<float> *w) {
  require(m->size() == grad.size() && v->size() == grad.size() && w->size() == grad.size(),
          "ref::adamw_step_f32: sizes differ");
  require(t >= 1, "ref::adamw_step_f32: t counts from 1");
  const double power = static_cast<double>(t);
  const float scale = static_cast<float>(o.grad_scale);
  const float b1 = static_cast<float>(o.beta1), one_minus_b1 = static_cast<float>(1.0 - o.beta1);
  const float b2 = static_cast<float>(o.beta2), one_minus_b2 = static_cast<float>(1.0 - o.beta2);
  const float decay = static_cast<float>(1.0 - o.lr * o.weight_decay);
  const float sqrt_bc2 = static_cast<float>(std::sqrt(1.0 - std::pow(o.beta2, power)));
  const float step_size = static_cast<float>(o.lr / (1.0 - std::pow(o.beta1, power)));
  const float eps = static_cast<float>(o.eps);
  for (std::size_t i = 0; i < grad.size(); ++i) {
    const float g = grad[i] * scale;
    const float old_share1 = b1 * (*m)[i], new_share1 = one_minus_b1 * g;
    (*m)[i] = old_share1 + new_share1;
    const float old_share2 = b2 * (*v)[i], weighted = one_minus_b2 * g, new_share2 = weighted * g;
    (*v)[i] = old_share2 + new_share2;
    const float decayed = (*w)[i] * decay;
    const float root = std::sqrt((*v)[i]) / sqrt_bc2;
    const float denominator = root + eps;
    const float direction = (*m)[i] / denominator, change = step_size * direction;
    (*w)[i] = decayed - change;
  }
}

} // namespace ref

#endif
