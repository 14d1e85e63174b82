// Blocks of a GGUF file's tensors: their sizes, and the numbers in them. The bits are those of ggml's structures.
#pragma once
#include "lanes.h"

// Block types by GGUF's names.
enum Stored {
  STORED_Q4_0,
  STORED_Q4_1,
  STORED_Q5_0,
  STORED_Q5_1,
  STORED_Q8_0,
  STORED_Q4_K,
  STORED_Q5_K,
  STORED_Q6_K,
  STORED_MXFP4,
  STORED_IQ4_NL,
  STORED_IQ4_XS,
  STORED_Q2_K,
  STORED_Q3_K,
  STORED_IQ1_S,
  STORED_IQ1_M,
  STORED_IQ2_XXS,
  STORED_IQ2_XS,
  STORED_IQ2_S,
  STORED_IQ3_XXS,
  STORED_IQ3_S,
  STORED_TQ1_0,
  STORED_TQ2_0
};

typedef struct {
  int inputs, bytes;
} BlockSize;

static const BlockSize STORED_SIZES[] = {
    [STORED_Q4_0] = {32, 18},     [STORED_Q4_1] = {32, 20},     [STORED_Q5_0] = {32, 22},    [STORED_Q5_1] = {32, 24},
    [STORED_Q8_0] = {32, 34},     [STORED_Q4_K] = {256, 144},   [STORED_Q5_K] = {256, 176},  [STORED_Q6_K] = {256, 210},
    [STORED_MXFP4] = {32, 17},    [STORED_IQ4_NL] = {32, 18},   [STORED_IQ4_XS] = {256, 136}, [STORED_Q2_K] = {256, 84},
    [STORED_Q3_K] = {256, 110},   [STORED_IQ1_S] = {256, 50},   [STORED_IQ1_M] = {256, 56},  [STORED_IQ2_XXS] = {256, 66},
    [STORED_IQ2_XS] = {256, 74},  [STORED_IQ2_S] = {256, 82},   [STORED_IQ3_XXS] = {256, 98}, [STORED_IQ3_S] = {256, 110},
    [STORED_TQ1_0] = {256, 54},   [STORED_TQ2_0] = {256, 66},
};

static inline int64_t stored_row_bytes(int64_t type, int64_t inputs) {
  return inputs / STORED_SIZES[type].inputs * STORED_SIZES[type].bytes;
}

INLINE float half_at(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return low_halves(same_ints(bits))[0];
}

INLINE uint32_t word_at(const uint8_t* p) {
  uint32_t word;
  memcpy(&word, p, sizeof word);
  return word;
}

// The 6-bit scales and minima of the groups of Q4_K or Q5_K: eight of each in 12 bytes, the last four in two parts.
INLINE void small_scales(const uint8_t* packed, uint8_t scales[8], uint8_t minima[8]) {
  const uint32_t a = word_at(packed), b = word_at(packed + 4), c = word_at(packed + 8);
  const uint32_t words[] = {a & 0x3f3f3f3f, (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
                            b & 0x3f3f3f3f, (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030)};
  memcpy(scales, words, 8);
  memcpy(minima, words + 2, 8);
}

// Write the 256 values of a block of a K type besides Q4_K, of IQ1 to IQ3 or of TQ. table: of the types IQ.
void widen_large(int64_t type, const uint8_t* block, const void* table, float* out);
