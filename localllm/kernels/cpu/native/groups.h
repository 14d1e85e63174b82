// Groups of 32 inputs of a block: codes of 4 and 8 bits, and their scales.
#pragma once
#include "lanes.h"
#include "matrix.h"

// Twice the values of e2m1, plus E2M1_ZERO. Bytes from 0 to 24.
static const int8_t E2M1_DOUBLED[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
static const int8_t IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
enum { E2M1_ZERO = 12 };

// The number that is subtracted from a byte of `group_word`; of KIND_Q4_MIN the minimum is.
INLINE int zero_of(int kind) {
  switch (kind) {
    case KIND_Q8: return 128;
    case KIND_Q4: return 8;
    case KIND_MXFP4:
    case KIND_NVFP4: return E2M1_ZERO;
    default: return 0;
  }
}

// Nibbles as values of their kind's table, or as they are.
INLINE Ints decode_nibbles(int kind, Ints nibbles) {
  if (kind == KIND_IQ4) return look_up(IQ4_VALUES, nibbles);
  return kind == KIND_MXFP4 || kind == KIND_NVFP4 ? look_up(E2M1_DOUBLED, nibbles) : nibbles;
}

// Inputs 4 p to 4 p + 3 of LANES outputs from output v on, p below 8.
INLINE Ints group_word(int kind, const uint8_t* group, int p, int v) {
  if (kind == KIND_Q8) return load_ints(group + (p * OUTPUTS + v) * 4);
  const Words both = (Words)load_ints(group + (p % 4 * OUTPUTS + v) * 4);
  return decode_nibbles(kind, (Ints)(p < 4 ? both : both >> 4) & same_ints(0x0f0f0f0f));
}

// Scales of LANES outputs from output v on, for the first or the second 16 inputs.
INLINE Floats group_scales(int kind, const uint8_t* group, int half, int v) {
  const uint8_t* scales = group + code_bytes(kind);
  if (kind == KIND_MXFP4) {  // half of 2^(e - 127), which is subnormal for e below 2
    const Ints exponents = load_bytes(scales + v);
    return (Floats)(exponents << 23 | ((exponents == 0) & same_ints(1 << 22))) * same_floats(0.5f);
  }
  return load_halves((const uint16_t*)scales + (kind == KIND_NVFP4 ? half * OUTPUTS : 0) + v);
}

INLINE Floats group_minima(const uint8_t* group, int v) {
  return load_halves((const uint16_t*)(group + code_bytes(KIND_Q4_MIN)) + OUTPUTS + v);
}
