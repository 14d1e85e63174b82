// Products of a few rows with a block of 64 outputs.
#pragma once
#include "matrix.h"

enum {
  MAX_ROWS = 32,             // rows that one pass over the weights multiplies
  MAX_LINES = 2 * MAX_ROWS,  // lines of bytes that encode them
};

// Rows of activations [rows, K], encoded for one matrix.
//
// For 16 and 32 bit weights they are fp32 values, or for KIND_BF16_ROUNDED pairs of bf16. For the other kinds a row is one or two lines of bytes from -127 to
// 127, whose products with the weights are integers:
//
//   x = high * steps[0] + low * steps[1]    15 bits: high * 256 + low, up to 32512 steps in the row's largest magnitude
//   x = high * steps[0]                     8 bits: 127 steps
typedef struct {
  int64_t rows;
  const float* x;             // [rows, K] fp32, in the order of the matrix's columns
  int64_t x_stride;           // floats from a row of x to the next
  const uint32_t* pairs;      // [rows, padded K / 2] KIND_BF16_ROUNDED: bf16, the first input in the low half
  int64_t pairs_stride;       // pairs from a row to the next
  int64_t lines;
  const int8_t* codes;        // [lines, padded K], the lines of a row one after the other
  int64_t padded_inputs;      // a multiple of GROUP
  const int32_t* half_sums;   // [lines, padded K / HALF] sums of the codes
  const float* steps;         // [lines]; NaN: the row has NaN or infinity
  const int64_t* first_line;  // [rows + 1]
} Rows;

// Memory for encoding up to MAX_ROWS rows of up to `inputs` values. new_scratch returns NULL if there is none.
typedef struct Scratch Scratch;
Scratch* new_scratch(int64_t inputs);
void free_scratch(Scratch*);

// Encode `rows` rows, at most MAX_ROWS, of x [rows, K] (row r at x + r * stride) for `matrix`. is_fine: 15 bits for every
// row; otherwise 8 bits, and 15 for rows whose largest magnitude is more than 12 times their root mean square. How a row
// is encoded does not depend on the others. The result is valid until the next call with the same scratch, and as long
// as x. A row with NaN or infinity has products that are not finite.
Rows encode_rows(const Matrix* matrix, const float* x, int64_t stride, int64_t rows, int is_fine, Scratch* scratch);

// Compute y[r, 0..63] = (x W^T + bias) for the outputs of `block`, with row r at y + r * stride. Every (row, output) is
// summed in the same order whatever the number of rows, so that a row's result does not depend on its neighbours.
void multiply_block(const Matrix* matrix, const Rows* rows, int64_t block, float* y, int64_t stride);

// Add the products of all lines with the outputs of a block of KIND_STORED to sums[line * stride + output], where the sums
// are zeros.
void multiply_stored(const Matrix* matrix, const Rows* rows, int64_t block, float* sums, int64_t stride);

// Write the values of an output of KIND_STORED from input `first` on, a multiple of 256, as fp32: 256, or up to the last
// one. Returns how many.
int64_t widen_stored(const Matrix* matrix, int64_t output, int64_t first, float* out);

// Write the values of the first `outputs` outputs of `block` as fp32 [outputs, K], in the order of the matrix's columns.
void unpack_block(const Matrix* matrix, int64_t block, int64_t outputs, float* out);

// Write them as a block of KIND_BF16, rounded to nearest: [padded K / 2, 64] pairs.
void unpack_block_bf16(const Matrix* matrix, int64_t block, uint32_t* out);
