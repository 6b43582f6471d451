/* SPDX-License-Identifier: MIT */
/* mfsdp-plan.c - who owns what of a model, how good that is, and what a training step would take.
 * Build: cc -std=c11 -D_POSIX_C_SOURCE=200809L -O2 -I. examples/mfsdp-plan.c examples/plan/[a-z]*.c \
 *        examples/gpt/error.c examples/gpt/file.c -lpthread -lm */
#include "gpt/file.h"
#include "plan/calibrate.h"
#include "plan/cluster.h"
#include "plan/file.h"
#include "plan/heatmap.h"
#include "plan/input.h"

#include <stdlib.h>

/* Status 1, and not 2: nothing is wrong with the call. */
static int print_out(const char *text, size_t nbytes, plan_error *error) {
  if (fwrite(text, 1, nbytes, stdout) == nbytes && fflush(stdout) == 0) return PLAN_OK;
  (void)plan_fail(error, "cannot write to standard output");
  return 1;
}

/* Texts in memory: files are written, and anything is printed, only when all has gone well. */
typedef struct texts {
  FILE *out, *json, *svg;
  char *out_text, *json_text, *svg_text;
  size_t out_nbytes, json_nbytes, svg_nbytes;
} texts;

static int texts_open(texts *t, plan_error *error) {
  t->out = open_memstream(&t->out_text, &t->out_nbytes);
  t->json = open_memstream(&t->json_text, &t->json_nbytes);
  t->svg = open_memstream(&t->svg_text, &t->svg_nbytes);
  return t->out && t->json && t->svg ? PLAN_OK : plan_fail(error, "no memory for the report");
}

static int texts_close(texts *t, plan_error *error) {
  FILE *const files[] = {t->out, t->json, t->svg};
  int failed = 0;
  for (int i = 0; i < 3; ++i) {
    if (!files[i]) continue;
    failed |= ferror(files[i]);
    failed |= fclose(files[i]) != 0;
  }
  t->out = t->json = t->svg = NULL;
  return failed ? plan_fail(error, "no memory for the report") : PLAN_OK;
}

static void texts_free(texts *t) {
  (void)texts_close(t, NULL);
  free(t->out_text);
  free(t->json_text);
  free(t->svg_text);
}

static int report(mfsdp_context *context, const plan_options *o, const plan_input *input,
                  plan_question *question, plan_outcome *outcomes, texts *t, plan_error *error) {
  int made = 0, status = PLAN_OK;
  if (input->rules.count > 0) {
    plan_rules_print(&input->rules, t->out);
    fputc('\n', t->out);
  }
  plan_question_print(question, t->out);
  fputs("[\n", t->json);
  for (; made < o->world_count && status == PLAN_OK; ++made) {
    status = plan_outcome_make(context, question, o->worlds[made], &outcomes[made], error);
    if (status != PLAN_OK) break;
    plan_outcome_print(&outcomes[made], t->out);
    plan_outcome_json(&outcomes[made], made == 0, t->json);
  }
  fputs("\n]\n", t->json);
  if (status == PLAN_OK && o->svg) status = plan_heatmap(outcomes, made, t->svg, error);
  while (made-- > 0)
    plan_outcome_free(context, &outcomes[made]);
  return status;
}

static int run(const plan_options *o, plan_input *input, texts *t, plan_error *error) {
  static plan_outcome outcomes[PLAN_MOST_WORLDS];
  const mfsdp_context_desc desc = mfsdp_context_desc_default();
  mfsdp_context context;
  plan_question question;
  int status;
  memset(&question, 0, sizeof question);
  question.cluster = mfsdp_cluster_default();
  if (o->cluster && plan_cluster_read(o->cluster, &question.cluster, error) != PLAN_OK)
    return PLAN_USAGE_ERROR;
  if (plan_input_read(o, input, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  question.input = input->title;
  question.params = &input->params;
  question.planner = o->planner;
  question.caps = o->caps;
  question.banded_wire_cost = o->banded_wire_cost;
  question.cost = o->cost;
  question.algorithm = o->algorithm;
  question.newton_schulz_steps = o->steps;
  question.replicas = o->replicas;
  question.chunk_nbytes = (size_t)o->chunk;
  question.model_flops = 6.0 * (double)input->active * (double)o->tokens;
  if (texts_open(t, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  if (mfsdp_context_init(&context, &desc) != MFSDP_OK) return plan_fail(error, "no context");
  status = report(&context, o, input, &question, outcomes, t, error);
  if (mfsdp_context_destroy(&context) != MFSDP_OK && status == PLAN_OK)
    status = plan_fail(error, "%s", mfsdp_context_error(&context)->message);
  return status;
}

/* No output may be a file that is read, or the other output. */
static int check_outputs(const plan_options *o, plan_error *error) {
  const char *const outputs[2] = {o->json, o->svg};
  for (int k = 0; k < 2; ++k) {
    if (!outputs[k]) continue;
    for (int i = 0; i < o->input_count; ++i)
      if (!plan_model_find(o->inputs[i]) && gpt_file_same(outputs[k], o->inputs[i]))
        return plan_fail(error, "%s would overwrite the input %s", outputs[k], o->inputs[i]);
    if (o->cluster && gpt_file_same(outputs[k], o->cluster))
      return plan_fail(error, "%s would overwrite --cluster %s", outputs[k], o->cluster);
    if (o->rules && gpt_file_same(outputs[k], o->rules))
      return plan_fail(error, "%s would overwrite --rules %s", outputs[k], o->rules);
  }
  if (o->json && o->svg && gpt_file_same(o->json, o->svg))
    return plan_fail(error, "--json and --svg are one file, %s", o->svg);
  return PLAN_OK;
}

/* All or nothing: files appear when everything else is done. */
static int write_all(const plan_options *o, const texts *t, plan_error *error) {
  plan_output json, svg;
  int status = plan_output_begin(o->json, t->json_text, t->json_nbytes, &json, error);
  memset(&svg, 0, sizeof svg);
  if (status == PLAN_OK)
    status = plan_output_begin(o->svg, t->svg_text, t->svg_nbytes, &svg, error);
  if (status == PLAN_OK) status = print_out(t->out_text, t->out_nbytes, error);
  if (status == PLAN_OK) status = plan_output_end(&json, error);
  if (status == PLAN_OK) status = plan_output_end(&svg, error);
  plan_output_drop(&json);
  plan_output_drop(&svg);
  return status;
}

/* A cluster file with what was measured, by rank 0. */
static int calibrate(const plan_options *o, plan_error *error) {
  plan_calibration measured;
  int32_t world = o->world_count > 0 ? o->worlds[0] : 0, rank = 0;
  plan_output output;
  char *text = NULL;
  size_t nbytes = 0;
  FILE *f;
  int status = o->use_mpi ? plan_calibrate_mpi(&world, &rank, &measured, error)
                          : plan_calibrate_threads(world, &measured, error);
  if (status != PLAN_OK || rank != 0) return status;
  f = open_memstream(&text, &nbytes);
  if (f == NULL) return plan_fail(error, "no memory for the report");
  fprintf(f,
          "# measured by %d %s at once\n"
          "# links at %.4g Mbit/s give this machine the FLOP/s per byte/s of an A100 at 25 GB/s\n",
          (int)world, o->use_mpi ? "MPI processes" : "threads",
          plan_matched_mbit(measured.cluster.flops_per_s));
  if (world == 1) fputs("# one rank has no links: theirs are the data sheet's\n", f);
  plan_cluster_write(&measured.cluster, f);
  if (fclose(f) != 0) {
    free(text);
    return plan_fail(error, "no memory for the report");
  }
  if (o->input_count == 0) {
    status = print_out(text, nbytes, error);
  } else {
    status = plan_output_begin(o->inputs[0], text, nbytes, &output, error);
    if (status == PLAN_OK) status = plan_output_end(&output, error);
    plan_output_drop(&output);
  }
  free(text);
  return status;
}

int main(int argc, char **argv) {
  plan_options options;
  plan_input input;
  plan_error error;
  texts t;
  int status;
  memset(&input, 0, sizeof input);
  memset(&t, 0, sizeof t);
  error.text[0] = '\0';
  gpt_file_keep_standard();
  status = plan_options_parse(argc, argv, &options, &error);
  if (status == PLAN_OK && options.help) {
    plan_options_help(stdout);
    return 0;
  }
  if (status == PLAN_OK && options.calibrate) {
    status = calibrate(&options, &error);
    if (status != PLAN_OK) fprintf(stderr, "mfsdp-plan: %s\n", error.text);
    return status;
  }
  if (status == PLAN_OK) status = check_outputs(&options, &error);
  if (status == PLAN_OK) status = run(&options, &input, &t, &error);
  if (status == PLAN_OK) status = texts_close(&t, &error);
  if (status == PLAN_OK) status = write_all(&options, &t, &error);
  if (status != PLAN_OK) fprintf(stderr, "mfsdp-plan: %s\n", error.text);
  texts_free(&t);
  plan_input_free(&input);
  return status;
}
