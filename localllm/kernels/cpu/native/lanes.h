// Vectors of 4-byte lanes, as wide as the processor's registers. This is all that differs between instruction sets.
//
// A dot product of bytes multiplies the four bytes of each lane of weights with the four bytes of the same lane of
// activations and adds the products to the lane. Activations are signed, from -127 to 127. Weights are signed or
// unsigned, as the instruction wants them (WEIGHTS_ARE_UNSIGNED), over the whole range of a byte.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BF16__)
#define INSTRUCTION_SET "avx512bf16"
enum { LANES = 16, ACCUMULATORS = 16, WEIGHTS_ARE_UNSIGNED = 1 };
#elif defined(__AVX512VNNI__)
#define INSTRUCTION_SET "avx512vnni"
enum { LANES = 16, ACCUMULATORS = 16, WEIGHTS_ARE_UNSIGNED = 1 };
#elif defined(__AVXVNNI__)
#define INSTRUCTION_SET "avxvnni"
enum { LANES = 8, ACCUMULATORS = 8, WEIGHTS_ARE_UNSIGNED = 1 };
#elif defined(__AVX2__)
#define INSTRUCTION_SET "avx2"
enum { LANES = 8, ACCUMULATORS = 8, WEIGHTS_ARE_UNSIGNED = 0 };
#elif defined(__ARM_FEATURE_DOTPROD)
#define INSTRUCTION_SET "dotprod"
enum { LANES = 4, ACCUMULATORS = 16, WEIGHTS_ARE_UNSIGNED = 0 };
#else
#define INSTRUCTION_SET "plain"  // slow for bytes
enum { LANES = 4, ACCUMULATORS = 8, WEIGHTS_ARE_UNSIGNED = 0 };
#endif
// ACCUMULATORS: vectors of sums that a loop may hold beside its operands without running out of registers.

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));

INLINE Ints load_ints(const void* p) {
  Ints v;
  memcpy(&v, p, sizeof v);
  return v;
}

INLINE Floats load_floats(const void* p) {
  Floats v;
  memcpy(&v, p, sizeof v);
  return v;
}

// LANES numbers of 8 bits without a sign.
INLINE Ints load_bytes(const uint8_t* p) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void*)p));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void*)p));
#else
  return (Ints){p[0], p[1], p[2], p[3]};
#endif
}

// The bytes of a table of 16 at the places that the bytes of `places` name, from 0 to 15.
INLINE Ints look_up(const int8_t* table, Ints places) {
#if defined(__AVX512VNNI__)
  return (Ints)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void*)table)), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i half = _mm_loadu_si128((const void*)table);
  return (Ints)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(half), (__m256i)places);
#elif defined(__aarch64__)
  return (Ints)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)places);
#else
  Ints out;
  for (int i = 0; i < LANES * 4; i++) ((int8_t*)&out)[i] = table[((const uint8_t*)&places)[i]];
  return out;
#endif
}

INLINE void store_ints(void* p, Ints v) { memcpy(p, &v, sizeof v); }
INLINE void store_floats(void* p, Floats v) { memcpy(p, &v, sizeof v); }

#if defined(__AVX512VNNI__)

INLINE Ints same_ints(int32_t a) { return (Ints)_mm512_set1_epi32(a); }
INLINE Floats same_floats(float a) { return (Floats)_mm512_set1_ps(a); }
INLINE Floats to_floats(Ints a) { return (Floats)_mm512_cvtepi32_ps((__m512i)a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {  // a * b + c
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
INLINE Floats load_halves(const uint16_t* p) { return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void*)p)); }
INLINE Floats low_halves(Ints a) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)a)); }
INLINE void store_halves(uint16_t* p, Floats a) { _mm256_storeu_si256((void*)p, _mm512_cvtps_ph((__m512)a, 0)); }
INLINE Ints nearest_ints(Floats a) { return (Ints)_mm512_cvtps_epi32((__m512)a); }  // ties to even
INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
  return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
}

#elif defined(__AVX2__)

INLINE Ints same_ints(int32_t a) { return (Ints)_mm256_set1_epi32(a); }
INLINE Floats same_floats(float a) { return (Floats)_mm256_set1_ps(a); }
INLINE Floats to_floats(Ints a) { return (Floats)_mm256_cvtepi32_ps((__m256i)a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
INLINE Floats load_halves(const uint16_t* p) { return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const void*)p)); }
INLINE void store_halves(uint16_t* p, Floats a) { _mm_storeu_si128((void*)p, _mm256_cvtps_ph((__m256)a, 0)); }
INLINE Ints nearest_ints(Floats a) { return (Ints)_mm256_cvtps_epi32((__m256)a); }
INLINE Floats low_halves(Ints a) {
  const __m256i lower = _mm256_setr_epi8(
      0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  __m256i quarters = _mm256_permute4x64_epi64(_mm256_shuffle_epi8((__m256i)a, lower), 0x08);
  return (Floats)_mm256_cvtph_ps(_mm256_castsi256_si128(quarters));
}
#if defined(__AVXVNNI__)
INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
  return (Ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, (__m256i)x);
}
#else
INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
  // |w| may be 128, which an unsigned byte holds. x is never -128, so that its sign can change and a pair of products
  // is at most 2 * 128 * 127, which 16 bits hold.
  __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w));
  return (Ints)_mm256_add_epi32((__m256i)sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif

#elif defined(__ARM_FEATURE_DOTPROD)

INLINE Ints same_ints(int32_t a) { return (Ints)vdupq_n_s32(a); }
INLINE Floats same_floats(float a) { return (Floats)vdupq_n_f32(a); }
INLINE Floats to_floats(Ints a) { return (Floats)vcvtq_f32_s32((int32x4_t)a); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
INLINE Floats load_halves(const uint16_t* p) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE void store_halves(uint16_t* p, Floats a) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a))); }
INLINE Ints nearest_ints(Floats a) { return (Ints)vcvtnq_s32_f32((float32x4_t)a); }
INLINE Floats low_halves(Ints a) { return (Floats)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)a))); }
INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
  return (Ints)vdotq_s32((int32x4_t)sum, (int8x16_t)w, (int8x16_t)x);
}

#else

INLINE Ints same_ints(int32_t a) { return (Ints){a, a, a, a}; }
INLINE Floats same_floats(float a) { return (Floats){a, a, a, a}; }
INLINE Floats to_floats(Ints a) { return __builtin_convertvector(a, Floats); }
INLINE Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
INLINE Floats low_halves(Ints a) {
  Floats out;
  for (int i = 0; i < LANES; i++) {
    _Float16 half;
    memcpy(&half, (const char*)&a + 4 * i, sizeof half);
    out[i] = (float)half;
  }
  return out;
}
INLINE Floats load_halves(const uint16_t* p) { return low_halves((Ints){p[0], p[1], p[2], p[3]}); }
INLINE void store_halves(uint16_t* p, Floats a) {
  for (int i = 0; i < LANES; i++) {
    const _Float16 half = (_Float16)a[i];
    memcpy(p + i, &half, sizeof half);
  }
}
INLINE Ints nearest_ints(Floats a) {
  Ints out;
  for (int i = 0; i < LANES; i++) out[i] = (int32_t)__builtin_rintf(a[i]);
  return out;
}
INLINE Ints dot_bytes(Ints sum, Ints w, Ints x) {
  for (int i = 0; i < LANES; i++)
    for (int shift = 0; shift < 32; shift += 8) sum[i] += (int8_t)(w[i] >> shift) * (int8_t)(x[i] >> shift);
  return sum;
}

#endif

// Dot products of small weights: sums start at `start_of_nibbles`, at most eight products of weights u from 0 to 24 are
// added, and `nibble_sums` returns the sums of (u - zero) * x. `codes` are the 16 or 32 activations x that are multiplied,
// `sum` is their sum, and 16 * 127 * |u - zero| is below 2^15.
#if defined(__AVX2__) && !defined(__AVXVNNI__) && !defined(__AVX512VNNI__)
// Sums of 16 bits may overflow on the way, because only the result has to fit. Each of the two in a lane starts at the
// sum of its own activations.
INLINE Ints start_of_nibbles(const int8_t* codes, int count, int32_t sum, int zero) {
  const __m256i ones = _mm256_set1_epi8(1);
  const __m128i first = _mm_loadu_si128((const void*)codes);
  const __m128i second = count > 16 ? _mm_loadu_si128((const void*)(codes + 16)) : _mm_setzero_si128();
  const __m256i pairs = _mm256_maddubs_epi16(ones, _mm256_set_m128i(second, first));
  __m128i total = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  total = _mm_add_epi16(total, _mm_shuffle_epi32(total, 0x4e));
  total = _mm_add_epi16(total, _mm_shuffle_epi32(total, 0xb1));
  (void)sum;
  return (Ints)_mm256_mullo_epi16(_mm256_broadcastd_epi32(total), _mm256_set1_epi16((int16_t)-zero));
}
INLINE Ints dot_nibbles(Ints sum, Ints w, Ints x) {
  return (Ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
INLINE Ints nibble_sums(Ints sum) { return (Ints)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)); }
#else
INLINE Ints start_of_nibbles(const int8_t* codes, int count, int32_t sum, int zero) {
  (void)codes, (void)count;
  return same_ints(-zero * sum);
}
INLINE Ints dot_nibbles(Ints sum, Ints w, Ints x) { return dot_bytes(sum, w, x); }
INLINE Ints nibble_sums(Ints sum) { return sum; }
#endif

// Widen n fp16 numbers by the instruction, which compilers do not find in a loop over _Float16.
INLINE void widen_halves(const uint16_t* halves, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store_floats(out + i, load_halves(halves + i));
  for (; i < n; i++) {
    _Float16 half;
    memcpy(&half, halves + i, sizeof half);
    out[i] = (float)half;
  }
}

INLINE Floats low_bf16(Ints a) { return (Floats)(a << 16); }
INLINE Floats high_bf16(Ints a) { return (Floats)(a & same_ints((int32_t)0xffff0000)); }

// Multiply the two bf16 of each lane of w and x, and add both products to the lane.
INLINE Floats dot_pairs(Floats sum, Ints w, Ints x) {
#if defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
  return multiply_add(high_bf16(w), high_bf16(x), multiply_add(low_bf16(w), low_bf16(x), sum));
#endif
}

// LANES floats as LANES / 2 pairs of bf16, rounded to nearest, ties to even.
INLINE void store_pairs(uint32_t* p, Floats a) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256((void*)p, (__m256i)_mm512_cvtneps_pbh((__m512)a));
#else
  uint16_t halves[LANES];
  for (int i = 0; i < LANES; i++) {
    uint32_t bits;
    memcpy(&bits, (const float*)&a + i, sizeof bits);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    halves[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
  }
  memcpy(p, halves, sizeof halves);
#endif
}
INLINE Floats high_halves(Ints a) { return low_halves((Ints)((Words)a >> 16)); }

INLINE Floats each_float(float a) { return (Floats){0} + a; }
INLINE Floats pick(Ints condition, Floats yes, Floats no) { return (Floats)((condition & (Ints)yes) | (~condition & (Ints)no)); }

INLINE float largest_lane(Floats a) {
  float most = a[0];
  for (int i = 1; i < LANES; i++) most = a[i] > most ? a[i] : most;
  return most;
}

INLINE float sum_of_lanes(Floats a) {
  float sums[LANES];
  store_floats(sums, a);
  for (int n = LANES / 2; n; n /= 2) {
    for (int i = 0; i < n; i++) sums[i] += sums[i + n];
  }
  return sums[0];
}

// The numbers from 0 to 15 in LANES / 2 bytes, the low half of a byte first.
INLINE Floats nibble_floats(const uint8_t* p) {
#if defined(__AVX512VNNI__)
  uint32_t a, b;
  memcpy(&a, p, sizeof a);
  memcpy(&b, p + 4, sizeof b);
  const Words words = (Words)_mm512_inserti64x4(_mm512_set1_epi32((int32_t)a), _mm256_set1_epi32((int32_t)b), 1);
  const Words shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
#elif defined(__AVX2__)
  int32_t a;
  memcpy(&a, p, sizeof a);
  const Words words = (Words)same_ints(a), shifts = {0, 4, 8, 12, 16, 20, 24, 28};
#else
  uint16_t a;
  memcpy(&a, p, sizeof a);
  const Words words = (Words)same_ints(a), shifts = {0, 4, 8, 12};
#endif
  return to_floats((Ints)(words >> shifts) & same_ints(15));
}

#if defined(__clang__)
#define LANES_OF(a, b, ...) (Floats) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LANES_OF(a, b, ...) (Floats) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

// Return the sums over the lanes of LANES vectors, in their order.
INLINE Floats sum_of_each(Floats v[LANES]) {
#if defined(__AVX512VNNI__)
  for (int i = 0; i < 8; i++) {
    v[i] = LANES_OF(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           LANES_OF(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = LANES_OF(v[i], v[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           LANES_OF(v[i], v[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    v[i] = LANES_OF(v[i], v[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           LANES_OF(v[i], v[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  return LANES_OF(v[0], v[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         LANES_OF(v[0], v[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif defined(__AVX2__)
  for (int i = 0; i < 4; i++) {
    v[i] = LANES_OF(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) + LANES_OF(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
  for (int i = 0; i < 2; i++) {
    v[i] = LANES_OF(v[i], v[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) + LANES_OF(v[i], v[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return LANES_OF(v[0], v[1], 0, 8, 2, 10, 4, 12, 6, 14) + LANES_OF(v[0], v[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
  for (int i = 0; i < 2; i++) v[i] = LANES_OF(v[i], v[i + 2], 0, 1, 4, 5) + LANES_OF(v[i], v[i + 2], 2, 3, 6, 7);
  return LANES_OF(v[0], v[1], 0, 4, 2, 6) + LANES_OF(v[0], v[1], 1, 5, 3, 7);
#endif
}
