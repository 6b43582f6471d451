/* SPDX-License-Identifier: MIT */
#include "layers.h"

#include "vector_math.h"

#include <math.h>

void gpt_layernorm_forward(int64_t rows, int64_t dim, const float *x, const float *restrict gain,
                           const float *restrict bias, float *y, float *mean, float *rstd) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *in = x + row * dim;
    float *restrict out = y + row * dim;
    const float mu = gpt_sum(in, dim) / (float)dim;
    float variance, scale;
    for (int64_t i = 0; i < dim; ++i)
      out[i] = in[i] - mu;
    variance = gpt_dot(out, out, dim) / (float)dim;
    scale = 1.0f / sqrtf(variance + GPT_LAYERNORM_EPS);
    for (int64_t i = 0; i < dim; ++i)
      out[i] = out[i] * scale * gain[i] + bias[i];
    mean[row] = mu;
    rstd[row] = scale;
  }
}

/* Sums over one row of g = dy * gain and of g * xhat, in lanes (see vector_math.h). */
static void layernorm_row_sums(int64_t dim, const float *x, const float *gain, const float *dy,
                               float mu, float scale, float *sum_g, float *sum_gx) {
  float lane_g[GPT_LANES] = {0}, lane_gx[GPT_LANES] = {0};
  int64_t i = 0;
  for (; i + GPT_LANES <= dim; i += GPT_LANES)
    for (int j = 0; j < GPT_LANES; ++j) {
      const float g = dy[i + j] * gain[i + j];
      lane_g[j] += g;
      lane_gx[j] += g * ((x[i + j] - mu) * scale);
    }
  for (int j = 0; i < dim; ++i, ++j) {
    const float g = dy[i] * gain[i];
    lane_g[j] += g;
    lane_gx[j] += g * ((x[i] - mu) * scale);
  }
  *sum_g = gpt_fold_lanes(lane_g);
  *sum_gx = gpt_fold_lanes(lane_gx);
}

void gpt_layernorm_backward(int64_t rows, int64_t dim, const float *x, const float *restrict gain,
                            const float *mean, const float *rstd, const float *dy, float *dx,
                            float *restrict dgain, float *restrict dbias) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *restrict in = x + row * dim, *restrict up = dy + row * dim;
    float *restrict down = dx + row * dim;
    const float mu = mean[row], scale = rstd[row];
    float mean_g, mean_gx;
    layernorm_row_sums(dim, in, gain, up, mu, scale, &mean_g, &mean_gx);
    mean_g /= (float)dim;
    mean_gx /= (float)dim;
    for (int64_t i = 0; i < dim; ++i) {
      const float xhat = (in[i] - mu) * scale;
      down[i] += scale * (up[i] * gain[i] - mean_g - xhat * mean_gx);
      dgain[i] += up[i] * xhat;
      dbias[i] += up[i];
    }
  }
}

void gpt_bias_rows(int64_t rows, int64_t dim, const float *bias, float *y) {
  for (int64_t row = 0; row < rows; ++row)
    memcpy(y + row * dim, bias, (size_t)dim * sizeof *bias);
}

void gpt_residual_bias_rows(int64_t rows, int64_t dim, const float *x, const float *restrict bias,
                            float *y) {
  for (int64_t row = 0; row < rows; ++row) {
    const float *restrict in = x + row * dim;
    float *restrict out = y + row * dim;
    for (int64_t i = 0; i < dim; ++i)
      out[i] = in[i] + bias[i];
  }
}

void gpt_bias_backward(int64_t rows, int64_t dim, const float *dy, float *restrict dbias) {
  int64_t row = 0;
  /* Four rows at a time: a quarter of the loads and stores of dbias. */
  for (; row + 4 <= rows; row += 4) {
    const float *restrict a = dy + row * dim, *restrict b = a + dim;
    const float *restrict c = b + dim, *restrict d = c + dim;
    for (int64_t i = 0; i < dim; ++i)
      dbias[i] += (a[i] + b[i]) + (c[i] + d[i]);
  }
  for (; row < rows; ++row) {
    const float *restrict a = dy + row * dim;
    for (int64_t i = 0; i < dim; ++i)
      dbias[i] += a[i];
  }
}

void gpt_bias_gelu_forward(int64_t rows, int64_t dim, const float *x, const float *restrict bias,
                           float *y, float *slope) {
  const float two_k = 1.5957691216f; /* 2 sqrt(2/pi) */
  const float cubic = 0.044715f;
  for (int64_t row = 0; row < rows; ++row) {
    /* Not restrict: slope may be x, and element i is read before it is written. */
    const float *in = x + row * dim;
    float *out = y + row * dim, *derivative = slope + row * dim;
    for (int64_t i = 0; i < dim; ++i) {
      const float u = in[i] + bias[i];
      /* Beyond 12 the sigmoid is 0 or 1 in fp32; the clamp keeps u^3 finite. */
      const float low = u < -12.0f ? -12.0f : u;
      const float v = low > 12.0f ? 12.0f : low;
      const float square = v * v;
      const float e = gpt_expf(-two_k * v * (1.0f + cubic * square));
      const float s = 1.0f / (1.0f + e);
      const float gain = two_k * (1.0f + 3.0f * cubic * square);
      out[i] = u * s;
      /* e * s is 1 - s without its cancellation near 1. */
      derivative[i] = s + v * gain * s * (e * s);
    }
  }
}

void gpt_gelu_backward(int64_t count, const float *restrict slope, float *restrict dy) {
  for (int64_t i = 0; i < count; ++i)
    dy[i] *= slope[i];
}

void gpt_embedding_forward(int64_t batch, int64_t context, int64_t dim, const uint8_t *token,
                           const float *wte, const float *wpe, float *x) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < context; ++t) {
      const float *restrict word = wte + token[b * context + t] * dim;
      const float *restrict place = wpe + t * dim;
      float *restrict out = x + (b * context + t) * dim;
      for (int64_t i = 0; i < dim; ++i)
        out[i] = word[i] + place[i];
    }
}

void gpt_embedding_backward(int64_t batch, int64_t context, int64_t dim, const uint8_t *token,
                            const float *dx, float *dwte, float *dwpe) {
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t t = 0; t < context; ++t) {
      float *restrict word = dwte + token[b * context + t] * dim;
      float *restrict place = dwpe + t * dim;
      const float *restrict in = dx + (b * context + t) * dim;
      for (int64_t i = 0; i < dim; ++i) {
        word[i] += in[i];
        place[i] += in[i];
      }
    }
}

double gpt_cross_entropy(int64_t rows, int64_t classes, const float *logits,
                         const uint8_t *target) {
  double loss = 0.0;
  for (int64_t row = 0; row < rows; ++row) {
    const float *in = logits + row * classes;
    const float top = gpt_max(in, classes);
    float part[GPT_LANES * 16]; /* exponentials of one stretch of the row */
    double sum = 0.0;
    for (int64_t i = 0; i < classes; i += GPT_LANES * 16) {
      const int64_t count = classes - i < GPT_LANES * 16 ? classes - i : GPT_LANES * 16;
      sum += (double)gpt_exp_sum(in + i, top, count, part);
    }
    loss += log(sum) - (double)(in[target[row]] - top);
  }
  return loss / (double)rows;
}

double gpt_cross_entropy_backward(int64_t rows, int64_t classes, float *logits,
                                  const uint8_t *target) {
  double loss = 0.0;
  for (int64_t row = 0; row < rows; ++row) {
    float *restrict in = logits + row * classes;
    const float top = gpt_max(in, classes);
    const float chosen = in[target[row]] - top;
    const float sum = gpt_exp_sum(in, top, classes, in);
    const float scale = 1.0f / (sum * (float)rows);
    for (int64_t i = 0; i < classes; ++i)
      in[i] *= scale;
    in[target[row]] -= 1.0f / (float)rows;
    loss += log((double)sum) - (double)chosen;
  }
  return loss / (double)rows;
}
