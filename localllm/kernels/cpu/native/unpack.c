// Values of packed weights.
#include "lanes.h"
#include "products.h"

static float half_value(uint16_t bits) { return low_halves(same_ints(bits))[0]; }

static float bf16_value(uint16_t bits) { return low_bf16(same_ints(bits))[0]; }

static float group_value(int64_t kind, const uint8_t* group, int output, int input) {
  const int is_q8 = kind == KIND_Q8, half = GROUP / 2, within = is_q8 ? input : input % half;
  const uint8_t byte = group[(within / 4 * OUTPUTS + output) * 4 + within % 4];
  const int code = is_q8 ? byte : input < half ? byte & 15 : byte >> 4;
  const uint16_t* scales = (const uint16_t*)(group + (is_q8 ? GROUP : half) * OUTPUTS);
  const float scale = half_value(scales[output]);
  if (kind == KIND_Q4_MIN) return (float)code * scale - half_value(scales[OUTPUTS + output]);
  return (float)(code - (is_q8 ? 128 : 8)) * scale;
}

static float value(const Matrix* m, int64_t block, int output, int64_t k) {
  const int64_t groups = m->inputs / GROUP, pairs = (m->inputs + 1) / 2;
  const int64_t group_bytes =
      m->kind == KIND_Q8 ? GROUP * OUTPUTS + OUTPUTS * 2 : GROUP / 2 * OUTPUTS + OUTPUTS * (m->kind == KIND_Q4 ? 2 : 4);
  switch (m->kind) {
    case KIND_F32: return ((const float*)m->weights)[(block * m->inputs + k) * OUTPUTS + output];
    case KIND_BF16:
      return bf16_value(((const uint16_t*)m->weights)[((block * pairs + k / 2) * OUTPUTS + output) * 2 + k % 2]);
    case KIND_F16:
      return half_value(((const uint16_t*)m->weights)[((block * pairs + k / 2) * OUTPUTS + output) * 2 + k % 2]);
    case KIND_I8:
      return (float)((const int8_t*)m->weights)[((block * (m->inputs / 4) + k / 4) * OUTPUTS + output) * 4 + k % 4] *
             m->scales[block * OUTPUTS + output];
    default:
      return group_value(m->kind, (const uint8_t*)m->weights + (block * groups + k / GROUP) * group_bytes, output,
                         (int)(k % GROUP));
  }
}

void unpack_block(const Matrix* m, int64_t block, float* out) {
  for (int output = 0; output < OUTPUTS; output++)
    for (int64_t k = 0; k < m->inputs; k++)
      out[output * m->inputs + (m->input_order ? m->input_order[k] : k)] = value(m, block, output, k);
}
