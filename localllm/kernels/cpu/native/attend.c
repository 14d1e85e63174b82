// Attention of one token over its request's paged cache, in fp32 whatever the types of the cache.
//
// The positions that a query sees are cut into pieces at multiples of PIECE, so that the order of all sums depends on
// the position alone. The result of a piece is, for each query head: the largest score, the sum of exp(score - largest),
// and the values weighted by these.
#include "attend.h"
#include "functions.h"

enum {
  PIECE = 512,  // positions
  TILE = 16,    // positions that are read together
  WIDTH = 16    // floats that a row is padded to: a multiple of LANES
};

static int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t group_of(const Attention* a) { return a->heads / a->kv_heads; }
static int64_t cache_head(const Attention* a, int64_t head) { return a->made == MADE_LATENT ? 0 : head; }

static int64_t first_visible(const Attention* a, int64_t position) {
  if (a->window < 0) return position - position % -a->window;
  return a->window ? larger(0, position + 1 - a->window) : 0;
}

int64_t attention_pieces(const Attention* a, int64_t position) {
  return position / PIECE - first_visible(a, position) / PIECE + 1;
}

// Queries, sums of values, scores of a piece, a tile of the cache, a head of k or v.
int64_t attention_floats(const Attention* a) {
  int64_t width = padded(a->head_dim);
  return group_of(a) * (width + PIECE) + TILE * width + width;
}

int64_t attention_result_floats(const Attention* a) { return group_of(a) * (2 + padded(a->value_dim)); }

// A head of q or k ----------------------------------------------------------------------------------------------------

static float head_sum(const Attention* a, const float* x) {
  float sum = 0;
  for (int64_t i = 0; i < a->head_dim; i++) sum += x[i];
  return sum;
}

static float clipped(const Attention* a, float x) {
  const float limit = (float)a->clip;
  return !limit ? x : x > limit ? limit : x < -limit ? -limit : x;
}

// Sum of squares over `heads` heads, after the limit on each value.
static float squares(const Attention* a, const float* x, int64_t heads) {
  const int64_t n = heads * a->head_dim;
  if (!a->clip) return dot_rows(x, x, n);
  float sum = 0;
  for (int64_t i = 0; i < n; i++) sum += clipped(a, x[i]) * clipped(a, x[i]);
  return sum;
}

static void clip_head(const Attention* a, const float* x, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i++) out[i] = clipped(a, x[i]);
}

// Norm `out`, head number `head` of q's heads, then k's. `x` holds all of them.
static void norm_head(const Attention* a, const float* x, int64_t head, float* out) {
  const int64_t n = a->head_dim;
  const float* weight = a->head_norm_weight + head * n;
  float mean = 0, mean_square;
  if (a->head_norm == HEAD_NORM_WHOLE) {
    int is_k = head >= a->heads;
    int64_t heads = is_k ? a->kv_heads : a->heads;
    mean_square = squares(a, is_k ? x + a->heads * n : x, heads) / (float)(heads * n);
  } else {
    if (a->head_norm == HEAD_NORM_LAYER) mean = head_sum(a, out) / (float)n;
    for (int64_t i = 0; i < n; i++) out[i] -= mean;
    mean_square = dot_rows(out, out, n) / (float)n;
  }
  float factor = 1.0f / sqrtf(mean_square + (float)a->head_norm_eps);
  for (int64_t i = 0; i < n; i++) out[i] = out[i] * factor * weight[i];
}

static void rotate_head(const Attention* a, int64_t position, float* x) {
  const int64_t half = a->rotary_dim / 2;
  const float *cosines = a->angles + position * a->rotary_dim, *sines = cosines + half;
  for (int64_t i = 0; i < half; i++) {
    float first = x[i], second = x[i + half];
    x[i] = first * cosines[i] - second * sines[i];
    x[i + half] = second * cosines[i] + first * sines[i];
  }
}

// Multiply by the Hadamard matrix of rotary_store_kv.py, with its order of sums.
static void turn_head(const Attention* a, float* x) {
  const int64_t size = a->hadamard_size;
  const float factor = 1.0f / sqrtf((float)size);
  for (int64_t step = 1; step < size; step *= 2) {
    for (int64_t start = 0; start < a->head_dim; start += 2 * step) {
      for (int64_t i = start; i < start + step; i++) {
        float first = x[i], second = x[i + step];
        x[i] = first + second;
        x[i + step] = first - second;
      }
    }
  }
  for (int64_t i = 0; i < a->head_dim; i++) x[i] *= factor;
}

// Write head number `head` of q's heads, then k's, as attention reads it.
static void prepare_head(const Attention* a, const float* x, int64_t head, int64_t position, float* out) {
  clip_head(a, x + head * a->head_dim, a->head_dim, out);
  const int is_last = a->head_norm == HEAD_NORM_RMS_LAST;
  if (a->head_norm != HEAD_NORM_NONE && !is_last) norm_head(a, x, head, out);
  if (a->angles) rotate_head(a, position, out);
  if (is_last) norm_head(a, x, head, out);
  if (a->hadamard_size) turn_head(a, out);
}

static float query_growth(const Attention* a, int64_t position) {
  if (!a->query_growth) return 1.0f;
  return (float)(1.0 + a->query_growth * log(1.0 + (double)((position + a->growth_offset) / a->growth_period)));
}

// [group, padded head_dim], with zeros as padding.
static void prepare_queries(const Attention* a, const StepRow* row, const float* x, int64_t head, float* queries) {
  const int64_t width = padded(a->head_dim), group = group_of(a);
  const float growth = query_growth(a, row->position);
  for (int64_t h = 0; h < group; h++, queries += width) {
    prepare_head(a, x, head * group + h, row->turn, queries);
    for (int64_t i = 0; i < a->head_dim; i++) queries[i] *= growth;
    for (int64_t i = a->head_dim; i < width; i++) queries[i] = 0;
  }
}

// The cache -----------------------------------------------------------------------------------------------------------

// As quantize.py: the largest magnitude becomes 127. A head with NaN or infinity gets a scale that is not finite.
static float store_codes(const float* x, int64_t n, int8_t* codes) {
  float peak = 1e-20f, poison = 0;
  for (int64_t i = 0; i < n; i++) {
    peak = fabsf(x[i]) > peak ? fabsf(x[i]) : peak;
    poison += x[i] * 0.0f;
  }
  float scale = peak / 127.0f;
  for (int64_t i = 0; i < n; i++) {
    float code = rintf(x[i] / scale);
    codes[i] = (int8_t)(poison != 0 || code != code ? 0 : code > 127 ? 127 : code < -127 ? -127 : code);
  }
  return scale + poison;
}

// As quantize_nibbles of quantize.py.
static void store_nibbles(const float* x, int64_t n, int64_t group, uint8_t* codes, _Float16* scales) {
  for (int64_t g = 0; g < n / group; g++) {
    const float* y = x + g * group;
    float low = y[0], high = y[0], poison = 0;
    for (int64_t i = 0; i < group; i++) {
      low = y[i] < low ? y[i] : low;
      high = y[i] > high ? y[i] : high;
      poison += y[i] * 0.0f;
    }
    const float step = (high - low) / 15.0f, least = 0x1p-24f;
    const _Float16 scale = (_Float16)((step > least ? step : least) + poison);
    const _Float16 zero = (_Float16)(low + 8.0f * (float)scale);
    scales[g] = scale;
    scales[n / group + g] = zero;
    for (int64_t i = 0; i < group; i += 2) {
      int pair[2];
      for (int j = 0; j < 2; j++) {
        float code = rintf((y[i + j] - (float)zero) / (float)scale);
        pair[j] = (int)(code > 7 ? 7 : code > -8 ? code : -8) + 8;
      }
      codes[(g * group + i) / 2] = (uint8_t)(pair[0] | pair[1] << 4);
    }
  }
}

static int64_t groups_of(const Attention* a, int64_t group) { return a->head_dim / (group ? group : a->head_dim); }

// type, group: of the keys or of the values.
static void store_head(
    const Attention* a, int64_t type, int64_t group, const float* x, void* cache, void* scales, int64_t token) {
  const int64_t n = a->head_dim;
  switch (type) {
    case CACHE_F32: memcpy((float*)cache + token * n, x, (size_t)n * sizeof(float)); break;
    case CACHE_BF16: {
      for (int64_t i = 0; i < n; i++) ((uint16_t*)cache)[token * n + i] = to_bf16(x[i]);
      break;
    }
    case CACHE_F16: {
      for (int64_t i = 0; i < n; i++) ((_Float16*)cache)[token * n + i] = (_Float16)x[i];
      break;
    }
    case CACHE_I8: ((float*)scales)[token] = store_codes(x, n, (int8_t*)cache + token * n); break;
    case CACHE_I4: {
      _Float16* own = (_Float16*)scales + token * 2 * groups_of(a, group);
      store_nibbles(x, n, n / groups_of(a, group), (uint8_t*)cache + token * n / 2, own);
      break;
    }
  }
}

static void store_keys_and_values(const Attention* a, const StepRow* row, const float* x, int64_t head, float* memory) {
  const int64_t token = cache_head(a, head) * a->num_blocks * a->block_size + row->slot;
  const int64_t first_value = (a->heads + (a->made == MADE_QK ? 0 : a->kv_heads)) * a->head_dim;
  if (a->made == MADE_Q || (a->made == MADE_LATENT && head)) return;
  prepare_head(a, x, a->heads + head, row->turn, memory);
  store_head(a, a->key_type, a->key_group, memory, a->k, a->k_scales, token);
  if (a->made == MADE_LATENT) return;
  clip_head(a, x + first_value + head * a->value_dim, a->value_dim, memory);
  for (int64_t i = a->value_dim; i < a->head_dim; i++) memory[i] = 0;
  if (a->norms_values) norm_head(a, x, a->heads + a->kv_heads + head, memory);
  store_head(a, a->value_type, a->value_group, memory, a->v, a->v_scales, token);
}

static void widen_nibbles(const uint8_t* codes, const _Float16* scales, int64_t n, int64_t group, float* out) {
  for (int64_t g = 0; g < n / group; g++) {
    const float step = (float)scales[g];
    const Floats scale = each_float(step), zero = each_float((float)scales[n / group + g] - 8.0f * step);
    for (int64_t i = g * group; i < (g + 1) * group; i += LANES) {
      store_floats(out + i, multiply_add(nibble_floats(codes + i / 2), scale, zero));
    }
  }
}

static void widen(
    const Attention* a, int64_t type, int64_t group, const void* cache, const void* scales, int64_t token, float* out) {
  const int64_t n = a->head_dim;
  switch (type) {
    case CACHE_F32: memcpy(out, (const float*)cache + token * n, (size_t)n * sizeof(float)); break;
    case CACHE_BF16: {
      for (int64_t i = 0; i < n; i++) out[i] = from_bf16(((const uint16_t*)cache)[token * n + i]);
      break;
    }
    case CACHE_F16: widen_halves((const uint16_t*)cache + token * n, n, out); break;
    case CACHE_I8: {
      const float scale = ((const float*)scales)[token];
      for (int64_t i = 0; i < n; i++) out[i] = (float)((const int8_t*)cache)[token * n + i] * scale;
      break;
    }
    case CACHE_I4: {
      const _Float16* own = (const _Float16*)scales + token * 2 * groups_of(a, group);
      widen_nibbles((const uint8_t*)cache + token * n / 2, own, n, n / groups_of(a, group), out);
      break;
    }
  }
  for (int64_t i = n; i < padded(n); i++) out[i] = 0;
}

// Return `count` tokens as rows of padded(head_dim) floats: the cache itself where its rows are that.
static const float* load_tile(
    const Attention* a, int64_t type, int64_t group, const void* cache, const void* scales, int64_t token,
    int64_t count, float* tile) {
  const int64_t width = padded(a->head_dim);
  if (type == CACHE_F32 && width == a->head_dim) return (const float*)cache + token * width;
  for (int64_t j = 0; j < count; j++) widen(a, type, group, cache, scales, token + j, tile + j * width);
  return tile;
}

// Scores --------------------------------------------------------------------------------------------------------------

// Return the products of one query with the LANES keys from `keys` on.
static Floats score_keys(const float* query, const float* keys, int64_t width) {
  Floats sums[LANES];
  for (int j = 0; j < LANES; j++) sums[j] = load_floats(keys + j * width) * load_floats(query);
  for (int64_t i = LANES; i < width; i += LANES) {
    const Floats q = load_floats(query + i);
    for (int j = 0; j < LANES; j++) sums[j] = multiply_add(load_floats(keys + j * width + i), q, sums[j]);
  }
  return sum_of_each(sums);
}

static float score_key(const float* query, const float* key, int64_t width) {
  Floats sum = each_float(0);
  for (int64_t i = 0; i < width; i += LANES) sum = multiply_add(load_floats(query + i), load_floats(key + i), sum);
  return sum_of_lanes(sum);
}

// scores [group, PIECE], from place `at` on.
static void score_group(
    const float* queries, const float* keys, int64_t width, int64_t group, int64_t at, int64_t count, float* scores) {
  for (int64_t h = 0; h < group; h++) {
    const float* query = queries + h * width;
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
      store_floats(scores + h * PIECE + at + j, score_keys(query, keys + j * width, width));
    }
    for (; j < count; j++) scores[h * PIECE + at + j] = score_key(query, keys + j * width, width);
  }
}

// Scale, cap and tilt the scores of query head `head` for the positions first .. first + n - 1.
static void finish_scores(const Attention* a, int64_t head, int64_t first, int64_t n, int64_t position, float* scores) {
  const float cap = (float)a->softcap, slope = a->slopes ? a->slopes[head] : 0;
  const float scale = (float)(cap ? a->scale / a->softcap : a->scale);
  for (int64_t i = 0; i < n; i++) scores[i] *= scale;
  for (int64_t i = 0; cap && i < n; i += 16) store16(scores + i, tanh16(load16(scores + i)) * all_lanes(cap));
  for (int64_t i = 0; slope && i < n; i++) scores[i] += slope * (float)(first + i - position);
  const float* biases = a->distance_bias ? a->distance_bias + head * a->distances : NULL;
  for (int64_t i = 0; biases && i < n; i++) scores[i] += biases[smaller(position - first - i, a->distances - 1)];
}

// Replace n scores by exp(score - largest), and the places up to a multiple of 16 by 0. Sets the largest, returns the sum.
static float exponentials(float* scores, int64_t n, float* largest) {
  Floats peak = each_float(-INFINITY), sum = each_float(0);
  int64_t i;
  for (i = n; i % WIDTH; i++) scores[i] = -INFINITY;
  for (i = 0; i < n; i += LANES) {
    const Floats score = load_floats(scores + i);
    peak = pick(score > peak, score, peak);
  }
  *largest = largest_lane(peak);
  for (i = 0; i < n; i += LANES) {
    const Floats score = load_floats(scores + i);
    const Floats e = pick(score == each_float(-INFINITY), each_float(0), exponential(score - each_float(*largest)));
    store_floats(scores + i, e);
    sum += e;
  }
  return sum_of_lanes(sum);
}

// Values --------------------------------------------------------------------------------------------------------------

// Add `count` values, weighted, to the sums of `heads` heads, `vectors` vectors of each from column 0 on. stride: floats
// from value to value; width: of the sums.
ALWAYS_INLINE void add_values_of(
    const float* weights, const float* values, int64_t stride, int64_t width, int64_t count, float* sums,
    const int heads, const int vectors) {
  Floats s[4][4];
  for (int h = 0; h < heads; h++) {
    for (int i = 0; i < vectors; i++) s[h][i] = load_floats(sums + h * width + i * LANES);
  }
  for (int64_t j = 0; j < count; j++) {
    Floats v[4];
    for (int i = 0; i < vectors; i++) v[i] = load_floats(values + j * stride + i * LANES);
    for (int h = 0; h < heads; h++) {
      const Floats weight = each_float(weights[h * PIECE + j]);
      for (int i = 0; i < vectors; i++) s[h][i] = multiply_add(weight, v[i], s[h][i]);
    }
  }
  for (int h = 0; h < heads; h++) {
    for (int i = 0; i < vectors; i++) store_floats(sums + h * width + i * LANES, s[h][i]);
  }
}

// heads * vectors sums are held in registers.
ALWAYS_INLINE void add_values_to(
    const float* weights, const float* values, int64_t stride, int64_t width, int64_t count, float* sums,
    const int heads, const int vectors) {
  int64_t i = 0;
  for (; i + vectors * LANES <= width; i += vectors * LANES) {
    add_values_of(weights, values + i, stride, width, count, sums + i, heads, vectors);
  }
  for (; i < width; i += LANES) add_values_of(weights, values + i, stride, width, count, sums + i, heads, 1);
}

static void add_values(
    const float* weights, const float* values, int64_t stride, int64_t width, int64_t count, int64_t group,
    float* sums) {
  enum { FOUR = ACCUMULATORS / 4 };
  int64_t h = 0;
  for (; h + 4 <= group; h += 4, weights += 4 * PIECE, sums += 4 * width)
    add_values_to(weights, values, stride, width, count, sums, 4, FOUR);
  for (; h + 2 <= group; h += 2, weights += 2 * PIECE, sums += 2 * width)
    add_values_to(weights, values, stride, width, count, sums, 2, 4);
  for (; h < group; h++, weights += PIECE, sums += width)
    add_values_to(weights, values, stride, width, count, sums, 1, 4);
}

// Pieces --------------------------------------------------------------------------------------------------------------

typedef struct {
  const Attention* a;
  const StepRow* row;
  int64_t head, first, end;  // positions first .. end - 1
  float *queries, *scores, *tile;
} Piece;

// Return how many of the piece's positions from `position` on are one tile: in one block of the cache. Sets its token.
static int64_t tile_at(const Piece* p, int64_t position, int64_t* token) {
  const int64_t size = p->a->block_size, offset = position % size;
  *token = (cache_head(p->a, p->head) * p->a->num_blocks + p->row->block_table[position / size]) * size + offset;
  return smaller(smaller(TILE, size - offset), p->end - position);
}

static void score_piece(const Piece* p) {
  const Attention* a = p->a;
  const int64_t width = padded(a->head_dim), group = group_of(a);
  int64_t token, count;
  for (int64_t position = p->first; position < p->end; position += count) {
    count = tile_at(p, position, &token);
    const float* keys = load_tile(a, a->key_type, a->key_group, a->k, a->k_scales, token, count, p->tile);
    score_group(p->queries, keys, width, group, position - p->first, count, p->scores);
  }
}

static void weigh_values(const Piece* p, float* sums) {
  const Attention* a = p->a;
  const int64_t stride = padded(a->head_dim), width = padded(a->value_dim), group = group_of(a);
  int64_t token, count;
  memset(sums, 0, (size_t)(group * width) * sizeof(float));
  for (int64_t position = p->first; position < p->end; position += count) {
    count = tile_at(p, position, &token);
    const float* values = load_tile(a, a->value_type, a->value_group, a->v, a->v_scales, token, count, p->tile);
    add_values(p->scores + position - p->first, values, stride, width, count, group, sums);
  }
}

// A result is [group] largest scores, [group] sums, [group, padded value_dim] weighted values.
void attend_piece(
    const Attention* a, const StepRow* row, const float* x, int64_t head, int64_t piece, int64_t stores, float* memory,
    float* result) {
  const int64_t width = padded(a->head_dim), group = group_of(a), visible = first_visible(a, row->position);
  const int64_t start = (visible / PIECE + piece) * PIECE;
  Piece p = {a, row, head, larger(start, visible), smaller(start + PIECE, row->position + 1), NULL, NULL, NULL};
  p.queries = memory;
  p.scores = p.queries + group * width;
  p.tile = p.scores + group * PIECE;
  if (stores && p.end == row->position + 1) store_keys_and_values(a, row, x, head, p.tile + TILE * width);
  prepare_queries(a, row, x, head, p.queries);
  score_piece(&p);
  for (int64_t h = 0; h < group; h++) {
    float* scores = p.scores + h * PIECE;
    finish_scores(a, head * group + h, p.first, p.end - p.first, row->position, scores);
    result[group + h] = exponentials(scores, p.end - p.first, result + h);
  }
  weigh_values(&p, result + 2 * group);
}

void store_piece(const Attention* a, const StepRow* row, const float* x, int64_t head, float* memory) {
  store_keys_and_values(a, row, x, head, memory);
}

void join_pieces(const Attention* a, int64_t head, int64_t pieces, const float* results, float* y) {
  const int64_t n = a->value_dim, width = padded(n), group = group_of(a), size = attention_result_floats(a);
  for (int64_t h = 0; h < group; h++) {
    float* out = y + (head * group + h) * n;
    float largest = a->sinks ? a->sinks[head * group + h] : -INFINITY;
    for (int64_t i = 0; i < pieces; i++) largest = results[i * size + h] > largest ? results[i * size + h] : largest;
    float sum = a->sinks ? expf(a->sinks[head * group + h] - largest) : 0;
    memset(out, 0, (size_t)n * sizeof(float));
    for (int64_t i = 0; i < pieces; i++) {
      const float *result = results + i * size, *values = result + 2 * group + h * width;
      const float weight = expf(result[h] - largest);
      sum += result[group + h] * weight;
      for (int64_t j = 0; j < n; j++) out[j] += values[j] * weight;
    }
    for (int64_t j = 0; j < n; j++) out[j] /= sum;
  }
}

// Matrices of heads -----------------------------------------------------------------------------------------------------

int64_t head_product_floats(const HeadProducts* p) { return (TILE + MAX_ROWS) * padded(p->inputs); }

// Return `count` rows of weights from row `first` on as rows of padded(inputs) floats: in place, or in `tile`.
static const float* widen_weights(const HeadProducts* p, int64_t first, int64_t count, float* tile) {
  const int64_t n = p->inputs, width = padded(n);
  if (p->type == CACHE_F32 && width == n) return (const float*)p->weights + first * n;
  for (int64_t j = 0; j < count; j++) {
    const int64_t start = (first + j) * n;
    float* out = tile + j * width;
    if (p->type == CACHE_F32) {
      memcpy(out, (const float*)p->weights + start, (size_t)n * sizeof(float));
    } else if (p->type == CACHE_BF16) {
      for (int64_t i = 0; i < n; i++) out[i] = from_bf16(((const uint16_t*)p->weights)[start + i]);
    } else {
      widen_halves((const uint16_t*)p->weights + start, n, out);
    }
    for (int64_t i = n; i < width; i++) out[i] = 0;
  }
  return tile;
}

void multiply_head(
    const HeadProducts* p, int64_t head, const float* x, int64_t x_stride, int64_t rows, float* y, int64_t y_stride,
    float* memory) {
  const int64_t n = p->inputs, width = padded(n);
  float *tile = memory, *inputs = tile + TILE * width;
  x += head * p->x_head_stride;
  y += head * p->y_head_stride;
  for (int64_t r = 0; r < rows; r++) {
    memcpy(y + r * y_stride, x + r * x_stride, (size_t)p->copied * sizeof(float));
    memcpy(inputs + r * width, x + r * x_stride + p->copied, (size_t)n * sizeof(float));
    for (int64_t i = n; i < width; i++) inputs[r * width + i] = 0;
  }
  // The weights are read once for all rows, whose sums do not depend on one another.
  for (int64_t first = 0; first < p->outputs; first += TILE) {
    const int64_t count = smaller(TILE, p->outputs - first);
    const float* weights = widen_weights(p, head * p->outputs + first, count, tile);
    for (int64_t r = 0; r < rows; r++) {
      score_group(inputs + r * width, weights, width, 1, first, count, y + r * y_stride + p->copied);
    }
  }
}
