// Encodes rows of activations as lines of bytes.
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include "functions.h"
#include "products.h"

static const float FINE_STEPS = 127 * 256, COARSE_STEPS = 127;
static const float MAX_PEAK = 12;  // largest magnitude, relative to the rms of its row, for which 8 bits suffice
static const float TINY = 1e-30f;  // a row without larger values counts as zeros

struct Scratch {
  float* x;             // [MAX_ROWS, inputs + 1]
  int8_t* codes;        // [MAX_LINES, padded], or the pairs of MAX_ROWS rows
  int32_t* half_sums;   // [MAX_LINES, padded / HALF]
  float steps[MAX_LINES];
  int64_t first_line[MAX_ROWS + 1];
};

static int64_t padded(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

// Pairs from a row to the next: never a multiple of 4096 bytes, at which all rows would share a few lines of the cache.
static int64_t pairs_stride(int64_t inputs) { return padded(inputs) / 2 + 16 * (padded(inputs) % 512 == 0); }

Scratch* new_scratch(int64_t inputs) {
  Scratch* s = calloc(1, sizeof *s);
  if (!s) return NULL;
  s->x = malloc((size_t)(MAX_ROWS * (inputs + 1)) * sizeof *s->x);
  s->codes = malloc((size_t)(MAX_ROWS * pairs_stride(inputs)) * sizeof(uint32_t));
  s->half_sums = malloc((size_t)(MAX_LINES * padded(inputs) / HALF) * sizeof *s->half_sums);
  if (s->x && s->codes && s->half_sums) return s;
  free_scratch(s);
  return NULL;
}

void free_scratch(Scratch* s) {
  if (!s) return;
  free(s->x);
  free(s->codes);
  free(s->half_sums);
  free(s);
}

static int has_outliers(const float* x, int64_t count, float peak) {
  enum { PARTS = 32 };  // sums side by side
  float parts[PARTS] = {0}, sum = 0;
  const float factor = 1 / peak;  // squares of the largest values may not be finite
  int64_t i = 0;
  for (; i + PARTS <= count; i += PARTS)
    for (int j = 0; j < PARTS; j++) parts[j] += (x[i + j] * factor) * (x[i + j] * factor);
  for (; i < count; i++) sum += (x[i] * factor) * (x[i] * factor);
  for (int j = 0; j < PARTS; j++) sum += parts[j];
  return (float)count > sum * MAX_PEAK * MAX_PEAK;
}

// x to the nearest integer, for magnitudes below 2^22: adding 1.5 * 2^23 leaves the integer in the low bits.
static inline int32_t nearest(float x) {
  const float middle = 12582912;
  float moved = x + middle;
  int32_t bits, middle_bits;
  memcpy(&bits, &moved, sizeof bits);
  memcpy(&middle_bits, &middle, sizeof middle_bits);
  return bits - middle_bits;
}

static void encode_half_coarse(const float* restrict x, float factor, int8_t* restrict high, int32_t* restrict sum) {
  int32_t total = 0;
  for (int i = 0; i < HALF; i++) {
    int32_t code = nearest(x[i] * factor);
    high[i] = (int8_t)code;
    total += code;
  }
  *sum = total;
}

static void encode_half_fine(
    const float* restrict x, float factor, int8_t* restrict high, int8_t* restrict low, int32_t* restrict high_sum,
    int32_t* restrict low_sum) {
  int32_t highs = 0, lows = 0;
  for (int i = 0; i < HALF; i++) {
    int32_t code = nearest(x[i] * factor), h = (code + 128) >> 8, l = code - h * 256;
    l = l < -127 ? -127 : l;  // -128 has no opposite, which a product without VNNI needs
    high[i] = (int8_t)h;
    low[i] = (int8_t)l;
    highs += h;
    lows += l;
  }
  *high_sum = highs;
  *low_sum = lows;
}

typedef struct {
  int8_t* codes;
  int32_t* half_sums;
  int64_t inputs;  // padded
} Lines;

static void encode_half(const float* x, float factor, int is_fine, int64_t half, const Lines* to) {
  int8_t* codes = to->codes + half * HALF;
  int32_t* sums = to->half_sums + half;
  if (is_fine)
    encode_half_fine(x, factor, codes, codes + to->inputs, sums, sums + to->inputs / HALF);
  else
    encode_half_coarse(x, factor, codes, sums);
}

static void encode_row(const float* x, int64_t inputs, float factor, int is_fine, const Lines* to) {
  const int64_t whole = inputs / HALF;
  for (int64_t half = 0; half < whole; half++) encode_half(x + half * HALF, factor, is_fine, half, to);
  for (int64_t half = whole; half < to->inputs / HALF; half++) {
    float rest[HALF] = {0};
    if (half * HALF < inputs) memcpy(rest, x + half * HALF, (size_t)(inputs - half * HALF) * sizeof *x);
    encode_half(rest, factor, is_fine, half, to);
  }
}

// Return how many lines the row takes.
static int64_t encode_lines(const float* x, int64_t inputs, int is_fine, const Lines* to, float* steps) {
  const float peak = float_of_bits(largest_magnitude_bits(x, inputs, 0));
  const int is_finite = isfinite(peak), is_zero = peak < TINY;
  if (!is_finite || is_zero) {
    memset(to->codes, 0, (size_t)to->inputs);
    memset(to->half_sums, 0, (size_t)(to->inputs / HALF) * sizeof *to->half_sums);
    steps[0] = is_finite ? 0 : NAN;
    return 1;
  }
  is_fine = is_fine || has_outliers(x, inputs, peak);
  const float levels = is_fine ? FINE_STEPS : COARSE_STEPS, step = peak / levels;
  encode_row(x, inputs, levels / peak, is_fine, to);
  steps[0] = is_fine ? step * 256 : step;
  if (is_fine) steps[1] = step;
  return is_fine ? 2 : 1;
}

static void round_row(const float* x, int64_t inputs, uint32_t* pairs) {
  int64_t i = 0;
  for (; i + LANES <= inputs; i += LANES) store_pairs(pairs + i / 2, load_floats(x + i));
  for (; i < inputs; i += LANES) {
    float rest[LANES] = {0};
    memcpy(rest, x + i, (size_t)(inputs - i) * sizeof *x);
    store_pairs(pairs + i / 2, load_floats(rest));
  }
}

// x in the order of the matrix's columns, padded with a zero where pairs of inputs are read.
static void copy_row(const Matrix* matrix, const float* x, float* to) {
  const int64_t inputs = matrix->inputs;
  if (matrix->input_order)
    for (int64_t k = 0; k < inputs; k++) to[k] = x[matrix->input_order[k]];
  else
    memcpy(to, x, (size_t)inputs * sizeof *x);
  to[inputs] = 0;
}

Rows encode_rows(const Matrix* matrix, const float* x, int64_t stride, int64_t rows, int is_fine, Scratch* s) {
  const int64_t inputs = matrix->inputs;
  const int is_pair = matrix->kind == KIND_BF16 || matrix->kind == KIND_F16, is_rounded = matrix->kind == KIND_BF16_ROUNDED;
  if (matrix->input_order || (is_pair && inputs % 2)) {
    for (int64_t r = 0; r < rows; r++) copy_row(matrix, x + r * stride, s->x + r * (inputs + 1));
    x = s->x;
    stride = inputs + 1;
  }
  Rows out = {.rows = rows, .x = x, .x_stride = stride};
  if (is_pair || matrix->kind == KIND_F32) return out;
  if (is_rounded) {
    out.pairs = (const uint32_t*)s->codes;
    out.pairs_stride = pairs_stride(inputs);
    for (int64_t r = 0; r < rows; r++)
      round_row(x + r * stride, inputs, (uint32_t*)s->codes + r * out.pairs_stride);
    return out;
  }
  out.padded_inputs = padded(inputs);
  for (int64_t r = 0; r < rows; r++) {
    Lines to = {s->codes + out.lines * out.padded_inputs, s->half_sums + out.lines * (out.padded_inputs / HALF),
                out.padded_inputs};
    s->first_line[r] = out.lines;
    out.lines += encode_lines(x + r * stride, inputs, is_fine, &to, s->steps + out.lines);
  }
  s->first_line[rows] = out.lines;
  out.codes = s->codes;
  out.half_sums = s->half_sums;
  out.steps = s->steps;
  out.first_line = s->first_line;
  return out;
}
