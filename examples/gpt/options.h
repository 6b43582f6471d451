/* SPDX-License-Identifier: MIT */
/*
 * options.h - every option of the training program, in one table: an option is added by adding a
 * line. The table yields the struct, the parser, the range checks and --help.
 */
#ifndef GPT_OPTIONS_H
#define GPT_OPTIONS_H

#include "config.h"
#include "error.h"
#include "strategy.h"

#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * X(KIND, field, "name", "default", low, high, "VALUE", "help")
 *   INTEGER  int64_t      low <= value <= high
 *   REAL     double       finite, low <= value <= high
 *   FLAG     int32_t      given or not; also --name=1 and --name=0
 *   TEXT     const char * not empty; points into argv; default "" means NULL
 *   CHOICE   int32_t      index of the name in VALUE, "a|b|c"; a name with ! in front is known, but
 *                         not in this build
 */

/* 1 in build/examples/train_gpt_cuda alone, NCCL where there is one: everything else is built
 * without a toolkit. */
#ifndef MFSDP_EXAMPLE_CUDA
#define MFSDP_EXAMPLE_CUDA 0
#endif
#ifndef MFSDP_EXAMPLE_NCCL
#define MFSDP_EXAMPLE_NCCL 0
#endif

#if MFSDP_EXAMPLE_MPI
#define GPT_TRANSPORTS_HOST "threads|mpi"
#else
#define GPT_TRANSPORTS_HOST "threads|!mpi"
#endif
#if MFSDP_EXAMPLE_NCCL
#define GPT_TRANSPORTS GPT_TRANSPORTS_HOST "|nccl"
#define GPT_TRANSPORTS_HELP                                                                        \
  "ranks are threads of this process, the processes of an mpirun, or (nccl) processes with a GPU " \
  "each"
#else
#define GPT_TRANSPORTS GPT_TRANSPORTS_HOST "|!nccl"
#define GPT_TRANSPORTS_HELP "ranks are threads of this process, or the processes of an mpirun"
#endif

#if MFSDP_EXAMPLE_CUDA
#define GPT_DEVICES "cpu|cuda"
#else
#define GPT_DEVICES "cpu|!cuda"
#endif

/* Shampoo and SOAP need a LAPACKE, or a GPU. */
#if MFSDP_EXAMPLE_LAPACKE || MFSDP_EXAMPLE_CUDA
#define GPT_OPTIMIZERS "muon|adamw|shampoo|soap"
#else
#define GPT_OPTIMIZERS "muon|adamw|!shampoo|!soap"
#endif

#define GPT_OPTIONS(X)                                                                           \
  X(TEXT, data, "data", "", 0, 0, "FILE", "text to train on (required)")                         \
  X(INTEGER, ranks, "ranks", "4", 1, 1024, "N", "data-parallel ranks")                           \
  X(CHOICE, transport, "transport", "threads", 0, 0, GPT_TRANSPORTS, GPT_TRANSPORTS_HELP)        \
  X(CHOICE, collective, "collective", "direct", 0, 0, "direct|ring|hierarchical|native|auto",    \
    "how units are gathered and reduced; sums in rank order, bit for bit, by direct alone")      \
  X(INTEGER, chunk_kib, "chunk-kib", "0", 0, 1048576, "N",                                       \
    "KiB of a unit in one message of --collective ring; 0: by the size of units and the hosts")  \
  X(FLAG, narrow_sums, "narrow-sums", "0", 0, 0, "",                                             \
    "native may add the gradients of --dtype bf16 or f16 in that type: sums are rounded")        \
  X(INTEGER, deadline, "deadline", "60", 1, 86400, "S",                                          \
    "seconds without progress until a rank that does not answer is an error")                    \
  X(INTEGER, micro_batches, "micro-batches", "1", 1, 1000000, "M",                               \
    "micro-batches per rank and step")                                                           \
  X(INTEGER, steps, "steps", "300", 1, 1000000000, "N", "optimizer steps")                       \
  X(CHOICE, optimizer, "optimizer", "muon", 0, 0, GPT_OPTIMIZERS,                                \
    "optimizer of the hidden matrices; the rest uses AdamW")                                     \
  X(CHOICE, planner, "planner", "balanced", 0, 0,                                                \
    "round-robin|role-greedy|scope-greedy|cost-aware|balanced", "how matrices get their owners") \
  X(INTEGER, layers, "layers", "4", 1, 1000, "N", "transformer blocks")                          \
  X(INTEGER, dim, "dim", "128", 1, 65536, "N", "width; a multiple of --heads")                   \
  X(INTEGER, heads, "heads", "4", 1, 4096, "N", "attention heads")                               \
  X(INTEGER, context, "context", "128", 1, 65536, "N", "bytes per window")                       \
  X(INTEGER, batch, "batch", "8", 1, 65536, "N", "windows per micro-batch")                      \
  X(REAL, lr, "lr", "0.02", 1e-12, 1e3, "LR",                                                    \
    "step size of the hidden matrices; unless it is given, --preset brings its own (this is "    \
    "jordan's), and Shampoo and SOAP have 0.003")                                                \
  X(REAL, adamw_lr, "adamw-lr", "0.003", 1e-12, 1e3, "LR",                                       \
    "step size of AdamW: the other parameters, or all with --optimizer adamw")                   \
  X(CHOICE, schedule, "schedule", "linear", 0, 0, "constant|linear|cosine|wsd|wsd-sqrt",         \
    "how all step sizes change over the steps, after the warm-up")                               \
  X(INTEGER, warmup, "warmup", "-1", -1, 1000000000, "N",                                        \
    "steps until the full step size; -1: a twentieth of --steps, at least 10")                   \
  X(INTEGER, decay_steps, "decay-steps", "-1", -1, 1000000000, "N",                              \
    "the last steps, in which wsd decays; -1: a fifth of --steps")                               \
  X(REAL, final_lr, "final-lr", "0.1", 0, 1, "F",                                                \
    "what is left of the step sizes after the last step")                                        \
  X(REAL, clip, "clip", "1", 0, 1e30, "NORM", "gradient norm limit; 0 is off")                   \
  X(FLAG, tied, "tied", "0", 0, 0, "", "the head shares the token embedding")                    \
  X(INTEGER, seed, "seed", "1", 0, 1e15, "N", "seed of initial values and sample order")         \
  X(INTEGER, threads_per_rank, "threads-per-rank", "1", 1, 1024, "N",                            \
    "BLAS threads of each rank; more than 1 gives up bitwise equality")                          \
  X(CHOICE, dtype, "dtype", "f32", 0, 0, "f32|bf16|f16",                                         \
    "parameters and gradients in transit; masters and sums stay fp32")                           \
  X(INTEGER, prefetch, "prefetch", "0", 0, 16, "K",                                              \
    "units gathered ahead, and reduced behind, by threads of their own")                         \
  X(INTEGER, reshard_after_forward, "reshard-after-forward", "1", 0, 1, "0|1",                   \
    "0: keep parameters until backward: half the gathers, more memory")                          \
  X(TEXT, loss_csv, "loss-csv", "", 0, 0, "FILE", "write step, loss and time to FILE")           \
  X(TEXT, loss_svg, "loss-svg", "", 0, 0, "FILE", "draw the loss curve to FILE")                 \
  X(TEXT, trace, "trace", "", 0, 0, "FILE", "write a Chrome trace to FILE, for ui.perfetto.dev") \
  X(TEXT, checkpoint, "checkpoint", "", 0, 0, "DIR",                                             \
    "save to DIR, at the end and every --save-every")                                            \
  X(INTEGER, save_every, "save-every", "0", 0, 1000000000, "N",                                  \
    "steps between saves; 0: the end only")                                                      \
  X(INTEGER, keep_last, "keep-last", "0", 0, 1000000, "N", "checkpoints that stay; 0: all")      \
  X(FLAG, async_save, "async-save", "0", 0, 0, "",                                               \
    "a thread of each rank writes while training goes on; costs a copy of what the rank owns")   \
  X(FLAG, resume, "resume", "0", 0, 0, "", "go on from the latest checkpoint in DIR")            \
  X(CHOICE, device, "device", "cpu", 0, 0, GPT_DEVICES,                                          \
    "where ranks compute; threads share the first visible GPU")                                  \
  X(CHOICE, strategy, "strategy", "matrix", 0, 0, GPT_STRATEGIES,                                \
    "who holds and updates the hidden matrices: an owner each, all ranks in row bands that are " \
    "gathered or sent to a home and back, or everybody (zero1: parameters; replicated: all); "   \
    "hybrid: an owner each, bands where that is faster")                                         \
  X(FLAG, step_in_backward, "step-in-backward", "0", 0, 0, "",                                   \
    "owners work on a unit's matrices as soon as their gradients are there, beside backward")    \
  X(CHOICE, preset, "preset", "jordan", 0, 0, "torch|jordan|moonlight|dion",                     \
    "whose Muon: momentum, scale, decay, step size and coefficients")                            \
  X(CHOICE, coefficients, "coefficients", "preset", 0, 0,                                        \
    "preset|jordan5|you5|polar-express|polar-express-16|cans5|cubic5|deepseek-v4",               \
    "polynomials of Muon's Newton-Schulz; preset: those of --preset")                            \
  X(INTEGER, precondition_every, "precondition-every", "10", 1, 1000000, "N",                    \
    "steps between new roots of Shampoo, or new bases of SOAP")                                  \
  X(INTEGER, precondition_limit, "precondition-limit", "10000", 0, 1048576, "N",                 \
    "longer sides of a matrix are not preconditioned by Shampoo and SOAP")                       \
  X(CHOICE, graft, "graft", "adamw", 0, 0, "adamw|sgd|none", "whose norm Shampoo's steps have")

/* The values of the CHOICE options, in the order of their lists. */
enum { GPT_OPTIMIZER_MUON = 0, GPT_OPTIMIZER_ADAMW, GPT_OPTIMIZER_SHAMPOO, GPT_OPTIMIZER_SOAP };
enum { GPT_GRAFT_ADAMW = 0, GPT_GRAFT_SGD, GPT_GRAFT_NONE };
enum { GPT_TRANSPORT_THREADS = 0, GPT_TRANSPORT_MPI, GPT_TRANSPORT_NCCL };
enum { GPT_DEVICE_CPU = 0, GPT_DEVICE_CUDA };
enum {
  GPT_COLLECTIVE_DIRECT = 0,
  GPT_COLLECTIVE_RING,
  GPT_COLLECTIVE_HIERARCHICAL,
  GPT_COLLECTIVE_NATIVE,
  GPT_COLLECTIVE_AUTO
};
enum { GPT_PRESET_TORCH = 0, GPT_PRESET_JORDAN, GPT_PRESET_MOONLIGHT, GPT_PRESET_DION };
enum { GPT_COEFFICIENTS_PRESET = 0 }; /* then the sets in the order of MFSDP_NS_SETS */
/* mfsdp_schedule_kind less one. */
enum {
  GPT_SCHEDULE_CONSTANT = 0,
  GPT_SCHEDULE_LINEAR,
  GPT_SCHEDULE_COSINE,
  GPT_SCHEDULE_WSD,
  GPT_SCHEDULE_WSD_SQRT
};
enum { GPT_DTYPE_F32 = 0, GPT_DTYPE_BF16, GPT_DTYPE_F16 };
enum {
  GPT_PLANNER_ROUND_ROBIN = 0,
  GPT_PLANNER_ROLE_GREEDY,
  GPT_PLANNER_SCOPE_GREEDY,
  GPT_PLANNER_COST_AWARE,
  GPT_PLANNER_BALANCED
};

/* GPT_OPTION_data, GPT_OPTION_ranks, ...: index into `given`. */
enum gpt_option_index {
#define GPT_OPTION_INDEX(kind, field, name, initial, low, high, value, help) GPT_OPTION_##field,
  GPT_OPTIONS(GPT_OPTION_INDEX)
#undef GPT_OPTION_INDEX
      GPT_OPTION_COUNT
};

#define GPT_OPTION_FIELD_INTEGER(field) int64_t field;
#define GPT_OPTION_FIELD_REAL(field) double field;
#define GPT_OPTION_FIELD_FLAG(field) int32_t field;
#define GPT_OPTION_FIELD_TEXT(field) const char *field;
#define GPT_OPTION_FIELD_CHOICE(field) int32_t field;

typedef struct gpt_options {
#define GPT_OPTION_FIELD(kind, field, name, initial, low, high, value, help) \
  GPT_OPTION_FIELD_##kind(field)
  GPT_OPTIONS(GPT_OPTION_FIELD)
#undef GPT_OPTION_FIELD
  uint8_t given[GPT_OPTION_COUNT]; /* 1: on the command line */
} gpt_options;

enum { GPT_OPTIONS_HELP = 1 };

/*
 * Parses `--name value` and `--name=value`; where a name comes twice, the last counts. Returns
 * GPT_OK; GPT_OPTIONS_HELP if --help was given (print gpt_options_help, exit 0); or GPT_USAGE_ERROR
 * with a line for standard error (exit 2). On GPT_OK the values are checked together too: a file is
 * named, the model's shape holds, no output overwrites the input.
 */
int gpt_options_parse(int argc, const char *const *argv, gpt_options *options, gpt_error *error);

/* The table with defaults, for standard output. */
void gpt_options_help(FILE *out, const char *program);

/* 1 if something is to run beside the model, on queues with threads of their own. */
int gpt_options_overlap(const gpt_options *options);

/* The model's shape. */
void gpt_options_config(const gpt_options *options, gpt_config *config);

#ifdef __cplusplus
}
#endif

#endif /* GPT_OPTIONS_H */
