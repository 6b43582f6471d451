/* SPDX-License-Identifier: MIT */
/*
 * gpt_ref.h - the GPT example's forward pass in float64, written from its formulas with plain loops
 * and tanh, without a look at the code under test: the reference of gradients by central
 * differences.
 */
#ifndef TESTS_GPT_REF_H
#define TESTS_GPT_REF_H

#include "examples/gpt/config.h"

#include <cmath>
#include <cstdint>
#include <vector>

namespace gpt_ref {

using Vector = std::vector<double>;
using Params =
    std::vector<Vector>; /* declared order of config.h; a tied head's entry is not read */

inline Vector LayerNorm(const Vector &x, size_t dim, const Vector &gain, const Vector &bias) {
  Vector y(x.size());
  for (size_t row = 0; row < x.size(); row += dim) {
    double mean = 0.0, variance = 0.0;
    for (size_t i = 0; i < dim; ++i)
      mean += x[row + i] / double(dim);
    for (size_t i = 0; i < dim; ++i)
      variance += std::pow(x[row + i] - mean, 2) / double(dim);
    for (size_t i = 0; i < dim; ++i)
      y[row + i] = (x[row + i] - mean) / std::sqrt(variance + 1e-5) * gain[i] + bias[i];
  }
  return y;
}

/* y = x W^T + b; an empty bias is none. */
inline Vector Linear(const Vector &x, size_t inputs, const Vector &weight, const Vector &bias) {
  const size_t outputs = weight.size() / inputs, rows = x.size() / inputs;
  Vector y(rows * outputs);
  for (size_t row = 0; row < rows; ++row)
    for (size_t o = 0; o < outputs; ++o) {
      double sum = bias.empty() ? 0.0 : bias[o];
      for (size_t i = 0; i < inputs; ++i)
        sum += x[row * inputs + i] * weight[o * inputs + i];
      y[row * outputs + o] = sum;
    }
  return y;
}

inline double Gelu(double x) {
  return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
}

inline Vector Attention(const Vector &qkv, size_t batch, size_t context, size_t dim, size_t heads) {
  const size_t width = dim / heads;
  Vector out(batch * context * dim, 0.0);
  for (size_t b = 0; b < batch; ++b)
    for (size_t h = 0; h < heads; ++h)
      for (size_t t = 0; t < context; ++t) {
        const double *q = &qkv[(b * context + t) * 3 * dim + h * width];
        Vector score(t + 1);
        double top = -INFINITY, sum = 0.0;
        for (size_t s = 0; s <= t; ++s) {
          const double *k = &qkv[(b * context + s) * 3 * dim + dim + h * width];
          for (size_t i = 0; i < width; ++i)
            score[s] += q[i] * k[i] / std::sqrt(double(width));
          top = std::max(top, score[s]);
        }
        for (double &s : score)
          sum += s = std::exp(s - top);
        for (size_t s = 0; s <= t; ++s) {
          const double *v = &qkv[(b * context + s) * 3 * dim + 2 * dim + h * width];
          double *o = &out[(b * context + t) * dim + h * width];
          for (size_t i = 0; i < width; ++i)
            o[i] += score[s] / sum * v[i];
        }
      }
  return out;
}

inline void Add(Vector *x, const Vector &y) {
  for (size_t i = 0; i < x->size(); ++i)
    (*x)[i] += y[i];
}

inline Vector Block(Vector x, const gpt_config &c, const Vector *p) {
  const size_t dim = size_t(c.dim);
  Vector y = LayerNorm(x, dim, p[GPT_LN1_GAIN], p[GPT_LN1_BIAS]);
  y = Linear(y, dim, p[GPT_QKV_WEIGHT], p[GPT_QKV_BIAS]);
  y = Attention(y, size_t(c.batch), size_t(c.context), dim, size_t(c.heads));
  Add(&x, Linear(y, dim, p[GPT_PROJECTION_WEIGHT], p[GPT_PROJECTION_BIAS]));
  y = LayerNorm(x, dim, p[GPT_LN2_GAIN], p[GPT_LN2_BIAS]);
  y = Linear(y, dim, p[GPT_UP_WEIGHT], p[GPT_UP_BIAS]);
  for (double &v : y)
    v = Gelu(v);
  Add(&x, Linear(y, 4 * dim, p[GPT_DOWN_WEIGHT], p[GPT_DOWN_BIAS]));
  return x;
}

inline Vector Logits(const gpt_config &c, const Params &p, const std::vector<uint8_t> &inputs) {
  const size_t dim = size_t(c.dim), head = size_t(gpt_param_count(&c)) - GPT_HEAD_PARAMS;
  Vector x(inputs.size() * dim);
  for (size_t t = 0; t < inputs.size(); ++t)
    for (size_t i = 0; i < dim; ++i)
      x[t * dim + i] =
          p[GPT_WTE][inputs[t] * dim + i] + p[GPT_WPE][(t % size_t(c.context)) * dim + i];
  for (size_t layer = 0; layer < size_t(c.layers); ++layer)
    x = Block(x, c, &p[GPT_EMBEDDING_PARAMS + layer * GPT_BLOCK_PARAMS]);
  x = LayerNorm(x, dim, p[head + GPT_FINAL_GAIN], p[head + GPT_FINAL_BIAS]);
  return Linear(x, dim, c.tied ? p[GPT_WTE] : p[head + GPT_HEAD_WEIGHT], {});
}

inline double Loss(const gpt_config &c, const Params &p, const std::vector<uint8_t> &inputs,
                   const std::vector<uint8_t> &targets) {
  const Vector logits = Logits(c, p, inputs);
  const size_t vocab = size_t(c.vocab);
  double loss = 0.0;
  for (size_t t = 0; t < targets.size(); ++t) {
    double sum = 0.0;
    for (size_t v = 0; v < vocab; ++v)
      sum += std::exp(logits[t * vocab + v] - logits[t * vocab + targets[t]]);
    loss += std::log(sum) / double(targets.size());
  }
  return loss;
}

} // namespace gpt_ref

#endif /* TESTS_GPT_REF_H */
