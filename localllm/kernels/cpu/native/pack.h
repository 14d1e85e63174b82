// Rows of a GGUF file's tensors, taken apart: into the layouts of matrix.h, into codes of 8 bits, into fp32.
#pragma once
#include <stdint.h>
#include "pool.h"
#include "stored.h"

// Some rows of one type. They may come from several tensors, in any order.
typedef struct {
  int64_t type;
  int64_t count;
  int64_t inputs;              // of a row, a multiple of the type's block
  const uint8_t* const* rows;  // [count]
  const void* table;           // of the types IQ1 to IQ3: the magnitudes that their codes name (stored_blocks.py)
} StoredRows;

// The kind of matrix that `localllm_pack_q4` writes for a type of 4 bits; -1 for others.
int64_t packed_kind(int64_t type);

// Write rows as their `packed_kind`. Scales and minima are rounded to fp16 once; exponents are kept.
void localllm_pack_q4(Pool*, const StoredRows* stored, uint8_t* blocks);

// Write rows of 16-bit numbers, whose `type` is not read, as KIND_BF16 or KIND_F16.
void localllm_pack_halves(Pool*, const StoredRows* stored, uint32_t* blocks);

// Round each row to codes from -127 to 127, with its largest magnitude at 127. codes [count, inputs], scales [count].
// smallest: the magnitude below which a row counts as zeros.
void localllm_round_rows(Pool*, const StoredRows* stored, double smallest, int8_t* codes, float* scales);

// Write the values as fp32 [count, inputs].
void localllm_widen_rows(Pool*, const StoredRows* stored, float* out);

// Write codes [count, inputs], a multiple of 64 rows of a multiple of 4 inputs, as the weights of KIND_I8, and minus the
// sum of each row.
void localllm_reorder_int8(Pool*, const int8_t* codes, int64_t count, int64_t inputs, int8_t* weights, int32_t* sums);
