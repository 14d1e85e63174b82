// Operations of a decode step, and products on their own, as jobs of a pool.
#include "step.h"
#include <float.h>
#include <stdatomic.h>
#include <stdlib.h>
#include "attend.h"
#include "functions.h"
#include "lanes.h"

enum {
  PIECE_BYTES = 1 << 17,  // of weights that a thread takes at a time
  PIECES_PER_THREAD = 4,  // at least, where the matrix has so many blocks: the last pieces end at about the same time
  MAX_CHOICES = 1 << 12,  // experts of a row
  GROUPS = 64             // of MAX_ROWS rows that a product of many rows encodes before it multiplies
};

// Memory ---------------------------------------------------------------------------------------------------------------

// What one thread needs. It grows between jobs.
typedef struct {
  Scratch* scratch;
  float* normed;  // [MAX_ROWS, inputs]
  float* attention;  // or of a recurrent operation
  Rows rows;         // the input `prepared`, normed and encoded
  int64_t prepared;  // key; -1: none
} Local;

typedef struct {
  int64_t threads, inputs, attention_floats, result_floats, joins;
  Local* locals;         // [threads]
  float* results;        // of the pieces of an attention
  _Atomic int64_t* left;  // [joins] pieces of a row's KV head that are done; zeros between operations
  Scratch* groups[GROUPS];
  int64_t group_inputs, num_groups;
} Memory;

static void free_memory(void* shared) {
  Memory* memory = shared;
  for (int64_t i = 0; i < memory->threads; i++) {
    Local* local = &memory->locals[i];
    free_scratch(local->scratch);
    free(local->normed);
    free(local->attention);
  }
  for (int64_t i = 0; i < memory->num_groups; i++) free_scratch(memory->groups[i]);
  free(memory->locals);
  free(memory->results);
  free((void*)memory->left);
  free(memory);
}

// The functions from here to the norms return 0 if memory runs out. What they could not get has a size of 0 then,
// so that a later call asks for it again.
static Memory* memory_of(Pool* pool) {
  Memory* memory = pool_shared(pool);
  if (memory) return memory;
  memory = calloc(1, sizeof *memory);
  if (!memory) return NULL;
  memory->threads = pool_threads(pool);
  memory->locals = calloc((size_t)memory->threads, sizeof(Local));
  if (!memory->locals) {
    free(memory);
    return NULL;
  }
  set_pool_shared(pool, memory, free_memory);
  return memory;
}

static int replace(float** buffer, int64_t floats) {
  free(*buffer);
  *buffer = malloc((size_t)floats * sizeof(float));
  return *buffer != NULL;
}

static int want_inputs(Memory* memory, int64_t inputs) {
  if (inputs <= memory->inputs) return 1;
  memory->inputs = 0;
  for (int64_t i = 0; i < memory->threads; i++) {
    Local* local = &memory->locals[i];
    free_scratch(local->scratch);
    local->scratch = new_scratch(inputs);
    if (!replace(&local->normed, MAX_ROWS * inputs) || !local->scratch) return 0;
  }
  memory->inputs = inputs;
  return 1;
}

static int want_floats(Memory* memory, int64_t floats) {
  if (floats <= memory->attention_floats) return 1;
  memory->attention_floats = 0;
  for (int64_t i = 0; i < memory->threads; i++)
    if (!replace(&memory->locals[i].attention, floats)) return 0;
  memory->attention_floats = floats;
  return 1;
}

static int want_results(Memory* memory, int64_t floats) {
  if (floats <= memory->result_floats) return 1;
  const int64_t more = floats + floats / 2;
  memory->result_floats = replace(&memory->results, more) ? more : 0;
  return memory->result_floats > 0;
}

static int want_joins(Memory* memory, int64_t joins) {
  if (joins <= memory->joins) return 1;
  free((void*)memory->left);
  memory->left = calloc((size_t)joins, sizeof *memory->left);
  memory->joins = memory->left ? joins : 0;
  return memory->left != NULL;
}

static int want_attention(Memory* memory, const Attention* attention, int64_t pieces, int64_t rows) {
  return want_floats(memory, attention_floats(attention)) &&
         want_results(memory, pieces * attention_result_floats(attention)) &&
         want_joins(memory, rows * attention->kv_heads);
}

// Norms and activations ------------------------------------------------------------------------------------------------

static void rms_norm(const Norm* norm, const float* x, int64_t n, float* y) {
  const float factor = 1.0f / sqrtf(dot_rows(x, x, n) / (float)n + (float)norm->eps);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * factor * norm->weight[i];
}

static void layer_norm(const Norm* norm, const float* x, int64_t n, float* y) {
  const float mean = sum_row(x, n) / (float)n;
  for (int64_t i = 0; i < n; i++) y[i] = x[i] - mean;
  const float factor = 1.0f / sqrtf(dot_rows(y, y, n) / (float)n + (float)norm->eps);
  if (norm->bias) {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * factor * norm->weight[i] + norm->bias[i];
  } else {
    for (int64_t i = 0; i < n; i++) y[i] = y[i] * factor * norm->weight[i];
  }
}

static void norm_row(const Norm* norm, const float* x, int64_t n, float* y) {
  if (norm->kind == NORM_RMS) {
    rms_norm(norm, x, n, y);
  } else if (norm->kind == NORM_LAYER) {
    layer_norm(norm, x, n, y);
  } else {
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * norm->weight[i];
  }
}

ALWAYS_INLINE v16f activate16(int64_t activation, v16f x) {
  const v16f zero = all_lanes(0);
  switch (activation) {
    case ACT_SILU: return x * sigmoid16(x);
    case ACT_GELU: return x * normal16(x);
    case ACT_GELU_TANH: {  // (1 + tanh(u)) / 2 = sigmoid(2 u)
      v16f u = x * (all_lanes(1.0f) + all_lanes(0.044715f) * x * x);
      return x * sigmoid16(u * all_lanes(1.59576912f));
    }
    case ACT_RELU: return choose(x < zero, zero, x);
    case ACT_RELU2: return choose(x < zero, zero, x * x);
    case ACT_QUICK_GELU: return x * sigmoid16(x * all_lanes(1.702f));
    case ACT_SIGMOID: return sigmoid16(x);
    case ACT_SOFTPLUS: return softplus16(x);
    case ACT_TANH: return tanh16(x);
    default: return x;
  }
}

ALWAYS_INLINE v16f limit16(v16f x, float low, float high) {
  x = choose(x < all_lanes(low), all_lanes(low), x);
  return choose(x > all_lanes(high), all_lanes(high), x);
}

// Return activation(gate) * up, both limited if the limit is not 0.
ALWAYS_INLINE v16f gate16(int64_t activation, float limit, v16f gate, v16f up) {
  if (limit > 0) return limit16(activate16(activation, gate), -INFINITY, limit) * limit16(up, -limit, limit);
  if (activation != ACT_SWIGLU_CLAMPED) return activate16(activation, gate) * up;
  gate = limit16(gate, -INFINITY, 7.0f);
  return (limit16(up, -7.0f, 7.0f) + all_lanes(1.0f)) * gate * sigmoid16(gate * all_lanes(1.702f));
}

// Products -------------------------------------------------------------------------------------------------------------

static int64_t blocks_of(int64_t outputs) { return (outputs + OUTPUTS - 1) / OUTPUTS; }

// Blocks of outputs of an operation: of y, that is, half of a gated matrix.
static int64_t operation_outputs(const Operation* o) {
  return o->op == OP_GATED ? o->matrix.outputs / 2 : o->matrix.outputs;
}

static int64_t clamp(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// Return how many blocks of outputs one piece has.
static int64_t blocks_per_piece(int64_t blocks, int64_t bytes, int64_t threads) {
  const int64_t most = clamp(blocks / (threads * PIECES_PER_THREAD), 1, blocks);
  return clamp(PIECE_BYTES / bytes, 1, most);
}

static int64_t pieces_of(int64_t blocks, int64_t per_piece) { return (blocks + per_piece - 1) / per_piece; }

typedef struct {
  Memory* memory;
  const Operation* operations;
  const StepRow* rows;
  int64_t num_rows;
  int64_t stores_first;  // a request has several rows: all write their k and v before any of them attends
} Step;

// Every thread norms and encodes the input for itself: that takes less time than waiting for the one that does. `key`
// names the input within the step, so that a thread does it once.
static const Rows* prepare(
    Step* step, int64_t key, const Matrix* matrix, const Norm* norm, const float* x, int64_t stride, int64_t rows,
    int64_t thread) {
  Local* local = &step->memory->locals[thread];
  if (local->prepared == key) return &local->rows;
  const int64_t inputs = matrix->inputs;
  if (norm->kind != NORM_NONE) {
    for (int64_t r = 0; r < rows; r++) norm_row(norm, x + r * stride, inputs, local->normed + r * inputs);
    x = local->normed;
    stride = inputs;
  }
  local->rows = encode_rows(matrix, x, stride, rows, 1, local->scratch);
  local->prepared = key;
  return &local->rows;
}

static int64_t key_of(int64_t operation, int64_t row, int64_t choice) {
  return (operation * MAX_ROWS + row) * MAX_CHOICES + choice;
}

// Write or add 64 or fewer results of each row to y.
static void finish_block(const Operation* o, const float* results, int64_t rows, int64_t first, int64_t count) {
  const v16f factor = all_lanes((float)o->factor);
  for (int64_t r = 0; r < rows; r++) {
    float y[OUTPUTS], *out = o->y + r * o->y_stride + first;
    for (int64_t i = 0; i < OUTPUTS; i += 16) store16(y + i, load16(results + r * OUTPUTS + i) * factor);
    if (o->adds) {
      for (int64_t i = 0; i < count; i++) out[i] += y[i];
    } else {
      memcpy(out, y, (size_t)count * sizeof(float));
    }
  }
}

// Low-rank adapters ----------------------------------------------------------------------------------------------------

enum { TOGETHER = 256, RANKS_PER_PIECE = 4 };  // values widened at a time; rows of A that a thread takes at a time

// Return `count` values, at most TOGETHER, from value `first` on as fp32: in place, or in `wide`.
static const float* widened(const LowRank* l, const void* values, int64_t first, int64_t count, float* wide) {
  if (l->type == CACHE_F32) return (const float*)values + first;
  const uint16_t* halves = (const uint16_t*)values + first;
  if (l->type == CACHE_BF16) {
    for (int64_t i = 0; i < count; i++) wide[i] = from_bf16(halves[i]);
    return wide;
  }
  widen_halves(halves, count, wide);
  return wide;
}

static int64_t rank_of(const LowRank* l, int64_t row) { return l->adapters[row] < 0 ? 0 : l->ranks[l->adapters[row]]; }

// Add the adapters of the rows to `count` outputs from output `first` on.
static void add_low_rank(const LowRank* l, int64_t rows, int64_t first, int64_t count, float* y, int64_t y_stride) {
  float wide[TOGETHER];
  for (int64_t r = 0; r < rows; r++) {
    const int64_t rank = rank_of(l, r), start = l->adapters[r] * l->width;
    const float* low = l->low + r * l->width;
    float* out = y + r * y_stride;
    for (int64_t k = 0; k < rank; k++) {
      const float* b = widened(l, l->b, (start + k) * l->columns + first, count, wide);
      for (int64_t i = 0; i < count; i++) out[i] += low[k] * b[i];
    }
  }
}

// Pieces of one row and a few ranks; none if no row has an adapter.
static int64_t count_shrink_pieces(const Step* step, const LowRank* l) {
  int64_t most = 0;
  for (int64_t r = 0; r < step->num_rows; r++) most = rank_of(l, r) > most ? rank_of(l, r) : most;
  return step->num_rows * pieces_of(most, RANKS_PER_PIECE);
}

static void run_shrink(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const LowRank* l = o->low_rank;
  const int64_t row = piece % step->num_rows, first = piece / step->num_rows * RANKS_PER_PIECE;
  const int64_t inputs = o->matrix.inputs, end = clamp(first + RANKS_PER_PIECE, 0, rank_of(l, row));
  if (first >= end) return;
  const Rows* rows = prepare(
      step, key_of(operation, 0, 0), &o->matrix, &o->norm, o->x, o->x_stride, step->num_rows, thread);
  const float* x = rows->x + row * rows->x_stride;
  float wide[TOGETHER];
  for (int64_t k = first; k < end; k++) {
    const int64_t start = (l->adapters[row] * l->width + k) * inputs;
    float sum = 0;
    for (int64_t i = 0; i < inputs; i += TOGETHER) {
      const int64_t count = clamp(inputs - i, 0, TOGETHER);
      sum += dot_rows(x + i, widened(l, l->a, start + i, count, wide), count);
    }
    l->low[row * l->width + k] = sum;
  }
}

// Blocks of products ---------------------------------------------------------------------------------------------------

// Multiply `count` outputs of each row from output `first` on with their factors, if there are any.
static void scale_outputs(const Operation* o, int64_t rows, int64_t first, int64_t count, float* y, int64_t y_stride) {
  if (!o->output_factors) return;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < count; i++) y[r * y_stride + i] *= o->output_factors[first + i];
}

static void activate_block(int64_t activation, int64_t rows, float* y) {
  if (activation == ACT_NONE) return;
  for (int64_t i = 0; i < rows * OUTPUTS; i += 16) store16(y + i, activate16(activation, load16(y + i)));
}

static void run_linear_block(const Operation* o, const Rows* rows, int64_t block) {
  float y[MAX_ROWS * OUTPUTS];
  const int64_t first = block * OUTPUTS, count = clamp(o->matrix.outputs - first, 0, OUTPUTS);
  multiply_block(&o->matrix, rows, block, y, OUTPUTS);
  if (o->low_rank) add_low_rank(o->low_rank, rows->rows, first, count, y, OUTPUTS);
  scale_outputs(o, rows->rows, first, count, y, OUTPUTS);
  activate_block(o->activation, rows->rows, y);
  finish_block(o, y, rows->rows, first, count);
}

// gated [rows, 64]. matrix, low_rank: of the operation, or of an expert
static void multiply_gated(
    const Operation* o, const Matrix* matrix, const LowRank* low_rank, const Rows* rows, int64_t block, float* gated) {
  const int64_t outputs = matrix->outputs / 2, first = block * OUTPUTS, count = clamp(outputs - first, 0, OUTPUTS);
  const int64_t up_block = (outputs + first) / OUTPUTS, offset = (outputs + first) % OUTPUTS;
  float up[MAX_ROWS * 2 * OUTPUTS];
  multiply_block(matrix, rows, block, gated, OUTPUTS);
  multiply_block(matrix, rows, up_block, up, 2 * OUTPUTS);
  if (offset + count > OUTPUTS) multiply_block(matrix, rows, up_block + 1, up + OUTPUTS, 2 * OUTPUTS);
  for (int64_t r = 0; r < rows->rows && offset; r++) {
    float* u = up + r * 2 * OUTPUTS;
    memmove(u, u + offset, (size_t)count * sizeof(float));
  }
  if (low_rank) {
    add_low_rank(low_rank, rows->rows, first, count, gated, OUTPUTS);
    add_low_rank(low_rank, rows->rows, outputs + first, count, up, 2 * OUTPUTS);
  }
  scale_outputs(o, rows->rows, first, count, gated, OUTPUTS);
  scale_outputs(o, rows->rows, outputs + first, count, up, 2 * OUTPUTS);
  for (int64_t r = 0; r < rows->rows; r++) {
    float *g = gated + r * OUTPUTS, *u = up + r * 2 * OUTPUTS;
    for (int64_t i = 0; i < OUTPUTS; i += 16) {
      store16(g + i, gate16(o->activation, (float)o->limit, load16(g + i), load16(u + i)));
    }
  }
}

static void run_gated_block(const Operation* o, const Rows* rows, int64_t block) {
  float y[MAX_ROWS * OUTPUTS];
  multiply_gated(o, &o->matrix, o->low_rank, rows, block, y);
  finish_block(o, y, rows->rows, block * OUTPUTS, clamp(o->matrix.outputs / 2 - block * OUTPUTS, 0, OUTPUTS));
}

static int64_t product_blocks_per_piece(const Step* step, const Operation* o) {
  const int64_t bytes = block_bytes(&o->matrix) * (o->op == OP_GATED ? 2 : 1);
  return blocks_per_piece(blocks_of(operation_outputs(o)), bytes, step->memory->threads);
}

static void run_product(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const Rows* rows = prepare(
      step, key_of(operation, 0, 0), &o->matrix, &o->norm, o->x, o->x_stride, step->num_rows, thread);
  const int64_t blocks = blocks_of(operation_outputs(o)), per_piece = product_blocks_per_piece(step, o);
  const int64_t end = clamp((piece + 1) * per_piece, 0, blocks);
  for (int64_t block = piece * per_piece; block < end; block++) {
    if (o->op == OP_GATED) {
      run_gated_block(o, rows, block);
    } else {
      run_linear_block(o, rows, block);
    }
  }
}

// Attention ------------------------------------------------------------------------------------------------------------

static const StepRow* row_of(const Step* step, const Attention* attention, int64_t row) {
  return &step->rows[attention->group * MAX_ROWS + row];
}

static int64_t count_attention_pieces(const Step* step, const Attention* attention) {
  int64_t pieces = 0;
  for (int64_t r = 0; r < step->num_rows; r++) {
    pieces += attention->kv_heads * attention_pieces(attention, row_of(step, attention, r)->position);
  }
  return pieces;
}

static int64_t has_request_with_several_rows(const StepRow* rows, int64_t num_rows) {
  for (int64_t r = 1; r < num_rows; r++)
    if (rows[r].block_table == rows[r - 1].block_table) return 1;
  return 0;
}

// Whether the new k is written before anything attends to it: also where several parts of the query heads read one k.
static int64_t stores_before(const Step* step, const Attention* attention) {
  return step->stores_first || attention->made == MADE_LATENT;
}

// The pieces are the KV heads of the first row, then of the second, ...
static void run_store(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const Attention* attention = o->attention;
  const int64_t row = piece / attention->kv_heads;
  store_piece(attention, row_of(step, attention, row), o->x + row * o->x_stride, piece % attention->kv_heads, step->memory->locals[thread].attention);
}

// Run piece number `piece` of an attention, in which row number r has `pieces` of each KV head from piece `start` on. Who
// ends the last piece of a KV head joins them.
static void attend_part(
    Memory* memory, const Attention* attention, const StepRow* row, int64_t r, int64_t start, int64_t pieces,
    int64_t piece, const float* x, int64_t stores, int64_t thread, float* y) {
  const int64_t size = attention_result_floats(attention), head = (piece - start) / pieces;
  attend_piece(attention, row, x, head, (piece - start) % pieces, stores, memory->locals[thread].attention,
               memory->results + piece * size);
  _Atomic int64_t* left = &memory->left[r * attention->kv_heads + head];
  if (atomic_fetch_add_explicit(left, 1, memory_order_acq_rel) + 1 < pieces) return;
  atomic_store_explicit(left, 0, memory_order_relaxed);
  join_pieces(attention, head, pieces, memory->results + (start + head * pieces) * size, y);
}

// The pieces of an operation are those of the first row's first KV head, then of its second, ..., then of the next row.
static void run_attention(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const Attention* attention = o->attention;
  int64_t row = 0, start = 0, pieces = attention_pieces(attention, row_of(step, attention, 0)->position);
  while (piece >= start + attention->kv_heads * pieces) {
    start += attention->kv_heads * pieces;
    pieces = attention_pieces(attention, row_of(step, attention, ++row)->position);
  }
  attend_part(step->memory, attention, row_of(step, attention, row), row, start, pieces, piece,
              o->x + row * o->x_stride, !stores_before(step, attention), thread, o->y + row * o->y_stride);
}

// A mixture of experts --------------------------------------------------------------------------------------------------

static void softmax(float* x, int64_t n) {
  float largest = -INFINITY, sum = 0;
  for (int64_t i = 0; i < n; i++) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; i++) sum += x[i] = expf(x[i] - largest);
  for (int64_t i = 0; i < n; i++) x[i] /= sum;
}

// Return the place of the largest value, the first one where several are equal.
static int64_t place_of_largest(const float* x, int64_t n) {
  int64_t place = 0;
  for (int64_t i = 1; i < n; i++) place = x[i] > x[place] ? i : place;
  return place;
}

// What a group counts for: its largest value, or with a correction the sum of its two largest.
static float group_value(const Experts* e, const float* choice, int64_t size) {
  const int64_t best = place_of_largest(choice, size);
  if (!e->correction || size < 2) return choice[best];
  float second = -INFINITY;
  for (int64_t i = 0; i < size; i++) second = i != best && choice[i] > second ? choice[i] : second;
  return choice[best] + second;
}

// Set `choice` to -infinity outside the best groups. `values` has space for one of each group.
static void leave_groups_out(const Experts* e, float* choice, float* values) {
  const int64_t size = e->count / e->num_groups;
  for (int64_t g = 0; g < e->num_groups; g++) values[g] = group_value(e, choice + g * size, size);
  for (int64_t left_out = e->num_groups - e->top_groups; left_out > 0; left_out--) {
    int64_t worst = 0;  // the last one where several are equal
    for (int64_t g = 1; g < e->num_groups; g++) worst = values[g] <= values[worst] ? g : worst;
    values[worst] = INFINITY;
    for (int64_t i = 0; i < size; i++) choice[worst * size + i] = -INFINITY;
  }
}

// The part of the best expert in the softmax over those near it that have not been chosen.
static float part_of_best(const Experts* e, const float* logits, const float* choice, int64_t best) {
  const float top = logits[best];
  float sum = 0;
  for (int64_t i = 0; i < e->count; i++) {
    const float size = fabsf(logits[i]), larger = size > top ? size : top;
    if (choice[i] > -INFINITY && top - logits[i] <= (float)e->tolerance * larger) sum += expf(logits[i] - top);
  }
  return 1.0f / sum;
}

// As kernels/moe/route.py. `memory`: 3 * count floats.
static void route(const Experts* e, const float* logits, int32_t* ids, float* weights, float* memory) {
  float *scores = memory, *choice = memory + e->count, sum = 0;
  memcpy(scores, logits, (size_t)e->count * sizeof(float));
  if (e->is_sigmoid) {
    for (int64_t i = 0; i < e->count; i++) scores[i] = 1.0f / (1.0f + expf(-scores[i]));
  } else {
    softmax(scores, e->count);
  }
  for (int64_t i = 0; i < e->count; i++) {
    float value = e->correction ? scores[i] + e->correction[i] : logits[i];
    choice[i] = value >= -FLT_MAX ? value : -FLT_MAX;  // NaN: lowest, but above a group that is left out
  }
  if (e->num_groups > 1) leave_groups_out(e, choice, choice + e->count);
  for (int64_t k = 0; k < e->top_k; k++) {
    ids[k] = (int32_t)place_of_largest(choice, e->count);
    weights[k] = e->is_sparse_mixer ? part_of_best(e, logits, choice, ids[k]) : scores[ids[k]];
    sum += weights[k];
    choice[ids[k]] = -INFINITY;
  }
  float factor = (float)e->scale;
  if (e->renormalizes) factor /= sum < (float)e->least_sum ? (float)e->least_sum : sum;
  for (int64_t k = 0; k < e->top_k; k++) weights[k] *= e->expert_scale ? factor * e->expert_scale[ids[k]] : factor;
}

static void run_route(const Operation* o, int64_t row, float* memory) {
  const Experts* e = o->experts;
  route(e, o->x + row * o->x_stride, e->ids + row * e->top_k, e->weights + row * e->top_k, memory);
}

static int64_t expert_blocks_per_piece(const Step* step, const Operation* o) {
  const int64_t blocks = blocks_of(o->matrix.outputs);
  return blocks_per_piece(blocks, 1, step->memory->threads);  // limited by the number of pieces only
}

// The choices of one expert that are multiplied together: its weights are read once for all of them.
typedef struct {
  int64_t count, items[MAX_ROWS];  // row * top_k + choice
} Sharing;

// Find the choices of the expert of `item` from `item` on, if they begin there: at the first choice of this expert in the
// step, the ninth, and so on. Return 0 otherwise.
static int begins_sharing(const Step* step, const Experts* e, int64_t item, Sharing* found) {
  const int64_t end = step->num_rows * e->top_k;
  int64_t before = 0;
  for (int64_t i = 0; i < item; i++) before += e->ids[i] == e->ids[item];
  if (before % MAX_ROWS) return 0;
  found->count = 0;
  for (int64_t i = item; i < end && found->count < MAX_ROWS; i++)
    if (e->ids[i] == e->ids[item]) found->items[found->count++] = i;
  return 1;
}

// Do `prepare` for the inputs of some choices. choice_stride: floats from the input of a row's choice to that of the next
// one; 0: they have the same, which their weights multiply if the experts ask for it.
static const Rows* prepare_sharing(
    Step* step, int64_t operation, const Matrix* matrix, const Sharing* sharing, int64_t choice_stride, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const int64_t top_k = o->experts->top_k, inputs = matrix->inputs, first = sharing->items[0];
  const int64_t key = key_of(operation, first / top_k, first % top_k);
  Local* local = &step->memory->locals[thread];
  const float* x = o->x + first / top_k * o->x_stride + first % top_k * choice_stride;
  const int scales = o->experts->scales_inputs && !choice_stride;
  if ((sharing->count == 1 && !scales) || local->prepared == key)
    return prepare(step, key, matrix, &o->norm, x, o->x_stride, sharing->count, thread);
  for (int64_t i = 0; i < sharing->count; i++) {
    const int64_t row = sharing->items[i] / top_k, choice = sharing->items[i] % top_k;
    float* to = local->normed + i * inputs;
    x = o->x + row * o->x_stride + choice * choice_stride;
    if (o->norm.kind != NORM_NONE)
      norm_row(&o->norm, x, inputs, to);
    else
      memcpy(to, x, (size_t)inputs * sizeof(float));
    const float weight = scales ? o->experts->weights[sharing->items[i]] : 1;
    for (int64_t k = 0; k < inputs && scales; k++) to[k] *= weight;
  }
  return prepare(step, key, matrix, &(Norm){0}, local->normed, inputs, sharing->count, thread);
}

// Pieces of one choice, of which only the first ones of an expert have work; of all rows for the second matrices, whose
// results are added up.
static int64_t count_expert_pieces(const Step* step, const Operation* o) {
  const int64_t each = pieces_of(blocks_of(o->matrix.outputs), expert_blocks_per_piece(step, o));
  return (o->op == OP_EXPERTS_DOWN ? 1 : step->num_rows * o->experts->top_k) * each;
}

// Floats for the products of all choices of a piece.
static int64_t expert_floats(const Step* step, const Operation* o) {
  if (o->op != OP_EXPERTS_DOWN) return 0;
  return step->num_rows * o->experts->top_k * expert_blocks_per_piece(step, o) * OUTPUTS;
}

typedef struct {
  int64_t item, first, end;  // which choice; its blocks
} Blocks;

static Blocks expert_blocks(const Step* step, const Operation* o, int64_t piece) {
  const int64_t blocks = blocks_of(o->matrix.outputs), per_piece = expert_blocks_per_piece(step, o);
  const int64_t pieces = pieces_of(blocks, per_piece), first = piece % pieces * per_piece;
  return (Blocks){piece / pieces, first, clamp(first + per_piece, 0, blocks)};
}

static void run_expert_firsts(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const Experts* e = o->experts;
  const Blocks p = expert_blocks(step, o, piece);
  const int64_t outputs = o->matrix.outputs;
  const Matrix* matrix = &e->gate_up[e->ids[p.item]];
  Sharing sharing;
  if (!begins_sharing(step, e, p.item, &sharing)) return;
  const Rows* rows = prepare_sharing(step, operation, matrix, &sharing, 0, thread);
  float y[MAX_ROWS * OUTPUTS];
  for (int64_t block = p.first; block < p.end; block++) {
    if (o->op == OP_EXPERTS_GATED) {
      multiply_gated(o, matrix, NULL, rows, block, y);
    } else {
      multiply_block(matrix, rows, block, y, OUTPUTS);
      activate_block(o->activation, rows->rows, y);
    }
    for (int64_t i = 0; i < sharing.count; i++) {
      const int64_t row = sharing.items[i] / e->top_k, choice = sharing.items[i] % e->top_k;
      memcpy(o->y + row * o->y_stride + choice * outputs + block * OUTPUTS, y + i * OUTPUTS,
             (size_t)clamp(outputs - block * OUTPUTS, 0, OUTPUTS) * sizeof(float));
    }
  }
}

static void add_weighted(const float* x, float weight, float* y) {
  for (int64_t i = 0; i < OUTPUTS; i += 16) store16(y + i, load16(y + i) + load16(x + i) * all_lanes(weight));
}

// All rows at a time: first the products of each expert with its rows, then for each row their sum, in the order of the
// row's choices, so that it does not depend on the other rows.
static void run_expert_downs(Step* step, int64_t operation, int64_t piece, int64_t thread) {
  const Operation* o = &step->operations[operation];
  const Experts* e = o->experts;
  const Blocks p = expert_blocks(step, o, piece);
  const int64_t size = (p.end - p.first) * OUTPUTS;
  float y[MAX_ROWS * OUTPUTS], *products = step->memory->locals[thread].attention;  // [rows, top_k, size]
  for (int64_t item = 0; item < step->num_rows * e->top_k; item++) {
    const Matrix* matrix = &e->down[e->ids[item]];
    Sharing sharing;
    if (!begins_sharing(step, e, item, &sharing)) continue;
    const Rows* rows = prepare_sharing(step, operation, matrix, &sharing, matrix->inputs, thread);
    for (int64_t block = p.first; block < p.end; block++) {
      multiply_block(matrix, rows, block, y, OUTPUTS);
      for (int64_t i = 0; i < sharing.count; i++)
        memcpy(products + sharing.items[i] * size + (block - p.first) * OUTPUTS, y + i * OUTPUTS, OUTPUTS * sizeof(float));
    }
  }
  for (int64_t row = 0; row < step->num_rows; row++) {
    Operation of_row = *o;
    of_row.y = o->y + row * o->y_stride;
    for (int64_t block = p.first; block < p.end; block++) {
      const int64_t first = block * OUTPUTS, count = clamp(o->matrix.outputs - first, 0, OUTPUTS);
      float sums[OUTPUTS] = {0};
      for (int64_t choice = 0; choice < e->top_k; choice++) {
        const int64_t item = row * e->top_k + choice;
        const float weight = e->scales_inputs ? 1 : e->weights[item];
        add_weighted(products + item * size + (block - p.first) * OUTPUTS, weight, sums);
      }
      finish_block(&of_row, sums, 1, first, count);
    }
  }
}

// Operations without weights ---------------------------------------------------------------------------------------------

static void run_add(const Operation* o, int64_t row, float* normed) {
  const int64_t n = o->matrix.outputs;
  const float *x = o->x + row * o->x_stride, factor = (float)o->factor;
  float* y = o->y + row * o->y_stride;
  if (o->norm.kind != NORM_NONE) {
    norm_row(&o->norm, x, n, normed);
    x = normed;
  }
  for (int64_t i = 0; i < n; i++) y[i] = (o->adds ? y[i] : 0) + x[i] * factor;
}

static void run_gate(const Operation* o, int64_t row) {
  const int64_t n = o->matrix.outputs;
  const float* x = o->x + row * o->x_stride;
  float* y = o->y + row * o->y_stride;
  for (int64_t i = 0; i < n; i += 16) {
    const size_t size = (size_t)clamp(n - i, 0, 16) * sizeof(float);
    v16f gate = all_lanes(0), up = gate;
    memcpy(&gate, x + i, size);
    memcpy(&up, x + n + i, size);
    v16f result = gate16(o->activation, (float)o->limit, gate, up);
    memcpy(y + i, &result, size);
  }
}

static void run_scale(const Operation* o, int64_t row) {
  const float factor = activate16(o->activation, all_lanes(o->x[row * o->x_stride]))[0];
  float* y = o->y + row * o->y_stride;
  for (int64_t i = 0; i < o->matrix.outputs; i++) y[i] *= factor;
}

static void run_multiply(const Operation* o, int64_t row) {
  const int64_t n = o->matrix.outputs, factors = o->matrix.inputs;
  const float* x = o->x + row * o->x_stride;
  float* y = o->y + row * o->y_stride;
  if (factors < n) {
    const int64_t each = n / factors;
    for (int64_t i = 0; i < factors; i++) {
      const float factor = activate16(o->activation, all_lanes(x[i]))[0];
      for (int64_t j = 0; j < each; j++) y[i * each + j] *= factor;
    }
    return;
  }
  for (int64_t i = 0; i < n; i += 16) {
    const size_t size = (size_t)clamp(n - i, 0, 16) * sizeof(float);
    v16f factor = all_lanes(0), value = factor;
    memcpy(&factor, x + i, size);
    memcpy(&value, y + i, size);
    value *= activate16(o->activation, factor);
    memcpy(y + i, &value, size);
  }
}

static void run_mix(const Mixing* m, int64_t row) {
  const float *x = m->x + row * m->x_stride, *factors = m->factors + row * m->factors_stride;
  float* y = m->y + row * m->y_stride;
  for (int64_t j = 0; j < m->outputs; j++, y += m->width, factors += m->inputs)
    for (int64_t k = 0; k < m->width; k++) {
      float sum = m->adds ? y[k] : 0;
      for (int64_t i = 0; i < m->inputs; i++) sum += factors[i] * x[i * m->width + k];
      y[k] = sum;
    }
}

static void run_resize(const Operation* o, int64_t row) {
  const int64_t n = o->matrix.outputs;
  const float* x = o->x + row * o->x_stride;
  float* y = o->y + row * o->y_stride;
  const float size = sqrtf(dot_rows(x, x, n) / (float)n), own = sqrtf(dot_rows(y, y, n) / (float)n);
  const float factor = size / (own < (float)o->limit ? (float)o->limit : own);
  for (int64_t i = 0; i < n; i++) y[i] *= factor;
}

static void run_cut(const Operation* o, int64_t row) {
  const int64_t n = o->matrix.outputs;
  float *y = o->y + row * o->y_stride, squares = 0;
  const float mean = sum_row(y, n) / (float)n;
  for (int64_t i = 0; i < n; i++) squares += (y[i] - mean) * (y[i] - mean);
  const float cut = mean + (float)o->limit * sqrtf(squares / (float)n);
  for (int64_t i = 0; i < n; i++) y[i] = y[i] <= cut ? 0 : y[i] - cut;  // NaN stays
}

// Recurrent operations ---------------------------------------------------------------------------------------------------

static int64_t recurrent_floats(const Operation* o) {
  switch (o->op) {
    case OP_CONVOLVE: return convolution_floats(o->recurrent);
    case OP_DELTA: return delta_floats(o->recurrent);
    case OP_SCAN: return scan_floats(o->recurrent);
    default: return 0;
  }
}

static int64_t recurrent_pieces(const Operation* o) {
  switch (o->op) {
    case OP_CONVOLVE: return convolution_pieces(o->recurrent);
    case OP_DELTA: return ((const GatedDelta*)o->recurrent)->heads;
    case OP_SCAN: return ((const SelectiveScan*)o->recurrent)->heads;
    default: return 1;
  }
}

static void run_recurrent(const Operation* o, int64_t piece, float* memory) {
  const int64_t pieces = recurrent_pieces(o), row = piece / pieces;
  switch (o->op) {
    case OP_CONVOLVE: convolve_piece(o->recurrent, &o->states[row], piece % pieces, memory); break;
    case OP_DELTA: delta_piece(o->recurrent, &o->states[row], piece % pieces, memory); break;
    case OP_SCAN: scan_piece(o->recurrent, &o->states[row], piece % pieces, memory); break;
    default: norm_token(o->recurrent, row);
  }
}

// Steps ----------------------------------------------------------------------------------------------------------------

// Each operation has two phases. The first one has pieces only for an attention whose rows store first.
enum { PHASES = 2 };

static int64_t count_step_pieces(void* context, int64_t phase) {
  Step* step = context;
  const Operation* o = &step->operations[phase / PHASES];
  if (phase % PHASES == 0) {
    return o->op == OP_ATTEND && stores_before(step, o->attention) ? step->num_rows * o->attention->kv_heads : 0;
  }
  switch (o->op) {
    case OP_LINEAR:
    case OP_GATED: return pieces_of(blocks_of(operation_outputs(o)), product_blocks_per_piece(step, o));
    case OP_ATTEND: return count_attention_pieces(step, o->attention);
    case OP_SHRINK: return count_shrink_pieces(step, o->low_rank);
    case OP_HEADS: return o->heads->heads;
    case OP_EXPERTS_GATED:
    case OP_EXPERTS_UP:
    case OP_EXPERTS_DOWN: return count_expert_pieces(step, o);
    case OP_CONVOLVE:
    case OP_DELTA:
    case OP_SCAN: return step->num_rows * recurrent_pieces(o);
    default: return step->num_rows;
  }
}

static void run_step_piece(void* context, int64_t phase, int64_t piece, int64_t thread) {
  Step* step = context;
  const int64_t operation = phase / PHASES;
  const Operation* o = &step->operations[operation];
  Local* local = &step->memory->locals[thread];
  if (phase % PHASES == 0) {
    run_store(step, operation, piece, thread);
    return;
  }
  switch (o->op) {
    case OP_LINEAR:
    case OP_GATED: run_product(step, operation, piece, thread); break;
    case OP_ATTEND: run_attention(step, operation, piece, thread); break;
    case OP_SHRINK: run_shrink(step, operation, piece, thread); break;
    case OP_HEADS:
      multiply_head(o->heads, piece, o->x, o->x_stride, step->num_rows, o->y, o->y_stride, local->attention);
      break;
    case OP_ADD: run_add(o, piece, local->normed); break;
    case OP_ROUTE: run_route(o, piece, local->normed); break;
    case OP_GATE: run_gate(o, piece); break;
    case OP_SCALE: run_scale(o, piece); break;
    case OP_MULTIPLY: run_multiply(o, piece); break;
    case OP_MIX: run_mix(o->recurrent, piece); break;
    case OP_RESIZE: run_resize(o, piece); break;
    case OP_CUT: run_cut(o, piece); break;
    case OP_EXPERTS_GATED:
    case OP_EXPERTS_UP: run_expert_firsts(step, operation, piece, thread); break;
    case OP_EXPERTS_DOWN: run_expert_downs(step, operation, piece, thread); break;
    default: run_recurrent(o, piece, local->attention);
  }
}

// The largest row that a thread norms or encodes.
static int64_t widest_row(const Operation* o) {
  switch (o->op) {
    case OP_ROUTE: return o->experts->count;
    case OP_EXPERTS_GATED:
    case OP_EXPERTS_UP: return o->experts->gate_up[0].inputs;
    case OP_EXPERTS_DOWN: {
      const int64_t inputs = o->experts->down[0].inputs, outputs = blocks_of(o->matrix.outputs) * OUTPUTS;
      return inputs > outputs ? inputs : outputs;
    }
    case OP_ADD: return o->matrix.outputs;
    default: return o->matrix.inputs;
  }
}

static int want_memory(const Step* step, int64_t count) {
  if (!step->memory) return 0;
  for (int64_t i = 0; i < count; i++) {
    const Operation* o = &step->operations[i];
    const int is_there =
        o->op == OP_ATTEND
            ? want_attention(step->memory, o->attention, count_attention_pieces(step, o->attention), step->num_rows)
            : want_inputs(step->memory, widest_row(o)) && want_floats(step->memory, recurrent_floats(o)) &&
                  want_floats(step->memory, expert_floats(step, o)) &&
                  want_floats(step->memory, o->op == OP_HEADS ? head_product_floats(o->heads) : 0);
    if (!is_there) return 0;
  }
  for (int64_t i = 0; i < step->memory->threads; i++) step->memory->locals[i].prepared = -1;
  return 1;
}

int64_t localllm_run_step(
    Pool* pool, const Operation* operations, int64_t count, const StepRow* rows, int64_t num_rows) {
  lock_pool(pool);
  Step step = {memory_of(pool), operations, rows, num_rows, has_request_with_several_rows(rows, num_rows)};
  const int is_there = want_memory(&step, count);
  if (is_there) run_job(pool, &(Job){&step, PHASES * count, count_step_pieces, run_step_piece});
  unlock_pool(pool);
  return is_there;
}

// Experts in RAM of rows of a device ---------------------------------------------------------------------------------------

static void widen_row(const FarJob* job, int64_t row, float* out) {
  const int64_t n = job->hidden;
  const uint16_t* halves = (const uint16_t*)job->x + row * n;
  if (job->type == CACHE_F32) {
    memcpy(out, (const float*)job->x + row * n, n * sizeof(float));
  } else if (job->type == CACHE_BF16) {
    for (int64_t i = 0; i < n; i++) out[i] = from_bf16(halves[i]);
  } else {
    for (int64_t i = 0; i < n; i++) out[i] = half_at((const uint8_t*)(halves + i));
  }
}

// Compute the rows whose numbers are in `chosen`. Returns 0 if memory runs out.
static int64_t run_far_rows(const FarJob* job, const int64_t* chosen, int64_t num_rows) {
  const Operation *gates = &job->operations[0], *downs = &job->operations[1];
  const Experts* experts = job->experts;
  const int64_t top_k = experts->top_k;
  for (int64_t i = 0; i < num_rows; i++) {
    widen_row(job, chosen[i], (float*)gates->x + i * gates->x_stride);
    memcpy(experts->ids + i * top_k, job->ids + chosen[i] * top_k, top_k * sizeof(int32_t));
    memcpy(experts->weights + i * top_k, job->weights + chosen[i] * top_k, top_k * sizeof(float));
  }
  if (!localllm_run_step(job->pool, job->operations, 2, job->rows, num_rows)) return 0;
  for (int64_t i = 0; i < num_rows; i++)
    memcpy(job->y + chosen[i] * job->hidden, downs->y + i * downs->y_stride, job->hidden * sizeof(float));
  return 1;
}

void localllm_run_far(void* of) {
  FarJob* job = of;
  const int64_t top_k = job->experts->top_k, experts = job->experts->count;
  int64_t real = 0, chosen[MAX_ROWS], taken = 0;
  for (int64_t row = 0; row < job->count; row++) {
    int64_t padded = 0;
    for (int64_t k = 0; k < top_k; k++) {
      const int32_t id = job->ids[row * top_k + k];
      padded += id < 0;
      if (id >= experts || (padded && padded != k + 1)) {  // or a row that is padding in part
        job->outcome = NO_SUCH_EXPERT;
        return;
      }
    }
    real += !padded;
  }
  job->outcome = real > job->most_rows ? TOO_MANY_ROWS : DONE;
  for (int64_t row = 0; row < job->count && job->outcome == DONE; row++) {
    if (job->ids[row * top_k] < 0) {
      memset(job->y + row * job->hidden, 0, job->hidden * sizeof(float));
      continue;
    }
    chosen[taken++] = row;
    if (--real && taken < MAX_ROWS) continue;
    if (!run_far_rows(job, chosen, taken)) job->outcome = NO_MEMORY;
    taken = 0;
  }
}

// Attention of any number of rows ------------------------------------------------------------------------------------

enum {
  ATTENDED = 64,              // rows at a time, at most
  ATTENDED_FLOATS = 1 << 20  // of their pieces' results, unless a single row has more
};

typedef struct {
  Memory* memory;
  const Attention* attention;
  const StepRow* rows;
  const float* x;
  float* y;
  int64_t x_stride, y_stride, count;
  int64_t starts[ATTENDED + 1];  // the first piece of each row, and the end
} Attending;

static int64_t count_attended_pieces(void* context, int64_t operation) {
  const Attending* a = context;
  (void)operation;
  return a->starts[a->count];
}

static void run_attended_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  const Attending* a = context;
  int64_t row = 0, end = a->count;
  (void)operation;
  while (row + 1 < end) {
    const int64_t middle = (row + end) / 2;
    if (a->starts[middle] <= piece) {
      row = middle;
    } else {
      end = middle;
    }
  }
  const int64_t start = a->starts[row], pieces = (a->starts[row + 1] - start) / a->attention->kv_heads;
  attend_part(a->memory, a->attention, &a->rows[row], row, start, pieces, piece, a->x + row * a->x_stride, 0, thread,
              a->y + row * a->y_stride);
}

// Take as many of `count` rows as go together, at least one.
static void take_rows(Attending* a, int64_t count) {
  const int64_t size = attention_result_floats(a->attention);
  a->count = 0;
  do {
    const int64_t pieces = a->attention->kv_heads * attention_pieces(a->attention, a->rows[a->count].position);
    a->starts[a->count + 1] = a->starts[a->count] + pieces;
    if (a->count && a->starts[a->count + 1] * size > ATTENDED_FLOATS) break;
    a->count++;
  } while (a->count < count && a->count < ATTENDED);
}

int64_t localllm_attend(
    Pool* pool, const Attention* attention, const StepRow* rows, int64_t count, const float* x, int64_t x_stride,
    float* y, int64_t y_stride) {
  lock_pool(pool);
  Attending a = {memory_of(pool), attention, rows, x, y, x_stride, y_stride, 0, {0}};
  int is_there = a.memory != NULL;
  while (is_there && count) {
    take_rows(&a, count);
    is_there = want_attention(a.memory, attention, a.starts[a.count], a.count);
    if (!is_there) break;
    run_job(pool, &(Job){&a, 1, count_attended_pieces, run_attended_piece});
    count -= a.count, a.rows += a.count, a.x += a.count * x_stride, a.y += a.count * y_stride;
  }
  unlock_pool(pool);
  return is_there;
}

// Products of any number of rows -----------------------------------------------------------------------------------------

typedef struct {
  Memory* memory;
  const Matrix* matrix;
  const Operation* gate;  // OP_GATED: its activation; NULL: a product alone
  const float* x;
  float* y;
  int64_t x_stride, y_stride, rows, is_fine;
  Rows encoded[GROUPS];  // of MAX_ROWS rows each
} Product;

static int64_t groups_of(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }

static int64_t product_outputs(const Product* p) { return p->gate ? p->matrix->outputs / 2 : p->matrix->outputs; }

static int64_t product_per_piece(const Product* p) {
  const int64_t bytes = block_bytes(p->matrix) * (p->gate ? 2 : 1);
  return blocks_per_piece(blocks_of(product_outputs(p)), bytes, p->memory->threads);
}

static int64_t count_product_pieces(void* context, int64_t operation) {
  Product* p = context;
  if (operation == 0) return groups_of(p->rows);
  return pieces_of(blocks_of(product_outputs(p)), product_per_piece(p));
}

static void encode_group(Product* p, int64_t group) {
  const int64_t first = group * MAX_ROWS, count = clamp(p->rows - first, 0, MAX_ROWS);
  p->encoded[group] = encode_rows(
      p->matrix, p->x + first * p->x_stride, p->x_stride, count, (int)p->is_fine, p->memory->groups[group]);
}

static void multiply_group(const Product* p, int64_t group, int64_t block) {
  const int64_t first = block * OUTPUTS, count = clamp(product_outputs(p) - first, 0, OUTPUTS);
  float *y = p->y + group * MAX_ROWS * p->y_stride + first, part[MAX_ROWS * OUTPUTS];
  if (p->gate) {
    multiply_gated(p->gate, p->matrix, NULL, &p->encoded[group], block, part);
  } else if (count == OUTPUTS) {
    multiply_block(p->matrix, &p->encoded[group], block, y, p->y_stride);
    return;
  } else {
    multiply_block(p->matrix, &p->encoded[group], block, part, OUTPUTS);
  }
  for (int64_t r = 0; r < p->encoded[group].rows; r++) {
    memcpy(y + r * p->y_stride, part + r * OUTPUTS, (size_t)count * sizeof(float));
  }
}

static void run_product_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  Product* p = context;
  (void)thread;
  if (operation == 0) {
    encode_group(p, piece);
    return;
  }
  const int64_t blocks = blocks_of(product_outputs(p)), per_piece = product_per_piece(p);
  const int64_t end = clamp((piece + 1) * per_piece, 0, blocks);
  for (int64_t block = piece * per_piece; block < end; block++) {
    for (int64_t group = 0; group < groups_of(p->rows); group++) multiply_group(p, group, block);
  }
}

static int want_groups(Memory* memory, int64_t groups, int64_t inputs) {
  if (inputs > memory->group_inputs) {
    for (int64_t i = 0; i < memory->num_groups; i++) free_scratch(memory->groups[i]);
    memory->num_groups = 0;
    memory->group_inputs = inputs;
  }
  for (; memory->num_groups < groups; memory->num_groups++) {
    memory->groups[memory->num_groups] = new_scratch(memory->group_inputs);
    if (!memory->groups[memory->num_groups]) {
      memory->group_inputs = memory->num_groups ? memory->group_inputs : 0;
      return 0;
    }
  }
  return 1;
}

static int64_t run_whole_product(
    Pool* pool, const Matrix* matrix, const Operation* gate, const float* x, int64_t x_stride, int64_t rows,
    int64_t is_fine, float* y, int64_t y_stride) {
  lock_pool(pool);
  Product p = {.memory = memory_of(pool), .matrix = matrix, .gate = gate, .x_stride = x_stride, .y_stride = y_stride};
  p.is_fine = is_fine;
  int is_there = p.memory != NULL;
  for (int64_t first = 0; is_there && first < rows; first += GROUPS * MAX_ROWS) {
    p.x = x + first * x_stride;
    p.y = y + first * y_stride;
    p.rows = clamp(rows - first, 0, GROUPS * MAX_ROWS);
    is_there = want_groups(p.memory, groups_of(p.rows), matrix->inputs);
    if (is_there) run_job(pool, &(Job){&p, 2, count_product_pieces, run_product_piece});
  }
  unlock_pool(pool);
  return is_there;
}

int64_t localllm_linear(
    Pool* pool, const Matrix* matrix, const float* x, int64_t x_stride, int64_t rows, int64_t is_fine, float* y,
    int64_t y_stride) {
  return run_whole_product(pool, matrix, NULL, x, x_stride, rows, is_fine, y, y_stride);
}

int64_t localllm_gated(
    Pool* pool, const Matrix* matrix, int64_t activation, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride) {
  const Operation gate = {.op = OP_GATED, .activation = activation};
  return run_whole_product(pool, matrix, &gate, x, x_stride, rows, 1, y, y_stride);
}

typedef struct {
  const Matrix* matrix;
  int64_t first, count;
  void* out;
} Unpacking;

static int64_t count_unpacked_blocks(void* context, int64_t operation) {
  (void)operation;
  return blocks_of(((Unpacking*)context)->count);
}

static void unpack_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  const Unpacking* u = context;
  const int64_t inputs = u->matrix->inputs, count = clamp(u->count - piece * OUTPUTS, 0, OUTPUTS);
  float* out = (float*)u->out + piece * OUTPUTS * inputs;
  (void)operation, (void)thread;
  unpack_block(u->matrix, u->first / OUTPUTS + piece, count, out);
}

static void unpack_bf16_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  const Unpacking* u = context;
  (void)operation, (void)thread;
  uint32_t* out = (uint32_t*)u->out + piece * OUTPUTS * ((u->matrix->inputs + 1) / 2);
  unpack_block_bf16(u->matrix, u->first / OUTPUTS + piece, out);
}

static void run_unpacking(Pool* pool, Unpacking unpacking, void (*run_piece)(void*, int64_t, int64_t, int64_t)) {
  lock_pool(pool);
  run_job(pool, &(Job){&unpacking, 1, count_unpacked_blocks, run_piece});
  unlock_pool(pool);
}

void localllm_unpack(Pool* pool, const Matrix* matrix, int64_t first, int64_t count, float* out) {
  run_unpacking(pool, (Unpacking){matrix, first, count, out}, unpack_piece);
}

void localllm_unpack_bf16(Pool* pool, const Matrix* matrix, int64_t first, int64_t count, uint32_t* out) {
  run_unpacking(pool, (Unpacking){matrix, first, count, out}, unpack_bf16_piece);
}

// What the library was compiled as ---------------------------------------------------------------------------------------

#ifndef LOCALLLM_SOURCE_HASH
#define LOCALLLM_SOURCE_HASH ""
#endif

const char* localllm_instruction_set(void) { return INSTRUCTION_SET; }

const char* localllm_source_hash(void) { return LOCALLLM_SOURCE_HASH; }

int64_t localllm_size_of(int64_t structure) {
  const int64_t sizes[] = {sizeof(Matrix),      sizeof(Attention),   sizeof(Experts),       sizeof(Operation),
                           sizeof(StepRow),     sizeof(Convolution), sizeof(GatedDelta),    sizeof(SelectiveScan),
                           sizeof(GatedNorm),   sizeof(StateRows),   sizeof(StateRow),    sizeof(LowRank),
                           sizeof(HeadProducts), sizeof(FarJob), sizeof(Mixing)};
  return sizes[structure];
}
