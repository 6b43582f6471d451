/* SPDX-License-Identifier: MIT */
#include "options.h"

#include "file.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

typedef enum option_kind { INTEGER, REAL, FLAG, TEXT, CHOICE } option_kind;

typedef struct option {
  option_kind kind;
  const char *name, *initial;
  double low, high;
  const char *value, *help;
  size_t offset;
} option;

#define OFFSET_INTEGER(field) offsetof(gpt_options, field)
#define OFFSET_REAL(field) offsetof(gpt_options, field)
#define OFFSET_FLAG(field) offsetof(gpt_options, field)
#define OFFSET_TEXT(field) offsetof(gpt_options, field)
#define OFFSET_CHOICE(field) offsetof(gpt_options, field)

static const option table[GPT_OPTION_COUNT] = {
#define ROW(kind, field, name, initial, low, high, value, help) \
  {kind, name, initial, low, high, value, help, OFFSET_##kind(field)},
    GPT_OPTIONS(ROW)
#undef ROW
};

/* ---- one value ---- */

/* strtoll and strtod skip blanks in front; a value that starts with one is a quoting accident. */
static int starts_number(const char *text) {
  return (*text >= '0' && *text <= '9') || *text == '-' || *text == '+' || *text == '.';
}

static int parse_integer(const option *o, const char *text, int64_t *out, gpt_error *error) {
  char *end = NULL;
  long long value;
  errno = 0;
  value = strtoll(text, &end, 10);
  if (!starts_number(text) || *end != '\0' || errno != 0 || (double)value < o->low ||
      (double)value > o->high)
    return gpt_fail(error, "--%s is '%s'; give a whole number from %.0f to %.0f", o->name, text,
                    o->low, o->high);
  *out = (int64_t)value;
  return GPT_OK;
}

static int parse_real(const option *o, const char *text, double *out, gpt_error *error) {
  char *end = NULL;
  const double value = strtod(text, &end);
  if (!starts_number(text) || *end != '\0' || !isfinite(value) || value < o->low || value > o->high)
    return gpt_fail(error, "--%s is '%s'; give a number from %g to %g", o->name, text, o->low,
                    o->high);
  *out = value;
  return GPT_OK;
}

static int parse_flag(const option *o, const char *text, int32_t *out, gpt_error *error) {
  if (strcmp(text, "0") != 0 && strcmp(text, "1") != 0)
    return gpt_fail(error, "--%s is '%s'; write --%s alone, or --%s=0 or --%s=1", o->name, text,
                    o->name, o->name, o->name);
  *out = text[0] == '1';
  return GPT_OK;
}

/* The names of a choice, one after the other. */
typedef struct choice {
  const char *name;
  size_t length;
  int built;
  const char *rest;
} choice;

static int next_choice(const char *list, choice *c) {
  if (*list == '\0') return 0;
  c->built = *list != '!';
  c->name = list + !c->built;
  c->length = strcspn(c->name, "|");
  c->rest = c->name + c->length + (c->name[c->length] == '|');
  return 1;
}

/* Names are equal whatever their case, and whether they have - or _ inside. */
static int same_name(const choice *c, const char *text) {
  if (strlen(text) != c->length) return 0;
  for (size_t i = 0; i < c->length; ++i) {
    char given = text[i];
    if (given == '_') given = '-';
    if (given >= 'A' && given <= 'Z') given = (char)(given - 'A' + 'a');
    if (given != c->name[i]) return 0;
  }
  return 1;
}

static int parse_choice(const option *o, const char *text, int32_t *out, gpt_error *error) {
  char names[160];
  size_t used = 0;
  int32_t index = 0;
  choice c;
  names[0] = '\0';
  for (const char *list = o->value; next_choice(list, &c); list = c.rest, ++index) {
    if (same_name(&c, text)) {
      *out = index;
      return c.built ? GPT_OK : gpt_fail(error, "--%s %s: not in this build", o->name, text);
    }
    if (c.built && used + c.length + 3 < sizeof names)
      used += (size_t)snprintf(names + used, sizeof names - used, "%s%.*s", used ? ", " : "",
                               (int)c.length, c.name);
  }
  return gpt_fail(error, "--%s '%s' is unknown; choose one of: %s", o->name, text, names);
}

static int set_value(const option *o, const char *text, gpt_options *options, gpt_error *error) {
  void *field = (char *)options + o->offset;
  switch (o->kind) {
  case INTEGER: return parse_integer(o, text, (int64_t *)field, error);
  case REAL: return parse_real(o, text, (double *)field, error);
  case FLAG: return parse_flag(o, text, (int32_t *)field, error);
  case CHOICE: return parse_choice(o, text, (int32_t *)field, error);
  case TEXT:
    if (*text == '\0') return gpt_fail(error, "--%s is empty; give a file name", o->name);
    *(const char **)field = text;
    return GPT_OK;
  }
  return GPT_USAGE_ERROR; /* no such kind */
}

static int set_defaults(gpt_options *options, gpt_error *error) {
  memset(options, 0, sizeof *options);
  for (int i = 0; i < GPT_OPTION_COUNT; ++i)
    if (table[i].initial[0] != '\0') {
      const int status = set_value(&table[i], table[i].initial, options, error);
      if (status != GPT_OK) return status;
    }
  return GPT_OK;
}

/* ---- the command line ---- */

static const option *find(const char *name, size_t length) {
  for (int i = 0; i < GPT_OPTION_COUNT; ++i)
    if (strlen(table[i].name) == length && strncmp(table[i].name, name, length) == 0)
      return &table[i];
  return NULL;
}

/* Takes the option at argv[*at] with its value, and moves *at past them. */
static int take_argument(int argc, const char *const *argv, int *at, gpt_options *options,
                         gpt_error *error) {
  const char *argument = argv[(*at)++], *value;
  const option *o;
  size_t length;
  if (strncmp(argument, "--", 2) != 0)
    return gpt_fail(error, "'%s' is not an option; options start with --, see --help", argument);
  length = strcspn(argument + 2, "=");
  o = find(argument + 2, length);
  if (!o) return gpt_fail(error, "%.*s is unknown; see --help", (int)(length + 2), argument);
  options->given[o - table] = 1;
  if (argument[2 + length] == '=')
    value = argument + 3 + length;
  else if (o->kind == FLAG)
    value = "1";
  else if (*at < argc && strncmp(argv[*at], "--", 2) != 0)
    value = argv[(*at)++];
  else
    return gpt_fail(error, "--%s needs a value: --%s %s", o->name, o->name, o->value);
  return set_value(o, value, options, error);
}

static int same_file(const char *a, const char *b) {
  return a && b && gpt_file_same(a, b);
}

/* No output overwrites the input or another output. */
static int check_files(const gpt_options *o, gpt_error *error) {
  const struct {
    const char *name, *path;
  } outputs[] = {{"loss-csv", o->loss_csv}, {"loss-svg", o->loss_svg}, {"trace", o->trace}};
  const int count = (int)(sizeof outputs / sizeof outputs[0]);
  for (int i = 0; i < count; ++i) {
    if (same_file(o->data, outputs[i].path))
      return gpt_fail(error, "%s is --data and an output file; choose another output name",
                      outputs[i].path);
    for (int k = 0; k < i; ++k)
      if (same_file(outputs[k].path, outputs[i].path))
        return gpt_fail(error, "--%s and --%s are both %s; choose two names", outputs[k].name,
                        outputs[i].name, outputs[i].path);
  }
  return GPT_OK;
}

/* No option that the chosen optimizer does not read. */
static int check_optimizer(const gpt_options *o, gpt_error *error) {
  static const char *const names[] = {"muon", "adamw", "shampoo", "soap"};
  const char *name = names[o->optimizer];
  if (o->optimizer != GPT_OPTIMIZER_MUON &&
      (o->given[GPT_OPTION_preset] || o->given[GPT_OPTION_coefficients]))
    return gpt_fail(error, "--%s is Muon's; --optimizer %s does not use it",
                    o->given[GPT_OPTION_preset] ? "preset" : "coefficients", name);
  if (o->optimizer == GPT_OPTIMIZER_ADAMW && o->given[GPT_OPTION_lr])
    return gpt_fail(error, "--lr is Muon's step size; with --optimizer adamw give --adamw-lr");
  if (o->optimizer != GPT_OPTIMIZER_SHAMPOO && o->given[GPT_OPTION_graft])
    return gpt_fail(error, "--graft is Shampoo's; --optimizer %s does not use it", name);
  if (o->optimizer != GPT_OPTIMIZER_SHAMPOO && o->optimizer != GPT_OPTIMIZER_SOAP &&
      (o->given[GPT_OPTION_precondition_every] || o->given[GPT_OPTION_precondition_limit]))
    return gpt_fail(error,
                    "--precondition-%s is Shampoo's and SOAP's; --optimizer %s does not use it",
                    o->given[GPT_OPTION_precondition_every] ? "every" : "limit", name);
  return GPT_OK;
}

static int check_schedule(const gpt_options *o, gpt_error *error) {
  const int decays_late = o->schedule == GPT_SCHEDULE_WSD || o->schedule == GPT_SCHEDULE_WSD_SQRT;
  if (o->given[GPT_OPTION_decay_steps] && !decays_late)
    return gpt_fail(error, "--decay-steps is read by --schedule wsd and wsd-sqrt only");
  if (o->given[GPT_OPTION_final_lr] && o->schedule == GPT_SCHEDULE_CONSTANT)
    return gpt_fail(error, "--final-lr: --schedule constant does not decay");
  if (o->decay_steps == 0 || o->decay_steps > o->steps)
    return gpt_fail(error, "--decay-steps is %lld, needs 1 to --steps (%lld), or -1",
                    (long long)o->decay_steps, (long long)o->steps);
  return GPT_OK;
}

/* No device that the transport or the optimizer cannot use. */
static int check_device(const gpt_options *o, gpt_error *error) {
  if (o->device == GPT_DEVICE_CUDA && o->transport == GPT_TRANSPORT_MPI)
    return gpt_fail(error,
                    "--transport mpi carries host memory; with --device cuda use threads or nccl");
  if (o->device != GPT_DEVICE_CUDA && o->transport == GPT_TRANSPORT_NCCL)
    return gpt_fail(error, "--transport nccl carries a GPU's memory; use --device cuda");
  if (o->device == GPT_DEVICE_CUDA && o->given[GPT_OPTION_threads_per_rank])
    return gpt_fail(error, "--threads-per-rank is BLAS's; --device cuda does not use it");
#if !MFSDP_EXAMPLE_LAPACKE
  if (o->device == GPT_DEVICE_CPU &&
      (o->optimizer == GPT_OPTIMIZER_SHAMPOO || o->optimizer == GPT_OPTIMIZER_SOAP))
    return gpt_fail(error, "--optimizer %s on the host: not in this build",
                    o->optimizer == GPT_OPTIMIZER_SOAP ? "soap" : "shampoo");
#endif
  return GPT_OK;
}

/* Shampoo and SOAP keep statistics of whole matrices: no band can do that. */
static int check_strategy(const gpt_options *o, gpt_error *error) {
  const gpt_strategy *strategy = gpt_strategy_at(o->strategy);
  const int preconditions =
      o->optimizer == GPT_OPTIMIZER_SHAMPOO || o->optimizer == GPT_OPTIMIZER_SOAP;
  if (preconditions && (strategy->matrices == MFSDP_PLACEMENT_BANDED || strategy->allow_banded))
    return gpt_fail(error,
                    "--strategy %s cuts matrices into bands, which --optimizer %s cannot update; "
                    "use matrix, zero1 or replicated",
                    strategy->name, o->optimizer == GPT_OPTIMIZER_SOAP ? "soap" : "shampoo");
  return GPT_OK;
}

static int check_together(const gpt_options *o, gpt_error *error) {
  gpt_config config;
  if (!o->data) return gpt_fail(error, "--data is missing; name a text file: --data FILE");
  if (check_files(o, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (check_optimizer(o, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (check_schedule(o, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (check_device(o, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (check_strategy(o, error) != GPT_OK) return GPT_USAGE_ERROR;
  if (!o->checkpoint && (o->given[GPT_OPTION_save_every] || o->given[GPT_OPTION_keep_last] ||
                         o->async_save || o->resume))
    return gpt_fail(error,
                    "--save-every, --keep-last, --async-save and --resume need --checkpoint DIR");
  gpt_options_config(o, &config);
  return gpt_config_check(&config, error);
}

int gpt_options_parse(int argc, const char *const *argv, gpt_options *options, gpt_error *error) {
  int status = set_defaults(options, error);
  for (int i = 1; i < argc; ++i)
    if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) return GPT_OPTIONS_HELP;
  for (int at = 1; at < argc && status == GPT_OK;)
    status = take_argument(argc, argv, &at, options, error);
  if (status != GPT_OK) return status;
  return check_together(options, error);
}

/* ---- help ---- */

static void print_choices(FILE *out, const option *o) {
  const char *separator = " (";
  choice c;
  for (const char *list = o->value; next_choice(list, &c); list = c.rest)
    if (c.built) {
      fprintf(out, "%s%.*s", separator, (int)c.length, c.name);
      separator = ", ";
    }
  fprintf(out, "; default %s)", o->initial);
}

static void print_option(FILE *out, const option *o) {
  const char *value = o->kind == CHOICE ? "NAME" : o->value;
  const int width = fprintf(out, "  --%s%s%s", o->name, *value ? " " : "", value);
  fprintf(out, "%*s%s", width < 24 ? 24 - width : 1, "", o->help);
  if (o->kind == CHOICE) print_choices(out, o);
  if (o->kind == INTEGER) fprintf(out, " (%.0f to %.0f; default %s)", o->low, o->high, o->initial);
  if (o->kind == REAL) fprintf(out, " (default %s)", o->initial);
  fputc('\n', out);
}

void gpt_options_help(FILE *out, const char *program) {
  fprintf(out, "usage: %s --data FILE [--name value | --name=value ...]\n\n", program);
  fprintf(
      out,
      "Trains a small GPT on the bytes of FILE. Each hidden matrix lives whole on one rank,\n"
      "which updates it there; nothing is gathered for the optimizer step (see --strategy).\n\n");
  for (int i = 0; i < GPT_OPTION_COUNT; ++i)
    print_option(out, &table[i]);
  fprintf(out, "  --help                this text\n");
}

int gpt_options_overlap(const gpt_options *options) {
  return options->prefetch > 0 || options->step_in_backward != 0;
}

void gpt_options_config(const gpt_options *o, gpt_config *config) {
  memset(config, 0, sizeof *config);
  config->layers = o->layers;
  config->dim = o->dim;
  config->heads = o->heads;
  config->context = o->context;
  config->batch = o->batch;
  config->vocab = GPT_VOCAB;
  config->tied = o->tied;
}
