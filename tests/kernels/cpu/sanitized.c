// Runs steps and products from two threads at once, in a pool that falls asleep in between. Compiled with sanitizers by
// test_native_sanitized.py. Exits with 1 if results differ from those of one thread.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "pack.h"
#include "step.h"

enum { HIDDEN = 128, HEADS = 4, KV_HEADS = 2, SIZE = 32, QKV = (HEADS + 2 * KV_HEADS) * SIZE, FEATURES = 200, BLOCKS = 64 };
enum { STEPS = 150, OPERATIONS = 15, LONG = 40 };
enum { PLACES = 4, TAPS = 4, STATE = 24 };  // of recurrent operations: HEADS heads of STATE x SIZE
enum { CHANNELS = 2 * KV_HEADS * STATE + HEADS * SIZE, MIXED = CHANNELS + HEADS * SIZE + 2 * HEADS };

typedef struct {
  Pool* pool;
  Operation operations[OPERATIONS];
  Attention attention, latent;
  HeadProducts heads;
  Convolution convolution;
  GatedDelta delta;
  SelectiveScan scan;
  GatedNorm norm;
  StateRow states[MAX_ROWS];
  Matrix pairs;
  float *stream, *qkv, *attended, *gated, *x, *y;
  double sum;
} Caller;

static float* numbers(int64_t count, unsigned seed) {
  float* values = aligned_alloc(64, (size_t)(count * 4 + 63) / 64 * 64);
  for (int64_t i = 0; i < count; i++) {
    seed = seed * 1664525 + 1013904223;
    values[i] = ((float)(seed >> 8) / (1 << 24) - 0.5f) / 4;
  }
  return values;
}

static Matrix matrix(int64_t outputs, int64_t inputs, unsigned seed) {
  const int64_t padded = (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS;
  return (Matrix){.kind = KIND_F32, .outputs = outputs, .inputs = inputs, .weights = numbers(padded * inputs, seed)};
}

// Pairs of bf16, with activations rounded to them. Odd `inputs` end in half a pair.
static Matrix matrix_of_pairs(int64_t outputs, int64_t inputs, unsigned seed) {
  const int64_t count = (outputs + OUTPUTS - 1) / OUTPUTS * OUTPUTS * ((inputs + 1) / 2 * 2);
  float* wide = numbers(count, seed);
  uint16_t* halves = aligned_alloc(64, (size_t)count * sizeof *halves);
  for (int64_t i = 0; i < count; i++) memcpy(halves + i, (const char*)(wide + i) + 2, sizeof *halves);
  free(wide);
  return (Matrix){.kind = KIND_BF16_ROUNDED, .outputs = outputs, .inputs = inputs, .weights = halves};
}

static Operation operation(int64_t op, Matrix m, const float* x, int64_t x_stride, float* y, int64_t y_stride) {
  return (Operation){.op = op, .matrix = m, .x = x, .x_stride = x_stride, .y = y, .y_stride = y_stride, .factor = 1};
}

// What follows in `mixed`: the channels [q | k | v] or [b | c | x], a gate as wide as v, two values for each head.
static void describe_recurrent(Caller* c) {
  float *mixed = numbers(LONG * MIXED, 20), *y = numbers(LONG * CHANNELS, 21), *out = numbers(LONG * HIDDEN, 22);
  float* each_head = numbers(3 * HEADS, 23);
  const int64_t keys = KV_HEADS * STATE, gate = CHANNELS, last = CHANNELS + HEADS * SIZE;
  for (int i = 0; i < HEADS; i++) each_head[i] = -1 - each_head[i];
  c->convolution = (Convolution){mixed, y, MIXED, CHANNELS, numbers(TAPS * CHANNELS, 24), numbers(CHANNELS, 25),
                                 numbers(PLACES * CHANNELS * (TAPS - 1), 26), CACHE_F32, CHANNELS, TAPS, 1};
  c->delta = (GatedDelta){y, y + keys, y + 2 * keys, mixed + last, mixed + last + HEADS, out, CHANNELS, CHANNELS,
                          CHANNELS, MIXED, MIXED, HIDDEN, each_head, each_head + HEADS,
                          numbers(PLACES * HEADS * STATE * SIZE, 27), KV_HEADS, HEADS, STATE, SIZE, 0};
  c->scan = (SelectiveScan){y + 2 * keys, mixed + last, y, y + keys, out, CHANNELS, MIXED, CHANNELS, CHANNELS, HIDDEN,
                            each_head, each_head + HEADS, each_head + 2 * HEADS,
                            numbers(PLACES * HEADS * STATE * SIZE, 28), HEADS, KV_HEADS, SIZE, STATE, 0, 10};
  c->norm = (GatedNorm){out, mixed + gate, out, HIDDEN, MIXED, HIDDEN, numbers(HIDDEN, 29), HEADS, SIZE, 0, 1, 1e-5};
  const void* all[] = {&c->convolution, &c->delta, &c->norm, &c->scan};
  const int64_t ops[] = {OP_CONVOLVE, OP_DELTA, OP_GATED_NORM, OP_SCAN};
  for (int i = 0; i < 4; i++) {
    c->operations[7 + i] = operation(ops[i], (Matrix){0}, mixed, MIXED, out, HIDDEN);
    c->operations[7 + i].recurrent = all[i];
    c->operations[7 + i].states = c->states;
  }
  c->operations[11] = operation(OP_MULTIPLY, (Matrix){.outputs = HIDDEN, .inputs = HIDDEN}, out, HIDDEN, c->stream, HIDDEN);
}

static void describe(Caller* c, Pool* pool) {
  *c = (Caller){.pool = pool};
  c->stream = numbers(MAX_ROWS * HIDDEN, 1);
  c->qkv = numbers(MAX_ROWS * QKV, 2);
  c->attended = numbers(MAX_ROWS * HIDDEN, 3);
  c->gated = numbers(MAX_ROWS * FEATURES, 4);
  c->x = numbers(LONG * HIDDEN, 5);
  c->y = numbers(LONG * QKV, 6);
  c->pairs = matrix_of_pairs(QKV, HIDDEN - 1, 30);
  const int64_t cache = KV_HEADS * BLOCKS * 16 * SIZE;
  c->attention = (Attention){.k = numbers(cache, 7), .v = numbers(cache, 8), .num_blocks = BLOCKS, .block_size = 16,
                             .heads = HEADS, .kv_heads = KV_HEADS, .head_dim = SIZE, .scale = 0.2};
  Operation* o = c->operations;
  o[0] = operation(OP_LINEAR, matrix(QKV, HIDDEN, 9), c->stream, HIDDEN, c->qkv, QKV);
  o[0].norm = (Norm){.kind = NORM_RMS, .weight = numbers(HIDDEN, 10), .eps = 1e-5};
  o[1] = operation(OP_ATTEND, (Matrix){0}, c->qkv, QKV, c->attended, HIDDEN);
  o[1].attention = &c->attention;
  o[2] = operation(OP_LINEAR, matrix(HIDDEN, HIDDEN, 11), c->attended, HIDDEN, c->stream, HIDDEN);
  o[2].adds = 1;
  o[3] = operation(OP_GATED, matrix(2 * FEATURES, HIDDEN, 12), c->stream, HIDDEN, c->gated, FEATURES);
  o[3].norm = o[0].norm;
  o[3].activation = ACT_SILU;
  o[4] = operation(OP_LINEAR, matrix(HIDDEN, FEATURES, 13), c->gated, FEATURES, c->stream, HIDDEN);
  o[4].adds = 1;
  o[5] = operation(OP_ADD, (Matrix){.outputs = HIDDEN}, c->attended, HIDDEN, c->stream, HIDDEN);
  o[6] = operation(OP_SCALE, (Matrix){.outputs = HIDDEN}, c->gated, FEATURES, c->stream, HIDDEN);
  o[6].activation = ACT_SIGMOID;
  describe_recurrent(c);
  // The heads are parts that read one key, which only one of them writes.
  float* keys = numbers(BLOCKS * 16 * SIZE, 14);
  c->latent = (Attention){.k = keys, .v = keys, .num_blocks = BLOCKS, .block_size = 16, .heads = HEADS,
                          .kv_heads = HEADS, .head_dim = SIZE, .scale = 0.2, .made = MADE_LATENT};
  c->heads = (HeadProducts){numbers(HEADS * SIZE * SIZE, 15), CACHE_F32, HEADS, SIZE, SIZE, 0, SIZE, SIZE};
  o[12] = operation(OP_ATTEND, (Matrix){0}, c->qkv, QKV, c->attended, HIDDEN);
  o[12].attention = &c->latent;
  o[13] = operation(OP_HEADS, (Matrix){0}, c->attended, HIDDEN, c->gated, FEATURES);
  o[13].heads = &c->heads;
  o[14] = operation(OP_ADD, (Matrix){.outputs = HIDDEN}, c->gated, FEATURES, c->stream, HIDDEN);
  o[14].adds = 1;
}

// Rows of any length between places of their own, one of them from zeros.
static void call_recurrent(Caller* c, int step) {
  const int32_t middle = step % LONG, bounds[] = {0, middle, LONG}, read[] = {-1, 3}, write[] = {1, 3}, save[] = {2, 0};
  const StateRows rows = {bounds, read, write, save, 2};
  localllm_convolve(c->pool, &c->convolution, &rows);
  localllm_gated_delta(c->pool, &c->delta, &rows);
  localllm_gated_norm(c->pool, &c->norm, LONG);
  for (int i = 0; i < HIDDEN; i++) c->sum += c->delta.y[i] + c->delta.y[(LONG - 1) * HIDDEN + i];
  localllm_selective_scan(c->pool, &c->scan, &rows);
  for (int i = 0; i < HIDDEN; i++) c->sum += c->scan.y[i] + c->scan.y[(LONG - 1) * HIDDEN + i];
}

// A number that changes with each byte.
static double mixed(const void* bytes, size_t size) {
  uint32_t sum = 0;
  for (size_t i = 0; i < size; i++) sum = sum * 31 + ((const uint8_t*)bytes)[i];
  return sum;
}

// Take rows of every type apart. Each row ends where its memory does.
static double pack(Pool* pool, int64_t type) {
  enum { ROWS = 70, INPUTS = 512 };
  const size_t row_bytes = (size_t)stored_row_bytes(type, INPUTS);
  uint8_t* rows[ROWS];
  for (int r = 0; r < ROWS; r++) {
    rows[r] = malloc(row_bytes);
    for (size_t i = 0; i < row_bytes; i++) rows[r][i] = (uint8_t)(i * 37 + (size_t)r * 11 + (i * i >> 3));
  }
  const StoredRows stored = {type, ROWS, INPUTS, (const uint8_t* const*)rows, NULL};
  const StoredRows halves = {0, ROWS, (int64_t)row_bytes / 2, (const uint8_t* const*)rows, NULL};
  const size_t half_bytes = 2 * OUTPUTS * ((row_bytes / 2 + 1) / 2) * sizeof(uint32_t);
  uint32_t* pairs = malloc(half_bytes);
  localllm_pack_halves(pool, &halves, pairs);
  const size_t q4_bytes = 2 * INPUTS / GROUP * (size_t)group_bytes(packed_kind(type));
  uint8_t* blocks = calloc(1, q4_bytes);
  int8_t *codes = malloc(ROWS * INPUTS), *weights = malloc(OUTPUTS * INPUTS);
  float *scales = malloc(ROWS * sizeof(float)), *wide = malloc(ROWS * INPUTS * sizeof(float));
  int32_t sums[OUTPUTS];
  if (packed_kind(type) >= 0) localllm_pack_q4(pool, &stored, blocks);
  localllm_round_rows(pool, &stored, 1e-20, codes, scales);
  localllm_widen_rows(pool, &stored, wide);
  localllm_reorder_int8(pool, codes, OUTPUTS, INPUTS, weights, sums);
  const double sum = mixed(blocks, q4_bytes) + mixed(codes, ROWS * INPUTS) + mixed(scales, ROWS * sizeof(float)) +
                     mixed(wide, ROWS * INPUTS * sizeof(float)) + mixed(weights, OUTPUTS * INPUTS) +
                     mixed(sums, sizeof sums) + mixed(pairs, half_bytes);
  free(pairs);
  for (int r = 0; r < ROWS; r++) free(rows[r]);
  free(blocks);
  free(codes);
  free(weights);
  free(scales);
  free(wide);
  return sum;
}

static void* call(void* argument) {
  Caller* c = argument;
  int32_t table[BLOCKS];
  for (int i = 0; i < BLOCKS; i++) table[i] = (i * 7 + 3) % BLOCKS;
  for (int step = 0; step < STEPS; step++) {
    const int64_t position = step * 6;
    StepRow row = {table, position, table[position / 16] * 16 + position % 16};
    float* stream = numbers(MAX_ROWS * HIDDEN, (unsigned)step);
    memcpy(c->stream, stream, MAX_ROWS * HIDDEN * sizeof(float));
    free(stream);
    c->states[0] = (StateRow){0, 1, step ? 1 + step % 2 : -1, 2 - step % 2, 3};
    localllm_run_step(c->pool, c->operations, OPERATIONS, &row, 1);
    call_recurrent(c, step);
    localllm_linear(c->pool, &c->operations[0].matrix, c->x, HIDDEN, step % LONG + 1, 1, c->y, QKV);
    for (int i = 0; i < HIDDEN; i++) c->sum += c->stream[i] + c->y[i];
    localllm_linear(c->pool, &c->pairs, c->x, HIDDEN, step % LONG + 1, 1, c->y, QKV);
    for (int i = 0; i < HIDDEN; i++) c->sum += c->y[i];
    localllm_gated(c->pool, &c->pairs, ACT_SILU, c->x, HIDDEN, step % LONG + 1, c->y, QKV);
    for (int i = 0; i < QKV / 2; i++) c->sum += c->y[i];
    if (step <= STORED_Q3_K) c->sum += pack(c->pool, step);
    if (step % 10 == 0) nanosleep(&(struct timespec){0, 3000000}, NULL);
  }
  return NULL;
}

int main(void) {
  static Caller callers[3];
  Pool *one = localllm_open_pool(1, NULL), *many = localllm_open_pool(4, NULL);
  for (int i = 0; i < 3; i++) describe(&callers[i], i ? many : one);
  call(&callers[0]);
  pthread_t threads[2];
  for (int i = 0; i < 2; i++) pthread_create(&threads[i], NULL, call, &callers[i + 1]);
  for (int i = 0; i < 2; i++) pthread_join(threads[i], NULL);
  localllm_close_pool(one);
  localllm_close_pool(many);
  printf("%.9g %.9g %.9g\n", callers[0].sum, callers[1].sum, callers[2].sum);
  return !(callers[0].sum == callers[1].sum && callers[0].sum == callers[2].sum);
}
