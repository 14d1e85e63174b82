// Products of a few rows with rows of a GGUF file, in the bytes of the file.
//
// A block of 256 weights has whole numbers as scales of its groups, so that everything within a block is summed as
// integers: `dot_signed` and `dot_unsigned` multiply 32 weights with the 32 activations of a line and with two scales.
// Eight lanes of fp32 sum the blocks, in the same order for every instruction set and number of rows.
#include "functions.h"
#include "products.h"
#include "stored.h"

enum { SUPER = 256, TOGETHER = 4, AHEAD = 1024 };  // weights of a large block; lines at a time; bytes read ahead

typedef uint8_t Bytes __attribute__((vector_size(32), aligned(1)));
typedef int8_t SignedBytes __attribute__((vector_size(32), aligned(1)));
typedef uint16_t Words16 __attribute__((vector_size(32)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef float Floats8 __attribute__((vector_size(32)));

// What a line has of a block: its activations, and their sums over HALF of them each.
typedef struct {
  const int8_t* codes;
  const int32_t* half_sums;
} Line;

// Sums of `TOGETHER` lines over an output's weights.
typedef struct {
  Floats8 products[TOGETHER];
  float minima[TOGETHER];  // what is subtracted
} Totals;

// ---- 32 weights --------------------------------------------------------------------------------------------------------

INLINE Bytes load32(const void* p) {
  Bytes v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE Bytes same_bytes(uint8_t a) { return (Bytes){0} + a; }

INLINE Ints8 dot_unsigned(Ints8 sum, Bytes w, const int8_t* x, int first, int second) {
#if defined(__AVX2__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)w, _mm256_loadu_si256((const void*)x));
  const __m256i scales = _mm256_set_m128i(_mm_set1_epi16((int16_t)second), _mm_set1_epi16((int16_t)first));
  return (Ints8)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, scales));
#elif defined(__ARM_FEATURE_DOTPROD)
  const int8x16_t* halves = (const int8x16_t*)&w;
  const int32x4_t zero = vdupq_n_s32(0);
  int32x4_t sums[2];
  memcpy(sums, &sum, sizeof sums);
  sums[0] = vmlaq_n_s32(sums[0], vdotq_s32(zero, halves[0], vld1q_s8(x)), first);
  sums[1] = vmlaq_n_s32(sums[1], vdotq_s32(zero, halves[1], vld1q_s8(x + HALF)), second);
  memcpy(&sum, sums, sizeof sum);
  return sum;
#else
  for (int i = 0; i < GROUP; i++) sum[i / 4] += (int8_t)w[i] * x[i] * (i < HALF ? first : second);
  return sum;
#endif
}

// As `dot_unsigned`, of weights with the signs of `signs`.
INLINE Ints8 dot_signed(Ints8 sum, Bytes magnitudes, SignedBytes signs, const int8_t* x, int first, int second) {
#if defined(__AVX2__)
  const __m256i turned = _mm256_sign_epi8(_mm256_loadu_si256((const void*)x), (__m256i)signs);
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)magnitudes, turned);
  const __m256i scales = _mm256_set_m128i(_mm_set1_epi16((int16_t)second), _mm_set1_epi16((int16_t)first));
  return (Ints8)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, scales));
#else
  const Bytes mask = (Bytes)(signs < 0);
  return dot_unsigned(sum, (magnitudes ^ mask) - mask, x, first, second);
#endif
}

INLINE Bytes magnitudes_of(SignedBytes w) {
#if defined(__AVX2__)
  return (Bytes)_mm256_abs_epi8((__m256i)w);
#else
  const Bytes mask = (Bytes)(w < 0);
  return ((Bytes)w ^ mask) - mask;
#endif
}

INLINE Floats8 multiply_add8(Ints8 a, float b, Floats8 c) {
#if defined(__AVX2__)
  return (Floats8)_mm256_fmadd_ps(_mm256_cvtepi32_ps((__m256i)a), _mm256_set1_ps(b), (__m256)c);
#else
  for (int i = 0; i < 8; i++) c[i] = __builtin_fmaf((float)a[i], b, c[i]);
  return c;
#endif
}

// Bytes moved by less than 8 bits. What comes from the next byte has to be masked.
INLINE Bytes right(Bytes v, int bits) {
#if defined(__AVX2__)
  return (Bytes)_mm256_srli_epi16((__m256i)v, bits);
#else
  return v >> (uint8_t)bits;
#endif
}

INLINE Bytes left(Bytes v, int bits) {
#if defined(__AVX2__)
  return (Bytes)_mm256_slli_epi16((__m256i)v, bits);
#else
  return v << (uint8_t)bits;
#endif
}

// The nibbles of 16 bytes: the low ones first.
INLINE Bytes nibbles_of(const uint8_t* p) {
#if defined(__AVX2__)
  const __m128i both = _mm_loadu_si128((const void*)p);
  return (Bytes)_mm256_set_m128i(_mm_srli_epi16(both, 4), both) & same_bytes(15);
#else
  Bytes out;
  for (int i = 0; i < HALF; i++) out[i] = p[i] & 15, out[HALF + i] = p[i] >> 4;
  return out;
#endif
}

// 0 or 255 for each of 32 bits.
INLINE Bytes bytes_of_bits(uint32_t bits) {
#if defined(__AVX2__)
  const __m256i places = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)bits), places);
  const __m256i single = _mm256_set1_epi64x((int64_t)0x8040201008040201);
  return (Bytes)_mm256_cmpeq_epi8(_mm256_and_si256(spread, single), single);
#else
  Bytes out;
  for (int i = 0; i < GROUP; i++) out[i] = bits >> i & 1 ? 255 : 0;
  return out;
#endif
}

// ---- blocks of 32 ------------------------------------------------------------------------------------------------------

INLINE void dot_small_block(int type, const uint8_t* b, int count, const Line* lines, Totals* totals) {
  Bytes w;
  switch (type) {
    case STORED_Q8_0: w = load32(b + 2); break;
    case STORED_Q5_0: w = (nibbles_of(b + 6) | (bytes_of_bits(word_at(b + 2)) & same_bytes(16))) - same_bytes(16); break;
    default: w = nibbles_of(b + 8) | (bytes_of_bits(word_at(b + 4)) & same_bytes(16));
  }
  const int is_signed = type != STORED_Q5_1;
  const Bytes magnitudes = is_signed ? magnitudes_of((SignedBytes)w) : w;
  const float scale = half_at(b), minimum = is_signed ? 0 : -half_at(b + 2);
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    const Ints8 sum = is_signed ? dot_signed((Ints8){0}, magnitudes, (SignedBytes)w, lines[i].codes, 1, 1)
                                : dot_unsigned((Ints8){0}, w, lines[i].codes, 1, 1);
    totals->products[i] = multiply_add8(sum, scale, totals->products[i]);
    if (!is_signed) {
      const float inputs = (float)(lines[i].half_sums[0] + lines[i].half_sums[1]);
      totals->minima[i] = __builtin_fmaf(minimum, inputs, totals->minima[i]);
    }
  }
}

// ---- blocks of 256 -----------------------------------------------------------------------------------------------------

// What a block of 256 has in common for all lines: the value of a weight is w * scales[half] * scale - minima[half] *
// minimum.
typedef struct {
  float scale, minimum;
  int16_t scales[16], minima[16];
} Scales;

// 32 weights: magnitudes, and signs by the signs of these bytes. Without signs if the type has minima.
typedef struct {
  Bytes magnitudes;
  SignedBytes signs;
} Weights;

INLINE int has_minima(int type) { return type == STORED_Q5_K || type == STORED_Q2_K; }

// Odd scales of 4 bits, as the types by tables have them: two nibbles of a byte.
INLINE void odd_scales(Scales* s, int group, int first, int second) {
  s->scales[2 * group] = (int16_t)(2 * first + 1);
  s->scales[2 * group + 1] = (int16_t)(2 * second + 1);
}

INLINE void read_scales(int type, const uint8_t* b, Scales* s) {
  uint8_t each[8], minima[8];
  switch (type) {
    case STORED_Q2_K:
      s->scale = half_at(b + 80);
      s->minimum = half_at(b + 82);
      for (int i = 0; i < 16; i++) s->scales[i] = b[i] & 15, s->minima[i] = b[i] >> 4;
      return;
    case STORED_Q3_K:  // 6 bits: nibbles of the first 8 bytes, and pairs of bits of the last 4
      s->scale = half_at(b + 108);
      for (int i = 0; i < 16; i++) {
        const int low = b[96 + i % 8] >> (i / 8 * 4) & 15, high = b[104 + i % 4] >> (i / 4 * 2) & 3;
        s->scales[i] = (int16_t)((low | high << 4) - 32);
      }
      return;
    case STORED_Q5_K:
      s->scale = half_at(b);
      s->minimum = half_at(b + 2);
      small_scales(b + 4, each, minima);
      for (int i = 0; i < 16; i++) s->scales[i] = each[i / 2], s->minima[i] = minima[i / 2];
      return;
    case STORED_Q6_K:
      s->scale = half_at(b + 208);
      for (int i = 0; i < 16; i++) s->scales[i] = ((const int8_t*)b)[192 + i];
      return;
    case STORED_IQ2_XXS:
    case STORED_IQ3_XXS:
      s->scale = half_at(b) * (type == STORED_IQ2_XXS ? 0.125f : 0.25f);
      for (int i = 0; i < 8; i++) {
        const int scale = b[type == STORED_IQ2_XXS ? 9 + 8 * i : 69 + 4 * i] >> 4;
        odd_scales(s, i, scale, scale);
      }
      return;
    case STORED_IQ2_XS:
    case STORED_IQ2_S: {
      const uint8_t* scales = b + (type == STORED_IQ2_XS ? 66 : 74);
      s->scale = half_at(b) * 0.125f;
      for (int i = 0; i < 8; i++) odd_scales(s, i, scales[i] & 15, scales[i] >> 4);
      return;
    }
    case STORED_IQ3_S:
      s->scale = half_at(b);
      for (int i = 0; i < 8; i++) {
        const int scale = b[106 + i / 2] >> (i % 2 * 4) & 15;
        odd_scales(s, i, scale, scale);
      }
      return;
    case STORED_IQ1_S:
      s->scale = half_at(b) * 0.125f;
      for (int i = 0; i < 8; i++) odd_scales(s, i, b[35 + 2 * i] >> 4 & 7, b[35 + 2 * i] >> 4 & 7);
      return;
    case STORED_IQ1_M: {  // the highest nibbles of four words are the unit
      uint16_t words[4], unit;
      memcpy(words, b + 48, sizeof words);
      unit = (uint16_t)(words[0] >> 12 | (words[1] >> 8 & 0xf0) | (words[2] >> 4 & 0xf00) | (words[3] & 0xf000));
      s->scale = half_at((const uint8_t*)&unit) * 0.125f;
      for (int i = 0; i < 8; i++) {
        const int both = words[i / 2] >> (i % 2 * 6);
        odd_scales(s, i, both & 7, both >> 3 & 7);
      }
      return;
    }
    default:  // STORED_TQ1_0, STORED_TQ2_0
      s->scale = half_at(b + (type == STORED_TQ1_0 ? 52 : 64));
      for (int i = 0; i < 16; i++) s->scales[i] = 1;
  }
}

// 28 bits as four times seven, each with an eighth bit that makes their number even.
INLINE uint32_t with_parity(uint32_t bits) {
  const uint32_t v = (bits & 127) | (bits >> 7 & 127) << 8 | (bits >> 14 & 127) << 16 | (bits >> 21 & 127) << 24;
  uint32_t parity = v ^ v >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return v | (parity & 0x01010101) << 7;
}

// Magnitudes of a table, negative where the sign's bit is set.
INLINE Weights with_signs(Bytes magnitudes, uint32_t bits) {
  return (Weights){magnitudes, (SignedBytes)(bytes_of_bits(bits) | same_bytes(1))};
}

INLINE Weights with_own_signs(Bytes w) { return (Weights){magnitudes_of((SignedBytes)w), (SignedBytes)w}; }

// Four rows of 8 bytes of a table.
INLINE Bytes four_rows(const void* table, int a, int b, int c, int d) {
  const uint64_t* rows = table;
  const uint64_t each[4] = {rows[a], rows[b], rows[c], rows[d]};
  return load32(each);
}

INLINE int word16_at(const uint8_t* p) { return p[0] | p[1] << 8; }

// Digits of three, from 0 to 2: the most significant one of each byte's fraction.
INLINE Bytes third_digits(Bytes q) {
  return ((Bytes)(q > same_bytes(85)) & same_bytes(1)) + ((Bytes)(q > same_bytes(170)) & same_bytes(1));
}

// Weights of group `group` of 32, without their scale. table: of the types IQ (stored_tables.py).
INLINE Weights group_of_block(int type, const uint8_t* b, const void* table, int group) {
  const Bytes one = same_bytes(1), three = same_bytes(3), fifteen = same_bytes(15);
  const uint8_t* q = b + 2 + 8 * group;  // of most types IQ
  switch (type) {
    case STORED_Q2_K: return (Weights){right(load32(b + 16 + group / 4 * 32), group % 4 * 2) & three, {0}};
    case STORED_Q3_K: {
      const Bytes low = right(load32(b + 32 + group / 4 * 32), group % 4 * 2) & three;
      return with_own_signs((low | left(right(load32(b), group) & one, 2)) - same_bytes(4));
    }
    case STORED_Q5_K: {
      const Bytes low = right(load32(b + 48 + group / 2 * 32), group % 2 * 4) & fifteen;
      return (Weights){low | left(right(load32(b + 16), group) & one, 4), {0}};
    }
    case STORED_Q6_K: {
      const Bytes low = right(load32(b + group / 4 * 64 + group % 2 * 32), group % 4 / 2 * 4) & fifteen;
      const Bytes high = right(load32(b + 128 + group / 4 * 32), group % 4 * 2) & three;
      return with_own_signs((low | left(high, 4)) - same_bytes(32));
    }
    case STORED_IQ2_XXS: return with_signs(four_rows(table, q[0], q[1], q[2], q[3]), with_parity(word_at(q + 4)));
    case STORED_IQ2_XS: {
      const int w[4] = {word16_at(q), word16_at(q + 2), word16_at(q + 4), word16_at(q + 6)};
      const uint32_t signs = (uint32_t)(w[0] >> 9 | w[1] >> 9 << 7 | w[2] >> 9 << 14 | w[3] >> 9 << 21);
      return with_signs(four_rows(table, w[0] & 511, w[1] & 511, w[2] & 511, w[3] & 511), with_parity(signs));
    }
    case STORED_IQ2_S: {
      const uint8_t *low = b + 2 + 4 * group, high = b[66 + group];
      const Bytes w = four_rows(table, low[0] | (high << 8 & 0x300), low[1] | (high << 6 & 0x300),
                                low[2] | (high << 4 & 0x300), low[3] | (high << 2 & 0x300));
      return with_signs(w, word_at(low + 32));
    }
    case STORED_IQ3_XXS:
    case STORED_IQ3_S: {
      const int is_small = type == STORED_IQ3_XXS, high = is_small ? 0 : b[66 + group];
      const uint32_t* rows = table;
      uint32_t each[8];
      for (int i = 0; i < 8; i++) each[i] = rows[q[i] | (high >> i & 1) << 8];
      return with_signs(load32(each), is_small ? with_parity(word_at(b + 66 + 4 * group)) : word_at(b + 74 + 4 * group));
    }
    case STORED_IQ1_S: {
      const uint8_t* low = b + 2 + 4 * group;
      const int high = word16_at(b + 34 + 2 * group);
      const Bytes w = four_rows(table, low[0] | (high << 8 & 0x700), low[1] | (high << 5 & 0x700),
                                low[2] | (high << 2 & 0x700), low[3] | (high >> 1 & 0x700));
      return with_own_signs(w + same_bytes(high & 0x8000 ? 255 : 1));
    }
    case STORED_IQ1_M: {
      const uint8_t* low = b + 4 * group;
      const int high = word16_at(b + 32 + 2 * group);
      const Bytes w = four_rows(table, low[0] | (high << 8 & 0x700), low[1] | (high << 4 & 0x700),
                                low[2] | (high & 0x700), low[3] | (high >> 4 & 0x700));
      const Words16 bits = {8, 8, 8, 8, 128, 128, 128, 128, 2048, 2048, 2048, 2048, 32768, 32768, 32768, 32768};
      const Bytes is_down = (Bytes)((((Words16){0} + (uint16_t)high) & bits) == bits);  // by four rows
      return with_own_signs(w + (is_down | one));
    }
    case STORED_TQ1_0: {  // 32 bytes of five digits, 16 bytes of five, 4 bytes of four
      static const uint8_t POWERS[] = {1, 3, 9, 27, 81};
      if (group < 5) return with_own_signs(third_digits(load32(b) * same_bytes(POWERS[group])) - one);
      uint8_t each[GROUP], powers[GROUP];
      memcpy(each, b + 32, HALF);
      memset(powers, POWERS[2 * (group - 5)], HALF);
      if (group < 7) {
        memcpy(each + HALF, b + 32, HALF);
        memset(powers + HALF, POWERS[2 * (group - 5) + 1], HALF);
      } else {
        for (int i = 0; i < 4; i++) memcpy(each + HALF + 4 * i, b + 48, 4), memset(powers + HALF + 4 * i, POWERS[i], 4);
      }
      return with_own_signs(third_digits(load32(each) * load32(powers)) - one);
    }
    default: return with_own_signs((right(load32(b + group / 4 * 32), group % 4 * 2) & three) - one);  // STORED_TQ2_0
  }
}

INLINE void dot_large_block(
    int type, const uint8_t* b, const void* table, int count, const Line* lines, Totals* totals) {
  Scales s;
  Ints8 sums[TOGETHER] = {{0}};
  read_scales(type, b, &s);
#pragma GCC unroll 8
  for (int group = 0; group < SUPER / GROUP; group++) {
    const Weights w = group_of_block(type, b, table, group);
    const int first = s.scales[2 * group], second = s.scales[2 * group + 1];
#pragma GCC unroll 4
    for (int i = 0; i < count; i++) {
      const int8_t* x = lines[i].codes + group * GROUP;
      sums[i] = has_minima(type) ? dot_unsigned(sums[i], w.magnitudes, x, first, second)
                                 : dot_signed(sums[i], w.magnitudes, w.signs, x, first, second);
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < count; i++) {
    totals->products[i] = multiply_add8(sums[i], s.scale, totals->products[i]);
    if (has_minima(type)) {
      int32_t sum = 0;
      for (int half = 0; half < 16; half++) sum += s.minima[half] * lines[i].half_sums[half];
      totals->minima[i] = __builtin_fmaf(s.minimum, (float)sum, totals->minima[i]);
    }
  }
}

INLINE void widen_large_block(int type, const uint8_t* b, const void* table, float* out) {
  Scales s;
  read_scales(type, b, &s);
  for (int group = 0; group < SUPER / GROUP; group++) {
    const Weights w = group_of_block(type, b, table, group);
    const Bytes mask = (Bytes)(w.signs < 0), values = (w.magnitudes ^ mask) - mask;
    int8_t each[GROUP];
    memcpy(each, &values, sizeof each);
    for (int half = 0; half < 2; half++) {
      const int place = 2 * group + half;
      const float scale = (float)s.scales[place] * s.scale;
      const float minimum = has_minima(type) ? (float)s.minima[place] * -s.minimum : 0;
      for (int i = 0; i < HALF; i++) out[place * HALF + i] = (float)each[half * HALF + i] * scale + minimum;
    }
  }
}

// ---- rows --------------------------------------------------------------------------------------------------------------

INLINE float total_of(Floats8 sums, float minima) {
  float each[8];
  memcpy(each, &sums, sizeof each);
  return ((each[0] + each[4]) + (each[2] + each[6])) + ((each[1] + each[5]) + (each[3] + each[7])) - minima;
}

INLINE void dot_row(
    int type, int count, const uint8_t* row, const void* table, int64_t inputs, const Rows* rows, int64_t first,
    float* sums, int64_t stride) {
  const int64_t size = STORED_SIZES[type].inputs, bytes = STORED_SIZES[type].bytes, halves = rows->padded_inputs / HALF;
  Totals totals = {0};
  Line lines[TOGETHER];
  for (int i = 0; i < count; i++) {  // the last one twice, instead of code for one line
    const int64_t line = first + i < rows->lines ? first + i : first;
    lines[i] = (Line){rows->codes + line * rows->padded_inputs, rows->half_sums + line * halves};
  }
  for (int64_t k = 0; k < inputs; k += size, row += bytes) {
    __builtin_prefetch(row + AHEAD);
    if (size == GROUP)
      dot_small_block(type, row, count, lines, &totals);
    else
      dot_large_block(type, row, table, count, lines, &totals);
    for (int i = 0; i < count; i++) lines[i].codes += size, lines[i].half_sums += size / HALF;
  }
  for (int i = 0; i < count && first + i < rows->lines; i++) sums[(first + i) * stride] = total_of(totals.products[i], totals.minima[i]);
}

// All lines with one output, a few at a time.
INLINE void dot_lines(
    int type, const uint8_t* row, const void* table, int64_t inputs, const Rows* rows, float* sums, int64_t stride) {
  int64_t first = 0;
  for (; first + 4 <= rows->lines; first += 4) dot_row(type, 4, row, table, inputs, rows, first, sums, stride);
  for (; first < rows->lines; first += 2) dot_row(type, 2, row, table, inputs, rows, first, sums, stride);
}

#define LARGE_TYPES(X)                                                                                     \
  X(Q5_K) X(Q6_K) X(Q2_K) X(Q3_K) X(IQ2_XXS) X(IQ2_XS) X(IQ2_S) X(IQ3_XXS) X(IQ3_S) X(IQ1_S) X(IQ1_M) X(TQ1_0) X(TQ2_0)
#define ALL_TYPES(X) X(Q5_0) X(Q5_1) X(Q8_0) LARGE_TYPES(X)

#define DEFINE_DOT(NAME)                                                                                             \
  static void dot_##NAME(                                                                                            \
      const uint8_t* row, const void* table, int64_t inputs, const Rows* rows, float* sums, int64_t stride) {        \
    dot_lines(STORED_##NAME, row, table, inputs, rows, sums, stride);                                                \
  }
ALL_TYPES(DEFINE_DOT)

#define DEFINE_WIDEN(NAME)                                                        \
  static void widen_##NAME(const uint8_t* b, const void* table, float* out) {     \
    widen_large_block(STORED_##NAME, b, table, out);                              \
  }
LARGE_TYPES(DEFINE_WIDEN)

void multiply_stored(const Matrix* matrix, const Rows* rows, int64_t block, float* sums, int64_t stride) {
#define DOT(NAME) [STORED_##NAME] = dot_##NAME,
  static void (*const dot[])(const uint8_t*, const void*, int64_t, const Rows*, float*, int64_t) = {ALL_TYPES(DOT)};
  const int64_t type = matrix->kind - KIND_STORED, bytes = stored_row_bytes(type, matrix->inputs);
  const int64_t left = matrix->outputs - block * OUTPUTS, count = left < OUTPUTS ? left : OUTPUTS;
  const uint8_t* row = (const uint8_t*)matrix->weights + block * OUTPUTS * bytes;
  for (int64_t n = 0; n < count; n++, row += bytes)
    dot[type](row, matrix->table, matrix->inputs, rows, sums + n, stride);
}

void widen_large(int64_t type, const uint8_t* block, const void* table, float* out) {
#define WIDEN(NAME) [STORED_##NAME] = widen_##NAME,
  static void (*const widen[])(const uint8_t*, const void*, float*) = {LARGE_TYPES(WIDEN)};
  widen[type](block, table, out);
}
