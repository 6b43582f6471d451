/* SPDX-License-Identifier: MIT */
#include "options.h"

#include "describe.h"

#include <string.h>

enum option {
#define ENUM(name, value, help) OPTION_##name,
  PLAN_OPTION_TABLE(ENUM)
#undef ENUM
      OPTION_COUNT
};

/* With _ for the - of the command line. */
static const char *const names[OPTION_COUNT] = {
#define NAME(name, value, help) "--" #name,
    PLAN_OPTION_TABLE(NAME)
#undef NAME
};

/* Is `word` the option, with - where the name has _? */
static int is_option(const char *word, const char *name) {
  for (; *word && *name; ++word, ++name)
    if (*word != (*name == '_' ? '-' : *name)) return 0;
  return *word == *name;
}

/* The name as it is typed. */
static const char *typed(int option, char text[32]) {
  size_t i = 0;
  for (; i < 31 && names[option][i]; ++i)
    text[i] = (char)(names[option][i] == '_' ? '-' : names[option][i]);
  text[i] = '\0';
  return text;
}

static int worlds(const char *list, plan_options *o, plan_error *error) {
  for (;;) {
    const size_t length = strcspn(list, ",");
    char word[24] = "";
    int64_t world = 0;
    if (length < sizeof word) memcpy(word, list, length);
    if (!plan_number_of(word, MFSDP_PLAN_MAX_WORLD, &world) || world < 1)
      return plan_fail(error, "--world '%.60s': each needs to be a number of 1 to %d", list,
                       MFSDP_PLAN_MAX_WORLD);
    if (o->world_count == PLAN_MOST_WORLDS)
      return plan_fail(error, "--world: at most %d of them", PLAN_MOST_WORLDS);
    o->worlds[o->world_count++] = (int32_t)world;
    if (!list[length]) return PLAN_OK;
    list += length + 1;
  }
}

static int planner(const char *word, plan_options *o, plan_error *error) {
  for (int p = MFSDP_PLANNER_ROUND_ROBIN; p <= MFSDP_PLANNER_BALANCED; ++p)
    if (strcmp(word, mfsdp_planner_name((mfsdp_planner)p)) == 0) {
      o->planner = (mfsdp_planner)p;
      return PLAN_OK;
    }
  return plan_fail(error,
                   "--planner '%.40s': needs round-robin, role-greedy, scope-greedy, "
                   "cost-aware or balanced",
                   word);
}

static int collective(const char *word, plan_options *o, plan_error *error) {
  for (int a = MFSDP_SIM_DIRECT; a <= MFSDP_SIM_NATIVE; ++a)
    if (strcmp(word, mfsdp_sim_algorithm_name((mfsdp_sim_algorithm)a)) == 0) {
      o->algorithm = (mfsdp_sim_algorithm)a;
      return PLAN_OK;
    }
  return plan_fail(error, "--collective '%.40s': needs direct, ring, hierarchical or native", word);
}

static int cost(const char *word, plan_options *o, plan_error *error) {
  for (int c = PLAN_COST_NEWTON_SCHULZ; c <= PLAN_COST_ELEMENTS; ++c)
    if (strcmp(word, plan_cost_name((plan_cost)c)) == 0) {
      o->cost = (plan_cost)c;
      return PLAN_OK;
    }
  return plan_fail(error, "--cost '%.40s': needs newton-schulz, form or elements", word);
}

static int number(int option, const char *word, int64_t least, int64_t most, int64_t *out,
                  plan_error *error) {
  char name[32];
  if (plan_number_of(word, most, out) && *out >= least) return PLAN_OK;
  return plan_fail(error, "%s '%.40s': needs a number of %lld to %lld", typed(option, name), word,
                   (long long)least, (long long)most);
}

/* One of two words: 1 for the first, 0 for the second. */
static int choice(int option, const char *word, const char *first, const char *second, int *out,
                  plan_error *error) {
  *out = strcmp(word, first) == 0;
  if (*out || strcmp(word, second) == 0) return PLAN_OK;
  return plan_fail(error, "%s '%.40s': needs %s or %s", names[option], word, first, second);
}

static int file_name(int option, const char *word, const char **out, plan_error *error) {
  if (!*word) return plan_fail(error, "%s needs the name of a file", names[option]);
  *out = word;
  return PLAN_OK;
}

static int set(int option, const char *word, plan_options *o, plan_error *error) {
  int64_t value = 0;
  int whole = 0, status = PLAN_OK;
  switch ((enum option)option) {
  case OPTION_world: return worlds(word, o, error);
  case OPTION_planner: return planner(word, o, error);
  case OPTION_cost: return cost(word, o, error);
  case OPTION_max_resident:
    return number(option, word, 0, INT64_MAX - 1, &o->caps.max_resident_nbytes, error);
  case OPTION_max_gamma:
    return number(option, word, 1000, INT64_C(1) << 40, &o->caps.max_gamma_permille, error);
  case OPTION_max_owners:
    return number(option, word, 1, MFSDP_PLAN_MAX_WORLD, &o->caps.max_owners, error);
  case OPTION_allow_banded:
    o->banded_wire_cost = -1;
    if (strcmp(word, "auto") == 0) return PLAN_OK;
    return number(option, word, 1, INT64_C(1) << 40, &o->banded_wire_cost, error);
  case OPTION_cluster: return file_name(option, word, &o->cluster, error);
  case OPTION_rules: return file_name(option, word, &o->rules, error);
  case OPTION_dtype:
    if (!plan_dtype_of(word, &o->dtype) || o->dtype == MFSDP_F64)
      status = plan_fail(error, "--dtype '%.40s': needs f32, bf16 or f16", word);
    break;
  case OPTION_views:
    status = choice(option, word, "whole", "heads", &whole, error);
    o->views = whole ? PLAN_VIEWS_WHOLE : PLAN_VIEWS_HEADS;
    break;
  case OPTION_collective: return collective(word, o, error);
  case OPTION_steps:
    status = number(option, word, 0, 100, &value, error);
    o->steps = (int32_t)value;
    break;
  case OPTION_replicas:
    status = number(option, word, 1, MFSDP_PLAN_MAX_WORLD, &value, error);
    o->replicas = (int32_t)value;
    break;
  case OPTION_tokens: return number(option, word, 0, INT64_C(1) << 40, &o->tokens, error);
  case OPTION_chunk: return number(option, word, 1, INT64_C(1) << 40, &o->chunk, error);
  case OPTION_transport: return choice(option, word, "mpi", "threads", &o->use_mpi, error);
  case OPTION_json: return file_name(option, word, &o->json, error);
  case OPTION_svg: return file_name(option, word, &o->svg, error);
  case OPTION_COUNT: break;
  }
  return status;
}

static void defaults(plan_options *o) {
  memset(o, 0, sizeof *o);
  o->planner = mfsdp_plan_desc_default().planner;
  o->caps = mfsdp_plan_desc_default().caps;
  o->cost = PLAN_COST_NEWTON_SCHULZ;
  o->views = PLAN_VIEWS_WHOLE;
  o->algorithm = MFSDP_SIM_DIRECT;
  o->steps = 5;
  o->replicas = 1;
  o->chunk = 1 << 22;
}

/* --calibrate stands alone: its file, the ranks and what carries them. */
static int check_calibrate(const plan_options *o, const int *seen, plan_error *error) {
  for (int i = 0; i < OPTION_COUNT; ++i) {
    char name[32];
    if (seen[i] && i != OPTION_world && i != OPTION_transport)
      return plan_fail(error, "--calibrate measures, and does not use %s", typed(i, name));
  }
  if (o->input_count > 1)
    return plan_fail(error, "--calibrate takes one file, not %d", o->input_count);
  if (o->use_mpi && o->world_count > 0)
    return plan_fail(error, "--calibrate --transport mpi: mpirun says how many; leave --world out");
  if (!o->use_mpi && o->world_count != 1)
    return plan_fail(error, "--calibrate needs --world N, the ranks on this machine");
  return PLAN_OK;
}

int plan_options_parse(int argc, char **argv, plan_options *options, plan_error *error) {
  int seen[OPTION_COUNT] = {0};
  defaults(options);
  options->inputs = argv + 1;
  for (int i = 1; i < argc; ++i) {
    int option = 0;
    if (strcmp(argv[i], "--help") == 0) {
      options->help = 1;
      return PLAN_OK;
    }
    if (strcmp(argv[i], "--calibrate") == 0) {
      options->calibrate = 1;
      continue;
    }
    if (argv[i][0] != '-') {
      options->inputs[options->input_count++] = argv[i]; /* never past i */
      continue;
    }
    while (option < OPTION_COUNT && !is_option(argv[i], names[option]))
      ++option;
    if (option == OPTION_COUNT)
      return plan_fail(error, "unknown option '%.60s' (see --help)", argv[i]);
    if (seen[option]++) return plan_fail(error, "%s is there twice", argv[i]);
    if (++i == argc) return plan_fail(error, "%s needs a value", argv[i - 1]);
    if (set(option, argv[i], options, error) != PLAN_OK) return PLAN_USAGE_ERROR;
  }
  if (options->calibrate) return check_calibrate(options, seen, error);
  if (seen[OPTION_transport]) return plan_fail(error, "--transport is for --calibrate");
  if (options->input_count == 0)
    return plan_fail(error, "needs an INPUT: safetensors files, a table or a model (see --help)");
  if (options->world_count == 0) return plan_fail(error, "needs --world N[,N..]");
  if (options->cost == PLAN_COST_FORM && options->steps > MFSDP_NS_MAX_STEPS)
    return plan_fail(error, "--cost form goes with at most --steps %d", MFSDP_NS_MAX_STEPS);
  return PLAN_OK;
}

static void help_line(FILE *f, const char *name, const char *value, const char *help) {
  int column = 2;
  fputs("  ", f);
  for (; *name; ++name, ++column)
    fputc(*name == '_' ? '-' : *name, f);
  column += fprintf(f, " %s", value);
  fprintf(f, "%*s %s\n", column < 24 ? 24 - column : 0, "", help);
}

void plan_options_help(FILE *f) {
  fputs("mfsdp-plan INPUT.. --world N[,N..] [options]\n"
        "mfsdp-plan --calibrate [FILE] --world N\n\n"
        "Plans owners for the matrices of a model, judges the plan and predicts the training step\n"
        "of MatrixFSDP and its alternatives on a cluster.\n\n"
        "INPUT  safetensors files (only headers are read; names end in .safetensors), or one text\n"
        "       table of lines `name dtype shape unit role view`, or one of the built-in models\n",
        f);
  fputs("      ", f);
  for (int i = 0; plan_model_at(i); ++i)
    fprintf(f, " %s", plan_model_at(i)->name);
  fputs("\n\n", f);
#define HELP(name, value, help) help_line(f, "--" #name, value, help);
  PLAN_OPTION_TABLE(HELP)
#undef HELP
  fputs("  --calibrate            measures this machine with N ranks at once, and prints what "
        "--cluster\n"
        "                         reads, or writes it to FILE\n"
        "  --help                 this text\n\n"
        "Exit status: 0; 2 and one line on standard error for bad input, and nothing is written.\n",
        f);
}
