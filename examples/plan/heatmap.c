/* SPDX-License-Identifier: MIT */
#include "heatmap.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { LEFT = 64, GAP = 64, BARS = 74, TOP = 96, BELOW = 46, UNDER = 78, PLOT = 430 };

/* One map: a grid of values with sums along both sides. */
typedef struct map {
  const char *title, *unit;
  int is_bytes;
  unsigned dark[3]; /* the colour of the largest value */
  int rows, columns;
  int32_t ranks, units, ranks_each, units_each; /* ranks_each ranks share a row */
  double *cells, *row_sums, *column_sums;       /* rows x columns, rows, columns */
  double largest, total, mean_row, largest_rank;
} map;

static void map_free(map *m) {
  free(m->cells);
  free(m->row_sums);
  free(m->column_sums);
}

/* Bytes lie with the owner, the cost of a matrix with its home. */
static int32_t piece_rank(const map *m, const mfsdp_piece *piece) {
  return m->is_bytes ? piece->owner : piece->home;
}

static double piece_value(const plan_outcome *o, const map *m, const mfsdp_piece *piece,
                          int32_t index) {
  int64_t padded = 0;
  if (!m->is_bytes) return (double)mfsdp_plan_piece_cost(o->plan, index);
  (void)mfsdp_i64_align(piece->count, &padded);
  return (double)(padded * mfsdp_param_resident_nbytes(mfsdp_plan_param(o->plan, piece->param)));
}

/* Sums by (rank, unit), then the largest of those that share a cell. */
static int map_fill(const plan_outcome *o, map *m) {
  double *of_rank = (double *)calloc((size_t)m->ranks, sizeof *of_rank);
  double *in_unit = (double *)calloc((size_t)m->ranks, sizeof *in_unit);
  int32_t count, first = 0;
  m->cells = (double *)calloc((size_t)m->rows * (size_t)m->columns, sizeof *m->cells);
  m->row_sums = (double *)calloc((size_t)m->rows, sizeof *m->row_sums);
  m->column_sums = (double *)calloc((size_t)m->columns, sizeof *m->column_sums);
  if (!of_rank || !in_unit || !m->cells || !m->row_sums || !m->column_sums) {
    free(of_rank);
    free(in_unit);
    return 0;
  }
  for (int32_t u = 0; u < m->units; ++u) {
    const mfsdp_piece *pieces = mfsdp_plan_pieces(o->plan, u, &count);
    const int column = u / m->units_each;
    double sum = 0.0;
    for (int32_t i = 0; i < count; ++i) {
      const double value = piece_value(o, m, &pieces[i], first + i);
      const int32_t rank = piece_rank(m, &pieces[i]);
      in_unit[rank] += value;
      of_rank[rank] += value;
      sum += value;
    }
    for (int32_t i = 0; i < count; ++i) {
      const int32_t rank = piece_rank(m, &pieces[i]);
      double *cell = &m->cells[rank / m->ranks_each * m->columns + column];
      if (in_unit[rank] > *cell) *cell = in_unit[rank];
      if (*cell > m->largest) m->largest = *cell;
      in_unit[rank] = 0.0;
    }
    if (sum > m->column_sums[column]) m->column_sums[column] = sum;
    m->total += sum;
    first += count;
  }
  for (int32_t r = 0; r < m->ranks; ++r) {
    double *row = &m->row_sums[r / m->ranks_each];
    if (of_rank[r] > *row) *row = of_rank[r];
    if (of_rank[r] > m->largest_rank) m->largest_rank = of_rank[r];
  }
  m->mean_row = m->total / m->ranks;
  free(of_rank);
  free(in_unit);
  return 1;
}

/* ---- drawing ---- */

static void put_text(FILE *f, double x, double y, const char *attributes, const char *text) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
  for (; *text; ++text)
    switch (*text) {
    case '&': fputs("&amp;", f); break;
    case '<': fputs("&lt;", f); break;
    case '>': fputs("&gt;", f); break;
    default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, f);
    }
  fputs("</text>\n", f);
}

/* From a light tint to the dark colour by the square root, so that small pieces stay visible. */
static void color_of(const map *m, double value, char text[8]) {
  const double t = m->largest > 0.0 ? sqrt(value / m->largest) : 0.0;
  unsigned c[3];
  for (int i = 0; i < 3; ++i) {
    const double light = 236.0 - 0.06 * (255.0 - m->dark[i]);
    c[i] = (unsigned)(light + (m->dark[i] - light) * t + 0.5);
  }
  snprintf(text, 8, "#%02x%02x%02x", c[0] & 255, c[1] & 255, c[2] & 255);
}

static const char *value_text(const map *m, double value, char text[24]) {
  return m->is_bytes ? plan_bytes_text(value, text) : plan_count_text(value, text);
}

static double cell_width(const map *m) {
  const double width = (double)PLOT / m->columns;
  return width > 14.0 ? 14.0 : width;
}

static double cell_height(const map *m) {
  const double height = (double)PLOT / m->rows;
  return height > 24.0 ? 24.0 : height;
}

/* Equal neighbours in a row become one rectangle. */
static void put_cells(FILE *f, const map *m, double x, double y) {
  const double w = cell_width(m), h = cell_height(m), seam = h >= 8.0 ? 1.0 : 0.0;
  fprintf(f,
          "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"#f7f7f7\" "
          "stroke=\"#ddd\"/>\n<g shape-rendering=\"crispEdges\">\n",
          x, y, w * m->columns, h * m->rows);
  for (int r = 0; r < m->rows; ++r)
    for (int c = 0; c < m->columns;) {
      const double value = m->cells[r * m->columns + c];
      char color[8];
      int run = 1;
      while (c + run < m->columns && m->cells[r * m->columns + c + run] == value)
        ++run;
      color_of(m, value, color);
      if (value > 0.0)
        fprintf(f, "<rect x=\"%.2f\" y=\"%.2f\" width=\"%.2f\" height=\"%.2f\" fill=\"%s\"/>\n",
                x + w * c, y + h * r, w * run, h - seam, color);
      c += run;
    }
  fputs("</g>\n", f);
}

/* Totals by rank at the right, by unit below, and the mean over ranks. */
static void put_bars(FILE *f, const map *m, double x, double y) {
  const double w = cell_width(m), h = cell_height(m), right = x + w * m->columns + 8;
  const double below = y + h * m->rows + 24, room = BELOW - 10;
  double most = 0.0, mean;
  for (int c = 0; c < m->columns; ++c)
    if (m->column_sums[c] > most) most = m->column_sums[c];
  for (int r = 0; r < m->rows; ++r)
    if (m->largest_rank > 0.0)
      fprintf(f, "<rect x=\"%.1f\" y=\"%.2f\" width=\"%.1f\" height=\"%.2f\" fill=\"#8c8c8c\"/>\n",
              right, y + h * r, m->row_sums[r] / m->largest_rank * BARS,
              h > 4.0 ? h - 1.0 : h * 0.8);
  for (int c = 0; c < m->columns; ++c)
    if (most > 0.0)
      fprintf(f, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"#8c8c8c\"/>\n",
              x + w * c, below, w > 4.0 ? w - 1.0 : w * 0.8, m->column_sums[c] / most * room);
  if (m->largest_rank <= 0.0) return;
  mean = right + m->mean_row / m->largest_rank * BARS;
  fprintf(f, "<path d=\"M%.1f %.1fV%.1f\" stroke=\"#111\" stroke-dasharray=\"3 2\"/>\n", mean,
          y - 3, y + h * m->rows + 3);
}

static int tick_step(int count, double size, double least) {
  static const int steps[] = {1, 2, 4, 8, 16, 32, 64, 128};
  for (size_t i = 0; i < sizeof steps / sizeof steps[0]; ++i)
    if (size * steps[i] >= least || steps[i] >= count) return steps[i];
  return count;
}

static void put_ticks(FILE *f, const map *m, double x, double y) {
  const double w = cell_width(m), h = cell_height(m);
  const int rows = tick_step(m->rows, h, 14.0);
  const int columns = tick_step(m->columns, w, 24.0);
  char text[32];
  for (int r = 0; r < m->rows; r += rows) {
    snprintf(text, sizeof text, "%d", (int)(r * m->ranks_each));
    put_text(f, x - 6, y + h * r + h / 2 + 4, "text-anchor=\"end\" class=\"small\"", text);
  }
  for (int c = 0; c < m->columns; c += columns) {
    snprintf(text, sizeof text, "%d", (int)(c * m->units_each));
    put_text(f, x + w * c + w / 2, y + h * m->rows + 15, "text-anchor=\"middle\" class=\"small\"",
             text);
  }
}

static void put_legend(FILE *f, const map *m, double x, double y) {
  char low[24], quarter[24], high[24], color[8];
  enum { STEPS = 32, WIDTH = 160 };
  for (int i = 0; i < STEPS; ++i) {
    const double t = (i + 0.5) / STEPS;
    color_of(m, m->largest * t * t, color);
    fprintf(f, "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"10\" fill=\"%s\"/>\n",
            x + (double)WIDTH * i / STEPS, y, (double)WIDTH / STEPS + 0.3, color);
  }
  put_text(f, x, y + 23, "class=\"small\"", value_text(m, 0.0, low));
  put_text(f, x + WIDTH / 2.0, y + 23, "text-anchor=\"middle\" class=\"small\"",
           value_text(m, m->largest / 4, quarter));
  put_text(f, x + WIDTH, y + 23, "text-anchor=\"end\" class=\"small\"",
           value_text(m, m->largest, high));
  put_text(f, x + WIDTH + 14, y + 10, "class=\"small\"",
           "one rank's part of one unit; blank: none");
}

static void put_map(FILE *f, const map *m, double x, double y) {
  const double bottom = y + cell_height(m) * m->rows;
  char line[200], total[24], most[24], mean[24];
  put_text(f, x, y - 40, "font-weight=\"bold\"", m->title);
  snprintf(line, sizeof line, "total %s, a rank at most %s, on average %s: ratio %.3f",
           value_text(m, m->total, total), value_text(m, m->largest_rank, most),
           value_text(m, m->mean_row, mean),
           m->mean_row > 0.0 ? m->largest_rank / m->mean_row : 1.0);
  put_text(f, x, y - 23, "class=\"small\"", line);
  put_cells(f, m, x, y);
  put_bars(f, m, x, y);
  put_ticks(f, m, x, y);
  put_text(f, x + cell_width(m) * m->columns + 8, y - 6, "class=\"small\"", "by rank");
  put_text(f, x + cell_width(m) * m->columns + 8, bottom + 15, "class=\"small\"", "unit");
  snprintf(line, sizeof line, m->ranks_each > 1 ? "rank (rows of %d: the largest)" : "rank",
           (int)m->ranks_each);
  fprintf(f, "<g transform=\"translate(%.1f %.1f) rotate(-90)\">", x - 40,
          y + cell_height(m) * m->rows / 2);
  put_text(f, 0, 0, "text-anchor=\"middle\" class=\"small\"", line);
  fputs("</g>\n", f);
  snprintf(line, sizeof line,
           m->units_each > 1 ? "by unit (columns of %d: the largest)" : "by unit",
           (int)m->units_each);
  put_text(f, x + cell_width(m) * m->columns + 8, bottom + 36, "class=\"small\"", line);
  put_legend(f, m, x, bottom + 24 + BELOW);
}

/* ---- the whole ---- */

static map map_of(const plan_outcome *o, int is_bytes) {
  map m;
  memset(&m, 0, sizeof m);
  m.is_bytes = is_bytes;
  m.title = is_bytes ? "Resident bytes (master, compute copy, accumulator)"
            : o->question->cost == PLAN_COST_ELEMENTS ? "Optimizer cost (elements of matrices)"
            : o->question->cost == PLAN_COST_FORM
                ? "Optimizer cost (multiply-adds of Newton-Schulz as it runs)"
                : "Optimizer cost (multiply-adds of a Newton-Schulz step)";
  m.dark[0] = is_bytes ? 8 : 140;
  m.dark[1] = is_bytes ? 69 : 45;
  m.dark[2] = is_bytes ? 148 : 4;
  m.ranks = mfsdp_plan_world(o->plan);
  m.units = mfsdp_plan_unit_count(o->plan);
  m.ranks_each = (m.ranks + PLAN_HEATMAP_ROWS - 1) / PLAN_HEATMAP_ROWS;
  m.units_each = m.units > 0 ? (m.units + PLAN_HEATMAP_COLUMNS - 1) / PLAN_HEATMAP_COLUMNS : 1;
  m.rows = (int)((m.ranks + m.ranks_each - 1) / m.ranks_each);
  m.columns = m.units > 0 ? (int)((m.units + m.units_each - 1) / m.units_each) : 1;
  return m;
}

static double section_height(const plan_outcome *o) {
  const map m = map_of(o, 1);
  return TOP + cell_height(&m) * m.rows + BELOW + UNDER;
}

/* Where the second map starts: the first one's width, room for its longest line of text. */
static double map_width(const plan_outcome *o) {
  const map m = map_of(o, 1);
  const double width = cell_width(&m) * m.columns + 8 + BARS;
  return width > 440.0 ? width : 440.0;
}

static int put_section(FILE *f, const plan_outcome *o, double y, plan_error *error) {
  const mfsdp_plan_summary *s = &o->summary;
  char line[256];
  snprintf(line, sizeof line, "%.120s on %d ranks", o->question->input, (int)s->world);
  put_text(f, 24, y + 26, "font-size=\"17\" font-weight=\"bold\" fill=\"#111\"", line);
  snprintf(line, sizeof line,
           "planner %s; gamma at most %.2f, on average %.2f; largest cost over the proven bound "
           "(%s) %.3f",
           mfsdp_planner_name(mfsdp_plan_planner(o->plan)), s->gamma_max, s->gamma_mean,
           mfsdp_plan_bound_name(s->bound), s->cost_ratio);
  put_text(f, 24, y + 46, "class=\"small\"", line);
  for (int i = 0; i < 2; ++i) {
    map m = map_of(o, i == 0);
    const int filled = map_fill(o, &m);
    if (filled) put_map(f, &m, LEFT + i * (map_width(o) + GAP), y + TOP + 16);
    map_free(&m);
    if (!filled) return plan_fail(error, "no memory to draw world %d", (int)s->world);
  }
  return PLAN_OK;
}

int plan_heatmap(const plan_outcome *outcomes, int count, FILE *f, plan_error *error) {
  double width = 0.0, height = 16.0, y = 0.0;
  int status = PLAN_OK;
  for (int i = 0; i < count; ++i) {
    const double w = LEFT + 2 * map_width(&outcomes[i]) + GAP + 40;
    if (w > width) width = w;
    height += section_height(&outcomes[i]);
  }
  fprintf(f,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" viewBox=\"0 0 "
          "%.0f %.0f\" font-family=\"Helvetica, Arial, sans-serif\" font-size=\"13\" "
          "fill=\"#333\">\n<style>.small{font-size:11px;fill:#555}</style>\n"
          "<rect width=\"%.0f\" height=\"%.0f\" fill=\"#fff\"/>\n",
          width, height, width, height, width, height);
  for (int i = 0; i < count && status == PLAN_OK; ++i) {
    status = put_section(f, &outcomes[i], y, error);
    y += section_height(&outcomes[i]);
  }
  fputs("</svg>\n", f);
  return status;
}
