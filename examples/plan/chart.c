/* SPDX-License-Identifier: MIT */
#include "chart.h"

#include <math.h>

enum { LEFT = 64, RIGHT = 20, TOP = 44, LEGEND = 20, BOTTOM = 46 };

/* Distinct in hue and lightness, also for the common forms of colour blindness (Okabe and Ito). */
static const char *const palette[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7",
                                      "#e69f00", "#56b4e9", "#000000"};

typedef struct axis {
  double low, high; /* logarithms, base 2 or 10 */
  double from, to;  /* pixels */
} axis;

static double position(const axis *a, double logarithm) {
  return a->from + (logarithm - a->low) / (a->high - a->low) * (a->to - a->from);
}

static void text(FILE *f, double x, double y, const char *attributes, const char *words) {
  fprintf(f, "<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes);
  for (; *words; ++words)
    switch (*words) {
    case '&': fputs("&amp;", f); break;
    case '<': fputs("&lt;", f); break;
    case '>': fputs("&gt;", f); break;
    default: fputc(*words, f);
    }
  fputs("</text>\n", f);
}

/* The smallest whole powers around all points. */
static void ranges(const plan_chart *chart, axis *x, axis *y) {
  x->low = y->low = 1e9;
  x->high = y->high = -1e9;
  for (int s = 0; s < chart->series_count; ++s)
    for (int i = 0; i < chart->series[s].count; ++i) {
      if (!(chart->series[s].y[i] > 0.0)) continue;
      const double lx = log2(chart->series[s].x[i]), ly = log10(chart->series[s].y[i]);
      x->low = fmin(x->low, lx);
      x->high = fmax(x->high, lx);
      y->low = fmin(y->low, floor(ly));
      y->high = fmax(y->high, ceil(ly));
    }
  if (x->low > x->high) x->low = x->high = y->low = y->high = 0.0;
  if (x->high - x->low < 1.0) x->high = x->low + 1.0;
  if (y->high - y->low < 1.0) y->high = y->low + 1.0;
}

static void put_axes(FILE *f, const axis *x, const axis *y) {
  char word[32];
  for (int power = (int)ceil(x->low); power <= x->high + 1e-9; ++power) {
    const double at = position(x, power);
    fprintf(f, "<path d=\"M%.1f %.1fV%.1f\" stroke=\"#e8e8e8\"/>\n", at, y->to, y->from);
    snprintf(word, sizeof word, "%.0f", exp2(power));
    text(f, at, y->from + 17, "text-anchor=\"middle\" font-size=\"11\"", word);
  }
  for (int power = (int)y->low; power <= y->high + 1e-9; ++power) {
    const double at = position(y, power);
    fprintf(f, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#d8d8d8\"/>\n", x->from, at, x->to);
    snprintf(word, sizeof word, "%g", pow(10.0, power));
    text(f, x->from - 7, at + 4, "text-anchor=\"end\" font-size=\"11\"", word);
    for (int minor = 2; minor < 10 && power < y->high; ++minor) {
      const double between = position(y, power + log10(minor));
      fprintf(f, "<path d=\"M%.1f %.1fH%.1f\" stroke=\"#f2f2f2\"/>\n", x->from, between, x->to);
    }
  }
  fprintf(f, "<path d=\"M%.1f %.1fV%.1fH%.1f\" stroke=\"#555\" fill=\"none\"/>\n", x->from, y->to,
          y->from, x->to);
}

static void put_series(FILE *f, const plan_series *s, const axis *x, const axis *y) {
  const char *color = palette[(unsigned)s->color % (sizeof palette / sizeof palette[0])];
  fprintf(f, "<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"2\"%s points=\"", color,
          s->dashed ? " stroke-dasharray=\"6 4\"" : "");
  for (int i = 0; i < s->count; ++i)
    if (s->y[i] > 0.0)
      fprintf(f, "%.1f,%.1f ", position(x, log2(s->x[i])), position(y, log10(s->y[i])));
  fputs("\"/>\n", f);
  for (int i = 0; i < s->count; ++i)
    if (s->y[i] > 0.0)
      fprintf(f,
              "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"3.4\" fill=\"%s\" stroke=\"%s\" "
              "stroke-width=\"1.6\"/>\n",
              position(x, log2(s->x[i])), position(y, log10(s->y[i])), s->dashed ? "#fff" : color,
              color);
}

/* Below the title, in two columns. */
static void put_legend(FILE *f, const plan_chart *chart, double left, double top) {
  for (int i = 0; i < chart->series_count; ++i) {
    const plan_series *s = &chart->series[i];
    const double x = left + (i % 2) * (PLAN_CHART_WIDTH - LEFT - RIGHT) / 2.0;
    const double y = top + LEGEND * (double)(i / 2);
    fprintf(f, "<path d=\"M%.1f %.1fh26\" stroke=\"%s\" stroke-width=\"2\"%s/>\n", x, y - 4,
            palette[(unsigned)s->color % (sizeof palette / sizeof palette[0])],
            s->dashed ? " stroke-dasharray=\"6 4\"" : "");
    text(f, x + 33, y, "font-size=\"12\"", s->name);
  }
}

void plan_chart_put(FILE *f, const plan_chart *chart, double left, double top) {
  const double head = top + TOP + LEGEND * (double)((chart->series_count + 1) / 2);
  axis x = {0.0, 0.0, left + LEFT, left + PLAN_CHART_WIDTH - RIGHT};
  axis y = {0.0, 0.0, top + PLAN_CHART_HEIGHT - BOTTOM, head};
  ranges(chart, &x, &y);
  text(f, left + LEFT, top + 22, "font-size=\"15\" font-weight=\"bold\" fill=\"#111\"",
       chart->title);
  put_legend(f, chart, left + LEFT, top + TOP + 4);
  put_axes(f, &x, &y);
  for (int i = 0; i < chart->series_count; ++i)
    put_series(f, &chart->series[i], &x, &y);
  text(f, (x.from + x.to) / 2, top + PLAN_CHART_HEIGHT - 10,
       "text-anchor=\"middle\" font-size=\"12\"", chart->x_label);
  fprintf(f, "<g transform=\"translate(%.1f %.1f) rotate(-90)\">", left + 16, (y.from + y.to) / 2);
  text(f, 0, 0, "text-anchor=\"middle\" font-size=\"12\"", chart->y_label);
  fputs("</g>\n", f);
}
