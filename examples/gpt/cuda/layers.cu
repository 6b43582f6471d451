/* SPDX-License-Identifier: MIT */
#include "layers_cuda.h"

#include "../ops.h" /* GPT_LAYERNORM_EPS */

#include <cuda_runtime.h>

#include <math.h>

static const int kWarp = 32;
static const int kThreads = 128;                   /* of element-wise kernels */
static const int kWarps = 4;                       /* of a block, where a warp has a row */
static const int kColumns = kWarp, kLanes = 8;     /* of a block that adds up columns */
static const int64_t kMostBlocks = INT64_C(65535); /* then threads take several turns */

static unsigned blocks_for(int64_t work, int64_t of_a_block) {
  const int64_t blocks = (work + of_a_block - 1) / of_a_block;
  return (unsigned)(blocks < 1 ? 1 : blocks > kMostBlocks ? kMostBlocks : blocks);
}

template <class... Parameters, class... Arguments>
static int launch(struct CUstream_st *stream, dim3 grid, dim3 block, void (*kernel)(Parameters...),
                  Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  return (int)cudaLaunchKernelEx(&config, kernel, arguments...);
}

/* A thread for each of `count` elements. */
template <class... Parameters, class... Arguments>
static int launch_elements(struct CUstream_st *stream, int64_t count, void (*kernel)(Parameters...),
                           Arguments... arguments) {
  return launch(stream, dim3(blocks_for(count, kThreads)), dim3((unsigned)kThreads), kernel,
                arguments...);
}

/* A warp for each of `rows` rows. */
template <class... Parameters, class... Arguments>
static int launch_rows(struct CUstream_st *stream, int64_t rows, void (*kernel)(Parameters...),
                       Arguments... arguments) {
  return launch(stream, dim3(blocks_for(rows, kWarps)), dim3((unsigned)(kWarp * kWarps)), kernel,
                arguments...);
}

/* A column for each x of a block, whose y share the rows. */
template <class... Parameters, class... Arguments>
static int launch_columns(struct CUstream_st *stream, int64_t dim, void (*kernel)(Parameters...),
                          Arguments... arguments) {
  return launch(stream, dim3((unsigned)((dim + kColumns - 1) / kColumns)),
                dim3((unsigned)kColumns, (unsigned)kLanes), kernel, arguments...);
}

/* ---- what kernels share ---- */

static __device__ inline int64_t first_element() {
  return (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
}
static __device__ inline int64_t element_stride() {
  return (int64_t)gridDim.x * blockDim.x;
}
static __device__ inline int64_t first_row() {
  return (int64_t)blockIdx.x * kWarps + threadIdx.x / kWarp;
}
static __device__ inline int64_t row_stride() {
  return (int64_t)gridDim.x * kWarps;
}
static __device__ inline int lane_of_warp() {
  return (int)(threadIdx.x % kWarp);
}

/* The same bits in every lane: each step adds the same two numbers on both sides. */
static __device__ inline float warp_sum(float value) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
    value += __shfl_xor_sync(0xffffffffu, value, lanes);
  return value;
}

static __device__ inline float larger(float a, float b) {
  return b > a ? b : a;
}

static __device__ inline float warp_max(float value) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2)
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, lanes));
  return value;
}

/* As the host's gpt_expf: neither it nor its inverse is 0 or infinite; NaN stays NaN. */
static __device__ inline float bounded_exp(float x) {
  const float above = x < -87.0f ? -87.0f : x;
  return expf(above > 87.0f ? 87.0f : above);
}

/* ---- element by element ---- */

static __global__ void scale_kernel(int64_t count, float factor, float *x) {
  for (int64_t i = first_element(); i < count; i += element_stride())
    x[i] *= factor;
}

static __global__ void bias_rows_kernel(int64_t count, int64_t dim, const float *x,
                                        const float *bias, float *y) {
  for (int64_t i = first_element(); i < count; i += element_stride())
    y[i] = x == NULL ? bias[i % dim] : x[i] + bias[i % dim];
}

/* The formula of gpt_bias_gelu_forward. */
static __global__ void gelu_kernel(int64_t count, int64_t dim, const float *x, const float *bias,
                                   float *y, float *slope) {
  const float two_k = 1.5957691216f; /* 2 sqrt(2/pi) */
  const float cubic = 0.044715f;
  for (int64_t i = first_element(); i < count; i += element_stride()) {
    const float u = x[i] + bias[i % dim];
    const float low = u < -12.0f ? -12.0f : u;
    const float v = low > 12.0f ? 12.0f : low;
    const float square = v * v;
    const float e = bounded_exp(-two_k * v * (1.0f + cubic * square));
    const float s = 1.0f / (1.0f + e);
    const float gain = two_k * (1.0f + 3.0f * cubic * square);
    y[i] = u * s;
    slope[i] = s + v * gain * s * (e * s);
  }
}

static __global__ void gelu_backward_kernel(int64_t count, const float *slope, float *dy) {
  for (int64_t i = first_element(); i < count; i += element_stride())
    dy[i] *= slope[i];
}

static __global__ void embedding_kernel(int64_t count, int64_t context, int64_t dim,
                                        const uint8_t *token, const float *wte, const float *wpe,
                                        float *x) {
  for (int64_t i = first_element(); i < count; i += element_stride()) {
    const int64_t row = i / dim, column = i % dim;
    x[i] = wte[token[row] * dim + column] + wpe[row % context * dim + column];
  }
}

/* ---- the embedding's gradients ---- */

/* A thread owns one element of dwte and looks for its token: no two add into one place. */
static __global__ void word_gradient_kernel(int64_t rows, int64_t dim, const uint8_t *token,
                                            const float *dx, float *dwte) {
  const int64_t word = blockIdx.y;
  for (int64_t i = first_element(); i < dim; i += element_stride()) {
    float sum = dwte[word * dim + i];
    for (int64_t row = 0; row < rows; ++row)
      if (token[row] == word) sum += dx[row * dim + i];
    dwte[word * dim + i] = sum;
  }
}

static __global__ void place_gradient_kernel(int64_t batch, int64_t count, const float *dx,
                                             float *dwpe) {
  for (int64_t i = first_element(); i < count; i += element_stride()) {
    float sum = dwpe[i];
    for (int64_t window = 0; window < batch; ++window)
      sum += dx[window * count + i];
    dwpe[i] = sum;
  }
}

/* ---- sums of columns ---- */

/* Adds the sums over a block's y, in their order, to out[column]. All threads call it. */
static __device__ inline void add_column(float (*part)[kColumns + 1], float sum, bool inside,
                                         float *out) {
  part[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y == 0 && inside) {
    float total = part[0][threadIdx.x];
    for (int lane = 1; lane < kLanes; ++lane)
      total += part[lane][threadIdx.x];
    *out += total;
  }
  __syncthreads(); /* part may be written to again */
}

static __global__ void bias_gradient_kernel(int64_t rows, int64_t dim, const float *dy,
                                            float *dbias) {
  __shared__ float part[kLanes][kColumns + 1];
  const int64_t column = (int64_t)blockIdx.x * kColumns + threadIdx.x;
  float sum = 0.0f;
  if (column < dim)
    for (int64_t row = threadIdx.y; row < rows; row += kLanes)
      sum += dy[row * dim + column];
  add_column(part, sum, column < dim, dbias + column);
}

static __global__ void layernorm_gradients_kernel(int64_t rows, int64_t dim, const float *x,
                                                  const float *mean, const float *rstd,
                                                  const float *dy, float *dgain, float *dbias) {
  __shared__ float part[kLanes][kColumns + 1];
  const int64_t column = (int64_t)blockIdx.x * kColumns + threadIdx.x;
  float gain = 0.0f, bias = 0.0f;
  if (column < dim)
    for (int64_t row = threadIdx.y; row < rows; row += kLanes) {
      const float up = dy[row * dim + column];
      gain += up * ((x[row * dim + column] - mean[row]) * rstd[row]);
      bias += up;
    }
  add_column(part, gain, column < dim, dgain + column);
  add_column(part, bias, column < dim, dbias + column);
}

/* ---- a warp for a row ---- */

static __global__ void layernorm_kernel(int64_t rows, int64_t dim, const float *x,
                                        const float *gain, const float *bias, float *y, float *mean,
                                        float *rstd) {
  const int lane = lane_of_warp();
  for (int64_t row = first_row(); row < rows; row += row_stride()) {
    const float *in = x + row * dim;
    float sum = 0.0f, squares = 0.0f, mu, scale;
    for (int64_t i = lane; i < dim; i += kWarp)
      sum += in[i];
    mu = warp_sum(sum) / (float)dim;
    for (int64_t i = lane; i < dim; i += kWarp)
      squares += (in[i] - mu) * (in[i] - mu);
    scale = 1.0f / sqrtf(warp_sum(squares) / (float)dim + GPT_LAYERNORM_EPS);
    for (int64_t i = lane; i < dim; i += kWarp)
      y[row * dim + i] = (in[i] - mu) * scale * gain[i] + bias[i];
    if (lane != 0) continue;
    mean[row] = mu;
    rstd[row] = scale;
  }
}

/* The products with gain are rounded as those in their mean, never fused: of rows that hardly
 * vary the differences are small, and rstd makes them large. */
static __global__ void layernorm_backward_kernel(int64_t rows, int64_t dim, const float *x,
                                                 const float *gain, const float *mean,
                                                 const float *rstd, const float *dy, float *dx) {
  const int lane = lane_of_warp();
  for (int64_t row = first_row(); row < rows; row += row_stride()) {
    const float *in = x + row * dim, *up = dy + row * dim;
    const float mu = mean[row], scale = rstd[row];
    float mean_g = 0.0f, mean_gx = 0.0f;
    for (int64_t i = lane; i < dim; i += kWarp) {
      const float g = __fmul_rn(up[i], gain[i]);
      mean_g += g;
      mean_gx += g * ((in[i] - mu) * scale);
    }
    mean_g = warp_sum(mean_g) / (float)dim;
    mean_gx = warp_sum(mean_gx) / (float)dim;
    for (int64_t i = lane; i < dim; i += kWarp)
      dx[row * dim + i] +=
          scale * (__fmul_rn(up[i], gain[i]) - mean_g - (in[i] - mu) * scale * mean_gx);
  }
}

static __global__ void softmax_kernel(int64_t rows, int64_t context, float *scores) {
  const int lane = lane_of_warp();
  for (int64_t row = first_row(); row < rows; row += row_stride()) {
    float *p = scores + row * context;
    const int64_t visible = row % context + 1;
    float top = -INFINITY, sum = 0.0f, inverse;
    for (int64_t i = lane; i < visible; i += kWarp)
      top = larger(top, p[i]);
    top = warp_max(top);
    for (int64_t i = lane; i < visible; i += kWarp)
      sum += bounded_exp(p[i] - top);
    inverse = 1.0f / warp_sum(sum);
    for (int64_t i = lane; i < context; i += kWarp)
      p[i] = i < visible ? bounded_exp(p[i] - top) * inverse : 0.0f;
  }
}

static __global__ void softmax_backward_kernel(int64_t rows, int64_t context, const float *probs,
                                               float *dscores) {
  const int lane = lane_of_warp();
  for (int64_t row = first_row(); row < rows; row += row_stride()) {
    const float *p = probs + row * context;
    float *d = dscores + row * context;
    const int64_t visible = row % context + 1;
    float total = 0.0f;
    for (int64_t i = lane; i < visible; i += kWarp)
      total += p[i] * d[i];
    total = warp_sum(total);
    for (int64_t i = lane; i < context; i += kWarp)
      d[i] = i < visible ? p[i] * (d[i] - total) : 0.0f;
  }
}

/* Lane i writes what lane i read, so the target's logit is read by the lane that overwrites it. */
static __global__ void cross_entropy_kernel(int64_t rows, int64_t classes, float *logits,
                                            const uint8_t *target, int gradient, double *losses) {
  const int lane = lane_of_warp();
  for (int64_t row = first_row(); row < rows; row += row_stride()) {
    float *in = logits + row * classes;
    const int64_t wanted = target[row];
    float top = -INFINITY, sum = 0.0f, scale;
    for (int64_t i = lane; i < classes; i += kWarp)
      top = larger(top, in[i]);
    top = warp_max(top);
    for (int64_t i = lane; i < classes; i += kWarp)
      sum += bounded_exp(in[i] - top);
    sum = warp_sum(sum);
    if (lane == wanted % kWarp) losses[row] = log((double)sum) - (double)(in[wanted] - top);
    if (!gradient) continue;
    scale = 1.0f / (sum * (float)rows);
    for (int64_t i = lane; i < classes; i += kWarp) {
      const float share = bounded_exp(in[i] - top) * scale;
      in[i] = i == wanted ? share - 1.0f / (float)rows : share;
    }
  }
}

/* losses[rows] = the mean; one block. */
static __global__ void mean_kernel(int64_t rows, double *losses) {
  __shared__ double part[kThreads];
  double sum = 0.0;
  for (int64_t row = threadIdx.x; row < rows; row += kThreads)
    sum += losses[row];
  part[threadIdx.x] = sum;
  for (unsigned width = kThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) part[threadIdx.x] += part[threadIdx.x + width];
  }
  if (threadIdx.x == 0) losses[rows] = part[0] / (double)rows;
}

/* ---- the interface ---- */

int gpt_cuda_scale(struct CUstream_st *stream, int64_t count, float factor, float *x) {
  return launch_elements(stream, count, scale_kernel, count, factor, x);
}

int gpt_cuda_layernorm_forward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                               const float *x, const float *gain, const float *bias, float *y,
                               float *mean, float *rstd) {
  return launch_rows(stream, rows, layernorm_kernel, rows, dim, x, gain, bias, y, mean, rstd);
}

int gpt_cuda_layernorm_backward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                                const float *x, const float *gain, const float *mean,
                                const float *rstd, const float *dy, float *dx, float *dgain,
                                float *dbias) {
  const int error = launch_columns(stream, dim, layernorm_gradients_kernel, rows, dim, x, mean,
                                   rstd, dy, dgain, dbias);
  if (error != 0) return error;
  return launch_rows(stream, rows, layernorm_backward_kernel, rows, dim, x, gain, mean, rstd, dy,
                     dx);
}

int gpt_cuda_bias_rows(struct CUstream_st *stream, int64_t rows, int64_t dim, const float *x,
                       const float *bias, float *y) {
  return launch_elements(stream, rows * dim, bias_rows_kernel, rows * dim, dim, x, bias, y);
}

int gpt_cuda_bias_backward(struct CUstream_st *stream, int64_t rows, int64_t dim, const float *dy,
                           float *dbias) {
  return launch_columns(stream, dim, bias_gradient_kernel, rows, dim, dy, dbias);
}

int gpt_cuda_bias_gelu_forward(struct CUstream_st *stream, int64_t rows, int64_t dim,
                               const float *x, const float *bias, float *y, float *slope) {
  return launch_elements(stream, rows * dim, gelu_kernel, rows * dim, dim, x, bias, y, slope);
}

int gpt_cuda_gelu_backward(struct CUstream_st *stream, int64_t count, const float *slope,
                           float *dy) {
  return launch_elements(stream, count, gelu_backward_kernel, count, slope, dy);
}

int gpt_cuda_embedding_forward(struct CUstream_st *stream, int64_t batch, int64_t context,
                               int64_t dim, const uint8_t *token, const float *wte,
                               const float *wpe, float *x) {
  const int64_t count = batch * context * dim;
  return launch_elements(stream, count, embedding_kernel, count, context, dim, token, wte, wpe, x);
}

int gpt_cuda_embedding_backward(struct CUstream_st *stream, int64_t batch, int64_t context,
                                int64_t dim, int64_t classes, const uint8_t *token, const float *dx,
                                float *dwte, float *dwpe) {
  const int error =
      launch(stream, dim3(blocks_for(dim, kThreads), (unsigned)classes), dim3((unsigned)kThreads),
             word_gradient_kernel, batch * context, dim, token, dx, dwte);
  if (error != 0) return error;
  return launch_elements(stream, context * dim, place_gradient_kernel, batch, context * dim, dx,
                         dwpe);
}

int gpt_cuda_causal_softmax(struct CUstream_st *stream, int64_t rows, int64_t context,
                            float *scores) {
  return launch_rows(stream, rows, softmax_kernel, rows, context, scores);
}

int gpt_cuda_causal_softmax_backward(struct CUstream_st *stream, int64_t rows, int64_t context,
                                     const float *probs, float *dscores) {
  return launch_rows(stream, rows, softmax_backward_kernel, rows, context, probs, dscores);
}

int gpt_cuda_cross_entropy(struct CUstream_st *stream, int64_t rows, int64_t classes, float *logits,
                           const uint8_t *target, int gradient, double *losses) {
  const int error = launch_rows(stream, rows, cross_entropy_kernel, rows, classes, logits, target,
                                gradient, losses);
  if (error != 0) return error;
  return launch(stream, dim3(1), dim3((unsigned)kThreads), mean_kernel, rows, losses);
}
