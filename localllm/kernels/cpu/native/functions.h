// Functions of 16 floats, accurate to a few units of the last place of 1, sums over rows of floats, magnitudes, and bfloat16.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#include "lanes.h"

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed between inlined functions only

typedef float v16f __attribute__((vector_size(64), aligned(4)));
typedef int32_t v16i __attribute__((vector_size(64), aligned(4)));
typedef uint32_t v16u __attribute__((vector_size(64), aligned(4)));

#define ALWAYS_INLINE static inline __attribute__((always_inline, unused))

ALWAYS_INLINE v16f all_lanes(float a) { return (v16f){a, a, a, a, a, a, a, a, a, a, a, a, a, a, a, a}; }
ALWAYS_INLINE v16f load16(const float* p) { return *(const v16f*)p; }
ALWAYS_INLINE void store16(float* p, v16f a) { *(v16f*)p = a; }
ALWAYS_INLINE v16f choose(v16i condition, v16f yes, v16f no) {
  return (v16f)((condition & (v16i)yes) | (~condition & (v16i)no));
}
ALWAYS_INLINE v16f abs16(v16f a) { return (v16f)((v16i)a & ((v16i){0} + 0x7fffffff)); }

ALWAYS_INLINE float sum_lanes(v16f a) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = a[i] + a[i + 8];
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}

ALWAYS_INLINE float float_of_bits(int32_t bits) {
  float a;
  memcpy(&a, &bits, sizeof a);
  return a;
}

// The larger of `most` and of the bits of `count` floats without their signs, which are ordered as the magnitudes are,
// infinity and NaN last.
ALWAYS_INLINE int32_t largest_magnitude_bits(const float* x, int64_t count, int32_t most) {
  for (int64_t i = 0; i < count; i++) {
    int32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bits &= 0x7fffffff;
    most = bits > most ? bits : most;
  }
  return most;
}

// e^x = 2^n * e^r with |r| <= ln(2) / 2; x is limited to the exponents of normal numbers.
ALWAYS_INLINE Floats exponential(Floats x) {
  const Floats round = each_float(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  x = pick(x < each_float(-87.0f), each_float(-87.0f), x);
  x = pick(x > each_float(88.0f), each_float(88.0f), x);
  Floats shifted = x * each_float(1.44269504f) + round;
  Floats n = shifted - round;
  Floats r = x - n * each_float(0.693359375f) + n * each_float(2.12194440e-4f);
  Floats p = each_float(1.0f / 5040);
  p = p * r + each_float(1.0f / 720);
  p = p * r + each_float(1.0f / 120);
  p = p * r + each_float(1.0f / 24);
  p = p * r + each_float(1.0f / 6);
  p = p * r + each_float(0.5f);
  p = p * r + each_float(1.0f);
  p = p * r + each_float(1.0f);
  Ints exponent = ((Ints)shifted - (Ints)round + 127) << 23;
  return p * (Floats)exponent;
}

ALWAYS_INLINE v16f exp16(v16f x) {
  float each[16];
  store16(each, x);
  for (int i = 0; i < 16; i += LANES) store_floats(each + i, exponential(load_floats(each + i)));
  return load16(each);
}

ALWAYS_INLINE v16f sigmoid16(v16f x) { return all_lanes(1.0f) / (all_lanes(1.0f) + exp16(-x)); }

ALWAYS_INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

ALWAYS_INLINE v16f softplus16(v16f x) {
  for (int i = 0; i < 16; i++) x[i] = softplus(x[i]);
  return x;
}

ALWAYS_INLINE v16f tanh16(v16f x) { return all_lanes(2.0f) * sigmoid16(x + x) - all_lanes(1.0f); }

// The normal distribution's function, (1 + erf(x / sqrt(2))) / 2, off by at most 1e-7 (Abramowitz & Stegun 7.1.26).
ALWAYS_INLINE v16f normal16(v16f x) {
  v16f z = abs16(x) * all_lanes(0.70710678f);
  v16f t = all_lanes(1.0f) / (all_lanes(1.0f) + all_lanes(0.3275911f) * z);
  v16f p = all_lanes(1.061405429f);
  p = p * t + all_lanes(-1.453152027f);
  p = p * t + all_lanes(1.421413741f);
  p = p * t + all_lanes(-0.284496736f);
  p = p * t + all_lanes(0.254829592f);
  v16f tail = all_lanes(0.5f) * p * t * exp16(-z * z);
  return choose(x > all_lanes(0), all_lanes(1.0f) - tail, tail);
}

ALWAYS_INLINE float dot_rows(const float* a, const float* b, int64_t n) {
  v16f s0 = all_lanes(0), s1 = s0;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    s0 += load16(a + i) * load16(b + i);
    s1 += load16(a + i + 16) * load16(b + i + 16);
  }
  float s = sum_lanes(s0 + s1);
  for (; i < n; i++) s += a[i] * b[i];
  return s;
}

ALWAYS_INLINE float sum_row(const float* a, int64_t n) {
  v16f s0 = all_lanes(0);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) s0 += load16(a + i);
  float s = sum_lanes(s0);
  for (; i < n; i++) s += a[i];
  return s;
}

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (v16i){__VA_ARGS__})
#endif

// Return the sums over the lanes of 16 vectors, in their order.
ALWAYS_INLINE v16f sum_each(v16f v[16]) {
  for (int i = 0; i < 8; i++) {
    v[i] = SHUFFLE(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           SHUFFLE(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    v[i] = SHUFFLE(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return SHUFFLE(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         SHUFFLE(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

ALWAYS_INLINE uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

ALWAYS_INLINE float from_bf16(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}
