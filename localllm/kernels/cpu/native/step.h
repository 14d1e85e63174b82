// A decode step as a list of operations on a few rows, each row the next token of another request, or a later one of the
// request of the row before: tokens that were guessed, in the order of their positions.
//
// The list is written once for a model. A call runs it for 1 to MAX_ROWS rows. Activations are fp32. Each buffer has
// space for MAX_ROWS rows; a row starts `stride` floats after the row before it. A row's results do not depend on the
// rows of other requests, nor on the number of threads.
#pragma once
#include "pool.h"
#include "products.h"
#include "recurrent.h"

enum Op {
  OP_LINEAR,  // y = activation(norm(x) W^T + bias) * factor, or added to y
  OP_GATED,   // y = activation(gate) * up, where W has the gate's N/2 outputs first, then up's
  OP_ATTEND,  // y = attention(q, k, v) of x = [q, k, v]; writes k and v into the cache
  OP_ADD,     // y += norm(x) * factor; y = norm(x) * factor unless it adds
  OP_ROUTE,   // choose experts by the router's logits x
  OP_GATE,    // y = activation(x[0..N)) * x[N..2N)
  OP_SCALE,   // y *= activation(x[0])
  OP_EXPERTS_GATED,  // y[c] = activation(gate) * up of norm(x) for each choice c; y [rows, top_k * N]
  OP_EXPERTS_UP,     // y[c] = activation(norm(x) W^T + bias), likewise
  OP_EXPERTS_DOWN,   // y = sum over choices c of weights[c] * (x[c] W^T + bias), times factor, or added to y
  OP_MULTIPLY,    // y *= activation(x), K values of x for N of y: each multiplies N / K of them, one after another
  OP_CONVOLVE,    // a Convolution of one token a row
  OP_DELTA,       // a GatedDelta, likewise
  OP_SCAN,        // a SelectiveScan, likewise
  OP_GATED_NORM,  // a GatedNorm, likewise
  OP_SHRINK,      // low = norm(x) A^T of the LowRank, for rows with an adapter
  OP_HEADS,       // the HeadProducts of x
  OP_MIX,         // a Mixing of one token a row
  OP_RESIZE,      // y *= m(x) / m(y), m: root of the mean of squares, of y at least `limit`
  OP_CUT,         // y = max(0, y - mean(y) - limit * deviation(y))
};
// Operations without weights of their own have N, the values of a row of y (of a choice), as their matrix's outputs.

enum NormKind { NORM_NONE, NORM_RMS, NORM_LAYER, NORM_SCALE };  // SCALE: x * weight

typedef struct {
  int64_t kind;
  const float* weight;  // [H]
  const float* bias;    // [H]; NULL: none
  double eps;
} Norm;

enum Activation {
  ACT_NONE,
  ACT_SILU,
  ACT_GELU,
  ACT_GELU_TANH,
  ACT_RELU,
  ACT_RELU2,
  ACT_QUICK_GELU,
  ACT_SIGMOID,
  ACT_SWIGLU_CLAMPED,  // of gate and up (gpt-oss): g = min(gate, 7), u = clamp(up, -7, 7): (u + 1) * g * sigmoid(1.702 g)
  ACT_SOFTPLUS,
  ACT_TANH
};

enum CacheType { CACHE_F32, CACHE_BF16, CACHE_F16, CACHE_I8, CACHE_I4 };

enum HeadNorm { HEAD_NORM_NONE, HEAD_NORM_RMS, HEAD_NORM_LAYER, HEAD_NORM_WHOLE, HEAD_NORM_RMS_LAST };

// The heads of x: q, k and v; q and k, where v is k before norm and rotation; q alone, with nothing to write; q and one
// k, which is the value too: the cache has one head, `k` and `v` are the same, and `kv_heads` are the parts into which the
// query heads are split among threads.
enum HeadsMade { MADE_QKV, MADE_QK, MADE_Q, MADE_LATENT };

typedef struct {
  void *k, *v;                // [kv_heads, blocks, block_size, head_dim] of their types; CACHE_I4 half as many bytes
  void *k_scales, *v_scales;  // [kv_heads, blocks, block_size] float CACHE_I8; [.., 2, groups] _Float16 CACHE_I4
  int64_t key_type, value_type, num_blocks, block_size;
  int64_t key_group, value_group;  // numbers with a scale of their own, CACHE_I4: a multiple of 16
  int64_t hadamard_size;           // dimensions of q and k that rotate together once more, for keys CACHE_I4; 0: none
  int64_t heads, kv_heads, head_dim;
  int64_t value_dim;           // numbers of a head of v in x, and of a head of y: head_dim or fewer, behind which the
                               // cache has zeros; fewer not with norms_values or MADE_QK
  const float* angles;         // [positions, rotary_dim]: cosines, then sines; NULL: no rotation
  int64_t rotary_dim;          // dimension i rotates with i + rotary_dim / 2
  int64_t window;              // positions that a query sees, its own included; 0: all; -n: of its chunk of n
  int64_t group;               // whose block tables and positions are read: rows group * MAX_ROWS and on
  double scale, softcap, clip;  // softcap, clip 0: none
  const float* sinks;          // [heads]; NULL
  const float* slopes;         // [heads] of ALiBi; NULL
  const float* distance_bias;  // [heads, distances], added to scores; the last one also at larger distances; NULL
  int64_t distances;
  int64_t head_norm;           // of q and k, before the rotation; RMS_LAST: after it
  const float* head_norm_weight;  // [heads + kv_heads, head_dim], and of v's heads if they are normed
  double head_norm_eps;
  int64_t made;                // enum HeadsMade
  int64_t norms_values;        // HEAD_NORM_RMS of v too
  double query_growth;         // q * (1 + growth * log(1 + (position + growth_offset) / growth_period)); 0: none
  int64_t growth_period;
  int64_t growth_offset;
} Attention;

// A mixture of experts. Experts are chosen as kernels/moe/route.py defines.
typedef struct {
  int64_t count, top_k;
  const Matrix *gate_up, *down;  // [count]; gate_up as in OP_GATED, or up alone
  const float* correction;       // [count], added to the scores for the choice only; NULL
  int64_t is_sigmoid;            // scores are the sigmoid of the logits, else their softmax
  int64_t renormalizes;          // the weights of the chosen are divided by their sum
  double least_sum;              // and by this if their sum is less
  int64_t num_groups, top_groups;
  double scale;                  // of the weights
  const float* expert_scale;     // [count], a factor of each expert's weight; NULL
  int64_t is_sparse_mixer;       // a weight is a part of the softmax over the logits that are near the chosen one
  double tolerance;              // how near: a share
  int64_t scales_inputs;         // a weight multiplies what its expert reads, not what it returns
  int32_t* ids;                  // [MAX_ROWS, top_k], written by OP_ROUTE, best first
  float* weights;                // [MAX_ROWS, top_k], likewise
} Experts;

// Low-rank adapters of a matrix [N, K]: for a row with adapter e, W counts as W + B[e] A[e].
typedef struct {
  const void* a;            // [adapters, width, K] of `type`
  const void* b;            // [adapters, width, columns]: B transposed, from the matrix's first output on
  int64_t type;             // CacheType: CACHE_F32, CACHE_BF16 or CACHE_F16
  int64_t width, columns;
  const int64_t* ranks;     // [adapters] how many rows of a and b each uses
  const int64_t* adapters;  // [MAX_ROWS] of each row, -1: none; written before each call
  float* low;               // [MAX_ROWS, width], written by OP_SHRINK
} LowRank;

// A matrix for each head: y[h] = the first `copied` values of x[h], then W[h] times those behind them.
typedef struct {
  const void* weights;                // [heads, outputs, inputs] of `type`
  int64_t type;                       // CacheType: CACHE_F32, CACHE_BF16 or CACHE_F16
  int64_t heads, outputs, inputs, copied;
  int64_t x_head_stride, y_head_stride;  // floats between heads
} HeadProducts;

// y[j] = y[j] or 0 + the sum over i of factors[j, i] * x[i].
typedef struct {
  const float *x, *factors;  // of a token: [inputs, width], [outputs, inputs]
  float* y;                  // [outputs, width]
  int64_t x_stride, factors_stride, y_stride;
  int64_t outputs, inputs, width, adds;
} Mixing;

typedef struct {
  int64_t op;
  Matrix matrix;
  Norm norm;
  const float* x;
  int64_t x_stride;
  float* y;
  int64_t y_stride;
  int64_t adds;        // y += instead of y =
  int64_t activation;
  double factor;       // of the result; 1: none
  double limit;        // OP_GATED, OP_GATE, OP_EXPERTS_GATED: of activation(gate), and of up on both sides; 0: none
                       // OP_RESIZE, OP_CUT: as there
  const Attention* attention;  // OP_ATTEND
  const Experts* experts;      // OP_ROUTE, OP_EXPERTS_GATED, OP_EXPERTS_UP, OP_EXPERTS_DOWN
  const void* recurrent;       // OP_CONVOLVE to OP_GATED_NORM, OP_MIX: what is computed, where from and to, row r as token r
  const StateRow* states;      // likewise: [MAX_ROWS], row r's only token r and its places, written before each call
  const LowRank* low_rank;     // OP_SHRINK; OP_LINEAR, OP_GATED: added before the activation. NULL: none
  const HeadProducts* heads;   // OP_HEADS
  const float* output_factors;  // OP_LINEAR, OP_GATED: [N] of x W^T + bias, before the activation; NULL: none
} Operation;

// A row as the layers of one group of block tables see it.
typedef struct {
  const int32_t* block_table;  // the blocks of the row's request
  int64_t position;            // of the row's token
  int64_t slot;                // where its k and v go: block * block_size + offset
  int64_t turn;                // row of the angles that its heads turn by: the position, but behind a picture less
} StepRow;

// Run the operations for 1 to MAX_ROWS rows. rows: [groups, MAX_ROWS]. The groups of a request's own tokens have the same
// positions. Of a group of sources, which heads of MADE_Q alone read, a row's position is that of its source's last token.
// Returns 0, and has done nothing, if memory runs out.
int64_t localllm_run_step(Pool*, const Operation* operations, int64_t count, const StepRow* rows, int64_t num_rows);

// The experts of a layer in RAM, of rows of a device.
typedef struct {
  Pool* pool;
  const Operation* operations;  // [2] OP_EXPERTS_GATED or _UP, OP_EXPERTS_DOWN, without norms
  const Experts* experts;       // theirs, whose ids and weights are [MAX_ROWS, top_k]
  const StepRow* rows;          // [MAX_ROWS]
  int64_t type;                 // CacheType of x
  int64_t hidden;
  const void* x;                // [count, hidden]
  const int32_t* ids;           // [count, top_k]; a row of padding has -1 alone
  const float* weights;         // [count, top_k]
  float* y;                     // [count, hidden]: the sum over a row's choices; zeros of padding
  int64_t count;
  int64_t most_rows;            // without padding, for which this is faster than products of many rows
  int64_t outcome;              // enum JobOutcome, of the last run; y is undefined but after DONE
} FarJob;

enum JobOutcome { DONE, NO_MEMORY, NO_SUCH_EXPERT, TOO_MANY_ROWS };

// Run a FarJob. Allocates nothing after a run of MAX_ROWS rows, and takes no lock but the pool's.
void localllm_run_far(void* job);

// y [count, heads * value_dim] = attention of any number of rows of one token each, whose keys and values are in the cache:
// only reads it. x [count, heads * head_dim] holds the queries, before the attention's norm and rotation if it has them.
// A row's result has the bits that it has in a step. Returns 0 if memory runs out.
int64_t localllm_attend(
    Pool*, const Attention* attention, const StepRow* rows, int64_t count, const float* x, int64_t x_stride, float* y,
    int64_t y_stride);

// y [rows, N] = x [rows, K] W^T + bias, for any number of rows. is_fine: 15-bit codes of the activations, else 8-bit
// ones, except for rows with outliers. Returns 0 if memory runs out.
int64_t localllm_linear(
    Pool*, const Matrix* matrix, const float* x, int64_t x_stride, int64_t rows, int64_t is_fine, float* y, int64_t y_stride);

// y [rows, N / 2] = activation(gate) * up, where W has the gate's outputs first, as in OP_GATED, for any number of rows,
// with 15-bit codes. Returns 0 if memory runs out.
int64_t localllm_gated(
    Pool*, const Matrix* matrix, int64_t activation, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride);

// Write the values of `count` outputs from output `first` on, a multiple of 64, as fp32 [count, K].
void localllm_unpack(Pool*, const Matrix* matrix, int64_t first, int64_t count, float* out);

// Write them as KIND_BF16, in whole blocks: an operand of torch's product for many rows.
void localllm_unpack_bf16(Pool*, const Matrix* matrix, int64_t first, int64_t count, uint32_t* out);

// Name of the instruction set that the library was compiled for: avx512bf16, avx512vnni, avxvnni, avx2, dotprod.
const char* localllm_instruction_set(void);

// Hash of the sources that the library was compiled from; "" where the compile was not told.
const char* localllm_source_hash(void);

// Bytes of a structure as the library knows it: 0 Matrix, 1 Attention, 2 Experts, 3 Operation, 4 StepRow, 5 Convolution,
// 6 GatedDelta, 7 SelectiveScan, 8 GatedNorm, 9 StateRows, 10 StateRow, 11 LowRank, 12 HeadProducts, 13 FarJob, 14 Mixing.
int64_t localllm_size_of(int64_t structure);
