// Recurrent operations on rows of tokens, each row with a state of its own that is kept between calls.
//
// Activations are fp32: token t of the call is at `stride` floats times t. A token's results have the same bits however
// its request is cut into rows, whatever the other rows, and with any number of threads.
#pragma once
#include "pool.h"

// A depthwise causal convolution: y = act(bias + sum over taps of weight * x), the oldest input first.
typedef struct {
  const float* x;
  float* y;
  int64_t x_stride, y_stride;
  const float* weight;  // [taps, channels]
  const float* bias;    // [channels]; NULL: none
  void* states;         // [places, channels, taps - 1] of state_type, the oldest input first
  int64_t state_type;   // CacheType: CACHE_F32, CACHE_BF16 or CACHE_F16
  int64_t channels, taps, is_silu;
} Convolution;

// The gated delta rule, as kernels/gated_delta.py defines it.
typedef struct {
  const float *q, *k, *v, *a, *b;  // of a token: [key_heads, key_dim] twice, [heads, value_dim], [heads] twice
  float* y;                        // [heads, value_dim]
  int64_t q_stride, k_stride, v_stride, a_stride, b_stride, y_stride;
  const float *rate, *dt_bias;  // [heads]
  float* states;                // [places, heads, key_dim, value_dim]
  int64_t key_heads, heads, key_dim, value_dim;
  int64_t is_tiled;  // head h has key head h % key_heads, else h / (heads / key_heads)
  double beta_scale;
} GatedDelta;

// The selective scan of Mamba-2, as kernels/selective_scan.py defines it.
typedef struct {
  const float *x, *dt, *b, *c;  // of a token: [heads, head_dim], [heads], [groups, state_size] twice
  float* y;                     // [heads, head_dim]
  int64_t x_stride, dt_stride, b_stride, c_stride, y_stride;
  const float *rate, *dt_bias, *skip;  // [heads]
  float* states;                       // [places, heads, head_dim, state_size]
  int64_t heads, groups, head_dim, state_size;
  double least, most;  // limits of the time step
} SelectiveScan;

// RMSNorm of groups of columns with a gate, as kernels/gated_norm.py defines it.
typedef struct {
  const float *x, *gate;  // of a token: [groups, width]
  float* y;
  int64_t x_stride, gate_stride, y_stride;
  const float* weight;  // [width], or [groups, width] unless `shares_weight`
  int64_t groups, width, shares_weight, gate_first;
  double eps;
} GatedNorm;

// A row: tokens first .. end - 1. Its state before the first token is that of place `read`, or zeros for -1. Its state
// after the last token is written to the places `write` and `save`; 0: nowhere.
typedef struct {
  int64_t first, end, read, write, save;
} StateRow;

// The rows of a call. Row r has the tokens bounds[r] .. bounds[r + 1] - 1.
typedef struct {
  const int32_t *bounds, *read, *write, *save;
  int64_t count;
} StateRows;

// Each returns 0, and has done nothing, where there is no memory.
int64_t localllm_convolve(Pool*, const Convolution*, const StateRows*);
int64_t localllm_gated_delta(Pool*, const GatedDelta*, const StateRows*);
int64_t localllm_selective_scan(Pool*, const SelectiveScan*, const StateRows*);

void localllm_gated_norm(Pool*, const GatedNorm*, int64_t tokens);

// Pieces of one row (of one token: the norm), and floats that a thread needs for a piece.
int64_t convolution_pieces(const Convolution*);
int64_t convolution_floats(const Convolution*);
void convolve_piece(const Convolution*, const StateRow*, int64_t piece, float* memory);
int64_t delta_floats(const GatedDelta*);
void delta_piece(const GatedDelta*, const StateRow*, int64_t head, float* memory);
int64_t scan_floats(const SelectiveScan*);
void scan_piece(const SelectiveScan*, const StateRow*, int64_t head, float* memory);
void norm_token(const GatedNorm*, int64_t token);
