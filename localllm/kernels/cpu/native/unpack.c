// Values of packed weights, GROUP inputs of a block at a time.
#include "groups.h"
#include "products.h"

typedef float Tile[GROUP][OUTPUTS];

static void unpack_f32(const Matrix* m, int64_t block, int64_t first, int64_t count, Tile to) {
  const float* w = (const float*)m->weights + (block * m->inputs + first) * OUTPUTS;
  memcpy(to, w, (size_t)(count * OUTPUTS) * sizeof *w);
}

static void unpack_pairs(const Matrix* m, int64_t block, int64_t first, int64_t count, Tile to) {
  const int64_t pairs = (m->inputs + 1) / 2;
  const float* w = (const float*)m->weights + (block * pairs + first / 2) * OUTPUTS;
  for (int64_t pair = 0; pair < (count + 1) / 2; pair++, w += OUTPUTS)
    for (int v = 0; v < OUTPUTS; v += LANES) {
      const Ints both = load_ints(w + v);
      const int is_bf16 = m->kind != KIND_F16;
      store_floats(to[2 * pair] + v, is_bf16 ? low_bf16(both) : low_halves(both));
      store_floats(to[2 * pair + 1] + v, is_bf16 ? high_bf16(both) : high_halves(both));
    }
}

static void unpack_int8(const Matrix* m, int64_t block, int64_t first, int64_t count, Tile to) {
  const int8_t* w = (const int8_t*)m->weights + (block * stored_inputs(m) + first) * OUTPUTS;
  const float* scales = m->scales + block * OUTPUTS;
  for (int64_t k = 0; k < count; k++)
    for (int v = 0; v < OUTPUTS; v += LANES) {
      const Ints four = load_ints(w + (k / 4 * OUTPUTS + v) * 4);
      const Ints code = (Ints)((Words)four << (24 - 8 * (k % 4))) >> 24;
      store_floats(to[k] + v, to_floats(code) * load_floats(scales + v));
    }
}

static void unpack_group(const Matrix* m, int64_t block, int64_t first, int64_t count, Tile to) {
  const int kind = (int)m->kind;
  const int64_t place = block * (m->inputs / GROUP) + first / GROUP;
  const uint8_t* group = (const uint8_t*)m->weights + place * group_bytes(kind);
  const Ints zero = same_ints(zero_of(kind));
  for (int k = 0; k < count; k++)
    for (int v = 0; v < OUTPUTS; v += LANES) {
      const Words moved = (Words)group_word(kind, group, k / 4, v) << (24 - 8 * (k % 4));
      const Ints code = kind == KIND_IQ4 ? (Ints)moved >> 24 : (Ints)(moved >> 24) - zero;
      const Floats minimum = kind == KIND_Q4_MIN ? group_minima(group, v) : same_floats(0);
      store_floats(to[k] + v, multiply_add(to_floats(code), group_scales(kind, group, k / HALF, v), -minimum));
    }
}

// Write the values of `count` inputs from `first`, a multiple of GROUP, on.
static void unpack_tile(const Matrix* m, int64_t block, int64_t first, int64_t count, Tile to) {
  switch (m->kind) {
    case KIND_F32: unpack_f32(m, block, first, count, to); break;
    case KIND_BF16:
    case KIND_BF16_ROUNDED:
    case KIND_F16: unpack_pairs(m, block, first, count, to); break;
    case KIND_I8: unpack_int8(m, block, first, count, to); break;
    default: unpack_group(m, block, first, count, to);
  }
}

static int64_t tile_inputs(const Matrix* m, int64_t first) {
  return m->inputs - first < GROUP ? m->inputs - first : GROUP;
}

void unpack_block(const Matrix* m, int64_t block, int64_t outputs, float* out) {
  if (m->kind >= KIND_STORED) {
    for (int64_t output = 0; output < outputs; output++, out += m->inputs)
      for (int64_t k = 0; k < m->inputs;) k += widen_stored(m, block * OUTPUTS + output, k, out + k);
    return;
  }
  Tile tile;
  for (int64_t first = 0; first < m->inputs; first += GROUP) {
    const int64_t count = tile_inputs(m, first);
    unpack_tile(m, block, first, count, tile);
    for (int64_t output = 0; output < outputs; output++)
      for (int64_t k = 0; k < count; k++) out[output * m->inputs + first + k] = tile[k][output];
  }
}

// The bits of the nearest bf16, ties to even, in the upper half.
static Words bf16_bits(Floats value) {
  const Words bits = (Words)value;
  return (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000;
}

static void unpack_stored_bf16(const Matrix* m, int64_t block, uint32_t* out) {
  enum { AT_ONCE = 256 };
  const int64_t left = m->outputs - block * OUTPUTS;
  for (int64_t n = 0; n < OUTPUTS; n++)
    for (int64_t first = 0; first < m->inputs; first += AT_ONCE) {
      float values[AT_ONCE] = {0};
      uint32_t pairs[AT_ONCE];
      const int64_t count = m->inputs - first < AT_ONCE ? m->inputs - first : AT_ONCE;
      if (n < left) widen_stored(m, block * OUTPUTS + n, first, values);
      for (int64_t k = 0; k < count; k += LANES) {
        const Words rounded = bf16_bits(load_floats(values + k)) >> 16;
        memcpy(pairs + k, &rounded, sizeof rounded);
      }
      for (int64_t k = 0; k < count; k += 2) out[(first + k) / 2 * OUTPUTS + n] = pairs[k] | pairs[k + 1] << 16;
    }
}

void unpack_block_bf16(const Matrix* m, int64_t block, uint32_t* out) {
  Tile tile;
  if (m->kind >= KIND_STORED) {
    unpack_stored_bf16(m, block, out);
    return;
  }
  for (int64_t first = 0; first < m->inputs; first += GROUP) {
    const int64_t count = tile_inputs(m, first);
    unpack_tile(m, block, first, count, tile);
    if (count % 2) memset(tile[count], 0, sizeof tile[count]);
    for (int64_t k = 0; k < count; k += 2, out += OUTPUTS)
      for (int v = 0; v < OUTPUTS; v += LANES) {
        const Words low = bf16_bits(load_floats(tile[k] + v)), high = bf16_bits(load_floats(tile[k + 1] + v));
        const Words pair = low >> 16 | high;
        memcpy(out + v, &pair, sizeof pair);
      }
  }
}
