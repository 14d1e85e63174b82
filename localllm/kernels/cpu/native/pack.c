// Rows of a GGUF file's tensors, taken apart by the threads of a pool.
//
// A product of a code and its scale has at most 24 bits, so that it is exact in fp32, fused with an addition or not.
// tests/kernels/cpu compare every type with kernels/gguf_blocks.py, bit by bit.
#include "pack.h"
#include "functions.h"
#include "groups.h"
#include "products.h"

enum { TILE = 256, RUN = 32 };  // inputs that are decoded at a time; bytes of nibbles of two groups of a K type

static const uint8_t* block_at(const StoredRows* s, int64_t row, int64_t input) {
  const BlockSize size = STORED_SIZES[s->type];
  return s->rows[row] + input / size.inputs * size.bytes;
}

// Values of a block ------------------------------------------------------------------------------------------------------

static void widen_q4_0(const uint8_t* b, float* out) {
  const float scale = half_at(b);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)((b[2 + i] & 15) - 8) * scale;
    out[16 + i] = (float)((b[2 + i] >> 4) - 8) * scale;
  }
}

static void widen_q4_1(const uint8_t* b, float* out) {
  const float scale = half_at(b), minimum = half_at(b + 2);
  for (int i = 0; i < 16; i++) {
    out[i] = (float)(b[4 + i] & 15) * scale + minimum;
    out[16 + i] = (float)(b[4 + i] >> 4) * scale + minimum;
  }
}

// Codes of 5 bits: nibbles, and a word of fifth bits.
static void widen_q5(const uint8_t* nibbles, uint32_t fifth, int zero, float scale, float minimum, float* out) {
  for (int i = 0; i < 16; i++) {
    const int low = (nibbles[i] & 15) | (int)(fifth >> i & 1) << 4;
    const int high = nibbles[i] >> 4 | (int)(fifth >> (16 + i) & 1) << 4;
    out[i] = (float)(low - zero) * scale + minimum;
    out[16 + i] = (float)(high - zero) * scale + minimum;
  }
}

static void widen_q5_0(const uint8_t* b, float* out) { widen_q5(b + 6, word_at(b + 2), 16, half_at(b), 0, out); }

static void widen_q5_1(const uint8_t* b, float* out) {
  widen_q5(b + 8, word_at(b + 4), 0, half_at(b), half_at(b + 2), out);
}

static void widen_q8_0(const uint8_t* b, float* out) {
  const float scale = half_at(b);
  const int8_t* codes = (const int8_t*)b + 2;
  for (int i = 0; i < 32; i++) out[i] = (float)codes[i] * scale;
}

static void widen_q4_k(const uint8_t* b, float* out) {
  const float unit = half_at(b), unit_of_minima = half_at(b + 2);
  uint8_t scales[8], minima[8];
  small_scales(b + 4, scales, minima);
  for (int group = 0; group < 8; group++, out += GROUP) {
    const uint8_t* run = b + 16 + group / 2 * RUN;
    const float scale = (float)scales[group] * unit, minimum = (float)minima[group] * -unit_of_minima;
    for (int i = 0; i < GROUP; i++) out[i] = (float)(run[i] >> (group % 2 * 4) & 15) * scale + minimum;
  }
}

// zero: what the table's bytes are more than their values
static void widen_table(const uint8_t* nibbles, const int8_t* table, int zero, float scale, float* out) {
  for (int i = 0; i < 16; i++) {
    out[i] = (float)(table[nibbles[i] & 15] - zero) * scale;
    out[16 + i] = (float)(table[nibbles[i] >> 4] - zero) * scale;
  }
}

// Half of 2^(e - 127): the tables of e2m1 hold twice the values.
static void widen_mxfp4(const uint8_t* b, float* out) {
  widen_table(b + 1, E2M1_DOUBLED, E2M1_ZERO, float_of_bits(b[0] ? b[0] << 23 : 1 << 22) * 0.5f, out);
}

static void widen_iq4_nl(const uint8_t* b, float* out) { widen_table(b + 2, IQ4_VALUES, 0, half_at(b), out); }

// The scale of a group of IQ4_XS: 6 bits, in two parts.
static float small_scale(const uint8_t* b, int group) {
  const int low = b[4 + group / 2] >> (group % 2 * 4) & 15, high = b[2 + group / 4] >> (group % 4 * 2) & 3;
  return (float)((low | high << 4) - 32) * half_at(b);
}

static void widen_iq4_xs(const uint8_t* b, float* out) {
  for (int group = 0; group < 8; group++)
    widen_table(b + 8 + 16 * group, IQ4_VALUES, 0, small_scale(b, group), out + group * GROUP);
}

// The types whose blocks `widen_large` does not know.
static void (*const WIDEN[])(const uint8_t*, float*) = {
    [STORED_Q4_0] = widen_q4_0,     [STORED_Q4_1] = widen_q4_1,     [STORED_Q5_0] = widen_q5_0,
    [STORED_Q5_1] = widen_q5_1,     [STORED_Q8_0] = widen_q8_0,     [STORED_Q4_K] = widen_q4_k,
    [STORED_MXFP4] = widen_mxfp4,   [STORED_IQ4_NL] = widen_iq4_nl, [STORED_IQ4_XS] = widen_iq4_xs,
    [STORED_TQ2_0] = NULL,
};

static void widen_block(const StoredRows* s, const uint8_t* block, float* out) {
  if (WIDEN[s->type])
    WIDEN[s->type](block, out);
  else
    widen_large(s->type, block, s->table, out);
}

// Write the values of up to TILE inputs of a row from `first` on. Returns how many.
static int64_t widen_tile(const StoredRows* s, int64_t row, int64_t first, float* out) {
  const BlockSize size = STORED_SIZES[s->type];
  const int64_t count = s->inputs - first < TILE ? s->inputs - first : TILE;
  const uint8_t* block = block_at(s, row, first);
  for (int64_t k = 0; k < count; k += size.inputs, block += size.bytes) widen_block(s, block, out + k);
  return count;
}

int64_t widen_stored(const Matrix* m, int64_t output, int64_t first, float* out) {
  const int64_t type = m->kind - KIND_STORED;
  const uint8_t* row = (const uint8_t*)m->weights + output * stored_row_bytes(type, m->inputs);
  return widen_tile(&(StoredRows){type, 1, m->inputs, &row, m->table}, 0, first, out);
}

// Codes of 8 bits --------------------------------------------------------------------------------------------------------

static float largest_magnitude(const StoredRows* s, int64_t row) {
  float tile[TILE];
  int32_t most = 0;
  for (int64_t first = 0; first < s->inputs; first += TILE) {
    const int64_t count = widen_tile(s, row, first, tile);
    most = largest_magnitude_bits(tile, count, most);
  }
  return float_of_bits(most);
}

static float round_row(const StoredRows* s, int64_t row, float smallest, int8_t* codes) {
  float tile[TILE];
  int32_t rounded[TILE];
  const float peak = largest_magnitude(s, row), scale = (peak < smallest ? smallest : peak) / 127;
  const Floats factor = same_floats(1 / scale);
  for (int64_t first = 0; first < s->inputs; first += TILE) {
    const int64_t count = widen_tile(s, row, first, tile);
    for (int64_t i = 0; i < count; i += LANES) store_ints(rounded + i, nearest_ints(load_floats(tile + i) * factor));
    for (int64_t i = 0; i < count; i++) codes[first + i] = (int8_t)rounded[i];
  }
  return scale;
}

// 4 bits -----------------------------------------------------------------------------------------------------------------

// What one output has in a group of 32 inputs: pairs of codes as matrix.h has them.
typedef struct {
  uint32_t words[4];
  float scale, minimum;
  uint8_t exponent;
} Group;

int64_t packed_kind(int64_t type) {
  switch (type) {
    case STORED_Q4_0: return KIND_Q4;
    case STORED_Q4_1:
    case STORED_Q4_K: return KIND_Q4_MIN;
    case STORED_MXFP4: return KIND_MXFP4;
    case STORED_IQ4_NL:
    case STORED_IQ4_XS: return KIND_IQ4;
    default: return -1;
  }
}

static void group_of_k(const uint8_t* b, int group, Group* out) {
  const uint8_t* run = b + 16 + group / 2 * RUN;
  const uint32_t low = 0x0f0f0f0f;
  for (int j = 0; j < 4; j++) {
    const uint32_t first = word_at(run + 4 * j), second = word_at(run + 16 + 4 * j);
    out->words[j] = group % 2 ? (first >> 4 & low) | (second & ~low) : (first & low) | (second & low) << 4;
  }
  uint8_t scales[8], minima[8];
  small_scales(b + 4, scales, minima);
  out->scale = (float)scales[group] * half_at(b);
  out->minimum = out->scale * 0 - (float)minima[group] * -half_at(b + 2);  // the zero has the sign of its definition
}

static void group_at(const StoredRows* s, int64_t row, int64_t input, Group* out) {
  const uint8_t *b = block_at(s, row, input), *nibbles = b + STORED_SIZES[s->type].bytes - sizeof out->words;
  const int group = (int)(input % TILE / GROUP);
  switch (s->type) {
    case STORED_Q4_K: group_of_k(b, group, out); return;
    case STORED_IQ4_XS:
      out->scale = small_scale(b, group);
      nibbles = b + 8 + 16 * group;
      break;
    case STORED_MXFP4: out->exponent = b[0]; break;
    default: out->scale = half_at(b);
  }
  if (s->type == STORED_Q4_1) out->minimum = out->scale * 0 - half_at(b + 2);
  memcpy(out->words, nibbles, sizeof out->words);
}

static void pack_group(const StoredRows* s, int64_t block, int64_t input, uint8_t* to) {
  uint32_t words[4][OUTPUTS];
  float scales[OUTPUTS], minima[OUTPUTS];
  const int64_t kind = packed_kind(s->type);
  for (int n = 0; n < OUTPUTS; n++) {
    Group group = {0};
    if (block * OUTPUTS + n < s->count) group_at(s, block * OUTPUTS + n, input, &group);
    for (int j = 0; j < 4; j++) words[j][n] = group.words[j];
    scales[n] = group.scale;
    minima[n] = group.minimum;
    if (kind == KIND_MXFP4) to[sizeof words + (size_t)n] = group.exponent;
  }
  memcpy(to, words, sizeof words);
  if (kind == KIND_MXFP4) return;
  uint16_t* halves = (uint16_t*)(to + sizeof words);
  for (int n = 0; n < OUTPUTS; n += LANES) {
    store_halves(halves + n, load_floats(scales + n));
    if (kind == KIND_Q4_MIN) store_halves(halves + OUTPUTS + n, load_floats(minima + n));
  }
}

// 16 bits ----------------------------------------------------------------------------------------------------------------

enum { LINE = 16 };  // pairs of inputs in a line of the cache

typedef uint32_t Four __attribute__((vector_size(16)));

#if defined(__clang__)
#define FOUR_OF(a, b, ...) (Four) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FOUR_OF(a, b, ...) (Four) __builtin_shuffle(a, b, (Four){__VA_ARGS__})
#endif

// Write pairs `first` to `first` + 3 of four rows as four lanes of each pair's row of memory.
static void turn_four(const uint8_t* const* rows, int64_t first, uint32_t* to) {
  Four v[4];
  for (int n = 0; n < 4; n++) memcpy(&v[n], rows[n] + 4 * first, sizeof v[n]);
  const Four a = FOUR_OF(v[0], v[1], 0, 4, 1, 5), b = FOUR_OF(v[2], v[3], 0, 4, 1, 5);
  const Four c = FOUR_OF(v[0], v[1], 2, 6, 3, 7), d = FOUR_OF(v[2], v[3], 2, 6, 3, 7);
  const Four out[4] = {FOUR_OF(a, b, 0, 1, 4, 5), FOUR_OF(a, b, 2, 3, 6, 7), FOUR_OF(c, d, 0, 1, 4, 5), FOUR_OF(c, d, 2, 3, 6, 7)};
  for (int j = 0; j < 4; j++) memcpy(to + (first + j) * OUTPUTS, &out[j], sizeof out[j]);
}

// A row ends within a pair where their number is odd: the last weight is a zero then.
static uint32_t pair_at(const uint8_t* row, int64_t pair, int64_t inputs) {
  uint32_t both = 0;
  memcpy(&both, row + 4 * pair, 2 * pair + 1 < inputs ? 4 : 2);
  return both;
}

// Jobs -------------------------------------------------------------------------------------------------------------------

typedef struct {
  const StoredRows* stored;
  float smallest;
  const int8_t* codes;
  int64_t blocks, inputs;
  void* out;
  void* per_row;
} Packing;

static int64_t count_blocks(void* context, int64_t operation) {
  (void)operation;
  return ((Packing*)context)->blocks;
}

static int64_t last_row(const Packing* p, int64_t block) {
  const int64_t end = (block + 1) * OUTPUTS;
  return end < p->stored->count ? end : p->stored->count;
}

static void pack_q4_block(void* context, int64_t operation, int64_t block, int64_t thread) {
  const Packing* p = context;
  const int64_t size = group_bytes(packed_kind(p->stored->type));
  uint8_t* to = (uint8_t*)p->out + block * (p->inputs / GROUP) * size;
  (void)operation, (void)thread;
  for (int64_t input = 0; input < p->inputs; input += GROUP, to += size) pack_group(p->stored, block, input, to);
}

static void round_block(void* context, int64_t operation, int64_t block, int64_t thread) {
  const Packing* p = context;
  (void)operation, (void)thread;
  for (int64_t row = block * OUTPUTS; row < last_row(p, block); row++)
    ((float*)p->per_row)[row] = round_row(p->stored, row, p->smallest, (int8_t*)p->out + row * p->inputs);
}

static void widen_rows_of_block(void* context, int64_t operation, int64_t block, int64_t thread) {
  const Packing* p = context;
  (void)operation, (void)thread;
  for (int64_t row = block * OUTPUTS; row < last_row(p, block); row++)
    for (int64_t first = 0; first < p->inputs; first += TILE)
      widen_tile(p->stored, row, first, (float*)p->out + row * p->inputs + first);
}

// A line of all rows at a time, while the first level of the cache holds what is written of it.
static void pack_halves_block(void* context, int64_t operation, int64_t block, int64_t thread) {
  const Packing* p = context;
  const uint8_t* const* rows = p->stored->rows + block * OUTPUTS;
  const int64_t count = last_row(p, block) - block * OUTPUTS, pairs = (p->inputs + 1) / 2;
  const int64_t turned = p->inputs / 8 * 4, together = count / 4 * 4;
  uint32_t* to = (uint32_t*)p->out + block * OUTPUTS * pairs;
  (void)operation, (void)thread;
  if (count < OUTPUTS) memset(to, 0, (size_t)(OUTPUTS * pairs) * sizeof *to);
  for (int64_t line = 0; line < turned; line += LINE)
    for (int64_t n = 0; n < together; n += 4)
      for (int64_t k = line; k < line + LINE && k < turned; k += 4) turn_four(rows + n, k, to + n);
  for (int64_t n = 0; n < count; n++)
    for (int64_t k = n < together ? turned : 0; k < pairs; k++) to[k * OUTPUTS + n] = pair_at(rows[n], k, p->inputs);
}

static void reorder_block(void* context, int64_t operation, int64_t block, int64_t thread) {
  const Packing* p = context;
  const int8_t* from = p->codes + block * OUTPUTS * p->inputs;
  uint32_t* to = (uint32_t*)p->out + block * OUTPUTS * (p->inputs / 4);
  int32_t* sums = (int32_t*)p->per_row + block * OUTPUTS;
  (void)operation, (void)thread;
  for (int64_t k = 0; k < p->inputs; k += 4, to += OUTPUTS)
    for (int n = 0; n < OUTPUTS; n++) to[n] = word_at((const uint8_t*)from + n * p->inputs + k);
  for (int n = 0; n < OUTPUTS; n++) {
    int32_t sum = 0;
    for (int64_t k = 0; k < p->inputs; k++) sum += from[n * p->inputs + k];
    sums[n] = -sum;
  }
}

static void run_packing(Pool* pool, Packing* packing, void (*run_piece)(void*, int64_t, int64_t, int64_t)) {
  if (packing->blocks == 1) {  // as for the tokens of a step
    run_piece(packing, 0, 0, 0);
    return;
  }
  lock_pool(pool);
  run_job(pool, &(Job){packing, 1, count_blocks, run_piece});
  unlock_pool(pool);
}

static Packing packing_of(const StoredRows* stored, void* out) {
  return (Packing){
      .stored = stored, .blocks = (stored->count + OUTPUTS - 1) / OUTPUTS, .inputs = stored->inputs, .out = out};
}

void localllm_pack_q4(Pool* pool, const StoredRows* stored, uint8_t* blocks) {
  Packing packing = packing_of(stored, blocks);
  run_packing(pool, &packing, pack_q4_block);
}

void localllm_pack_halves(Pool* pool, const StoredRows* stored, uint32_t* blocks) {
  Packing packing = packing_of(stored, blocks);
  run_packing(pool, &packing, pack_halves_block);
}

void localllm_round_rows(Pool* pool, const StoredRows* stored, double smallest, int8_t* codes, float* scales) {
  Packing packing = packing_of(stored, codes);
  packing.smallest = (float)smallest;
  packing.per_row = scales;
  run_packing(pool, &packing, round_block);
}

void localllm_widen_rows(Pool* pool, const StoredRows* stored, float* out) {
  Packing packing = packing_of(stored, out);
  run_packing(pool, &packing, widen_rows_of_block);
}

void localllm_reorder_int8(Pool* pool, const int8_t* codes, int64_t count, int64_t inputs, int8_t* weights, int32_t* sums) {
  Packing packing = {.codes = codes, .blocks = count / OUTPUTS, .inputs = inputs, .out = weights, .per_row = sums};
  run_packing(pool, &packing, reorder_block);
}
