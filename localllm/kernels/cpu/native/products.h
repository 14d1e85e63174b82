// Products of a few rows with a block of 64 outputs.
#pragma once
#include "matrix.h"

enum { MAX_ROWS = 8 };  // rows that one pass over the weights multiplies

// Rows of activations [rows, K], encoded for one kind of weights.
//
// Products of codes are integers. A row has 15-bit codes, value = code * step, stored as code = 256 * high + low. Rows of
// a long batch may have 8-bit codes instead (is_fine = 0): then low is unused, and value = high * step.
typedef struct {
  int64_t rows, inputs;
  int64_t is_fine;
  const float* x;              // [rows, K] fp32, in the order of the matrix's columns
  const int8_t *high, *low;    // [rows, K]; for KIND_I8 with X_IS_UNSIGNED, both around 128
  const int32_t* group_sums;   // [rows, K/32] sums of the codes
  const float* steps;          // [rows]
} Rows;

// Memory for encoding up to MAX_ROWS rows of up to `inputs` values.
typedef struct Scratch Scratch;
Scratch* new_scratch(int64_t inputs);
void free_scratch(Scratch*);

// Encode rows x [rows, K] (row r at x + r * stride) for the kind of `matrix`. The result is valid until the next call
// with the same scratch. A row with NaN or infinity has products that are not finite.
Rows encode_rows(const Matrix* matrix, const float* x, int64_t stride, int64_t rows, int is_fine, Scratch* scratch);

// Compute y[r, 0..63] = (x W^T + bias) for the outputs of `block`, with row r at y + r * stride. Every (row, output) is
// summed in the same order whatever the number of rows, so that a row's result does not depend on its neighbours.
void multiply_block(const Matrix* matrix, const Rows* rows, int64_t block, float* y, int64_t stride);

// Write the values of the outputs of `block` as fp32 [64, K].
void unpack_block(const Matrix* matrix, int64_t block, float* out);
