// Weight matrices in the layouts that one row and many rows read alike.
//
// W [N, K]: N outputs, K inputs. Outputs come in blocks of 64. The weights of a block are rows of 256 bytes, 64 lanes of
// 4 bytes, one lane for each output. This is how oneDNN packs weights for torch's products, whose bytes KIND_F32,
// KIND_BF16, KIND_BF16_ROUNDED and KIND_I8 therefore share.
//
//   KIND_F32     [N/64, K, 64] fp32                  a lane holds one input
//   KIND_BF16    [N/64, K/2, 64, 2] bf16             a lane holds two inputs
//   KIND_F16     [N/64, K/2, 64, 2] fp16             likewise
//   KIND_I8      [N/64, K/4, 64, 4] int8             four inputs; w = code * scales[n]
//   KIND_Q8      [N/64, K/32] of { uint8 codes[8][64][4]; fp16 scales[64] }
//                                                    w = (code - 128) * scale
//   KIND_Q4      [N/64, K/32] of { uint8 codes[4][64][4]; fp16 scales[64] }
//                                                    w = (code - 8) * scale
//   KIND_Q4_MIN  [N/64, K/32] of { uint8 codes[4][64][4]; fp16 scales[64]; fp16 minima[64] }
//                                                    w = code * scale - minimum
//   KIND_MXFP4   [N/64, K/32] of { uint8 codes[4][64][4]; uint8 exponents[64] }
//                                                    w = E2M1_DOUBLED[code] * 2^(exponent - 128)
//   KIND_NVFP4   [N/64, K/32] of { uint8 codes[4][64][4]; fp16 scales[2][64] }
//                                                    w = E2M1_DOUBLED[code] * scale of each 16 inputs
//   KIND_IQ4     [N/64, K/32] of { uint8 codes[4][64][4]; fp16 scales[64] }
//                                                    w = IQ4_VALUES[code] * scale
//   KIND_BF16_ROUNDED  as KIND_BF16              activations are rounded to bf16 too
//   KIND_STORED + a type of stored.h                 rows of a GGUF file, one after the other, not padded
// The tables are in groups.h. In the 4-bit kinds byte [j][n][i] holds input 4 j + i of output n's block of 32 in its low nibble, and input
// 16 + 4 j + i in its high nibble.
//
// N is padded to a multiple of 64 in the weights, scales and bias. Odd K of the 16-bit kinds is padded with a zero
// weight. K of the other kinds is a multiple of 4 (KIND_I8, at most MAX_INT8_INPUTS) or 32. In memory KIND_I8 may have more
// inputs than K in a block (`stored_inputs`): oneDNN pads them to a multiple of 64.
#pragma once
#include <stdint.h>
#include "stored.h"

enum {
  OUTPUTS = 64,             // in a block
  GROUP = 32,               // inputs with one scale, or two
  HALF = 16,                // inputs with one scale of KIND_NVFP4
  MAX_INT8_INPUTS = 65536,  // whose products of bytes 32 bits can sum
};

enum Kind {
  KIND_F32,
  KIND_BF16,
  KIND_F16,
  KIND_I8,
  KIND_Q8,
  KIND_Q4,
  KIND_Q4_MIN,
  KIND_MXFP4,
  KIND_NVFP4,
  KIND_IQ4,
  KIND_BF16_ROUNDED,
  KIND_STORED = 64
};

typedef struct {
  int64_t kind;
  int64_t outputs;             // N, without padding
  int64_t inputs;              // K
  const void* weights;         // at a multiple of 64 bytes
  const float* scales;         // [padded N] KIND_I8
  const float* bias;           // [padded N]; NULL: none
  const int32_t* input_order;  // [K]: column k multiplies x[input_order[k]]; NULL: x[k]
  const void* table;           // KIND_STORED: of StoredRows
  int64_t stored_inputs;       // KIND_I8: of a block in memory; 0: K
} Matrix;

static inline int64_t stored_inputs(const Matrix* matrix) {
  return matrix->stored_inputs ? matrix->stored_inputs : matrix->inputs;
}

// Bytes of the codes of a group of inputs of a block, for kinds that have scales in between.
static inline int64_t code_bytes(int64_t kind) { return GROUP * OUTPUTS / (kind == KIND_Q8 ? 1 : 2); }

// Bytes of a group of inputs of a block: codes, scales and minima.
static inline int64_t group_bytes(int64_t kind) {
  switch (kind) {
    case KIND_MXFP4: return code_bytes(kind) + OUTPUTS;
    case KIND_Q4_MIN:
    case KIND_NVFP4: return code_bytes(kind) + OUTPUTS * 4;
    default: return code_bytes(kind) + OUTPUTS * 2;
  }
}

// Bytes of a block.
static inline int64_t block_bytes(const Matrix* matrix) {
  const int64_t inputs = matrix->inputs;
  switch (matrix->kind) {
    case KIND_F32: return inputs * OUTPUTS * 4;
    case KIND_BF16:
    case KIND_BF16_ROUNDED:
    case KIND_F16: return (inputs + 1) / 2 * OUTPUTS * 4;
    case KIND_I8: return stored_inputs(matrix) * OUTPUTS;
    default:
      if (matrix->kind >= KIND_STORED) return OUTPUTS * stored_row_bytes(matrix->kind - KIND_STORED, inputs);
      return inputs / GROUP * group_bytes(matrix->kind);
  }
}
