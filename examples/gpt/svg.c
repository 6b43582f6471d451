/* SPDX-License-Identifier: MIT */
#include "svg.h"

#include "curve.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WIDTH = 860, HEIGHT = 520, LEFT = 72, RIGHT = 24, TOP = 56, BOTTOM = 60 };
enum { PLOT_RIGHT = WIDTH - RIGHT, PLOT_BOTTOM = HEIGHT - BOTTOM, MOST_POINTS = 1200 };

/* Distinct in hue and lightness, also for the common forms of colour blindness (Okabe and Ito). */
static const char *const palette[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9"};

static const char *color_of(const gpt_svg_series *s) {
  return palette[(unsigned)s->color % (sizeof palette / sizeof palette[0])];
}

/* ---- scales ---- */

typedef struct axis {
  double low, high, step; /* of the values: multiples of step */
  double from, to;        /* pixels */
} axis;

static double position(const axis *a, double value) {
  return a->from + (value - a->low) / (a->high - a->low) * (a->to - a->from);
}

static void extend(axis *a, const double *values, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!isfinite(values[i])) continue;
    if (values[i] < a->low) a->low = values[i];
    if (values[i] > a->high) a->high = values[i];
  }
}

/* Widens the range to multiples of 1, 2 or 5 times a power of ten, about `ticks` of them. */
static void round_range(axis *a, int ticks) {
  double width, unit, ratio;
  if (a->high - a->low < 1e-9 * (1.0 + fabs(a->low))) a->high = a->low + 1.0;
  width = (a->high - a->low) / ticks;
  unit = pow(10.0, floor(log10(width)));
  ratio = width / unit;
  a->step = unit * (ratio <= 1.0 ? 1.0 : ratio <= 2.0 ? 2.0 : ratio <= 5.0 ? 5.0 : 10.0);
  a->low = a->step * floor(a->low / a->step + 1e-9);
  a->high = a->step * ceil(a->high / a->step - 1e-9);
}

/* ---- pieces of the picture ---- */

static void put_text(FILE *f, const char *text) {
  for (; *text; ++text)
    switch (*text) {
    case '&': fputs("&amp;", f); break;
    case '<': fputs("&lt;", f); break;
    case '>': fputs("&gt;", f); break;
    default: fputc((unsigned char)*text < 0x20 ? ' ' : *text, f);
    }
}

static void put_label(FILE *f, double x, double y, const char *attributes, const char *text) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
  put_text(f, text);
  fputs("</text>\n", f);
}

static void put_tick(FILE *f, const axis *a, double value, int horizontal) {
  const double at = position(a, value);
  char text[40];
  /* Just enough decimals to tell neighbouring ticks apart; -0 is 0. */
  const int decimals = a->step >= 1.0 ? 0 : (int)ceil(-log10(a->step) - 1e-9);
  snprintf(text, sizeof text, "%.*f", decimals, fabs(value) < a->step / 2 ? 0.0 : value);
  if (horizontal) {
    fprintf(f, "<path d=\"M%.1f %dV%d\" class=\"grid\"/>\n", at, (int)TOP, (int)PLOT_BOTTOM);
    put_label(f, at, PLOT_BOTTOM + 20, "text-anchor=\"middle\"", text);
  } else {
    fprintf(f, "<path d=\"M%d %.1fH%d\" class=\"grid\"/>\n", (int)LEFT, at, (int)PLOT_RIGHT);
    put_label(f, LEFT - 8, at + 4, "text-anchor=\"end\"", text);
  }
}

static void put_axis(FILE *f, const axis *a, int horizontal) {
  const int64_t ticks = (int64_t)floor((a->high - a->low) / a->step + 0.5);
  for (int64_t i = 0; i <= ticks; ++i)
    put_tick(f, a, a->low + (double)i * a->step, horizontal);
}

/* What is drawn of a series: its own points, or their moving average. */
typedef struct line {
  const double *x, *y;
} line;

/* A polyline through at most MOST_POINTS points: each is the mean of a stretch of the line. */
static void put_line(FILE *f, const axis *x_axis, const axis *y_axis, const gpt_svg_series *s,
                     line drawn, const char *style) {
  const int64_t stretch = (s->count + MOST_POINTS - 1) / MOST_POINTS;
  fprintf(f, "<polyline points=\"");
  for (int64_t first = 0; first < s->count; first += stretch) {
    const int64_t end = first + stretch < s->count ? first + stretch : s->count;
    double sum_x = 0.0, sum_y = 0.0;
    int64_t used = 0;
    for (int64_t i = first; i < end; ++i) {
      if (!isfinite(drawn.x[i]) || !isfinite(drawn.y[i])) continue;
      sum_x += drawn.x[i];
      sum_y += drawn.y[i];
      ++used;
    }
    if (used > 0)
      fprintf(f, "%.1f,%.1f ", position(x_axis, sum_x / (double)used),
              position(y_axis, sum_y / (double)used));
  }
  fprintf(f, "\" fill=\"none\" stroke=\"%s\" %s/>\n", color_of(s), style);
}

static void put_marks(FILE *f, const axis *x_axis, const axis *y_axis, const gpt_svg_series *s) {
  for (int64_t i = 0; i < s->count && s->count <= MOST_POINTS; ++i)
    if (isfinite(s->x[i]) && isfinite(s->y[i]))
      fprintf(f,
              "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.2\" fill=\"#fff\" stroke=\"%s\" "
              "stroke-width=\"1.8\"/>\n",
              position(x_axis, s->x[i]), position(y_axis, s->y[i]), color_of(s));
}

static void put_series(FILE *f, const axis *x_axis, const axis *y_axis, const gpt_svg_series *s,
                       line drawn) {
  const line own = {s->x, s->y};
  if (s->smooth) put_line(f, x_axis, y_axis, s, own, "stroke-width=\"1\" stroke-opacity=\"0.25\"");
  put_line(f, x_axis, y_axis, s, drawn,
           s->points ? "stroke-width=\"1.8\" stroke-dasharray=\"6 4\"" : "stroke-width=\"2.4\"");
}

/* Top right: where a falling curve leaves room. */
static void put_legend(FILE *f, const gpt_svg_chart *chart) {
  size_t longest = 0;
  double left, width;
  for (int i = 0; i < chart->series_count; ++i)
    if (strlen(chart->series[i].name) > longest) longest = strlen(chart->series[i].name);
  width = 62.0 + 7.4 * (double)longest;
  left = PLOT_RIGHT - 12 - width;
  fprintf(f,
          "<rect x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\" rx=\"4\" fill=\"#fff\" "
          "fill-opacity=\"0.9\" stroke=\"#ccc\"/>\n",
          left, TOP + 12, width, 14 + 22 * chart->series_count);
  for (int i = 0; i < chart->series_count; ++i) {
    const gpt_svg_series *s = &chart->series[i];
    const double y = TOP + 30 + 22 * i;
    fprintf(f, "<path d=\"M%.1f %.1fh30\" stroke=\"%s\" stroke-width=\"2.4\"%s/>\n", left + 12, y,
            color_of(s), s->points ? " stroke-dasharray=\"6 4\"" : "");
    put_label(f, left + 50, y + 4, "", s->name);
  }
}

static void put_chart(FILE *f, const gpt_svg_chart *chart, const axis *x, const axis *y,
                      const line *drawn) {
  fprintf(f,
          "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
          "viewBox=\"0 0 %d %d\" font-family=\"Helvetica, Arial, sans-serif\" "
          "font-size=\"13\" fill=\"#333\">\n",
          WIDTH, HEIGHT, WIDTH, HEIGHT);
  fputs("<style>.grid{stroke:#e4e4e4;fill:none}</style>\n", f);
  fprintf(f, "<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n", WIDTH, HEIGHT);
  fprintf(f,
          "<clipPath id=\"plot\"><rect x=\"%d\" y=\"%d\" width=\"%d\" height=\"%d\"/></clipPath>\n",
          LEFT, TOP, PLOT_RIGHT - LEFT, PLOT_BOTTOM - TOP);
  put_label(f, LEFT, 32, "font-size=\"17\" font-weight=\"bold\" fill=\"#111\"", chart->title);
  put_axis(f, x, 1);
  put_axis(f, y, 0);
  fprintf(f, "<path d=\"M%d %dV%dH%d\" stroke=\"#555\" fill=\"none\"/>\n", LEFT, TOP, PLOT_BOTTOM,
          PLOT_RIGHT);
  put_label(f, (LEFT + PLOT_RIGHT) / 2.0, HEIGHT - 16, "text-anchor=\"middle\"", chart->x_label);
  put_label(f, -(TOP + PLOT_BOTTOM) / 2.0, 20, "text-anchor=\"middle\" transform=\"rotate(-90)\"",
            chart->y_label);
  fputs("<g clip-path=\"url(#plot)\" stroke-linejoin=\"round\">\n", f);
  for (int i = 0; i < chart->series_count; ++i)
    put_series(f, x, y, &chart->series[i], drawn[i]);
  fputs("</g>\n", f);
  /* Marks lie inside the range and may reach over its edge: they are not clipped. */
  for (int i = 0; i < chart->series_count; ++i)
    if (chart->series[i].points) put_marks(f, x, y, &chart->series[i]);
  put_legend(f, chart);
  fputs("</svg>\n", f);
}

/* ---- the whole ---- */

static int write_file(const char *path, const gpt_svg_chart *chart, const axis *x, const axis *y,
                      const line *drawn, gpt_error *error) {
  int failed;
  FILE *f = fopen(path, "w");
  if (!f) return gpt_fail(error, "cannot write %s: %s", path, strerror(errno));
  put_chart(f, chart, x, y, drawn);
  failed = ferror(f);
  failed |= fclose(f) != 0;
  return failed ? gpt_fail(error, "%s is incomplete; is the disk full?", path) : GPT_OK;
}

/* drawn[i] points at the series' own values, or into `room` for two values of each point. x is
 * averaged like y: so a falling curve is not shifted to the right. */
static int draw(const char *path, const gpt_svg_chart *chart, line *drawn, double *room,
                gpt_error *error) {
  axis x = {INFINITY, -INFINITY, 0, LEFT, PLOT_RIGHT};
  axis y = {INFINITY, -INFINITY, 0, PLOT_BOTTOM, TOP};
  for (int i = 0; i < chart->series_count; ++i) {
    const gpt_svg_series *s = &chart->series[i];
    drawn[i].x = s->x;
    drawn[i].y = s->y;
    if (s->smooth) {
      const int64_t window = gpt_curve_window(s->count);
      gpt_curve_smooth(s->count, s->x, window, room);
      gpt_curve_smooth(s->count, s->y, window, room + s->count);
      drawn[i].x = room;
      drawn[i].y = room + s->count;
      room += 2 * s->count;
    }
    extend(&x, s->x, s->count);
    extend(&y, drawn[i].y, s->count);
  }
  if (!(x.low <= x.high) || !(y.low <= y.high))
    return gpt_fail(error, "%s: there is no finite value to draw", path);
  round_range(&x, 8);
  round_range(&y, 7);
  return write_file(path, chart, &x, &y, drawn, error);
}

int gpt_svg_write(const char *path, const gpt_svg_chart *chart, gpt_error *error) {
  size_t points = 1;
  line *drawn;
  double *room;
  int status;
  for (int i = 0; i < chart->series_count; ++i)
    points += (size_t)chart->series[i].count;
  drawn = (line *)calloc((size_t)chart->series_count + 1, sizeof *drawn);
  room = (double *)malloc(2 * points * sizeof *room);
  if (drawn && room)
    status = draw(path, chart, drawn, room, error);
  else
    status = gpt_fail(error, "no memory to draw %s", path);
  free(drawn);
  free(room);
  return status;
}
