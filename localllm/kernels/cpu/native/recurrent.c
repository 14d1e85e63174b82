// Recurrent operations: a block of a row's state takes all tokens of the row, in a thread's memory if there are more,
// and is written to its places. The blocks fit into the cache, so that a state element is read from memory once and
// written once whatever the number of tokens.
#include "recurrent.h"
#include <stdlib.h>
#include "functions.h"
#include "lanes.h"
#include "step.h"

enum {
  WIDTH = 16,      // floats of a vector of functions.h
  CHANNELS = 256,  // of a piece of a convolution
  ROWS = 16,       // of a scan's state that are in a thread's memory at a time
  // Vectors of LANES columns of a delta rule's state that are changed together: as many as keep 128 rows in the cache,
  // and for a single token, which reads the state from memory, as many as there are registers for.
#if defined(__AVX512F__)
  VECTORS = 4,
  MOST_VECTORS = 8,
#elif defined(__aarch64__)
  VECTORS = 8,
  MOST_VECTORS = 8,
#else
  VECTORS = 4,
  MOST_VECTORS = 4,
#endif
  MOST_COLUMNS = MOST_VECTORS * LANES
};

static const float DELTA_EPS = 1e-6f;  // added to the squared length of q and k

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

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

static void copy_block(const float* x, int64_t x_stride, int64_t rows, int64_t count, float* y, int64_t y_stride) {
  for (int64_t i = 0; i < rows; i++) {
    for (int64_t j = 0; j < count; j += WIDTH) {
      store_few(y + i * y_stride + j, load_few(x + i * x_stride + j, count - j), count - j);
    }
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

int64_t delta_floats(const GatedDelta* d) { return d->key_dim * MOST_COLUMNS; }

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
  t.beta = (float)d->beta_scale * sigmoid(d->b[token * d->b_stride + head]);
  return t;
}

// Some columns of a state.
typedef struct {
  float* values;
  int64_t stride;  // from a row to the next
} Tile;

// found = k^T state. Even and odd rows have sums of their own, so that additions need not wait for each other.
ALWAYS_INLINE void multiply_key(const float* k, int64_t rows, Tile state, float* found, const int vectors) {
  Floats sums[2][MOST_VECTORS];
  for (int j = 0; j < vectors; j++) sums[0][j] = sums[1][j] = same_floats(0);
  for (int64_t i = 0; i < rows; i++) {
    const Floats factor = same_floats(k[i]);
    const float* row = state.values + i * state.stride;
    for (int j = 0; j < vectors; j++) sums[0][j] = multiply_add(factor, load_floats(row + j * LANES), sums[0][j]);
    if (++i == rows) break;
    const Floats odd = same_floats(k[i]);
    row += state.stride;
    for (int j = 0; j < vectors; j++) sums[1][j] = multiply_add(odd, load_floats(row + j * LANES), sums[1][j]);
  }
  for (int j = 0; j < vectors; j++) store_floats(found + j * LANES, sums[0][j] + sums[1][j]);
}

// to = decay * from + k change^T; y = q^T to.
ALWAYS_INLINE void change_state(
    const DeltaToken* t, int64_t rows, Tile from, Tile to, const float* change, float* y, const int vectors) {
  Floats added[MOST_VECTORS], sums[MOST_VECTORS];
  const Floats decay = same_floats(t->decay);
  for (int j = 0; j < vectors; j++) {
    added[j] = load_floats(change + j * LANES);
    sums[j] = same_floats(0);
  }
  for (int64_t i = 0; i < rows; i++) {
    const Floats k = same_floats(t->k[i]), q = same_floats(t->q[i]);
    const float* row = from.values + i * from.stride;
    float* out = to.values + i * to.stride;
    for (int j = 0; j < vectors; j++) {
      const Floats value = multiply_add(k, added[j], load_floats(row + j * LANES) * decay);
      store_floats(out + j * LANES, value);
      sums[j] = multiply_add(q, value, sums[j]);
    }
  }
  for (int j = 0; j < vectors; j++) store_floats(y + j * LANES, sums[j]);
}

// Let a token change columns of a state, and write the output of the first `count` columns.
ALWAYS_INLINE void apply_delta(
    const DeltaToken* t, int64_t rows, const float* v, Tile from, Tile to, float* y, int64_t count, const int vectors) {
  float change[MOST_COLUMNS], out[MOST_COLUMNS];
  multiply_key(t->k, rows, from, change, vectors);
  const float scale = t->decay * t->k_scale, factor = t->beta * t->k_scale;
  for (int64_t j = 0; j < count; j++) change[j] = (v[j] - change[j] * scale) * factor;
  for (int64_t j = count; j < vectors * LANES; j++) change[j] = 0;
  change_state(t, rows, from, to, change, out, vectors);
  for (int64_t j = 0; j < count; j++) y[j] = out[j] * t->q_scale;
}

// Run all tokens of a row through `count` columns of a head's state, which `vectors` vectors hold. If the columns fill
// the vectors, the first token reads the state's place itself, and the last token writes it.
ALWAYS_INLINE void delta_columns(
    const GatedDelta* d, const StateRow* row, int64_t head, int64_t column, int64_t count, float* memory,
    const int vectors) {
  const int64_t rows = d->key_dim, stride = d->value_dim, size = d->heads * rows * stride;
  const int64_t place = head * rows * stride + column, offset = head * d->value_dim + column;
  const Tile block = {memory, vectors * LANES};
  const int is_direct = count == block.stride && row->first < row->end;
  const float* before = row->read < 0 ? NULL : d->states + row->read * size + place;
  Tile from = block, last = block;
  if (before && is_direct) {
    from = (Tile){d->states + row->read * size + place, stride};
  } else {
    load_block(before, stride, rows, count, block.stride, memory);
  }
  if (row->write && is_direct) last = (Tile){d->states + row->write * size + place, stride};
  for (int64_t token = row->first; token < row->end; token++) {
    const DeltaToken t = delta_token(d, head, token);
    const Tile to = token + 1 == row->end ? last : block;
    const float* v = d->v + token * d->v_stride + offset;
    apply_delta(&t, rows, v, from, to, d->y + token * d->y_stride + offset, count, vectors);
    from = to;
  }
  if (row->write && !is_direct) {
    copy_block(last.values, last.stride, rows, count, d->states + row->write * size + place, stride);
  }
  if (row->save) copy_block(last.values, last.stride, rows, count, d->states + row->save * size + place, stride);
}

void delta_piece(const GatedDelta* d, const StateRow* row, int64_t head, float* memory) {
  int64_t column = 0;
  if (row->end - row->first == 1) {
    for (; column + MOST_COLUMNS <= d->value_dim; column += MOST_COLUMNS) {
      delta_columns(d, row, head, column, MOST_COLUMNS, memory, MOST_VECTORS);
    }
  }
  for (; column < d->value_dim; column += VECTORS * LANES) {
    delta_columns(d, row, head, column, smaller(VECTORS * LANES, d->value_dim - column), memory, VECTORS);
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

// Write the sums over the lanes of ROWS vectors.
static void sum_rows(const Floats* sums, float* out) {
#if defined(__AVX512F__)
  v16f each[ROWS];
  for (int i = 0; i < ROWS; i++) each[i] = (v16f)sums[i];
  store16(out, sum_each(each));
#else
  for (int i = 0; i < ROWS; i++) {
    float lanes[LANES], sum = 0;
    store_floats(lanes, sums[i]);
    for (int j = 0; j < LANES / 2; j++) sum += lanes[j] + lanes[j + LANES / 2];
    out[i] = sum;
  }
#endif
}

// Let a token change ROWS rows of a head's state, and write `count` outputs. memory: 2 * padded_size floats.
static void scan_token(
    const SelectiveScan* s, int64_t head, int64_t token, int64_t first, int64_t count, float* block, float* memory) {
  const int64_t width = padded_size(s), group = head / (s->heads / s->groups), offset = head * s->head_dim + first;
  const float* b = padded_vector(s->b + token * s->b_stride + group * s->state_size, s->state_size, width, memory);
  const float* c =
      padded_vector(s->c + token * s->c_stride + group * s->state_size, s->state_size, width, memory + width);
  float step = softplus(s->dt[token * s->dt_stride + head] + s->dt_bias[head]), y[ROWS];
  step = step < (float)s->least ? (float)s->least : step > (float)s->most ? (float)s->most : step;
  const Floats decay = same_floats(expf(step * s->rate[head]));
  const float* x = s->x + token * s->x_stride + offset;
  Floats sums[ROWS];
  for (int i = 0; i < ROWS; i++) {
    const Floats factor = same_floats(i < count ? x[i] * step : 0);
    float* row = block + i * width;
    Floats sum = same_floats(0);
    for (int64_t j = 0; j < width; j += LANES) {
      const Floats value = multiply_add(factor, load_floats(b + j), load_floats(row + j) * decay);
      store_floats(row + j, value);
      sum = multiply_add(value, load_floats(c + j), sum);
    }
    sums[i] = sum;
  }
  sum_rows(sums, y);
  for (int64_t i = 0; i < count; i++) s->y[token * s->y_stride + offset + i] = y[i] + x[i] * s->skip[head];
}

void scan_piece(const SelectiveScan* s, const StateRow* row, int64_t head, float* memory) {
  const int64_t n = s->state_size, width = padded_size(s), size = s->heads * s->head_dim * n;
  float* vectors = memory + ROWS * width;
  for (int64_t first = 0; first < s->head_dim; first += ROWS) {
    const int64_t count = smaller(ROWS, s->head_dim - first), place = (head * s->head_dim + first) * n;
    if (count < ROWS) memset(memory, 0, (size_t)(ROWS * width) * sizeof(float));
    load_block(row->read < 0 ? NULL : s->states + row->read * size + place, n, count, n, width, memory);
    for (int64_t token = row->first; token < row->end; token++) {
      scan_token(s, head, token, first, count, memory, vectors);
    }
    if (row->write) copy_block(memory, width, count, n, s->states + row->write * size + place, n);
    if (row->save) copy_block(memory, width, count, n, s->states + row->save * size + place, n);
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

static int64_t run_call(Pool* pool, Call call) {
  if (!call.rows->count) return 1;
  lock_pool(pool);
  call.memory = malloc((size_t)(pool_threads(pool) * call.floats) * sizeof(float));
  const int64_t has_memory = call.memory || !call.floats;
  if (has_memory) run_job(pool, &(Job){&call, 1, count_pieces, run_piece});
  free(call.memory);
  unlock_pool(pool);
  return has_memory;
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

int64_t localllm_convolve(Pool* pool, const Convolution* c, const StateRows* rows) {
  return run_call(pool, (Call){c, rows, convolution_pieces(c), NULL, convolution_floats(c), run_convolution});
}

int64_t localllm_gated_delta(Pool* pool, const GatedDelta* d, const StateRows* rows) {
  return run_call(pool, (Call){d, rows, d->heads, NULL, delta_floats(d), run_delta});
}

int64_t localllm_selective_scan(Pool* pool, const SelectiveScan* s, const StateRows* rows) {
  return run_call(pool, (Call){s, rows, s->heads, NULL, scan_floats(s), run_scan});
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
