// Products of a few rows with a block of 64 outputs, for every layout of matrix.h.
//
// A block is read once, GROUP inputs at a time: these are multiplied with all rows while the first level of the cache
// holds them. Sums stay in memory from one group of inputs to the next. Within a group `ACCUMULATORS` vectors of sums
// are in registers: a few rows times a few of the block's vectors.
#include "groups.h"
#include "products.h"

enum { VECTORS = OUTPUTS / LANES, WORDS = GROUP / 4 };

typedef union {
  float floats[OUTPUTS];
  int32_t ints[OUTPUTS];
} Sums __attribute__((aligned(64)));

// How many vectors of a block are summed together for so many rows.
#define TOGETHER(rows) (ACCUMULATORS / (rows) < VECTORS ? ACCUMULATORS / (rows) : VECTORS)

// Call f(first, count) for all rows, with counts that the compiler knows.
#define FOR_ROWS(total, call)                    \
  do {                                           \
    int64_t first = 0;                           \
    for (; first + 4 <= (total); first += 4) {   \
      enum { COUNT = 4 };                        \
      call;                                      \
    }                                            \
    for (; first + 2 <= (total); first += 2) {   \
      enum { COUNT = 2 };                        \
      call;                                      \
    }                                            \
    for (; first < (total); first++) {           \
      enum { COUNT = 1 };                        \
      call;                                      \
    }                                            \
  } while (0)

// Ask for the next 256 bytes that are `ahead` bytes after w. Processors look ahead by themselves, but not far enough for
// one thread to read as fast as memory allows: so much more work is done for a byte of 4-bit weights that these need
// the longer distance.
enum { AHEAD = 1024, AHEAD_4_BIT = 2048 };
INLINE void prefetch(const void* w, int64_t ahead) {
  for (int i = 0; i < OUTPUTS * 4; i += 64) __builtin_prefetch((const char*)w + ahead + i);
}

// ---- 16 and 32 bit weights --------------------------------------------------------------------------------------------

INLINE Floats even_input(int kind, Ints w) { return kind == KIND_BF16 ? low_bf16(w) : low_halves(w); }
INLINE Floats odd_input(int kind, Ints w) { return kind == KIND_BF16 ? high_bf16(w) : high_halves(w); }

// Add the products of `inputs` inputs with `count` rows: x of the first row, sums of the first row.
INLINE void add_floats(
    int kind, int count, const float* w, int64_t inputs, const float* x, int64_t x_stride, Sums* sums) {
  const int together = TOGETHER(count);
#pragma GCC unroll 1
  for (int v = 0; v < VECTORS; v += together) {
    Floats sum[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++)
      sum[i] = load_floats(sums[i / together].floats + (v + i % together) * LANES);
    const float* at = w + v * LANES;
    const int step = kind == KIND_F32 ? 1 : 2;
#pragma GCC unroll 1
    for (int64_t k = 0; k < inputs; k += step, at += OUTPUTS) {
      if (v == 0) prefetch(at, AHEAD);
#pragma GCC unroll 16
      for (int i = 0; i < count * together; i++) {
        const float* row = x + i / together * x_stride + k;
        if (kind == KIND_F32) {
          sum[i] = multiply_add(load_floats(at + i % together * LANES), same_floats(row[0]), sum[i]);
        } else {
          const Ints pairs = load_ints(at + i % together * LANES);
          sum[i] = multiply_add(even_input(kind, pairs), same_floats(row[0]), sum[i]);
          sum[i] = multiply_add(odd_input(kind, pairs), same_floats(row[1]), sum[i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++)
      store_floats(sums[i / together].floats + (v + i % together) * LANES, sum[i]);
  }
}

INLINE void sum_floats(int kind, const Matrix* matrix, const Rows* rows, int64_t block, Sums* sums) {
  const int64_t inputs = kind == KIND_F32 ? matrix->inputs : (matrix->inputs + 1) / 2 * 2;
  const int64_t words = kind == KIND_F32 ? inputs : inputs / 2;  // in a row of memory, for each output
  const float* w = (const float*)matrix->weights + block * words * OUTPUTS;
  for (int64_t k = 0; k < inputs; k += GROUP, w += (kind == KIND_F32 ? GROUP : GROUP / 2) * OUTPUTS) {
    const int64_t some = inputs - k < GROUP ? inputs - k : GROUP;
    FOR_ROWS(rows->rows, add_floats(kind, COUNT, w, some, rows->x + first * rows->x_stride + k, rows->x_stride, sums + first));
  }
}

static void sum_f32(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_floats(KIND_F32, m, rows, block, sums);
}
static void sum_bf16(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_floats(KIND_BF16, m, rows, block, sums);
}
static void sum_f16(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_floats(KIND_F16, m, rows, block, sums);
}

// ---- products of pairs of bf16 ----------------------------------------------------------------------------------------

enum { CHUNK = 64 };  // pairs of inputs whose weights, 16 KB, stay in the first level of the cache for all rows

// Add the products of `pairs` pairs of inputs with `count` rows, `together` vectors of outputs at a time. The first rows
// ask for the chunk after this one, so that memory is read while the others are multiplied.
INLINE void add_pairs(
    int count, int together, int is_first, const float* w, int64_t pairs, const uint32_t* x, int64_t stride, Sums* sums) {
#pragma GCC unroll 1
  for (int v = 0; v < VECTORS; v += together) {
    Floats sum[24];
#pragma GCC unroll 24
    for (int i = 0; i < count * together; i++)
      sum[i] = load_floats(sums[i / together].floats + (v + i % together) * LANES);
    const float* at = w + v * LANES;
#pragma GCC unroll 1
    for (int64_t k = 0; k < pairs; k++, at += OUTPUTS) {
      Ints weights[4];
#pragma GCC unroll 4
      for (int i = 0; i < together; i++) {
        if (is_first) __builtin_prefetch(at + i * LANES + CHUNK * OUTPUTS);
        weights[i] = load_ints(at + i * LANES);
      }
#pragma GCC unroll 12
      for (int row = 0; row < count; row++) {
        const Ints both = same_ints((int32_t)x[row * stride + k]);
#pragma GCC unroll 4
        for (int i = 0; i < together; i++)
          sum[row * together + i] = dot_pairs(sum[row * together + i], weights[i], both);
      }
    }
#pragma GCC unroll 24
    for (int i = 0; i < count * together; i++)
      store_floats(sums[i / together].floats + (v + i % together) * LANES, sum[i]);
  }
}

static void sum_bf16_rounded(const Matrix* matrix, const Rows* rows, int64_t block, Sums* sums) {
  const int64_t pairs = (matrix->inputs + 1) / 2, stride = rows->pairs_stride;
  const float* w = (const float*)matrix->weights + block * pairs * OUTPUTS;
  for (int64_t k = 0; k < pairs; k += CHUNK, w += CHUNK * OUTPUTS) {
    const int64_t some = pairs - k < CHUNK ? pairs - k : CHUNK;
    int64_t row = 0;
// 24 sums at a time are the most whose operands find registers beside them, and for few rows, all outputs.
#define ADD_ROWS(count, together)             \
  for (; row + (count) <= rows->rows; row += (count)) \
    add_pairs(count, together, row == 0, w, some, rows->pairs + row * stride + k, stride, sums + row)
    ADD_ROWS(12, 2);
    ADD_ROWS(8, 2);
    ADD_ROWS(4, 4);
    ADD_ROWS(2, 4);
    ADD_ROWS(1, 4);
#undef ADD_ROWS
  }
}

// ---- weights of 8 bits and fewer --------------------------------------------------------------------------------------

// Some lines of codes within one group of inputs.
typedef struct {
  const int8_t* codes;
  int64_t stride;
  const int32_t* sums;
  int64_t sums_stride;
} Lines;

INLINE Lines lines_at(const Rows* rows, int64_t first, int64_t group) {
  const int64_t halves = rows->padded_inputs / HALF;
  return (Lines){rows->codes + first * rows->padded_inputs + group * GROUP, rows->padded_inputs,
                 rows->half_sums + first * halves + group * 2, halves};
}

INLINE int32_t group_sum(const Lines* lines, int line) {
  const int32_t* halves = lines->sums + line * lines->sums_stride;
  return halves[0] + halves[1];
}

INLINE Ints four_codes(const Lines* lines, int line, int64_t word) {
  int32_t v;
  memcpy(&v, lines->codes + line * lines->stride + 4 * word, sizeof v);
  return same_ints(v);
}

// Bytes of 8-bit weights as `dot_bytes` wants them.
INLINE Ints as_factors(Ints codes, int are_unsigned) {
  return are_unsigned == WEIGHTS_ARE_UNSIGNED ? codes : codes ^ same_ints((int32_t)0x80808080);
}

// What `dot_bytes` has added too much: unsigned weights are 128 more than their values.
INLINE Ints excess(const Lines* lines, int line) {
  return same_ints(WEIGHTS_ARE_UNSIGNED ? 128 * group_sum(lines, line) : 0);
}

INLINE void add_int8(int count, const uint8_t* w, int64_t words, const Lines* lines, Sums* sums) {
  const int together = TOGETHER(count);
#pragma GCC unroll 1
  for (int v = 0; v < VECTORS; v += together) {
    Ints sum[ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++)
      sum[i] = load_ints(sums[i / together].ints + (v + i % together) * LANES) - excess(lines, i / together);
    for (int64_t j = 0; j < words; j++) {
      if (v == 0) prefetch(w + j * OUTPUTS * 4, AHEAD);
#pragma GCC unroll 16
      for (int i = 0; i < count * together; i++) {
        const Ints codes = as_factors(load_ints(w + (j * OUTPUTS + (v + i % together) * LANES) * 4), 0);
        sum[i] = dot_bytes(sum[i], codes, four_codes(lines, i / together, j));
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++)
      store_ints(sums[i / together].ints + (v + i % together) * LANES, sum[i]);
  }
}

static void sum_int8(const Matrix* matrix, const Rows* rows, int64_t block, Sums* sums) {
  const int64_t words = matrix->inputs / 4;
  const uint8_t* w = (const uint8_t*)matrix->weights + block * stored_inputs(matrix) * OUTPUTS;
  for (int64_t j = 0; j < words; j += WORDS, w += WORDS * OUTPUTS * 4) {
    const int64_t some = words - j < WORDS ? words - j : WORDS;
    FOR_ROWS(rows->lines, Lines lines = lines_at(rows, first, j / WORDS);
             add_int8(COUNT, w, some, &lines, sums + first));
  }
  for (int64_t line = 0; line < rows->lines; line++)
    for (int v = 0; v < OUTPUTS; v += LANES)
      store_floats(sums[line].floats + v, to_floats(load_ints(sums[line].ints + v)) *
                                              load_floats(matrix->scales + block * OUTPUTS + v));
}

// Dot products with codes of 8 bits, or with nibbles whose values take 8.
INLINE void dot_group_bytes(int kind, int count, int together, int v, const uint8_t* w, const Lines* lines, Ints* sum) {
  const int is_q8 = kind == KIND_Q8;
#pragma GCC unroll 16
  for (int i = 0; i < count * together; i++) sum[i] = -excess(lines, i / together);
#pragma GCC unroll 8
  for (int p = 0; p < WORDS; p++) {
    if (v == 0 && (is_q8 || p < WORDS / 2)) prefetch(w + p * OUTPUTS * 4, is_q8 ? AHEAD : AHEAD_4_BIT);
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++) {
      const Ints codes = as_factors(group_word(kind, w, p, (v + i % together) * LANES), is_q8);
      sum[i] = dot_bytes(sum[i], codes, four_codes(lines, i / together, p));
    }
  }
}

// Dot products with nibbles whose values are small: of all inputs, or of one half.
INLINE void dot_nibbles_of(
    int kind, int count, int together, int v, int half, const uint8_t* w, const Lines* lines, const Ints* start,
    Ints* sum) {
  const Ints nibble = same_ints(0x0f0f0f0f);
  const int has_low = kind != KIND_NVFP4 || half == 0, has_high = kind != KIND_NVFP4 || half == 1;
#pragma GCC unroll 16
  for (int i = 0; i < count * together; i++) sum[i] = start[i / together];
  for (int j = 0; j < WORDS / 2; j++) {
    if (v == 0 && half == 0) prefetch(w + j * OUTPUTS * 4, AHEAD_4_BIT);
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++) {
      const Ints both = load_ints(w + (j * OUTPUTS + (v + i % together) * LANES) * 4);
      const Ints low = decode_nibbles(kind, both & nibble), high = decode_nibbles(kind, (Ints)((Words)both >> 4) & nibble);
      if (has_low) sum[i] = dot_nibbles(sum[i], low, four_codes(lines, i / together, j));
      if (has_high) sum[i] = dot_nibbles(sum[i], high, four_codes(lines, i / together, WORDS / 2 + j));
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < count * together; i++) sum[i] = nibble_sums(sum[i]);
}

// Add the products of a group, or of one half of its inputs, with their scales, for `count` lines.
INLINE void add_half(int kind, int count, int half, const uint8_t* w, const Lines* lines, Sums* sums) {
  const int together = TOGETHER(count), is_half = kind == KIND_NVFP4;
  const int has_bytes = kind == KIND_Q8 || kind == KIND_IQ4;
  Ints start[4];
#pragma GCC unroll 4
  for (int line = 0; line < count && !has_bytes; line++)
    start[line] = start_of_nibbles(
        lines->codes + line * lines->stride + half * HALF, is_half ? HALF : GROUP,
        is_half ? lines->sums[line * lines->sums_stride + half] : group_sum(lines, line), zero_of(kind));
#pragma GCC unroll 1
  for (int v = 0; v < VECTORS; v += together) {
    Ints sum[ACCUMULATORS];
    if (has_bytes)
      dot_group_bytes(kind, count, together, v, w, lines, sum);
    else
      dot_nibbles_of(kind, count, together, v, half, w, lines, start, sum);
#pragma GCC unroll 16
    for (int i = 0; i < count * together; i++) {
      const int at = (v + i % together) * LANES, line_sum = group_sum(lines, i / together);
      float* to = sums[i / together].floats + at;
      Floats total = multiply_add(to_floats(sum[i]), group_scales(kind, w, half, at), load_floats(to));
      if (kind == KIND_Q4_MIN) total = multiply_add(same_floats((float)-line_sum), group_minima(w, at), total);
      store_floats(to, total);
    }
  }
}

INLINE void sum_groups(int kind, const Matrix* matrix, const Rows* rows, int64_t block, Sums* sums) {
  const int64_t groups = matrix->inputs / GROUP;
  const uint8_t* w = (const uint8_t*)matrix->weights + block * groups * group_bytes(kind);
  for (int64_t group = 0; group < groups; group++, w += group_bytes(kind))
    FOR_ROWS(rows->lines, Lines lines = lines_at(rows, first, group);
             add_half(kind, COUNT, 0, w, &lines, sums + first);
             if (kind == KIND_NVFP4) add_half(kind, COUNT, 1, w, &lines, sums + first));
}

static void sum_q8(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_Q8, m, rows, block, sums);
}
static void sum_q4(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_Q4, m, rows, block, sums);
}
static void sum_q4_min(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_Q4_MIN, m, rows, block, sums);
}
static void sum_mxfp4(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_MXFP4, m, rows, block, sums);
}
static void sum_nvfp4(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_NVFP4, m, rows, block, sums);
}
static void sum_iq4(const Matrix* m, const Rows* rows, int64_t block, Sums* sums) {
  sum_groups(KIND_IQ4, m, rows, block, sums);
}

// ---- all kinds --------------------------------------------------------------------------------------------------------

static Floats row_result(const Rows* rows, const Sums* sums, int64_t row, int at, Floats bias) {
  if (!rows->lines) return load_floats(sums[row].floats + at) + bias;
  Floats y = same_floats(0);
  for (int64_t line = rows->first_line[row]; line < rows->first_line[row + 1]; line++)
    y = multiply_add(load_floats(sums[line].floats + at), same_floats(rows->steps[line]), y);
  return y + bias;
}

void multiply_block(const Matrix* matrix, const Rows* rows, int64_t block, float* y, int64_t stride) {
  static void (*const sum[])(const Matrix*, const Rows*, int64_t, Sums*) = {
      [KIND_F32] = sum_f32,     [KIND_BF16] = sum_bf16,   [KIND_F16] = sum_f16, [KIND_I8] = sum_int8,
      [KIND_Q8] = sum_q8,       [KIND_Q4] = sum_q4,       [KIND_Q4_MIN] = sum_q4_min,
      [KIND_MXFP4] = sum_mxfp4, [KIND_NVFP4] = sum_nvfp4, [KIND_IQ4] = sum_iq4,
      [KIND_BF16_ROUNDED] = sum_bf16_rounded,
  };
  Sums sums[MAX_LINES];
  memset(sums, 0, (size_t)(rows->lines ? rows->lines : rows->rows) * sizeof *sums);
  if (matrix->kind >= KIND_STORED)
    multiply_stored(matrix, rows, block, sums[0].floats, OUTPUTS);
  else
    sum[matrix->kind](matrix, rows, block, sums);
  for (int64_t row = 0; row < rows->rows; row++)
    for (int at = 0; at < OUTPUTS; at += LANES) {
      const Floats bias = matrix->bias ? load_floats(matrix->bias + block * OUTPUTS + at) : same_floats(0);
      store_floats(y + row * stride + at, row_result(rows, sums, row, at, bias));
    }
}
