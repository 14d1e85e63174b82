// Recurrent operations: a block of a row's state is copied to a thread's memory, takes all tokens of the row there, and is
// copied to its places. The blocks fit into the first-level cache, so that a state element is read from memory once and
// written once whatever the number of tokens.
#include "recurrent.h"
#include <stdlib.h>
#include "functions.h"
#include "lanes.h"
#include "step.h"

enum {
  WIDTH = 16,      // floats of a vector
  CHANNELS = 256,  // of a piece of a convolution
  ROWS = 16,       // of a scan's state that are in memory at a time
#if defined(__AVX512F__)
  VECTORS = 4,  // columns / WIDTH of a delta rule's state that are in memory at a time
  CHAINS = 2    // sums of an output that are added up at the end, so that additions need not wait for each other
#else
  VECTORS = 2,
  CHAINS = 1
#endif
};

static const float DELTA_EPS = 1e-6f;  // added to the squared length of q and k

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

static float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static v16f silu16(v16f x) { return x * sigmoid16(x); }

// Return n <= 16 floats, followed by zeros.
ALWAYS_INLINE v16f load_few(const float* p, int64_t n) {
  v16f x = all_lanes(0);
  if (n >= WIDTH) return load16(p);
  memcpy(&x, p, (size_t)n * sizeof(float));
  return x;
}

ALWAYS_INLINE void store_few(float* p, v16f x, int64_t n) {
  if (n >= WIDTH) {
    store16(p, x);
  } else {
    memcpy(p, &x, (size_t)n * sizeof(float));
  }
}

// Copy `rows` rows of `count` floats into rows of `width` floats, with zeros as padding; all zeros if x is NULL.
static void load_block(const float* x, int64_t stride, int64_t rows, int64_t count, int64_t width, float* block) {
  if (!x) {
    memset(block, 0, (size_t)(rows * width) * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < width; j += WIDTH) {
      store16(block + i * width + j, j < count ? load_few(x + i * stride + j, count - j) : all_lanes(0));
    }
  }
}

static void store_block(const float* block, int64_t rows, int64_t count, int64_t width, float* x, int64_t stride) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < count; j += WIDTH) store_few(x + i * stride + j, load16(block + i * width + j), count - j);
  }
}

// Convolution ---------------------------------------------------------------------------------------------------------

int64_t convolution_pieces(const Convolution* c) { return (c->channels + CHANNELS - 1) / CHANNELS; }

int64_t convolution_floats(const Convolution* c) { return 2 * (c->taps - 1) * CHANNELS; }

static float state_value(const Convolution* c, int64_t place) {
  switch (c->state_type) {
    case CACHE_BF16: return from_bf16(((const uint16_t*)c->states)[place]);
    case CACHE_F16: return (float)((const _Float16*)c->states)[place];
    default: return ((const float*)c->states)[place];
  }
}

static void set_state_value(const Convolution* c, int64_t place, float value) {
  switch (c->state_type) {
    case CACHE_BF16: ((uint16_t*)c->states)[place] = to_bf16(value); break;
    case CACHE_F16: ((_Float16*)c->states)[place] = (_Float16)value; break;
    default: ((float*)c->states)[place] = value;
  }
}

// Return the inputs of the piece's channels at a position of the row; before the row they are in `before`.
static const float* inputs_at(
    const Convolution* c, const StateRow* row, int64_t channel, int64_t position, const float* before) {
  if (position < 0) return before + (c->taps - 1 + position) * CHANNELS;
  return c->x + (row->first + position) * c->x_stride + channel;
}

static void load_inputs(const Convolution* c, int64_t place, int64_t channel, int64_t count, float* before) {
  const int64_t kept = c->taps - 1;
  for (int64_t j = 0; j < kept; j++) {
    for (int64_t i = 0; i < count; i++) {
      before[j * CHANNELS + i] = place < 0 ? 0 : state_value(c, (place * c->channels + channel + i) * kept + j);
    }
  }
}

static void store_inputs(const Convolution* c, int64_t place, int64_t channel, int64_t count, const float* last) {
  const int64_t kept = c->taps - 1;
  for (int64_t j = 0; j < kept; j++) {
    for (int64_t i = 0; i < count; i++) {
      set_state_value(c, (place * c->channels + channel + i) * kept + j, last[j * CHANNELS + i]);
    }
  }
}

static void convolve_token(
    const Convolution* c, const StateRow* row, int64_t channel, int64_t count, int64_t position, const float* before) {
  float* y = c->y + (row->first + position) * c->y_stride + channel;
  for (int64_t i = 0; i < count; i += WIDTH) {
    v16f sum = c->bias ? load_few(c->bias + channel + i, count - i) : all_lanes(0);
    for (int64_t tap = 0; tap < c->taps; tap++) {
      const float* x = inputs_at(c, row, channel, position - (c->taps - 1) + tap, before);
      sum += load_few(c->weight + tap * c->channels + channel + i, count - i) * load_few(x + i, count - i);
    }
    store_few(y + i, c->is_silu ? silu16(sum) : sum, count - i);
  }
}

void convolve_piece(const Convolution* c, const StateRow* row, int64_t piece, float* memory) {
  const int64_t channel = piece * CHANNELS, count = smaller(CHANNELS, c->channels - channel), kept = c->taps - 1;
  const int64_t tokens = row->end - row->first;
  float *before = memory, *last = memory + kept * CHANNELS;
  load_inputs(c, row->read, channel, count, before);
  for (int64_t position = 0; position < tokens; position++) convolve_token(c, row, channel, count, position, before);
  for (int64_t j = 0; j < kept; j++) {
    const float* x = inputs_at(c, row, channel, tokens - kept + j, before);
    memcpy(last + j * CHANNELS, x, (size_t)count * sizeof(float));
  }
  if (row->write) store_inputs(c, row->write, channel, count, last);
  if (row->save) store_inputs(c, row->save, channel, count, last);
}

// Gated delta rule ----------------------------------------------------------------------------------------------------

int64_t delta_floats(const GatedDelta* d) { return d->key_dim * VECTORS * WIDTH; }

// What a token does to every column of a head's state.
typedef struct {
  const float *q, *k;
  float q_scale, k_scale;  // to length 1, and q's further by 1 / sqrt(key_dim)
  float decay, beta;
} DeltaToken;

static DeltaToken delta_token(const GatedDelta* d, int64_t head, int64_t token) {
  const int64_t n = d->key_dim;
  const int64_t key_head = d->is_tiled ? head % d->key_heads : head / (d->heads / d->key_heads);
  DeltaToken t;
  t.q = d->q + token * d->q_stride + key_head * n;
  t.k = d->k + token * d->k_stride + key_head * n;
  t.q_scale = 1.0f / sqrtf((dot_rows(t.q, t.q, n) + DELTA_EPS) * (float)n);
  t.k_scale = 1.0f / sqrtf(dot_rows(t.k, t.k, n) + DELTA_EPS);
  t.decay = expf(d->rate[head] * softplus(d->a[token * d->a_stride + head] + d->dt_bias[head]));
  t.beta = sigmoid(d->b[token * d->b_stride + head]);
  return t;
}

// Let a token change `vectors` vectors of columns of a state, and write its output.
ALWAYS_INLINE void apply_delta(
    const DeltaToken* t, int64_t rows, const float* v, float* state, float* y, int64_t count, const int vectors) {
  const int64_t width = vectors * WIDTH;
  v16f sums[2][VECTORS], change[VECTORS];
  for (int j = 0; j < vectors; j++) sums[0][j] = sums[1][j] = all_lanes(0);
  int64_t i = 0;
  for (; i + 2 <= rows; i += 2) {
    for (int c = 0; c < 2; c++) {
      const v16f k = all_lanes(t->k[i + c]);
      for (int j = 0; j < vectors; j++) sums[c][j] += k * load16(state + (i + c) * width + j * WIDTH);
    }
  }
  for (; i < rows; i++) {
    for (int j = 0; j < vectors; j++) sums[0][j] += all_lanes(t->k[i]) * load16(state + i * width + j * WIDTH);
  }
  const v16f found = all_lanes(t->decay * t->k_scale), factor = all_lanes(t->beta * t->k_scale);
  for (int j = 0; j < vectors; j++) {
    change[j] = (load_few(v + j * WIDTH, count - j * WIDTH) - (sums[0][j] + sums[1][j]) * found) * factor;
  }
  v16f out[CHAINS][VECTORS];
  for (int c = 0; c < CHAINS; c++) {
    for (int j = 0; j < vectors; j++) out[c][j] = all_lanes(0);
  }
  const v16f decay = all_lanes(t->decay);
  for (i = 0; i + CHAINS <= rows; i += CHAINS) {
    for (int c = 0; c < CHAINS; c++) {
      const v16f k = all_lanes(t->k[i + c]), q = all_lanes(t->q[i + c]);
      float* row = state + (i + c) * width;
      for (int j = 0; j < vectors; j++) {
        v16f s = load16(row + j * WIDTH) * decay + k * change[j];
        store16(row + j * WIDTH, s);
        out[c][j] += q * s;
      }
    }
  }
  for (; i < rows; i++) {
    for (int j = 0; j < vectors; j++) {
      v16f s = load16(state + i * width + j * WIDTH) * decay + all_lanes(t->k[i]) * change[j];
      store16(state + i * width + j * WIDTH, s);
      out[0][j] += all_lanes(t->q[i]) * s;
    }
  }
  for (int j = 0; j < vectors; j++) {
    v16f sum = out[0][j];
    for (int c = 1; c < CHAINS; c++) sum += out[c][j];
    store_few(y + j * WIDTH, sum * all_lanes(t->q_scale), count - j * WIDTH);
  }
}

// Run all tokens of a row through `count` columns of a head's state, which `vectors` vectors hold.
ALWAYS_INLINE void delta_columns(
    const GatedDelta* d, const StateRow* row, int64_t head, int64_t column, int64_t count, float* block,
    const int vectors) {
  const int64_t rows = d->key_dim, stride = d->value_dim, width = vectors * WIDTH;
  const int64_t size = d->heads * rows * stride, place = head * rows * stride + column;
  const int64_t offset = head * d->value_dim + column;
  load_block(row->read < 0 ? NULL : d->states + row->read * size + place, stride, rows, count, width, block);
  for (int64_t token = row->first; token < row->end; token++) {
    const DeltaToken t = delta_token(d, head, token);
    const float* v = d->v + token * d->v_stride + offset;
    apply_delta(&t, rows, v, block, d->y + token * d->y_stride + offset, count, vectors);
  }
  if (row->write) store_block(block, rows, count, width, d->states + row->write * size + place, stride);
  if (row->save) store_block(block, rows, count, width, d->states + row->save * size + place, stride);
}

void delta_piece(const GatedDelta* d, const StateRow* row, int64_t head, float* memory) {
  int64_t column = 0;
  for (; column + VECTORS * WIDTH <= d->value_dim; column += VECTORS * WIDTH) {
    delta_columns(d, row, head, column, VECTORS * WIDTH, memory, VECTORS);
  }
  for (; column < d->value_dim; column += WIDTH) {
    delta_columns(d, row, head, column, smaller(WIDTH, d->value_dim - column), memory, 1);
  }
}

// Selective scan ------------------------------------------------------------------------------------------------------

static int64_t padded_size(const SelectiveScan* s) { return (s->state_size + WIDTH - 1) / WIDTH * WIDTH; }

int64_t scan_floats(const SelectiveScan* s) { return (ROWS + 2) * padded_size(s); }

// Return a vector of `size` values whose length is padded to whole vectors: x itself if it has that length.
static const float* padded_vector(const float* x, int64_t size, int64_t width, float* memory) {
  if (size == width) return x;
  load_block(x, size, 1, size, width, memory);
  return memory;
}

// Let a token change ROWS rows of a head's state, and write `count` outputs. memory: 2 * padded_size floats.
static void scan_token(
    const SelectiveScan* s, int64_t head, int64_t token, int64_t first, int64_t count, float* block, float* memory) {
  const int64_t width = padded_size(s), group = head / (s->heads / s->groups), offset = head * s->head_dim + first;
  const float* b = padded_vector(s->b + token * s->b_stride + group * s->state_size, s->state_size, width, memory);
  const float* c =
      padded_vector(s->c + token * s->c_stride + group * s->state_size, s->state_size, width, memory + width);
  float step = softplus(s->dt[token * s->dt_stride + head] + s->dt_bias[head]);
  step = step < (float)s->least ? (float)s->least : step > (float)s->most ? (float)s->most : step;
  const v16f decay = all_lanes(expf(step * s->rate[head]));
  const v16f x = load_few(s->x + token * s->x_stride + offset, count);
  const v16f added = x * all_lanes(step);
  v16f sums[ROWS];
  for (int i = 0; i < ROWS; i++) {
    const v16f factor = all_lanes(added[i]);
    float* row = block + i * width;
    sums[i] = all_lanes(0);
    for (int64_t j = 0; j < width; j += WIDTH) {
      v16f value = load16(row + j) * decay + factor * load16(b + j);
      store16(row + j, value);
      sums[i] += value * load16(c + j);
    }
  }
  store_few(s->y + token * s->y_stride + offset, sum_each(sums) + x * all_lanes(s->skip[head]), count);
}

void scan_piece(const SelectiveScan* s, const StateRow* row, int64_t head, float* memory) {
  const int64_t n = s->state_size, width = padded_size(s), size = s->heads * s->head_dim * n;
  float* vectors = memory + ROWS * width;
  for (int64_t first = 0; first < s->head_dim; first += ROWS) {
    const int64_t count = smaller(ROWS, s->head_dim - first), place = (head * s->head_dim + first) * n;
    memset(memory, 0, (size_t)(ROWS * width) * sizeof(float));
    load_block(row->read < 0 ? NULL : s->states + row->read * size + place, n, count, n, width, memory);
    for (int64_t token = row->first; token < row->end; token++) {
      scan_token(s, head, token, first, count, memory, vectors);
    }
    if (row->write) store_block(memory, count, n, width, s->states + row->write * size + place, n);
    if (row->save) store_block(memory, count, n, width, s->states + row->save * size + place, n);
  }
}

// Gated norm ----------------------------------------------------------------------------------------------------------

static void norm_group(const float* x, const float* gate, const float* weight, const GatedNorm* g, float* y) {
  const int64_t n = g->width;
  v16f squares = all_lanes(0);
  for (int64_t i = 0; i < n; i += WIDTH) {
    v16f value = load_few(x + i, n - i);
    if (g->gate_first) value *= silu16(load_few(gate + i, n - i));
    store_few(y + i, value, n - i);
    squares += value * value;
  }
  const v16f factor = all_lanes(1.0f / sqrtf(sum_lanes(squares) / (float)n + (float)g->eps));
  for (int64_t i = 0; i < n; i += WIDTH) {
    v16f value = load_few(y + i, n - i) * factor * load_few(weight + i, n - i);
    if (!g->gate_first) value *= silu16(load_few(gate + i, n - i));
    store_few(y + i, value, n - i);
  }
}

void norm_token(const GatedNorm* g, int64_t token) {
  for (int64_t group = 0; group < g->groups; group++) {
    const int64_t offset = group * g->width;
    norm_group(g->x + token * g->x_stride + offset, g->gate + token * g->gate_stride + offset,
               g->weight + (g->shares_weight ? 0 : offset), g, g->y + token * g->y_stride + offset);
  }
}

// Calls on their own --------------------------------------------------------------------------------------------------

typedef struct {
  const void* operation;
  const StateRows* rows;
  int64_t per_row;  // pieces
  float* memory;    // [threads, floats]
  int64_t floats;
  void (*run)(const void* operation, const StateRow*, int64_t piece, float* memory);
} Call;

static int64_t count_pieces(void* context, int64_t operation) {
  const Call* call = context;
  (void)operation;
  return call->rows->count * call->per_row;
}

static void run_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  const Call* call = context;
  const StateRows* rows = call->rows;
  const int64_t r = piece / call->per_row;
  (void)operation;
  const StateRow row = {rows->bounds[r], rows->bounds[r + 1], rows->read[r], rows->write[r], rows->save[r]};
  call->run(call->operation, &row, piece % call->per_row, call->memory + thread * call->floats);
}

static void run_call(Pool* pool, Call call) {
  if (!call.rows->count) return;
  lock_pool(pool);
  call.memory = malloc((size_t)(pool_threads(pool) * call.floats) * sizeof(float));
  run_job(pool, &(Job){&call, 1, count_pieces, run_piece});
  free(call.memory);
  unlock_pool(pool);
}

static void run_convolution(const void* operation, const StateRow* row, int64_t piece, float* memory) {
  convolve_piece(operation, row, piece, memory);
}

static void run_delta(const void* operation, const StateRow* row, int64_t piece, float* memory) {
  delta_piece(operation, row, piece, memory);
}

static void run_scan(const void* operation, const StateRow* row, int64_t piece, float* memory) {
  scan_piece(operation, row, piece, memory);
}

void localllm_convolve(Pool* pool, const Convolution* c, const StateRows* rows) {
  run_call(pool, (Call){c, rows, convolution_pieces(c), NULL, convolution_floats(c), run_convolution});
}

void localllm_gated_delta(Pool* pool, const GatedDelta* d, const StateRows* rows) {
  run_call(pool, (Call){d, rows, d->heads, NULL, delta_floats(d), run_delta});
}

void localllm_selective_scan(Pool* pool, const SelectiveScan* s, const StateRows* rows) {
  run_call(pool, (Call){s, rows, s->heads, NULL, scan_floats(s), run_scan});
}

typedef struct {
  const GatedNorm* norm;
  int64_t tokens;
} NormCall;

static int64_t count_norm_pieces(void* context, int64_t operation) {
  (void)operation;
  return ((const NormCall*)context)->tokens;
}

static void run_norm_piece(void* context, int64_t operation, int64_t piece, int64_t thread) {
  (void)operation, (void)thread;
  norm_token(((const NormCall*)context)->norm, piece);
}

void localllm_gated_norm(Pool* pool, const GatedNorm* norm, int64_t tokens) {
  NormCall call = {norm, tokens};
  if (!tokens) return;
  lock_pool(pool);
  run_job(pool, &(Job){&call, 1, count_norm_pieces, run_norm_piece});
  unlock_pool(pool);
}
